"""Partitioners: functions that assign every vertex to a part from the edges.

Where it sits: ``partition`` calls :func:`assign`; the inner loops are in ``graph.structure.kernels``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kagome.errors import PartitionError
from kagome.graph.partition.choice import PartitionMethod
from kagome.graph.partition.coordinates import Weights, cut_by_coordinates, pieces
from kagome.graph.structure import edges, kernels, traffic

#: Limit of a part's vertices and in-edges, as a multiple of the mean.
BALANCE: Final = 1.25
#: Up to this many edges METIS is started in several ways, and the best cut is kept.
SEVERAL_STARTS: Final = 5_000_000
#: Starts of METIS: a vertex weighs this plus its in-degree over the mean (inf: all weigh the same).
STARTS: Final = (math.inf, 3.0, 1.0)
ONE_START: Final = (3.0,)
#: Balances to which each start is repaired, in vertices and in-edges (None: as METIS left it).
SLACKS: Final = (None, 1.02, 1.05, 1.1, BALANCE)
#: Balance that a cut may use, if it is closer, to relieve the part with most rows to send or to read.
RELIEF: Final = 1.02
#: From this many edges on, a cut's busiest part is relieved: in a smaller graph an exchange is mostly
#: latency, and compiling the loops takes four seconds.
FEWEST_EDGES: Final = 100_000
#: Up to this many numbers, one a vertex and part, it is.
MOST_READERS: Final = 2**26


class Partitioner(Protocol):
    """A function that assigns every vertex to a part."""

    def __call__(self, edge_index: Tensor, num_nodes: int, weights: Weights, seed: int) -> Tensor:
        """Return the part of each vertex.

        Args:
            edge_index: The edges; those that cut by the order of vertices alone do not read them.
            num_nodes: The number of vertices.
            weights: The work of each part, relative to the others.
            seed: The seed of random draws.

        Shapes:
            edge_index ``[2, E]``; weights ``[parts]``; owner ``[N]``, int64.
        """


def contiguous(edge_index: Tensor, num_nodes: int, weights: Weights, seed: int) -> Tensor:
    """Cut the vertices, in their order, into pieces as large as their weights: a :class:`Partitioner`."""
    return pieces(num_nodes, weights)


def random(edge_index: Tensor, num_nodes: int, weights: Weights, seed: int) -> Tensor:
    """Cut the vertices, in a seeded random order, into such pieces: a :class:`Partitioner`."""
    order = torch.randperm(num_nodes, generator=torch.Generator().manual_seed(seed))
    owner = torch.empty(num_nodes, dtype=torch.int64)
    owner[order] = pieces(num_nodes, weights)
    return owner


def streaming(edge_index: Tensor, num_nodes: int, weights: Weights, seed: int) -> Tensor:
    """Run linear deterministic greedy twice over the vertices in a seeded order, then repair the balance.

    It is a :class:`Partitioner`.

    Cost: a few passes over the edges, 16 bytes an edge.
    """
    parts = weights.size
    if parts == 1 or parts >= num_nodes or edge_index.size(1) == 0:
        return pieces(num_nodes, weights)
    graph = _Adjacency.of(edge_index, num_nodes)
    order = np.random.default_rng(seed % 2**64).permutation(num_nodes)
    owner = np.full(num_nodes, -1, np.int64)
    # The first pass does not know where later vertices go; the second does. A closer bound than the final
    # one leaves ``mend`` room to move vertices.
    for _ in range(2):
        kernels.stream(graph.indptr, graph.indices, order, graph.weight, owner, graph.bounds(weights, 1.15))
    kernels.mend(graph.indptr, graph.indices, graph.weight, owner, graph.bounds(weights, BALANCE), 3)
    return torch.from_numpy(owner)


def metis(edge_index: Tensor, num_nodes: int, weights: Weights, seed: int) -> Tensor:
    """Run METIS on the symmetrised graph, then repair it so that vertices and in-edges are both balanced.

    METIS (as ``pymetis`` builds it) balances one weight per vertex. Unit weights leave a part of Squirrel
    with 4.8 times the mean in-edges. A weight that adds the in-degree gives parts of many small or few large
    vertices. So METIS starts from several weights, and each result is repaired to several balances. Of those
    in balance, the one with the smallest product of halo rows and load of the fullest part is kept. Load is
    the greater of vertices and in-edges, each over its mean: whichever of the two a model's time depends on,
    no part has more of the work. By halo rows alone a part of Flickr in 4 had 1.25 times the mean load; it
    now has 1.02, at 0.1 % more halo rows. Last, vertices are moved out of the part with most rows to send or
    to read, which all ranks wait for, while the balance holds (``traffic.relieve``, benchmarks/volume).

    It is a :class:`Partitioner`. Direction, self-loops and duplicates of edges do not count for the cut.

    Cost: for 1.6 M edges about 0.15 s a start, and 0.05 s for each of its four repairs; one start above 5 M
    edges and no moves out of the busiest part, three and these below, from 100,000 edges on.
    """
    parts = weights.size
    if parts == 1 or parts >= num_nodes or edge_index.size(1) == 0:
        return pieces(num_nodes, weights)
    graph = _Adjacency.of(edge_index, num_nodes)
    # METIS needs sorted lists without duplicates; the loops here accept any order.
    edges.sort_rows(graph.indptr, graph.indices)
    simple = edges.simple(graph.indptr, graph.indices)
    mean = float(graph.weight.mean())
    best: tuple[tuple[float, float, float], NDArray[np.int64]] | None = None
    for share in STARTS if edge_index.size(1) <= SEVERAL_STARTS else ONE_START:
        # METIS takes whole numbers: ten to a unit keep one decimal.
        counts = None if share == math.inf else np.round(10 * (share + graph.weight / mean)).astype(np.int64)
        start = _start(simple, weights, seed, counts)
        for slack in SLACKS:
            # Each balance starts from METIS's own result.
            owner = start.copy()
            if slack is not None:
                bounds = graph.bounds(weights, slack)
                kernels.mend(graph.indptr, graph.indices, graph.weight, owner, bounds, 6)
            load = max(graph.loads(owner, weights))
            # In order: within the balance, then traffic times load, then load.
            halo = int(_rows(edge_index, owner, parts)[1].sum())
            score = graph.excess(owner, weights), halo * load, load
            if best is None or score < best[0]:
                best = score, owner
    assert best is not None
    return torch.from_numpy(_relieved(edge_index, graph, best[1], weights))


def _relieved(
    edge_index: Tensor, graph: _Adjacency, owner: NDArray[np.int64], weights: Weights
) -> NDArray[np.int64]:
    """Return the cut after moves out of the part with most rows to send or to read, if it is better."""
    parts = weights.size
    if not FEWEST_EDGES <= edge_index.size(1) <= SEVERAL_STARTS or owner.size * parts > MOST_READERS:
        return owner
    source, target = edge_index.contiguous().numpy()
    out, into = traffic.lists(source, target, owner.size), traffic.lists(target, source, owner.size)
    moved, before = owner.copy(), max(graph.loads(owner, weights))
    traffic.relieve(out, into, graph.weight, moved, graph.bounds(weights, max(RELIEF, before)), 4)
    after = max(graph.loads(moved, weights))
    # The load counts twice: ranks wait for the fullest part too, in each layer and not for rows alone.
    worse = (
        _rows(edge_index, moved, parts).max() * after**2 >= _rows(edge_index, owner, parts).max() * before**2
    )
    return owner if worse or graph.excess(moved, weights) > graph.excess(owner, weights) else moved


class _Adjacency(NamedTuple):
    """The graph in the form that the compiled loops read."""

    indptr: NDArray[np.int64]
    indices: NDArray[np.int32]
    weight: NDArray[np.float64]  # in-edges of each vertex

    @staticmethod
    def of(edge_index: Tensor, num_nodes: int) -> _Adjacency:
        source, target = edge_index.numpy()
        indptr, indices = kernels.adjacency(source, target, num_nodes)
        return _Adjacency(indptr, indices, np.bincount(target, minlength=num_nodes).astype(np.float64))

    def bounds(self, weights: Weights, slack: float) -> NDArray[np.float64]:
        """Return the most vertices and in-edges of each part, never below what a single vertex (a hub) needs.

        Shapes:
            ``[2, parts]``.
        """
        vertices, edges = self.wanted(weights)
        most = np.maximum(slack * vertices, np.ceil(vertices))
        return np.stack([most, np.maximum(slack * edges, max(float(self.weight.max()), 1.0))])

    def wanted(self, weights: Weights) -> NDArray[np.float64]:
        """Return the vertices and in-edges of each part in proportion to its weight, ``[2, parts]``."""
        total = weights.sum()
        # Multiplied before divided: with weights of 1 this is the mean to the last bit.
        return np.stack([self.weight.size * weights / total, float(self.weight.sum()) * weights / total])

    def excess(self, owner: NDArray[np.int64], weights: Weights) -> float:
        """Return how far the fullest part exceeds the intended balance; a tiny excess is rounded to 0."""
        most = self.bounds(weights, BALANCE)
        return round(max(0.0, float((self.held(owner, weights.size) / most).max()) - 1.0), 2)

    def held(self, owner: NDArray[np.int64], parts: int) -> NDArray[np.float64]:
        """Return the vertices and in-edges of each part, ``[2, parts]``."""
        edges = np.bincount(owner, self.weight, minlength=parts)
        return np.stack([np.bincount(owner, minlength=parts).astype(np.float64), edges])

    def loads(self, owner: NDArray[np.int64], weights: Weights) -> tuple[float, float]:
        """Return the most vertices and the most in-edges of a part, each over what its weight asks for."""
        # In this order, weights that are all 1 round as a mean does.
        scaled = (self.held(owner, weights.size) * (weights.sum() / weights)).max(1)
        vertices, edges = scaled / (self.weight.size, self.weight.sum())
        return float(vertices), float(edges)


def _rows(edge_index: Tensor, owner: NDArray[np.int64], parts: int) -> NDArray[np.int64]:
    """Return the rows that each part sends, and those that it reads, ``[2, parts]``."""
    source, target = edge_index.contiguous().numpy()
    owners = owner.astype(np.int32)
    readers, _, _ = edges.read_by(source, target, owners, parts)
    return np.stack([edges.sent_counts(readers, owners, parts), edges.halo_counts(readers, parts)])


def _start(
    simple: tuple[NDArray[np.int64], NDArray[np.int64]],
    weights: Weights,
    seed: int,
    counts: NDArray[np.int64] | None,
) -> NDArray[np.int64]:
    import pymetis

    # Without targets METIS takes another path for equal parts, by which all earlier cuts were made.
    alike = bool((weights == weights[0]).all())
    result = pymetis.part_graph(
        weights.size,
        pymetis.CSRAdjacency(*simple),
        vweights=counts,
        tpwgts=None if alike else (weights / weights.sum()).tolist(),
        # METIS's seed is a C int, and srand treats 0 and 1 alike.
        options=pymetis.Options(seed=1 + seed % (2**31 - 1)),
    )
    return np.asarray(result.vertex_part, np.int64)


#: The partitioner that reads ``data.pos`` in place of the edges.
COORDINATES: Final = "coordinates"
#: The other partitioners that ``Parallel(partitioner=...)`` and ``--parallel.partitioner`` accept.
PARTITIONERS: Final[Mapping[str, Partitioner]] = MappingProxyType(
    {"metis": metis, "streaming": streaming, "contiguous": contiguous, "random": random}
)


def assign(
    method: str,
    edge_index: Tensor,
    num_nodes: int,
    parts: int,
    seed: int = 0,
    pos: Tensor | None = None,
) -> Tensor:
    """Assign every vertex to a part with the partitioner of that name.

    Args:
        method: The text of a :class:`PartitionMethod`, of which the name is one of :data:`PARTITIONERS`, or
            ``coordinates``. ``metis/2`` divides the vertices of each of its parts evenly between two
            consecutive parts, and ``metis@3:1`` gives the first part three times the vertices and edges.
        edge_index: The edges.
        num_nodes: The number of vertices.
        parts: The number of parts; if there are fewer vertices, some parts are empty.
        seed: The seed of the partitioner's random draws.
        pos: The coordinates of the vertices, which ``coordinates`` needs.

    Returns:
        The part of each vertex.

    Raises:
        PartitionError: If no partitioner has that name, or the number of parts, shares or weights is invalid.

    Shapes:
        edge_index ``[2, E]``, int64; owner ``[N]``, int64, from 0 to parts - 1.

    Example:
        >>> import torch
        >>> ring = torch.tensor([[0, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 0]])
        >>> assign("contiguous", ring, num_nodes=6, parts=2).tolist()
        [0, 0, 0, 1, 1, 1]
    """
    asked = PartitionMethod.parse(method)
    name = asked.name
    if name not in PARTITIONERS and name != COORDINATES:
        raise PartitionError(
            f"one of the partitioners {', '.join((*PARTITIONERS, COORDINATES))}", f"{name!r}"
        )
    if parts < 1:
        raise PartitionError("1 part or more", f"{parts}")
    cut = asked.cut_parts(parts)
    weights = np.array(asked.weights or [1.0] * cut)
    if name == COORDINATES:
        owner = cut_by_coordinates(pos, num_nodes, weights)
    else:
        owner = PARTITIONERS[name](edge_index, num_nodes, weights, seed)
    return owner if asked.shares == 1 else shared_out(owner, cut, asked.shares)


def shared_out(owner: Tensor, parts: int, shares: int) -> Tensor:
    """Divide each part's vertices, in their order, into the given number of shares of equal size."""
    # Vertices grouped by part, in their order; ``place`` counts each within its part.
    order = torch.argsort(owner, stable=True)
    sizes = torch.bincount(owner, minlength=parts)
    first = torch.cumsum(sizes, 0) - sizes
    place = torch.empty_like(owner)
    place[order] = torch.arange(owner.numel()) - first[owner[order]]
    return owner * shares + place * shares // sizes[owner].clamp(min=1)
