"""Fast paths in a whole run: the losses of PyG's own way, and a model that they cannot follow runs too."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn

from kagome import Parallel, Trainer
from training import CLASSES, FEATURES, QUIET, graph, settings


class _Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * 2


class Unseen(pyg.MessagePassing):
    """Hands its messages to a function that torch does not show."""

    def __init__(self) -> None:
        super().__init__(aggr="mean")
        self.lin = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.propagate(edge_index, x=self.lin(x))
        return out

    def message(self, x_j: Tensor) -> Tensor:
        out: Tensor = _Twice.apply(x_j)
        return out


def zoo(name: str) -> nn.Module:
    kinds: dict[str, Callable[[], nn.Module]] = {
        "GCN": lambda: pyg.GCN(FEATURES, 16, 2, CLASSES, dropout=0.3),
        "SAGE": lambda: pyg.GraphSAGE(FEATURES, 16, 2, CLASSES, dropout=0.3),
        "GAT": lambda: pyg.GAT(FEATURES, 16, 2, CLASSES, heads=4, dropout=0.3),
        "GATv2": lambda: pyg.GAT(FEATURES, 16, 2, CLASSES, heads=4, v2=True),
        "EdgeCNN": lambda: pyg.EdgeCNN(FEATURES, 16, 2, CLASSES),
        "unseen": Unseen,
        "unseen, then seen": lambda: pyg.Sequential(
            "x, edge_index",
            [(Unseen(), "x, edge_index -> x"), (pyg.SAGEConv(CLASSES, CLASSES), "x, edge_index -> x")],
        ),
    }
    torch.manual_seed(3)
    return kinds[name]()


def losses(
    channel: Any, name: str, fast: bool, parallel: dict[str, Any] | None = None
) -> tuple[list[float], list[str]]:
    data, model, mesh = graph(torch.float64), zoo(name).double(), Parallel(**(parallel or {}))
    with Trainer(model, data, parallel=mesh, train=settings(), report=QUIET, fast=fast) as trainer:
        trainer.fit(5)
        return [record.loss for record in trainer.records], trainer.notes


@pytest.mark.some(5)
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", ["GCN", "SAGE", "GAT", "GATv2", "EdgeCNN"])
def test_a_run_is_the_same_without_fast_paths(ranks: Callable[..., list], world: int, name: str) -> None:
    fast, slow = (ranks(world, losses, name, fast)[0][0] for fast in (True, False))
    assert fast == pytest.approx(slow, rel=1e-9)
    assert fast[0] != fast[-1]


@pytest.mark.parametrize("world", [1, 2])
def test_a_model_that_cannot_be_followed_runs_without_them_and_says_so(
    ranks: Callable[..., list], world: int
) -> None:
    fast, notes = ranks(world, losses, "unseen", True)[0]
    slow, quiet = ranks(world, losses, "unseen", False)[0]
    assert fast == pytest.approx(slow, rel=1e-12)
    assert [note for note in notes if "without fast paths" in note]
    assert not [note for note in quiet if "without fast paths" in note]


@pytest.mark.parametrize(
    "mesh", [{"chunks": 3}, {"pipe": 2, "chunks": 2}, {"pipe": 2, "chunks": 1}], ids=lambda mesh: str(mesh)
)
def test_stages_and_chunks_run_without_them_too(ranks: Callable[..., list], mesh: dict[str, Any]) -> None:
    parallel, world = {**mesh, "cross_chunk": "exact"}, mesh.get("pipe", 1)
    alone = ranks(1, losses, "unseen, then seen", False)[0][0]
    for fast in (True, False):
        for found, notes in ranks(world, losses, "unseen, then seen", fast, parallel):
            assert found == pytest.approx(alone, rel=1e-9)
            assert any("without fast paths" in note for note in notes) == fast


def drawn_and_seeded(channel: Any) -> float:
    drawn = random.random()
    random.seed(5)
    return drawn


def test_what_one_test_seeds_no_other_builds_models_by(ranks: Callable[..., list]) -> None:
    # Two of PyG's Sequentials that are built after the same seed share one forward, whatever their layers.
    assert len({ranks(1, drawn_and_seeded)[0] for _ in range(3)}) == 3


def test_bf16_on_a_cpu_says_what_it_costs() -> None:
    for amp, fast, says in [("bf16", True, True), ("bf16", False, False), ("none", True, False)]:
        with Trainer(
            pyg.GCNConv(FEATURES, CLASSES), graph(), train=settings(amp=amp), report=QUIET, fast=fast
        ) as trainer:
            notes = trainer.fit(1)["notes"]
        assert any("bf16 has no compiled kernels" in note for note in notes) == says
