"""Rows cross between real ranks: the two ways are transposes, each byte is counted, nobody waits for ever."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch_geometric.data import Data

from collisions import Collisions, as_on_a_gpu
from convolutions import sample_graph
from kagome.comm.channel import Channel
from kagome.comm.in_process.thread_group import ThreadGroup
from kagome.errors import CommError
from kagome.graph.partition.partition import extract
from kagome.halo.exchange import all_rows, total
from kagome.halo.forward_pass import ForwardPass
from kagome.intercept.hooks import install
from kagome.intercept.interceptor import Interceptor
from kagome.model.exact.handlers import HANDLERS
from kagome.sparse_ops.edge_view import in_view
from kagome.verify.check import check
from odd_models import TwoLayers
from parity import alone, assert_equal, parity, random_owner, split, whole

CPU = torch.device("cpu")


def graph_and_owner(world: int) -> tuple[Data, Tensor]:
    return sample_graph(1), random_owner(30, world, seed=7)


def sent(world: int) -> int:
    """Rows that cross in one exchange, all ranks together."""
    data, owner = graph_and_owner(world)
    return sum(sum(extract(data, owner, part, world).send_counts) for part in range(world))


def pass_of(*, grad: bool = True) -> ForwardPass:
    return ForwardPass(1, checked=True, device=CPU, grad=grad)


# Transposes ------------------------------------------------------------------------------------------


def both_products(channel: Channel, width: int) -> tuple[float, float, int, int]:
    data, owner = graph_and_owner(channel.size)
    halo_exchange = in_view(extract(data, owner, channel.rank, channel.size), channel, CPU).rows
    generator = torch.Generator().manual_seed(channel.rank)
    x = torch.randn(halo_exchange.own, width, generator=generator, dtype=torch.float64)
    y = torch.randn(halo_exchange.own + halo_exchange.halo, width, generator=generator, dtype=torch.float64)
    forward_pass = pass_of(grad=False)
    channel.take_traffic()
    out = halo_exchange.gather(x, forward_pass, "out")
    forth = channel.take_traffic().bytes["halo"]
    back = halo_exchange.reduce(y, forward_pass, "back")
    return float((out * y).sum()), float((x * back).sum()), forth, channel.take_traffic().bytes["halo"]


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("width", [1, 5])
def test_gather_and_reduce_are_transposes(ranks: Callable[..., list], world: int, width: int) -> None:
    products = torch.tensor(ranks(world, both_products, width), dtype=torch.float64).sum(0)
    torch.testing.assert_close(products[0], products[1], rtol=1e-12, atol=0)
    assert products[2] == products[3] == 8 * width * sent(world)


def gradients(channel: Channel, way: str) -> tuple[Tensor, Tensor]:
    data, owner = graph_and_owner(channel.size)
    halo_exchange = in_view(extract(data, owner, channel.rank, channel.size), channel, CPU).rows
    generator = torch.Generator().manual_seed(channel.rank)
    tall, low = halo_exchange.own + halo_exchange.halo, halo_exchange.own
    rows, weight = (low, tall) if way == "gather" else (tall, low)
    x = torch.randn(rows, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    y = torch.randn(weight, 3, generator=generator, dtype=torch.float64)
    forward_pass = pass_of()
    out = (halo_exchange.gather if way == "gather" else halo_exchange.reduce)(x, forward_pass, way)
    ((out * y).sum() + forward_pass.token).backward()
    back = (halo_exchange.reduce if way == "gather" else halo_exchange.gather)(
        y, pass_of(grad=False), "reference"
    )
    assert x.grad is not None
    return x.grad, back


@pytest.mark.parametrize("way", ["gather", "reduce"])
def test_the_gradient_of_one_is_the_other(ranks: Callable[..., list], way: str) -> None:
    for grad, back in ranks(3, gradients, "gather" if way == "gather" else "reduce"):
        torch.testing.assert_close(grad, back, rtol=1e-13, atol=0)


def every_row(channel: Channel) -> tuple[Tensor, Tensor]:
    own = 2 * channel.rank  # rank 0 has none
    x = torch.full((own, 2), float(channel.rank), dtype=torch.float64, requires_grad=True)
    forward_pass = pass_of()
    out = all_rows(torch.arange(own), channel).gather(x, forward_pass, "all")
    (
        out.sum() * (channel.rank + 1)
        + total(x.sum(0), forward_pass, channel, "sum").sum()
        + forward_pass.token
    ).backward()
    assert x.grad is not None
    return out.detach()[:, 0], x.grad


def test_everyone_s_lists_lie_where_rows_do() -> None:
    channel = ThreadGroup(1).run(lambda channel: channel)[0]
    assert all_rows(torch.arange(3, device="meta"), channel).send.device.type == "meta"


def test_everyone_s_rows_come_own_ones_first_and_their_gradients_return(ranks: Callable[..., list]) -> None:
    for rank, (out, grad) in enumerate(ranks(3, every_row)):
        others = [float(peer) for peer in range(3) if peer != rank for _ in range(2 * peer)]
        assert out.tolist() == [float(rank)] * (2 * rank) + others
        # Each of three ranks weighs all rows by its number + 1, and adds the total once.
        assert (grad == 1 + 2 + 3 + 3).all()


# Bytes -----------------------------------------------------------------------------------------------


class One(nn.Module):
    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv(x, edge_index)


def two_layers() -> nn.Module:
    return TwoLayers(pyg.SAGEConv(6, 5), pyg.SAGEConv(5, 4))


def gcn() -> nn.Module:
    return One(pyg.GCNConv(6, 4))


def constant_reader() -> nn.Module:
    return One(pyg.SAGEConv(6, 4))


@pytest.mark.parametrize("world", [2, 3])
def test_constant_rows_travel_once_and_others_forth_and_back(ranks: Callable[..., list], world: int) -> None:
    data, owner = graph_and_owner(world)
    rows = sent(world)
    one = split(ranks, world, constant_reader, data, owner, epochs=3)
    assert one.halo == [8 * 6 * rows, 0, 0]
    two = split(ranks, world, two_layers, data, owner, epochs=3)
    # The second layer maps 5 columns to 4 before it sums neighbours.
    assert two.halo == [8 * (6 + 4 + 4) * rows, 8 * (4 + 4) * rows, 8 * (4 + 4) * rows]
    data.x.requires_grad_()
    grown = split(ranks, world, constant_reader, data, owner, epochs=2)
    assert grown.halo == [8 * (4 + 4) * rows] * 2


def test_degrees_and_constant_features_travel_once(ranks: Callable[..., list]) -> None:
    data, owner = graph_and_owner(2)
    # Six features and a degree a row in the first epoch: what neighbours' features sum to is kept.
    assert split(ranks, 2, gcn, data, owner, epochs=3).halo == [8 * (6 + 1) * sent(2), 0, 0]
    data.x.requires_grad_()
    # 4 columns forth and back in every epoch; one degree a row in the first.
    assert split(ranks, 2, gcn, data, owner, epochs=3).halo == [
        8 * (4 + 4 + 1) * sent(2),
        8 * (4 + 4) * sent(2),
        8 * (4 + 4) * sent(2),
    ]


def test_one_rank_sends_nothing() -> None:
    data = sample_graph(1)
    assert parity(alone(), two_layers, data, torch.zeros(30, dtype=torch.long), 0, 2).halo == [0, 0]


def rows_in(channel: Channel, dtype: torch.dtype) -> int:
    data, owner = graph_and_owner(channel.size)
    halo_exchange = in_view(extract(data, owner, channel.rank, channel.size), channel, CPU).rows
    channel.take_traffic()
    halo_exchange.gather(torch.zeros(halo_exchange.own, 3, dtype=dtype), pass_of(grad=False), "rows")
    return channel.take_traffic().bytes["halo"]


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 4), (torch.bfloat16, 2), (torch.int64, 8)])
def test_rows_travel_in_their_own_type(ranks: Callable[..., list], dtype: torch.dtype, size: int) -> None:
    assert sum(ranks(3, rows_in, dtype)) == size * 3 * sent(3)


# Ranks that differ -----------------------------------------------------------------------------------


def disagree(channel: Channel, how: str) -> tuple[str, float]:
    data, owner = graph_and_owner(channel.size)
    halo_exchange = in_view(extract(data, owner, channel.rank, channel.size), channel, CPU).rows
    odd = channel.rank == 1
    epoch = 2 if odd and how == "epoch" else 1
    forward_pass = ForwardPass(epoch, checked=True, device=CPU, grad=True)
    if odd and how == "number":
        forward_pass.collectives += 1
    x = torch.zeros(
        halo_exchange.own, 4 if odd and how == "width" else 3, requires_grad=not (odd and how == "grad")
    )
    begun = time.monotonic()
    try:
        halo_exchange.gather(x, forward_pass, "conv.x")
    except CommError as error:
        return str(error), time.monotonic() - begun
    return "", time.monotonic() - begun


@pytest.mark.parametrize("how", ["epoch", "number", "width", "grad"])
def test_ranks_at_different_reads_all_hear_of_it_at_once(ranks: Callable[..., list], how: str) -> None:
    answers = ranks(3, disagree, how, spoils=True)
    for text, seconds in answers:
        assert "conv.x" in text
        assert seconds < 10
    assert any("rank 1" in text for text, _ in answers)


class UnusedAside(nn.Module):
    """Two sites whose results go nowhere: backward must visit them all the same, on all ranks or none."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.aside = pyg.SAGEConv(6, 5), pyg.GATConv(5, 3)
        self.last = pyg.SAGEConv(5, 4)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.first(x, edge_index)
        self.aside(x, edge_index)
        return self.last(x, edge_index)


