"""Batches flattened into rows, with repeated edges, as weather models after anemoi have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from test_shard import WORLDS, N, grads, graph
from test_vertex_sets import net_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch_geometric.data import Batch, Data
from torch_geometric.utils import scatter, softmax

import kagome
from kagome.comm.channel import Channel
from kagome.errors import ModelError

GRID, MESH, HEADS, WIDTH = 31, 11, 2, 3
CHANNELS = HEADS * WIDTH


def edges_of() -> dict[str, tuple[str, str, Tensor]]:
    """Edges from grid to mesh, on the mesh, and back; as many up as down, which counts do not tell apart."""
    generator = torch.Generator().manual_seed(4)

    def drawn(source: int, target: int, count: int) -> Tensor:
        return torch.stack([torch.randint(n, (count,), generator=generator) for n in (source, target)])

    return {
        "up": ("grid", "mesh", drawn(GRID, MESH, 61)),
        "across": ("mesh", "mesh", drawn(MESH, MESH, 40)),
        "down": ("mesh", "grid", drawn(MESH, GRID, 61)),
    }


SIZES = {"grid": GRID, "mesh": MESH}


def weather_graph() -> kagome.Graph:
    sets: dict[str, Any] = {name: kagome.Vertices(size) for name, size in SIZES.items()}
    for name, (source, target, edges) in edges_of().items():
        sets[name] = kagome.Edges(source, target, edges)
    return kagome.Graph(**sets)


class Trained(nn.Module):
    """Attributes and trained numbers, a row a vertex or an edge, repeated for each sample."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.register_buffer("given", torch.randn(rows, 2))
        self.trained = nn.Parameter(torch.randn(rows, 2))

    def forward(self, batch: int) -> Tensor:
        return torch.cat([each.repeat(batch, 1) for each in (self.given, self.trained)], dim=-1)


class Attention(pyg.MessagePassing):
    """Edge features in keys and values, and a softmax over the edges of each target."""

    def __init__(self) -> None:
        super().__init__(aggr="add", node_dim=0)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, edges: Tensor, index: Tensor, size: Any
    ) -> Any:
        return self.propagate(index, size=size, query=query, key=key, value=value, edges=edges)

    def message(
        self,
        query_i: Tensor,
        key_j: Tensor,
        value_j: Tensor,
        edges: Tensor,
        index: Tensor,
        ptr: Any,
        size_i: Any,
    ) -> Tensor:
        alpha = (query_i * (key_j + edges)).sum(dim=-1) / WIDTH**0.5
        alpha = softmax(alpha, index, ptr, size_i)
        return (value_j + edges) * alpha.view(-1, HEADS, 1)


class Transformer(nn.Module):
    """One layer of attention, whose heads are an axis of their own for a while, as where heads are split."""

    def __init__(self) -> None:
        super().__init__()
        self.maps = nn.ModuleList(nn.Linear(CHANNELS, CHANNELS) for _ in range(4))
        self.norm, self.conv, self.out = (
            nn.LayerNorm(CHANNELS),
            Attention(),
            nn.Linear(2 * CHANNELS, CHANNELS),
        )

    def forward(self, source: Tensor, target: Tensor, edges: Tensor, index: Tensor, batch: int) -> Any:
        source, skip = self.norm(source), target
        given = zip(self.maps, (self.norm(target), source, source, edges), strict=True)
        # "(batch grid) (heads vars) -> batch heads grid vars", and back to "(batch grid) heads vars"
        apart = [linear(rows).view(batch, -1, HEADS, WIDTH).transpose(1, 2) for linear, rows in given]
        query, key, value, edged = (each.transpose(1, 2).reshape(-1, HEADS, WIDTH) for each in apart)
        size = source.shape[0], target.shape[0]
        out = self.conv(query, key, value, edged, index, size)
        return skip + self.out(torch.cat([out.flatten(1), target], dim=-1)), edges


