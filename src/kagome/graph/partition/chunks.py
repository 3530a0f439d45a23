"""Chunks: ordered pieces of a part, which chunk reads which, and what each step of an epoch finds fresh.

Where it sits: each rank makes the chunks of its part from a ``Partition``. ``historical.provider`` keeps a
table of a part's rows in their order; ``pipelining`` runs the chunks in an epoch's order.

::

    table of a part      [ chunk 0 | chunk 1 | ... | chunk K-1 | halo ]     rows of a chunk are contiguous
    a chunk              own rows = its piece of the table; it reads rows of other chunks and of the halo

*Fresh* is static. Rows of the own part are fresh if an earlier step wrote them. Halo rows are fresh if they
arrived in an earlier step or in this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kagome.graph.partition.partition import Partition
from kagome.graph.partition.partitioners import assign


@dataclass(frozen=True)
class Chunk:
    """One piece of a part.

    Args:
        number: The number of the chunk.
        part: The piece as a part of its own: its halo is everything that its edges read elsewhere.
        first: Position of its first row in the part's table.
        reads: Positions of its halo rows in the table.
        places: Positions of its own rows in the table; None where they follow each other.

    Shapes:
        ``reads [h]``, ``places [n]``.
    """

    number: int
    part: Partition
    first: int
    reads: Tensor
    places: Tensor | None = None

    @property
    def own(self) -> int:
        """The number of the chunk's own rows."""
        return self.part.own.numel()


@dataclass(frozen=True)
class Chunks:
    """All chunks of a part.

    Args:
        pieces: The chunks, by number.
        rows: The part's own row at each of the table's first positions.
        own: The number of own rows of the part.
        halo: The number of halo rows of the part.
        send: Positions of the rows that peers read, by peer, then in the part's order.
        send_counts: The number of rows that each peer reads.
        recv_counts: The number of halo rows from each peer.
        read_by: Which of this part's chunks read each halo row.
        ids: Original vertex ids of the table's positions.

    Shapes:
        ``rows [own]``, ``send [sum(send_counts)]``, ``read_by [halo, K]``, ``ids [own + halo]``.
    """

    pieces: tuple[Chunk, ...]
    rows: Tensor
    own: int
    halo: int
    send: Tensor
    send_counts: tuple[int, ...]
    recv_counts: tuple[int, ...]
    read_by: Tensor
    ids: Tensor

    @property
    def table(self) -> int:
        """The number of rows of the part's table."""
        return self.own + self.halo

    @property
    def chunk_of(self) -> Tensor:
        """The chunk of each own position. Shapes: ``[own]``."""
        sizes = torch.tensor([piece.own for piece in self.pieces])
        return torch.repeat_interleave(torch.arange(len(self.pieces)), sizes)


def cut_part(part: Partition, count: int, *, method: str = "metis", seed: int = 0) -> Chunks:
    """Cut a part into chunks by its inner edges.

    Args:
        part: The part.
        count: The number of chunks; if there are fewer vertices, some chunks are empty.
        method: The partitioner's name.
        seed: The partitioner's seed.

    Cost:
        The partitioner's, and a copy of the part.
    """
    own, halo = part.own.numel(), part.halo.numel()
    source, target = part.edge_index
    # Edges from the halo tie no two chunks together.
    inner = source < own
    if count == 1:
        chunk_of = torch.zeros(own, dtype=torch.int64)
    else:
        pos = part.nodes.get("pos")
        chunk_of = assign(method, part.edge_index[:, inner].contiguous(), own, count, seed, pos)
    # Table position -> own row, and below, own or halo row -> table position:
    #   own rows   0 1 2 3 4     chunk_of  1 0 0 1 0
    #   rows       1 2 4 0 3     chunk 0 | chunk 1       place  3 0 1 4 2, then the halo unchanged
    rows = torch.argsort(chunk_of, stable=True)
    place = torch.empty(own + halo, dtype=torch.int64)
    place[rows] = torch.arange(own)
    place[own:] = torch.arange(own, own + halo)
    sizes = torch.bincount(chunk_of, minlength=count).tolist()
    firsts = [sum(sizes[:number]) for number in range(count)]
    # An edge belongs to the chunk of its target, which sums over it.
    edge_chunk = chunk_of[target]
    by_chunk = torch.argsort(edge_chunk, stable=True).split(
        torch.bincount(edge_chunk, minlength=count).tolist()
    )
    pieces = tuple(
        _piece(
            part, number, rows[firsts[number] : firsts[number] + sizes[number]], firsts[number], ids, place
        )
        for number, ids in enumerate(by_chunk)
    )
    read_by = torch.zeros(halo, count, dtype=torch.bool)
    for piece in pieces:
        read_by[piece.reads[piece.reads >= own] - own, piece.number] = True
    ids = torch.cat([part.own[rows], part.halo])
    sends, comes = part.send_counts, part.recv_counts
    return Chunks(pieces, rows, own, halo, place[part.send], sends, comes, read_by, ids)


