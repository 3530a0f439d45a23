"""Shares: attention that is a softmax of a number at each end, for some heads over the edges of all ranks.

Where it sits: ``reduce`` puts such a softmax off where messages are summed in feature slices;
``sliced_reduce`` asks for the heads of its columns. What crosses are the two numbers a vertex and head, not
one an edge and head.

::

    a_i, b_j of own rows [n, H] ──apart──> of all rows, some heads ──softmax over in-edges──> [E, h]

Softmax and dropout go head by head, so the shares are those of the whole. What else is done with them makes
them numbers an edge of this rank's, by a halo.

Where edges lie in an order of the user's that is not that of the kernels, shares that only a sum reads are
kept in the order in which it reads them: see ``kernels.structure.Structure.walked``. Parts differ in that, so
rows cross when the softmax is asked for, on all of them alike.
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
from kagome.sparse_ops import edge_softmax

Draw = Callable[[Tensor, Tensor, int], Tensor]
"""``(shares, a word an edge, first head) -> shares`` of which some are dropped."""


@dataclass(frozen=True, eq=False)
class Drop:
    """Dropout of attention weights that are not computed yet.

    Args:
        draw: What drops.
        own: A word for each of this rank's edges.
        all: A word for each edge of all ranks; without slices, of own ones in the order of ``walked``.
    """

    draw: Draw
    own: Tensor
    all: Tensor


@dataclass(frozen=True, eq=False)
class JointShare:
    """Softmax over each row's in-edges of ``leaky_relu(a_i + b_j)``, each head by itself.

    Args:
        logits: a and b.
        slope: Of the leaky relu; 1 for none.
        slicing: The edges of all ranks; None where each rank keeps its own, in the order of ``walked``.
        ends: Without slices, the numbers of the rows that edges write and of those that they read.
        drop: Dropout after it.
        deep: Axes of one entry behind the heads.
        known: By cut: what was computed of some heads.
    """

    logits: Message
    slope: float
    slicing: EdgeLayout | None
    ends: tuple[Tensor, Tensor] | None = None
    drop: Drop | None = None
    deep: int = 0
    known: dict[SliceCut | None, Tensor] = field(default_factory=dict)

    @property
    def shape(self) -> Sequence[int]:
        """The shape of the attention weights: edges, heads, and axes of one entry."""
        return (*self.logits.shape, *[1] * self.deep)

    @property
    def parts(self) -> Sequence[Tensor]:
        """What it is made from."""
        return self.logits.parts

    def compute(self) -> Tensor:
        """The shares of this rank's edges."""
        edges = self.logits.edges
        out = edge_softmax.joint_softmax(*self._ends(), self.slope, edges.structure)
        if self.drop is not None:
            out = self.drop.draw(out, self.drop.own, 0)
        return edges.pairs(out.view(*self.shape))

    def heads(self, cut: SliceCut) -> Tensor:
        """The shares of all ranks' edges, of this rank's heads.

        Shapes:
            ``[E, h]``.
        """
        if cut not in self.known:
            assert self.slicing is not None
            self.logits.check()
            source, target, scope = self.logits.source, self.logits.target, self.logits.edges.scope
            assert source is not None
            assert target is not None
            a = scope.apart(target, cut, self.slicing, source.site)
            b = scope.apart(source.rows, cut, self.slicing, source.site)
            b = scope.beyond(b, self.slicing, source.site)
            out = edge_softmax.joint_softmax(a, b, self.slope, self.slicing.structure)
            if self.drop is not None:
                first = cut.begins[self.slicing.rows.channel.rank]
                out = self.drop.draw(out, self.drop.all, first)
            self.known[cut] = out
        return self.known[cut]

    def walked(self) -> Tensor:
        """The shares of this rank's edges, in the order in which kernels walk them."""
        if None not in self.known:
            out = edge_softmax.joint_softmax(*self._ends(), self.slope, self.logits.edges.structure.walked)
            self.known[None] = out if self.drop is None else self.drop.draw(out, self.drop.all, 0)
        return self.known[None]

    def _ends(self) -> tuple[Tensor, Tensor]:
        if self.ends is None:
            return ends(self.logits)
        self.logits.check()
        return self.ends


def share_of(value: Any) -> JointShare | None:
    """What a tensor stands for, if it is attention that was put off."""
    found = isinstance(value, LazyTensor) and value.value is None and isinstance(value.expr, JointShare)
    return value.expr if found else None


def put_off(
    logits: Message, slope: float, slicing: EdgeLayout | None, read: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """The softmax of ``leaky_relu(a_i + b_j)``, to be computed by head, or in the order of ``walked``."""
    return logits.edges.pairs(LazyTensor(JointShare(logits, slope, slicing, read)))


def ends(logits: Message) -> tuple[Tensor, Tensor]:
    """The numbers of the rows that edges write, and of those that they read.

    Shapes:
        ``[own, H]``, ``[whole, H]``.

    Cost:
        An exchange of ``H`` numbers a halo row, on several parts.
    """
    assert logits.target is not None
    return flat(logits.target), flat(logits.whole())


def answer(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Attention with axes of one entry behind its heads, and messages times it; else NotImplemented."""
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
    fits = message.one_ended and message.source is not None and len(message.shape) == len(share.shape)
    headed = len(message.shape) == 3 and len(heads) == 1 and message.trailing[:1] == heads
    single = len(message.shape) == 2 and heads == (1,) and share.deep == 0
    if not fits or not (headed or single):
        return NotImplemented
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
        same = asked[:1] in ((-1,), shape[:1]) and asked[1:] == (*shape[1:], *[1] * max(more, 0))
        if more < 0 or not same:
            return NotImplemented
        return share.logits.edges.pairs(LazyTensor(replace(share, deep=share.deep + more)))
    if not more:
        return NotImplemented
    return share.logits.edges.pairs(LazyTensor(replace(share, deep=share.deep + more)))


def dropped(share: JointShare, draw: Draw, own: Tensor, every: Tensor) -> Tensor:
    """The shares, some of them dropped.

    Args:
        share: The shares.
        draw: What drops.
        own: A word for each of this rank's edges.
        every: See :class:`Drop`.
    """
    # What was computed of them had nothing dropped.
    late = replace(share, drop=Drop(draw, own, every), known={})
    return share.logits.edges.pairs(LazyTensor(late))


def computed(weight: Tensor, rows: Tensor) -> Tensor:
    """A weight an edge, or an edge and head, as numbers of this rank's edges."""
    return flattened(weight.now(), rows) if isinstance(weight, LazyTensor) else weight


def flattened(weight: Tensor, rows: Tensor) -> Tensor:
    """A weight of one head without its axis, where rows have none."""
    return weight.view(-1) if rows.dim() == 2 and weight.dim() == 2 and weight.size(1) == 1 else weight
