"""Schedules: generators of programs for fill-drain, 1F1B, kFkB, and the exact order layer by layer.

Where it sits: pure functions. ``pipelining`` asks for one by name; ``planner`` tries them all in
``simulator``.

::

    fill-drain, 2 stages, chunks in the order 1 0      stage 1 starts when stage 0 has done one chunk,
      0: 1 0 . . 0 1                                   backward takes the chunks in reverse: what was
      1: . 1 0 0 1 .                                   fresh in forward is known in backward

    1F1B                                               at most S - s chunks are held by stage s
      0: 0 1 . 0 2 1 3 2 . 3
      1: . 0 0 1 1 2 2 3 3 .

    exact                                              all chunks pass a piece of the layers before any
      0: 0.0 1.0 0.1 1.1 ...                           passes the next: every neighbour's row is fresh

    fill-drain, 4 stages dealt to 2 ranks              all chunks pass a rank's first stage, then its next
      0: stage 0: 0 1 2  stage 2: 0 1 2                one: it fills in the time of a stage of few layers;
      1:    stage 1: 0 1 2  stage 3: 0 1 2             chunks beyond the ranks give messages time to travel
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kagome.errors import ScheduleError
from kagome.schedule.actions import Action, ActionKind, Program, Programs

Link = tuple[int, int]
"""A pair of stages: the source, and the stage that reads its output."""


@dataclass(frozen=True)
class Shape:
    """The stages, chunks, links and ranks that a schedule is generated for.

    Args:
        stages: The number of stages.
        order: The chunks in the order in which they are processed.
        links: Pairs of stages of which the second reads the first one's output; by default each stage reads
            the one before it.
        ranks: The number of ranks, to which the stages are assigned in rotation; by default each stage has
            its own.

    Raises:
        ScheduleError: If there is no stage or no chunk, a rank has no stage, a chunk is named twice, or a
            link leads backward.
    """

    stages: int
    order: tuple[int, ...]
    links: tuple[Link, ...] | None = None
    ranks: int | None = None

    def __post_init__(self) -> None:
        if self.stages < 1 or not self.order:
            raise ScheduleError(
                "a pipeline has a stage and a chunk", f"found {self.stages} stages, {len(self.order)} chunks"
            )
        if not 1 <= self.homes <= self.stages:
            raise ScheduleError("each rank has a stage", f"{self.homes} ranks have {self.stages} stages")
        if len(set(self.order)) != len(self.order) or min(self.order) < 0:
            raise ScheduleError("each chunk is processed once", f"the order is {self.order}")
        for one, other in self.all_links:
            if not 0 <= one < other < self.stages:
                raise ScheduleError(
                    f"a link leads from a stage to a later one of {self.stages}", f"found {one} -> {other}"
                )

    @property
    def all_links(self) -> tuple[Link, ...]:
        """The links between stages, in order."""
        if self.links is None:
            return tuple((stage, stage + 1) for stage in range(self.stages - 1))
        return tuple(sorted(set(self.links)))

    @property
    def homes(self) -> int:
        """The number of ranks that have stages."""
        return self.stages if self.ranks is None else self.ranks

    def held(self, rank: int) -> range:
        """Return the stages of a rank."""
        return range(rank, self.stages, self.homes)

    def turns(self, rank: int) -> Iterator[tuple[int, int]]:
        """Yield stage and chunk of everything that a rank computes forward, in order."""
        for stage in self.held(rank):
            for chunk in self.order:
                yield stage, chunk

    def sources(self, stage: int) -> list[int]:
        """Return the stages whose output a stage reads."""
        return [one for one, other in self.all_links if other == stage]

    def readers(self, stage: int) -> list[int]:
        """Return the stages that read a stage's output."""
        return [other for one, other in self.all_links if one == stage]


def fill_drain(shape: Shape) -> Programs:
    """Generate programs with all chunks forward, then all backward in exactly the reverse order.

    Source: GNNPipe, where rows of chunks processed before are fresh and the others historical.
    """

    def program(rank: int) -> Iterator[Action]:
        turns = list(shape.turns(rank))
        for stage, chunk in turns:
            yield from _forward(shape, stage, chunk)
        for stage, chunk in reversed(turns):
            yield from _backward(shape, stage, chunk)

    return _programs(shape, program)


