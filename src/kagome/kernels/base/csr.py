"""Compressed sparse rows (CSR): the edges grouped by the row they write and by the row they read.

Where it sits: ``deferred.deferral`` builds a ``Structure`` for each edge list and keeps it while the edges
live. All kernels in ``ops`` walk its layouts. It knows row numbers only: no graphs, parts or layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, is_dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kagome.errors import DataError
from kagome.kernels.base.jit import exact
from kagome.kernels.base.thread_pool import compiled, roomy, share

LARGEST = 2**31 - 1
"""Largest number of rows or edges: both are int32, which halves the bytes that every kernel reads."""
SHORT = 24
"""Rows of at most this many entries are sorted by insertion."""


class Arrays(NamedTuple):
    """The index lists of a layout in the form that compiled loops take."""

    pointer: Any
    column: Any


@dataclass(frozen=True, eq=False)
class CsrLayout:
    """Edges grouped by one end: a compressed sparse row matrix whose entries know their edge.

    Args:
        pointer: Where each row's entries begin, and at last where the last row's entries end.
        middle: Where each row's entries that read halo rows begin; the row's end if it has none.
        column: The row at the other end of each entry's edge.
        order: The position of each entry's edge in the edge list that was given, or a function that finds
            it. Sums without weights never ask for it.

    Shapes:
        ``pointer [R + 1]`` and ``middle [R]`` int64, ``column [E]`` and ``order [E]`` int32.
    """

    pointer: Tensor
    middle: Tensor
    column: Tensor
    order: Tensor | Callable[[], Tensor]

    @property
    def edge(self) -> Tensor:
        """The position of each entry's edge in the edge list that was given, kept from now on."""
        found = self.entries()
        # The function holds the edge list, which may then be freed. ``vars``: the dataclass is frozen.
        vars(self)["order"] = found
        return found

    def entries(self) -> Tensor:
        """Return what ``edge`` is, without keeping it."""
        return self.order if isinstance(self.order, Tensor) else self.order()

    @cached_property
    def arrays(self) -> Arrays:
        """The index lists that every loop reads, as numpy arrays; available on a CPU only."""
        return Arrays(self.pointer.numpy(), self.column.numpy())

    @cached_property
    def edge_array(self) -> Any:
        """``edge`` as a numpy array; available on a CPU only."""
        return self.edge.numpy()

    @property
    def rows(self) -> int:
        """The number of rows in the layout."""
        return self.middle.numel()

    @property
    def edges(self) -> int:
        """The number of entries in the layout."""
        return self.column.numel()

    @cached_property
    def prepared(self) -> dict[Any, Any]:
        """Results that a device's kernels computed from ``pointer`` and ``middle``, kept with the layout."""
        return {}

    @cached_property
    def by_edge(self) -> CsrLayout:
        """The layout in which each entry reads its own edge, in place of the row at the edge's other end."""
        found = replace(self, column=self.edge)
        # Pointer and middle are the same, so both layouts share what GPU kernels derived from them. ``vars``
        # is used because the dataclass is frozen.
        vars(found)["prepared"] = self.prepared
        return found

    @cached_property
    def own(self) -> CsrLayout:
        """The layout of the entries that read own rows, without gaps; the layout itself if all of them do."""
        return self._taken(self.pointer[:-1], self.middle)

    @cached_property
    def halo(self) -> CsrLayout:
        """The layout of the entries that read halo rows, without gaps."""
        return self._taken(self.middle, self.pointer[1:])

    def _taken(self, begin: Tensor, end: Tensor) -> CsrLayout:
        pointer = torch.zeros_like(self.pointer)
        torch.cumsum(end - begin, 0, out=pointer[1:])
        # A part without halo rows needs no second copy of its edges.
        if int(pointer[-1]) == self.edges:
            return self
        place = _places(begin, pointer)
        column = self.column.index_select(0, place)
        if isinstance(self.order, Tensor):
            order: Tensor | Callable[[], Tensor] = self.order.index_select(0, place)
        else:
            # A copy of this layout, which has no spans: with itself it would form a cycle.
            order = partial(_taken_entries, replace(self), begin, pointer)
        # The middle is each row's end: a layout of one span is walked as a whole and not divided again.
        return CsrLayout(pointer, pointer[1:], column, order)

    def kept(self) -> Iterator[Tensor]:
        """Yield the tensors that this layout keeps by now: those of ``own`` and ``halo`` too."""
        yield from (self.pointer, self.middle, self.column)
        yield from _tensors([self.order, *self.prepared.values()])
        for name in ("own", "halo"):
            part = vars(self).get(name)
            # A layout whose columns are all own rows returns itself as ``own``.
            if part is not None and part is not self:
                yield from part.kept()

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that this layout keeps by now."""
        return _bytes_of(self.kept())


def _places(begin: Tensor, pointer: Tensor) -> Tensor:
    """Return which entry of the layout each entry of a span is, by where rows begin in both."""
    row = torch.repeat_interleave(pointer.diff())
    # Entry k of row i, counted over the span, is entry k - pointer[i] + begin[i] of the layout.
    return torch.arange(row.numel(), device=row.device) + (begin - pointer[:-1]).index_select(0, row)


def _taken_entries(layout: CsrLayout, begin: Tensor, pointer: Tensor) -> Tensor:
    return layout.entries().index_select(0, _places(begin, pointer))


def _bytes_of(tensors: Iterable[Tensor]) -> int:
    # Tensors may share memory, as ``middle`` does where it is a view of ``pointer``: count each storage once.
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def _tensors(value: Any) -> list[Tensor]:
    """Return the tensors in nested sequences and dataclasses."""
    if isinstance(value, Tensor):
        return [value]
    if is_dataclass(value):
        value = list(vars(value).values())
    return [tensor for each in value for tensor in _tensors(each)] if isinstance(value, (list, tuple)) else []


@dataclass(frozen=True, eq=False)
class Structure:
    """An edge list with the layouts that kernels need; each is built on first use and kept.

    Args:
        source: The row that each edge reads.
        target: The row that each edge writes.
        own: The number of rows that may be written; every target is below it.
        num_sources: The number of rows that may be read; every source is below it.
        own_sources: The number of own rows among those that may be read; halo rows follow them. None if
            the rows that are read and written are of one vertex set, so that it is ``own``.

    Shapes:
        ``source [E]``, ``target [E]``, int64.

    Cost:
        4 bytes an edge and 16 a row for each of the two layouts; O(E) time. Where edges have weights, 4 bytes
        an edge more, and the time once more.
    """

    source: Tensor
    target: Tensor
    own: int
    num_sources: int
    own_sources: int | None = None

    @property
    def first_halo(self) -> int:
        """The number of the first halo row among the rows that may be read."""
        return self.own if self.own_sources is None else self.own_sources

    @property
    def bipartite(self) -> bool:
        """Whether edges read rows of one vertex set and write rows of another."""
        return self.own_sources is not None

    @cached_property
    def by_target(self) -> CsrLayout:
        """The in-edges of each own row, sorted by source; edges with equal sources keep the given order."""
        return self._grouped()[0]

    def with_edges(self) -> Structure:
        """Return this object, whose layouts know their edges from the start: for sums with weights."""
        if "by_target" not in vars(self):
            layout, order = self._grouped()
            vars(layout)["order"] = order
            vars(self)["by_target"] = layout
        return self

    def _grouped(self) -> tuple[CsrLayout, Tensor]:
        """Return ``by_target``, and the order of its entries, which it can find again."""
        self._fits()
        if self.source.is_cuda:
            layout = _sorted(self.target, self.source, self.own, self.num_sources, self.first_halo)
            return layout, layout.edge
        ends = self.target, self.source, self.own, self.first_halo
        pointer, middle, column, edge = _counted_layout(*ends)
        return CsrLayout(pointer, middle, column, partial(_counted_order, *ends)), edge

    @cached_property
    def by_source(self) -> CsrLayout:
        """The out-edges of each row that may be read, sorted by target; equal ones keep the given order."""
        layout = self.by_target
        if layout.column.is_cuda:
            return _sorted(self.source, self.target, self.num_sources, self.own, self.own)
        # Transposing by_target visits the targets in ascending order, so each new row is sorted already.
        # One loop moves columns and edges. Where edges are not asked for, columns stand in for them.
        known = isinstance(layout.order, Tensor)
        moved = layout.edge if known else layout.column
        start, other, which = _turned_layout(layout, moved, self.num_sources)
        # Targets are own rows, so no entry of this layout reads a halo row: the middle is each row's end.
        order = which if known else partial(_turned_order, layout, self.num_sources)
        return CsrLayout(start, start[1:], other, order)

    @cached_property
    def walked(self) -> Structure:
        """The same edges in the order in which ``by_target`` walks them, or this object if most already are.

        Edge values that only kernels write and read are then accessed one after another. In the user's order
        the accesses are spread over memory, which makes attention take a third more time.

        Cost:
            4 bytes an edge.
        """
        if "by_target" in vars(self):
            order = self.by_target.entries()
        else:  # both are found at once
            vars(self)["by_target"], order = self._grouped()
        layout = self.by_target
        # An entry follows its predecessor if their edges are neighbours in the list. Where half of the
        # entries do, the user's order is close to that of the kernels, and a copy of the edges does not pay.
        if 2 * int((order.diff() == 1).sum()) >= layout.edges - 1:
            vars(layout)["order"] = order
            return self
        return _Walked(self, layout)

    @cached_property
    def degree(self) -> Tensor:
        """The number of in-edges of each own row."""
        return self.by_target.pointer.diff()

    @property
    def edges(self) -> int:
        """The number of edges in the list."""
        return self.source.numel()

    def kept(self) -> Iterator[Tensor]:
        """Yield the tensors kept by now beside the edge list itself, which belongs to the caller."""
        built = vars(self)
        for name in ("by_target", "by_source"):
            if name in built:
                yield from built[name].kept()
        if "degree" in built:
            yield built["degree"]
        if built.get("walked", self) is not self:
            yield from built["walked"].kept()

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors kept by now, without the edge list itself."""
        return _bytes_of(self.kept())

    def _fits(self) -> None:
        if max(self.num_sources, self.edges) > LARGEST:
            raise DataError(
                f"a part of at most {LARGEST} rows and as many edges",
                f"{self.num_sources} rows and {self.edges} edges",
                hint="more parts: --parallel.graph",
            )
        # Kernels do not check bounds: an index past the end would read other memory.
        for ids, rows in ((self.source, self.num_sources), (self.target, self.own)):
            least, most = (int(end) for end in torch.aminmax(ids)) if ids.numel() else (0, -1)
            if least < 0 or most >= rows:
                wrong = least if least < 0 else most
                raise IndexError(f"index {wrong} is out of bounds for dimension 0 with size {rows}")


