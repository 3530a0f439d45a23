"""Sliced attention: a softmax of one number at each end, for some heads over the edges of all ranks.

Where it sits: ``reduce`` defers such a softmax where messages are summed in feature slices. ``sliced_reduce``
asks for the heads of its columns. Ranks exchange two numbers per vertex and head, not one per edge and head.

::

    a_i, b_j of own rows [n, H] ──split──> of all rows, some heads ──softmax over in-edges──> [E, h]

Softmax and dropout work head by head, so the weights equal those of the whole graph. Any other operation on
them makes them numbers for this rank's edges, through a halo exchange.

Without slices a sum computes weights that only it reads row by row, and again in backward, where it has all
rows that edges read. Else they are kept in the order in which the sum reads them: see
``kernels.base.csr.Structure.walked``. Parts differ in that order, so rows are exchanged when the softmax is
called, on all parts alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from kagome.deferred.lazy_tensor import LazyTensor
from kagome.deferred.message import Message, flat
from kagome.feature_parallel.all_to_all import SliceCut
from kagome.feature_parallel.edge_layout import EdgeLayout
from kagome.kernels import ops
from kagome.sparse_ops import edge_softmax

Draw = Callable[[Tensor, Tensor, int], Tensor]
"""``(weights, a random word per edge, first head) -> weights`` with some of them dropped."""


@dataclass(frozen=True, eq=False)
class Drop:
    """Dropout of attention weights that are not computed yet.

    Args:
        draw: The function that drops weights.
        own: One random word for each of this rank's edges.
        all: One random word for each edge of all ranks. Without slices, for own edges in the order of
            ``walked``.
    """

    draw: Draw
    own: Tensor
    all: Tensor


@dataclass(frozen=True, eq=False)
class JointShare:
    """Softmax over each row's in-edges of ``leaky_relu(a_i + b_j)``, each head by itself.

    Args:
        logits: The message with a and b.
        slope: The negative slope of the leaky relu; 1 for none.
        edge_layout: The edges of all ranks; None where each rank keeps its own, in the order of ``walked``.
        ends: Without slices, the numbers of the rows that edges write and of those that they read.
        drop: The dropout applied to the result.
        deep: How many axes of size 1 follow the heads.
        known: The weights computed so far, by slice cut.
    """

    logits: Message
    slope: float
    edge_layout: EdgeLayout | None
    ends: tuple[Tensor, Tensor] | None = None
    drop: Drop | None = None
    deep: int = 0
    known: dict[SliceCut | None, Tensor] = field(default_factory=dict)

    @property
    def shape(self) -> Sequence[int]:
        """The shape of the attention weights: edges, heads, and axes of size 1."""
        return (*self.logits.shape, *[1] * self.deep)

    @property
    def parts(self) -> Sequence[Tensor]:
        """The tensors it is made from."""
        return self.logits.parts

    def compute(self) -> Tensor:
        """Compute the attention weights of this rank's edges."""
        edges = self.logits.edges
        out = edge_softmax.joint_softmax(*self._ends(), self.slope, edges.structure)
        if self.drop is not None:
            out = self.drop.draw(out, self.drop.own, 0)
        return edges.pairs(out.view(*self.shape))

    def heads(self, cut: SliceCut) -> Tensor:
        """Return the attention weights of all ranks' edges, for this rank's heads.

        Shapes:
            ``[E, h]``.
        """
        # Each hop of a propagation asks again for the same heads.
        if cut not in self.known:
            assert self.edge_layout is not None
            self.logits.check()
            source, target, deferral = self.logits.source, self.logits.target, self.logits.edges.deferral
            assert source is not None
            assert target is not None
            # [V, h] of all rows of the tensor group, then [num_sources, h] with rows of other parts.
            a = deferral.sliced.split(target, cut, self.edge_layout.written, source.site)
            b = deferral.sliced.split(source.rows, cut, self.edge_layout.rows, source.site)
            b = deferral.sliced.beyond(b, self.edge_layout, source.site)
            out = edge_softmax.joint_softmax(a, b, self.slope, self.edge_layout.structure)
            if self.drop is not None:
                # A draw depends on the number of the head among all heads.
                first = cut.begins[self.edge_layout.rows.channel.rank]
                out = self.drop.draw(out, self.drop.all, first)
            self.known[cut] = out
        return self.known[cut]

    def walked(self) -> Tensor:
        """Return the attention weights of this rank's edges, in the order in which kernels read them."""
        if None not in self.known:
            out = edge_softmax.joint_softmax(*self._ends(), self.slope, self.logits.edges.structure.walked)
            self.known[None] = out if self.drop is None else self.drop.draw(out, self.drop.all, 0)
        return self.known[None]

    def summed(self, rows: Tensor) -> Tensor | None:
        """Return the sum of neighbours' rows that these weights weigh, without storing them.

        None where they are stored anyway: where another sum has asked for them, or dropout drops some.

        Args:
            rows: All rows that edges read.

        Shapes:
            ``[num_sources, H, C]``, or ``[num_sources, F]`` for one head -> with a row for each own row.
        """
        a, b = self._ends()
        headed = rows.view(rows.size(0), 1, rows.size(1)) if rows.dim() == 2 else rows
        fits = headed.dim() == 3 and headed.shape[:2] == b.shape and rows.dtype == a.dtype == b.dtype
        if self.drop is not None or self.known or not fits:
            return None
        edges = self.logits.edges.structure
        # Kernels that store weights read them in the order in which they walk.
        edges = edges if ops.fuses_attention(headed) else edges.walked.with_edges()
        out = edge_softmax.attention_sum(a, b, headed, self.slope, edges)
        return out.view(edges.own, *rows.shape[1:])

    def _ends(self) -> tuple[Tensor, Tensor]:
        if self.ends is None:
            return ends(self.logits)
        self.logits.check()
        return self.ends


