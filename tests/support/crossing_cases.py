"""Exchanges of all ranks in which each rank can say what each other sends, as it is or coded by hand.

Where it sits: ``test_crossing.py`` compares with it what crosses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kagome.comm.channel import Channel
from kagome.comm.codec import Codec
from kagome.comm.exchange import ExchangeRequest, SiteExchange
from kagome.config import CodecName, Parallel
from kagome.halo.compressed_exchange import CompressedExchange
from kagome.halo.epoch_rows import CompressionState, ExchangeMode

OWN, WIDTH, SEED = 9, 7, 5


def counts_between(size: int, pattern: str) -> list[list[int]]:
    """counts[a][b]: rows from a to b."""
    if pattern == "empty":
        return [[0] * size for _ in range(size)]
    if pattern == "one way":
        return [[5 if a == 0 and b != 0 else 0 for b in range(size)] for a in range(size)]
    return [[0 if a == b else (a * 5 + b * 3 + 1) % 8 for b in range(size)] for a in range(size)]


def site_exchange(
    epoch: int, row_ids: Tensor, direction: int = 0, site: Any = ("conv1.x", 1), training: bool = True
) -> SiteExchange:
    return SiteExchange(site, direction, epoch, training, row_ids, reads=row_ids.new_empty(0))


@dataclass(frozen=True)
class Case:
    """One exchange of all ranks: each of them can say what each other sends."""

    size: int
    pattern: str = "uneven"
    dtype: torch.dtype = torch.float32
    direction: int = 0
    epoch: int = 2
    training: bool = True
    site: Any = ("conv1.x", 1)
    width: int = WIDTH
    fixed: bool = False
    """The same rows in every epoch."""

    def counts(self, rank: int) -> tuple[list[int], list[int]]:
        counts = counts_between(self.size, self.pattern)
        return counts[rank], [counts[peer][rank] for peer in range(self.size)]

    def rows(self, rank: int) -> Tensor:
        """A rank's rows: all that it has, or, where gradients travel, those that it sends."""
        generator = torch.Generator().manual_seed(100 * rank + (0 if self.fixed else self.epoch))
        count = OWN if self.direction == 0 else sum(self.counts(rank)[0])
        drawn = torch.randn(count, self.width, generator=generator, dtype=torch.float64)
        return (100 * drawn if not self.dtype.is_floating_point else drawn).to(self.dtype)

    def index(self, rank: int) -> Tensor:
        """Which of its rows a rank sends, for each peer another choice; some go to several."""
        sends, _ = self.counts(rank)
        parts = [(torch.arange(count) * 2 + rank + peer) % OWN for peer, count in enumerate(sends)]
        return torch.cat(parts)

    def row_ids(self, rank: int) -> Tensor:
        """The vertices that are sent; gradients of one may come from several ranks."""
        return self.index(rank) + (1000 * rank if self.direction == 0 else 0)

    def site_exchange(self, rank: int) -> SiteExchange:
        return site_exchange(self.epoch, self.row_ids(rank), self.direction, self.site, self.training)

    def begin(self, carrier: CompressedExchange | Channel) -> Any:
        rank = carrier.rank
        sends, comes = self.counts(rank)
        index = self.index(rank) if self.direction == 0 else None
        request = ExchangeRequest(sends, comes, "halo of conv1.x", index=index, site=self.site_exchange(rank))
        return carrier.start(self.rows(rank), request)

    def sent(self, peer: int, rank: int) -> tuple[Tensor, Tensor]:
        """What a peer sends to a rank, and their ids."""
        sends, _ = self.counts(peer)
        first = sum(sends[:rank])
        place = slice(first, first + sends[rank])
        rows = self.rows(peer)
        rows = rows[self.index(peer)] if self.direction == 0 else rows
        return rows[place], self.row_ids(peer)[place]

    def plain(self, rank: int) -> Tensor:
        """What comes to a rank if nothing is coded."""
        return torch.cat([self.sent(peer, rank)[0] for peer in range(self.size)])

    def restored(self, peer: int, rank: int, name: CodecName) -> Tensor:
        """What a peer sends to a rank, coded and restored here."""
        codec, (rows, row_ids) = Codec(name), self.sent(peer, rank)
        message = torch.empty(codec.size(*rows.shape, rows.dtype), dtype=torch.uint8)
        codec.encode(rows, None, row_ids, draws(self.site_exchange(peer), peer), message, where="")
        return codec.decode(message, torch.empty_like(rows))

    def by_hand(self, rank: int, name: CodecName) -> Tensor:
        """What comes to a rank if it is coded."""
        return torch.cat([self.restored(peer, rank, name) for peer in range(self.size)])

    def bytes(self, rank: int, name: CodecName) -> int:
        sends, _ = self.counts(rank)
        return sum(Codec(name).size(count, self.width, self.dtype) for count in sends)


def draws(site: SiteExchange, rank: int) -> int:
    """Seed of the draws of a rank's exchange."""
    return CompressionState(Parallel(), SEED, ExchangeMode.of(Parallel())).draws_of(site, rank)


def compressed_exchange(channel: Channel, **settings: Any) -> CompressedExchange:
    return CompressedExchange(channel, Parallel(**settings), SEED)
