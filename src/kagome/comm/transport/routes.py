"""Routes: the ways from one rank to another, each of which has a communicator of its own where nccl is used.

Where it sits: ``pipelining`` names the routes that its stages need, ``comm.channel`` opens them, and
``comm.groups`` makes their groups. gloo's tags keep messages apart, so it needs no routes.

[Note: routes] nccl orders the operations of a communicator on one stream, and a send ends only when the
receiver has posted its receive. If two stages share a communicator, a receive that was posted early holds up
a send that the other stage waits for:

::

    one communicator        rank 0    recv from 1 (waits)     send to 1 (behind it)
                            rank 1    recv from 0 (waits)     send to 0 (behind it)         for ever

    a communicator for      rank 0    0->1  send              1->0  recv
    each route              rank 1    0->1  recv              1->0  send

With a communicator for each route, a message waits only for earlier messages of its route. Both ends have
these in the same order, so no circle can close.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

POSTED_AHEAD: Final = 2
"""Receives that a pipeline posts before it needs them, where messages have routes. A posted receive is a
kernel that occupies a part of the GPU until its message has arrived."""


class Route(NamedTuple):
    """The way of the messages from one rank of a group to another, in one pass."""

    sender: int
    receiver: int
    backward: bool = False


def both_passes(links: Iterable[tuple[int, int]]) -> set[Route]:
    """Return the routes of the values that ranks send along links, and of the gradients that come back.

    Args:
        links: Pairs of the rank that gives a value and the rank that takes it. Pairs of one rank with itself
            are left out.

    Example:
        >>> sorted(both_passes([(0, 1), (1, 1)]))
        [Route(sender=0, receiver=1, backward=False), Route(sender=1, receiver=0, backward=True)]
    """
    apart = {(giver, taker) for giver, taker in links if giver != taker}
    there = {Route(giver, taker) for giver, taker in apart}
    return there | {Route(taker, giver, backward=True) for giver, taker in apart}
