"""Models as the fields that train one big graph write them: outputs and every gradient, on 1 to 4 ranks."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from test_shard import WORLDS, both, grads, net_of, of_first
from torch import Tensor, nn

from kagome.comm.channel import Channel

EXAMPLES = Path(__file__).parents[2] / "examples"


def example(name: str) -> ModuleType:
    """An example as a module."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def mesh_graph_net(channel: Channel | None) -> dict[str, Tensor]:
    """15 layers with a state an edge, and batches of four fields over one mesh."""
    simulation = example("mesh_simulation")
    torch.manual_seed(5)
    data = simulation.mesh(6)
    data.pos, data.edge_attr = data.pos.double(), data.edge_attr.double()
    model: nn.Module = simulation.MeshNet()
    model.layers = nn.ModuleList(simulation.Processor() for _ in range(15))
    model.double()
    with net_of(channel, model, data) as net:
        for step in range(2):
            x, y = (each.double() for each in simulation.fields(data, step))
            out = net(x, data.edge_index, data.edge_attr)
            loss = net.mean((out - net.place(y, axis=1)) ** 2)
            loss.backward()
        rows = net.gather(out, axis=1)
    return grads(model) | {"loss": loss.detach(), "out": of_first(channel, rows, tuple(y.shape))}


@pytest.mark.every
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("shape", [mesh_graph_net])
def test_shape(ranks: Any, world: int, shape: Any) -> None:
    both(ranks, world, shape)
