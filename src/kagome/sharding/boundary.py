"""Boundary: autograd functions where tensors enter and leave the model, and where ranks' values are reduced.

Where it sits: :class:`kagome.sharding.module.ShardedModel` passes all inputs and outputs through them.

The ranks minimize the mean of their losses (see ``gradient_sync``). So in a backward that trains, a gradient
by an input row is divided by the number of ranks, as gradients of parameters are. In ``torch.autograd.grad``
by an input nothing is scaled: it is the derivative of what the user wrote, and all ranks have the same.

=====================  ==============================  =====================================
                       in ``loss.backward()``          in ``torch.autograd.grad`` by inputs
=====================  ==============================  =====================================
rows that enter        divided by the ranks            as they are
the same on all ranks  summed, divided by the ranks    summed
rows that leave        as they are                     as they are
a number that leaves   as it is                        divided by the ranks: each has it
a total of ranks       summed                          as it is
=====================  ==============================  =====================================
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kagome.comm.channel import Channel
from kagome.sharding.gradient_sync import GradientSync


@dataclass(frozen=True)
class Boundary:
    """What the autograd functions of one model share.

    Args:
        sync: The synchronization of gradients.
        channel: The channel of all ranks of the graph.
    """

    sync: GradientSync
    channel: Channel

    def enter(self, value: Tensor, *, rows: bool) -> Tensor:
        """Return an input of the model; ``rows`` says whether it has this rank's rows alone."""
        if not value.requires_grad or self.channel.size == 1:
            return value
        return _Enter.apply(value, self, rows)  # type: ignore[no-any-return,no-untyped-call]

    def leave(self, value: Tensor, token: Tensor, *, rows: bool) -> Tensor:
        """Return an output of the model, whose backward visits every exchange: see [Note: token]."""
        if not value.requires_grad:
            return value
        return _Leave.apply(value, token, self, rows)  # type: ignore[no-any-return,no-untyped-call]

    def total(self, part: Tensor, action: str) -> Tensor:
        """Return the sum of a tensor over all ranks, with gradient. All ranks call it."""
        if not part.requires_grad:
            return self.channel.all_reduce(part, action=action)
        return _Total.apply(part, self, action)  # type: ignore[no-any-return,no-untyped-call]


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, boundary: Boundary, rows: bool) -> Tensor:
        ctx.boundary, ctx.rows = boundary, rows
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        boundary, g = ctx.boundary, grads[0]
        trains = boundary.sync.started()
        if not ctx.rows:
            g = boundary.total(g, "gradient of an input that all ranks share")
        return (g / boundary.channel.size if trains else g), None, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, token: Tensor, boundary: Boundary, rows: bool) -> Tensor:
        ctx.boundary, ctx.rows = boundary, rows
        ctx.save_for_backward(torch.zeros_like(token))
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        boundary, g = ctx.boundary, grads[0]
        trains = boundary.sync.started()
        if not trains and not ctx.rows:
            g = g / boundary.channel.size
        return g, ctx.saved_tensors[0], None, None


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
