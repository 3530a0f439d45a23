"""Messages: what crosses between the stages of one part, chunk by chunk, begun early and waited for late.

Where it sits: ``pipeline`` posts all receives of a pass before its first action, so that transfers run while
stages compute; a SEND begins and is not waited for before the pass ends.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from kagome.comm.channel import Channel, Pending, Sending
from kagome.run.job import Job, StageCode
from kagome.run.stage_codec import Coded, StageCodec
from kagome.schedule.actions import Action, Kind


class Messages:
    """One rank's, in one pass.

    Args:
        code: Of this rank's stage.
        pipe: The ranks that hold this part, one a stage.
        jobs: The chunks, by number.
        epoch: For errors and draws.
        codec: How values look on the way; None where no backward follows: they go as they are.
    """

    def __init__(
        self,
        code: StageCode,
        pipe: Channel,
        jobs: dict[int, Job],
        epoch: int,
        codec: StageCodec | None = None,
    ) -> None:
        self.code, self.pipe, self.jobs, self.epoch, self.codec = code, pipe, jobs, epoch, codec
        self._coming: dict[Action, list[tuple[str, Pending | Coded]]] = {}
        self._leaving: list[Sending] = []

    def post(self, actions: Iterable[Action]) -> None:
        """Begin the receives among these actions, in their order."""
        for action in actions:
            if action.kind.receives:
                self._coming[action] = [(name, self._begun(name, action)) for name in self.names(action)]

    def _begun(self, name: str, action: Action) -> Pending | Coded:
        """One receive; its wait gives the value."""
        value = self.code.survey.values[name]
        shape, dtype = self.code.shape(name, self.jobs[action.chunk].scope), value.dtype or torch.float32
        size = None if self.codec is None else self.codec.size(value, shape)
        coming = self.pipe.start_receive(
            shape if size is None else (size,),
            dtype if size is None else torch.uint8,
            action.other,
            action=self._words(action),
            backward=not action.kind.forward,
        )
        if self.codec is None or size is None:
            return coming
        return Coded(coming, self.codec.codec, shape, dtype)

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
            value = (job.outs[name] if action.kind.forward else job.gradient(name)).detach()
            self._leaving.append(
                self.pipe.start_send(
                    self._written(name, value, action).contiguous(),
                    action.other,
                    action=self._words(action),
                    backward=not action.kind.forward,
                )
            )

    def _written(self, name: str, value: Tensor, action: Action) -> Tensor:
        """What travels of a value."""
        if self.codec is None:
            return value
        self.codec.crossed.plain += value.nbytes
        size = self.codec.size(self.code.survey.values[name], tuple(value.shape))
        if size is None:
            return value
        backward = not action.kind.forward
        where = f"{name} in {self._words(action)}"
        stamps = self.jobs[action.chunk].scope.row_ids()
        return self.codec.encode(name, value, stamps, size, self.epoch, backward=backward, where=where)

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
