"""``kagome.check`` of a sharded model and a loss: what is right passes, each fault is named."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch_geometric.nn as pyg
from test_shard import C, F, N, graph, model_of
from torch import Tensor, nn
from torch.nn.functional import logsigmoid
from torch_geometric.data import Data

import kagome
from kagome.comm.channel import Channel
from kagome.sharding.compare.single_rank_collectives import single_rank_collectives

# What passes -------------------------------------------------------------------------------------


class Mesh(nn.Module):
    """Two layers after MeshGraphNet, with a state an edge and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.edge = nn.Linear(F, 6), nn.Linear(2, 6)
        self.messages = nn.ModuleList(nn.Linear(18, 6) for _ in range(2))
        self.updates = nn.ModuleList(nn.Linear(12, 6) for _ in range(2))
        self.decode, self.drop = nn.Linear(6, C), nn.Dropout(0.3)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        source, target = edge_index
        h, state = self.encode(x), self.edge(edge_attr)
        for message, update in zip(self.messages, self.updates, strict=True):
            state = state + message(torch.cat([h[source], h[target], state], dim=-1)).tanh()
            sums = torch.zeros(h.size(0), 6, dtype=h.dtype).index_add(0, target, state)
            h = h + self.drop(update(torch.cat([h, sums], dim=-1)).relu())
        return self.decode(h)


class Potential(nn.Module):
    """Energies of vertices from distances."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(2, 6), nn.Linear(6, 1)

    def forward(self, pos: Tensor, edge_index: Tensor) -> Tensor:
        source, target = edge_index
        gap = pos[source] - pos[target]
        square = gap.square().sum(1, keepdim=True) + 1.0
        each = self.two(self.one(torch.cat([square, square.rsqrt()], dim=1)).tanh())
        return torch.zeros(pos.size(0), 1, dtype=pos.dtype).index_add(0, target, each)


class Table(nn.Module):
    """LightGCN's propagation of a learned table."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Parameter(torch.randn(N, 4)), pyg.LGConv()

    def forward(self, edge_index: Tensor) -> Tensor:
        one = self.layer(self.table, edge_index)
        return (self.table + one + self.layer(one, edge_index)) / 3


def passing(channel: Channel, case: str, dtype: torch.dtype) -> list[Any]:
    """Check a net that is right; return the result, and whether the model is as before."""
    data = graph()
    data = Data(**{n: v.to(dtype) if v.is_floating_point() else v for n, v in data.to_dict().items()})
    torch.manual_seed(5)
    predictor = nn.Linear(4, 4).to(dtype)
    if case == "mesh":
        model: nn.Module = Mesh().to(dtype)
        inputs = [data.x, data.edge_index, data.edge_attr]

        def loss(net: Any, out: Tensor) -> Tensor:
            return net.mean((out - net.place(data.y)) ** 2)
    elif case == "potential":
        model = Potential().to(dtype)
        inputs = [data.x[:, :3].clone().requires_grad_(), data.edge_index]

        def loss(net: Any, out: Tensor) -> Tensor:
            return net.sum(nn.functional.mse_loss(out, net.place(data.y[:, :1]), reduction="none"))
    else:
        model = Table().to(dtype)
        inputs = [data.edge_index]
        pairs = torch.randint(N, (2, 15), generator=torch.Generator().manual_seed(2))

        def loss(net: Any, out: Tensor) -> Tensor:
            a, b = net.pairs(out, pairs[:, net.rank :: net.ranks])
            c, d = net.pairs(out, net.negatives(10, step=net.step))
            good, bad = (predictor(a) * b).sum(1), (predictor(c) * d).sum(1)
            penalty = (
                net.sum(net.table**2) + net.mean(net.read(net.table, pairs[0]) ** 2) if case == "cut" else 0
            )
            return penalty - net.mean(logsigmoid(good)) - net.mean(logsigmoid(-bad))

    beside = [predictor] if case in ("table", "cut") else []
    with kagome.shard(model, data, beside=beside, cut=case == "cut", log=str) as net:
        before = [p.clone() for p in (*model.parameters(), *predictor.parameters())]
        found = kagome.check(net, *inputs, loss=loss, second=case == "potential")
        after = [*model.parameters(), *predictor.parameters()]
        same = all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
        untouched = same and all(p.grad is None for p in after) and net.step == 0
        net.sum(net(*inputs)).backward()  # still works
        untouched &= all(p.grad is not None for p in model.parameters())
    return [found.text(), found.first, [row.kind for row in found.rows], found.worst, untouched]


