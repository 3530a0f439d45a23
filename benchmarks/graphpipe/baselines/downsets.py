"""Down-sets: all places where a sequential pipeline can cut a graph of operators, or those along one order.

Where it sits: ``pipedream`` and ``piper`` search over all of them, ``bapipe`` along one order. The number of
all down-sets is exponential in the branches of a model, which ``planner.stages.graphpipe`` avoids.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kagome.errors import PlanError
from kagome.planner.stages.devices import COPIES, StageCost

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Downsets:
    """Sets of operators that contain all operators they read, by size: from the empty set to the whole graph.

    Args:
        sets: The sets as bit masks over the operators' numbers.
        compute: Seconds forward and backward of each set, by number of replicas: ``[sets, replicas]``.
        live: Bytes per sample that operators outside each set read from it, which a cut there sends.
        weights: Bytes of the weights of each set.
        kept: Bytes saved per sample by each set.
    """

    sets: tuple[int, ...]
    compute: Floats
    live: Floats
    weights: Floats
    kept: Floats

    def inside(self, number: int) -> npt.NDArray[np.intp]:
        """Return the numbers of the sets that are proper subsets of one."""
        whole = self.sets[number]
        return np.fromiter((other for other in range(number) if not self.sets[other] & ~whole), dtype=np.intp)


def downsets(cost: StageCost, micro_batch: int, *, most: int, deadline: float | None = None) -> Downsets:
    """Find all down-sets of a graph of operators.

    Args:
        cost: The cost of any set of operators as a stage.
        micro_batch: The number of samples in a micro-batch.
        most: The most down-sets to make.
        deadline: The latest time on the clock of ``time.monotonic``; None for no limit.

    Raises:
        PlanError: If there are more down-sets, or the deadline has passed.
    """
    operators = cost.graph.operators
    place = {operator.name: number for number, operator in enumerate(operators)}
    # Breadth first by size: a down-set grows by an operator that it lacks and whose reads it has.
    needs = [sum(1 << place[read] for read in set(operator.reads)) for operator in operators]
    found, edge = {0}, [0]
    while edge:
        grown: set[int] = set()
        for one in edge:
            for number, need in enumerate(needs):
                if not one >> number & 1 and not need & ~one:
                    grown.add(one | 1 << number)
        edge = [one for one in grown if one not in found]
        found.update(edge)
        # Checked once for each size: a limit in the inner loop would cost as much as the work.
        late = deadline is not None and time.monotonic() > deadline
        if len(found) > most or late:
            raise PlanError(
                f"{most} places to cut at most, as a sequential planner looks at each",
                f"{len(found)} sets of {len(operators)} operators" + (", and no more time" if late else ""),
                hint="take the planner graphpipe",
            )
    return _counted(cost, micro_batch, sorted(found, key=lambda one: (one.bit_count(), one)))


def prefixes(cost: StageCost, micro_batch: int) -> Downsets:
    """Return the down-sets along the order of the operators: the empty one, and one up to each operator.

    Args:
        cost: The cost of any set of operators as a stage.
        micro_batch: The number of samples in a micro-batch.
    """
    count = len(cost.graph.operators)
    return _counted(cost, micro_batch, [(1 << size) - 1 for size in range(count + 1)])


def _counted(cost: StageCost, micro_batch: int, sets: Sequence[int]) -> Downsets:
    """Make the down-sets with the costs of each."""
    operators = cost.graph.operators
    place = {operator.name: number for number, operator in enumerate(operators)}
    replicas = range(1, min(cost.devices.count, micro_batch) + 1)
    # Costs are sums over operators, so those of a stage are the difference of two down-sets' costs.
    seconds = np.array([[sum(cost.compute([o.name], d, micro_batch)) for d in replicas] for o in operators])
    member = np.array([[one >> number & 1 for number in range(len(operators))] for one in sets], dtype=float)
    # A value is sent by a cut if it is computed before it and read after it.
    readers = [sum(1 << place[name] for name in cost.graph.readers[o.name]) for o in operators]
    live = np.array(
        [
            sum(o.output for n, o in enumerate(operators) if one >> n & 1 and readers[n] & ~one)
            for one in sets
        ],
        dtype=float,
    )
    return Downsets(
        tuple(sets),
        member @ seconds,
        live,
        member @ np.array([o.weights for o in operators], dtype=float),
        member @ np.array([o.kept for o in operators], dtype=float),
    )


def per_sample(
    cost: StageCost, sets: Downsets, inner: npt.NDArray[np.intp], outer: int, replicas: int, micro_batch: int
) -> Floats:
    """Return the seconds per sample of the stages between some sets and a larger one, as ``StageCost`` does.

    In a sequential pipeline a stage also passes on the values that later stages read.
    """
    d, link = replicas, cost.devices
    compute = sets.compute[outer, d - 1] - sets.compute[inner, d - 1]
    carried = sets.live[inner] + sets.live[outer]
    # As StageCost.traffic, with the values passed on for later stages in addition: `live` counts them.
    traffic = np.where(carried > 0, link.latency + carried * micro_batch / d / link.bandwidth, 0.0)
    sync = 2 * (d - 1) / d * (sets.weights[outer] - sets.weights[inner]) / link.bandwidth
    return np.asarray(np.maximum(compute, traffic) / micro_batch + sync / cost.batch)


def memory(sets: Downsets, inner: npt.NDArray[np.intp], outer: int, replicas: int, held: float) -> Floats:
    """Return the bytes of each replica of the stages between some sets and a larger one.

    All replicas together hold ``held`` samples in flight.
    """
    kept = (sets.kept[outer] - sets.kept[inner]) * held / replicas
    return np.asarray(COPIES * (sets.weights[outer] - sets.weights[inner]) + kept)
