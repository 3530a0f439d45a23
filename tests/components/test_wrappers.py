"""Wrappers around a model or its layers: taken off where that is exact, else refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import Tensor, nn

import kagome
from kagome import Trainer
from kagome.comm.channel import Channel
from kagome.config import Parallel
from kagome.errors import ModelError
from training import QUIET, graph, settings

MESHES = [(1, {}), (2, {}), (2, {"pipe": 2, "chunks": 2, "cross_chunk": "exact"})]
KINDS = ["model", "model in place", "layer", "layer in place", "function", "DDP", "DataParallel", "both"]


class Net(nn.Module):
    """A norm over all vertices between two layers: compiled as it stands, it would be a rank's own."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = pyg.GCNConv(8, 8, bias=False)
        self.norm, self.last = nn.BatchNorm1d(8), pyg.GCNConv(8, 4)
        self.act = F.relu
        if kind == "layer":
            self.first, self.norm = torch.compile(self.first), torch.compile(self.norm)
        if kind == "layer in place":
            self.first.compile()
            self.norm.compile()
        if kind == "function":
            self.act = torch.compile(F.relu)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.last(self.act(self.norm(self.first(x, edge_index))), edge_index)


def wrapped(kind: str) -> nn.Module:
    net: Any = Net(kind).double()
    if kind == "model in place":
        net.compile()
    if kind in ("DDP", "both"):
        net = nn.parallel.DistributedDataParallel(net)
    if kind == "DataParallel":
        net = nn.DataParallel(net)
    return torch.compile(net) if kind in ("model", "both") else net


def curve(channel: Channel, kind: str, parallel: dict[str, Any]) -> list[float | None]:
    train = settings(check=True, epochs=3)
    with Trainer(
        wrapped(kind), graph(torch.float64), parallel=Parallel(**parallel), train=train, report=QUIET
    ) as trainer:
        trainer.fit()
        return [record.loss for record in trainer.records]


@pytest.mark.some(8)
@pytest.mark.parametrize(
    ("kind", "world", "parallel"),
    [(k, w, p) for k in KINDS for w, p in MESHES if w > 1 or k not in ("DDP", "both")],
)
def test_a_wrapped_model_trains_as_the_plain_one(ranks, kind, world, parallel):
    expected = ranks(1, curve, "plain", {})[0]
    for found in ranks(world, curve, kind, parallel):
        assert found == pytest.approx(expected, rel=1e-10)


def test_the_model_is_left_as_it_was():
    mine = Net("layer")
    compiled = mine.first
    with Trainer(mine, graph(), train=settings(epochs=1), report=QUIET) as trainer:
        trainer.fit()
        assert trainer.model is mine
        assert mine.first is compiled
        assert "first._orig_mod.lin.weight" in mine.state_dict()


def test_a_compiled_model_is_checked_as_it_was_written():
    assert kagome.check(wrapped("model"), graph(torch.float64), vertices=40).first is None


def test_a_wrapper_around_a_layer_is_refused_by_name():
    mine = Net("plain")
    mine.norm = nn.DataParallel(mine.norm)
    with pytest.raises(ModelError, match=r"cuts its inputs .* \(norm: DataParallel\)"):
        Trainer(mine, graph(), train=settings(), report=QUIET)
    with pytest.raises(ModelError, match="leave DataParallel out"):
        kagome.check(mine, graph(), vertices=40)


def shards(channel: Channel) -> str:
    from torch.distributed.fsdp import fully_shard

    mine = Net("plain")
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    with pytest.raises(ModelError) as caught:
        Trainer(fully_shard(mine, mesh=mesh), graph(), train=settings(), report=QUIET)
    return str(caught.value)


def test_a_model_in_shards_is_refused_by_name(ranks):
    for said in ranks(2, shards):
        assert "weights that lie in pieces on the ranks (the model: FSDPModule)" in said
