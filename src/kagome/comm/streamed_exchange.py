"""Letters: bytes that are written sheet by sheet while others travel, and headers that go ahead of rows.

Where it sits: ``channel`` calls it; ``halo.encoded_message`` and ``halo.block_exchange`` code rows as they
are sent.

::

    write 1.0 | send 1.0 ─────────────────>
              | write 2.0 | send 2.0 ─────────────────>
                          | write 1.1 | send 1.1 ─────────────────>          sheet 1 of peer 1's letter
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kagome.comm.stats import Kind
from kagome.comm.transport import failures
from kagome.comm.work import Sheets, Work

if TYPE_CHECKING:
    from kagome.comm.channel import Channel


def start_bytes(
    channel: Channel,
    write: Callable[[int, int, Tensor], None],
    sizes: Sheets,
    expected: Sheets,
    *,
    action: str,
    kind: Kind = "halo",
    header: tuple[int, ...] | None = None,
) -> Work:
    """Begin to send each peer bytes that are written only before they go, and to receive theirs.

    Args:
        channel: Of this rank.
        write: Called once with each rank of the group that gets any, this one too, each of its sheets, and
            the place of its bytes, where the model runs.
        sizes: Bytes of each sheet for each rank: as many sheets for all, on all ranks, empty ones last.
        expected: Bytes of each sheet from each.
        action: What this is, for errors.
        kind: What its bytes count as.
        header: As :meth:`Channel.start_exchange` takes it.

    Returns:
        The exchange under way; :meth:`Work.parts` gives each peer's bytes as they come.

    Raises:
        CommError: If a peer's header or sizes differ, or a peer was late or lost.
    """
    if header is not None and channel.size > 1:
        with channel.timed(kind):
            compare(channel, header, [sum(each) for each in sizes], [sum(each) for each in expected], action)
    totals = [sum(each) for each in sizes]
    parts = list(torch.empty(sum(totals), dtype=torch.uint8, device=channel.wire).split(totals))
    apart = {peer for peer in range(channel.size) if channel.streams(peer)}

    def fill(peer: int, sheet: int) -> None:
        places = parts[peer].split(list(sizes[peer]))
        for number in (sheet,) if peer in apart else range(len(places)):
            place = places[number]
            if place.numel() and channel.wire == channel.device:
                write(peer, number, place)
            elif place.numel():
                written = torch.empty_like(place, device=channel.device)
                write(peer, number, written)
                place.copy_(written)

    def posted(sheets: Sheets) -> Sheets:
        return [
            each if peer in apart else (sum(each), *[0] * (len(each) - 1)) for peer, each in enumerate(sheets)
        ]

    if channel.size == 1:
        fill(0, 0)
        return Work(parts[0], channel, action, kind)
    coming = [sum(each) for each in expected]
    pending = channel.start_parts(parts, coming, action, kind, fill, (posted(sizes), posted(expected)))
    pending.apart = frozenset(apart)
    return pending


def compare(
    channel: Channel, fields: tuple[int, ...], sends: Sequence[int], comes: Sequence[int], action: str
) -> None:
    """Compare a header and counts with all peers, before anything else is sent.

    Raises:
        CommError: If they differ.
    """
    ours = [failures.header(fields, send, come) for send, come in zip(sends, comes, strict=True)]
    parts = torch.split(torch.tensor(ours, device=channel.wire), 1)
    pending = channel.start_parts(list(parts), [1] * channel.size, f"{action} (header)", "other")
    theirs: list[list[int]] = pending.wait().tolist()
    # The own counts were compared before.
    theirs[channel.rank] = failures.header(fields, comes[channel.rank], sends[channel.rank])
    texts = failures.disagreements(ours, theirs, channel.names)
    if texts:
        raise failures.disagree(channel.names[channel.rank], action, texts)
