"""Chunking: a rank's part cut into chunks, each with its interceptor, and what supplies their halo rows.

Where it sits: ``chunk_engine`` makes one :class:`Chunking`, which holds all that depends on ``cross_chunk``.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from kagome.comm.channel import Channel
from kagome.components.parallelize import PartOptions, interceptor_of
from kagome.config import Parallel
from kagome.errors import ConfigError
from kagome.graph.partition.chunks import Chunk, Chunks, ChunkStep, alone, cut_part, order_of, plan_steps
from kagome.graph.partition.merged_chunks import at_once, bare, together
from kagome.graph.partition.partition import Partition
from kagome.halo.compressed_exchange import CompressedExchange
from kagome.historical.isolated_chunk import IsolatedChannel
from kagome.historical.provider import ExactRows, HistoricalRows, Left
from kagome.historical.tables import ChunkChannel, ChunkRows, Tables
from kagome.intercept.interceptor import Interceptor

FEW = 64
"""Number of chunks that is allowed for a graph of any size."""
LARGE = 20_000_000
"""Number of edges of a part above which ``auto`` uses the streaming partitioner to cut it into chunks."""


@dataclass(frozen=True)
class Chunking:
    """A rank's part cut into chunks.

    Args:
        whole: The interceptor of all chunks at once, with all edges: evaluation and exact epochs run it.
        pieces: The interceptors that other epochs run one after the other: one for each chunk, without the
            edges from outside it for ``cross_chunk="drop"``; ``whole`` alone where nothing runs chunk by
            chunk.
        tables: The rows and gradients that outlive a chunk; None where the part is one chunk.
        exchange: The exchange with the other parts.
        settings: How to split.
        seed: The seed of the run.
    """

    whole: Interceptor
    pieces: tuple[Interceptor, ...]
    tables: Tables | None
    exchange: CompressedExchange
    settings: Parallel
    seed: int
    _planned: dict[tuple[int, bool, bool], tuple[ChunkStep, ...]] = field(default_factory=dict, repr=False)

    @property
    def count(self) -> int:
        """Number of chunks of the part."""
        return self.settings.chunks or 1

    @property
    def together(self) -> bool:
        """Whether all chunks run at once in every epoch, as one piece of the program."""
        return len(self.pieces) < self.count

    @property
    def scopes(self) -> tuple[Interceptor, ...]:
        """All interceptors, each once, that of all chunks at once first."""
        return tuple(dict.fromkeys((self.whole, *self.pieces)))

    def text(self) -> str:
        """Describe what happens to edges between chunks; empty if there is one chunk. All ranks call it."""
        if self.count == 1:
            return ""
        old = f"up to {self.settings.history_epochs} epochs old"
        words = {
            "history": f"rows of later chunks are {old} and pass no gradient on; sums over all vertices are "
            "the last epoch's",
            "drop": "they are dropped in training; sums over all vertices are told from a chunk's own",
            "exact": "all chunks run at once",
        }
        return f"; {self.cut_share():.0%} of the edges lie between chunks: {words[self.settings.cross_chunk]}"

    def cut_share(self) -> float:
        """Return the share of edges that start in another chunk or part. A whole graph group calls it."""
        # Local ids from `own` on are rows of other chunks or parts.
        source, own = self.whole.views[0].edge_index[0], self.whole.own
        found = torch.stack([(source >= own).sum(), torch.tensor(source.numel(), device=source.device)])
        among, edges = self.exchange.all_reduce(found, action="count cut edges", kind="other").tolist()
        return float(among / max(edges, 1))

    def program_order(self, epoch: int, part: int) -> tuple[int, ...]:
        """Return the chunk numbers in the order in which an epoch's program runs them."""
        return (0,) if self.together else self.order(epoch, part)

    def order(self, epoch: int, part: int) -> tuple[int, ...]:
        """Return the chunks of a part in the order of an epoch."""
        shuffle = self.settings.shuffle_chunks
        return order_of(self.count, seed=self.seed, epoch=epoch, part=part, shuffle=shuffle)

    def history(self, epoch: int, *, refresh: bool, stale: bool) -> HistoricalRows:
        """Return the provider of halo rows for an epoch with history.

        Args:
            epoch: The epoch, counted from 1.
            refresh: Whether its rows are kept for later epochs.
            stale: Whether historical rows receive the gradients of the epoch before.
        """
        assert self.tables is not None
        # The owner receives stale gradients of a halo row even if all its readers ran earlier.
        steps = self._steps(epoch, refresh=refresh or stale, scaled=not stale)
        left = Left(self.tables, self.tables.reads, self._next(epoch)) if stale else None
        return HistoricalRows(self.tables, steps, left)

    def exact(self, epoch: int, *, training: bool, stale: bool) -> ExactRows:
        """Return the provider of halo rows for an epoch in which all chunks run at once.

        Args:
            epoch: The epoch, counted from 1.
            training: Whether a backward follows; False in evaluation.
            stale: Whether the next epoch may use gradients of this one.
        """
        assert self.tables is not None
        left = None
        if stale:
            steps = self._next(epoch)
            steps = steps if self.together else (at_once(steps),)
            left = Left(self.tables, (self.tables.whole.places,), steps)
        return ExactRows(self.tables, left, trains=training)

    def _next(self, epoch: int) -> tuple[ChunkStep, ...]:
        """Return the steps of the epoch after this one, by which gradients are left for it."""
        return self._steps(epoch + 1, refresh=True, scaled=False)

    def _steps(self, epoch: int, *, refresh: bool, scaled: bool) -> tuple[ChunkStep, ...]:
        """Plan which rows each step of an epoch exchanges; the epoch before asks for the same plan."""
        tables, key = self.tables, (epoch, refresh, scaled)
        assert tables is not None
        if key not in self._planned:
            # A plan is used in its own epoch and, for gradients left, in the epoch before; older ones are
            # dropped.
            for old in [other for other in self._planned if other[0] < epoch - 1]:
                del self._planned[old]
            # Each rank computes the orders of all parts from the seed, so sender and receiver plan alike
            # without a message.
            orders = [self.order(epoch, part) for part in range(tables.channel.size)]
            steps = plan_steps(
                tables.chunks,
                orders[tables.channel.rank],
                orders,
                tables.halo_chunk,
                tables.sent_read_by,
                scale=self.settings.cross_chunk_scale if scaled else 1.0,
                refresh=refresh,
            )
            self._planned[key] = (at_once(steps),) if self.together else steps
        return self._planned[key]


