"""Provider of other chunks' rows: historical embeddings, or exact rows of all chunks at once.

Where it sits: the chunk engine gives ``historical.tables`` one provider for each epoch. Reads and sums of
chunks are answered here.

::

    forward, step i    write own rows; exchange this step's rows with the peers; read fresh or historical rows
    backward           add gradients of fresh rows (those of an earlier step times the scale); exchange back;
                       own gradient = received + accumulated on own rows

Source: GNNPipe's historical embeddings and gradient scaling, extended by a halo between parts.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from kagome.comm.exchange import DeferredWork, Op, Work
from kagome.comm.stats import Kind
from kagome.comm.transport.device import to_device
from kagome.errors import ModelError
from kagome.graph.partition.chunks import Chunk, ChunkStep
from kagome.halo.forward_pass import Site, of_gradients
from kagome.halo.table_view import TableIndex, TableView
from kagome.historical.tables import Place, RowGradients, SiteTable, Tables
from kagome.kernels.base.ordered_sums import add_from_peers


class Left:
    """Gradients of rows that the next epoch reads as historical rows: that epoch adds them to its own.

    In backward a chunk receives the gradients that later chunks have accumulated on its rows. The gradient
    from an earlier chunk comes too late. GNNPipe's third technique makes up for it by counting the others
    twice; with this class the gradient of the previous epoch is used instead.

    Args:
        tables: Tables of this rank.
        reads: Table positions of the rows that each piece reads, by number.
        steps: Steps of the next epoch, one for each piece.

    Source: the third technique's alternative in GNNPipe; LMC compensates samples of a graph so.
    """

    def __init__(self, tables: Tables, reads: Sequence[Tensor], steps: Sequence[ChunkStep]) -> None:
        self.tables, self.reads, self.steps = tables, reads, {step.chunk: step for step in steps}
        self._cached: dict[int, tuple[Tensor, Tensor]] = {}

    def add(self, table: SiteTable, chunk: int, away: RowGradients) -> None:
        """Accumulate a chunk's gradients of rows that the next epoch will read as historical rows.

        Args:
            table: Table of the site.
            chunk: Index of the chunk.
            away: RowGradients of the rows that the chunk read.

        Cost:
            The sums of about half of the gradients.
        """
        due, reads = self.tables.due(table), self.reads[chunk]
        if chunk not in self._cached:
            # All rows that this chunk reads, except those that are fresh for it in the next epoch.
            old = torch.ones(reads.numel(), dtype=torch.bool)
            old[self.steps[chunk].fresh] = False
            ids = to_device(old.nonzero().view(-1), self.tables.device)
            self._cached[chunk] = reads[ids], ids
        place, ids = self._cached[chunk]
        away.add_to(due, place, ids, due.new_ones(ids.numel()))

    def other(self, chunk: int) -> Tensor:
        """Return the indices of the rows that the next epoch reads fresh, which :meth:`add` omits."""
        return to_device(self.steps[chunk].fresh, self.tables.device)


# [Note: what a chunk reads and gives] Three chunks in the order 2 0 1; ``1'`` are the last known rows of
# chunk 1:
#
#     forward     chunk 2              chunk 0              chunk 1
#                 reads 0' 1'          reads 2  1'          reads 2  0
#     backward    chunk 2              chunk 0              chunk 1        from right to left
#                 has all by now       adds to 2            adds to 2, 0
#
# A chunk runs backward after every chunk that has read its fresh rows, so the gradients that they added to
# the table are complete when it takes them. No message says so: the reverse order alone guarantees it, on
# this rank and, for halo rows, on the ranks of the other parts.
#
# The gradients at ``0'`` and ``1'`` belong to rows of an earlier epoch, whose graph is gone. They are dropped
# and the factor of those that arrive in time makes up for them, or ``Left`` keeps them, and the next epoch
# adds them without a factor.


class HistoricalRows:
    """Chunks run one after the other; rows and gradients of later chunks are the last known ones, if any.

    Args:
        tables: Tables of this rank.
        steps: Chunk steps of this epoch.
        left: Collects the gradients of this epoch that the next one adds; None to drop them. This epoch adds
            those that the epoch before has left.
    """

    def __init__(self, tables: Tables, steps: Sequence[ChunkStep], left: Left | None = None) -> None:
        self.tables, self.left = tables, left
        self.steps = {step.chunk: step for step in steps}
        # A table has two halves, which change roles every epoch: this epoch's may be the second.
        places, device = tables.places, tables.device
        self.sources = {
            step.chunk: TableIndex(to_device((step.source + tables.now * places) % (2 * places), device))
            for step in steps
        }
        self._cached: dict[tuple[int, torch.dtype], tuple[Tensor, Tensor, Tensor]] = {}

    def start_gather(self, chunk: Chunk, rows: Tensor, site: Site, label: str) -> Work:
        """Write own rows, exchange this step's rows, and return a view of the table's fresh and old rows."""
        tables, step = self.tables, self.steps[chunk.number]
        table = tables.table(site, rows)
        if not table.kept:
            raise ModelError(
                "rows of later chunks to be those of an earlier epoch",
                "no earlier epoch that has read neighbours here",
                where=site.action(label),
                hint="a forward that does the same in every epoch, or cross_chunk='exact'",
            )
        tables.came(chunk, _place(site, label))
        where = self.sources[chunk.number]
        if site.once:  # an exact pass has read them: see ``Tables.share``
            return TableView(lambda: table.rows, where, tables.by_entry)
        current = tables.current(table)
        # Own rows first, because the exchange sends from the table.
        tables.write(chunk, current, rows)
        # Only the rows that a peer reads in this step or later: see ``graph.partition.chunks.plan_steps``.
        work = self._exchange(current, step.send, step, site, label, 0)

        def settle() -> Tensor:
            if work is not None:
                with work.borrow() as halo:
                    current.index_copy_(0, to_device(step.recv, tables.device), halo)
            # Both halves: ``sources`` has a position in one or the other for each row that is read.
            return table.rows

        return TableView(settle, where, tables.by_entry)

    def start_reduce(self, chunk: Chunk, away: RowGradients, site: Site, label: str) -> Work:
        """Accumulate gradients of fresh rows, and send those of this step's halo rows to their owners."""
        tables, step = self.tables, self.steps[chunk.number]
        table = tables.sites[site.key]
        gradients = tables.gradients(table, stale=self.left is not None)
        # Gradients of fresh rows alone, times the cross-chunk scale for rows of an earlier step.
        place, fresh, scale = self._fresh(chunk.number, gradients.dtype)
        away.add_to(gradients, place, fresh, scale)
        if self.left is not None:
            self.left.add(table, chunk.number, away)
        recv = step.recv
        work = self._exchange(gradients, recv, step, site, label, 3)

        def add() -> Tensor:
            if work is not None:
                with work.borrow() as received:
                    # A row that several peers read comes back from each of them.
                    send = to_device(step.send, tables.device)
                    add_from_peers(gradients, send, step.send_counts, received)
            return tables.own(chunk, gradients)

        return DeferredWork(add)

    def reduce(self, chunk: Chunk, part: Tensor, op: Op, action: str, kind: Kind, key: Hashable) -> Tensor:
        """Return the last epoch's reduction over all chunks: a constant, whose gradients are zeros."""
        # The sum of the last epoch is a constant, so no gradient leads to the rows that it was made of.
        if of_gradients(key):
            return torch.zeros_like(part)
        tables = self.tables
        key = tables.call(chunk, key)
        tables.came(chunk, (action, key))
        # This epoch's share of the sum grows chunk by chunk; ``Tables.end`` adds the shares of all ranks.
        before = tables.gathered.get(key)
        tables.gathered[key] = op, part.clone() if before is None else _join(op, before[1], part)
        known = tables.statistic(key)
        if known is None or known.shape != part.shape:
            got = "none" if known is None else f"one of shape {list(known.shape)} for {list(part.shape)}"
            raise ModelError(
                "the last epoch's sum over all vertices, under chunks",
                f"{got} ({action})",
                hint="a forward that does the same in every epoch, or cross_chunk='exact'",
            )
        return known.clone()

    def _exchange(
        self,
        rows: Tensor,
        index: Tensor,
        step: ChunkStep,
        site: Site,
        label: str,
        direction: int,
    ) -> Work | None:
        tables = self.tables
        if tables.channel.size == 1:
            return None
        index = to_device(index, tables.device)
        row_ids, width = tables.ids[index], rows.size(1)
        sides = (
            (step.send_counts, step.recv_counts) if direction < 2 else (step.recv_counts, step.send_counts)
        )
        request = site.request(label, direction, *sides, width=width, row_ids=row_ids, index=index)
        return tables.channel.start(rows, request)

    def _fresh(self, chunk: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Return where a chunk's fresh reads are in the table, their indices, and their gradient factors."""
        if (chunk, dtype) not in self._cached:
            step, device = self.steps[chunk], self.tables.device
            fresh = to_device(step.fresh, device)
            cached = self.tables.reads[chunk][fresh], fresh, to_device(step.scale.to(dtype), device)
            self._cached[chunk, dtype] = cached
        return self._cached[chunk, dtype]


# [Note: sums of an exact pass] A row is read by chunks 1 and 2. In the next epoch's order it is fresh for 2
# and old for 1, so that epoch cannot give it the gradient of 1, and takes the one of this pass:
#
#     reader 1 (old next)     away ──> due         for the next epoch ...
#     reader 2 (fresh next)   away ──> gradients
#                             due  ──> gradients   ... and for this one, as one addition of the whole table
#
# Each reader's sum over its edges is taken once.


class ExactRows:
    """All chunks run at once, so that every row read is one of this forward pass.

    Args:
        tables: Tables of this rank.
        left: Collects the gradients that the next epoch's historical rows add; None to drop them.
        trains: Whether this is a training epoch, whose sums the next epoch may read, or an evaluation.
    """

    def __init__(self, tables: Tables, left: Left | None = None, *, trains: bool) -> None:
        self.tables, self.left, self.trains = tables, left, trains
        # Every row is fresh. Those that the next epoch reads fresh too are the ones that are not left for it.
        reads = tables.whole.places
        self._now = torch.arange(reads.numel(), device=reads.device) if left is None else left.other(0)
        self._places = reads[self._now]

    def start_gather(self, chunk: Chunk, rows: Tensor, site: Site, label: str) -> Work:
        """Write own rows, exchange halo rows, and return a view of the table."""
        tables, own = self.tables, chunk.own
        table = tables.table(site, rows)
        current = tables.current(table)
        # Own rows first, because the exchange sends from the table, which holds rows of this pass alone.
        tables.write(chunk, current, rows)
        work = self._exchange(current, tables.send, site, label, 0)

        def settle() -> Tensor:
            if work is not None:
                with work.borrow() as halo:
                    current[own:].copy_(halo)
            if site.once:
                tables.share(table)
            return current

        return TableView(settle, tables.whole, tables.by_entry)

    def start_reduce(self, chunk: Chunk, away: RowGradients, site: Site, label: str) -> Work:
        """Accumulate gradients of all rows read, and send those of halo rows back to their owners."""
        tables, own = self.tables, chunk.own
        table = tables.sites[site.key]
        gradients = tables.gradients(table)
        if self.left is not None:
            self.left.add(table, 0, away)
            gradients.add_(tables.due(table))
        # Every gradient arrives in time, so the factors are 1.
        away.add_to(gradients, self._places, self._now, gradients.new_ones(self._now.numel()))
        work = self._exchange(gradients[own:], None, site, label, 3)

        def add() -> Tensor:
            if work is not None:
                with work.borrow() as received:
                    add_from_peers(gradients, tables.send, tables.chunks.send_counts, received)
            return tables.own(chunk, gradients)

        return DeferredWork(add)

    def reduce(self, chunk: Chunk, part: Tensor, op: Op, action: str, kind: Kind, key: Hashable) -> Tensor:
        """Reduce over the parts, each of which has one share for all its chunks."""
        tables, call = self.tables, self.tables.call(chunk, key)
        found = tables.channel.all_reduce(part, op, action=action, kind=kind, key=key)
        # An epoch with history may follow, which reads the sums of this one.
        if self.trains and not of_gradients(key):
            tables.statistics[call] = found.clone()
        return found

    def _exchange(
        self, rows: Tensor, index: Tensor | None, site: Site, label: str, direction: int
    ) -> Work | None:
        """Start to exchange rows of the halo: those of ``index`` forward, all of them backward."""
        tables, chunks = self.tables, self.tables.chunks
        if tables.channel.size == 1:
            return None
        sides = (chunks.send_counts, chunks.recv_counts)
        row_ids = tables.ids[chunks.own :] if index is None else tables.ids[index]
        request = site.request(
            label,
            direction,
            *(sides if index is not None else sides[::-1]),
            width=rows.size(1),
            row_ids=row_ids,
            index=index,
        )
        return tables.channel.start(rows, request)


def _place(site: Site, label: str) -> Place:
    """Return the place of a read, by which chunks compare where they are."""
    return site.action(label), site.key


def _join(op: Op, one: Tensor, other: Tensor) -> Tensor:
    if op == "sum":
        return one + other
    return torch.maximum(one, other) if op == "max" else torch.minimum(one, other)
