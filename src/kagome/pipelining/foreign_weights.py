"""Foreign weights: weights that another rank of a pipeline trains, so that their values here are out of date.

Where it sits: ``chunk_engine`` and ``pipelining.dag.pipeline`` find out which weights a loss reads, and
refuse optimizers, hooks and schedulers that read foreign weights. A weight that the loss reads also belongs
to the stage of the loss, like a weight that two stages use: its gradients are summed, and both ranks apply
the same update.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from kagome.components.task import forked
from kagome.errors import ModelError
from kagome.model.split.stages import Stage

_FACTS = frozenset(
    (
        *(
            "requires_grad",
            "requires_grad_",
            "is_leaf",
            "grad_fn",
            "names",
            "_version",
            "__hash__",
        ),
        *("dtype", "device", "layout", "shape", "ndim", "dim", "size", "numel", "nelement", "stride"),
        *("element_size", "itemsize", "nbytes", "data_ptr", "get_device", "is_contiguous", "is_same_size"),
        *("is_sparse", "is_cuda", "is_cpu", "is_mps", "is_xpu", "is_meta", "is_quantized", "is_nested"),
        *("is_floating_point", "is_complex", "is_shared", "__len__"),
    )
)
"""Attributes and methods of a weight whose result does not depend on its values."""
_GRAD = "grad"


class Reads(TorchFunctionMode):
    """Records which of some weights are read.

    Args:
        weights: The weights to watch, by full name.
        grads: Whether reading ``grad`` counts: it is None here, unlike on the rank that trains the weight.
    """

    def __init__(self, weights: Mapping[str, Tensor], *, grads: bool) -> None:
        super().__init__()
        self._names = {id(weight): name for name, weight in weights.items()}
        self._facts = _FACTS if grads else _FACTS | {_GRAD}
        self.found: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a torch call, and record the weights among its arguments."""
        name = getattr(func, "__name__", "")
        # Reading an attribute (`weight.grad`) arrives as the `__get__` of a descriptor, whose owner has the
        # name.
        if name == "__get__":
            name = getattr(getattr(func, "__self__", None), "__name__", name)
        if name not in self._facts:
            for value in _flat((*args, *(kwargs or {}).values())):
                if (found := self._names.get(id(value))) is not None and found not in self.found:
                    self.found.append(found)
        return func(*args, **(kwargs or {}))


def _flat(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from _flat(value)
        else:
            yield value


def read_by_loss(lose: Callable[[], Any], model: nn.Module) -> tuple[str, ...]:
    """Return the weights that a loss reads besides the output.

    If the loss raises, the result has the weights that it read before.

    Args:
        lose: Computes the loss of made-up rows of an output.
        model: The user's module.
    """
    with Reads(dict(model.named_parameters()), grads=False) as reads, suppress(Exception):
        lose()  # real rows are watched in the first epoch, which also reports a failure
    return tuple(reads.found)


def with_read(stages: Sequence[Stage], names: Sequence[str]) -> tuple[Stage, ...]:
    """Return the stages with these weights added to the stage that computes the output."""
    return tuple(
        replace(stage, parameters=(*stage.parameters, *(n for n in names if n not in stage.parameters)))
        if stage.output is not None
        else stage
        for stage in stages
    )


@contextmanager
def watched(foreign: Mapping[str, Tensor], who: str, *, grads: bool = False) -> Iterator[None]:
    """Refuse code in this block that reads weights that another rank trains.

    Args:
        foreign: The weights that other ranks train, by full name.
        who: What runs in the block, for the error message.
        grads: Whether reading their gradients, which are None here, is refused too.

    Raises:
        ModelError: If one is read; the error names it.
    """
    if not foreign:
        yield
        return
    with Reads(foreign, grads=grads) as reads:
        yield
        # After the block, so that an error of the block itself comes first.
        if reads.found:
            raise refused(reads.found, who)


def refused(names: Sequence[str], who: str) -> ModelError:
    """Return the error for reading weights that another rank trains."""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return ModelError(
        "a rank of a pipeline to read the weights of its own stage alone between forward and update",
        f"{who} that reads {names[0]}{more}, which another rank trains: they are old here",
        hint="read all weights after an epoch, take a penalty on them as the optimizer's weight_decay, or "
        "train without stages",
    )


@contextmanager
def unmoving(buffers: Mapping[str, Tensor]) -> Iterator[None]:
    """Refuse a loss that reads buffers which a forward changes on another rank, or once in each chunk.

    Args:
        buffers: The buffers that may not be read, by full name.

    Raises:
        ModelError: If one is read; the error names it.
    """
    with Reads(buffers, grads=False) as reads:
        yield
        if reads.found:
            raise ModelError(
                "the loss of a pipeline's last stage to read what that stage has once all rows have passed",
                f"a read of the buffer {reads.found[0]}, which the forward moves elsewhere or chunk by chunk",
                hint="train without stages and chunks, or return it beside the output",
            )


def refuse_mixing(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that updates a weight by the gradients of others.

    Two steps on copies differ in the gradient of one weight; all other weights must be equal after both. An
    optimizer that takes a norm over all gradients would here see the gradients of one rank's stages only.

    Raises:
        ModelError: If another weight differs.
    """
    if type(optimizer).__module__.startswith("torch."):
        return  # torch's optimizers update each weight by itself
    steps = []
    # Only the first weight's gradient differs between the two steps. 3 changes a norm over all gradients
    # clearly.
    for factor in (1.0, 3.0):
        copied = object.__new__(type(optimizer))  # a copied optimizer lacks the attributes of its subclass
        vars(copied).update(copy.deepcopy(vars(optimizer)))
        copied._optimizer_step_pre_hooks.clear()
        copied._optimizer_step_post_hooks.clear()
        pairs = [
            (theirs, ours)
            for group, held in zip(optimizer.param_groups, copied.param_groups, strict=True)
            for theirs, ours in zip(group["params"], held["params"], strict=True)
            if theirs.grad is not None
        ]
        for place, (theirs, ours) in enumerate(pairs):
            ours.grad = theirs.grad.clone() * (factor if place == 0 else 1.0)
        # An optimizer that draws (noisy updates) must draw the same in both steps.
        with forked():
            torch.manual_seed(0)
            copied.step()
        steps.append([ours.detach() for _, ours in pairs[1:]])
    if not all(torch.equal(one, two) for one, two in zip(*steps, strict=True)):
        raise ModelError(
            "an optimizer of a pipeline to move each weight by its own gradient",
            f"{type(optimizer).__name__}, which moves one by another's gradient too, and a rank has those of "
            "its stages",
            hint="train.clip for a norm of all gradients, or train without stages",
        )


def watch_hooks(optimizer: torch.optim.Optimizer, foreign: Mapping[str, Tensor]) -> None:
    """Wrap an optimizer's step hooks, also those added since, so that they cannot read foreign weights."""
    for hooks in (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks):
        for key, hook in hooks.items():
            if not isinstance(hook, _Watched):
                hooks[key] = _Watched(hook, foreign)


class _Watched:
    """A step hook that may not read other ranks' weights or gradients."""

    def __init__(self, hook: Callable[..., Any], foreign: Mapping[str, Tensor]) -> None:
        self._hook, self._foreign = hook, foreign

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the hook, and refuse it if it reads foreign weights."""
        with watched(self._foreign, "a hook of the optimizer", grads=True):
            return self._hook(*args, **kwargs)
