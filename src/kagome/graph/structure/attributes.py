"""Attributes of a graph: a row a vertex, a row an edge, or the same on all ranks; foreign kinds made plain.

Where it sits: ``validate`` cleans with these, ``graph.partition.partition`` splits by them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data

from kagome.errors import DataError
from kagome.graph.structure import nested_values

#: A dense copy of sparse features may be so large; beyond it the user is asked to project.
DENSE_LIMIT_BYTES = 4 * 2**30

Shared = Tensor | int | float | str | list[Any] | tuple[Any, ...] | dict[Any, Any]
"""What is the same on all ranks: a tensor, a number, a truth value, a text, or lists and dicts of such."""

_STRUCTURE: Final = ("edge_index", "adj_t", "num_nodes", "split_idx")
_OF_VERTICES: Final = frozenset({"x", "y", "z", "pos", "batch", "n_id", "weight"})
_OF_EDGES: Final = frozenset({"e_id"})


class Notes(tuple[str, ...]):
    """Sentences that a loader leaves in ``data.notes``; a user's attribute of that name is not one."""


@dataclass(frozen=True)
class Attributes:
    """The attributes of a graph by kind.

    Args:
        nodes: A row a vertex.
        edges: A row an edge.
        shared: Neither: the same on all ranks.
        refused: Why the others cannot be given to a model, by name.
        unclear: Those of them that have a row a vertex or a row an edge, and nothing tells which.
    """

    nodes: dict[str, Tensor] = field(default_factory=dict)
    edges: dict[str, Tensor] = field(default_factory=dict)
    shared: dict[str, Shared] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    unclear: dict[str, Tensor] = field(default_factory=dict)


class Sorted(Data):  # type: ignore[misc]
    """A graph that remembers the kinds of its attributes: in a sample a size may fit another kind by chance.

    Args:
        edge_index: Its edges.
        num_nodes: Its vertices.
        attributes: By kind.
    """

    def __init__(self, edge_index: Tensor, num_nodes: int, attributes: Attributes) -> None:
        rest = {**attributes.nodes, **attributes.edges, **attributes.shared}
        super().__init__(edge_index=edge_index, num_nodes=num_nodes, **rest)
        self.__dict__["attributes"] = attributes


def attributes_of(data: Data) -> Attributes:
    """The attributes of a graph by kind.

    The first size decides. Where there are as many edges as vertices, the name does: ``edge...`` and ``e_id``
    have a row an edge; ``x``, ``y``, ``z``, ``pos``, ``batch``, ``n_id``, ``weight``, ``node...`` and
    ``..._mask`` a row a vertex; any other is refused, but on one rank, which cuts nothing. Whole numbers
    whose name says that they are ids of vertices (``...index``), and ``[2, M]`` of them in the range of ids,
    are a second list of edges, which is refused.

    Args:
        data: A graph with ``num_nodes`` and ``edge_index``.
    """
    known = data.__dict__.get("attributes")
    if isinstance(known, Attributes):
        return known
    found = Attributes()
    num_nodes, num_edges = int(data.num_nodes), data.edge_index.size(1)
    for name, value in data.to_dict().items():
        if name in _STRUCTURE or value is None or isinstance(value, Notes):
            continue
        if not isinstance(value, Tensor) or is_sparse(value) or without_numbers(value):
            _sort_plain(name, value, found)
            continue
        rows = value.size(0) if value.dim() else -1
        if rows == num_nodes == num_edges:
            _sort_by_name(name, value, num_nodes, found)
        elif rows == num_edges:
            found.edges[name] = value
        elif rows == num_nodes:
            found.nodes[name] = value
        elif _names_vertices(name, value, num_nodes):
            found.refused[name] = (
                f"data.{name} {list(value.shape)} names vertices beside edge_index: a second list of edges, "
                "or of ids, is not served yet"
            )
        else:
            found.shared[name] = value
    return found


def _sort_plain(name: str, value: Any, found: Attributes) -> None:
    fault = without_numbers(value) or nested_values.fault_of(value)
    if not fault:
        found.shared[name] = value
    elif is_sparse(value) and not without_numbers(value):
        found.refused[name] = f"data.{name} is a sparse matrix; tensors, numbers and texts are carried"
    else:
        found.refused[name] = (
            f"data.{name} is {fault}; tensors, numbers, texts, and lists and dicts of numbers and texts are "
            "carried"
        )


