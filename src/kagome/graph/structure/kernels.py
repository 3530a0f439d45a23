"""Compiled loops over adjacency lists: build them, stream vertices into parts, and repair the balance.

Where it sits: the inner loops of ``graph.partition.partitioners``; numpy arrays in, numpy arrays out, no
torch.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kagome.kernels.base.jit import compiled, exact, inlined

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]
Floats = NDArray[np.float64]


@exact
@compiled
def adjacency(source: Longs, target: Longs, num_nodes: int) -> tuple[Longs, Ints]:
    """Return the neighbours of every vertex in both directions, without self-loops but with duplicates.

    Cost: two passes over the edges, 8 bytes an edge.
    """
    # Counts are put one place to the right, so that their running sum gives where each list begins.
    indptr = np.zeros(num_nodes + 1, np.int64)
    for e in range(source.size):
        if source[e] != target[e]:
            indptr[source[e] + 1] += 1
            indptr[target[e] + 1] += 1
    for v in range(num_nodes):
        indptr[v + 1] += indptr[v]
    fill = indptr[:-1].copy()
    # Four bytes a neighbour: ids are below 2^31 (``validate.MOST_VERTICES``).
    indices = np.empty(indptr[num_nodes], np.int32)
    for e in range(source.size):
        s, t = source[e], target[e]
        if s != t:
            indices[fill[s]] = t
            fill[s] += 1
            indices[fill[t]] = s
            fill[t] += 1
    return indptr, indices


@compiled
def stream(indptr: Longs, indices: Ints, order: Longs, weight: Floats, owner: Longs, bounds: Floats) -> None:
    """Assign vertices one after another to the part with most neighbours, weighted by its free space.

    The rule is linear deterministic greedy (Stanton and Kliot, KDD 2012) with two loads per part, vertices
    and in-edges; the fuller of the two counts. ``owner`` is written in place. A vertex that already has an
    owner is removed from it first, so a second call improves on the first.

    Args:
        indptr: Start of each vertex's neighbours.
        indices: The neighbours in both directions.
        order: The order of visit.
        weight: The in-edges of each vertex.
        owner: The part of each vertex, -1 where it has none yet.
        bounds: Most vertices ``[0, q]`` and most in-edges ``[1, q]`` of each part q.

    Cost: one pass over the adjacency.
    """
    parts = bounds.shape[1]
    vertices = np.zeros(parts)
    edges = np.zeros(parts)
    for v in range(owner.size):
        if owner[v] >= 0:
            vertices[owner[v]] += 1
            edges[owner[v]] += weight[v]
    # Neighbours of the vertex at hand in each part.
    near = np.zeros(parts)
    for v in order:
        if owner[v] >= 0:
            vertices[owner[v]] -= 1
            edges[owner[v]] -= weight[v]
        near[:] = 0
        for k in range(indptr[v], indptr[v + 1]):
            q = owner[indices[k]]
            if q >= 0:
                near[q] += 1
        best, best_score, best_load = -1, -1.0, np.inf
        for q in range(parts):
            # Fullness with this vertex, in the measure that is nearer to its bound.
            load = max((vertices[q] + 1) / bounds[0, q], (edges[q] + weight[v]) / bounds[1, q])
            # Stanton and Kliot: neighbours there, times the free share. Ties go to the emptier part.
            score = near[q] * max(0.0, 1.0 - max(vertices[q] / bounds[0, q], edges[q] / bounds[1, q]))
            # A full part is not a candidate; if all are full, the least full one takes the vertex.
            if load > 1:
                score = -load
            if best < 0 or score > best_score or (score == best_score and load < best_load):
                best, best_score, best_load = q, score, load
        owner[v] = best
        vertices[best] += 1
        edges[best] += weight[v]


@inlined
def _count(near: Floats, indptr: Longs, indices: Ints, owner: Longs, v: int) -> None:
    near[:] = 0
    for k in range(indptr[v], indptr[v + 1]):
        near[owner[indices[k]]] += 1


@inlined
def _over(load: Floats, bounds: Floats, q: int, vertices: float, edges: float) -> float:
    """Return how far part q would exceed its bounds, relative to them, with these additions."""
    full = float((load[0, q] + vertices) / bounds[0, q]), float((load[1, q] + edges) / bounds[1, q])
    return max(0.0, full[0] - 1) + max(0.0, full[1] - 1)


@inlined
def _target(near: Floats, load: Floats, bounds: Floats, p: int, weight: float, repair: bool) -> int:
    """Return the part with most neighbours that can take a vertex of p, or -1 if none can.

    A repair may overfill the target by half of what it relieves. Two parts that exceed different bounds can
    only be repaired by such an exchange.
    """
    # How much less p would exceed its bounds without the vertex, and below, how much more q would with it.
    relief = _over(load, bounds, p, 0.0, 0.0) - _over(load, bounds, p, -1.0, -weight)
    best, most = -1, -1.0
    for q in range(load.shape[1]):
        if q == p or near[q] <= most:
            continue
        burden = _over(load, bounds, q, 1.0, weight) - _over(load, bounds, q, 0.0, 0.0)
        if (burden < 0.5 * relief) if repair else (burden <= 0.0):
            best, most = q, near[q]
    # Beyond balance, a move has to cut fewer edges.
    if not repair and most <= near[p]:
        return -1
    return best


@inlined
def _move(load: Floats, owner: Longs, v: int, to: int, weight: float) -> None:
    load[0, owner[v]] -= 1
    load[1, owner[v]] -= weight
    load[0, to] += 1
    load[1, to] += weight
    owner[v] = to


@compiled
def _repair(
    indptr: Longs, indices: Ints, weight: Floats, owner: Longs, load: Floats, bounds: Floats, p: int, m: int
) -> int:
    """Move vertices out of part p, cheapest first, until its load in measure m is within the bound."""
    near = np.zeros(load.shape[1])
    # inf: the vertex belongs to another part, relieves nothing, or no part can take it.
    cost = np.full(owner.size, np.inf)
    for v in range(owner.size):
        if owner[v] != p or (m == 1 and weight[v] == 0):
            continue
        _count(near, indptr, indices, owner, v)
        to = _target(near, load, bounds, p, weight[v], True)
        if to >= 0:
            # Newly cut edges per unit of load. The half orders moves that cut none by their load. A move that
            # gains edges (loss < 0) is the better the larger its load is, so there load multiplies.
            loss = near[p] - near[to] + 0.5
            unit = weight[v] if m == 1 else 1.0
            cost[v] = loss / unit if loss > 0 else loss * unit
    moved = 0
    for v in np.argsort(cost):
        if load[m, p] <= bounds[m, p] or cost[v] == np.inf:
            break
        # Earlier moves have changed the parts of its neighbours.
        _count(near, indptr, indices, owner, v)
        to = _target(near, load, bounds, p, weight[v], True)
        if to >= 0:
            _move(load, owner, v, to, weight[v])
            moved += 1
    return moved


@compiled
def mend(indptr: Longs, indices: Ints, weight: Floats, owner: Longs, bounds: Floats, rounds: int) -> None:
    """Move vertices until no part exceeds a bound, then where a move within the bounds cuts fewer edges.

    The method is greedy in the manner of Fiduccia and Mattheyses. Moves out of an overfull part are ordered
    by the number of newly cut edges per unit of load that they remove.

    Args:
        indptr: Start of each vertex's neighbours.
        indices: The neighbours in both directions.
        weight: The in-edges of each vertex.
        owner: The part of each vertex; changed in place.
        bounds: Most vertices ``[0, q]`` and most in-edges ``[1, q]`` of each part q.
        rounds: The number of rounds of repair and improvement.

    Cost: a few passes over the adjacency a round.
    """
    parts = bounds.shape[1]
    load = np.zeros((2, parts))
    for v in range(owner.size):
        load[0, owner[v]] += 1
        load[1, owner[v]] += weight[v]
    near = np.zeros(parts)
    for _ in range(rounds):
        # Overloads that no single move relieves, so that others get their turn.
        stuck = np.zeros((2, parts))
        # A repair may overfill others by half of what it relieves, so several may be needed for one part.
        for _step in range(6 * parts):
            worst, p, m = 1.0, -1, 0
            for q in range(parts):
                for k in range(2):
                    if stuck[k, q] == 0 and load[k, q] / bounds[k, q] > worst:
                        worst, p, m = load[k, q] / bounds[k, q], q, k
            if p < 0:
                break
            if _repair(indptr, indices, weight, owner, load, bounds, p, m) == 0:
                stuck[m, p] = 1
        # In balance: moves that keep the bounds and cut fewer edges.
        gained = 0
        for v in range(owner.size):
            _count(near, indptr, indices, owner, v)
            to = _target(near, load, bounds, owner[v], weight[v], False)
            if to >= 0:
                _move(load, owner, v, to, weight[v])
                gained += 1
        if gained == 0:
            break
