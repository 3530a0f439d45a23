"""Pipes: what layers over stages would cost, with parts in each stage.

Where it sits: beside ``candidates``; the schedule simulator tells how stages wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kagome.config import default_chunks
from kagome.planner.candidates import Candidate, settings_of
from kagome.planner.cluster import Cluster
from kagome.planner.cost_model import CostRates, Load, Sliced, computing, halos, summed
from kagome.schedule.actions import Action, ActionKind
from kagome.schedule.schedules import Shape, exact as exact_program, fill_drain
from kagome.schedule.simulator import simulate

HALVES = 2
"""Rows that a stage with chunks keeps for each of a part and each read: of this epoch and of one before. With
history as many of gradients, else one."""


@dataclass(frozen=True)
class PipeCut:
    """A model's layers over stages.

    Args:
        shares: Of the computing, by stage.
        crossing: Bytes of all messages between stages of an epoch, of the whole graph.
        reads: Of neighbours, by stage.
        kept: Of what autograd keeps of a forward, by rank; what crosses between two lies with both.
        widths: Bytes of a row at all reads of neighbours, and of its gradients, by rank; None if not known.
        dealt: Stages of each rank, dealt round.
        chunks: Whether chunks can pass it: every layer reads by the edges into a vertex alone.
    """

    shares: tuple[float, ...]
    crossing: float
    reads: tuple[int, ...]
    kept: tuple[float, ...]
    widths: tuple[tuple[float, float], ...] | None
    dealt: int = 1
    chunks: bool = True

    @property
    def ranks(self) -> int:
        """Those that the stages are dealt to."""
        return len(self.shares) // self.dealt

    def tables(self, rank: int, rates: CostRates, *, old: bool) -> float:
        """Bytes that a rank with chunks keeps of a row, for its reads.

        Args:
            rank: Which.
            rates: Of the whole model: so much it may be where widths are not known.
            old: Whether gradients of an epoch before are kept too.
        """
        forward, backward = (rates.forward, rates.backward) if self.widths is None else self.widths[rank]
        return HALVES * forward + (HALVES if old else 1) * backward


CHUNK = 6e-4
"""Seconds that a core takes for a chunk and a read of neighbours, both ways, beyond its rows: 0.55 to 0.65 ms
of three models (benchmarks/pipeline/chunk.py)."""
LOSS = 16.0
"""Bytes of the sum of the loss, and of who was asked to stop; elsewhere they go along with gradients."""
FRESH = 2 / 3
"""Of the rows that cross between parts in chunks with history, those whose gradients go back: a row is fresh
for a chunk that comes after its own, so ``1 - 1 / (r + 1)`` of those that r chunks read; two on average."""


def pipes(
    cut: PipeCut,
    number: int,
    loads: Sequence[Load],
    rates: CostRates,
    cluster: Cluster,
    uncertain: float,
    *,
    chunks: int,
    exact: bool = False,
    sliced: Sliced | None = None,
) -> Candidate:
    """Layers over stages, the graph in chunks; in each stage so many parts, or parts in feature slices.

    Args:
        cut: The layers.
        number: Parts.
        loads: Of each part, a rank's memory; one stands for all where they are alike.
        rates: Of the model.
        cluster: Where it runs.
        uncertain: By which share the halo may be off.
        chunks: Of each part; one chunk knows all its neighbours.
        exact: Layer by layer over all chunks, with nothing old.
        sliced: How features are sliced within a part.
    """
    stages, ranks, tensor = len(cut.shares), cut.ranks, 1 if sliced is None else sliced.count
    size = ranks * number * tensor
    old = chunks > 1 and not exact
    pace = cluster.pace(size)
    most, halo = halos(replace(rates, backward=rates.backward * FRESH) if old else rates, loads, number)
    sent = {"stage": round(cut.crossing), "halo": round(halo)}
    sent |= {} if sliced is None else {"transpose": round(sliced.sent)}
    compute = max(
        sliced.computing(load)
        if sliced is not None
        else computing(rates, load.rows, load.edges, load.sent + load.halo)
        for load in loads
    )
    compute /= pace
    python = CHUNK / min(pace, 1.0)  # a GPU does not hasten it
    link = cluster.bandwidth(size)
    message = cut.crossing / max(stages - 1, 1) / 2 / number / tensor / chunks / link + cluster.latency

    def seconds(action: Action) -> float:
        pieces = cut.reads[action.stage] if exact else 1
        reads = cut.reads[action.stage]
        busy = cut.shares[action.stage] * compute / chunks / pieces + python * reads / pieces
        return busy * (1 if action.kind is ActionKind.F else 2) / 3

    shape = Shape(stages, tuple(range(chunks)), ranks=ranks)
    programs = exact_program(shape, [max(reads, 1) for reads in cut.reads]) if exact else fill_drain(shape)
    run = simulate(programs, seconds, transfer=lambda action: message)
    sums = summed(number * tensor, rates.weights, ranks)
    # Stages wait for each other's messages too where there is one chunk.
    waits = most / tensor / (1 if chunks == 1 else ranks) / link + sums / link
    sent |= {"weights": round(sums * size), "other": round(summed(size, (LOSS,)) * size)}
    if sliced is not None:
        waits += sliced.sent / number / tensor / cluster.bandwidth(tensor)
    busy = max(map(run.busy, range(ranks)))
    settings = settings_of(False, pipe=ranks, stages_per_rank=cut.dealt, graph=number, tensor=tensor)
    settings |= {"chunks": chunks} if chunks != default_chunks(ranks, tensor) else {}
    settings |= {"cross_chunk": "exact"} if exact else {}
    return Candidate(
        settings,
        exact or chunks == 1,
        run.seconds + waits,
        busy,
        run.seconds + waits - busy,
        sent,
        max(
            load.whole
            + (load.memory - load.whole) * cut.kept[rank]
            + (cut.tables(rank, rates, old=old) * (load.rows + load.halo) if chunks > 1 else 0.0)
            for load in loads
            for rank in range(ranks)
        ),
        uncertain if number > 1 else 0.0,
        run=run,
    )
