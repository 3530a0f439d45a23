"""Gradient hooks: a user's hooks on parameters' gradients, run once the gradients are summed over all ranks.

Where it sits: ``gradients`` takes the hooks off around a backward and runs them after the sum. Autograd would
run them on the share of one rank or of one chunk: a clamp or a norm of a share is not a share of the clamp or
norm of the sum.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

from torch import nn

Hooks = MutableMapping[int, Callable[..., Any]]


class GradientHooks:
    """The hooks on some parameters' gradients.

    Args:
        parameters: The parameters that are trained.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._of_tensor: dict[int, Hooks] = {}
        self._after: dict[int, Hooks] = {}

    def take_off(self) -> None:
        """Take the hooks off before a backward: none runs until :meth:`run`."""
        for place, parameter in enumerate(self._parameters):
            for name, taken in (
                ("_backward_hooks", self._of_tensor),
                ("_post_accumulate_grad_hooks", self._after),
            ):
                hooks: Hooks | None = getattr(parameter, name)
                if hooks:
                    taken[place] = dict(hooks)
                    hooks.clear()  # autograd refers to this very dict

    def put_back(self) -> None:
        """Put the hooks back after the backward, also after one that failed."""
        for place, parameter in enumerate(self._parameters):
            for name, taken in (
                ("_backward_hooks", self._of_tensor),
                ("_post_accumulate_grad_hooks", self._after),
            ):
                if place in taken:
                    getattr(parameter, name).update(taken[place])

    def run(self) -> None:
        """Run the hooks, as autograd would have, on the gradients that the parameters hold now."""
        for place in sorted({*self._of_tensor, *self._after}):
            parameter = self._parameters[place]
            if parameter.grad is None:
                continue
            for hook in self._of_tensor.get(place, {}).values():
                changed = hook(parameter.grad)
                parameter.grad = parameter.grad if changed is None else changed
            for hook in self._after.get(place, {}).values():
                hook(parameter)
        self._of_tensor, self._after = {}, {}
