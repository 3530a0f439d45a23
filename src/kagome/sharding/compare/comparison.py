"""Comparison: a sharded model and a loss of the user's, beside the same model on the whole graph.

Where it sits: ``sharding.check`` is its public face.

::

    rank 0        copy of the model, one rank, whole graph  ──> outputs, loss, gradients ─┐
    all ranks     copy of the model, own rows               ──> outputs, loss, gradients ─┴─> compared there

Both copies run in one number type (float64, as a rule). The user's model, its gradients and its buffers stay
as they are. The whole runs first: if it fails, the split is not to blame.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path
from torch_geometric.data import Data, HeteroData

from kagome.comm.channel import Channel
from kagome.comm.mesh import Mesh
from kagome.components.parallelize import parallelize
from kagome.errors import ConfigError, KagomeError, ModelError
from kagome.graph.partition.partition import Partition, split_all
from kagome.graph.partition.sets_partition import SetsPartition, extract_sets
from kagome.graph.structure.sets import Graph
from kagome.graph.structure.validate import validate
from kagome.sharding.compare.single_rank_collectives import single_rank_collectives
from kagome.sharding.module import ShardedModel
from kagome.sharding.parts import without_edge_labels

Loss = Callable[[Any, Any], Tensor]
"""A loss of a sharded model and its output: ``loss(net, out)``."""


class ComparedModel(ShardedModel):
    """A sharded copy whose targets have the number type of the comparison."""

    dtype: torch.dtype

    def place(self, value: Tensor, rows: str | None = None, *, axis: int = 0) -> Tensor:
        """Return own rows as :meth:`ShardedModel.place` does, in the number type of the comparison."""
        return super().place(_cast(value, self.dtype), rows, axis=axis)


@dataclass
class Measured:
    """What one run of a model and a loss gave.

    Args:
        outputs: The tensors of the output, by their place in it.
        loss: The loss.
        gradients: The gradients of parameters and inputs, by name; without those that nothing reads.
        seconds: Gradients of a weighted sum of the gradients of inputs, by name.
        called: Collectives of ``torch.distributed`` that the user's code called.
    """

    outputs: dict[str, Tensor]
    loss: Tensor
    gradients: dict[str, Tensor]
    seconds: dict[str, Tensor] = field(default_factory=dict)
    called: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Sample:
    """What both sides are given.

    Args:
        args: The arguments of the model; those of whole rows, on all ranks.
        kwargs: The same by name.
        loss: The loss.
        second: Whether second derivatives are taken.
        dtype: The number type.
        step: The number of the forward pass, by which dropout draws.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    loss: Loss
    second: bool
    dtype: torch.dtype
    step: int


def run_split(net: ShardedModel, sample: Sample) -> Measured:
    """Run a copy of the model on this rank's part. All ranks call it."""
    part = _cast_part(net._parallel.scope.given_part, sample.dtype)
    with _sharded(net, part, net._mesh, sample.dtype, None) as own:
        return _measured(own, net, sample)


def run_whole(net: ShardedModel, sample: Sample, tables: Mapping[str, Tensor]) -> Measured:
    """Run a copy of the model on the whole graph, on this rank alone.

    Args:
        net: The sharded model.
        sample: What it is given.
        tables: All rows of its cut tables, by name.

    Raises:
        ModelError: If it fails.
    """
    given = net._given
    if given is None:
        raise ConfigError(
            "a net of kagome.shard(model, data), whose data is the whole graph",
            "one of a folder, whose whole graph is on no rank",
            where="kagome.check(net, ...)",
        )
    part = _cast_part(_whole_part(given), sample.dtype)
    try:
        with (
            _sharded(net, part, _single_rank(net._mesh), sample.dtype, tables) as whole,
            single_rank_collectives() as called,
        ):
            found = _measured(whole, net, sample)
    except KagomeError:
        raise
    except Exception as error:
        raise ModelError(
            "the model and the loss to run on the whole graph, on one rank",
            f"{type(error).__name__}: {error}",
            where="kagome.check(net, ...)",
            hint="give whole inputs, all rows of the graph; dtype=torch.float32 for a layer that needs it; "
            "in the loss, use the net that it is given",
        ) from error
    found.called = called
    return found


# Copies ------------------------------------------------------------------------------------------


