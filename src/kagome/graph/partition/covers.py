"""Covers: which rows and which partial sums one part has to send another, as few of both as there can be.

Where it sits: ``sparse_ops.partial_sums`` takes the cover of what a part reads, and ``kagome partition``
counts those of all parts.

[Note: cover] The edges from one part to another are a bipartite graph of senders and receivers. An edge is
served if its sender's row is sent, or if the sum over the edges of its receiver is. So what is sent is a
vertex cover of that graph: a set that has one end of each edge. The smallest cover has as many vertices as
the largest matching has edges (König)::

    edges             a -> x   a -> y   a -> z   b -> x   c -> x   d -> x
    halo rows         a b c d          4 rows
    partial sums      x y z            3 rows
    smallest cover    a x              2 rows: a's, and b + c + d for x
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kagome.graph.partition.store import load_part

Ids = NDArray[np.integer[Any]]
Mask = NDArray[np.bool_]
LEAST_SAVED: Final = 0.1
"""Share of a peer's rows that ``auto`` wants saved: less does not pay for the second list of edges that a
rank keeps for sums. Time does not decide: 20,000 rows of 128 numbers took 1.2 ms of processor time to copy
for their readers, and as sums of one edge each, which is the worst case, 1.6 ms."""


@dataclass(frozen=True)
class Cover:
    """A set of senders and receivers such that each edge has one of its ends in it.

    Args:
        senders: Whether the row of each sender is sent.
        receivers: Whether a partial sum is sent for each receiver.

    Shapes:
        ``senders [S]``, ``receivers [R]``.
    """

    senders: Mask
    receivers: Mask


def smallest_cover(sender: Ids, receiver: Ids, senders: int, receivers: int) -> Cover:
    """Return the smallest cover that has as many senders as possible: see [Note: cover].

    Several pairs of parts may be given at once, as long as no sender or receiver belongs to two pairs. The
    cover is then the smallest for each of them.

    Args:
        sender: The sender of each edge.
        receiver: The receiver of each edge.
        senders: The number of senders.
        receivers: The number of receivers.

    Shapes:
        ``sender [E]``, ``receiver [E]``.

    Cost:
        ``O(E sqrt(S + R))`` at most, by the matching of Hopcroft and Karp.

    Example:
        >>> import numpy as np
        >>> sender, receiver = np.array([0, 0, 1, 2, 3]), np.array([0, 1, 1, 1, 1])
        >>> found = smallest_cover(sender, receiver, 4, 2)  # of five edges four end in one receiver
        >>> found.senders.tolist(), found.receivers.tolist()
        ([True, False, False, False], [False, True])
    """
    if not sender.size:
        return Cover(np.zeros(senders, np.bool_), np.zeros(receivers, np.bool_))
    # Imported here: a run that sends no partial sums starts without scipy.
    from scipy.sparse import csr_matrix
    from scipy.sparse.csgraph import maximum_bipartite_matching

    # Edges that share both ends are one entry: the constructor adds them up.
    graph = csr_matrix((np.ones(sender.size, np.int32), (sender, receiver)), shape=(senders, receivers))
    sender_of = maximum_bipartite_matching(graph, perm_type="row")  # of each receiver; -1 if unmatched
    matched = np.zeros(senders, np.bool_)
    matched[sender_of[sender_of >= 0]] = True
    # König: begin at the senders that the matching leaves out, and go along any edge to a receiver and along
    # an edge of the matching back to a sender. The cover has the senders that are not reached and the
    # receivers that are.
    reached, sums = np.zeros(senders, np.bool_), np.zeros(receivers, np.bool_)
    begin = np.flatnonzero(~matched & (np.diff(graph.indptr) > 0))
    while begin.size:
        reached[begin] = True
        found = np.unique(_neighbours(graph.indptr, graph.indices, begin))
        found = found[~sums[found]]
        sums[found] = True
        # A receiver that is reached has a sender in the matching, or the matching could have been larger.
        begin = sender_of[found]
        begin = begin[~reached[begin]]
    return Cover(matched & ~reached, sums)


def _neighbours(pointer: Ids, column: Ids, rows: Ids) -> Ids:
    """Return the columns of some rows of a compressed sparse matrix, one row after the other."""
    begin, count = pointer[rows], np.diff(pointer)[rows]
    # Place k of the result is column k - (what earlier rows had) of its row.
    found: Ids = column[np.arange(count.sum()) + np.repeat(begin - (np.cumsum(count) - count), count)]
    return found


@dataclass(frozen=True, eq=False)
class HaloCover:
    """What a part reads of each peer, as rows and partial sums.

    Args:
        kept: Whether each halo row is read as a row. Sums have the edges that read the others.
        read: The number of rows that the part reads of each peer without sums.
        counts: The number of rows and sums that it reads in their place.

    Shapes:
        ``kept [H]``.
    """

    kept: Mask
    read: Ids
    counts: Ids


def halo_cover(
    source: Ids, target: Ids, own: int, recv_counts: tuple[int, ...], least: float = 0.0
) -> HaloCover:
    """Return the smallest cover of what a part reads of each peer.

    Args:
        source: The row that each edge reads: an own row, or a halo row after them.
        target: The row that each edge writes.
        own: The number of own rows that edges read.
        recv_counts: The number of halo rows of each peer.
        least: The share of a peer's rows that sums must save. Below it, the peer sends rows alone.

    Shapes:
        ``source [E]``, ``target [E]``.

    Cost:
        A matching over the edges that read halo rows.
    """
    peers, beyond = len(recv_counts), source >= own
    peer_of = np.repeat(np.arange(peers), recv_counts)
    sender = source[beyond] - own
    # A target is another receiver for each peer: no sum has rows of two peers.
    receivers, receiver = np.unique(target[beyond] * peers + peer_of[sender], return_inverse=True)
    cover = smallest_cover(sender, receiver, peer_of.size, receivers.size)
    asked = np.zeros(peer_of.size, np.bool_)
    asked[sender] = True
    read = np.bincount(peer_of[asked], minlength=peers)
    counts = np.bincount(peer_of[cover.senders], minlength=peers)
    counts += np.bincount(receivers[cover.receivers] % peers, minlength=peers)
    # Where sums save nothing, the smallest cover that has most senders is all senders. So `worth` is False
    # there for any threshold, and a peer without sums sends what it would send without covers.
    worth = read - counts > least * read
    kept = np.where(worth[peer_of], cover.senders, asked)
    return HaloCover(kept, read, np.where(worth, counts, read))


def savings(folder: str | Path, parts: int) -> tuple[str, ...]:
    """Return a sentence on the rows that partial sums would save in a saved partition, if any edge is cut."""
    found = []
    for number in range(parts):
        piece = load_part(folder, number)
        source, target = piece.edge_index.numpy()
        found.append(halo_cover(source, target, piece.own.numel(), piece.recv_counts))
    tables = [np.stack([each.read for each in found]), np.stack([each.counts for each in found])]
    rows, fewer = (int(table.sum()) for table in tables)
    if not rows:
        return ()
    # A part sends along a column of the table, and the gradients of what it reads along a row.
    most, less = (int(max(table.sum(0).max(), table.sum(1).max())) for table in tables)
    return (
        f"with partial sums, which layers that sum or average rows can send: {fewer:,} rows in place of "
        f"{rows:,} ({fewer / rows - 1:+.0%}), the most of a part {less:,} in place of {most:,} "
        f"({less / most - 1:+.0%})",
    )


def cover_counts(source: Ids, target: Ids, owner: Ids, parts: int, least: float = 0.0) -> tuple[Ids, Ids]:
    """Return what each part reads of each other one, for a cut of a whole graph: rows; rows and sums.

    Args:
        source: The source of each edge.
        target: The target of each edge.
        owner: The part of each vertex.
        parts: The number of parts.
        least: As of :func:`halo_cover`.

    Shapes:
        ``source [E]``, ``target [E]``, ``owner [N]``; both results ``[parts, parts]``, by reader, then by
        sender.

    Cost:
        A matching over the edges that are cut.
    """
    rows, fewer = np.zeros((2, parts, parts), np.int64)
    sends, reads = owner[source], owner[target]
    for part in range(parts):
        cut = (reads == part) & (sends != part)
        # Halo rows by the part that owns them, each once.
        halo, row = np.unique(sends[cut] * owner.size + source[cut], return_inverse=True)
        counts = np.bincount(halo // max(owner.size, 1), minlength=parts)
        found = halo_cover(row, target[cut], 0, tuple(counts.tolist()), least)
        rows[part], fewer[part] = found.read, found.counts
    return rows, fewer
