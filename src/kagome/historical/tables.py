"""Tables: what a rank remembers of its part's rows between chunks and between epochs, site by site.

Where it sits: ``run`` makes one :class:`Tables` a rank and a :class:`ChunkRows` a chunk, and says before each
epoch which supplier of ``provider`` answers. ``intercept.interceptor`` sees a ``HaloExchange`` and a channel
as ever.

::

    a site's table     [ rows of this epoch | rows of the last one that was kept ]      2 x (own + halo) rows
    a site's gradients [ what readers send back ]                                           own + halo rows
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kagome.comm.channel import Kind, Op
from kagome.comm.exchange import Trip
from kagome.errors import ModelError
from kagome.graph.partition.chunks import Chunk, Chunks
from kagome.halo.exchange import Carrier, HaloExchange, UnderWay
from kagome.halo.forward_pass import Site, SiteKey
from kagome.halo.resumed_rows import NOTHING, Entry, ResumedRows
from kagome.halo.table_view import TableIndex
from kagome.historical.lockstep import Place, unlike
from kagome.placement.weak_map import WeakTensorMap


@dataclass
class SiteTable:
    """The rows of one site, of this epoch and of the last one that was kept, and their gradients.

    Args:
        rows: Both, one after the other.
        gradients: What readers sent back in this epoch.
        due: What this epoch's readers leave to the next one, in which they will come too late.
        due_in: The epoch in which that is taken.
        once: Whether all forwards share what is read here.
        kept: Whether rows of an earlier epoch are known.

    Shapes:
        ``rows [2 T, W]``, ``gradients [T, W]``, ``due [T, W]`` with T own and halo rows of the part.
    """

    rows: Tensor
    gradients: Tensor | None = None
    due: Tensor | None = None
    due_in: int = -1
    left: int = -1
    zeroed: int = -1
    written: int = -1
    known: bool = False
    once: bool = False
    kept: bool = False


@dataclass
class Later:
    """Rows that are there once something was done."""

    done: Callable[[], Tensor]
    rows: Tensor | None = None

    def wait(self) -> Tensor:
        """The rows."""
        if self.rows is None:
            self.rows = self.done()
        return self.rows

    @contextmanager
    def lent(self) -> Iterator[Tensor]:
        """The rows."""
        yield self.wait()


class Supplier(Protocol):
    """What answers a chunk's reads in an epoch."""

    def fetch(self, chunk: Chunk, rows: Tensor, site: Site, words: str) -> UnderWay:
        """The rows that a chunk reads elsewhere, of its own rows."""

    def give(self, chunk: Chunk, away: Tensor, site: Site, words: str) -> UnderWay:
        """Take the gradients of what a chunk read; what comes is for its own rows."""

    def reduce(self, chunk: Chunk, part: Tensor, op: Op, action: str, kind: Kind, key: Hashable) -> Tensor:
        """A sum or an extreme over all chunks of all parts."""