def _single_rank(mesh: Mesh) -> Mesh:
    """Return a mesh of this rank alone."""
    channel = Channel(None, mesh.device)
    axes = dict.fromkeys(mesh.axes, 1)
    return replace(
        mesh,
        size=1,
        rank=0,
        axes=axes,
        world=channel,
        graph=channel,
        weights=channel.beside(),
        pipe=channel,
        threads=(mesh.threads[mesh.rank],),
        watch=None,
        notes=(),
    )


@contextmanager
def _sharded(
    net: ShardedModel,
    part: Partition | SetsPartition,
    mesh: Mesh,
    dtype: torch.dtype,
    whole: Mapping[str, Tensor] | None,
) -> Iterator[ComparedModel]:
    """Put a copy of a net's model on a part, in a number type, with the modules beside it.

    Args:
        net: The sharded model.
        part: The part.
        mesh: The ranks that have the parts.
        dtype: The number type.
        whole: All rows of cut tables, by name; None where the copy keeps own rows.
    """
    before, beside = torch.get_default_dtype(), net._beside
    model = deepcopy(net)
    tables = net._tables.of_copy(model, whole)
    model = model.to(dtype)
    options = replace(
        net._parallel.options,
        fast=net._parallel.options.fast and mesh.graph.size > 1,
        tensor=net._parallel.options.tensor if mesh.graph.size > 1 else 1,
    )
    with ExitStack() as stack:
        for module in beside:
            stack.enter_context(_in_dtype(module, dtype))
        parallel = parallelize(model, part, mesh.graph, options)
        tables.place(parallel.scope)
        stack.enter_context(parallel)
        made = ComparedModel(model, parallel, mesh, net._given, beside, ExitStack(), tables)
        made.dtype = dtype
        stack.callback(made.close)
        stack.callback(tables.release)  # nobody reads the copy's rows: they need not be joined
        torch.set_default_dtype(dtype)
        stack.callback(torch.set_default_dtype, before)
        yield made


