"""Choice of partitioner: METIS if it fits into memory, otherwise the streaming partitioner.

Where it sits: ``graph.prepare`` and ``train.data`` turn the name ``auto`` into a partitioner's name here.
"""

from __future__ import annotations

from typing import Final

from torch import Tensor

from kagome.graph.structure.topology import pairs

AUTO: Final = "auto"
#: METIS's peak memory in bytes for each neighbour of each vertex, for each edge and for each vertex. Measured
#: on synthetic and real graphs with 1.6 to 40 M neighbours, input included, plus a margin of a tenth. METIS
#: itself takes 48 to 125 bytes a neighbour, most with many vertices and weak communities.
NEIGHBOUR_BYTES: Final = 150
EDGE_BYTES: Final = 8
VERTEX_BYTES: Final = 100
#: Share of the available memory that a partitioner may use.
SHARE: Final = 0.9


def metis_bytes(num_nodes: int, num_edges: int, neighbours: int) -> int:
    """Return an upper bound of METIS's peak memory, without the graph itself.

    Args:
        num_nodes: The number of vertices.
        num_edges: The number of edges.
        neighbours: Neighbours of all vertices together: distinct edges and their reverses.
    """
    return NEIGHBOUR_BYTES * neighbours + EDGE_BYTES * num_edges + VERTEX_BYTES * num_nodes


def is_auto(name: str) -> bool:
    """Return whether the partitioner is still to be chosen, with or without ``/shares`` behind its name."""
    return name.partition("/")[0] == AUTO


def choose(
    name: str, edge_index: Tensor, num_nodes: int, parts: int, available: int | None
) -> tuple[str, tuple[str, ...]]:
    """Return the partitioner for a name: the name itself, unless it is ``auto``.

    Args:
        name: A partitioner, or ``auto``; ``auto/2`` also divides each part's vertices between two parts.
        edge_index: The edges.
        num_nodes: The number of vertices.
        parts: The number of parts.
        available: Bytes that may be used; None if unknown.

    Returns:
        The partitioner's name; and if METIS does not fit, a sentence with the needed and the free memory.

    Shapes:
        edge_index ``[2, E]``.

    Cost: nothing if METIS fits in any case, otherwise two sorts of the edges.
    """
    if not is_auto(name):
        return name, ()
    shares = name.removeprefix(AUTO)
    count = edge_index.size(1)
    # 2 E is the most neighbours that E edges can give. Only where that does not fit are they counted.
    if available is None or parts == 1 or metis_bytes(num_nodes, count, 2 * count) <= SHARE * available:
        return f"metis{shares}", ()
    different, paired = pairs(edge_index, num_nodes)
    # Neighbours of all vertices: distinct edges and distinct reverses, less those that are both.
    need = metis_bytes(num_nodes, count, 2 * different - paired)
    if need <= SHARE * available:
        return f"metis{shares}", ()
    return f"streaming{shares}", (
        f"METIS would need about {need / 2**30:.2g} GiB and {max(available, 0) / 2**30:.2g} GiB are "
        "available: the streaming partitioner cuts the graph (--parallel.partitioner metis to insist).",
    )
