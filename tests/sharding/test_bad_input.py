"""What a user may do wrong with ``kagome.shard``: each has an error of its own on all ranks, or is right."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from test_shard import C, F, N, grads, graph, model_of
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch_geometric.data import Data

import kagome
from kagome.comm.channel import Channel


def caught(call: Callable[[], Any]) -> str:
    """The kind and text of what a call raises."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


# What is refused ---------------------------------------------------------------------------------


def other_edges(case: str) -> Tensor:
    """A list of edges that is not the graph's: of its size, with ids that each part has, or of another."""
    generator = torch.Generator().manual_seed(7)
    count = {"same size": 90, "small ids": 90, "fewer": 30}[case]
    return torch.randint(0, 5 if case == "small ids" else N, (2, count), generator=generator)


def unfit(channel: Channel, case: str) -> str:
    data, model = graph(), model_of("sage")
    mine = channel.rank == 1

    def raising(x: Tensor, edge_index: Tensor) -> Tensor:
        if mine:
            raise RuntimeError("of the user's")
        return model(x, edge_index)  # type: ignore[no-any-return]

    def with_more(x: Tensor, edge_index: Tensor, more: Any = None) -> Tensor:
        return model(x if more is None else more, edge_index)  # type: ignore[no-any-return]

    def with_number(x: Tensor, edge_index: Tensor) -> tuple[Tensor, Tensor]:
        return model(x, edge_index), torch.tensor([float(channel.rank)])

    def run() -> None:
        with kagome.shard(model, data, log=str) as net:
            call(net, data.x, data.edge_index)

    def call(net: Any, x: Tensor, edges: Tensor) -> None:
        calls: dict[str, Callable[[], Any]] = {
            "same size": lambda: net(x, other_edges(case)),
            "small ids": lambda: net(x, other_edges(case)),
            "own edges": lambda: net(x, edges[:, net.own("edges")]),
            "fewer": lambda: net(x, other_edges(case)),
            "reversed": lambda: net(x, edges.flip(0)),
            "raising": lambda: net.run(raising, x, edges),
            "none": lambda: net.run(with_more, x, edges, torch.ones(3) if mine else None),
            "rows on one": lambda: net.run(with_more, x, edges, x if mine else None),
            "by name on one": lambda: net.run(with_more, x, edges, **({"more": x} if mine else {})),
            "axes": lambda: net.run(with_more, x, edges, x if mine else x.unsqueeze(0)),
            "vector": lambda: net(x, edges).sum(1).backward(),
            "number": lambda: net.run(with_number, x, edges),
        }
        calls[case]()

    return caught(run)


@pytest.mark.every
@pytest.mark.parametrize(
    ("case", "words"),
    [
        (
            "same size",
            ["argument 2 to be the graph's edge_index", "[2, 90] with other", "Data(edge_index"],
        ),
        ("small ids", ["argument 2 to be the graph's edge_index", "[2, 90] with other values"]),
        ("own edges", ["argument 2 to be the graph's edge_index", "other values"]),
        ("reversed", ["argument 2 to be the graph's edge_index", "other values"]),
        ("fewer", ["an edge list of shape [2, 30]", "that is not made of edge_index"]),
        ("raising", ["RuntimeError on a part: of the user's", "rank 1"]),
        ("none", ["argument 3 to be of one kind", "NoneType on rank 0, a tensor of 1 axes on rank 1"]),
        ("rows on one", ["NoneType on rank 0, a tensor of 2 axes on rank 1"]),
        ("by name on one", ["more to be of one kind", "not given on rank 0, a tensor of 2 axes on rank 1"]),
        ("axes", ["a tensor of 3 axes on rank 0, a tensor of 2 axes on rank 1"]),
        ("number", ["outputs with own rows, or the same on all ranks; got one of shape [1] and sum"]),
        ("vector", ["RuntimeError: grad can be implicitly created only for scalar outputs"]),
    ],
)
def test_refused_on_all_ranks(ranks: Any, case: str, words: list[str]) -> None:
    for message in ranks(2, unfit, case, spoils=True, timeout=60):
        for each in words:
            assert each in message


def mesh_of(channel: Channel, parts: int) -> str:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("graph",))
    parallel = kagome.Parallel(graph=parts)
    return caught(lambda: kagome.shard(model_of("gcn"), graph(), mesh=mesh, parallel=parallel, log=str))