class _Walked(Structure):
    """Edges in the order in which ``by_target`` walks them: their ends follow from it and are not kept.

    Args:
        given: The edges in the order that was given.
        layout: Their ``by_target``.
    """

    def __init__(self, given: Structure, layout: CsrLayout) -> None:
        place = torch.arange(layout.edges, dtype=torch.int32, device=layout.column.device)
        # As in a frozen dataclass: ``vars`` in place of assignments.
        vars(self).update(own=given.own, num_sources=given.num_sources, own_sources=given.own_sources)
        vars(self)["by_target"] = replace(layout, order=place)

    @property
    def source(self) -> Tensor:
        """The row that each edge reads, made at each access."""
        return self.by_target.column.long()

    @property
    def target(self) -> Tensor:
        """The row that each edge writes, made at each access."""
        # The size is known: a GPU is not waited for.
        return torch.repeat_interleave(self.by_target.pointer.diff(), output_size=self.edges)

    @property
    def edges(self) -> int:
        """The number of edges in the layout."""
        return self.by_target.edges

    @cached_property
    def walked(self) -> Structure:
        """The edges themselves, as they are walked."""
        return self


def _sorted(major: Tensor, minor: Tensor, rows: int, columns: int, own: int) -> CsrLayout:
    """Build the layout by one stable sort of (major, minor); it works on any device."""
    # Both ends in one key: their product is below 2^62, because neither number of rows exceeds LARGEST.
    edge = torch.argsort(major * max(columns, 1) + minor, stable=True)
    column, row = minor[edge], major[edge]
    pointer = torch.zeros(rows + 1, dtype=torch.int64, device=major.device)
    torch.cumsum(torch.bincount(major, minlength=rows), 0, out=pointer[1:])
    middle = pointer[:-1] + torch.bincount(row[column < own], minlength=rows)
    return CsrLayout(pointer, middle, column.to(torch.int32), edge.to(torch.int32))


