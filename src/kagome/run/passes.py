"""Passes: a rank's program of actions, run over its jobs - chunk after chunk, or all in lockstep.

Where it sits: ``pipeline`` asks for the pass that an epoch or an evaluation needs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor

from kagome.comm.mesh import Mesh
from kagome.neighbors.history import History
from kagome.neighbors.intercept import Interception
from kagome.neighbors.lockstep import Lockstep
from kagome.run.chunking import Chunking
from kagome.run.engine import Phases
from kagome.run.job import Job, StageCode
from kagome.run.messages import Messages
from kagome.run.stage_codec import StageCodec
from kagome.schedule.actions import Action, Kind, Program, pointed
from kagome.schedule.schedules import Link, Shape, fill_drain, k_forward_k_backward

Jobs = dict[int, Job]


@dataclass(frozen=True)
class Passes:
    """One rank's passes over its chunks.

    Args:
        code: Of its stage.
        mesh: All ranks.
        chunks: Of its part.
        links: Which stages give to which.
        phases: Where the time of each action goes.
        buffers: Of its stage: moved once an epoch, not by every chunk.
        lose: Called with each job whose forward has ended in training.
        codec: How values go from stage to stage in training.
    """

    code: StageCode
    mesh: Mesh
    chunks: Chunking
    links: tuple[Link, ...]
    phases: Phases
    buffers: Sequence[Tensor]
    lose: Callable[[Job], None]
    codec: StageCodec

    def one_by_one(self, epoch: int, history: History | None, *, checked: bool) -> Jobs:
        """One chunk after the other, by a program that is known beforehand."""
        jobs = self._jobs(self.chunks.apart, epoch, training=True, checked=checked)
        program = self.program(epoch)
        messages = Messages(self.code, self.mesh.pipe, jobs, epoch, self.codec)
        messages.post(program)
        begun = False
        # Chunks that know nothing of each other note their own statistics, as micro-batches do.
        alike = history is not None

        def compute(action: Action) -> None:
            nonlocal begun
            job = jobs[action.chunk]
            if action.kind is Kind.F:
                with self._noting(action.chunk == program_first or not alike):
                    job.forward()
                self.lose(job)
                return
            if not begun and history is not None:
                history.begin_backward()
            begun = True
            job.backward()

        program_first = next(action.chunk for action in program if action.kind is Kind.F)
        self._run(program, jobs, messages, compute, epoch)
        messages.end()
        return jobs

    def in_lockstep(self, epoch: int, *, training: bool, checked: bool = False) -> Jobs:
        """All chunks piece by piece: a program that ends where the model has no more reads."""
        tables = self.chunks.tables
        assert tables is not None
        jobs = self._jobs(self.chunks.scopes, epoch, training=training, checked=checked)
        order = tuple(range(len(self.chunks.scopes)))
        supplier = self.chunks.exact()
        tables.begin(epoch, supplier)
        messages = Messages(self.code, self.mesh.pipe, jobs, epoch, self.codec if training else None)
        passes = (True, False) if training else (True,)
        for forward in passes:
            messages.post(
                a for chunk in (order if forward else order[::-1]) for a in self._ends(chunk, forward)[0]
            )
        for forward in passes:
            works = [job.forward if forward else job.backward for job in jobs.values()]
            lockstep = supplier.lockstep = Lockstep(works)
            ended: set[int] = set()

            def compute(action: Action, lockstep: Lockstep = lockstep, ended: set[int] = ended) -> None:
                job = jobs[action.chunk]
                with self._noting(action.chunk == 0):
                    done = lockstep.advance(action.chunk)
                if done:
                    ended.add(action.chunk)
                    if action.kind is Kind.F and training:
                        self.lose(job)

            try:
                with _calling_thread():
                    self._run(self._rounds(order, ended, forward), jobs, messages, compute, epoch)
            finally:
                lockstep.close()
        messages.end()
        return jobs

    def program(self, epoch: int) -> Program:
        """What this rank's stage does in an epoch, chunk after chunk."""
        shape = Shape(self.chunks.settings.pipe, self.chunks.program_order(epoch, self.mesh.part), self.links)
        name = self.chunks.settings.schedule
        if name == "auto":
            name = "1f1b" if self.chunks.settings.cross_chunk == "drop" else "fill-drain"
        if name == "fill-drain":
            return self._needed(fill_drain(shape)[self.mesh.stage])
        k = 1 if name == "1f1b" else self.chunks.settings.pipe
        return self._needed(k_forward_k_backward(shape, k)[self.mesh.stage])

    def forward(self, epoch: int) -> Jobs:
        """One evaluation of a part that is one chunk."""
        jobs = self._jobs(self.chunks.scopes, epoch, training=False, checked=False)
        messages = Messages(self.code, self.mesh.pipe, jobs, epoch)
        receives, sends = self._ends(0, True)
        program = (*receives, Action(self.mesh.stage, Kind.F, 0), *sends)
        messages.post(program)
        self._run(program, jobs, messages, lambda action: jobs[0].forward(), epoch)
        messages.end()
        return jobs

    def _needed(self, program: Iterable[Action]) -> Program:
        """Without messages that have nothing to carry: gradients of values that have none."""
        names = Messages(self.code, self.mesh.pipe, {}, 0).names
        return tuple(action for action in program if action.kind.computes or names(action))

    def _rounds(self, order: Sequence[int], ended: set[int], forward: bool) -> Iterator[Action]:
        """Each round a piece of every chunk; receives before the first, sends after the last."""
        stage = self.mesh.stage
        kind = Kind.F if forward else Kind.B
        for piece in count():
            for chunk in order if forward else order[::-1]:
                receives, sends = self._ends(chunk, forward)
                if piece == 0:
                    yield from receives
                yield Action(stage, kind, chunk, piece)
                if chunk in ended:
                    yield from sends
            if len(ended) == len(order):
                return

    def _ends(self, chunk: int, forward: bool) -> tuple[list[Action], list[Action]]:
        """The receives before a chunk's first piece and the sends after its last."""
        stage = self.mesh.stage
        before = [one for one, other in self.links if other == stage]
        after = [other for one, other in self.links if one == stage]
        come, go = (before, after) if forward else (after[::-1], before[::-1])
        take, give = (Kind.RECV_F, Kind.SEND_F) if forward else (Kind.RECV_B, Kind.SEND_B)
        receives = self._needed(Action(stage, take, chunk, None, other) for other in come)
        sends = self._needed(Action(stage, give, chunk, None, other) for other in go)
        return list(receives), list(sends)

    def _jobs(self, scopes: Sequence[Interception], epoch: int, *, training: bool, checked: bool) -> Jobs:
        return {
            number: Job(self.code, scope, epoch, training, checked) for number, scope in enumerate(scopes)
        }

    def _run(
        self,
        program: Iterable[Action],
        jobs: Mapping[int, Job],
        messages: Messages,
        compute: Callable[[Action], None],
        epoch: int,
    ) -> None:
        done: list[Action] = []
        try:
            for action in program:
                done.append(action)
                self.mesh.doing(f"epoch {epoch}: {action}")
                with self.phases.phase(str(action), epoch):
                    if action.kind.computes:
                        compute(action)
                    elif action.kind.sends:
                        messages.send(action)
                    else:
                        self._received(action, jobs[action.chunk], messages)
        except BaseException:
            known = program if isinstance(program, tuple) else done
            print(
                f"kagome: rank {self.mesh.rank} stopped here:\n{pointed(known, len(done) - 1)}",
                file=sys.stderr,
            )
            raise

    def _received(self, action: Action, job: Job, messages: Messages) -> None:
        for name, value in messages.receive(action):
            if action.kind.forward:
                job.take(name, value)
            else:
                job.gradients[name] = value

    @contextmanager
    def _noting(self, notes: bool) -> Iterator[None]:
        """Buffers are moved once an epoch, not by every chunk."""
        before = [] if notes else [(buffer, buffer.clone()) for buffer in self.buffers]
        yield
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)


@contextmanager
def _calling_thread() -> Iterator[None]:
    """Backward runs in the thread that calls it, on a device too: chunks in lockstep wait inside."""
    with torch.autograd.set_multithreading_enabled(False):
        yield
