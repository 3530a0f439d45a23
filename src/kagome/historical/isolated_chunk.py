"""Apart: the channel of a chunk that knows nothing of the others: its rows stand for those of all.

Where it sits: ``pipeline.chunking`` gives it to the chunks of ``cross_chunk="drop"``. A model takes the same
way there as on a part of the graph, so what a part cannot do is found out before training, on a sample.

::

    sum over all vertices    the chunk's own, times N / n     a mean is the chunk's own then
    largest of all           the chunk's own
    rows of neighbours       no edge leads to any
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Final

import torch
from torch import Tensor

from kagome.comm.channel import Kind, Op
from kagome.comm.exchange import Trip
from kagome.errors import ModelError
from kagome.halo.exchange import UnderWay
from kagome.historical.tables import Later

STAND_IN: Final = 2
"""What a chunk without a vertex takes for all sums: none of its rows reads it, and it is finite wherever a
forward divides by it, or by one less."""


class IsolatedChannel:
    """A chunk's end of no other one: what an interception takes for its channel.

    Args:
        rank: The chunk's place among all chunks of all parts.
        size: How many those are.
        own: Vertices of the chunk.
        vertices: Of the whole graph.
    """

    exact = False
    """Its sums are estimates."""
    closed = True
    """No edge leads to rows of another chunk."""

    def __init__(self, rank: int, size: int, own: int, vertices: int) -> None:
        self.rank, self.size = rank, size
        self.where: Callable[[], str] = str
        """Names the layer that is running; set where it is known."""
        self._factor = vertices / own if own else 0.0

    def exchange(
        self,
        rows: Tensor,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
        *,
        action: str,
        kind: Kind = "halo",
        header: tuple[int, ...] | None = None,
    ) -> Tensor:
        """Refused, but where nothing is sent."""
        if not any(send_counts):
            return rows[:0]
        raise ModelError(
            "chunks that know nothing of each other read their own rows",
            f"a layer asks for more: {action}",
            where=self.where(),
            hint="chunks=1, or another layer",
        )

    def start_exchange(
        self,
        rows: Tensor,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
        *,
        action: str,
        kind: Kind = "halo",
        header: tuple[int, ...] | None = None,
        pick: Tensor | None = None,
        trip: Trip | None = None,
    ) -> UnderWay:
        """As :meth:`exchange`."""
        found = self.exchange(rows, send_counts, recv_counts, action=action, kind=kind, header=header)
        return Later(lambda: found)

    def all_reduce(
        self,
        tensor: Tensor,
        op: Op = "sum",
        *,
        action: str,
        kind: Kind = "statistics",
        key: Hashable = None,
    ) -> Tensor:
        """What the sum over all vertices is likely to be, or the largest or smallest here."""
        found = tensor.detach()
        if op != "sum":
            floats = found.is_floating_point() and not self._factor
            lowest = torch.finfo(found.dtype).min if floats else None
            return found.clone() if lowest is None else found.masked_fill(found == lowest, STAND_IN)
        if not self._factor:
            return torch.full_like(found, STAND_IN)
        if found.is_floating_point() or found.is_complex():
            return found * self._factor
        return (found.double() * self._factor).round().to(found.dtype)
