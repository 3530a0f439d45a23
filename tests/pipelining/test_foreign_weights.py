"""Penalties on weights, weights read in forward, hooks that read weights: right on every mesh, or refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import hypothesis
import pytest
import torch
import torch_geometric.nn as pyg
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

import kagome
from dags import plan_of
from kagome import Parallel, Trainer
from kagome.comm.channel import Channel
from kagome.errors import KagomeError, ModelError
from kagome.pipelining.foreign_weights import Reads
from training import QUIET, graph, settings
from weight_readers import PENALTIES, Net, optimizer_of, rows, summed

EPOCHS = 3
EXACT: dict[str, Any] = {"cross_chunk": "exact"}
MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "two parts": (2, {}),
    "three parts": (3, {}),
    "two stages": (2, {"pipe": 2, "chunks": 1}),
    "two stages, exact": (2, {"pipe": 2, "chunks": 2, **EXACT}),
    "three stages, exact": (3, {"pipe": 3, "chunks": 2, **EXACT}),
    "chunks, exact": (1, {"chunks": 2, **EXACT}),
}


Case = tuple[str, str, str]
"""What forward reads, the penalty, the optimizer."""
CASES: list[Case] = [
    *(("", penalty, "") for penalty in PENALTIES),
    *((inside, "none", "") for inside in ("sum", "norm", "first")),
    *(("", "none", optimizer) for optimizer in ("ema", "clip", "rate", "reading", "adamw", "one by one")),
    ("first", "l1", "adamw"),
]
HOOKS = ("ema", "clip", "reading")


def made(case: Case) -> tuple[nn.Module, Callable[[Tensor, Tensor], Tensor], Any]:
    torch.manual_seed(3)
    model = Net(case[0]).double()
    penalty = PENALTIES[case[1]]
    return model, lambda out, y: rows(out, y) + 0.01 * penalty(model), optimizer_of(case[2], model)


def plain(case: Case) -> list[float]:
    (model, loss, make), data, found = made(case), graph(torch.float64), []
    parameters = list(model.parameters())
    optimizer = make(parameters) if make else Adam(parameters, lr=0.01, weight_decay=5e-4)
    for _ in range(EPOCHS):
        optimizer.zero_grad()
        out = model(data.x, data.edge_index)
        lost = loss(out[data.train_mask], data.y[data.train_mask]).mean()
        lost.backward()
        optimizer.step()
        found.append(float(lost.detach()))
    return found


def trained(channel: Channel, cases: list[Case], parallel: dict[str, Any]) -> list[list[float] | str]:
    found: list[list[float] | str] = []
    for case in cases:
        model, loss, make = made(case)
        try:
            with Trainer(
                *(model, graph(torch.float64)),
                loss=loss,
                optimizer=make,
                train=settings(epochs=EPOCHS, lr=0.01, weight_decay=5e-4),
                parallel=Parallel(**parallel),
                report=QUIET,
            ) as trainer:
                trainer.fit()
                found.append([record.loss for record in trainer.records])
        except KagomeError as error:
            found.append(str(error))
    return found


@pytest.mark.some(1)
@pytest.mark.parametrize("mesh", MESHES)
def test_weights_that_are_read_besides_count_as_in_plain_pyg_or_are_refused(ranks, mesh):
    world, parallel = MESHES[mesh]
    found = ranks(world, trained, CASES, parallel, timeout=400.0)
    assert len(CASES) >= 30
    for place, case in enumerate(CASES):
        each = [rank[place] for rank in found]
        if parallel.get("pipe", 1) > 1 and case[2] in HOOKS:
            assert all("which another rank trains" in text for text in each), (case, each)
            continue
        for losses in each:
            assert losses == pytest.approx(plain(case), rel=1e-10, abs=1e-10), case


@pytest.mark.some(1)
@pytest.mark.parametrize("kind", ["history", "drop"])
def test_a_penalty_under_history_and_drop_is_that_of_today_s_weights(ranks, kind):
    """With one chunk a part there is nothing old but weights: the numbers are plain PyG's."""
    cases = [("", "l1", ""), ("", "two layers alike", "")]
    whole = ranks(2, trained, cases, {"pipe": 2, "chunks": 1, "cross_chunk": kind})[0]
    for one, case in zip(whole, cases, strict=True):
        assert one == pytest.approx(plain(case), rel=1e-10)
    # With several, the penalty's share of the loss is what it is without stages.
    alone = ranks(1, trained, cases, {"chunks": 2, "cross_chunk": kind, "guard": False})[0]
    staged = ranks(2, trained, cases, {"pipe": 2, "chunks": 2, "cross_chunk": kind, "guard": False})[0]
    for one, other in zip(alone, staged, strict=True):
        assert one == pytest.approx(other, rel=1e-10)


