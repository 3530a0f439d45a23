"""The check before training: it lets right models through, names what is wrong, and touches nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch_geometric.data import Data
from torch_geometric.utils import to_undirected

from by_hand import in_memory
from convolutions import sample_graph
from kagome import Trainer
from kagome.config import Report, Run, Train
from kagome.errors import CheckError, KagomeError, ModelError
from kagome.graph.partition.partition import split_all
from kagome.profile.subgraph import take_sample
from kagome.scope.exchanges import RankSums
from kagome.verify.check import TOLERANCE, check, way_alone

HIDDEN = 8


class Net(nn.Module):
    """Two convolutions with a layer between, which is what the tests vary."""

    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.first, self.middle, self.last = pyg.SAGEConv(6, HIDDEN), middle, pyg.GCNConv(HIDDEN, 4)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x, edge_index)).relu(), edge_index)


class Apply(nn.Module):
    """A layer that is one function of the rows."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def running_sum(x: Tensor) -> Tensor:
    rows, before = [], torch.zeros_like(x[:1])
    for place in range(x.size(0)):
        before = before + x[place : place + 1]
        rows.append(before)
    return torch.cat(rows)


def data() -> Data:
    graph = sample_graph(1, vertices=60)
    return Data(x=graph.x.float(), edge_index=graph.edge_index, edge_weight=graph.edge_weight.float())


