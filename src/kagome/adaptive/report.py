"""Exchange report: bytes before codecs by epoch, the error of codecs, and the results of probes.

Where it sits: ``train.graph_engine`` and ``pipelining.chunk_engine`` keep one each; ``train.trainer`` takes
its counts epoch by epoch and its facts at the end.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import fmean
from typing import Any, Final

from kagome.adaptive.history import HistoryProbe
from kagome.adaptive.precision import PrecisionController, StalenessProbe
from kagome.adaptive.stage_codec import StageCodec
from kagome.comm.channel import Channel
from kagome.components.gradients import Gradients
from kagome.config import ExchangeSettings
from kagome.halo.compressed_exchange import CompressedExchange

OTHERS: Final = (
    *("max_age", "sync_every", "smoothing"),
    *("error_feedback", "halo_sample", "skip_drift", "adaptive_bits"),
)
"""Further settings of the rows that are sent to other parts, which the note at the end lists."""


Found = StalenessProbe | HistoryProbe
"""The result of a probe."""


class ExchangeReport:
    """The exchange report of one rank; it is empty unless rows are encoded or late.

    Args:
        world: All ranks.
        exchange: The exchange with the other parts, as the settings say.
        gradients: The gradients whose sums it reports on.
        stages: The codec between stages, as the settings say; None where there is one stage.
        sliced: Whether features are cut into slices.
    """

    def __init__(
        self,
        world: Channel,
        exchange: CompressedExchange,
        gradients: Gradients,
        stages: StageCodec | None = None,
        *,
        sliced: bool = False,
    ) -> None:
        self.world, self.exchange, self.gradients, self.stages = world, exchange, gradients, stages
        self.codecs: dict[str, str] = {}
        """The codec by kind of traffic, also of what is sent unencoded."""
        if exchange.size > 1:
            # Feature slices read a halo where a layer's columns meet.
            for kind in ("halo", "transpose") if sliced else ("halo",):
                self.codecs[kind] = exchange.mode.codec.name
                self.codecs[f"{kind} backward"] = exchange.mode.codec_backward.name
        if stages is not None:
            self.codecs["stage"] = stages.codec.name
        summed = gradients.codec if gradients.channel.size > 1 else "none"
        if summed != "none":
            self.codecs["weights"] = summed
        self._rows = not exchange.exact or (stages is not None and not stages.exact)
        self.exact = not self._rows and summed == "none"
        """Whether everything is sent unencoded, and nothing is late."""
        self._errors: dict[str, float] = {}

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Exclude from the report what a probe sends in a block: without codecs there would be no probe."""
        exchange, stages = self.exchange, self.stages
        # Counts up to here are put back at the end, and those of the block are dropped.
        kept, summed = exchange.take_counts(), self.gradients.take_uncoded()
        before = None if stages is None else stages.take_counts()
        try:
            yield
        finally:
            exchange.state.counts = kept
            self.gradients.uncoded = summed
            if stages is not None and before is not None:
                stages.counts = before

    def take(self) -> dict[str, int]:
        """Return the bytes, by kind, that this rank would have sent without codecs since the last call."""
        # Taken in exact runs too, so that counts do not accumulate.
        counts = self.exchange.take_counts()
        taken, summed = {"halo": counts}, self.gradients.take_uncoded()
        if self.stages is not None:
            taken["stage"] = self.stages.take_counts()
        for each in taken.values():
            self._errors.update(each.errors)
        if self.exact:
            return {}
        plain = {kind: each.plain for kind, each in taken.items()} | {"transpose": counts.sliced}
        return plain | {"weights": summed} if "weights" in self.codecs else plain

    def facts(
        self, found: Sequence[Found], precision: PrecisionController, *, oldest: int = 0
    ) -> dict[str, Any]:
        """Return the summary's ``max_age`` and ``crossing``. All ranks call it.

        Args:
            found: The results of probes.
            precision: The precision controller of this run.
            oldest: Age of the oldest row of another chunk that was read.

        Cost:
            A number a site from each rank.
        """
        if self.exact:
            return {"max_age": oldest, "crossing": None}
        told: Any = self.world.gather_objects(
            (self.exchange.known.oldest, self._errors), "what was exchanged"
        )
        ages, errors = zip(*told, strict=True)
        # Each rank measures the codec's error on a sample of the rows that it sends; sites are reported by
        # their mean.
        by_site: defaultdict[str, list[float]] = defaultdict(list)
        for of_rank in errors:
            for site, error in of_rank.items():
                by_site[site].append(error)
        probes: dict[str, Any] = {"count": len(found)}
        if found:
            least = min(found, key=lambda probe: probe.cosine)
            probes |= {"last_cosine": found[-1].cosine, "lowest_cosine": least.cosine}
            probes |= {"lowest_epoch": least.epoch}
        probes["climbed"] = [{"epoch": probe.epoch, "text": probe.text()} for probe in precision.climbed]
        exchange = {
            "codecs": dict(self.codecs),
            "errors": {site: fmean(values) for site, values in by_site.items()},
            "oldest_age": max(ages),
            "probes": probes,
        }
        return {"max_age": max(oldest, *ages), "crossing": exchange}

    def sentence(self, found: Sequence[Found] | None, precision: PrecisionController) -> tuple[str, ...]:
        """Return the note for the end of a run, if anything was encoded or late.

        Args:
            found: The results of probes; None if they are reported elsewhere.
            precision: The precision controller of this run.
        """
        if self.exact:
            return ()
        message = "crossing: " + ", ".join(f"{kind} {codec}" for kind, codec in self.codecs.items())
        settings, plain = self.exchange.state.settings, ExchangeSettings()
        others = [name for name in OTHERS if getattr(settings, name) != getattr(plain, name)]
        message += "".join(f", {name}={getattr(settings, name)}" for name in others)
        if found is None or not self._rows:
            return (message,)
        if not found:
            return (f"{message}; no probe compared its gradient with the exact one",)
        least, last = min(found, key=lambda probe: probe.cosine), found[-1]
        message += (
            f"; {len(found)} probes, the last, epoch {last.epoch}: {last.text()}; lowest cosine "
            f"{least.cosine:.2f} in epoch {least.epoch}"
        )
        if precision.climbed:
            message += f"; {len(precision.climbed)} times a rung up, at the end {precision.level.text()}"
        return (message,)
