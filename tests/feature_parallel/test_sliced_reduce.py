"""Feature slices: every layer gives what the whole graph gives, whichever of its reads are cut by columns."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn.models.basic_gnn import BasicGNN

from convolutions import BUILDABLE, ConvCase, double_precision, sample_graph
from kagome.comm.channel import Channel
from kagome.comm.in_process.thread_group import ThreadGroup
from kagome.components.parallelize import PartOptions, parallelize
from kagome.feature_parallel.all_to_all import even
from kagome.graph.partition.partition import extract
from kagome.model.decouple.decouple import decouple
from parity import Result, assert_equal, case_build, joined, one_rank, parity, random_owner, seeded, whole


def in_threads(
    model: nn.Module,
    data: Data,
    size: int,
    *,
    epochs: int = 1,
    owner: Tensor | None = None,
    tensor: int | None = None,
) -> Result:
    """``parity`` in feature slices, ranks as threads: each has a copy of one model, as seeds are global."""
    owner = random_owner(data.num_nodes, size, seed=size) if owner is None else owner

    def work(channel: object) -> object:
        return parity(channel, partial(copy.deepcopy, model), data, owner, 0, epochs, tensor or channel.size)

    with double_precision():
        return joined(ThreadGroup(size).run(work), data.num_nodes)


def one_each() -> Iterator[ConvCase]:
    """Of each class's variants every second one: all are exact in parts, by other tests."""
    for _, found in groupby(BUILDABLE, key=lambda case: case.name):
        yield from list(found)[::2]


@pytest.mark.some(32)
@pytest.mark.parametrize(
    "case", list(one_each()), ids=lambda case: f"{case.name}-{case.variant}".replace(" ", "_")
)
def test_each_convolution_is_whole(case: ConvCase) -> None:
    data = sample_graph(seed=1, groups_of_four=case.needs_groups_of_four)
    size, epochs = (3, 1) if len(case.variant) % 2 else (2, 2)
    build = case_build(case)
    with double_precision():
        model = seeded(build, 0)
    data.x.requires_grad_(size == 3 or not list(model.parameters()))
    found = in_threads(model, data, size, epochs=epochs)
    assert_equal(found, (one_rank if case.random else whole)(build, data, epochs=epochs))


# Whole models over real ranks, and what they send -------------------------------------------------

V, E, WIDTH, CLASSES, RELATIONS = 61, 400, 10, 5, 3


def graph() -> Data:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(V, WIDTH, generator=generator, dtype=torch.float64)
    edge_index = torch.randint(0, V, (2, E), generator=generator)
    return Data(x=x, edge_index=edge_index, edge_type=torch.randint(0, RELATIONS, (E,), generator=generator))