class Mlp(pyg.MessagePassing):
    """Messages of a network over both ends and the state of an edge, which is updated."""

    def __init__(self) -> None:
        super().__init__()
        self.edge = nn.Sequential(nn.Linear(3 * CHANNELS, 8), nn.SiLU(), nn.Linear(8, CHANNELS))
        self.row = nn.Sequential(nn.Linear(2 * CHANNELS, 8), nn.SiLU(), nn.Linear(8, CHANNELS))

    def forward(self, source: Tensor, target: Tensor, edges: Tensor, index: Tensor, batch: int) -> Any:
        size = source.shape[0], target.shape[0]
        out, edges = self.propagate(index, size=size, x=(source, target), edges=edges)
        return target + self.row(torch.cat([target, out], dim=1)), edges

    def message(self, x_i: Tensor, x_j: Tensor, edges: Tensor) -> Tensor:
        return self.edge(torch.cat([x_i, x_j, edges], dim=1)) + edges

    def aggregate(self, inputs: Tensor, index: Tensor, ptr: Any, dim_size: Any) -> Any:
        return scatter(inputs, index, dim=0, dim_size=dim_size, reduce="sum"), inputs


LAYERS = {"transformer": Transformer, "mlp": Mlp}


class Mapper(nn.Module):
    """A layer along one edge set, whose edges and their attributes are repeated for the batch."""

    def __init__(self, kind: str, edges: Tensor, sizes: tuple[int, int]) -> None:
        super().__init__()
        self.register_buffer("index", edges)
        self.register_buffer("increment", torch.tensor(sizes).view(2, 1))
        self.attributes, self.embed = Trained(edges.size(1)), nn.Linear(4, CHANNELS)
        self.layer, self.again = LAYERS[kind.split()[0]](), kind.endswith("again")

    def forward(self, source: Tensor, target: Tensor, batch: int, times: int = 1) -> Tensor:
        if self.again:  # anemoi checkpoints encoder and decoder as a whole
            return checkpoint(self.layers, source, target, batch, times, use_reentrant=False)
        return self.layers(source, target, batch, times)

    def layers(self, source: Tensor, target: Tensor, batch: int, times: int) -> Tensor:
        index = torch.cat([self.index + i * self.increment for i in range(batch)], dim=1)
        edges = self.embed(self.attributes(batch))
        for _ in range(times):
            target, edges = self.layer(target if times > 1 else source, target, edges, index, batch)
        return target


