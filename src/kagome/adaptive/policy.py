"""Exchange policy: how a pipeline exchanges rows in each epoch, with other parts and with other stages.

Where it sits: ``pipelining.chunk_engine`` has one. Where there is history, the history controller watches
codecs too: it measures all that makes its epochs differ from exact ones. Elsewhere a precision controller
does.
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
    """The exchange policy of one rank.

    Args:
        exchange: The exchange with the other parts.
        mesh: All ranks.
        parallel: The settings.
        gradients: The gradients whose sums it reports on.
        seed: The seed of the random draws.
        guarded: Whether a history controller watches.
    """

    def __init__(
        self,
        exchange: CompressedExchange,
        mesh: Mesh,
        parallel: Parallel,
        gradients: Gradients,
        *,
        seed: int,
        guarded: bool,
    ) -> None:
        self.exchange, self.mesh = exchange, mesh
        self.stages = StageCodec(parallel.codec_stage, seed, mesh.stage)
        self.tally = ExchangeReport(
            mesh.world, exchange, gradients, self.stages if parallel.pipe > 1 else None
        )
        self.guarded = guarded
        self._drifts: tuple[float, ...] = ()
        self._stage, self._halo = self.stages.codec.name, not exchange.exact
        """Whether levels are about the halo; else they are about what goes from stage to stage."""
        watched = parallel if self._halo else Parallel(codec=self._stage, guard=parallel.guard)
        self._watched = replace(watched, guard=watched.guard and not guarded)
        self.ladder = PrecisionController(self._watched)

    def go_on(self, state: Mapping[str, Any] | None) -> None:
        """Restore the state of an earlier run's precision controller."""
        self.ladder = PrecisionController(self._watched, state)

    def look(self) -> None:
        """Note how far rows have moved, after an epoch's first forward pass and before gradients come."""
        self._drifts = self._drifts or self.exchange.drifts

    def moved(self, epoch: int) -> list[float]:
        """Return how far rows of this part moved, if needed: the largest drift over the part's stages."""
        if not self._drifts:
            return []
        mine, self._drifts = torch.tensor(self._drifts, device=self.mesh.device), ()
        found: list[float] = self.mesh.pipe.all_reduce(mine, "max", action=f"drift, epoch {epoch}").tolist()
        return found

    def rung(self, *, exact: bool) -> PrecisionLevel:
        """Return the coming epoch's precision level: exact in everything if history is not trusted."""
        return EXACT if exact and self.guarded else self.ladder.rung

    @contextmanager
    def using(self, rung: PrecisionLevel, *, probes: bool = False) -> Iterator[None]:
        """Exchange rows by a precision level for a block. All ranks do.

        Args:
            rung: The precision level.
            probes: Whether rows are late also where they would be waited for.
        """
        if not self._halo:
            with self.stages.using(rung.codec):
                yield
            return
        with (
            self.exchange.using(rung.mode(probes=probes)),
            self.stages.using("none" if rung.exact else self._stage),
        ):
            yield