@contextmanager
def _in_dtype(module: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Give a module another number type within a block; its weights, gradients and buffers come back."""
    weights = [(p, p.data, p.grad) for p in module.parameters()]
    buffers = [(m, n, b) for m in module.modules() for n, b in m._buffers.items() if b is not None]
    for parameter, data, _ in weights:
        parameter.grad = None
        parameter.data = _cast(data, dtype).clone()
    for owner, name, buffer in buffers:
        owner._buffers[name] = _cast(buffer, dtype).clone()
    try:
        yield
    finally:
        for parameter, data, gradient in weights:
            parameter.grad = None
            parameter.data = data
            parameter.grad = gradient
        for owner, name, buffer in buffers:
            owner._buffers[name] = buffer


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def _whole_part(given: Data | HeteroData | Graph) -> Partition | SetsPartition:
    """Return the graph as the only part of itself."""
    if isinstance(given, Data):
        data = validate(without_edge_labels(given))[0]
        return split_all(data, torch.zeros(int(data.num_nodes or 0), dtype=torch.int64), 1)[0]
    sets = Graph.of(given)
    owners = {name: torch.zeros(each.count, dtype=torch.int64) for name, each in sets.vertices.items()}
    return extract_sets(sets, owners, 0, 1)


def _cast_part(part: Partition | SetsPartition, dtype: torch.dtype) -> Partition | SetsPartition:
    """Return a part with attributes in a number type; one of several sets has none."""
    if isinstance(part, SetsPartition):
        return part
    nodes, edges, shared = (
        {name: _cast(value, dtype) for name, value in kind.items()}
        for kind in (part.nodes, part.edges, part.shared)
    )
    return replace(part, nodes=nodes, edges=edges, shared=shared)


# A run -------------------------------------------------------------------------------------------


def _measured(run: ComparedModel, net: ShardedModel, sample: Sample) -> Measured:
    out, total, leaves = _forward(run, net, sample)
    outputs = {
        f"output{keystr(path)}": leaf.detach()
        for path, leaf in tree_flatten_with_path(out)[0]
        if isinstance(leaf, Tensor)
    }
    if total.requires_grad:
        total.backward()
    found = Measured(outputs, total.detach(), _gradients(run, net, leaves))
    if sample.second:
        for parameter in _parameters(run, net).values():
            parameter.grad = None
        found.seconds = _second(run, net, sample)
    return found


def _forward(
    run: ComparedModel, net: ShardedModel, sample: Sample
) -> tuple[Any, Tensor, dict[str, tuple[Tensor, bool]]]:
    """Return the output, the loss, and for each input with a gradient its leaf and whether it has rows."""
    leaves: dict[str, tuple[Tensor, bool]] = {}
    paths = [f"argument {place + 1}" for place in range(len(sample.args))]

    def prepared(path: str, value: Any) -> Any:
        if type(value) is dict:
            return {key: prepared(f"{path}[{key!r}]", each) for key, each in value.items()}
        if type(value) in (list, tuple):
            return type(value)(prepared(f"{path}[{i}]", each) for i, each in enumerate(value))
        if not isinstance(value, Tensor):
            return value
        if not value.requires_grad:
            name = net._placer.recognized(value)
            # An attribute of a set is placed by name: a cast tensor is not recognized.
            return run.place(value, name) if name else value if name == "" else _cast(value, sample.dtype)
        leaf = _cast(value.detach(), sample.dtype).clone().requires_grad_()
        leaves[path] = leaf, False
        return leaf

    args = [prepared(path, value) for path, value in zip(paths, sample.args, strict=True)]
    kwargs = {name: prepared(name, value) for name, value in sample.kwargs.items()}
    run.step = sample.step
    out = run(*args, **kwargs)
    for path, (leaf, _) in leaves.items():
        leaves[path] = leaf, run._placer.has_rows(path, leaf)
    total = sample.loss(run, out)
    if not isinstance(total, Tensor) or total.numel() != 1:
        shape = f"shape {list(total.shape)}" if isinstance(total, Tensor) else type(total).__name__
        raise ModelError(
            "a loss of one number", shape, where="kagome.check(net, ..., loss=...)", hint="net.mean(...)"
        )
    return out, total.reshape(()), leaves


def _parameters(run: ComparedModel, net: ShardedModel) -> dict[str, nn.Parameter]:
    named = dict(run.named_parameters())
    for place, module in enumerate(net._beside):
        named |= {f"beside[{place}].{name}": each for name, each in module.named_parameters()}
    return named


def _gradients(
    run: ComparedModel, net: ShardedModel, leaves: Mapping[str, tuple[Tensor, bool]]
) -> dict[str, Tensor]:
    """Return all gradients of a backward; those of rows from all ranks. All ranks call it.

    Those of cut tables are on rank 0 alone.
    """
    found = {}
    for name, p in _parameters(run, net).items():
        gradient, table = p.grad, run._tables.table_of(p)
        if gradient is not None and table is not None:
            gradient = run._tables.whole(table, gradient, f"check: gradient of {name}", dst=0)
        if gradient is not None:
            found[f"gradient of {name}"] = gradient.clone()
    for path, (leaf, rows) in leaves.items():
        gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        if rows:
            gradient = run._mesh.graph.all_reduce(gradient.clone(), action="check: gradients of inputs")
        found[f"gradient of {path}"] = gradient
    return found


def _second(run: ComparedModel, net: ShardedModel, sample: Sample) -> dict[str, Tensor]:
    """Return gradients of a weighted sum of the gradients of inputs, in a second pass."""
    _, total, leaves = _forward(run, net, sample)
    if not leaves:
        raise ConfigError(
            "an input with requires_grad for second derivatives",
            "none",
            where="kagome.check(..., second=True)",
            hint="positions.requires_grad_()",
        )
    each = torch.autograd.grad(total, [leaf for leaf, _ in leaves.values()], create_graph=True)
    mine, alike = total.new_zeros(()), total.new_zeros(())
    generator = torch.Generator().manual_seed(0)
    for (leaf, rows), gradient in zip(leaves.values(), each, strict=True):
        weights = torch.randn(leaf.shape, generator=generator, dtype=leaf.dtype).to(leaf.device)
        # On a rank, rows of others have the gradient 0.
        term = (gradient * weights).sum()
        mine, alike = (mine + term, alike) if rows else (mine, alike + term)
    (run.sum(mine) + alike).backward()
    found = _gradients(run, net, leaves)
    return {name.replace("gradient", "second derivative", 1): value for name, value in found.items()}
