"""Methods: one aggregation in the form of each library; all give the same numbers.

Where it sits: ``aggregation`` times them. Each is ``prepare(x, weight) -> do`` or None where the library has
no such aggregation; ``do(x, weight)`` is what is timed, and autograd goes back through it.

Shapes:
    x ``[N, F]`` with weight None or ``[E]``; x ``[N, H, C]`` with weight ``[E, H]``.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from rivals import import_dgl
from torch import Tensor
from torch.autograd import Function

Do = Callable[[Tensor, Tensor | None], Tensor]
Prepare = Callable[[Tensor, Tensor | None], Do | None]


def known(edge_index: Tensor, vertices: int) -> tuple[dict[str, Prepare], list[str]]:
    """The methods that can be had here, and sentences on those that cannot."""
    found: dict[str, Prepare] = {}
    notes: list[str] = []
    for name, make in (("Kagome", _kagome), ("DGL", _dgl), ("MKL CSR", _mkl), ("torch.sparse.mm", _reduce)):
        prepare, note = make(edge_index, vertices)
        if prepare is not None:
            found[name] = prepare
        if note:
            notes.append(f"{name}: {note}.")
    found["PyG"] = _pyg(edge_index, vertices)
    return found, notes


def _pyg(edge_index: Tensor, vertices: int) -> Prepare:
    """What ``MessagePassing`` does: gather, weigh, scatter."""
    source, target = edge_index

    def do(x: Tensor, weight: Tensor | None) -> Tensor:
        message = x.index_select(0, source)
        if weight is not None:
            message = message * weight.unsqueeze(-1)
        index = target.view(-1, *[1] * (x.dim() - 1)).expand_as(message)
        return x.new_zeros(vertices, *x.shape[1:]).scatter_add_(0, index, message)

    return lambda x, weight: do


def _dgl(edge_index: Tensor, vertices: int) -> tuple[Prepare | None, str]:
    dgl, note = import_dgl()
    if dgl is None:
        return None, note
    ends = edge_index.to(torch.int32)
    graph = dgl.graph((ends[0], ends[1]), num_nodes=vertices).formats(["coo", "csr", "csc"])
    graph.create_formats_()

    def prepare(x: Tensor, weight: Tensor | None) -> Do:
        if weight is None:
            return lambda x, weight: dgl.ops.copy_u_sum(graph, x)
        return lambda x, weight: dgl.ops.u_mul_e_sum(graph, x, weight.unsqueeze(-1))

    return prepare, note


def _mkl(edge_index: Tensor, vertices: int) -> tuple[Prepare | None, str]:
    return _sparse(edge_index, vertices, lambda a, x: a @ x), "the transpose is kept"


def _reduce(edge_index: Tensor, vertices: int) -> tuple[Prepare | None, str]:
    product = _sparse(edge_index, vertices, lambda a, x: torch.sparse.mm(a, x, "sum"))
    return product, 'reduce="sum", the transpose is kept'


def _sparse(edge_index: Tensor, vertices: int, times: Callable[[Tensor, Tensor], Tensor]) -> Prepare:
    """A product with a CSR matrix; its backward is the product with the transpose, made before."""

    def prepare(x: Tensor, weight: Tensor | None) -> Do | None:
        if x.dim() != 2:
            return None
        value = torch.ones(edge_index.size(1)) if weight is None else weight
        size = (vertices, vertices)
        there = torch.sparse_coo_tensor(edge_index.flip(0), value, size).to_sparse_csr()
        back = torch.sparse_coo_tensor(edge_index, value, size).to_sparse_csr()
        return lambda x, weight: _Linear.apply(x, lambda v: times(there, v), lambda v: times(back, v))

    return prepare


class _Linear(Function):
    """A linear map whose transpose is known."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Callable[..., Tensor], back: Callable[..., Tensor]) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return ctx.back(grad), None, None


class _Weighted(Function):
    """Kagome's sum with weights that learn: the transpose for the rows, dot products for the weights."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ops: Any, structure: Any) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.ops, ctx.structure = ops, structure
        return ops.sum_rows(structure.by_target, x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        gx = ctx.ops.sum_rows(ctx.structure.by_source, grad, weight)
        return gx, ctx.ops.dot_edges(ctx.structure.by_target, grad, x), None, None


def _kagome(edge_index: Tensor, vertices: int) -> tuple[Prepare | None, str]:
    """The kernels themselves, as ``neighbors`` calls them."""
    try:
        ops = import_module("kagome.kernels.ops")
        structure = import_module("kagome.kernels.base.csr").Structure(
            edge_index[0].contiguous(), edge_index[1].contiguous(), vertices, vertices
        )
    except ImportError as error:
        return None, f"this version has no kernels of its own ({error})"

    def prepare(x: Tensor, weight: Tensor | None) -> Do:
        structure.by_target, structure.by_source  # noqa: B018 - built here, not while it is timed
        if weight is not None and weight.dim() == 2:
            return lambda x, weight: _Weighted.apply(x, weight, ops, structure)
        return lambda x, weight: _Linear.apply(
            x,
            lambda v: ops.sum_rows(structure.by_target, v, weight),
            lambda v: ops.sum_rows(structure.by_source, v, weight),
        )

    return prepare, f"by its {ops.backend_of(torch.zeros(1))}" if hasattr(ops, "backend_of") else ""
