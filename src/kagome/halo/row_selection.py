"""Row selection: which rows of a site are sent in an epoch, and with how many bits each.

Where it sits: ``encoded_exchange`` asks a selection before it encodes. Both sides of a message compute the
same answer, from the seed or from the notes of the last message.

::

    SampledRows   a share of each peer's rows, redrawn each epoch and scaled up: sums are unbiased
    Skip          rows that have moved since they were last sent; announced one epoch ahead
    Fit           more bits for rows with a large error and many readers, fewer for others, same total bytes

Source: BNS-GCN's boundary sampling; SANCUS' skipped broadcasts, by rows; AdaQP's bits, without its solver.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import torch
from torch import Tensor

from kagome.comm.codec import BITS, Codec
from kagome.comm.exchange import ExchangeRequest, SiteExchange
from kagome.comm.transport.device import to_device
from kagome.config import CodecName
from kagome.errors import CommError
from kagome.halo.encoded_message import MessageLayout, Piece, plain
from kagome.halo.resumed_rows import State

FIT_EVERY: Final = 50
"""Number of epochs for which rows keep their bits."""
ANNOUNCED: Final = 2
"""The epoch of each such period in which bits are announced, one byte for each row."""
CHOICES: Final[tuple[CodecName, ...]] = ("onebit", "int2", "int4", "int8")


@dataclass(frozen=True)
class SelectionPlan:
    """The content of one exchange.

    Args:
        out: Layout of the messages to the peers.
        received: Layout of the messages from the peers.
        notes: Notes that follow each peer's message; empty if there are none.
        ground: Values of rows that are not received; zeros if None.
    """

    out: MessageLayout
    received: MessageLayout
    notes: Sequence[Tensor] = ()
    ground: Tensor | None = None


class Selection(Protocol):
    """The choice of rows of one site in one direction."""

    compares: bool
    """Whether a plan looks at the rows, which are then copied in the order of sending."""

    def plan(self, request: ExchangeRequest, rows: Tensor) -> SelectionPlan:
        """Return the content of this epoch's exchange; ``rows`` are in the order of sending if compared."""

    def arrived(self, rows: Tensor, notes: Sequence[Tensor], epoch: int) -> None:
        """Keep the rows of an exchange that has ended, and the notes of its messages."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that the next epoch depends on."""

    def load_state_dict(self, state: State) -> None:
        """Continue from the saved state of another selection."""


def _sides(request: ExchangeRequest) -> tuple[SiteExchange, Sequence[int], Sequence[int]]:
    """Return the site of an exchange, and the numbers of rows to and from each rank."""
    assert request.site is not None
    return request.site, request.send_counts, request.recv_counts


class SampledRows:
    """A random share of the rows that each pair of ranks exchanges.

    Args:
        share: The share of rows, in (0, 1).
        seed: Seed of the run.
        rank: This rank's number.
        codec: Codec of the rows.
    """

    compares = False

    def __init__(self, share: float, seed: int, rank: int, codec: Codec) -> None:
        self.share, self.seed, self.rank, self.codec = share, seed, rank, codec

    def plan(self, request: ExchangeRequest, rows: Tensor) -> SelectionPlan:
        """Select the same rows in both directions and at all sites of an epoch."""
        site, send_counts, recv_counts = _sides(request)
        # A synchronous epoch sends every row, unscaled.
        if site.whole:
            return SelectionPlan(plain(self.codec, send_counts), plain(self.codec, recv_counts))
        # Backward is the transpose of forward: a row that was not sent gets no gradient, and one that was
        # gets it with the same factor. So the draws depend on the epoch and the two ranks alone, not on the
        # direction.
        to_readers = site.direction < 2

        def layout(counts: Sequence[int], *, owned: bool) -> MessageLayout:
            # A row is sent by its owner, and its gradient back to the owner: the draws go by (owner, reader).
            pairs = [(self.rank, peer) if owned else (peer, self.rank) for peer in range(len(counts))]
            pieces = [[self._piece(site.epoch, pair, n)] for pair, n in zip(pairs, counts, strict=True)]
            return MessageLayout(pieces, counts, [0] * len(counts))

        return SelectionPlan(layout(send_counts, owned=to_readers), layout(recv_counts, owned=not to_readers))

    def arrived(self, rows: Tensor, notes: Sequence[Tensor], epoch: int) -> None:
        """Do nothing, since samples need no state."""

    def state_dict(self) -> dict[str, Any]:
        """Return no state: the draws follow from the epoch."""
        return {}

    def load_state_dict(self, state: State) -> None:
        """Do nothing, since samples need no state."""

    def _piece(self, epoch: int, pair: tuple[int, int], count: int) -> Piece:
        if count == 0:
            return Piece(self.codec)
        kept = max(int(self.share * count), 1)
        # Both ends draw by themselves, from a seed of several numbers, which torch's generator does not
        # accept.
        draws = np.random.default_rng([self.seed % 2**64, epoch, *pair])
        chosen = torch.from_numpy(np.sort(draws.permutation(count)[:kept]))
        # Each row is kept with probability kept / count, so the expected sum of the scaled rows is the whole
        # sum.
        return Piece(self.codec, chosen, count / kept)


