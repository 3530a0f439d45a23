"""Model zoo: ready models by name, from PyG's own classes or as small stacks of PyG's layers.

Where it sits: ``cli`` names a model here, and the trainer trains it exactly as it trains a user's own.
"""

from __future__ import annotations

import difflib
import inspect
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

import torch_geometric.nn as pyg
from torch import Tensor, nn

from kagome.config import Model
from kagome.config.named_module import named_module
from kagome.errors import ModelError
from kagome.launch.host_memory import available_bytes

MODULE_BYTES = 20_000
"""Bytes of a layer's module objects, apart from its weights."""
_PYTHON = "python:"
_HOW_PYTHON = "python:package.module:function"


def build_model(
    settings: Model,
    *,
    in_channels: int,
    out_channels: int,
    num_nodes: int,
    degree_histogram: Tensor | None = None,
    metadata: tuple[list[str], list[tuple[str, str, str]]] | None = None,
) -> nn.Module:
    """Build a model by its name.

    Args:
        settings: Name, layers, hidden width, dropout and heads.
        in_channels: Columns of the features.
        out_channels: Number of classes, or columns of the output.
        num_nodes: Vertices of the whole graph; passed only to ``python:`` models that ask for it.
        degree_histogram: How many vertices of the whole graph have 0, 1, 2, ... incoming edges; ``pna`` needs
            it.
        metadata: The vertex types and edge types of a graph with several; passed only to ``python:`` models
            that ask for it.

    Returns:
        The model, on the CPU, with weights drawn from torch's generator in its present state. Its ``forward``
        takes ``(x, edge_index)``, and ``edge_weight`` where the layers can use one.

    Shapes:
        degree_histogram: [largest degree + 1], integers.
        forward: x [N, in_channels], edge_index [2, E], edge_weight [E] -> [N, out_channels].

    Raises:
        ModelError: If the name is unknown, a setting is out of range, the heads do not divide the hidden
            width, or a ``python:`` model cannot be found or called, or is not a module.
    """
    _check_ranges(settings)
    if settings.name.startswith(_PYTHON):
        offered = {"in_channels": in_channels, "out_channels": out_channels, "num_nodes": num_nodes}
        return _build_python(settings, offered if metadata is None else {**offered, "metadata": metadata})
    builders = _builders(degree_histogram)
    if settings.name not in builders:
        near = difflib.get_close_matches(settings.name, builders, n=1, cutoff=0.5)
        raise ModelError(
            f"model.name to be one of {', '.join(builders)} or {_HOW_PYTHON}",
            f"{settings.name!r}",
            hint=f"--model.name {near[0]}"
            if near
            else f"for a model of your own, --model.name {_HOW_PYTHON}",
        )
    return builders[settings.name](settings, in_channels, out_channels)


def _check_ranges(settings: Model) -> None:
    for name in ("layers", "hidden", "heads"):
        if getattr(settings, name) < 1:
            raise ModelError(f"model.{name} to be 1 or more", f"{getattr(settings, name)}")
    _refuse_weights_beyond_memory(settings)
    if not 0 <= settings.dropout < 1:
        raise ModelError("model.dropout to be 0 or more and below 1", f"{settings.dropout}")


def _refuse_weights_beyond_memory(settings: Model) -> None:
    """Raise ``ModelError`` if the weights alone would exceed the free memory, before any is allocated."""
    free = available_bytes()
    if settings.name.startswith(_PYTHON) or free is None:
        return
    # Every layer except the first and the last has a square map. The module objects take memory too.
    need = max(settings.layers - 2, 0) * (4 * settings.hidden**2 + MODULE_BYTES) + 4 * settings.hidden
    if need > free:
        raise ModelError(
            f"at least {need / 2**30:,.1f} GiB for the weights of a model of {settings.layers:,} layers of "
            f"width {settings.hidden:,}",
            f"{free / 2**30:,.1f} GiB that are free",
            hint="a smaller --model.layers or --model.hidden",
        )


def _check_heads(settings: Model) -> None:
    if settings.hidden % settings.heads:
        fitting = [n for n in range(1, settings.heads) if settings.hidden % n == 0]
        raise ModelError(
            f"model.heads to divide model.hidden for {settings.name}",
            f"{settings.heads} heads, which leave a rest of {settings.hidden % settings.heads} "
            f"in a width of {settings.hidden}",
            hint=f"--model.heads {fitting[-1]}, "
            f"or --model.hidden {-(-settings.hidden // settings.heads) * settings.heads}",
        )


_Builder = Callable[[Model, int, int], nn.Module]


