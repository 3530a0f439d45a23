"""Boundary: autograd functions where tensors enter and leave the model, and where ranks' values are reduced.

Where it sits: :class:`kagome.sharding.module.ShardedModel` passes all inputs and outputs through it.

The ranks minimize the mean of their losses (see ``gradient_sync``). So in a backward that trains, the
gradient of a tensor that the user gave to the model is divided by the number of ranks, as gradients of
parameters are. In ``torch.autograd.grad`` by an input nothing is scaled: it is the derivative of what the
user wrote, and all ranks have the same.

=====================  =======================  =====================================
                       in ``loss.backward()``   in ``torch.autograd.grad`` by inputs
=====================  =======================  =====================================
rows that enter        as they are              as they are
the same on all ranks  summed                   summed
a leaf of the user's   divided by the ranks     as it is
rows that leave        as they are              as they are
a number that leaves   as it is                 divided by the ranks: each has it
a total of ranks       summed                   as it is
=====================  =======================  =====================================
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from kagome.comm.channel import Channel
from kagome.errors import ModelError
from kagome.halo.forward_pass import ForwardPass
from kagome.placement.weak_map import WeakTensorMap
from kagome.sharding.gradients.gradient_sync import GradientSync


@dataclass(frozen=True)
class Boundary:
    """What the autograd functions of one model share.

    Args:
        sync: The synchronization of gradients.
        channel: The channel of all ranks of the graph.
        own: The number of this rank's own vertices, of each vertex set.
    """

    sync: GradientSync
    channel: Channel
    own: tuple[int, ...]
    _leaves: WeakTensorMap[bool] = field(default_factory=WeakTensorMap)

    def enter(self, value: Tensor, *, rows: bool) -> Tensor:
        """Return an input of the model; ``rows`` says whether it has this rank's rows alone.

        Raises:
            ModelError: If its rows come from weights whose gradients nobody sums over the ranks.
        """
        if not value.requires_grad or self.channel.size == 1:
            return value
        for leaf in _leaves(value):
            self._watch(leaf, rows=rows)
        return value if rows else _Enter.apply(value, self)  # type: ignore[no-untyped-call]

    def _watch(self, leaf: Tensor, *, rows: bool) -> None:
        if leaf in self._leaves or self.sync.has(leaf):
            return
        if rows and isinstance(leaf, nn.Parameter) and not {*self.own} & {*leaf.shape[:1]}:
            raise ModelError(
                "inputs of net(...) from the model's own weights, or from none",
                f"rows made by weights of shape {list(leaf.shape)} outside of it, whose gradients are one "
                "rank's share",
                where="net(...)",
                hint="kagome.shard(model, graph, beside=[module]) for a module outside of the model",
            )
        self._leaves[leaf] = True
        sync, size = self.sync, self.channel.size
        leaf.register_hook(lambda g: g / size if sync.training_now else g)

    def leave(self, value: Tensor, forward_pass: ForwardPass, *, rows: bool) -> Tensor:
        """Return an output of the model, whose backward visits every exchange: see [Note: token]."""
        if not value.requires_grad:
            return value
        return _Leave.apply(value, forward_pass.token, forward_pass, self, rows)  # type: ignore[no-any-return,no-untyped-call]

    def total(self, part: Tensor, action: str) -> Tensor:
        """Return the sum of a tensor over all ranks, with gradient. All ranks call it."""
        if not part.requires_grad:
            return self.channel.all_reduce(part, action=action)
        return _Total.apply(part, self, action)  # type: ignore[no-any-return,no-untyped-call]


def _leaves(value: Tensor) -> list[Tensor]:
    """Return the leaves of autograd that a tensor is made of, up to outputs of a sharded model."""
    if value.grad_fn is None:
        return [value]
    found: list[Tensor] = []
    seen: set[Any] = set()
    waiting: list[Any] = [value.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen or isinstance(node, _Leave._backward_cls):
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            found.append(leaf)
        waiting.extend(above for above, _ in node.next_functions)
    return found


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, boundary: Boundary) -> Tensor:
        ctx.boundary = boundary
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.boundary.total(grads[0], "gradient of an input that all ranks share"), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, value: Tensor, token: Tensor, forward_pass: ForwardPass, boundary: Boundary, rows: bool
    ) -> Tensor:
        # The nodes of exchanges refer to the pass weakly; a derivative of the output needs it.
        ctx.forward_pass = forward_pass
        ctx.boundary, ctx.rows = boundary, rows
        ctx.save_for_backward(torch.zeros_like(token))
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        boundary, g = ctx.boundary, grads[0]
        trains = boundary.sync.started()
        if not trains and not ctx.rows:
            g = g / boundary.channel.size
        return g, ctx.saved_tensors[0], None, None, None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, boundary: Boundary, action: str) -> Tensor:
        ctx.boundary, ctx.action = boundary, action
        return boundary.channel.all_reduce(part, action=action)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        boundary, g = ctx.boundary, grads[0]
        if boundary.sync.started():
            g = boundary.total(g, f"{ctx.action}, backward")
        return g, None, None