def _array(ids: Tensor) -> Any:
    return ids.contiguous().numpy()


def _counted_layout(major: Tensor, minor: Tensor, rows: int, own: int) -> tuple[Tensor, ...]:
    return tuple(map(torch.from_numpy, grouped(_array(major), _array(minor), rows, own)))


def _counted_order(major: Tensor, minor: Tensor, rows: int, own: int) -> Tensor:
    return _counted_layout(major, minor, rows, own)[3]


def _turned_layout(layout: CsrLayout, edge: Tensor, rows: int) -> tuple[Tensor, ...]:
    return tuple(map(torch.from_numpy, turned(*layout.arrays, edge.numpy(), rows)))


def _turned_order(layout: CsrLayout, rows: int) -> Tensor:
    return _turned_layout(layout, layout.edge, rows)[2]


# Sorting by counting, which moves each edge once ----------------------------------------------------------


def grouped(major: Any, minor: Any, rows: int, own: int) -> tuple[Any, Any, Any, Any]:
    """Sort edges by ``major``, then ``minor``, then their order in the list.

    Args:
        major: The end of each edge that names the row.
        minor: The other end of each edge.
        rows: The number of rows.
        own: The first minor that counts as a halo row: ``middle`` is where these begin in each row.

    Returns:
        ``pointer``, ``middle``, ``column`` and ``edge`` of a ``CsrLayout``.

    Cost:
        O(E) and a short sort a row. A row that is already sorted is only checked.
    """
    pointer = np.zeros(rows + 1, np.int64)
    column, edge = np.empty(major.size, np.int32), np.empty(major.size, np.int32)
    _counted(major, minor, pointer, pointer[:-1].copy(), column, edge)
    middle = np.empty(rows, np.int64)
    begin, end = pointer[:-1], pointer[1:]
    share(lambda low, high: _ordered(low, high, own, begin, end, column, edge, middle), begin, end, 16)
    return pointer, middle, column, edge


