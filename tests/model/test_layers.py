"""Layers: a traced model gives what the model gives, bit by bit; what cannot be traced is told by line."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.utils import add_self_loops, degree, dropout_edge, scatter, softmax

from kagome.config import Model
from kagome.errors import ModelError
from kagome.model.forward_call import ForwardCall
from kagome.model.trace.builder import chain
from kagome.model.trace.graph import LayerGraph
from kagome.model.trace.shapes import survey, trace
from kagome.model.zoo import build_model
from odd_models import ODD_MODELS

N, E, F_IN, F_OUT, HIDDEN = 24, 90, 5, 3, 8
ZOO = (
    *("gcn", "sage", "gin", "gat", "gatv2", "pna", "edgecnn"),
    *("gcn2", "appnp", "sgc", "deepgcn", "resgcn+", "transformer"),
)


def sample(*, weights: bool = False) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = {
        "x": torch.randn(N, F_IN, generator=generator),
        "edge_index": torch.randint(N, (2, E), generator=generator),
    }
    if weights:
        inputs["edge_weight"] = torch.rand(E, generator=generator)
    return inputs


def histogram() -> Tensor:
    return torch.bincount(torch.bincount(sample()["edge_index"][1], minlength=N))


def look(value: Any) -> str:
    if value.dim() and value.size(0) in (N, E):
        return "rows" if value.size(0) == N else "edges"
    return "fixed"


def surveyed(graph: LayerGraph, model: nn.Module, inputs: dict[str, Tensor]) -> Any:
    return survey(graph, model, inputs, look=look, draws=lambda: 0)


def equal_in_both_modes(model: nn.Module, inputs: dict[str, Tensor]) -> LayerGraph:
    """Trace a model and compare outputs, buffers and the state of the generator."""
    before = {name: (m.training, dict(vars(m))) for name, m in model.named_modules()}
    state = torch.get_rng_state()
    graph = trace(model, list(inputs))
    assert torch.equal(torch.get_rng_state(), state)
    assert {name: (m.training, dict(vars(m))) for name, m in model.named_modules()} == before
    for training in (True, False):
        whole, steps = (copy.deepcopy(model).train(training) for _ in range(2))
        torch.manual_seed(3)
        wanted = ForwardCall.of(whole, list(inputs)).call(whole, inputs)
        torch.manual_seed(3)
        got = graph.run(steps, inputs, training=training, keep=[graph.output])
        assert torch.equal(got[graph.output], wanted)
        for (name, one), two in zip(whole.named_buffers(), steps.buffers(), strict=True):
            assert torch.equal(one, two), name
    return graph


def line_of(function: Callable[..., Any], text: str) -> str:
    lines, start = inspect.getsourcelines(function)
    return f"test_layers.py:{start + next(i for i, line in enumerate(lines) if text in line)}"


class ByHand(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = pyg.GCNConv(F_IN, HIDDEN), pyg.GCNConv(HIDDEN, F_OUT)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = F.dropout(x, 0.5, training=self.training)
        x = self.first(x, edge_index).relu()
        x = F.dropout(x, p=0.5, training=self.training)
        return self.second(x, edge_index)


def test_functional_dropout_follows_the_mode():
    graph = equal_in_both_modes(ByHand(), sample())
    assert [step.kind for step in graph.steps] == ["function", "module", "method", "function", "module"]
    assert graph.inputs == ("x", "edge_index")
    conv = graph.steps[1]
    assert (conv.path, conv.parameters) == ("first", ("first.bias", "first.lin.weight"))
    assert (conv.reads, conv.layer, conv.within) == ((graph.steps[0].name, "edge_index"), True, "")
    assert conv.line.endswith(line_of(ByHand.forward, "self.first(x"))


@pytest.mark.some(12)
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("name", ZOO)
def test_every_zoo_model(name: str, layers: int):
    torch.manual_seed(1)
    model = build_model(
        Model(name=name, layers=layers, hidden=HIDDEN, heads=2, dropout=0.5),
        in_channels=F_IN,
        out_channels=F_OUT,
        num_nodes=N,
        degree_histogram=histogram(),
    )
    for inputs in (sample(), sample(weights=True)):
        graph = equal_in_both_modes(model, inputs)
        assert sum(step.layer for step in graph.steps) >= (2 if name == "sgc" else layers)
        used = {name for step in graph.steps for name in step.parameters}
        assert used == set(graph.parameters) == {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize("name", ODD_MODELS)
def test_models_as_users_write_them(name: str):
    torch.manual_seed(1)
    equal_in_both_modes(ODD_MODELS[name](F_IN, F_OUT), sample())


@pytest.mark.some(12)
@pytest.mark.parametrize("jk", [None, "last", "cat", "max", "lstm"])
@pytest.mark.parametrize("build", [pyg.GCN, pyg.GraphSAGE, pyg.GAT, pyg.GIN, pyg.PNA])
def test_the_models_of_pyg(build: Any, jk: str | None):
    more = {"aggregators": ["mean", "max"], "scalers": ["identity", "amplification"], "deg": histogram()}
    model = build(
        *(F_IN, HIDDEN, 3, F_OUT),
        dropout=0.5,
        norm="batch_norm" if jk != "max" else "graph_norm",
        jk=jk,
        **(more if build is pyg.PNA else {}),
    )
    graph = equal_in_both_modes(model, sample())
    assert sum(step.path.startswith("convs.") for step in graph.steps) == 3


class ManyCalls(nn.Module):
    """What else a forward calls: PyG's functions, sizes, new tensors, buffers, draws, no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(F_IN, HIDDEN))
        self.scale = nn.Parameter(torch.randn(HIDDEN))
        self.mean = nn.Buffer(torch.randn(HIDDEN))
        self.aggr = pyg.SoftmaxAggregation(learn=True)
        self.last = nn.Linear(HIDDEN, F_OUT)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        edge_index, _ = dropout_edge(edge_index, p=0.3, training=self.training)
        edge_index, _ = add_self_loops(edge_index, num_nodes=len(x))
        row, col = edge_index
        if self.weight.size(0) == F_IN:
            h = x @ self.weight + torch.zeros(x.size(0), HIDDEN, device=x.device)
        score = softmax((h[row] * h[col]).sum(-1), col, num_nodes=x.size(0))
        deg = degree(col, x.shape[0], dtype=x.dtype).clamp(min=1)
        h = scatter(h[row] * score.view(-1, 1), col, dim=0, dim_size=x.size(0)) / deg.view(-1, 1)
        h = h - self.mean * 2 + torch.randn(HIDDEN) * self.scale
        h = h * torch.bernoulli(torch.full((HIDDEN,), 0.5))
        h = h + self.aggr(h[row], col, dim_size=h.size(0))
        with torch.no_grad():
            shift = h.mean(0)
        return self.last(h - shift)


