"""Operator costs: a model as a DAG of named operators with the costs of each, measured or declared.

Where it sits: it is the input of every stage planner. ``profile.operators`` measures it on a module;
benchmarks declare it.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property

from kagome.errors import PlanError

Table = tuple[tuple[int, float], ...]
"""Pairs of a number of samples and seconds, at ascending sizes."""


@dataclass(frozen=True)
class Operator:
    """One operator of a model, with its costs.

    Args:
        name: The name, unique in its graph.
        reads: The operators whose output it reads.
        forward: Pairs of a number of samples and the seconds forward, measured at ascending sizes.
        backward: Pairs of a number of samples and the seconds backward, at the same sizes.
        weights: Bytes of its weights.
        output: Bytes of its output per sample.
        kept: Bytes saved for backward per sample.
        least: The fewest samples that a replica must take at a time; a batch norm needs two.
        first_half: Pairs of a number of samples and the seconds of a backward's first half, if it is done in
            two; () if that was not measured.
        second_half: The same of the second half.
    """

    name: str
    reads: tuple[str, ...]
    forward: Table
    backward: Table
    weights: int = 0
    output: int = 0
    kept: int = 0
    least: int = 1
    first_half: Table = ()
    second_half: Table = ()

    def halves(self, samples: float) -> tuple[float, float]:
        """Return the seconds of a backward in two: gradients of what the operator reads, then the rest."""
        if self.first_half:
            return at(self.first_half, samples), at(self.second_half, samples)
        # The two gradients of a matrix product cost the same. Without weights there is one gradient only.
        whole = at(self.backward, samples)
        return (whole / 2, whole / 2) if self.weights else (whole, 0.0)

    def seconds(self, samples: float) -> float:
        """Return the seconds forward and backward together for a number of samples; see :func:`at`."""
        return at(self.forward, samples) + at(self.backward, samples)


def at(table: Table, samples: float) -> float:
    """Return a table's value at a number of samples, linear between sizes and in proportion beyond the last.

    Below the first size it is the first value: a device is not faster with fewer samples than it computes at
    once.
    """
    # seconds
    #    |           /      beyond the last size: in proportion to the samples
    #    |       ___/       between sizes: linear
    #    |______/           below the first size: its value
    #    +------------ samples
    sizes = [size for size, _ in table]
    place = bisect_left(sizes, samples)
    if place == 0:
        return table[0][1]
    if place == len(table):
        size, seconds = table[-1]
        return seconds * samples / size
    (low, before), (high, after) = table[place - 1], table[place]
    return before + (after - before) * (samples - low) / (high - low)


@dataclass(frozen=True)
class OperatorGraph:
    """A DAG of operators in topological order.

    Args:
        operators: The operators, each after those that it reads.

    Raises:
        PlanError: If a name appears twice, or an operator reads one that does not come before it.
    """

    operators: tuple[Operator, ...]

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for operator in self.operators:
            # Planners rely on topological order: one pass in order then finds everything below an operator.
            missing = [name for name in operator.reads if name not in seen]
            if operator.name in seen or missing:
                raise PlanError(
                    "operators with names of their own, each behind those it reads",
                    f"{operator.name!r} twice" if operator.name in seen else f"{missing} behind it",
                    where=f"operator {operator.name!r}",
                    hint="sort them so that each comes after its reads",
                )
            if not operator.forward or len(operator.forward) != len(operator.backward):
                raise PlanError(
                    "an operator with seconds forward and backward at the same sizes",
                    f"{len(operator.forward)} and {len(operator.backward)}",
                    where=f"operator {operator.name!r}",
                )
            seen.add(operator.name)

    @cached_property
    def by_name(self) -> Mapping[str, Operator]:
        """The operators, keyed by name."""
        return {operator.name: operator for operator in self.operators}

    @cached_property
    def readers(self) -> Mapping[str, tuple[str, ...]]:
        """For each operator, by name, the operators that read it."""
        found: dict[str, list[str]] = {operator.name: [] for operator in self.operators}
        for operator in self.operators:
            # An operator may read another twice (x + x), and is still one reader.
            for name in dict.fromkeys(operator.reads):
                found[name].append(operator.name)
        return {name: tuple(names) for name, names in found.items()}

    def boundary_bytes(self, inside: Iterable[str]) -> tuple[int, int]:
        """Return the bytes per sample that a set of operators receives from others, and sends to others."""
        names = set(inside)
        # A value counts once, however many operators read it on either side.
        taken = {read for name in names for read in self.by_name[name].reads if read not in names}
        given = [name for name in names if any(reader not in names for reader in self.readers[name])]
        return sum(self.by_name[name].output for name in taken), sum(self.by_name[n].output for n in given)

    def to_json(self) -> str:
        """Return the graph as JSON text."""
        return json.dumps([asdict(operator) for operator in self.operators], indent=1)

    @staticmethod
    def from_json(text: str) -> OperatorGraph:
        """Read a graph from JSON text."""
        return OperatorGraph(tuple(_operator(each) for each in json.loads(text)))


def _operator(record: Mapping[str, object]) -> Operator:
    def pairs(value: object) -> Table:
        assert isinstance(value, list)
        return tuple((int(size), float(seconds)) for size, seconds in value)

    fields = dict(record)
    # JSON has lists only, and an Operator must be hashable.
    fields["reads"] = tuple(fields["reads"])  # type: ignore[arg-type]
    for name in ("forward", "backward", "first_half", "second_half"):
        fields[name] = pairs(fields.get(name, []))
    return Operator(**fields)  # type: ignore[arg-type]