def _piece(part: Partition, number: int, mine: Tensor, first: int, edge_ids: Tensor, place: Tensor) -> Chunk:
    """Return the chunk of the part's rows ``mine``, with the edges ``edge_ids`` that end in them."""
    # In table positions; targets count from the chunk's first row.
    source, target = place[part.edge_index[0, edge_ids]], place[part.edge_index[1, edge_ids]] - first
    inside = (source >= first) & (source < first + mine.numel())
    # Each row that is read elsewhere once, ascending in the table.
    reads, local = torch.unique(source[~inside], return_inverse=True)
    source = source - first
    source[~inside] = local + mine.numel()
    # Table position -> own or halo row of the part.
    back = torch.empty_like(place)
    back[place] = torch.arange(place.numel())
    ids = torch.cat([part.own, part.halo])
    chunk = replace(
        part,
        own=part.own[mine],
        halo=ids[back[reads]],
        edge_index=torch.stack([source, target]),
        edge_ids=part.edge_ids[edge_ids],
        send=torch.empty(0, dtype=torch.int64),
        send_counts=(),
        recv_counts=(),
        nodes={name: value[mine] for name, value in part.nodes.items()},
        edges={name: value[edge_ids] for name, value in part.edges.items()},
    )
    return Chunk(number, chunk, first, reads)


def alone(chunk: Chunk) -> Partition:
    """Return a chunk without the edges that start outside it: a small graph of its own."""
    part, own = chunk.part, chunk.own
    inner = part.edge_index[0] < own
    return replace(
        part,
        halo=part.halo[:0],
        edge_index=part.edge_index[:, inner].contiguous(),
        edge_ids=part.edge_ids[inner],
        send_counts=(0,),
        recv_counts=(0,),
        edges={name: value[inner] for name, value in part.edges.items()},
    )


def order_of(count: int, *, seed: int, epoch: int, part: int, shuffle: bool = True) -> tuple[int, ...]:
    """Return the seeded order of a part's chunks in an epoch, which every rank can compute for every part."""
    if not shuffle:
        return tuple(range(count))
    # Spread like this, the seeds of neighbouring epochs and parts give unrelated orders.
    generator = torch.Generator().manual_seed(((seed * 1_000_003 + epoch) * 8_191 + part) % 2**63)
    return tuple(torch.randperm(count, generator=generator).tolist())


