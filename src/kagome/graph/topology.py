"""Topology: sentences on the edges of a graph.

Where it sits: ``validate`` says them at the start of a run.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor


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
    there = np.unique(source * num_nodes + target)
    back = np.unique(target * num_nodes + source)
    notes: list[str] = []
    if not np.array_equal(there, back):
        paired = np.isin(there, back, assume_unique=True).mean()
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
