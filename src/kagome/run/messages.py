"""Messages: what crosses between the stages of one part, chunk by chunk, begun early and waited for late.

Where it sits: ``pipeline`` posts all receives of a pass before its first action, so that transfers run while
stages compute; a SEND begins and is not waited for before the pass ends.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from kagome.comm.channel import Channel
from kagome.run.job import Job, StageCode
from kagome.schedule.actions import Action, Kind


class Messages:
    """One rank's, in one pass.

    Args:
        code: Of this rank's stage.
        pipe: The ranks that hold this part, one a stage.
        jobs: The chunks, by number.
        epoch: For errors.
    """

    def __init__(self, code: StageCode, pipe: Channel, jobs: dict[int, Job], epoch: int) -> None:
        self.code, self.pipe, self.jobs, self.epoch = code, pipe, jobs, epoch
        self._coming: dict[Action, list[tuple[str, Any]]] = {}
        self._leaving: list[Any] = []

    def post(self, actions: Iterable[Action]) -> None:
        """Begin the receives among these actions, in their order."""
        values = self.code.survey.values
        for action in actions:
            if action.kind.receives:
                scope = self.jobs[action.chunk].scope
                self._coming[action] = [
                    (
                        name,
                        self.pipe.start_receive(
                            self.code.shape(name, scope),
                            values[name].dtype or torch.float32,
                            action.other,
                            action=self._words(action),
                            backward=not action.kind.forward,
                        ),
                    )
                    for name in self.names(action)
                ]

    def names(self, action: Action) -> list[str]:
        """The values that a SEND or RECV is about."""
        stage = self.code.stage
        given = stage.gives if action.kind in (Kind.SEND_F, Kind.RECV_B) else stage.takes
        names = given.get(action.other, ())
        return [n for n in names if action.kind.forward or self.code.survey.values[n].grad]

    def send(self, action: Action) -> None:
        """Begin to send a chunk's values, or their gradients."""
        job = self.jobs[action.chunk]
        for name in self.names(action):
            value = job.outs[name] if action.kind.forward else job.gradient(name)
            self._leaving.append(
                self.pipe.start_send(
                    value.detach().contiguous(),
                    action.other,
                    action=self._words(action),
                    backward=not action.kind.forward,
                )
            )

    def receive(self, action: Action) -> list[tuple[str, Tensor]]:
        """Wait for what a RECV is about."""
        return [(name, coming.wait()) for name, coming in self._coming.pop(action)]

    def end(self) -> None:
        """Wait until all that was sent has left."""
        leaving, self._leaving = self._leaving, []
        for each in leaving:
            each.wait()

    def _words(self, action: Action) -> str:
        return f"{action}, epoch {self.epoch}"