def share_of(value: Any) -> JointShare | None:
    """Return the deferred attention that a tensor stands for; None for any other tensor."""
    found = isinstance(value, LazyTensor) and value.value is None and isinstance(value.expr, JointShare)
    return value.expr if found else None


def defer(
    logits: Message, slope: float, edge_layout: EdgeLayout | None, read: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """Defer the softmax of ``leaky_relu(a_i + b_j)``, computed later by head or in ``walked`` order."""
    return logits.edges.pairs(LazyTensor(JointShare(logits, slope, edge_layout, read)))


def ends(logits: Message) -> tuple[Tensor, Tensor]:
    """Return the numbers of the rows that edges write, and of those that they read.

    Shapes:
        ``[own, H]``, ``[num_sources, H]``.

    Cost:
        On several parts, an exchange of ``H`` numbers per halo row.
    """
    assert logits.target is not None
    return flat(logits.target), flat(logits.with_halo())


def answer(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Answer views that add axes of size 1 to attention, and products with messages; else NotImplemented."""
    share = share_of(args[0]) if args else None
    if share is not None and name in ("unsqueeze", "view", "reshape"):
        return _deeper(share, name, args, kwargs)
    if name not in ("mul", "__rmul__") or len(args) != 2 or kwargs:
        return NotImplemented
    share, other = (share, args[1]) if share is not None else (share_of(args[1]), args[0])
    message = other.expr if isinstance(other, LazyTensor) and isinstance(other.expr, Message) else None
    if share is None or message is None or message.edges is not share.logits.edges:
        return NotImplemented
    heads = tuple(share.logits.shape[1:])
    # alpha [E, H, 1] times messages [E, H, C], or alpha [E, 1] times messages [E, F]. The attention becomes
    # the message's weight and is not computed.
    fits = message.one_ended and message.source is not None and len(message.shape) == len(share.shape)
    headed = len(message.shape) == 3 and len(heads) == 1 and message.trailing[:1] == heads
    single = len(message.shape) == 2 and heads == (1,) and share.deep == 0
    if not fits or not (headed or single):
        return NotImplemented
    # ``replace`` passes the same dict ``known`` on, so that all forms of one attention share its weights.
    weight = share.logits.edges.pairs(LazyTensor(replace(share, deep=0)))
    return message.edges.pairs(LazyTensor(replace(message, weight=weight)))


def _deeper(share: JointShare, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    shape = tuple(share.shape)
    if kwargs:
        return NotImplemented
    if name == "unsqueeze":
        more = 1 if len(args) == 2 and args[1] in (-1, len(shape)) else 0
    else:
        asked = tuple(args[1]) if isinstance(args[1], (tuple, list)) else tuple(args[1:])
        more = len(asked) - len(shape)
        # Only axes of size 1 behind the heads are kept as a form. Any other shape needs the numbers.
        same = asked[:1] in ((-1,), shape[:1]) and asked[1:] == (*shape[1:], *[1] * max(more, 0))
        if more < 0 or not same:
            return NotImplemented
        return share.logits.edges.pairs(LazyTensor(replace(share, deep=share.deep + more)))
    if not more:
        return NotImplemented
    return share.logits.edges.pairs(LazyTensor(replace(share, deep=share.deep + more)))


def dropped(share: JointShare, draw: Draw, own: Tensor, every: Tensor) -> Tensor:
    """Return the attention with dropout applied.

    Args:
        share: The deferred attention.
        draw: The function that drops weights.
        own: One random word for each of this rank's edges.
        every: One random word per edge for slices or ``walked``; see :class:`Drop`.
    """
    # Weights computed before have nothing dropped.
    late = replace(share, drop=Drop(draw, own, every), known={})
    return share.logits.edges.pairs(LazyTensor(late))


def computed(weight: Tensor, rows: Tensor) -> Tensor:
    """Return a weight per edge, or per edge and head, as computed numbers for this rank's edges."""
    return flattened(weight.now(), rows) if isinstance(weight, LazyTensor) else weight


def flattened(weight: Tensor, rows: Tensor) -> Tensor:
    """Return a weight of one head without its head axis, if rows have none."""
    return weight.view(-1) if rows.dim() == 2 and weight.dim() == 2 and weight.size(1) == 1 else weight
