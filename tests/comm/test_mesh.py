"""Mesh: one context joins the ranks and leaves them, whoever made the process group."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore

from kagome.comm.channel import Channel
from kagome.comm.exchange import ExchangeRequest
from kagome.comm.mesh import open_mesh
from kagome.config import Parallel
from kagome.errors import CommError, ConfigError
from kagome.launch.launcher import start_local

LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID", "SLURM_NTASKS")


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)


def test_one_rank_needs_no_group():
    with open_mesh() as mesh:
        assert not dist.is_initialized()
        assert (mesh.size, mesh.rank, dict(mesh.axes)) == (1, 0, {"pipe": 1, "graph": 1, "tensor": 1})
        assert mesh.watch is None
        assert mesh.graph is mesh.world
        assert (mesh.stage, mesh.part, mesh.pipe.size, mesh.pipe.names) == (0, 0, 1, [0])
        mesh.doing("nothing")
        rows = torch.ones(2, 3, device=mesh.device)
        assert mesh.graph.start(rows, ExchangeRequest([2], [2], "a")).wait() is rows


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
    with pytest.raises(ConfigError, match="3 ranks for the mesh graph=3"), open_mesh(Parallel(graph=3)):
        pass


def test_a_store_that_ends_while_it_is_joined_is_sought_again(monkeypatch):
    """Rank 0 ends a group and opens the next one at the same port: others may meet the old store's end."""
    begun = []

    def ends_once(ranks, limit):
        begun.append(ranks)
        if len(begun) == 1:
            raise dist.DistNetworkError("Failed to recv, got 0 bytes.")
        return HashStore()

    monkeypatch.setattr("kagome.comm.transport.rendezvous._store", ends_once)
    with open_mesh(always_group=True) as mesh:
        assert mesh.graph.size == 1
    assert len(begun) == 2


def test_ranks_that_never_come_are_told(monkeypatch):
    for name, value in zip(LAUNCHED, ("1", "2", "127.0.0.1", "1"), strict=False):
        monkeypatch.setenv(name, value)
    with (
        pytest.raises(CommError, match=r"rank 1 to meet 1 other ranks at 127.0.0.1:1"),
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
    assert start_local(3, join) == (0, 3.0, {"pipe": 1, "graph": 3, "tensor": 1})


# Two axes ----------------------------------------------------------------------------------------


def placed(channel: Channel, pipe: int, shared: bool) -> dict[str, object]:
    with open_mesh(Parallel(pipe=pipe, shared_memory=shared), timeout=20) as mesh:
        mine = torch.tensor([10.0**mesh.rank])
        found = {
            "axes": dict(mesh.axes),
            "place": (mesh.stage, mesh.part, mesh.rank),
            "graph": list(mesh.graph.names),
            "pipe": list(mesh.pipe.names),
            "same": (mesh.graph is mesh.world, mesh.pipe is mesh.world),
            "sums": [
                int(each.all_reduce(mine, action="sum").item())
                for each in (mesh.world, mesh.graph, mesh.weights, mesh.pipe)
            ],
            "later": int(mesh.weights.start_all_reduce(mine, action="sum").wait().item()),
            "groups": len(dist.distributed_c10d._world.pg_map),
        }
        for each in (mesh.world, mesh.graph, mesh.pipe):
            assert each.traffic is mesh.world.traffic
            shared_memory = each.shared_memory
            assert (shared_memory is not None) == (shared and each.size > 1)
            assert shared_memory is None or mesh.world.shared_memory is not None
            assert shared_memory is None or shared_memory.allowance is mesh.world.shared_memory.allowance
    assert len(dist.distributed_c10d._world.pg_map) == 1
    return found


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(("size", "pipe"), [(2, 1), (2, 2), (3, 3), (4, 2), (4, 4)])
def test_ranks_stand_along_two_axes(ranks, size, pipe, shared):
    graph = size // pipe
    for rank, found in enumerate(ranks(size, placed, pipe, shared)):
        stage, part = divmod(rank, graph)
        here = [stage * graph + p for p in range(graph)]
        column = [s * graph + part for s in range(pipe)]
        assert found["axes"] == {"pipe": pipe, "graph": graph, "tensor": 1}
        assert found["place"] == (stage, part, rank)
        assert (found["graph"], found["pipe"]) == (here, column)
        assert found["same"] == (pipe == 1, graph == 1)
        everyone, mine, other = (sum(10**r for r in each) for each in (range(size), here, column))
        assert found["sums"] == [everyone, mine, mine, other]
        assert found["later"] == mine
        assert found["groups"] == (3 if pipe > 1 and graph > 1 else 1)


def counted(channel: Channel) -> dict[str, int]:
    with open_mesh(Parallel(pipe=2), timeout=20) as mesh:
        mesh.world.take_traffic()
        ones, rows = [1, 1], torch.zeros(2, 3)
        mesh.graph.start(rows, ExchangeRequest(ones, ones, "halo")).wait()
        mesh.weights.start_all_reduce(torch.zeros(5), action="sum").wait()
        if mesh.stage == 0:
            mesh.pipe.start_send(rows, 1, action="rows").wait()
        else:
            mesh.pipe.start_receive((2, 3), torch.float32, 0, action="rows").wait()
        mesh.world.start(torch.zeros(4, 1), ExchangeRequest([1] * 4, [1] * 4, "all", kind="transpose")).wait()
        taken = mesh.world.take_traffic().bytes
        assert not any(each.take_traffic().bytes["halo"] for each in (mesh.graph, mesh.pipe))
        return taken


def test_what_any_channel_sends_is_counted_once(ranks):
    for rank, taken in enumerate(ranks(4, counted)):
        assert taken["halo"] == 12
        assert taken["weights"] == 20
        assert taken["stage"] == (24 if rank < 2 else 0)
        assert taken["transpose"] == 12
        assert sum(taken.values()) == 12 + 20 + taken["stage"] + 12


def refused(channel: Channel) -> None:
    with open_mesh(Parallel(graph=2, pipe=2)):
        pass


def test_a_mesh_whose_product_is_not_the_ranks_is_refused(ranks):
    with pytest.raises(ConfigError, match="4 ranks for the mesh pipe=2 x graph=2"):
        ranks(3, refused)


def loses(channel: Channel) -> str:
    with open_mesh(Parallel(pipe=2), timeout=2) as mesh:
        try:
            if mesh.rank == 0:
                mesh.graph.start(torch.zeros(2, 1), ExchangeRequest([1, 1], [1, 1], "halo")).wait()
            elif mesh.rank == 3:
                mesh.pipe.start_receive((2,), torch.float32, 0, action="rows").wait()
        except CommError as error:
            return str(error)
        return ""


@pytest.mark.slow
def test_peers_of_a_stage_are_named_as_ranks_of_the_world(ranks):
    texts = ranks(4, loses, spoils=True)
    assert texts[0].startswith("expected rank 0 to be answered in 'halo' by rank 1")
    assert texts[3].startswith("expected rank 3 to be answered in 'rows' by rank 1")


def join_both() -> tuple[int, int, float]:
    with open_mesh(Parallel(pipe=2), timeout=20) as mesh:
        total = mesh.pipe.all_reduce(torch.tensor(float(mesh.rank)), action="total").item()
        return mesh.stage, mesh.part, total


@pytest.mark.slow
def test_started_ranks_meet_along_two_axes():
    assert start_local(4, join_both) == (0, 0, 2.0)
