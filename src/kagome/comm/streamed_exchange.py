"""Streamed exchange: bytes written segment by segment while others are in transit, and headers sent first.

Where it sits: ``channel`` calls it. ``halo.encoded_message`` and ``halo.block_exchange`` encode rows while
they are sent.

::

    write 1.0 | send 1.0 ─────────────────>
              | write 2.0 | send 2.0 ─────────────────>
                          | write 1.1 | send 1.1 ─────────────────>          segment 1 of peer 1's message
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from kagome.comm.exchange import BytesRequest, SegmentSizes
from kagome.comm.transport import failures
from kagome.comm.work import ChannelWork

if TYPE_CHECKING:
    from kagome.comm.channel import Channel


def start_bytes(channel: Channel, request: BytesRequest) -> ChannelWork:
    """Begin to send each peer bytes that are written just before they are sent, and to receive the peers'.

    Args:
        channel: The channel to send through.
        request: The function that writes the bytes, and the sizes in both directions.

    Returns:
        The exchange in progress; :meth:`ChannelWork.parts` yields each peer's bytes as they arrive.

    Raises:
        CommError: If a peer's header or sizes differ, or a peer was late or its connection was lost.
    """
    sizes, expected, action, kind = request.sizes, request.expected, request.action, request.kind
    if request.header is not None and channel.size > 1:
        with channel.timed(kind):
            compare(
                channel,
                request.header,
                [sum(each) for each in sizes],
                [sum(each) for each in expected],
                action,
            )
    # [Note: segments] The segments s0 .. s3 of a message, by the way that it takes:
    #
    #     gloo             [ s0 ] [ s1 ] [ s2 ] [ s3 ]    a message each; s1 is encoded while s0 is sent
    #     shared memory    [ s0   s1   s2   s3 ]          encoded in one go, one token
    #     nccl             [ s0   s1   s2   s3 ]          one grouped call for all peers
    #
    # The bytes are the same in all three, so both ends only have to agree on the way.
    totals = [sum(each) for each in sizes]
    parts = list(torch.empty(sum(totals), dtype=torch.uint8, device=channel.send_device).split(totals))
    streamed_peers = {peer for peer in range(channel.size) if channel.streams(peer)}

    def fill(peer: int, segment: int) -> None:
        places = parts[peer].split(list(sizes[peer]))
        for number in (segment,) if peer in streamed_peers else range(len(places)):
            place = places[number]
            # Encoded in the buffer that is sent. With a GPU behind gloo, the GPU encodes and the bytes are
            # copied.
            if place.numel() and channel.send_device == channel.device:
                request.write(peer, number, place)
            elif place.numel():
                written = torch.empty_like(place, device=channel.device)
                request.write(peer, number, written)
                place.copy_(written)

    def posted(segments: SegmentSizes) -> SegmentSizes:
        # A message that is not streamed is posted as its first segment; the others are empty, so that all
        # peers have the same number.
        return [
            each if peer in streamed_peers else (sum(each), *[0] * (len(each) - 1))
            for peer, each in enumerate(segments)
        ]

    if channel.size == 1:
        fill(0, 0)
        return ChannelWork(parts[0], channel, action, kind)
    coming = [sum(each) for each in expected]
    pending = channel.start_parts(parts, coming, action, kind, fill, (posted(sizes), posted(expected)))
    pending.streamed_peers = frozenset(streamed_peers)
    return pending


def compare(
    channel: Channel, fields: tuple[int, ...], sends: Sequence[int], comes: Sequence[int], action: str
) -> None:
    """Compare a header and row counts with all peers, before anything else is sent.

    Raises:
        CommError: If the header or a count differs from a peer's.
    """
    ours = [failures.header(fields, send, come) for send, come in zip(sends, comes, strict=True)]
    control = channel.control
    parts = torch.split(torch.tensor(ours, device=control.send_device), 1)
    pending = control.start_parts(list(parts), [1] * channel.size, f"{action} (header)", "other")
    theirs: list[list[int]] = pending.wait().tolist()
    # A rank's counts to itself were compared before.
    theirs[channel.rank] = failures.header(fields, comes[channel.rank], sends[channel.rank])
    texts = failures.disagreements(ours, theirs, channel.names)
    if texts:
        raise failures.disagree(channel.names[channel.rank], action, texts)
