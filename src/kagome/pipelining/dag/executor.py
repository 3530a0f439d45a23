"""DAG executor: runs one rank's program over the samples of a batch, action by action.

Where it sits: ``pipeline`` runs one for each update and each prediction.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from kagome.comm.channel import Channel
from kagome.model.operators.graph import Branches
from kagome.model.operators.pieces import Piece
from kagome.pipelining.dag.sample_layout import SampleLayout
from kagome.pipelining.dag.stage_run import DagStageCode, DagStageRun
from kagome.pipelining.dag.transfers import DagTransfers, names_of
from kagome.records.spans import Spans
from kagome.schedule.actions import Action, ActionKind, Program, Programs, pointed
from kagome.schedule.schedules import Shape, k_forward_k_backward

Lose = Callable[[Tensor, range], Tensor]


@dataclass(frozen=True)
class DagExecutor:
    """Runs the program of one rank.

    Args:
        code: The code of its stage.
        layout: Which rank computes which samples.
        program: The actions of its stage, in order.
        channel: The channel between all ranks.
        spans: Records the time of each action.
    """

    code: DagStageCode
    layout: SampleLayout
    program: Program
    channel: Channel
    spans: Spans

    def run(
        self,
        inputs: Mapping[str, Tensor],
        update: int,
        *,
        training: bool,
        lose: Lose | None = None,
        done: Callable[[DagStageRun], None] = lambda job: None,
    ) -> None:
        """Run the program on one batch.

        Args:
            inputs: The inputs of the whole batch, by name.
            update: The number of the weight update, for random draws and errors.
            training: Whether a backward follows.
            lose: Returns the share of the loss for some samples of the output.
            done: Called with each stage run after its forward.

        Raises:
            CommError: If a peer was late or lost. The program with the rank's position in it is written to
                stderr.
        """
        stage, replica = self.layout.seat(self.channel.rank)
        doing = f"update {update}" if training else "prediction"
        jobs: dict[int, DagStageRun] = {}

        def job_of(chunk: int) -> DagStageRun:
            if chunk not in jobs:
                samples = self.layout.samples(stage, chunk, replica)
                jobs[chunk] = DagStageRun(self.code, samples, inputs, lose, update, training=training)
            return jobs[chunk]

        last = {self._chunk(stage, action): place for place, action in enumerate(self.program)}
        at = 0
        try:
            messages = DagTransfers(
                self.code.branches,
                self.code.piece,
                self.layout,
                self.channel,
                self.program,
                lambda action: f"{action}, {doing}",
            )
            for at, action in enumerate(self.program):
                if self.channel.watch is not None:
                    self.channel.watch.doing(f"{doing}: {action}")
                with self.spans.phase(str(action), update if training else None):
                    if action.kind.computes:
                        job = job_of(action.chunk)
                        if action.kind is ActionKind.F:
                            job.forward()
                            done(job)
                        else:
                            job.backward()
                            messages.answered(job)
                    else:
                        job = job_of(self._chunk(stage, action))
                        (messages.send if action.kind.sends else messages.receive)(action, job)
                if last[self._chunk(stage, action)] == at:
                    jobs.pop(self._chunk(stage, action))
            messages.end()
        except BaseException:
            print(
                f"kagome: rank {self.channel.rank} stopped here in {doing}:\n{pointed(self.program, at)}",
                file=sys.stderr,
            )
            raise

    def _chunk(self, stage: int, action: Action) -> int:
        if action.kind.computes:
            return action.chunk
        return self.layout.chunk_of(stage, action.other, action.chunk)


def update_programs(
    branches: Branches, pieces: tuple[Piece, ...], shape: Shape, k: Sequence[int]
) -> Programs:
    """Return every stage's program for an update, without messages that would carry no value."""
    return tuple(
        tuple(a for a in program if a.kind.computes or names_of(branches, pieces[a.stage], a))
        for program in k_forward_k_backward(shape, k)
    )


def forward_program(piece: Piece, chunks: int) -> Program:
    """Return a stage's program for a prediction, in which all stages have the same micro-batches."""
    stage, program = piece.number, list[Action]()
    for chunk in range(chunks):
        program += [Action(stage, ActionKind.RECV_F, chunk, None, one) for one in sorted(piece.takes)]
        program.append(Action(stage, ActionKind.F, chunk))
        program += [Action(stage, ActionKind.SEND_F, chunk, None, other) for other in sorted(piece.gives)]
    return tuple(program)