# [Note: announcements] The rows of a message are announced in the message before it:
#
#     epoch       t                     t + 1                     t + 2
#     message     rows A, bits of B     rows B, bits of C         rows C, bits of D
#     reads                             A of t, others older      B of t + 1, others older
#
# The sender chooses B by its rows of epoch t, and sends their values of epoch t + 1. So the receiver knows
# the size of a message before it arrives, and posts its buffer without asking. The first message holds all
# rows, and so does one after a gap in the epochs: both ends see the gap and begin anew.
class Skip:
    """Rows that have moved by more than a share of their length, and rows that would become too old.

    Args:
        share: The share of a row's length.
        limit: Maximum age in epochs of a row when it is read.
        codec: Codec of the rows.
    """

    compares = True

    def __init__(self, share: float, limit: int, codec: Codec) -> None:
        self.share, self.limit, self.codec = share, limit, codec
        self.oldest = 0
        """Age of the oldest row that was read, in epochs."""
        self._sent: Tensor | None = None
        self._when = self._epochs = torch.empty(0, dtype=torch.long)
        self._send_next: Tensor | None = None
        self._table: Tensor | None = None
        self._recv_next: Tensor | None = None
        # Row counts of the peers, kept for ``arrived``, which gets no request.
        self._counts: tuple[int, ...] = ()
        self._last = 0

    def plan(self, request: ExchangeRequest, rows: Tensor) -> SelectionPlan:
        """Select the rows announced in the last epoch; all rows if none were announced."""
        site, send_counts, recv_counts = _sides(request)
        sent = self._sent
        if site.whole or sent is None or sent.shape != rows.shape or site.epoch != self._last + 1:
            sent, self._send_next, self._recv_next, self._table = rows.clone(), None, None, None
            self._when = torch.full((rows.size(0),), site.epoch)
        self._last, self._counts = site.epoch, tuple(recv_counts)
        send_now, recv_now = self._send_next, self._recv_next
        if send_now is not None:
            self._when[send_now] = site.epoch
            which = to_device(send_now.nonzero().view(-1), rows.device)
            sent.index_copy_(0, which, rows.index_select(0, which))
        self._sent = sent
        # Measured from the values that the peers hold, not from the last epoch: slow drift adds up until it
        # is sent.
        moved = (rows - sent).norm(dim=1) > self.share * rows.norm(dim=1)
        # A row that is not sent in the next epoch either is still read, one epoch late, in the one after.
        self._send_next = moved.cpu() | (site.epoch + 2 - self._when > self.limit)
        notes = [to_device(_packed(part), rows.device) for part in self._send_next.split(list(send_counts))]
        return SelectionPlan(
            self._layout(send_now, send_counts), self._layout(recv_now, recv_counts), notes, self._table
        )

    def arrived(self, rows: Tensor, notes: Sequence[Tensor], epoch: int) -> None:
        """Record which rows were received, and which will be received next.

        Raises:
            CommError: If a row would be read that exceeds the maximum age.
        """
        if self._recv_next is None:
            self._epochs = torch.full((rows.size(0),), epoch)
        else:
            self._epochs = torch.where(self._recv_next, epoch, self._epochs)
        if rows.size(0):
            # Rows are read one epoch after they are received: skipped rows need ``max_age``, which makes rows
            # late.
            age = epoch + 1 - int(self._epochs.min())
            self.oldest = max(self.oldest, age)
            if age > self.limit:
                raise CommError(
                    f"rows at most {self.limit} epochs old when they are read",
                    f"one {age} epochs old in epoch {epoch + 1}: it was not sent again in time",
                    hint="this is a fault in Kagome: please report it with the run's config.toml",
                )
        # On the host in one copy: it waits for the device.
        parts = torch.cat(list(notes)).cpu().split([note.numel() for note in notes])
        self._recv_next = torch.cat([_unpacked(*each) for each in zip(parts, self._counts, strict=True)])
        self._table = rows

    def state_dict(self) -> dict[str, Any]:
        """Return the rows sent and received, their epochs, and the rows announced for the next epoch."""
        state = {"sent": self._sent, "when": self._when, "epochs": self._epochs, "goes": self._send_next}
        state |= {"table": self._table, "comes": self._recv_next}
        return {**state, "counts": self._counts, "last": self._last, "oldest": self.oldest}

    def load_state_dict(self, state: State) -> None:
        """Continue from the saved state of another selection."""
        self._sent, self._when, self._epochs = state["sent"], state["when"], state["epochs"]
        self._send_next, self._table, self._recv_next = state["goes"], state["table"], state["comes"]
        self._counts, self._last, self.oldest = state["counts"], state["last"], state["oldest"]

    def _layout(self, chosen: Tensor | None, counts: Sequence[int]) -> MessageLayout:
        noted = [-(-count // 8) for count in counts]
        if chosen is None:
            return MessageLayout([[Piece(self.codec)] for _ in counts], counts, noted)
        parts = chosen.split(list(counts))
        return MessageLayout([[Piece(self.codec, part.nonzero().view(-1))] for part in parts], counts, noted)


class Fit:
    """A number of bits for each row by its importance, with the codec's bits on average.

    Args:
        codec: The codec whose bits are distributed.
        reads: Number of edges that read each row that is sent, as reported by the readers.
    """

    compares = True

    def __init__(self, codec: Codec, reads: Tensor) -> None:
        self.codec, self.reads = codec, reads.double()
        self._send_next: Tensor | None = None
        self._recv_next: Tensor | None = None

    def plan(self, request: ExchangeRequest, rows: Tensor) -> SelectionPlan:
        """Encode each row with its bits, and announce the bits of the coming epochs once in each period."""
        site, send_counts, recv_counts = _sides(request)
        announces = site.epoch % FIT_EVERY == ANNOUNCED
        out = self._layout(self._send_next, send_counts, announces=announces)
        received = self._layout(self._recv_next, recv_counts, announces=announces)
        if not announces:
            return SelectionPlan(out, received)
        # A code's step is span / (2^bits - 1), and each edge that reads the row adds its error to a sum.
        # ``worth`` is the weight of 1 / (2^bits - 1)^2 in the squared error.
        spans = rows.amax(1) - rows.amin(1) if rows.numel() else rows.new_zeros(rows.size(0))
        worth = (spans.double().cpu() * self.reads).square()
        assert self.codec.bits is not None
        self._send_next = torch.cat(
            [shared_out(part, self.codec.bits) for part in worth.split(list(send_counts))]
        )
        notes = [
            to_device(part.to(torch.uint8), rows.device) for part in self._send_next.split(list(send_counts))
        ]
        return SelectionPlan(out, received, notes)

    def arrived(self, rows: Tensor, notes: Sequence[Tensor], epoch: int) -> None:
        """Record the bits of the rows that will be received."""
        if epoch % FIT_EVERY == ANNOUNCED:
            self._recv_next = torch.cat(list(notes)).cpu().long()

    def state_dict(self) -> dict[str, Any]:
        """Return the bits of each row, sent and received."""
        return {"goes": self._send_next, "comes": self._recv_next}

    def load_state_dict(self, state: State) -> None:
        """Continue with the bits of another selection."""
        self._send_next, self._recv_next = state["goes"], state["comes"]

    def _layout(self, chosen: Tensor | None, counts: Sequence[int], *, announces: bool) -> MessageLayout:
        noted = list(counts) if announces else [0] * len(counts)
        if chosen is None:
            return MessageLayout([[Piece(self.codec)] for _ in counts], counts, noted)
        pieces = [
            [
                # One piece for each number of bits that occurs, so the pieces of a message have up to four
                # codecs.
                Piece(Codec(name), (part == place).nonzero().view(-1))
                for place, name in enumerate(CHOICES)
                if bool((part == place).any())
            ]
            for part in chosen.split(list(counts))
        ]
        return MessageLayout(pieces, counts, noted)


def shared_out(worth: Tensor, mean: int) -> Tensor:
    """Return each row's index in ``CHOICES``, so that ``sum of worth / (2^bits - 1)^2`` is minimal.

    Args:
        worth: Weight of each row's squared error.
        mean: Average number of bits for a row.

    Shapes:
        ``worth [R]`` -> ``[R]`` indices into ``CHOICES``.

    Cost:
        A sort of three numbers for each row. Each step gains less for a bit than the one before it, so taking
        the best steps first is optimal.
    """
    # Every row begins with 1 bit and may take three steps, each only after the one before it:
    #
    #     bits     1 ── +1 ──> 2 ── +2 ──> 4 ── +4 ──> 8
    #     error    1           1/9         1/225       1/65025     1 / (2^bits - 1)^2
    bits = torch.tensor([BITS[name] for name in CHOICES], dtype=torch.float64)
    error = 1 / (2**bits - 1).square()
    steps, costs = error[:-1] - error[1:], bits[1:] - bits[:-1]
    gains = worth.unsqueeze(1) * (steps / costs)
    # Gains fall from step to step of a row, so the best steps in order include a step's predecessors. A
    # stable sort keeps that for rows of worth 0, whose gains are equal.
    order = gains.flatten().argsort(descending=True, stable=True)
    spent = costs.repeat(worth.numel())[order].cumsum(0)
    budget = (mean - float(bits[0])) * worth.numel()
    taken = torch.zeros(gains.numel(), dtype=torch.long)
    taken[order[spent <= budget]] = 1
    # Steps count up to the first one that was not taken.
    return taken.view(gains.shape).cumprod(1).sum(1)


def _packed(flags: Tensor) -> Tensor:
    """Pack eight flags into each byte."""
    return torch.from_numpy(np.packbits(flags.numpy(), bitorder="little"))


def _unpacked(message: Tensor, count: int) -> Tensor:
    return torch.from_numpy(np.unpackbits(message.numpy(), count=count, bitorder="little")).bool()
