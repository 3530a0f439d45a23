"""Train step: forward, loss and backward in one call, and the loss of such a step.

Where it sits: ``module`` takes its steps from here. ``pipelined`` takes the objective that gives the loss of
the present step to the chunk engine.

::

    graph axis    loss(out, *targets) of own rows           one call a rank
    pipe axis     loss(out, *targets) of a chunk's rows     one call a chunk, on the ranks of the last stage
                  ──> values, weights ──> their mean over all rows of all ranks
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from kagome.errors import ModelError
from kagome.graph.structure.labels import labels_of
from kagome.objective.loss_state import Moves, unmoved
from kagome.objective.objective import Objective, Target
from kagome.sharding.collectives import Collectives
from kagome.sharding.rows.placing import Placer

Loss = Callable[..., Any]
"""``loss(out, *targets)``: a value a row, or ``(values, weights)``, of some rows."""
PLACES: Final = "kagome_rows"
"""The attribute of a part with the number of each of its vertices, by which targets are found."""


def values_of(loss: Loss, out: Any, targets: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    """Return a loss's values of some rows, and their weights if it gives any.

    Args:
        loss: The user's loss.
        out: The model's output for the rows.
        targets: The targets of the same rows.

    Raises:
        ModelError: If it gives one number, or one for each column: a mean over the rows of one rank or chunk.

    Shapes:
        values ``[n, ...]``, weights ``[n]`` or as the values.
    """
    found = loss(out, *targets)
    values, weights = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
    if not isinstance(values, Tensor) or values.dim() == 0:
        raise ModelError(
            "loss(out, *targets) to give a value a row, or (values, weights)",
            "one number" if isinstance(values, Tensor) else type(values).__name__,
            where="net.train_step",
            hint='reduction="none"; net.train_step takes the mean over all rows of all ranks',
        )
    _refuse_columns(values, out)
    if weights is not None:
        # A weight a row, [n], counts for each column of values [n, columns].
        weights = weights.reshape(*weights.shape, *[1] * (values.dim() - weights.dim()))
    return values, weights


def _refuse_columns(values: Tensor, out: Any) -> None:
    """Refuse a value for each column, as ``((out - y) ** 2).mean(0)`` gives, which weighs ranks and not rows.

    Raises:
        ModelError: If the first value depends on several rows.
    """
    if not isinstance(out, Tensor) or values.shape != out.shape[1:] or not values.numel():
        return
    if not (out.requires_grad and values.requires_grad):
        return
    # As many columns as rows have values of one shape, too: only a gradient tells a row from a column.
    first = values.reshape(-1)[0]
    (slope,) = torch.autograd.grad(first, out, retain_graph=True, allow_unused=True)
    rows = 0 if slope is None else int((slope.detach().flatten(1) != 0).any(dim=1).sum())
    if rows > 1:
        raise ModelError(
            "loss(out, *targets) to give a value a row, or (values, weights)",
            f"{values.numel():,} values, one for each column, of {rows:,} rows each",
            where="net.train_step",
            hint='.mean(1) or reduction="none"; net.train_step takes the mean over all rows of all ranks',
        )


def tensors_of(target: Tensor | Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the targets of a step, which may be one or several."""
    return (target,) if isinstance(target, Tensor) else tuple(target)


class GraphSteps(Collectives):
    """One training step, where each rank runs the whole model on its part."""

    _placer: Placer

    def train_step(
        self, *args: Any, target: Tensor | Sequence[Tensor] = (), loss: Loss, **kwargs: Any
    ) -> Tensor:
        """Run forward, loss and backward. All ranks call it.

        It is ``net(...)``, ``net.mean(...)`` and ``backward()`` in one, with the signature that a pipe axis
        needs, so that one loop serves both.

        Args:
            args: What the model's ``forward`` takes.
            target: One tensor or several with a row a vertex: all of the graph's rows, or own rows.
            loss: ``loss(out, *targets)`` of own rows: a value a row, or ``(values, weights)``.
            kwargs: The same as ``args``, by name.

        Returns:
            The mean loss over all rows of all ranks, on every rank, without gradient.

        Raises:
            ModelError: If the loss gives one number, or one for each column.

        Shapes:
            ``[]``.

        Example:
            >>> import torch, kagome
            >>> from torch_geometric.nn import GCN
            >>> data = kagome.load("digits")
            >>> model = GCN(64, 16, num_layers=2, out_channels=10)
            >>> optimizer = torch.optim.Adam(model.parameters())
            >>> by_row = torch.nn.CrossEntropyLoss(reduction="none")
            >>> with kagome.shard(model, data) as net:
            ...     for _ in range(2):
            ...         loss = net.train_step(data.x, data.edge_index, target=data.y, loss=by_row)
            ...         optimizer.step()
            ...         optimizer.zero_grad()
            ...     net.eval_step(data.x, data.edge_index).shape
            torch.Size([1797, 10])
        """
        targets = [self._placer.target(each) for each in tensors_of(target)]
        out = self(*args, **kwargs)
        try:
            values, weights = values_of(loss, out, targets)
        except ModelError as error:
            self._mesh.graph.report_error(error)  # a rank of one row cannot see it, and waits in the mean
            raise
        total = self.mean(values, weights)
        total.backward()
        return total.detach()

    def eval_step(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output for own rows in evaluation mode, without gradient. All ranks call it.

        Args:
            args: What the model's ``forward`` takes.
            kwargs: The same by name.
        """
        training = self.training
        try:
            with torch.no_grad():
                return self.eval()(*args, **kwargs)
        finally:
            self.train(training)


@dataclass
class StepCall:
    """The loss and the targets of the present step, called with the numbers of the rows.

    Args:
        loss: The user's loss.
        targets: Own rows of each target.
    """

    loss: Loss
    targets: Sequence[Tensor] = ()

    def __call__(self, out: Tensor, places: Tensor) -> Any:
        """Return the values of some rows, with their weights if the loss gives any."""
        # Chunks have some of this rank's rows, in an order of their own.
        values, weights = values_of(self.loss, out, [target[places] for target in self.targets])
        return values if weights is None else (values, weights.expand_as(values))


@dataclass(frozen=True)
class StepObjective(Objective):
    """The objective of a loop of the user's own: any loss, of targets that are given in each step.

    Args:
        call: The loss and the targets of the present step.
    """

    call: StepCall = field(default_factory=lambda: StepCall(_first))

    @staticmethod
    def of(call: StepCall) -> StepObjective:
        """Return the objective whose loss is a step's."""
        # Facts of labels choose built-in losses and metrics. Here they are those of no labels.
        facts = labels_of(torch.tensor([0, 1]))
        return StepObjective("", facts, loss=call, pairs=None, call=call)

    @property
    def uses(self) -> frozenset[str]:
        """The attribute that says which rows the loss is called for."""
        return frozenset({PLACES})

    def target(self, inputs: Mapping[str, Any], rows: Tensor | slice) -> Target:
        """Return the numbers of some rows, in place of labels."""
        return Target(inputs[PLACES][rows])

    def tried(self) -> AbstractContextManager[Moves]:
        """Return a context for trial calls of the loss: state that the user's loss keeps is put back."""
        return unmoved(self.call.loss)


def _first(out: Tensor, *_: Tensor) -> Tensor:
    """Return a value a row, for what is tried before the first step."""
    return out.reshape(out.size(0), -1).sum(1)


def no_step() -> StepCall:
    """Return the call that stands for the loss before the first step."""
    return StepCall(_first)
