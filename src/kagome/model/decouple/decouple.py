"""Decouple: turns a model into one with all maps first and all propagation after; depth sends no more.

Where it sits: a model is rewritten so where settings say ``decouple``. The result is another model. Its
single-device reference is the rewritten module itself, run in plain PyG.

::

    coupled      map  hop  relu  map  hop  relu  map  hop        two exchanges a hop
    decoupled    map  relu  map  relu  map  |  hop  hop  hop     two exchanges in all: one each way

To add a layer: write its map (layer, its arguments) -> rows and its operator, and add them to ``RULES``.

Source: NeutronTP, PVLDB 18(2), section 4.1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric import nn as pyg
from torch_geometric.data import Data

from kagome.errors import ModelError
from kagome.model.copies import copied
from kagome.model.decouple.propagation import Attention, Ends, Mean, Relations, Symmetric
from kagome.model.forward_call import ForwardCall


@dataclass(frozen=True)
class Operator:
    """The operator of one hop, as a layer's settings define it.

    Args:
        kind: The class in ``propagation``.
        options: Arguments of the class.
    """

    kind: type[nn.Module]
    options: tuple[Any, ...] = ()

    def build(self) -> nn.Module:
        """Build the module that propagates along edges."""
        return self.kind(*self.options)


@dataclass(frozen=True)
class Rule:
    """How a class of layers is split into a map and an operator.

    Args:
        map: ``(layer, x, *arguments) -> rows``: what the layer does to rows. For a layer with attention it
            also returns the layer's scores at both ends of an edge: ``(rows, ends)``.
        operator: ``(layer) -> Operator``: what the layer does along edges. It refuses settings that cannot be
            split.
    """

    map: Callable[..., Tensor | tuple[Tensor, Ends]]
    operator: Callable[[Any], Operator]


class Hops(NamedTuple):
    """Consecutive hops of one operator.

    Args:
        operator: The operator of these hops.
        ends: For each hop whose layer has attention, its scores at both ends of an edge.
        times: Number of hops.
    """

    operator: Operator
    ends: tuple[Ends, ...]
    times: int = 1


class CallOrder:
    """The layers called in a forward pass, in order; consecutive ones of one operator are merged."""

    def __init__(self) -> None:
        self.hops: list[Hops] = []

    def note(self, operator: Operator, ends: Ends | None) -> None:
        """Record that a layer was called."""
        # Hops of one operator run as one call: their exchange, into feature slices and back, is needed once.
        new = () if ends is None else (ends,)
        if self.hops and self.hops[-1].operator == operator:
            last = self.hops.pop()
            self.hops.append(Hops(operator, (*last.ends, *new), last.times + 1))
        else:
            self.hops.append(Hops(operator, new))


class Map(nn.Module):
    """The part of a layer that maps rows; its forward takes the arguments of the layer's forward.

    Args:
        layer: The layer, whose weights are used.
        rule: How the layer is split.
        operator: The operator of its hop.
        calls: Records each call.
    """

    def __init__(self, layer: nn.Module, rule: Rule, operator: Operator, calls: CallOrder) -> None:
        super().__init__()
        self.layer, self.rule, self.operator, self.calls = layer, rule, operator, calls

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Map the rows and record the call.

        Shapes:
            ``[N, F]`` -> ``[N, G]``.
        """
        found = self.rule.map(self.layer, x, *args, **kwargs)
        rows, ends = found if isinstance(found, tuple) else (found, None)
        self.calls.note(self.operator, ends)
        return rows

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)  # models read widths and the like of layers


class Decoupled(nn.Module):
    """The maps of a model, followed by as many hops as it has layers.

    Args:
        model: The maps: a model whose layers are :class:`Map`.
        calls: The recorder of these maps.
        operators: The module of each operator, in the order of the first forward pass.
    """

    def __init__(self, model: nn.Module, calls: CallOrder, operators: Mapping[Operator, nn.Module]) -> None:
        super().__init__()
        self.model, self.calls = model, calls
        self.order = tuple(operators)
        self.operators = nn.ModuleList(operators.values())

    def forward(self, data: Data) -> Tensor:
        """Run all maps, then all hops, and return the scores.

        Args:
            data: Features, edges and other attributes that the model asks for by name.

        Shapes:
            ``data.x [N, F]``, ``data.edge_index [2, E]`` -> ``[N, C]``.
        """
        # The maps run in each forward and record which hops follow, so a model may call its layers in another
        # order, or with skips, as long as its operators are those of the trial run.
        inputs = {name: data[name] for name in data.keys()}  # noqa: SIM118 - Data is not a dict
        rows, hops, calling = _mapped(self.model, self.calls, inputs)
        weight = inputs.get("edge_weight") if "edge_weight" in calling.named else None
        for operator, ends, count in hops:
            run = self.operators[self.order.index(operator)]
            more: dict[str, Any] = {}
            if isinstance(run, Relations):
                more["edge_type"] = inputs["edge_type"]
            if isinstance(run, Attention):
                more["ends"] = ends
            rows = run(rows, inputs["edge_index"], weight, count, **more)
        return rows

    def text(self) -> str:
        """Return a description of the model for the log."""
        names = " and ".join(type(each).__name__.lower() for each in self.operators)
        return (
            f"all maps of {type(self.model).__name__} come first, then all its hops ({names}). It is another "
            "model than the coupled one, and exact by itself: the same on any number of ranks."
        )