@pytest.mark.every
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        ("mesh", torch.float64),
        ("potential", torch.float32),
        ("table", torch.float32),
        ("cut", torch.float32),
    ],
    ids=["mesh", "potential", "table", "cut"],
)
def test_what_is_right_passes(ranks: Any, world: int, case: str, dtype: torch.dtype) -> None:
    for text, first, kinds, worst, untouched in ranks(world, passing, case, dtype):
        assert first is None
        assert untouched
        assert 0 <= worst < 1e-10
        assert "float64; 23 vertices, 90 edges" in text
        wanted = {"output", "loss", "gradient"} | ({"second derivative"} if case == "potential" else set())
        assert set(kinds) == wanted
        if case in ("table", "cut"):
            assert kinds.count("gradient") == 3


def wrong_with_tables(channel: Channel) -> str:
    """A penalty on own rows alone, which is a share of that on the whole table."""
    data, model = graph(), Table().double()
    with kagome.shard(model, data, cut=("table",), log=str) as net:
        try:
            kagome.check(net, data.edge_index, loss=lambda net, out: net.mean(out**2) + net.table.sum())
        except kagome.KagomeError as error:
            return str(error)
    return ""


def wrong_gradient(channel: Channel) -> str:
    """A loss of the right value, whose gradient misses other ranks' rows of the table."""

    def loss(net: Any, out: Tensor) -> Tensor:
        kept = net.table if net.ranks == 1 else net.table * 2 - net.table.detach()
        return net.sum(kept**2)  # type: ignore[no-any-return]

    data, model = graph(), Table().double()
    with kagome.shard(model, data, cut=("table",), log=str) as net:
        try:
            kagome.check(net, data.edge_index, loss=loss)
        except kagome.KagomeError as error:
            return str(error)
    return ""


def test_faults_of_cut_tables_are_found(ranks: Any) -> None:
    assert all("net.mean(values) in place of" in told for told in ranks(2, wrong_with_tables))
    for told in ranks(3, wrong_gradient):
        assert "gradient of table" in told
        assert "2 times that in all entries" in told


def copied_model(channel: Channel) -> bool:
    """Whether a copy of a net, and what ``net.inputs`` has, are those of the whole graph."""
    data, model = graph(), model_of("sage")
    wanted = model(data.x, data.edge_index)
    with kagome.shard(model, data, log=str) as net:
        found = kagome.check(net, net.inputs["x"], net.inputs["edge_index"], loss=right)
        return found.first is None and torch.equal(deepcopy(net)(data.x, data.edge_index), wanted)


def test_a_copy_of_a_net_runs_on_the_whole_graph(ranks: Any) -> None:
    assert ranks(2, copied_model) == [True, True]


# What is found -----------------------------------------------------------------------------------