@pytest.mark.every
@pytest.mark.parametrize("parts", [1, 3])
def test_a_mesh_of_another_size_is_refused(ranks: Any, parts: int) -> None:
    for message in ranks(2, mesh_of, parts, spoils=True):
        assert f"a mesh of {parts} ranks for graph={parts}; got one of 2: ('graph',)" in message


class Holds(nn.Module):
    """A layer, and a buffer that a forward uses."""

    def __init__(self, case: str) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layer, self.case = pyg.SAGEConv(F, C), case
        held: dict[str, Tensor] = {
            "reads": torch.tensor([1, 4, 20, 22]),
            "reads small ids": torch.tensor([0, 1, 2]),
            "writes": torch.tensor([1, 4, 20, 22]),
            "area": torch.linspace(0.1, 2.0, N).unsqueeze(1),
            "other edges": other_edges("fewer"),
            "other edges by hand": other_edges("fewer"),
            "small edges by hand": torch.tensor([[0, 1, 2], [1, 2, 0]]),
        }
        self.register_buffer("held", held[case])

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h, held = self.layer(x, edge_index), self.held
        if self.case.startswith("reads"):
            return h + h[held].mean(0)  # type: ignore[no-any-return, index]
        if self.case == "writes":
            h = h.clone()
            h[held] = 0.0  # type: ignore[index]
            return h  # type: ignore[no-any-return]
        if self.case == "area":
            return h * held  # type: ignore[no-any-return]
        if self.case == "other edges":
            return h + self.layer(x, held)  # type: ignore[no-any-return]
        source, target = held  # type: ignore[misc]
        return h.index_add(0, target, h[source])  # type: ignore[no-any-return]


def plain(model: nn.Module, data: Data, x: Tensor | None = None) -> dict[str, Tensor]:
    out = model(data.x if x is None else x, data.edge_index)
    (out**2).mean().backward()
    return grads(model) | {"out": out.detach()}


def sharded(
    model: nn.Module, data: Data, x: Tensor | None = None, change: Callable[[], None] | None = None
) -> dict[str, Any]:
    with kagome.shard(model, data, log=str) as net:
        if change is not None:
            change()
        out = net(data.x if x is None else x, data.edge_index)
        net.mean(out**2).backward()
        return grads(model) | {"out": net.gather(out)}


