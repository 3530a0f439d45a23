"""Partition: one part of a graph as its rank sees it - own rows, halo rows, in-edges, and who is sent what.

Where it sits: made from the whole graph by ``partitioners``' owners, kept on disk by ``store``, read by
``neighbors`` and ``run``.
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
        part: Number of this part.
        num_parts: Parts of the graph.
        num_nodes: Vertices of the whole graph.
        num_edges: Edges of the whole graph.
        last_vertex: Largest original id that any edge of the whole graph touches, -1 without edges.
        own: Original ids of own rows, ascending.
        halo: Original ids of rows that are read here and owned by others, by owner, then ascending.
        edge_index: In-edges of own vertices in local ids: row 0 the source, own below n, halo k is n + k; row
            1 the target. In the order of the whole graph: on one part this is the given ``edge_index``.
        edge_ids: Position of each edge in the whole graph's ``edge_index``, ascending.
        send: Own local rows that peers read, by peer, then ascending.
        send_counts: Rows sent to each part.
        recv_counts: Halo rows from each part.
        nodes: Attributes of own rows (x, y, masks and any other).
        edges: Attributes of the edges, in ``edge_index``'s order.
        shared: Attributes that are neither: tensors, numbers and texts, the same in all parts.
        refused: Why the data's other attributes cannot be given to a model, by name.
        fingerprint: Of the graph, the method, the seed and the number of parts; the same in all parts.
        unclear: On one part, attributes with a row a vertex or a row an edge, nobody knows which; they are
            neither saved nor sent.

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
        """All that a model may ask for by name."""
        matrix = adjacency_of(self.edges)
        rest = [name for name in self.edges if matrix is None or name != matrix.name]
        more = [] if matrix is None else ["adj_t"]
        return ["num_nodes", *self.shared, "edge_index", *self.nodes, *rest, *more]


def fingerprint(data: Data, method: str = "", seed: int = 0, parts: int = 1) -> str:
    """A name for this graph cut in this way; it changes with any edge, feature, label, mask or attribute.

    Args:
        data: The whole graph, validated.
        method: Partitioner.
        seed: Its seed.
        parts: Parts.

    Returns:
        Hexadecimal digits, the same on every machine of one byte order: 32 of the graph, a dash, 8 of the
        cut.

    Cost: one reading of all tensors, about 1 GB/s.
    """
    digest = hashlib.blake2b(f"{data.num_nodes}".encode(), digest_size=16)
    found = attributes_of(data)
    tensors = {**found.nodes, **found.edges, **tensors_of(found.shared), **found.unclear}
    tensors["edge_index"] = data.edge_index
    for name, value in sorted(found.shared.items()):
        if not isinstance(value, Tensor):
            digest.update(f"{name} {value!r}".encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    cut = hashlib.blake2b(f"{method} {seed} {parts}".encode(), digest_size=4)
    return f"{digest.hexdigest()}-{cut.hexdigest()}"


def graph_of(fingerprint: str) -> str:
    """The digits of a fingerprint that name the graph, however it is cut."""
    return fingerprint.partition("-")[0]


def kinds_of(part: Partition) -> Attributes:
    """The attributes of a part by kind."""
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
    """Take one part out of the whole graph; no other part has to be known.

    Args:
        data: The whole graph, validated.
        owner: Part of each vertex.
        part: The part to take.
        num_parts: Parts.
        fingerprint: Kept in the result.
        readers: Which parts read each vertex, from ``edges.read_by``, if it is known already.

    Returns:
        The part; without vertices where it owns none.

    Raises:
        PartitionError: If there is no such part, or ``owner`` does not fit the graph.

    Shapes:
        owner ``[N]``, int64; readers ``[N, num_parts / 64]``.

    Cost: three passes over the edges; beside the part 20 bytes a vertex of the whole graph, and 8 more for
    each 64 parts, for the time of the call.
    """
    _check_owner(owner, int(data.num_nodes), num_parts, part)
    source, target = data.edge_index.contiguous().numpy()
    owners = owner.to(torch.int32).numpy()
    readers = edges.read_by(source, target, owners, num_parts)[0] if readers is None else readers
    own = (owner == part).nonzero().view(-1)
    halo, received = edges.halo_of(readers, owners, part, num_parts)
    send, sent = edges.sent_by(readers, own.numpy(), num_parts)
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
        unclear=attributes.unclear if num_parts == 1 else {},
    )


def _numbers(vertices: int, own: NDArray[np.int64], halo: NDArray[np.int64]) -> NDArray[np.int64]:
    """The number in a part of each vertex that it knows: its own first; no other vertex is asked for."""
    local = np.empty(vertices, np.int64)
    local[own] = np.arange(own.size)
    local[halo] = np.arange(own.size, own.size + halo.size)
    return local


def _tensor(ids: NDArray[np.int64]) -> Tensor:
    # NumPy gives an empty array strides of 0, which look like a row repeated.
    return torch.from_numpy(ids) if ids.size else torch.empty(ids.shape, dtype=torch.int64)


def _check_owner(owner: Tensor, num_nodes: int, num_parts: int, part: int | None = None) -> None:
    if part is not None and not 0 <= part < num_parts:
        raise PartitionError(f"part {part} was asked for", f"there are {num_parts}, counted from 0")
    if owner.numel() != num_nodes:
        raise PartitionError(
            f"owner must name a part for each of {num_nodes:,} vertices", f"it names {owner.numel():,}"
        )
    if owner.numel() and not 0 <= int(owner.min()) <= int(owner.max()) < num_parts:
        raise PartitionError(
            f"owners run from 0 to {num_parts - 1}", f"they run from {int(owner.min())} to {int(owner.max())}"
        )


def each_part(
    data: Data,
    owner: Tensor,
    num_parts: int,
    *,
    fingerprint: str = "",
    readers: NDArray[np.int64] | None = None,
) -> Iterator[Partition]:
    """One part of the whole graph after another, so that no two need be held at a time.

    Args:
        data: The whole graph, validated.
        owner: Part of each vertex.
        num_parts: Parts.
        fingerprint: Kept in each.
        readers: As in :func:`extract`.

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
    """Every part of the whole graph, all at once; as :func:`each_part`."""
    return list(each_part(data, owner, num_parts, fingerprint=fingerprint))


def partition(data: Data, *, parts: int, method: str = "metis", seed: int = 0) -> list[Partition]:
    """Assign each vertex to a part and return what each part holds.

    Args:
        data: The whole graph, validated.
        parts: Parts; more than there are vertices leave some empty.
        method: Name of a partitioner.
        seed: Its seed.

    Returns:
        The parts, in order.

    Raises:
        PartitionError: If there is no such partitioner, or no part.
    """
    owner = assign(method, data.edge_index, int(data.num_nodes), parts, seed)
    return split_all(data, owner, parts, fingerprint=fingerprint(data, method, seed, parts))
