"""Subset: some of the vertices, as rows of a part hold them.

Where it sits: a :class:`kagome.placement.placement.Placement` names one where a tensor has a row for some own
vertices only: after ``x[:6000]``, ``x[mask]``, ``x.split([6000, 2000])``.

::

    all vertices     0 1 2 3 4 5 6 7        x[2:6] of the whole graph
    a part owns          2   4     7        its rows of that: those of 2 and 4
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class RowSubset:
    """Which own vertices a tensor has rows for.

    Args:
        chosen: The own rows that were taken, in the order in which they lie: places, or a flag an own row.
        span: The places among all vertices of the graph; None where values chose the rows (a mask).

    Shapes:
        chosen: ``[k]`` int64, or ``[n]`` bool.
    """

    chosen: Tensor
    span: range | None = None

    def places(self) -> Tensor:
        """Own rows, in the order in which they lie. Shapes: ``[k]``."""
        return self.chosen.nonzero().view(-1) if self.chosen.dtype == torch.bool else self.chosen

    def same(self, other: RowSubset | None) -> bool:
        """Whether another tensor's rows belong to the same vertices, in the same order."""
        if other is None or (self.span is None) != (other.span is None):
            return False
        if self.span is not None:
            return self.span == other.span
        return self.chosen is other.chosen or torch.equal(self.places(), other.places())


def among(ids: Tensor, span: range) -> Tensor:
    """Which of some vertices lie in a span of the graph's.

    Args:
        ids: Original numbers of vertices.
        span: Ascending places.

    Shapes:
        ids ``[k]`` -> ``[k]`` bool.
    """
    if not span:
        return torch.zeros_like(ids, dtype=torch.bool)
    inside = (ids >= span[0]) & (ids <= span[-1])
    return inside if span.step == 1 else inside & ((ids - span.start) % span.step == 0)


def in_a_row(spans: Sequence[range]) -> range | None:
    """The span that spans laid end to end make, or None where they leave a gap or change their step.

    Args:
        spans: In the order in which they lie; empty ones count for nothing.
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
