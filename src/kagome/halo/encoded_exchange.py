"""Encoded exchange: rows that a codec shortens, all of them or those that a selection names.

Where it sits: ``compressed_exchange`` puts it in front of ``comm``'s channel. ``row_selection`` says which
rows a message has, ``encoded_message`` writes and reads its bytes.

::

    rows ──selection──> codec ──bytes──> peers           bytes ──codec──> rows
           residual ──┘      └──> residual of the next epoch
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Final

import torch
from torch import Tensor

from kagome.comm.codec import Codec, lost_squares
from kagome.comm.exchange import BytesExchange, BytesRequest, ExchangeRequest, SiteExchange, Work
from kagome.halo.encoded_message import MessageLayout, Writer, incoming_rows, plain, read
from kagome.halo.epoch_rows import CompressionState
from kagome.halo.row_selection import Fit, SampledRows, Selection, SelectionPlan, Skip

MEASURED_EVERY: Final = 10
"""Number of epochs between two measurements of a codec's error."""
MEASURED_ROWS: Final = 64


class ErrorMeter:
    """Measures the codecs' error on a sample of rows.

    Args:
        state: Where the errors are counted.
    """

    def __init__(self, state: CompressionState) -> None:
        self.state = state
        self._measured: set[str] = set()

    def measure(
        self,
        layout: MessageLayout,
        rows: Tensor,
        index: Tensor | None,
        site: SiteExchange,
        key: int,
        action: str,
    ) -> None:
        """Measure the error of an exchange, if it is due; each codec has its share of all rows."""
        name = site.name
        if site.epoch % MEASURED_EVERY != 1 and name in self._measured:
            return
        self._measured.add(name)
        # One step for all codecs, so that each has its share of the sample.
        step, lost, whole = max(site.row_ids.numel() // MEASURED_ROWS, 1), 0.0, 0.0
        for codec, places in layout.coded().items():
            some = places[::step].to(rows.device)
            sample = rows.index_select(0, some if index is None else index[some])
            less, all_ = lost_squares(codec, sample, site.row_ids[some], key, action)
            lost, whole = lost + less, whole + all_
        if whole > 0:
            self.state.counts.errors[name] = math.sqrt(lost / whole)


class EncodedExchange:
    """An exchange that encodes the rows of a training epoch, and sends only those that are selected.

    Args:
        channel: The channel to the peers.
        late: The channel for rows that are read in the next epoch.
        state: Mode, rows of earlier epochs and counts of this rank.
        meter: Measures the codecs' error.
    """

    def __init__(
        self, channel: BytesExchange, late: BytesExchange, state: CompressionState, meter: ErrorMeter
    ) -> None:
        self.channel, self.late, self.state, self.meter = channel, late, state, meter

    def start(self, rows: Tensor, request: ExchangeRequest) -> Work:
        """Begin an exchange of a site's rows, encoded as the mode says."""
        site, state = request.site, self.state
        assert site is not None
        count = rows.size(0) if request.index is None else request.index.numel()
        state.counts.plain += count * rows.size(1) * rows.itemsize
        codec = state.mode.codec_for(site)
        # The header would cost more than the codec saves. Both ends of a message have one width, so they
        # decide alike.
        if not codec.shortens(rows.size(1), rows.dtype):
            codec = Codec("none")
        selection = self._selection(site, codec, request) if state.mode.chooses else None
        # Late rows take other connections: see :meth:`Channel.connect`.
        way = self.late if site.late else self.channel
        if codec.exact and selection is None:
            return way.start(rows, request)
        index, feedback = request.index, state.settings.error_feedback
        # A selection may compare the rows with those sent before, and feedback adds to them: both need them
        # in the order of sending.
        if feedback or (selection is not None and selection.compares):
            rows, index = request.selected(rows), None
        if feedback:
            rows = self._with_residual(rows, site)
        plan = SelectionPlan(plain(codec, request.send_counts), plain(codec, request.recv_counts))
        if selection is not None:
            plan = selection.plan(request, rows)
        return self._sent(way, plan, rows, index, request, selection)

    def _with_residual(self, rows: Tensor, site: SiteExchange) -> Tensor:
        """Return rows plus the codec's error on them in the last epoch."""
        residual = self.state.rows.residual(site.key, site.epoch)
        return rows + residual if residual is not None and residual.shape == rows.shape else rows

    def _selection(self, site: SiteExchange, codec: Codec, request: ExchangeRequest) -> Selection | None:
        """Return the selection among a site's rows; None if all rows are sent alike."""
        settings = self.state.settings

        def make() -> Selection | None:
            if settings.halo_sample < 1:
                return SampledRows(settings.halo_sample, self.state.seed, self.channel.rank, codec)
            if settings.skip_drift > 0 and not site.backward:
                return Skip(settings.skip_drift, settings.max_age, codec)
            if settings.adaptive_bits and codec.bits is not None:
                return Fit(codec, self._reads(site, request))
            return None

        counts = sum(request.send_counts), sum(request.recv_counts)
        return self.state.rows.selection(site.key, site.epoch, make, counts)

    def _reads(self, site: SiteExchange, request: ExchangeRequest) -> Tensor:
        """Return how many edges read each row that is sent; the ranks that read it report that.

        A gradient's row counts 1.
        """
        if site.direction > 1:
            return torch.ones(sum(request.send_counts))
        assert site.reads is not None
        back = ExchangeRequest(request.recv_counts, request.send_counts, "readers of rows", "other")
        return self.channel.start(site.reads.unsqueeze(1), back).wait().squeeze(1).cpu()

    def _sent(
        self,
        way: BytesExchange,
        plan: SelectionPlan,
        rows: Tensor,
        index: Tensor | None,
        request: ExchangeRequest,
        selection: Selection | None,
    ) -> Work:
        """Write encoded messages and begin to send them, and to receive the peers' messages."""
        site, action, feedback = request.site, request.action, self.state.settings.error_feedback
        assert site is not None
        width, dtype = rows.size(1), rows.dtype
        # Error feedback, with r the residual of the last epoch and c the codec:
        #
        #     send      c(rows + r)
        #     keep      r' = rows + r - c(rows + r)        the sender decodes what it has just encoded
        key = self.state.draws_of(site, self.channel.rank)
        self.meter.measure(plan.out, rows, index, site, key, action)
        refusals = self.state.refusals
        writer = Writer(plan.out, rows, index, site.row_ids, key, plan.notes, action, refusals)
        restored = rows.clone() if feedback else None  # rows that are not sent have no error

        def write(peer: int, segment: int, message: Tensor) -> None:
            writer.write(peer, segment, message)
            if restored is not None:
                read(plan.out, peer, segment, message, restored)

        sizes, expected = plan.out.segments(width, dtype), plan.received.segments(width, dtype)
        work = way.start_bytes(BytesRequest(write, sizes, expected, action, request.kind, request.header))
        if restored is not None:
            lost = rows - restored
            # With few bits the error of a draw may exceed the row itself; accumulated, it would diverge.
            keep = lost.norm(dim=1, keepdim=True) < rows.norm(dim=1, keepdim=True)
            self.state.rows.residuals[site.key] = torch.where(keep, lost, 0.0), site.epoch
        # Rows that are not received: the last ones known if the selection has them, else zeros. Made when
        # the bytes are decoded: late ones travel as bytes alone. Not ``rows.new_zeros``, which would keep
        # what is sent.
        shape = sum(plan.received.counts), width
        zeros = partial(torch.zeros, shape, dtype=dtype, device=rows.device)
        buffer: Callable[[], Tensor] = zeros if plan.ground is None else plan.ground.clone
        arrived = None if selection is None else partial(selection.arrived, epoch=site.epoch)
        return incoming_rows(work, plan.received, width, dtype, buffer, arrived)