class Tables:
    """All that outlives a chunk: rows, gradients and statistics of every site of a rank's stage.

    Args:
        chunks: Of this rank's part.
        pieces: What is taken one after the other: its chunks, or all of them together.
        channel: The way to the other parts.
        device: Where the model runs.

    Cost:
        Three tables a site: ``3 (own + halo) W`` values; four where gradients of the epoch before pass on.
    """

    def __init__(
        self, chunks: Chunks, pieces: Sequence[Chunk], channel: Carrier, device: torch.device
    ) -> None:
        self.chunks, self.channel, self.device = chunks, channel, device
        self.sites: dict[SiteKey, SiteTable] = {}
        self.statistics: dict[Hashable, Tensor] = {}
        self.gathered: dict[Hashable, tuple[Op, Tensor]] = {}
        self.now = 0
        """Which half of a site's rows is this epoch's."""
        self.epoch = self.passes = 0
        self.supplier: Supplier | None = None
        self.recall: ResumedRows = NOTHING
        self._calls: dict[int, Counter[Hashable]] = {}
        self._came: Counter[tuple[Place, int]] = Counter()
        self.send, self.ids = chunks.send.to(device), chunks.ids.to(device)
        self.reads = [piece.reads.to(device) for piece in pieces]
        self.whereabouts = [TableIndex(reads) for reads in self.reads]
        self.by_edge: WeakTensorMap[Tensor] = WeakTensorMap()
        self.halo_chunk, self.sent_read_by = self._ask_peers()

    def _ask_peers(self) -> tuple[Tensor, Tensor]:
        """Each halo row's chunk at its owner, and which of its reader's chunks read each sent row."""
        chunks, channel = self.chunks, self.channel
        if channel.size == 1:
            return torch.empty(0, dtype=torch.int64), torch.empty(0, len(chunks.pieces), dtype=torch.bool)
        mine = chunks.chunk_of[chunks.send].unsqueeze(1).to(self.device)
        there, back = (chunks.send_counts, chunks.recv_counts), (chunks.recv_counts, chunks.send_counts)
        halo_chunk = channel.exchange(mine, *there, action="chunks of the halo", kind="other")
        readers = chunks.read_by.to(torch.uint8).to(self.device)
        sent = channel.exchange(readers, *back, action="readers of what is sent", kind="other")
        return halo_chunk.squeeze(1).cpu(), sent.cpu().bool()

    @property
    def places(self) -> int:
        """Rows of a table."""
        return self.chunks.table

    def begin(self, epoch: int, supplier: Supplier) -> None:
        """An epoch, or an evaluation, begins."""
        self.epoch, self.supplier = epoch, supplier
        self.passes += 1
        self.gathered = {}
        self._calls, self._came = {}, Counter()

    def table(self, site: Site, rows: Tensor) -> SiteTable:
        """The table of a site whose rows look like these."""
        found = self.sites.get(site.key)
        if found is None or found.rows.shape[1] != rows.size(1) or found.rows.dtype != rows.dtype:
            found = SiteTable(rows.new_zeros(2 * self.places, rows.size(1)), once=site.once)
            self.sites[site.key] = found
            self._recall(site.key, found)
        found.known = found.known or found.written not in (-1, self.passes)
        found.written = self.passes
        return found

    def _recall(self, key: SiteKey, table: SiteTable) -> None:
        """Rows last known, and gradients left for this epoch, as an earlier run had them."""
        state, last = self.recall.take("table", key, self.epoch), self.last(table)
        if state is None or state["rows"].shape != last.shape or state["rows"].dtype != last.dtype:
            return
        last.copy_(state["rows"])
        table.written = 0  # in a pass before all of this run's
        table.kept = True
        if state["due"] is not None:
            table.due, table.due_in = state["due"], state["due_in"]

    def carried(self, epoch: int) -> Iterator[Entry]:
        """What the epoch after this one may read of it."""
        for key, table in self.sites.items():
            due = table.due if table.due_in == epoch + 1 else None
            if table.kept and not table.once:
                yield "table", key, {"rows": self.last(table), "due": due, "due_in": table.due_in}
        for call, value in self.statistics.items():
            yield "statistic", call, {"value": value}

    def forget(self, recall: ResumedRows) -> None:
        """Let the next epoch read nothing of those before, but what is recalled."""
        self.sites, self.statistics, self.recall = {}, {}, recall

    @property
    def whole(self) -> bool:
        """Whether all sites that were come to have rows of an earlier epoch."""
        return all(table.kept or table.once for table in self.sites.values())

    def statistic(self, call: Hashable) -> Tensor | None:
        """What a sum over all vertices was in the last epoch."""
        if call not in self.statistics:
            state = self.recall.take("statistic", call, self.epoch)
            return None if state is None else state["value"]
        return self.statistics[call]

    def current(self, table: SiteTable) -> Tensor:
        """The half of this epoch."""
        return table.rows.narrow(0, self.now * self.places, self.places)

    def last(self, table: SiteTable) -> Tensor:
        """The half that was kept."""
        return table.rows.narrow(0, (1 - self.now) * self.places, self.places)

    def gradients(self, table: SiteTable, *, stale: bool = False) -> Tensor:
        """The gradients of this epoch: at first zeros, or what was left for it."""
        if table.zeroed != self.passes:
            if stale and table.due is not None and table.due_in == self.epoch:
                table.gradients, table.due, table.left = table.due, table.gradients, -1
            else:
                table.gradients = self._zeros(table, table.gradients)
        table.zeroed = self.passes
        assert table.gradients is not None
        return table.gradients

    def due(self, table: SiteTable) -> Tensor:
        """What this pass leaves to the next epoch: zeros at first. After :meth:`gradients`."""
        if table.left != self.passes:
            table.due = self._zeros(table, table.due)
        table.left, table.due_in = self.passes, self.epoch + 1
        assert table.due is not None
        return table.due

    def _zeros(self, table: SiteTable, known: Tensor | None) -> Tensor:
        if known is None:
            return table.rows.new_zeros(self.places, table.rows.size(1))
        return known.zero_()

    def keep(self) -> None:
        """The rows of this epoch become the last known ones; a site that nobody came to has those it had."""
        for table in self.sites.values():
            if table.written == self.passes:
                table.kept = True
            elif table.kept and not table.once:
                self.current(table).copy_(self.last(table))
        self.now = 1 - self.now

    def drift(self, world: Carrier) -> float:
        """After an exact pass that was kept: how far rows have moved since, on the mean of sites.

        All ranks call it.
        """
        found = []
        for table in self.sites.values():
            if table.written == self.passes and table.known:
                new, old = self.last(table), self.current(table)
                length = float(new.norm())
                if length > 0:
                    found.append(float((new - old).norm()) / length)
        mine = torch.tensor([sum(found), float(len(found))], dtype=torch.float64, device=self.device)
        moved, sites = world.all_reduce(mine, action="drift", kind="statistics").tolist()
        return float(moved / max(sites, 1))

    def call(self, chunk: Chunk, key: Hashable) -> Hashable:
        """A key of this call: a chunk may come to the same key several times."""
        counts = self._calls.setdefault(chunk.number, Counter())
        counts[key] += 1
        return key, counts[key]

    def came(self, chunk: Chunk, place: Place) -> None:
        """A chunk has come to a read or a sum of this pass."""
        self._came[place, chunk.number] += 1

    def end(self) -> None:
        """Sum over the parts what chunks have given to statistics: the next epoch's. All ranks call it.

        Raises:
            ModelError: If not every chunk has come to what some have: others have read rows that it left as
                they were.

        Cost:
            One all-reduce an operation, of all statistics together.
        """
        for (place, chunk), many in self._came.items():
            following = (chunk + 1) % len(self.reads)
            if self._came[place, following] != many:
                raise unlike(f"chunk {chunk} does, and chunk {following} does not", place)
        for op in ("sum", "max", "min"):
            keys = sorted((key for key, (how, _) in self.gathered.items() if how == op), key=repr)
            if not keys:
                continue
            parts = [self.gathered[key][1] for key in keys]
            flat = torch.cat([part.reshape(-1).double() for part in parts])
            summed = self.channel.all_reduce(flat, op, action=f"statistics, epoch {self.epoch}")
            for key, part, values in zip(
                keys, parts, summed.split([part.numel() for part in parts]), strict=True
            ):
                self.statistics[key] = values.view(part.shape).to(part.dtype)
        self.gathered = {}


