"""The forecast: what it says is what is measured, for any number of ranks, and asking changes nothing."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv, SAGEConv

import kagome
from kagome import Parallel, Trainer, config
from kagome.comm.channel import Channel
from kagome.components.parallelize import PartOptions
from kagome.config import Train
from kagome.errors import ModelError
from kagome.graph.partition.partition import split_all
from kagome.graph.partition.partitioners import assign
from kagome.memory.estimate import AGAIN, optimizer_bytes, rates_of
from kagome.model.trace.graph import LayerGraph
from kagome.model.zoo import build_model
from kagome.pipelining import staging
from kagome.profile.part_size import UNITS, counts_of, split_counts
from kagome.profile.synthetic_parts import made_pieces
from kagome.records.memory import MemoryByKind
from kagome.train import admission
from kagome.train.data import from_data
from training import CLASSES, FEATURES, QUIET, Gat, Gcn, graph, host_apart, model, settings

EXACT = ("weights", "gradients", "optimizer", "features", "edges", "tables")
ZOO = ("gcn", "sage", "gat", "deepgcn")


def zoo(name: str, data: Data) -> nn.Module:
    torch.manual_seed(0)
    chosen = config.Model(name=name, layers=3, hidden=16, heads=4, dropout=0.5)
    classes = int(data.y.max()) + 1
    return build_model(
        chosen, in_channels=data.x.size(1), out_channels=classes, num_nodes=int(data.num_nodes or 0)
    )


def held(mine: nn.Module, data: Data, train: Train | None = None, **given: Any) -> list[dict[str, Any]]:
    with Trainer(mine, data, train=train or settings(), report=QUIET, **given) as trainer:
        memory: list[dict[str, Any]] = trainer.fit(3)["memory"]
        return memory


def same(memory: list[dict[str, Any]], tolerance: float = 0.02) -> None:
    for one in memory:
        predicted, measured = one["predicted"], one["measured"]
        assert {k: predicted[k] for k in EXACT} == {k: measured[k] for k in EXACT}
        for kind in ("activations", "halo"):
            assert abs(predicted[kind] - measured[kind]) <= tolerance * measured[kind], kind
        assert measured["activations"] > 0


def of_the_zoo(channel: Channel, name: str) -> list[list[dict[str, Any]]]:
    data = kagome.load(name)
    return [held(zoo(each, data), data) for each in ZOO]


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("world", "name"), [(1, "sbm:vertices=500,degree=8"), (2, "digits"), (3, "sbm:vertices=500,degree=8")]
)
def test_predicted_is_measured(ranks, world: int, name: str) -> None:
    for memory in ranks(world, of_the_zoo, name)[0]:
        assert len(memory) == world
        same(memory)


def in_other_ways(channel: Channel) -> list[list[dict[str, Any]]]:
    torch.manual_seed(0)
    loops = graph()
    own = torch.arange(0, 200, 3).expand(2, -1)
    loops.edge_index = torch.cat([loops.edge_index, own], dim=1)
    loops.edge_weight = torch.rand(loops.edge_index.size(1))
    some = graph()
    some.val_mask[:] = False
    return [
        held(zoo("gat", graph()), graph(), recompute=True),
        held(zoo("deepgcn", graph()), graph(), recompute=True),
        held(zoo("gat", graph()), graph(), settings(amp="bf16")),
        held(zoo("gcn", graph()), graph(), fast=False),
        held(zoo("gcn", loops), loops),
        held(model("gat", 0.3, torch.float64), graph(torch.float64)),
        held(model("gcn"), some),
        held(model("gcn"), graph(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    ]


@pytest.mark.some(1)
@pytest.mark.parametrize("world", [1, 2])
def test_so_it_is_in_other_ways_of_running(ranks, world: int) -> None:
    recomputed, deep, amp, *rest = ranks(world, in_other_ways)[0]
    for memory in (recomputed, deep, amp, *rest):
        same(memory)
    full = ranks(world, of_the_zoo, "sbm:vertices=200,degree=6,features=8,classes=4,communities=4")[0]
    for less, more in ((recomputed, full[2]), (deep, full[3])):
        assert less[0]["measured"]["activations"] < more[0]["measured"]["activations"] / 2


@pytest.mark.some(2)
@pytest.mark.parametrize("name", ["deepgcn", "gat", "sage"])
def test_the_layer_that_runs_again_is_foreseen(name: str) -> None:
    """All layers together save no less than recomputation leaves out, and no more than a plain forward does.

    They may save more than is left out: recomputation keeps each layer's input, which some do not save.
    """
    data = kagome.load("sbm:vertices=500,degree=8")
    part, _ = from_data(data, Channel(None, "cpu"), method="contiguous", seed=0)
    plain, again = (
        rates_of(zoo(name, data), None, part, PartOptions(recompute=each)) for each in (False, True)
    )
    counts = split_counts(data.edge_index, torch.arange(500) // 250, 2)[0]
    saved, kept = (
        sum(rates.at(counts).as_dict()[kind] or 0 for kind in ("activations", "halo"))
        for rates in (plain, again)
    )
    each = [
        sum(rate * unit for rate, unit in zip(rates, counts.units, strict=True))
        for kind, rates in again.by_unit.items()
        if kind.startswith(AGAIN)
    ]
    assert len(each) == 3, "layers"
    assert 0 < saved - kept <= sum(each) <= saved
    assert again.at(counts).other == pytest.approx(max(each), abs=1)
    assert plain.at(counts).other is None


def in_pipelines(channel: Channel, cuts: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    data = kagome.load("sbm:vertices=600,degree=8,features=16,classes=4,communities=8")
    found = []
    for name in ("gcn", "gcn2", "gat"):
        torch.manual_seed(0)
        chosen = config.Model(name=name, layers=8, hidden=16, heads=4, dropout=0.5)
        mine = build_model(chosen, in_channels=16, out_channels=4, num_nodes=600)
        found += [held(mine, data, parallel=config.Parallel(reuse=False, **cut)) for cut in cuts]
    return found


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("world", "cut"),
    [
        (2, {"pipe": 2}),
        (2, {"pipe": 2, "chunks": 1}),
        (2, {"pipe": 2, "chunks": 4, "stages_per_rank": 2, "guard": False}),
        (2, {"pipe": 2, "cross_chunk": "exact"}),
        (2, {"pipe": 2, "cross_chunk": "drop"}),
        (4, {"pipe": 2, "graph": 2, "chunks": 3}),
        (4, {"pipe": 2, "tensor": 2}),
    ],
)
def test_stages_hold_what_was_foretold(ranks, world: int, cut: dict[str, Any]) -> None:
    for memory in ranks(world, in_pipelines, [cut])[0]:
        assert len(memory) == world
        as_foretold(memory)


def as_foretold(memory: list[dict[str, Any]]) -> None:
    """Of tables but for degrees, which count for each layer and are read once a stage."""
    for one in memory:
        predicted, measured = one["predicted"], one["measured"]
        for kind in ("weights", "gradients", "optimizer", "features", "edges"):
            assert predicted[kind] == measured[kind], kind
        assert predicted["activations"] == pytest.approx(measured["activations"], rel=0.04)
        assert predicted["halo"] == pytest.approx(measured["halo"], rel=0.1)


class TwoReads(nn.Module):
    """Two layers read the features, which are kept; one of them takes extremes and gathers no row."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = (SAGEConv(16, 16, aggr="max") for _ in range(2))
        self.inner, self.last = nn.Linear(16, 16), SAGEConv(16, 4)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        hidden = self.inner(self.one(x, edge_index).relu()).relu()
        return self.last(hidden + self.other(x, edge_index).relu(), edge_index)


