"""Stage transfers: point-to-point messages between the stages of one part, a chunk at a time.

Where it sits: ``chunk_passes`` posts the receives of a pass before its first action, so that transfers run
while stages compute: with gloo all of them, with nccl a few at a time. A SEND starts a transfer; only the end
of the pass waits for it. A value for another stage of the same rank is kept here until that stage takes it.
Samples of a batch have ``dag.transfers``: their messages go in parts to several replicas, and there may be
too many to post at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice

import torch
from torch import Tensor

from kagome.adaptive.stage_codec import StageCodec, decoded_values
from kagome.comm.channel import Channel
from kagome.comm.exchange import Work
from kagome.comm.transport.routes import POSTED_AHEAD, Route
from kagome.comm.work import SendWork
from kagome.pipelining.executor import names_of
from kagome.pipelining.stage_run import StageCode, StageRun
from kagome.schedule.actions import Action


class StageTransfers:
    """The transfers of one rank in one pass.

    Args:
        codes: The code of each of this rank's stages, by stage number.
        pipe: The channel between the ranks that hold this part.
        ranks: The rank of every stage.
        stage_runs: The stage runs of this pass, by stage and chunk.
        epoch: The epoch, for error messages and random draws.
        codec: How values are encoded for a transfer; None where no backward follows, so that they are sent
            as they are.
    """

    def __init__(
        self,
        codes: Mapping[int, StageCode],
        pipe: Channel,
        ranks: Sequence[int],
        stage_runs: Mapping[tuple[int, int], StageRun],
        epoch: int,
        codec: StageCodec | None = None,
    ) -> None:
        self.codes, self.pipe, self.ranks, self.stage_runs = codes, pipe, ranks, stage_runs
        self.epoch, self.codec = epoch, codec
        self._here: dict[Action, list[tuple[str, Tensor]]] = {}
        self._coming: dict[Action, list[tuple[str, Work]]] = {}
        self._leaving: list[SendWork] = []
        self._order: deque[Action] = deque()
        self._left: dict[Route, deque[Action]] = {}

    def post(self, arriving: Iterable[Action], program: Iterable[Action]) -> None:
        """Start the receives of a pass, or as many as may be posted before they are needed.

        Args:
            arriving: All receives; those from one rank must be in the order in which it sends.
            program: This rank's actions in the order in which it performs them.
        """
        awaited = [action for action in arriving if self._from_other_rank(action)]
        # gloo finds a message by its tag and size, and its receives cost no more than their buffers.
        if self.pipe.lanes:
            for action in awaited:
                self._begin(action)
            return
        for action in awaited:
            self._left.setdefault(self._route(action), deque()).append(action)
        self._order.extend(a for a in program if a.kind.receives and self._from_other_rank(a))
        self._begin_next()

    def _from_other_rank(self, action: Action) -> bool:
        # Values between two stages of this rank need no message; they stay in `_here`.
        return self.ranks[action.other] != self.pipe.rank

    def _begin_next(self) -> None:
        """Start the next receives of the program."""
        for action in tuple(islice(self._order, POSTED_AHEAD)):
            self._begin_up_to(action)

    def _begin_up_to(self, action: Action) -> None:
        """Start a receive, after those that its sender sends before it on the same route."""
        left = self._left[self._route(action)]
        while action not in self._coming:
            self._begin(left.popleft())

    def _begin(self, action: Action) -> None:
        self._coming[action] = [(name, self._begun(name, action)) for name in self.names(action)]

    def _route(self, action: Action) -> Route:
        return Route(self.ranks[action.other], self.pipe.rank, not action.kind.forward)

    def _begun(self, name: str, action: Action) -> Work:
        """Start one receive; ``wait`` of the result returns the value."""
        code, stage_run = self.codes[action.stage], self.stage_runs[action.stage, action.chunk]
        value = code.survey.values[name]
        shape, dtype = code.shape(name, stage_run.scope), value.dtype or torch.float32
        # Sender and receiver decide alike whether a value is encoded, from the survey, so no header is sent.
        size = None if self.codec is None else self.codec.size(value, shape)
        coming = self.pipe.start_receive(
            shape if size is None else (size,),
            dtype if size is None else torch.uint8,
            self.ranks[action.other],
            action=self._words(action),
            backward=not action.kind.forward,
        )
        if self.codec is None or size is None:
            return coming
        return decoded_values(coming, self.codec.codec, shape, dtype)

    def names(self, action: Action) -> list[str]:
        """Return the names of the values that a SEND or RECV transfers."""
        code = self.codes[action.stage]
        return names_of(action, code.stage, code.survey.values)

    def send(self, action: Action) -> None:
        """Start to send a chunk's values, or their gradients."""
        stage_run = self.stage_runs[action.stage, action.chunk]
        peer = self.ranks[action.other]
        for name in self.names(action):
            value = (stage_run.outs[name] if action.kind.forward else stage_run.gradient(name)).detach()
            if peer == self.pipe.rank:
                # In evaluation the receiving stage may change it in place while it is still being sent to
                # other stages.
                kept = value if stage_run.training else value.clone()
                # Filed under the RECV that will ask for it.
                self._here.setdefault(action.counterpart, []).append((name, kept))
                continue
            # The work holds the tensor until it is sent; `end` waits for all.
            self._leaving.append(
                self.pipe.start_send(
                    self._written(name, value, action).contiguous(),
                    peer,
                    action=self._words(action),
                    backward=not action.kind.forward,
                )
            )

    def _written(self, name: str, value: Tensor, action: Action) -> Tensor:
        """Return the tensor that is sent for a value: encoded, or the value itself."""
        if self.codec is None:
            return value
        self.codec.counts.plain += value.nbytes
        size = self.codec.size(self.codes[action.stage].survey.values[name], tuple(value.shape))
        if size is None:
            return value
        backward = not action.kind.forward
        where = f"{name} in {self._words(action)}"
        row_ids = self.stage_runs[action.stage, action.chunk].scope.ids.own()
        return self.codec.encode(name, value, row_ids, size, self.epoch, backward=backward, where=where)

    def receive(self, action: Action) -> None:
        """Wait for the values of a RECV, and hand them to the stage run."""
        if action in self._here:
            found = self._here.pop(action)
        else:
            if self._order:
                self._begin_up_to(action)
                self._order.remove(action)
                self._begin_next()
            found = [(name, coming.wait()) for name, coming in self._coming.pop(action)]
        stage_run = self.stage_runs[action.stage, action.chunk]
        for name, value in found:
            if action.kind.forward:
                stage_run.take(name, value)
            else:
                stage_run.returned(name, value)

    def end(self) -> None:
        """Wait until all sends have completed, and raise what the codec has refused."""
        leaving, self._leaving = self._leaving, []
        for each in leaving:
            each.wait()
        if self.codec is not None:
            self.codec.refusals.check()

    def _words(self, action: Action) -> str:
        return f"{action}, epoch {self.epoch}"
