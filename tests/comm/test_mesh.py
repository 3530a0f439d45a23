"""Mesh: one context joins the ranks and leaves them, whoever made the process group."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from kagome.comm.channel import Channel
from kagome.comm.mesh import open_mesh
from kagome.config import Parallel
from kagome.errors import CommError, ConfigError
from kagome.launch import start_local

LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID", "SLURM_NTASKS")


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)


def test_one_rank_needs_no_group():
    with open_mesh() as mesh:
        assert not dist.is_initialized()
        assert (mesh.size, mesh.rank, dict(mesh.axes)) == (1, 0, {"graph": 1})
        assert mesh.watch is None
        mesh.doing("nothing")
        rows = torch.ones(2, 3, device=mesh.device)
        assert mesh.graph.exchange(rows, [2], [2], action="a") is rows


def test_one_rank_may_have_a_group_and_it_is_gone_afterwards():
    sizes = []

    def work() -> None:
        with open_mesh(always_group=True) as mesh:
            sizes.append((mesh.graph.size, dist.is_initialized()))
            raise KeyError

    with pytest.raises(KeyError):
        work()
    assert sizes == [(1, True)]
    assert not dist.is_initialized()


def test_a_mesh_that_needs_more_ranks_is_refused():
    with pytest.raises(ConfigError, match="graph=3 needs 3 ranks"), open_mesh(Parallel(graph=3)):
        pass


def test_ranks_that_never_come_are_told(monkeypatch):
    for name, value in zip(LAUNCHED, ("1", "2", "127.0.0.1", "1"), strict=False):
        monkeypatch.setenv(name, value)
    with (
        pytest.raises(CommError, match=r"rank 1 was to meet 1 other ranks at 127.0.0.1:1"),
        open_mesh(timeout=1),
    ):
        pass


def use_given(channel: Channel) -> tuple[int, float]:
    with open_mesh(timeout=10) as mesh:
        total = mesh.graph.all_reduce(torch.ones(()), action="total").item()
    assert dist.is_initialized()
    return mesh.rank, total


def test_a_given_process_group_is_used_and_kept(ranks):
    assert ranks(3, use_given) == [(0, 3.0), (1, 3.0), (2, 3.0)]


def join() -> tuple[int, float, dict[str, int]]:
    with open_mesh(timeout=20) as mesh:
        mesh.doing("epoch 1")
        total = mesh.graph.all_reduce(torch.tensor(float(mesh.rank)), action="total").item()
        return mesh.local_rank, total, dict(mesh.axes)


def test_started_ranks_meet():
    assert start_local(3, join) == (0, 3.0, {"graph": 3})
