"""Failures: error messages for late peers, lost connections and ranks that disagree.

Where it sits: pure functions from numbers to ``CommError``; ``comm.peers`` and ``comm.streamed_exchange``
raise the errors that they return.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence

from kagome.errors import CommError

HEADER_NUMBERS = 5
HEADER_FIELDS = ("direction", "epoch", "site", "width", "gradient", "rows to the peer", "rows from the peer")


def header(fields: Sequence[int], sent: int, received: int) -> list[int]:
    """Return the numbers sent to one peer ahead of its rows: always 8, so that the size never differs.

    Raises:
        ValueError: If there are more than 5 fields.
    """
    if len(fields) > HEADER_NUMBERS:
        raise ValueError(f"a header has up to {HEADER_NUMBERS} numbers, this one has {len(fields)}")
    # index    0 .. 4               5                  6              7
    #          fields, then zeros   rows to the peer   rows from it   number of fields
    return [*fields, *[0] * (HEADER_NUMBERS - len(fields)), sent, received, len(fields)]


def disagreements(
    ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]], names: Sequence[int]
) -> list[str]:
    """Return one text for each peer whose header differs from the one that was sent to it."""
    texts: list[str] = []
    for our, their, name in zip(ours, theirs, names, strict=True):
        # One side's send count is the other side's receive count.
        mirrored = [*their[:HEADER_NUMBERS], their[6], their[5], their[7]]
        if list(our) == mirrored:
            continue
        pairs = [
            f"{field} is {own} here, {other} there"
            for field, own, other in zip(HEADER_FIELDS, our, mirrored, strict=False)
            if own != other
        ]
        texts.append(f"with rank {name}: {'; '.join(pairs) or 'the headers differ in length'}")
    return texts


def disagree(rank: int, action: str, texts: Sequence[str]) -> CommError:
    """Return the error of a rank whose header differs from those of its peers."""
    return CommError(
        f"rank {rank} and its peers to agree before '{action}'",
        f"differences {', and '.join(texts)}",
        where=f"rank {rank}",
        hint="every rank must run the same model, in the same order, on parts of one partition",
    )


def broken_wait(rank: int, action: str, peers: Sequence[str], *, late: float | None) -> CommError:
    """Return the error of a rank whose wait failed.

    Args:
        rank: The rank that waited.
        action: The operation that it waited in.
        peers: Descriptions of the peers to blame.
        late: The time limit in seconds that was exceeded; None if a connection was closed instead.
    """
    named = " and by ".join(peers[:4]) + (f" and by {len(peers) - 4} others" if len(peers) > 4 else "")
    got, hint = "a closed connection: that process died or gave up", "see what that rank said last"
    if late is not None:
        got = f"nothing within {late:g} s"
        hint = "see what that rank does; raise train.timeout if it is only slow"
    expected = f"rank {rank} to be answered in '{action}' by {named}"
    return CommError(expected, got, where=f"rank {rank}", hint=hint)


def is_late(error: RuntimeError) -> bool:
    """Return whether gloo or nccl exceeded its time limit; otherwise a connection was lost."""
    # Neither backend has an error class for this: gloo and nccl raise a RuntimeError, whose words differ by
    # the kind of operation.
    # The system's own "Connection timed out" comes with a connection that the network has lost.
    text = str(error).lower().replace(os.strerror(errno.ETIMEDOUT).lower(), "")
    return "timed out" in text or "timeout" in text
