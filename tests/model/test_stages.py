"""Stages: run one by one they give the whole model's outputs and gradients; cuts are as good as any."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn

from convolutions import double_precision
from kagome.config import Model
from kagome.errors import ModelError
from kagome.model.split.stages import Stage, cut, describe, links, shared_parameters, stage_bytes
from kagome.model.trace.graph import LayerGraph, Step
from kagome.model.trace.shapes import Survey, Value, survey, trace
from kagome.model.zoo import build_model
from odd_models import ODD_MODELS

N, E, F_IN, F_OUT, HIDDEN = 24, 90, 5, 3, 8
DEEP = ("gcn", "gat", "pna", "gcn2", "deepgcn", "resgcn+", "transformer")


def sample() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "x": torch.randn(N, F_IN, generator=generator, dtype=torch.float64),
        "edge_index": torch.randint(N, (2, E), generator=generator),
    }


def look(value: Any) -> str:
    if value.dim() and value.size(0) in (N, E):
        return "rows" if value.size(0) == N else "edges"
    return "fixed" if N not in value.shape else "none"


def surveyed(model: nn.Module) -> tuple[LayerGraph, Survey]:
    inputs = sample()
    graph = trace(model, list(inputs))
    return graph, survey(graph, model, inputs, look=look, draws=lambda: 0)


def built(build: Callable[[], nn.Module]) -> nn.Module:
    with double_precision():
        torch.manual_seed(1)
        return build()


def pipelined(
    graph: LayerGraph, stages: Sequence[Stage], model: nn.Module, weight: Tensor
) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Output and gradients of the stages, each given nothing but what it says that it takes."""
    model.zero_grad(set_to_none=True)
    inputs = sample()
    sent: dict[tuple[int, int], dict[str, Tensor]] = {}
    taken: list[dict[str, Tensor]] = []
    made: list[dict[str, Any]] = []
    for stage in stages:
        leaves = {
            name: sent[giver, stage.number][name]
            .detach()
            .requires_grad_(sent[giver, stage.number][name].requires_grad)
            for giver, names in stage.takes.items()
            for name in names
        }
        values = {**{name: inputs[name] for name in stage.inputs}, **leaves}
        given_on = [name for names in stage.gives.values() for name in names]
        assert len(given_on) == len(set(given_on))
        keep = [*given_on, *([stage.output] if stage.output else [])]
        held = graph.run(model, values, training=True, steps=stage.steps, keep=keep)
        for taker, names in stage.gives.items():
            sent[stage.number, taker] = {name: held[name] for name in names}
        taken.append(leaves)
        made.append(held)
    assert {pair: tuple(values) for pair, values in sent.items()} == {
        (giver, stage.number): names for stage in stages for giver, names in stage.takes.items()
    }
    back: dict[tuple[int, int], dict[str, Tensor]] = {}
    for stage in reversed(stages):
        ends: list[tuple[Tensor, Tensor]] = []
        if stage.output:
            ends.append((made[stage.number][stage.output], weight))
        for taker, names in stage.gives.items():
            ends += [(made[stage.number][name], back[stage.number, taker][name]) for name in names]
        ends = [(value, grad) for value, grad in ends if value.requires_grad]
        torch.autograd.backward([value for value, _ in ends], [grad for _, grad in ends])
        for giver, names in stage.takes.items():
            leaves = taken[stage.number]
            back[giver, stage.number] = {
                name: torch.zeros_like(leaves[name]) if (grad := leaves[name].grad) is None else grad
                for name in names
            }
    return made[-1][graph.output], {name: p.grad for name, p in model.named_parameters()}


