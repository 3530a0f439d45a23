"""What other libraries put around a sharded model: gradients stay those of one process, or it is refused."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_device_mesh import sample
from test_shard import C, N, grads, graph, model_of
from test_vertex_sets import GRID, LAYERS, Fields, Weather, Whole, hetero, weather_graph
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
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


def fully_sharded(channel: Channel, after: bool, puts_off: bool) -> list[dict[str, Tensor]]:
    """Two copies of two parts: weights and gradients in pieces over the copies; three steps with momentum."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("data", "graph"))
    data, model = graph(), model_of("gat")
    found = []
    with kagome.shard(model, data, mesh=mesh["graph"], log=str) as net:
        fully_shard(net, mesh=mesh["data"], reshard_after_forward=after)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
        for step in range(3):
            optimizer.zero_grad()
            for number in range(2):
                x, y = sample(2 * (2 * step + number) + mesh.get_local_rank("data"))
                with net.no_sync() if puts_off and not number else nullcontext():
                    out = net(x, data.edge_index, data.edge_attr)
                    net.mean((out - net.place(y)) ** 2).backward()
            if after:
                clipped = net.clip_grad_norm_(1.0)
            else:
                clipped = torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0).full_tensor()
            found.append({n: p.grad.full_tensor() for n, p in net.named_parameters() if p.grad is not None})
            found[-1]["norm"] = clipped
            assert all(p.grad.to_local().numel() < p.numel() for p in net.parameters() if p.size(0) > 1)
            optimizer.step()
        kept = net.stateful(optimizer)
        saved = kept.state_dict()
        pieces = [saved["model"]["one.bias"], saved["optimizer"]["state"]["0"]["momentum_buffer"]]
        assert all(isinstance(each, DTensor) for each in pieces)
        weights = {n: p.clone() if isinstance(p, Tensor) else p for n, p in saved["model"].items()}
        with torch.no_grad():
            for p in net.parameters():
                p.zero_()
        kept.load_state_dict({**saved, "model": weights})
        with torch.no_grad():
            rows = net.gather(net(sample(0)[0], data.edge_index, data.edge_attr))
        out = torch.zeros(N, C, dtype=torch.float64) if rows is None else rows
        dist.broadcast(out, 0)
        found.append({n: p.full_tensor() for n, p in net.state_dict().items() if isinstance(p, DTensor)})
        found[-1]["out"] = out
    return found


def plainly() -> list[dict[str, Tensor]]:
    data, model = graph(), model_of("gat")
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), []
    for step in range(3):
        optimizer.zero_grad()
        for number in range(4):
            x, y = sample(4 * step + number)
            out = model(x, data.edge_index, data.edge_attr)
            (((out - y) ** 2).mean() / 2).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        found.append(grads(model) | {"norm": norm})
        optimizer.step()
    found.append({n: p.detach() for n, p in model.named_parameters()})
    found[-1]["out"] = model(sample(0)[0], data.edge_index, data.edge_attr).detach()
    return found


@pytest.mark.parametrize(("after", "puts_off"), [(False, False), (True, True)])
def test_fsdp_over_copies_of_parts(ranks: Any, after: bool, puts_off: bool) -> None:
    expected = plainly()
    for found in ranks(4, fully_sharded, after, puts_off):
        for mine, theirs in zip(found, expected, strict=True):
            assert mine.keys() == theirs.keys()
            for name, value in theirs.items():
                torch.testing.assert_close(mine[name], value, rtol=1e-10, atol=1e-10, msg=name)


def model_of_sets(kind: str) -> tuple[torch.nn.Module, Any]:
    """A model of a grid and two meshes, whose edges are buffers, or of three vertex types with a table."""
    torch.manual_seed(5)
    if kind == "weather":
        return Weather(shifted=True).double(), weather_graph()
    return Fields(LAYERS[kind], {"paper": 5, "author": 6, "field": 7}).double(), hetero()


