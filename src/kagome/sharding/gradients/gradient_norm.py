"""Gradient norm: the norm of all gradients where some parameters are cut, and whether ranks' weights agree.

Where it sits: :meth:`kagome.sharding.module.ShardedModel.clip_grad_norm_` is made of it.

``torch.nn.utils.clip_grad_norm_`` takes the norm of what one rank has. With a cut parameter that norm differs
between ranks, each would scale the shared gradients by another factor, and their weights would diverge.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_

from kagome.comm.channel import Channel
from kagome.errors import ModelError
from kagome.sharding.gradients.gradient_sync import GradientSync


def clip(sync: GradientSync, channel: Channel, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scale all gradients so that their norm is at most ``max_norm``; return the norm before.

    Args:
        sync: The trained parameters.
        channel: The channel of all ranks of the graph.
        max_norm: The largest norm.
        norm_type: Its order, such as 2 or infinity.

    Shapes:
        -> ``[]``, the same on all ranks.

    Cost:
        One number is summed over the ranks, if a parameter is cut.
    """
    shared = [p.grad for p in sync.shared if p.grad is not None]
    cut = [p.grad for p in sync.cut if p.grad is not None]
    norm = _norm(shared, norm_type, channel.device)
    # Each rank has all entries of shared gradients, and other entries of cut ones: the latter are added up.
    if sync.cut:
        part, action = _norm(cut, norm_type, channel.device), "norm of gradients of tables"
        if norm_type == inf:
            norm = torch.maximum(norm, channel.all_reduce(part, "max", action=action))
        else:
            powers = channel.all_reduce(part**norm_type, action=action)
            norm = (norm**norm_type + powers) ** (1 / norm_type)
    clip_grads_with_norm_([*sync.pieces, *sync.cut], max_norm, norm)
    return norm


def _norm(gradients: Sequence[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """Return the norm of several tensors as if they were one vector; 0 of none."""
    norms = [torch.linalg.vector_norm(g, norm_type) for g in gradients if g.numel()]
    # Of pieces that FSDP has made, the norm of all of them.
    each = [(n.full_tensor() if isinstance(n, DTensor) else n).double() for n in norms]
    if not each:
        return torch.zeros((), dtype=torch.float64, device=device)
    norm: Tensor = torch.linalg.vector_norm(torch.stack(each), norm_type)
    return norm


def refuse_different_weights(shared: Sequence[nn.Parameter], channel: Channel) -> None:
    """Refuse weights that should be the same on all ranks and are not. All ranks call it.

    Raises:
        ModelError: If they differ by more than rounding.
    """
    # Two numbers a parameter, not its entries: a difference that keeps both sums is no fault of a norm.
    mine = [[float(p.detach().abs().double().sum()), float(p.detach().double().sum())] for p in shared]
    told: Any = channel.gather_objects(mine, "weights that all ranks share")
    for place, (size, total) in enumerate(mine):
        rounding = max(1e-12, 8 * torch.finfo(shared[place].dtype).eps)
        # GPUs of several kinds may round otherwise, so equal bits are not asked for.
        for each in told:
            theirs = each[place]
            if max(abs(size - theirs[0]), abs(total - theirs[1])) > rounding * max(size, theirs[0]):
                raise ModelError(
                    "weights that are the same on all ranks",
                    f"one of shape {list(shared[place].shape)} and sum {total:.9g} here, of sum "
                    f"{theirs[1]:.9g} on another rank",
                    where=f"net(...), rank {channel.rank}",
                    hint="net.clip_grad_norm_(max_norm) in place of torch's, which takes one rank's rows of "
                    "a cut table; net.sum(...) for what the loss takes of one",
                )
