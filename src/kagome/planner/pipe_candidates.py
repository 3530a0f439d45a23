"""Pipeline candidates: predicts what a split of layers into stages costs, with parts in each stage.

Where it sits: beside ``candidates``; ``schedule.simulator`` finds how long stages wait for each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from kagome.config import default_chunks
from kagome.planner.candidates import ROUNDS, Candidate, settings_of
from kagome.planner.cluster import Cluster
from kagome.planner.cost_model import CostRates, Load, Sliced, computing, halos, summed
from kagome.schedule.actions import Action, ActionKind
from kagome.schedule.schedules import Shape, fill_drain
from kagome.schedule.simulator import simulate

HALVES = 2
"""Table rows that a stage with chunks keeps for each row and each read: this epoch's and the one before. It
keeps as many rows of gradients with history, else one."""


@dataclass(frozen=True)
class PipeCut:
    """A model's layers cut into stages.

    Args:
        shares: The share of the computing in each stage.
        stage_bytes: Bytes of all messages between stages in an epoch, for the whole graph.
        reads: The number of reads of neighbours in each stage.
        kept: For each rank, the share of the bytes that autograd saves in a forward; values sent between two
            ranks count on both.
        widths: For each rank, bytes per row over all its reads of neighbours, forward and backward; None if
            unknown.
        dealt: The number of stages of each rank; stages are assigned to ranks in turn.
        chunks: Whether the graph can be in chunks: every layer reads along the in-edges of a vertex alone.
    """

    shares: tuple[float, ...]
    stage_bytes: float
    reads: tuple[int, ...]
    kept: tuple[float, ...]
    widths: tuple[tuple[float, float], ...] | None
    dealt: int = 1
    chunks: bool = True

    @property
    def ranks(self) -> int:
        """The number of ranks that the stages are assigned to."""
        return len(self.shares) // self.dealt

    def tables(self, rank: int, rates: CostRates, *, old: bool) -> float:
        """Return the bytes per row of the tables that a rank with chunks keeps for its reads.

        Args:
            rank: The rank within the pipeline.
            rates: The measured costs of the whole model, an upper bound that is used if widths are unknown.
            old: Whether gradients of an earlier epoch are kept too.
        """
        # A stage keeps tables for its own reads only; the whole model's reads are an upper bound.
        forward, backward = (rates.forward, rates.backward) if self.widths is None else self.widths[rank]
        return HALVES * forward + (HALVES if old else 1) * backward


CHUNK = 6e-4
"""Fixed seconds of a core for each chunk and read of neighbours, forward and backward: 0.55 to 0.65 ms on
three models (benchmarks/pipeline/chunk.py)."""
LOSS = 16.0
"""Bytes of the sum of the loss and of the request to stop; without stages, gradients carry them."""
FRESH = 2 / 3
"""Share of the halo rows of chunks with history whose gradients are sent back. A row is fresh for a chunk
that comes after its own, which makes ``1 - 1 / (r + 1)`` of the rows read by r chunks; r is 2 on average."""


def pipes(
    cut: PipeCut,
    number: int,
    loads: Sequence[Load],
    rates: CostRates,
    cluster: Cluster,
    uncertain: float,
    *,
    chunks: int,
    sliced: Sliced | None = None,
) -> Candidate:
    """Predict a pipeline over chunks of the graph, with several parts, or parts in slices, in each stage.

    Args:
        cut: The layers cut into stages.
        number: The number of parts.
        loads: The load of each part, with the memory of a rank. A single load stands for all parts if they
            are alike.
        rates: The measured costs of the model.
        cluster: The cluster that it runs on.
        uncertain: The relative uncertainty of the halo.
        chunks: The number of chunks of each part; a single chunk reads all its neighbours.
        sliced: The feature slices within a part; None without.
    """
    stages, ranks, tensor = len(cut.shares), cut.ranks, 1 if sliced is None else sliced.count
    size = ranks * number * tensor
    # With history, chunks read rows of an earlier epoch and send gradients for fresh rows alone.
    old = chunks > 1
    pace = cluster.pace(size)
    most, halo = halos(replace(rates, backward=rates.backward * FRESH) if old else rates, loads, number)
    sent = {"stage": round(cut.stage_bytes), "halo": round(halo)}
    sent |= {} if sliced is None else {"transpose": round(sliced.sent)}
    # The slowest part stands for all of them in the simulation.
    compute = max(
        sliced.computing(load)
        if sliced is not None
        else computing(rates, load.rows, load.edges, load.sent + load.halo)
        for load in loads
    )
    # Parts meet at every exchange, as in ``candidates.parts``.
    compute *= (rates.uneven if number > 1 and sliced is None else 1.0) / pace
    python = CHUNK / min(pace, 1.0)  # a GPU does not make it faster
    # A message is the share of one link, one direction, one part, one slice and one chunk in all traffic.
    link = cluster.bandwidth(size)
    message = cut.stage_bytes / max(stages - 1, 1) / 2 / number / tensor / chunks / link + cluster.latency

    def seconds(action: Action) -> float:
        busy = cut.shares[action.stage] * compute / chunks + python * cut.reads[action.stage]
        # Seconds are measured for both passes together; backward takes about twice as long.
        return busy * (1 if action.kind is ActionKind.F else 2) / 3

    programs = fill_drain(Shape(stages, tuple(range(chunks)), ranks=ranks))
    run = simulate(programs, seconds, transfer=lambda action: message)
    # Each stage sums the gradients of its own weights, over its own ranks.
    sums = summed(number * tensor, rates.weights, ranks)
    # With one chunk, stages wait for each other's halo messages too.
    beside = ranks if old else 1
    waits = most / tensor / beside / link + sums / link
    # With history each chunk makes its own exchanges with the parts.
    meetings = (chunks if old else 1) / beside
    waits += cluster.latency * _messages(rates, number, ranks, sliced, meetings)
    sent |= {"weights": round(sums * size), "other": round(summed(size, (LOSS,)) * size)}
    if sliced is not None:
        waits += sliced.sent / number / tensor / cluster.bandwidth(tensor)
    busy = max(map(run.busy, range(ranks)))
    settings = settings_of(False, pipe=ranks, stages_per_rank=cut.dealt, graph=number, tensor=tensor)
    settings |= {"chunks": chunks} if chunks != default_chunks(ranks, tensor) else {}
    return Candidate(
        settings,
        not old,
        run.seconds + waits,
        busy,
        run.seconds + waits - busy,
        sent,
        uncertain=uncertain if number > 1 else 0.0,
        run=run,
        **_fullest(cut, loads, rates, chunks, old=old),
    )


def _fullest(
    cut: PipeCut, loads: Sequence[Load], rates: CostRates, chunks: int, *, old: bool
) -> dict[str, Any]:
    """Return what the fullest rank of the pipeline holds, and the activations among it."""
    memory, moved = max(
        (_memory(cut, load, rates, rank, chunks, old=old), load.activations * cut.kept[rank])
        for load in loads
        for rank in range(cut.ranks)
    )
    # Backward asks for the activations of one chunk at a time. In a single chunk these are all of them:
    # nothing is known of the layers of a stage.
    return {"memory_bytes": memory, "moved": (moved,), "inner": (moved / chunks,)}


def _memory(cut: PipeCut, load: Load, rates: CostRates, rank: int, chunks: int, *, old: bool) -> float:
    """Return the bytes that a rank of the pipeline needs for a part."""
    tables = cut.tables(rank, rates, old=old) * (load.rows + load.halo) if chunks > 1 else 0.0
    return load.whole + (load.memory - load.whole) * cut.kept[rank] + tables


def _messages(rates: CostRates, number: int, ranks: int, sliced: Sliced | None, meetings: float) -> float:
    """Return the number of messages that a rank sends within its stage in an epoch, one after another.

    Args:
        rates: The measured costs of the model.
        number: The number of parts.
        ranks: The number of ranks that the stages are assigned to.
        sliced: The feature slices within a part; None without.
        meetings: How often a rank takes part in an exchange of the model, for each that it has.
    """
    tensor = 1 if sliced is None else sliced.count
    away = (number - 1) * tensor * rates.meetings
    transposes = 0 if sliced is None else (tensor - 1) * sliced.meetings
    # Each stage sums the gradients of its own weights alone.
    sums = (number * tensor - 1) * ROUNDS * ceil(len(rates.weights) / ranks)
    return (away + transposes) * meetings + sums