RIGHT: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(HIDDEN, HIDDEN),
    "batch norm": lambda: nn.BatchNorm1d(HIDDEN),
    "dropout": lambda: nn.Dropout(0.5),
    "alpha dropout without share": lambda: nn.AlphaDropout(0.0),
    "dropout by hand": lambda: Apply(lambda x: x * (torch.rand(x.shape, dtype=x.dtype) > 0.5)),
    "noise": lambda: Apply(lambda x: x + torch.randn_like(x)),
    "layer norm": lambda: nn.LayerNorm(HIDDEN),
    "graph norm": lambda: pyg.GraphNorm(HIDDEN),
    "centred": lambda: Apply(lambda x: x - x.mean(0)),
    "spread": lambda: Apply(lambda x: x / (x.std(0) + 1)),
    "attention to all": lambda: Apply(lambda x: x * x.sum(1, keepdim=True).softmax(0)),
    "scores by a vector": lambda: Apply(
        lambda x: x * (x @ torch.ones(HIDDEN, dtype=x.dtype)).softmax(0).view(-1, 1)
    ),
    "gram": lambda: Apply(lambda x: x @ (x.t() @ x) / 100),
    "columns rolled": lambda: Apply(lambda x: x.roll(1, 1)),
    "heads": lambda: Apply(lambda x: x.view(-1, 2, HIDDEN // 2).mean(1).repeat(1, 2)),
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_models_pass(name: str) -> None:
    torch.manual_seed(0)
    result = check(Net(RIGHT[name]()), data())
    assert result.first is None, result.first
    assert result.dtype == "float64"
    assert result.worst < 1e-12
    assert {"first", "middle", "last", "first.lin_l.weight"} <= {row.name for row in result.rows}
    assert {"output", "gradient"} <= {row.kind for row in result.rows}
    result.raise_if_different()
    assert "equal" in result.text()


def through_memory(x: Tensor) -> Tensor:
    """No torch call shows what all rows are added."""
    return x + float(in_memory(x).mean())


def only_whole(x: Tensor) -> Tensor:
    """Fails on a part."""
    if in_memory(x).shape[0] != 60:
        raise RuntimeError("60 rows are wanted")
    return x


WRONG: dict[str, Callable[[Tensor], Tensor]] = {
    "rolled": lambda x: x.roll(1, 0),
    "running sum": running_sum,
    "cumsum": lambda x: x.cumsum(0),
    "upside down": lambda x: x.flip(0),
    "numpy mean": lambda x: x + float(x.detach().numpy().mean()),
    "mean of memory": through_memory,
    "best row": lambda x: x + x.detach()[x.detach()[:, 0].tolist().index(max(x.detach()[:, 0].tolist()))],
}


@pytest.mark.parametrize("name", WRONG)
def test_a_layer_that_mixes_rows_is_named(name: str) -> None:
    """Named as the first that differs, or refused on the spot; never the layers around it."""
    torch.manual_seed(0)
    model = Net(Apply(WRONG[name]))
    try:
        result = check(model, data())
    except ModelError as error:
        named = error.where.partition(";")[0]
    else:
        assert result.first is not None
        assert result.first.kind == "output"
        assert result.first.error > 1e3 * TOLERANCE[torch.float64]
        with pytest.raises(CheckError, match=r"the output of middle, which differs"):
            result.raise_if_different()
        assert "differ first at middle (output)" in result.text()
        named = result.first.name
    assert named == "middle"


class WrongGradient(torch.autograd.Function):
    """Right forward, and a backward that mixes rows where no torch call shows it."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> Tensor:
        return torch.from_numpy(np.roll(in_memory(grads[0].contiguous()), 1, 0)) * 2


def test_a_wrong_gradient_alone_is_found_at_the_layers_before_it() -> None:
    torch.manual_seed(0)
    first = check(Net(Apply(WrongGradient.apply)), data()).first
    assert first is not None
    assert first.kind == "gradient"
    assert first.name.startswith("first.")


def test_a_draw_that_depends_on_the_split_is_found() -> None:
    def drawn(x: Tensor) -> Tensor:
        return x * torch.from_numpy(np.random.rand(*x.shape)).to(x.dtype)

    first = check(Net(Apply(drawn)), data()).first
    assert first is not None
    assert first.name.removesuffix(" with dropout") == "middle"


def test_a_forward_that_ends_in_shares_has_a_gradient_to_compare() -> None:
    torch.manual_seed(0)
    net = Net(nn.Identity())
    net.last = pyg.Sequential("x, e", [(pyg.GCNConv(HIDDEN, 4), "x, e -> x"), nn.Softmax(-1)])
    found = check(net, data())
    assert found.first is None, found.text()


# Number types ----------------------------------------------------------------------------------------


class Single(nn.Module):
    """Insists on float32, whatever comes in and whatever its weights were cast to."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(HIDDEN, HIDDEN) / HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return x.float() @ self.weight


def test_a_layer_that_insists_on_float32_is_checked_in_float32() -> None:
    torch.manual_seed(0)
    result = check(Net(Single()), data())
    assert result.dtype == "float32"
    assert result.first is None, result.first
    wrong = check(Net(nn.Sequential(Single(), Apply(through_memory))), data())
    assert wrong.dtype == "float32"
    assert wrong.first is not None
    assert wrong.first.name == "middle.1"


def test_a_layer_that_passes_through_float32_is_right() -> None:
    torch.manual_seed(0)
    model = Net(Apply(lambda x: x.float().to(x.dtype)))
    result = check(model, data())
    assert result.first is None, result.first


# Errors of the user's --------------------------------------------------------------------------------


def test_a_model_that_fails_on_the_whole_graph_is_told_so_with_the_layer() -> None:
    with pytest.raises(ModelError, match="in plain PyTorch Geometric") as caught:
        check(Net(nn.Linear(HIDDEN + 1, HIDDEN)), data())
    assert caught.value.where == "middle"
    assert isinstance(caught.value.__cause__, RuntimeError)


class Table(Net):
    """It reads its table of all vertices whole."""

    def __init__(self) -> None:
        super().__init__(nn.Identity())
        self.table = nn.Embedding(60, 6)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return super().forward(x + self.table.weight, edge_index)


def test_a_table_of_all_vertices_is_checked_on_a_sample_that_keeps_their_numbers() -> None:
    torch.manual_seed(0)
    result = check(Table(), data(), vertices=30)
    assert result.first is None
    assert result.vertices == 60


def late_ones_wrong(x: Tensor) -> Tensor:
    """Wrong in the last rows alone, which no sample without numbers has."""
    return torch.cat([x[:7000], x[7000:] + float(in_memory(x[7000:]).sum())])


class Kinds(Net):
    """Two kinds of vertices by a number that a sample of 200 does not reach."""

    def __init__(self, reads: Callable[[Tensor], Tensor]) -> None:
        super().__init__(nn.Identity())
        self.u, self.i, self.reads = nn.Linear(6, 6), nn.Linear(6, 6), reads

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = torch.cat([self.u(x[:6000]), self.i(x[6000:])])
        return super().forward(self.reads(x), edge_index)


@pytest.mark.parametrize("part", [False, True])
def test_places_beyond_the_sample_are_checked_among_all_vertices(part: bool) -> None:
    torch.manual_seed(0)
    graph = sample_graph(1, vertices=8000)
    given = split_all(graph, torch.arange(8000) % 3, 3)[1] if part else graph
    result = check(Kinds(lambda x: x), given)
    assert result.first is None
    assert result.vertices == 8000
    assert not result.unseen
    # Wrong in the last rows alone, which no sample without numbers has.
    wrong = check(Kinds(lambda x: torch.cat([x[:7000], x[7000:] + float(in_memory(x[7000:]).sum())])), given)
    assert wrong.first is not None


def test_places_among_too_many_vertices_are_said_not_to_be_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kagome.profile.subgraph.NUMBERED", 100)
    result = check(Kinds(lambda x: x), sample_graph(1, vertices=8000))
    assert result.first is None
    assert "8,000 vertices" in result.text()


class Odd(Net):
    """What Kagome's own way cannot follow, and plain PyG runs."""

    def __init__(self, body: Callable[[nn.Module, Tensor, Tensor], Tensor]) -> None:
        super().__init__(nn.Identity())
        self.inner, self.body = pyg.SAGEConv(6, 6), body

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return super().forward(self.body(self.inner, x, edge_index), edge_index)


ALONE: dict[str, tuple[str, Callable[[nn.Module, Tensor, Tensor], Tensor]]] = {
    "as ever": ("fast", lambda m, x, e: m(x, e)),
    "order of rows": ("fast", lambda m, x, e: x.cumsum(0)),
    "checkpoint": ("pyg", lambda m, x, e: checkpoint(m, x, e, use_reentrant=False)),
    "backward inside": ("fast", lambda m, x, e: x + torch.autograd.grad((x * m.lin_l.weight[0]).sum(), x)[0]),
    "all pairs": ("fast", lambda m, x, e: (x @ x.t()).softmax(-1) @ x),
    "knn": ("fast", lambda m, x, e: m(x, torch.stack([torch.cdist(x, x).argmin(1), torch.arange(len(x))]))),
    "to_undirected": ("fast", lambda m, x, e: m(x, to_undirected(e))),
}


@pytest.mark.parametrize("name", ALONE)
def test_one_rank_runs_what_plain_pyg_runs(name: str) -> None:
    way, body = ALONE[name]
    torch.manual_seed(0)
    graph = data()
    graph.x.requires_grad_(name == "backward inside")
    part = split_all(graph, torch.zeros(60, dtype=torch.long), 1)[0]
    assert way_alone(Odd(body), part, Run())[0] == way


def test_one_rank_that_steps_aside_trains_as_plain_pyg_does() -> None:
    graph, losses = data(), []
    for found in ("checkpoint", "as ever"):
        torch.manual_seed(0)
        model = Odd(ALONE[found][1])
        graph.y = torch.arange(60) % 4
        with Trainer(model, graph, train=Train(epochs=4), report=Report(progress=False)) as trainer:
            trainer.fit()
            losses.append([record.loss for record in trainer.records])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0][0] > losses[0][-1]


@pytest.mark.parametrize("checks", [True, False])
def test_one_rank_trains_forward_derivatives_of_layers(checks: bool) -> None:
    def body(m: nn.Module, x: Tensor, e: Tensor) -> Tensor:
        found = torch.func.jvp(lambda rows: m(rows, e).tanh(), (x,), (torch.ones_like(x),))
        return found[0] + found[1]

    graph = data()
    graph.y, graph.train_mask = torch.arange(60) % 4, torch.ones(60, dtype=torch.bool)
    torch.manual_seed(0)
    model = Odd(body)
    twin = copy.deepcopy(model)
    expected, steps = [], torch.optim.SGD(twin.parameters(), lr=0.1)
    for _ in range(4):
        loss = nn.functional.cross_entropy(twin(graph.x, graph.edge_index), graph.y)
        steps.zero_grad(), loss.backward(), steps.step()
        expected.append(float(loss))
    train, quiet = Train(epochs=4, check=checks), Report(progress=False)
    with Trainer(
        model, graph, train=train, report=quiet, optimizer=lambda given: torch.optim.SGD(given, lr=0.1)
    ) as trainer:
        trainer.fit()
        assert [record.loss for record in trainer.records] == pytest.approx(expected, rel=1e-5)


def test_a_model_that_fails_on_a_part_only_is_told_so_with_the_layer() -> None:
    with pytest.raises(ModelError, match="to run on a part") as caught:
        check(Net(Apply(only_whole)), data())
    assert caught.value.where.startswith("middle")


def test_a_model_that_cannot_be_copied_is_told_so() -> None:
    model = Net(nn.Identity())
    model.generator = (row for row in range(3))
    with pytest.raises(ModelError, match="a copy of the model for the check; got TypeError"):
        check(model, data())


def test_ranks_that_fall_apart_are_told_with_the_layer() -> None:
    zeros = Apply(lambda x: x + torch.zeros_like(x).scatter_add(0, torch.zeros_like(x, dtype=torch.long), x))
    for _ in range(10):  # which rank's error came last once decided, and it could be the empty one
        with pytest.raises(KagomeError, match="middle"):
            check(Net(zeros), data())


class AsksForMore(Net):
    def forward(self, x: Tensor, edge_index: Tensor, colour: Tensor) -> Tensor:
        return super().forward(x, edge_index) + colour


def test_an_input_that_the_data_does_not_have_is_named() -> None:
    with pytest.raises(KagomeError, match="'colour'"):
        check(AsksForMore(nn.Identity()), data())


# Nothing is touched ----------------------------------------------------------------------------------


def state(model: nn.Module) -> dict[str, object]:
    hooks = [name for name in vars(model) if name.endswith("_hooks")]
    return {
        name: (
            {key: id(value) for key, value in vars(module).items() if not key.endswith("_hooks")},
            [len(getattr(module, hook)) for hook in hooks],
            module.training,
        )
        for name, module in model.named_modules()
    }


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("middle", ["right", "wrong", "failing"])
def test_the_user_s_model_is_not_changed(middle: str, training: bool) -> None:
    torch.manual_seed(0)
    function = {
        "right": lambda x: x,
        "wrong": through_memory,
        "failing": only_whole,
    }[middle]
    model = Net(nn.Sequential(nn.BatchNorm1d(HIDDEN), Apply(function), nn.Dropout(0.3)))
    model.last = pyg.GCNConv(HIDDEN, 4, cached=True)
    model.train(training)
    graph = data()
    model(graph.x, graph.edge_index).sum().backward()
    weights, before = copy.deepcopy(model.state_dict()), state(model)
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    features, generator = graph.x.clone(), torch.get_rng_state()
    if middle == "failing":
        with pytest.raises(ModelError):
            check(model, graph)
    else:
        check(model, graph)
    assert state(model) == before
    for name, value in model.state_dict().items():
        assert value.dtype == weights[name].dtype
        assert torch.equal(value, weights[name]), name
    assert all(torch.equal(grads[name], p.grad) for name, p in model.named_parameters() if name in grads)
    assert torch.equal(graph.x, features)
    assert torch.get_default_dtype() == torch.float32
    assert torch.equal(torch.get_rng_state(), generator)


# The sample ------------------------------------------------------------------------------------------


def test_a_part_can_be_checked_on_its_own_edges() -> None:
    torch.manual_seed(0)
    graph = sample_graph(1, vertices=300)
    part = split_all(graph, torch.arange(300) % 2, 2)[1]
    assert check(Net(nn.Identity()), part).first is None
    first = check(Net(Apply(through_memory)), part).first
    assert first is not None
    assert first.name == "middle"


@pytest.mark.parametrize("vertices", [10, 100, 1000])
def test_a_sample_holds_all_edges_among_its_vertices(vertices: int) -> None:
    graph = sample_graph(1, vertices=300)
    graph.x[:, 0] = torch.arange(300)
    sample = take_sample(graph, vertices, 0)
    kept = sample.x[:, 0].long()
    assert sample.num_nodes == min(vertices, 300)
    assert kept.unique().numel() == sample.num_nodes
    inside = torch.isin(graph.edge_index, kept).all(0)
    assert torch.equal(kept[sample.edge_index], graph.edge_index[:, inside])
    assert torch.equal(sample.edge_weight, graph.edge_weight[inside])
    assert sample.edge_index.size(1) > 0


def test_a_sample_of_nearly_all_vertices_draws_none_of_them_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last vertices were waited for: 20,000 draws, 9 seconds, before a pipeline of 20,000 vertices."""
    drawn, randperm = [], torch.randperm
    monkeypatch.setattr(torch, "randperm", lambda *a, **k: drawn.append(a) or randperm(*a, **k))
    lone = Data(x=torch.randn(3000, 2), edge_index=torch.zeros(2, 0, dtype=torch.long))
    assert take_sample(lone, 2999, 0).num_nodes == 2999
    assert len(drawn) < 16 * 2 * 9  # a sixteenth of what is missing at a time: e^9 > 3,000


def test_buffers_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch norm that counted rows of all ranks once a rank would be found by its buffers."""
    monkeypatch.setattr(RankSums, "have_equal", lambda *_: False)

    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = pyg.SAGEConv(6, HIDDEN), nn.BatchNorm1d(HIDDEN)

        def forward(self, x: Tensor, edge_index: Tensor, group: Tensor) -> Tensor:
            x = self.conv(x, edge_index)
            pooled = pyg.global_mean_pool(x, group, size=3)
            return x + self.norm(pooled)[group]

    sample = data()
    sample.group = torch.arange(sample.num_nodes) % 3
    torch.manual_seed(0)
    result = check(Pooled(), sample)
    assert result.first is not None
    assert (result.first.kind, result.first.name) == ("buffer", "norm.running_var")