def turned(pointer: Any, column: Any, edge: Any, rows: int) -> tuple[Any, Any, Any]:
    """Transpose a layout: sort its entries by column, then row, then order.

    Args:
        pointer: Where each row's entries begin, and at last the end.
        column: The column of each entry.
        edge: The edge of each entry.
        rows: The number of rows of the transpose.

    Returns:
        ``pointer``, ``column`` and ``edge`` of the transpose.
    """
    start = np.zeros(rows + 1, np.int64)
    other, which = np.empty_like(column), np.empty_like(edge)
    _transposed(pointer, column, edge, start, start[:-1].copy(), other, which)
    return start, other, which


@exact
@compiled
def _counted(major: Any, minor: Any, pointer: Any, fill: Any, column: Any, edge: Any) -> None:
    # A counting sort: count the entries of each row, turn the counts into offsets, and place the edges.
    for e in range(major.size):
        pointer[major[e] + 1] += 1
    # Here pointer[i] is already an offset and pointer[i + 1] still a count; fill[i] is row i's next free
    # place.
    for i in range(pointer.size - 1):
        fill[i] = pointer[i]
        pointer[i + 1] += pointer[i]
    for e in range(major.size):
        k = fill[major[e]]
        fill[major[e]] = k + 1
        column[k] = minor[e]
        edge[k] = e


@exact
@roomy
def _ordered(
    low: int, high: int, own: int, begin: Any, end: Any, column: Any, edge: Any, middle: Any
) -> None:
    for i in range(low, high):
        first, last = begin[i], end[i]
        straight = True
        for k in range(first + 1, last):
            straight &= column[k - 1] <= column[k]
        if not straight and last - first <= SHORT:
            # Insertion sort moves an entry past greater columns only, so that equal ones keep their order.
            for k in range(first + 1, last):
                c, e, j = column[k], edge[k], k
                while j > first and column[j - 1] > c:
                    column[j], edge[j] = column[j - 1], edge[j - 1]
                    j -= 1
                column[j], edge[j] = c, e
        elif not straight:
            # Column and edge share one word, so that equal columns keep the order of their edges.
            word = np.empty(last - first, np.int64)
            for k in range(first, last):
                word[k - first] = (np.int64(column[k]) << 32) | np.int64(edge[k])
            word.sort()
            for k in range(first, last):
                column[k] = word[k - first] >> 32
                edge[k] = word[k - first] & 0xFFFFFFFF
        # Halo rows have the greatest ids, so their entries are the last ones of a sorted row.
        split = last
        while split > first and column[split - 1] >= own:
            split -= 1
        middle[i] = split


@exact
@compiled
def _transposed(pointer: Any, column: Any, edge: Any, start: Any, fill: Any, other: Any, which: Any) -> None:
    for k in range(column.size):
        start[column[k] + 1] += 1
    for u in range(start.size - 1):
        fill[u] = start[u]
        start[u + 1] += start[u]
    # Rows are walked in ascending order, which sorts the entries of each new row.
    for i in range(pointer.size - 1):
        for k in range(pointer[i], pointer[i + 1]):
            place = fill[column[k]]
            fill[column[k]] = place + 1
            other[place] = i
            which[place] = edge[k]
