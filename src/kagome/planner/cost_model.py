"""Costs: what a model was measured to take by row and edge, and what a part of a graph asks of its rank.

Where it sits: ``candidates`` and ``pipe_candidates`` make predictions of it; ``autoplan.workload`` measures;
loads no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

ONE_ROUND = 2**18
"""A sum goes in one round up to so many bytes of all ranks together: see ``comm.summing``."""


@dataclass(frozen=True)
class Load:
    """What one part asks of its rank.

    Args:
        rows: Own rows.
        edges: In-edges.
        sent: Rows sent to peers, forward.
        halo: Rows read of peers, of which gradients go back.
        memory: Bytes held.
        whole: Of them, what each stage of a pipeline holds whole: data, tables, weights.
    """

    rows: float
    edges: float
    sent: float
    halo: float
    memory: float
    whole: float = 0.0


@dataclass(frozen=True)
class Timed:
    """What a rank's epoch takes here, beside the bytes of its messages; nothing is below 0.

    Args:
        seconds: Of one that computes nothing.
        row: Seconds of a row.
        edge: Seconds of an edge.
        crossed: Seconds of a row that is sent to a peer or read of one.
        meanwhile: Share of its seconds in which rows travel that nobody waits for yet.
        uneven: Seconds of whoever takes longest from one exchange to the next, over the slowest rank's.
        meetings: Exchanges and sums of all ranks.
        spread: By which share two measurements of the same differed.
    """

    seconds: float
    row: float
    edge: float
    crossed: float
    meanwhile: float
    uneven: float
    meetings: int
    spread: float = field(default=0.0, kw_only=True)


@dataclass(frozen=True)
class CostRates(Timed):
    """What a model costs here, by row and edge: beside its seconds what crosses.

    Args:
        forward: Bytes that cross for a row that is sent, forward.
        backward: Bytes that cross for a halo row, backward.
        weights: Bytes of gradients, of each message that carries some.
        coded: ``forward`` and ``backward`` with one bit a number.
        coding: Seconds to code a byte of them, and to restore it.
        alone: How many times as fast as that one rank computes that has no peers, and all of this machine's
            cores.
    """

    forward: float
    backward: float
    weights: tuple[float, ...]
    coded: tuple[float, float] = (0.0, 0.0)
    coding: float = 0.0
    alone: float = 1.0


@dataclass(frozen=True)
class Sliced:
    """Feature slices within each part.

    Args:
        count: How many.
        two: Seconds of the epoch of a rank in two: of nothing, of a row and of an edge of the whole part.
        four: The same in four.
        meetings: Exchanges and sums of all ranks, but for those of gradients.
        sent: Bytes of all transposes of an epoch, of all ranks.
    """

    count: int
    two: tuple[float, float, float]
    four: tuple[float, float, float]
    meetings: int
    sent: float

    def computing(self, load: Load) -> float:
        """Seconds of an epoch of one of them: ``a + b / T``, where ``a`` is what has no columns to cut."""
        units = (1.0, load.rows, load.edges)
        two, four = (
            sum(rate * unit for rate, unit in zip(rates, units, strict=True))
            for rates in (self.two, self.four)
        )
        alike = min(max(0.0, 2 * four - two), four)
        return alike + 4 * (four - alike) / self.count


def summed(ranks: int, messages: Sequence[float], stages: int = 1) -> float:
    """Bytes that each rank sends for sums of messages: in one round if one is small, else in two.

    Args:
        ranks: That sum.
        messages: Bytes of each.
        stages: That share them.
    """
    total = 0.0
    for message in messages:
        size = message / stages
        one_round = ranks == 2 or ranks * size <= ONE_ROUND
        total += (ranks - 1) * size if one_round else 2 * (ranks - 1) / ranks * size
    return total


def halos(rates: CostRates, loads: Sequence[Load], parts: int) -> tuple[float, float]:
    """Bytes that all wait for, and all of them; one load stands for all parts if they are alike.

    All wait at each exchange for the busiest link, in or out, forward as backward.
    """
    most = (rates.forward + rates.backward) * max(max(load.sent, load.halo) for load in loads)
    each = [rates.forward * load.sent + rates.backward * load.halo for load in loads]
    return most, sum(each) if len(each) == parts else each[0] * parts


def computing(rates: CostRates, rows: float, edges: float, crossed: float = 0.0) -> float:
    """Seconds of an epoch on so many rows and edges, with so many rows that cross, where it was measured."""
    return rates.seconds + rates.row * rows + rates.edge * edges + rates.crossed * crossed
