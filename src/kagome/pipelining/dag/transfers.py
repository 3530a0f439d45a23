"""DAG transfers: point-to-point messages between the stages of a DAG, started early and waited for late.

Where it sits: ``sample_pass`` makes one for each pass. Receives are posted a few actions ahead, and sends
are not waited for. Each rank sends each rank of another stage exactly the samples that both compute. Chunks
of a graph have ``pipelining.p2p``: their messages go whole to one rank, are encoded, or stay on a rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

import torch

from kagome.comm.channel import Channel
from kagome.comm.exchange import Work
from kagome.comm.work import SendWork
from kagome.pipelining.dag.sample_layout import SampleLayout
from kagome.pipelining.dag.stage_run import DagStageCode, DagStageRun
from kagome.pipelining.executor import names_of
from kagome.schedule.actions import Action, Program

AHEAD: Final = 8
"""Most receives that are posted ahead: more would hold memory that the schedule's window does not count."""

_Coming = tuple[str, range, Work]


class DagTransfers:
    """The transfers of one rank in one pass.

    Args:
        code: The code of this rank's stage.
        layout: Which rank computes which samples.
        channel: The channel between all ranks.
        program: The actions of this rank, in order.
        stage_run_of: Returns the stage run of an action.
        turn: The update in words, for error messages.
    """

    def __init__(
        self,
        code: DagStageCode,
        layout: SampleLayout,
        channel: Channel,
        program: Program,
        stage_run_of: Callable[[Action], DagStageRun],
        turn: str,
    ) -> None:
        self.code, self.layout, self.channel = code, layout, channel
        self.stage_run_of, self.turn = stage_run_of, turn
        self._posted: deque[tuple[Action, list[_Coming]]] = deque()
        self._left = deque(action for action in program if action.kind.receives)
        self._leaving: dict[int, list[SendWork]] = {}
        self._post()

    def send(self, action: Action) -> None:
        """Start to send each peer its samples of a message."""
        stage_run, forward = self.stage_run_of(action), action.kind.forward
        for peer, samples in self.layout.shared(self.channel.rank, action.other, action.chunk):
            for name in self._names(action):
                value = stage_run.outs[name].detach() if forward else stage_run.gradient(name)
                sending = self.channel.start_send(
                    stage_run.rows(value, name, samples),
                    peer,
                    action=f"{action}, {self.turn}",
                    backward=not forward,
                )
                # A value whose gradient comes back is waited for then (`answered`), so that its memory is
                # freed. All other sends are filed under -1 and waited for at the end.
                answered = forward and self.code.branches.facts[name].grad
                self._leaving.setdefault(stage_run.samples.start if answered else -1, []).append(sending)

    def receive(self, action: Action) -> None:
        """Wait for the samples of a message from all peers, and hand them to the stage run."""
        stage_run = self.stage_run_of(action)
        posted, coming = self._posted.popleft()
        assert posted == action
        for name, samples, pending in coming:
            stage_run.take(action.other, name, (samples, pending.wait()))
        self._post()

    def answered(self, stage_run: DagStageRun) -> None:
        """Complete the sends of a stage run whose gradients have all come back; these sends have arrived."""
        for sending in self._leaving.pop(stage_run.samples.start, []):
            sending.wait()

    def end(self) -> None:
        """Wait until all sends have completed."""
        for leaving in self._leaving.values():
            for sending in leaving:
                sending.wait()
        self._leaving.clear()

    def _post(self) -> None:
        # Program order is arrival order for each peer, and receives must be posted in that order.
        while self._left and len(self._posted) < AHEAD:
            action = self._left.popleft()
            self._posted.append((action, list(self._begun(action))))

    def _begun(self, action: Action) -> Iterable[_Coming]:
        # The same peers, samples and names in the same order as the senders' `send`.
        for peer, samples in self.layout.shared(self.channel.rank, action.other, action.chunk):
            for name in self._names(action):
                fact = self.code.branches.facts[name]
                pending = self.channel.start_receive(
                    fact.shape_of(len(samples)),
                    fact.dtype or torch.float32,
                    peer,
                    action=f"{action}, {self.turn}",
                    backward=not action.kind.forward,
                )
                yield name, samples, pending

    def _names(self, action: Action) -> list[str]:
        return names_of(action, self.code.piece, self.code.branches.facts)
