"""Penalties on weights, weights read in forward, hooks that read weights: right on every mesh, or refused."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from dags import plan_of
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from training import CLASSES, FEATURES, QUIET, graph, settings

import kagome
from kagome import Parallel, Trainer
from kagome.comm.channel import Channel
from kagome.errors import KagomeError, ModelError
from kagome.run.foreign import Reads

EPOCHS = 3
EXACT: dict[str, Any] = {"cross_chunk": "exact"}
MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "two parts": (2, {}),
    "three parts": (3, {}),
    "two stages": (2, {"pipe": 2, "chunks": 1}),
    "two stages, exact": (2, {"pipe": 2, "chunks": 2, **EXACT}),
    "three stages, exact": (3, {"pipe": 3, "chunks": 2, **EXACT}),
    "chunks, exact": (1, {"chunks": 2, **EXACT}),
}


class Net(nn.Module):
    """Four layers; may read weights in forward besides."""

    def __init__(self, inside: str = "") -> None:
        super().__init__()
        widths = [FEATURES, 8, 8, 8, CLASSES]
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


Case = tuple[str, str, str]
"""What forward reads, the penalty, the optimizer."""
CASES: list[Case] = [
    *(("", penalty, "") for penalty in PENALTIES),
    *((inside, "none", "") for inside in ("sum", "norm", "first")),
    *(("", "none", optimizer) for optimizer in ("ema", "clip", "rate", "reading", "adamw", "one by one")),
    ("first", "l1", "adamw"),
]
HOOKS = ("ema", "clip", "reading")


def made(case: Case) -> tuple[nn.Module, Callable[[Tensor, Tensor], Tensor], Any]:
    torch.manual_seed(3)
    model = Net(case[0]).double()
    penalty = PENALTIES[case[1]]
    return model, lambda out, y: rows(out, y) + 0.01 * penalty(model), optimizer_of(case[2], model)


def plain(case: Case) -> list[float]:
    (model, loss, make), data, found = made(case), graph(torch.float64), []
    parameters = list(model.parameters())
    optimizer = make(parameters) if make else Adam(parameters, lr=0.01, weight_decay=5e-4)
    for _ in range(EPOCHS):
        optimizer.zero_grad()
        out = model(data.x, data.edge_index)
        lost = loss(out[data.train_mask], data.y[data.train_mask]).mean()
        lost.backward()
        optimizer.step()
        found.append(float(lost.detach()))
    return found


def trained(channel: Channel, cases: list[Case], parallel: dict[str, Any]) -> list[list[float] | str]:
    found: list[list[float] | str] = []
    for case in cases:
        model, loss, make = made(case)
        try:
            with Trainer(
                *(model, graph(torch.float64)),
                loss=loss,
                optimizer=make,
                train=settings(epochs=EPOCHS, lr=0.01, weight_decay=5e-4),
                parallel=Parallel(**parallel),
                report=QUIET,
            ) as trainer:
                trainer.fit()
                found.append([record.loss for record in trainer.records])
        except KagomeError as error:
            found.append(str(error))
    return found


@pytest.mark.some(1)
@pytest.mark.parametrize("mesh", MESHES)
def test_weights_that_are_read_besides_count_as_in_plain_pyg_or_are_refused(ranks, mesh):
    world, parallel = MESHES[mesh]
    found = ranks(world, trained, CASES, parallel, timeout=400.0)
    assert len(CASES) >= 30
    for place, case in enumerate(CASES):
        each = [rank[place] for rank in found]
        if parallel.get("pipe", 1) > 1 and case[2] in HOOKS:
            assert all("which another rank trains" in text for text in each), (case, each)
            continue
        for losses in each:
            assert losses == pytest.approx(plain(case), rel=1e-10, abs=1e-10), case


@pytest.mark.some(1)
@pytest.mark.parametrize("kind", ["history", "drop"])
def test_a_penalty_under_history_and_drop_is_that_of_today_s_weights(ranks, kind):
    """With one chunk a part there is nothing old but weights: the numbers are plain PyG's."""
    cases = [("", "l1", ""), ("", "two layers alike", "")]
    whole = ranks(2, trained, cases, {"pipe": 2, "chunks": 1, "cross_chunk": kind})[0]
    for one, case in zip(whole, cases, strict=True):
        assert one == pytest.approx(plain(case), rel=1e-10)
    # With several, the penalty's share of the loss is what it is without stages.
    alone = ranks(1, trained, cases, {"chunks": 2, "cross_chunk": kind, "guard": False})[0]
    staged = ranks(2, trained, cases, {"pipe": 2, "chunks": 2, "cross_chunk": kind, "guard": False})[0]
    for one, other in zip(alone, staged, strict=True):
        assert one == pytest.approx(other, rel=1e-10)


def in_stages(channel: Channel, what: str) -> str:
    torch.manual_seed(1)
    layers = (nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    model = nn.Sequential(*layers)
    x, y = torch.randn(8, 4), torch.randint(0, 3, (8,))

    def loss(out: Tensor, target: Tensor) -> Tensor:
        if what == "hook":
            return rows(out, target)
        return rows(out, target) + 0.1 * model[4 if what == "own" else 0].weight.abs().sum()

    def make(weights: Any) -> Optimizer:
        made = SGD(weights, lr=0.1)
        if what == "hook":
            made.register_step_post_hook(lambda *_: model[0].weight.sum() + model[4].weight.sum())
        return made

    plan = plan_of(8, ("0 1 2 3", 1, 4), ("4", 1, 4))
    try:
        with kagome.pipeline(model, x, loss=loss, optimizer=make, plan=plan, channel=channel) as pipe:
            pipe.step(x, y)
    except ModelError as error:
        return str(error)
    return "fine"


@pytest.mark.parametrize(
    ("what", "text"),
    [("own", "fine"), ("another", "the loss reads 0.weight"), ("hook", "a hook of the optimizer reads")],
)
def test_stages_of_samples_refuse_what_reads_other_ranks_weights(ranks, what, text):
    for found in ranks(2, in_stages, what):
        assert text in found


def test_what_counts_as_a_read():
    weight, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    with Reads({"w": weight, "o": other}, grads=False) as reads:
        assert weight.requires_grad
        assert weight.grad is None
        assert weight.shape == (2,)
        assert reads.found == []
        torch.stack([weight, weight])
    assert reads.found == ["w"]
    with Reads({"w": weight}, grads=True) as reads:
        assert weight.grad is None
    assert reads.found == ["w"]
