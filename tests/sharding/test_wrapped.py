"""What other libraries put around a sharded model: gradients stay those of one process, or it is refused."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_shard import grads, graph, model_of
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import kagome
from kagome.comm.channel import Channel


def accumulated(channel: Channel | None, copies: int, wrap: bool, put_off: bool, **more: Any) -> Any:
    """Gradients of two losses, twice; the wrapper's ranks are all, those of the graph among them."""
    data, model = graph(), model_of("gat")
    found: list[dict[str, Tensor]] = []
    if channel is None:
        for _ in range(2):
            model.zero_grad()
            for power in (2, 4):
                ((model(data.x, data.edge_index, data.edge_attr) - data.y) ** power).mean().backward()
            found.append(grads(model))
        return found
    shape = copies, dist.get_world_size() // copies
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "graph"))
    with kagome.shard(model, data, mesh=mesh["graph"], log=str) as net:
        over = mesh.get_group("data") if more.pop("copies_alone", False) else None
        wrapped = DistributedDataParallel(net, process_group=over, **more) if wrap else net
        y = net.place(data.y)
        for _ in range(2):
            model.zero_grad()
            for power in (2, 4):
                with net.no_sync() if put_off and power == 2 else nullcontext():
                    out = wrapped(data.x, data.edge_index, data.edge_attr)
                    net.mean((out - y) ** power).backward()
            found.append(grads(model))
    return found


def same(ranks: Any, world: int, copies: int, put_off: bool, more: dict[str, bool]) -> None:
    expected = accumulated(None, 1, False, False)
    for found in ranks(world, wrapped_by_ddp, copies, put_off, more):
        for mine, theirs in zip(found, expected, strict=True):
            assert mine.keys() == theirs.keys()
            for name, value in theirs.items():
                torch.testing.assert_close(mine[name], value, rtol=1e-10, atol=1e-10, msg=name)


def wrapped_by_ddp(channel: Channel, copies: int, put_off: bool, more: dict[str, bool]) -> Any:
    return accumulated(channel, copies, True, put_off, **more)


@pytest.mark.every
@pytest.mark.parametrize(("world", "copies"), [(2, 1), (3, 1), (4, 2)])
def test_ddp_over_the_ranks_of_the_graph_leaves_gradients_as_they_are(
    ranks: Any, world: int, copies: int
) -> None:
    """As Lightning's and Accelerate's do: a mean over ranks of what is a mean over ranks."""
    same(ranks, world, copies, False, {})


@pytest.mark.every
@pytest.mark.parametrize("put_off", [False, True])
@pytest.mark.parametrize(("world", "copies", "alone"), [(2, 1, False), (2, 2, True), (4, 2, True)])
def test_gradients_that_are_views_of_buckets_accumulate(
    ranks: Any, world: int, copies: int, alone: bool, put_off: bool
) -> None:
    """The next backward overwrote what the last had left in the bucket."""
    same(ranks, world, copies, put_off, {"gradient_as_bucket_view": True, "copies_alone": alone})


def cut(channel: Channel, layers: bool, before: bool) -> str:
    data, model = graph(), model_of("gat")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    try:
        if before:
            fully_shard(model, mesh=mesh)
        with kagome.shard(model, data, log=str) as net:
            if layers:
                fully_shard(net.one, mesh=mesh)
            fully_shard(net, mesh=mesh)
            net(data.x, data.edge_index, data.edge_attr)
    except kagome.KagomeError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(("layers", "before"), [(False, False), (True, False), (False, True)])
def test_weights_in_pieces_are_refused(ranks: Any, layers: bool, before: bool) -> None:
    """FSDP over another axis than the graph's had left the sum over the graph's ranks out."""
    for message in ranks(2, cut, layers, before, spoils=True):
        assert "FSDPModule" in message
        assert "nothing" not in message
