"""Choice: METIS where it fits into memory, the streaming partitioner where it does not.

Where it sits: ``graph.prepare`` and ``train.data`` turn the name ``auto`` into a partitioner's name here.
"""

from __future__ import annotations

from typing import Final

from torch import Tensor

from kagome.graph.structure.topology import pairs

AUTO: Final = "auto"
#: Bytes at METIS's peak for each neighbour of each vertex, each edge and each vertex. Measured on made and
#: real graphs of 1.6 to 40 M neighbours (48 to 125 for a neighbour in METIS itself, most where vertices are
#: many and communities weak), with its input and a margin of a tenth.
NEIGHBOUR_BYTES: Final = 150
EDGE_BYTES: Final = 8
VERTEX_BYTES: Final = 100
#: What of the available memory a cut may take.
SHARE: Final = 0.9


def metis_bytes(num_nodes: int, num_edges: int, neighbours: int) -> int:
    """What METIS takes at its peak beside the graph itself, from above.

    Args:
        num_nodes: Vertices.
        num_edges: Edges.
        neighbours: Neighbours of all vertices together: different edges with their reverses.
    """
    return NEIGHBOUR_BYTES * neighbours + EDGE_BYTES * num_edges + VERTEX_BYTES * num_nodes


def is_auto(name: str) -> bool:
    """Whether a partitioner is yet to be chosen, however its parts are shared out."""
    return name.partition("/")[0] == AUTO


def choose(
    name: str, edge_index: Tensor, num_nodes: int, parts: int, available: int | None
) -> tuple[str, tuple[str, ...]]:
    """The partitioner that a name stands for; only ``auto`` stands for another.

    Args:
        name: A partitioner, or ``auto``; ``auto/2`` is that with each part's vertices shared out to two.
        edge_index: Edges.
        num_nodes: Vertices.
        parts: Parts.
        available: Bytes that may be taken; None if nobody knows.

    Returns:
        The partitioner's name; and where METIS does not fit, a sentence that says so with both numbers.

    Shapes:
        edge_index ``[2, E]``.

    Cost: none where METIS fits in any case, else two sorts of the edges.
    """
    if not is_auto(name):
        return name, ()
    shares = name.removeprefix(AUTO)
    count = edge_index.size(1)
    if available is None or parts == 1 or metis_bytes(num_nodes, count, 2 * count) <= SHARE * available:
        return f"metis{shares}", ()
    different, paired = pairs(edge_index, num_nodes)
    need = metis_bytes(num_nodes, count, 2 * different - paired)
    if need <= SHARE * available:
        return f"metis{shares}", ()
    return f"streaming{shares}", (
        f"METIS would need about {need / 2**30:.2g} GiB and {max(available, 0) / 2**30:.2g} GiB are "
        "available: the streaming partitioner cuts the graph (--parallel.partitioner metis to insist).",
    )
