"""Partition: one part of a graph as its rank sees it: own rows, halo rows, in-edges, and rows sent to peers.

Where it sits: made from the whole graph and the owners that ``partitioners`` assign, kept on disk by
``store``, and read by the packages that train, such as ``intercept``, ``pipelining`` and ``train``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch_geometric.data import Data

from kagome.errors import PartitionError
from kagome.graph.partition.partitioners import assign
from kagome.graph.structure import edges
from kagome.graph.structure.attributes import Attributes, Shared, attributes_of, tensors_of
from kagome.graph.structure.sparse_adjacency import adjacency_of


@dataclass(frozen=True)
class Partition:
    """One part of a graph as its rank sees it.

    Args:
        part: The number of this part.
        num_parts: The number of parts of the graph.
        num_nodes: The number of vertices of the whole graph.
        num_edges: The number of edges of the whole graph.
        last_vertex: The largest original id that any edge of the whole graph touches; -1 without edges.
        own: Original ids of own rows, ascending.
        halo: Original ids of rows that are read here and owned by others, by owner, then ascending.
        edge_index: In-edges of own vertices in local ids. Row 0 is the source: own ids are below n, halo row
            k is n + k. Row 1 is the target. In the order of the whole graph; with one part this is the given
            ``edge_index``.
        edge_ids: Position of each edge in the whole graph's ``edge_index``, ascending.
        send: Own local rows that peers read, by peer, then ascending.
        send_counts: The number of rows sent to each part.
        recv_counts: The number of halo rows from each part.
        nodes: Attributes of own rows (x, y, masks and any other).
        edges: Attributes of the edges, in the order of ``edge_index``.
        shared: Attributes that are neither: tensors, numbers and texts, the same in all parts.
        refused: For each other attribute of the data, the reason why it cannot be given to a model.
        fingerprint: A name for graph, method, seed and number of parts; the same in all parts.
        unclear: With one part, attributes whose rows may belong to vertices or to edges; they are neither
            saved nor sent.

    Shapes:
        own ``[n]``, halo ``[H]``, edge_index ``[2, E]``, edge_ids ``[E]``, send ``[sum(send_counts)]``; nodes
        ``[n, ...]``, edges ``[E, ...]``.
    """

    part: int
    num_parts: int
    num_nodes: int
    num_edges: int
    last_vertex: int
    own: Tensor
    halo: Tensor
    edge_index: Tensor
    edge_ids: Tensor
    send: Tensor
    send_counts: tuple[int, ...]
    recv_counts: tuple[int, ...]
    nodes: dict[str, Tensor]
    edges: dict[str, Tensor]
    fingerprint: str
    shared: dict[str, Shared] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    unclear: dict[str, Tensor] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """The names of everything that a model may ask for."""
        # The edge attribute that carries a sparse matrix's values is shown as the matrix.
        matrix = adjacency_of(self.edges)
        rest = [name for name in self.edges if matrix is None or name != matrix.name]
        more = [] if matrix is None else ["adj_t"]
        return ["num_nodes", *self.shared, "edge_index", *self.nodes, *rest, *more]


def fingerprint(data: Data, method: str = "", seed: int = 0, parts: int = 1) -> str:
    """Return a name for a graph and its cut; it changes with any edge, feature, label, mask or attribute.

    Args:
        data: The whole graph, validated.
        method: The partitioner's name.
        seed: The partitioner's seed.
        parts: The number of parts.

    Returns:
        Hexadecimal digits, the same on every machine of one byte order: 32 of the graph, a dash, 8 of the
        cut.

    Cost: one reading of all tensors, about 1 GB/s.
    """
    # A vertex without edges and attributes is in no tensor, so the count goes first.
    digest = hashlib.blake2b(f"{data.num_nodes}".encode(), digest_size=16)
    found = attributes_of(data)
    tensors = {**found.nodes, **found.edges, **tensors_of(found.shared), **found.unclear}
    tensors["edge_index"] = data.edge_index
    for name, value in sorted(found.shared.items()):
        if not isinstance(value, Tensor):
            digest.update(f"{name} {value!r}".encode())
    for name, tensor in sorted(tensors.items()):
        # The same bytes under another name, type or shape are another graph.
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        # As bytes, since NumPy has no bfloat16.
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    cut = hashlib.blake2b(f"{method} {seed} {parts}".encode(), digest_size=4)
    return f"{digest.hexdigest()}-{cut.hexdigest()}"


def graph_of(fingerprint: str) -> str:
    """Return the digits of a fingerprint that name the graph, however it is cut."""
    return fingerprint.partition("-")[0]


def kinds_of(part: Partition) -> Attributes:
    """Return the attributes of a part, sorted by kind."""
    return Attributes(part.nodes, part.edges, part.shared, part.refused)


def extract(
    data: Data,
    owner: Tensor,
    part: int,
    num_parts: int,
    *,
    fingerprint: str = "",
    readers: NDArray[np.int64] | None = None,
) -> Partition:
    """Extract one part from the whole graph; the other parts need not be known.

    Args:
        data: The whole graph, validated.
        owner: The part of each vertex.
        part: The number of the part to extract.
        num_parts: The number of parts.
        fingerprint: The fingerprint to keep in the result.
        readers: Which parts read each vertex, from ``edges.read_by``, if already known.

    Returns:
        The part; it has no vertices if it owns none.

    Raises:
        PartitionError: If there is no such part, or ``owner`` does not fit the graph.

    Shapes:
        owner ``[N]``, int64; readers ``[N, num_parts / 64]``.

    Cost: three passes over the edges; during the call, beside the part, 20 bytes a vertex of the whole graph
    and 8 more for each 64 parts.
    """
    _check_owner(owner, int(data.num_nodes), num_parts, part)
    source, target = data.edge_index.contiguous().numpy()
    owners = owner.to(torch.int32).numpy()
    readers = edges.read_by(source, target, owners, num_parts)[0] if readers is None else readers
    own = (owner == part).nonzero().view(-1)
    halo, received = edges.halo_of(readers, owners, part, num_parts)
    send, sent = edges.sent_by(readers, own.numpy(), num_parts)
    # vertices     own 2 4 7    halo 1 8 3 (by owner)
    # local ids        0 1 2         3 4 5               the in-edge 8 -> 4 becomes 4 -> 1
    local = _numbers(owner.numel(), own.numpy(), halo)
    edge_index, edge_ids = (_tensor(ids) for ids in edges.edges_of(source, target, owners, part, local))
    attributes = attributes_of(data)
    return Partition(
        part=part,
        num_parts=num_parts,
        num_nodes=owner.numel(),
        num_edges=data.edge_index.size(1),
        last_vertex=int(data.edge_index.max()) if data.edge_index.numel() else -1,
        own=own,
        halo=_tensor(halo),
        edge_index=edge_index,
        edge_ids=edge_ids,
        send=_tensor(send),
        send_counts=tuple(sent.tolist()),
        recv_counts=tuple(received.tolist()),
        nodes={name: value[own] for name, value in attributes.nodes.items()},
        edges={name: value[edge_ids] for name, value in attributes.edges.items()},
        fingerprint=fingerprint,
        shared=attributes.shared,
        refused=attributes.refused,
        # A single part cuts nothing, so a model may have them as they are.
        unclear=attributes.unclear if num_parts == 1 else {},
    )


def _numbers(vertices: int, own: NDArray[np.int64], halo: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the local number of each vertex that a part knows, own first; other entries are not set."""
    # Not set for other vertices: no edge of the part names one.
    local = np.empty(vertices, np.int64)
    local[own] = np.arange(own.size)
    local[halo] = np.arange(own.size, own.size + halo.size)
    return local