def test_what_else_a_forward_calls():
    model = ManyCalls()
    graph = equal_in_both_modes(model, sample())
    values = surveyed(graph, model, sample()).values
    assert not next(value.grad for name, value in values.items() if name.startswith("mean_"))
    names = {getattr(step.target, "__name__", step.target) for step in graph.steps}
    assert {
        "dropout_edge",
        "add_self_loops",
        "softmax",
        "degree",
        "scatter",
        "len",
        "zeros",
        "randn",
        "bernoulli",
    } <= names
    matmul = next(step for step in graph.steps if "weight" in step.parameters and step.kind == "function")
    assert not matmul.layer
    assert matmul.parameters == ("weight",)
    draws = [graph.run(model, sample(), training=False, keep=[graph.output])[graph.output] for _ in range(2)]
    assert not torch.equal(*draws)
    # Buffers are read as they are when a step runs.
    with torch.no_grad():
        model.mean.zero_()
    torch.manual_seed(3)
    wanted = model.eval()(**sample())
    torch.manual_seed(3)
    assert torch.equal(graph.run(model, sample(), training=False, keep=[graph.output])[graph.output], wanted)


class TakesData(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = pyg.GCNConv(F_IN, HIDDEN), pyg.GCNConv(HIDDEN, F_OUT)

    def forward(self, data: Data) -> Tensor:
        x, edge_index = data.x, data["edge_index"]
        assert data.edge_attr is None
        weight = data.edge_weight if "edge_weight" in data else None
        x = self.first(x, edge_index, weight).relu()
        return self.second(x, edge_index) + torch.ones(data.num_nodes, 1)


def test_one_data_object():
    assert equal_in_both_modes(TakesData(), sample()).inputs == ("x", "edge_index")
    assert equal_in_both_modes(TakesData(), sample(weights=True)).inputs == ("x", "edge_index", "edge_weight")


class OtherNames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = pyg.GCNConv(F_IN, F_OUT)

    def forward(self, feats: Tensor, adj: Tensor, *, edge_weight: Tensor | None = None, k: int = 2) -> Tensor:
        for _ in range(k):
            feats = self.conv(feats, adj, edge_weight)[:, :1].expand(-1, F_IN) * 0.5 + feats
        return feats


def test_inputs_by_other_names_and_defaults():
    assert equal_in_both_modes(OtherNames(), sample()).inputs == ("x", "edge_index")
    assert equal_in_both_modes(OtherNames(), sample(weights=True)).inputs == (
        "x",
        "edge_index",
        "edge_weight",
    )


class NeedsMore(nn.Module):
    def forward(self, x: Tensor, edge_index: Tensor, pos: Tensor) -> Tensor:
        return x


def test_an_input_that_there_is_not():
    with pytest.raises(ModelError, match="data with 'pos' for forward"):
        trace(NeedsMore(), ["x", "edge_index"])


class Branches(ByHand):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.first(x, edge_index)
        if x.size(0) > 3:
            x = x.relu()
        return self.second(x, edge_index)


class Noise(ByHand):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.first(x, edge_index)
        if self.training:
            x = x + torch.randn_like(x)
        return self.second(x, edge_index)


class Mixed(ByHand):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.first(x, edge_index)
        return self.second(x * torch.empty(1).uniform_(), edge_index)


class Scaled(ByHand):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = F.dropout(self.first(x, edge_index), 0.5 if self.training else 0.0)
        return self.second(x, edge_index)


class Remembers(ByHand):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        self.hidden = self.first(x, edge_index)
        return self.second(self.hidden, edge_index)


class Casts(ByHand):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            x = self.first(x, edge_index)
        return self.second(x.float(), edge_index)


class Loops(ByHand):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.first(x, edge_index)
        x = torch.stack([row.relu() for row in x])
        return self.second(x, edge_index)


@pytest.mark.parametrize(
    ("build", "text", "says"),
    [
        (Branches, "if x.size(0) > 3", "cannot be used as inputs to control flow"),
        (Noise, "torch.randn_like", "does the same in training and in evaluation"),
        (Mixed, ".uniform_()", "draws numbers by uniform_"),
        (Scaled, "F.dropout(", "does the same in training and in evaluation"),
        (Remembers, "self.hidden = ", "sets 'hidden'"),
        (Casts, "self.first(x", "autocast"),
        (Loops, "for row in x", "cannot be iterated"),
    ],
)
def test_what_cannot_be_traced_is_told_with_its_line(build: type[nn.Module], text: str, says: str):
    model = build().eval()
    with pytest.raises(ModelError, match=says) as caught:
        trace(model, ["x", "edge_index"])
    assert caught.value.where.endswith(line_of(build.forward, text))
    assert "--parallel.layers" in caught.value.hint
    assert not any(module.training for module in model.modules())
    # torch and PyG are as they were.
    model.note = torch.zeros(1)
    assert model(**sample()).shape == (N, F_OUT)
    assert torch.zeros.__module__ is None or "tracing" not in torch.zeros.__module__
    assert type(len) is type(abs)


def by_length(rows: Tensor) -> Tensor:
    return rows / len(rows)


class Writes(ByHand):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.first(x, edge_index).clone()
        x[: len(x) // 2, 0] = by_length(x[: len(x) // 2, 1])
        x[-1] = x[0]
        return self.second(x, edge_index)


def test_what_is_written_by_place_and_lengths_are_steps():
    model, given = Writes().eval(), sample()
    graph = trace(model, ["x", "edge_index"])
    found = graph.run(model, given, training=False, keep=[graph.output])[graph.output]
    assert torch.equal(found, model(**given))
    written = [step for step in graph.steps if step.name.startswith("setitem")]
    assert [step.changes for step in written] == [("clone",), ("clone",)]


@pytest.mark.parametrize(
    "returned", [lambda x: (x, x.relu()), lambda x: {"x": x}, lambda x: [x]], ids=["tuple", "dict", "list"]
)
def test_several_outputs_are_refused(returned: Callable[[Tensor], Any]):
    class Several(ByHand):
        def forward(self, x: Tensor, edge_index: Tensor) -> Any:
            return returned(self.first(x, edge_index))

    with pytest.raises(ModelError, match="one tensor with a row a vertex"):
        trace(Several(), ["x", "edge_index"])


class Inside(nn.Module):
    """A model with one of the others inside."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first, self.inner = pyg.GCNConv(F_IN, F_IN), inner
        self.last = nn.Linear(F_OUT, F_OUT)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.last(self.inner(self.first(x, edge_index).relu(), edge_index))


@pytest.mark.parametrize("build", [Branches, Noise, Scaled, Remembers, Casts, Loops])
def test_a_submodule_that_cannot_be_traced_is_one_step(build: type[nn.Module]):
    model = Inside(build())
    graph = trace(model, ["x", "edge_index"])
    paths = [step.path for step in graph.steps if step.layer]
    assert paths == ["first", "inner", "last"]
    assert len(graph.steps[2].parameters) == 4
    for training in (True, False):
        model.train(training)
        torch.manual_seed(3)
        wanted = model(**sample())
        torch.manual_seed(3)
        got = graph.run(model, sample(), training=training, keep=[graph.output])
        assert torch.equal(got[graph.output], wanted)


def test_a_submodule_that_can_is_looked_into():
    graph = equal_in_both_modes(Inside(ByHand()), sample())
    assert [step.path for step in graph.steps if step.layer] == [
        "first",
        "inner.first",
        "inner.second",
        "last",
    ]
    assert {step.within for step in graph.steps} == {"", "inner"}


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return 7 * grads[0]


class Custom(ByHand):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(Double.apply(self.first(x, edge_index)), edge_index)


def test_a_gradient_of_the_users_own_stays():
    model = Custom()
    graph = equal_in_both_modes(model, sample())
    out = graph.run(model, sample(), training=True, keep=[graph.output])[graph.output]
    got = torch.autograd.grad(out.sum(), list(model.parameters()))
    wanted = torch.autograd.grad(model(**sample()).sum(), list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.conv, self.back = (
            nn.Linear(F_IN, F_IN),
            pyg.GCNConv(F_IN, F_IN),
            nn.Linear(F_IN, F_IN),
        )
        self.back.weight = self.embed.weight

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.back(self.conv(self.embed(x), edge_index))


def test_tied_weights_go_by_one_name():
    graph = equal_in_both_modes(Tied(), sample())
    assert [step.parameters for step in graph.steps] == [
        ("embed.weight", "embed.bias"),
        ("conv.bias", "conv.lin.weight"),
        ("embed.weight", "back.bias"),
    ]


def test_values_are_freed_after_their_last_use():
    model, inputs = ByHand(), sample()
    graph = trace(model, list(inputs))
    seen: list[str] = []
    kept = graph.run(
        model,
        inputs,
        training=True,
        before=lambda step: seen.append(step.name),
        after=lambda step, value: seen.append(f"{step.name} {tuple(value.shape)}"),
        keep=["x", graph.steps[1].name],
    )
    assert list(kept) == ["x", graph.steps[1].name]
    assert kept["x"] is inputs["x"]
    assert seen[2:4] == ["first", f"first {(N, HIDDEN)}"]
    part = graph.run(
        model, {**inputs, graph.steps[1].name: kept["first"]}, training=True, steps=graph.steps[2:4], keep=[]
    )
    assert part == {}


def test_a_survey_says_what_each_step_gives_and_leaves_the_model_alone():
    model = pyg.GCN(F_IN, HIDDEN, 2, F_OUT, norm="batch_norm").eval()
    graph = trace(model, list(sample()))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    count = iter(range(100))
    found = survey(graph, model, sample(), look=look, draws=lambda: next(count))
    assert not model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert list(found.draws.values()) == list(range(len(graph.steps)))
    assert list(found.eval_draws.values()) == list(range(1, len(graph.steps) + 1))
    value = found.values["convs_0"]
    assert (value.kind, value.shape, value.dtype, value.grad) == ("rows", (HIDDEN,), torch.float32, True)
    assert value.bytes(10, 20) == 10 * HIDDEN * 4
    many = ManyCalls()
    graph = trace(many, list(sample()))
    kinds = {name: value.kind for name, value in surveyed(graph, many, sample()).values.items()}
    assert {kinds["dropout_edge"], kinds["size"]} == {"none"}
    assert kinds["weight"] == kinds["mean"] == "fixed"


def test_a_chain_of_named_layers():
    class Model(Branches):
        def __init__(self) -> None:
            super().__init__()
            self.relu, self.norm = nn.ReLU(), nn.BatchNorm1d(HIDDEN)
            self.block = pyg.DeepGCNLayer(pyg.GCNConv(HIDDEN, HIDDEN), nn.LayerNorm(HIDDEN), nn.ReLU())

    model, inputs = Model(), sample(weights=True)
    graph = chain(model, ["first", "norm", "relu", "block", "relu", "second"], list(inputs))
    assert [step.name for step in graph.steps] == ["first", "norm", "relu", "block", "relu_1", "second"]
    assert graph.inputs == ("x", "edge_index", "edge_weight")
    got = graph.run(model, inputs, training=True, keep=[graph.output])[graph.output]
    e, w = inputs["edge_index"], inputs["edge_weight"]
    h = model.block(model.norm(model.first(inputs["x"], e, w)).relu(), e).relu()
    assert torch.equal(got, model.second(h, e, w))
    with pytest.raises(ModelError, match="got 'secnd' for a model with the modules") as caught:
        chain(model, ["first", "secnd"], list(inputs))
    assert "second" in caught.value.hint
    with pytest.raises(ModelError, match="data with 'x_0' for the layer inner"):
        chain(Inside(pyg.GCN2Conv(F_IN, 0.1)), ["first", "inner"], list(inputs))
