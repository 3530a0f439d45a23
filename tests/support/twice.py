"""Twice: a model trained with every layer run once, and with layers that run again, on the same parts.

Where it sits: ``recompute/test_recompute.py`` and ``test_recompute_blocks.py`` compare what both leave.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch_geometric.data import Data

from convolutions import double_precision, sample_graph
from kagome.comm.channel import Channel
from kagome.components.parallelize import ParallelModel, PartOptions, parallelize
from kagome.config import Model
from kagome.graph.partition.partition import extract
from kagome.model.zoo import build_model
from parity import alone, random_owner

Build = Callable[[], nn.Module]
Ranks = Callable[..., list]
ROUNDING = 1e-12
FAN_IN, FAN_OUT = 6, 4


@dataclass
class Left:
    """What training left on one rank."""

    out: Tensor
    grads: dict[str, Tensor | None]
    buffers: dict[str, Tensor]
    traffic: list[dict[str, int]]
    """Bytes sent in each epoch, by kind."""
    peak: int
    """Most bytes of tensors that lived at once in the last epoch, beside weights and the graph."""


class Peak(TorchDispatchMode):
    """The most bytes that live at once of what any call has made."""

    def __init__(self) -> None:
        super().__init__()
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, Tensor) and tensor.layout is torch.strided:
                storage = tensor.untyped_storage()
                ref = StorageWeakRef(storage)
                self._live.setdefault(ref.cdata, (ref, storage.nbytes()))
        self._live = {key: value for key, value in self._live.items() if not value[0].expired()}
        self.bytes = max(self.bytes, sum(size for _, size in self._live.values()))
        return out


def train(
    channel: Channel,
    build: Build,
    data: Data,
    owner: Tensor,
    again: bool,
    fast: bool = True,
    epochs: int = 2,
    blind: bool = False,
    measured: bool = False,
    away: bool = False,
) -> Left:
    """Train on this rank's part, without a step: two epochs show what layers keep between them.

    Args:
        channel: The way to the other parts.
        build: Makes the model.
        data: The whole graph.
        owner: Part of each vertex.
        again: Whether layers run again.
        fast: Whether messages are put off.
        epochs: Forward and backward passes.
        blind: Part 0 has no training vertex: its loss is the token alone.
        measured: Whether the peak is measured.
        away: Whether the user lets autograd keep copies of what it saves.
    """
    with double_precision():
        torch.manual_seed(0)
        model = build().double()
        part = extract(data, owner, channel.rank, channel.size)
        x = part.nodes["x"] = part.nodes["x"].detach().clone().requires_grad_(data.x.requires_grad)
        net = parallelize(model, part, channel, PartOptions(seed=3, fast=fast, recompute=again))
        model.train()
        traffic, peak = [], Peak()
        channel.take_traffic()
        random.seed(5)
        with net:
            for epoch in range(1, epochs + 1):
                model.zero_grad(set_to_none=True)
                x.grad = None
                with Peak() if measured else torch.enable_grad() as peak:
                    with saved_tensors_hooks(torch.clone, torch.clone) if away else nullcontext():
                        out = net.forward(epoch, training=True, checked=epoch == 1)
                    token = net.scope.forward.forward_pass.token
                    weights = torch.arange(data.num_nodes * math.prod(out.shape[1:])).sin()
                    weights = weights.view(data.num_nodes, *out.shape[1:])[part.own]
                    loss = token if blind and channel.rank == 0 else (out * weights).sum() + token
                    loss.backward()
                traffic.append(channel.take_traffic().bytes)
        grads = {"x": x.grad, **{name: p.grad for name, p in model.named_parameters()}}
        buffers = {name: b.clone() for name, b in model.named_buffers()}
        return Left(out.detach(), grads, buffers, traffic, peak.bytes if measured else 0)


def both(ranks: Ranks, world: int, build: Build, data: Data | None = None, **given: Any) -> list[list[Left]]:
    """The ranks' results with every layer run once, and with layers that run again."""
    data = sample_graph(1) if data is None else data
    owner = given.pop("owner", None)
    owner = random_owner(data.num_nodes, world, seed=world) if owner is None else owner
    named = {"fast": True, "epochs": 2, "blind": False, "measured": False, "away": False, **given}
    return [ranks(world, train, build, data, owner, again, *named.values()) for again in (False, True)]


def assert_same(once: list[Left], twice: list[Left]) -> None:
    """Output, gradients and buffers to rounding; the bytes of every kind, of every epoch."""
    for plain, found in zip(once, twice, strict=True):
        pairs = {"output": (plain.out, found.out)}
        pairs |= {name: (grad, found.grads[name]) for name, grad in plain.grads.items()}
        for name, (value, other) in pairs.items():
            assert (value is None) == (other is None), name
            if value is not None and other is not None and value.numel():
                gap = float((value - other).abs().max() / value.abs().max().clamp(min=1e-30))
                assert gap <= ROUNDING, (name, gap)
        assert all(torch.equal(value, found.buffers[name]) for name, value in plain.buffers.items())
        assert plain.traffic == found.traffic


def zoo(name: str, layers: int = 3, hidden: int = 8, heads: int = 2, dropout: float = 0.4) -> nn.Module:
    settings = Model(name=name, layers=layers, hidden=hidden, heads=heads, dropout=dropout)
    histogram = torch.tensor([2, 3, 5, 8, 6, 3, 2, 1])
    return build_model(
        settings, in_channels=FAN_IN, out_channels=FAN_OUT, num_nodes=30, degree_histogram=histogram
    )


def on_one_rank(model: nn.Module, data: Data | None = None) -> ParallelModel:
    data = sample_graph(1) if data is None else data
    part = extract(data, torch.zeros(data.num_nodes, dtype=torch.long), 0, 1)
    return parallelize(model, part, alone(), PartOptions(recompute=True))
