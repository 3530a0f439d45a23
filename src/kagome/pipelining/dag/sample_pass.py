"""Sample pass: one rank's stage over the samples of a batch, forward and backward or forward alone.

Where it sits: ``pipeline`` runs one for each update and each prediction. It makes the stage runs, and
``pipelining.executor`` performs the program.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from kagome.comm.channel import Channel
from kagome.model.operators.graph import Branches
from kagome.model.operators.pieces import Piece
from kagome.pipelining.dag.sample_layout import SampleLayout
from kagome.pipelining.dag.stage_run import DagStageCode, DagStageRun
from kagome.pipelining.dag.transfers import DagTransfers
from kagome.pipelining.executor import Executor, needed
from kagome.records.spans import Spans
from kagome.schedule.actions import Action, ActionKind, Program, Programs
from kagome.schedule.schedules import Shape, forward_only
from kagome.schedule.simulator import simulate

Lose = Callable[[Tensor, range], Tensor]


@dataclass(frozen=True)
class SamplePass:
    """The pass of one rank over the samples of a batch.

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
        done: Callable[[DagStageRun], None] = lambda stage_run: None,
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
        # A later entry overwrites an earlier one, so what remains is each micro-batch's last action in the
        # program.
        last = {self.layout.chunk(stage, action): action for action in self.program}
        stage_runs: dict[int, DagStageRun] = {}

        def stage_run_of(action: Action) -> DagStageRun:
            """Return the stage run of an action, and drop it with its last one: its memory is freed then."""
            chunk = self.layout.chunk(stage, action)
            stage_run = stage_runs.pop(chunk, None)
            if stage_run is None:
                samples = self.layout.samples(stage, chunk, replica)
                stage_run = DagStageRun(self.code, samples, inputs, lose, update, training)
            if action is not last[chunk]:
                stage_runs[chunk] = stage_run
            return stage_run

        turn = f"update {update}" if training else "prediction"
        messages = DagTransfers(self.code, self.layout, self.channel, self.program, stage_run_of, turn)

        def compute(action: Action) -> None:
            stage_run = stage_run_of(action)
            if action.kind is ActionKind.F:
                stage_run.forward()
                done(stage_run)
            elif action.kind is ActionKind.W:
                stage_run.backward_weights()
            else:
                if action.kind is ActionKind.I:
                    stage_run.backward_inputs()
                else:
                    stage_run.backward()
                # A gradient that has come back shows that the value had arrived, so this wait ends at once.
                messages.answered(stage_run)

        executor = Executor(self.channel.rank, self._doing, self.spans.phase)
        executor.run(self.program, compute, messages, turn=turn, epoch=update if training else None)

    def _doing(self, action: str) -> None:
        if self.channel.watch is not None:
            self.channel.watch.doing(action)


def update_programs(branches: Branches, pieces: Sequence[Piece], programs: Programs) -> Programs:
    """Return every stage's program for an update, without messages that would carry no value.

    Raises:
        ScheduleError: If stages would wait for each other forever, by orders that were written by hand.
    """
    found = tuple(tuple(needed(program, pieces, branches.facts)) for program in programs)
    simulate(found, lambda action: 1.0)
    return found


def forward_program(pieces: Sequence[Piece], chunks: int, stage: int) -> Program:
    """Return a stage's program for a prediction, in which all stages have the same micro-batches."""
    # An empty batch: no stage computes or sends.
    if not chunks:
        return ()
    links = tuple((one, piece.number) for piece in pieces for one in piece.takes)
    return forward_only(Shape(len(pieces), range(chunks), links))[stage]
