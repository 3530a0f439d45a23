"""History controller: decides which epochs may use history, by measuring how far it changes the gradient.

Where it sits: ``pipelining.chunk_engine`` asks it before each epoch. Deep models lose their accuracy where
rows of other chunks are old while weights move fast. The gradient shows this early. So now and then an epoch
computes its gradient twice, with history and exactly, at the same weights and with the same draws.

::

    exact | h | probe | h h | probe | h h h h | probe | ...      while gradients agree, the span doubles
    probe: they differ a bit | careful: c | probe | c c | ...    rows and gradients of the epoch before,
                                                                 a probe after four epochs at the latest
    probe: still | exact x 2 | probe | exact x 4 | ...           exact epochs, ever more of them, and from
                                                                 then on a probe after half as many; the
                                                                 same where a probe is due after each epoch

Careful epochs differ from others in two ways. First, no row is older than one epoch: frozen rows have one
draw of dropout for all that time, and are right only on the mean over draws. Second, what later chunks add to
an earlier chunk's gradient comes too late in this epoch's backward. Careful epochs use what the later chunks
added in the epoch before; others count twice what arrives in time. Rows computed from old rows are older
than they look. In a deep model this error grows from one careful epoch to the next, and a probe, which is
exact, ends that.

A model that has learned nothing yet has exact epochs too, whatever probes find: see ``plateau``.

Source: none; GNNPipe has no such controller, and plain deep models fail there (papers.md, section 1.5).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from kagome.adaptive.plateau import ProgressMonitor, Verdict
from kagome.adaptive.thresholds import HISTORY_FAIR, HISTORY_GOOD, OFTEN, PAYS
from kagome.config import PipelineSettings

Epoch = Literal["history", "refresh", "exact", "probe"]

STATE: Final = (
    *("careful_from", "exact_epochs", "oldest", "epochs"),
    *("_span", "_rest", "_most", "_exact_left", "_since_probe", "_age", "_tried", "_left"),
)
"""The controller's state besides the results of probes."""


@dataclass(frozen=True)
class HistoryProbe:
    """The result of one probe.

    Args:
        epoch: The epoch of the probe.
        cosine: The cosine between the gradient with history and the exact one.
        ratio: The length of the gradient with history over that of the exact one.
        drift: How far rows had moved since they were last known, over their length: the mean over sites.
        age: Epochs since the last known rows were taken.
    """

    epoch: int
    cosine: float
    ratio: float
    drift: float
    age: int

    def text(self) -> str:
        """Describe the result in one phrase."""
        return (
            f"gradient with history {self.ratio:.2f} times as long, cosine {self.cosine:.2f}; rows "
            f"{self.age} epochs old are {self.drift:.0%} away"
        )


# [Note: states] The controller is a state machine. Its state is (careful?, exact epochs left, span); the
# result of a probe or an epoch is the input:
#
#     state            input                            next state
#     exact, n left    an exact epoch                   exact, n - 1 left; at 0 the next epoch is a probe
#     free             cosine >= GOOD                   free, the span doubles, up to a period
#     free             cosine < GOOD                    careful for the rest of the run, span 1
#     careful          cosine >= GOOD                   careful, the span doubles, up to its largest
#     careful, span    FAIR <= cosine < GOOD            careful, the span stays
#       of PAYS
#     careful, span 1  cosine < GOOD                    exact, 2 left, then 4, 8, ... up to a period
#     careful          cosine < FAIR                    the same, and the span is 1; the largest span is
#                                                       half of the one that has just failed
#     any              the loss leaves its plateau      probe first, then as before
#     any              the loss is on a plateau         exact, without a count (``plateau.held``)
#
# The exact epochs are 2 again once PAYS careful epochs in a row have been found fair. A run never leaves the
# careful state. The first epoch is exact, because the tables are empty.


