"""Segments: how the rows of a layout are dealt to programs, so that a hub does not hold up the others.

Where it sits: ``ops`` asks for them once for each layout and span; they are kept with the layout.

::

    row      0   1   2                3
    entries  ──  ─   ───────────────  ──          a row of up to SPLIT entries is one segment
    segments ──  ─   ──── ──── ──── ─ ──          a longer row, a hub, is several
    scratch          [ 0 ][ 1 ][ 2 ][3]           each writes its own slot; a second kernel adds them in order

Long segments come first, because the segments that begin last decide when the kernel ends. Short segments
keep the order of rows: neighbouring rows read much the same rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kagome.kernels.base.csr import CsrLayout
from kagome.kernels.base.reference import Span

SPLIT = 1024
"""Most entries of a segment."""
LONG = 128
"""Entries from which a segment counts as long."""


@dataclass(frozen=True, eq=False)
class Segments:
    """The segments of the rows of a layout.

    Args:
        row: The row of each segment, counted from the first row that is computed.
        begin: Where the entries of each segment begin.
        end: Where the entries of each segment end.
        slot: The place of each segment in the scratch, or -1 if the segment is a whole row.
        hubs: The rows that have several segments.
        hub_begin: The first slot of each hub.
        hub_end: The slot after the last one of each hub.
        slots: The number of slots.
        mean: Mean entries per row, rounded up.

    Shapes:
        ``row``, ``begin``, ``end``, ``slot [S]``; ``hubs``, ``hub_begin``, ``hub_end [H]``; all int64.
    """

    row: Tensor
    begin: Tensor
    end: Tensor
    slot: Tensor
    hubs: Tensor
    hub_begin: Tensor
    hub_end: Tensor
    slots: int
    mean: int


def segments_of(layout: CsrLayout, span: Span, rows: slice | None = None) -> Segments:
    """Return the segments of a layout's rows, computed at the first call.

    Cost:
        28 bytes per segment, kept with the layout. The host waits for the device at the first call.
    """
    key = ("segments", span, None if rows is None else (rows.start, rows.stop))
    found: Segments | None = layout.prepared.get(key)
    if found is None:
        found = layout.prepared[key] = _cut(*bounds(layout, span, rows))
    return found


def bounds(layout: CsrLayout, span: Span = "all", rows: slice | None = None) -> tuple[Tensor, Tensor]:
    """Return where the entries of each row begin and end."""
    kept = slice(None) if rows is None else rows
    begin = layout.middle if span == "halo" else layout.pointer[:-1]
    end = layout.middle if span == "own" else layout.pointer[1:]
    return begin[kept].contiguous(), end[kept].contiguous()


def rows_by_length(layout: CsrLayout) -> tuple[Tensor, Tensor]:
    """Return the rows of up to SPLIT entries, and the hubs, computed at the first call."""
    found: tuple[Tensor, Tensor] | None = layout.prepared.get("by length")
    if found is None:
        hub = layout.pointer.diff() > SPLIT
        found = layout.prepared["by length"] = ((~hub).nonzero().view(-1), hub.nonzero().view(-1))
    return found


def row_of_entries(layout: CsrLayout) -> Tensor:
    """Return the row of each entry, int32, computed at the first call."""
    found: Tensor | None = layout.prepared.get("rows")
    if found is None:
        rows = torch.arange(layout.rows, dtype=torch.int32, device=layout.column.device)
        # Without ``output_size`` the host would wait for the device to learn the sum of the counts.
        found = layout.prepared["rows"] = torch.repeat_interleave(
            rows, layout.pointer.diff(), output_size=layout.edges
        )
    return found


def _cut(begin: Tensor, end: Tensor) -> Segments:
    count = end - begin
    # A row without entries has one segment as well: its program writes the zeros.
    pieces = ((count + SPLIT - 1) // SPLIT).clamp(min=1)
    row = torch.repeat_interleave(pieces)
    # The number of each segment within its row.
    number = torch.arange(row.numel(), device=row.device) - (pieces.cumsum(0) - pieces)[row]
    first = begin[row] + number * SPLIT
    last = torch.minimum(first + SPLIT, end[row])
    hub = pieces > 1
    of_hub = hub[row]
    # Slots are numbered in the order of rows, so that those of a hub lie one after another.
    slots = int(of_hub.sum())
    slot = torch.where(of_hub, of_hub.cumsum(0) - 1, -1)
    hubs = hub.nonzero().view(-1)
    hub_end = pieces[hubs].cumsum(0)
    length = last - first
    # Stable, so that short segments keep the order of rows.
    order = torch.where(length > LONG, length, 0).argsort(descending=True, stable=True)
    mean = -(-int(count.sum()) // max(count.numel(), 1))
    row, first, last, slot = (each[order].contiguous() for each in (row, first, last, slot))
    return Segments(row, first, last, slot, hubs, hub_end - pieces[hubs], hub_end, slots, mean)
