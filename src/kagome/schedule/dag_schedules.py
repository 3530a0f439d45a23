"""DAG schedules: programs for stages that form a DAG, each with its own micro-batch size and its own k.

Where it sits: beside ``schedules``. ``planner`` asks how many samples a stage must hold; ``pipelining.dag``
runs the programs.

::

    samples      0    1    2    3    4    5    6    7        stage 0 in micro-batches of 2, stage 1 of 4:
    stage 0   [ 0F0    ][ 0F1    ][ 0F2    ][ 0F3    ]       a message has the smaller of both sizes, and
    messages    u = 0      u = 1     u = 2     u = 3         its number counts in them
    stage 1   [        1F0       ][        1F1       ]

Source: GraphPipe, ASPLOS 2025, static scheduler; kFkB per stage, warm-up by what successors hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kagome.errors import ScheduleError
from kagome.schedule.actions import Action, ActionKind, Programs

Link = tuple[int, int]
"""A pair of stages: the source, and the stage that reads its output."""


@dataclass(frozen=True)
class Turns:
    """How a stage processes the samples of a batch.

    Args:
        micro_batch: Samples in a micro-batch.
        k: Micro-batches that go forward, and then backward, in one turn.
    """

    micro_batch: int
    k: int = 1


@dataclass(frozen=True)
class DagShape:
    """The stages and links that programs of a DAG are generated for.

    Args:
        batch: Samples in a batch.
        stages: How each stage processes them; sources come before their readers.
        links: Pairs of stages of which the second reads the first one's output.

    Raises:
        ScheduleError: If a batch is not a whole number of micro-batches, if of two linked stages neither
            micro-batch divides the other, or if a link leads backward.
    """

    batch: int
    stages: tuple[Turns, ...]
    links: tuple[Link, ...]

    def __post_init__(self) -> None:
        for stage, turns in enumerate(self.stages):
            if turns.micro_batch < 1 or turns.k < 1 or self.batch % turns.micro_batch:
                raise ScheduleError(
                    f"a batch of {self.batch} samples is a whole number of micro-batches, k is 1 or more",
                    f"micro-batches of {turns.micro_batch} samples, k = {turns.k}",
                    where=f"stage {stage}",
                    hint="take a micro-batch that divides the batch",
                )
        for one, other in self.links:
            if not 0 <= one < other < len(self.stages):
                raise ScheduleError(
                    f"a link leads from a stage to a later one of {len(self.stages)}",
                    f"found {one} -> {other}",
                )
            sizes = self.stages[one].micro_batch, self.stages[other].micro_batch
            if max(sizes) % min(sizes):
                raise ScheduleError(
                    "of two linked stages one's micro-batch divides the other's",
                    f"{sizes[0]} and {sizes[1]} samples",
                    where=f"stages {one} and {other}",
                    hint="take powers of two",
                )

    def sources(self, stage: int) -> list[int]:
        """Return the stages whose output a stage reads."""
        return sorted({one for one, other in self.links if other == stage})

    def readers(self, stage: int) -> list[int]:
        """Return the stages that read a stage's output."""
        return sorted({other for one, other in self.links if one == stage})

    def unit(self, one: int, other: int) -> int:
        """Return the samples of a message between two stages."""
        return min(self.stages[one].micro_batch, self.stages[other].micro_batch)


def window(turns: Turns, readers: Sequence[tuple[int, Turns]], batch: int) -> int:
    """Return the most samples that a stage must hold so that none of its readers waits for it.

    Args:
        turns: How the stage processes samples.
        readers: For each reader, the samples that it holds and how it processes them.
        batch: Samples in a batch: no stage holds more.

    Returns:
        One turn of its own plus the most that a reader holds, in whole micro-batches. In a chain of S stages
        of one size and k = 1 it is ``S - s`` micro-batches.

    Source: GraphPipe, in-flight samples under kFkB.
    """
    size, found = turns.micro_batch, turns.k * turns.micro_batch
    for held, reader in readers:
        found = max(found, -(-held // size) * size + max(turns.k * size, reader.micro_batch))
    return min(found, batch)


def windows(shape: DagShape) -> list[int]:
    """Return the most samples that each stage holds."""
    found = [0] * len(shape.stages)
    for stage in range(len(shape.stages) - 1, -1, -1):
        readers = [(found[other], shape.stages[other]) for other in shape.readers(stage)]
        found[stage] = window(shape.stages[stage], readers, shape.batch)
    return found


def dag(shape: DagShape) -> Programs:
    """Generate programs in which each stage fills its window, then alternates k backward and k forward.

    For independent samples only.

    Cost: stage s holds at most :func:`windows` samples.
    """
    held = windows(shape)

    def program(stage: int) -> Iterator[Action]:
        turns = shape.stages[stage]
        count = shape.batch // turns.micro_batch
        begun = held[stage] // turns.micro_batch
        for chunk in range(begun):
            yield from _forward(shape, stage, chunk)
        done = 0
        while done < count:
            for chunk in range(done, min(done + turns.k, count)):
                yield from _backward(shape, stage, chunk)
            done = min(done + turns.k, count)
            for chunk in range(begun, min(begun + turns.k, count)):
                yield from _forward(shape, stage, chunk)
            begun = min(begun + turns.k, count)

    return tuple(tuple(program(stage)) for stage in range(len(shape.stages)))


def covered(shape: DagShape, stage: int, other: int, chunk: int) -> range:
    """Return the messages between two stages that hold samples of one micro-batch of the first."""
    each = shape.stages[stage].micro_batch // shape.unit(stage, other)
    return range(chunk * each, (chunk + 1) * each)


def _forward(shape: DagShape, stage: int, chunk: int) -> Iterator[Action]:
    for one in shape.sources(stage):
        for unit in covered(shape, stage, one, chunk):
            yield Action(stage, ActionKind.RECV_F, unit, None, one)
    yield Action(stage, ActionKind.F, chunk)
    for other in shape.readers(stage):
        for unit in covered(shape, stage, other, chunk):
            yield Action(stage, ActionKind.SEND_F, unit, None, other)


def _backward(shape: DagShape, stage: int, chunk: int) -> Iterator[Action]:
    for other in reversed(shape.readers(stage)):
        for unit in covered(shape, stage, other, chunk):
            yield Action(stage, ActionKind.RECV_B, unit, None, other)
    yield Action(stage, ActionKind.B, chunk)
    for one in reversed(shape.sources(stage)):
        for unit in covered(shape, stage, one, chunk):
            yield Action(stage, ActionKind.SEND_B, unit, None, one)
