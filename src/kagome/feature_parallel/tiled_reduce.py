"""Tiled reduce: sums over feature slices, one chunk of destinations at a time, in bounded working memory.

Where it sits: ``deferred.sliced_reduce`` uses it where ``memory_gib`` is set. All ranks have the same chunks,
in the same order. Rows stay in host memory; the rows of a chunk are copied to the device, and its result is
copied back. The host waits for the device once a chunk and pass.

::

    peers    ─ rows that chunk j + 1 reads first ─┐        ┌─ rows of chunk j - 1 ─> their owners
    host     rows [V, d] ──reads of chunk j──>    │        │            result [V, d]
    device                                sum over the in-edges of chunk j

Backward takes the chunks in reverse. The gradients of rows that chunk j reads first are complete once chunk j
is done. The host adds them up while the device sums chunk j - 1, and they travel to their owners meanwhile or
during the sum of chunk j - 2.

Source: NeutronTP, PVLDB 18(2), section 4.2 and algorithm 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from kagome.comm.exchange import Exchange, Work
from kagome.comm.transport.device import HOST, HostCopy, to_host
from kagome.errors import ConfigError, ModelError
from kagome.feature_parallel.all_to_all import (
    GATHER,
    GATHER_BACK,
    SPLIT,
    SPLIT_BACK,
    AllToAll,
    RowBlock,
    SliceCut,
)
from kagome.feature_parallel.edge_layout import EdgeLayout
from kagome.halo.forward_pass import ForwardPass, Site
from kagome.kernels import ops
from kagome.kernels.base.csr import CsrLayout, Structure
from kagome.placement.weak_map import WeakTensorMap

MOST = 1 << 16
"""Largest number of chunks; a bound that needs more is refused."""


@dataclass(frozen=True)
class WorkingMemory:
    """Tensors that a reduction holds on the device.

    Args:
        reads: Number of tensors with the rows read.
        writes: Number of tensors with the rows written.
        heads: Number of weights an edge.
    """

    reads: int = 1
    writes: int = 1
    heads: int = 0


@dataclass(frozen=True, eq=False)
class DestinationChunk:
    """Consecutive destinations, with all their in-edges.

    Args:
        begin: First row written.
        end: One past the last row written.
        reads: Indices of the rows read, ascending.
        brings: The rows read that no earlier chunk reads.
        writes: The rows written.
        edges: Indices of its edges among those of all ranks.
        structure: Its edges, by index into ``reads`` and counted from ``begin``.

    Shapes:
        reads ``[R]``, edges ``[E of the chunk]``.
    """

    begin: int
    end: int
    reads: Tensor
    brings: RowBlock
    writes: RowBlock
    edges: Tensor
    structure: Structure

    @cached_property
    def reads_on_host(self) -> Tensor:
        """``reads`` in the host's memory, where the rows rest: copied once."""
        return self.reads.to(HOST)

    @cached_property
    def brings_on_host(self) -> Tensor:
        """The rows of ``brings`` in the host's memory."""
        return self.brings.all.to(HOST)

    def working(self, width: int, itemsize: int, room: WorkingMemory) -> int:
        """Return the bytes on the device at a time: rows read and written, edges, weights, their gradient."""
        # rows read        [R, d], as often as the reduction holds such tensors
        # rows written     [writes, d], likewise
        # an edge          column and edge id in int32 (8 bytes), its weights and their gradients
        # a row written    pointer and middle in int64 (16 bytes)
        writes = self.end - self.begin
        rows = room.reads * max(self.reads.numel(), writes) + room.writes * writes
        return rows * width * itemsize + self.edges.numel() * (8 + 2 * room.heads * itemsize) + 16 * writes


def travelling(coming: RowBlock | None, going: RowBlock | None, width: int, itemsize: int) -> int:
    """Return the bytes sent and received while one chunk's rows arrive and another's results leave."""
    return (
        2
        * sum(0 if row_block is None else row_block.all.numel() for row_block in (coming, going))
        * width
        * itemsize
    )


