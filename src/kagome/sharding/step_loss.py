"""Step loss: the loss of one training step, of some rows of the model's output and of targets.

Where it sits: ``net.train_step`` takes one. ``module`` calls it once for all own rows; ``pipelined`` gives it
to the chunk engine, which calls it for each chunk of rows.
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
        ModelError: If it gives one number: a mean over the rows of one rank or chunk, or a sum.

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
    if weights is not None:
        weights = weights.reshape(*weights.shape, *[1] * (values.dim() - weights.dim()))
    return values, weights


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
        facts = labels_of(torch.tensor([0, 1]))  # of no labels: nothing is chosen by them
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
