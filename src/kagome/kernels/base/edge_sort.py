"""Edge sort: group edges into compressed sparse rows by counting, which moves each edge once.

Where it sits: ``csr`` builds its layouts with it on a CPU.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kagome.kernels.base.thread_pool import compiled, roomy, share

SHORT = 24
"""Rows of at most this many entries are sorted by insertion."""


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


@compiled
def _counted(major: Any, minor: Any, pointer: Any, fill: Any, column: Any, edge: Any) -> None:
    for e in range(major.size):
        pointer[major[e] + 1] += 1
    for i in range(pointer.size - 1):
        fill[i] = pointer[i]
        pointer[i + 1] += pointer[i]
    for e in range(major.size):
        k = fill[major[e]]
        fill[major[e]] = k + 1
        column[k] = minor[e]
        edge[k] = e


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
        split = last
        while split > first and column[split - 1] >= own:
            split -= 1
        middle[i] = split


@compiled
def _transposed(pointer: Any, column: Any, edge: Any, start: Any, fill: Any, other: Any, which: Any) -> None:
    for k in range(column.size):
        start[column[k] + 1] += 1
    for u in range(start.size - 1):
        fill[u] = start[u]
        start[u + 1] += start[u]
    for i in range(pointer.size - 1):
        for k in range(pointer[i], pointer[i + 1]):
            place = fill[column[k]]
            fill[column[k]] = place + 1
            other[place] = i
            which[place] = edge[k]
