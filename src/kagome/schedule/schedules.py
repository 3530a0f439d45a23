"""Schedules: generators of programs for fill-drain, 1F1B, kFkB and zero bubble.

Where it sits: pure functions. ``pipelining`` asks for one by name, for the chunks of a graph and for the
samples of a batch; ``planner`` tries them all in ``simulator``, and asks how many samples a stage must hold.

::

    fill-drain, 2 stages, chunks in the order 1 0      stage 1 starts when stage 0 has done one chunk,
      0: 1 0 . . 0 1                                   backward takes the chunks in reverse: what was
      1: . 1 0 0 1 .                                   fresh in forward is known in backward

    1F1B                                               at most S - s chunks are held by stage s
      0: 0 1 . 0 2 1 3 2 . 3
      1: . 0 0 1 1 2 2 3 3 .

    zero bubble, written as orders                     backward in two halves: I, for which sources wait,
      0: F F F I F I W I W W    W in gaps              and W, for which nobody does

    fill-drain, 4 stages on 2 ranks                    all chunks pass a rank's first stage, then its next
      0: stage 0: 0 1 2  stage 2: 0 1 2                one: it fills in the time of a short stage; more
      1:    stage 1: 0 1 2  stage 3: 0 1 2             chunks than ranks give messages time to travel

    samples      0    1    2    3    4    5    6    7        stage 0 in micro-batches of 2, stage 1 of 4:
    stage 0   [ 0F0    ][ 0F1    ][ 0F2    ][ 0F3    ]       a message has the smaller of both sizes, and
    messages    u = 0      u = 1     u = 2     u = 3         its number counts in them
    stage 1   [        1F0       ][        1F1       ]

Source: fill-drain is GPipe's, 1F1B PipeDream's, kFkB by stage over a DAG GraphPipe's (ASPLOS 2025); the
backward in two halves is that of zero bubble pipelines (Qi et al., ICLR 2024).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

from kagome.errors import ScheduleError
from kagome.schedule.actions import Action, ActionKind, Program, Programs

Link = tuple[int, int]
"""A pair of stages: the source, and the stage that reads its output."""


@dataclass(frozen=True)
class Shape:
    """The stages, chunks, links and ranks that a schedule is generated for.

    Args:
        stages: The number of stages.
        order: The chunks in the order in which they are processed; with ``sizes``, the samples of a batch.
        links: Pairs of stages of which the second reads the first one's output; by default each stage reads
            the one before it.
        ranks: The number of ranks, to which the stages are assigned in rotation; by default each stage has
            its own.
        sizes: The number of samples that each stage processes together, as a micro-batch, which is then its
            chunk; by default stages have the same chunks.

    Raises:
        ScheduleError: If there is no stage or no chunk, a rank has no stage, a chunk is named twice, or a
            link leads backward. With sizes, if a batch is not a whole number of micro-batches, or if of two
            linked stages neither micro-batch divides the other.
    """

    stages: int
    order: tuple[int, ...] | range
    links: tuple[Link, ...] | None = None
    ranks: int | None = None
    sizes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.stages < 1 or not self.order:
            raise ScheduleError(
                "a pipeline with a stage and a chunk", f"{self.stages} stages and {len(self.order)} chunks"
            )
        if not 1 <= self.homes <= self.stages:
            raise ScheduleError("a stage for each rank", f"{self.homes} ranks and {self.stages} stages")
        order = self.order
        # A range names each chunk once. Stage planners pass the samples of a batch as a range for each
        # candidate.
        if isinstance(order, tuple) and (len(set(order)) != len(order) or min(order) < 0):
            raise ScheduleError("each chunk to be processed once", f"the order {order}")
        for one, other in self.all_links:
            if not 0 <= one < other < self.stages:
                raise ScheduleError(
                    f"a link from a stage to a later one of {self.stages}", f"{one} -> {other}"
                )
        if self.sizes is not None:
            self._check_sizes(self.sizes)

    def _check_sizes(self, sizes: Sequence[int]) -> None:
        batch = len(self.order)
        # Micro-batch c of a stage is the samples c * size to (c + 1) * size - 1, so their order must not
        # change.
        in_order = self.order == range(batch) or self.order == tuple(range(batch))
        if len(sizes) != self.stages or not in_order:
            raise ScheduleError(
                f"micro-batches of samples in order for {self.stages} stages",
                f"{len(sizes)} sizes, order {self.order}",
            )
        for stage, size in enumerate(sizes):
            if size < 1 or batch % size:
                raise ScheduleError(
                    f"a batch of {batch} samples to be a whole number of micro-batches",
                    f"micro-batches of {size} samples",
                    where=f"stage {stage}",
                    hint="take a micro-batch that divides the batch",
                )
        for one, other in self.all_links:
            # A message holds the smaller micro-batch of both ends. The larger one must be a whole number of
            # messages.
            if max(sizes[one], sizes[other]) % self.unit(one, other):
                raise ScheduleError(
                    "the micro-batch of one of two linked stages to divide the other's",
                    f"{sizes[one]} and {sizes[other]} samples",
                    where=f"stages {one} and {other}",
                    hint="take powers of two",
                )

    @cached_property
    def all_links(self) -> tuple[Link, ...]:
        """The links between stages, in order."""
        if self.links is None:
            return tuple((stage, stage + 1) for stage in range(self.stages - 1))
        # Sorted: the order of the links is the order in which a stage receives and sends.
        return tuple(sorted(set(self.links)))

    @property
    def homes(self) -> int:
        """The number of ranks that have stages."""
        return self.stages if self.ranks is None else self.ranks

    def held(self, rank: int) -> range:
        """Return the stages of a rank."""
        # Stage s belongs to rank s % homes.
        return range(rank, self.stages, self.homes)

    def turns(self, rank: int) -> Iterator[tuple[int, int]]:
        """Yield stage and chunk of everything that a rank computes forward, in order."""
        for stage in self.held(rank):
            for chunk in self.chunks(stage):
                yield stage, chunk

    def size(self, stage: int) -> int:
        """Return the number of entries of ``order`` that a chunk of a stage covers."""
        return 1 if self.sizes is None else self.sizes[stage]

    def chunks(self, stage: int) -> Sequence[int]:
        """Return the chunks of a stage in the order in which it processes them."""
        return self.order if self.sizes is None else range(len(self.order) // self.sizes[stage])

    def unit(self, one: int, other: int) -> int:
        """Return the number of entries of ``order`` that a message between two stages covers."""
        return min(self.size(one), self.size(other))

    def messages(self, stage: int, other: int, chunk: int) -> range:
        """Return the numbers of the messages between two stages that hold a chunk of the first."""
        # Stage of 4 samples, reader of 2: chunk 1 is in messages 2 and 3. The other way round: in message 1.
        each = self.size(stage) // self.unit(stage, other)
        return range(chunk * each, (chunk + 1) * each)

    def sources(self, stage: int) -> list[int]:
        """Return the stages whose output a stage reads."""
        return [one for one, other in self.all_links if other == stage]

    def readers(self, stage: int) -> list[int]:
        """Return the stages that read a stage's output."""
        return [other for one, other in self.all_links if one == stage]


