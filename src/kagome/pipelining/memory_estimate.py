"""Stage forecast: what a rank of a pipeline will hold, its stages' share of what the whole model would.

Where it sits: ``train.admission`` asks for it before the first epoch; ``memory.estimate`` has told what a
model keeps of a row, ``staging`` which share of it a rank's stages keep.

::

    there already       weights, features, edges
    of its stages       gradients, the optimizer's state
    whole x share       what autograd keeps: of all chunks in flight
    tables              of each read of its stages: rows of this epoch and of one before, and gradients
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch.optim import Optimizer

from kagome.components.gradients import message_bytes
from kagome.config import Parallel
from kagome.memory.estimate import MemoryRates, optimizer_bytes
from kagome.memory.saved_tensors import Pair
from kagome.pipelining.chunk_engine import ChunkEngine
from kagome.profile.part_size import GroupSize, PartSize
from kagome.records.memory import MemoryByKind
from kagome.schedule.simulator import simulate


@dataclass(frozen=True)
class StageMemory:
    """What a rank has of its part's model.

    Args:
        now: What it holds before the first epoch.
        whole: Bytes that autograd keeps of a forward of all its chunks, in whatever stage; None if that is
            not known.
        kept: Of what autograd keeps of a forward, the share of its stages.
        read: Bytes of a row at all reads of neighbours by its stages, and of its gradients; None if that is
            not known.
        flight: Of its chunks, the most that are on their way at once.
        gradients: Bytes of its stages' weights.
        optimizer: Bytes of the optimizer's state for them; None where that is not known.
        edges: Edges of its chunks in training: fewer than its part's where some are dropped.
    """

    now: MemoryByKind
    whole: float | None
    kept: float
    read: Pair | None
    flight: float
    gradients: int
    optimizer: int | None
    edges: int


def share_of(pipeline: ChunkEngine, counts: PartSize, optimizer: Optimizer) -> StageMemory:
    """A rank's, before its first epoch.

    Args:
        pipeline: Of this rank.
        counts: Of its part.
        optimizer: Over the model's parameters.
    """
    rank, chunks, learning = pipeline.mesh.stage, pipeline.chunks, pipeline.owners.parameters
    flight = 1.0
    if chunks.count > 1 and pipeline.parallel.cross_chunk == "drop":
        programs = pipeline.passes.programs(1)
        flight = simulate(programs, lambda _: 1.0).held[rank] / (chunks.count * len(pipeline.mine))
    own = sum(p.nbytes for p in learning)
    several = pipeline.mesh.weights.size > 1
    reads = sum(scope.views[0].rows.halo for scope in chunks.apart) if chunks.count > 1 else 0
    edges = sum(scope.views[0].edge_index.size(1) for scope in chunks.apart)
    here = counts if chunks.count == 1 else replace(counts, halo=reads, edges=edges, cut=0)
    return StageMemory(
        pipeline.held(optimizer, None),
        pipeline.staging.keeping.whole(here),
        pipeline.staging.kept_by(rank, here),
        pipeline.staging.read_by(rank),
        flight,
        sum(message_bytes(learning, 0)) if several else own,
        optimizer_bytes(optimizer, learning),
        edges,
    )


def held_by_stages(
    rates: MemoryRates,
    counts: PartSize,
    share: StageMemory,
    parallel: Parallel,
    *,
    keeps_best: bool = True,
    team: GroupSize | None = None,
) -> MemoryByKind:
    """What a rank will hold.

    Args:
        rates: Of the whole model.
        counts: Of the part.
        share: Of the model.
        parallel: How it is split.
        keeps_best: Whether a copy of the best epoch's weights is kept.
        team: The ranks that slice features with it; None where none do.
    """
    whole = rates.at(counts, team=team)
    kept: float | None = whole.activations
    halo = None if whole.halo is None else whole.halo * share.kept
    if parallel.chunks != 1:
        whole = rates.at(replace(counts, halo=0, cut=0, edges=share.edges))
        kept, drops = share.whole, parallel.cross_chunk == "drop"
        halo = None
        if share.read is not None:
            forward, backward = share.read
            # Gradients of one epoch; with a guard, those that the next one may take too.
            own = parallel.cross_chunk == "history" and (parallel.guard or parallel.stale_gradients)
            each = 2 * forward + (0 if drops else backward * (2 if own else 1))
            halo = each * (counts.rows + counts.halo)
    return MemoryByKind(
        weights=share.now.weights + rates.best * keeps_best,
        gradients=share.gradients,
        optimizer=share.optimizer,
        features=share.now.features,
        edges=share.now.edges,
        tables=max(share.now.tables, whole.tables),
        activations=None if kept is None else round(kept * share.kept * share.flight),
        halo=None if halo is None else round(halo),
    )