class Cut2(nn.Module):
    """GCN-II, whose layers read the first ones' rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 7), nn.Linear(7, CLASSES)
        self.convs = nn.ModuleList(pyg.GCN2Conv(7, 0.1, 0.5, layer + 1) for layer in range(3))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        first = x = self.first(x).relu()
        for conv in self.convs:
            x = conv(x, first, edge_index).relu()
        return self.last(x)


class Hops(nn.Module):
    """APPNP: a map, then ten hops."""

    def __init__(self, hops: int = 10) -> None:
        super().__init__()
        self.map, self.hops = nn.Linear(WIDTH, CLASSES), pyg.APPNP(hops, 0.1)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.hops(self.map(x), edge_index)


def basic(kind: type[BasicGNN], **options: object) -> nn.Module:
    return kind(WIDTH, 7, 3, CLASSES, **options)


def attention(heads: int) -> nn.Module:
    return pyg.GAT(WIDTH, 6, 2, CLASSES, heads=heads)


class Relational(nn.Module):
    """Two R-GCN layers."""

    def __init__(self) -> None:
        super().__init__()
        self.one = pyg.RGCNConv(WIDTH, 7, RELATIONS)
        self.two = pyg.RGCNConv(7, CLASSES, RELATIONS, num_bases=2)

    def forward(self, x: Tensor, edge_index: Tensor, edge_type: Tensor) -> Tensor:
        return self.two(self.one(x, edge_index, edge_type).relu(), edge_index, edge_type)


def apart_first(build: Callable[[], nn.Module]) -> nn.Module:
    """The model, decoupled."""
    return decouple(build(), {name: value[:2] for name, value in few().items()})


def few() -> dict[str, Tensor]:
    data = graph()
    edge_index = torch.tensor([[0, 1], [1, 0]])
    return {
        "x": data.x.to(torch.get_default_dtype()),
        "edge_index": edge_index,
        "edge_type": torch.zeros(2, dtype=torch.long),
    }


DEGREES = torch.tensor([0, 3, 5, 8, 6, 3, 2, 1, 1, 1, 1])
MODELS: dict[str, Callable[[], nn.Module]] = {
    "gcn": partial(basic, pyg.GCN),
    "sage": partial(basic, pyg.GraphSAGE),
    "gin": partial(basic, pyg.GIN),
    "pna": partial(
        basic, pyg.PNA, aggregators=["mean", "min", "max", "std"], scalers=["identity"], deg=DEGREES
    ),
    "largest": partial(basic, pyg.GraphSAGE, aggr="max"),
    "softmax": partial(basic, pyg.GraphSAGE, aggr="softmax", aggr_kwargs={"learn": True}),
    "gat1": partial(attention, 1),
    "gat2": partial(attention, 2),
    "gat6": partial(attention, 6),
    "gcn2": Cut2,
    "appnp": Hops,
    "decoupled gcn": partial(apart_first, partial(basic, pyg.GCN)),
    "decoupled deep gcn": partial(apart_first, partial(pyg.GCN, WIDTH, 7, 6, CLASSES)),
    "decoupled sage": partial(apart_first, partial(basic, pyg.GraphSAGE)),
    "decoupled gat": partial(apart_first, partial(attention, 2)),
    "decoupled gcn2": partial(apart_first, Cut2),
    "decoupled rgcn": partial(apart_first, Relational),
}


@pytest.mark.some(24)
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", MODELS)
def test_models_are_whole(ranks: Callable[..., list], name: str, size: int) -> None:
    data, owner = graph(), torch.arange(V) * size // V
    shares = ranks(size, parity, MODELS[name], data, owner, 0, 2, size)
    assert_equal(joined(shares, V), whole(MODELS[name], data, epochs=2))


@pytest.mark.some(8)
@pytest.mark.parametrize("cut", ["even", "one edge between", "a rank without", "a group without", "random"])
@pytest.mark.parametrize("name", MODELS)
def test_models_are_whole_in_parts_whose_features_are_sliced(
    ranks: Callable[..., list], name: str, cut: str
) -> None:
    """Two parts of two slices each: rows of the other part come in this rank's columns."""
    data, place = graph(), torch.arange(V)
    owner = {
        "even": place * 4 // V,
        "one edge between": torch.where(place < V - 1, place * 2 // V, 3),
        "a rank without": torch.where(place < V // 2, 0, 2 + place % 2),
        "a group without": place % 2,
        "random": torch.randint(0, 4, (V,), generator=torch.Generator().manual_seed(4)),
    }[cut]
    shares = ranks(4, parity, MODELS[name], data, owner, 0, 2, 2)
    assert_equal(joined(shares, V), whole(MODELS[name], data, epochs=2))


@pytest.mark.parametrize(
    ("name", "tensor"), [(name, 3) for name in MODELS] + [(name, 1) for name in ("gcn", "gat2", "pna")]
)
def test_a_rank_without_vertices(name: str, tensor: int) -> None:
    """It takes its part in every exchange, though its tensors lie nowhere and PyG leaves a softmax out."""
    data, owner = graph(), torch.where(torch.arange(V) < 40, 0, 2)
    with double_precision():
        model = seeded(MODELS[name], 0)
    found = in_threads(model, data, 3, epochs=2, owner=owner, tensor=tensor)
    assert_equal(found, whole(MODELS[name], data, epochs=2))


def sent(channel: Channel, name: str, epochs: int, bound: int | None = None) -> list[dict[str, int]]:
    """Bytes by kind that this rank sends in each epoch."""
    with double_precision():
        part = extract(graph(), torch.arange(V) * channel.size // V, channel.rank, channel.size)
        model = seeded(MODELS[name], 0)
        found = []
        with parallelize(model, part, channel, PartOptions(tensor=channel.size, memory=bound)) as net:
            for epoch in range(1, epochs + 1):
                channel.take_traffic()
                out = net.forward(epoch, training=True)
                (out.sum() + net.scope.forward.forward_pass.token).backward()
                found.append(dict(channel.take_traffic().bytes))
        return found


def transposes(size: int, width: int) -> int:
    """Bytes of one transpose of float64 rows, all ranks together."""
    counts = torch.bincount(torch.arange(V) * size // V, minlength=size).tolist()
    cut = even(width, size)
    return 8 * (V * width - sum(n * cut.taken(rank) for rank, n in enumerate(counts)))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_bytes_of_gcn(ranks: Callable[..., list], size: int) -> None:
    """Twice a site each way; the first layer's sum of constant features once."""
    first, later = (
        sum(epoch["transpose"] for epoch in epochs)
        for epochs in zip(*ranks(size, sent, "gcn", 2), strict=True)
    )
    sites = 4 * transposes(size, 7) + 4 * transposes(size, CLASSES)
    assert later == sites
    roots = V * 8 * (size - 1)  # in place of the weights, whose products they are
    assert first == sites + 2 * transposes(size, WIDTH) + roots


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", ["appnp", "decoupled gcn", "decoupled deep gcn", "decoupled sage"])
def test_hops_stay_in_slices(ranks: Callable[..., list], name: str, size: int) -> None:
    """However many hops: once apart and once together, and the same back."""
    _, later = (
        sum(epoch["transpose"] for epoch in epochs)
        for epochs in zip(*ranks(size, sent, name, 2), strict=True)
    )
    assert later == 4 * transposes(size, CLASSES)


@pytest.mark.parametrize("size", [2, 3])
def test_attention_crosses_by_vertex_and_head(ranks: Callable[..., list], size: int) -> None:
    """Two numbers a vertex to each peer, and their gradients back, beside four transposes; at any depth."""
    _, later = (
        sum(epoch["transpose"] for epoch in epochs)
        for epochs in zip(*ranks(size, sent, "decoupled gat", 2), strict=True)
    )
    assert later == 4 * transposes(size, CLASSES) + 2 * 2 * 8 * V * (size - 1)


def test_attention_of_whole_heads_crosses_by_head(ranks: Callable[..., list]) -> None:
    """Of six heads each of two ranks takes three."""
    _, later = (
        sum(epoch["transpose"] for epoch in epochs) for epochs in zip(*ranks(2, sent, "gat6", 2), strict=True)
    )
    first, last = 6, 6 * CLASSES  # of the last layer the heads are averaged
    sites = 4 * transposes(2, first) + 4 * transposes(2, last)
    assert later == sites + 2 * 4 * transposes(2, 6)
