"""Halo exchange: the differentiable function from a rank's own rows to all rows that its edges read.

Where it sits: ``intercept.interceptor`` calls it at each site; it sends through ``comm``'s channel.

::

    own rows [n] ──send lists──> peers            backward: gradients of halo rows go back to their
    halo rows [H] <──────────── peers             owners, who add them by index (a row sent to two
    out = own ++ halo  [n + H]                    peers comes back twice)

[Note: token] Each forward pass starts with a zero scalar that requires grad. It goes through every collective
of that pass and is added to the loss. Backward therefore visits all collectives, on every rank, in exactly
the reverse order, even where a rank's loss does not depend on a site. Without the token such a rank would
leave its peers waiting or, where sizes agree, mix up data silently.

[Note: again] A derivative that a model takes inside forward (``user_code.derivatives``) runs backward there,
and the loss is differentiated through it once more. So the backward of a collective is itself a collective
with a backward: its transpose. The token of the forward pass goes through it as well.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Final
from weakref import ref

import torch
from torch import Tensor

from kagome.comm.exchange import Exchange, ExchangeRequest, Work, swap_counts
from kagome.halo.forward_pass import ForwardPass, Site, inside
from kagome.kernels import ops
from kagome.kernels.base.csr import Structure
from kagome.kernels.base.ordered_sums import add_from_peers

Way = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class HaloExchange:
    """The static send and receive lists of one part, and the channel to the peers.

    Args:
        own: Number n of own rows.
        halo: Number H of rows read from other ranks.
        send: Indices of own rows that peers read, by peer.
        send_counts: Number of rows sent to each peer.
        recv_counts: Number of halo rows received from each peer.
        channel: The channel to the peers.
        ids: Original ids of own and halo rows, which seed the codecs' draws.
        reads: Number of edges that read each halo row.

    Shapes:
        ``send [sum(send_counts)]``, ``ids [n + H]``; rows ``[n, W]`` to ``[n + H, W]`` and back.

    Cost:
        ``sum(send_counts) * W`` values sent forward, ``H * W`` sent backward; ``(n + H) * W`` values kept.
    """

    own: int
    halo: int
    send: Tensor
    send_counts: tuple[int, ...]
    recv_counts: tuple[int, ...]
    channel: Exchange
    ids: Tensor | None = None
    reads: Tensor | None = None

    @cached_property
    def row_ids(self) -> tuple[Tensor, Tensor]:
        """The ids of the rows that are sent, and of the halo rows."""
        ids = torch.arange(self.own + self.halo, device=self.send.device) if self.ids is None else self.ids
        return ids[self.send], ids[self.own :]

    @property
    def closed(self) -> bool:
        """Whether no edge reads a row of another rank."""
        return self.channel.size == 1 or bool(getattr(self.channel, "closed", False))

    def gather(self, rows: Tensor, forward_pass: ForwardPass, name: str) -> Tensor:
        """Return own and halo rows ``[n + H, W]`` for own rows ``[n, W]``, with gradient."""
        if self.closed:
            return rows
        return self.gathered(rows, forward_pass, forward_pass.begin(name, grad=rows.requires_grad))

    def reduce(self, rows: Tensor, forward_pass: ForwardPass, name: str) -> Tensor:
        """Return the sums on own rows ``[n, W]`` of values at own and halo rows ``[n + H, W]``.

        This is the transpose of :meth:`gather`.
        """
        if self.closed:
            return rows
        site = forward_pass.begin(name, grad=rows.requires_grad)
        return through(
            rows,
            forward_pass,
            lambda r: self.reduce_no_grad(r, site, 0),
            lambda g: self.gather_no_grad(g, site, 1),
        )

    def gathered(self, rows: Tensor, forward_pass: ForwardPass, site: Site) -> Tensor:
        """Do what :meth:`gather` does for a given site, also in backward: see [Note: again]."""
        return through(
            rows,
            forward_pass,
            lambda r: self.gather_no_grad(r, site, 0),
            lambda g: self.reduce_no_grad(g, site, 1),
        )

    def reduced(self, rows: Tensor, forward_pass: ForwardPass, site: Site) -> Tensor:
        """Do what :meth:`reduce` does for a given site, also in backward."""
        return through(
            rows,
            forward_pass,
            lambda r: self.reduce_no_grad(r, site, 1),
            lambda g: self.gather_no_grad(g, site, 0),
        )

    def halo_work(self, rows: Tensor, forward_pass: ForwardPass, name: str) -> HaloWork:
        """Return the exchange as two steps, for a caller that reduces own and halo rows separately."""
        return HaloWork(self, forward_pass.begin(name, grad=rows.requires_grad))

    def gather_no_grad(self, rows: Tensor, site: Site, direction: int) -> Tensor:
        """Fetch the halo rows, without gradient."""
        label = "halo forward" if direction == 0 else "halo backward"
        with self.start_gather(rows, site, label, direction).borrow() as halo:
            return torch.cat([rows, halo])

    def reduce_no_grad(self, rows: Tensor, site: Site, direction: int) -> Tensor:
        """Send the values at halo rows to their owners, who add them; without gradient."""
        label = "halo sums forward" if direction == 0 else "halo backward"
        with self.start_reduce(
            rows[self.own :].contiguous(), site, label, direction + 2
        ).borrow() as received:
            return self.add(received, rows[: self.own].clone())

    def start_gather(self, rows: Tensor, site: Site, label: str, direction: int) -> Work:
        """Begin to fetch the halo rows ``[H, W]`` of own rows ``[n, W]``."""
        request = site.request(
            label,
            direction,
            self.send_counts,
            self.recv_counts,
            width=self.agreed(rows.size(1)),
            row_ids=self.row_ids[0],
            index=self.send,
            reads=self.reads,
        )
        return self.channel.start(rows, request)

    def start_reduce(self, away: Tensor | HaloSums, site: Site, label: str, direction: int) -> Work:
        """Begin to send values at halo rows ``[H, W]``, or sums that are still to be taken, to their owners.

        :meth:`add` adds the received values to own rows.
        """
        away = away if isinstance(away, Tensor) else away.rows()
        request = site.request(
            label,
            direction,
            self.recv_counts,
            self.send_counts,
            width=self.agreed(away.size(1)),
            row_ids=self.row_ids[1],
        )
        return self.channel.start(away, request)

    def agreed(self, width: int) -> int:
        """Return the part of a width that all ranks of the channel agree on."""
        return width

    def add(self, received: Tensor, own: Tensor) -> Tensor:
        """Add received values to own rows, in place."""
        return add_from_peers(own, self.send, self.send_counts, received)


# [Note: transpose pair] Let P be the 0-1 matrix that copies own rows of all ranks into the places of own and
# halo rows. A read of neighbours multiplies by P. Sums that are returned to their owners are a product with
# its transpose:
#
#     P      [ 1 . . ]  own 0            P^T    [ 1 . . | 1 ]   own 0 gets its own value, and
#            [ . 1 . ]  own 1                   [ . 1 . | . ]   that of every halo copy of it
#            [ . . 1 ]  own 2                   [ . . 1 | . ]
#            [ 1 . . ]  halo copy of row 0
#
# Backward of a product with P is a product with P^T, and backward of that is P again. So two functions are
# enough for forward, backward and the backward of backward. ``direction`` keeps their messages apart: 0 and 1
# are P in forward and in backward, 2 and 3 are P^T.


@dataclass(frozen=True, slots=True)
class HaloSums:
    """The gradients at halo rows: sums over the edges that read them, of which none is taken yet.

    Args:
        edges: The edges.
        grad: The gradient of each own row.
        weight: One number per edge, or one per edge and head.
        scale: A factor for each halo row.

    Shapes:
        grad ``[own, F]`` or ``[own, H, C]``; the sums ``[H, W]`` with all columns joined.
    """

    edges: Structure
    grad: Tensor
    weight: Tensor | None
    scale: Tensor | None

    def rows(self, which: Tensor | None = None) -> Tensor:
        """Take all sums, or on a CPU some of them."""
        first, scale = self.edges.first_halo, self.scale
        rows: slice | Tensor = slice(first, self.edges.num_sources)
        if which is not None:
            rows, scale = which + first, None if scale is None else scale.index_select(0, which)
        away = ops.sum_rows(self.edges.by_source, self.grad, self.weight, scale, rows=rows)
        return away.reshape(away.size(0), _columns(away)).contiguous()

    def add_to(self, table: Tensor, place: Tensor, which: Tensor, times: Tensor) -> None:
        """Add the sums that ``which`` names, ascending, each times a factor, to their places in a table."""
        if table.is_cuda:  # its kernels sum ranges of rows
            ops.add_rows(table, place, self.rows(), which, times)
        else:
            number = torch.arange(which.numel())
            ops.add_rows(table, place, self.rows(which), number, times)


@dataclass(frozen=True, slots=True)
class HaloWork:
    """The exchange of one site and its transpose, each with separate start and end to overlap computation.

    A node of autograd keeps one until the graph of its forward pass is freed. It must not refer to the
    forward pass: that holds the token, the token holds the node, and such a reference cycle would never be
    freed.

    Args:
        exchange: The send and receive lists.
        site: The site of the exchange.
    """

    exchange: HaloExchange
    site: Site

    def start_gather(self, rows: Tensor) -> Work:
        """Begin to fetch the halo rows of own rows ``[n, ...]``: ``[H, W]``."""
        flat = rows.detach().reshape(rows.size(0), _columns(rows))
        return self.exchange.start_gather(flat, self.site, "halo forward", 0)

    def start_reduce(self, away: HaloSums) -> Work:
        """Begin to send gradients at halo rows to their owners and receive those of own rows."""
        return self.exchange.start_reduce(away, self.site, "halo backward", 3)

    def add(self, received: Tensor, own: Tensor) -> Tensor:
        """Add received values to the own rows that were sent, in place."""
        self.exchange.add(received, own.view(own.size(0), received.size(1)))
        return own


def _columns(rows: Tensor) -> int:
    width = 1
    for size in rows.shape[1:]:
        width *= size
    return width


class _Collective(torch.autograd.Function):
    """A collective whose backward is its transpose; the token goes through it: see [Note: token]."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, token: Tensor, forward_pass: ForwardPass, there: Way, back: Way
    ) -> tuple[Tensor, Tensor]:
        # A weak reference, because the forward pass holds this node.
        ctx.forward_pass, ctx.ways = ref(forward_pass), (there, back)
        return there(rows), torch.zeros_like(token)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # The token has no value to pass on: its gradient only makes autograd visit this node.
        rows, token = grads[0].contiguous(), torch.zeros_like(grads[1])
        (there, back), forward_pass = ctx.ways, inside(ctx.forward_pass)
        found = back(rows) if forward_pass is None else through(rows, forward_pass, back, there)
        return found, token, None, None, None


