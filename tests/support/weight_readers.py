"""What reads all weights: penalties, forwards that read weights, optimizers that do.

Where it sits: ``pipelining/test_foreign_weights.py`` and ``kinds/kind_weights.py`` train by them.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer


class Net(nn.Module):
    """Four layers; may read weights in forward besides."""

    def __init__(self, inside: str = "", features: int = 8, classes: int = 4) -> None:
        super().__init__()
        widths = [features, 8, 8, 8, classes]
        self.convs = nn.ModuleList(pyg.SAGEConv(*each) for each in pairwise(widths))
        self.inside = inside

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for conv in self.convs[:-1]:
            x = conv(x, edge_index).tanh()
        x = self.convs[-1](x, edge_index)
        if self.inside == "sum":
            x = x + 0.01 * sum(p.abs().sum() for p in self.parameters())
        if self.inside == "norm":
            x = x * torch.cat([p.flatten() for p in self.parameters() if p.requires_grad]).norm()
        if self.inside == "first":
            x = x + self.convs[0].lin_l.weight.sum()
        return x


def rows(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y, reduction="none")


def summed(parts: Any) -> Tensor:
    return torch.stack(list(parts)).sum()


PENALTIES: dict[str, Callable[[Any], Tensor]] = {
    "none": lambda m: torch.zeros(()),
    "l1": lambda m: sum(p.abs().sum() for p in m.parameters()),
    "l2": lambda m: sum((p**2).sum() for p in m.parameters()),
    "weights alone": lambda m: sum(p.abs().sum() for n, p in m.named_parameters() if "weight" in n),
    "the first layer": lambda m: m.convs[0].lin_l.weight.norm(),
    "the last layer": lambda m: m.convs[3].lin_l.weight.norm(),
    "a vector": lambda m: nn.utils.parameters_to_vector(m.parameters()).abs().sum(),
    "stacked": lambda m: summed(p.norm() for p in m.parameters()),
    "a list": lambda m: summed(torch._foreach_norm(list(m.parameters()))),
    "state_dict": lambda m: summed(v.abs().sum() for v in m.state_dict().values()),
    "data": lambda m: summed(p.data.abs().sum() for p in m.parameters()),
    "detached": lambda m: summed(p.detach().abs().sum() for p in m.parameters()),
    "spectral": lambda m: sum(torch.linalg.matrix_norm(p, 2) for p in m.parameters() if p.dim() == 2),
    "two layers alike": lambda m: (m.convs[1].lin_l.weight - m.convs[2].lin_l.weight).square().sum(),
    "orthogonal": lambda m: sum((p @ p.t()).triu(1).square().sum() for p in m.parameters() if p.dim() == 2),
    "the largest": lambda m: torch.stack([p.abs().max() for p in m.parameters()]).max(),
    "a group": lambda m: summed(p.norm(dim=0).sum() for p in m.parameters() if p.dim() == 2),
    "entropy": lambda m: summed((p.softmax(-1) * p.log_softmax(-1)).sum() for p in m.parameters()),
    "a product": lambda m: (
        m.convs[3].lin_l.weight @ m.convs[2].lin_l.weight @ m.convs[1].lin_r.weight
    ).norm(),
    "smooth": lambda m: summed(F.smooth_l1_loss(p, torch.zeros_like(p)) for p in m.parameters()),
    "biases": lambda m: summed(p.square().sum() for p in m.parameters() if p.dim() == 1),
}


class Reading(SGD):
    """Reads all weights in its own step."""

    def step(self, closure: Any = None) -> Any:
        self.mean = [p.detach().clone() for group in self.param_groups for p in group["params"]]
        return super().step(closure)


def optimizer_of(name: str, model: nn.Module) -> Callable[[Any], Optimizer] | None:
    if name in ("ema", "clip", "rate"):

        def make(parameters: Any) -> Optimizer:
            made = SGD(parameters, lr=0.05)
            means = [p.detach().clone() for p in model.parameters()]

            def hook(optimizer: Optimizer, *_: Any) -> None:
                if name == "ema":
                    torch._foreach_lerp_(means, [p.detach() for p in model.parameters()], 0.1)
                if name == "clip":
                    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
                assert optimizer.param_groups[0]["lr"] == 0.05

            made.register_step_pre_hook(hook)
            return made

        return make
    kinds: dict[str, Callable[[Any], Optimizer]] = {
        "reading": lambda p: Reading(p, lr=0.05),
        "adamw": lambda p: AdamW(p, lr=0.01, weight_decay=0.1),
        "one by one": lambda p: SGD(p, lr=0.05, momentum=0.9, foreach=False),
    }
    return kinds.get(name)