def _mapped(
    model: nn.Module, calls: CallOrder, inputs: Mapping[str, Any]
) -> tuple[Tensor, list[Hops], ForwardCall]:
    """Run a model's maps; return the rows, the hops that follow, and how the model is called."""
    calls.hops = []
    calling = ForwardCall.of(model, set(inputs))
    rows = calling.call(model, inputs)
    hops, calls.hops = calls.hops, []  # releases the tensors of this forward pass
    return rows, hops, calling


def decouple(model: nn.Module, inputs: Mapping[str, Tensor]) -> Decoupled:
    """Split each message-passing layer into a map and a hop, with all maps first. The weights are shared.

    Args:
        model: The user's module; it stays as it is, and shares its weights.
        inputs: Inputs with a few rows and edges, for a trial run.

    Returns:
        The rewritten model; its forward takes one ``Data``.

    Raises:
        ModelError: For a layer that cannot be split, with its name and the reason.
    """
    # The modules are copied and their tensors are not: a step of the optimizer trains both models.
    own = (*model.parameters(), *model.buffers())
    model_copy = copied(model, {id(tensor): tensor for tensor in own})
    calls = CallOrder()
    layers = {path: m for path, m in model_copy.named_modules() if isinstance(m, pyg.MessagePassing)}
    if not layers:
        raise ModelError(
            "a message-passing layer, whose propagation decouple moves behind a model's maps",
            f"a {type(model).__name__} without one",
            hint="leave --parallel.decouple out",
        )
    for path, layer in layers.items():
        rule, operator = _rule_of(path, layer)
        parent, _, name = path.rpartition(".")
        mapped = Map(layer, rule, operator, calls)
        if not path:
            model_copy = mapped  # a model that is one layer
        else:
            setattr(model_copy.get_submodule(parent), name, mapped)
    # A trial run without dropout finds the order of the operators, and the device and type of the rows.
    training = model_copy.training
    model_copy.eval()
    with torch.no_grad():
        rows, hops, _ = _mapped(model_copy, calls, inputs)
    model_copy.train(training)
    built: dict[Operator, nn.Module] = {}
    for operator, _, _ in hops:
        if operator not in built:
            built[operator] = operator.build().to(rows.device, rows.dtype).train(training)
    return Decoupled(model_copy, calls, built)


def _rule_of(path: str, layer: nn.Module) -> tuple[Rule, Operator]:
    where = path or type(layer).__name__
    for kind, rule in RULES.items():
        # A subclass has the same map and hop only if it keeps PyG's methods.
        if isinstance(layer, kind) and all(
            getattr(type(layer), name) is getattr(kind, name) for name in _METHODS
        ):
            try:
                return rule, rule.operator(layer)
            except _CannotError as error:
                raise _refused(where, layer, str(error)) from None
    reason = REASONS.get(type(layer).__name__, "it has no rule that says what its map and its hop are")
    raise _refused(where, layer, reason)


class _CannotError(Exception):
    """A layer has settings that cannot be split."""


def _refused(where: str, layer: nn.Module, reason: str) -> ModelError:
    return ModelError(
        f"one of {', '.join(kind.__name__ for kind in RULES)}, which decouple splits into a map and a hop",
        f"{type(layer).__name__}: {reason}",
        where=where,
        hint="leave --parallel.decouple out: the exact slices take any layer",
    )


# Layers ------------------------------------------------------------------------------------------


_METHODS = ("forward", "message", "aggregate", "update", "edge_update")
_SUMS = ("add", "sum")


def _check_hop(layer: Any, *aggregations: str) -> None:
    """Refuse a layer whose messages run against the edges, or are reduced in another way than its hop's."""
    if layer.flow != "source_to_target":
        raise _CannotError("its messages run against the edges")
    if not isinstance(layer.aggr, str) or layer.aggr not in aggregations:
        raise _CannotError(f"its aggregation is {layer.aggr!r}, and its hop takes a {aggregations[-1]}")


