"""Guard: which epochs may use history, by what history is measured to cost.

Where it sits: ``pipeline`` asks it before each epoch. Deep models lose their accuracy where rows of other
chunks are old while weights move fast; what tells it early is the gradient. So now and then an epoch computes
its gradient twice, with history and exactly, at the same weights and with the same draws.

::

    exact | h | probe | h h | probe | h h h h | probe | ...      while gradients agree, the span doubles
    probe: they do not quite | careful: c | probe | c c | ...    rows and gradients of the epoch before,
                                                                 a probe after four epochs at the latest
    probe: nor so | exact x 2 | probe | exact x 4 | ...          exact epochs, ever more of them, and from
                                                                 then on a probe after half as many

Careful epochs differ from others in two ways. No row is older than one epoch: frozen ones have one draw of
dropout for all that time, and on the mean over draws alone are they right. And what later chunks will add to
an earlier one's gradient, too late in this epoch's backward, is what they added in the epoch before, in place
of counting twice what comes in time. Rows that came of old rows are older than they look: in a deep model the
error grows from one careful epoch to the next, and a probe, which is exact, ends that.

What a model has to learn first may be too faint for both: on the plateau where a deep one begins, gradients
are those of a constant, and agree. GCN of 32 layers on Cora left it in epoch 28 on one device, and in two
parts with history not at all, at cosines of 0.97 to 1.00; another one fell back in 15 epochs of history. So a
model whose loss has not fallen after 20 epochs has exact ones until it has, and until it is lower still where
it rose again.

Source: none; GNNPipe has no such guard, and plain deep models fail there (papers.md, section 1.5).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

Epoch = Literal["history", "refresh", "exact", "probe"]

GOOD: Final = 0.95
"""Cosine of the two gradients from which on the next probe may come later; below it epochs are careful."""
FAIR: Final = 0.85
"""Below it careful epochs are not trusted."""
OFTEN: Final = 4
"""A probe comes after so many careful epochs at the latest, and where one is bad after half as many from then
on; while history is good, after one period of it, but no earlier."""

LEARNS: Final = 0.9
"""Share of the first epoch's loss below which a model has begun to learn; a share of that if it fell back."""
BEGINS: Final = 20
"""Epochs that it has for that; then they are exact."""
BACK: Final = 5
"""Epochs in which the loss is half the way back, after which a model has fallen back."""
PATIENT: Final = 100
"""Exact epochs at most; then as many have history."""

STATE: Final = (
    *("careful_from", "exact_epochs", "plateau_epochs", "oldest", "epochs"),
    *("_span", "_rest", "_most", "_exact_left", "_since_probe", "_age"),
    *("_first", "_share", "_learned", "_above", "_held", "_patient_until"),
)
"""What a guard goes by, besides what probes found."""


@dataclass(frozen=True)
class Measured:
    """What one probe found.

    Args:
        epoch: When.
        cosine: Between the gradient with history and the exact one.
        ratio: Length of the one over the other's.
        drift: How far rows had moved from those last known, over their length: the mean over sites.
        age: Epochs since the last known rows were taken.
    """

    epoch: int
    cosine: float
    ratio: float
    drift: float
    age: int

    def text(self) -> str:
        """One phrase."""
        return (
            f"gradient with history {self.ratio:.2f} times as long, cosine {self.cosine:.2f}; rows "
            f"{self.age} epochs old are {self.drift:.0%} away"
        )


