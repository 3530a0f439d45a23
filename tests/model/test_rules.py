"""Layers that look at the whole graph in a way of their own; what Kagome leaves on a model: nothing."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch_geometric.data import Data

from convolutions import CASES, ConvCase, double_precision, sample_graph
from kagome.comm.channel import Channel
from kagome.comm.exchange import Exchange
from kagome.comm.in_process.thread_group import ThreadChannel, ThreadGroup
from kagome.components.parallelize import PartOptions, parallelize
from kagome.errors import ModelError
from kagome.graph.partition.partition import Partition, extract
from kagome.intercept.hooks import install
from kagome.intercept.interceptor import Interceptor
from kagome.model.exact.handlers import HANDLERS
from kagome.model.exact.layer_rules import apply_rules
from parity import alone, assert_equal, case_build, random_owner, seeded, split, whole, worst

BUILDABLE = [case for case in CASES if case.build is not None]


def edges(*pairs: tuple[int, int], nodes: int) -> Data:
    generator = torch.Generator().manual_seed(4)
    x = 2 * torch.rand(nodes, 6, generator=generator, dtype=torch.float64) - 1
    weight = torch.rand(len(pairs), generator=generator, dtype=torch.float64) + 0.1
    return Data(x=x, edge_index=torch.tensor(pairs).t().contiguous(), edge_weight=weight)


class One(nn.Module):
    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv(x, edge_index)


class OneWeighted(One):
    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor) -> Tensor:
        return self.conv(x, edge_index, edge_weight)


def egconv() -> nn.Module:
    return One(pyg.EGConv(6, 4, num_heads=2, aggregators=["symnorm", "mean"]))


def chebconv(normalization: str | None = None) -> nn.Module:
    return OneWeighted(pyg.ChebConv(6, 4, 3, normalization=normalization))


def median() -> nn.Module:
    return One(pyg.SAGEConv(6, 4, aggr="median"))


def lstm() -> nn.Module:
    return One(pyg.SAGEConv(6, 4, aggr="lstm"))


def gps(attention: str) -> nn.Module:
    return One(pyg.GPSConv(6, pyg.GCNConv(6, 6), heads=2, attn_type=attention))


# Quirks ----------------------------------------------------------------------------------------------

RING = [(v, (v + 1) % 6) for v in range(6)]


def test_egconv_takes_the_last_vertex_with_an_edge_for_the_last(ranks: Callable[..., list]) -> None:
    # Part 1 holds the end of the graph's edges; in part 0 each vertex has edges to halo rows only.
    data = edges(*RING, (5, 0), nodes=6)
    assert_equal(split(ranks, 2, egconv, data, torch.tensor([0, 1, 0, 1, 0, 1])), whole(egconv, data))
    assert_equal(split(ranks, 2, egconv, data, torch.tensor([0, 0, 0, 1, 1, 1])), whole(egconv, data))


@pytest.mark.parametrize("largest", [0, 3, 5])
def test_chebconv_scales_by_the_largest_entry_of_all_ranks(ranks: Callable[..., list], largest: int) -> None:
    data = edges(*RING, *((b, a) for a, b in RING), nodes=6)
    data.edge_weight[largest] = 9.0
    for owner in ([0, 1, 0, 1, 0, 1], [0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 0, 2]):
        found = split(ranks, 3, chebconv, data, torch.tensor(owner))
        assert_equal(found, whole(chebconv, data))
    data.edge_weight[largest] = 18.0  # it matters
    assert worst(found, whole(chebconv, data)) > 1e-3


@pytest.mark.parametrize("build", [median, lstm])
@pytest.mark.parametrize(
    "owner", [[0, 0, 0, 1, 1, 1], [1, 0, 0, 0, 0, 0], [0, 1, 1, 1, 1, 1], [1, 0, 1, 0, 1, 0]]
)
def test_an_aggregation_whose_first_rows_have_no_in_edge(
    ranks: Callable[..., list], build: Callable[[], nn.Module], owner: list[int]
) -> None:
    # Vertex 0 has an in-edge (plain PyG's median fails without), 1 and 3 have none.
    data = edges((5, 0), (1, 2), (3, 2), (3, 4), (4, 4), (0, 5), (2, 5), nodes=6)
    assert_equal(split(ranks, 2, build, data, torch.tensor(owner)), whole(build, data))


@pytest.mark.parametrize("attention", ["multihead", "performer"])
def test_attention_to_all_vertices_with_a_rank_that_has_none(
    ranks: Callable[..., list], attention: str
) -> None:
    data, build = sample_graph(1), partial(gps, attention)
    owner = random_owner(30, 2) * 2
    assert_equal(split(ranks, 3, build, data, owner, epochs=2), whole(build, data, epochs=2))


@pytest.mark.parametrize(
    "build",
    [
        lambda: pyg.WLConv(),
        lambda: pyg.HypergraphConv(6, 4),
        lambda: pyg.HeteroConv({("a", "to", "a"): pyg.SAGEConv(6, 4)}),
        lambda: pyg.HANConv(6, 4, (["a"], [("a", "to", "a")])),
        lambda: pyg.HGTConv(6, 4, (["a"], [("a", "to", "a")])),
    ],
    ids=["WLConv", "HypergraphConv", "HeteroConv", "HANConv", "HGTConv"],
)
def test_what_no_split_makes_exact_is_refused_before_it_runs(build: Callable[[], nn.Module]) -> None:
    model = nn.ModuleDict({"first": pyg.GCNConv(6, 4), "second": build()})
    before = snapshot(model)
    with pytest.raises(ModelError) as caught:
        apply_rules(model, scope_of(sample_graph(1), ThreadChannel(ThreadGroup(2), 0)))
    assert caught.value.where == "second"
    assert snapshot(model) == before


# Once ------------------------------------------------------------------------------------------------


class ThreeGCN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(pyg.GCNConv(6, 6) for _ in range(3))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for conv in self.convs:
            x = conv(x, edge_index)
        return x


def exchanges(channel: Channel, build: Callable[[], nn.Module], epochs: int) -> list[int]:
    """Collectives of each forward pass."""
    with double_precision():
        counts = []
        with parallelize(seeded(build, 0), part_of(sample_graph(1), channel), channel, PartOptions()) as net:
            for epoch in range(epochs):
                out = net.forward(epoch, training=True, checked=True)
                (out.sum() + net.scope.forward.forward_pass.token).backward()
                counts.append(net.scope.forward.forward_pass.collectives)
        return counts


def test_degrees_are_fetched_in_the_first_epoch_only(ranks: Callable[..., list]) -> None:
    for counts in ranks(2, exchanges, ThreeGCN, 3):
        first, *later = counts
        assert later == [2, 2]  # a read of rows a layer, but for the first: its neighbours' sum is kept
        assert 3 < first <= 2 * 3


# Nothing left behind ---------------------------------------------------------------------------------


def part_of(data: Data, channel: Exchange) -> Partition:
    return extract(data, random_owner(30, channel.size), channel.rank, channel.size)


def scope_of(data: Data, channel: Exchange) -> Interceptor:
    return Interceptor(part_of(data, channel), channel, handlers=HANDLERS)


OWN_CACHES = {"_use_segment_matmul_heuristic_output"}
"""What PyG's layers set on themselves when they first run."""


