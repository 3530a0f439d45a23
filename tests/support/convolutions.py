"""Every class that ``torch_geometric.nn.conv`` exports, in the variants that behave differently.

Where it sits: the parity tests and the table ``docs/convolutions.md`` are generated from ``CASES``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch_geometric.nn as pyg
from torch import nn

from convolution_wrappers import (
    C,
    D,
    F,
    Featured,
    First,
    FirstWeighted,
    Heat,
    History,
    HistoryWeighted,
    Oriented,
    Plain,
    Positioned,
    R,
    Signed,
    SortedByTarget,
    SumOfNeighbours,
    Typed,
    TypedFeatured,
    Weighted,
    double_precision,
    mlp,
    sample_graph,
)

__all__ = ["CASES", "ConvCase", "double_precision", "sample_graph"]


@dataclass(frozen=True)
class ConvCase:
    """One class in one variant: built, or with the reason why not.

    Args:
        name: Class name in ``torch_geometric.nn.conv``.
        variant: What is set; ``default`` for nothing.
        build: Makes a module with ``forward(x, edge_index, **those attributes that it names)``.
        refused: Why the class does not train on one homogeneous graph.
        needs: A package that cannot be installed here.
        needs_groups_of_four: Takes ``sample_graph(groups_of_four=True)`` only.
        random: Draws random numbers in training.
    """

    name: str
    variant: str
    build: Callable[[], nn.Module] | None = None
    refused: str | None = None
    needs: str | None = None
    needs_groups_of_four: bool = False
    random: bool = False


@dataclass(frozen=True)
class _New:
    """An argument that each build makes anew: cases must not share weights."""

    make: Callable[[], Any]


def _mlp(*widths: int, norm: bool = False) -> _New:
    return _New(lambda: mlp(*widths, norm=norm))


def _signed(fan_in: int = F, first: bool = True) -> nn.Module:
    return pyg.SignedConv(fan_in, C, first_aggr=first)


def _fresh(value: Any) -> Any:
    return value.make() if isinstance(value, _New) else value


def _family(name: str, wrap: type[Plain], common: tuple[Any, ...], **variants: Any) -> Iterator[ConvCase]:
    """Cases of one class, a keyword each: keyword arguments of the class, or (wrapper, keyword arguments)."""
    for variant, said in variants.items():
        wrapper, options = said if isinstance(said, tuple) else (wrap, said)

        def build(wrapper: type[Plain] = wrapper, options: dict[str, Any] = options) -> nn.Module:
            keywords = {key: _fresh(value) for key, value in options.items()}
            # Not pyg.NAME: conv has aliases (ECConv, PointConv) that torch_geometric.nn does not export.
            return wrapper(getattr(pyg.conv, name)(*map(_fresh, common), **keywords))

        yield ConvCase(name, variant.replace("_", " "), build, random=variant == "dropout")


T2S = {"flow": "target_to_source"}
AGGREGATORS = ["mean", "min", "max", "std", "var", "sum"]
SCALERS = ["identity", "amplification", "attenuation", "linear", "inverse_linear"]
NO_LOOPS, CACHED = {"add_self_loops": False}, {"cached": True}
EDGE = {"edge_dim": D}
DEGREES = _New(lambda: torch.tensor([2, 3, 5, 8, 6, 3, 2, 1]))
ONE_GRAPH = "takes several vertex and edge types as dicts, of a `HeteroData`"
CUGRAPH = "pylibcugraphops (CUDA only)"

_SPECTRAL = [
    *_family(
        "GCNConv", Plain, (F, C), default={}, improved={"improved": True}, cached=CACHED,
        no_self_loops=NO_LOOPS, target_to_source=T2S, edge_weight=(Weighted, {}),
        edge_weight_target_to_source=(Weighted, T2S), edge_weight_cached=(Weighted, CACHED),
        not_normalized=(Weighted, {"normalize": False, "add_self_loops": False}),
    ),
    *_family(
        "ChebConv", Plain, (F, C, 3), sym={}, rw={"normalization": "rw"},
        no_normalization={"normalization": None}, edge_weight=(Weighted, {}),
        edge_weight_no_normalization=(Weighted, {"normalization": None}), target_to_source=T2S,
    ),
    *_family(
        "TAGConv", Plain, (F, C), default={}, not_normalized={"normalize": False}, edge_weight=(Weighted, {}),
    ),
    *_family(
        "ARMAConv", Plain, (F, C), default={}, stacks={"num_stacks": 2, "num_layers": 2},
        edge_weight=(Weighted, {}), shared={"num_stacks": 2, "num_layers": 3, "shared_weights": True},
        dropout={"num_stacks": 2, "num_layers": 2, "dropout": 0.3},
    ),
    *_family(
        "SGConv", Plain, (F, C), default={"K": 2}, cached={"K": 2, **CACHED},
        edge_weight=(Weighted, {"K": 2}), no_self_loops={"K": 2, **NO_LOOPS},
    ),
    *_family(
        "SSGConv", Plain, (F, C), default={"alpha": 0.1, "K": 2}, cached={"alpha": 0.1, "K": 2, **CACHED},
        edge_weight=(Weighted, {"alpha": 0.1, "K": 2}),
    ),
    *_family(
        "APPNP", Plain, (3, 0.1), default={}, cached=CACHED, edge_weight=(Weighted, {}),
        dropout={"dropout": 0.3}, not_normalized=(Weighted, {"normalize": False}),
    ),
    # No variant without self-loops: PyG's own then fails unless each vertex brings exactly one.
    *_family(
        "ClusterGCNConv", Plain, (F, C), default={}, diag_lambda={"diag_lambda": 0.5}, target_to_source=T2S,
    ),
    *_family(
        "LGConv", Plain, (), default={}, not_normalized={"normalize": False}, edge_weight=(Weighted, {}),
    ),
    *_family(
        "MixHopConv", Plain, (F, C), default={}, powers={"powers": [0, 2, 3]}, edge_weight=(Weighted, {}),
    ),
    *_family(
        "GCN2Conv", First, (F, 0.1), default={"theta": 0.5, "layer": 1}, no_theta={}, cached=CACHED,
        two_weights={"theta": 0.5, "layer": 2, "shared_weights": False}, edge_weight=(FirstWeighted, {}),
        not_normalized=(FirstWeighted, {"normalize": False}),
    ),
    *_family(
        "FAConv", First, (F,), default={}, cached=CACHED,
        not_normalized=(FirstWeighted, {"normalize": False}), dropout={"dropout": 0.3},
    ),
    *_family(
        "EGConv", Plain, (F, 8), symnorm={"num_heads": 4}, symnorm_cached={"num_heads": 4, **CACHED},
        sum_mean_max={"num_heads": 4, "aggregators": ["sum", "mean", "max"]},
        all_aggregators={"num_heads": 2, "aggregators": ["symnorm", *AGGREGATORS]},
    ),
    *_family(
        "PDNConv", Featured, (F, C, D, 5), default={}, no_self_loops=NO_LOOPS,
        not_normalized={"normalize": False},
    ),
    *_family("LEConv", Plain, (F, C), default={}, edge_weight=(Weighted, {}), target_to_source=T2S),
    *_family("WLConvContinuous", Plain, (), default={}, edge_weight=(Weighted, {})),
    *_family(
        "AntiSymmetricConv", Plain, (F,), default={}, iterations={"num_iters": 3}, edge_weight=(Weighted, {}),
        sage={"phi": _New(lambda: pyg.SAGEConv(F, F))},
    ),
]  # fmt: skip

_SUMS = [
    ConvCase("MessagePassing", "own subclass, sum", lambda: SumOfNeighbours(aggr="sum")),
    ConvCase("MessagePassing", "own subclass, max", lambda: SumOfNeighbours(aggr="max")),
    *_family(
        "SimpleConv", Plain, (), default={}, edge_weight=(Weighted, {}),
        mean_self_loop={"aggr": "mean", "combine_root": "self_loop"},
        max_cat={"aggr": "max", "combine_root": "cat"}, combine_sum={"combine_root": "sum"},
        target_to_source=T2S,
    ),
    *_family(
        "SAGEConv", Plain, (F, C), mean={}, max={"aggr": "max"}, lstm=(SortedByTarget, {"aggr": "lstm"}),
        median={"aggr": "median"}, several_aggregations={"aggr": ["mean", "max", "std"]},
        softmax={"aggr": "softmax"}, project={"project": True}, normalize={"normalize": True},
        no_root={"root_weight": False}, target_to_source=T2S,
    ),
    *_family(
        "GraphConv", Plain, (F, C), default={}, edge_weight=(Weighted, {}), max={"aggr": "max"},
        mean={"aggr": "mean"}, edge_weight_max=(Weighted, {"aggr": "max"}), target_to_source=T2S,
    ),
    *_family("GatedGraphConv", Plain, (8, 3), default={}, edge_weight=(Weighted, {}), max={"aggr": "max"}),
    *_family(
        "GINConv", Plain, (), default={"nn": _mlp(F, 8, C)},
        train_eps={"nn": _mlp(F, 8, C), "train_eps": True}, batch_norm={"nn": _mlp(F, 8, C, norm=True)},
    ),
    *_family(
        "GINEConv", Featured, (_mlp(F, 8, C),), edge_dim={"edge_dim": D},
        train_eps={**EDGE, "train_eps": True},
    ),
    *_family("MFConv", Plain, (F, C), default={}, max_degree={"max_degree": 3}),
    *_family(
        "GENConv", Plain, (F, C), softmax={}, learn_t={"learn_t": True},
        powermean={"aggr": "powermean", "learn_p": True},
        msg_norm={"msg_norm": True, "learn_msg_scale": True}, mean={"aggr": "mean"},
        layer_norm={"norm": "layer"}, edge_attr=(Featured, EDGE),
    ),
    *_family(
        "PNAConv", Plain, (F, 8, AGGREGATORS, SCALERS, DEGREES), default={},
        towers={"towers": 2, "divide_input": True}, edge_attr=(Featured, EDGE),
        train_norm={"train_norm": True},
    ),
    *_family(
        "EdgeConv", Plain, (), default={"nn": _mlp(2 * F, 8, C)}, mean={"nn": _mlp(2 * F, C), "aggr": "mean"},
        batch_norm={"nn": _mlp(2 * F, 8, C, norm=True)},
    ),
    *_family(
        "CGConv", Plain, (F,), default={}, edge_attr=(Featured, {"dim": D}), batch_norm={"batch_norm": True},
        mean={"aggr": "mean"},
    ),
    *_family(
        "NNConv", Featured, (F, C, _mlp(D, 5, F * C)), default={}, max={"aggr": "max"},
        no_root={"root_weight": False},
    ),
    *_family("ECConv", Featured, (F, C, _mlp(D, 5, F * C)), default={}),
    *_family(
        "GMMConv", Featured, (F, C), default={"dim": D, "kernel_size": 3},
        separate={"dim": D, "kernel_size": 3, "separate_gaussians": True},
    ),
    ConvCase(
        "MeshCNNConv", "default", lambda: Plain(pyg.conv.MeshCNNConv(F, C)), needs_groups_of_four=True
    ),
    *_family("ResGatedGraphConv", Plain, (F, C), default={}, edge_attr=(Featured, EDGE)),
    *_family("FiLMConv", Plain, (F, C), default={}, relations=(Typed, {"num_relations": R})),
    *_family(
        "FeaStConv", Plain, (F, C), default={}, heads={"heads": 3}, no_self_loops={"heads": 2, **NO_LOOPS},
    ),
    ConvCase("SignedConv", "first", lambda: Signed(_signed())),
    ConvCase("SignedConv", "two layers", lambda: Signed(_signed(), _signed(C, first=False))),
    *_family(
        "DirGNNConv", Plain, (), SAGEConv={"conv": _New(lambda: pyg.SAGEConv(F, C))},
        GCNConv={"conv": _New(lambda: pyg.GCNConv(F, C))},
        GATConv={"conv": _New(lambda: pyg.GATConv(F, C)), "root_weight": False},
    ),
]  # fmt: skip

_RELATIONS = [
    *(
        case
        for name in ("RGCNConv", "FastRGCNConv")
        for case in _family(
            name, Typed, (F, 6, R), default={}, bases={"num_bases": 2}, blocks={"num_blocks": 3},
            sum={"aggr": "sum"}, no_root={"root_weight": False},
        )
    ),
    *_family(
        "RGATConv", Typed, (F, C, R), across_relation={},
        within_relation={"attention_mechanism": "within-relation"},
        multiplicative={"attention_mode": "multiplicative-self-attention", "heads": 2, "dim": 2},
        bases={"num_bases": 2}, blocks={"num_blocks": 2}, mean_of_heads={"heads": 2, "concat": False},
        edge_attr=(TypedFeatured, EDGE), additive={"mod": "additive"}, scaled={"mod": "scaled"},
        f_additive={"mod": "f-additive"}, f_scaled={"mod": "f-scaled"}, dropout={"dropout": 0.3},
    ),
    *_family(
        "HEATConv", Heat, (F, C, 2, R, 2, D, 2), default={"heads": 2},
        mean_of_heads={"heads": 2, "concat": False}, dropout={"heads": 2, "dropout": 0.3},
    ),
]  # fmt: skip

_ATTENTION = [
    *(
        case
        for name in ("GATConv", "GATv2Conv")
        for case in _family(
            name, Plain, (F, C), default={}, heads={"heads": 2}, mean_of_heads={"heads": 3, "concat": False},
            residual={"heads": 2, "residual": True}, no_self_loops={"heads": 2, **NO_LOOPS},
            target_to_source={"heads": 2, **T2S, **NO_LOOPS}, target_to_source_self_loops={"heads": 2, **T2S},
            edge_attr=(Featured, {"heads": 2, **EDGE}),
            edge_attr_no_self_loops=(Featured, {**EDGE, **NO_LOOPS}),
            edge_attr_fill_add=(Featured, {**EDGE, "fill_value": "add"}),
            dropout={"heads": 2, "dropout": 0.6},
            **{"share_weights": {"heads": 2, "share_weights": True}} if "v2" in name else {},
        )
    ),
    *_family(
        "TransformerConv", Plain, (F, C), default={}, heads={"heads": 2}, beta={"heads": 2, "beta": True},
        mean_of_heads={"heads": 2, "concat": False}, edge_attr=(Featured, {"heads": 2, **EDGE}),
        no_root={"root_weight": False}, dropout={"heads": 2, "dropout": 0.3},
    ),
    *_family("AGNNConv", Plain, (), default={}, fixed={"requires_grad": False}, no_self_loops=NO_LOOPS),
    *_family(
        "SuperGATConv", Plain, (F, C), MX={"heads": 2}, SD={"heads": 2, "attention_type": "SD"},
        mean_of_heads={"heads": 2, "concat": False}, dropout={"heads": 2, "dropout": 0.6},
    ),
    *_family(
        "GeneralConv", Plain, (F, C), default={}, heads={"heads": 2},
        attention={"heads": 2, "attention": True},
        dot_product={"heads": 2, "attention": True, "attention_type": "dot_product"},
        l2_normalize={"l2_normalize": True}, both_ends={"directed_msg": False},
        edge_attr=(Featured, {"in_edge_channels": D}),
    ),
    *_family(
        "DNAConv", History, (F,), default={}, heads={"heads": 2, "groups": 2}, cached=CACHED,
        edge_weight=(HistoryWeighted, {}), dropout={"heads": 2, "dropout": 0.3},
    ),
    *_family(
        "GPSConv", Plain, (F, _New(lambda: pyg.GCNConv(F, F))), batch_norm={"heads": 2},
        layer_norm={"heads": 2, "norm": "layer_norm"}, performer={"heads": 2, "attn_type": "performer"},
        dropout={"heads": 2, "dropout": 0.3},
    ),
]  # fmt: skip

_POINTS = [
    *(
        case
        for name in ("PointNetConv", "PointConv")
        for case in _family(
            name, Positioned, (_mlp(F + D, 8), _mlp(8, C)), default={}, no_self_loops=NO_LOOPS,
        )
    ),
    *_family("PointNetConv", Positioned, (), batch_norm={"local_nn": _mlp(F + D, 8, C, norm=True)}),
    *_family("PPFConv", Oriented, (_mlp(F + 4, 8), _mlp(8, C)), default={}, no_self_loops=NO_LOOPS),
    *_family(
        "PointTransformerConv", Positioned, (F, C), default={}, no_self_loops=NO_LOOPS,
        own_networks={"pos_nn": _mlp(D, 8, C), "attn_nn": _mlp(C, C)},
    ),
    *_family("PointGNNConv", Positioned, (_mlp(F, D), _mlp(D + F, 8), _mlp(8, F)), default={}),
]  # fmt: skip

_NOT_BUILT = [
    ConvCase("GravNetConv", "default", needs="pyg-lib"),
    ConvCase("DynamicEdgeConv", "default", needs="pyg-lib"),
    ConvCase("XConv", "default", needs="pyg-lib"),
    ConvCase("SplineConv", "default", needs="pyg-lib or torch-spline-conv"),
    ConvCase("PANConv", "default", needs="torch-sparse"),
    ConvCase("FusedGATConv", "default", needs="dgNN (CUDA only)"),
    ConvCase("CuGraphSAGEConv", "default", needs=CUGRAPH),
    ConvCase("CuGraphGATConv", "default", needs=CUGRAPH),
    ConvCase("CuGraphRGCNConv", "default", needs=CUGRAPH),
    ConvCase("HGTConv", "default", refused=ONE_GRAPH),
    ConvCase("HANConv", "default", refused=ONE_GRAPH),
    ConvCase("HeteroConv", "default", refused=ONE_GRAPH),
    ConvCase(
        "HypergraphConv", "default", refused="takes vertex-hyperedge incidences, not edges between vertices",
    ),
    ConvCase(
        "WLConv", "default", refused="numbers colours in order of visit: nothing to train or differentiate",
    ),
]  # fmt: skip

CASES: tuple[ConvCase, ...] = (*_SPECTRAL, *_SUMS, *_RELATIONS, *_ATTENTION, *_POINTS, *_NOT_BUILT)


BUILDABLE = [case for case in CASES if case.build is not None]


def splits() -> Iterator[tuple[ConvCase, tuple[int, int]]]:
    """Each class on both numbers of ranks, its variants in turn; one that has no variants on both."""
    worlds = ((2, 2), (3, 1))
    variants = Counter(case.name for case in BUILDABLE)
    for place, case in enumerate(BUILDABLE):
        for number, world in enumerate(worlds):
            if variants[case.name] == 1 or number == place % 2:
                yield case, world