def through(rows: Tensor, forward_pass: ForwardPass, there: Way, back: Way) -> Tensor:
    """Run a collective, and its transpose in backward if one follows: see [Note: token]."""
    # Rows without a gradient, such as features: no rank's backward reaches this site, so the token stays out.
    if not (rows.requires_grad and forward_pass.follows()):
        return there(rows)
    out: Tensor
    out, forward_pass.token = _Collective.apply(rows, forward_pass.token, forward_pass, there, back)  # type: ignore[no-untyped-call]
    return out


def total(
    part: Tensor, forward_pass: ForwardPass, channel: Exchange, name: str, what: str = "total"
) -> Tensor:
    """Return the sum of a small tensor over all ranks, with gradient. The transpose is the same sum.

    Args:
        part: This rank's summand.
        forward_pass: The running forward pass.
        channel: The channel to the peers.
        name: Name of the site.
        what: :data:`NAMED` if one rank has the wanted rows and the others have zeros.

    Cost:
        An all-reduce of ``part`` forward and one backward.
    """
    # A user's code that runs in backward cannot wait for other ranks: the sum stays this rank's share, and
    # what is linear in it is summed with the weights' gradients.
    if forward_pass.backward is not None:
        return forward_pass.backward.summed(part)
    if channel.size == 1:
        return part
    site = forward_pass.begin(name, grad=part.requires_grad)
    agree(channel, site, part)

    def summed(label: str) -> Way:
        return lambda t: site.sum(channel, t, label)

    return through(part, forward_pass, summed(f"{what} forward"), summed(f"{what} backward"))


