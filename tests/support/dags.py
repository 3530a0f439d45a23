"""Pipelines whose stages form a DAG, as functions that ranks run, and plain training to compare with."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kagome
from kagome.model.examples import EXAMPLES
from kagome.planner.stages.plan import PlannedStage, StagePlan

SIZES: dict[str, dict[str, Any]] = {
    "multimodal": {"width": 16, "layers": 1, "joint": 1, "heads": 2},
    "dlrm": {"bottom": (12,), "top": (12,)},
    "uno": {"width": 12, "tower": 1, "layers": 2},
    "gnn": {"width": 12},
}


class Odd(nn.Module):
    """Tied weights, a skip over a stage, several readers, integers that cross, samples along axis 1.

    And steps in place, dropouts of both kinds, a weight by itself and some that get no gradient.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.first, self.left, self.right = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.table, self.out = nn.Embedding(5, 8), nn.Linear(8, 3)
        self.relu, self.drop = nn.ReLU(inplace=True), nn.Dropout(p)
        self.shift, self.unused = nn.Parameter(torch.randn(8)), nn.Linear(2, 2)
        self.turned, self.norm = nn.GRU(8, 8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.relu(self.first(x))
        which = self.right(h).argmax(1) % 5
        a = self.left(self.drop(h)) + self.shift
        b = F.linear(h, self.left.weight) * 0.5 + self.table(which)
        b += h
        seq, _ = self.turned(torch.stack([a, b]))  # [2, samples, 8]
        c = self.relu(self.norm(seq).sum(0) + h.sum(1, keepdim=True))
        return self.out(F.dropout(c, 0.3 if self.drop.p else 0.0, self.training))


class Noisy(nn.Module):
    """Dropout inside attention, where heads and samples share an axis, and of whole channels."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.out = nn.Linear(2, 8), nn.Linear(8, 3)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.4, batch_first=True)
        self.drop = nn.Dropout1d(0.3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.read(x.view(-1, 3, 2))
        seen, _ = self.attention(h, h, h)
        return self.out(self.drop(seen).mean(1))


class Encoder(nn.Module):
    """A transformer's layer as it is by default, whose attention drops within the kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.out = nn.Linear(2, 8), nn.Linear(8, 3)
        self.layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layer(self.read(x.view(-1, 3, 2))).mean(1))


def task(name: str, count: int) -> tuple[nn.Module, dict[str, Tensor], Tensor, Any]:
    """A model with a batch and a target, the same wherever it is called."""
    torch.manual_seed(7)
    if name in EXAMPLES:
        example = EXAMPLES[name]
        return example.build(**SIZES[name]), *example.batch(count), example.loss
    loss = nn.CrossEntropyLoss(reduction="none")
    inputs = {"x": torch.randn(count, 6)}
    if name == "encoder":
        return Encoder(), inputs, torch.randint(0, 3, (count,)), loss
    model = Noisy() if name == "noisy" else Odd(0.4 if name == "odd drop" else 0.0)
    return model, inputs, torch.randint(0, 3, (count,)), loss


def plan_of(batch: int, *stages: tuple) -> StagePlan:
    return StagePlan(batch, tuple(PlannedStage(tuple(names.split()), *rest) for names, *rest in stages))


def sgd(weights: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(weights, lr=0.1, momentum=0.5)


def trained(
    channel: Any,
    name: str,
    plan: StagePlan | None,
    batch: int = 8,
    updates: int = 2,
    schedule: Any = "auto",
) -> dict[str, Any]:
    """Some updates on this rank's stage."""
    torch.set_default_dtype(torch.float64)
    try:
        model, inputs, target, loss = task(name, batch)
        if channel.rank:  # rank 0's weights count
            with torch.no_grad():
                next(model.parameters()).add_(1.0)
        pipe = kagome.pipeline(
            model, inputs, loss=loss, optimizer=sgd, plan=plan, schedule=schedule, channel=channel
        )
        losses = [pipe.step(inputs, target) for _ in range(updates)]
        more = {key: torch.cat([value, value[: batch // 2 + 1]]) for key, value in inputs.items()}
        return {
            "losses": losses,
            "gradients": dict(pipe.gradients()),
            "scores": pipe.predict(more),
            "score": pipe.evaluate(inputs, target),
            "state": {key: value.clone() for key, value in pipe.state_dict().items()},
            "spans": pipe.spans,
            "program": pipe.program,
            "stage": pipe.stage,
        }
    finally:
        torch.set_default_dtype(torch.float32)


def plain(name: str, batch: int = 8, updates: int = 2) -> dict[str, Any]:
    """The same updates without Kagome."""
    torch.set_default_dtype(torch.float64)
    try:
        model, inputs, target, loss = task(name, batch)
        optimizer = sgd(model.parameters())
        losses = []
        for _ in range(updates):
            optimizer.zero_grad()
            value = loss(model.train()(**inputs), target).mean()
            value.backward()
            optimizer.step()
            losses.append(float(value.detach()))
        more = {key: torch.cat([value, value[: batch // 2 + 1]]) for key, value in inputs.items()}
        with torch.no_grad():
            return {
                "losses": losses,
                "gradients": {key: weight.grad for key, weight in model.named_parameters()},
                "scores": model.eval()(**more),
                "score": float(loss(model(**inputs), target).mean()),
                "state": model.state_dict(),
            }
    finally:
        torch.set_default_dtype(torch.float32)


def same(found: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    """Every rank has the losses, scores and weights, and all gradients are somewhere."""
    seen = set()
    for rank in found:
        assert rank["losses"] == pytest.approx(expected["losses"], rel=0, abs=1e-10)
        assert rank["score"] == pytest.approx(expected["score"], rel=0, abs=1e-10)
        for key in ("scores", "state"):
            torch.testing.assert_close(rank[key], expected[key], rtol=0, atol=1e-10)
        for name, gradient in rank["gradients"].items():
            seen.add(name)
            theirs = expected["gradients"][name]
            assert (gradient is None) == (theirs is None), name
            if gradient is not None:
                torch.testing.assert_close(gradient, theirs, rtol=0, atol=1e-10, msg=name)
    assert seen >= {name for name, gradient in expected["gradients"].items() if gradient is not None}
