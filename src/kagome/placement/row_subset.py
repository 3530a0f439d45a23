"""Row subset: which own vertices a tensor has rows for, if not all.

Where it sits: a :class:`kagome.placement.placement.Placement` names one where a tensor has rows for some own
vertices only: after ``x[:6000]``, ``x[mask]``, ``x.split([6000, 2000])``.

::

    all vertices     0 1 2 3 4 5 6 7        x[2:6] of the whole graph
    a part owns          2   4     7        its rows of x[2:6]: those of vertices 2 and 4
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class RowSubset:
    """The own vertices that a tensor has rows for.

    Args:
        chosen: The selected own rows in the order of the tensor: positions, or one flag per own row.
        span: The positions among all vertices of the graph; None where values chose the rows (a mask).

    Shapes:
        chosen: ``[k]`` int64, or ``[n]`` bool.
    """

    chosen: Tensor
    span: range | None = None

    def places(self) -> Tensor:
        """Return the positions of own rows, in the order of the tensor. Shapes: ``[k]``."""
        return self.chosen.nonzero().view(-1) if self.chosen.dtype == torch.bool else self.chosen

    def same(self, other: RowSubset | None) -> bool:
        """Return True if another tensor's rows belong to the same vertices, in the same order."""
        # A span and a mask may select the same rows on this part and different ones on another.
        if other is None or (self.span is None) != (other.span is None):
            return False
        if self.span is not None:
            return self.span == other.span
        return self.chosen is other.chosen or torch.equal(self.places(), other.places())


def among(ids: Tensor, span: range) -> Tensor:
    """Return which of the given vertices are in a span of the graph's.

    Args:
        ids: Original numbers of vertices.
        span: Ascending positions.

    Shapes:
        ids ``[k]`` -> ``[k]`` bool.
    """
    # An empty range has no first and last position.
    if not span:
        return torch.zeros_like(ids, dtype=torch.bool)
    inside = (ids >= span[0]) & (ids <= span[-1])
    return inside if span.step == 1 else inside & ((ids - span.start) % span.step == 0)


def in_a_row(spans: Sequence[range]) -> range | None:
    """Return the span that consecutive spans form, or None if they leave a gap or change their step.

    Args:
        spans: The spans in the order of concatenation; empty ones are ignored.
    """
    whole = range(0)
    for span in spans:
        if not span:
            continue
        if not whole:
            whole = span
        elif whole.step == span.step == 1 and span.start == whole.stop:
            whole = range(whole.start, span.stop)
        else:
            return None
    return whole
