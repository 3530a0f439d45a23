"""History: who supplies the rows of other chunks - those last known, or all chunks in lockstep.

Where it sits: ``run`` gives ``tables`` one of these for an epoch; chunks' reads and sums come here.

::

    forward, step i    write own rows; exchange this step's rows with the peers; read: fresh or historical
    backward           add gradients of fresh rows (an earlier step's times the scale); exchange back;
                       own gradient = incoming + what lies on own rows

Source: GNNPipe's historical embeddings and gradient scaling, with a halo between parts besides.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

from kagome.comm.channel import Kind, Op
from kagome.errors import ModelError
from kagome.graph.partition.chunks import Chunk, ChunkStep
from kagome.halo.exchange import UnderWay
from kagome.halo.forward_pass import Site, of_gradients
from kagome.halo.table_view import TableIndex, TableView
from kagome.historical.lockstep import Lockstep, Place
from kagome.historical.tables import Later, SiteTable, Tables
from kagome.kernels import ops


class Left:
    """Gradients of rows that the next epoch will read historically: that epoch takes them as its own.

    In backward a chunk finds what later ones have added. An earlier one's gradient comes too late: without
    GNNPipe's third technique, which counts the others twice, it is that of the epoch before.

    Args:
        tables: Of this rank.
        steps: Of the next epoch.

    Source: the third technique's alternative in GNNPipe; LMC compensates samples of a graph so.
    """

    def __init__(self, tables: Tables, steps: Sequence[ChunkStep]) -> None:
        self.tables, self.steps = tables, {step.chunk: step for step in steps}
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}

    def add(self, table: SiteTable, chunk: int, away: Tensor) -> None:
        """Leave what a chunk sends back.

        Cost:
            A pass over about half of it.
        """
        if chunk not in self._kept:
            old = torch.ones(away.size(0), dtype=torch.bool)
            old[self.steps[chunk].fresh] = False
            ids = old.nonzero().view(-1).to(self.tables.device)
            self._kept[chunk] = self.tables.reads[chunk][ids], ids
        place, ids = self._kept[chunk]
        ops.add_rows(self.tables.due(table), place, away, ids, away.new_ones(ids.numel()))


class HistoricalRows:
    """One chunk after the other: rows of later chunks, and their gradients, are those last known, or none.

    Args:
        tables: Of this rank.
        steps: Of this epoch, by chunk.
        left: What the next epoch's historical rows take of this one's gradients; None for nothing. This one's
            take what the epoch before has left.
    """

    def __init__(self, tables: Tables, steps: Sequence[ChunkStep], left: Left | None = None) -> None:
        self.tables, self.left = tables, left
        self.steps = {step.chunk: step for step in steps}
        # The half of this epoch may be the second one of the table.
        places, device = tables.places, tables.device
        self.sources = {
            step.chunk: TableIndex(((step.source + tables.now * places) % (2 * places)).to(device))
            for step in steps
        }
        self._kept: dict[tuple[int, torch.dtype], tuple[Tensor, Tensor, Tensor]] = {}

    def fetch(self, chunk: Chunk, rows: Tensor, site: Site, words: str) -> UnderWay:
        """Write own rows, exchange this step's; fresh and historical ones lie in the table then."""
        tables, step = self.tables, self.steps[chunk.number]
        table = tables.table(site, rows)
        if not table.kept:
            raise ModelError(
                "rows of later chunks are those of an earlier epoch",
                "no earlier epoch has read neighbours here",
                where=site.action(words),
                hint="a forward that does the same in every epoch, or cross_chunk='exact'",
            )
        tables.came(chunk, _place(site, words))
        current = tables.current(table)
        current.narrow(0, chunk.first, chunk.own).copy_(rows)
        coming = self._exchange(current, step.send, step.send_counts, step.recv_counts, site, words, 0)

        def settle() -> Tensor:
            if coming is not None:
                with coming.lent() as halo:
                    current.index_copy_(0, step.recv.to(tables.device), halo)
            return table.rows

        return TableView(settle, self.sources[chunk.number], tables.by_edge)

    def give(self, chunk: Chunk, away: Tensor, site: Site, words: str) -> UnderWay:
        """Add gradients of fresh rows, send those of this step's halo rows back."""
        tables, step = self.tables, self.steps[chunk.number]
        table = tables.sites[site.key]
        gradients = tables.gradients(table, stale=self.left is not None)
        place, fresh, scale = self._fresh(chunk.number, away.dtype)
        ops.add_rows(gradients, place, away, fresh, scale)
        if self.left is not None:
            self.left.add(table, chunk.number, away)
        recv = step.recv
        coming = self._exchange(gradients, recv, step.recv_counts, step.send_counts, site, words, 3)

        def add() -> Tensor:
            if coming is not None:
                with coming.lent() as come:
                    gradients.index_add_(0, step.send.to(tables.device), come)
            return gradients.narrow(0, chunk.first, chunk.own)

        return Later(add)

    def reduce(self, chunk: Chunk, part: Tensor, op: Op, action: str, kind: Kind, key: Hashable) -> Tensor:
        """What all gave together in the last epoch: a constant, so nothing comes back in backward."""
        if of_gradients(key):
            return torch.zeros_like(part)
        tables = self.tables
        key = tables.call(chunk, key)
        tables.came(chunk, (action, key))
        before = tables.gathered.get(key)
        tables.gathered[key] = op, part.clone() if before is None else _join(op, before[1], part)
        known = tables.statistic(key)
        if known is None or known.shape != part.shape:
            found = "none" if known is None else f"one of shape {list(known.shape)} for {list(part.shape)}"
            raise ModelError(
                "under chunks a sum over all vertices is the last epoch's",
                f"the last epoch had {found} ({action})",
                hint="a forward that does the same in every epoch, or cross_chunk='exact'",
            )
        return known.clone()

    def _exchange(
        self,
        rows: Tensor,
        pick: Tensor,
        sends: tuple[int, ...],
        comes: tuple[int, ...],
        site: Site,
        words: str,
        direction: int,
    ) -> UnderWay | None:
        if self.tables.channel.size == 1:
            return None
        pick = pick.to(self.tables.device)
        return self.tables.channel.start_exchange(
            rows,
            sends,
            comes,
            action=site.action(words),
            header=site.header(direction, rows.size(1)),
            pick=pick,
            trip=site.trip(direction, self.tables.ids[pick]),
        )

    def _fresh(self, chunk: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Places of a chunk's fresh rows, which they are, and the factors of their gradients."""
        if (chunk, dtype) not in self._kept:
            step, device = self.steps[chunk], self.tables.device
            fresh = step.fresh.to(device)
            kept = self.tables.reads[chunk][fresh], fresh, step.scale.to(device, dtype)
            self._kept[chunk, dtype] = kept
        return self._kept[chunk, dtype]


class ExactRows:
    """All chunks in lockstep: every row is of this forward.

    Args:
        tables: Of this rank.
        left: What the next epoch's historical rows take of this one's gradients; None for nothing.
        trains: Whether it is an epoch, whose sums the next one may read, or an evaluation.

    Attributes:
        lockstep: The works that meet here; set before each pass.
    """

    def __init__(self, tables: Tables, left: Left | None = None, *, trains: bool) -> None:
        self.tables, self.left, self.trains = tables, left, trains
        self.lockstep: Lockstep | None = None
        self._reduced: dict[Hashable, Tensor] = {}

    def fetch(self, chunk: Chunk, rows: Tensor, site: Site, words: str) -> UnderWay:
        """Write own rows; when all chunks have, exchange the part's: they lie in the table then."""
        tables = self.tables
        table = tables.table(site, rows)
        current = tables.current(table)
        current.narrow(0, chunk.first, chunk.own).copy_(rows)

        def settle() -> None:
            plan, size = tables.chunks, tables.channel.size
            if size > 1:
                with tables.channel.start_exchange(
                    current,
                    plan.send_counts,
                    plan.recv_counts,
                    action=site.action(words),
                    header=site.header(0, rows.size(1)),
                    pick=tables.send,
                    trip=site.trip(0, tables.ids[tables.send]),
                ).lent() as halo:
                    current[plan.own :].copy_(halo)

        def met() -> Tensor:
            self._meet(_place(site, words), settle)
            return current

        return TableView(met, tables.whereabouts[chunk.number], tables.by_edge)

    def give(self, chunk: Chunk, away: Tensor, site: Site, words: str) -> UnderWay:
        """Add gradients; when all chunks have, send the halo's back."""
        tables = self.tables
        table = tables.sites[site.key]
        gradients = tables.gradients(table)
        reads = tables.reads[chunk.number]
        every, ones = torch.arange(reads.numel(), device=tables.device), away.new_ones(reads.numel())
        ops.add_rows(gradients, reads, away, every, ones)
        if self.left is not None:
            self.left.add(table, chunk.number, away)

        def settle() -> None:
            plan, size = tables.chunks, tables.channel.size
            if size > 1:
                with tables.channel.start_exchange(
                    gradients[plan.own :],
                    plan.recv_counts,
                    plan.send_counts,
                    action=site.action(words),
                    header=site.header(3, away.size(1)),
                    trip=site.trip(3, tables.ids[plan.own :]),
                ).lent() as come:
                    gradients.index_add_(0, tables.send, come)

        def add() -> Tensor:
            self._meet(_place(site, words), settle)
            return gradients.narrow(0, chunk.first, chunk.own)

        return Later(add)

    def reduce(self, chunk: Chunk, part: Tensor, op: Op, action: str, kind: Kind, key: Hashable) -> Tensor:
        """Over the chunks here, then over the parts."""
        tables, call = self.tables, self.tables.call(chunk, key)
        before = self._reduced.get(call)
        self._reduced[call] = part if before is None else _join(op, before, part)

        def settle() -> None:
            found = tables.channel.all_reduce(self._reduced[call], op, action=action, kind=kind, key=key)
            self._reduced[call] = found
            if self.trains and not of_gradients(key):
                tables.statistics[call] = found

        self._meet((action, call), settle)
        found: Tensor = self._reduced[call]
        return found.clone()

    def _meet(self, at: Place, settle: Callable[[], None]) -> None:
        assert self.lockstep is not None
        self.lockstep.meet(at, settle)


def _place(site: Site, words: str) -> Place:
    """A read, as chunks compare where they are."""
    return site.action(words), site.key


def _join(op: Op, one: Tensor, other: Tensor) -> Tensor:
    if op == "sum":
        return one + other
    return torch.maximum(one, other) if op == "max" else torch.minimum(one, other)