def chunked(part: Partition, channel: Channel, settings: Parallel, options: PartOptions) -> Chunking:
    """Cut a part into chunks. All ranks of a graph group call it.

    Args:
        part: This rank's part.
        channel: The channel to the ranks of the other parts.
        settings: How to split, with every choice made.
        options: How the model runs.

    Raises:
        ConfigError: On all ranks, if there are more chunks than the graph has vertices.

    Cost:
        A copy of the part's edges, and where epochs run chunk by chunk one of the part besides.
    """
    count, seed, device = settings.chunks or 1, options.seed, options.device
    if count == 1:
        exchange = CompressedExchange(channel, settings, seed, late=channel.patient)
        one = interceptor_of(part, exchange, options)
        return Chunking(one, (one,), None, exchange, settings, seed)
    _refuse_empty(part, count)
    drops = settings.cross_chunk == "drop"
    # Independent chunks read no rows of other parts either.
    exchange = CompressedExchange(channel, Parallel() if drops else settings, seed, late=channel.patient)
    # The memory bound is for feature slices, which chunks exclude.
    options = replace(options, sums_only=options.sums_only and not drops, memory=None)
    method: str = settings.partitioner
    if method == "auto":
        method = "metis" if part.edge_index.size(1) <= LARGE else "streaming"
    chunks: Chunks = cut_part(part, count, method=method, seed=seed)
    whole = together(part, chunks)
    # Epochs with history run at once too where a rank has all stages, because then nothing waits for a single
    # chunk: the same numbers in less time. Exact ones always do.
    single = settings.cross_chunk == "exact" or (settings.pipe == 1 and not drops)
    pieces = (whole,) if single else chunks.pieces
    tables = Tables(bare(chunks), whole, pieces, exchange, device)
    scope = _reading(whole, tables, options)
    if single:
        scopes = [scope]
    elif drops:
        scopes = [_isolated(piece, tables, options) for piece in pieces]
    else:
        scopes = [_reading(piece, tables, options) for piece in pieces]
    return Chunking(scope, tuple(scopes), tables, exchange, settings, seed)


def _reading(piece: Chunk, tables: Tables, options: PartOptions) -> Interceptor:
    """Return the interceptor of a chunk, or of all at once, that reads rows of other chunks from tables."""
    none = torch.empty(0, dtype=torch.int64, device=tables.device)
    end = ChunkChannel(piece, tables)
    # No send lists: the epoch's provider exchanges rows with other parts, by the plan of the chunk steps.
    plan = ChunkRows(piece.own, piece.reads.numel(), none, (), (), end, None, None, piece, tables)
    found = interceptor_of(piece.part, end, options, rows=plan)
    end.where = found.where
    return found


def _isolated(piece: Chunk, tables: Tables, options: PartOptions) -> Interceptor:
    """Return the interceptor of a chunk without the edges that come from outside it."""
    part, count = alone(piece), len(tables.chunks.pieces)
    # Each chunk of each part counts as a rank of its own, which is alone with its rows.
    rank, size = tables.channel.rank * count + piece.number, tables.channel.size * count
    end = IsolatedChannel(rank, size, piece.own, part.num_nodes)
    found = interceptor_of(part, end, options)
    end.where = found.where
    return found


def _refuse_empty(part: Partition, count: int) -> None:
    """Refuse more chunks than the graph has vertices; up to ``FEW`` chunks are always allowed."""
    if count > max(part.num_nodes, FEW):
        raise ConfigError(
            f"a vertex or more for each of parallel.chunks={count:,} pieces of a part",
            f"a whole graph of {part.num_nodes:,} vertices",
            hint=f"--parallel.chunks {max(1, min(part.num_nodes // 100, 16))}",
        )
