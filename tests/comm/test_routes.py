"""Routes: under nccl's order, messages in both directions end only where each route has its own group."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from kagome.comm.channel import Channel
from kagome.comm.exchange import ExchangeRequest
from kagome.comm.mesh import open_mesh
from kagome.comm.transport.routes import Route, both_passes
from kagome.config import Parallel
from kagome.errors import CommError
from pipelines import trained
from rendezvous_group import NAME, under_rules

BOTH = {Route(a, b, back) for a in range(4) for b in range(4) if a != b for back in (False, True)}


def crossing(channel: Channel, own: bool) -> list[float]:
    """Every rank posts its receives, then sends to all: with one communicator nobody's send begins."""
    with open_mesh(timeout=20) as mesh:
        world = mesh.world
        assert not world.lanes
        routes = {route for route in BOTH if max(route[:2]) < world.size}
        world.open_routes(routes)
        world.open_routes(routes)
        if not own:
            everyone = dist.group.WORLD
            for route in world._transport.routes:
                world._transport.routes[route] = Everyone(everyone, sum(route[:2]) - world.rank)
        found = []
        for back in (False, True):
            peers = [peer for peer in range(world.size) if peer != world.rank]
            come = [
                world.start_receive((2,), torch.float32, peer, action="come", backward=back) for peer in peers
            ]
            sent = [
                world.start_send(torch.full((2,), 10.0 * world.rank + peer), peer, action="go", backward=back)
                for peer in peers
            ]
            found += [float(each.wait().sum()) / 2 for each in come]
            for each in sent:
                each.wait()
        return found


class Everyone:
    """The group of all ranks in the place of a route's: what Kagome once did."""

    def __init__(self, group: dist.ProcessGroup, peer: int) -> None:
        self.group, self.peer = group, peer

    def rank(self) -> int:
        return 0

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> object:
        return self.group.send(tensors, self.peer, tag)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> object:
        return self.group.recv(tensors, self.peer, tag)


@pytest.mark.parametrize("world", [2, 4])
def test_messages_cross_on_routes(ranks, world):
    found = ranks(world, under_rules, crossing, True, spoils=True)
    for rank, mine in enumerate(found):
        assert mine == [10.0 * peer + rank for peer in range(world) if peer != rank] * 2


def crossing_on_one(channel: Channel) -> str:
    try:
        under_rules(channel, crossing, False, seconds=2.0)
    except (CommError, RuntimeError) as error:
        return str(error)
    return "ended"


def test_on_one_communicator_they_wait_for_ever(ranks):
    for error in ranks(2, crossing_on_one, spoils=True):
        assert "nothing within" in error or "timed out" in error.lower(), error


def routes_of_parts(channel: Channel) -> tuple[int, list[float]]:
    """Two stages of two parts: each part's pair of stages has groups of its own."""
    with open_mesh(Parallel(pipe=2, graph=2), timeout=20) as mesh:
        mesh.pipe.open_routes(both_passes([(0, 1)]))
        peer = 1 - mesh.stage
        sent = mesh.pipe.start_send(
            torch.tensor([float(mesh.rank)]), peer, action="go", backward=mesh.stage == 1
        )
        come = mesh.pipe.start_receive((1,), torch.float32, peer, action="come", backward=mesh.stage == 0)
        found = come.wait().tolist()
        sent.wait()
        with pytest.raises(ValueError, match="has no group"):
            mesh.pipe.start_send(torch.ones(1), peer, action="go", backward=mesh.stage == 0)
        return dist.get_world_size(), found


def test_each_part_has_its_own_routes(ranks):
    assert [found for _, found in ranks(4, under_rules, routes_of_parts, spoils=True)] == [
        [2.0],
        [3.0],
        [0.0],
        [1.0],
    ]


def without_mesh(channel: Channel) -> str:
    alone = Channel(dist.group.WORLD, "cpu")
    with pytest.raises(CommError, match="a channel that was made by itself"):
        alone.open_routes([Route(0, 1)])
    return dist.get_backend()


def test_a_channel_without_a_mesh_has_no_routes(ranks):
    assert ranks(2, under_rules, without_mesh, spoils=True) == [NAME] * 2


def on_gloo(channel: Channel) -> int:
    before = dist.distributed_c10d._world.group_count
    channel.open_routes(both_passes([(0, 1)]))
    return dist.distributed_c10d._world.group_count - before


def test_gloo_needs_none(ranks):
    assert ranks(2, on_gloo) == [0, 0]


def test_gradients_come_back_on_routes_of_their_own():
    assert both_passes([(0, 1), (0, 2), (1, 1)]) == {
        Route(0, 1),
        Route(1, 0, True),
        Route(0, 2),
        Route(2, 0, True),
    }


def beside_the_device(channel: Channel) -> tuple[list[object], list[str]]:
    """Headers, counts and objects take the way of the host; rows take that of the group."""
    with open_mesh(Parallel(pipe=2, graph=2, chunks=1, max_age=1), timeout=20) as mesh:
        graph = mesh.graph
        assert not graph.lanes
        assert graph.control.lanes
        assert graph.patient is not graph
        ways: list[str] = []
        for each, name in ((graph._transport, "group"), (graph.control._transport, "control")):
            each.post = watched_post(each.post, ways, name)
        told = graph.gather_objects({"rank": mesh.rank}, "tell")
        ones = (1, 1)
        rows = torch.full((2, 3), float(mesh.rank))
        request = ExchangeRequest(ones, ones, "rows", header=(0, 1, 2, 3))
        assert graph.start(rows, request).wait()[:, 0].tolist() == [2.0 * mesh.stage, 2.0 * mesh.stage + 1]
        graph.barrier("all are here")
        wrong = ExchangeRequest(ones, ones, "rows", header=(0, 1, mesh.rank, 3))
        with pytest.raises(CommError, match="site is"):
            graph.start(rows, wrong)
        return told, ways


def watched_post(post, ways, name):
    def posted(*args, **kwargs):
        ways.append(name)
        return post(*args, **kwargs)

    return posted


def test_headers_and_objects_go_through_the_host(ranks):
    for rank, (told, ways) in enumerate(ranks(4, under_rules, beside_the_device, spoils=True)):
        first = rank // 2 * 2
        assert told == [{"rank": first}, {"rank": first + 1}]
        # counts and bytes of the object; a header and rows; a barrier; a header that differs
        assert ways == ["control", "control", "control", "group", "control", "control"]


def late_rows(channel: Channel) -> tuple[list[float], float | None]:
    told = trained(channel, "sage", {"graph": 2, "max_age": 1}, 3)
    return told["losses"], told["crossing"]["hidden_share"]


def test_late_rows_have_a_communicator_of_their_own(ranks):
    """And no share of hidden time is told, since the host's clock does not know it."""
    wanted = ranks(2, late_rows)
    found = ranks(2, under_rules, late_rows, spoils=True)
    for (mine, hidden), (theirs, known) in zip(found, wanted, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-9)
        assert hidden is None
        assert known is not None
