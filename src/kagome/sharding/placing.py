"""Placing: which tensors of a call have rows of vertices or edges, and this rank's share of each.

Where it sits: :class:`kagome.sharding.module.ShardedModel` places the arguments of each call before the model
sees them.

::

    net(x, edge_index, edge_attr, scale)
        x           [N, 8], on each rank       ──> its own rows [n, 8]
        x           [n, 8], own rows           ──> as it is
        edge_index  the graph's edges          ──> its own edges
        edge_attr   [E, 3]                     ──> those of its own edges
        scale       no axis of N, n or E       ──> as it is: the same on all ranks

The sizes decide, and the ranks compare what they find the first time: an axis that has as many entries as
one rank has vertices, by chance, does not have as many as the next rank has.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

import torch
from torch import Tensor
from torch_geometric.data import Data

from kagome.comm.channel import Channel
from kagome.errors import ModelError
from kagome.graph.partition.partition import Partition
from kagome.intercept.interceptor import Interceptor
from kagome.model.forward_call import as_data
from kagome.placement.placement import Placement, PlacementKind
from kagome.placement.weak_map import WeakTensorMap
from kagome.sharding.boundary import Boundary

Rows = Literal["vertices", "edges"]
"""What the rows of a tensor belong to."""
HINT: Final = "net.place(tensor, 'vertices', axis=...) for such a tensor, or 'edges'"


@dataclass(frozen=True)
class RowAxis:
    """The rows of a tensor: what they belong to, and along which axis they lie."""

    rows: Rows
    axis: int


class Placer:
    """Places the arguments of a sharded model's calls.

    Args:
        scope: The interceptor of this rank's part.
        part: This rank's part.
        channel: The channel of all ranks of the graph.
        boundary: What inputs with a gradient pass through.
        given: The graph as the user gave it, whose tensors are recognized; None if it was read from files.
    """

    def __init__(
        self,
        scope: Interceptor,
        part: Partition,
        channel: Channel,
        boundary: Boundary,
        given: Data | None,
    ) -> None:
        self._scope, self._channel, self._boundary = scope, channel, boundary
        self._own = {"vertices": part.own.to(scope.device), "edges": part.edge_ids.to(scope.device)}
        self._all = {"vertices": part.num_nodes, "edges": part.num_edges}
        self._known: WeakTensorMap[tuple[str, int]] = WeakTensorMap()
        self._cuts: WeakTensorMap[tuple[int, RowAxis, Tensor]] = WeakTensorMap()
        self._decided: dict[tuple[str, int], RowAxis | None] = {}
        self._edges: bytes | None = None
        for name, value in ({} if given is None else given.to_dict()).items():
            if isinstance(value, Tensor) and isinstance(scope.inputs.get(name), Tensor):
                self._known[value] = name, value._version
        if given is not None:
            self._edges = _digest(given.edge_index)

    def own(self, rows: Rows) -> Tensor:
        """Return the ids of own rows in the whole graph."""
        return self._own[rows]

    def arguments(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a call with this rank's share of each tensor. All ranks call it."""
        placed = tuple(self._value(f"argument {place + 1}", value) for place, value in enumerate(args))
        return placed, {name: self._value(name, value) for name, value in kwargs.items()}

    def place(self, value: Tensor, rows: Rows, axis: int) -> Tensor:
        """Return own rows of a tensor, recorded as such whatever their number.

        Raises:
            ModelError: If it has neither as many rows as this rank has, nor as the whole graph.
        """
        if rows not in get_args(Rows):
            raise ModelError("'vertices' or 'edges' in net.place(tensor, rows)", repr(rows))
        axis = range(value.dim())[axis]
        return self._share(value, RowAxis(rows, axis), "the tensor")

    def is_rows(self, value: Tensor) -> bool:
        """Return whether a tensor of the running forward has rows of vertices or edges."""
        placement = self._scope.placements.get(value)
        return placement is not None and placement.kind in (PlacementKind.ROWS, PlacementKind.PAIRS)

    def _value(self, path: str, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._tensor(path, value)
        if isinstance(value, Data):
            items = {name: self._value(f"{path}.{name}", each) for name, each in value.to_dict().items()}
            return as_data({**items, "num_nodes": self._scope.inputs["num_nodes"]})
        if isinstance(value, Mapping) and type(value) is dict:
            return {key: self._value(f"{path}[{key!r}]", each) for key, each in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self._value(f"{path}[{i}]", each) for i, each in enumerate(value))
        if path == "num_nodes" and value == self._all["vertices"]:
            return self._scope.inputs["num_nodes"]
        return value

    def _tensor(self, path: str, value: Tensor) -> Tensor:
        name, version = self._known.get(value, ("", -1))
        if name and version == value._version:
            self._decided.setdefault((path, value.dim()), self._axis_of(name))
            return self._scope.inputs[name]  # type: ignore[no-any-return]
        if self._is_edges(value):
            return self._scope.inputs["edge_index"]  # type: ignore[no-any-return]
        cut = self._cuts.get(value)
        if cut is not None and cut[0] == value._version:
            return cut[2]
        placement = self._scope.placements.get(value)
        if placement is not None:
            return self._boundary.enter(value, rows=True)
        where = self._where(path, value)
        if where is None:
            return self._boundary.enter(value.to(self._scope.device), rows=False)
        return self._share(value, where, path)

    def _axis_of(self, name: str) -> RowAxis | None:
        """Return the rows of an attribute of the graph: a later argument in its place has such rows too."""
        placement = self._scope.placements.get(self._scope.inputs[name])
        if placement is None or placement.kind not in (PlacementKind.ROWS, PlacementKind.PAIRS):
            return None
        return RowAxis("vertices" if placement.kind is PlacementKind.ROWS else "edges", placement.axis)

    def _is_edges(self, value: Tensor) -> bool:
        """Return whether a tensor is the graph's list of edges, by its values."""
        if value.dtype != torch.int64 or value.dim() != 2 or value.shape[0] != 2 or self._edges is None:
            return False
        if value.size(1) != self._all["edges"]:
            return False
        same = _digest(value) == self._edges
        if same:
            self._known[value] = "edge_index", value._version
        return same

    def _where(self, path: str, value: Tensor) -> RowAxis | None:
        """Return the rows of a tensor by its sizes; the ranks agree the first time."""
        key = path, value.dim()
        if key not in self._decided:
            mine = [
                [rows, axis]
                for rows in get_args(Rows)
                for axis, size in enumerate(value.shape)
                if size in (self._own[rows].numel(), self._all[rows])
            ]
            told: Any = self._channel.gather_objects([mine, list(value.shape)], f"rows of {path}")
            each, shapes = zip(*told, strict=True)
            self._decided[key] = self._chosen(
                path, value, [found for found in mine if all(found in e for e in each)]
            )
            if self._decided[key] is None:
                self._refuse_unlike(path, shapes)
        return self._decided[key]

    def _refuse_unlike(self, path: str, shapes: Sequence[Any]) -> None:
        """Refuse a tensor without rows that has other sizes on other ranks, such as rows of some vertices."""
        if any(shape != shapes[0] for shape in shapes):
            raise ModelError(
                f"{path} with a row for each vertex or edge, or the same on all ranks",
                f"shapes {', '.join(map(str, shapes))} on the ranks",
                hint=HINT,
            )

    def _chosen(self, path: str, value: Tensor, found: list[list[Any]]) -> RowAxis | None:
        if not found:
            return None
        if len({rows for rows, _ in found}) > 1:
            raise ModelError(
                "a tensor whose sizes say whether it has rows of vertices or of edges",
                f"{path} of shape {list(value.shape)}: the graph has {self._all['vertices']:,} vertices and "
                f"{self._all['edges']:,} edges",
                hint=HINT,
            )
        axes = [axis for _, axis in found]
        # Where several axes have that size, rows are the last but one, as in PyG: [.., N, F].
        axis = axes[0] if len(axes) == 1 else value.dim() - 2 if value.dim() - 2 in axes else axes[0]
        return RowAxis(found[0][0], axis)

    def _share(self, value: Tensor, where: RowAxis, path: str) -> Tensor:
        own, whole = self._own[where.rows], self._all[where.rows]
        size = value.size(where.axis)
        if size not in (own.numel(), whole):
            raise ModelError(
                f"{path} with {own.numel():,} rows along axis {where.axis}, this rank's own {where.rows}, or "
                f"{whole:,}, all of the graph",
                f"{size:,} in shape {list(value.shape)}",
                where=f"rank {self._channel.rank}",
                hint="x[net.own()] for own rows of a tensor of the whole graph",
            )
        moved = value.to(self._scope.device)
        # With as many own rows as the graph has, the rank has the whole graph, in its own order.
        share = moved if size == own.numel() else moved.index_select(where.axis, own)
        share = self._boundary.enter(share, rows=True)
        self._scope.placements.put(share, self._placement(where))
        if not value.requires_grad and share is not value:
            self._cuts[value] = value._version, where, share
        return share

    def _placement(self, where: RowAxis) -> Placement:
        if where.rows == "vertices":
            return Placement(PlacementKind.ROWS, axis=where.axis)
        return Placement(PlacementKind.PAIRS, axis=where.axis, edges=self._scope.views[0].edge_index)


def _digest(edges: Tensor) -> bytes:
    """Return a digest of a list of edges, by which it is recognized."""
    array = edges.detach().cpu().contiguous().numpy()
    return hashlib.blake2b(array.data, digest_size=16).digest()
