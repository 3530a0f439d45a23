"""History tables: a rank's memory of its part's rows, site by site, between chunks and between epochs.

Where it sits: the chunk engine makes one :class:`Tables` for each rank and one :class:`ChunkRows` for each
chunk. Before each epoch it sets the provider (``historical.provider``) that answers reads.
``intercept.interceptor`` uses them as a ``HaloExchange`` and a channel.

::

    a site's table     [ rows of this epoch | rows of the last epoch that was kept ]    2 x (own + halo) rows
    a site's gradients [ accumulated from readers ]                                         own + halo rows
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kagome.comm.exchange import Exchange, ExchangeRequest, Op, Work
from kagome.comm.stats import Kind
from kagome.comm.transport.device import to_device
from kagome.errors import ModelError
from kagome.graph.partition.chunks import Chunk, Chunks
from kagome.halo.exchange import HaloExchange, HaloSums
from kagome.halo.forward_pass import Site, SiteKey
from kagome.halo.resumed_rows import NOTHING, Entry, ResumedRows
from kagome.halo.table_view import TableIndex
from kagome.historical.isolated_chunk import no_rows
from kagome.kernels import ops
from kagome.placement.weak_map import WeakTensorMap

Place = tuple[str, Hashable]
"""A read or a sum over all vertices: its description, and a key that tells it from others described alike."""


@dataclass
class SiteTable:
    """Rows of one site, of this epoch and of the last epoch that was kept, with their gradients.

    Args:
        rows: Rows of both epochs, one half each.
        gradients: Gradients that readers have sent back in this epoch.
        due: Gradients of this epoch's readers that the next epoch adds, because here they come too late.
        due_in: The epoch that adds ``due``.
        left: The pass in which ``due`` was last reset to zeros.
        zeroed: The pass in which ``gradients`` was last initialised.
        written: The pass that last wrote rows.
        known: Whether rows of an earlier pass are in the table, so that the drift can be measured.
        once: Whether all forward passes share the rows read here.
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


class RowGradients(Protocol):
    """The gradients of the rows that a chunk read, which need not be computed yet."""

    def add_to(self, table: Tensor, place: Tensor, which: Tensor, times: Tensor) -> None:
        """Add those that ``which`` names, each times a factor, to their places in a table."""


@dataclass(frozen=True)
class GivenRows:
    """Gradients of rows that are computed already.

    Shapes:
        rows ``[h, W]``.
    """

    rows: Tensor

    def add_to(self, table: Tensor, place: Tensor, which: Tensor, times: Tensor) -> None:
        """Add some of the rows to a table."""
        ops.add_rows(table, place, self.rows, which, times)


class Provider(Protocol):
    """The provider that answers the chunks' reads, gradients and sums in an epoch."""

    def start_gather(self, chunk: Chunk, rows: Tensor, site: Site, label: str) -> Work:
        """Start to fetch the rows that a chunk reads in other chunks and parts, given its own rows."""

    def start_reduce(self, chunk: Chunk, away: RowGradients, site: Site, label: str) -> Work:
        """Start to add the gradients of rows that a chunk read; return the gradients of its own rows."""

    def reduce(self, chunk: Chunk, part: Tensor, op: Op, action: str, kind: Kind, key: Hashable) -> Tensor:
        """Return a sum, maximum or minimum over all chunks of all parts."""


