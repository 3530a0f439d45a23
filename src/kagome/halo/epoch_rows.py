"""Compression state: a rank's mode of exchange, its rows of earlier epochs and its counts.

Where it sits: ``compressed_exchange`` has one, which its wrappers for staleness, encoding and blocks share. A
checkpoint saves the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final

from torch import Tensor

from kagome.comm.codec import Codec, UnreadRefusals
from kagome.comm.exchange import SiteExchange
from kagome.config import ExchangeSettings
from kagome.errors import CheckpointError
from kagome.halo.resumed_rows import NOTHING, Entry, ResumedRows, State
from kagome.halo.row_selection import Selection, Skip
from kagome.halo.staleness import StaleRows

Key = tuple[Hashable, int]
"""A site and a direction."""
DRIFTED: Final = 0.5
"""With ``sync_every="auto"`` an epoch waits for its rows before the drift accumulated over late epochs
exceeds this."""


class EpochRows:
    """One rank's rows of earlier epochs.

    Attributes:
        synchronous: Whether this epoch waits for rows that might be late.
        drifted: How far rows have moved since an epoch last waited for them.
    """

    def __init__(self) -> None:
        self.all_stale_rows: dict[Key, StaleRows] = {}
        self.selections: dict[Key, Selection] = {}
        self.residuals: dict[Key, tuple[Tensor, int]] = {}
        """For each site, the codec's error on its rows, and the epoch of that error."""
        self.resumed_rows: ResumedRows = NOTHING
        self.synchronous, self.drifted = False, 0.0
        self._told = 0

    @property
    def oldest(self) -> int:
        """Age of the oldest row that was read, in epochs."""
        skipped = [each.oldest for each in self.selections.values() if isinstance(each, Skip)]
        return max((*skipped, *(stale_rows.oldest for stale_rows in self.all_stale_rows.values())), default=0)

    @property
    def drifts(self) -> tuple[float, float]:
        """How far the rows received last moved within an epoch, the maximum over sites, and 1.

        Both are 0 if no rows moved: a part without neighbours must not make other ranks' rows look still.
        Gradients are not included: in a healthy run they move by about their own length in every epoch.
        """
        forth = [
            stale_rows.drift
            for (_, direction), stale_rows in self.all_stale_rows.items()
            if direction % 2 == 0
        ]
        found = [drift for drift in forth if drift is not None]
        return (max(found), 1.0) if found else (0.0, 0.0)

    def moved(self, drift: float, epoch: int) -> None:
        """Add the drift of an epoch and decide whether the next one waits.

        An epoch is counted once, however often this is called for it.

        The error of late rows adds up over epochs. With little drift many epochs may be late; with much drift
        only every second one, or none.
        """
        if epoch == self._told:
            return
        # With ``auto`` and a drift of 0.2 an epoch, and DRIFTED at 0.5:
        #
        #     epoch            1      2      3      4 waits    5
        #     drifted after    0.2    0.4    0.6    0.2        0.4
        self._told = epoch
        self.drifted = drift + (0.0 if self.synchronous else self.drifted)
        self.synchronous = self.drifted > DRIFTED

    def stale_rows(self, key: Key, epoch: int, make: Callable[[], StaleRows]) -> StaleRows:
        """Return a site's stale rows. The first call creates them and restores rows from a checkpoint."""
        found = self.all_stale_rows.get(key)
        if found is None:
            found = self.all_stale_rows[key] = make()
            # "line", "selection", "residual" and "crossing" are names in the files of checkpoints: they do
            # not change.
            state = self.resumed_rows.take("line", key, epoch)
            if state is not None:
                found.load_state_dict(state)
        return found

    def selection(
        self, key: Key, epoch: int, make: Callable[[], Selection | None], rows: tuple[int, int]
    ) -> Selection | None:
        """Return a site's selection, if it has one.

        The first call creates it and restores its state from a checkpoint.

        Args:
            key: The site and direction.
            epoch: The current epoch.
            make: Creates a new selection, or returns None.
            rows: Number of rows sent and number of rows received.

        Raises:
            CheckpointError: If the restored state belongs to other rows.
        """
        found = self.selections.get(key)
        if found is None:
            found = make()
            if found is None:
                return None
            self.selections[key] = found
            state = self.resumed_rows.take("selection", key, epoch)
            if state is not None:
                _refuse_others(state, rows, str(key))
                found.load_state_dict(state)
        return found

    def residual(self, key: Key, epoch: int) -> Tensor | None:
        """Return the codec's error on a site's rows in the last epoch; None if it encoded none then."""
        if key not in self.residuals:
            state = self.resumed_rows.take("residual", key, epoch)
            return None if state is None else state["rows"]
        rows, when = self.residuals[key]
        # An older residual belongs to rows that have moved on; epochs without a codec may lie between.
        return rows if epoch - when <= 1 else None

    def settle(self) -> None:
        """Receive what is still in transit. The rows that are read do not change."""
        for stale_rows in self.all_stale_rows.values():
            stale_rows.arrive()

    def keep(self) -> None:
        """Receive what is still in transit, and borrow no memory of other ranks any more."""
        for stale_rows in self.all_stale_rows.values():
            stale_rows.keep()

    def forget(self, resumed_rows: ResumedRows) -> None:
        """Drop all rows of earlier epochs except those restored from a checkpoint. All ranks call it."""
        self.settle()  # a message that is not received would block later ones
        self.all_stale_rows, self.selections, self.residuals = {}, {}, {}
        state = resumed_rows.take("crossing", "", resumed_rows.epoch)
        self.resumed_rows, self._told = resumed_rows, 0
        self.synchronous = state is not None and bool(state["synchronous"])
        # Checkpoints of earlier versions lack this value.
        self.drifted = 0.0 if state is None else float(state.get("drifted", 0.0))

    def state_entries(self, epoch: int) -> Iterator[Entry]:
        """Yield the state that the epoch after this one may read."""
        yield "crossing", "", {"synchronous": self.synchronous, "drifted": self.drifted}
        for key, stale_rows in self.all_stale_rows.items():
            yield "line", key, stale_rows.state_dict()
        for key, selection in self.selections.items():
            yield "selection", key, selection.state_dict()
        for key, (rows, when) in self.residuals.items():
            if when == epoch:
                yield "residual", key, {"rows": rows}


