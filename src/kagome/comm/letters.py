"""Letters: bytes that are written peer by peer while those before travel, and headers that go ahead of rows.

Where it sits: ``channel`` calls it; ``neighbors.letter`` and ``neighbors.blocks`` code rows as they are sent.

::

    write 1 | send 1 ─────────────────>
            | write 2 | send 2 ─────────────────>
                      | write 3 | send 3 ─────────────────>
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kagome.comm import faults
from kagome.comm.pending import Pending
from kagome.comm.traffic import Kind

if TYPE_CHECKING:
    from kagome.comm.channel import Channel


def start_bytes(
    channel: Channel,
    write: Callable[[int, Tensor], None],
    sizes: Sequence[int],
    expected: Sequence[int],
    *,
    action: str,
    kind: Kind = "halo",
    header: tuple[int, ...] | None = None,
) -> Pending:
    """Begin to send each peer bytes that are written only before they go, and to receive theirs.

    Args:
        channel: Of this rank.
        write: Called once with each rank of the group that gets any, this one too, and the place of its
            bytes, where the model runs.
        sizes: Bytes for each rank.
        expected: Bytes from each.
        action: What this is, for errors.
        kind: What its bytes count as.
        header: As :meth:`Channel.start_exchange` takes it.

    Returns:
        The exchange under way; :meth:`Pending.parts` gives each peer's bytes as they come.

    Raises:
        CommError: If a peer's header or sizes differ, or a peer was late or lost.
    """
    if header is not None and channel.size > 1:
        with channel.timed(kind):
            compare(channel, header, sizes, expected, action)
    parts = list(torch.empty(sum(sizes), dtype=torch.uint8, device=channel.wire).split(list(sizes)))

    def fill(peer: int) -> None:
        if not sizes[peer]:
            return
        if channel.wire == channel.device:
            write(peer, parts[peer])
            return
        place = torch.empty(sizes[peer], dtype=torch.uint8, device=channel.device)
        write(peer, place)
        parts[peer].copy_(place)

    if channel.size == 1:
        fill(0)
        return Pending(parts[0], channel, action, kind)
    return channel.start_parts(parts, expected, action, kind, fill)


def compare(
    channel: Channel, fields: tuple[int, ...], sends: Sequence[int], comes: Sequence[int], action: str
) -> None:
    """Compare a header and counts with all peers, before anything else is sent.

    Raises:
        CommError: If they differ.
    """
    ours = [faults.header(fields, send, come) for send, come in zip(sends, comes, strict=True)]
    parts = torch.split(torch.tensor(ours, device=channel.wire), 1)
    pending = channel.start_parts(list(parts), [1] * channel.size, f"{action} (header)", "other")
    theirs: list[list[int]] = pending.wait().tolist()
    # The own counts were compared before.
    theirs[channel.rank] = faults.header(fields, comes[channel.rank], sends[channel.rank])
    texts = faults.disagreements(ours, theirs, channel.names)
    if texts:
        raise faults.disagree(channel.names[channel.rank], action, texts)