class Tables:
    """Rows, gradients and statistics of every site of a rank's stage: the state that outlives a chunk.

    Args:
        chunks: Chunks of this rank's part.
        whole: All chunks merged into one, for exact passes.
        pieces: The units that other epochs run one after the other: single chunks, or ``whole`` alone.
        channel: Channel to the other parts.
        device: Device of the model.

    Cost:
        Three tables a site: ``3 (own + halo) W`` values; four where gradients of the epoch before are added.
    """

    def __init__(
        self, chunks: Chunks, whole: Chunk, pieces: Sequence[Chunk], channel: Exchange, device: torch.device
    ) -> None:
        self.chunks, self.channel, self.device = chunks, channel, device
        # [Note: halves] ``now`` says which half of every table is this epoch's. ``keep`` flips it:
        #
        #     now = 0    [ this epoch | last kept ]    now = 1    [ last kept | this epoch ]
        #     keep()      becomes last   overwritten next
        self.sites: dict[SiteKey, SiteTable] = {}
        self.statistics: dict[Hashable, Tensor] = {}
        self.gathered: dict[Hashable, tuple[Op, Tensor]] = {}
        self.now = 0
        """Index of the half of each table that holds rows of this epoch: 0 or 1."""
        self.epoch = self.passes = 0
        self.provider: Provider | None = None
        self.resumed_rows: ResumedRows = NOTHING
        self._calls: dict[int, Counter[Hashable]] = {}
        self._came: Counter[tuple[Place, int]] = Counter()
        self.send, self.ids = chunks.send.to(device), chunks.ids.to(device)
        self.reads = [piece.reads.to(device) for piece in pieces]
        self.whole = TableIndex(whole.reads.to(device))
        self.order = chunks.rows.to(device)
        """The part's own row at each of the first positions of a table."""
        self.by_entry: WeakTensorMap[tuple[Tensor, Tensor]] = WeakTensorMap()
        self.halo_chunk, self.sent_read_by = self._ask_peers()

    def _ask_peers(self) -> tuple[Tensor, Tensor]:
        """Return each halo row's chunk at its owner, and which of the peer's chunks read each sent row."""
        chunks, channel = self.chunks, self.channel
        if channel.size == 1:
            return torch.empty(0, dtype=torch.int64), torch.empty(0, len(chunks.pieces), dtype=torch.bool)
        mine = chunks.chunk_of[chunks.send].unsqueeze(1).to(self.device)
        send_counts, recv_counts = chunks.send_counts, chunks.recv_counts
        halo_chunk = channel.start(
            mine, ExchangeRequest(send_counts, recv_counts, "chunks of the halo", "other")
        ).wait()
        readers = chunks.read_by.to(torch.uint8).to(self.device)
        sent = channel.start(
            readers, ExchangeRequest(recv_counts, send_counts, "readers of what is sent", "other")
        ).wait()
        return halo_chunk.squeeze(1).cpu(), sent.cpu().bool()

    @property
    def places(self) -> int:
        """Number of rows in one half of a table."""
        return self.chunks.table

    def begin(self, epoch: int, provider: Provider) -> None:
        """Begin an epoch or an evaluation with the provider that answers its reads."""
        self.epoch, self.provider = epoch, provider
        self.passes += 1
        self.gathered = {}
        self._calls, self._came = {}, Counter()

    def table(self, site: Site, rows: Tensor) -> SiteTable:
        """Return the table of a site; make one if there is none for rows of this width and type."""
        found = self.sites.get(site.key)
        if found is None or found.rows.shape[1] != rows.size(1) or found.rows.dtype != rows.dtype:
            found = SiteTable(rows.new_zeros(2 * self.places, rows.size(1)), once=site.once)
            self.sites[site.key] = found
            self._recall(site.key, found)
        # Written in another pass than this one: that pass's rows are in one of the halves.
        found.known = found.known or found.written not in (-1, self.passes)
        found.written = self.passes
        return found

    def _recall(self, key: SiteKey, table: SiteTable) -> None:
        """Restore last known rows, and gradients left for this epoch, from an earlier run."""
        state, last = self.resumed_rows.take("table", key, self.epoch), self.last(table)
        if state is None or state["rows"].shape != last.shape or state["rows"].dtype != last.dtype:
            return
        last.copy_(state["rows"])
        table.written = 0  # before every pass of this run: those are counted from 1
        table.kept = True
        if state["due"] is not None:
            table.due, table.due_in = state["due"], state["due_in"]

    def state_entries(self, epoch: int) -> Iterator[Entry]:
        """Yield the entries that the epoch after this one may read: the state for a checkpoint."""
        for key, table in self.sites.items():
            due = table.due if table.due_in == epoch + 1 else None
            if table.kept and not table.once:
                yield "table", key, {"rows": self.last(table), "due": due, "due_in": table.due_in}
        for call, value in self.statistics.items():
            yield "statistic", call, {"value": value}

    def forget(self, resumed_rows: ResumedRows) -> None:
        """Drop all tables, so that the next epoch reads nothing but the rows resumed from a checkpoint."""
        self.sites, self.statistics, self.resumed_rows = {}, {}, resumed_rows

    @property
    def filled(self) -> bool:
        """Whether every site reached so far has rows of an earlier epoch."""
        return all(table.kept or table.once for table in self.sites.values())

    def statistic(self, call: Hashable) -> Tensor | None:
        """Return the reduction over all vertices in the last epoch; None if it is not known."""
        if call not in self.statistics:
            state = self.resumed_rows.take("statistic", call, self.epoch)
            return None if state is None else state["value"]
        return self.statistics[call]

    def current(self, table: SiteTable) -> Tensor:
        """Return the half of a table that holds rows of this epoch."""
        return table.rows.narrow(0, self.now * self.places, self.places)

    def last(self, table: SiteTable) -> Tensor:
        """Return the half of a table that holds rows of the last epoch that was kept."""
        return table.rows.narrow(0, (1 - self.now) * self.places, self.places)

    def write(self, chunk: Chunk, half: Tensor, rows: Tensor) -> None:
        """Write a chunk's own rows to its positions in a half of a table."""
        mine = half.narrow(0, chunk.first, chunk.own)
        if chunk.places is None:
            mine.copy_(rows)
        else:  # all chunks merged, in the part's order
            torch.index_select(rows, 0, self.order, out=mine)

    def own(self, chunk: Chunk, half: Tensor) -> Tensor:
        """Return a chunk's own rows of a half of a table: a view, or a copy for merged chunks."""
        if chunk.places is None:
            return half.narrow(0, chunk.first, chunk.own)
        return half.index_select(0, to_device(chunk.places, half.device))

    def gradients(self, table: SiteTable, *, stale: bool = False) -> Tensor:
        """Return the gradients of this epoch. They start as zeros, or as what the last epoch left."""
        if table.zeroed != self.passes:
            # The two buffers change roles: this epoch adds to the gradients that were left for it, and its
            # old buffer collects those that it leaves. ``left`` at -1 makes ``due`` reset that one to zeros
            # first.
            if stale and table.due is not None and table.due_in == self.epoch:
                table.gradients, table.due, table.left = table.due, table.gradients, -1
            else:
                table.gradients = self._zeros(table, table.gradients)
        table.zeroed = self.passes
        assert table.gradients is not None
        return table.gradients

    def due(self, table: SiteTable) -> Tensor:
        """Return the gradients left to the next epoch, zeros at first. Call it after :meth:`gradients`."""
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
        """Make the rows of this epoch the last known ones. Sites not reached in this pass keep their rows."""
        for table in self.sites.values():
            if table.written == self.passes:
                table.kept = True
            # ``now`` turns for all tables, so a table that this pass did not reach must have its last rows in
            # the half that becomes the last one.
            elif table.kept and not table.once:
                self.current(table).copy_(self.last(table))
        self.now = 1 - self.now

    def share(self, table: SiteTable) -> None:
        """Make rows of this pass those of any other one too, where all forward passes share them.

        Chunks read such rows once, and not in the pass in which the merged chunk did: see [Note: halves].
        """
        self.last(table).copy_(self.current(table))
        table.kept = True

    def drift(self, world: Exchange) -> float:
        """Return the mean relative change of rows since the last kept epoch. All ranks call it.

        Call it after an exact pass was kept.
        """
        mine = torch.zeros(2, dtype=torch.float64, device=self.device)
        for table in self.sites.values():
            if table.written == self.passes and table.known:
                new, old = self.last(table), self.current(table)
                length = new.norm().double()
                there = length > 0
                # A sum and a count, since parts and stages have unequal numbers of sites. Both stay on the
                # device, which the host waits for once.
                share = torch.where(there, (new - old).norm().double() / length, 0.0)
                mine += torch.stack([share, there.double()])
        moved, sites = world.all_reduce(mine, action="drift", kind="statistics").tolist()
        return float(moved / max(sites, 1))

    def call(self, chunk: Chunk, key: Hashable) -> Hashable:
        """Return a key of this call. A chunk may use the same key several times, so calls are numbered."""
        counts = self._calls.setdefault(chunk.number, Counter())
        counts[key] += 1
        return key, counts[key]

    def came(self, chunk: Chunk, place: Place) -> None:
        """Record that a chunk has reached a read or a sum in this pass."""
        self._came[place, chunk.number] += 1

    def end(self) -> None:
        """Sum the chunks' statistics over the parts, for the next epoch to read. All ranks call it.

        Raises:
            ModelError: If only some chunks have reached a place: they then read rows that the others did not
                write.

        Cost:
            One all-reduce for each operation, of all statistics together.
        """
        # Each chunk is compared with the next one, the last with the first. If one differs from any other,
        # some neighbour in this ring differs from it.
        for (place, chunk), many in self._came.items():
            following = (chunk + 1) % len(self.reads)
            if self._came[place, following] != many:
                raise ModelError(
                    "all chunks of a part to read their neighbours at the same places",
                    f"a place of chunk {chunk} that chunk {following} does not come to",
                    where=place[0],
                    hint="a forward that does the same for every piece of the graph",
                )
        for op in ("sum", "max", "min"):
            # By text, because ranks met the keys in different orders: their chunks run in different orders.
            keys = sorted((key for key, (how, _) in self.gathered.items() if how == op), key=repr)
            if not keys:
                continue
            parts = [self.gathered[key][1] for key in keys]
            # In double, which holds counts exactly up to 2^53, so that sums of all types travel in one
            # message.
            flat = torch.cat([part.reshape(-1).double() for part in parts])
            summed = self.channel.all_reduce(flat, op, action=f"statistics, epoch {self.epoch}")
            for key, part, values in zip(
                keys, parts, summed.split([part.numel() for part in parts]), strict=True
            ):
                self.statistics[key] = values.view(part.shape).to(part.dtype)
        self.gathered = {}


