"""Parity: one model on the whole graph in plain PyG, and split over ranks by Kagome, compared entry by entry.

Where it sits: every test of exactness calls ``whole`` and ``split`` (or, on ranks of its own, ``parity``).

::

    whole(build, data)                    Result  (plain PyG, no Kagome)
    ranks(world, parity, build, ...)      [Share, ...]  ──joined──> Result
    differences(found, expected)          name -> largest difference / largest entry
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch_geometric.data import Data

from convolutions import CASES, ConvCase, double_precision
from kagome.comm.channel import Channel
from kagome.comm.stats import Traffic
from kagome.components.parallelize import PartOptions, parallelize
from kagome.config import PartialSums
from kagome.graph.partition.partition import extract
from kagome.model.forward_call import ForwardCall
from odd_models import ODD_MODELS

Build = Callable[[], nn.Module]
TOLERANCE = 1e-10
"""Of the largest entry, in float64."""


@dataclass
class Result:
    """What one run of a model left, in the order of the whole graph."""

    out: Tensor
    grads: dict[str, Tensor | None]
    x_grad: Tensor | None
    buffers: dict[str, Tensor]
    halo: list[int] = field(default_factory=list)
    """Halo bytes that all ranks sent, an epoch each."""


@dataclass
class Share:
    """A rank's share of a result."""

    own: Tensor
    out: Tensor
    grads: dict[str, Tensor | None]
    x_grad: Tensor | None
    buffers: dict[str, Tensor]
    halo: list[int]


def conv(name: str, variant: str) -> nn.Module:
    """Build a case of the registry."""
    case = next(case for case in CASES if (case.name, case.variant) == (name, variant))
    assert case.build is not None
    return case.build()


def odd(name: str, fan_in: int = 6, fan_out: int = 4) -> nn.Module:
    """Build an odd model."""
    return ODD_MODELS[name](fan_in, fan_out)


def case_build(case: ConvCase) -> Build:
    """The case as a function that pickles."""
    return partial(conv, case.name, case.variant)


def seeded(build: Build, seed: int) -> nn.Module:
    """The model with the weights of a seed, drawn in float64."""
    torch.manual_seed(seed)
    return build().double()


def whole(build: Build, data: Data, *, seed: int = 0, epochs: int = 1) -> Result:
    """Train ``epochs`` times on the whole graph in plain PyG, without a step; what the last one left."""
    with double_precision():
        model = seeded(build, seed)
        model.train()
        x = data.x.detach().clone().requires_grad_(data.x.requires_grad)
        inputs = {**{name: data[name] for name in data.keys()}, "x": x}  # noqa: SIM118 - Data is not a dict
        for _ in range(epochs):
            model.zero_grad(set_to_none=True)
            x.grad = None
            out = ForwardCall.of(model, set(inputs)).call(model, inputs)
            loss = (out * weights(out, data.num_nodes, seed)).sum()
            if loss.requires_grad:
                loss.backward()
        return Result(out.detach(), _grads(model), x.grad, _buffers(model))


def parity(
    channel: Channel,
    build: Build,
    data: Data,
    owner: Tensor,
    seed: int = 0,
    epochs: int = 1,
    tensor: int = 1,
    bound: int | None = None,
    partial_sums: PartialSums = "off",
) -> Share:
    """Train ``epochs`` times on this rank's part, as ``run.engine`` does, without a step.

    Args:
        channel: The way to the other parts.
        build: Makes the model.
        data: The whole graph; a gradient of x comes back if x requires one.
        owner: Part of each vertex.
        seed: Of weights, draws, and the loss's weights.
        epochs: Forward and backward passes.
        tensor: How many ranks reduce some columns of a part each, where columns do not meet.
        bound: Bytes of working memory of such sums.
        partial_sums: When parts send partial sums in place of rows.
    """
    options = PartOptions(seed=seed, tensor=tensor, memory=bound, partial_sums=partial_sums)
    with double_precision():
        part = extract(data, owner, channel.rank, channel.size)
        x = part.nodes["x"] = part.nodes["x"].detach().clone().requires_grad_(data.x.requires_grad)
        model = seeded(build, seed)
        model.train()
        halo = []
        take_traffic = getattr(channel, "take_traffic", Traffic)
        take_traffic()
        with parallelize(model, part, channel, options) as net:
            for epoch in range(1, epochs + 1):
                model.zero_grad(set_to_none=True)
                x.grad = None
                out = net.forward(epoch, training=True, checked=True)
                loss = (out * weights(out, data.num_nodes, seed)[part.own]).sum()
                loss = loss + net.scope.forward.forward_pass.token
                if loss.requires_grad:
                    loss.backward()
                halo.append(take_traffic().bytes.get("halo", 0))
        if net.scope.sliced.bound is not None and bound is not None and not net.escape:
            assert 0 < net.scope.sliced.bound.gauge.peak <= bound
        return Share(part.own, out.detach(), _grads(model), x.grad, _buffers(model), halo)


