"""Wrappers: remove what other ways of running put around a model, such as ``DistributedDataParallel``.

Where it sits: ``train.trainer``, ``verify.check``, ``autoplan.plan`` and ``pipelining.dag`` pass a user's
model through here first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import wraps
from typing import Final, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from kagome.errors import ModelError

AROUND: Final = {
    "OptimizedModule": "_orig_mod",
    "DistributedDataParallel": "module",
    "DataParallel": "module",
}
"""Classes around a whole model that compute nothing of their own, and the attribute that holds the model.

``DistributedDataParallel`` adds sums of gradients over ranks, which Kagome makes itself; its hooks do nothing
where its own forward has not run.
"""
WITHIN: Final = {
    "DistributedDataParallel": "a wrapper that sums gradients over ranks by itself",
    "DataParallel": "a wrapper that cuts its inputs into rows for several devices",
    "FullyShardedDataParallel": "weights that lie in pieces on the ranks",
    "FSDPModule": "weights that lie in pieces on the ranks",
}
"""Classes around a layer, or a whole model, that cannot be taken off, and why."""

P = ParamSpec("P")
T = TypeVar("T")


def unwrapped(model: nn.Module, *, empty: bool = False) -> nn.Module:
    """Return the model that a user wrote, without its wrappers. Compiled layers inside stay.

    Args:
        model: The user's module.
        empty: Whether weights may hold no numbers yet; :func:`refuse_empty` refuses those that must.

    Raises:
        ModelError: If it is not a module, a layer is in a wrapper that cannot be taken off, or weights hold
            no numbers.
    """
    refuse_no_module(model, "this place")
    # Wrappers may be nested: torch.compile(DistributedDataParallel(model)).
    while (held := _attribute(model)) is not None:
        model = getattr(model, held)
    for name, module in model.named_modules():
        for kind in _classes(module) & WITHIN.keys():
            raise ModelError(
                "a model of plain layers",
                WITHIN[kind],
                where=f"{name or 'the model'}: {kind}",
                hint=f"leave {kind} out: Kagome divides the work among the ranks, and sums gradients",
            )
    if not empty:
        refuse_empty(model)
    return model


def refuse_empty(model: nn.Module, apart: Collection[Tensor] = ()) -> None:
    """Refuse meta tensors among the weights.

    Args:
        model: The user's module.
        apart: Tensors that get their numbers otherwise.

    Raises:
        ModelError: Naming the first of them.
    """
    given = {id(tensor) for tensor in apart}
    for name, held_tensor in (*model.named_parameters(), *model.named_buffers()):
        if held_tensor.is_meta and id(held_tensor) not in given:
            raise ModelError(
                "a model with numbers in its weights",
                f"{name}, a meta tensor, which holds none",
                hint='model.to_empty(device="cpu"), then give all weights their first values',
            )


def refuse_no_module(model: object, what: str) -> None:
    """Raise an error if a model is not a ``torch.nn.Module``.

    Raises:
        ModelError: If it is not one.
    """
    if not isinstance(model, nn.Module):
        hint = "an object of the class: Model(...)" if isinstance(model, type) else ""
        kind = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        raise ModelError(f"a torch.nn.Module in {what}", kind, hint=hint)


def as_written(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function so that compiled models, layers and functions run uncompiled in it.

    Compiled code would hide from the interception what a model reads and sums.
    """

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        # A pipeline also traces forward through them, which dynamo would refuse.
        followed = torch._dynamo.config.patch(error_on_nested_fx_trace=False)
        with followed, torch.compiler.set_stance("force_eager"):
            return function(*args, **kwargs)

    return run


def _attribute(model: nn.Module) -> str | None:
    return next((AROUND[kind] for kind in _classes(model) if kind in AROUND), None)


def _classes(module: nn.Module) -> set[str]:
    # By name, so that FSDP is not imported for models that do not use it. The bases count because fully_shard
    # gives a module a new class that derives from FSDPModule.
    return {kind.__name__ for kind in type(module).__mro__ if kind.__module__.startswith("torch")}
