"""The zoo: every name builds, trains, traces; every fault says what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, fx, nn
from torch_geometric.nn import MessagePassing

from kagome.config import Model
from kagome.errors import ModelError
from kagome.model.zoo import build_model

N, E, F_IN, F_OUT = 20, 80, 5, 3
NAMES = (
    *("gcn", "sage", "gin", "gat", "gatv2", "pna", "edgecnn"),
    *("gcn2", "appnp", "sgc", "deepgcn", "resgcn+", "transformer"),
)
WEIGHTED = ("gcn", "gcn2", "appnp", "sgc")


@pytest.fixture
def edge_index() -> Tensor:
    return torch.randint(N, (2, E), generator=torch.Generator().manual_seed(0))


def build(edge_index: Tensor, name: str, **settings: float) -> nn.Module:
    torch.manual_seed(1)
    histogram = torch.bincount(torch.bincount(edge_index[1], minlength=N))
    chosen: dict[str, float] = {"layers": 2, "hidden": 16, "heads": 4, "dropout": 0.5, **settings}
    return build_model(
        Model(name=name, **chosen),  # type: ignore[arg-type]
        in_channels=F_IN,
        out_channels=F_OUT,
        num_nodes=N,
        degree_histogram=histogram,
    )


@pytest.mark.some(20)
@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_every_name_trains(name: str, layers: int, edge_index: Tensor) -> None:
    model = build(edge_index, name, layers=layers)
    out = model(torch.randn(N, F_IN), edge_index)
    assert out.shape == (N, F_OUT)
    out.square().sum().backward()
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert parameter.grad.isfinite().all(), parameter_name


@pytest.mark.parametrize("name", NAMES)
def test_dropout_is_drawn_in_training_only(name: str, edge_index: Tensor) -> None:
    model, x = build(edge_index, name, layers=3), torch.randn(N, F_IN)
    assert not torch.equal(model(x, edge_index), model(x, edge_index))
    model.eval()
    assert torch.equal(model(x, edge_index), model(x, edge_index))


@pytest.mark.parametrize("name", WEIGHTED)
def test_edge_weights_pass_through(name: str, edge_index: Tensor) -> None:
    model, x = build(edge_index, name).eval(), torch.randn(N, F_IN)
    ones = torch.ones(E)
    assert torch.allclose(model(x, edge_index, edge_weight=ones), model(x, edge_index), atol=1e-6)
    assert not torch.allclose(model(x, edge_index, edge_weight=torch.rand(E)), model(x, edge_index))


class _Leaves(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, MessagePassing) or super().is_leaf_module(m, module_qualified_name)


@pytest.mark.parametrize("name", NAMES)
def test_every_name_traces_and_the_trace_computes_the_same(name: str, edge_index: Tensor) -> None:
    model = build(edge_index, name, layers=3)
    graph = _Leaves().trace(model, {"edge_weight": None} if name in WEIGHTED else None)
    traced = fx.GraphModule(model, graph)
    calls = [node.target for node in graph.nodes if node.op == "call_module"]
    assert sum(isinstance(model.get_submodule(str(call)), MessagePassing) for call in calls) >= 1
    x = torch.randn(N, F_IN)
    for mode in (True, False):  # the trace must follow train() and eval(), not freeze one of them
        model.train(mode)
        traced.train(mode)
        torch.manual_seed(2)
        whole = model(x, edge_index)
        torch.manual_seed(2)
        assert torch.equal(traced(x, edge_index), whole)


def test_layers_are_counted_as_named(edge_index: Tensor) -> None:
    for name in NAMES:
        convs = [m for m in build(edge_index, name, layers=3).modules() if isinstance(m, MessagePassing)]
        assert len(convs) == (1 if name in ("sgc", "appnp") else 3), name


@pytest.mark.parametrize("name", ["gat", "gatv2", "transformer"])
def test_heads_must_divide_the_width(name: str, edge_index: Tensor) -> None:
    with pytest.raises(ModelError, match=r"got 6 heads, which leave a rest of 4 in a width of 16") as caught:
        build(edge_index, name, heads=6)
    assert caught.value.hint == "--model.heads 4, or --model.hidden 18"


def test_an_unknown_name_gets_the_names_and_the_nearest(edge_index: Tensor) -> None:
    with pytest.raises(ModelError, match=r"gcn, sage, gin.* got 'transfomer'") as caught:
        build(edge_index, "transfomer")
    assert caught.value.hint == "--model.name transformer"
    with pytest.raises(ModelError, match="python:package"):
        build(edge_index, "zzzzzz")


@pytest.mark.parametrize(("setting", "value"), [("layers", 0), ("hidden", 0), ("heads", 0), ("dropout", 1.0)])
def test_settings_out_of_range(setting: str, value: float, edge_index: Tensor) -> None:
    with pytest.raises(ModelError, match=f"model.{setting}"):
        build(edge_index, "gcn", **{setting: value})


def test_pna_needs_degrees() -> None:
    with pytest.raises(ModelError, match="histogram"):
        build_model(Model(name="pna"), in_channels=2, out_channels=2, num_nodes=3)


OWN = """
from torch import nn
from torch_geometric.nn import GCNConv

class Net(nn.Module):
    def __init__(self, fan_in, fan_out, **said):
        super().__init__()
        self.conv, self.said = GCNConv(fan_in, fan_out), said

    def forward(self, x, edge_index):
        return self.conv(x, edge_index)

def some(in_channels, out_channels, hidden, extra=3):
    return Net(in_channels, out_channels, hidden=hidden, extra=extra)

def everything(**settings):
    return Net(settings.pop("in_channels"), settings.pop("out_channels"), **settings)

def nothing():
    return Net(5, 3)

def greedy(in_channels, depth):
    return Net(in_channels, depth)

def positional(in_channels, /):
    return Net(in_channels, 3)

def wrong(in_channels):
    return "a model"

value = 7
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "zoo_own_model.py").write_text(OWN)
    (tmp_path / "zoo_own_broken.py").write_text("import a_package_that_is_not_there")
    monkeypatch.syspath_prepend(str(tmp_path))
    return "python:zoo_own_model"


@pytest.mark.parametrize("function", ["some", "everything", "nothing"])
def test_own_models_get_what_they_name(own: str, function: str, edge_index: Tensor) -> None:
    model = build(edge_index, f"{own}:{function}", hidden=12)
    assert model(torch.randn(N, F_IN), edge_index).shape == (N, F_OUT)
    said = {
        "some": {"hidden": 12, "extra": 3},
        "everything": {"layers": 2, "hidden": 12, "heads": 4, "dropout": 0.5, "num_nodes": N},
        "nothing": {},
    }
    assert model.said == said[function]


@pytest.mark.parametrize(
    ("ending", "message"),
    [
        (":greedy", "got one that also asks for depth"),
        (":positional", "got one that also asks for in_channels"),
        (":wrong", "to return a torch.nn.Module; got a value of type str"),
        (":value", "got one of type int"),
        (":sume", "a function sume in .*; got none"),
        ("", "a model of your own to be named"),
    ],
)
def test_faults_of_own_models(own: str, ending: str, message: str, edge_index: Tensor) -> None:
    with pytest.raises(ModelError, match=message):
        build(edge_index, own + ending)


@pytest.mark.parametrize("module", ["zoo_own_missing", "zoo_own_broken"])
def test_own_modules_that_cannot_be_imported(own: str, module: str, edge_index: Tensor) -> None:
    with pytest.raises(ModelError, match="got one that cannot be imported: No module named") as caught:
        build(edge_index, f"python:{module}:build")
    assert isinstance(caught.value.__cause__, ImportError)