class Skip(nn.Module):
    """The first rows are read again by the last layer: with dealt stages the same rank may have both."""

    def __init__(self) -> None:
        super().__init__()
        self.convs, self.last = nn.ModuleList(GCNConv(16, 16) for _ in range(5)), GCNConv(16, 4)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        first = hidden = self.convs[0](x, edge_index).relu()
        for conv in list(self.convs)[1:]:
            hidden = conv(hidden, edge_index).relu()
        return self.last(hidden * first, edge_index)


def skipping(channel: Channel) -> list[dict[str, Any]]:
    data = kagome.load("sbm:vertices=600,degree=8,features=16,classes=4,communities=8")
    torch.manual_seed(0)
    cut = config.Parallel(pipe=2, stages_per_rank=2, chunks=4, reuse=False)
    return held(Skip(), data, parallel=cut)


def test_what_stages_of_one_rank_share_counts_once(ranks) -> None:
    as_foretold(ranks(2, skipping)[0])


def at_each_cut(channel: Channel, name: str, cut: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Two stages, cut after each step that they can be cut after."""
    data = kagome.load("sbm:vertices=600,degree=8,features=16,classes=4,communities=8")
    found = []
    for place in range(10):

        def heavy(model: nn.Module, graph: LayerGraph, *rest: Any, at: int = place, **named: Any) -> Any:
            """Two steps that follow each other take all the time: the cut lies between them."""
            names = [step.name for step in graph.steps]
            spent = {each: (1.0, 1.0) if each in names[at : at + 2] else (0.0, 0.0) for each in names}
            return spent, dict.fromkeys(names, (0.0, 0.0))

        torch.manual_seed(0)
        mine: nn.Module = TwoReads()
        if name != "two reads":
            chosen = config.Model(name=name, layers=3, hidden=16, heads=4, dropout=0.5)
            mine = build_model(chosen, in_channels=16, out_channels=4, num_nodes=600)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(staging, "timed", heavy)
            memory = held(mine, data, parallel=config.Parallel(pipe=2, reuse=False, **cut))
        if memory not in found:
            found.append(memory)
    return found


@pytest.mark.parametrize(
    ("name", "cut"),
    [
        ("gcn", {"cross_chunk": "exact"}),
        ("two reads", {}),
        pytest.param("gcn2", {}, marks=pytest.mark.slow),
        pytest.param("gat", {"chunks": 1}, marks=pytest.mark.slow),
        pytest.param("gat", {"cross_chunk": "drop"}, marks=pytest.mark.slow),
    ],
)
def test_stages_hold_what_was_foretold_wherever_they_are_cut(ranks, name: str, cut: dict[str, Any]) -> None:
    """Which cut is best is measured, so that it may be any one.

    Seven chunks of a stage that ended with a layer's sum were said to keep what all have anyhow.
    """
    found = ranks(2, at_each_cut, name, cut)[0]
    assert len(found) >= 4
    for memory in found:
        as_foretold(memory)


def test_counts_of_a_cut_are_those_of_its_parts() -> None:
    data = graph()
    data.edge_index = torch.cat([data.edge_index[:, 5:], torch.tensor([[3, 9], [3, 9]])], dim=1)
    owner = assign("random", data.edge_index, 200, 4, 1)
    parts = split_all(data, owner, 4)
    found = split_counts(data.edge_index, owner, 4, data.train_mask)
    assert found == tuple(counts_of(part) for part in parts)
    assert sum(one.loops for one in found) == 2
    assert found[0].units == (1, *(getattr(found[0], name) for name in UNITS[1:]))


def measured_on(channel: Channel) -> list[dict[str, Any]]:
    return held(model("gat"), graph())


def test_ranks_that_are_not_there_are_foreseen_from_the_whole_graph(ranks) -> None:
    data, mine = graph(), model("gat")
    whole = split_all(data, torch.zeros(200, dtype=torch.int64), 1)[0]
    rates = rates_of(mine, torch.optim.Adam(mine.parameters()), whole, PartOptions())
    owner = assign("metis", data.edge_index, 200, 3, 0)
    foreseen = [rates.at(one) for one in split_counts(data.edge_index, owner, 3, data.train_mask)]
    for guess, one in zip(foreseen, ranks(3, measured_on)[0], strict=True):
        same([{"predicted": guess.as_dict(), "measured": one["measured"]}])


def in_slices(channel: Channel, name: str, more: dict[str, Any]) -> list[list[dict[str, Any]]]:
    data, cut = kagome.load(name), config.Parallel(reuse=False, **more)
    return [held(zoo(each, data), data, parallel=cut) for each in ("gcn", "sage", "gat")]


@pytest.mark.some(1)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_slices_hold_what_is_foreseen(ranks, size: int) -> None:
    """The edges of all ranks, and some columns of all their rows: what the fullest rank has of them."""
    for memory in ranks(size, in_slices, "sbm:vertices=600,degree=8", {"tensor": size})[0]:
        for one in memory:
            predicted, measured = one["predicted"], one["measured"]
            for kind in ("weights", "gradients", "optimizer", "features", "edges"):
                assert predicted[kind] == measured[kind], kind
        for kind in ("tables", "activations"):
            predicted, measured = (
                max(one[side][kind] for one in memory) for side in ("predicted", "measured")
            )
            assert predicted == pytest.approx(measured, rel=0.05), kind


@pytest.mark.slow
def test_slices_of_parts_hold_what_is_foreseen(ranks) -> None:
    """Beside the columns of their part's rows ranks hold those of the rows that it reads of other parts."""
    for memory in ranks(4, in_slices, "sbm:vertices=600,degree=8", {"tensor": 2, "graph": 2})[0]:
        for kind in ("tables", "activations"):
            predicted, measured = (
                max(one[side][kind] for one in memory) for side in ("predicted", "measured")
            )
            assert predicted == pytest.approx(measured, rel=0.05), kind


def test_asking_changes_nothing() -> None:
    mine, data = Gat(0.5).train(), graph()
    before = copy.deepcopy(mine.state_dict())
    part = split_all(data, torch.zeros(200, dtype=torch.int64), 1)[0]
    optimizer = torch.optim.Adam(mine.parameters())
    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    rates_of(mine, optimizer, part, PartOptions())
    drawn = torch.rand(1), np.random.rand(), random.random()
    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    assert drawn == (torch.rand(1), np.random.rand(), random.random())
    assert all(torch.equal(value, before[name]) for name, value in mine.state_dict().items())
    assert all(p.grad is None for p in mine.parameters())
    assert mine.training
    assert not optimizer.state
    assert not any(module._forward_hooks for module in mine.modules())


def test_made_pieces_tell_all_units_apart() -> None:
    part = split_all(graph(), torch.zeros(200, dtype=torch.int64), 1)[0]
    for several, units in ((True, 6), (False, 4)):
        pieces = made_pieces(part, several=several, loops=True, seed=0)
        table = torch.tensor([counts_of(piece).units for piece in pieces]).double()
        table = table[:, table.any(0)]
        table = table / table.max(0).values
        assert table.size(1) == units
        assert torch.linalg.cond(table) < 100
        for piece in pieces:
            assert piece.nodes["x"].shape == (piece.own.numel(), FEATURES)
            assert len(torch.unique(piece.nodes["y"])) > 1


class Picky(nn.Module):
    """Fails on small graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        if x.size(0) < 80:
            raise ValueError("too few rows\nmore words")
        return self.layer(x)


class Tables(nn.Module):
    """A row an edge and a row a vertex: parameters, a buffer, an embedding."""

    def __init__(self, vertices: int, edges: int) -> None:
        super().__init__()
        self.weight, self.place = nn.Parameter(torch.ones(edges)), nn.Parameter(torch.zeros(vertices, 8))
        self.register_buffer("held", torch.linspace(0.5, 1, edges))
        self.own = nn.Embedding(vertices, 8)
        self.first, self.last = nn.Linear(FEATURES, 8), GCNConv(8, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = self.first(x) + self.place + self.own.weight
        return self.last(h.tanh(), edge_index, (self.weight * self.held).sigmoid())


def of_tables(channel: Channel) -> tuple[list[dict[str, Any]], list[str]]:
    data = graph()
    torch.manual_seed(0)
    mine = Tables(data.num_nodes, data.num_edges)
    with Trainer(mine, data, train=settings(), report=QUIET) as trainer:
        memory: list[dict[str, Any]] = trainer.fit(3)["memory"]
        return memory, [note for note in trainer.notes if note.startswith("memory")]


@pytest.mark.parametrize("world", [1, 2])
def test_a_model_with_tables_of_vertices_and_edges_is_foreseen(ranks, world: int) -> None:
    """It was "not known": made graphs have other numbers of vertices and edges."""
    memory, notes = ranks(world, of_tables)[0]
    assert not any("not known" in note for note in notes)
    same(memory)


def test_a_model_that_fails_on_a_made_graph_trains_all_the_same() -> None:
    with Trainer(Picky(), graph(), train=settings(), report=QUIET) as trainer:
        one = trainer.fit(2)["memory"][0]
        note = next(note for note in trainer.notes if note.startswith("memory"))
    assert note.endswith("on one rank; activations are not known: ValueError: too few rows")
    assert one["predicted"]["activations"] is None
    assert {k: one["predicted"][k] for k in EXACT} == {k: one["measured"][k] for k in EXACT}


def warned(monkeypatch: pytest.MonkeyPatch, free: int | None, **given: Any) -> list[str]:
    monkeypatch.setattr(admission, "available_bytes", lambda: free)
    train = settings(check=given.pop("check", False))
    with Trainer(Gcn(), graph(), train=train, report=QUIET, **given) as trainer:
        trainer.fit(1)
        return [note for note in trainer.notes if note.startswith("memory")]


def test_too_little_memory_is_said_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(warned(monkeypatch, 10**9)) == 1
    assert len(warned(monkeypatch, None)) == 1
    note, warning = warned(monkeypatch, 2000)
    assert note.startswith("memory: about ")
    assert "; got 2.00 kB left: try more ranks" in warning
    assert "--model.recompute" in warning
    assert "--model.recompute" not in warned(monkeypatch, 2000, recompute=True)[1]


def test_far_too_little_memory_ends_a_run_before_its_first_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match=r"memory of at least .* more for .*; got 2.00 kB left") as refused:
        warned(monkeypatch, 2000, check=True)
    assert "the fullest is rank 0)" in str(refused.value)
    assert "--train.no-check tries it all the same" in str(refused.value)
    (need,) = (want.need for want in wants(monkeypatch, 2000))
    assert len(warned(monkeypatch, round(need / 1.4), check=True)) == 2
    # What moves out of memory is not wanted there; on a CPU host memory is the device's.
    host = Parallel(activations="host")
    with pytest.raises(ModelError):
        warned(monkeypatch, 10, check=True, parallel=host)
    assert [want.need for want in wants(monkeypatch, 10, parallel=host)] == [need]
    with host_apart():
        (less,) = (want.need for want in wants(monkeypatch, 10, parallel=host))
    assert 0 < less < need


def wants(monkeypatch: pytest.MonkeyPatch, free: int, **given: Any) -> list[Any]:
    found: list[Any] = []
    inner = admission._too_much

    def noted(*given: Any) -> list[Any]:
        found[:] = inner(*given)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(admission, "_too_much", noted)
        warned(patch, free, **given)
    return found


def test_a_place_s_ranks_are_counted_together() -> None:
    counts = split_counts(torch.zeros(2, 0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), 1)[0]
    offers = [admission.RankAccount(counts, place, 100, 2000, True, None, 0) for place in ("a", "b", "a")]
    each = [MemoryByKind(weights=1000, features=1000, activations=size) for size in (60, 90, 60)]
    (want,) = admission._too_much(each, offers)
    said = want.text(recomputes=False)
    assert said.startswith("memory: expected at least 120 B more for 2 ranks on a; got 100 B left")


def test_the_optimizer_is_known_by_its_class() -> None:
    def check(make: Any) -> None:
        mine = Gcn()
        learning = list(mine.parameters())[:-1]  # the last one gets no gradient
        optimizer = make(mine.parameters())
        guess = optimizer_bytes(optimizer, learning)
        assert not any(optimizer.state.get(p) for p in learning) or make is torch.optim.Adagrad
        for p in learning:
            p.grad = torch.ones_like(p)
        optimizer.step()
        found = sum(v.nbytes for p in learning for v in optimizer.state[p].values() if isinstance(v, Tensor))
        assert guess == found
        assert optimizer_bytes(optimizer, learning) == guess

    for make in (
        torch.optim.Adam,
        lambda p: torch.optim.AdamW(p, amsgrad=True),
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
        lambda p: torch.optim.RMSprop(p, centered=True),
        lambda p: torch.optim.Adam([{"params": [q], "lr": 0.1} for q in p]),
        torch.optim.NAdam,
    ):
        check(make)


class Curious(torch.optim.SGD):
    """Looks at numbers."""

    def step(self, closure: Any = None) -> None:
        if float(self.param_groups[0]["params"][0].grad.norm()) > 0:
            super().step()


def test_an_optimizer_that_looks_at_numbers_is_not_known() -> None:
    mine = Gcn()
    assert optimizer_bytes(Curious(mine.parameters(), lr=0.1), list(mine.parameters())) is None


def test_check_says_what_the_fullest_of_so_many_ranks_would_hold() -> None:
    part = split_all(graph(), torch.zeros(200, dtype=torch.int64), 1)[0]
    run = config.Run()
    alone = admission.foresee_split(Gcn(), part, run, 1)
    several = admission.foresee_split(Gcn(), part, run, 3)
    assert alone.startswith("memory: about ")
    assert alone.endswith("halo 0 B) on one rank")
    assert several.endswith("on the fullest of 3 ranks")