class HistoryController:
    """Decide for each epoch whether it uses history, refreshes it, runs exactly or is a probe.

    Args:
        period: Epochs for which history may be frozen.
        watch: Whether to measure; else rows are refreshed each period, and epochs are never exact again.
        state: The state of an earlier controller: its measurements and decisions.
    """

    def __init__(self, period: int, *, watch: bool = True, state: Mapping[str, Any] | None = None) -> None:
        self.period, self.watch = period, watch
        self.found: list[HistoryProbe] = []
        self.careful_from: int | None = None
        """The epoch since which no row is older than one epoch, and gradients of the epoch before pass on."""
        self.exact_epochs = 0
        """How many epochs were exact because history was not trusted."""
        self.plateau = ProgressMonitor()
        self.oldest = self.epochs = 0
        """Age of the oldest rows that an epoch has read; the number of epochs that have run."""
        self._span, self._rest, self._most = 1, 1, OFTEN
        self._exact_left = 1  # the first epoch fills the tables
        self._since_probe = self._age = 0
        self._tried, self._left = 0, False
        """Epochs with history since the last exact one; whether the last probe has led to exact epochs."""
        if state:
            self._go_on(state)

    def resume(self, *, rows: bool, kept: bool) -> None:
        """Continue a run, whose rows of other chunks may be lost.

        Args:
            rows: Whether these rows are known.
            kept: Whether there are saved weights for a rollback.
        """
        if not rows:
            self._exact_left = max(self._exact_left, 1)
        self.plateau.resume(kept=kept)

    def state_dict(self) -> dict[str, Any]:
        """Return the measurements and the decisions that followed."""
        plain = {name: getattr(self, name) for name in STATE}
        found = [asdict(found) for found in self.found]
        return {**plain, "plateau": self.plateau.state_dict(), "found": found}

    def _go_on(self, state: Mapping[str, Any]) -> None:
        for name in STATE:
            setattr(self, name, state.get(name, getattr(self, name)))  # earlier checkpoints lack some
        self.plateau = ProgressMonitor(state.get("plateau") if self.watch else None)
        self.found = [HistoryProbe(**found) for found in state["found"]]
        if not self.watch:
            self.careful_from, self._exact_left = None, min(self._exact_left, 1)

    @property
    def careful(self) -> bool:
        """Whether no row is older than an epoch, and gradients of the epoch before are passed on."""
        return self.careful_from is not None

    def next(self) -> Epoch:
        """Return how the coming epoch is to run."""
        if self._exact_left or self.plateau.held:
            return "exact"
        if self.watch and self._since_probe >= self._span:
            return "probe"
        # Careful epochs read rows of the epoch before, so each one refreshes. Others freeze rows for a
        # period.
        return "refresh" if self.careful or self._age + 1 >= self.period else "history"

    @property
    def age(self) -> int:
        """Epochs since the last known rows were taken, in the coming epoch."""
        return self._age + 1

    def done(self, kind: Epoch, loss: float) -> Verdict:
        """Note an epoch that has run, before its weight step.

        Args:
            kind: How the epoch ran.
            loss: The mean loss over all ranks.

        Returns:
            A note, and what happens to the weights.
        """
        self.epochs += 1
        if kind != "exact":
            self.oldest = max(self.oldest, self.age)
        elif self._exact_left:
            self._exact_left -= 1
        # Refreshes, probes and exact epochs leave their own rows in the tables.
        self._age = self._age + 1 if kind == "history" else 0
        self._tried = self._tried + 1 if kind in ("history", "refresh") else 0
        held, turn = self.plateau.held, self.plateau.observe(self.epochs, loss) if self.watch else Verdict()
        if self.plateau.held and not held:  # the exact epochs left now count to the plateau
            self.exact_epochs -= self._exact_left
            self._exact_left = 0
        if kind == "probe":
            self._since_probe = 0
        elif turn.released or (kind == "exact" and not self._exact_left):
            self._since_probe = self._span  # probe first: the history is untried
        else:
            self._since_probe += 1
        return turn

    def observe(self, found: HistoryProbe) -> str:
        """Take the result of a probe.

        Returns:
            A note; an empty text if there is nothing to report.
        """
        before, self._left = self._left, False
        self.found.append(found)
        # Without a rest of exact epochs, even at a low cosine: careful epochs may already be good enough.
        if found.cosine < HISTORY_GOOD and not self.careful:
            self.careful_from, self._span = found.epoch, 1
            return (
                f"epoch {found.epoch}: from here on rows of other chunks are one epoch old, and gradients of "
                f"that epoch pass on ({found.text()})"
            )
        self._span = self._spanned(found.cosine)
        if found.cosine >= HISTORY_FAIR and (not self.careful or self._span >= PAYS):
            if self._tried >= PAYS:
                self._rest = 1
            return f"epoch {found.epoch}: history is used again ({found.text()})" if before else ""
        # 2, 4, 8, ... exact epochs, until careful ones have been found fair.
        self._rest = min(2 * self._rest, self.period)
        self._exact_left = self._rest
        self.exact_epochs += self._rest
        self._left = True
        return f"epoch {found.epoch}: {self._rest} exact epochs come next ({found.text()})"

    def facts(self) -> dict[str, Any]:
        """Return what the summary reports: probes, since when epochs are careful, how many were exact."""
        known = {"probes": [asdict(found) for found in self.found], "careful_from": self.careful_from}
        plateau = {"plateau_epochs": self.plateau.held_epochs, "undone": self.plateau.undone}
        return {"history": {**known, "exact_epochs": self.exact_epochs, **plateau}} if self.found else {}

    def final_notes(self, *, stages: bool) -> tuple[str, ...]:
        """Return the note for the end of a run.

        Args:
            stages: Whether there are several stages, which wait for each other in exact epochs.
        """
        if not self.found:
            return ()
        least = min(self.found, key=lambda found: found.cosine)
        advice = (
            f"; stages wait for each other in those, and they are most of {self.epochs} epochs: parts of the "
            "graph (--parallel.graph) need no history"
        )
        held, undone = self.plateau.held_epochs, self.plateau.undone
        plateau = f", {held} before the loss fell" if held else ""
        if undone:
            plateau += f", weights of before put back {'once' if undone == 1 else f'{undone} times'}"
        exact = self.exact_epochs + held
        return (
            f"history: {len(self.found)} probes, {self.exact_epochs} exact epochs for want of trust{plateau}"
            f"; the last, epoch {self.found[-1].epoch}: {self.found[-1].text()}; "
            f"lowest cosine {least.cosine:.2f} in epoch {least.epoch}"
            + (advice if stages and 2 * exact > self.epochs else ""),
        )

    def _spanned(self, cosine: float) -> int:
        """Return the number of epochs until the next probe."""
        if cosine < HISTORY_FAIR:
            # The span that has just failed was too long. Its half stays the limit for the rest of the run.
            self._most = max(self._tried // 2, PAYS) if self._tried else self._most
            return 1
        if cosine >= HISTORY_GOOD:
            return min(2 * self._span, self._most if self.careful else max(self.period, OFTEN))
        return self._span


def history_controller(settings: PipelineSettings) -> HistoryController | None:
    """Return the controller of history, where the settings let chunks read any."""
    if settings.cross_chunk != "history":
        return None
    return HistoryController(settings.history_epochs, watch=settings.guard)