def test_an_unused_branch_neither_hangs_nor_gets_a_gradient(ranks: Callable[..., list]) -> None:
    data, owner = graph_and_owner(3)
    found = split(ranks, 3, UnusedAside, data, owner, epochs=2)
    assert_equal(found, whole(UnusedAside, data, epochs=2))
    assert not any(g is not None and g.any() for name, g in found.grads.items() if name.startswith("aside"))


class NormAside(nn.Module):
    """A norm of the features, behind which nothing reads neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.map, self.conv = nn.BatchNorm1d(6), nn.Linear(6, 4), pyg.SAGEConv(6, 4)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.map(self.norm(x)) + self.conv(x, edge_index)


def train_without_rows(channel: Channel, build: Callable[[], nn.Module]) -> list[Tensor]:
    """Rank 1 has no training vertex: its loss is the token alone, as in ``run.engine``."""
    data, owner = graph_and_owner(channel.size)
    torch.manual_seed(0)
    model = build().double()
    scope = Interceptor(extract(data, owner, channel.rank, channel.size), channel, handlers=HANDLERS)
    install(model, scope)
    with scope.running(1, training=True, checked=True) as forward_pass:
        out = model(scope.inputs["x"], scope.inputs["edge_index"])
    (forward_pass.token if channel.rank == 1 else out.sum() + forward_pass.token).backward()
    return [p.grad if p.grad is not None else torch.zeros_like(p) for p in model.parameters()]


@pytest.mark.some(2)
@pytest.mark.parametrize("build", [two_layers, NormAside])
def test_a_rank_without_training_vertices_does_not_keep_the_others_waiting(
    ranks: Callable[..., list], build: Callable[[], nn.Module]
) -> None:
    shares = ranks(3, train_without_rows, build)
    data, owner = graph_and_owner(3)
    torch.manual_seed(0)
    model = build().double()
    model(data.x, data.edge_index)[owner != 1].sum().backward()
    for parameter, *grads in zip(model.parameters(), *shares, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(sum(grads), parameter.grad, rtol=1e-10, atol=1e-13)
    # The vertices of rank 1 are read by the others' second layer: its share of the first's gradient is not 0.
    assert any(grad.any() for grad in shares[1]) == (build is two_layers)


# Recomputation ---------------------------------------------------------------------------------------


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = pyg.SAGEConv(6, 5), pyg.SAGEConv(5, 4)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.first(x, edge_index)
        return self.second(x, edge_index)


def test_a_layer_under_no_grad_is_a_constant_as_it_is_in_pyg():
    """Precomputed diffusion: it used to be refused, taken for reentrant checkpointing."""
    torch.manual_seed(0)
    result = check(Frozen(), sample_graph(seed=1), vertices=30)
    assert result.worst < 1e-10, result.text()


# Order of sums ---------------------------------------------------------------------------------------


def sums_by_peer(channel: Channel, atomic: bool) -> tuple[Tensor, int, int]:
    data, owner = graph_and_owner(channel.size)
    halo_exchange = in_view(extract(data, owner, channel.rank, channel.size), channel, CPU).rows
    generator = torch.Generator().manual_seed(channel.rank)
    y = torch.randn(halo_exchange.own + halo_exchange.halo, 3, generator=generator)
    with as_on_a_gpu() if atomic else Collisions() as found:
        out = halo_exchange.reduce(y, pass_of(grad=False), "back")
    return out, len(found.twice), found.sums


def test_received_rows_are_added_in_one_order_on_a_gpu(ranks):
    plain, found = ranks(4, sums_by_peer, False), ranks(4, sums_by_peer, True)
    assert any(twice for _, twice, _ in plain)  # rows that several peers read
    for (out, twice, sums), (wanted, _, _) in zip(found, plain, strict=True):
        assert torch.equal(out, wanted)
        assert (twice, sums) == (0, 3)