def _sort_by_name(name: str, value: Tensor, count: int, found: Attributes) -> None:
    if name.startswith("edge") or name in _OF_EDGES:
        found.edges[name] = value
    elif name in _OF_VERTICES or name.startswith("node") or name.endswith("_mask"):
        found.nodes[name] = value
    else:
        found.unclear[name] = value
        found.refused[name] = (
            f"data.{name} has {count:,} rows, and there are as many vertices as edges: call it "
            f"edge_{name} or node_{name}"
        )


def _names_vertices(name: str, value: Tensor, num_nodes: int) -> bool:
    if value.dim() == 0 or value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
        return False
    if "index" in name or name == "face":
        return True
    if value.dim() != 2 or value.size(0) != 2 or value.numel() == 0:
        return False
    least, most = value.aminmax()
    return int(least) >= 0 and int(most) < num_nodes


def split_attributes(data: Data) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tensors with a row a vertex, and those with a row an edge; see :func:`attributes_of`."""
    found = attributes_of(data)
    return found.nodes, found.edges


def tensors_of(values: Mapping[str, Any]) -> dict[str, Tensor]:
    """Those of some values that are tensors."""
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def unboxed(value: Any) -> Any:
    """A NumPy array of numbers as a tensor, a NumPy scalar as Python's; anything else as it is."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        return torch.as_tensor(value)
    return nested_values.unboxed(value)


def plain(value: Any) -> Tensor:
    """A plain CPU tensor that knows no gradient, from a tensor, a subclass of it, or an array.

    Shapes:
        any; kept.
    """
    if hasattr(value, "as_tensor"):  # torch_geometric.EdgeIndex and Index
        value = value.as_tensor()
    # A conjugate or negative view has the bytes of what it is a view of.
    return torch.as_tensor(value).detach().cpu().resolve_conj().resolve_neg()


def numbers_of(name: str, value: Any, must: str = "be a tensor of numbers") -> Tensor:
    """A tensor of what a user gave as one: a tensor, an array, a list of numbers.

    Args:
        name: The attribute's.
        value: Its value.
        must: What it has to do, for the error.

    Raises:
        DataError: If it is nothing of the kind.
    """
    said, hint = without_numbers(value), ""
    if not said and isinstance(value, Tensor) and value.is_quantized:
        said, hint = "a quantized tensor", f"data.{name}.dequantize()"
    if not said and not is_sparse(value):
        try:
            return plain(value)  # type: ignore[no-any-return, unused-ignore]
        except (TypeError, ValueError, RuntimeError, OverflowError):
            pass
    kind = getattr(value, "dtype", None)
    said = said or f"a {type(value).__name__}" + (f" of {kind}" if kind is not None else "")
    raise DataError(f"{name} must {must}", f"it is {said}", where=f"data.{name}", hint=hint)


def without_numbers(value: Any) -> str:
    """What a tensor is that has no array of numbers to be cut into parts; empty for any other value."""
    if not isinstance(value, Tensor):
        return ""
    if value.is_nested:
        return "a nested tensor"
    return "a meta tensor, which holds no numbers" if value.is_meta else ""


def is_sparse(value: Any) -> bool:
    """Whether this is a sparse tensor of torch, or a SparseTensor of torch_sparse."""
    if isinstance(value, Tensor):
        return value.layout != torch.strided and not value.is_nested
    return hasattr(value, "to_dense") and hasattr(value, "sizes")


def dense(value: Any) -> Tensor:
    """A sparse matrix as a dense tensor.

    Raises:
        DataError: If that would take more memory than is sensible.

    Shapes:
        value ``[N, F]``, sparse; result ``[N, F]``, dense.
    """
    rows, columns = (value.sizes() if callable(getattr(value, "sizes", None)) else value.shape)[:2]
    size = rows * columns * 4
    if size > DENSE_LIMIT_BYTES:
        raise DataError(
            f"sparse features are made dense up to {DENSE_LIMIT_BYTES / 2**30:.0f} GiB",
            f"{rows:,} x {columns:,} would take {size / 2**30:.1f} GiB",
            where="data.x",
            hint="--data.project 256 makes fewer columns of them",
        )
    return plain(value.to_dense())


def edges_of(adjacency: Any) -> tuple[Tensor, Tensor | None]:
    """Edges of a sparse adjacency held transposed, as PyG does (``adj_t``): rows are targets.

    Returns:
        The edges, and their values where these are not all 1.

    Shapes:
        adjacency ``[N, N]``; edges ``[2, E]``; values ``[E, ...]``.
    """
    from torch_geometric.utils import to_edge_index

    target_source, value = to_edge_index(adjacency)
    value = None if value is None or bool((value == 1).all()) else plain(value)
    return plain(target_source).flip(0).contiguous(), value
