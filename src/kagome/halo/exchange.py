"""NeighborRows: the one differentiable function that turns a rank's own rows into all rows its edges read.

Where it sits: ``intercept.interceptor`` calls it at each site; it sends through ``comm``'s channel.

::

    own rows [n] ──send lists──> peers            backward: gradients of halo rows go back to their
    halo rows [H] <──────────── peers             owners, who add them by index (a row sent to two
    out = own ++ halo  [n + H]                    peers comes back twice)

[Note: token] Each forward starts a zero scalar that requires grad. It passes through every collective of
that forward and is added to the loss, so that backward visits all of them, on every rank, in exactly the
reverse order, also where a rank's loss does not depend on a site. Without it such a rank leaves its peers
waiting or, where sizes agree, mixes data silently.

[Note: again] A derivative that a model takes inside forward (``user_code.derivatives``) runs backward there,
and the loss is differentiated through it once more. So the backward of a collective is a collective with a
backward of its own, its transpose again, and the token of the turn goes along in it as well.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Final, Protocol
from weakref import ref

import torch
from torch import Tensor

from kagome.comm.channel import Kind, Op
from kagome.comm.exchange import Trip
from kagome.halo.forward_pass import ForwardPass, Site, inside

Way = Callable[[Tensor], Tensor]


class UnderWay(Protocol):
    """What this file needs of an exchange that was begun."""

    def wait(self) -> Tensor:
        """The rows, once they have come."""

    def lent(self) -> AbstractContextManager[Tensor]:
        """The same for a block that neither keeps nor changes them."""


class Carrier(Protocol):
    """What this file needs of a channel: see :class:`kagome.comm.channel.Channel`."""

    @property
    def rank(self) -> int:
        """The number of this rank in the group."""

    @property
    def size(self) -> int:
        """Ranks in the group."""

    def exchange(
        self,
        rows: Tensor,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
        *,
        action: str,
        kind: Kind = "halo",
        header: tuple[int, ...] | None = None,
    ) -> Tensor:
        """All-to-all of rows, a count for each peer."""

    def start_exchange(
        self,
        rows: Tensor,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
        *,
        action: str,
        kind: Kind = "halo",
        header: tuple[int, ...] | None = None,
        pick: Tensor | None = None,
        trip: Trip | None = None,
    ) -> UnderWay:
        """The same, of those rows that ``pick`` names; begun, its wait gives what comes.

        ``trip`` says what it is, to carriers that code rows or bring them late.
        """

    def all_reduce(
        self,
        tensor: Tensor,
        op: Op = "sum",
        *,
        action: str,
        kind: Kind = "statistics",
        key: Hashable = None,
    ) -> Tensor:
        """The sum, maximum or minimum over all ranks; ``key`` names it the same way in every epoch."""


@dataclass(frozen=True)
class HaloExchange:
    """Who supplies the neighbours' rows: the static lists of one part, and the way across.

    Args:
        own: Number of own rows n.
        halo: Number of rows H read from others.
        send: Own rows that peers read, by peer.
        send_counts: How many of them go to each peer.
        recv_counts: How many halo rows come from each peer.
        channel: The way to the peers.
        ids: Original ids of own and halo rows: what codecs draw by.
        reads: Edges that read each halo row.

    Shapes:
        ``send [sum(send_counts)]``, ``ids [n + H]``; rows ``[n, W]`` to ``[n + H, W]`` and back.

    Cost:
        ``sum(send_counts) * W`` values out forward, ``H * W`` out backward; ``(n + H) * W`` values kept.
    """

    own: int
    halo: int
    send: Tensor
    send_counts: tuple[int, ...]
    recv_counts: tuple[int, ...]
    channel: Carrier
    ids: Tensor | None = None
    reads: Tensor | None = None

    @cached_property
    def stamps(self) -> tuple[Tensor, Tensor]:
        """The ids of rows that are sent, and of halo rows."""
        ids = torch.arange(self.own + self.halo, device=self.send.device) if self.ids is None else self.ids
        return ids[self.send], ids[self.own :]

    @property
    def closed(self) -> bool:
        """Whether no edge reads a row from elsewhere."""
        return self.channel.size == 1 or bool(getattr(self.channel, "closed", False))

    def extend(self, rows: Tensor, turn: ForwardPass, name: str) -> Tensor:
        """Own rows ``[n, W]`` -> own and halo rows ``[n + H, W]``, with gradient."""
        if self.closed:
            return rows
        return self.extended(rows, turn, turn.begin(name, grad=rows.requires_grad))

    def give_back(self, rows: Tensor, turn: ForwardPass, name: str) -> Tensor:
        """Sums on own and halo rows ``[n + H, W]`` -> on own rows ``[n, W]``: the transpose of extend."""
        if self.closed:
            return rows
        site = turn.begin(name, grad=rows.requires_grad)
        return through(rows, turn, lambda r: self.back(r, site, 0), lambda g: self.forth(g, site, 1))

    def extended(self, rows: Tensor, turn: ForwardPass, site: Site) -> Tensor:
        """The same for a site that is known; in backward too: see [Note: again]."""
        return through(rows, turn, lambda r: self.forth(r, site, 0), lambda g: self.back(g, site, 1))

    def given_back(self, rows: Tensor, turn: ForwardPass, site: Site) -> Tensor:
        """The same."""
        return through(rows, turn, lambda r: self.back(r, site, 1), lambda g: self.forth(g, site, 0))

    def road(self, rows: Tensor, turn: ForwardPass, name: str) -> HaloWork:
        """The same as :meth:`extend` for a caller that reduces own and halo rows apart."""
        return HaloWork(self, turn.begin(name, grad=rows.requires_grad))

    def forth(self, rows: Tensor, site: Site, direction: int) -> Tensor:
        """Fetch the halo rows; no gradient."""
        words = "halo forward" if direction == 0 else "halo backward"
        with self.fetch(rows, site, words, direction).lent() as halo:
            return torch.cat([rows, halo])

    def back(self, rows: Tensor, site: Site, direction: int) -> Tensor:
        """Send what lies on halo rows to their owners, who add it; no gradient."""
        words = "halo sums forward" if direction == 0 else "halo backward"
        with self.give(rows[self.own :].contiguous(), site, words, direction + 2).lent() as come:
            return self.add(come, rows[: self.own].clone())

    def fetch(self, rows: Tensor, site: Site, words: str, direction: int) -> UnderWay:
        """Begin to fetch the halo rows ``[H, W]`` of own rows ``[n, W]``."""
        return self.channel.start_exchange(
            rows,
            self.send_counts,
            self.recv_counts,
            action=site.action(words),
            header=site.header(direction, self.agreed(rows.size(1))),
            pick=self.send,
            trip=site.trip(direction, self.stamps[0], self.reads),
        )

    def give(self, away: Tensor, site: Site, words: str, direction: int) -> UnderWay:
        """Begin to send what lies on halo rows ``[H, W]`` to their owners; what comes is for :meth:`add`."""
        return self.channel.start_exchange(
            away,
            self.recv_counts,
            self.send_counts,
            action=site.action(words),
            header=site.header(direction, self.agreed(away.size(1))),
            trip=site.trip(direction, self.stamps[1]),
        )

    def agreed(self, width: int) -> int:
        """What of a width all ranks of the channel agree on."""
        return width

    def add(self, come: Tensor, own: Tensor) -> Tensor:
        """Add in place what came for own rows."""
        return own.index_add_(0, self.send, come)


@dataclass(frozen=True, slots=True)
class HaloWork:
    """One exchange and the one back, each begun and ended apart: what lies between them hides them.

    A node of autograd keeps one until its turn's graph is gone. So it knows nothing of the turn: that has the
    token, the token has the node, and such a circle is never freed.

    Args:
        plan: The lists.
        site: What it is for.
    """

    plan: HaloExchange
    site: Site

    def fetch(self, rows: Tensor) -> UnderWay:
        """Begin to fetch the halo rows of own rows ``[n, ...]``: ``[H, W]``."""
        flat = rows.detach().reshape(rows.size(0), _columns(rows))
        return self.plan.fetch(flat, self.site, "halo forward", 0)

    def give(self, away: Tensor) -> UnderWay:
        """Begin to send gradients on halo rows ``[H, ...]`` to their owners, and to get one's own back."""
        flat = away.reshape(away.size(0), _columns(away)).contiguous()
        return self.plan.give(flat, self.site, "halo backward", 3)

    def add(self, come: Tensor, own: Tensor) -> Tensor:
        """Add in place what came to the own rows that were sent."""
        self.plan.add(come, own.view(own.size(0), come.size(1)))
        return own