def _gcn(layer: Any, x: Tensor, *_: Any, **__: Any) -> Tensor:
    out: Tensor = layer.lin(x)
    return out if layer.bias is None else out + layer.bias


def _symmetric(layer: Any) -> Operator:
    _check_hop(layer, *_SUMS)
    return Operator(
        Symmetric,
        (
            bool(getattr(layer, "normalize", True)),
            bool(getattr(layer, "add_self_loops", True)),
            bool(getattr(layer, "improved", False)),
        ),
    )


def _gcn2(layer: Any, x: Tensor, first: Tensor, *_: Any, **__: Any) -> Tensor:
    """Return GCN-II's map of ``(1 - alpha) x + alpha x_0``, without the sum over neighbours."""
    # PyG: z = (1 - alpha) A x + alpha x_0, then (1 - beta) z + beta z W. Here A is left out: it comes later.
    mixed, start = (1 - layer.alpha) * x, layer.alpha * first[: x.size(0)]
    if layer.weight2 is None:
        mixed = mixed + start
        return torch.addmm(mixed, mixed, layer.weight1, beta=1.0 - layer.beta, alpha=layer.beta)
    out = torch.addmm(mixed, mixed, layer.weight1, beta=1.0 - layer.beta, alpha=layer.beta)
    return out + torch.addmm(start, start, layer.weight2, beta=1.0 - layer.beta, alpha=layer.beta)


def _sage(layer: Any, x: Tensor, *_: Any, **__: Any) -> Tensor:
    # PyG maps the mean of neighbours by ``lin_l`` and the own row by ``lin_r``. Here both map the own row,
    # and the mean comes after all maps.
    near = layer.lin(x).relu() if layer.project and hasattr(layer, "lin") else x
    out: Tensor = layer.lin_l(near)
    out = out + layer.lin_r(x) if layer.root_weight else out
    return functional.normalize(out, p=2.0, dim=-1) if layer.normalize else out


def _mean(layer: Any) -> Operator:
    _check_hop(layer, "mean")  # only means stay in bounds hop after hop
    return Operator(Mean)


def _gat(layer: Any, x: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Ends]:
    # [N, heads, columns]; the scores of an edge's ends are means over the heads, [N, 1].
    heads: Tensor = layer.lin(x).view(-1, layer.heads, layer.out_channels)
    source, target = (
        (heads * vector).sum(-1).mean(1, keepdim=True) for vector in (layer.att_src, layer.att_dst)
    )
    out = heads.flatten(1) if layer.concat else heads.mean(1)
    if getattr(layer, "res", None) is not None:
        out = out + layer.res(x)
    return out if layer.bias is None else out + layer.bias, (source, target)


def _attention(layer: Any) -> Operator:
    _check_hop(layer, *_SUMS)
    if layer.edge_dim is not None:
        raise _CannotError("its attention reads edge attributes")
    if layer.lin is None:
        raise _CannotError("it has a map for each end")
    return Operator(
        Attention, (float(layer.negative_slope), bool(layer.add_self_loops), float(layer.dropout))
    )


def _rgcn(layer: Any, x: Tensor, *_: Any, **__: Any) -> Tensor:
    weight = layer.weight
    # Weights of the relations as mixtures of bases: [relations, bases] @ [bases, in * out].
    if layer.num_bases is not None:
        weight = (layer.comp @ weight.flatten(1)).view(layer.num_relations, *weight.shape[1:])
    # A map cannot depend on an edge's type: it takes the mean of all relations' weights.
    out: Tensor = x @ weight.mean(0)
    out = out if layer.root is None else out + x @ layer.root
    return out if layer.bias is None else out + layer.bias


def _relations(layer: Any) -> Operator:
    _check_hop(layer, "mean")
    if layer.num_blocks is not None:
        raise _CannotError("its weights are blocks")
    return Operator(Relations, (int(layer.num_relations),))


RULES: Mapping[type[nn.Module], Rule] = {
    pyg.GCNConv: Rule(_gcn, _symmetric),
    pyg.GCN2Conv: Rule(_gcn2, _symmetric),
    pyg.SAGEConv: Rule(_sage, _mean),
    pyg.GATConv: Rule(_gat, _attention),
    pyg.RGCNConv: Rule(_rgcn, _relations),
}
REASONS: Mapping[str, str] = {
    "APPNP": "it is decoupled as it is",
    "SGConv": "it propagates before its only map",
    "GINConv": "its sums grow without bound where no map lies between them",
    "PNAConv": "its messages are maps of both ends",
    "GATv2Conv": "its attention is a map of both ends",
    "TransformerConv": "its attention is a map of both ends",
}
