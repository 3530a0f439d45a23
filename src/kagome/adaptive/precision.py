"""Precision controller: how exactly rows are exchanged in each epoch, from the user's settings up to exact.

Where it sits: ``train.graph_engine`` asks it before each epoch. Encoded and late rows change the gradient;
where it no longer points in the direction of the exact one, accuracy falls. So now and then an epoch computes
both gradients, at the same weights and with the same draws. If they are too far apart, precision rises by one
level.

::

    as set  ->  waiting for rows  ->  finer codecs, one after the other  ->  exact
            a probe below ROWS_FAIR goes one level up, and probes again at once
            so do late rows that were off by more than CLOSE in most of the last probes
            probes at ROWS_GOOD come ever later, after late rows off by more than CLOSE sooner again
            what encodes or selects is probed before it is trusted: in the first epoch, and when tried again
            after the longest wait, twice, one level down is tried; after twice as many when that fails

The error of a codec is drawn anew each epoch: a gradient that is off by half is noise, but unbiased.
The error of late rows lies along the last step: where the loss is steep, steps overshoot, and the loss stays
where it is although each gradient points in a good direction. So late rows are also judged by how far off
they are. One device that takes each step with the gradient of the step before loses as much
(benchmarks/wire/delay.py).

One noisy gradient costs more than its step: if it is long, Adam divides by it for hundreds of epochs. A GAT
of two layers on Flickr took its first step with one bit, at a cosine of 0.03 and a loss of 26 instead of 5.
With a controller that probed from the second epoch on it had 26 % after 200 epochs, and 40 % with exact rows.
One of four layers on Squirrel, which did well with two bits, would have gone back to one at a gradient 539
times too long.

Source: none. Sylvie's own logs show where it is needed: a 4-layer GAT fell to 5.8 % (papers.md, section 3).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Final, Literal

from kagome.adaptive.thresholds import CLOSE, CODED_FAIR, LONGEST, RECENT, ROWS_FAIR, ROWS_GOOD
from kagome.comm.codec import FINER, Codec
from kagome.config import CodecName, ExchangeSettings, Parallel
from kagome.halo.epoch_rows import ExchangeMode


@dataclass(frozen=True)
class PrecisionLevel:
    """A precision level: how rows are exchanged.

    Args:
        codec: The codec of rows.
        codec_backward: The codec of gradients.
        waits: Whether no row is late.
        chooses: Whether only some rows are sent, or not all with the same number of bits.
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
        """Whether no information is lost."""
        return self.waits and not self.chooses and not self.codes

    def mode(self, *, probes: bool = False) -> ExchangeMode:
        """Return the mode of exchange, for a probe or for training."""
        codec, backward = Codec(self.codec), Codec(self.codec_backward)
        return ExchangeMode(codec, backward, self.waits, self.chooses, probes)

    def text(self) -> str:
        """Describe the level in a few words."""
        both = self.codec if self.codec == self.codec_backward else f"{self.codec} and {self.codec_backward}"
        return (
            f"codec {both}, {'some of them, ' if self.chooses else ''}{'none late' if self.waits else 'late'}"
        )


EXACT: Final = PrecisionLevel("none", "none", True)


@dataclass(frozen=True)
class StalenessProbe:
    """The result of one probe.

    Args:
        epoch: The epoch of the probe.
        level: The precision level that was compared with exact.
        cosine: The cosine between the two gradients.
        ratio: The length of the level's gradient over the exact one's.
    """

    epoch: int
    level: PrecisionLevel
    cosine: float
    ratio: float

    @property
    def off(self) -> float:
        """Length of the two gradients' difference over the exact one's."""
        # |g - e| / |e| by the law of cosines, with ratio = |g| / |e|. Rounding may make the sum slightly
        # negative.
        return math.sqrt(max(1 + self.ratio**2 - 2 * self.ratio * self.cosine, 0.0))

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> StalenessProbe:
        """Return the probe that a checkpoint holds."""
        return cls(state["epoch"], PrecisionLevel(**state["rung"]), state["cosine"], state["ratio"])

    def state_dict(self) -> dict[str, Any]:
        """Return the probe under the names that checkpoints have for its fields."""
        return {"epoch": self.epoch, "rung": asdict(self.level), "cosine": self.cosine, "ratio": self.ratio}

    def text(self) -> str:
        """Describe the result in one phrase."""
        return f"{self.level.text()}: gradient {self.ratio:.2f} times as long, cosine {self.cosine:.2f}"


def levels_of(settings: ExchangeSettings) -> tuple[PrecisionLevel, ...]:
    """Return the precision levels from what the settings say up to exact."""
    forward, backward = settings.codec, settings.codec_backward or settings.codec
    chooses = settings.halo_sample < 1 or settings.skip_drift > 0 or settings.adaptive_bits
    # The ladder gives up the selection of rows first, then lateness, then coarse codecs one by one.
    levels = [PrecisionLevel(forward, backward, settings.max_age == 0, chooses)]
    if chooses:
        levels.append(PrecisionLevel(forward, backward, settings.max_age == 0))
    if settings.max_age:
        levels.append(PrecisionLevel(forward, backward, True))
    for step in range(1, len(FINER)):
        levels.append(PrecisionLevel(_finer(forward, step), _finer(backward, step), True))
    # Levels may repeat, for example where the codec is already the finest.
    return tuple(dict.fromkeys(levels))


