"""Merged chunks: all chunks of a part as one piece, which reads what each of them would read.

Where it sits: ``pipelining.chunking`` merges the chunks for evaluation and exact epochs. A rank that holds
all layers runs them so in all epochs, at the cost of one chunk, because no stage waits for the first of them.
Which rows are fresh and which are historical is still decided chunk by chunk.

::

    part        own, halo
    chunks      own 0, halo 0 | own 1, halo 1 | own 2, halo 2
    together    own, halo 0, halo 1, halo 2                       a row that two chunks read is there twice

Own rows and edges are those of the part, in its order. Where a part has all vertices, nothing would tell own
rows in another order from a tensor that has a row for each vertex.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kagome.graph.partition.chunks import Chunk, Chunks, ChunkStep
from kagome.graph.partition.partition import Partition


def together(part: Partition, chunks: Chunks) -> Chunk:
    """Merge all chunks of a part into one, with every edge and every read of each.

    Args:
        part: The part.
        chunks: Its chunks.

    Cost:
        A copy of the part's edges.
    """
    # Positions in the table are by chunk, and ``places`` has that of each own row:
    #
    #     own rows   0 1 2 3 4     chunk_of  1 0 0 1 0
    #     table      1 2 4 | 0 3   places    3 0 1 4 2
    places = torch.empty_like(chunks.rows)
    places[chunks.rows] = torch.arange(chunks.own)
    source, target = part.edge_index
    chunk_of = torch.empty_like(places)
    chunk_of[chunks.rows] = chunks.chunk_of
    # Edges of each chunk are in the part's order there too, so that they come back to their places by chunk.
    source, of_target, first = source.clone(), chunk_of[target], chunks.own
    for piece in chunks.pieces:
        mine = (of_target == piece.number).nonzero().view(-1)
        local = piece.part.edge_index[0]
        away = local >= piece.own
        source[mine[away]] = local[away] + (first - piece.own)
        first += piece.reads.numel()
    none = torch.empty(0, dtype=torch.int64)
    merged = replace(
        part,
        halo=torch.cat([piece.part.halo for piece in chunks.pieces]),
        edge_index=torch.stack([source, target]),
        send=none,
        send_counts=(),
        recv_counts=(),
    )
    return Chunk(0, merged, 0, torch.cat([piece.reads for piece in chunks.pieces]), places)


def bare(chunks: Chunks) -> Chunks:
    """Return the chunks without attributes, for use beside those that have them."""
    pieces = [replace(piece, part=replace(piece.part, nodes={}, edges={})) for piece in chunks.pieces]
    return replace(chunks, pieces=tuple(pieces))


def at_once(steps: Sequence[ChunkStep]) -> ChunkStep:
    """Merge all steps of an epoch into one, for the chunks merged by :func:`together`.

    Rows for a peer are sent in the order of their owner's steps, which is the order in which the peer expects
    them.

    Args:
        steps: The steps of all chunks, in the epoch's order.
    """
    # Reads are laid out by chunk number, as in ``together``; messages by step, as the peers expect them.
    by_chunk = sorted(steps, key=lambda step: step.chunk)
    fresh, before = [], 0
    for step in by_chunk:
        # ``fresh`` counts among the reads of its step.
        fresh.append(step.fresh + before)
        before += step.source.numel()
    send, send_counts = _by_peer([(step.send, step.send_counts) for step in steps])
    recv, recv_counts = _by_peer([(step.recv, step.recv_counts) for step in steps])
    return ChunkStep(
        0,
        torch.cat([step.source for step in by_chunk]),
        torch.cat(fresh),
        torch.cat([step.scale for step in by_chunk]),
        send,
        send_counts,
        recv,
        recv_counts,
    )


def _by_peer(lists: Sequence[tuple[Tensor, tuple[int, ...]]]) -> tuple[Tensor, tuple[int, ...]]:
    """Merge lists that are each ordered by peer into one list ordered by peer."""
    peers = list(zip(*(rows.split(counts) for rows, counts in lists), strict=True))
    rows = torch.cat([each for peer in peers for each in peer])
    return rows, tuple(sum(each.numel() for each in peer) for peer in peers)
