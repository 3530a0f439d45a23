"""Devices: each rank has its own GPU, ranks that share one exchange through the host, and no host differs."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from devices import CurrentDevice
from kagome.comm.channel import Channel
from kagome.comm.mesh import open_mesh
from kagome.comm.transport.device import Agreement, RankDevice, agreed, own_device
from kagome.errors import LaunchError
from kagome.launch.environment import Ranks


def gpus(monkeypatch: pytest.MonkeyPatch, count: int, kind: str = "cuda") -> list[int]:
    """Let torch see some GPUs, and return the list that the chosen ones are added to."""
    chosen: list[int] = []
    CurrentDevice(monkeypatch, count)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(kind))
    monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
    return chosen


@pytest.mark.parametrize(
    ("visible", "local_rank", "local_size", "index"),
    [(8, 3, 8, 3), (8, 3, 4, 3), (1, 0, 1, 0), (1, 3, 4, 0), (2, 3, 4, 1)],
    ids=["one each", "spare", "alone", "one in sight of each", "two in sight of each"],
)
@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_a_rank_has_the_gpu_of_its_number(monkeypatch, kind, visible, local_rank, local_size, index):
    chosen = gpus(monkeypatch, visible, kind)
    ranks = Ranks(rank=local_rank, size=8, local_rank=local_rank, local_size=local_size)
    assert own_device(ranks) == torch.device(kind, index)
    assert chosen == [index]


@pytest.mark.parametrize(("count", "kind"), [(0, "cuda"), (1, "mps")])
def test_a_rank_without_a_gpu_that_exchanges_computes_on_the_cpu(monkeypatch, count, kind):
    assert not gpus(monkeypatch, count, kind)
    assert own_device(Ranks()) == torch.device("cpu")


def test_the_gpu_that_a_script_chose_is_kept(monkeypatch):
    assert gpus(monkeypatch, 4) == []
    assert own_device(Ranks(size=4, local_size=4), bound=2) == torch.device("cuda", 2)


def seen(host: str, device: str, visible: int, key: str) -> RankDevice:
    return RankDevice(host, device, visible, 2, key)


def test_ranks_with_a_gpu_each_use_nccl(monkeypatch):
    """With one GPU in sight of each rank all are called ``cuda:0``, and are not one GPU."""
    monkeypatch.setattr(dist, "is_backend_available", lambda name: True)
    found = [seen("a", "cuda:0", 1, f"a/{rank}") for rank in range(4)]
    assert agreed(found) == Agreement("nccl")
    assert agreed([seen("a", "cpu", 0, "")] * 2) == Agreement("gloo")


def test_ranks_that_share_a_gpu_exchange_through_the_host():
    two = [seen("b", "cuda:0", 1, "b/0")] * 2
    found = agreed([seen("a", "cuda:0", 1, "a/0"), *two])
    assert (found.backend, found.staged) == ("gloo", True)
    assert found.notes == (
        "2 ranks share cuda:0 of b, which has 2 ranks and 1 GPU in sight of each: all ranks exchange through "
        "the host's memory (gloo in place of nccl)",
    )


def test_a_gpu_without_its_backend_is_used_through_the_host(monkeypatch):
    monkeypatch.setattr(dist, "is_backend_available", lambda name: False)
    found = agreed([seen("a", "cuda:0", 1, "a/0")])
    assert (found.backend, found.staged) == ("gloo", True)
    assert "no nccl" in found.notes[0]


def test_hosts_that_differ_are_refused_with_both_counts():
    found = [seen("a", "cuda:0", 8, "a/0"), seen("a", "cuda:1", 8, "a/1"), seen("b", "cpu", 0, "")]
    with pytest.raises(LaunchError, match=r"got 8 GPUs on a \(rank 0\), no GPUs on b \(rank 2\)"):
        agreed(found)


def without_backend(channel: Channel) -> tuple[str, str, float]:
    """Make the group as a script does that names no backend, which torch then calls ``undefined``."""
    store, rank, size = dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
    channel.close()
    dist.destroy_process_group()
    dist.init_process_group(store=dist.PrefixStore("undefined", store), rank=rank, world_size=size)
    with open_mesh(timeout=20) as mesh:
        total = mesh.graph.all_reduce(torch.ones(2), action="total").sum().item()
        return dist.get_backend(), str(mesh.graph.send_device), total


def test_a_script_may_name_no_backend(ranks):
    assert ranks(2, without_backend, spoils=True) == [("undefined", "cpu", 4.0)] * 2
