"""Graphs of several vertex sets under ``kagome.shard``: outputs and every gradient, on 1 to 4 ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from test_shard import WORLDS, both, grads
from torch import Tensor, nn
from torch_geometric.data import HeteroData

import kagome
from kagome.comm.channel import Channel
from kagome.errors import DataError, ModelError
from kagome.graph.partition.sets_partition import sets_fingerprint

SIZES = {"paper": 23, "author": 17, "field": 3}
LINKS = {
    ("author", "writes", "paper"): 61,
    ("paper", "by", "author"): 59,
    ("paper", "cites", "paper"): 90,
    ("paper", "about", "field"): 41,
    ("field", "holds", "paper"): 37,
}


def hetero() -> HeteroData:
    """Three vertex types, one with fewer vertices than there may be ranks, and one without features."""
    generator = torch.Generator().manual_seed(3)
    data = HeteroData()
    for kind, width in (("paper", 5), ("author", 6)):
        data[kind].x = torch.randn(SIZES[kind], width, generator=generator, dtype=torch.float64)
    data["field"].num_nodes = SIZES["field"]
    for (source, relation, target), count in LINKS.items():
        ends = [torch.randint(SIZES[kind], (count,), generator=generator) for kind in (source, target)]
        data[source, relation, target].edge_index = torch.stack(ends)
        weights = torch.randn(count, 2, generator=generator, dtype=torch.float64)
        data[source, relation, target].edge_attr = weights
    return data


class Fields(nn.Module):
    """A model of three vertex types, with a learned table for the one without features."""

    def __init__(self, layers: Callable[[dict[str, int]], nn.Module], widths: dict[str, int]) -> None:
        super().__init__()
        self.table = nn.Embedding(SIZES["field"], widths["field"])
        self.one, self.out = layers(widths), nn.Linear(8, 4)

    def forward(
        self, x: dict[str, Tensor], edges: dict[Any, Tensor], edge_attr_dict: dict[Any, Tensor]
    ) -> Any:
        attr = edge_attr_dict
        x = {**x, "field": self.table.weight}
        h = self.one(x, edges, attr) if isinstance(self.one, Edged) else self.one(x, edges)
        return {kind: self.out(rows.relu()) for kind, rows in h.items()}


class Edged(nn.Module):
    """``HeteroConv`` with attributes of edges."""

    def __init__(self, make: Callable[[tuple[int, int], int], nn.Module], widths: dict[str, int]) -> None:
        super().__init__()
        self.conv = pyg.HeteroConv({link: make((widths[link[0]], widths[link[2]]), 8) for link in LINKS})

    def forward(self, x: dict[str, Tensor], edges: dict[Any, Tensor], attr: dict[Any, Tensor]) -> Any:
        return self.conv(x, edges, edge_attr_dict=attr)


class TwoLayers(nn.Module):
    """GraphSAGE, as ``to_hetero`` takes it."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = pyg.SAGEConv((-1, -1), 8), pyg.SAGEConv((-1, -1), 8)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.two(self.one(x, edge_index).relu(), edge_index)


def to_hetero(_widths: dict[str, int]) -> nn.Module:
    return pyg.to_hetero(TwoLayers(), (list(SIZES), list(LINKS)), aggr="sum")


LAYERS: dict[str, Callable[[dict[str, int]], nn.Module]] = {
    "sage": lambda widths: pyg.HeteroConv(
        {link: pyg.SAGEConv((widths[link[0]], widths[link[2]]), 8) for link in LINKS}
    ),
    "gat": lambda widths: Edged(
        lambda sizes, out: pyg.GATConv(sizes, out, edge_dim=2, add_self_loops=False), widths
    ),
    "gatv2": lambda widths: Edged(
        lambda sizes, out: pyg.GATv2Conv(sizes, out, edge_dim=2, add_self_loops=False), widths
    ),
    "transformer": lambda widths: Edged(
        lambda sizes, out: pyg.TransformerConv(sizes, out, edge_dim=2, heads=2, concat=False), widths
    ),
    "gine": lambda widths: Edged(
        lambda sizes, out: pyg.GINEConv(nn.Linear(sizes[0], out), edge_dim=2), dict.fromkeys(widths, 5)
    ),
    "hgt": lambda widths: pyg.HGTConv(widths, 8, (list(SIZES), list(LINKS)), heads=2),
    "han": lambda widths: pyg.HANConv(widths, 8, (list(SIZES), list(LINKS)), heads=2),
    "to_hetero": to_hetero,
}


