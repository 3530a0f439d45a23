"""Epoch controller: how exactly each epoch reads rows, what it probes, and what follows from its loss.

Where it sits: an engine asks it for a plan before each epoch, and reports the result to it. The engine does
not know precision levels and careful epochs; ``precision`` and ``history`` decide on them.

::

    plan = plan()                                  how rows of other chunks are read, how rows are exchanged
    plan.guess?   gradient of the guess, then the exact one:  probed(...)
    observe(epoch, plan, loss)                     a step, a step with a saved copy, or the saved copy

Where there is history, its controller watches codecs too: it measures all that makes its epochs differ from
exact ones. Elsewhere the precision controller does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from kagome.adaptive.history import Epoch, HistoryController, HistoryProbe
from kagome.adaptive.plateau import Weights
from kagome.adaptive.precision import EXACT, PrecisionController, PrecisionLevel, StalenessProbe
from kagome.adaptive.report import ExchangeReport, Found
from kagome.config import Parallel


@dataclass(frozen=True)
class EpochPlan:
    """The decisions about one epoch.

    Args:
        kind: How rows of other chunks are read. A probe reads them exactly.
        level: How rows are exchanged.
        guess: In a probe, the plan whose gradient is compared with this one's; its weights are not stepped.
    """

    kind: Epoch
    level: PrecisionLevel
    guess: EpochPlan | None = None

    @property
    def exact(self) -> bool:
        """Whether every row of another chunk is one of this epoch."""
        return self.kind in ("exact", "probe")


class EpochController:
    """Decide how each epoch of one rank runs. All ranks decide alike.

    Args:
        parallel: The settings.
        report: The report of this rank's exchanges; it has the exchange with other parts and between stages.
        log: Takes each note.
        history: The controller of history; None where no epoch reads any.
        alone: Whether no rows are exchanged with other parts, so that no level is needed.
    """

    def __init__(
        self,
        parallel: Parallel,
        report: ExchangeReport,
        log: Callable[[str], None],
        *,
        history: HistoryController | None = None,
        alone: bool = False,
    ) -> None:
        self.parallel, self.report, self.history = parallel, report, history
        self._log = log
        self.exchange, self.stages = report.exchange, report.stages
        self._stage = "none" if self.stages is None else self.stages.codec.name
        self._halo = self.stages is None or not self.exchange.exact
        """Whether levels are about the halo; else they are about values between stages."""
        # The ladder of levels is built from settings. Where only values between stages are encoded, their
        # codec takes the place of the halo's in made-up settings. A rank alone gets the exact settings, whose
        # ladder has one level.
        watched = parallel if self._halo else Parallel(codec=self._stage, guard=parallel.guard)
        watched = Parallel() if alone else watched
        # With history, its probes cover codecs too, so the precision controller measures nothing.
        self._watched = replace(watched, guard=watched.guard and history is None)
        self.precision = PrecisionController(self._watched)

    # Before an epoch ------------------------------------------------------------------------------

    def plan(self) -> EpochPlan:
        """Return how the coming epoch runs."""
        kind: Epoch = "exact" if self.parallel.cross_chunk == "exact" else "history"
        if self.history is not None:
            kind = self.history.next()
        level = self.precision.level
        # Compares everything that history epochs leave out, rows and codecs, with an exact epoch.
        if kind == "probe":
            return EpochPlan(kind, EXACT, EpochPlan("history", level))
        # Compares the level alone: both gradients read rows of other chunks in the same way.
        if self.precision.probes():
            return EpochPlan(kind, EXACT, EpochPlan(kind, level))
        # An exact epoch of the history controller fills tables or replaces epochs that are not trusted, so it
        # is exact in every respect. With cross_chunk="exact" there is no such controller, and the codec was
        # asked for.
        trusted = kind != "exact" or self.history is None
        return EpochPlan(kind, level if trusted else EXACT)

    @contextmanager
    def using(self, plan: EpochPlan, *, probes: bool = False) -> Iterator[None]:
        """Exchange rows as a plan says, for a block. All ranks do.

        Args:
            plan: The plan.
            probes: Whether rows are late also where they would be waited for.
        """
        if self._halo:
            # Values between stages have no ladder of their own here: the codec as set, or none in exact
            # epochs.
            with self.exchange.using(plan.level.mode(probes=probes)), self._between_stages(plan.level):
                yield
        else:
            assert self.stages is not None
            with self.stages.using(plan.level.codec):
                yield

    @contextmanager
    def _between_stages(self, level: PrecisionLevel) -> Iterator[None]:
        if self.stages is None:
            yield
            return
        with self.stages.using("none" if level.exact else self._stage):
            yield

    # After it -------------------------------------------------------------------------------------

    def probed(self, epoch: int, plan: EpochPlan, agreed: tuple[float, float], *, drift: float = 0.0) -> None:
        """Take the result of a probe.

        Args:
            epoch: The epoch.
            plan: Its plan, which has a guess.
            agreed: Cosine between the guess's gradient and the exact one, and the ratio of their lengths.
            drift: How far rows of other chunks had moved, for a probe of history.
        """
        assert plan.guess is not None
        if plan.kind == "probe":
            assert self.history is not None
            self._log(self.history.observe(HistoryProbe(epoch, *agreed, drift, self.history.age)))
        else:
            self._log(self.precision.observe(StalenessProbe(epoch, plan.guess.level, *agreed)))

    def observe(self, epoch: int, plan: EpochPlan, loss: float) -> Weights:
        """Take the mean loss of an epoch before its weight step; return what that step is to be."""
        self._log(self.precision.done(epoch))
        if self.history is None:
            return "step"
        verdict = self.history.done(plan.kind, loss)
        self._log(verdict.text)
        return verdict.weights

    # A run ----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the measurements of both controllers and the decisions that followed."""
        states = {"ladder": self.precision.state_dict()}
        return states if self.history is None else states | {"history": self.history.state_dict()}

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Continue with what an earlier run's controllers measured and decided."""
        # Made anew, because the state may belong to other settings; the constructor then ignores it.
        self.precision = PrecisionController(self._watched, states.get("ladder"))
        if self.history is not None:
            self.history = HistoryController(
                self.parallel.history_epochs, watch=self.parallel.guard, state=states.get("history")
            )

    def facts(self) -> dict[str, Any]:
        """Return what the summary reports of exchanges and probes. All ranks call it."""
        history = self.history
        found: Sequence[Found] = self.precision.found if history is None else history.found
        facts = self.report.facts(found, self.precision, oldest=0 if history is None else history.oldest)
        return facts if history is None else facts | history.facts()

    def final_notes(self) -> tuple[str, ...]:
        """Return the notes for the end of a run: what history, codecs and late rows were found to cost."""
        if self.history is None:
            return self.report.sentence(self.precision.found, self.precision)
        notes = self.history.final_notes(stages=self.parallel.pipe > 1)
        return (*notes, *self.report.sentence(None, self.precision))