def fill_drain(shape: Shape) -> Programs:
    """Generate programs with all chunks forward, then all backward in exactly the reverse order.

    Source: GNNPipe, where rows of chunks processed before are fresh and the others historical.

    Example:
        >>> from kagome.schedule.actions import to_text
        >>> print(to_text(fill_drain(Shape(stages=2, order=(0, 1)))), end="")
        0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B1 0B1 0RECV_B0 0B0
        1RECV_F0 1F0 1RECV_F1 1F1 1B1 1SEND_B1 1B0 1SEND_B0
    """

    def program(rank: int) -> Iterator[Action]:
        # Backward is the exact reverse, over the stages of a rank too: the gradient of a fresh row is
        # complete only when all chunks that read it have been backward, and those were processed later in
        # forward.
        turns = list(shape.turns(rank))
        for stage, chunk in turns:
            yield from _step(shape, stage, chunk, forward=True)
        for stage, chunk in reversed(turns):
            yield from _step(shape, stage, chunk, forward=False)

    return _programs(shape, program)


def forward_only(shape: Shape) -> Programs:
    """Generate programs that take all chunks forward, for evaluation."""

    def program(rank: int) -> Iterator[Action]:
        for stage, chunk in shape.turns(rank):
            yield from _step(shape, stage, chunk, forward=True)

    return _programs(shape, program)