@dataclass(frozen=True)
class ChunkStep:
    """The rows that one step of an epoch reads, sends and receives.

    Args:
        chunk: The number of the chunk that the step runs.
        source: For each row that the chunk reads, its position in the table; plus the table's length if the
            row is historical.
        fresh: Which of these rows are fresh.
        scale: The factor of each fresh row's gradient.
        send: Positions of the rows that are sent in this step, by peer.
        send_counts: The number of rows sent to each peer.
        recv: Positions of the halo rows that are received.
        recv_counts: The number of rows received from each peer.

    Shapes:
        ``source [h]``, ``fresh [f]``, ``scale [f]``, ``send [..]``, ``recv [..]``.
    """

    chunk: int
    source: Tensor
    fresh: Tensor
    scale: Tensor
    send: Tensor
    send_counts: tuple[int, ...]
    recv: Tensor
    recv_counts: tuple[int, ...]


def plan_steps(
    chunks: Chunks,
    own_order: Sequence[int],
    orders: Sequence[Sequence[int]],
    halo_chunk: Tensor,
    sent_read_by: Tensor,
    *,
    scale: float,
    refresh: bool,
) -> tuple[ChunkStep, ...]:
    """Plan which rows each step of an epoch reads, sends and receives.

    A halo row is sent in its owner's step if the reader reads it in that step or later. In epochs that
    refresh history, every halo row is sent.

    Args:
        chunks: The chunks of this part.
        own_order: The order of this part's chunks.
        orders: The orders of every part's chunks.
        halo_chunk: The owner's chunk that holds each halo row.
        sent_read_by: Which chunks of the reader read each sent row.
        scale: The factor of a gradient that is sent to an earlier step.
        refresh: Whether history is refreshed after this epoch.

    Shapes:
        ``halo_chunk [H]``, ``sent_read_by [sum(send_counts), K]``.
    """
    # steps[p, c]: when part p runs its chunk c.
    steps = torch.tensor([_places(order) for order in orders])
    own_step = torch.tensor(_places(own_order))
    owner = torch.repeat_interleave(torch.arange(len(orders)), torch.tensor(chunks.recv_counts))
    reader = torch.repeat_interleave(torch.arange(len(orders)), torch.tensor(chunks.send_counts))
    # The step in which each own position, halo row and sent row is computed by its owner.
    of_own = own_step[chunks.chunk_of]
    of_halo = steps[owner, halo_chunk] if halo_chunk.numel() else halo_chunk
    of_sent = of_own[chunks.send]
    # The last step in which a chunk reads the row, here and at the peer that it is sent to; -1 if none does.
    last_here = torch.where(chunks.read_by, own_step, -1).amax(1) if of_halo.numel() else of_halo
    last_there = torch.where(sent_read_by, steps[reader], -1).amax(1) if of_sent.numel() else of_sent
    goes, comes = (last_there >= of_sent) | refresh, (last_here >= of_halo) | refresh
    found = []
    of_place = torch.cat([of_own, of_halo])
    for number, chunk in enumerate(own_order):
        reads = chunks.pieces[chunk].reads
        # A halo row is exchanged in the step in which its owner computes it, so it is fresh in that step
        # already. An own row of another chunk is fresh from the next step on.
        at = of_place[reads]
        fresh = torch.where(reads < chunks.own, at < number, at <= number)
        kept = fresh.nonzero().view(-1)
        # The gradient goes to a step that is over: technique 3 of GNNPipe scales it.
        cross = at[kept] < number
        sent = (goes & (of_sent == number)).nonzero().view(-1)
        come = (comes & (of_halo == number)).nonzero().view(-1)
        found.append(
            ChunkStep(
                chunk,
                # Historical rows are in the second half of the table.
                torch.where(fresh, reads, reads + chunks.table),
                kept,
                torch.where(cross, scale, 1.0),
                chunks.send[sent],
                tuple(torch.bincount(reader[sent], minlength=len(orders)).tolist()),
                come + chunks.own,
                tuple(torch.bincount(owner[come], minlength=len(orders)).tolist()),
            )
        )
    return tuple(found)


def _places(order: Sequence[int]) -> list[int]:
    """Return the step at which each chunk runs."""
    found = [0] * len(order)
    for step, chunk in enumerate(order):
        found[chunk] = step
    return found
