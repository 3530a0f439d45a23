"""Ways: how rows cross in each epoch of a pipeline, to other parts and to other stages.

Where it sits: ``pipeline.chunk_engine`` has one. The guard of history watches codecs too, where there is
history: all that makes its epochs differ from exact ones. Elsewhere a ladder does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from kagome.adaptive.precision import EXACT, PrecisionController, PrecisionLevel
from kagome.adaptive.report import ExchangeReport
from kagome.adaptive.stage_codec import StageCodec
from kagome.comm.mesh import Mesh
from kagome.components.gradients import Gradients
from kagome.config import Parallel
from kagome.halo.compressed_exchange import CompressedExchange


class ExchangePolicy:
    """One rank's.

    Args:
        crossing: The way to the other parts.
        mesh: All ranks.
        parallel: The settings.
        gradients: Whose sums it tells of.
        seed: Of the draws.
        guarded: Whether history is watched.
    """

    def __init__(
        self,
        crossing: CompressedExchange,
        mesh: Mesh,
        parallel: Parallel,
        gradients: Gradients,
        *,
        seed: int,
        guarded: bool,
    ) -> None:
        self.crossing, self.mesh = crossing, mesh
        self.stages = StageCodec(parallel.codec_stage, seed, mesh.stage)
        self.tally = ExchangeReport(
            mesh.world, crossing, gradients, self.stages if parallel.pipe > 1 else None
        )
        self.guarded = guarded
        self._drifts: tuple[float, ...] = ()
        self._stage, self._halo = self.stages.codec.name, not crossing.exact
        """Whether rungs are about the halo; else they are about what goes from stage to stage."""
        watched = parallel if self._halo else Parallel(codec=self._stage, guard=parallel.guard)
        self._watched = replace(watched, guard=watched.guard and not guarded)
        self.ladder = PrecisionController(self._watched)

    def go_on(self, state: Mapping[str, Any] | None) -> None:
        """Know what an earlier run's ladder knew."""
        self.ladder = PrecisionController(self._watched, state)

    def look(self) -> None:
        """At the end of an epoch's first forward, before gradients come: how far rows have moved."""
        self._drifts = self._drifts or self.crossing.drifts

    def moved(self, epoch: int) -> list[float]:
        """How far rows of this part moved, where all want to know it: the most of all its stages."""
        if not self._drifts:
            return []
        mine, self._drifts = torch.tensor(self._drifts, device=self.mesh.device), ()
        found: list[float] = self.mesh.pipe.all_reduce(mine, "max", action=f"drift, epoch {epoch}").tolist()
        return found

    def rung(self, *, exact: bool) -> PrecisionLevel:
        """Of the coming epoch; one that is exact for want of trust in history is exact in all."""
        return EXACT if exact and self.guarded else self.ladder.rung

    @contextmanager
    def using(self, rung: PrecisionLevel, *, asks: bool = False) -> Iterator[None]:
        """Let rows cross by a rung for a block, ``asks``: late also where they would be waited for.

        All ranks do.
        """
        if not self._halo:
            with self.stages.using(rung.codec):
                yield
            return
        ways = {"waits": rung.waits, "chooses": rung.chooses, "asks": asks}
        with (
            self.crossing.using(rung.codec, rung.codec_backward, **ways),
            self.stages.using("none" if rung.exact else self._stage),
        ):
            yield