class Centered(nn.Module):
    """A model that gathers the sum of all rows by itself, which it has on a part already."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = pyg.SAGEConv(F, C)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = self.layer(x, edge_index)
        mine = h.sum(0)
        shares = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(shares, mine)
        return h - sum(shares) / N


def own_mean(net: Any, out: Tensor) -> Tensor:
    return ((out - net.place(graph().y)) ** 2).mean()


def summed_again(net: Any, out: Tensor) -> Tensor:
    loss = net.mean(out**2)
    dist.all_reduce(loss)
    return loss  # type: ignore[no-any-return]


def summed_by_hand(net: Any, out: Tensor) -> Tensor:
    loss = (out**2).sum() / N
    dist.all_reduce(loss)
    return loss


def gathered_without_gradient(net: Any, out: Tensor) -> Tensor:
    mine = (out**2).sum(0)
    shares = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(shares, mine)
    return sum(shares).sum() / N  # type: ignore[union-attr]


def gathered_with_own_gradient(net: Any, out: Tensor) -> Tensor:
    mine = (out**2).sum(0)
    shares = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(shares, mine)
    shares[dist.get_rank()] = mine
    return sum(shares).sum() / N  # type: ignore[union-attr]


def raw_ids(net: Any, out: Tensor) -> Tensor:
    return net.mean(out[torch.tensor([1, 2, N - 1])] ** 2)  # type: ignore[no-any-return]


def small_ids(net: Any, out: Tensor) -> Tensor:
    return net.sum(out[torch.tensor([0, 1, 2])] ** 2)  # type: ignore[no-any-return]


def right(net: Any, out: Tensor) -> Tensor:
    return net.mean(out**3)  # type: ignore[no-any-return]


def failing(channel: Channel, loss: Callable[..., Tensor], centered: bool) -> list[str]:
    data = graph()
    torch.manual_seed(5)
    model = Centered().double() if centered else model_of("sage")
    with kagome.shard(model, data, log=str) as net:
        try:
            kagome.check(net, data.x, data.edge_index, loss=loss)
        except kagome.KagomeError as error:
            return [type(error).__name__, str(error)]
    return ["none", ""]


@pytest.mark.every
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(
    ("loss", "centered", "words"),
    [
        (own_mean, False, ["the loss of the whole graph on every rank", "net.mean"]),
        (right, True, ["torch.distributed.all_gather is called", "output[", "on {world} ranks"]),
        (
            gathered_without_gradient,
            False,
            ["all_gather is called", "gradient of ", "got 0 on"],
        ),
        (gathered_with_own_gradient, False, ["all_gather is called", "gradient of ", "times that"]),
        (summed_again, False, ["loss to be", "on {world} ranks", "all_reduce is called"]),
        (summed_by_hand, False, ["gradient of ", "times that in all entries", "all_reduce is called"]),
        (raw_ids, False, ["IndexError on own rows alone", "net.read(out, ids)"]),
        (small_ids, False, ["loss to be", "as on the whole graph"]),
    ],
    ids=[
        "own mean",
        "gather in forward",
        "gather",
        "own gather",
        "summed again",
        "summed by hand",
        "raw ids",
        "small ids",
    ],
)
def test_a_fault_is_found(ranks: Any, world: int, loss: Any, centered: bool, words: list[str]) -> None:
    for kind, message in ranks(world, failing, loss, centered, spoils=True):
        assert kind == "CheckError"
        for each in words:
            assert each.format(world=world) in message, message


def unfit(channel: Channel, case: str) -> str:
    data, model = graph(), model_of("sage")
    settings: dict[str, Any] = {"loss": right}
    inputs = [data.x, data.edge_index]
    if case == "no loss":
        settings = {}
    elif case == "no input with gradient":
        settings |= {"second": True}
    elif case == "dtype":
        settings |= {"dtype": torch.float16}
    elif case == "vector":
        settings = {"loss": lambda net, out: out.sum(1)}
    elif case == "fails":
        inputs = [data.x[:-1], data.edge_index]
    with kagome.shard(model, data, log=str) as net:
        try:
            kagome.check(net, *inputs, **settings)
        except kagome.KagomeError as error:
            return str(error)
    return "nothing"


@pytest.mark.every
@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("no loss", "a loss, a function of the net and its output"),
        ("no input with gradient", "positions.requires_grad_()"),
        ("dtype", "torch.float64 or torch.float32"),
        ("vector", "a loss of one number; got shape [23]"),
        ("fails", "the model and the loss to run on the whole graph"),
    ],
)
def test_a_check_that_cannot_be_made(ranks: Any, case: str, words: str) -> None:
    for message in ranks(2, unfit, case, spoils=True):
        assert words in message


def test_single_rank_collectives_have_a_gradient() -> None:
    value = torch.ones(3, requires_grad=True)
    with single_rank_collectives() as called:
        assert (dist.get_world_size(), dist.get_rank()) == (1, 0)
        shares = [torch.zeros(3), torch.ones(3)]
        dist.all_gather(shares, value)
        work = dist.all_reduce(shares[0], async_op=True)
        work.wait()
        out = torch.zeros(3)
        dist.reduce_scatter(out, [value])
        whole = torch.zeros(3)
        dist.all_gather_into_tensor(whole, value)
    (sum(shares).sum() + 2 * out.sum() + 4 * whole.sum()).backward()
    assert value.grad is not None
    assert value.grad.tolist() == [7.0] * 3
    assert called == {"all_gather", "all_reduce", "reduce_scatter", "all_gather_into_tensor"}


def of_several_sets(channel: Channel) -> list[Any]:
    """Check a layer from one vertex set to another, whose data are float32."""
    data = graph()
    index = torch.stack([data.edge_index[0], data.edge_index[1] % 7])
    sets = kagome.Graph(
        grid=kagome.Vertices(N),
        mesh=kagome.Vertices(7),
        up=kagome.Edges("grid", "mesh", index, attr=data.edge_attr.float()),
    )
    torch.manual_seed(5)
    model = pyg.GATConv((F, 4), C, edge_dim=2, add_self_loops=False)
    x, coarse = data.x.float(), torch.randn(7, 4)
    with kagome.shard(model, sets, log=str) as net:
        for value, rows, hint in (
            (torch.zeros(40, net.own("grid").numel()), "grid", "axis=1"),
            (torch.zeros(net.own("grid").numel(), 40), "mesh", '"grid" as the set'),
        ):
            with pytest.raises(kagome.KagomeError, match=f"Try: {hint}"):
                net.gather(value, rows)
        with pytest.raises(kagome.KagomeError, match="the name of a vertex set"):
            kagome.metrics.recall_at(net, torch.zeros(1, 1), index, 1, items=torch.arange(7))
        found = kagome.check(
            net,
            (x, coarse),
            sets.edges["up"].index,
            sets.edges["up"].attr,
            loss=lambda net, out: net.mean((out - net.place(data.y[:7], "mesh")) ** 2),
        )
    return [found.first, found.worst, found.vertices, found.edges, found.dtype]


def with_labels_of_edges(channel: Channel) -> list[str]:
    data = graph()
    data.y, data.train_mask = torch.rand(90, 1, dtype=torch.float64), torch.arange(90) % 2 == 0
    with kagome.shard(Ends(), data, log=str) as net:

        def loss(net: Any, out: Tensor) -> Tensor:
            wrong = (out - net.place(data.y, "edges")) ** 2
            return net.mean(wrong[net.place(data.train_mask, "edges")])  # type: ignore[no-any-return]

        found = kagome.check(net, data.x, data.edge_index, loss=loss)
    return [each.kind for each in found.rows]


class Ends(nn.Module):
    """A number for each edge."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.conv, self.out = pyg.SAGEConv(F, 4).double(), nn.Linear(8, 1).double()

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = self.conv(x, edge_index)
        return self.out(torch.cat([h[edge_index[0]], h[edge_index[1]]], dim=1))  # type: ignore[no-any-return]


def test_labels_of_edges_may_be_attributes_of_the_graph(ranks: Any) -> None:
    """The check refused ``data.y`` with a row for each edge, which ``kagome.shard`` takes."""
    assert "gradient" in ranks(2, with_labels_of_edges)[0]


def test_a_net_of_several_sets_passes(ranks: Any) -> None:
    for first, worst, vertices, edges, dtype in ranks(2, of_several_sets):
        assert (first, vertices, edges, dtype) == (None, N + 7, 90, "float64")
        assert worst < 1e-10
