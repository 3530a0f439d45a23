"""Sparse features: constant rows that are nearly all zeros, such as the words of a text, times a weight.

Where it sits: ``deferred.deferral`` makes one of constant features, ``deferred.reduce`` one of a sum of such
features over neighbours. ``sparse_ops.linear`` takes it in place of the rows. A sum over neighbours is never
computed, because it would have ten to fifty times as many nonzeros.

::

    x W^T       entries of x by row       each a number times a row of W^T, added
    A x W^T     the same, then the edges  each a row of x W^T, own or another rank's, added
    g^T A x     the edges by source, then entries of x by column
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from kagome.kernels import ops
from kagome.kernels.base.csr import LARGEST, CsrLayout, Structure

SHARE: Final = 1 / 16
"""Largest share of nonzeros. Above it oneDNN's dense product is as fast: on one core with AVX-512 a nonzero
costs 7 to 12 times as much as a number of the dense product."""
LEAST: Final = 1 << 16
"""Fewest numbers in the rows for which a sparse product is worthwhile."""


@dataclass(frozen=True, eq=False)
class SparseFeatures:
    """Rows, or weighted sums of rows over in-edges, stored by their nonzero entries.

    Args:
        by_row: Entries by row: the layout's columns are those of the rows, ``edge`` is an index into
            ``values``.
        by_column: The same entries, grouped by column.
        values: Numbers of the entries.
        columns: Number of columns of the rows.
        edges: The edges over which the rows are summed; None for the rows themselves.
        weight: One number per edge; None for a sum without weights.
        scale: A factor for each row of the sum; None for 1.

    Cost:
        20 bytes an entry of float32.
    """

    by_row: CsrLayout
    by_column: CsrLayout
    values: Tensor
    columns: int
    edges: Structure | None = None
    weight: Tensor | None = None
    scale: Tensor | None = None

    def __iter__(self) -> Iterator[Tensor]:
        """Yield all tensors except those of the edges, which others hold."""
        # ``Constants.cache`` iterates over a cached value and notes the version of each tensor.
        for layout in (self.by_row, self.by_column):
            yield from (layout.pointer, layout.middle, layout.column, layout.edge)
        yield self.values

    @property
    def dtype(self) -> torch.dtype:
        """The data type of the entries."""
        return self.values.dtype

    def linear(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return ``x W^T + b``, with gradients of weight and bias.

        Shapes:
            weight ``[G, columns]``, bias ``[G]`` -> ``[n, G]``.

        Cost:
            A multiplication and an addition for each entry, and for each edge, times the columns of the
            result.
        """
        out: Tensor = _Linear.apply(weight, bias, self)  # type: ignore[no-untyped-call]
        return out

    def times(self, right: Tensor) -> Tensor:
        """Return the product ``x R`` with a dense matrix.

        Shapes:
            ``[columns, G]`` -> ``[n, G]``.
        """
        out = ops.sum_rows(self.by_row, right.contiguous(), self.values)
        return out if self.edges is None else self._summed(out)

    def transposed_times(self, left: Tensor) -> Tensor:
        """Return the product ``x^T L`` of the transpose with a dense matrix.

        Shapes:
            ``[n, G]`` -> ``[columns, G]``.
        """
        left = left.contiguous()
        if self.edges is not None:
            # With A for the edges, (A x)^T L = x^T (A^T L): the edges by source come first.
            left = left if self.scale is None else left * self.scale.unsqueeze(1)
            left = ops.sum_rows(self.edges.by_source, left, self.weight)
        # ``by_column`` may have more rows than x has columns: see ``sparse_of``.
        return ops.sum_rows(self.by_column, left, self.values, rows=slice(0, self.columns))

    def to_dense(self) -> Tensor:
        """Return the rows as a dense tensor.

        Shapes:
            ``[n, columns]``.
        """
        row = torch.repeat_interleave(self.by_row.pointer.diff())
        out = self.values.new_zeros(self.by_row.rows, self.columns)
        out[row, self.by_row.column.long()] = self.values[self.by_row.edge.long()]
        return out if self.edges is None else self._summed(out)

    def _summed(self, rows: Tensor) -> Tensor:
        assert self.edges is not None
        return ops.sum_rows(self.edges.by_target, rows, self.weight, self.scale)


def sparse_of(
    rows: Tensor,
    edges: Structure | None = None,
    weight: Tensor | None = None,
    scale: Tensor | None = None,
) -> SparseFeatures | None:
    """Return rows by their nonzero entries; None if a dense product is as fast.

    Args:
        rows: The rows, or with ``edges`` all rows that the edges read.
        edges: The edges over which to sum them; None for no sum.
        weight: One number per edge; None for a sum without weights.
        scale: A factor for each row of the sum; None for 1.

    Shapes:
        rows ``[n, F]``, or ``[num_sources, F]`` with edges; weight ``[E]``; scale ``[own]``.

    Cost:
        A pass over the rows.
    """
    if any(t is not None and (t.dtype != rows.dtype or t.dim() != 1) for t in (weight, scale)):
        return None
    if not is_sparse(rows, edges):
        return None
    row, column = rows.nonzero(as_tuple=True)
    # An entry becomes an edge from its column to its row. A structure needs at least as many sources as
    # targets, hence the maximum of the two sizes.
    found = Structure(column, row, rows.size(0), max(rows.shape)).with_edges()
    values = rows[row, column]
    return SparseFeatures(found.by_target, found.by_source, values, rows.size(1), edges, weight, scale)


def is_sparse(rows: Tensor, edges: Structure | None = None) -> bool:
    """Whether a sparse product is faster than a dense one: see :func:`sparse_of`."""
    if rows.device.type != "cpu" or rows.dtype not in ops.LOOPED or rows.dim() != 2:
        return False
    numbers = (rows.size(0) if edges is None else edges.own) * rows.size(1)
    if numbers < LEAST or max(rows.shape) > LARGEST:
        return False
    # An edge of a sum costs about as much as a nonzero: both add one row of the result's width.
    entries = int(rows.count_nonzero()) + (0 if edges is None else edges.edges)
    return entries <= min(SHARE * numbers, LARGEST)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, bias: Tensor | None, x: SparseFeatures) -> Tensor:
        ctx.x = x
        out = x.times(weight.t())
        return out if bias is None else out.add_(bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        g = grads[0]
        g_weight = ctx.x.transposed_times(g).t() if ctx.needs_input_grad[0] else None
        return g_weight, g.sum(0) if ctx.needs_input_grad[1] else None, None
