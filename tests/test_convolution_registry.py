"""The registry of convolutions covers all of PyG, and each case and odd model works in one process."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
import torch_geometric.nn.conv as conv
from torch import Tensor, nn

from convolutions import CASES, ConvCase, double_precision, sample_graph
from odd_models import MUST_BE_REFUSED, ODD_MODELS

BUILDABLE = [case for case in CASES if case.build is not None]
GRAPHS = {groups: sample_graph(seed=3, groups_of_four=groups) for groups in (False, True)}


def label(case: ConvCase) -> str:
    return f"{case.name}-{case.variant}".replace(" ", "_")


def run(module: nn.Module, groups_of_four: bool = False) -> tuple[Tensor, Tensor | None]:
    graph = GRAPHS[groups_of_four]
    named = list(inspect.signature(module.forward).parameters)[2:]
    x = graph.x.clone().requires_grad_()
    out = module(x, graph.edge_index, **{name: graph[name] for name in named})
    out.square().sum().backward()
    return out, x.grad  # no gradient where a cached layer answers without looking at x


def test_every_exported_class_has_a_case() -> None:
    named = {case.name for case in CASES}
    aliases = {"ECConv", "PointConv"}
    assert all(hasattr(conv, name) for name in aliases)
    assert named == set(conv.__all__) | aliases


def test_cases_are_told_apart_and_say_one_thing_each() -> None:
    assert [key for key, times in Counter(map(label, CASES)).items() if times > 1] == []
    for case in CASES:
        assert sum(part is not None for part in (case.build, case.refused, case.needs)) == 1, label(case)


def test_the_sample_graph_has_what_splits_stumble_over() -> None:
    ends = GRAPHS[False].edge_index
    assert ends.shape == (2, 120)
    assert GRAPHS[False].num_nodes == 30
    assert (ends[0] == ends[1]).sum() >= 10
    assert ends.unique(dim=1).size(1) <= 115
    assert set(range(30)) - set(ends.unique().tolist()) >= {1, 29}
    assert 0 in ends[1]
    assert 0 not in ends[0]
    assert not torch.equal(ends[1], ends[1].sort().values)
    assert torch.equal(ends, sample_graph(seed=3).edge_index)
    assert torch.equal(GRAPHS[True].edge_index[1], torch.arange(30).repeat_interleave(4))


@pytest.fixture
def uninitialised_memory_is_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("uninitialised_memory_is_nan")
@pytest.mark.parametrize("case", BUILDABLE, ids=label)
def test_the_seed_sets_every_weight_of_a_case(case: ConvCase) -> None:
    assert case.build is not None
    with double_precision():
        torch.manual_seed(0)
        one = case.build().state_dict()
        torch.manual_seed(0)
        two = case.build().state_dict()
    for name, value in one.items():
        assert value.isfinite().all(), name
        assert torch.equal(value, two[name]), name


@pytest.mark.parametrize("case", BUILDABLE, ids=label)
def test_a_case_runs_in_one_process(case: ConvCase) -> None:
    assert case.build is not None
    with double_precision():
        torch.manual_seed(0)
        module = case.build()
        assert not {id(p) for p in module.parameters()} & {id(p) for p in case.build().parameters()}
        first, gradient = run(module, case.needs_groups_of_four)
        second, _ = run(module, case.needs_groups_of_four)
        module.eval()
        calm = [run(module, case.needs_groups_of_four)[0] for _ in range(2)]
    assert first.shape[0] == 30
    assert first.dim() == 2
    assert gradient is not None
    for tensor in (first, gradient, *(p.grad for p in module.parameters() if p.grad is not None)):
        assert tensor.dtype == torch.float64
        assert tensor.isfinite().all()
    assert torch.equal(first, second) is not case.random
    assert torch.equal(*calm)


@pytest.mark.parametrize("case", [c for c in CASES if c.needs is not None], ids=label)
def test_what_is_said_to_need_a_package_is_a_class(case: ConvCase) -> None:
    assert issubclass(getattr(conv, case.name), nn.Module)


@pytest.mark.parametrize("name", ODD_MODELS)
def test_an_odd_model_runs_in_one_process(name: str) -> None:
    with double_precision():
        torch.manual_seed(0)
        module = ODD_MODELS[name](6, 4)
        out, gradient = run(module)
    assert out.shape == (30, 4)
    assert out.isfinite().all()
    assert gradient is not None
    assert gradient.isfinite().all()


def test_odd_models_that_must_be_refused_are_there() -> None:
    assert set(ODD_MODELS) >= MUST_BE_REFUSED
