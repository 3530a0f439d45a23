"""Choice of partitioner: its text form, and METIS if it fits into memory, else the streaming partitioner.

Where it sits: ``graph.prepare`` and ``train.data`` turn the name ``auto`` into a partitioner's name here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

from torch import Tensor

from kagome.errors import PartitionError
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


@dataclass(frozen=True)
class PartitionMethod:
    """A partitioner with what it is asked for, in one text that saved parts and cache keys hold.

    Args:
        name: The partitioner's name, or ``auto``.
        shares: The number of consecutive parts among which each part that it cuts is divided evenly.
        weights: The work that each part that it cuts is to get, relative to the others; () if all are alike.

    Example:
        >>> PartitionMethod.parse("metis/2@3:1")
        PartitionMethod(name='metis', shares=2, weights=(3.0, 1.0))
        >>> str(PartitionMethod("metis", weights=(3.0, 1.5)))
        'metis@3:1.5'
    """

    name: str
    shares: int = 1
    weights: tuple[float, ...] = ()

    @staticmethod
    def parse(text: str) -> PartitionMethod:
        """Read a method from its text.

        Raises:
            PartitionError: If shares or weights are no positive numbers.
        """
        front, at, behind = text.partition("@")
        name, slash, each = front.partition("/")
        if slash and not (each.isdecimal() and int(each)):
            raise PartitionError(
                f"a number of shares of 1 or more behind {name}/", f"{each!r}", hint=f"{name}/2"
            )
        try:
            weights = tuple(map(float, behind.split(":"))) if at else ()
        except ValueError:
            weights = (math.nan,)  # refused below, with the text as it was given
        if not all(0 < weight < math.inf for weight in weights):
            raise PartitionError(
                f"positive weights of parts behind {front}@", f"{behind!r}", hint=f"{front}@2:1"
            )
        return PartitionMethod(name, int(each or 1), weights)

    def __str__(self) -> str:
        shares = f"/{self.shares}" if self.shares > 1 else ""
        weights = ":".join(f"{weight:.12g}" for weight in self.weights)
        return f"{self.name}{shares}{'@' if weights else ''}{weights}"

    @property
    def of_parts(self) -> tuple[float, ...]:
        """The weight of each part after the division into shares; () if all are alike."""
        return tuple(weight for weight in self.weights for _ in range(self.shares))

    def cut_parts(self, parts: int) -> int:
        """Return how many parts are cut, each of which is divided into shares.

        Raises:
            PartitionError: If the shares do not divide the parts, or there is not a weight for each cut part.
        """
        if parts % self.shares:
            raise PartitionError(f"a number of parts that {self.shares} divides", f"{parts}")
        cut = parts // self.shares
        # Shares of one part are alike, so weights belong to what is cut.
        if self.weights and len(self.weights) != cut:
            raise PartitionError(f"a weight for each of {cut} parts", f"{len(self.weights)} weights")
        return cut


def metis_bytes(num_nodes: int, num_edges: int, neighbours: int) -> int:
    """Return an upper bound of METIS's peak memory, without the graph itself.

    Args:
        num_nodes: The number of vertices.
        num_edges: The number of edges.
        neighbours: Neighbours of all vertices together: distinct edges and their reverses.
    """
    return NEIGHBOUR_BYTES * neighbours + EDGE_BYTES * num_edges + VERTEX_BYTES * num_nodes


def is_auto(method: str) -> bool:
    """Return whether the partitioner is still to be chosen, whatever stands behind its name."""
    return PartitionMethod.parse(method).name == AUTO


def choose(
    method: str, edge_index: Tensor, num_nodes: int, parts: int, available: int | None
) -> tuple[str, tuple[str, ...]]:
    """Return a partition method with a partitioner in place of ``auto``; others as they are.

    Args:
        method: The text of a :class:`PartitionMethod`.
        edge_index: The edges.
        num_nodes: The number of vertices.
        parts: The number of parts.
        available: Bytes that may be used; None if unknown.

    Returns:
        The method's text; and if METIS does not fit, a sentence with the needed and the free memory.

    Shapes:
        edge_index ``[2, E]``.

    Cost: nothing if METIS fits in any case, otherwise two sorts of the edges.
    """
    asked = PartitionMethod.parse(method)
    if asked.name != AUTO:
        return method, ()
    count = edge_index.size(1)
    # 2 E is the most neighbours that E edges can give. Only where that does not fit are they counted.
    if available is None or parts == 1 or metis_bytes(num_nodes, count, 2 * count) <= SHARE * available:
        return str(replace(asked, name="metis")), ()
    different, paired = pairs(edge_index, num_nodes)
    # Neighbours of all vertices: distinct edges and distinct reverses, less those that are both.
    need = metis_bytes(num_nodes, count, 2 * different - paired)
    if need <= SHARE * available:
        return str(replace(asked, name="metis")), ()
    return str(replace(asked, name="streaming")), (
        f"METIS would need about {need / 2**30:.2g} GiB and {max(available, 0) / 2**30:.2g} GiB are "
        "available: the streaming partitioner cuts the graph (--parallel.partitioner metis to insist).",
    )