def chunks_of(
    edge_layout: EdgeLayout, width: int, itemsize: int, room: WorkingMemory, bound: int
) -> tuple[DestinationChunk, ...]:
    """Cut the destinations into few chunks, about equal in edges, that keep the working memory in bounds.

    The number of chunks is doubled until the bound is kept. It is then bisected between the last number that
    failed and the one that succeeded, so that it is at most an eighth larger than necessary.

    Args:
        edge_layout: The edges of all ranks.
        width: Columns of the widest slice.
        itemsize: Bytes of a number.
        room: Tensors that the reduction holds at a time.
        bound: Largest working memory, in bytes.

    Raises:
        ConfigError: If the rows that one destination reads do not fit.

    Cost:
        A sort of the edges for each number of chunks tried. Keeps 16 bytes an edge.
    """
    # ``fewer`` is a number of chunks that exceeds the bound (0 before the first try), ``count`` the next to
    # try.
    rows, count, fewer = edge_layout.written.total, 1, 0
    while True:
        chunks = cut_in(edge_layout, min(count, max(rows, 1)))
        need = largest(chunks, width, itemsize, room)
        if need <= bound:
            break
        if count >= min(rows, MOST):
            raise ConfigError(
                f"a reduction to work in {bound / 2**30:.3g} GiB, as parallel.memory_gib bounds it",
                f"{need / 2**30:.3g} GiB for the in-edges of one vertex, with {width} columns",
                hint="a larger --parallel.memory-gib, or more slices (--parallel.tensor)",
            )
        count, fewer = 2 * count, count
    # Every number of chunks costs a sort of all edges, so the search ends at an eighth.
    while count - fewer > max(fewer // 8, 1):
        middle = (count + fewer) // 2
        tried = cut_in(edge_layout, min(middle, max(rows, 1)))
        if largest(tried, width, itemsize, room) <= bound:
            count, chunks = middle, tried
        else:
            fewer = middle
    return chunks


def largest(chunks: Sequence[DestinationChunk], width: int, itemsize: int, room: WorkingMemory) -> int:
    """Return the largest working memory of any chunk, with the exchanges of the chunks next to it."""
    found = 0
    for place, chunk in enumerate(chunks):
        # While a chunk is summed, the rows of the next one arrive and the results of the last one leave. In
        # backward the former leave, on a GPU those of the chunk after it, and the latter arrive.
        going = chunks[place - 1].writes if place else None
        after = [travelling(each.brings, going, width, itemsize) for each in chunks[place + 1 : place + 3]]
        beside = max(after, default=travelling(None, going, width, itemsize))
        found = max(found, chunk.working(width, itemsize, room) + beside)
    return found


def cut_in(edge_layout: EdgeLayout, count: int) -> tuple[DestinationChunk, ...]:
    """Cut the destinations into at most ``count`` chunks of about equal numbers of edges."""
    layout, way = edge_layout.structure.by_target, edge_layout.rows
    # An edge costs 1 and a row 1, so that many rows without edges are divided as well. A chunk ends where the
    # cumulative cost reaches its share of the whole.
    cost = layout.pointer + torch.arange(layout.rows + 1, device=layout.pointer.device)
    goals = torch.arange(1, count, device=cost.device) * int(cost[-1]) // count
    inner = torch.searchsorted(cost, goals).tolist()
    # A vertex with more edges than a chunk's share makes bounds equal. The set merges them into fewer chunks.
    bounds = sorted({0, *inner, layout.rows})
    known = torch.zeros(way.total, dtype=torch.bool, device=cost.device)
    chunks = []
    for begin, end in pairwise(bounds):
        first, last = int(layout.pointer[begin]), int(layout.pointer[end])
        columns, edges = layout.column[first:last].long(), layout.edge[first:last].long()
        reads, source = torch.unique(columns, return_inverse=True)
        # Rows that an earlier chunk brought are in host memory already, so each row is sent once.
        new = reads[~known[reads]]
        known[reads] = True
        target = torch.repeat_interleave(layout.pointer[begin : end + 1].diff())
        # ``Structure`` requires at least as many rows to read as to write.
        structure = Structure(source, target, end - begin, max(reads.numel(), end - begin))
        writes = edge_layout.written.row_block(torch.arange(begin, end, device=cost.device))
        chunks.append(DestinationChunk(begin, end, reads, way.row_block(new), writes, edges, structure))
    return tuple(chunks)


@dataclass(eq=False)
class MemoryGauge:
    """The peak memory of tiled sums, in bytes: rows, weights and edges of a chunk, and its exchanges."""

    peak: int = 0
    moving: int = 0
    """Bytes sent and received at present."""

    def note(self, *tensors: Tensor | None) -> None:
        """Record tensors that are held at the same time."""
        self.peak = max(self.peak, self.moving + sum(t.nbytes for t in tensors if t is not None))


@dataclass(frozen=True, eq=False)
class Hop:
    """One sum over the chunks.

    Args:
        edge_layout: The edges of all ranks.
        chunks: The chunks of destinations.
        cut: Columns of each rank.
        scale: A factor for each row of the result, for a mean; None for none.
        factor: A factor for each row that edges read; None for none.
        device: Device on which sums are computed.
        gauge: Records the working memory.
        first: Whether the input is own whole rows, which are sent to the ranks of their columns chunk by
            chunk.
        last: Whether the output is own whole rows, which are sent to their owners chunk by chunk.
        site: The site of the exchanges.
    """

    edge_layout: EdgeLayout
    chunks: tuple[DestinationChunk, ...]
    cut: SliceCut
    scale: Tensor | None
    factor: Tensor | None
    device: torch.device
    gauge: MemoryGauge = field(default_factory=MemoryGauge)
    first: bool = False
    last: bool = False
    site: Site | None = None

    def run(self, rows: Tensor, weight: Tensor | None, forward_pass: ForwardPass, name: str) -> Tensor:
        """Compute the sum, with gradient.

        Shapes:
            rows ``[n, D]`` if ``first``, else ``[V, d]``; weight ``[E]`` or ``[E, h]`` of all ranks; result
            ``[n, D]`` if ``last``, else ``[V, d]``.
        """
        grad = rows.requires_grad or (weight is not None and weight.requires_grad)
        # One site for all chunks: these are the same on all ranks and in one order, so their messages match.
        hop = replace(self, site=forward_pass.begin(name, grad=grad))
        follows = grad and forward_pass.follows()
        # The token requires a gradient in training. Without ``no_grad``, a sum of constants would therefore
        # require one too, and keep its inputs.
        with nullcontext() if follows else torch.no_grad():
            out, token = _Hop.apply(rows, weight, forward_pass.token, hop)  # type: ignore[no-untyped-call]
        if follows:
            forward_pass.token = token
        return out  # type: ignore[no-any-return]

    def way(self, direction: int) -> AllToAll:
        """Return the exchange of the rows that are read, or of those that are written."""
        read = direction in (SPLIT, SPLIT_BACK)
        return self.edge_layout.rows if read else self.edge_layout.written

    def own(self, direction: int) -> int:
        """Return the number of own rows in this direction."""
        way = self.way(direction)
        return way.counts[way.channel.rank]

    @property
    def mine(self) -> int:
        """Number of columns of this rank."""
        return self.cut.taken(self.edge_layout.rows.channel.rank)

    def split(self, rows: Tensor, row_block: RowBlock, direction: int) -> Work:
        """Start to send own whole rows of a block, and to receive this rank's columns of the whole block."""
        assert self.site is not None
        return self.way(direction).start_split(rows, self.cut, self.site, direction, row_block)

    def gather(self, part: Tensor, row_block: RowBlock, direction: int) -> Work:
        """Start to send this rank's columns of a block to the owners of its rows."""
        assert self.site is not None
        return self.way(direction).start_gather(part, self.cut, self.site, direction, row_block)

    def shaped(self, rows: Tensor, weight: Tensor | None) -> Tensor:
        """Return rows split by head, if the weight has heads."""
        if weight is None or weight.dim() == 1:
            return rows
        heads = weight.size(1)
        return rows.view(rows.size(0), heads, rows.size(1) // max(heads, 1))

    def moved(self, rows: Tensor, ids: Tensor, ids_on_host: Tensor) -> Tensor:
        """Copy some rows to the device, from there or from the host, without a wait of the host."""
        if rows.device == self.device:
            return rows.index_select(0, ids)
        picked = rows.new_empty(ids.numel(), *rows.shape[1:], pin_memory=True)
        torch.index_select(rows, 0, ids_on_host, out=picked)
        return picked.to(self.device, non_blocking=True)

    def read(self, rows: Tensor, chunk: DestinationChunk) -> Tensor:
        """Copy the rows that a chunk reads to the device."""
        return self.moved(rows, chunk.reads, chunk.reads_on_host)


class TileBound:
    """A bound on the working memory of reductions, with the chunks that keep it.

    Args:
        bytes: Largest working memory, in bytes.
        device: Device on which sums are computed.
    """

    def __init__(self, bytes: int, device: torch.device) -> None:
        self.bytes, self.device, self.gauge = bytes, device, MemoryGauge()
        self._chunks: WeakTensorMap[Any] = WeakTensorMap()

    def used(self, channel: Exchange) -> dict[str, int]:
        """Return the peak working memory over all ranks, for the summary. All ranks call it."""
        peak = torch.tensor(self.gauge.peak, device=self.device)
        most = channel.all_reduce(peak, "max", action="working memory", kind="other")
        return {"working_memory_bytes": int(most)}

    def chunks(
        self, edge_layout: EdgeLayout, width: int, itemsize: int, room: WorkingMemory
    ) -> tuple[DestinationChunk, ...]:
        """Return chunks of these edges within the bound; they are cut once. See :func:`chunks_of`."""
        known = self._chunks.setdefault(edge_layout, {})
        key = width, itemsize, room
        if key not in known:
            known[key] = chunks_of(edge_layout, width, itemsize, room, self.bytes)
        found: tuple[DestinationChunk, ...] = known[key]
        return found

    def hop(
        self,
        edge_layout: EdgeLayout,
        cut: SliceCut,
        weight: Tensor | None,
        itemsize: int,
        *,
        scale: Tensor | None,
        factor: Tensor | None,
        first: bool,
    ) -> Hop:
        """Return the sum over the chunks that these columns and weights need.

        Raises:
            ConfigError: If even the smallest chunks exceed the bound.
        """
        # The widest slice of all ranks, so that all of them have the same chunks.
        width = max(cut.taken(rank) for rank in range(len(edge_layout.rows.counts)))
        room = WorkingMemory(heads=0 if weight is None else weight[:1].numel())
        chunks = self.chunks(edge_layout, width, itemsize, room)
        return Hop(edge_layout, chunks, cut, scale, factor, self.device, self.gauge, first=first)


class _Hop(torch.autograd.Function):
    """See :class:`Hop`; the token is passed along, see [Note: token] in ``halo.exchange``."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor | None, token: Tensor, hop: Hop
    ) -> tuple[Tensor, Tensor]:
        layout, chunks = hop.edge_layout, hop.chunks
        part = rows.new_empty(layout.rows.total, hop.mine, device=HOST) if hop.first else rows
        shape = (hop.own(GATHER), hop.cut.width) if hop.last else (layout.written.total, hop.mine)
        out = rows.new_empty(shape)
        # [Note: tiled pipeline] s is the exchange that brings a chunk's rows, r the one that returns its
        # results:
        #
        #     start            s0
        #     chunk 0          wait s0, start s1      sum 0               start r0
        #     chunk 1          wait s1, start s2      sum 1    wait r0,   start r1
        #     chunk 2          wait s2                sum 2    wait r1,   start r2
        #     end                                              wait r2
        #
        # So at most one of each kind is in transit during a sum, which is what ``travelling`` counts.
        coming = hop.split(rows, chunks[0].brings, SPLIT) if hop.first and chunks else None
        going: tuple[RowBlock, Work] | None = None
        for place, chunk in enumerate(chunks):
            if coming is not None:
                came, more = to_host(coming.wait()), place + 1 < len(chunks)
                coming = hop.split(rows, chunks[place + 1].brings, SPLIT) if more else None
                part[chunk.brings_on_host] = came.wait()
            comes = chunks[place + 1].brings if coming is not None else None
            hop.gauge.moving = travelling(comes, going and going[0], hop.mine, rows.itemsize)
            x = hop.read(part, chunk)
            if hop.factor is not None:
                x.mul_(hop.factor.index_select(0, chunk.reads).view(-1, 1))
            w = None if weight is None else weight.index_select(0, chunk.edges)
            s = None if hop.scale is None else hop.scale[chunk.begin : chunk.end]
            found = ops.sum_rows(chunk.structure.by_target, hop.shaped(x, w), w, s).flatten(1)
            hop.gauge.note(x, w, found, *walked(chunk.structure.by_target))
            if not hop.last:
                out[chunk.begin : chunk.end] = found
                continue
            _laid(out, going)
            going = chunk.writes, hop.gather(found, chunk.writes, GATHER)
        _laid(out, going)
        ctx.hop, ctx.weight_grad = hop, ctx.needs_input_grad[1]
        # The gradient of the rows needs only the weights; that of an edge weight is a dot product with its
        # row.
        ctx.save_for_backward(weight, part if ctx.weight_grad else None)
        return out, torch.zeros_like(token)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        hop: Hop = ctx.hop
        weight, part = ctx.saved_tensors
        chunks, g = hop.chunks, grads[0].contiguous()
        returned = _Returned(hop, g) if ctx.needs_input_grad[0] else None
        g_weight = torch.zeros_like(weight) if ctx.weight_grad else None
        # The transposed pipeline, from the last chunk to the first: gradients of the results arrive, and
        # those of the rows return.
        coming = hop.split(g, chunks[-1].writes, GATHER_BACK) if hop.last and chunks else None
        for place in reversed(range(len(chunks))):
            chunk = chunks[place]
            if coming is not None:
                mine = coming.wait()
                coming = hop.split(g, chunks[place - 1].writes, GATHER_BACK) if place else None
            else:
                mine = g[chunk.begin : chunk.end]
            comes = chunks[place - 1].writes if coming is not None else None
            going = None if returned is None else returned.going
            hop.gauge.moving = travelling(comes, going and going[0], hop.mine, g.itemsize)
            if hop.scale is not None:
                mine = mine * hop.scale[chunk.begin : chunk.end].to(mine).view(-1, 1)
            mine = mine.contiguous()
            w = None if weight is None else weight.index_select(0, chunk.edges)
            shaped = hop.shaped(mine, w)
            if returned is not None:
                # out_i = s_i sum_j w_ij f_j x_j        g_j = f_j sum_i w_ij (s_i g_i)
                #
                # ``mine`` is s_i g_i already. A hop has weights w or factors f, never both: f replaces
                # weights f_i f_j.
                back = ops.sum_rows(chunk.structure.by_source, shaped, w)
                back = back.flatten(1)[: chunk.reads.numel()]
                if hop.factor is not None:
                    back.mul_(hop.factor.index_select(0, chunk.reads).view(-1, 1))
                hop.gauge.note(mine, w, back, *walked(chunk.structure.by_source))
                returned.add(chunk, back)
                del back
            if g_weight is not None:
                x = hop.shaped(hop.read(part, chunk), w)
                # [rows, heads, columns]: the gradient of w_ij for a head is the dot product over its columns.
                x3, g3 = (t if t.dim() == 3 else t.unsqueeze(1) for t in (x, shaped))
                dots = ops.dot_edges(chunk.structure.by_target, g3.contiguous(), x3.contiguous())
                hop.gauge.note(mine, w, x, dots, *walked(chunk.structure.by_target))
                g_weight[chunk.edges] = dots.view(-1, *weight.shape[1:])
        return None if returned is None else returned.all(), g_weight, torch.zeros_like(grads[1]), None


class _Returned:
    """The gradients of the rows that chunks read, which add up where the rows rest.

    Args:
        hop: The sum.
        g: The gradient of its result.
    """

    def __init__(self, hop: Hop, g: Tensor) -> None:
        self._hop, total = hop, hop.edge_layout.rows.total
        self._lies = g.new_zeros(total, hop.mine, device=HOST if hop.first else g.device)
        self._rows = g.new_zeros(hop.own(SPLIT), hop.cut.width) if hop.first else self._lies
        self._arriving: tuple[DestinationChunk, HostCopy] | None = None
        self.going: tuple[RowBlock, Work] | None = None
        """The complete gradients that travel to their owners."""

    def add(self, chunk: DestinationChunk, back: Tensor) -> None:
        """Add what a chunk gives back: where it comes from a device, at the next chunk, when it is there."""
        if not self._hop.first:
            self._lies.index_add_(0, chunk.reads, back)
            return
        arriving = chunk, to_host(back)
        self._settle()
        self._arriving = arriving
        if arriving[1].event is None:
            self._settle()

    def all(self) -> Tensor:
        """Return the gradients of the hop's rows, once all have come."""
        self._settle()
        if self._hop.first:
            _laid(self._rows, self.going)
        return self._rows

    def _settle(self) -> None:
        if self._arriving is None:
            return
        (chunk, copy), self._arriving = self._arriving, None
        self._lies.index_add_(0, chunk.reads_on_host, copy.wait())
        # No earlier chunk reads the rows that this one brings, and the later ones are done: their gradients
        # are complete.
        _laid(self._rows, self.going)
        whole = self._hop.moved(self._lies, chunk.brings.all, chunk.brings_on_host)
        self.going = chunk.brings, self._hop.gather(whole, chunk.brings, SPLIT_BACK)


def refuse_second_derivative() -> None:
    """Raise ``ModelError`` if backward is itself to be differentiated: chunks keep no graph for that."""
    # autograd enables gradients in backward for ``create_graph=True`` alone.
    if torch.is_grad_enabled():
        raise ModelError(
            "sums within memory_gib to be differentiated once",
            "a derivative of the model that is differentiated again (create_graph=True)",
            hint="leave parallel.memory_gib out, or train on one rank",
        )


def walked(layout: CsrLayout) -> list[Tensor]:
    """Return the tensors of a layout that a sum reads for each edge: its other end, and its number."""
    return [each for each in (layout.column, layout.order) if isinstance(each, Tensor)]


def _laid(out: Tensor, going: tuple[RowBlock, Work] | None) -> None:
    """Wait for received own rows and write them to their places."""
    if going is not None:
        out[going[0].own] = going[1].wait()