def _finer(codec: CodecName, steps: int) -> CodecName:
    place = FINER.index(codec) if codec in FINER else FINER.index("bf16")
    return FINER[min(place + steps, len(FINER) - 1)]


class PrecisionController:
    """Decide for each epoch how its rows are exchanged.

    Args:
        parallel: The settings.
        state: The state of an earlier controller: its measurements and decisions.
    """

    def __init__(self, parallel: Parallel, state: Mapping[str, Any] | None = None) -> None:
        self.levels = levels_of(parallel)
        self.watch = parallel.guard and not self.levels[0].exact
        self.index = 0
        self.found: list[StalenessProbe] = []
        self.climbed: list[StalenessProbe] = []
        """The probes after which rows were exchanged more exactly."""
        self._span, self._since = 1, 0
        self._opening = self._opens()
        """Whether the coming epoch is the first of a level that is to be trusted: no row is late in it."""
        self._stay, self._calm = 0, 0
        """Probes since the last change of level; the number of them after the longest wait."""
        # An index is meaningful for the same ladder only. With other settings the run begins at its first
        # level.
        if state and self.watch and state["rungs"] == [asdict(level) for level in self.levels]:
            self._go_on(state)

    @property
    def level(self) -> PrecisionLevel:
        """The precision level of the coming epoch."""
        return self.levels[self.index]

    def probes(self) -> bool:
        """Return whether the coming epoch is a probe; an exact level needs none."""
        return self.watch and not self.level.exact and (self._opening or self._since >= self._span)

    def done(self, epoch: int) -> str:
        """Note an epoch that has run.

        Returns:
            A note; an empty text if there is nothing to report.
        """
        self._since += 1
        # An exact level has no probes that could lead back, so time alone does.
        if not self.index or not self.level.exact:
            return ""
        # Stay for as long as a probed level does: probes after 1, 2, 4 ... epochs, then the longest waits.
        return self._down(epoch) if self._since >= LONGEST * (1 + self._patience()) else ""

    def state_dict(self) -> dict[str, Any]:
        """Return the measurements and the decisions that followed."""
        found, climbed = ([probe.state_dict() for probe in probes] for probes in (self.found, self.climbed))
        place = {"level": self.index, "span": self._span, "since": self._since}
        place |= {"stay": self._stay, "calm": self._calm, "opening": self._opening}
        return {
            **place,
            "rungs": [asdict(level) for level in self.levels],
            "found": found,
            "climbed": climbed,
        }

    def _go_on(self, state: Mapping[str, Any]) -> None:
        self.index, self._span, self._since = state["level"], state["span"], state["since"]
        # Earlier checkpoints lack these.
        self._stay, self._calm = state.get("stay", 0), state.get("calm", 0)
        self._opening = state.get("opening", False)
        self.found, self.climbed = (
            [StalenessProbe.of_state(probe) for probe in state[name]] for name in ("found", "climbed")
        )

    def observe(self, found: StalenessProbe) -> str:
        """Take the result of a probe.

        Returns:
            A note; an empty text if there is nothing to report.
        """
        opening, self._opening = self._opening, False
        self.found.append(found)
        self._since, self._stay = 0, self._stay + (not opening)
        late = not self.level.waits
        far = self._far() if late else 0.0
        # A long noisy gradient raises Adam's second moments for hundreds of epochs, so codecs need a higher
        # cosine than late rows.
        least = CODED_FAIR if self.level.codes else ROWS_FAIR
        fair = found.cosine >= least and far <= CLOSE  # False for NaN
        if not fair:
            self._go(1)
            self.climbed.append(found)
            mostly = f", mostly off by {far:.2f} of its length" if far > CLOSE else ""
            why = f"{found.text()}{mostly}"
            return f"epoch {found.epoch}: rows cross with {self.level.text()} from now on ({why})"
        if opening:
            return ""  # the next epoch is probed too
        # Spans to the next probe: halved after far late rows, doubled after a good probe, one longer after a
        # fair one.
        if late and found.off > CLOSE:
            self._span = max(self._span // 2, 1)
        elif found.cosine >= ROWS_GOOD:
            self._calm += self._span >= LONGEST
            self._span = min(2 * self._span, LONGEST)
            if self.index and self._calm >= self._patience():
                message = self._down(found.epoch)
                self._since = -1  # this epoch is not done; the next has no late rows yet
                return message
        else:
            self._span = min(self._span + 1, LONGEST)
        return ""

    def _go(self, step: Literal[-1, 1]) -> None:
        self.index, self._span, self._since, self._stay, self._calm = self.index + step, 1, 0, 0, 0
        self._opening = step < 0 and self._opens()

    def _opens(self) -> bool:
        """Return whether a level loses information in its very first epoch, in which no row is late."""
        return self.level.codes or self.level.chooses

    def _down(self, epoch: int) -> str:
        before = self.level.text()
        self._go(-1)
        return f"epoch {epoch}: rows cross with {self.level.text()} again, after {before}"

    def _patience(self) -> int:
        """Return how many longest waits pass before the level below is tried: a failed try costs epochs."""
        below = self.levels[self.index - 1]
        # Each failed try of that level doubles the wait, up to 32 times the longest span.
        return 1 << min(sum(probe.level == below for probe in self.climbed), 5)

    def _far(self) -> float:
        """Return by how much most of the last probes on this level were off; 0 while there are few."""
        if self._stay < RECENT:
            return 0.0
        return median(probe.off for probe in self.found[-RECENT:])
