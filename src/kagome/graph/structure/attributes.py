"""Attributes of a graph: one row per vertex, one row per edge, or shared by all ranks.

Where it sits: ``validate`` cleans attributes with these functions, ``graph.partition.partition`` splits them.
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

#: Largest dense copy of sparse features in bytes; beyond it the user is asked to project the features.
DENSE_LIMIT_BYTES = 4 * 2**30

Shared = Tensor | int | float | str | list[Any] | tuple[Any, ...] | dict[Any, Any]
"""A value that is the same on all ranks: a tensor, number, bool or text, or lists and dicts of such."""

# Attributes that are handled by name elsewhere.
_STRUCTURE: Final = ("edge_index", "adj_t", "num_nodes", "split_idx")
# Names that PyG uses for attributes of vertices and of edges.
_OF_VERTICES: Final = frozenset({"x", "y", "z", "pos", "batch", "n_id", "weight"})
_OF_EDGES: Final = frozenset({"e_id"})


class Notes(tuple[str, ...]):
    """Sentences that a loader leaves in ``data.notes``; a user's attribute of that name has another type."""


@dataclass(frozen=True)
class Attributes:
    """The attributes of a graph, sorted by kind.

    Args:
        nodes: Attributes with a row per vertex.
        edges: Attributes with a row per edge.
        shared: Attributes that are neither and are the same on all ranks.
        refused: For each other attribute, the reason why it cannot be given to a model.
        unclear: The refused attributes whose rows may belong to vertices or to edges.
    """

    nodes: dict[str, Tensor] = field(default_factory=dict)
    edges: dict[str, Tensor] = field(default_factory=dict)
    shared: dict[str, Shared] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    unclear: dict[str, Tensor] = field(default_factory=dict)


class Sorted(Data):  # type: ignore[misc]
    """A graph that remembers the kinds of its attributes: in a sample a size may fit another kind by chance.

    Args:
        edge_index: The edges of the graph.
        num_nodes: The number of vertices.
        attributes: The attributes, sorted by kind.
    """

    def __init__(self, edge_index: Tensor, num_nodes: int, attributes: Attributes) -> None:
        rest = {**attributes.nodes, **attributes.edges, **attributes.shared}
        super().__init__(edge_index=edge_index, num_nodes=num_nodes, **rest)
        # Beside Data's store, in which it would count as an attribute of the graph.
        self.__dict__["attributes"] = attributes


def attributes_of(data: Data) -> Attributes:
    """Return the attributes of a graph, sorted by kind.

    The size of the first axis decides. If there are as many edges as vertices, the name decides. ``edge...``
    and ``e_id`` have a row per edge. ``x``, ``y``, ``z``, ``pos``, ``batch``, ``n_id``, ``weight``,
    ``node...`` and ``..._mask`` have a row per vertex. Any other name is refused, except on one rank, which
    cuts nothing.

    Integers are refused as a second list of edges if their name says that they are vertex ids (``...index``),
    or if they have the shape ``[2, M]`` and the range of vertex ids.

    Args:
        data: A graph with ``num_nodes`` and ``edge_index``.
    """
    # A sample of a graph was made with the kinds that the whole graph had.
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
        # A number without axes belongs to neither.
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
    # PyG adds the number of vertices to such attributes in a batch; ``face`` holds the triangles of a mesh.
    if "index" in name or name == "face":
        return True
    # [2, M] with numbers in the range of ids looks like edges under another name.
    if value.dim() != 2 or value.size(0) != 2 or value.numel() == 0:
        return False
    least, most = value.aminmax()
    return int(least) >= 0 and int(most) < num_nodes


def tensors_of(values: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the values that are tensors, by name."""
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def unboxed(value: Any) -> Any:
    """Return a NumPy array of numbers as a tensor and a NumPy scalar as a Python number; others unchanged."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        return torch.as_tensor(value)
    return nested_values.unboxed(value)


def plain(value: Any) -> Tensor:
    """Return a plain CPU tensor without gradient from a tensor, a tensor subclass or an array.

    Shapes:
        any; kept.
    """
    if hasattr(value, "as_tensor"):  # torch_geometric.EdgeIndex and Index
        value = value.as_tensor()
    # A conjugate or negative view shares the bytes of the tensor that it views.
    return torch.as_tensor(value).detach().cpu().resolve_conj().resolve_neg()


def numbers_of(name: str, value: Any, must: str = "be a tensor of numbers") -> Tensor:
    """Return a tensor from what a user gave as one: a tensor, an array or a list of numbers.

    Args:
        name: The name of the attribute.
        value: The value of the attribute.
        must: The requirement that the error message states.

    Raises:
        DataError: If the value cannot be read as a tensor of numbers.
    """
    message, hint = without_numbers(value), ""
    if not message and isinstance(value, Tensor) and value.is_quantized:
        message, hint = "a quantized tensor", f"data.{name}.dequantize()"
    if not message and not is_sparse(value):
        # Ragged lists, texts and objects fail here, each with an error of its own.
        try:
            return plain(value)  # type: ignore[no-any-return, unused-ignore]
        except (TypeError, ValueError, RuntimeError, OverflowError):
            pass
    kind = getattr(value, "dtype", None)
    message = message or f"a {type(value).__name__}" + (f" of {kind}" if kind is not None else "")
    raise DataError(f"{name} to {must}", message, where=f"data.{name}", hint=hint)


def without_numbers(value: Any) -> str:
    """Return the kind of a tensor that has no plain array of numbers to cut into parts; otherwise ``""``."""
    if not isinstance(value, Tensor):
        return ""
    if value.is_nested:
        return "a nested tensor"
    return "a meta tensor, which holds no numbers" if value.is_meta else ""


def is_sparse(value: Any) -> bool:
    """Return whether this is a sparse tensor of torch or a SparseTensor of torch_sparse."""
    if isinstance(value, Tensor):
        return value.layout != torch.strided and not value.is_nested
    return hasattr(value, "to_dense") and hasattr(value, "sizes")


def dense(value: Any) -> Tensor:
    """Return a sparse matrix as a dense tensor.

    Raises:
        DataError: If the dense tensor would be too large.

    Shapes:
        value ``[N, F]``, sparse; result ``[N, F]``, dense.
    """
    rows, columns = (value.sizes() if callable(getattr(value, "sizes", None)) else value.shape)[:2]
    # Estimated at 4 bytes an entry, as float32.
    size = rows * columns * 4
    if size > DENSE_LIMIT_BYTES:
        raise DataError(
            f"sparse features that take up to {DENSE_LIMIT_BYTES / 2**30:.0f} GiB as dense ones",
            f"{rows:,} x {columns:,}, which take {size / 2**30:.1f} GiB",
            where="data.x",
            hint="--data.project 256 makes fewer columns of them",
        )
    return plain(value.to_dense())


def edges_of(adjacency: Any) -> tuple[Tensor, Tensor | None]:
    """Return the edges of a sparse adjacency in PyG's transposed form (``adj_t``), whose rows are targets.

    Returns:
        The edges, and their values unless all are 1.

    Shapes:
        adjacency ``[N, N]``; edges ``[2, E]``; values ``[E, ...]``.
    """
    from torch_geometric.utils import to_edge_index

    # adj_t[i, j] is the edge j -> i, so its rows are targets and come first.
    target_source, value = to_edge_index(adjacency)
    value = None if value is None or bool((value == 1).all()) else plain(value)
    return plain(target_source).flip(0).contiguous(), value
