"""Ladder: how carefully rows cross, from what the user asked for up to exact, by what it is measured to cost.

Where it sits: ``train.graph_engine`` asks it before each epoch. Coded and late rows change the gradient;
where it no longer points where the exact one does, accuracy goes. So now and then an epoch computes both, at
the same weights and with the same draws, and what is too far off goes one rung up.

::

    as set  ->  waiting for rows  ->  finer codecs, one after the other  ->  exact
            a probe below FAIR goes one rung up, and probes again at once
            so do late rows that were off by more than CLOSE in most of the last probes
            probes at GOOD come ever later, after late rows off by more than CLOSE sooner again
            what codes or chooses is probed before it is trusted: in the first epoch, and when tried again
            after the longest wait, twice, one rung down is tried; after twice as many when that fails

What a codec loses is drawn anew each epoch: a gradient that is off by half is noise, right on the mean. What
late rows lose lies along the last step: where the loss is steep, steps overshoot, and the loss stays where it
is although each gradient points well. So late rows are judged by how far off they are, too. One device that
takes each step with the gradient of the step before loses as much (benchmarks/wire/delay.py).

One gradient of noise costs more than its step: where it is long, Adam divides by it for hundreds of epochs.
A GAT of two layers on Flickr took its first step by one bit, at a cosine of 0.03 and a loss of 26 in place of
5: with a guard that looked from the second epoch on it had 26 % after 200 epochs, exact rows 40. One of four
layers on Squirrel, content with two bits, would have gone back to one at a gradient 539 times too long.

Source: none. Sylvie's own logs show where it is wanted: a 4-layer GAT fell to 5.8 % (papers.md, section 3).
CLOSE is between what we measured with late rows and no guard in 120 epochs: medians of 0.4 to 0.6 for a GCN
of 3 layers on Squirrel and Flickr, which lost 3 and 10 points, and of 0.3 for GCNII on Squirrel, whose loss
lagged behind; 0.2 and less on Cora, which lost nothing. They are judged from the first probes on, although
late rows are far off in the first epochs of many runs that they do not harm: with 16 epochs of grace Flickr's
GCN lost 2 to 12 points, as it stays where it was thrown, and there the two gradients agree.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Final, Literal

from kagome.comm.codec import FINER
from kagome.config import CodecName, Parallel

GOOD: Final = 0.9
"""Cosine of the two gradients from which on the next probe may come later."""
FAIR: Final = 0.5
"""Below it rows cross more carefully."""
FAIR_CODED: Final = 0.8
"""The same where a codec is used. With 0.5 the GAT on Flickr lost 3.7 points on the mean of three seeds, with
0.7 2.4 (two bits at 0.73, then a gradient three times too long), with 0.8 half a point."""
CLOSE: Final = 0.25
"""Length of what is wrong in a gradient, over the exact one's: above it, on the median, rows are not late."""
RECENT: Final = 3
"""Probes of which the median is taken."""
LONGEST: Final = 64
"""Epochs from one probe to the next at most."""


@dataclass(frozen=True)
class PrecisionLevel:
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
    def codes(self) -> bool:
        """Whether a codec is used."""
        return not self.codec == self.codec_backward == "none"

    @property
    def exact(self) -> bool:
        """Whether nothing is lost."""
        return self.waits and not self.chooses and not self.codes

    def text(self) -> str:
        """In a few words."""
        both = self.codec if self.codec == self.codec_backward else f"{self.codec} and {self.codec_backward}"
        return (
            f"codec {both}, {'some of them, ' if self.chooses else ''}{'none late' if self.waits else 'late'}"
        )


EXACT: Final = PrecisionLevel("none", "none", True)


@dataclass(frozen=True)
class StalenessProbe:
    """What one probe found.

    Args:
        epoch: When.
        rung: What was compared with exact.
        cosine: Of the two gradients.
        ratio: Length of the one over the exact one's.
    """

    epoch: int
    rung: PrecisionLevel
    cosine: float
    ratio: float

    @property
    def off(self) -> float:
        """Length of the two gradients' difference over the exact one's."""
        return math.sqrt(max(1 + self.ratio**2 - 2 * self.ratio * self.cosine, 0.0))

    def text(self) -> str:
        """One phrase."""
        return f"{self.rung.text()}: gradient {self.ratio:.2f} times as long, cosine {self.cosine:.2f}"


def rungs_of(parallel: Parallel) -> tuple[PrecisionLevel, ...]:
    """From what the settings say up to exact."""
    forward, backward = parallel.codec, parallel.codec_backward or parallel.codec
    chooses = parallel.halo_sample < 1 or parallel.skip_drift > 0 or parallel.adaptive_bits
    rungs = [PrecisionLevel(forward, backward, parallel.max_age == 0, chooses)]
    if chooses:
        rungs.append(PrecisionLevel(forward, backward, parallel.max_age == 0))
    if parallel.max_age:
        rungs.append(PrecisionLevel(forward, backward, True))
    for step in range(1, len(FINER)):
        rungs.append(PrecisionLevel(_finer(forward, step), _finer(backward, step), True))
    return tuple(dict.fromkeys(rungs))


