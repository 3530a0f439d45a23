"""Topology: sentences on the edges of a graph.

Where it sits: ``validate`` says them at the start of a run.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


def distinct(keys: NDArray[np.int64]) -> NDArray[np.int64]:
    """Different values, ascending; by sorting, which is ten times as fast here as numpy.unique's hashing.

    Shapes:
        keys ``[n]``; result ``[m]``, m up to n.
    """
    ordered = np.sort(keys)
    return ordered[np.concatenate([[True], ordered[1:] != ordered[:-1]])] if keys.size else ordered


def topology(edge_index: Tensor, num_nodes: int) -> list[str]:
    """What is allowed but may be a mistake: directions, duplicates, self-loops, isolated vertices.

    Args:
        edge_index: Edges.
        num_nodes: Vertices.

    Returns:
        A sentence for each.

    Shapes:
        edge_index ``[2, E]``.

    Cost: two sorts of the edges.
    """
    count = edge_index.size(1)
    if count == 0:
        return ["The graph has no edges: no vertex reads another."]
    source, target = edge_index.numpy()
    there = distinct(source * num_nodes + target)
    back = distinct(target * num_nodes + source)
    notes: list[str] = []
    if not np.array_equal(there, back):
        # Both are without duplicates: what is in both comes twice in the two together.
        paired = 1 - (distinct(np.concatenate([there, back])).size - there.size) / there.size
        notes.append(
            f"The graph is directed: {paired:.0%} of its edges have their reverse (--data.undirected)."
        )
    if there.size < count:
        notes.append(f"{count - there.size:,} of {count:,} edges are duplicates; they are kept.")
    loops = int((source == target).sum())
    if loops:
        notes.append(f"{loops:,} self-loops are kept.")
    touched = np.zeros(num_nodes, bool)
    touched[source] = touched[target] = True
    if not touched.all():
        notes.append(f"{num_nodes - int(touched.sum()):,} of {num_nodes:,} vertices have no edge.")
    return notes
