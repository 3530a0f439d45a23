"""Selection: which rows of a site cross in an epoch, and with how many bits each - not always all alike.

Where it sits: ``compressed_exchange`` asks one before it codes; both ends of a message come to the same
answer, from the seed or from what the last message announced.

::

    Sample   a share of each peer's rows, other ones each epoch, made larger: sums are right on the mean
    Skip     rows that have moved since they were last sent; who goes next is said one epoch ahead
    Fit      many bits for rows that lose much and are read often, few for the others, the same bytes

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
from kagome.comm.exchange import Trip
from kagome.config import CodecName
from kagome.errors import CommError
from kagome.halo.encoded_message import Letters, Piece, plain
from kagome.halo.resumed_rows import State

FIT_EVERY: Final = 50
"""Epochs for which bits stay with their rows."""
ANNOUNCED: Final = 2
"""The epoch among those in which bits are announced, a byte a row."""
CHOICES: Final[tuple[CodecName, ...]] = ("onebit", "int2", "int4", "int8")


@dataclass(frozen=True)
class SelectionPlan:
    """What one exchange carries.

    Args:
        out: Letters to the peers.
        come: Letters from them.
        notes: What is noted behind each peer's; nothing if empty.
        ground: What lies where no row comes; zeros if None.
    """

    out: Letters
    come: Letters
    notes: Sequence[Tensor] = ()
    ground: Tensor | None = None


class Selection(Protocol):
    """One site's, in one direction."""

    def plan(
        self, trip: Trip, rows: Tensor, sends: Sequence[int], comes: Sequence[int], *, whole: bool
    ) -> SelectionPlan:
        """What this epoch's exchange carries, of rows in the order in which they go; ``whole``: all."""

    def arrived(self, rows: Tensor, notes: Sequence[Tensor], epoch: int) -> None:
        """What there is now, and the notes that came with it."""

    def state_dict(self) -> dict[str, Any]:
        """What the next epoch goes by."""

    def load_state_dict(self, state: State) -> None:
        """Go on as another one would have."""


class SampledRows:
    """A share of the rows that each pair of ranks shares.

    Args:
        share: Of them, in (0, 1).
        seed: Of the run.
        rank: This rank.
        codec: Of the rows.
    """

    def __init__(self, share: float, seed: int, rank: int, codec: Codec) -> None:
        self.share, self.seed, self.rank, self.codec = share, seed, rank, codec

    def plan(
        self, trip: Trip, rows: Tensor, sends: Sequence[int], comes: Sequence[int], *, whole: bool
    ) -> SelectionPlan:
        """The same rows both ways and at all sites of an epoch."""
        if whole:
            return SelectionPlan(plain(self.codec, sends), plain(self.codec, comes))
        to_readers = trip.direction < 2

        def letters(counts: Sequence[int], *, owned: bool) -> Letters:
            # Who owns a row sends it forth; its gradient comes back to the owner.
            pairs = [(self.rank, peer) if owned else (peer, self.rank) for peer in range(len(counts))]
            pieces = [[self._piece(trip.epoch, pair, n)] for pair, n in zip(pairs, counts, strict=True)]
            return Letters(pieces, counts, [0] * len(counts))

        return SelectionPlan(letters(sends, owned=to_readers), letters(comes, owned=not to_readers))

    def arrived(self, rows: Tensor, notes: Sequence[Tensor], epoch: int) -> None:
        """Nothing is kept."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing: draws follow from the epoch."""
        return {}

    def load_state_dict(self, state: State) -> None:
        """Nothing is kept."""

    def _piece(self, epoch: int, pair: tuple[int, int], count: int) -> Piece:
        if count == 0:
            return Piece(self.codec)
        kept = max(int(self.share * count), 1)
        draws = np.random.default_rng([self.seed % 2**64, epoch, *pair])
        chosen = torch.from_numpy(np.sort(draws.permutation(count)[:kept]))
        return Piece(self.codec, chosen, count / kept)