def snapshot(model: nn.Module) -> dict[str, object]:
    """Names of instance attributes, and numbers of hooks, of every module."""
    hooks = (
        "_forward_pre_hooks",
        "_forward_hooks",
        "_forward_hooks_with_kwargs",
        "_forward_hooks_always_called",
    )
    return {
        name: (
            set(vars(module)) - OWN_CACHES,
            [len(getattr(module, hook)) for hook in hooks],
            module.training,
        )
        for name, module in model.named_modules()
    }


def run_and_take_off(channel: Channel, case: ConvCase) -> str:
    """Run a case on a part, take everything off, run it whole: what differs from a model never touched."""
    with double_precision():
        data = sample_graph(seed=1, groups_of_four=case.needs_groups_of_four)
        model = seeded(case_build(case), 0).train()  # layers of a class may share one default activation
        untouched = copy.deepcopy(model)
        names = list(inspect.signature(model.forward).parameters)
        before, weights = snapshot(model), copy.deepcopy(model.state_dict())
        with (
            parallelize(model, part_of(data, channel), channel, PartOptions()) as net,
            net.running(1, training=True, checked=True) as forward_pass,
            torch.no_grad(),
        ):
            model.eval()
            forward_pass.grad = False
            model(**{name: net.scope.inputs[name] for name in names})
        after = snapshot(model.train())
        if after != before:
            return str([(name, before[name], after[name]) for name in before if before[name] != after[name]])
        for name, value in model.state_dict().items():
            if not torch.equal(value, weights[name]):
                return f"{name} differs"
        inputs = {name: data[name] for name in names}
        outs = [m.eval()(**inputs).detach() for m in (model, untouched)]
        return "" if torch.equal(*outs) else "the output on the whole graph differs"


def cases_left_behind(channel: Channel, names: list[tuple[str, str]]) -> dict[tuple[str, str], str]:
    return {
        (case.name, case.variant): run_and_take_off(channel, case)
        for case in BUILDABLE
        if (case.name, case.variant) in names
    }


def test_taking_kagome_off_leaves_every_layer_as_it_was(ranks: Callable[..., list]) -> None:
    names = [(case.name, case.variant) for case in BUILDABLE]
    for answers in ranks(2, cases_left_behind, names):
        assert len(answers) == len(BUILDABLE)
        assert {name: text for name, text in answers.items() if text} == {}


def test_what_a_user_had_put_on_a_layer_comes_back() -> None:
    model = gcn_of_two()
    own = model.first.forward
    model.first.__dict__["forward"] = own
    remove = apply_rules(model, scope_of(sample_graph(1), alone()))
    assert vars(model.first)["forward"] is not own
    remove()
    assert vars(model.first)["forward"] is own
    assert "forward" not in vars(model.second)


def gcn_of_two() -> nn.Module:
    model = nn.Module()
    model.first, model.second = pyg.GCNConv(6, 4), pyg.GCNConv(4, 4)
    return model


@pytest.mark.parametrize("attribute", ["_cached_edge_index", "_cached_adj_t"])
def test_a_cache_of_another_graph_is_dropped_at_both_ends(attribute: str) -> None:
    data = sample_graph(1)
    conv = pyg.GCNConv(6, 4, cached=True).double()
    conv(data.x[:10], torch.tensor([[0, 1], [1, 2]]))
    assert conv._cached_edge_index is not None
    model = One(conv)
    uninstall = install(model, scope_of(data, alone()))
    assert getattr(conv, attribute) is None
    conv._cached_edge_index = (torch.zeros(2, 1), None)
    uninstall()
    assert getattr(conv, attribute) is None
