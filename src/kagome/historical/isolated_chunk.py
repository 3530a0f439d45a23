"""Isolated chunk: the channel of a chunk that sees no other chunk and lets its own rows stand for all rows.

Where it sits: ``pipelining.chunking`` gives it to the chunks of ``cross_chunk="drop"``. A model runs the same
code on such a chunk as on a part of the graph. A layer that cannot run on a part is therefore found before
training, on a sample.

::

    sum over all vertices    the chunk's own sum times N / n, so that a mean is the chunk's own mean
    maximum over all         the chunk's own maximum
    rows of neighbours       no edge of the chunk reads another chunk's rows
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Final

import torch
from torch import Tensor

from kagome.comm.exchange import DeferredWork, ExchangeRequest, Op, Work
from kagome.comm.stats import Kind
from kagome.errors import ModelError

STAND_IN: Final = 2
"""Value of every sum in a chunk without vertices. No row of the chunk reads it. Dividing by it, or by it
minus one, gives a finite number."""


def no_rows(rows: Tensor, request: ExchangeRequest, expected: str, where: str) -> Work:
    """Answer an exchange of a chunk, whose channel sends no rows.

    Args:
        rows: The rows that would be sent.
        request: The exchange.
        expected: What a layer may read, for the error message.
        where: The name of the running layer.

    Raises:
        ModelError: If rows are to be sent.
    """
    if any(request.send_counts):
        raise ModelError(
            expected,
            f"a layer that asks for more: {request.action}",
            where=where,
            hint="chunks=1, or another layer",
        )
    return DeferredWork(lambda: rows[:0])


class IsolatedChannel:
    """The channel of one chunk without peers; an interceptor uses it in place of a real channel.

    Args:
        rank: Index of the chunk among all chunks of all parts.
        size: Number of chunks of all parts.
        own: Number of vertices of the chunk.
        vertices: Number of vertices of the whole graph.
    """

    exact = False
    """Sums over all vertices are estimates here."""
    closed = True
    """No edge of the chunk reads rows of another chunk."""

    def __init__(self, rank: int, size: int, own: int, vertices: int) -> None:
        self.rank, self.size = rank, size
        self.where: Callable[[], str] = str
        """Returns the name of the running layer, for error messages; set by a caller that knows it."""
        self._factor = vertices / own if own else 0.0

    def start(self, rows: Tensor, request: ExchangeRequest) -> Work:
        """Return no rows where nothing is to be sent; otherwise raise ``ModelError``."""
        return no_rows(
            rows, request, "chunks that know nothing of each other to read their own rows", self.where()
        )

    def all_reduce(
        self,
        tensor: Tensor,
        op: Op = "sum",
        *,
        action: str,
        kind: Kind = "statistics",
        key: Hashable = None,
    ) -> Tensor:
        """Estimate the sum over all vertices from the chunk's own. A maximum or minimum is the chunk's."""
        found = tensor.detach()
        if op != "sum":
            if self._factor or not found.is_floating_point():
                return found.clone()
            # Without rows a maximum is -inf, and without edges ``model.exact.layer_rules`` takes the lowest
            # float as ChebConv's largest weight. A product of its gradient, 0, with infinity is NaN.
            return found.masked_fill(found <= torch.finfo(found.dtype).min, STAND_IN)
        if not self._factor:
            return torch.full_like(found, STAND_IN)
        if found.is_floating_point() or found.is_complex():
            # The chunk's n vertices stand for all N. A count of vertices becomes N, and a mean stays the
            # chunk's own, because both of its sums have the same factor.
            return found * self._factor
        # Counts stay whole numbers.
        return (found.double() * self._factor).round().to(found.dtype)