def k_forward_k_backward(shape: Shape, k: int = 1) -> Programs:
    """Generate programs that alternate k chunks forward and k backward after a warm-up; k = 1 is 1F1B.

    For independent work only: backward takes the chunks in the order of forward.

    Args:
        shape: Stages and chunks.
        k: Chunks per turn.

    Raises:
        ScheduleError: If k is below 1, or ranks have several stages.

    Cost: stage s holds at most ``k * (depth below it + 1)`` chunks: ``S - s`` in a chain with k = 1.
    """
    if k < 1:
        raise ScheduleError("kFkB takes a k from 1 up", f"it is {k}")
    if shape.homes != shape.stages:
        raise ScheduleError("kFkB takes a stage a rank", f"{shape.homes} ranks have {shape.stages} stages")
    below = _depths(shape)

    def program(stage: int) -> Iterator[Action]:
        count, ahead = len(shape.order), min(len(shape.order), k * below[stage])
        forward, backward = iter(shape.order), iter(shape.order)
        for _ in range(ahead):
            yield from _forward(shape, stage, next(forward))
        done, begun = 0, ahead
        while done < count:
            for _ in range(min(k, count - done)):
                yield from _backward(shape, stage, next(backward))
                done += 1
            for _ in range(min(k, count - begun)):
                yield from _forward(shape, stage, next(forward))
                begun += 1

    return _programs(shape, program)


def exact(shape: Shape, pieces: Sequence[int]) -> Programs:
    """Generate programs in which all chunks pass one piece of a stage before any passes the next.

    Backward does the same in reverse. Nothing is dropped and no row is stale. The price is that a stage's
    last piece begins only when all chunks have passed the pieces before, so stages overlap by one piece each.

    Args:
        shape: Stages and chunks.
        pieces: The number of pieces of each stage; a piece is a read of neighbours' rows and what follows it.

    Raises:
        ScheduleError: If a stage has no piece.
    """
    if len(pieces) != shape.stages or min(pieces) < 1:
        raise ScheduleError(f"{shape.stages} stages have a piece each at least", f"found {tuple(pieces)}")

    def program(rank: int) -> Iterator[Action]:
        for stage in shape.held(rank):
            last = pieces[stage] - 1
            for piece in range(last + 1):
                for chunk in shape.order:
                    yield from _forward(shape, stage, chunk, piece, first=piece == 0, last=piece == last)
        for stage in reversed(shape.held(rank)):
            last = pieces[stage] - 1
            for piece in range(last, -1, -1):
                for chunk in reversed(shape.order):
                    yield from _backward(shape, stage, chunk, piece, first=piece == last, last=piece == 0)

    return _programs(shape, program)


def arrivals(programs: Sequence[Program], rank: int) -> tuple[Action, ...]:
    """Return a rank's RECVs, each sender's in the order of its SENDs, which is the order of arrival."""
    mine = {action for action in programs[rank] if action.kind.receives}
    sent = (action.answer for program in programs for action in program if action.kind.sends)
    return tuple(answer for answer in sent if answer in mine)


def _forward(
    shape: Shape, stage: int, chunk: int, piece: int | None = None, *, first: bool = True, last: bool = True
) -> Iterator[Action]:
    for one in shape.sources(stage) if first else ():
        yield Action(stage, ActionKind.RECV_F, chunk, None, one)
    yield Action(stage, ActionKind.F, chunk, piece)
    for other in shape.readers(stage) if last else ():
        yield Action(stage, ActionKind.SEND_F, chunk, None, other)


def _backward(
    shape: Shape, stage: int, chunk: int, piece: int | None = None, *, first: bool = True, last: bool = True
) -> Iterator[Action]:
    for other in reversed(shape.readers(stage)) if first else ():
        yield Action(stage, ActionKind.RECV_B, chunk, None, other)
    yield Action(stage, ActionKind.B, chunk, piece)
    for one in reversed(shape.sources(stage)) if last else ():
        yield Action(stage, ActionKind.SEND_B, chunk, None, one)


def _depths(shape: Shape) -> list[int]:
    """Return for each stage the number of stages on the longest path from it to an end, itself included."""
    found = [1] * shape.stages
    for stage in range(shape.stages - 1, -1, -1):
        found[stage] = 1 + max((found[reader] for reader in shape.readers(stage)), default=0)
    return found


def _programs(shape: Shape, program: Callable[[int], Iterator[Action]]) -> Programs:
    return tuple(tuple(program(rank)) for rank in range(shape.homes))
