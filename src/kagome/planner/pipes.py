"""Pipes: what layers over stages would cost, with parts in each stage.

Where it sits: beside ``meshes``, whose arithmetic it shares; the schedule simulator tells how stages wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kagome.planner.cluster import Cluster
from kagome.planner.meshes import Candidate, Load, Rates, computing, halos, settings_of, summed
from kagome.schedule.actions import Action, Kind
from kagome.schedule.schedules import Shape, fill_drain
from kagome.schedule.schedules import exact as exact_program
from kagome.schedule.simulate import simulate


@dataclass(frozen=True)
class Cut:
    """A model's layers over stages.

    Args:
        shares: Of the computing, by stage.
        crossing: Bytes of all messages between stages of an epoch, of the whole graph.
        reads: Of neighbours, by stage.
    """

    shares: tuple[float, ...]
    crossing: float
    reads: tuple[int, ...]


CHUNK = 2.3e-3
"""Seconds that Python takes for a chunk and a read of neighbours, both ways (benchmarks/pipeline)."""
TABLES = 1.5
"""A stage keeps rows of each read beside its activations: so many times what its layers alone keep."""


def pipes(
    cut: Cut,
    number: int,
    loads: Sequence[Load],
    rates: Rates,
    cluster: Cluster,
    uncertain: float,
    *,
    exact: bool,
) -> Candidate:
    """Layers over stages, the graph in chunks; in each stage so many parts.

    Args:
        cut: The layers.
        number: Parts.
        loads: Of each part; one stands for all where they are alike.
        rates: Of the model.
        cluster: Where it runs.
        uncertain: By which share the halo may be off.
        exact: Layer by layer over all chunks, with nothing old.
    """
    stages = len(cut.shares)
    chunks = 4 * stages
    compute = max(computing(rates, load.rows, load.edges) for load in loads) / cluster.pace(stages * number)
    link = cluster.bandwidth(stages * number)
    message = cut.crossing / max(stages - 1, 1) / 2 / number / chunks / link + cluster.latency
    most, halo = halos(rates, loads, number)

    def seconds(action: Action) -> float:
        pieces = cut.reads[action.stage] if exact else 1
        busy = cut.shares[action.stage] * compute / chunks / pieces + CHUNK * cut.reads[action.stage] / pieces
        return busy * (1 if action.kind is Kind.F else 2) / 3

    shape = Shape(stages, tuple(range(chunks)))
    programs = exact_program(shape, [max(reads, 1) for reads in cut.reads]) if exact else fill_drain(shape)
    run = simulate(programs, seconds, transfer=lambda action: message)
    sums = summed(number, rates.weights, stages)
    waits = (most / stages + sums) / link
    busy = max(map(run.busy, range(stages)))
    settings = settings_of(False, pipe=stages, graph=number)
    return Candidate(
        {**settings, "cross_chunk": "exact"} if exact else settings,
        exact,
        run.seconds + waits,
        busy,
        run.seconds + waits - busy,
        {"stage": round(cut.crossing), "halo": round(halo), "weights": round(sums * number * stages)},
        max(load.memory for load in loads) * max(cut.shares) * TABLES,
        uncertain if number > 1 else 0.0,
        run=run,
    )
