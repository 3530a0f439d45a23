"""DAG stage run: one rank's samples of one micro-batch, forward and backward through its stage.

Where it sits: ``sample_pass`` makes one for each micro-batch, and drops it with its last action.
``transfers`` hands it the values that it receives. Chunks of a graph have ``pipelining.stage_run``: they
read each other's rows, which needs an interceptor, and each lives until the pass ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from kagome.model.operators import autocast
from kagome.model.operators.graph import Branches
from kagome.model.operators.pieces import Piece
from kagome.model.operators.sample_dropout import Masks
from kagome.model.operators.split_backward import SplitBackward

Part = tuple[range, Tensor]
"""Some samples of a value: their range in the batch, and the tensor."""


@dataclass(frozen=True)
class DagStageCode:
    """The stage of a rank, ready to run.

    Args:
        model: The user's module; only the layers of the stage are called.
        branches: The model's graph of operators.
        piece: This rank's stage.
        masks: The dropout masks, drawn by sample.
    """

    model: nn.Module
    branches: Branches
    piece: Piece
    masks: Masks


@dataclass
class DagStageRun:
    """One rank's run of its stage on its samples of one micro-batch.

    Args:
        code: The code of the stage.
        samples: The range of samples in the batch.
        inputs: The inputs of the whole batch, by name.
        lose: Returns the share of the loss for some samples of the output; None without training.
        update: The number of the weight update, for random draws.
        training: Whether a backward follows.
        outs: The values that the stage has computed for later stages or as the output, by name.
        loss: The share of the loss; None where the stage does not compute the output.
    """

    code: DagStageCode
    samples: range
    inputs: Mapping[str, Tensor]
    lose: Callable[[Tensor, range], Tensor] | None
    update: int
    training: bool
    outs: dict[str, Tensor] = field(default_factory=dict)
    loss: Tensor | None = None
    _come: dict[tuple[int, str], list[Part]] = field(default_factory=dict)
    _taken: dict[str, Tensor] = field(default_factory=dict)
    _split: SplitBackward | None = None

    def take(self, other: int, name: str, part: Part) -> None:
        """Store samples of a value, or of its gradient, that another stage has sent."""
        self._come.setdefault((other, name), []).append(part)

    def forward(self) -> None:
        """Run the stage's forward on the values received."""
        piece, facts = self.code.piece, self.code.branches.facts
        # A short micro-batch may leave nothing for this replica. Its peers know that by the layout.
        if not self.samples:
            return
        values: dict[str, Any] = {
            name: self.inputs[name][self.samples.start : self.samples.stop] for name in piece.inputs
        }
        for other, names in piece.takes.items():
            for name in names:
                value = _joined(self._come.pop((other, name)), facts[name].axis)
                # Received values are leaves, whose `.grad` is sent back after backward.
                self._taken[name] = values[name] = value.requires_grad_(facts[name].grad and self.training)
        for name in piece.copied:
            values[name] = values[name].clone()  # a layer changes it: neither the batch nor a leaf may change
        # Dropout masks are drawn by the sample's place in the batch, whatever the micro-batches.
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
        if self.lose is not None and piece.output is not None:
            with torch.set_grad_enabled(self.training):
                self.loss = self.lose(self.outs[piece.output], self.samples)

    def backward(self) -> None:
        """Run backward from the gradients of the sent values and the loss, to weights and received values."""
        roots, gradients = self._roots()
        if roots:
            with autocast.without(roots[0].device):
                torch.autograd.backward(roots, gradients)

    def backward_inputs(self) -> None:
        """Run the first half of backward, to the received values."""
        roots, gradients = self._roots()
        if roots:
            self._split = SplitBackward(
                roots, gradients, [value for value in self._taken.values() if value.requires_grad]
            )
            self._split.inputs()

    def backward_weights(self) -> None:
        """Run the second half of backward, to the weights, and free the graph."""
        if self._split is not None:
            self._split.weights()
        self._split = None

    def _roots(self) -> tuple[list[Tensor], list[Tensor | None]]:
        """Return the tensors that backward starts from, each with its gradient, and forget the outputs."""
        piece, facts = self.code.piece, self.code.branches.facts
        if not self.samples:
            return [], []
        roots: list[Tensor] = []
        gradients: list[Tensor | None] = []
        for other in sorted(piece.gives):  # a fixed order, so that sums are the same bit for bit
            for name in piece.gives[other]:
                if facts[name].grad and self.outs[name].requires_grad:
                    roots.append(self.outs[name])
                    gradients.append(_joined(self._come.pop((other, name)), facts[name].axis))
        if self.loss is not None and self.loss.requires_grad:
            roots.append(self.loss)
            gradients.append(None)
        self.outs = {}
        return roots, gradients

    def gradient(self, name: str) -> Tensor:
        """Return the gradient of a value that another stage sent; zeros if it has none."""
        value = self._taken[name]
        return torch.zeros_like(value) if value.grad is None else value.grad

    def rows(self, value: Tensor, name: str, wanted: range) -> Tensor:
        """Return the wanted samples of a value."""
        # Samples need not lie along axis 0. `wanted` counts in the batch, the tensor begins at this run's
        # first.
        axis = self.code.branches.facts[name].axis
        return value.narrow(axis, wanted.start - self.samples.start, len(wanted))


def _joined(parts: Iterable[Part], axis: int) -> Tensor:
    """Join samples in the order of the batch."""
    ordered = [tensor for _, tensor in sorted(parts, key=lambda part: part[0].start)]
    return ordered[0] if len(ordered) == 1 else torch.cat(ordered, axis)
