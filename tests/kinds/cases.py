"""A case of a kind of silent fault: a model, its data and its loss, as a user brings them.

Where it sits: ``kind_*.py`` list cases, ``compare.py`` trains each by a plain loop and by ``Trainer``,
``table.py`` writes what came of it on every mesh, ``test_kinds.py`` runs some of them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.data import Data

PlainLoss = Callable[[nn.Module, Any, Data], Tensor]
"""Of the model, its output for the whole graph and the data: the mean that plain PyTorch trains by."""
PlainMetric = Callable[[Any, Data, Tensor], float]
"""Of the output, the data and a mask of vertices."""


def squared(model: nn.Module, out: Tensor, data: Data) -> Tensor:
    """The mean squared error of the training vertices."""
    chosen = data.train_mask
    return nn.functional.mse_loss(out[chosen], data.y[chosen])


def with_targets(data: Data, columns: int = 4) -> Data:
    """The data with float targets, half of them to train on and the others to test.

    None are for validation: the model holds its last weights after training then, not its best.
    """
    nodes = data.num_nodes
    draw = torch.Generator().manual_seed(11)
    data.y = torch.randn(nodes, columns, generator=draw, dtype=torch.float64)
    half = torch.randperm(nodes, generator=draw) % 2
    data.train_mask, data.val_mask, data.test_mask = (half == each for each in (0, 2, 1))
    return data


@dataclass(frozen=True)
class Case:
    """One model of a kind."""

    build: Callable[[], nn.Module]
    """Makes the model; it is turned to float64 and has the weights of one seed."""
    data: Callable[[], Data]
    """What the plain loop trains on."""
    plain: PlainLoss = squared
    loss: Callable[[nn.Module], Any] = lambda model: "mse"
    """Of the model, what Trainer is given as ``loss``."""
    given: dict[str, Any] = field(default_factory=dict)
    """More of Trainer's arguments."""
    train: dict[str, Any] = field(default_factory=dict)
    """More of the settings of ``Train``."""
    ours: Callable[[], Data] | None = None
    """What Kagome is given, where that is another object than the plain loop's."""
    metric: PlainMetric | None = None
    """What the metric of the validation vertices must be after each epoch; the best epoch's weights stay."""
    lower: bool = False
    """Whether less of the metric is better."""
    draws: bool = False
    """Whether it draws random numbers: it is compared with Kagome on one rank then."""
    unclear: bool = False
    """Whether one rank may refuse it by name too: nothing says what is meant, plain PyTorch computes what
    nobody means, or, a second list of edges, it is not served yet."""
    optimizer: Callable[[nn.Module], Callable[[Any], torch.optim.Optimizer]] = lambda model: sgd


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """Steps that are as large as the gradients are: Adam would make steps of rounding."""
    return torch.optim.SGD(parameters, lr=0.05)


def called(model: nn.Module, data: Data) -> Any:
    """Call a model as its signature asks: each argument is an attribute of the data, or the data."""
    names = list(inspect.signature(model.forward).parameters)
    held = {"data": data, "num_nodes": data.num_nodes, **data.to_dict()}
    return model(**{name: held[name] for name in names if name in held})
