"""Learning: loss, optimizer and scheduler of a run - a user's, tried before the first epoch, or the default.

Where it sits: ``trainer`` asks it once, before the engine is made.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from kagome.config import Train
from kagome.errors import ConfigError, KagomeError, ModelError
from kagome.run import task


def loss_of(loss: task.Loss | None, y: Tensor, classes: int) -> task.Loss:
    """The user's loss, tried on a few made-up rows, or the default one.

    Raises:
        ConfigError: If it averages over rows by itself.
    """
    kind = task.kind_of(y)
    if loss is None:
        return task.default_loss(kind, classes)
    generator = torch.Generator().manual_seed(0)
    sample = torch.randn(12, classes, generator=generator)
    if kind == "multilabel":
        labels = torch.ones(12, y.size(1)).to(y.dtype)
    else:
        labels = torch.randint(0, classes, (12,), generator=generator)
    try:
        return task.checked_loss(loss, sample, labels)
    except KagomeError:
        raise
    except (RuntimeError, IndexError, TypeError, ValueError):
        # A loss for outputs of another shape or device; the engine tries it on the first epoch's own.
        return loss


def optimizer_of(model: nn.Module, train: Train, make: Callable[[Any], Optimizer] | None = None) -> Optimizer:
    """The optimizer over all parameters that require a gradient.

    Raises:
        ModelError: If there are none.
        ConfigError: If ``make`` gives no optimizer, or one that runs the model by itself.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise ModelError("training needs a model with parameters", "it has none that require a gradient")
    if make is None:
        return torch.optim.Adam(parameters, lr=train.lr, weight_decay=train.weight_decay)
    if isinstance(make, Optimizer) or not callable(make):
        raise ConfigError(
            "optimizer=... takes a callable(params) -> Optimizer",
            f"it was given a {type(make).__name__}",
            hint="optimizer=lambda params: torch.optim.AdamW(params, lr=0.01)",
        )
    optimizer = make(parameters)
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            "optimizer=... takes a callable(params) -> Optimizer", f"it gave a {type(optimizer).__name__}"
        )
    # torch wraps step; the signature it shows is the class's own.
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise ConfigError(
            "one epoch is one forward pass, one backward pass and one step",
            f"{type(optimizer).__name__} runs the model several times within a step",
            hint="an optimizer whose step needs no closure: Adam, AdamW, SGD, ...",
        )
    return optimizer


def frozen(model: nn.Module) -> frozenset[str]:
    """The names of the parameters that are not trained: they require no gradient."""
    return frozenset(name for name, p in model.named_parameters() if not p.requires_grad)


def refuse_thawed(model: nn.Module, before: frozenset[str]) -> None:
    """Parameters that need a gradient only now are in no optimizer and in no sum over ranks.

    Args:
        model: As it is now.
        before: What was ``frozen`` when optimizer and engine were made.

    Raises:
        ModelError: If one of them has been unfrozen since.
    """
    if thawed := sorted(before - frozen(model)):
        more = f" and {len(thawed) - 1} more" if len(thawed) > 1 else ""
        raise ModelError(
            "fit trains the parameters that required a gradient when the Trainer was made",
            f"{thawed[0]}{more} did not then, and {'do' if more else 'does'} now",
            hint="make a new Trainer of this model, which keeps its weights, and fit with that",
        )


def set_rates(optimizer: Optimizer, train: Train) -> None:
    """Give the default optimizer today's rates, which may be others than a checkpoint's."""
    for group in optimizer.param_groups:
        group["lr"], group["weight_decay"] = train.lr, train.weight_decay


def scheduler_of(optimizer: Optimizer, make: Callable[[Optimizer], Any] | None) -> Any:
    """What steps the learning rate once an epoch, or None.

    Raises:
        ConfigError: If ``make`` gives nothing that steps.
    """
    if make is None:
        return None
    scheduler = make(optimizer) if callable(make) else make
    if not callable(getattr(scheduler, "step", None)) or scheduler is make:
        raise ConfigError(
            "scheduler=... takes a callable(optimizer) with a step()",
            f"it was given, or gave, a {type(scheduler).__name__}",
            hint="scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 50)",
        )
    return scheduler


def step_scheduler(scheduler: Any, loss: float, val_metric: float | None) -> None:
    """One step; a plateau is one of the loss, or with ``mode="max"`` of the validation metric."""
    if not isinstance(scheduler, ReduceLROnPlateau):
        scheduler.step()
    elif scheduler.mode == "min":
        scheduler.step(loss)
    elif val_metric is not None:
        scheduler.step(val_metric)
