"""Pieces: what one stage of a DAG runs, and what it takes and gives.

Where it sits: ``graph`` cuts a model into them; ``run.dag`` and ``profile.operators`` run them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from kagome.model.trace.graph import Step


@dataclass(frozen=True, eq=False)
class Piece:
    """What one stage runs.

    Args:
        number: Counted from 0.
        steps: In order, those computed again included.
        takes: By earlier piece, the values that it takes from it.
        gives: By later piece, the values that it gives to it.
        inputs: Names of the inputs that it reads.
        output: Name of the model's output, if it makes it; else None.
    """

    number: int
    steps: Sequence[Step]
    takes: Mapping[int, tuple[str, ...]]
    gives: Mapping[int, tuple[str, ...]]
    inputs: Sequence[str]
    output: str | None

    @cached_property
    def parameters(self) -> tuple[str, ...]:
        """Full names of the weights that it uses."""
        return _joined(step.parameters for step in self.steps)

    @cached_property
    def buffers(self) -> tuple[str, ...]:
        """Full names of the buffers that it uses."""
        return _joined(step.buffers for step in self.steps)

    @cached_property
    def copied(self) -> frozenset[str]:
        """What it takes or reads and changes in place."""
        own = {step.name for step in self.steps}
        return frozenset(name for step in self.steps for name in step.changes if name not in own)

    @cached_property
    def taken(self) -> tuple[str, ...]:
        """All that it takes."""
        return _joined(self.takes.values())

    @cached_property
    def given(self) -> tuple[str, ...]:
        """All that it gives, and the output, each once."""
        return _joined([*self.gives.values(), () if self.output is None else (self.output,)])


def _joined(names: Iterable[Iterable[str]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for each in names for name in each))
