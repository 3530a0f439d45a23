"""Pieces: the steps that one stage of a DAG pipeline runs, with the values it takes and gives.

Where it sits: ``graph`` cuts a model into pieces; ``pipelining.dag`` and ``profile.operators`` run them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from kagome.model.trace.graph import Step


@dataclass(frozen=True, eq=False)
class Piece:
    """The steps of one stage, with the values that it exchanges with other stages.

    Args:
        number: Number of the piece, counted from 0.
        steps: Its steps in order, including those that other pieces compute too.
        takes: Values that it takes, by the earlier piece that gives them.
        gives: Values that it gives, by the later piece that takes them.
        inputs: Names of the inputs that it reads.
        output: Name of the model's output if the piece computes it; else None.
    """

    number: int
    steps: Sequence[Step]
    takes: Mapping[int, tuple[str, ...]]
    gives: Mapping[int, tuple[str, ...]]
    inputs: Sequence[str]
    output: str | None

    @cached_property
    def parameters(self) -> tuple[str, ...]:
        """Full names of the weights that the piece uses."""
        return _joined(step.parameters for step in self.steps)

    @cached_property
    def buffers(self) -> tuple[str, ...]:
        """Full names of the buffers that the piece uses."""
        return _joined(step.buffers for step in self.steps)

    @cached_property
    def copied(self) -> frozenset[str]:
        """Names of values from other pieces, and of inputs, that it changes in place."""
        own = {step.name for step in self.steps}
        return frozenset(name for step in self.steps for name in step.changes if name not in own)

    @cached_property
    def taken(self) -> tuple[str, ...]:
        """Names of all values that it takes."""
        return _joined(self.takes.values())

    @cached_property
    def given(self) -> tuple[str, ...]:
        """Names of all values that it gives, and of the output, each once."""
        return _joined([*self.gives.values(), () if self.output is None else (self.output,)])


def _joined(names: Iterable[Iterable[str]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for each in names for name in each))
