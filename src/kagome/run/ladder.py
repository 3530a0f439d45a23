"""Ladder: how carefully rows cross, from what the user asked for up to exact, by what it is measured to cost.

Where it sits: ``engine`` asks it before each epoch. Coded and late rows change the gradient; where it no
longer points where the exact one does, accuracy goes. So now and then an epoch computes both, at the same
weights and with the same draws, and what is too far off goes one rung up.

::

    as set  ->  waiting for rows  ->  finer codecs, one after the other  ->  exact
            a probe below FAIR goes one rung up, and probes again at once
            probes at GOOD come ever later; after the longest wait, one rung down is tried

Source: none. Sylvie's own logs show where it is wanted: a 4-layer GAT fell to 5.8 % (papers.md, section 3).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from kagome.comm.codec import FINER
from kagome.config import CodecName, Parallel

GOOD: Final = 0.9
"""Cosine of the two gradients from which on the next probe may come later."""
FAIR: Final = 0.5
"""Below it rows cross more carefully."""
LONGEST: Final = 64
"""Epochs from one probe to the next at most."""


@dataclass(frozen=True)
class Rung:
    """One way of crossing.

    Args:
        codec: Of rows.
        codec_backward: Of gradients.
        waits: Whether no row is late.
        chooses: Whether only some rows cross, or not all alike.
    """

    codec: CodecName
    codec_backward: CodecName
    waits: bool
    chooses: bool = False

    @property
    def exact(self) -> bool:
        """Whether nothing is lost."""
        return self.waits and not self.chooses and self.codec == self.codec_backward == "none"

    def text(self) -> str:
        """In a few words."""
        both = self.codec if self.codec == self.codec_backward else f"{self.codec} and {self.codec_backward}"
        return (
            f"codec {both}, {'some of them, ' if self.chooses else ''}{'none late' if self.waits else 'late'}"
        )


EXACT: Final = Rung("none", "none", True)


@dataclass(frozen=True)
class Probe:
    """What one probe found.

    Args:
        epoch: When.
        rung: What was compared with exact.
        cosine: Of the two gradients.
        ratio: Length of the one over the exact one's.
    """

    epoch: int
    rung: Rung
    cosine: float
    ratio: float

    def text(self) -> str:
        """One phrase."""
        return f"{self.rung.text()}: gradient {self.ratio:.2f} times as long, cosine {self.cosine:.2f}"


def rungs_of(parallel: Parallel) -> tuple[Rung, ...]:
    """From what the settings say up to exact."""
    forward, backward = parallel.codec, parallel.codec_backward or parallel.codec
    chooses = parallel.halo_sample < 1 or parallel.skip_drift > 0 or parallel.adaptive_bits
    rungs = [Rung(forward, backward, parallel.max_age == 0, chooses)]
    if chooses:
        rungs.append(Rung(forward, backward, parallel.max_age == 0))
    if parallel.max_age:
        rungs.append(Rung(forward, backward, True))
    for step in range(1, len(FINER)):
        rungs.append(Rung(_finer(forward, step), _finer(backward, step), True))
    return tuple(dict.fromkeys(rungs))


def _finer(codec: CodecName, steps: int) -> CodecName:
    place = FINER.index(codec) if codec in FINER else FINER.index("bf16")
    return FINER[min(place + steps, len(FINER) - 1)]


class Ladder:
    """Says of each epoch how its rows cross.

    Args:
        parallel: The settings.
        state: Of an earlier one: what it measured, and what followed from it.
    """

    def __init__(self, parallel: Parallel, state: Mapping[str, Any] | None = None) -> None:
        self.rungs = rungs_of(parallel)
        self.watch = parallel.guard and not self.rungs[0].exact
        self.level = 0
        self.found: list[Probe] = []
        self.climbed: list[Probe] = []
        """The probes after which rows crossed more carefully."""
        self._span, self._since = 1, 0
        if state and self.watch and state["rungs"] == [asdict(rung) for rung in self.rungs]:
            self._go_on(state)

    @property
    def rung(self) -> Rung:
        """Of the coming epoch."""
        return self.rungs[self.level]

    def probes(self) -> bool:
        """Whether the coming epoch measures; the first ones are nobody's."""
        return self.watch and self._since >= self._span

    def done(self) -> None:
        """An epoch has run."""
        self._since += 1

    def state_dict(self) -> dict[str, Any]:
        """What was measured, and what followed from it."""
        found, climbed = ([asdict(probe) for probe in probes] for probes in (self.found, self.climbed))
        place = {"level": self.level, "span": self._span, "since": self._since}
        return {**place, "rungs": [asdict(rung) for rung in self.rungs], "found": found, "climbed": climbed}

    def _go_on(self, state: Mapping[str, Any]) -> None:
        self.level, self._span, self._since = state["level"], state["span"], state["since"]
        self.found, self.climbed = (
            [Probe(**{**probe, "rung": Rung(**probe["rung"])}) for probe in state[name]]
            for name in ("found", "climbed")
        )

    def see(self, found: Probe) -> str:
        """Take what a probe measured.

        Returns:
            What to say, or nothing.
        """
        self.found.append(found)
        self._since = 0
        before = self.rung
        fair = found.cosine >= FAIR  # not where it is no number
        if not fair and self.level + 1 < len(self.rungs):
            self.level, self._span = self.level + 1, 1
            self.climbed.append(found)
            return f"epoch {found.epoch}: rows cross with {self.rung.text()} from now on ({found.text()})"
        if found.cosine >= GOOD or self.rung.exact:
            longest = self._span >= LONGEST
            self._span = min(2 * self._span, LONGEST)
            if longest and self.level:
                self.level, self._span = self.level - 1, 1
                return f"epoch {found.epoch}: rows cross with {self.rung.text()} again, after {before.text()}"
        elif fair:
            self._span = min(self._span + 1, LONGEST)
        return ""