@dataclass(frozen=True)
class ChunkRows(HaloExchange):
    """Halo exchange of one chunk: its halo is what its edges read in other chunks and in other parts."""

    chunk: Chunk | None = None
    tables: Tables | None = None

    def start_gather(self, rows: Tensor, site: Site, label: str, direction: int) -> Work:
        """Start to fetch the rows that this chunk reads in other chunks and parts."""
        chunk, tables = self._known()
        assert tables.provider is not None
        return tables.provider.start_gather(chunk, rows.detach(), site, label)

    def start_reduce(self, away: Tensor | HaloSums, site: Site, label: str, direction: int) -> Work:
        """Pass on the gradients of the rows that this chunk read; those of old rows need not be computed."""
        chunk, tables = self._known()
        # A sum at neighbours (P^T) in forward would need the later chunks' summands, which do not exist yet.
        if direction == 2:
            raise ModelError(
                "chunks to read their neighbours' rows",
                "a layer that adds to its neighbours' rows (messages from target to source)",
                where=site.name,
                hint="chunks=1, or the edges turned round before training",
            )
        assert tables.provider is not None
        given = GivenRows(away) if isinstance(away, Tensor) else away
        return tables.provider.start_reduce(chunk, given, site, label)

    def add(self, received: Tensor, own: Tensor) -> Tensor:
        """Add the received gradients to those of own rows, in place."""
        return own.add_(received)

    def _known(self) -> tuple[Chunk, Tables]:
        assert self.chunk is not None
        assert self.tables is not None
        return self.chunk, self.tables


class ChunkChannel:
    """A chunk's channel to all chunks of all parts; an interceptor uses it in place of a real channel.

    Args:
        chunk: The chunk.
        tables: Tables of its rank.
    """

    exact = False
    """Rows of other chunks may be those of an earlier epoch."""

    def __init__(self, chunk: Chunk, tables: Tables) -> None:
        self.chunk, self.tables = chunk, tables
        self.where: Callable[[], str] = str
        """Returns the name of the running layer, for error messages; set by a caller that knows it."""
        count = len(tables.chunks.pieces)
        # For the model each chunk is a rank of its own, so a layer that sees ``size > 1`` asks for all rows'
        # sums.
        self.rank, self.size = tables.channel.rank * count + chunk.number, tables.channel.size * count

    def start(self, rows: Tensor, request: ExchangeRequest) -> Work:
        """Return no rows where nothing is to be sent; otherwise raise ``ModelError``."""
        return no_rows(
            rows, request, "chunks to read their neighbours' rows by the edges into them", self.where()
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
        """Return the sum, maximum or minimum over all chunks of all parts, or the last one known."""
        assert self.tables.provider is not None
        return self.tables.provider.reduce(self.chunk, tensor.detach(), op, action, kind, key)
