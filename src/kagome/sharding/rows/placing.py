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
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch_geometric.data import Data, HeteroData

from kagome.comm.channel import Channel
from kagome.comm.watchdog import CallProgress
from kagome.errors import ModelError
from kagome.graph.structure.sets import Graph, edge_name
from kagome.intercept.interceptor import Interceptor
from kagome.model.forward_call import as_data
from kagome.placement.placement import PlacementKind
from kagome.placement.weak_map import WeakTensorMap
from kagome.sharding.gradients.boundary import Boundary
from kagome.sharding.rows.row_sets import RowSet, RowSets

HINT: Final = "net.place(tensor, 'vertices', axis=...) for such a tensor, or the name of another set"


@dataclass(frozen=True)
class RowAxis:
    """The rows of a tensor: what they belong to, and along which axis they lie."""

    rows: str
    axis: int
    copies: int = 1
    """Of how many samples, one after the other."""


class Placer:
    """Places the arguments of a sharded model's calls.

    Args:
        scope: The interceptor of this rank's part.
        sets: The vertex sets and edge sets.
        channel: The channel of all ranks of the graph.
        boundary: What inputs with a gradient pass through.
        given: The graph as the user gave it, whose tensors are recognized; None if it was read from files.
    """

    def __init__(
        self,
        scope: Interceptor,
        sets: RowSets,
        channel: Channel,
        boundary: Boundary,
        given: Data | HeteroData | Graph | None,
    ) -> None:
        self._scope, self._sets, self._channel, self._boundary = scope, sets, channel, boundary
        self._known: WeakTensorMap[tuple[str, int]] = WeakTensorMap()
        self._cuts: WeakTensorMap[tuple[int, RowAxis, Tensor]] = WeakTensorMap()
        self._decided: dict[tuple[str, int, int], RowAxis | None] = {}
        self._copies = 1
        """Of how many samples the call's edges are, one after the other."""
        self._edges: dict[bytes, list[str]] = {}
        """The names of the edges of the graph in ``scope.inputs``, by a digest of their values."""
        self._attributes: WeakTensorMap[tuple[int, str]] = WeakTensorMap()
        self._comparisons = Comparisons(channel)
        self._layouts: dict[tuple[tuple[str, str], ...], int] = {}
        """The layouts of arguments that the ranks have compared, numbered from 1."""
        self._first = True
        """Whether the first call runs, in which all ranks compare their arguments."""
        self._batches: WeakTensorMap[tuple[int, list[int], int]] = WeakTensorMap()
        self._graph = edges_of(given)
        self._note(given)

    def _note(self, given: Data | HeteroData | Graph | None) -> None:
        """Note the tensors of the graph as the user gave it, by which they are recognized."""
        if given is None:
            return
        if isinstance(given, Data):
            self._edges[_digest(given.edge_index)] = ["edge_index"]
            for name, value in given.to_dict().items():
                if isinstance(value, Tensor) and isinstance(self._scope.inputs.get(name), Tensor):
                    self._known[value] = name, value._version
            return
        if isinstance(given, HeteroData):
            for kind, held in Graph.attributes(given).items():
                for value in held.values():
                    if isinstance(value, Tensor) and value.dim() and value.size(0) == self._sets[kind].size:
                        self._attributes[value] = value._version, kind
        sets = Graph.of(given)
        for name, edges in sets.edges.items():
            self._edges.setdefault(_digest(edges.index), []).append(name)
            if edges.attr is not None:
                self._attributes[edges.attr] = edges.attr._version, name
        for name, vertices in sets.vertices.items():
            if vertices.pos is not None:
                self._attributes[vertices.pos] = vertices.pos._version, name

    def arguments(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a call with this rank's share of each tensor. All ranks call it."""
        leaves = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor | Data)]
        # A batch in the edges says that other arguments may have rows of as many samples.
        edges = [each.get("edge_index") if isinstance(each, Data) else each for each in leaves]
        copies = [self._batch(each)[1] for each in edges if isinstance(each, Tensor)]
        self._copies = max((1, *copies))
        with self._comparisons.call():
            self._refuse_other_arguments(args, kwargs)
            placed = tuple(self._value(f"argument {place + 1}", value) for place, value in enumerate(args))
            return placed, {name: self._value(name, value) for name, value in kwargs.items()}

    def _refuse_other_arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Refuse arguments of another layout than other ranks'; they compare each layout once.

        Raises:
            ModelError: Naming the first that differs.
        """
        named = [*((f"argument {place + 1}", value) for place, value in enumerate(args)), *kwargs.items()]
        mine = tuple((path, _kind(value)) for path, value in named)
        if self._copies > 1:
            mine = (*mine, ("the edges", f"those of {self._copies} samples"))
        known = len(self._layouts)
        self._first = not known
        self._comparisons.layout = self._layouts.setdefault(mine, known + 1)
        if len(self._layouts) == known:
            return
        here = ", ".join(f"{path}: {kind}" for path, kind in mine)
        told = self._comparisons.gather(
            [list(each) for each in mine], "arguments of a call", here=here, alone=not self._first
        )
        each = [dict(theirs) for theirs in told]
        for path in dict.fromkeys(name for theirs in each for name in theirs):
            kinds = [theirs.get(path, "not given") for theirs in each]
            if len(set(kinds)) > 1:
                raise ModelError(
                    f"{path} to be of one kind on all ranks",
                    ", ".join(f"{kind} on rank {rank}" for rank, kind in enumerate(kinds)),
                    where="net(...)",
                    hint="the same arguments on all ranks; a rank without rows gives a tensor of none",
                )

    def place(self, value: Tensor, rows: RowSet, axis: int) -> Tensor:
        """Return own rows of a tensor, recorded as such whatever their number.

        Raises:
            ModelError: If it has neither as many rows as this rank has, nor as the whole graph.
        """
        axis = range(value.dim())[axis]
        return self._share(value, RowAxis(rows.name, axis), "the tensor")

    def target(self, value: Tensor) -> Tensor:
        """Return own rows of a target: a row a vertex; of several vertex sets, its sizes say which."""
        if len(self._sets.vertices) == 1:
            return self.place(value, self._sets.vertices[0], 0)
        with self._comparisons.call():
            return self._tensor("target", value, "")

    def recognized(self, value: Tensor) -> str | None:
        """Return the set whose attribute a tensor is, ``""`` for an input of the part; None for any other."""
        return "" if value in self._known else self._attributes.get(value, (0, None))[1]

    def has_rows(self, path: str, value: Tensor) -> bool:
        """Return whether an argument of an earlier call has rows of vertices or edges."""
        return any(self._decided.get((path, value.dim(), copies)) for copies in {1, self._copies})

    def is_rows(self, value: Tensor) -> bool:
        """Return whether a tensor of the running forward has rows of vertices or edges."""
        placement = self._scope.placements.get(value)
        return placement is not None and placement.kind in (PlacementKind.ROWS, PlacementKind.PAIRS)

    def _value(self, path: str, value: Any, kind: str = "") -> Any:
        """Return this rank's share of an argument; ``kind`` is the set that a dict's key names."""
        if isinstance(value, Tensor):
            return self._tensor(path, value, kind)
        if isinstance(value, HeteroData):
            raise ModelError(
                "x_dict, edge_index_dict and the like as arguments of a sharded model",
                f"a HeteroData in {path}",
                hint="net(data.x_dict, data.edge_index_dict)",
            )
        if isinstance(value, Data):
            items = {name: self._value(f"{path}.{name}", each) for name, each in value.to_dict().items()}
            return as_data({**items, "num_nodes": self._scope.inputs["num_nodes"]})
        if isinstance(value, Mapping) and type(value) is dict:
            return {
                key: self._value(f"{path}[{key!r}]", each, self._kind(key)) for key, each in value.items()
            }
        if type(value) in (list, tuple):
            return type(value)(self._value(f"{path}[{i}]", each) for i, each in enumerate(value))
        if path == "num_nodes" and "num_nodes" in self._scope.inputs and value == self._sets["vertices"].size:
            return self._scope.inputs["num_nodes"]
        return value

    def _kind(self, key: Any) -> str:
        """Return the vertex set or edge set that a key of ``x_dict`` or ``edge_index_dict`` names."""
        name = edge_name(*key) if isinstance(key, tuple) and len(key) == 3 else key
        return name if isinstance(name, str) and name in self._sets else ""

    def _tensor(self, path: str, value: Tensor, kind: str) -> Tensor:
        """Return this rank's share of a tensor; ``kind`` is the set that a key names, or empty."""
        # One tensor may stand for two sets, under two keys: what the key names comes first.
        name, version = self._known.get(value, ("", -1))
        if name and version == value._version and kind in ("", name):
            self._decided.setdefault((path, value.dim(), self._copies), self._axis_of(name))
            return self._scope.inputs[name]  # type: ignore[no-any-return]
        if (edges := self._edges_of(path, value, kind)) is not None:
            return edges
        cut = self._cuts.get(value)
        if cut is not None and cut[0] == value._version and kind in ("", cut[1].rows):
            return cut[2]
        version, name = self._attributes.get(value, (-1, ""))
        if name and version == value._version and kind in ("", name):
            return self._share(value, RowAxis(name, 0), path)
        placement = self._scope.placements.get(value)
        if placement is not None:
            return self._boundary.enter(value, rows=True)
        where = self._where(path, value, kind)
        if where is None:
            return self._boundary.enter(value.to(self._scope.device), rows=False)
        ids = value.dtype == torch.int64 and value.dim() == 2 and value.size(0) == 2
        if ids and where.axis == 1 and self._sets[where.rows].ends is not None:
            raise ModelError(
                f"{path} to be the graph's edge_index of {where.rows}, with the same values",
                f"an int64 tensor of shape {list(value.shape)} with other values",
                where="net(...)",
                hint="kagome.shard(model, Data(edge_index=...)) with the edges that forward uses, in that "
                "order; net.place(tensor, 'edges', axis=1) for two numbers an edge that are no ids",
            )
        return self._share(value, where, path)

    def _axis_of(self, name: str) -> RowAxis | None:
        """Return the rows of an attribute of the graph: a later argument in its place has such rows too."""
        placement = self._scope.placements.get(self._scope.inputs[name])
        found = None if placement is None else self._sets.of(placement)
        return None if found is None or placement is None else RowAxis(found.name, placement.axis)

    def _edges_of(self, path: str, value: Tensor, kind: str) -> Tensor | None:
        """Return own edges for a tensor that is an edge set of the graph, by its values.

        Raises:
            ModelError: If two edge sets between other vertices have these values.
        """
        if value.dtype != torch.int64 or value.dim() != 2 or value.shape[0] != 2 or not self._edges:
            return None
        numbers, copies = self._batch(value)
        if not copies and all(view.count != value.size(1) for view in self._scope.views):
            self._refuse_copies(path, value)
            return None
        by_view = {each.placement.view: each.name for each in self._sets.values() if each.ends is not None}
        names = [by_view[number] for number in numbers] if copies else self._edges.get(_digest(value), [])
        if kind in names:
            names = [kind]
        if len({self._sets[name].ends for name in names if name in self._sets}) > 1:
            raise ModelError(
                "edges whose values say which edge set they are",
                f"{path}, with the values of {' and of '.join(names)}",
                hint="an argument edge_index_dict, whose keys name the sets",
            )
        if not names:
            return None
        if copies:
            return self._scope.batches.edges(self._sets[names[0]].placement.view, copies)
        self._known[value] = names[0], value._version
        return self._scope.inputs[names[0]]  # type: ignore[no-any-return]

    def _batch(self, value: Tensor) -> tuple[list[int], int]:
        """Return the views whose edges a tensor has, of several samples, and their number; 0 if none."""
        if value.dtype != torch.int64 or value.dim() != 2 or value.shape[0] != 2:
            return [], 0
        version, numbers, copies = self._batches.get(value, (-1, [], 0))
        if version == value._version:
            return numbers, copies
        # Compared on the CPU, where the graph's edges are; the answer is kept until the tensor changes.
        numbers, copies, given = [], 0, value.detach().cpu()
        for number, index in self._graph.items():
            if index.size(1) and value.size(1) > index.size(1) and value.size(1) % index.size(1) == 0:
                found = self._scope.batches.copies_in(number, index, given)
                if found:
                    numbers, copies = [*numbers, number], found
        self._batches[value] = value._version, numbers, copies
        return numbers, copies

    def _refuse_copies(self, path: str, value: Tensor) -> None:
        """Refuse edges of several copies of the graph whose ids are not those of a batch."""
        size = value.size(1)
        for count in {view.count for view in self._scope.views if view.count and self._channel.size > 1}:
            if size > count and size % count == 0 and _digest(value[:, :count]) in self._edges:
                raise ModelError(
                    f"the graph's {count:,} edges, or those of {size // count} samples, shifted from sample "
                    "to sample by the numbers of vertices",
                    f"{size:,} in {path}, with other ids from the second sample on",
                    where="net(...)",
                    hint="torch.cat([edge_index + i * sizes for i in range(batch)], dim=1) with sizes "
                    "[[sources], [targets]]; or a batch as an axis of its own, [batch, N, F]",
                )

    def _where(self, path: str, value: Tensor, kind: str) -> RowAxis | None:
        """Return the rows of a tensor by its sizes; the ranks agree the first time."""
        key = path, value.dim(), self._copies
        if key not in self._decided:
            asked = [self._sets[kind]] if kind else [*self._sets.values()]
            mine = [
                [rows.name, axis, copies]
                for rows in asked
                for axis, size in enumerate(value.shape)
                for copies in sorted({1, self._copies})
                if size in (rows.count * copies, rows.size * copies)
            ]
            here = f"{path}: {_kind(value)}, whose rows are to be found"
            told = self._comparisons.gather(
                [mine, list(value.shape)], f"rows of {path}", here=here, alone=not self._first
            )
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
        if len({(rows, copies) for rows, _, copies in found}) > 1:
            sizes = ", ".join(f"{each.size:,} {each.name}" for each in self._sets.values())
            raise ModelError(
                "a tensor whose sizes say whether it has rows of vertices or of edges, and of which",
                f"{path} of shape {list(value.shape)}: the graph has {sizes}",
                hint=HINT,
            )
        axes = [axis for _, axis, _ in found]
        # Where several axes have that size, rows are the last but one, as in PyG: [.., N, F].
        axis = axes[0] if len(axes) == 1 else value.dim() - 2 if value.dim() - 2 in axes else axes[0]
        return RowAxis(found[0][0], axis, found[0][2])

    def _share(self, value: Tensor, where: RowAxis, path: str) -> Tensor:
        rows = self._sets.batched(where.rows, where.copies)
        own, size = rows.own, value.size(where.axis)
        if size not in (rows.count, rows.size):
            raise ModelError(
                f"{path} with {rows.count:,} rows along axis {where.axis}, this rank's own {where.rows}, or "
                f"{rows.size:,}, all of the graph",
                f"{size:,} in shape {list(value.shape)}",
                where=f"rank {self._channel.rank}",
                hint="x[net.own()] for own rows of a tensor of the whole graph",
            )
        moved = value.to(self._scope.device)
        # With as many own rows as the graph has, the rank has the whole graph, in its own order.
        share = moved if size == rows.count else moved.index_select(where.axis, own)
        share = self._boundary.enter(share, rows=True)
        self._scope.placements.put(share, rows.placement.along(where.axis))
        if not value.requires_grad and share is not value:
            self._cuts[value] = value._version, where, share
        return share