NAMED: Final = "rows of named vertices"


def is_named(key: Hashable) -> bool:
    """Return whether a sum collects rows of vertices that forward names: each is an own row of one rank."""
    return isinstance(key, tuple) and key[-1] == f"{NAMED} forward"


Sum = Callable[[Tensor], Tensor]


def summing(
    there: Callable[..., tuple[Tensor, tuple[Tensor, ...]]],
    back: Callable[..., tuple[Tensor | None, ...]],
    inputs: tuple[Tensor | None, ...],
    forward_pass: ForwardPass,
    channel: Exchange,
    name: str,
) -> Tensor:
    """Run a function that sums over all ranks inside, forward and backward, as a norm with global statistics.

    Args:
        there: ``(sum, *inputs) -> (result, kept)``.
        back: ``(sum, gradient, *kept) -> gradients of the inputs``. Only the first one's may need the sum.
        inputs: The inputs. Backward sums over the ranks if the first one requires a gradient.
        forward_pass: The running forward pass.
        channel: The channel to the peers.
        name: Name of the site.

    Cost:
        The sums; the tensors ``kept`` for backward.
    """
    first = inputs[0]
    assert first is not None
    site = forward_pass.begin(name, grad=first.requires_grad)
    # An empty header message: the size of the statistics is known only inside ``there``.
    agree(channel, site, first[:0])

    def sum_of(label: str) -> Sum:
        return lambda t: site.sum(channel, t, label)

    if not forward_pass.follows():
        return there(sum_of("statistics forward"), *inputs)[0]
    ways = there, back, sum_of("statistics forward"), sum_of("statistics backward")
    out, token = _Summing.apply(forward_pass.token, forward_pass, ways, *inputs)  # type: ignore[no-untyped-call]
    if first.requires_grad:
        forward_pass.token = token
    return out  # type: ignore[no-any-return]