def _finer(codec: CodecName, steps: int) -> CodecName:
    place = FINER.index(codec) if codec in FINER else FINER.index("bf16")
    return FINER[min(place + steps, len(FINER) - 1)]


class PrecisionController:
    """Says of each epoch how its rows cross.

    Args:
        parallel: The settings.
        state: Of an earlier one: what it measured, and what followed from it.
    """

    def __init__(self, parallel: Parallel, state: Mapping[str, Any] | None = None) -> None:
        self.rungs = rungs_of(parallel)
        self.watch = parallel.guard and not self.rungs[0].exact
        self.level = 0
        self.found: list[StalenessProbe] = []
        self.climbed: list[StalenessProbe] = []
        """The probes after which rows crossed more carefully."""
        self._span, self._since = 1, 0
        self._opening = self._opens()
        """Whether the coming epoch is the first of a rung that is to be trusted: nothing is late in it."""
        self._stay, self._calm = 0, 0
        """Probes since the last change of rung; of them those after the longest wait."""
        if state and self.watch and state["rungs"] == [asdict(rung) for rung in self.rungs]:
            self._go_on(state)

    @property
    def rung(self) -> PrecisionLevel:
        """Of the coming epoch."""
        return self.rungs[self.level]

    def probes(self) -> bool:
        """Whether the coming epoch measures; what is exact needs no probe."""
        return self.watch and not self.rung.exact and (self._opening or self._since >= self._span)

    def done(self, epoch: int) -> str:
        """An epoch has run.

        Returns:
            What to say, or nothing.
        """
        self._since += 1
        if not self.level or not self.rung.exact:
            return ""
        # As long as a rung stays that is probed: after 1, 2, 4 ... epochs, then after the longest waits.
        return self._down(epoch) if self._since >= LONGEST * (1 + self._patience()) else ""

    def state_dict(self) -> dict[str, Any]:
        """What was measured, and what followed from it."""
        found, climbed = ([asdict(probe) for probe in probes] for probes in (self.found, self.climbed))
        place = {"level": self.level, "span": self._span, "since": self._since}
        place |= {"stay": self._stay, "calm": self._calm, "opening": self._opening}
        return {**place, "rungs": [asdict(rung) for rung in self.rungs], "found": found, "climbed": climbed}

    def _go_on(self, state: Mapping[str, Any]) -> None:
        self.level, self._span, self._since = state["level"], state["span"], state["since"]
        # Earlier checkpoints lack these.
        self._stay, self._calm = state.get("stay", 0), state.get("calm", 0)
        self._opening = state.get("opening", False)
        self.found, self.climbed = (
            [StalenessProbe(**{**probe, "rung": PrecisionLevel(**probe["rung"])}) for probe in state[name]]
            for name in ("found", "climbed")
        )

    def see(self, found: StalenessProbe) -> str:
        """Take what a probe measured.

        Returns:
            What to say, or nothing.
        """
        opening, self._opening = self._opening, False
        self.found.append(found)
        self._since, self._stay = 0, self._stay + (not opening)
        late = not self.rung.waits
        far = self._far() if late else 0.0
        least = FAIR_CODED if self.rung.codes else FAIR
        fair = found.cosine >= least and far <= CLOSE  # not where it is no number
        if not fair:
            self._go(1)
            self.climbed.append(found)
            mostly = f", mostly off by {far:.2f} of its length" if far > CLOSE else ""
            why = f"{found.text()}{mostly}"
            return f"epoch {found.epoch}: rows cross with {self.rung.text()} from now on ({why})"
        if opening:
            return ""  # the next epoch is probed too
        if late and found.off > CLOSE:
            self._span = max(self._span // 2, 1)
        elif found.cosine >= GOOD:
            self._calm += self._span >= LONGEST
            self._span = min(2 * self._span, LONGEST)
            if self.level and self._calm >= self._patience():
                said = self._down(found.epoch)
                self._since = -1  # this epoch is not done; the next has no late rows yet
                return said
        else:
            self._span = min(self._span + 1, LONGEST)
        return ""

    def _go(self, step: Literal[-1, 1]) -> None:
        self.level, self._span, self._since, self._stay, self._calm = self.level + step, 1, 0, 0, 0
        self._opening = step < 0 and self._opens()

    def _opens(self) -> bool:
        """Whether a rung loses something in its very first epoch, in which no row is late."""
        return self.rung.codes or self.rung.chooses

    def _down(self, epoch: int) -> str:
        before = self.rung.text()
        self._go(-1)
        return f"epoch {epoch}: rows cross with {self.rung.text()} again, after {before}"

    def _patience(self) -> int:
        """Longest waits before the rung below is tried: a try that fails costs some epochs."""
        below = self.rungs[self.level - 1]
        return 1 << min(sum(probe.rung == below for probe in self.climbed), 5)

    def _far(self) -> float:
        """By how much most of the last probes on this rung were off; 0 while there are few."""
        if self._stay < RECENT:
            return 0.0
        return median(probe.off for probe in self.found[-RECENT:])
