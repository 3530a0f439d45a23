"""As many edges as vertices, and an attribute whose name does not say of which it has a row each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch_geometric.data import Data

from kagome.comm.channel import Channel
from parity import alone
from pipelines import HIDDEN, data, told
from training import CLASSES, FEATURES

EPOCHS = 3


class Reads(nn.Module):
    """Reads ``foo`` as a row a vertex or as a row an edge."""

    def __init__(self, of: str) -> None:
        super().__init__()
        self.first, self.last = pyg.SAGEConv(FEATURES, HIDDEN), pyg.GraphConv(HIDDEN, CLASSES)
        self.more, self.of = nn.Linear(2, HIDDEN), of

    def forward(self, x: Tensor, edge_index: Tensor, foo: Tensor) -> Tensor:
        h = self.first(x, edge_index).tanh()
        if self.of == "vertices":
            return self.last(h + self.more(foo), edge_index)
        return self.last(h, edge_index, foo[:, 0].sigmoid())


def ring(vertices: int) -> Data:
    given, ids = data(vertices), torch.arange(vertices)
    # Neither by source nor by target: an order of its own.
    given.edge_index = torch.stack([ids * 7 % vertices, (ids * 11 + 3) % vertices])
    given.foo = torch.randn(vertices, 2, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return given


def reads(channel: Channel, of: str, vertices: int, parallel: dict[str, Any]) -> Any:
    torch.manual_seed(1)
    return told(Reads(of).double(), ring(vertices), EPOCHS, parallel, train={"check": True}, plain_steps=True)


def plain(of: str, vertices: int) -> list[float]:
    torch.manual_seed(1)
    model, given, losses = Reads(of).double(), ring(vertices), []
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for _ in range(EPOCHS):
        optimizer.zero_grad()
        out = model(given.x, given.edge_index, given.foo)[given.train_mask]
        loss = F.cross_entropy(out, given.y[given.train_mask])
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("vertices", [113, 401], ids=["all checked", "more than are checked"])
@pytest.mark.parametrize("of", ["vertices", "edges"])
def test_one_rank_gives_it_to_forward_as_it_is(of, vertices):
    found = reads(alone(), of, vertices, {})
    assert isinstance(found, dict), found
    assert found["losses"] == pytest.approx(plain(of, vertices), abs=1e-10)


@pytest.mark.parametrize(
    ("world", "parallel"), [(2, {"graph": 2}), (2, {"pipe": 2, "chunks": 1}), (1, {"chunks": 3})]
)
def test_what_cuts_the_graph_refuses_it_by_its_name(ranks, world, parallel):
    for rank in ranks(world, reads, "vertices", 113, parallel, spoils=True):
        assert "call it edge_foo or node_foo" in rank