def loss_of_sets(net: Any, kind: str, number: int) -> Tensor:
    """The loss of one sample; ``net`` is a sharded model, or stands for one."""
    if kind == "weather":
        state = torch.randn(2, GRID, 3, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
        return net.mean(net(net.place(state, "grid", axis=1)) ** 2)  # type: ignore[no-any-return]
    data = hetero()
    x = {name: rows * (1 + number / 4) for name, rows in data.x_dict.items()}
    out = net(x, data.edge_index_dict, data.edge_attr_dict)
    return sum((net.mean(rows**2) for rows in out.values()), torch.zeros((), dtype=torch.float64))


def fully_sharded_sets(channel: Channel, kind: str, after: bool) -> list[dict[str, Tensor]]:
    """Two copies of as many parts as there are ranks for: weights and gradients in pieces over the copies."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("data", "graph"))
    (model, given), found = model_of_sets(kind), []
    with kagome.shard(model, given, mesh=mesh["graph"], log=str) as net:
        fully_shard(net, mesh=mesh["data"], reshard_after_forward=after)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
        for step in range(3):
            optimizer.zero_grad()
            loss_of_sets(net, kind, 2 * step + mesh.get_local_rank("data")).backward()
            clipped = net.clip_grad_norm_(1.0)
            found.append({n: p.grad.full_tensor() for n, p in net.named_parameters() if p.grad is not None})
            found[-1]["norm"] = clipped
            assert any(p.grad is not None and p.grad.to_local().numel() < p.numel() for p in net.parameters())
            optimizer.step()
        found.append({n: p.full_tensor() for n, p in net.state_dict().items() if isinstance(p, DTensor)})
    return found


def plain_sets(kind: str) -> list[dict[str, Tensor]]:
    (model, _), found = model_of_sets(kind), []
    optimizer, net = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), Whole(model)
    for step in range(3):
        optimizer.zero_grad()
        for number in range(2):
            (loss_of_sets(net, kind, 2 * step + number) / 2).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        found.append(grads(model) | {"norm": norm})
        optimizer.step()
    found.append({n: p.detach() for n, p in model.named_parameters()})
    return found


@pytest.mark.some(2, each="kind")
@pytest.mark.parametrize(("world", "after"), [(2, True), (4, True), (4, False)])
@pytest.mark.parametrize("kind", ["weather", "sage", "hgt"])
def test_fsdp_over_copies_of_several_sets(ranks: Any, world: int, kind: str, after: bool) -> None:
    expected = plain_sets(kind)
    for found in ranks(world, fully_sharded_sets, kind, after):
        for mine, theirs in zip(found, expected, strict=True):
            assert mine.keys() == theirs.keys()
            for name, value in theirs.items():
                torch.testing.assert_close(mine[name], value, rtol=1e-10, atol=1e-10, msg=name)


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


def misused(channel: Channel, case: str) -> str:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "graph"))
    data, model = graph(), model_of("gat")
    model.register_parameter("table", torch.nn.Parameter(torch.zeros(N, 2, dtype=torch.float64)))
    over: dict[str, Any] = {} if case == "cut" else {"mesh": mesh["graph"]}
    predictor = torch.nn.Linear(3, 3).double()
    if case == "beside":
        over["beside"] = [predictor]
    try:
        with kagome.shard(model, data, cut=case == "cut", log=str, **over) as net:
            fully_shard(net, mesh=mesh["data"])
            inputs = data.x, data.edge_index, data.edge_attr
            assert case == "cut" or net(*inputs) is not None
            if case == "cut":
                net(*inputs)
            elif case == "beside":
                fully_shard(predictor, mesh=mesh["data"])
                net(*inputs)
            elif case == "run":
                net.reshard()  # as a backward does
                net.run(model.forward, *inputs)
            else:
                net.reshard()  # as a backward does
                kagome.check(net, *inputs, loss=lambda net, out: net.mean(out))
    except kagome.KagomeError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("case", ["cut", "beside", "run", "check"])
def test_what_fsdp_does_not_gather_is_refused(ranks: Any, case: str) -> None:
    pieces = "weights in pieces, as net.run and kagome.check"
    words = {"cut": "tables that are cut", "beside": "in the model or beside it"}.get(case, pieces)
    for message in ranks(2, misused, case, spoils=True):
        assert words in message
