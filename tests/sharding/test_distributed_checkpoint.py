"""Cut tables and their optimizer's state in ``torch.distributed.checkpoint``, on other numbers of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from test_cut_tables import CUT, D, bpr, fed, made
from test_shard import N, net_of
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import kagome
from kagome.comm.channel import Channel
from kagome.sharding.rows.row_blocks import RowBlocks

OPTIMIZERS = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "plain": lambda p: torch.optim.SGD(p, lr=0.1),
}


def trained(
    channel: Channel | None, kind: str, read: str | None, write: str | None, **more: Any
) -> dict[str, Tensor]:
    """Two steps, from a checkpoint if there is one; a checkpoint after them."""
    data, model = fed(), made()
    optimizer = OPTIMIZERS[kind](model.parameters())
    settings = {} if channel is None else {"cut": CUT, **more}
    with net_of(channel, model, data, **settings) as net:
        if read is not None:
            before = [p.detach().clone() for p in model.parameters()]
            optimizer.param_groups[0]["lr"] = 0.5  # the checkpoint's counts
            dcp.load({"training": net.stateful(optimizer)}, checkpoint_id=read)
            assert not all(torch.equal(one, p) for one, p in zip(before, model.parameters(), strict=True))
            assert net.step == 2
            assert optimizer.param_groups[0]["lr"] == 0.1
        first = 0 if read is None else 2
        for step in range(first, first + 2):
            optimizer.zero_grad()
            bpr(None if channel is None else net._mesh.graph, net, model, data, step).backward()
            optimizer.step()
        if write is not None:
            state = net.stateful(optimizer)
            table = state.state_dict()["model"]["table.weight"]
            assert isinstance(table, DTensor) == (net.ranks > 1)
            assert table.shape == (N, D)
            dcp.save({"training": state}, checkpoint_id=write)
        if channel is not None:
            return {name: value.clone() for name, value in net.state_dict().items()}
    return {name: value.clone() for name, value in model.state_dict().items()}


def straight(kind: str) -> dict[str, Tensor]:
    """Four steps in one process without a break."""
    data, model = fed(), made()
    optimizer = OPTIMIZERS[kind](model.parameters())
    with net_of(None, model, data) as net:
        for step in range(4):
            optimizer.zero_grad()
            bpr(None, net, model, data, step).backward()
            optimizer.step()
    return dict(model.state_dict())


@pytest.mark.parametrize(("worlds", "kind"), [((4, 3), "adam"), ((2, 1), "sgd"), ((1, 4), "plain")])
def test_a_run_goes_on_with_other_ranks(
    ranks: Any, tmp_path: Path, worlds: tuple[int, int], kind: str
) -> None:
    expected = straight(kind)
    ranks(worlds[0], trained, kind, None, str(tmp_path))
    assert len(list(tmp_path.glob("*.distcp"))) == worlds[0]
    for found in ranks(worlds[1], trained, kind, str(tmp_path), None):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_a_plain_process_reads_the_checkpoint(ranks: Any, tmp_path: Path) -> None:
    expected = ranks(3, trained, "adam", None, str(tmp_path))[0]
    model = made()
    state = {"training": {"model": model.state_dict()}}
    dcp.load(state, checkpoint_id=str(tmp_path), no_dist=True)
    torch.testing.assert_close(dict(model.state_dict()), expected, rtol=0, atol=0)


def copied(channel: Channel, folder: str, first: bool) -> dict[str, Tensor]:
    """Two copies of two parts, which write each row once."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("data", "graph"))
    where = (None, folder) if first else (folder, None)
    return trained(channel, "adam", *where, mesh=mesh["graph"])


def test_copies_of_parts(ranks: Any, tmp_path: Path) -> None:
    ranks(4, copied, str(tmp_path), True)
    for found in ranks(4, copied, str(tmp_path), False):
        torch.testing.assert_close(found, straight("adam"), rtol=1e-10, atol=1e-10)


def unbegun(channel: Channel, folder: str) -> None:
    """An optimizer without a step is saved as one, and saving leaves it so."""
    data, model = fed(), made()
    optimizer = OPTIMIZERS["adam"](model.parameters())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with kagome.shard(model, data, cut=CUT, log=str) as net:
        model.table.weight.grad = torch.ones_like(model.table.weight)
        dcp.save({"training": net.stateful(optimizer)}, checkpoint_id=folder)
        assert not optimizer.state
        assert optimizer.param_groups[0]["lr"] == 0.1
        assert bool((model.table.weight.grad == 1).all())
        assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
        dcp.load({"training": net.stateful(optimizer)}, checkpoint_id=folder)
        assert all(float(state["step"]) == 0 for state in optimizer.state.values())
        assert optimizer.state[model.table.weight]["exp_avg"].shape == model.table.weight.shape


def test_an_optimizer_that_has_made_no_step(ranks: Any, tmp_path: Path) -> None:
    ranks(2, unbegun, str(tmp_path))


def few(channel: Channel, folder: str) -> None:
    """Fewer rows than give each rank a block; one rank owns none, one all but one, in no order."""
    ids = torch.tensor([[4, 0, 2, 1], [], [3], []][channel.rank], dtype=torch.int64)
    blocks, rows = RowBlocks(channel, ids, 5), ids.double().view(-1, 1, 1).expand(-1, 2, 3) + torch.ones(2, 3)
    made = blocks.of(rows, dist.group.WORLD, "test")
    assert made.to_local().size(0) == [2, 2, 1, 0][channel.rank]
    dcp.save({"rows": made}, checkpoint_id=folder)
    read = {"rows": blocks.of(torch.zeros_like(rows), dist.group.WORLD, "test")}
    dcp.load(read, checkpoint_id=folder)
    assert torch.equal(blocks.own(read["rows"], "test"), rows)
    assert torch.equal(read["rows"].full_tensor()[:, 1, 2], torch.arange(1, 6).double())


def test_ranks_without_rows_or_blocks(ranks: Any, tmp_path: Path) -> None:
    ranks(4, few, str(tmp_path))
