"""Compiled passes over edge lists: which part reads which vertex, one part's edges, and sorted-list helpers.

Where it sits: ``graph.partition.partition``, ``graph.partition.quality``, ``topology`` and
``graph.datasets.builtin`` call these, with numpy arrays in and out. Each makes one or two passes over the
edges and keeps a few numbers per vertex, where sorting would copy all edges.
"""

from __future__ import annotations

import numpy as np

from kagome.graph.structure.kernels import Floats, Ints, Longs
from kagome.kernels.base.jit import compiled, exact


@exact
@compiled
def read_by(source: Longs, target: Longs, owner: Ints, parts: int) -> tuple[Longs, Longs, int]:
    """Return which parts read each vertex without owning it, as one bit per part.

    Args:
        source: The sources of the edges.
        target: The targets of the edges.
        owner: The part of each vertex.
        parts: The number of parts.

    Returns:
        Words of 64 bits, ``[N, words]``; the in-edges of each part; the number of edges between two parts.

    Cost: one pass over the edges; 8 bytes a vertex for each 64 parts.
    """
    readers = np.zeros((owner.size, (parts + 63) // 64), np.int64)
    in_edges = np.zeros(parts, np.int64)
    cut = 0
    for e in range(source.size):
        s = source[e]
        q = owner[target[e]]
        in_edges[q] += 1
        if owner[s] != q:
            cut += 1
            # Part q is bit q % 64 of word q // 64.
            readers[s, q >> 6] |= np.int64(1) << np.int64(q & 63)
    return readers, in_edges, cut


@exact
@compiled
def halo_counts(readers: Longs, parts: int) -> Longs:
    """Return for each part the number of rows that it reads and others own.

    Cost: one pass over the table.
    """
    count = np.zeros(parts, np.int64)
    for v in range(readers.shape[0]):
        for w in range(readers.shape[1]):
            if readers[v, w] != 0:
                for q in range(w * 64, min(parts, w * 64 + 64)):
                    # A word with bit 63 is negative, and its shift fills with ones; ``& 1`` drops them.
                    count[q] += (readers[v, w] >> np.int64(q & 63)) & 1
    return count


@exact
@compiled
def sent_counts(readers: Longs, owner: Ints, parts: int) -> Longs:
    """Return for each part the number of rows that it sends, each once for every part that reads it.

    Cost: one pass over the table.
    """
    count = np.zeros(parts, np.int64)
    for v in range(readers.shape[0]):
        for w in range(readers.shape[1]):
            word = readers[v, w]
            while word != 0:
                count[owner[v]] += 1
                word &= word - 1  # drops the lowest bit
    return count


@exact
@compiled
def halo_of(readers: Longs, owner: Ints, part: int, parts: int) -> tuple[Longs, Longs]:
    """Return the vertices that a part reads and others own, and the number from each owner.

    The vertices are sorted by owner, then ascending.

    Cost: two passes over the table.
    """
    word, bit = part >> 6, np.int64(part & 63)
    counts = np.zeros(parts, np.int64)
    for v in range(owner.size):
        counts[owner[v]] += (readers[v, word] >> bit) & 1
    # Where the rows of each owner begin.
    fill = np.zeros(parts, np.int64)
    for q in range(1, parts):
        fill[q] = fill[q - 1] + counts[q - 1]
    halo = np.empty(counts.sum(), np.int64)
    for v in range(owner.size):
        if (readers[v, word] >> bit) & 1:
            halo[fill[owner[v]]] = v
            fill[owner[v]] += 1
    return halo, counts


@exact
@compiled
def sent_by(readers: Longs, own: Longs, parts: int) -> tuple[Longs, Longs]:
    """Return the positions in ``own`` of the rows that each peer reads, and the number of rows for each peer.

    The positions are sorted by peer, then ascending.

    Cost: one pass over the own rows for each peer.
    """
    counts = np.zeros(parts, np.int64)
    for v in own:
        for q in range(parts):
            counts[q] += (readers[v, q >> 6] >> np.int64(q & 63)) & 1
    send = np.empty(counts.sum(), np.int64)
    k = 0
    # A peer lists its halo by owner, then ascending. ``own`` ascends, so both ends agree on the order of the
    # rows without a message.
    for q in range(parts):
        if counts[q] > 0:
            for i in range(own.size):
                if (readers[own[i], q >> 6] >> np.int64(q & 63)) & 1:
                    send[k] = i
                    k += 1
    return send, counts


@exact
@compiled
def edges_of(source: Longs, target: Longs, owner: Ints, part: int, local: Longs) -> tuple[Longs, Longs]:
    """Return the in-edges of a part in local ids, in the order of the whole list.

    Args:
        source: The sources of all edges.
        target: The targets of all edges.
        owner: The part of each vertex.
        part: The part whose edges are returned.
        local: The local id of each vertex that the part owns or reads.

    Returns:
        The edges ``[2, E]``, and the position of each in the whole list, ascending.

    Cost: two passes over all edges.
    """
    # The first pass counts, so that the second fills arrays of the right size.
    count = 0
    for e in range(target.size):
        count += owner[target[e]] == part
    edge_index = np.empty((2, count), np.int64)
    edge_ids = np.empty(count, np.int64)
    k = 0
    for e in range(target.size):
        if owner[target[e]] == part:
            edge_index[0, k] = local[source[e]]
            edge_index[1, k] = local[target[e]]
            edge_ids[k] = e
            k += 1
    return edge_index, edge_ids


@exact
@compiled
def shared(one: Longs, other: Longs) -> tuple[int, int]:
    """Return the number of distinct values of a sorted list, and how many of them are also in the other."""
    count = both = k = 0
    # One walk along two sorted lists; k never goes back.
    for i in range(one.size):
        if i > 0 and one[i] == one[i - 1]:
            continue
        count += 1
        while k < other.size and other[k] < one[i]:
            k += 1
        if k < other.size and other[k] == one[i]:
            both += 1
    return count, both


@exact
@compiled
def squeeze(ordered: Longs) -> int:
    """Move the distinct values of a sorted list to its front, and return their number."""
    count = 0
    for i in range(ordered.size):
        if i == 0 or ordered[i] != ordered[i - 1]:
            ordered[count] = ordered[i]
            count += 1
    return count


@exact
@compiled
def sort_rows(indptr: Longs, indices: Ints) -> None:
    """Sort each vertex's neighbours in place."""
    for v in range(indptr.size - 1):
        indices[indptr[v] : indptr[v + 1]].sort()


@exact
@compiled
def simple(indptr: Longs, indices: Ints) -> tuple[Longs, Longs]:
    """Return sorted neighbour lists without duplicates, in the 64-bit integers that METIS reads.

    Cost: two passes over the lists; 8 bytes for each remaining neighbour.
    """
    # Lists are sorted, so duplicates stand side by side.
    start = np.zeros_like(indptr)
    for v in range(indptr.size - 1):
        count = 0
        for k in range(indptr[v], indptr[v + 1]):
            if k == indptr[v] or indices[k] != indices[k - 1]:
                count += 1
        start[v + 1] = start[v] + count
    short = np.empty(start[-1], np.int64)
    place = 0
    for v in range(indptr.size - 1):
        for k in range(indptr[v], indptr[v + 1]):
            if k == indptr[v] or indices[k] != indices[k - 1]:
                short[place] = indices[k]
                place += 1
    return start, short


@exact
@compiled
def both_ways(keys: Longs, n: int) -> Longs:
    """Return every edge in both directions, sorted by source, then target.

    Args:
        keys: ``low * n + high`` of each edge with low < high, ascending and without duplicates.
        n: The number of vertices.

    Returns:
        The edges, ``[2, 2 len(keys)]``.

    Cost: two passes over the edges.
    """
    start = np.zeros(n + 1, np.int64)
    for key in keys:
        start[key // n + 1] += 1
        start[key % n + 1] += 1
    for v in range(n):
        start[v + 1] += start[v]
    edges = np.empty((2, 2 * keys.size), np.int64)
    # In this order a vertex meets its smaller neighbours first, ascending, and then its larger ones.
    for key in keys:
        low, high = key // n, key % n
        edges[0, start[high]] = high
        edges[1, start[high]] = low
        start[high] += 1
        edges[0, start[low]] = low
        edges[1, start[low]] = high
        start[low] += 1
    return edges


@compiled
def guide(reach: Floats) -> Longs:
    """Divide the range into as many equal steps as intervals; return the interval where each step begins."""
    size = reach.size - 1
    step = reach[size] / size
    found = np.empty(size, np.int64)
    at = 0
    for k in range(size):
        while at + 1 < size and reach[at + 1] <= k * step:
            at += 1
        found[k] = at
    return found


@compiled
def interval(reach: Floats, steps: Longs, at: Floats) -> Longs:
    """Return the interval of ``reach`` that contains each number, with a lookup table instead of a search.

    The result equals ``searchsorted(reach, at, "right") - 1``.

    Args:
        reach: The ends of the intervals, ascending from 0.
        steps: The lookup table from :func:`guide`.
        at: Numbers from 0 to ``reach[-1]``; a number equal to the end belongs to the last interval.

    Cost: about one comparison a number; a search would need the logarithm of the number of intervals.
    """
    # The range has ``size`` equal steps; the table gives the interval in which a number's step begins.
    size = steps.size
    scale = size / reach[size]
    found = np.empty(at.size, np.int64)
    for i in range(at.size):
        k = steps[min(size - 1, int(at[i] * scale))]
        # Rounding of ``at * scale`` may land one step too far to the right.
        while k > 0 and reach[k] > at[i]:
            k -= 1
        while k + 1 < size and reach[k + 1] <= at[i]:
            k += 1
        found[i] = k
    return found
