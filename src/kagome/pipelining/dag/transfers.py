"""DAG transfers: point-to-point messages between the stages of a DAG, started early and waited for late.

Where it sits: ``executor`` posts receives a few actions ahead, and sends without waiting. Each rank sends
each rank of another stage exactly the samples that both compute.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

import torch

from kagome.comm.channel import Channel
from kagome.comm.exchange import Work
from kagome.comm.work import SendWork
from kagome.model.operators.graph import Branches
from kagome.model.operators.pieces import Piece
from kagome.pipelining.dag.sample_layout import SampleLayout
from kagome.pipelining.dag.stage_run import DagStageRun
from kagome.schedule.actions import Action, ActionKind, Program

AHEAD: Final = 8
"""Most receives that are posted ahead: more would hold memory that the schedule's window does not count."""

_Coming = tuple[str, range, Work]


class DagTransfers:
    """The transfers of one rank in one pass.

    Args:
        branches: The model's graph of operators.
        piece: This rank's stage.
        layout: Which rank computes which samples.
        channel: The channel between all ranks.
        program: The actions of this rank, in order.
        words: Describes an action for error messages.
    """

    def __init__(
        self,
        branches: Branches,
        piece: Piece,
        layout: SampleLayout,
        channel: Channel,
        program: Program,
        words: Callable[[Action], str],
    ) -> None:
        self.branches, self.piece, self.layout, self.channel = branches, piece, layout, channel
        self.words = words
        self._posted: deque[tuple[Action, list[_Coming]]] = deque()
        self._left = deque(action for action in program if action.kind.receives)
        self._leaving: dict[int, list[SendWork]] = {}
        self._post()

    def send(self, action: Action, job: DagStageRun) -> None:
        """Start to send each peer its samples of a message."""
        forward = action.kind.forward
        for peer, samples in self.layout.shared(self.channel.rank, action.other, action.chunk):
            for name in names_of(self.branches, self.piece, action):
                value = job.outs[name].detach() if forward else job.gradient(name)
                sending = self.channel.start_send(
                    job.rows(value, name, samples),
                    peer,
                    action=self.words(action),
                    backward=not forward,
                )
                answered = forward and self.branches.facts[name].grad
                self._leaving.setdefault(job.samples.start if answered else -1, []).append(sending)

    def receive(self, action: Action, job: DagStageRun) -> None:
        """Wait for the samples of a message from all peers, and hand them to the stage run."""
        posted, coming = self._posted.popleft()
        assert posted == action
        for name, samples, pending in coming:
            job.take(action.other, name, (samples, pending.wait()))
        self._post()

    def answered(self, job: DagStageRun) -> None:
        """Complete the sends of a stage run whose gradients have all come back; these sends have arrived."""
        for sending in self._leaving.pop(job.samples.start, []):
            sending.wait()

    def end(self) -> None:
        """Wait until all sends have completed."""
        for leaving in self._leaving.values():
            for sending in leaving:
                sending.wait()
        self._leaving.clear()

    def _post(self) -> None:
        while self._left and len(self._posted) < AHEAD:
            action = self._left.popleft()
            self._posted.append((action, list(self._begun(action))))

    def _begun(self, action: Action) -> Iterable[_Coming]:
        for peer, samples in self.layout.shared(self.channel.rank, action.other, action.chunk):
            for name in names_of(self.branches, self.piece, action):
                fact = self.branches.facts[name]
                pending = self.channel.start_receive(
                    fact.shape_of(len(samples)),
                    fact.dtype or torch.float32,
                    peer,
                    action=self.words(action),
                    backward=not action.kind.forward,
                )
                yield name, samples, pending


def names_of(branches: Branches, piece: Piece, action: Action) -> list[str]:
    """Return the values that a SEND or RECV transfers; backward only has those with a gradient."""
    given = piece.gives if action.kind in (ActionKind.SEND_F, ActionKind.RECV_B) else piece.takes
    names = given.get(action.other, ())
    return [name for name in names if action.kind.forward or branches.facts[name].grad]