class Skip:
    """Rows that have moved by more than a share of their length, and those that would grow too old.

    Args:
        share: Of a row's length.
        limit: Epochs that a row may be old when it is read.
        codec: Of the rows.
    """

    def __init__(self, share: float, limit: int, codec: Codec) -> None:
        self.share, self.limit, self.codec = share, limit, codec
        self.oldest = 0
        """Age of the oldest row that was read, in epochs."""
        self._sent: Tensor | None = None
        self._when = self._epochs = torch.empty(0, dtype=torch.long)
        self._goes: Tensor | None = None
        self._table: Tensor | None = None
        self._comes: Tensor | None = None
        self._counts: tuple[int, ...] = ()
        self._last = 0

    def plan(
        self, trip: Trip, rows: Tensor, sends: Sequence[int], comes: Sequence[int], *, whole: bool
    ) -> SelectionPlan:
        """Those announced in the last epoch; all where there was none."""
        sent = self._sent
        if whole or sent is None or sent.shape != rows.shape or trip.epoch != self._last + 1:
            sent, self._goes, self._comes, self._table = rows.clone(), None, None, None
            self._when = torch.full((rows.size(0),), trip.epoch)
        self._last, self._counts = trip.epoch, tuple(comes)
        goes, coming = self._goes, self._comes
        if goes is not None:
            self._when[goes] = trip.epoch
            sent[goes.to(rows.device)] = rows[goes.to(rows.device)]
        self._sent = sent
        moved = (rows - sent).norm(dim=1) > self.share * rows.norm(dim=1)
        # What does not go in the next epoch either is read, one epoch late, in the one after it.
        self._goes = moved.cpu() | (trip.epoch + 2 - self._when > self.limit)
        notes = [_packed(part).to(rows.device) for part in self._goes.split(list(sends))]
        return SelectionPlan(self._letters(goes, sends), self._letters(coming, comes), notes, self._table)

    def arrived(self, rows: Tensor, notes: Sequence[Tensor], epoch: int) -> None:
        """Which rows came, and which will.

        Raises:
            CommError: If a row would be read that is older than it may be.
        """
        if self._comes is None:
            self._epochs = torch.full((rows.size(0),), epoch)
        else:
            self._epochs = torch.where(self._comes, epoch, self._epochs)
        if rows.size(0):
            age = epoch + 1 - int(self._epochs.min())
            self.oldest = max(self.oldest, age)
            if age > self.limit:
                raise CommError(
                    f"rows are at most {self.limit} epochs old when they are read",
                    f"one is {age} epochs old in epoch {epoch + 1}: it was not sent again in time",
                    hint="this is a fault in Kagome: please report it with the run's config.toml",
                )
        counts = self._counts
        self._comes = torch.cat([_unpacked(note, count) for note, count in zip(notes, counts, strict=True)])
        self._table = rows

    def state_dict(self) -> dict[str, Any]:
        """What was sent and what came, when, and what will."""
        state = {"sent": self._sent, "when": self._when, "epochs": self._epochs, "goes": self._goes}
        state |= {"table": self._table, "comes": self._comes}
        return {**state, "counts": self._counts, "last": self._last, "oldest": self.oldest}

    def load_state_dict(self, state: State) -> None:
        """Go on as another one would have."""
        self._sent, self._when, self._epochs = state["sent"], state["when"], state["epochs"]
        self._goes, self._table, self._comes = state["goes"], state["table"], state["comes"]
        self._counts, self._last, self.oldest = state["counts"], state["last"], state["oldest"]

    def _letters(self, chosen: Tensor | None, counts: Sequence[int]) -> Letters:
        noted = [-(-count // 8) for count in counts]
        if chosen is None:
            return Letters([[Piece(self.codec)] for _ in counts], counts, noted)
        parts = chosen.split(list(counts))
        return Letters([[Piece(self.codec, part.nonzero().view(-1))] for part in parts], counts, noted)


class Fit:
    """As many bits for each row as it is worth, of the codec's bits on the mean.

    Args:
        codec: Whose bits are shared out.
        reads: Edges that read each row that is sent, as the readers say.
    """

    def __init__(self, codec: Codec, reads: Tensor) -> None:
        self.codec, self.reads = codec, reads.double()
        self._goes: Tensor | None = None
        self._comes: Tensor | None = None

    def plan(
        self, trip: Trip, rows: Tensor, sends: Sequence[int], comes: Sequence[int], *, whole: bool
    ) -> SelectionPlan:
        """Each row with its bits; now and then the bits of the epochs to come are announced."""
        announces = trip.epoch % FIT_EVERY == ANNOUNCED
        out = self._letters(self._goes, sends, announces=announces)
        come = self._letters(self._comes, comes, announces=announces)
        if not announces:
            return SelectionPlan(out, come)
        spans = rows.amax(1) - rows.amin(1) if rows.numel() else rows.new_zeros(rows.size(0))
        worth = (spans.double().cpu() * self.reads).square()
        assert self.codec.bits is not None
        self._goes = torch.cat([shared_out(part, self.codec.bits) for part in worth.split(list(sends))])
        notes = [part.to(torch.uint8).to(rows.device) for part in self._goes.split(list(sends))]
        return SelectionPlan(out, come, notes)

    def arrived(self, rows: Tensor, notes: Sequence[Tensor], epoch: int) -> None:
        """Which bits will come."""
        if epoch % FIT_EVERY == ANNOUNCED:
            self._comes = torch.cat([note.cpu().long() for note in notes])

    def state_dict(self) -> dict[str, Any]:
        """The bits of each row."""
        return {"goes": self._goes, "comes": self._comes}

    def load_state_dict(self, state: State) -> None:
        """Go on with the bits of another one."""
        self._goes, self._comes = state["goes"], state["comes"]

    def _letters(self, chosen: Tensor | None, counts: Sequence[int], *, announces: bool) -> Letters:
        noted = list(counts) if announces else [0] * len(counts)
        if chosen is None:
            return Letters([[Piece(self.codec)] for _ in counts], counts, noted)
        pieces = [
            [
                Piece(Codec(name), (part == place).nonzero().view(-1))
                for place, name in enumerate(CHOICES)
                if bool((part == place).any())
            ]
            for part in chosen.split(list(counts))
        ]
        return Letters(pieces, counts, noted)


def shared_out(worth: Tensor, mean: int) -> Tensor:
    """Which of ``CHOICES`` each row gets, so that ``sum of worth / (2^bits - 1)^2`` is least.

    Args:
        worth: What a row's error counts.
        mean: Bits a row on the mean.

    Shapes:
        ``worth [R]`` -> ``[R]`` places in ``CHOICES``.

    Cost:
        A sort of three numbers a row. Steps are worth less and less a bit, so the best ones come first.
    """
    bits = torch.tensor([BITS[name] for name in CHOICES], dtype=torch.float64)
    error = 1 / (2**bits - 1).square()
    steps, costs = error[:-1] - error[1:], bits[1:] - bits[:-1]
    gains = worth.unsqueeze(1) * (steps / costs)
    order = gains.flatten().argsort(descending=True, stable=True)
    spent = costs.repeat(worth.numel())[order].cumsum(0)
    budget = (mean - float(bits[0])) * worth.numel()
    taken = torch.zeros(gains.numel(), dtype=torch.long)
    taken[order[spent <= budget]] = 1
    return taken.view(gains.shape).cumprod(1).sum(1)


def _packed(flags: Tensor) -> Tensor:
    """Eight flags a byte."""
    return torch.from_numpy(np.packbits(flags.numpy(), bitorder="little"))


def _unpacked(message: Tensor, count: int) -> Tensor:
    return torch.from_numpy(np.unpackbits(message.cpu().numpy(), count=count, bitorder="little")).bool()
