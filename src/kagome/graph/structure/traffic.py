"""Traffic: compiled loops that move vertices until the rank which sends or reads most rows does so less.

Where it sits: ``graph.partition.partitioners`` calls :func:`relieve` on the cut that it has chosen; numpy
arrays in, numpy arrays out, no torch.

[Note: busiest] All ranks wait for the one with most rows to send, or to read, whose gradients it sends in
backward. Moving vertex v from part p to part q changes these numbers in two ways::

    v's own row      p no longer sends it to the parts that read it; q does, except to itself
    rows v reads     row u no longer goes to p if v was its only reader there, and goes to q if it did not yet
"""

from __future__ import annotations

import numpy as np

from kagome.graph.structure.kernels import Floats, Longs
from kagome.kernels.base.jit import compiled, exact


@exact
@compiled
def lists(source: Longs, target: Longs, num_nodes: int) -> tuple[Longs, Longs]:
    """Return the targets of each vertex's out-edges, without self-loops, ascending and without duplicates.

    Cost: two passes over the edges and a sort of each list; 16 bytes an edge.
    """
    start = np.zeros(num_nodes + 1, np.int64)
    for e in range(source.size):
        if source[e] != target[e]:
            start[source[e] + 1] += 1
    for v in range(num_nodes):
        start[v + 1] += start[v]
    fill = start[:-1].copy()
    ends = np.empty(start[num_nodes], np.int64)
    for e in range(source.size):
        if source[e] != target[e]:
            ends[fill[source[e]]] = target[e]
            fill[source[e]] += 1
    # Squeezed in place: a list never moves to the right of where it was.
    begin, place = start.copy(), 0
    for v in range(num_nodes):
        start[v] = place
        ends[begin[v] : begin[v + 1]].sort()
        for k in range(begin[v], begin[v + 1]):
            if k == begin[v] or ends[k] != ends[k - 1]:
                ends[place] = ends[k]
                place += 1
    start[num_nodes] = place
    return start, ends[:place].copy()


@compiled
def _readers(start: Longs, ends: Longs, owner: Longs, parts: int) -> tuple[Longs, Longs]:
    """Return how many readers each vertex has in each part, and the rows that each part sends and reads.

    Shapes:
        ``[N, parts]``, ``[2, parts]``.
    """
    readers = np.zeros((owner.size, parts), np.int64)
    rows = np.zeros((2, parts), np.int64)
    for v in range(owner.size):
        for k in range(start[v], start[v + 1]):
            readers[v, owner[ends[k]]] += 1
        for q in range(parts):
            if q != owner[v] and readers[v, q] > 0:
                rows[0, owner[v]] += 1
                rows[1, q] += 1
    return readers, rows


@compiled
def _change(readers: Longs, owner: Longs, sources: Longs, v: int, q: int, change: Longs) -> None:
    """Write by how much rows sent and read change for each part if v moves to part q: see [Note: busiest]."""
    p = owner[v]
    change[:] = 0
    for r in range(change.shape[1]):
        if readers[v, r] > 0:
            if r != p:
                change[0, p] -= 1
                change[1, r] -= 1
            if r != q:
                change[0, q] += 1
                change[1, r] += 1
    for u in sources:
        if owner[u] != p and readers[u, p] == 1:
            change[0, owner[u]] -= 1
            change[1, p] -= 1
        if owner[u] != q and readers[u, q] == 0:
            change[0, owner[u]] += 1
            change[1, q] += 1


@compiled
def _allowed(rows: Longs, change: Longs, way: int, p: int) -> int:
    """Return by how many rows a move relieves part p, or 0 if it is not worth it.

    No other number may reach what p has now, and the sum of all may not grow by more than p is relieved.
    """
    most, grown = rows[way, p], 0
    for r in range(rows.shape[1]):
        grown += change[0, r]
        for k in range(2):
            if change[k, r] > 0 and rows[k, r] + change[k, r] >= most:
                return 0
    relief = -change[way, p]
    return relief if relief > 0 and grown <= relief else 0


@compiled
def relieve(
    out: tuple[Longs, Longs],
    into: tuple[Longs, Longs],
    weight: Floats,
    owner: Longs,
    bounds: Floats,
    rounds: int,
) -> None:
    """Move vertices out of the part that sends or reads most rows, while the bounds hold.

    Args:
        out: Where each vertex's list of the vertices that read it begins, and the lists: :func:`lists`.
        into: The same of the vertices that it reads.
        weight: The in-edges of each vertex.
        owner: The part of each vertex; changed in place.
        bounds: Most vertices ``[0, q]`` and most in-edges ``[1, q]`` of each part q.
        rounds: How often each vertex is looked at, at most.

    Cost: a pass over the edges for each part and round; 8 bytes a vertex and part.
    """
    parts = bounds.shape[1]
    readers, rows = _readers(out[0], out[1], owner, parts)
    load = np.zeros((2, parts))
    for v in range(owner.size):
        load[0, owner[v]] += 1
        load[1, owner[v]] += weight[v]
    change, near = np.zeros((2, parts), np.int64), np.zeros(parts, np.int64)
    # Each part's vertices are looked at in turn, from where the last look at it ended.
    at, idle = np.zeros(parts, np.int64), 0
    for _ in range(rounds * owner.size):
        way, p = 0, 0
        for r in range(parts):
            for k in range(2):
                if rows[k, r] > rows[way, p]:
                    way, p = k, r
        v = at[p]
        while idle < owner.size and owner[v] != p:
            v, idle = (v + 1) % owner.size, idle + 1
        # One whole turn without a move: no move relieves the busiest part.
        if idle >= owner.size:
            break
        at[p], idle = (v + 1) % owner.size, idle + 1
        sources = into[1][into[0][v] : into[0][v + 1]]
        near[:] = readers[v]
        for u in sources:
            near[owner[u]] += 1
        best, most = -1, 0
        for q in range(parts):
            # No part is left without a vertex.
            if q == p or near[q] == 0 or load[0, p] <= 1:
                continue
            if load[0, q] + 1 > bounds[0, q] or load[1, q] + weight[v] > bounds[1, q]:
                continue
            _change(readers, owner, sources, v, q, change)
            relief = _allowed(rows, change, way, p)
            if relief > most:
                best, most = q, relief
        if best < 0:
            continue
        _change(readers, owner, sources, v, best, change)
        rows += change
        for u in sources:
            readers[u, p] -= 1
            readers[u, best] += 1
        load[0, p] -= 1
        load[0, best] += 1
        load[1, p] -= weight[v]
        load[1, best] += weight[v]
        owner[v] = best
        idle = 0