class Guard:
    """Says of each epoch how it is to run.

    Args:
        period: Epochs for which history may be frozen.
        watch: Whether to measure; else rows are taken anew each period, and never computed exactly.
        state: Of an earlier one: what it measured, and what followed from it.
    """

    def __init__(self, period: int, *, watch: bool = True, state: Mapping[str, Any] | None = None) -> None:
        self.period, self.watch = period, watch
        self.found: list[Measured] = []
        self.careful_from: int | None = None
        """The epoch since which no row is older than one, and gradients of the epoch before pass on."""
        self.exact_epochs = 0
        """How many epochs were exact because history was not trusted."""
        self.plateau_epochs = 0
        """How many were because nothing had been learned yet."""
        self.oldest = self.epochs = 0
        """Age of the oldest rows that an epoch has read; epochs that have run."""
        self._span, self._rest, self._most = 1, 1, OFTEN
        self._exact_left = 1  # the first epoch fills the tables
        self._since_probe = self._age = 0
        self._first: float | None = None
        self._share, self._learned, self._above = LEARNS, False, 0
        self._held, self._patient_until = False, 0
        if state:
            self._go_on(state)

    def begin_anew(self) -> None:
        """Nothing is known of other chunks' rows: a run goes on where they were others."""
        self._exact_left = max(self._exact_left, 1)

    def state_dict(self) -> dict[str, Any]:
        """What was measured, and what followed from it."""
        plain = {name: getattr(self, name) for name in STATE}
        return {**plain, "found": [asdict(found) for found in self.found]}

    def _go_on(self, state: Mapping[str, Any]) -> None:
        for name in STATE:
            setattr(self, name, state.get(name, getattr(self, name)))  # earlier checkpoints lack some
        self.found = [Measured(**found) for found in state["found"]]
        if not self.watch:
            self.careful_from, self._exact_left = None, min(self._exact_left, 1)
            self._held = False

    @property
    def careful(self) -> bool:
        """Whether no row is older than an epoch, and gradients of the epoch before pass on."""
        return self.careful_from is not None

    def next(self) -> Epoch:
        """How the coming epoch is to run."""
        if self._exact_left:
            return "exact"
        if self.watch and self._since_probe >= self._span:
            return "probe"
        return "refresh" if self.careful or self._age + 1 >= self.period else "history"

    @property
    def age(self) -> int:
        """Epochs since the last known rows were taken, in the coming epoch."""
        return self._age + 1

    def done(self, kind: Epoch, loss: float) -> str:
        """An epoch has run so.

        Args:
            kind: How.
            loss: Of all ranks.

        Returns:
            What to say, or nothing.
        """
        self.epochs += 1
        self.plateau_epochs += self._held
        if kind == "exact":
            self._exact_left -= 1
        else:
            self.oldest = max(self.oldest, self.age)
        self._age = self._age + 1 if kind == "history" else 0
        if kind == "probe":
            self._since_probe = 0
        elif kind == "exact" and not self._exact_left:
            self._since_probe = self._span  # what is there now is to be tried first
        else:
            self._since_probe += 1
        return self._heed(loss) if self.watch else ""

    def _heed(self, loss: float) -> str:
        """What the loss says of a model that has learned nothing, or has lost it again."""
        first = self._first = loss if self._first is None else self._first
        goal = self._share * first
        learns, lost = loss < goal, loss >= (goal + goal / LEARNS) / 2
        self._learned |= learns
        self._above = self._above + 1 if lost or not self._learned else 0
        if self._held and (learns or not self._exact_left):
            self._patient_until = self.epochs if learns else self.epochs + PATIENT
            self._held, self._exact_left, self._above, self._since_probe = False, 0, 0, self._span
            return f"epoch {self.epochs}: history is tried again (the loss is {loss:.4g})"
        waited = self._above >= (BACK if self._learned else BEGINS) and self.epochs >= self._patient_until
        if first > 0 and waited and not self._held and not self._exact_left:  # of others nothing is known
            self._share *= LEARNS if self._learned else 1.0
            self._held, self._exact_left = True, PATIENT
            return (
                f"epoch {self.epochs}: exact epochs until the loss is below {self._share * first:.4g}, "
                f"{PATIENT} at most (it is {loss:.4g}, in the first epoch it was {first:.4g}; probes say "
                "nothing there)"
            )
        return ""

    def see(self, found: Measured) -> str:
        """Take what a probe measured.

        Returns:
            What to say, or nothing.
        """
        before = self._trusted
        self.found.append(found)
        if found.cosine < GOOD and not self.careful:
            self.careful_from, self._span = found.epoch, 1
            return (
                f"epoch {found.epoch}: from here on rows of other chunks are one epoch old, and gradients of "
                f"that epoch pass on ({found.text()})"
            )
        self._span = self._spanned(found.cosine)
        if found.cosine >= FAIR:
            self._rest = 1
            if not before:
                return f"epoch {found.epoch}: history is used again ({found.text()})"
            return ""
        self._rest = min(2 * self._rest, self.period)
        self._exact_left = self._rest
        self.exact_epochs += self._rest
        return f"epoch {found.epoch}: {self._rest} exact epochs come next ({found.text()})"

    def facts(self) -> dict[str, Any]:
        """What the summary is told: every probe, since when epochs are careful, and how many were exact."""
        known = {"probes": [asdict(found) for found in self.found], "careful_from": self.careful_from}
        counts = {"exact_epochs": self.exact_epochs, "plateau_epochs": self.plateau_epochs}
        return {"history": {**known, **counts}} if self.found else {}

    def sum_up(self, *, stages: bool) -> tuple[str, ...]:
        """What there is to say at the end; ``stages``: whether there are some, which exact epochs hold up."""
        if not self.found:
            return ()
        least = min(self.found, key=lambda found: found.cosine)
        advice = (
            f"; stages wait for each other in those, and they are most of {self.epochs} epochs: parts of the "
            "graph (--parallel.graph) need no history"
        )
        plateau = f", {self.plateau_epochs} before the loss fell" if self.plateau_epochs else ""
        exact = self.exact_epochs + self.plateau_epochs
        return (
            f"history: {len(self.found)} probes, {self.exact_epochs} exact epochs for want of trust{plateau}"
            f"; the last, epoch {self.found[-1].epoch}: {self.found[-1].text()}; "
            f"lowest cosine {least.cosine:.2f} in epoch {least.epoch}"
            + (advice if stages and 2 * exact > self.epochs else ""),
        )

    @property
    def _trusted(self) -> bool:
        return not self.found or self.found[-1].cosine >= FAIR

    def _spanned(self, cosine: float) -> int:
        """After how many epochs the next probe comes."""
        if cosine < FAIR:
            self._most = max(self._span // 2, 1)
            return self._most
        if cosine >= GOOD:
            return min(2 * self._span, self._most if self.careful else max(self.period, OFTEN))
        return self._span
