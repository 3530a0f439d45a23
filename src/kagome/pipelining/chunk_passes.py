"""Chunk passes: a rank's stages over the chunks of its part, chunk by chunk or all at once.

Where it sits: ``chunk_engine`` calls the pass that an epoch or an evaluation needs. A pass makes its stage
runs and its program, which ``executor`` performs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kagome.adaptive.stage_codec import StageCodec
from kagome.comm.mesh import Mesh
from kagome.components.engine import PhaseTimer
from kagome.historical.provider import HistoricalRows
from kagome.intercept.interceptor import Interceptor
from kagome.model.split.stages import Stage, links
from kagome.pipelining.buffer_isolation import BufferIsolation
from kagome.pipelining.chunking import Chunking
from kagome.pipelining.executor import Executor, needed
from kagome.pipelining.p2p import StageTransfers
from kagome.pipelining.stage_run import StageCode, StageRun
from kagome.schedule.actions import Action, ActionKind, Program, Programs
from kagome.schedule.schedules import (
    Shape,
    arrivals,
    fill_drain,
    forward_only,
    k_forward_k_backward,
)

StageRuns = dict[tuple[int, int], StageRun]
"""The stage runs of a pass, by stage and chunk."""


# [Note: at once] Where every row must be one of this pass, a chunk may go on after a read only when all
# chunks have come to it. They would pass a stage abreast, and stages would overlap by a layer at most:
#
#     abreast    stage 0   F0 F1 F2 | F0 F1 F2 | F0 F1 F2          a bar is a read of neighbours
#                stage 1                              F0 F1 F2 | F0 F1 F2
#     at once    stage 0   F ......................
#                stage 1                           F .............
#
# So all chunks run as one, which needs no thread for each chunk to stop in. Threads cost more than they look:
# each takes memory of an arena of its own, whose pages are fresh in every pass.


@dataclass(frozen=True)
class ChunkPasses:
    """The passes of one rank over its chunks.

    Args:
        codes: The code of each of its stages, by number, in order.
        mesh: All ranks.
        chunks: The chunks of its part.
        stages: The stages of all ranks.
        phases: Records the time of each action.
        isolation: Makes the buffer isolation of a pass; the argument is whether further buffers are watched.
        lose: Called with each stage run whose forward has ended in training.
        codec: Encodes the values that are sent between stages in training.
    """

    codes: Mapping[int, StageCode]
    mesh: Mesh
    chunks: Chunking
    stages: Sequence[Stage]
    phases: PhaseTimer
    isolation: Callable[[bool], BufferIsolation]
    lose: Callable[[StageRun], None]
    codec: StageCodec

    def one_by_one(self, epoch: int, history: HistoricalRows | None, *, checked: bool) -> StageRuns:
        """Train on one chunk after the other, by a program that is fixed before the pass.

        Args:
            epoch: The epoch.
            history: The provider of historical rows; None where chunks are independent.
            checked: Whether ranks compare the headers of their messages.
        """
        stage_runs = self._make_stage_runs(self.chunks.pieces, epoch, training=True, checked=checked)
        programs = self.programs(epoch)
        program = programs[self.mesh.stage]
        messages = self._messages(stage_runs, epoch, programs, self.codec)
        # Independent chunks each update running statistics, as micro-batches do.
        # With history, statistics over all vertices are the last epoch's and alike in all chunks: one update
        # of the running statistics is right, and the first chunk's stays.
        alike = history is not None
        isolation = self.isolation(alike)
        # The first chunk of this epoch's order, which is shuffled.
        first = next(action.chunk for action in program if action.kind is ActionKind.F)

        def compute(action: Action) -> None:
            stage_run = stage_runs[action.stage, action.chunk]
            if action.kind is ActionKind.F:
                stays = action.chunk == first if alike else stage_run.scope.own > 0
                with isolation.running(action.chunk, stays=stays):
                    stage_run.forward()
                self.lose(stage_run)
                return
            stage_run.backward()

        self._run(program, compute, messages, epoch)
        return stage_runs

    def at_once(self, epoch: int, *, training: bool, checked: bool = False, stale: bool = False) -> StageRuns:
        """Run all chunks as one, stage after stage: every row that is read is one of this pass.

        Args:
            epoch: The epoch.
            training: Whether a backward follows.
            checked: Whether ranks compare the headers of their messages.
            stale: Whether the next epoch may use gradients of this one.
        """
        tables = self.chunks.tables
        if tables is not None:
            tables.begin(epoch, self.chunks.exact(epoch, training=training, stale=stale))
        stage_runs = self._make_stage_runs((self.chunks.whole,), epoch, training=training, checked=checked)
        shape = self._shape((0,))
        programs = self._needed(fill_drain(shape) if training else forward_only(shape))
        messages = self._messages(stage_runs, epoch, programs, self.codec if training else None)
        # A single chunk changes the buffers as it likes. Several may not begin to change one later.
        isolation = self.isolation(training and tables is not None)

        def compute(action: Action) -> None:
            stage_run = stage_runs[action.stage, action.chunk]
            if action.kind is ActionKind.B:
                stage_run.backward()
                return
            with isolation.running(action.chunk, stays=True):
                stage_run.forward()
            if training:
                self.lose(stage_run)

        # One stage computes at a time, with the cores of those that wait.
        with self.mesh.alone():
            self._run(programs[self.mesh.stage], compute, messages, epoch)
        return stage_runs

    def programs(self, epoch: int) -> Programs:
        """Return the programs of this part's stages for an epoch that runs chunk by chunk."""
        settings = self.chunks.settings
        shape = self._shape(self.chunks.program_order(epoch, self.mesh.part))
        if settings.pattern == "fill-drain":
            return self._needed(fill_drain(shape))
        return self._needed(k_forward_k_backward(shape, 1 if settings.pattern == "1f1b" else settings.pipe))

    def _shape(self, order: tuple[int, ...]) -> Shape:
        return Shape(len(self.stages), order, links(self.stages), self.chunks.settings.pipe)

    def _needed(self, programs: Programs) -> Programs:
        return tuple(tuple(self._carrying(program)) for program in programs)

    def _carrying(self, program: Iterable[Action]) -> Iterator[Action]:
        return needed(program, self.stages, next(iter(self.codes.values())).survey.values)

    def _messages(
        self, stage_runs: StageRuns, epoch: int, programs: Programs, codec: StageCodec | None
    ) -> StageTransfers:
        """Return the transfers of a pass, whose receives have started as far as they may."""
        ranks = [stage.rank for stage in self.stages]
        messages = StageTransfers(self.codes, self.mesh.pipe, ranks, stage_runs, epoch, codec)
        messages.post(arrivals(programs, self.mesh.stage), programs[self.mesh.stage])
        return messages

    def _make_stage_runs(
        self, scopes: Sequence[Interceptor], epoch: int, *, training: bool, checked: bool
    ) -> StageRuns:
        # A chunk's sites are numbered through all stages of this rank, as in one forward of the whole model.
        named = [Counter[str]() for _ in scopes]
        return {
            (stage, number): StageRun(code, scope, epoch, training, checked, named[number])
            for stage, code in self.codes.items()
            for number, scope in enumerate(scopes)
        }

    def _run(
        self,
        program: Program,
        compute: Callable[[Action], None],
        messages: StageTransfers,
        epoch: int,
    ) -> None:
        executor = Executor(self.mesh.rank, self.mesh.doing, self.phases.phase)
        executor.run(program, compute, messages, turn=f"epoch {epoch}", epoch=epoch)
