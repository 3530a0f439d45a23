"""Chunk passes: a rank's stages over the chunks of its part, chunk by chunk or all in lockstep.

Where it sits: ``chunk_engine`` calls the pass that an epoch or an evaluation needs. A pass makes its stage
runs and its program, which ``executor`` performs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import count

import torch

from kagome.adaptive.stage_codec import StageCodec
from kagome.comm.mesh import Mesh
from kagome.components.engine import PhaseTimer
from kagome.historical.lockstep import Lockstep
from kagome.historical.provider import HistoricalRows
from kagome.intercept.interceptor import Interceptor
from kagome.model.split.stages import Stage, links
from kagome.pipelining.buffer_isolation import BufferIsolation
from kagome.pipelining.chunking import Chunking
from kagome.pipelining.executor import Executor, needed
from kagome.pipelining.p2p import StageTransfers
from kagome.pipelining.stage_run import StageCode, StageRun
from kagome.schedule.actions import Action, ActionKind, Program, Programs
from kagome.schedule.schedules import Shape, arrivals, fill_drain, forward_only, k_forward_k_backward

Jobs = dict[tuple[int, int], StageRun]
"""The stage runs of a pass, by stage and chunk."""


@dataclass(frozen=True)
class ChunkPasses:
    """The passes of one rank over its chunks.

    Args:
        codes: The code of each of its stages, by number, in order.
        mesh: All ranks.
        chunks: The chunks of its part.
        stages: The stages of all ranks.
        phases: Records the time of each action.
        moved: Makes the buffer isolation of a pass; its argument says whether further buffers are watched.
        lose: Called with each stage run whose forward has ended in training.
        codec: Encodes the values that go from stage to stage in training.
    """

    codes: Mapping[int, StageCode]
    mesh: Mesh
    chunks: Chunking
    stages: Sequence[Stage]
    phases: PhaseTimer
    moved: Callable[[bool], BufferIsolation]
    lose: Callable[[StageRun], None]
    codec: StageCodec

    def one_by_one(self, epoch: int, history: HistoricalRows | None, *, checked: bool) -> Jobs:
        """Train on one chunk after the other, by a program that is fixed before the pass.

        Args:
            epoch: The epoch.
            history: The supplier of historical rows; None where chunks are independent.
            checked: Whether ranks compare the headers of their messages.
        """
        jobs = self._jobs(self.chunks.apart, epoch, training=True, checked=checked)
        programs = self.programs(epoch)
        program = programs[self.mesh.stage]
        messages = self._messages(jobs, epoch, self.codec)
        messages.post(arrivals(programs, self.mesh.stage))
        # Independent chunks each update running statistics, as micro-batches do.
        alike = history is not None
        moved = self.moved(alike)

        def compute(action: Action) -> None:
            job = jobs[action.stage, action.chunk]
            if action.kind is ActionKind.F:
                stays = action.chunk == first if alike else job.scope.own > 0
                with moved.by(action.chunk, stays=stays):
                    job.forward()
                self.lose(job)
                return
            job.backward()

        first = next(action.chunk for action in program if action.kind is ActionKind.F)
        self._executor.run(program, compute, messages, turn=f"epoch {epoch}", epoch=epoch)
        return jobs

    def in_lockstep(self, epoch: int, *, training: bool, checked: bool = False, stale: bool = False) -> Jobs:
        """Run all chunks piece by piece; a stage ends when its steps have no more reads of neighbours.

        Args:
            epoch: The epoch.
            training: Whether a backward follows.
            checked: Whether ranks compare the headers of their messages.
            stale: Whether the next epoch may use gradients of this one.
        """
        tables = self.chunks.tables
        assert tables is not None
        jobs = self._jobs(self.chunks.scopes, epoch, training=training, checked=checked)
        supplier = self.chunks.exact(epoch, training=training, stale=stale)
        tables.begin(epoch, supplier)
        messages = self._messages(jobs, epoch, self.codec if training else None)
        passes = (True, False) if training else (True,)
        for forward in passes:
            messages.post(self._arrivals(forward))
        numbers, moved = tuple(self.codes), self.moved(training)
        turns = [(stage, way) for way in passes for stage in (numbers if way else numbers[::-1])]
        for stage, forward in turns:
            mine = {chunk: job for (other, chunk), job in jobs.items() if other == stage}
            works = [job.forward if forward else job.backward for job in mine.values()]
            lockstep = supplier.lockstep = Lockstep(works)
            ended: set[int] = set()

            def compute(action: Action, lockstep: Lockstep = lockstep, ended: set[int] = ended) -> None:
                with moved.by(action.chunk, stays=action.chunk == 0):
                    done = lockstep.advance(action.chunk)
                if done:
                    ended.add(action.chunk)
                    if action.kind is ActionKind.F and training:
                        self.lose(jobs[action.stage, action.chunk])

            rounds = self._rounds(stage, tuple(mine), ended, forward)
            try:
                with _calling_thread():
                    self._executor.run(
                        rounds, compute, messages, turn=f"epoch {epoch}", epoch=epoch, ends=False
                    )
            finally:
                lockstep.close()
        messages.end()
        return jobs

    def programs(self, epoch: int) -> Programs:
        """Return the programs of this part's stages for an epoch that runs chunk by chunk."""
        settings = self.chunks.settings
        order = self.chunks.program_order(epoch, self.mesh.part)
        shape = Shape(len(self.stages), order, self._links, settings.pipe)
        if settings.pattern == "fill-drain":
            found = fill_drain(shape)
        else:
            found = k_forward_k_backward(shape, 1 if settings.pattern == "1f1b" else settings.pipe)
        return tuple(map(self._needed, found))

    def forward(self, epoch: int) -> Jobs:
        """Evaluate a part that is a single chunk."""
        jobs = self._jobs(self.chunks.scopes, epoch, training=False, checked=False)
        messages = self._messages(jobs, epoch, None)
        shape = Shape(len(self.stages), (0,), self._links, self.chunks.settings.pipe)
        programs = forward_only(shape)
        messages.post(arrivals(programs, self.mesh.stage))

        def compute(action: Action) -> None:
            jobs[action.stage, 0].forward()

        program = programs[self.mesh.stage]
        self._executor.run(program, compute, messages, turn=f"epoch {epoch}", epoch=epoch)
        return jobs

    @cached_property
    def _executor(self) -> Executor:
        return Executor(self.mesh.rank, self.mesh.doing, self.phases.phase)

    @cached_property
    def _links(self) -> tuple[tuple[int, int], ...]:
        """The pairs of stages that a value goes between."""
        return links(self.stages)

    def _messages(self, jobs: Jobs, epoch: int, codec: StageCodec | None) -> StageTransfers:
        ranks = [stage.rank for stage in self.stages]
        return StageTransfers(self.codes, self.mesh.pipe, ranks, jobs, epoch, codec)

    def _needed(self, program: Iterable[Action]) -> Program:
        return needed(program, self.stages, next(iter(self.codes.values())).survey.values)

    def _arrivals(self, forward: bool) -> list[Action]:
        """Return the receives of a lockstep pass, those of each sender in the order in which it sends."""
        chunks = range(len(self.chunks.scopes))
        order = chunks if forward else chunks[::-1]
        stages = range(len(self.stages)) if forward else range(len(self.stages))[::-1]
        sends = (send for stage in stages for chunk in order for send in self._ends(stage, chunk, forward)[1])
        return [send.answer for send in sends if send.other in self.codes]

    def _rounds(self, stage: int, order: Sequence[int], ended: set[int], forward: bool) -> Iterator[Action]:
        """Yield rounds of one piece a chunk; receives come before its first piece, sends after its last."""
        kind = ActionKind.F if forward else ActionKind.B
        for piece in count():
            for chunk in order if forward else order[::-1]:
                receives, sends = self._ends(stage, chunk, forward)
                if piece == 0:
                    yield from receives
                yield Action(stage, kind, chunk, piece)
                if chunk in ended:
                    yield from sends
            if len(ended) == len(order):
                return

    def _ends(self, stage: int, chunk: int, forward: bool) -> tuple[list[Action], list[Action]]:
        """Return the receives before a chunk's first piece in a stage, and the sends after its last."""
        before = [one for one, other in self._links if other == stage]
        after = [other for one, other in self._links if one == stage]
        come, go = (before, after) if forward else (after[::-1], before[::-1])
        take, give = (
            (ActionKind.RECV_F, ActionKind.SEND_F) if forward else (ActionKind.RECV_B, ActionKind.SEND_B)
        )
        receives = self._needed(Action(stage, take, chunk, None, other) for other in come)
        sends = self._needed(Action(stage, give, chunk, None, other) for other in go)
        return list(receives), list(sends)

    def _jobs(self, scopes: Sequence[Interceptor], epoch: int, *, training: bool, checked: bool) -> Jobs:
        named = [Counter[str]() for _ in scopes]
        return {
            (stage, number): StageRun(code, scope, epoch, training, checked, named[number])
            for stage, code in self.codes.items()
            for number, scope in enumerate(scopes)
        }


@contextmanager
def _calling_thread() -> Iterator[None]:
    """Run backward in the calling thread, on a GPU too, because chunks in lockstep wait inside it."""
    with torch.autograd.set_multithreading_enabled(False):
        yield