def _columns(rows: Tensor) -> int:
    width = 1
    for size in rows.shape[1:]:
        width *= size
    return width


class _Collective(torch.autograd.Function):
    """A collective with its transpose as backward; the token goes along: see [Note: token]."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, token: Tensor, turn: ForwardPass, there: Way, back: Way
    ) -> tuple[Tensor, Tensor]:
        ctx.turn, ctx.ways = ref(turn), (there, back)  # the turn has the token, and that has this node
        return there(rows), torch.zeros_like(token)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, token = grads[0].contiguous(), torch.zeros_like(grads[1])
        (there, back), turn = ctx.ways, inside(ctx.turn)
        found = back(rows) if turn is None else through(rows, turn, back, there)
        return found, token, None, None, None


def through(rows: Tensor, turn: ForwardPass, there: Way, back: Way) -> Tensor:
    """A collective, and its transpose in backward where that follows: see [Note: token]."""
    if not (rows.requires_grad and turn.follows()):
        return there(rows)
    out: Tensor
    out, turn.token = _Collective.apply(rows, turn.token, turn, there, back)  # type: ignore[no-untyped-call]
    return out


def total(part: Tensor, turn: ForwardPass, channel: Carrier, name: str, what: str = "total") -> Tensor:
    """The sum of a small tensor over all ranks, with gradient (its transpose is the same sum).

    Args:
        part: This rank's.
        turn: The running turn.
        channel: The way to the peers.
        name: Of the site.
        what: :data:`NAMED` where one rank has what is wanted and the others have zeros.

    Cost:
        An all-reduce of ``part`` forward and one backward.
    """
    if turn.backward is not None:
        return turn.backward.summed(part)
    if channel.size == 1:
        return part
    site = turn.begin(name, grad=part.requires_grad)
    agree(channel, site, part)

    def summed(words: str) -> Way:
        return lambda t: site.sum(channel, t, words)

    return through(part, turn, summed(f"{what} forward"), summed(f"{what} backward"))


NAMED: Final = "rows of named vertices"


def is_named(key: Hashable) -> bool:
    """Whether a sum brings rows of vertices that forward names, which some rank must have."""
    return isinstance(key, tuple) and key[-1] == f"{NAMED} forward"


Sum = Callable[[Tensor], Tensor]


def summing(
    there: Callable[..., tuple[Tensor, tuple[Tensor, ...]]],
    back: Callable[..., tuple[Tensor | None, ...]],
    inputs: tuple[Tensor | None, ...],
    turn: ForwardPass,
    channel: Carrier,
    name: str,
) -> Tensor:
    """A function that sums over all ranks inside, forward and backward: a norm with everybody's statistics.

    Args:
        there: ``(sum, *inputs) -> (result, kept)``.
        back: ``(sum, gradient, *kept) -> gradients of the inputs``.
        inputs: The first one's gradient decides whether backward comes back.
        turn: The running turn.
        channel: The way to the peers.
        name: Of the site.

    Cost:
        Its sums; ``kept`` for backward.
    """
    first = inputs[0]
    assert first is not None
    site = turn.begin(name, grad=first.requires_grad)
    agree(channel, site, first[:0])

    def sum_of(words: str) -> Sum:
        return lambda t: site.sum(channel, t, words)

    if not turn.follows():
        return there(sum_of("statistics forward"), *inputs)[0]
    ways = there, back, sum_of("statistics forward"), sum_of("statistics backward")
    out, token = _Summing.apply(turn.token, turn, ways, *inputs)  # type: ignore[no-untyped-call]
    if first.requires_grad:
        turn.token = token
    return out  # type: ignore[no-any-return]


class _Summing(torch.autograd.Function):
    """See :func:`summing`; the token goes along."""

    @staticmethod
    def forward(
        ctx: Any, token: Tensor, turn: ForwardPass, ways: Any, *inputs: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        there, _, forth, _ = ctx.ways = ways
        ctx.turn, ctx.count = ref(turn), len(inputs)
        out, kept = there(forth, *inputs)
        ctx.save_for_backward(*inputs, *kept)
        return out, torch.zeros_like(token)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        there, back, forth, sum_back = ctx.ways
        turn, saved = inside(ctx.turn), ctx.saved_tensors
        if turn is not None and torch.is_grad_enabled():
            both = partial(through, turn=turn, there=forth, back=sum_back)
            wanted = ctx.needs_input_grad[3:]
            found = differentiated(partial(there, both), saved[: ctx.count], wanted, grads[0])
        else:
            found = back(sum_back, grads[0].contiguous(), *saved[ctx.count :])
        return (torch.zeros_like(grads[1]), None, None, *found)


def differentiated(
    function: Callable[..., tuple[Tensor, Any]],
    inputs: Sequence[Tensor | None],
    wanted: Sequence[bool],
    gradient: Tensor,
) -> tuple[Tensor | None, ...]:
    """The gradients of a function that runs once more, with gradients of their own: see [Note: again].

    Args:
        function: Of these inputs; its first result counts.
        inputs: Those.
        wanted: Which of their gradients.
        gradient: The result's.
    """
    # As views: of a tensor that is given twice each place has its own gradient.
    views = [None if each is None else each.view_as(each) for each in inputs]
    places = [place for place, asked in enumerate(wanted) if asked]
    out = function(*views)[0]
    by = [view for place in places if (view := views[place]) is not None]
    found = torch.autograd.grad(out, by, gradient, create_graph=True, allow_unused=True)
    by_place = dict(zip(places, found, strict=True))
    return tuple(by_place.get(place) for place in range(len(inputs)))


def agree(channel: Carrier, site: Site, part: Tensor) -> None:
    """In a checked forward: all ranks are at the same reduction, of the same size."""
    header = site.header(4, part.numel())
    if header is not None:
        none = [0] * channel.size
        channel.exchange(
            part.new_empty(0, 1), none, none, action=site.action("agree"), kind="other", header=header
        )


def all_rows(ids: Tensor, channel: Carrier) -> HaloExchange:
    """The lists, on rows' device, by which every rank reads every other's (attention over all vertices).

    Args:
        ids: Original ids of own rows.
        channel: The way to the peers.

    Cost:
        8 bytes a row to every other rank.
    """
    own, ones = ids.numel(), [1] * channel.size
    mine = torch.full((channel.size, 1), own)
    counts = channel.exchange(mine, ones, ones, action="counts", kind="other").squeeze(1).tolist()
    recv = [0 if peer == channel.rank else int(count) for peer, count in enumerate(counts)]
    send = [0 if peer == channel.rank else own for peer in range(channel.size)]
    places = torch.arange(own, device=ids.device).repeat(channel.size - 1)
    sent = ids[places].unsqueeze(1)
    theirs = channel.exchange(sent, send, recv, action="ids of rows", kind="other").squeeze(1)
    known, reads = torch.cat([ids, theirs]), torch.ones_like(theirs)
    return HaloExchange(own, sum(recv), places, tuple(send), tuple(recv), channel, known, reads)
