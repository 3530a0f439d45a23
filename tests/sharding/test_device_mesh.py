"""Parts of the graph along one axis of a ``DeviceMesh``, copies of them along the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_shard import C, F, N, grads, graph, model_of
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import kagome
from kagome.comm.channel import Channel


def sample(number: int) -> tuple[Tensor, Tensor]:
    """Features and targets of one sample over the graph."""
    generator = torch.Generator().manual_seed(number)
    made = [torch.randn(N, width, generator=generator, dtype=torch.float64) for width in (F, C)]
    return made[0], made[1]


def copies_of_parts(channel: Channel, copies: int) -> list[dict[str, Tensor]]:
    """Two steps: each copy of the parts takes another sample, and their gradients are averaged."""
    mesh = init_device_mesh(
        "cpu", (copies, dist.get_world_size() // copies), mesh_dim_names=("data", "graph")
    )
    data, model = graph(), model_of("gat")
    found = []
    with kagome.shard(model, data, mesh=mesh["graph"], log=str) as net:
        wrapped = DistributedDataParallel(net, process_group=mesh.get_group("data"), broadcast_buffers=False)
        for step in range(2):
            x, y = sample(copies * step + mesh.get_local_rank("data"))
            model.zero_grad()
            loss = net.mean((wrapped(x, data.edge_index, data.edge_attr) - net.place(y)) ** 2)
            loss.backward()
            found.append(grads(model))
    return found


def whole(copies: int) -> list[dict[str, Tensor]]:
    data, model = graph(), model_of("gat")
    found = []
    for step in range(2):
        model.zero_grad()
        for number in range(copies):
            x, y = sample(copies * step + number)
            (((model(x, data.edge_index, data.edge_attr) - y) ** 2).mean() / copies).backward()
        found.append(grads(model))
    return found


@pytest.mark.every
@pytest.mark.parametrize(("world", "copies"), [(2, 1), (2, 2), (4, 2)])
def test_copies_of_parts(ranks: Any, world: int, copies: int) -> None:
    expected = whole(copies)
    for found in ranks(world, copies_of_parts, copies):
        for mine, theirs in zip(found, expected, strict=True):
            assert mine.keys() == theirs.keys()
            for name, value in theirs.items():
                torch.testing.assert_close(mine[name], value, rtol=1e-10, atol=1e-10, msg=name)


def several_axes(channel: Channel) -> str:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "graph"))
    with pytest.raises(kagome.KagomeError) as error:
        kagome.shard(model_of("gcn"), graph(), mesh=mesh)
    return str(error.value)


def test_a_mesh_of_several_axes_is_refused(ranks: Any) -> None:
    assert all("a mesh of one axis" in message for message in ranks(2, several_axes))
