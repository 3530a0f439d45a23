"""Devices: the machines that stage planners plan for, and the cost of a stage on them.

Where it sits: ``graphpipe`` and the planners that it is compared with use it, so that they count costs alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from kagome.planner.stages.operator_costs import OperatorGraph, at

COPIES = 4
"""Copies of the weights in memory: the weights, their gradients, and the two moments of Adam."""


@dataclass(frozen=True)
class Devices:
    """A number of equal devices, all linked alike.

    Args:
        count: The number of devices.
        memory: Bytes of memory of each.
        bandwidth: Bytes per second between two of them.
        latency: Fixed seconds of a message.
    """

    count: int
    memory: float
    bandwidth: float
    latency: float = 0.0


@dataclass(frozen=True, eq=False)
class StageCost:
    """The cost of any set of operators as one stage.

    Args:
        graph: The graph of operators.
        devices: The devices that they run on.
        batch: The number of samples in a batch.
    """

    graph: OperatorGraph
    devices: Devices
    batch: int

    @cached_property
    def _tables(self) -> dict[tuple[str, int], tuple[float, float]]:
        return {}

    @cached_property
    def _split(self) -> dict[tuple[str, int], tuple[float, float]]:
        return {}

    def passes(self, name: str, samples: int) -> tuple[float, float]:
        """Return the seconds of an operator forward and backward."""
        # A search asks for the same operators and sizes over and over, so interpolated values are kept.
        found = self._tables.get((name, samples))
        if found is None:
            operator = self.graph.by_name[name]
            found = at(operator.forward, samples), at(operator.backward, samples)
            self._tables[name, samples] = found
        return found

    def _halves(self, name: str, samples: int) -> tuple[float, float]:
        found = self._split.get((name, samples))
        if found is None:
            found = self._split[name, samples] = self.graph.by_name[name].halves(samples)
        return found

    def compute(self, names: Sequence[str], devices: int, micro_batch: int) -> tuple[float, float]:
        """Return the seconds of a micro-batch forward and backward, on each of some replicas."""
        # Rounded up: the replica with the most samples is the slowest, and all wait for it.
        each = [self.passes(name, -(-micro_batch // devices)) for name in names]
        return sum(f for f, _ in each), sum(b for _, b in each)

    def halves(self, names: Sequence[str], devices: int, micro_batch: int) -> tuple[float, float]:
        """Return the seconds of a micro-batch's backward in two: gradients of inputs, then the rest.

        The first half computes what other stages wait for. It goes through operators that read another stage,
        directly or through operators of this one; all others have their whole backward in the second half.
        """
        inside, through = set(names), set[str]()
        inputs = rest = 0.0
        for operator in self.graph.operators:  # in topological order, so what it reads is known
            if operator.name not in inside:
                continue
            first, second = 0.0, self.passes(operator.name, -(-micro_batch // devices))[1]
            if any(read not in inside or read in through for read in operator.reads):
                through.add(operator.name)
                first, second = self._halves(operator.name, -(-micro_batch // devices))
            inputs, rest = inputs + first, rest + second
        return inputs, rest

    def traffic(self, names: Sequence[str], devices: int, micro_batch: int) -> float:
        """Return the seconds for which a micro-batch occupies the busier link of a replica, in or out."""
        taken, given = self.graph.boundary_bytes(names)
        if not taken and not given:
            return 0.0
        # Values go one way and their gradients the other way, so each link carries both.
        return self.devices.latency + (taken + given) * micro_batch / devices / self.devices.bandwidth

    def sync(self, names: Sequence[str], devices: int) -> float:
        """Return the seconds in which replicas sum their gradients, once per batch."""
        weights = sum(self.graph.by_name[name].weights for name in names)
        # A reduce-scatter and an all-gather, each of (d - 1) / d of the weights for each replica.
        return 2 * (devices - 1) / devices * weights / self.devices.bandwidth

    def per_sample(self, names: Sequence[str], devices: int, micro_batch: int) -> float:
        """Return the seconds per sample of a stage whose transfers overlap with its computation.

        Source: GraphPipe, time per sample (TPS).
        """
        # Weights are summed once a batch, so each sample bears its share of that.
        busy = max(sum(self.compute(names, devices, micro_batch)), self.traffic(names, devices, micro_batch))
        return busy / micro_batch + self.sync(names, devices) / self.batch

    def fits(self, names: Sequence[str], devices: int, micro_batch: int) -> bool:
        """Return whether each replica takes as many samples at a time as its operators need."""
        # Rounded down: the replica with the fewest samples must have enough.
        return micro_batch // devices >= max(self.graph.by_name[name].least for name in names)

    def memory(self, names: Sequence[str], devices: int, held: int) -> float:
        """Return the bytes of each replica if all replicas together hold ``held`` samples."""
        operators = [self.graph.by_name[name] for name in names]
        kept = sum(operator.kept for operator in operators)
        return COPIES * sum(operator.weights for operator in operators) + kept * held / devices