def _builders(degree_histogram: Tensor | None) -> dict[str, _Builder]:
    def attention(version_two: bool) -> _Builder:
        def build(m: Model, fan_in: int, fan_out: int) -> nn.Module:
            _check_heads(m)
            return _GAT(fan_in, m.hidden, m.layers, fan_out, m.dropout, v2=version_two, heads=m.heads)

        return build

    def pna(m: Model, fan_in: int, fan_out: int) -> nn.Module:
        if degree_histogram is None:
            raise ModelError(
                "a histogram of the degrees of the whole graph, by which the model pna scales",
                "none",
                hint="degree_histogram=torch.bincount(torch.bincount(edge_index[1], minlength=num_nodes))",
            )
        # The paper's aggregators and scalers. ``deg`` is of the whole
        # graph: a part's degrees have another mean.
        return _PNA(
            fan_in,
            m.hidden,
            m.layers,
            fan_out,
            m.dropout,
            aggregators=["mean", "min", "max", "std"],
            scalers=["identity", "amplification", "attenuation"],
            deg=degree_histogram,
        )

    return {
        "gcn": lambda m, i, o: _GCN(i, m.hidden, m.layers, o, m.dropout),
        "sage": lambda m, i, o: _SAGE(i, m.hidden, m.layers, o, m.dropout),
        "gin": lambda m, i, o: _GIN(i, m.hidden, m.layers, o, m.dropout),
        "gat": attention(version_two=False),
        "gatv2": attention(version_two=True),
        "pna": pna,
        "edgecnn": lambda m, i, o: _EdgeCNN(i, m.hidden, m.layers, o, m.dropout),
        "gcn2": _GCN2,
        "appnp": _APPNP,
        "sgc": _SGC,
        "deepgcn": _DeepGCN,
        "resgcn+": _ResGCN,
        "transformer": _Transformer,
    }


