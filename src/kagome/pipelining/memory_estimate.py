"""Memory estimate of a pipeline rank: its stages' share of what the whole model would hold.

Where it sits: ``train.admission`` asks for it before the first epoch. ``memory.estimate`` gives the bytes
that a model keeps for each row, and ``staging`` the share of them that a rank's stages keep.

::

    held already        weights, features, edges
    of its stages       gradients, the optimizer's state
    whole x share       what autograd saves for all chunks in flight
    tables              for each read of its stages: rows of this epoch and the one before, and gradients
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
    """The memory that a rank needs for its stages of the model.

    Args:
        now: What the rank holds before the first epoch.
        whole: Bytes that autograd saves in a forward of all its chunks through all stages; None if unknown.
        kept: The share of those bytes that this rank's stages save.
        read: Bytes per row, summed over all reads of neighbours by its stages, forward and backward; None if
            unknown.
        flight: The largest share of its chunks that is in flight at one time.
        gradients: Bytes of the gradients of its stages' weights.
        optimizer: Bytes of the optimizer's state for these weights; None if unknown.
        edges: Edges of its chunks in training; fewer than the part has where some are dropped.
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
    """Return the stage memory of a rank, before its first epoch.

    Args:
        pipeline: The engine of this rank.
        counts: The size of its part.
        optimizer: The optimizer of the model's parameters.
    """
    rank, chunks, learning = pipeline.mesh.stage, pipeline.chunks, pipeline.ownership.parameters
    flight = 1.0
    # 1F1B holds a few chunks at a time. In fill-drain and in exact passes all of them are in flight (1.0).
    if chunks.count > 1 and pipeline.parallel.cross_chunk == "drop":
        programs = pipeline.chunk_passes.programs(1)
        flight = simulate(programs, lambda _: 1.0).held[rank] / (chunks.count * len(pipeline.mine))
    own = sum(p.nbytes for p in learning)
    several = pipeline.mesh.weights.size > 1
    # Chunks read each other's rows, so a row counts for each chunk that reads it.
    reads = sum(scope.views[0].rows.halo for scope in chunks.pieces) if chunks.count > 1 else 0
    edges = sum(scope.views[0].edge_index.size(1) for scope in chunks.pieces)
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
    group_size: GroupSize | None = None,
) -> MemoryByKind:
    """Estimate the memory by kind that a rank of a pipeline will hold.

    Args:
        rates: The memory rates of the whole model.
        counts: The size of the rank's part.
        share: What the rank's stages need of the model's memory.
        parallel: How the model and the graph are split.
        keeps_best: Whether a copy of the best epoch's weights is kept.
        group_size: The size of the group that slices features with this rank; None without feature slices.
    """
    whole = rates.at(counts, group_size=group_size)
    kept: float | None = whole.activations
    halo = None if whole.halo is None else whole.halo * share.kept
    # Halo rows of chunks lie in tables and not among the activations.
    if parallel.chunks != 1:
        whole = rates.at(replace(counts, halo=0, cut=0, edges=share.edges))
        kept, drops = share.whole, parallel.cross_chunk == "drop"
        halo = None
        if share.read is not None:
            forward, backward = share.read
            # Gradients of one epoch. The history controller also keeps those that the next epoch may use.
            own = parallel.cross_chunk == "history" and (parallel.guard or parallel.stale_gradients)
            # Rows of this epoch and of the last kept one, gradients of this epoch and perhaps of the next.
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
