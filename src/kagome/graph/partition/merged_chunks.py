"""Together: all chunks of a part as one piece, which reads what each of them would read.

Where it sits: a rank that has all layers takes its chunks so, at the cost of one: nothing waits for the
first of them. What is fresh and what is historical stays each chunk's own matter.

::

    chunks      own 0, halo 0 | own 1, halo 1 | own 2, halo 2
    together    own 0, own 1, own 2, halo 0, halo 1, halo 2       a row that two chunks read is there twice
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kagome.graph.partition.chunks import Chunk, Chunks, ChunkStep


def together(chunks: Chunks) -> Chunk:
    """All chunks of a part as one, with every edge and every read of each.

    Args:
        chunks: The chunks.

    Cost:
        A copy of the part.
    """
    pieces = chunks.pieces
    parts = [piece.part for piece in pieces]
    edges, halo = [], chunks.own
    for piece in pieces:
        source, target = piece.part.edge_index
        away = source >= piece.own
        edges.append(
            torch.stack([source + torch.where(away, halo - piece.own, piece.first), target + piece.first])
        )
        halo += piece.reads.numel()
    edge_ids = torch.cat([part.edge_ids for part in parts])
    order = torch.argsort(edge_ids)
    part = replace(
        parts[0],
        own=torch.cat([part.own for part in parts]),
        halo=torch.cat([part.halo for part in parts]),
        edge_index=torch.cat(edges, 1)[:, order],
        edge_ids=edge_ids[order],
        nodes={name: torch.cat([part.nodes[name] for part in parts]) for name in parts[0].nodes},
        edges={name: torch.cat([part.edges[name] for part in parts])[order] for name in parts[0].edges},
    )
    return Chunk(0, part, 0, torch.cat([piece.reads for piece in pieces]))


def bare(chunks: Chunks) -> Chunks:
    """The chunks without attributes: all of them together have these."""
    pieces = [replace(piece, part=replace(piece.part, nodes={}, edges={})) for piece in chunks.pieces]
    return replace(chunks, pieces=tuple(pieces))


def at_once(steps: Sequence[ChunkStep]) -> ChunkStep:
    """All steps of an epoch as one, of all chunks :func:`together`.

    Rows for a peer leave step by step of their owner, which is the order in which the peer expects them.

    Args:
        steps: Of each chunk, in the epoch's order.
    """
    by_chunk = sorted(steps, key=lambda step: step.chunk)
    fresh, before = [], 0
    for step in by_chunk:
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
    """Lists that are each by peer as one that is by peer."""
    peers = list(zip(*(rows.split(counts) for rows, counts in lists), strict=True))
    rows = torch.cat([each for peer in peers for each in peer])
    return rows, tuple(sum(each.numel() for each in peer) for peer in peers)
