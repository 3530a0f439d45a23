"""Merged chunks: all chunks of a part as one piece, which reads what each of them would read.

Where it sits: ``pipelining.chunking`` merges the chunks for evaluation and exact epochs. A rank that holds
all layers runs them so in all epochs, at the cost of one chunk, because no stage waits for the first of them.
Which rows are fresh and which are historical is still decided chunk by chunk.

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
    """Merge all chunks of a part into one, with every edge and every read of each.

    Args:
        chunks: The chunks of the part.

    Cost:
        A copy of the part.
    """
    pieces = chunks.pieces
    parts = [piece.part for piece in pieces]
    edges, halo = [], chunks.own
    # The merged piece has all own rows first, so ids of a chunk move: own ones by the rows of earlier chunks,
    # halo ones behind all own rows and the halos of earlier chunks.
    for piece in pieces:
        source, target = piece.part.edge_index
        away = source >= piece.own
        edges.append(
            torch.stack([source + torch.where(away, halo - piece.own, piece.first), target + piece.first])
        )
        halo += piece.reads.numel()
    edge_ids = torch.cat([part.edge_ids for part in parts])
    # Edges in the order of the whole graph, as in every part.
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
    """Return the chunks without attributes, for use beside the merged chunk, which holds the attributes."""
    pieces = [replace(piece, part=replace(piece.part, nodes={}, edges={})) for piece in chunks.pieces]
    return replace(chunks, pieces=tuple(pieces))


def sharing(piece: Chunk, whole: Chunk) -> Chunk:
    """Return a chunk whose rows' attributes are views of the merged chunk's, so that there is one copy.

    Sparse attributes stay its own: a range of their rows is no view.
    """
    rows = {
        name: whole.part.nodes[name].narrow(0, piece.first, piece.own)
        if value.layout is torch.strided
        else value
        for name, value in piece.part.nodes.items()
    }
    return replace(piece, part=replace(piece.part, nodes=rows))


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
