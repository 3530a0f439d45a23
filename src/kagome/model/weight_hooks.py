"""Weight hooks: a user's gradient hooks on weights, which plain training calls with a whole batch's gradient.

Where it sits: code that runs a backward of a few samples turns them off meanwhile; ``pipelining.dag`` runs
them once, on the summed gradients of a batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


@contextmanager
def hooks_off(weights: Iterable[Tensor]) -> Iterator[None]:
    """Turn off all hooks of these weights for a block; afterwards each weight has its hooks again."""
    held = [hooks for weight in weights for hooks in _of(weight) if hooks]
    before = [dict(hooks) for hooks in held]
    for hooks in held:
        hooks.clear()  # in place, because torch itself reads this mapping
    try:
        yield
    finally:
        for hooks, were in zip(held, before, strict=True):
            hooks.update(were)


def run_hooks(weights: Iterable[Tensor]) -> None:
    """Run the hooks of weights on their gradients, as a single backward would."""
    with torch.no_grad():
        for weight in weights:
            if weight.grad is None:
                continue
            # Torch's order: hooks on the gradient may replace it; those
            # that run after it was accumulated read it.
            on_gradient, on_weight = _of(weight)
            for hook in list(on_gradient.values()):
                found = hook(weight.grad)
                weight.grad = weight.grad if found is None else found
            for hook in list(on_weight.values()):
                hook(weight)


def _of(weight: Tensor) -> tuple[dict[int, Any], dict[int, Any]]:
    """Return a weight's hooks on its gradient, and its hooks that run after the gradient was accumulated."""
    # Torch makes each mapping when the first hook is registered;
    # before that the attribute is None or missing.
    return weight._backward_hooks or {}, getattr(weight, "_post_accumulate_grad_hooks", None) or {}