def _tensor(ids: NDArray[np.int64]) -> Tensor:
    # NumPy gives an empty array strides of 0, which look like a row repeated.
    return torch.from_numpy(ids) if ids.size else torch.empty(ids.shape, dtype=torch.int64)


def _check_owner(owner: Tensor, num_nodes: int, num_parts: int, part: int | None = None) -> None:
    if part is not None and not 0 <= part < num_parts:
        raise PartitionError(f"a part from 0 to {num_parts - 1}", f"part {part}")
    if owner.numel() != num_nodes:
        raise PartitionError(
            f"owner to name a part for each of {num_nodes:,} vertices", f"{owner.numel():,} entries"
        )
    if owner.numel() and not 0 <= int(owner.min()) <= int(owner.max()) < num_parts:
        raise PartitionError(
            f"owners from 0 to {num_parts - 1}", f"owners from {int(owner.min())} to {int(owner.max())}"
        )


def each_part(
    data: Data,
    owner: Tensor,
    num_parts: int,
    *,
    fingerprint: str = "",
    readers: NDArray[np.int64] | None = None,
) -> Iterator[Partition]:
    """Yield the parts of the whole graph one after another, so that no two need be held at a time.

    Args:
        data: The whole graph, validated.
        owner: The part of each vertex.
        num_parts: The number of parts.
        fingerprint: The fingerprint to keep in each part.
        readers: Which parts read each vertex, as in :func:`extract`.

    Yields:
        The parts, in order.

    Raises:
        PartitionError: If ``owner`` does not fit the graph.

    Shapes:
        owner ``[N]``, int64.
    """
    _check_owner(owner, int(data.num_nodes), num_parts)
    if readers is None:
        source, target = data.edge_index.contiguous().numpy()
        readers = edges.read_by(source, target, owner.to(torch.int32).numpy(), num_parts)[0]
    for part in range(num_parts):
        yield extract(data, owner, part, num_parts, fingerprint=fingerprint, readers=readers)


def split_all(data: Data, owner: Tensor, num_parts: int, *, fingerprint: str = "") -> list[Partition]:
    """Return all parts of the whole graph at once; see :func:`each_part`."""
    return list(each_part(data, owner, num_parts, fingerprint=fingerprint))


def partition(data: Data, *, parts: int, method: str = "metis", seed: int = 0) -> list[Partition]:
    """Assign each vertex to a part and return what each part holds.

    Args:
        data: The whole graph, validated.
        parts: The number of parts; if there are fewer vertices, some parts are empty.
        method: The partitioner's name.
        seed: The partitioner's seed.

    Returns:
        The parts, in order.

    Raises:
        PartitionError: If there is no such partitioner, or the number of parts is below one.

    Example:
        >>> import torch
        >>> from torch_geometric.data import Data
        >>> ring = Data(x=torch.eye(6), edge_index=torch.tensor([[0, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 0]]))
        >>> first, second = partition(ring, parts=2, method="contiguous")
        >>> first.own.tolist(), first.halo.tolist()
        ([0, 1, 2], [5])
    """
    owner = assign(method, data.edge_index, int(data.num_nodes), parts, seed, data.get("pos"))
    return split_all(data, owner, parts, fingerprint=fingerprint(data, method, seed, parts))