def equals_the_whole(model: nn.Module, most: int) -> list[tuple[Stage, ...]]:
    """Cut a model without dropout into 1 to ``most`` stages and compare with plain training."""
    model.train()
    graph, found = surveyed(model)
    weight = torch.randn(N, F_OUT, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    model.zero_grad(set_to_none=True)
    wanted = model(**sample())
    wanted.backward(weight)
    grads = {name: p.grad for name, p in model.named_parameters()}
    cuts = []
    for count in range(1, most + 1):
        stages = cut(graph, found, count, dict.fromkeys((s.name for s in graph.steps if s.layer), 1.0))
        out, got = pipelined(graph, stages, model, weight)
        assert torch.equal(out, wanted)
        for name, grad in grads.items():
            mine = got[name]
            assert (mine is None) == (grad is None) or not mine.any(), name  # type: ignore[union-attr]
            if grad is not None:
                torch.testing.assert_close(mine, grad, rtol=1e-12, atol=1e-12, msg=name)
        held = [name for stage in stages for name in stage.parameters]
        assert set(held) == set(graph.parameters)
        assert len(held) - len(set(held)) == sum(len(n) - 1 for n in shared_parameters(stages).values())
        body = [step.name for stage in stages for step in stage.steps if step.layer]
        assert body == [step.name for step in graph.steps if step.layer]
        assert describe(stages, found).count("\n") == count - 1
        cuts.append(stages)
    return cuts


@pytest.mark.parametrize("name", DEEP)
def test_the_zoo(name: str):
    histogram = torch.bincount(torch.bincount(sample()["edge_index"][1], minlength=N))
    settings_ = Model(name=name, layers=5, hidden=HIDDEN, heads=2, dropout=0.0)
    model = built(
        lambda: build_model(
            settings_, in_channels=F_IN, out_channels=F_OUT, num_nodes=N, degree_histogram=histogram
        )
    )
    for stages in equals_the_whole(model, 5):
        assert not shared_parameters(stages)


ODD_CUTS = {"unused_branch": 3, "shared_conv": 4, "both_ways": 5, "all_norms": 5, "residual_jump_lstm": 5}


@pytest.mark.parametrize("name", sorted(set(ODD_MODELS) - {"edge_updates_dropout"}))
def test_models_as_users_write_them(name: str):
    most = ODD_CUTS.get(name, 2 if name not in ("ranked_rows",) else 1)
    equals_the_whole(built(lambda: ODD_MODELS[name](F_IN, F_OUT)), most)


@pytest.mark.parametrize("jk", [None, "last", "cat", "max", "lstm"])
@pytest.mark.parametrize("build", [pyg.GCN, pyg.GraphSAGE, pyg.GAT, pyg.GIN])
def test_the_models_of_pyg(build: Any, jk: str | None):
    equals_the_whole(built(lambda: build(F_IN, HIDDEN, 4, F_OUT, norm="batch_norm", jk=jk)), 5)


def test_all_layers_of_a_jump_are_handed_on():
    model = built(lambda: pyg.GCN(F_IN, HIDDEN, 3, F_OUT, jk="cat", act=None))
    *_, stages = equals_the_whole(model, 3)
    graph, found = surveyed(model)
    # Dropout follows each layer and stays with it: what crosses is the sum of its layer.
    first, second = (s.name for s in graph.steps if s.name in ("dropout", "dropout_1"))
    assert [stage.takes for stage in stages] == [{}, {0: (first,)}, {1: (first, second)}]
    assert [stage.gives for stage in stages] == [{1: (first,)}, {2: (first, second)}, {}]
    assert links(stages) == ((0, 1), (1, 2))
    # Two hops of the first layer's rows and one of the second's, 8 columns of 8 bytes, there and back.
    assert stage_bytes(stages, found, 100, 999) == 3 * 100 * HIDDEN * 8 * 2
    assert [stage.inputs for stage in stages] == [("x", "edge_index"), ("edge_index",), ("edge_index",)]
    assert stages[2].parameters == ("convs.2.bias", "convs.2.lin.weight", "lin.weight", "lin.bias")
    text = describe(stages, found, {"convs_0": 1.0, "convs_1": 2.0, "convs_2": 1.0}).split("\n")
    assert text[1] == (
        f"stage 1: convs.1, 50 % of the time; takes {first} rows x 8 from 0; "
        f"gives {first} rows x 8, {second} rows x 8 to 2"
    )
    assert text[2].startswith("stage 2: convs.2 to lin (2 layers), 25 % of the time; takes")


class TwoBranches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.aside, self.first = pyg.GCNConv(F_IN, 2), pyg.GCNConv(F_IN, HIDDEN)
        self.second, self.last = pyg.GCNConv(HIDDEN, HIDDEN), nn.Linear(HIDDEN + 2, F_OUT)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = x * 2
        aside = self.aside(x, edge_index)
        x = self.second(self.first(x, edge_index), edge_index)
        return self.last(torch.cat([x, aside], dim=-1))


def test_a_value_passes_by_stages_that_do_not_read_it():
    model = built(TwoBranches)
    equals_the_whole(model, 4)
    graph, found = surveyed(model)
    stages = cut(graph, found, 3, {"aside": 2.0, "first": 1.0, "second": 1.0, "last": 2.0})
    assert [stage.takes for stage in stages] == [{}, {}, {0: ("aside",), 1: ("second",)}]
    assert links(stages) == ((0, 2), (1, 2))
    # What needs no weights is computed again.
    assert [[step.name for step in stage.steps] for stage in stages] == [
        ["mul", "aside"],
        ["mul", "first", "second"],
        ["cat", "last"],
    ]
    assert stage_bytes(stages, found, 10, 0) == 10 * 8 * (2 + HIDDEN) * 2


def test_the_first_rows_of_gcnii_go_through_all_stages():
    model = built(
        lambda: build_model(
            Model(name="gcn2", layers=4, hidden=HIDDEN, dropout=0.0),
            in_channels=F_IN,
            out_channels=F_OUT,
            num_nodes=N,
        )
    )
    graph, found = surveyed(model)
    convs = [step.name for step in graph.steps if step.path.startswith("convs")]
    stages = cut(graph, found, 4, dict.fromkeys(convs, 1.0))
    x_0 = next(step.name for step in graph.steps if step.name == "relu")
    assert [len(names) for stage in stages for names in stage.takes.values()] == [2, 2, 2]
    assert all(x_0 in names for stage in stages for names in stage.takes.values())


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.conv, self.back = (
            nn.Linear(F_IN, F_IN),
            pyg.GCNConv(F_IN, F_IN),
            nn.Linear(F_IN, F_IN),
        )
        self.back.weight, self.unused = self.embed.weight, nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.ones(F_IN))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.conv(self.embed(x) * self.scale, edge_index)
        return (self.back(x) * self.scale)[:, :F_OUT]