def equal(found: dict[str, Any], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if found[name] is not None:  # rows are gathered on rank 0
            torch.testing.assert_close(
                found[name], value, rtol=1e-10, atol=1e-10, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
            )


def held_ids(channel: Channel, case: str) -> dict[str, Any]:
    return sharded(Holds(case).double(), graph())


@pytest.mark.every
@pytest.mark.parametrize("case", ["reads", "reads small ids", "writes", "area"])
def test_ids_in_a_buffer_are_those_of_the_graph(ranks: Any, case: str) -> None:
    for world in (2, 3):
        found = ranks(world, held_ids, case)
        assert found[0]["out"] is not None
        for each in found:
            equal(each, plain(Holds(case).double(), graph()))


def held_edges(channel: Channel, case: str) -> str:
    return caught(lambda: sharded(Holds(case).double(), graph()))


@pytest.mark.every
@pytest.mark.parametrize("case", ["other edges", "other edges by hand", "small edges by hand"])
def test_edges_in_a_buffer_that_are_not_the_graphs_are_refused(ranks: Any, case: str) -> None:
    for message in ranks(2, held_edges, case, spoils=True):
        assert message.startswith("ModelError")
        assert "edge" in message
        assert "not" in message


# What is right -----------------------------------------------------------------------------------


def replace_weight(model: nn.Module) -> None:
    layer: Any = model.one.lin_l  # type: ignore[union-attr]
    layer.weight = nn.Parameter(layer.weight.detach() * 2)


def replaced(channel: Channel) -> dict[str, Any]:
    model = model_of("sage")
    return sharded(model, graph(), change=lambda: replace_weight(model))


@pytest.mark.parametrize("world", [2])
def test_a_parameter_that_another_replaced_is_trained(ranks: Any, world: int) -> None:
    model = model_of("sage")
    replace_weight(model)
    expected = plain(model, graph())
    for found in ranks(world, replaced):
        equal(found, expected)


def unusual(case: str) -> tuple[Data, Tensor]:
    """A graph, and what is given to the model as features."""
    data = graph()
    if case == "no edges":
        data = Data(x=data.x, edge_index=torch.zeros(2, 0, dtype=torch.int64))
    elif case == "few vertices":
        data = Data(x=data.x[:2], edge_index=torch.tensor([[0, 1, 0], [1, 0, 0]]))
    x = data.x.clone()
    if case in ("nan", "infinite"):
        x[3, 1] = torch.nan if case == "nan" else torch.inf
    return data, x


def of_unusual(channel: Channel, case: str) -> dict[str, Any]:
    torch.manual_seed(5)
    data, x = unusual(case)
    return sharded(pyg.SAGEConv(F, C).double(), data, x)


@pytest.mark.every
@pytest.mark.parametrize("case", ["no edges", "few vertices", "nan", "infinite"])
def test_unusual_inputs_give_what_the_whole_gives(ranks: Any, case: str) -> None:
    torch.manual_seed(5)
    data, x = unusual(case)
    expected = plain(pyg.SAGEConv(F, C).double(), data, x)
    for found in ranks(3, of_unusual, case):
        equal(found, expected)


def not_finite(channel: Channel) -> str:
    data = graph()
    data.x[3, 1] = torch.nan
    return caught(lambda: kagome.shard(model_of("gcn"), data, log=str))


def test_a_graph_that_is_not_finite_is_refused(ranks: Any) -> None:
    for message in ranks(2, not_finite, spoils=True):
        assert "DataError: expected x to hold finite numbers; got nan in row 3" in message


def later(channel: Channel, case: str) -> tuple[str, float]:
    """A rank's arguments differ in a later call; the error, and the seconds until it."""
    data, mine = graph(), channel.rank == channel.size - 1
    x, begun = data.x.clone(), time.monotonic()
    batch = torch.stack([x, x + 1]), torch.cat([data.edge_index, data.edge_index + N], dim=1)

    def forward(x: Tensor, edges: Tensor, more: Any = None) -> Tensor:
        return model(x.flatten(0, -2), edges).view(*x.shape[:-1], -1)

    model = model_of("sage")
    more: dict[str, tuple[Any, ...]] = {
        "one more": (x, data.edge_index, *([data.edge_attr] if mine else [])),
        "one less": (x, data.edge_index, *([] if mine else [data.edge_attr])),
        "other axes": (x.unsqueeze(0) if mine else x, data.edge_index),
        "other samples": batch if mine else (x, data.edge_index),
        "not known": (x, data.edge_index),
        "each known": batch if mine else (x, data.edge_index),
    }
    try:
        with kagome.shard(model, data, log=str, timeout=4 if case == "each known" else 60) as net:
            placed = net.place(data.x)
            net.run(forward, placed if case == "not known" else x, data.edge_index)
            if not mine:
                more["not known"] = placed, data.edge_index
            if case == "one less":
                net.run(forward, x, data.edge_index)
            if case == "each known":
                net.run(forward, *batch)
            begun = time.monotonic()
            net.run(forward, *more[case])
    except kagome.KagomeError as error:
        return str(error), time.monotonic() - begun
    return "nothing", 0.0


@pytest.mark.some(1, each="case")
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("one more", "argument 3: a tensor of 2 axes, unlike earlier calls; rank 0 has gone on"),
        ("one less", "argument 3: a tensor of 2 axes, unlike earlier calls; rank"),
        ("other axes", "argument 1: a tensor of 3 axes, argument 2: a tensor of 2 axes, unlike earlier"),
        ("other samples", "the edges: those of 2 samples, unlike earlier calls"),
        ("not known", "argument 1: a tensor of 2 axes, whose rows are to be found, unlike earlier calls"),
    ],
)
def test_other_arguments_of_a_rank_in_a_later_call_are_refused_soon(
    ranks: Any, world: int, case: str, words: str
) -> None:
    for found, seconds in ranks(world, later, case, spoils=True):
        assert words in found
        assert seconds < 30  # a wait for rows would end after 60


def test_arguments_that_ranks_know_from_different_calls_are_named_after_the_wait(ranks: Any) -> None:
    found = [text for text, _ in ranks(2, later, "each known", spoils=True)]
    assert any("arguments of another layout than those of rank" in text for text in found)
    assert "nothing" not in found
