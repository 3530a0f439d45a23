"""Progress monitor: judges by the loss whether a model has begun to learn, and kept what it learned.

Where it sits: ``history`` asks it after each epoch. What a model has to learn first may be too faint for
history. On the plateau where a deep model begins, gradients are those of a constant, and agree whatever rows
are read. GCN of 32 layers on Cora left the plateau in epoch 28 on one device. In two parts with history it
did not leave it at all, at cosines of 0.97 to 1.00; other runs fell back within 15 epochs of history, and did
not recover.

::

    loss  1  ----------------.
          0.98 . . . . . . . . `-.                  .----  fell back
          0.9  . . . . . . . . . . `------------.--'    |
                  20 epochs | exact |  history           | exact, from the weights kept
                  of history        |                    | on, until 0.81
                                    weights are kept

Source: none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from kagome.adaptive.thresholds import BACK, BEGINS, BEGUN, LEARNS, PATIENT

Weights = Literal["step", "keep", "undo"]
"""The change of the weights: a step; a step after a copy is saved; or the saved copy instead."""

STATE: Final = (
    *("held_epochs", "undone", "first", "share", "learned", "above", "below", "back"),
    *("left", "until", "kept", "last"),
)


@dataclass(frozen=True)
class Verdict:
    """The consequence of an epoch's loss.

    Args:
        text: A note; empty if there is nothing to report.
        weights: The change of the weights.
        released: Whether history is tried again.
    """

    text: str = ""
    weights: Weights = "step"
    released: bool = False


class ProgressMonitor:
    """Decide whether the coming epochs are exact because the loss has not fallen.

    Args:
        state: The state of an earlier monitor.
    """

    def __init__(self, state: Mapping[str, Any] | None = None) -> None:
        self.held_epochs = 0
        """How many epochs were exact because the loss had not fallen."""
        self.undone = 0
        """How often weights were rolled back."""
        self.first: float | None = None
        """Loss of the first epoch; infinite if it is unknown."""
        self.share, self.learned = LEARNS, False
        self.above = self.below = self.back = 0
        """Epochs in a row that had not begun, or got no further; below the goal; half the way back."""
        self.left = self.until = 0
        """The most exact epochs that are left; the epoch before which no further ones begin."""
        self.kept: float | None = None
        """Loss of the weights that were saved for a rollback."""
        self.last: list[float] = []
        for name in STATE:
            setattr(self, name, (state or {}).get(name, getattr(self, name)))

    @property
    def held(self) -> bool:
        """Whether the coming epoch is exact."""
        return self.left > 0

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain values."""
        return {name: getattr(self, name) for name in STATE}

    def resume(self, *, kept: bool) -> None:
        """Continue a run; if its first loss is unknown, its model is taken to be past the beginning.

        Args:
            kept: Whether there are saved weights for a rollback.
        """
        self.first = math.inf if self.first is None else self.first
        if not kept:
            self.kept = None

    def observe(self, epoch: int, loss: float) -> Verdict:
        """Judge an epoch by its loss.

        Args:
            epoch: The epoch's number, counted from 1.
            loss: The mean loss over all ranks.
        """
        first = self.first = loss if self.first is None else self.first
        if first <= 0:  # shares of such a loss mean nothing
            return Verdict()
        goal = self.share * first
        # Half of the way from this goal back to the one before it, goal / LEARNS.
        learns, half = loss < goal, goal * (1 + 1 / LEARNS) / 2
        self.below = self.below + 1 if learns else 0
        self.learned |= self.below >= (1 if self.held else BACK)  # one epoch may be chance
        # After history was tried again the loss must fall further; before, a slow beginning counts.
        bar = goal if self.learned and self.kept is not None else BEGUN * first
        self.above = self.above + 1 if loss >= bar else 0
        self.back = self.back + 1 if self.learned and loss >= half else 0
        self.last = [*self.last, loss][-BACK:]
        if self.held:
            self.held_epochs += 1
            self.left -= 1
            return self._released(epoch, loss, learns) if learns or not self.left else Verdict()
        if (self.above >= BEGINS or self.back >= BACK) and epoch >= self.until:
            return self._holds(epoch, loss, first)
        return Verdict()

    def _released(self, epoch: int, loss: float, learns: bool) -> Verdict:
        # If the loss never fell, history is used for PATIENT epochs before the next exact ones: exact epochs
        # did not help either.
        self.until = epoch if learns else epoch + PATIENT
        self.left = self.above = self.back = 0
        self.kept, self.last = loss, []
        return Verdict(
            f"epoch {epoch}: history is tried again (the loss is {loss:.4g})", "keep", released=True
        )

    def _holds(self, epoch: int, loss: float, first: float) -> Verdict:
        # A model that has learned and fell back must get further than last time.
        self.share *= LEARNS if self.learned else 1.0
        self.left = PATIENT
        # Only if each of the last losses is worse than that of the saved weights: a step back loses an epoch
        # or more.
        undo = self.kept is not None and min(self.last) > self.kept
        self.undone += undo
        again = f"weights of a loss of {self.kept:.4g} again, and " if undo else ""
        text = (
            f"epoch {epoch}: {again}exact epochs until the loss is below {self.share * first:.4g}, {PATIENT} "
            f"at most (it is {loss:.4g}, in the first epoch it was {first:.4g}; probes say nothing there)"
        )
        return Verdict(text, "undo" if undo else "step")
