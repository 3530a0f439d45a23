"""Tensors at the peak: a storage counts while it lives, with the layer that made it and why it is held."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings as examples, strategies as st
from torch_geometric.nn import GCN

from kagome import Report, Trainer
from kagome.memory.live_tensors import LiveTensors
from training import QUIET, graph, settings

CPU = torch.device("cpu")


def test_a_view_of_what_was_held_before_is_no_memory() -> None:
    before = torch.ones(100)
    with LiveTensors(CPU, lambda: "", {before.data_ptr()}) as live:
        views = [before.view(10, 10), before[50:], before.detach()]
        made = before + 1
    assert live.peak == made.nbytes == before.nbytes
    assert len(views) == 3


@examples(deadline=None, max_examples=50)
@given(steps=st.lists(st.one_of(st.integers(1, 50), st.just(0)), max_size=30))
def test_the_peak_is_the_most_that_lived_at_once(steps: list[int]) -> None:
    kept: list[torch.Tensor] = []
    most: list[int] = []
    with LiveTensors(CPU, lambda: "") as live:
        for step in steps:
            if step:
                kept.append(torch.ones(step))
                kept.append(kept[-1].view(1, -1))  # the same memory once more
            elif kept:
                del kept[0]
            sizes = [each.numel() for each in {t.data_ptr(): t for t in kept}.values()]
            assert live.bytes == 4 * sum(sizes)
            most = max(most, sizes, key=sum)
    assert live.peak == sum(each.bytes for each in live.at_peak()) == 4 * sum(most)


def test_backward_is_told_by_the_layer_of_its_node() -> None:
    path = [""]
    first, last = torch.nn.Linear(4, 3), torch.nn.Linear(3, 2)
    with LiveTensors(CPU, lambda: path[-1]) as live:
        path.append("first")
        hidden = first(torch.ones(5, 4, requires_grad=True)).sigmoid()
        path.append("last")
        out = last(hidden)
        path.append("")
        big = torch.autograd.grad(out.sum(), [hidden, *first.parameters()], allow_unused=True)
        del hidden
    gradients = [each for each in live.at_peak() if each.backward]
    assert {each.layer for each in gradients if each.shape == (5, 3)} <= {"first", "last"}
    assert any(each.layer == "first" and "SigmoidBackward0" in each.made_by for each in gradients)
    assert big[0].shape == (5, 3)


@pytest.fixture(scope="module")
def told() -> tuple[dict, list[float]]:
    torch.manual_seed(0)
    model = GCN(graph().x.size(1), 16, num_layers=2, out_channels=int(graph().y.max()) + 1)
    report = Report(page=False, trace=False, progress=False, memory=True)
    with Trainer(model, graph(), train=settings(), report=report) as trainer:
        done = trainer.fit(2)
        return done["memory"][0]["peak_tensors"], [record.loss for record in trainer.records]


def test_a_run_lists_the_tensors_at_its_peak(told: tuple[dict, list[float]]) -> None:
    peak, _ = told
    sizes = [each["bytes"] for each in peak["largest"]]
    assert sizes == sorted(sizes, reverse=True)
    assert len(sizes) == 10
    assert sum(sizes) <= peak["live"]
    assert peak["allocator"] is None or peak["allocator"] >= 0
    reasons = {each["reason"] for each in peak["largest"]}
    assert {"features", "edges"} < reasons
    assert all(each["layer"] for each in peak["largest"] if each["reason"] == "saved for backward")


def test_features_and_edges_are_counted_once(told: tuple[dict, list[float]]) -> None:
    peak, _ = told
    held = [(each["reason"], tuple(each["shape"])) for each in peak["largest"]]
    assert held.count(("features", tuple(graph().x.shape))) == 1
    edges = graph().edge_index.nbytes
    assert sum(each["bytes"] == edges and each["reason"] == "edges" for each in peak["largest"]) == 1


def test_training_is_the_same_while_it_is_watched(told: tuple[dict, list[float]]) -> None:
    torch.manual_seed(0)
    model = GCN(graph().x.size(1), 16, num_layers=2, out_channels=int(graph().y.max()) + 1)
    with Trainer(model, graph(), train=settings(), report=QUIET) as trainer:
        assert "peak_tensors" not in trainer.fit(2)["memory"][0]
        assert [record.loss for record in trainer.records] == told[1]