class Weather(nn.Module):
    """Encode, process, decode: ``[batch, time, ensemble, grid, 3]`` to ``[batch, ensemble, grid, 3]``."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.rows = nn.ModuleDict({name: Trained(size) for name, size in SIZES.items()})
        self.embed = nn.ModuleDict({"grid": nn.Linear(6 + 4, CHANNELS), "mesh": nn.Linear(4, CHANNELS)})
        self.steps = nn.ModuleDict(
            {
                name: Mapper(kind, edges, (SIZES[source], SIZES[target]))
                for name, (source, target, edges) in edges_of().items()
            }
        )
        self.read = nn.Linear(CHANNELS, 3)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, ensemble, grid, fields = x.shape
        copies = batch * ensemble
        # "batch time ensemble grid vars -> (batch ensemble grid) (time vars)"
        rows = x.permute(0, 2, 3, 1, 4).reshape(batch * ensemble * grid, time * fields)
        h = self.embed["grid"](torch.cat([rows, self.rows["grid"](copies)], dim=-1))
        mesh = self.embed["mesh"](self.rows["mesh"](copies))
        hidden = self.steps["up"](h, mesh, copies)
        hidden = hidden + self.steps["across"](hidden, hidden, copies, times=2)
        out = self.read(self.steps["down"](hidden, h, copies))
        # "(batch ensemble grid) vars -> batch ensemble grid vars"
        return out.view(batch, ensemble, -1, fields) + x[:, -1]


def on_first(net: Any, values: dict[str, Tensor], rows: str, axis: int) -> dict[str, Tensor]:
    """Return all rows on rank 0, and what has none elsewhere."""
    found = {name: net.gather(value, rows, axis=axis) for name, value in values.items()}
    return {name: torch.zeros(0) if value is None else value for name, value in found.items()}


def alike(ranks: Any, world: int, scenario: Any, *args: Any) -> None:
    """Compare a scenario of the whole graph with that on some ranks; rank 0 has rows of all."""
    expected = scenario(None, *args)
    for found in ranks(world, scenario, *args):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            if found[name].numel() or not value.numel():
                torch.testing.assert_close(
                    found[name], value, rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}"
                )
            else:
                assert name.startswith(("out", "x ")), name


def weather(channel: Channel | None, kind: str, batch: int, ensemble: int) -> dict[str, Tensor]:
    """Two steps of a roll-out before one backward."""
    torch.manual_seed(5)
    model = Weather(kind).double()
    generator = torch.Generator().manual_seed(9)
    first = torch.randn(batch, 2, ensemble, GRID, 3, generator=generator, dtype=torch.float64)
    area = torch.rand(GRID, 1, generator=generator, dtype=torch.float64)
    with net_of(channel, model, weather_graph()) as net:
        x = net.place(first, "grid", axis=3)
        again = net(net.place(torch.stack([x[:, 1], net(x)], dim=1), "grid", axis=3))
        loss = net.mean((again - 1) ** 2, net.place(area, "grid"))
        loss.backward()
        shown = on_first(net, {"out": again}, "grid", 2)
    return grads(model) | {"loss": loss.detach()} | shown


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("kind", LAYERS)
def test_flattened_batches_are_those_of_the_whole_graph(ranks: Any, world: int, kind: str) -> None:
    alike(ranks, world, weather, kind, 2, 2)


def test_flattened_batches_in_checkpointed_mappers(ranks: Any) -> None:
    alike(ranks, 2, weather, "mlp again", 3, 1)


STRIDE = torch.tensor([[N], [N]])


def repeated(edges: Tensor, batch: int) -> Tensor:
    return torch.cat([edges + i * STRIDE for i in range(batch)], dim=1)


def at_once(edges: Tensor, batch: int) -> Tensor:
    """After einops: all samples in one sum, flattened."""
    shift = torch.arange(batch).view(1, batch, 1) * N
    return (edges.unsqueeze(1) + shift).reshape(2, -1)


def by_ends(edges: Tensor, batch: int) -> Tensor:
    source, target = edges
    return torch.stack([torch.cat([end + i * N for i in range(batch)]) for end in (source, target)])


def by_the_last_id(edges: Tensor, batch: int) -> Tensor:
    return torch.cat([edges + i * torch.max(edges) + i for i in range(batch)], dim=1)


def turned(edges: Tensor, batch: int) -> Tensor:
    return repeated(edges, batch).flip(0)


WAYS = {
    "repeated": repeated,
    "at once": at_once,
    "by ends": by_ends,
    "by the last id": by_the_last_id,
    "turned": turned,
}
KINDS = ("gcn", "sage", "gat", "gine", "transformer", "plain")


def layer(kind: str, width: int) -> nn.Module:
    made: dict[str, Any] = {
        "gcn": lambda: pyg.GCNConv(width, width),
        "sage": lambda: pyg.SAGEConv(width, width, aggr="max"),
        "gat": lambda: pyg.GATConv(width, width, edge_dim=2, heads=2, concat=False),
        "gine": lambda: pyg.GINEConv(nn.Linear(width, width), edge_dim=2),
        "transformer": lambda: pyg.TransformerConv(width, width, edge_dim=2),
        "plain": lambda: nn.Linear(2 * width, width),
    }
    return made[kind]()  # type: ignore[no-any-return]


class Flat(nn.Module):
    """Layers of PyG on a batch that is flattened into rows, between norms over all of these rows."""

    def __init__(self, kind: str, way: str) -> None:
        super().__init__()
        self.kind, self.way, self.back = kind, WAYS.get(way), way in ("turned", "held turned")
        self.one, self.norm, self.two = layer(kind, 5), nn.BatchNorm1d(5), layer(kind, 5)

    def step(self, conv: nn.Module, h: Tensor, edges: Tensor, attr: Tensor) -> Tensor:
        if self.kind == "plain":  # a user's own read and write by the ids
            source, target = edges.flip(0) if self.back else edges
            messages = torch.cat([h[source], h[target]], dim=1)
            return h.new_zeros(h.size(0), h.size(1)).index_add(0, target, conv(messages))
        return conv(h, edges, *(() if self.kind in ("gcn", "sage") else (attr,)))

    def forward(self, x: Tensor, edges: Tensor, attr: Tensor) -> Tensor:
        batch = x.size(0)
        edges = self.edges if self.way is None else self.way(edges, batch)
        h, attr = x.flatten(0, 1), attr.repeat(batch, 1)
        h = self.step(self.one, h, edges, attr)
        h = self.norm(h).relu() + h.mean(dim=0)
        h = self.step(self.two, h, edges, attr)
        # A sample and the next, taken apart in several ways.
        first, *others = h.chunk(batch)
        return torch.stack([first + h.unflatten(0, (batch, -1))[0], *others]) + h.view(x.shape)


def flat(channel: Channel | None, kind: str, way: str, batches: tuple[int, ...]) -> dict[str, Tensor]:
    torch.manual_seed(5)
    data, model = graph(), Flat(kind, way).double()
    data.edge_index[0, 0] = N - 1  # the last vertex has an edge, from which the stride may be taken
    found: dict[str, Tensor] = {}
    with net_of(channel, model, data) as net:
        for batch in batches:
            generator = torch.Generator().manual_seed(batch)
            x = torch.randn(batch, N, 5, generator=generator, dtype=torch.float64)
            x = net.place(x, "vertices", axis=1).clone().requires_grad_()
            out = net(x, data.edge_index, data.edge_attr)
            net.mean((out - 1) ** 2).backward()
            found |= on_first(net, {f"out {batch}": out, f"x {batch}": x.grad}, "vertices", 1)
    return found | grads(model)


@pytest.mark.some(1, each="kind")
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("kind", KINDS)
def test_layers_of_pyg_on_flattened_batches(ranks: Any, world: int, kind: str) -> None:
    alike(ranks, world, flat, kind, "repeated", (3, 1, 2))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["gine", "plain"])
def test_edges_of_a_batch_are_recognized_however_they_are_made(ranks: Any, kind: str, way: str) -> None:
    alike(ranks, 3, flat, kind, way, (2, 4))


class Given(nn.Module):
    """Layers on flattened rows and edges that are given so, and what a batch vector pools."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = pyg.GATConv(5, 4, edge_dim=2), pyg.SAGEConv(4, 3)

    def forward(self, x: Tensor, edges: Tensor, attr: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
        h = self.two(self.one(x, edges, attr).relu(), edges)
        return h, pyg.global_add_pool(h, batch, 3)


def given(channel: Channel | None) -> dict[str, Tensor]:
    """Three samples of ``Batch.from_data_list``."""
    torch.manual_seed(5)
    data, model = graph(), Given().double()
    batch = Batch.from_data_list([Data(x=data.x * i, edge_index=data.edge_index) for i in (1, 2, 3)])
    with net_of(channel, model, data) as net:
        h, pooled = net(batch.x, batch.edge_index, data.edge_attr.repeat(3, 1), batch.batch)
        (net.mean((h - 1) ** 2) + (pooled**2).mean()).backward()
        out = on_first(net, {"out": h.view(3, -1, 3)}, "vertices", 1)
    return out | {"pooled": pooled.detach()} | grads(model)


@pytest.mark.parametrize("world", WORLDS)
def test_batches_of_pyg_as_arguments(ranks: Any, world: int) -> None:
    alike(ranks, world, given)


def held(channel: Channel | None, back: bool) -> dict[str, Tensor]:
    """Edges of a batch in a buffer, in either order of their rows."""
    torch.manual_seed(5)
    data, model = graph(), Flat("plain", "held turned" if back else "held").double()
    edges = repeated(data.edge_index, 3)
    model.register_buffer("edges", edges.flip(0) if back else edges)
    x = torch.randn(3, N, 5, dtype=torch.float64)
    with net_of(channel, model, data) as net:
        out = net(x, None, data.edge_attr)
        net.mean((out - 1) ** 2).backward()
        return on_first(net, {"out": out}, "vertices", 1) | grads(model)


@pytest.mark.parametrize("back", [False, True], ids=["sources first", "targets first"])
def test_edges_of_a_batch_in_a_buffer(ranks: Any, back: bool) -> None:
    alike(ranks, 3, held, back)


class Empty(nn.Module):
    """Two vertex sets, an edge set without edges, and more samples than vertices."""

    def __init__(self, edges: dict[str, Tensor]) -> None:
        super().__init__()
        self.a, self.b = pyg.SAGEConv((2, 2), 3), pyg.GATConv((2, 2), 3, add_self_loops=False)
        for name, value in edges.items():
            self.register_buffer(name, value)
        self.register_buffer("stride", torch.tensor([[3], [7]]))

    def forward(self, few: Tensor, many: Tensor) -> Tensor:
        batch = few.size(0)
        some, none = (
            torch.cat([edges + i * self.stride for i in range(batch)], 1) for edges in (self.some, self.none)
        )
        few, many = few.reshape(-1, 2), many.reshape(-1, 2)
        rows = self.a((few, many), some) + self.b((few, many), none)
        return rows.view(batch, -1, 3)


def empty(channel: Channel | None) -> dict[str, Tensor]:
    torch.manual_seed(5)
    edges = {"some": torch.tensor([[0, 2, 2, 1], [6, 0, 0, 3]]), "none": torch.zeros(2, 0, dtype=torch.int64)}
    sets: dict[str, Any] = {name: kagome.Edges("few", "many", index) for name, index in edges.items()}
    graph = kagome.Graph(few=kagome.Vertices(3), many=kagome.Vertices(7), **sets)
    model = Empty(edges).double()
    few, many = (torch.randn(8, n, 2, dtype=torch.float64) for n in (3, 7))
    with net_of(channel, model, graph) as net:
        out = net(net.place(few, "few", axis=1), net.place(many, "many", axis=1))
        net.mean(out**2).backward()
        return on_first(net, {"out": out}, "many", 1) | grads(model)


@pytest.mark.parametrize("world", WORLDS)
def test_parts_and_edge_sets_without_rows(ranks: Any, world: int) -> None:
    alike(ranks, world, empty)


def sent(channel: Channel, flattened: bool, batch: int) -> tuple[int, int, int]:
    """Bytes and messages of a step of two layers that read rows of width 4, and the rows that are sent."""
    torch.manual_seed(5)
    data = graph()

    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = pyg.SimpleConv(aggr="sum"), pyg.SimpleConv(aggr="sum")
            self.embed = nn.Linear(5, 4)

        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            if flattened:
                h, edges = self.embed(x).flatten(0, 1), repeated(edges, batch)
                return self.two(self.one(h, edges).relu(), edges).view(batch, -1, 4)
            h = self.embed(x)
            return self.two(self.one(h, edges).relu(), edges)

    x = torch.randn(batch, N, 5, dtype=torch.float64)
    with kagome.shard(Sums().double(), data, log=str) as net:
        net.mean(net(x, data.edge_index) ** 2).backward()  # compares headers
        before = net.traffic
        net.mean(net(x, data.edge_index) ** 2).backward()
        spent = net.traffic.since(before)
        scope = net._parallel.scope
        rows = sum(scope.views[0].rows.send_counts) + scope.views[0].rows.halo
    return spent.bytes["halo"], spent.messages["halo"], rows


def test_a_flattened_batch_is_one_message_for_each_peer_and_layer(ranks: Any) -> None:
    ways = [ranks(3, sent, *way) for way in ((True, 1), (True, 4), (False, 4))]
    for one, four, apart in zip(*ways, strict=True):
        assert four == apart
        assert four[1] == one[1] == 2 * 2 * 2  # two peers, two layers, forward and backward
        assert four[0] == 2 * 4 * four[2] * 4 * 8  # two layers, four samples, four numbers of 8 bytes


def results(channel: Channel | None, folder: str) -> dict[str, Any]:
    """What the methods of a net make of flattened rows: those of two sets, one with a vertex on few ranks."""
    torch.manual_seed(5)
    generator = torch.Generator().manual_seed(2)
    few = torch.stack(
        [torch.randint(2, (9,), generator=generator), torch.randint(N, (9,), generator=generator)]
    )
    sets: Any = {"few": kagome.Vertices(2), "rows": kagome.Vertices(N)}
    graph = kagome.Graph(**sets, down=kagome.Edges("few", "rows", few))
    x, y = torch.randn(5, 2, 4, dtype=torch.float64), torch.randn(5, N, 4, dtype=torch.float64)

    class Down(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = pyg.SAGEConv((4, 4), 4)

        def forward(self, few: Tensor, rows: Tensor, edges: Tensor) -> tuple[Tensor, Tensor]:
            sizes = torch.tensor([[2], [N]])
            edges = torch.cat([edges + i * sizes for i in range(5)], dim=1)
            few, rows = few.flatten(0, 1), rows.flatten(0, 1)
            return few * 2, self.conv((few, rows), edges).tanh()

    model = Down().double()
    with net_of(channel, model, graph) as net:
        first, out = net(x, y, few)
        loss = net.mean(out**2)
        loss.backward()
        if channel is None:
            return grads(model) | {"loss": loss.detach(), "few": first, "out": out.detach()}
        shown = {"few": net.gather(first, "few"), "out": net.gather(out, "rows")}
        turned = net.gather(out.T, "rows", axis=-1)
        net.save(out, folder, "rows")
        for wrong in (out[1:], out[: 2 * net.own("rows").numel() + 1]):
            with pytest.raises(ModelError, match="own rows of rows along axis 0, or as many for each sample"):
                net.gather(wrong, "rows")
    if turned is not None:
        assert torch.equal(turned.T, shown["out"])
    return grads(model) | {"loss": loss.detach(), **{k: v for k, v in shown.items() if v is not None}}


@pytest.mark.parametrize("world", WORLDS)
def test_flattened_rows_are_gathered_and_saved(ranks: Any, tmp_path: Path, world: int) -> None:
    expected = results(None, "")
    for rank, found in enumerate(ranks(world, results, str(tmp_path))):
        assert {"few", "out"} <= found.keys() or rank
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-10, atol=1e-10, msg=name)
    rows = kagome.load_rows(tmp_path)
    torch.testing.assert_close(rows, expected["out"], rtol=1e-10, atol=1e-10)


def as_many(channel: Channel) -> str:
    """Rows of edges, as many as those of a batch of two, under the name of vertices."""
    edges = torch.arange(2 * N)
    data = Data(x=torch.randn(N, 3), edge_index=torch.stack([(edges // 2 + 1) % N, edges // 2]))
    with kagome.shard(pyg.SAGEConv(3, 3), data, log=str) as net:
        return told(lambda: net.gather(torch.zeros(net.own("edges").numel(), 3)))


def test_rows_of_another_set_are_no_batch(ranks: Any) -> None:
    for found in ranks(2, as_many):
        assert '"edges" as the set' in found


def draws(channel: Channel) -> list[float]:
    """Losses with dropout on rows and on attention of a flattened batch."""
    torch.manual_seed(5)
    data = graph()

    class Drops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.drop = pyg.GATConv(5, 4, edge_dim=2, dropout=0.3), nn.Dropout(0.4)

        def forward(self, x: Tensor, edges: Tensor, attr: Tensor) -> Tensor:
            batch = x.size(0)
            h, edges, attr = self.drop(x).flatten(0, 1), repeated(edges, batch), attr.repeat(batch, 1)
            return self.drop(self.conv(h, edges, attr)).view(batch, -1, 4)

    model, losses = Drops().double(), []
    x = torch.randn(3, N, 5, dtype=torch.float64)
    with kagome.shard(model, data, seed=7, log=str) as net:
        for _ in range(3):
            loss = net.mean(net(x, data.edge_index, data.edge_attr) ** 2)
            loss.backward()
            losses.append(loss.item())
    return losses


def test_draws_of_flattened_batches_are_the_same_on_any_number_of_ranks(ranks: Any) -> None:
    one = ranks(1, draws)[0]
    assert len(set(one)) == 3
    for found in ranks(4, draws):
        torch.testing.assert_close(found, one, rtol=1e-10, atol=1e-10)


def wrong(channel: Channel) -> list[str]:
    """Lists that are no edges of a batch, though as many: each is refused."""
    data, said = graph(), []

    class Reads(nn.Module):
        def __init__(self, make: Any, held: Tensor | None = None) -> None:
            super().__init__()
            self.make, self.conv = make, pyg.SAGEConv(5, 5)
            self.register_buffer("held", held)

        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            edges = self.make(edges) if self.held is None else self.held
            return self.conv(x.reshape(-1, 5), edges).view(x.shape)

    def shifted(by: Any) -> Any:
        return lambda edges: torch.cat([edges, edges + by], dim=1)

    ways: dict[str, Any] = {
        "another stride": shifted(N + 1),
        "a stride of one row": shifted(torch.tensor([[N], [0]])),
        "no stride": shifted(0),
        "copies in another order": lambda edges: torch.cat([edges + N, edges], dim=1),
        "edge by edge": lambda edges: (edges.unsqueeze(2) + torch.tensor([0, N])).reshape(2, -1),
        "scaled": lambda edges: torch.cat([edges, edges * 2 + N], dim=1),
        "chosen by value": lambda edges: torch.cat([edges, torch.where(edges == 3, 4, edges) + N], dim=1),
        "one edge less": lambda edges: torch.cat([edges, edges[:, 1:] + N], dim=1),
    }
    x = torch.randn(2, N, 5, dtype=torch.float64)
    for make in ways.values():
        with kagome.shard(Reads(make).double(), data, log=str) as net:
            said.append(told(lambda net=net: net(x, data.edge_index)))
    same = lambda edges: edges  # noqa: E731
    for other in (shifted(N + 1)(data.edge_index), repeated(data.edge_index, 2).roll(1, 1)):
        with kagome.shard(Reads(same).double(), data, log=str) as net:
            said.append(told(lambda net=net, other=other: net(x, other)))
        with kagome.shard(Reads(same, other).double(), data, log=str) as net:
            said.append(told(lambda net=net: net(x, data.edge_index)))
    return said


def told(call: Any) -> str:
    try:
        call()
    except ModelError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("world", [2, 3])
def test_lists_that_are_no_edges_of_a_batch_are_refused(ranks: Any, world: int) -> None:
    for found in ranks(world, wrong):
        assert len(found) == 12
        for number, text in enumerate(found):
            assert text, number


def checked(channel: Channel) -> str:
    """The check of a flattened batch, and one where a table of edges has as many rows as a batch."""
    torch.manual_seed(5)
    data = graph(edges=2 * N)

    class Held(nn.Module):
        """A layer on edges of one sample, with a learned row an edge, after one of a flattened batch."""

        def __init__(self) -> None:
            super().__init__()
            self.one = pyg.SAGEConv(5, 4)
            self.two = pyg.GINEConv(nn.Linear(4, 4), edge_dim=2)
            self.table = nn.Parameter(torch.randn(2 * N, 2))

        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            h = self.one(x.flatten(0, 1), repeated(edges, 2)).view(2, N, 4)
            return self.two(h[0], edges, self.table)

    def loss(net: Any, out: Tensor) -> Tensor:
        return net.mean((out - 1) ** 2)  # type: ignore[no-any-return]

    x = torch.randn(2, N, 5)
    with kagome.shard(Held(), data, log=str) as net:
        return str(kagome.check(net, x, data.edge_index, loss=loss).text())


def test_a_flattened_batch_is_checked_beside_a_table_of_edges(ranks: Any) -> None:
    for found in ranks(2, checked):
        assert "whole equal" in found
