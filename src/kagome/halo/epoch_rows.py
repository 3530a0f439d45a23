"""Known: what a crossing has of earlier epochs - late rows, what codecs lost, which rows are to go.

Where it sits: ``compressed_exchange`` has one, and makes its lines and selections; a checkpoint keeps it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Final

from torch import Tensor

from kagome.errors import CheckpointError
from kagome.halo.resumed_rows import NOTHING, Entry, ResumedRows, State
from kagome.halo.row_selection import Selection, Skip
from kagome.halo.staleness import StaleRows

Key = tuple[Hashable, int]
"""A site and a direction."""
DRIFTED: Final = 0.5
"""With ``sync_every="auto"`` an epoch waits before rows have moved by more, in all late epochs together."""


class EpochRows:
    """One rank's.

    Attributes:
        synchronous: Whether the rows of this epoch are waited for, where they might be late.
        drifted: How far rows have moved since they were last waited for.
    """

    def __init__(self) -> None:
        self.lines: dict[Key, StaleRows] = {}
        self.selections: dict[Key, Selection] = {}
        self.residuals: dict[Key, tuple[Tensor, int]] = {}
        """What the codec lost of a site's rows, and in which epoch."""
        self.recall: ResumedRows = NOTHING
        self.synchronous, self.drifted = False, 0.0
        self._told = 0

    @property
    def oldest(self) -> int:
        """Age of the oldest row that was read, in epochs."""
        skipped = [each.oldest for each in self.selections.values() if isinstance(each, Skip)]
        return max((*skipped, *(line.oldest for line in self.lines.values())), default=0)

    @property
    def drifts(self) -> tuple[float, float]:
        """How far rows that came last moved within an epoch, the most of any site, and 1.

        Twice 0 where none did: a part without neighbours is not to make others' rows look still. Not
        gradients: they move by as much as they are long in every epoch of a run that goes well.
        """
        forth = [line.drift for (_, direction), line in self.lines.items() if direction % 2 == 0]
        found = [drift for drift in forth if drift is not None]
        return (max(found), 1.0) if found else (0.0, 0.0)

    def moved(self, drift: float, epoch: int) -> None:
        """How far rows moved in an epoch: said of it once, whether or not it computes its gradient twice.

        What late rows cost adds up over epochs: with little drift many are late, with much every second one
        or none.
        """
        if epoch == self._told:
            return
        self._told = epoch
        self.drifted = drift + (0.0 if self.synchronous else self.drifted)
        self.synchronous = self.drifted > DRIFTED

    def line(self, key: Key, epoch: int, make: Callable[[], StaleRows]) -> StaleRows:
        """A site's line; the first time, a new one that knows what is recalled."""
        found = self.lines.get(key)
        if found is None:
            found = self.lines[key] = make()
            state = self.recall.take("line", key, epoch)
            if state is not None:
                found.load_state_dict(state)
        return found

    def selection(
        self, key: Key, epoch: int, make: Callable[[], Selection | None], rows: tuple[int, int]
    ) -> Selection | None:
        """A site's selection, if it has one; the first time, one that goes on as is recalled.

        Args:
            key: Of the site.
            epoch: The epoch.
            make: A new one.
            rows: How many go, and how many come.

        Raises:
            CheckpointError: If what is recalled is of other rows.
        """
        found = self.selections.get(key)
        if found is None:
            found = make()
            if found is None:
                return None
            self.selections[key] = found
            state = self.recall.take("selection", key, epoch)
            if state is not None:
                _refuse_others(state, rows, str(key))
                found.load_state_dict(state)
        return found

    def residual(self, key: Key, epoch: int) -> Tensor | None:
        """What the codec lost of a site's rows in the last epoch, if it coded any in that."""
        if key not in self.residuals:
            state = self.recall.take("residual", key, epoch)
            return None if state is None else state["rows"]
        rows, when = self.residuals[key]
        return rows if epoch - when <= 1 else None

    def settle(self) -> None:
        """Take what is still under way. Rows are the same before and after."""
        for line in self.lines.values():
            line.settle()

    def forget(self, recall: ResumedRows) -> None:
        """Let no epoch read what came before it, but what is recalled. All ranks call it."""
        self.settle()  # nothing is to lie in the way of what comes
        self.lines, self.selections, self.residuals = {}, {}, {}
        state = recall.take("crossing", "", recall.epoch)
        self.recall, self._told = recall, 0
        self.synchronous = state is not None and bool(state["synchronous"])
        # Earlier checkpoints have none.
        self.drifted = 0.0 if state is None else float(state.get("drifted", 0.0))

    def carried(self, epoch: int) -> Iterator[Entry]:
        """What the epoch after this one may read of it."""
        yield "crossing", "", {"synchronous": self.synchronous, "drifted": self.drifted}
        for key, line in self.lines.items():
            yield "line", key, line.state_dict()
        for key, selection in self.selections.items():
            yield "selection", key, selection.state_dict()
        for key, (rows, when) in self.residuals.items():
            if when == epoch:
                yield "residual", key, {"rows": rows}


def _refuse_others(state: State, rows: tuple[int, int], where: str) -> None:
    """Refuse a selection among other rows: ranks would send what nobody waits for."""
    for names, count in ((("sent", "goes"), rows[0]), (("table", "comes"), rows[1])):
        for name in names:
            value = state.get(name)
            if isinstance(value, Tensor) and value.size(0) != count:
                raise CheckpointError(
                    f"a selection among {count:,} rows of a site was to go on",
                    f"the checkpoint's {name} has {value.size(0):,}",
                    where=where,
                    hint="an earlier checkpoint of the run",
                )