@dataclass(frozen=True)
class ChunkRows(HaloExchange):
    """A chunk's rows: its halo is what its edges read in other chunks and in other parts."""

    chunk: Chunk | None = None
    tables: Tables | None = None

    def fetch(self, rows: Tensor, site: Site, words: str, direction: int) -> UnderWay:
        """The rows that this chunk reads elsewhere."""
        chunk, tables = self._known()
        assert tables.supplier is not None
        return tables.supplier.fetch(chunk, rows.detach(), site, words)

    def give(self, away: Tensor, site: Site, words: str, direction: int) -> UnderWay:
        """Take gradients of what was read."""
        chunk, tables = self._known()
        if direction == 2:
            raise ModelError(
                "chunks read their neighbours' rows",
                "a layer adds to its neighbours' rows (messages from target to source)",
                where=site.name,
                hint="chunks=1, or the edges turned round before training",
            )
        assert tables.supplier is not None
        return tables.supplier.give(chunk, away, site, words)

    def add(self, come: Tensor, own: Tensor) -> Tensor:
        """What lies on own rows."""
        return own.add_(come)

    def _known(self) -> tuple[Chunk, Tables]:
        assert self.chunk is not None
        assert self.tables is not None
        return self.chunk, self.tables


class ChunkChannel:
    """A chunk's end of all chunks of all parts: what an interception takes for its channel.

    Args:
        chunk: The chunk.
        tables: Of its rank.
    """

    exact = False
    """Its rows may be another chunk's, of another epoch."""

    def __init__(self, chunk: Chunk, tables: Tables) -> None:
        self.chunk, self.tables = chunk, tables
        self.where: Callable[[], str] = str
        """Names the layer that is running; set where it is known."""
        count = len(tables.chunks.pieces)
        self.rank, self.size = tables.channel.rank * count + chunk.number, tables.channel.size * count

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
            "chunks read their neighbours' rows by the edges into them",
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
        """The sum, maximum or minimum over all chunks of all parts, or the last one known."""
        assert self.tables.supplier is not None
        return self.tables.supplier.reduce(self.chunk, tensor.detach(), op, action, kind, key)
