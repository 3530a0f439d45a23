"""Layers that keep their inputs only and run again in backward: same numbers, same bytes, less kept.

Every convolution, every model of the zoo, the odd models; the memory of deep ones; the trainer.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import groupby

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch_geometric.data import Data

import kagome
from convolutions import ConvCase, sample_graph, splits
from kagome import Trainer
from kagome.comm.channel import Channel
from kagome.components.parallelize import PartOptions, parallelize
from kagome.config import Report, Train
from kagome.graph.partition.partition import extract
from odd_models import MUST_BE_REFUSED, ODD_MODELS
from parity import case_build, odd, random_owner
from twice import FAN_IN, FAN_OUT, Ranks, assert_same, both, on_one_rank, zoo


def one_each() -> Iterator[tuple[ConvCase, tuple[int, int]]]:
    """Of each class's variants one, on 2 or 3 ranks in turn: what differs between them is exact elsewhere."""
    for number, (_, found) in enumerate(groupby(splits(), key=lambda each: each[0].name)):
        variants = list(found)
        yield variants[number % len(variants)]


@pytest.mark.some(14)
@pytest.mark.parametrize(
    ("case", "split"),
    [pytest.param(*each, id=f"{each[1][0]}-ranks-{each[0].name}-{each[0].variant}") for each in one_each()],
)
def test_every_convolution(ranks: Ranks, case: ConvCase, split: tuple[int, int]) -> None:
    world, epochs = split
    data = sample_graph(1, groups_of_four=case.needs_groups_of_four)
    data.x.requires_grad_(epochs == 1)  # what is cached in one epoch knows no gradient of the next
    assert_same(*both(ranks, world, case_build(case), data, epochs=epochs))


ZOO = ("gcn", "sage", "gin", "gat", "gatv2", "pna", "edgecnn", "gcn2", "appnp", "sgc", "deepgcn", "resgcn+")


@pytest.mark.some(16)
@pytest.mark.parametrize(("world", "fast"), [(1, True), (3, True), (2, False)])
@pytest.mark.parametrize("name", [*ZOO, "transformer"])
def test_every_model_of_the_zoo(ranks: Ranks, name: str, world: int, fast: bool) -> None:
    once, twice = both(ranks, world, partial(zoo, name), fast=fast)
    assert_same(once, twice)
    assert world == 1 or once[0].traffic[0]["halo"] > 0


@pytest.mark.some(16)
@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("name", sorted(set(ODD_MODELS) - MUST_BE_REFUSED))
def test_odd_models(ranks: Ranks, name: str, world: int) -> None:
    assert_same(*both(ranks, world, partial(odd, name, FAN_IN, FAN_OUT)))


@pytest.mark.parametrize("name", ["gcn", "gat", "deepgcn"])
def test_ranks_without_training_vertices_or_without_any(ranks: Ranks, name: str) -> None:
    assert_same(*both(ranks, 3, partial(zoo, name), blind=True))
    assert_same(*both(ranks, 3, partial(zoo, name), owner=random_owner(30, 2, seed=1) * 2))


def test_mixed_precision(ranks: Ranks) -> None:
    results = [ranks(2, cast, again) for again in (False, True)]
    for plain, found in zip(*results, strict=True):
        assert plain.keys() == found.keys()
        assert all(torch.equal(plain[name], found[name]) for name in plain)


def cast(channel: Channel, again: bool) -> dict[str, Tensor]:
    """Gradients under bf16 autocast."""
    torch.manual_seed(0)
    model, data = zoo("transformer"), sample_graph(1)
    data.x = data.x.float()
    part = extract(data, random_owner(30, 2), channel.rank, 2)
    with parallelize(model, part, channel, PartOptions(recompute=again, amp=True)) as net:
        out = net.forward(1, training=True)
        (out.float().square().sum() + net.scope.forward.forward_pass.token).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_training_by_the_trainer(ranks: Ranks) -> None:
    results = [ranks(2, fit, again) for again in (False, True)]
    assert results[0] == results[1]
    assert results[0][0] == results[0][1]
    assert min(results[0][0]) < results[0][0][0]


