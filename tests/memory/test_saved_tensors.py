"""What steps keep for backward, and read: told apart by steps and by rows, also where a cut parts them."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from itertools import chain

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import GATConv, SAGEConv

from kagome.components.parallelize import PartOptions
from kagome.graph.partition.partition import Partition, partition
from kagome.memory import saved_tensors
from kagome.memory.saved_tensors import ActivationProfile
from kagome.model.trace.shapes import trace
from kagome.profile.part_size import PartSize

WIDTH, HIDDEN = 6, 10


class Shared(nn.Module):
    """What the ReLU gives is kept by itself and by the layers that read it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = SAGEConv(WIDTH, HIDDEN, aggr="max"), nn.Linear(HIDDEN, 3)
        self.heads = GATConv(HIDDEN, HIDDEN)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        hidden = self.first(x, edge_index).relu()
        return self.last(hidden) + self.heads(hidden, edge_index)[:, :3]


class Odd(nn.Module):
    def __init__(self, refuses: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self.inner, self.refuses = SAGEConv(WIDTH, 3), refuses

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        if self.refuses(x):
            raise ValueError("not such a graph")
        return self.inner(x, edge_index).tanh()


class Around(nn.Module):
    def __init__(self, refuses: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self.odd = Odd(refuses)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.odd(x, edge_index).sigmoid()


def part() -> Partition:
    generator = torch.Generator().manual_seed(2)
    data = Data(
        x=torch.randn(300, WIDTH, generator=generator),
        edge_index=torch.randint(0, 300, (2, 1500), generator=generator),
        y=torch.zeros(300, dtype=torch.long),
    )
    return partition(data, parts=1, method="contiguous")[0]


def found(model: nn.Module, *, amp: bool = False) -> ActivationProfile:
    here = part()
    graph = trace(model, ["edge_index", *here.nodes])
    return saved_tensors.keeping(model, graph, here, PartOptions(amp=amp))


def of(rows: int, edges: int = 0) -> PartSize:
    return PartSize(rows=rows, halo=0, edges=edges, loops=0, cut=0, sent=0, train=0)


def test_what_two_steps_keep_lies_with_both_where_a_cut_parts_them() -> None:
    kept = found(Shared())
    every = set(chain(*kept.pieces))
    relu = next(name for name in every if "relu" in name)
    ((names, shared),) = ((names, rates) for names, rates in kept.pieces.items() if relu in names)
    assert names >= {relu, "last"}
    assert shared[1] == 4 * HIDDEN
    counts, before = of(100, 400), {"first", relu}
    both = kept.share(before, counts) + kept.share(every - before, counts)
    whole = np.array(list(kept.pieces.values())).sum(0) @ counts.units
    assert both == pytest.approx(1 + 4 * HIDDEN * 100 / whole)
    assert kept.share(every, counts) == pytest.approx(1)
    assert kept.share([], counts) == 0
    assert kept.whole(counts) == pytest.approx(whole)


def test_edges_weigh_where_there_are_many() -> None:
    """Attention keeps numbers an edge; a sample of few vertices has few edges among them."""
    kept = found(Shared())
    few, many = (kept.share(["heads"], of(100, edges)) for edges in (0, 10_000))
    assert few < many < 1


def test_reads_are_as_wide_as_the_rows_that_cross() -> None:
    kept = found(Shared())
    assert kept.read(["first"]) == (4 * WIDTH, 0)  # features pass no gradient on
    assert kept.read(["heads"]) == (4 * HIDDEN + 4, 4 * HIDDEN + 4)  # and a number for its one head
    assert kept.read(["last"]) == (0, 0)
    assert kept.read(["first", "heads"]) == (4 * (WIDTH + HIDDEN) + 4, 4 * HIDDEN + 4)


def test_features_that_two_layers_read_cross_for_each_stage_and_once_for_one() -> None:
    """Rows that do not change are kept; a stage that begins later has not kept them."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = (SAGEConv(WIDTH, 3, aggr="max") for _ in range(2))

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.one(x, edge_index) + self.other(x, edge_index)

    kept = found(Twice())
    assert kept.read(["one"]) == kept.read(["other"]) == kept.read(["one", "other"]) == (4 * WIDTH, 0)


def test_rows_that_change_cross_for_each_layer_that_reads_them() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.map = nn.Linear(WIDTH, HIDDEN)
            self.one, self.other = (SAGEConv(HIDDEN, 3, aggr="max") for _ in range(2))

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            hidden = self.map(x)
            return self.one(hidden, edge_index) + self.other(hidden, edge_index)

    kept = found(Both())
    assert kept.read(["one"]) == kept.read(["other"]) == (4 * HIDDEN, 4 * HIDDEN)
    assert kept.read(["one", "other"]) == (8 * HIDDEN, 8 * HIDDEN)


def test_halves_are_half_as_wide() -> None:
    """Of rows that attention reads; what it weighs a head by stays whole."""
    full, half = (found(Shared(), amp=amp).read(["heads"]) for amp in (False, True))
    assert full == (4 * HIDDEN + 4, 4 * HIDDEN + 4)
    assert half == (2 * HIDDEN + 4, 2 * HIDDEN + 4)


def test_a_model_that_made_graphs_do_not_suit_is_run_on_its_own() -> None:
    kept = found(Around(lambda x: x.size(0) not in (48, 24)))
    assert set(kept.pieces) == {frozenset({"odd"}), frozenset({"sigmoid"})}
    assert all(rates[1] == 12 for rates in kept.pieces.values())
    assert kept.share(["odd"], of(48, 100)) == pytest.approx(0.5)
    assert kept.read(["odd"]) is None  # of rows that cross a sample tells nothing


def test_of_a_model_that_runs_on_none_all_may_lie_anywhere() -> None:
    kept = found(Around(lambda x: True))
    assert kept == ActivationProfile({}, None)
    assert kept.whole(of(48)) is None
    assert kept.share(["odd"], of(48)) == 1
    assert kept.read(["odd"]) is None


class Noisy(SAGEConv):
    """One step, which draws from whatever there is."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        noise = random.random() + float(np.random.rand()) + float(torch.rand(1))
        out: Tensor = super().forward(x, edge_index) * noise
        return out


class Moving(nn.Module):
    """It draws, and moves a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.noisy = nn.BatchNorm1d(WIDTH), Noisy(WIDTH, 3)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.noisy(self.norm(x), edge_index)


def test_asking_changes_nothing() -> None:
    model, here = Moving().eval(), part()
    graph = trace(model, ["edge_index", *here.nodes])
    before = copy.deepcopy(model.state_dict())

    def draws() -> tuple[float, float, float]:
        return float(torch.rand(1)), float(np.random.rand()), random.random()

    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    expected = draws()
    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    kept = saved_tensors.keeping(model, graph, here, PartOptions())
    assert draws() == expected
    assert kept.pieces
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert not model.training
    assert not any(module._forward_hooks for module in model.modules())