def net_of(
    channel: Channel | None, model: nn.Module, data: Any, **settings: Any
) -> AbstractContextManager[Any]:
    """A sharded model, or the whole one with the same methods."""
    return nullcontext(Whole(model)) if channel is None else kagome.shard(model, data, log=str, **settings)


class Whole:
    """The reference of a scenario: what a sharded model has, of the model itself on the whole graph."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.rank, self.ranks = model, 0, 1
        self.mean: Any = lambda v, weight=None: (
            v.mean() if weight is None else (v * weight).sum() / weight.expand_as(v).sum()
        )

    def __call__(self, *args: Any) -> Any:
        return self.model(*args)

    def place(self, value: Tensor, rows: str, *, axis: int = 0) -> Tensor:
        return value

    def gather(self, value: Tensor, rows: str, *, axis: int = 0) -> Tensor:
        return value.detach()

    def read(self, value: Tensor, ids: Tensor, rows: str) -> Tensor:
        return value[ids]


def by_types(channel: Channel | None, kind: str, sent: str = "", **settings: Any) -> dict[str, Tensor]:
    """A model of ``HeteroData``: a loss over two types, gradients of two backward passes.

    On several ranks bytes of the kind ``sent`` are sent, if it is named.
    """
    torch.manual_seed(5)
    data = hetero()
    widths = {"paper": 5, "author": 5 if kind == "gine" else 6, "field": 5 if kind == "gine" else 7}
    if kind == "gine":
        data["author"].x = data["author"].x[:, :5].contiguous()
    model = Fields(LAYERS[kind], widths).double()
    if channel is None:
        with torch.no_grad():  # lazy layers take their shapes; sharded ones without this call
            model(data.x_dict, data.edge_index_dict, data.edge_attr_dict)
    found: dict[str, Tensor] = {}
    cut = {"parallel": kagome.Parallel(**settings)} if settings and channel is not None else {}
    with net_of(channel, model, data, **cut) as net:
        for _ in range(2):
            out = net(data.x_dict, data.edge_index_dict, data.edge_attr_dict)
            loss = sum(net.mean(rows**2) for rows in out.values() if rows is not None)
            loss.backward()
        for name, rows in out.items():
            whole = net.gather(rows, name)
            if channel is None or channel.rank == 0:
                found[f"out {name}"] = whole
            else:
                found[f"out {name}"] = torch.zeros(0)
        assert channel is None or not sent or net.traffic.bytes[sent]
    return grads(model) | {"loss": loss.detach()} | found


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("kind", LAYERS)
def test_models_of_several_vertex_types(ranks: Any, world: int, kind: str) -> None:
    expected = by_types(None, kind)
    for rank, found in enumerate(ranks(world, by_types, kind)):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            if rank and name.startswith("out"):
                continue
            torch.testing.assert_close(
                found[name], value, rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}"
            )


GRID, FINE, COARSE = 29, 13, 5


class Interaction(pyg.MessagePassing):
    """An interaction network: edge states, updated with the rows of both ends; senders are shifted ids."""

    def __init__(self, edges: Tensor, *, shifted: bool) -> None:
        super().__init__(aggr="sum")
        self.receivers, self.shifted = int(edges[1].max()) + 1 if edges.numel() else 0, shifted
        self.register_buffer("edges", edges, persistent=False)
        self.edge = nn.Sequential(nn.Linear(12, 8), nn.SiLU(), nn.Linear(8, 4))
        self.row = nn.Sequential(nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 4))

    def forward(self, senders: Tensor, receivers: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        if self.shifted:
            rows: Any = torch.cat([receivers, senders], dim=-2)
            total, change = self.propagate(self.edges, x=rows, state=state)
        else:
            total, change = self.propagate(self.edges, x=(senders, receivers), state=state)
        return receivers + self.row(torch.cat([receivers, total], dim=-1)), state + change

    def message(self, x_j: Tensor, x_i: Tensor, state: Tensor) -> Tensor:
        return self.edge(torch.cat([state, x_j, x_i], dim=-1))

    def aggregate(self, inputs: Tensor, index: Tensor, ptr: Any, dim_size: int) -> Any:
        size = self.receivers if self.shifted else dim_size
        return super().aggregate(inputs, index, ptr, size), inputs


def weather_edges() -> dict[str, tuple[str, str, Tensor]]:
    generator = torch.Generator().manual_seed(4)

    def drawn(source: int, target: int, count: int) -> Tensor:
        edges = torch.stack([torch.randint(n, (count,), generator=generator) for n in (source, target)])
        edges[1, : min(target, count)] = torch.arange(min(target, count))
        return edges

    return {
        "g2m": ("grid", "fine", drawn(GRID, FINE, 67)),
        "m2m": ("fine", "fine", drawn(FINE, FINE, 43)),
        "down": ("fine", "coarse", drawn(FINE, COARSE, 31)),
        "c2c": ("coarse", "coarse", drawn(COARSE, COARSE, 19)),
        "up": ("coarse", "fine", drawn(COARSE, FINE, 37)),
        "m2g": ("fine", "grid", drawn(FINE, GRID, 71)),
    }


SETS = {"grid": GRID, "fine": FINE, "coarse": COARSE}


class Weather(nn.Module):
    """Encode, process on a hierarchy of meshes, decode; edges, static fields and masks are buffers."""

    def __init__(self, *, shifted: bool) -> None:
        super().__init__()
        self.embed, self.read = nn.Linear(5, 4), nn.Linear(4, 3)
        self.mesh = nn.ModuleDict({kind: nn.Linear(2, 4) for kind in ("fine", "coarse")})
        self.steps, self.links = nn.ModuleDict(), nn.ModuleDict()
        generator = torch.Generator().manual_seed(6)
        for kind in ("fine", "coarse"):
            self.register_buffer(f"{kind}_static", torch.randn(SETS[kind], 2, generator=generator))
        self.register_buffer("forced", torch.randn(GRID, 2, generator=generator))
        self.register_buffer("inside", (torch.arange(GRID) % 4 > 0).to(torch.float).unsqueeze(1))
        for name, (source, target, edges) in weather_edges().items():
            # Without the shift, ids are those of the two sets.
            shift = torch.tensor([[SETS[target] if shifted and source != target else 0], [0]])
            self.steps[name] = Interaction(edges + shift, shifted=shifted and source != target)
            self.links[name] = nn.Linear(2, 4)
            self.register_buffer(f"{name}_lengths", torch.randn(edges.size(1), 2, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        h = {"grid": self.embed(torch.cat([x, self.forced.expand(x.size(0), -1, -1)], dim=-1))}
        for kind, embedded in self.mesh.items():
            h[kind] = embedded(getattr(self, f"{kind}_static")).unsqueeze(0).expand(x.size(0), -1, -1)
        for name, (source, target, _) in weather_edges().items():
            state = self.links[name](getattr(self, f"{name}_lengths")).unsqueeze(0)
            state = state.expand(x.size(0), -1, -1)
            h[target], _ = self.steps[name](h[source], h[target], state)
        return x + self.inside * self.read(h["grid"])


def weather_graph() -> kagome.Graph:
    sets: dict[str, Any] = {name: kagome.Vertices(size) for name, size in SETS.items()}
    for name, (source, target, edges) in weather_edges().items():
        sets[name] = kagome.Edges(source, target, edges)
    return kagome.Graph(**sets)


def weather(channel: Channel | None, shifted: bool) -> dict[str, Tensor]:
    """A roll-out of three steps before one backward; a loss weighted by area; batches of two samples."""
    torch.manual_seed(5)
    model = Weather(shifted=shifted).double()
    before = {name: value.clone() for name, value in model.named_buffers()}
    generator = torch.Generator().manual_seed(9)
    first = torch.randn(2, GRID, 3, generator=generator, dtype=torch.float64)
    wanted = torch.randn(3, 2, GRID, 3, generator=generator, dtype=torch.float64)
    area = torch.rand(GRID, 1, generator=generator, dtype=torch.float64)
    with net_of(channel, model, weather_graph()) as net:
        own_area = net.place(area, "grid")
        state, loss = net.place(first, "grid", axis=1), torch.zeros((), dtype=torch.float64)
        for step in range(3):
            state = net(state)
            y = net.place(wanted[step], "grid", axis=1)
            loss = loss + net.mean((state - y) ** 2, own_area)
        loss.backward()
        out = net.gather(state, "grid", axis=1)
    for name, value in model.named_buffers():
        assert torch.equal(value, before[name]), name
    shown = out if channel is None or channel.rank == 0 else torch.zeros(0)
    return grads(model) | {"loss": loss.detach(), "out": shown}


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("shifted", [False, True], ids=["ids of two sets", "shifted ids"])
def test_weather_of_grid_and_meshes(ranks: Any, world: int, shifted: bool) -> None:
    expected = weather(None, shifted)
    assert len(expected) > 60
    for rank, found in enumerate(ranks(world, weather, shifted)):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            if rank and name == "out":
                continue
            torch.testing.assert_close(
                found[name], value, rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}"
            )


def curve(channel: Channel | None) -> list[float]:
    """Losses with dropout on rows and on attention, the same on any number of ranks."""
    torch.manual_seed(5)
    data = hetero()
    widths = {"paper": 5, "author": 6, "field": 7}
    layers = lambda w: Edged(  # noqa: E731
        lambda sizes, out: pyg.GATConv(sizes, out, edge_dim=2, add_self_loops=False, dropout=0.3), w
    )
    model = nn.ModuleList([Fields(layers, widths), nn.Dropout(0.4)]).double()

    def run(*args: Any) -> dict[str, Tensor]:
        return {kind: model[1](rows) for kind, rows in model[0](*args).items()}

    losses = []
    with kagome.shard(model, data, seed=7, log=str) as net:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        for _ in range(4):
            out = net.run(run, data.x_dict, data.edge_index_dict, data.edge_attr_dict)
            loss = net.mean((out["paper"] - 1) ** 2) + net.mean(out["field"].abs())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


@pytest.mark.every
def test_draws_of_each_vertex_set_are_the_same_on_any_number_of_ranks(ranks: Any) -> None:
    one = ranks(1, curve)[0]
    assert len(set(one)) == 4
    for found in ranks(4, curve):
        torch.testing.assert_close(found, one, rtol=1e-9, atol=1e-9)


def bipartite(channel: Channel | None) -> dict[str, Tensor]:
    """Users and items: pairs whose ends lie in two sets, negatives of both, an edge set without edges."""
    torch.manual_seed(5)
    generator = torch.Generator().manual_seed(8)
    bought = torch.stack([torch.randint(n, (50,), generator=generator) for n in (19, 11)])
    none = torch.zeros(2, 0, dtype=torch.int64)
    graph = kagome.Graph(
        user=kagome.Vertices(19),
        item=kagome.Vertices(11),
        bought=kagome.Edges("user", "item", bought),
        by=kagome.Edges("item", "user", bought.flip(0).contiguous()),
        liked=kagome.Edges("user", "item", none),
    )
    user = torch.randn(19, 4, generator=generator, dtype=torch.float64)
    item = torch.randn(11, 4, generator=generator, dtype=torch.float64)

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = pyg.SAGEConv((4, 4), 4), pyg.SAGEConv((4, 4), 4)
            self.liked = pyg.GATConv((4, 4), 4, add_self_loops=False)

        def forward(self, user: Tensor, item: Tensor, up: Tensor, down: Tensor, none: Tensor) -> Any:
            rows = self.up((user, item), up).relu() + self.liked((user, item), none)
            paid = user[self.list[0]] * self.prices
            rows = rows + torch.zeros_like(rows).index_add(0, self.list[1], paid)
            return self.down((rows, user), down), rows

    model = Both().double()
    # As many edges as their reverse: the sizes leave open of which a kept tensor has rows.
    model.register_buffer("prices", torch.rand(50, 1, generator=generator, dtype=torch.float64))
    model.register_buffer("list", bought.clone())
    with net_of(channel, model, graph) as net:
        users, items = net(user, item, bought, bought.flip(0).contiguous(), none)
        share = slice(net.rank, None, net.ranks)
        good = net.read(users, bought[0, share], "user") * net.read(items, bought[1, share], "item")
        loss = net.mean(torch.nn.functional.softplus(-good.sum(1)))
        loss.backward()
        if channel is not None:
            drawn = net.negatives(10, sets=("user", "item"))
            assert drawn.numel() == 0 or int(drawn[1].max()) < 11
    return grads(model) | {"loss": loss.detach()}


@pytest.mark.parametrize("world", WORLDS)
def test_pairs_of_two_sets_and_an_edge_set_without_edges(ranks: Any, world: int) -> None:
    both(ranks, world, bipartite)


def lazy(channel: Channel | None) -> dict[str, Tensor]:
    """Lazy layers of a ``kagome.Graph``, called with a few rows before the model is sharded."""
    generator = torch.Generator().manual_seed(8)
    up = torch.stack([torch.randint(n, (50,), generator=generator) for n in (19, 11)])
    graph = kagome.Graph(
        grid=kagome.Vertices(19),
        mesh=kagome.Vertices(11),
        up=kagome.Edges("grid", "mesh", up),
        down=kagome.Edges("mesh", "grid", up.flip(0).contiguous()),
    )
    grid = torch.randn(19, 4, generator=generator, dtype=torch.float64)
    mesh = torch.randn(11, 3, generator=generator, dtype=torch.float64)

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = pyg.SAGEConv((-1, -1), 5), pyg.GATConv((-1, -1), 4, add_self_loops=False)

        def forward(self, grid: Tensor, mesh: Tensor, up: Tensor, down: Tensor) -> Tensor:
            return self.down((self.up((grid, mesh), up).relu(), grid), down)

    torch.manual_seed(5 if channel is None else 5 + channel.rank)  # all ranks get the weights of rank 0
    model = Both().double()
    edge = torch.zeros(2, 1, dtype=torch.int64)
    with torch.no_grad():
        model(grid[:2], mesh[:2], edge, edge)
    with net_of(channel, model, graph) as net:
        out = net(grid, mesh, up, up.flip(0).contiguous())
        loss = net.mean((out - 1) ** 2)
        loss.backward()
    return grads(model) | {"loss": loss.detach()}


@pytest.mark.some(1)
@pytest.mark.parametrize("world", WORLDS)
def test_lazy_layers_of_two_vertex_sets(ranks: Any, world: int) -> None:
    both(ranks, world, lazy)


def refused(channel: Channel) -> list[str]:
    """What a graph of several sets refuses, each by a message of its own."""
    said: list[str] = []
    graph = kagome.Graph(
        a=kagome.Vertices(6),
        b=kagome.Vertices(9),
        ab=kagome.Edges("a", "b", torch.tensor([[0, 5, 3], [8, 1, 4]])),
    )

    class Read(nn.Module):
        def __init__(self, turned: bool = False) -> None:
            super().__init__()
            self.linear, self.turned = nn.Linear(2, 2), turned

        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            rows = self.linear(x)
            return x.new_zeros(9, 2).index_add(0, edges[1], rows[edges[int(self.turned)]])

    def tried(call: Callable[[], object]) -> None:
        try:
            call()
        except (ModelError, DataError) as error:
            said.append(str(error))
        else:
            said.append("nothing")

    def run(model: nn.Module, *args: Tensor) -> None:
        with kagome.shard(model, graph, log=str) as net:
            net(*args)

    tried(lambda: kagome.Edges("a", "b", torch.zeros(2, 1)) and kagome.Graph(a=kagome.Vertices(2)))
    tried(lambda: kagome.Graph(a=kagome.Vertices(2), e=kagome.Edges("a", "c", torch.zeros(2, 1).long())))
    tried(lambda: kagome.Graph(a=kagome.Vertices(2), e=kagome.Edges("a", "a", torch.tensor([[0], [2]]))))
    tried(lambda: run(Read(), torch.randn(5, 2), graph.edges["ab"].index))
    tried(lambda: run(Read(turned=True), torch.randn(6, 2), graph.edges["ab"].index))
    tried(lambda: run(Read(), torch.randn(6, 2), torch.tensor([[0, 5, 3], [8, 2, 4]])))
    tried(lambda: run(pyg.HeteroConv({("a", "ab", "b"): pyg.SAGEConv((-1, -1), 4)}), torch.randn(6, 2)))

    def named() -> None:
        with kagome.shard(Read(), graph, log=str) as net:
            net.place(torch.randn(6, 2), "c")

    tried(named)
    return said


@pytest.mark.every
def test_what_a_graph_of_several_sets_refuses(ranks: Any) -> None:
    expected = [
        "a vertex set and an edge set",
        "a vertex set for both ends of e",
        "ids from 0 to 1 of a in row 1 of e",
        "of shape [5, 2]",
        "read by ids of vertices of b",
        "edges|ids",
        "parameters that have a shape",
        "the name of a vertex set or edge set: 'a', 'b', 'ab'",
    ]
    for found in ranks(2, refused):
        assert len(found) == len(expected)
        for text, words in zip(found, expected, strict=True):
            assert any(word in text for word in words.split("|")), (words, text)
            assert text != "nothing"


def cut(channel: Channel | None) -> dict[str, Tensor]:
    """Learned tables of users and of items, each cut with its set, with Adam's state."""
    torch.manual_seed(5)
    generator = torch.Generator().manual_seed(8)
    bought = torch.stack([torch.randint(n, (60,), generator=generator) for n in (19, 11)])
    graph = kagome.Graph(
        user=kagome.Vertices(19),
        item=kagome.Vertices(11),
        bought=kagome.Edges("user", "item", bought),
        by=kagome.Edges("item", "user", bought.flip(0).contiguous()),
    )

    class Light(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.user, self.item = nn.Embedding(19, 4), nn.Embedding(11, 4)
            self.up, self.down = pyg.SAGEConv((4, 4), 4), pyg.SAGEConv((4, 4), 4)

        def forward(self, up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
            users, items = self.user.weight, self.item.weight
            return users + self.down((items, users), down), items + self.up((users, items), up)

    model = Light().double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    more = {} if channel is None else {"cut": ("user.weight", "item.weight")}
    with net_of(channel, model, graph, **more) as net:
        share = slice(net.rank, None, net.ranks)
        for _ in range(3):
            users, items = net(bought, bought.flip(0).contiguous())
            good = net.read(users, bought[0, share], "user") * net.read(items, bought[1, share], "item")
            loss = net.mean(torch.nn.functional.softplus(-good.sum(1)))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if channel is not None and channel.size > 1:
            assert model.user.weight.size(0) == net.own("user").numel() < 19
            assert optimizer.state[model.item.weight]["exp_avg"].size(0) == net.own("item").numel()
    return {name: value.detach() for name, value in model.state_dict().items()} | {"loss": loss.detach()}


@pytest.mark.parametrize("world", WORLDS)
def test_tables_of_two_vertex_sets_are_cut_with_their_rows(ranks: Any, world: int) -> None:
    both(ranks, world, cut)


def sent(channel: Channel) -> list[int]:
    """Bytes of the halo in each of three steps, of a model whose two edge sets read one set's features."""
    data = hetero()
    kinds = [("paper", "cites", "paper"), ("paper", "about", "field")]

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = (pyg.SAGEConv((5, to), 4, aggr="max") for to in (5, 7))

        def forward(self, x: Tensor, field: Tensor, cites: Tensor, about: Tensor) -> tuple[Tensor, Tensor]:
            # A maximum reads the features themselves, and they are the same in each step.
            return self.one((x, x), cites), self.two((x, field), about)

    torch.manual_seed(5)
    field = torch.randn(SIZES["field"], 7, dtype=torch.float64)
    model, found = Two().double(), []
    with kagome.shard(model, data, log=str) as net:
        for _ in range(3):
            before = net.traffic.bytes["halo"]
            out = net(data["paper"].x, field, *(data[kind].edge_index for kind in kinds))
            (net.mean(out[0] ** 2) + net.mean(out[1] ** 2)).backward()
            found.append(net.traffic.bytes["halo"] - before)
    return found


@pytest.mark.every
def test_features_that_two_edge_sets_read_are_sent_once(ranks: Any) -> None:
    for first, *later in ranks(2, sent):
        assert first > 0
        assert later == [0, 0]


def shared(channel: Channel | None) -> dict[str, Tensor]:
    """One tensor is the features of two vertex types, and one the edges of two edge types."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(12, 4, generator=generator, dtype=torch.float64)
    edges = torch.randint(0, 12, (2, 40), generator=generator)
    data = HeteroData()
    data["a"].x, data["b"].x = x, x
    data["a", "to", "b"].edge_index, data["b", "to", "a"].edge_index = edges, edges
    torch.manual_seed(5)
    model = pyg.HeteroConv({link: pyg.SAGEConv((4, 4), 3) for link in data.edge_types}).double()
    with net_of(channel, model, data) as net:
        for _ in range(2):
            out = net(data.x_dict, data.edge_index_dict)
            loss = net.mean(out["a"] ** 2) + net.mean(out["b"].abs())
            loss.backward()
    return grads(model) | {"loss": loss.detach()}


@pytest.mark.parametrize("world", WORLDS)
def test_one_tensor_of_two_sets_is_cut_by_each(ranks: Any, world: int) -> None:
    both(ranks, world, shared)


class Two(nn.Module):
    """What a user may do with rows of two sets."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.conv = how, pyg.GATConv((4, 4), 4, add_self_loops=False)

    def forward(self, a: Tensor, b: Tensor, edges: Tensor) -> Tensor:
        sizes = a.size(0), b.size(0)
        if self.how == "sources alone":
            return self.conv((a, None), edges, size=sizes)
        if self.how == "plain sizes":
            return self.conv((a, None), edges, size=(13, 9))
        if self.how == "written":
            both = torch.cat([a, b]).clone()
            both[: sizes[0]] = a * 2
            both[sizes[0] :] = both[sizes[0] :] + 1
            return both[sizes[0] :]
        if self.how == "no size":
            return self.conv((a, None), edges)
        if self.how == "product":
            return (b @ a.T).softmax(-1) @ a
        both = torch.zeros(sizes[0] + sizes[1], 4, dtype=a.dtype)
        both[: sizes[0]], both[sizes[0] :] = a, b
        return both[sizes[0] :]


def of_two(channel: Channel | None, how: str) -> dict[str, Tensor] | str:
    torch.manual_seed(5)
    model = Two(how).double()
    a, b = torch.randn(13, 4, dtype=torch.float64), torch.randn(9, 4, dtype=torch.float64)
    edges = torch.stack([torch.randint(13, (30,)), torch.randint(9, (30,))])
    graph = kagome.Graph(a=kagome.Vertices(13), b=kagome.Vertices(9), ab=kagome.Edges("a", "b", edges))
    try:
        with net_of(channel, model, graph) as net:
            rows = net.place(a, "a").clone().requires_grad_()
            net.mean((net(rows, b, edges) - 1) ** 2).backward()
            whole = net.gather(rows.grad, "a") if rows.grad is not None else None
    except ModelError as error:
        return str(error)
    return grads(model) | ({} if whole is None else {"a": whole})


@pytest.mark.parametrize("how", ["sources alone", "plain sizes", "written"])
def test_rows_of_two_sets_in_one_call(ranks: Any, how: str) -> None:
    expected = of_two(None, how)
    assert isinstance(expected, dict)
    for found in ranks(3, of_two, how):
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-10, atol=1e-10, msg=name)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("no size", "size=(sources, targets)"),
        ("product", "F.scaled_dot_product_attention"),
        ("filled", "torch.cat([a, b]) in place of slices"),
    ],
)
def test_what_two_sets_refuse_says_what_to_do(ranks: Any, how: str, words: str) -> None:
    for said in ranks(2, of_two, how, spoils=True):
        assert words in said


def test_the_fingerprint_of_a_graph_changes_with_attributes_of_edges() -> None:
    edges = torch.tensor([[0, 1], [1, 0]])
    attrs = [
        None,
        torch.zeros(2),
        torch.ones(2),
        torch.zeros(2, 1),
        torch.zeros(2, dtype=torch.int32),
        torch.ones(2).bfloat16(),
    ]
    graphs = [
        kagome.Graph(a=kagome.Vertices(2), aa=kagome.Edges("a", "a", edges, attr=attr)) for attr in attrs
    ]
    assert len({sets_fingerprint(graph) for graph in graphs}) == len(attrs)
    assert sets_fingerprint(graphs[1]) == sets_fingerprint(graphs[1])
