"""Devices: what stage planners know of the machines, and what a stage costs on them.

Where it sits: under ``graphpipe``, ``planner.baselines.pipedream`` and ``planner.baselines.piper``, so that
all three count alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from kagome.planner.stages.operator_costs import OperatorGraph, at

COPIES = 4
"""Of the weights: themselves, their gradients, and two moments of Adam."""


@dataclass(frozen=True)
class Devices:
    """Equal devices.

    Args:
        count: How many.
        memory: Bytes of each.
        bandwidth: Bytes a second between two of them.
        latency: Seconds of a message.
    """

    count: int
    memory: float
    bandwidth: float
    latency: float = 0.0


@dataclass(frozen=True, eq=False)
class StageCost:
    """What any set of operators costs as one stage.

    Args:
        graph: The operators.
        devices: What they run on.
        batch: Samples of a batch.
    """

    graph: OperatorGraph
    devices: Devices
    batch: int

    @cached_property
    def _tables(self) -> dict[tuple[str, int], tuple[float, float]]:
        return {}

    def passes(self, name: str, samples: int) -> tuple[float, float]:
        """Seconds of an operator forward and backward."""
        found = self._tables.get((name, samples))
        if found is None:
            operator = self.graph.by_name[name]
            found = at(operator.forward, samples), at(operator.backward, samples)
            self._tables[name, samples] = found
        return found

    def compute(self, names: Sequence[str], devices: int, micro_batch: int) -> tuple[float, float]:
        """Seconds of a micro-batch forward and backward, on each of some replicas."""
        each = [self.passes(name, -(-micro_batch // devices)) for name in names]
        return sum(f for f, _ in each), sum(b for _, b in each)

    def traffic(self, names: Sequence[str], devices: int, micro_batch: int) -> float:
        """Seconds that the busier of a replica's links, in or out, is taken by a micro-batch."""
        taken, given = self.graph.crossing(names)
        if not taken and not given:
            return 0.0
        # Values go one way and gradients the other: each link carries both.
        return self.devices.latency + (taken + given) * micro_batch / devices / self.devices.bandwidth

    def sync(self, names: Sequence[str], devices: int) -> float:
        """Seconds that replicas sum their gradients, once a batch."""
        weights = sum(self.graph.by_name[name].weights for name in names)
        return 2 * (devices - 1) / devices * weights / self.devices.bandwidth

    def per_sample(self, names: Sequence[str], devices: int, micro_batch: int) -> float:
        """Seconds a sample of a stage whose transfers go on beside its computation.

        Source: GraphPipe, time per sample (TPS).
        """
        busy = max(sum(self.compute(names, devices, micro_batch)), self.traffic(names, devices, micro_batch))
        return busy / micro_batch + self.sync(names, devices) / self.batch

    def fits(self, names: Sequence[str], devices: int, micro_batch: int) -> bool:
        """Whether each replica takes as many samples at a time as its operators need."""
        return micro_batch // devices >= max(self.graph.by_name[name].least for name in names)

    def memory(self, names: Sequence[str], devices: int, held: int) -> float:
        """Bytes of each replica that holds its share of so many samples."""
        operators = [self.graph.by_name[name] for name in names]
        kept = sum(operator.kept for operator in operators)
        return COPIES * sum(operator.weights for operator in operators) + kept * held / devices
