"""Every aggregation of PyG, along edges and as a readout, and every norm: exact, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch_geometric.nn import aggr
from torch_geometric.nn.resolver import aggregation_resolver

from by_hand import GROUPS, Body, ByHand, compared
from convolutions import sample_graph
from kagome.errors import CheckError, ModelError
from parity import assert_equal, split, whole

DEGREES = torch.tensor([2, 3, 5, 8, 6, 3, 2, 1])
SCALERS = ["identity", "amplification", "attenuation", "linear", "inverse_linear"]


def mlp(fan_out: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, fan_out))


SUMS: dict[str, Callable[[], Any]] = {
    **{name: lambda name=name: name for name in ("sum", "mean", "max", "min", "var", "std")},
    "softmax": lambda: aggr.SoftmaxAggregation(learn=True),
    "softmax of each channel": lambda: aggr.SoftmaxAggregation(learn=True, channels=8),
    "power mean": lambda: aggr.PowerMeanAggregation(p=3.0),
    "several": lambda: aggr.MultiAggregation(["mean", "max", "std"]),
    "several, by attention": lambda: aggr.MultiAggregation(
        ["mean", "max"], mode="attn", mode_kwargs={"in_channels": 8, "out_channels": 8, "num_heads": 2}
    ),
    "scaled by degree": lambda: aggr.DegreeScalerAggregation(
        ["mean", "std"], SCALERS, DEGREES, train_norm=True
    ),
    "attention": lambda: aggr.AttentionalAggregation(mlp(1), mlp()),
    "deep sets": lambda: aggr.DeepSetsAggregation(mlp(), mlp()),
    "variance preserving": aggr.VariancePreservingAggregation,
    "set2set": lambda: aggr.Set2Set(8, 2),
}
"""Made of sums and extremes: along edges, and over all vertices."""

IN_ONE_PLACE: dict[str, Callable[[], Any]] = {
    "median": aggr.MedianAggregation,
    "quantiles": lambda: aggr.QuantileAggregation([0.25, 0.8]),
    "LSTM": lambda: aggr.LSTMAggregation(8, 8),
    "GRU": lambda: aggr.GRUAggregation(8, 8),
    "sort": lambda: aggr.SortAggregation(3),
    "multiset transformer": lambda: aggr.GraphMultisetTransformer(8, 2, heads=2),
    "set transformer": lambda: aggr.SetTransformerAggregation(8, heads=2),
    "MLP": lambda: aggr.MLPAggregation(8, 8, 9, num_layers=1),
    "LCM": lambda: aggr.LCMAggregation(8, 8),
    "patch transformer": lambda: aggr.PatchTransformerAggregation(8, 8, 3, 8),
}
"""Along edges only: as a readout they want all vertices in one place."""


class Neighbours(pyg.MessagePassing):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index[:, edge_index[1].argsort(stable=True)], x=x)


def along_edges(build: Callable[[], Any]) -> nn.Module:
    width = width_of(build)
    return ByHand(
        lambda m, x, e, d: m.out(m.conv(x, e)),
        conv=lambda: Neighbours(aggr=build()),
        out=lambda: nn.Linear(width, 8),
    )


def readout(build: Callable[[], Any], index: str) -> nn.Module:
    def body(m: nn.Module, x: Tensor, e: Tensor, d: Any) -> Tensor:
        if index == "no index":
            return x + m.pool(x).mean(-1, keepdim=True)
        group = d.group if index == "groups" else e.new_zeros(x.size(0))
        pooled = m.pool(x, group, dim_size=GROUPS)
        return x + pooled.mean(-1, keepdim=True)[group]

    return ByHand(body, pool=lambda: aggregation_resolver(build()))


def width_of(build: Callable[[], Any]) -> int:
    made = Neighbours(aggr=build())
    ends = torch.tensor([[0, 1, 1], [0, 0, 1]])
    return made.double()(torch.rand(2, 8, dtype=torch.float64), ends).size(-1)


@pytest.mark.some(14)
@pytest.mark.parametrize("name", [*SUMS, "mul", *IN_ONE_PLACE])
def test_an_aggregation_of_neighbours_is_exact(name: str) -> None:
    build = {**SUMS, "mul": lambda: "mul", **IN_ONE_PLACE}[name]
    result = compared(lambda: along_edges(build))
    assert result.first is None, result.first
    assert result.worst < 1e-10


@pytest.mark.some(24)
@pytest.mark.parametrize("index", ["no index", "one graph", "groups"])
@pytest.mark.parametrize("name", SUMS)
def test_a_readout_of_all_vertices_is_exact(name: str, index: str) -> None:
    result = compared(lambda: readout(SUMS[name], index))
    assert result.first is None, result.first
    assert result.worst < 1e-10


@pytest.mark.parametrize("index", ["no index", "one graph"])
@pytest.mark.parametrize("name", IN_ONE_PLACE)
def test_a_readout_that_wants_all_vertices_in_one_place_is_refused(name: str, index: str) -> None:
    with pytest.raises(ModelError, match="several ranks") as caught:
        compared(lambda: readout(IN_ONE_PLACE[name], index))
    assert caught.value.where.startswith("pool")


@pytest.mark.parametrize("name", ["global_add_pool", "global_mean_pool", "global_max_pool"])
@pytest.mark.parametrize("batch", [False, True])
def test_a_global_pool_is_exact(name: str, batch: bool) -> None:
    def body(m: nn.Module, x: Tensor, e: Tensor, d: Any) -> Tensor:
        zeros = torch.zeros(x.size(0), dtype=torch.long) if batch else None
        return x + m.lin(getattr(pyg, name)(x, zeros))

    result = compared(lambda: ByHand(body, lin=lambda: nn.Linear(8, 8)))
    assert result.first is None, result.first


@pytest.mark.parametrize("by_hand", [False, True])
def test_an_extreme_of_all_edges_is_exact_or_refused(by_hand: bool) -> None:
    def pooled(x: Tensor) -> Tensor:
        return x.max(0).values if by_hand else pyg.global_max_pool(x, None)

    result = compared(lambda: ByHand(lambda m, x, e, d: x + pooled(d.attr).sum()))
    assert result.first is None, result.first
    with pytest.raises(ModelError, match="amax"):
        compared(lambda: ByHand(lambda m, x, e, d: x + pooled(m.lin(d.attr)), lin=lambda: nn.Linear(3, 8)))


def test_a_product_over_all_vertices_is_refused() -> None:
    with pytest.raises(ModelError, match="prod"):
        compared(lambda: readout(lambda: "mul", "one graph"))


def test_an_aggregation_that_optimises_inside_is_exact() -> None:
    """It differentiates in forward, by the sum of all vertices; its own layer insists on float32."""
    found = compared(
        lambda: readout(lambda: aggr.EquilibriumAggregation(8, 8, [4], grad_iter=2), "one graph")
    )
    assert found.first is None, found.first


def test_what_runs_without_gradient_is_exact() -> None:
    compared(lambda: readout(lambda: aggr.SoftmaxAggregation(semi_grad=True), "one graph"))


NORMS: dict[str, Callable[[], nn.Module]] = {
    "BatchNorm1d": lambda: nn.BatchNorm1d(8),
    "cumulative": lambda: nn.BatchNorm1d(8, momentum=None),
    "no buffers": lambda: nn.BatchNorm1d(8, track_running_stats=False),
    "not affine": lambda: nn.BatchNorm1d(8, affine=False),
    "SyncBatchNorm": lambda: nn.SyncBatchNorm(8),
    "LayerNorm": lambda: nn.LayerNorm(8),
    "GroupNorm": lambda: nn.GroupNorm(2, 8),
    "RMSNorm": lambda: nn.RMSNorm(8),
    "InstanceNorm1d": lambda: nn.InstanceNorm1d(8),
    "PyG BatchNorm": lambda: pyg.BatchNorm(8),
    "PyG InstanceNorm": lambda: pyg.InstanceNorm(8, affine=True, track_running_stats=True),
    "PyG LayerNorm": lambda: pyg.LayerNorm(8),
    "PyG LayerNorm of a vertex": lambda: pyg.LayerNorm(8, mode="node"),
    "GraphNorm": lambda: pyg.GraphNorm(8),
    "GraphSizeNorm": pyg.GraphSizeNorm,
    "PairNorm": pyg.PairNorm,
    "MeanSubtractionNorm": pyg.MeanSubtractionNorm,
    "DiffGroupNorm": lambda: pyg.DiffGroupNorm(8, groups=3),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(8, 8)),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(8, 8)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(8, 8)),
}


def on_rows(m: nn.Module, x: Tensor, e: Tensor, d: Any) -> Tensor:
    return m.norm(x)


def on_edges(m: nn.Module, x: Tensor, e: Tensor, d: Any) -> Tensor:
    return torch.zeros_like(x).index_add(0, e[1], m.norm(x[e[0]] * d.weight.view(-1, 1)))


@pytest.mark.some(20)
@pytest.mark.parametrize("body", [on_rows, on_edges])
@pytest.mark.parametrize("name", [name for name in NORMS if name != "GraphSizeNorm"])
def test_a_norm_is_exact(name: str, body: Body) -> None:
    result = compared(lambda: ByHand(body, norm=NORMS[name]))
    assert result.first is None, result.first
    assert result.worst < 1e-10


@pytest.mark.parametrize(
    "body", [lambda m, x, e, d: m.norm(x, d.group), lambda m, x, e, d: m.norm(x, e.new_zeros(x.size(0)))]
)
@pytest.mark.parametrize(
    "name",
    ["GraphNorm", "GraphSizeNorm", "PairNorm", "MeanSubtractionNorm", "PyG InstanceNorm", "PyG LayerNorm"],
)
def test_a_norm_of_groups_is_exact(name: str, body: Body) -> None:
    result = compared(lambda: ByHand(body, norm=NORMS[name]))
    assert result.first is None, result.first


def pooled(m: nn.Module, x: Tensor, e: Tensor, d: Any) -> Tensor:
    return x + m.norm(x.new_zeros(GROUPS, 8).index_add(0, d.group, x))[d.group]


def columns_as_instances(m: nn.Module, x: Tensor, e: Tensor, d: Any) -> Tensor:
    return m.norm(x.t().reshape(4, 2, x.size(0))).reshape(8, x.size(0)).t()


def rows_as_instances(m: nn.Module, x: Tensor, e: Tensor, d: Any) -> Tensor:
    return m.norm(x.view(-1, 2, 4)).view(-1, 8)


def rows_as_channels(m: nn.Module, x: Tensor, e: Tensor, d: Any) -> Tensor:
    return F.batch_norm(x.t(), None, None, training=True).t()


INSTANCE_NORMS = {
    "plain": lambda: nn.InstanceNorm1d(2),
    "affine": lambda: nn.InstanceNorm1d(2, affine=True),
    "tracked": lambda: nn.InstanceNorm1d(2, affine=True, track_running_stats=True),
}
OTHER_NORMS: dict[str, tuple[Body, Callable[[], nn.Module]]] = {
    "rows that all ranks have": (pooled, lambda: nn.BatchNorm1d(8)),
    **{f"columns as instances, {n}": (columns_as_instances, make) for n, make in INSTANCE_NORMS.items()},
    **{f"rows as instances, {n}": (rows_as_instances, make) for n, make in INSTANCE_NORMS.items()},
    "rows as channels": (rows_as_channels, nn.Identity),
}


@pytest.mark.parametrize("name", OTHER_NORMS)
def test_a_norm_of_other_shapes_is_exact(name: str) -> None:
    body, make = OTHER_NORMS[name]
    result = compared(lambda: ByHand(body, norm=make))
    assert result.first is None, result.first


def test_a_norm_of_one_row_that_all_ranks_have_is_refused_as_torch_does() -> None:
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        compared(lambda: ByHand(lambda m, x, e, d: x + m.norm(x.sum(0, True)), norm=NORMS["BatchNorm1d"]))


class NormOfOne(nn.Module):
    """A batch norm of the rows that a mask keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.norm = nn.Linear(6, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        rows = self.lin(x)
        return rows + self.norm(rows[mask]).sum(0)


@pytest.mark.parametrize("kept", [1, 2])
def test_a_norm_of_a_single_row_of_all_ranks_is_refused_as_torch_does(
    ranks: Callable[..., list], kept: int
) -> None:
    data = sample_graph(seed=1)
    data.mask = torch.arange(data.num_nodes) < kept
    owner = torch.arange(data.num_nodes) % 2
    if kept > 1:  # one on each rank
        assert_equal(split(ranks, 2, NormOfOne, data, owner), whole(NormOfOne, data))
        return
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        whole(NormOfOne, data)
    with pytest.raises(ModelError, match="more than one value per channel"):
        split(ranks, 2, NormOfOne, data, owner)


def test_a_product_over_all_vertices_by_hand_is_found() -> None:
    with pytest.raises((CheckError, ModelError)):
        compared(lambda: ByHand(lambda m, x, e, d: x * x.tanh().prod(0))).raise_if_different()