def fit(channel: Channel, again: bool) -> list[float]:
    """The losses of four epochs."""
    torch.manual_seed(1)
    data = kagome.load("sbm:vertices=200,degree=6,features=6,classes=4,communities=4")
    train, report = (
        Train(epochs=4, check=False, timeout=20.0),
        Report(page=False, trace=False, progress=False),
    )
    with Trainer(zoo("deepgcn"), data, train=train, report=report, recompute=again) as trainer:
        trainer.fit()
        assert trainer.settings.model.recompute is again
        assert bool(trainer.engine.scope.channel.runs) is False
        return [float(record.loss) for record in trainer.records if record.loss is not None]


# Memory -------------------------------------------------------------------------------------------


def band() -> Data:
    """A graph whose halves share few edges."""
    generator = torch.Generator().manual_seed(7)
    target = torch.randint(0, 400, (4000,), generator=generator)
    source = (target + torch.randint(-9, 10, (4000,), generator=generator)).clamp(0, 399)
    x = torch.rand(400, FAN_IN, generator=generator, dtype=torch.float64)
    return Data(x=x, edge_index=torch.stack([source, target]))


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("name", "share"),
    # Where kernels keep inputs alone, as GCNII's do, there is nothing to win; and little to lose.
    [("deepgcn", 0.3), ("gat", 0.5), ("gcn2", 1.1)],
)
def test_deep_models_keep_less(ranks: Ranks, name: str, share: float) -> None:
    build = partial(zoo, name, layers=12, hidden=32, heads=4)
    once, twice = both(ranks, 2, build, band(), owner=torch.arange(400) // 200, measured=True)
    assert_same(once, twice)
    for plain, found in zip(once, twice, strict=True):
        assert found.peak < share * plain.peak


# When --------------------------------------------------------------------------------------------


class Counted(nn.Module):
    """A convolution in a block that counts the block's runs."""

    runs: list[bool]

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.runs = pyg.SAGEConv(FAN_IN, FAN_IN), []

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        self.runs.append(torch.is_grad_enabled())
        return self.conv(x.tanh(), edge_index).tanh()


def test_a_layer_runs_again_in_training_only_and_is_left_as_it_was() -> None:
    block = Counted()
    model = nn.ModuleList([block, Counted()]).double()
    untouched = dict(vars(block))
    with on_one_rank(model) as net:
        scope = net.scope
        x, e = scope.inputs["x"], scope.inputs["edge_index"]
        with torch.no_grad(), scope.running(1, training=False):
            expected = block(x, e)
        assert block.runs == [False]
        with scope.running(1, training=True), torch.no_grad():
            assert torch.equal(block(x, e), expected)
        assert block.runs == [False, False]
        with scope.running(1, training=True):
            out = block(x, e)
        assert torch.equal(out, expected)
        out.sum().backward()
        assert block.runs == [False, False, True, True]
        forward = scope.forward
        assert (forward.path, forward.layers, forward.draws, forward.forward_pass.over) == ([], 0, 0, True)
    assert vars(block).keys() == untouched.keys()


def test_a_later_forward_may_come_before_the_backward() -> None:
    """The next epoch's forward is kept while an evaluation runs."""
    torch.manual_seed(0)
    model = zoo("gat").double()
    grads = []
    for between in (False, True):
        with on_one_rank(model) as net:
            scope = net.scope
            model.zero_grad()
            with scope.running(4, training=True):
                out = model(scope.inputs["x"], scope.inputs["edge_index"])
            forward_pass = scope.forward.forward_pass
            if between:
                model.eval()
                with torch.no_grad(), scope.running(9, training=False):
                    model(scope.inputs["x"], scope.inputs["edge_index"])
                model.train()
                forward_pass = scope.forward.forward_pass
            out.square().sum().backward()
            assert scope.forward.forward_pass is forward_pass
            grads.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_backward_may_run_twice() -> None:
    torch.manual_seed(0)
    model = zoo("gat").double()
    with on_one_rank(model) as net:
        scope = net.scope
        with scope.running(1, training=True):
            out = model(scope.inputs["x"], scope.inputs["edge_index"])
        weights = list(model.parameters())
        first = torch.autograd.grad(out.sum(), weights, retain_graph=True)
        assert all(
            torch.equal(a, b) for a, b in zip(first, torch.autograd.grad(out.sum(), weights), strict=True)
        )