def _build_python(settings: Model, sizes: Mapping[str, object]) -> nn.Module:
    module_name, _, function_name = settings.name.removeprefix(_PYTHON).partition(":")
    if not module_name or not function_name:
        raise ModelError(f"a model of your own to be named {_HOW_PYTHON}", f"{settings.name!r}")
    try:
        module = named_module(module_name)
    except ImportError as error:
        raise ModelError(
            f"a module {module_name} for the model {settings.name}",
            f"one that cannot be imported: {error}",
            hint="put the folder that holds it on PYTHONPATH",
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        names = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        near = difflib.get_close_matches(function_name, names, n=1)
        raise ModelError(
            f"a function {function_name} in {module_name} for the model {settings.name}",
            "none" if function is None else f"one of type {type(function).__name__}",
            where=str(getattr(module, "__file__", "")),
            hint=f"--model.name {_PYTHON}{module_name}:{near[0]}" if near else "",
        )
    offered: dict[str, object] = {
        **sizes,
        **{name: getattr(settings, name) for name in ("layers", "hidden", "dropout", "heads")},
    }
    built = function(**_asked_for(function, offered, settings.name))
    if not isinstance(built, nn.Module):
        raise ModelError(
            f"the model {settings.name} to return a torch.nn.Module",
            f"a value of type {type(built).__name__}",
        )
    return built


def _asked_for(function: Callable[..., object], offered: dict[str, object], name: str) -> dict[str, object]:
    # A user's function gets the settings that it names, and all of them if it takes ``**kwargs``.
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        chosen = offered
    else:
        chosen = {p.name: offered[p.name] for p in parameters if p.name in offered}
    unknown = [
        p.name
        for p in parameters
        if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
        and p.default is p.empty
        and (p.name not in chosen or p.kind is p.POSITIONAL_ONLY)
    ]
    if unknown:
        raise ModelError(
            f"the model {name} to be called by keyword with any of {', '.join(offered)}",
            f"one that also asks for {', '.join(unknown)}",
            hint="give those a default, or set them inside the function",
        )
    return chosen


class _FeaturesOnly(nn.Module):
    """Takes features and edges only: PyG's classes also name ``edge_attr`` but are built without it."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        # The class after this one in the order of resolution: PyG's model.
        out: Tensor = super().forward(x, edge_index)
        return out


class _GCN(pyg.models.GCN):  # type: ignore[misc]
    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None) -> Tensor:
        out: Tensor = super().forward(x, edge_index, edge_weight)
        return out


class _SAGE(_FeaturesOnly, pyg.models.GraphSAGE):  # type: ignore[misc]
    pass


class _GIN(_FeaturesOnly, pyg.models.GIN):  # type: ignore[misc]
    pass


class _GAT(_FeaturesOnly, pyg.models.GAT):  # type: ignore[misc]
    pass


class _PNA(_FeaturesOnly, pyg.models.PNA):  # type: ignore[misc]
    pass


class _EdgeCNN(_FeaturesOnly, pyg.models.EdgeCNN):  # type: ignore[misc]
    pass


class _GCN2(nn.Module):
    """GCNII: each layer adds back the first one's rows.

    Source: Chen et al., Simple and Deep Graph Convolutional Networks, ICML 2020.
    """

    def __init__(self, m: Model, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.first = nn.Linear(in_channels, m.hidden)
        self.convs = nn.ModuleList(
            # The paper's settings for Cora. Layer i has beta = log(theta / i + 1): deep layers map less.
            pyg.GCN2Conv(m.hidden, alpha=0.1, theta=0.5, layer=i, shared_weights=True, normalize=True)
            for i in range(1, m.layers + 1)
        )
        self.last = nn.Linear(m.hidden, out_channels)
        self.dropout = nn.Dropout(m.dropout)

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None) -> Tensor:
        x = x_0 = self.first(self.dropout(x)).relu()
        for conv in self.convs:
            x = conv(self.dropout(x), x_0, edge_index, edge_weight).relu()
        out: Tensor = self.last(self.dropout(x))
        return out


class _APPNP(nn.Module):
    """Transform first, then ten steps of personalised PageRank; ``layers`` counts the transforms.

    Source: Gasteiger et al., Predict then Propagate, ICLR 2019.
    """

    def __init__(self, m: Model, in_channels: int, out_channels: int) -> None:
        super().__init__()
        widths = [in_channels, *[m.hidden] * (m.layers - 1), out_channels]
        steps: list[nn.Module] = []
        for fan_in, fan_out in itertools.pairwise(widths):
            steps += [nn.Dropout(m.dropout), nn.Linear(fan_in, fan_out), nn.ReLU()]
        # Without the ReLU behind the last map, whose output are the scores.
        self.transform = nn.Sequential(*steps[:-1])
        self.propagation = pyg.APPNP(K=10, alpha=0.1)

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None) -> Tensor:
        out: Tensor = self.propagation(self.transform(x), edge_index, edge_weight)
        return out


class _SGC(nn.Module):
    """Propagate ``layers`` times with nothing in between, then a linear map of inner width ``hidden``.

    Source: Wu et al., Simplifying Graph Convolutional Networks, ICML 2019.
    """

    def __init__(self, m: Model, in_channels: int, out_channels: int) -> None:
        super().__init__()
        # Never cached: evaluation may run on another graph than training.
        self.conv = pyg.SGConv(in_channels, m.hidden, K=m.layers, cached=False)
        self.dropout = nn.Dropout(m.dropout)
        self.last = nn.Linear(m.hidden, out_channels)

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None) -> Tensor:
        out: Tensor = self.last(self.dropout(self.conv(x, edge_index, edge_weight)))
        return out


class _PreActivation(nn.Module, ABC):
    """Linear in, residual blocks LayerNorm -> ReLU -> Dropout -> conv, the same activation, linear out."""

    def __init__(self, m: Model, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.first = nn.Linear(in_channels, m.hidden)
        # PyG's 'res+' block is x + conv(act(norm(x))). Dropout rides in ``act``, as a module: the block's own
        # is a function call, and torch.fx would freeze the mode it was traced in.
        self.blocks = nn.ModuleList(
            pyg.DeepGCNLayer(
                self.make_conv(m.hidden),
                nn.LayerNorm(m.hidden),
                nn.Sequential(nn.ReLU(), nn.Dropout(m.dropout)),
                block="res+",
            )
            for _ in range(m.layers)
        )
        self.last = nn.Sequential(
            nn.LayerNorm(m.hidden), nn.ReLU(), nn.Dropout(m.dropout), nn.Linear(m.hidden, out_channels)
        )

    @abstractmethod
    def make_conv(self, hidden: int) -> nn.Module:
        """Return the layer inside each block; every model of this kind has its own."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x, edge_index)
        out: Tensor = self.last(x)
        return out


class _DeepGCN(_PreActivation):
    """DeeperGCN: GENConv with a learned softmax.

    Source: Li et al., DeeperGCN: All You Need to Train Deeper GCNs, 2020.
    """

    def make_conv(self, hidden: int) -> nn.Module:
        conv: nn.Module = pyg.GENConv(
            hidden, hidden, aggr="softmax", learn_t=True, num_layers=2, norm="layer"
        )
        return conv


class _ResGCN(_PreActivation):
    """ResGCN+: the same block around a mean of neighbours.

    Source: Chen et al., GNNPipe: Scaling Deep GNN Training with Pipelined Model Parallelism, 2023.
    """

    def make_conv(self, hidden: int) -> nn.Module:
        conv: nn.Module = pyg.SAGEConv(hidden, hidden, aggr="mean")
        return conv


class _Transformer(nn.Module):
    """Attention between neighbours with a gated shortcut; the last layer takes the mean of its heads.

    Source: Shi et al., Masked Label Prediction (UniMP), IJCAI 2021.
    """

    def __init__(self, m: Model, in_channels: int, out_channels: int) -> None:
        super().__init__()
        _check_heads(m)
        self.convs, self.norms = nn.ModuleList(), nn.ModuleList()
        for i in range(m.layers):
            # Inner layers join their heads to ``hidden`` columns; the last one has a column for each class in
            # every head, and takes their mean.
            final = i == m.layers - 1
            self.convs.append(
                pyg.TransformerConv(
                    in_channels if i == 0 else m.hidden,
                    out_channels if final else m.hidden // m.heads,
                    heads=m.heads,
                    concat=not final,
                    beta=True,
                    dropout=m.dropout,
                )
            )
            self.norms.append(nn.Identity() if final else nn.LayerNorm(m.hidden))
        self.dropout = nn.Dropout(m.dropout)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        # Not strict: the last layer's Identity is not called.
        for conv, norm in zip(self.convs[:-1], self.norms, strict=False):
            x = self.dropout(norm(conv(x, edge_index)).relu())
        out: Tensor = self.convs[-1](x, edge_index)
        return out