def test_tied_weights_belong_to_all_that_use_them():
    model = built(Tied)
    stages = equals_the_whole(model, 3)[-1]
    assert shared_parameters(stages) == {"scale": (0, 2), "embed.weight": (0, 2)}
    assert {"unused.weight", "unused.bias"} <= set(stages[0].parameters)
    assert not {"unused.weight", "unused.bias"} & set(stages[1].parameters + stages[2].parameters)
    assert not any("scale" in names for stage in stages for names in stage.takes.values())


class Sizes(nn.Module):
    """Sizes of hidden rows, read stages later, and weights made of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = pyg.GCNConv(F_IN, HIDDEN), pyg.GCNConv(HIDDEN, HIDDEN)
        self.last, self.mix = pyg.GCNConv(HIDDEN, F_OUT), nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        mix = self.mix.softmax(0)
        x = self.first(x, edge_index) * mix[0]
        count, width = x.shape
        x = self.second(x, edge_index) * mix[1]
        row, col = edge_index
        x = x + torch.zeros(count, width + 1 - 1, dtype=x.dtype).index_add(0, col, x[row]) / count
        return self.last(x, edge_index) * mix[2]


def test_sizes_are_read_again_and_small_tensors_cross():
    stages = equals_the_whole(built(Sizes), 3)[-1]
    assert any("softmax" in names for names in stages[2].takes.values())
    names = [[step.name for step in stage.steps] for stage in stages]
    assert all(
        "getitem" not in taken for stage in stages for given in stage.takes.values() for taken in given
    )
    assert "getattr_1" in names[0] + names[1]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = pyg.GATConv(F_IN, HIDDEN), pyg.GCNConv(HIDDEN, F_OUT)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out = self.first(x, edge_index, return_attention_weights=True)
        x = self.second(out[0], edge_index)
        return x + out[1][1].mean()


def test_a_module_with_a_state_is_in_one_stage():
    """Its running statistics are those of both calls."""
    graph, found = surveyed(built(lambda: ODD_MODELS["shared_conv"](F_IN, F_OUT)))
    names = ["norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]
    assert found.changed == set(names)
    stages = cut(graph, found, 4, {})
    assert sorted(sum(step.path == "norm" for step in stage.steps) for stage in stages) == [0, 0, 0, 2]
    assert [name for stage in stages for name in stage.buffers] == names
    with pytest.raises(ModelError, match="no cut between norm and norm_1, as norm is the same module"):
        cut(graph, found, 5, {})


def test_no_cut_where_a_tuple_would_cross():
    graph, found = surveyed(built(Attention))
    with pytest.raises(ModelError, match="got one that can be cut into 1 at most: it has 2 steps") as caught:
        cut(graph, found, 2, {})
    assert "pipe=2" in caught.value.expected
    assert "no cut between first and" in caught.value.got
    assert "test_stages.py:" in caught.value.where


def test_more_stages_than_layers():
    graph, found = surveyed(built(lambda: pyg.GCN(F_IN, HIDDEN, 3, F_OUT)))
    with pytest.raises(ModelError, match="at most: it has 3 steps with weights or messages") as caught:
        cut(graph, found, 5, {})
    assert caught.value.hint == "--parallel.pipe 3"


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = (pyg.GCNConv(F_IN, F_IN) for _ in range(3))
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.first(x, edge_index)
        x.view(-1).add_(1.0)
        y = self.second(self.act(x), edge_index)
        return (self.last(y, edge_index) + x)[:, :F_OUT]


def test_what_is_changed_in_place_crosses_changed():
    for stages in equals_the_whole(built(InPlace), 3):
        assert {"first", "act"} <= {step.name for step in stages[0].steps}


def test_an_input_changed_in_place_is_refused():
    class Changes(TwoBranches):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.aside(x.relu_(), edge_index)

    model = built(Changes)
    graph, found = surveyed(model)
    with pytest.raises(ModelError, match="changes 'x' in place"):
        cut(graph, found, 1, {})


def test_an_output_without_rows_is_refused():
    class Pooled(TwoBranches):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.aside(x, edge_index).mean(0)

    graph, found = surveyed(built(Pooled))
    with pytest.raises(ModelError, match="kind 'fixed' and shape"):
        cut(graph, found, 1, {})


# Against all cuts there are -------------------------------------------------------------------------------


@st.composite
def graphs(draw: Any) -> tuple[LayerGraph, Survey, dict[str, float]]:
    """A random graph: layers, glue, what needs no weights, and values that cannot cross."""
    steps: list[Step] = []
    values: dict[str, Value] = {}
    free = {"x"}
    kinds = draw(
        st.lists(st.sampled_from(["layer", "layer", "glue", "free", "tuple"]), min_size=1, max_size=9)
    )
    for place, kind in enumerate(kinds):
        name = f"s{place}"
        older = sorted(free) if kind == "free" else ["x", *(step.name for step in steps)]
        reads = draw(st.lists(st.sampled_from(older), min_size=1, max_size=3, unique=True))
        steps.append(
            Step(
                name,
                "module" if kind == "layer" else "function",
                name,
                parameters=(name,) if kind == "layer" else (),
                layer=kind == "layer",
                reads=tuple(reads),
            )
        )
        if kind != "layer" and free.issuperset(reads):
            free.add(name)
        width = draw(st.integers(1, 4))
        values[name] = (
            Value("none") if kind == "tuple" else Value("rows", (width,), torch.float32, draw(st.booleans()))
        )
    steps.append(Step("out", "module", "out", parameters=("out",), layer=True, reads=(steps[-1].name,)))
    values["out"] = Value("rows", (1,), torch.float32, True)
    seconds = {step.name: float(draw(st.integers(0, 5))) for step in steps}
    graph = LayerGraph(tuple(steps), ("x",), "out", tuple(s.name for s in steps if s.layer))
    return graph, Survey(values, {}), seconds


def free_steps(graph: LayerGraph) -> set[str]:
    free = {"x"}
    for step in graph.steps:
        if not step.layer and free.issuperset(step.reads):
            free.add(step.name)
    return free - {"x"}


def judged(
    graph: LayerGraph, found: Survey, seconds: Mapping[str, float], home: Mapping[str, int], count: int
) -> tuple[float, int] | None:
    """Seconds of the slowest stage and bytes of a cut, worked out value by value; None if it cannot be."""
    free = free_steps(graph)
    by_name = {step.name: step for step in graph.steps}
    spent = [0.0] * count
    layers = [0] * count
    needs: list[set[str]] = [set() for _ in range(count)]
    for step in graph.steps:
        if step.name in home:
            spent[home[step.name]] += seconds[step.name]
            layers[home[step.name]] += step.layer
            left = list(step.reads)
            while left:
                name = left.pop()
                if name in by_name and name not in needs[home[step.name]]:
                    needs[home[step.name]].add(name)
                    left += by_name[name].reads if name in free else ()
    for name in free:
        first = next((number for number in range(count) if name in needs[number]), None)
        if first is not None:
            spent[first] += seconds[name]
    sent = 0
    for name, own in home.items():
        takers = [number for number in range(own + 1, count) if name in needs[number]]
        value = found.values[name]
        if takers and value.kind == "none":
            return None
        sent += len(takers) * value.bytes(1, 1) * (2 if value.grad else 1)
    return (max(spent), sent) if all(layers) else None


@settings(max_examples=200, deadline=None)
@given(graphs(), st.integers(1, 4), st.sampled_from([0.0, 0.05, 0.3, 1.0]))
def test_no_cut_is_better(case: tuple[LayerGraph, Survey, dict[str, float]], count: int, slack: float):
    """None within the slack sends less, none of those that send as little is faster but by a hair."""
    graph, found, seconds = case
    free = free_steps(graph)
    body = [step.name for step in graph.steps if step.name not in free]
    marks = []
    for inner in itertools.combinations(range(1, len(body)), count - 1):
        ends = (0, *inner, len(body))
        home = {name: k for k in range(count) for name in body[ends[k] : ends[k + 1]]}
        marks.append(judged(graph, found, seconds, home, count))
    possible = [mark for mark in marks if mark is not None]
    if not possible:
        with pytest.raises(ModelError, match="at most"):
            cut(graph, found, count, seconds, slack=slack)
        return
    fastest = min(possible)[0]
    near = [mark for mark in possible if mark[0] <= fastest * (1 + slack) + 1e-9]
    sent = min(sent for _, sent in near)
    soonest = min(spent for spent, bytes_ in near if bytes_ == sent)
    stages = cut(graph, found, count, seconds, slack=slack)
    home = {s.name: stage.number for stage in stages for s in stage.steps if s.name not in free}
    mark = judged(graph, found, seconds, home, count)
    assert mark is not None
    assert mark[1] == stage_bytes(stages, found, 1, 1) == sent
    assert soonest <= mark[0] <= min(soonest + fastest * slack / 100, fastest * (1 + slack)) + 1e-9


def test_a_residual_block_is_not_cut_for_a_little_time():
    """What a block adds to would cross beside what is inside of it."""
    steps = [Step("in", "module", "in", parameters=("in",), layer=True, reads=("x",))]
    for place in range(8):
        norm, conv, whole = f"norm{place}", f"conv{place}", f"sum{place}"
        before = steps[-1].name
        steps.append(Step(norm, "module", norm, reads=(before,)))
        steps.append(Step(conv, "module", conv, parameters=(conv,), layer=True, reads=(norm,)))
        steps.append(Step(whole, "function", torch.add, reads=(before, conv)))
    graph = LayerGraph(tuple(steps), ("x",), steps[-1].name, ())
    found = Survey({step.name: Value("rows", (4,), torch.float32, True) for step in steps}, {})
    seconds = {step.name: 10.0 if step.layer else 1.0 for step in steps} | {"in": 2.0}
    row = 4 * 4 * 2  # four numbers of four bytes, and their gradients
    # 98 in all: 50 and 48 after a block, 49 and 49 before its sum.
    assert stage_bytes(cut(graph, found, 2, seconds, slack=0.0), found, 1, 1) == 2 * row
    stages = cut(graph, found, 2, seconds)
    assert stage_bytes(stages, found, 1, 1) == row
    assert stages[1].takes == {0: ("sum3",)}


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=2, max_size=9),
    st.integers(2, 4),
)
def test_of_two_passes_the_slowest_stages_together_are_least(each, count):
    """All chunks go forward before any comes back: no cut of a chain has a smaller sum."""
    count = min(count, len(each))
    names = [f"s{place}" for place in range(len(each))]
    steps = tuple(
        Step(name, "module", name, parameters=(name,), layer=True, reads=(before,))
        for name, before in zip(names, ["x", *names], strict=False)
    )
    found = Survey({name: Value("rows", (2,), torch.float32, True) for name in names}, {})
    forward, backward = (dict(zip(names, way, strict=True)) for way in zip(*each, strict=True))

    def slowest(ends: Sequence[int]) -> float:
        pieces = [names[a:b] for a, b in itertools.pairwise(ends)]
        return sum(max(sum(way[name] for name in piece) for piece in pieces) for way in (forward, backward))

    every = itertools.combinations(range(1, len(names)), count - 1)
    best = min(slowest((0, *inner, len(names))) for inner in every)
    graph = LayerGraph(steps, ("x",), names[-1], tuple(names))
    stages = cut(graph, found, count, forward, backward=backward)
    ends = list(itertools.accumulate((len(stage.steps) for stage in stages), initial=0))
    assert slowest(ends) == best


def test_a_deep_model_is_cut_at_once():
    """600 steps, 64 stages, each layer read by the next and by one far away."""
    steps, values = [], {}
    for place in range(600):
        reads = (f"s{place - 1}" if place else "x", f"s{place * 7 // 8}" if place > 8 else "x")
        reads = tuple(dict.fromkeys(reads))
        name, layer = f"s{place}", place % 3 == 0
        steps.append(
            Step(name, "module", name, parameters=(name,) if layer else (), layer=layer, reads=reads)
        )
        values[name] = Value("rows", (8,), torch.float32, True)
    graph = LayerGraph(tuple(steps), ("x",), "s599", ())
    begun = time.process_time()
    seconds = {step.name: 1.0 for step in steps}
    stages = cut(graph, Survey(values, {}), 64, seconds)
    assert time.process_time() - begun < 1
    begun = time.process_time()
    apart = cut(graph, Survey(values, {}), 64, seconds, backward=seconds)
    assert time.process_time() - begun < 5
    assert max(len(stage.steps) for stage in apart) == 10
    assert max(len(stage.steps) for stage in stages) == 10


@pytest.mark.parametrize(
    ("stages", "ranks", "asked", "advice"),
    [
        (4, None, "pipe=4 can cut into", "--parallel.pipe 2"),
        (8, 2, "pipe=2 with stages_per_rank=4 can cut into", "--parallel.stages-per-rank 1"),
        (6, 3, "pipe=3 with stages_per_rank=2 can cut into", "--parallel.pipe 2"),
    ],
)
def test_the_setting_that_asks_for_too_many_stages_is_named(stages, ranks, asked, advice):
    graph, seen = surveyed(built(lambda: pyg.GCN(F_IN, 8, 2, 3)))
    with pytest.raises(ModelError, match=asked) as refused:
        cut(graph, seen, stages, {}, ranks=ranks)
    assert advice in str(refused.value)