class _Summing(torch.autograd.Function):
    """The autograd function of :func:`summing`; the token goes through it."""

    @staticmethod
    def forward(
        ctx: Any, token: Tensor, forward_pass: ForwardPass, ways: Any, *inputs: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        there, _, sum_there, _ = ctx.ways = ways
        ctx.forward_pass, ctx.count = ref(forward_pass), len(inputs)
        out, kept = there(sum_there, *inputs)
        ctx.save_for_backward(*inputs, *kept)
        return out, torch.zeros_like(token)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        there, back, sum_there, sum_back = ctx.ways
        forward_pass, saved = inside(ctx.forward_pass), ctx.saved_tensors
        # A derivative inside forward with ``create_graph=True``: the gradient must itself have a graph, so
        # the function runs again with the sums as differentiable collectives.
        if forward_pass is not None and torch.is_grad_enabled():
            both = partial(through, forward_pass=forward_pass, there=sum_there, back=sum_back)
            wanted = ctx.needs_input_grad[3:]
            found = differentiated(partial(there, both), saved[: ctx.count], wanted, grads[0])
        else:
            # The sum is for the gradient of the first input alone. Where none is wanted, the token does not
            # come by, so a rank whose loss does not depend on this site would not take part in it.
            own = sum_back if ctx.needs_input_grad[3] else _own
            found = back(own, grads[0].contiguous(), *saved[ctx.count :])
        return (torch.zeros_like(grads[1]), None, None, *found)


def _own(part: Tensor) -> Tensor:
    """Return this rank's summand in place of the sum."""
    return part


def differentiated(
    function: Callable[..., tuple[Tensor, Any]],
    inputs: Sequence[Tensor | None],
    wanted: Sequence[bool],
    gradient: Tensor,
) -> tuple[Tensor | None, ...]:
    """Return a function's gradients, with gradients of their own, by running it once more: see [Note: again].

    Args:
        function: Function of the inputs; its first result is differentiated.
        inputs: The inputs of the function.
        wanted: For each input, whether its gradient is wanted.
        gradient: Gradient of the result.
    """
    # Views, so that a tensor that is passed twice gets a separate gradient for each place.
    views = [None if each is None else each.view_as(each) for each in inputs]
    places = [place for place, asked in enumerate(wanted) if asked]
    out = function(*views)[0]
    by = [view for place in places if (view := views[place]) is not None]
    found = torch.autograd.grad(out, by, gradient, create_graph=True, allow_unused=True)
    by_place = dict(zip(places, found, strict=True))
    return tuple(by_place.get(place) for place in range(len(inputs)))


def agree(channel: Exchange, site: Site, part: Tensor) -> None:
    """In a checked forward pass, verify that all ranks are at the same reduction, of the same size."""
    header = site.header(4, part.numel())
    if header is not None:
        # A reduction has no message that carries a header, so an exchange without rows takes its place.
        none = [0] * channel.size
        request = ExchangeRequest(none, none, site.action("agree"), "other", header)
        channel.start(part.new_empty(0, 1), request).wait()


def all_rows(ids: Tensor, channel: Exchange) -> HaloExchange:
    """Return the lists by which every rank reads all rows of every other, for attention over all vertices.

    Args:
        ids: Original ids of own rows.
        channel: The channel to the peers.

    Cost:
        8 bytes for each row to every other rank.
    """
    own = ids.numel()
    counts = swap_counts(channel, [own] * channel.size, "counts")
    recv = [0 if peer == channel.rank else count for peer, count in enumerate(counts)]
    send = [0 if peer == channel.rank else own for peer in range(channel.size)]
    # All own rows for each peer in turn; none for this rank itself, whose count is 0.
    places = torch.arange(own, device=ids.device).repeat(channel.size - 1)
    sent = ids[places].unsqueeze(1)
    naming = ExchangeRequest(send, recv, "ids of rows", "other")
    theirs = channel.start(sent, naming).wait().squeeze(1)
    known, reads = torch.cat([ids, theirs]), torch.ones_like(theirs)
    return HaloExchange(own, sum(recv), places, tuple(send), tuple(recv), channel, known, reads)