Term = tuple[str, str, int, int]
"""How a term of a penalty comes by its weights, what it makes of them, and of which layers."""
READS: dict[str, Callable[[nn.Module, int], Tensor]] = {
    "an attribute": lambda m, at: m.convs[at].lin_l.weight,
    "its name": lambda m, at: m.get_parameter(f"convs.{at}.lin_r.weight"),
    "a dict": lambda m, at: dict(m.named_parameters())[f"convs.{at}.lin_l.bias"],
    "a state": lambda m, at: m.state_dict(keep_vars=True)[f"convs.{at}.lin_l.weight"],
    "a list": lambda m, at: list(m.parameters())[2 * at],
    "a vector": lambda m, at: nn.utils.parameters_to_vector(m.convs[at:].parameters()),
    "a module": lambda m, at: [each for each in m.modules() if isinstance(each, pyg.Linear)][at].weight,
}
MADE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "the sum of sizes": lambda w, v: w.abs().sum(),
    "squares of both": lambda w, v: w.square().sum() * v.square().mean(),
    "a norm": lambda w, v: w.norm(),
    "a logarithm": lambda w, v: w.flatten().logsumexp(0) - v.max(),
    "a spread": lambda w, v: w.std() + v.flatten()[0],
    "a detached part": lambda w, v: (w * v.detach().norm()).sum(),
    "in place": lambda w, v: w.clone().mul_(v.mean()).tanh_().sum(),
}


def of_terms(terms: list[Term], model: nn.Module) -> Tensor:
    return summed(
        MADE[made](READS[read](model, one), READS[read](model, other)) for read, made, one, other in terms
    )


def learned(terms: list[Term], ours: dict[str, Any] | None) -> list[float]:
    """The losses of two epochs, by Trainer on a mesh or by a plain loop."""
    torch.manual_seed(3)
    model, data = Net().double(), graph(torch.float64)

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return rows(out, y) + 0.01 * of_terms(terms, model)

    if ours is not None:
        sgd = functools.partial(SGD, lr=0.05)
        mesh, train = Parallel(**ours), settings(epochs=2)
        with Trainer(
            model, data, loss=loss, optimizer=sgd, train=train, parallel=mesh, report=QUIET
        ) as trainer:
            trainer.fit()
            return [record.loss for record in trainer.records]
    optimizer, found = SGD(model.parameters(), lr=0.05), []
    for _ in range(2):
        optimizer.zero_grad()
        lost = loss(model(data.x, data.edge_index)[data.train_mask], data.y[data.train_mask]).mean()
        lost.backward()
        optimizer.step()
        found.append(float(lost.detach()))
    return found


def learned_by_rank(channel: Channel, terms: list[Term], parallel: dict[str, Any]) -> list[float]:
    return learned(terms, parallel)


layers = st.integers(0, 3)


@hypothesis.settings(max_examples=3, derandomize=True, suppress_health_check=list(hypothesis.HealthCheck))
@hypothesis.given(
    st.lists(
        st.tuples(st.sampled_from(list(READS)), st.sampled_from(list(MADE)), layers, layers),
        min_size=1,
        max_size=3,
    )
)
def test_any_penalty_counts_as_in_plain_pyg(ranks, terms):
    expected = learned(terms, None)
    world, parallel = MESHES["two stages, exact"]
    for losses in ranks(world, learned_by_rank, terms, parallel):
        assert losses == pytest.approx(expected, rel=1e-10), terms


def in_stages(channel: Channel, what: str) -> str:
    torch.manual_seed(1)
    layers = (nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    model = nn.Sequential(*layers)
    x, y = torch.randn(8, 4), torch.randint(0, 3, (8,))

    def loss(out: Tensor, target: Tensor) -> Tensor:
        if what == "hook":
            return rows(out, target)
        return rows(out, target) + 0.1 * model[4 if what == "own" else 0].weight.abs().sum()

    def make(weights: Any) -> Optimizer:
        made = SGD(weights, lr=0.1)
        if what == "hook":
            made.register_step_post_hook(lambda *_: model[0].weight.sum() + model[4].weight.sum())
        return made

    plan = plan_of(8, ("0 1 2 3", 1, 4), ("4", 1, 4))
    try:
        with kagome.pipeline(model, x, loss=loss, optimizer=make, plan=plan, channel=channel) as pipe:
            pipe.step(x, y)
    except ModelError as error:
        return str(error)
    return "fine"


@pytest.mark.parametrize(
    ("what", "text"),
    [("own", "fine"), ("another", "the loss that reads 0.weight"), ("hook", "optimizer that reads")],
)
def test_stages_of_samples_refuse_what_reads_other_ranks_weights(ranks, what, text):
    for found in ranks(2, in_stages, what):
        assert text in found


def test_what_counts_as_a_read():
    weight, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    with Reads({"w": weight, "o": other}, grads=False) as reads:
        assert weight.requires_grad
        assert weight.grad is None
        assert weight.shape == (2,)
        assert reads.found == []
        torch.stack([weight, weight])
    assert reads.found == ["w"]
    with Reads({"w": weight}, grads=True) as reads:
        assert weight.grad is None
    assert reads.found == ["w"]