def k_forward_k_backward(shape: Shape, k: int | Sequence[int] = 1) -> Programs:
    """Generate programs that fill each stage's window, then alternate k chunks backward and k forward.

    For independent work only: backward takes the chunks in the order of forward. k = 1 is 1F1B.

    Args:
        shape: Stages and chunks.
        k: Chunks per turn; one number for all stages, or one for each.

    Raises:
        ScheduleError: If a k is below 1, or ranks have several stages.

    Cost: a stage holds at most :func:`windows` entries of the order.
    """
    held, turns = windows(shape, k), _each(shape, k)
    if shape.homes != shape.stages:
        raise ScheduleError("one stage a rank for kFkB", f"{shape.homes} ranks and {shape.stages} stages")

    def program(stage: int) -> Iterator[Action]:
        # Both iterators continue from loop to loop. Once `forward` is empty, only backward remains (the
        # drain).
        #
        #     F F F | B F  B F  B F | B B B
        #     window  alternate       drain
        chunks, turn = shape.chunks(stage), turns[stage]
        forward, backward = iter(chunks), iter(chunks)
        # `held` counts entries of the order (samples), the iterator counts the stage's own micro-batches.
        for chunk in islice(forward, held[stage] // shape.size(stage)):
            yield from _step(shape, stage, chunk, forward=True)
        for _ in range(0, len(chunks), turn):
            for chunk in islice(backward, turn):
                yield from _step(shape, stage, chunk, forward=False)
            for chunk in islice(forward, turn):
                yield from _step(shape, stage, chunk, forward=True)

    return _programs(shape, program)


# [Note: windows] A stage may not wait for its reader, so it goes ahead by as many chunks as the reader has to
# hold, and one turn of its own. Three stages with k = 1:
#
#     stage 0    F0 F1 F2       B0 F3 B1 F4       3 chunks are held: it waits only until B0 returns
#     stage 1       F0 F1    B0 F2 B1 F3          2
#     stage 2          F0 B0 F1 B1 F2             1: backward follows at once
#
# With fewer chunks ahead stage 2 would stand still after B0. With more nothing becomes faster, and
# activations of more chunks are kept. If micro-batches differ in size, all of this is counted in samples, and
# rounded up to whole micro-batches of the stage that waits.


def windows(shape: Shape, k: int | Sequence[int] = 1) -> list[int]:
    """Return the most entries of the order that each stage must hold, so that no reader waits for it.

    It is one turn of its own plus the most that a reader holds, in whole chunks of its own. In a chain of S
    stages with the same chunks, stage s holds ``k * (S - s)`` chunks, or all of them.

    Args:
        shape: Stages and chunks.
        k: Chunks per turn; one number for all stages, or one for each.

    Raises:
        ScheduleError: If a k is below 1.

    Source: GraphPipe, in-flight samples under kFkB.
    """
    turns, found = _each(shape, k), [0] * shape.stages
    # Links lead to later stages, so the windows of all readers are known before their source's.
    for stage in range(shape.stages - 1, -1, -1):
        size = shape.size(stage)
        most = turn = turns[stage] * size
        for other in shape.readers(stage):
            # The reader's window, rounded up to whole micro-batches of this stage, and one turn. A reader of
            # larger micro-batches cannot begin before a whole one has arrived, which may be more than a turn.
            most = max(most, -(-found[other] // size) * size + max(turn, shape.size(other)))
        found[stage] = min(most, len(shape.order))
    return found


def zero_bubble(shape: Shape, orders: Sequence[str]) -> Programs:
    """Generate programs in which each stage goes through its chunks in an order of its own.

    Args:
        shape: Stages and chunks; one stage a rank.
        orders: For each stage, what it does, in order: a letter F for the next chunk's forward, I for the
            next chunk's gradients of inputs, W for those of its weights.

    Raises:
        ScheduleError: If an order does not have an F, an I and a W for each chunk, has an I before its F or a
            W before its I, or if ranks have several stages.

    Example:
        >>> from kagome.schedule.actions import to_text
        >>> print(to_text(zero_bubble(Shape(stages=2, order=(0, 1)), ("FFIWIW", "FIFIWW"))), end="")
        0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0I0 0W0 0RECV_B1 0I1 0W1
        1RECV_F0 1F0 1I0 1SEND_B0 1RECV_F1 1F1 1I1 1SEND_B1 1W0 1W1

    Source: zero bubble pipelines (Qi et al., ICLR 2024), whose B is the I of torch.distributed.pipelining.
    """
    if shape.homes != shape.stages or len(orders) != shape.stages:
        raise ScheduleError(
            f"one stage a rank, and an order for each of {shape.stages}",
            f"{shape.homes} ranks and {len(orders)} orders",
        )

    def program(stage: int) -> Iterator[Action]:
        # The three letters count the chunks independently. A letter that is ahead of the one it needs would
        # compute from values that do not exist yet.
        ahead = {"F": None, "I": "F", "W": "I"}
        chunks = {letter: iter(shape.chunks(stage)) for letter in ahead}
        done = dict.fromkeys(ahead, 0)
        for place, letter in enumerate(orders[stage]):
            needs = ahead.get(letter)
            chunk = next(chunks[letter], None) if letter in ahead else None
            if chunk is None or (needs is not None and done[needs] <= done[letter]):
                raise ScheduleError(
                    f"an order of F, I and W, each {len(shape.chunks(stage))} times, no I before its F and no"
                    " W before its I",
                    f"{letter!r} in place {place} after {done}",
                    where=f"stage {stage}",
                )
            done[letter] += 1
            if letter == "W":
                yield Action(stage, ActionKind.W, chunk)  # nobody else waits for it
            else:
                yield from _step(shape, stage, chunk, forward=letter == "F", half=True)
        if set(done.values()) != {len(shape.chunks(stage))}:
            raise ScheduleError(
                f"an order with F, I and W {len(shape.chunks(stage))} times each",
                f"{done}",
                where=f"stage {stage}",
            )

    return _programs(shape, program)


def arrivals(programs: Sequence[Program], rank: int) -> tuple[Action, ...]:
    """Return a rank's RECVs, each sender's in the order of its SENDs, which is the order of arrival."""
    mine = {action for action in programs[rank] if action.kind.receives}
    sent = (action.counterpart for program in programs for action in program if action.kind.sends)
    return tuple(answer for answer in sent if answer in mine)


def _receives(shape: Shape, stage: int, chunk: int, *, forward: bool) -> Iterator[Action]:
    """Yield the RECVs before a stage computes a chunk; in backward the other stages are in reverse order."""
    kind = ActionKind.RECV_F if forward else ActionKind.RECV_B
    for other in shape.sources(stage) if forward else reversed(shape.readers(stage)):
        for message in shape.messages(stage, other, chunk):
            yield Action(stage, kind, message, other)


def _sends(shape: Shape, stage: int, chunk: int, *, forward: bool) -> Iterator[Action]:
    """Yield the SENDs after a stage has computed a chunk; in backward other stages in reverse."""
    kind = ActionKind.SEND_F if forward else ActionKind.SEND_B
    for other in shape.readers(stage) if forward else reversed(shape.sources(stage)):
        for message in shape.messages(stage, other, chunk):
            yield Action(stage, kind, message, other)


def _step(
    shape: Shape,
    stage: int,
    chunk: int,
    *,
    forward: bool,
    half: bool = False,
) -> Iterator[Action]:
    """Yield the actions of a chunk in a stage."""
    yield from _receives(shape, stage, chunk, forward=forward)
    backward = ActionKind.I if half else ActionKind.B
    yield Action(stage, ActionKind.F if forward else backward, chunk)
    yield from _sends(shape, stage, chunk, forward=forward)


def _each(shape: Shape, k: int | Sequence[int]) -> Sequence[int]:
    """Return the k of each stage."""
    found = (k,) * shape.stages if isinstance(k, int) else k
    if len(found) != shape.stages or min(found) < 1:
        raise ScheduleError("kFkB to have a k of 1 or more for each stage", f"{k}")
    return found


def _programs(shape: Shape, program: Callable[[int], Iterator[Action]]) -> Programs:
    return tuple(tuple(program(rank)) for rank in range(shape.homes))