# Comparisons ---------------------------------------------------------------------------------------

# [Note: alone] Ranks compare each layout of arguments when they first meet it:
#
#     call 1   rank 0   compares with all   ─┐ the layout of the arguments, and whose rows they have
#              rank 1   compares with all   ─┘
#     call 2   known arguments: nothing is compared, and nothing is sent
#     call 3   rank 0   known arguments, so it goes on and waits for rows of rank 1
#              rank 1   new ones: it sees that rank 0 has passed call 3, and raises an error on all ranks
#
# How far a rank is stands in what its watchdog publishes every 2 s anyway, so no call sends a message for it.
PAUSE: Final = 0.02
"""Seconds between two looks at what the other ranks have published."""
GONE: Final = 30.0
"""Seconds without a sign of life after which a rank counts as gone."""


class Comparisons:
    """What ranks compare of the arguments of a model's calls: see [Note: alone].

    Args:
        channel: The channel of all ranks of the graph.
    """

    def __init__(self, channel: Channel) -> None:
        # A rank that has the whole graph compares with nobody, and may call alone.
        self._channel, self._watch = channel, None if channel.size == 1 else channel.watch
        self.layout = 1
        """The number of the layout of the present call's arguments, in the order in which ranks met them."""

    @contextmanager
    def call(self) -> Iterator[None]:
        """Wrap the placing of the arguments of one call. All ranks call it alike."""
        if (watch := self._watch) is None:
            yield
            return
        # An error in the block leaves the layout at 0: this rank has not passed the call.
        before = watch.progress
        watch.progress = CallProgress(before.call + 1, before.compared)
        yield
        watch.progress = watch.progress._replace(layout=self.layout)

    def gather(self, mine: object, action: str, *, here: str, alone: bool) -> list[Any]:
        """Return what each rank has to say, on every rank. It runs within :meth:`call`.

        Args:
            mine: What this rank says: plain data.
            action: The comparison, for errors.
            here: This rank's arguments in words.
            alone: Whether another rank may go on without comparing.

        Raises:
            ModelError: If another rank goes on without comparing.
        """
        if self._watch is not None:
            self._watch.progress = self._watch.progress._replace(compared=self._watch.progress.compared + 1)
            if alone:
                self._refuse_alone(here)
        return self._channel.gather_objects(mine, action)

    def _refuse_alone(self, here: str) -> None:
        """Return when all ranks compare, or when only a message to them can tell whether they do.

        Raises:
            ModelError: If a rank goes on without comparing.
        """
        watch, channel, names = self._watch, self._channel, self._channel.names
        assert watch is not None
        # The others may be waiting for this rank in the same way.
        watch.tell()
        mine, end = watch.progress, time.monotonic() + channel.timeout
        waiting = [name for rank, name in enumerate(names) if rank != channel.rank]
        while waiting and time.monotonic() < end:
            for name in [*waiting]:
                seen = watch.seen(name)
                # A message to a rank that is gone, or of which nothing is known, ends in an error of its own.
                if seen is None or time.time() - seen.alive > GONE or seen.progress.compared >= mine.compared:
                    waiting.remove(name)
                # It is in a later call, or has placed the arguments of this one.
                elif (seen.progress.call, seen.progress.layout > 0) > (mine.call, False):
                    raise ModelError(
                        "arguments of one kind on all ranks, in each call",
                        f"here {here}, unlike earlier calls; rank {name} has gone on with arguments of an "
                        "earlier call",
                        where=f"net(...), rank {names[channel.rank]}",
                        hint="the same arguments on all ranks; a rank without rows gives a tensor of none",
                    )
            time.sleep(PAUSE)


def edges_of(given: Data | HeteroData | Graph | None) -> dict[int, Tensor]:
    """Return the edges of a graph by the number of their view; none if it was read from files."""
    if given is None:
        return {}
    if isinstance(given, Data):
        return {0: given.edge_index.detach().cpu()}
    edges = Graph.of(given).edges.values()
    return {number: each.index.detach().cpu() for number, each in enumerate(edges)}


def _digest(edges: Tensor) -> bytes:
    """Return a digest of a list of edges, by which it is recognized."""
    array = edges.detach().cpu().contiguous().numpy()
    return hashlib.blake2b(array.data, digest_size=16).digest()


def _kind(value: Any) -> str:
    """Return the kind of an argument, by which ranks compare what they were given."""
    if isinstance(value, Tensor):
        return f"a tensor of {value.dim()} axes"
    if isinstance(value, Mapping) and type(value) is dict:
        return f"a dict of {', '.join(f'{key}: {_kind(each)}' for key, each in value.items())}"
    if isinstance(value, Data):
        return f"a Data of {', '.join(f'{key}: {_kind(each)}' for key, each in value.to_dict().items())}"
    if type(value) in (list, tuple):
        return f"a {type(value).__name__} of {', '.join(map(_kind, value))}"
    return type(value).__name__
