"""Regression: float targets, weights, attributes of any kind: on any mesh as plain PyTorch by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch_geometric.data import Data

from kagome import Parallel, Trainer
from kagome.comm.channel import Channel
from kagome.errors import KagomeError
from training import FEATURES, QUIET, graph, losses, settings

VERTICES = 120
W = (1.0, 3.0, 0.5, 2.0)


class Net(nn.Module):
    """Two layers; a tensor, a number and a text of the data that are the same on all ranks."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.one, self.two = pyg.SAGEConv(FEATURES, 8), pyg.SAGEConv(8, outputs)

    def forward(
        self, x: Tensor, edge_index: Tensor, u: Any = None, gain: Any = None, how: Any = None
    ) -> Tensor:
        h = self.one(x, edge_index).tanh()
        h = h if u is None else h + u
        h = h if gain is None or how != "times" else h * gain
        return self.two(h, edge_index)


def data(kind: str) -> Data:
    made = graph(torch.float64, VERTICES)
    draw = torch.Generator().manual_seed(5)
    made.u, made.gain, made.how = torch.randn(1, 8, generator=draw).double(), 1.5, "times"
    made.weight = torch.rand(VERTICES, generator=draw).double()
    made.val_mask = torch.zeros(VERTICES, dtype=torch.bool)
    if kind in ("mse", "holes", "own", "weighted"):
        made.y = torch.randn(VERTICES, 2, generator=draw).double() + made.x[:, :2]
    if kind == "holes":
        made.y[torch.rand(VERTICES, 2, generator=draw) < 0.4] = float("nan")
    return made


def own(out: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    return F.huber_loss(out, y, reduction="none").sum(1) * weight


def pairs(out: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return F.cross_entropy(out, y, reduction="none"), torch.tensor(W, dtype=out.dtype)[y]


def plain(kind: str, out: Tensor, d: Data) -> Tensor:
    m = d.train_mask
    out, y = out[m], d.y[m]
    if kind in ("classes", "pairs"):
        return F.cross_entropy(out, y, weight=torch.tensor(W).double())
    if kind == "own":
        return own(out, y, d.weight[m]).mean()
    if kind == "weighted":
        return (F.mse_loss(out, y, reduction="none").mean(1) * d.weight[m]).sum() / d.weight[m].sum()
    there = ~y.isnan()
    return F.mse_loss(out[there], y[there])


GIVEN: dict[str, dict[str, Any]] = {
    "mse": {"loss": "mse"},
    "holes": {"loss": "mse"},
    "own": {"loss": own},
    "weighted": {"loss": "mse", "loss_inputs": {"weight": "weight"}},
    "classes": {"loss": "cross_entropy", "class_weight": W},
    "pairs": {"loss": pairs},
}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


def net(kind: str) -> Net:
    torch.manual_seed(1)
    return Net(4 if kind in ("classes", "pairs") else 2).double()


def by_hand(kind: str, epochs: int) -> tuple[list[float], dict[str, Tensor]]:
    mine, d, found = net(kind), data(kind), []
    optimizer = sgd(mine.parameters())
    for _ in range(epochs):
        optimizer.zero_grad()
        loss = plain(kind, mine(d.x, d.edge_index, d.u, d.gain, d.how), d)
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
    return found, mine.state_dict()


def trained(channel: Channel, kind: str, parallel: dict[str, Any], epochs: int) -> Any:
    mine, given = net(kind), dict(GIVEN[kind])
    train = settings(class_weight=given.pop("class_weight", ()))
    try:
        with Trainer(
            mine, data(kind), parallel=Parallel(**parallel), train=train, report=QUIET, optimizer=sgd, **given
        ) as trainer:
            trainer.fit(epochs)
            return losses(trainer), {k: v.clone() for k, v in mine.state_dict().items()}
    except KagomeError as error:
        return f"{type(error).__name__}: {error}"


MESHES = [
    (1, {}),
    (2, {}),
    (3, {}),
    (2, {"tensor": 2}),
    (2, {"pipe": 2, "chunks": 3, "cross_chunk": "exact"}),
    (4, {"pipe": 2, "graph": 2, "chunks": 2, "cross_chunk": "exact"}),
    (1, {"chunks": 3, "cross_chunk": "exact"}),
]


@pytest.mark.some(14)
@pytest.mark.parametrize(("world", "parallel"), MESHES)
@pytest.mark.parametrize("kind", GIVEN)
def test_the_curve_is_plain_pytorch_s_on_any_mesh(ranks, world, parallel, kind):
    expected, weights = by_hand(kind, 4)
    for rank in ranks(world, trained, kind, parallel, 4):
        assert isinstance(rank, tuple), rank
        assert rank[0] == pytest.approx(expected, abs=1e-10)
        torch.testing.assert_close(rank[1], weights, rtol=0, atol=1e-10)


def chameleon(folder: Path) -> Data:
    """Chameleon with its pages' traffic, whose logarithm its raw files have, as the target."""
    raw = folder / "wikipedia_network" / "chameleon" / "raw" / "chameleon.npz"
    if not raw.exists():
        pytest.skip(f"{raw} is not there")
    with np.load(raw) as arrays:
        x, y = torch.from_numpy(arrays["features"]).float(), torch.from_numpy(arrays["target"]).double()
        edge_index = torch.from_numpy(arrays["edges"]).long().t().contiguous()
    return Data(x=x, y=(y - 8).float()[:, None], edge_index=edge_index)


def traffic(channel: Channel, folder: Path, epochs: int) -> Any:
    given = chameleon(folder)
    torch.manual_seed(0)
    mine = pyg.GraphSAGE(given.num_features, 32, 2, 1)
    with Trainer(mine, given, loss="mse", metric="r2", train=settings(lr=0.01), report=QUIET) as trainer:
        summary = trainer.fit(epochs)
        return losses(trainer), summary["test_metric"], summary["best_epoch"]


def test_traffic_of_a_real_graph_on_one_rank_and_on_three(ranks, data_folder):
    epochs = 30
    one, *_ = ranks(1, traffic, data_folder, epochs)
    three = ranks(3, traffic, data_folder, epochs)
    assert one[1] > 0.3, "R2 of the test pages"
    for rank in three:
        assert rank[0] == pytest.approx(one[0], rel=1e-4)
        assert rank[1] == pytest.approx(one[1], abs=1e-3)
        assert rank[2] == one[2]
