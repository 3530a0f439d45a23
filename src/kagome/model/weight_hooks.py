"""Hooks that a user has hung on weights: in plain training each sees the gradient of a whole batch.

Where it sits: whatever runs a backward of a few samples takes them off for that time; ``run.dag`` runs them
once on the sums of a batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


@contextmanager
def hooks_off(weights: Iterable[Tensor]) -> Iterator[None]:
    """No hook of a weight runs in a block; each weight has its hooks again afterwards."""
    held = [hooks for weight in weights for hooks in _of(weight) if hooks]
    before = [dict(hooks) for hooks in held]
    for hooks in held:
        hooks.clear()  # in place: torch itself looks into this mapping
    try:
        yield
    finally:
        for hooks, were in zip(held, before, strict=True):
            hooks.update(were)


def run_hooks(weights: Iterable[Tensor]) -> None:
    """Run the hooks of weights on their gradients, as one backward would."""
    with torch.no_grad():
        for weight in weights:
            if weight.grad is None:
                continue
            on_gradient, on_weight = _of(weight)
            for hook in list(on_gradient.values()):
                found = hook(weight.grad)
                weight.grad = weight.grad if found is None else found
            for hook in list(on_weight.values()):
                hook(weight)


def _of(weight: Tensor) -> tuple[dict[int, Any], dict[int, Any]]:
    """A weight's hooks on its gradient as it comes, and on the weight once it has come."""
    return weight._backward_hooks or {}, getattr(weight, "_post_accumulate_grad_hooks", None) or {}