def joined(shares: list[Share], nodes: int) -> Result:
    """The ranks' shares put together: rows to their places, gradients summed in the order of ranks."""
    out = shares[0].out.new_full((nodes, *shares[0].out.shape[1:]), float("nan"))
    x_grad = None
    if any(share.x_grad is not None for share in shares):
        width = next(share.x_grad.shape[1:] for share in shares if share.x_grad is not None)
        x_grad = out.new_zeros(nodes, *width)
    grads: dict[str, Tensor | None] = {}
    for share in shares:
        out[share.own] = share.out
        if share.x_grad is not None and x_grad is not None:
            x_grad[share.own] = share.x_grad
        for name, grad in share.grads.items():
            before = grads.get(name)
            grads[name] = grad if before is None else before if grad is None else before + grad
    halo = [sum(share.halo[epoch] for share in shares) for epoch in range(len(shares[0].halo))]
    for share in shares[1:]:
        for name, value in share.buffers.items():
            assert torch.equal(value, shares[0].buffers[name]), f"ranks disagree on the buffer {name}"
    return Result(out, grads, x_grad, shares[0].buffers, halo)


def split(
    ranks: Callable[..., list],
    world: int,
    build: Build,
    data: Data,
    owner: Tensor,
    *,
    seed: int = 0,
    epochs: int = 1,
) -> Result:
    """``parity`` on ``world`` real ranks, joined."""
    return joined(ranks(world, parity, build, data, owner, seed, epochs), data.num_nodes)


def one_rank(build: Build, data: Data, *, seed: int = 0, epochs: int = 1) -> Result:
    """``parity`` on one rank, in this process: what draws are compared with."""
    owner = torch.zeros(data.num_nodes, dtype=torch.long)
    return joined([parity(alone(), build, data, owner, seed, epochs)], data.num_nodes)


def alone() -> Channel:
    """A channel of one rank."""
    return Channel(None, "cpu")


def differences(found: Result, expected: Result) -> dict[str, float]:
    """The largest difference of each tensor.

    Of outputs and buffers relative to their own largest entry, of gradients to the model's largest.
    """
    errors = {"output": _error(found.out, expected.out)}
    pairs = {name: (found.grads[name], value) for name, value in expected.grads.items()}
    pairs["x"] = (found.x_grad, expected.x_grad)
    scale = max((float(v.abs().max()) for _, v in pairs.values() if v is not None and v.numel()), default=0.0)
    for name, (ours, theirs) in pairs.items():
        like = ours if ours is not None else theirs
        if like is not None:
            zeros = torch.zeros_like(like)
            errors[f"gradient of {name}"] = _error(
                zeros if ours is None else ours, zeros if theirs is None else theirs, scale
            )
    assert found.buffers.keys() == expected.buffers.keys()
    for name, value in expected.buffers.items():
        errors[f"buffer {name}"] = _error(found.buffers[name], value)
    return errors


def worst(found: Result, expected: Result) -> float:
    """The largest of all differences; not a number where one is."""
    return float(torch.tensor(list(differences(found, expected).values()), dtype=torch.float64).max())


def assert_equal(found: Result, expected: Result) -> None:
    """Everything agrees to ``TOLERANCE``."""
    wrong = {name: error for name, error in differences(found, expected).items() if not error <= TOLERANCE}
    assert not wrong, wrong


def random_owner(nodes: int, world: int, seed: int = 0) -> Tensor:
    """A part for each vertex, all parts used where there are enough vertices."""
    owner = torch.randint(0, world, (nodes,), generator=torch.Generator().manual_seed(seed))
    owner[torch.arange(min(world, nodes))] = torch.arange(min(world, nodes))
    return owner


def weights(out: Tensor, nodes: int, seed: int) -> Tensor:
    """What the loss multiplies each entry of the whole output with, on the output's device."""
    generator = torch.Generator().manual_seed(seed + 1)
    return torch.rand(nodes, *out.shape[1:], generator=generator, dtype=out.dtype).to(out.device) + 0.5


def _grads(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.named_buffers()}


def _error(a: Tensor, b: Tensor, scale: float | None = None) -> float:
    assert a.shape == b.shape, (a.shape, b.shape)
    a, b = (value if value.layout == torch.strided else value.to_dense() for value in (a, b))
    if not b.numel():
        return 0.0
    base = float(b.double().abs().max()) if scale is None else scale
    gap = float((a.double() - b.double()).abs().max())
    return gap / base if base else gap