@dataclass(frozen=True)
class ExchangeMode:
    """How rows are exchanged at present.

    Args:
        codec: Codec of rows in the forward pass.
        codec_backward: Codec of gradients.
        waits: Whether no row is late; such an epoch does not use the stale rows at all.
        chooses: Whether only some rows are sent, or rows get different numbers of bits.
        probes: Whether a probe measures the effect of late rows. Rows are then late even in an epoch that
            would wait for them.
    """

    codec: Codec
    codec_backward: Codec
    waits: bool
    chooses: bool
    probes: bool = False

    @classmethod
    def of(cls, settings: ExchangeSettings) -> ExchangeMode:
        """Return the mode that settings ask for."""
        return cls(
            Codec(settings.codec),
            Codec(settings.codec_backward or settings.codec),
            settings.max_age == 0,
            settings.halo_sample < 1 or settings.skip_drift > 0 or settings.adaptive_bits,
        )

    @property
    def exact(self) -> bool:
        """Whether all rows are sent unchanged and none is late."""
        return self.codec.exact and self.codec_backward.exact and self.waits and not self.chooses

    def codec_for(self, site: SiteExchange) -> Codec:
        """Return the codec of an exchange's direction."""
        return self.codec_backward if site.backward else self.codec


@dataclass
class CompressionCounts:
    """Counts of what was exchanged since they were last taken.

    Args:
        plain: Bytes that the rows would have had without encoding.
        sliced: The same count for feature slices.
        errors: For each site and pass, the norm of the codec's error over the norm of the rows, on a sample.
    """

    plain: int = 0
    sliced: int = 0
    errors: dict[str, float] = field(default_factory=dict)


@dataclass
class CompressionState:
    """The state that the wrappers of one rank's exchange share.

    Args:
        settings: Settings of codecs, selections, maximum age and smoothing.
        seed: Seed of the codecs' random draws.
        mode: How rows are exchanged at present.
        rows: Rows of earlier epochs.
        counts: Counts since they were last taken.
        refusals: Collects what a device refuses to encode within a pass; None to check each message.
    """

    settings: ExchangeSettings
    seed: int
    mode: ExchangeMode
    rows: EpochRows = field(default_factory=EpochRows)
    counts: CompressionCounts = field(default_factory=CompressionCounts)
    refusals: UnreadRefusals | None = None

    def draws_of(self, site: SiteExchange, rank: int) -> int:
        """Return a 64-bit seed of an exchange's draws.

        For values at halo rows it differs between the ranks that read them.
        """
        # A row goes to several readers with one draw, so all of them hold the same values. In the other
        # direction several ranks send a value for one row, and their owner adds these: with equal draws the
        # errors would add up instead of cancelling.
        reader = rank if site.direction > 1 else -1
        # A digest of the text, because Python's ``hash`` of a string differs between processes.
        text = repr((self.seed, site.epoch, site.site, site.direction, reader)).encode()
        return int.from_bytes(blake2b(text, digest_size=8).digest(), "little")


def _refuse_others(state: State, rows: tuple[int, int], where: str) -> None:
    """Refuse a selection among other rows, because ranks would then send rows that no peer waits for."""
    for names, count in ((("sent", "goes"), rows[0]), (("table", "comes"), rows[1])):
        for name in names:
            value = state.get(name)
            if isinstance(value, Tensor) and value.size(0) != count:
                raise CheckpointError(
                    f"a selection among {count:,} rows of a site",
                    f"{value.size(0):,} rows in the checkpoint's {name}",
                    where=where,
                    hint="an earlier checkpoint of the run",
                )
