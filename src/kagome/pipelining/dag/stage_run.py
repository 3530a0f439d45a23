"""Job: one rank's samples of one micro-batch, forward and backward through its stage.

Where it sits: ``executor`` makes one a micro-batch, gives it what ``transfers`` receive, and drops it at
last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kagome.model.operators.graph import Branches
from kagome.model.operators.pieces import Piece
from kagome.model.operators.sample_dropout import Masks
from kagome.pipelining.dag import autocast

Part = tuple[range, Tensor]
"""Some samples of a value."""


@dataclass(frozen=True)
class DagStageCode:
    """What a rank runs.

    Args:
        model: The user's module; only the stage's own layers are called.
        branches: Of the model.
        piece: This rank's stage.
        masks: Dropout.
    """

    model: nn.Module
    branches: Branches
    piece: Piece
    masks: Masks


class DagStageRun:
    """One rank's samples of one micro-batch.

    Args:
        code: What it runs.
        samples: Which samples of the batch.
        inputs: All of the batch.
        lose: Gives the share of the loss of the output's samples; None where there is no output, or no
            training.
        update: Number of the weights' update, for draws.
        training: Whether there is a backward.
    """

    def __init__(
        self,
        code: DagStageCode,
        samples: range,
        inputs: Mapping[str, Tensor],
        lose: Callable[[Tensor, range], Tensor] | None,
        update: int,
        *,
        training: bool,
    ) -> None:
        self.code, self.samples, self.update, self.training = code, samples, update, training
        self._inputs, self._lose = inputs, lose
        self._come: dict[tuple[int, str], list[Part]] = {}
        self._taken: dict[str, Tensor] = {}
        self.outs: dict[str, Tensor] = {}
        self.loss: Tensor | None = None

    def take(self, other: int, name: str, part: Part) -> None:
        """Note some samples of a value, or of a gradient of it that another stage has found."""
        self._come.setdefault((other, name), []).append(part)

    def forward(self) -> None:
        """Run the stage on what has come."""
        piece, facts = self.code.piece, self.code.branches.facts
        if not self.samples:
            return
        values: dict[str, Any] = {
            name: self._inputs[name][self.samples.start : self.samples.stop] for name in piece.inputs
        }
        for other, names in piece.takes.items():
            for name in names:
                value = _joined(self._come.pop((other, name)), facts[name].axis)
                self._taken[name] = values[name] = value.requires_grad_(facts[name].grad and self.training)
        for name in piece.copied:
            values[name] = values[name].clone()  # neither the user's batch nor a leaf can be changed
        ids = torch.arange(self.samples.start, self.samples.stop)
        masks, graph = self.code.masks, self.code.branches.graph
        with masks.on(self.update, ids), torch.set_grad_enabled(self.training):
            self.outs = graph.run(
                self.code.model,
                values,
                training=self.training,
                steps=piece.steps,
                before=masks.at,
                keep=piece.given,
            )
        if self._lose is not None and piece.output is not None:
            with torch.set_grad_enabled(self.training):
                self.loss = self._lose(self.outs[piece.output], self.samples)

    def backward(self) -> None:
        """Gradients of weights, and of what was taken, from those of what was given."""
        piece, facts = self.code.piece, self.code.branches.facts
        if not self.samples:
            return
        roots: list[Tensor] = []
        gradients: list[Tensor | None] = []
        for other in sorted(piece.gives):  # always in one order: sums have the same bits
            for name in piece.gives[other]:
                if facts[name].grad and self.outs[name].requires_grad:
                    roots.append(self.outs[name])
                    gradients.append(_joined(self._come.pop((other, name)), facts[name].axis))
        if self.loss is not None and self.loss.requires_grad:
            roots.append(self.loss)
            gradients.append(None)
        if roots:
            with autocast.without(roots[0].device):
                torch.autograd.backward(roots, gradients)
        self.outs = {}

    def gradient(self, name: str) -> Tensor:
        """The gradient of a value that was taken."""
        value = self._taken[name]
        return torch.zeros_like(value) if value.grad is None else value.grad

    def rows(self, value: Tensor, name: str, wanted: range) -> Tensor:
        """Some of a value's samples."""
        axis = self.code.branches.facts[name].axis
        return value.narrow(axis, wanted.start - self.samples.start, len(wanted))


def _joined(parts: Iterable[Part], axis: int) -> Tensor:
    """Samples in their order."""
    ordered = [tensor for _, tensor in sorted(parts, key=lambda part: part[0].start)]
    return ordered[0] if len(ordered) == 1 else torch.cat(ordered, axis)
