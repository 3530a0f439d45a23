"""All-to-all: turns vertex slices of rows into feature slices, and feature slices into vertex slices.

Where it sits: ``edge_layout`` has one for the rows and one for the edges of a tensor group;
``deferred.sliced_reduce`` calls it at a site. The input is all columns of own rows and the output some
columns of all rows. Nothing is padded.

::

      vertex slices                       feature slices, all V rows
    rank 0  [n_0, D] ┐                 ┌ rank 0  [V, d_0]
    rank 1  [n_1, D] ┼── split ──>     ┤ rank 1  [V, d_1]      rank t sends n_t (D - d_t) numbers,
    rank 2  [n_2, D] ┘   <── gather    └ rank 2  [V, d_2]      all ranks V D - sum of n_t d_t
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kagome.comm.exchange import Exchange, Work
from kagome.halo.exchange import through
from kagome.halo.forward_pass import ForwardPass, Site

SPLIT, SPLIT_BACK, GATHER, GATHER_BACK = 4, 5, 6, 7
"""Directions of an exchange, in the headers that ranks compare and for codecs. Gradients have odd numbers."""


@dataclass(frozen=True)
class SliceCut:
    """The columns that each rank takes; several ranks may take the same column.

    Args:
        begins: First column of each rank.
        ends: One past the last column of each rank.
        width: Number of columns in all.
    """

    begins: tuple[int, ...]
    ends: tuple[int, ...]
    width: int

    def taken(self, rank: int) -> int:
        """Return how many columns a rank takes."""
        return self.ends[rank] - self.begins[rank]

    def of(self, rank: int) -> slice:
        """Return the columns of a rank as a slice."""
        return slice(self.begins[rank], self.ends[rank])

    @property
    def overlaps(self) -> bool:
        """Whether several ranks take the same column."""
        return sum(self.ends) - sum(self.begins) > self.width


def even(width: int, ranks: int) -> SliceCut:
    """Divide columns as evenly as possible; the first ranks take one more where they do not divide."""
    # Rounded up, so that the first ranks get the additional columns. Ranks beyond ``width`` get empty ranges.
    bounds = [(width * rank + ranks - 1) // ranks for rank in range(ranks + 1)]
    return SliceCut(tuple(bounds[:-1]), tuple(bounds[1:]), width)


def everything(width: int, ranks: int) -> SliceCut:
    """Return the cut in which every rank takes all columns."""
    return SliceCut((0,) * ranks, (width,) * ranks, width)


def by_head(heads: int, each: int, ranks: int) -> tuple[SliceCut, SliceCut]:
    """Give whole heads to each rank; with fewer heads than ranks, split the columns of a head.

    Args:
        heads: Number of heads.
        each: Number of columns of a head.
        ranks: Number of ranks.

    Returns:
        The cut of ``heads * each`` columns, and the cut of the heads that each rank touches.
    """
    # A rank with whole heads needs the edge weights of those heads alone; those of a split head go to
    # several.
    if heads >= ranks or not heads:
        cut = even(heads, ranks)
        columns = SliceCut(
            tuple(b * each for b in cut.begins), tuple(e * each for e in cut.ends), heads * each
        )
        return columns, cut
    begins, ends, touched = [], [], []
    for head in range(heads):
        # Of 2 heads of 6 columns on 5 ranks:
        #
        #     rank       0      1      2      3      4
        #     head       0      0      0      1      1
        #     columns    0 1    2 3    4 5    6-8    9-11
        members = [rank for rank in range(ranks) if rank * heads // ranks == head]
        inside = even(each, len(members))
        begins += [head * each + begin for begin in inside.begins]
        ends += [head * each + end for end in inside.ends]
        touched += [head] * len(members)
    columns = SliceCut(tuple(begins), tuple(ends), heads * each)
    return columns, SliceCut(tuple(touched), tuple(head + 1 for head in touched), heads)


@dataclass(frozen=True, eq=False)
class RowBlock:
    """Rows that are exchanged together.

    Args:
        all: Their indices among all ranks' rows, ascending.
        own: Indices of those that this rank owns, among its own rows.
        counts: Number of them that each rank owns.
    """

    all: Tensor
    own: Tensor
    counts: tuple[int, ...]


class AllToAll:
    """The exchange between vertex slices and feature slices; each direction is the other's gradient.

    Args:
        counts: Rows of each rank of the tensor group.
        channel: Channel to these ranks.
        device: Device of the rows.
    """

    def __init__(self, counts: Sequence[int], channel: Exchange, device: torch.device | str = "cpu") -> None:
        self.counts, self.channel, self.device = tuple(counts), channel, device
        self.total = sum(self.counts)

    def split(self, rows: Tensor, cut: SliceCut, forward_pass: ForwardPass, name: str) -> Tensor:
        """Turn all columns of own rows into this rank's columns of all rows, by rank; with gradient.

        Shapes:
            ``[n, D]`` -> ``[V, d]``.

        Cost:
            Sends ``n (D - d)`` numbers where no column is taken twice, and receives ``(V - n) d``.
        """
        site = forward_pass.begin(name, grad=rows.requires_grad)
        return through(
            rows,
            forward_pass,
            lambda r: self.start_split(r, cut, site, SPLIT).wait(),
            lambda g: self.start_gather(g, cut, site, SPLIT_BACK).wait(),
        )

    def gather(self, part: Tensor, cut: SliceCut, forward_pass: ForwardPass, name: str) -> Tensor:
        """Turn this rank's columns of all rows into all columns of own rows; with gradient.

        Shapes:
            ``[V, d]`` -> ``[n, D]``.

        Cost:
            Sends ``(V - n) d`` numbers, and receives ``n (D - d)``.
        """
        site = forward_pass.begin(name, grad=part.requires_grad)
        return through(
            part,
            forward_pass,
            lambda p: self.start_gather(p, cut, site, GATHER).wait(),
            lambda g: self.start_split(g, cut, site, GATHER_BACK).wait(),
        )

    def row_block(self, places: Tensor) -> RowBlock:
        """Return the block of some rows, given by ascending index among all ranks' rows."""
        # The places are ascending, and each rank owns a range of them: one search finds all borders.
        ends = torch.tensor(self.counts, device=places.device).cumsum(0)
        until = torch.searchsorted(places, ends).tolist()
        counts = tuple(end - begin for begin, end in zip([0, *until], until, strict=False))
        rank = self.channel.rank
        mine = places[until[rank] - counts[rank] : until[rank]]
        return RowBlock(places, mine - sum(self.counts[:rank]), counts)

    @cached_property
    def _places(self) -> Tensor:
        """Indices of all rows, with which codecs seed their random draws."""
        return torch.arange(self.total, device=self.device)

    @cached_property
    def _own_places(self) -> Tensor:
        """Indices of own rows, repeated once for each rank."""
        return self._repeated(self._places, self.counts)

    def _repeated(self, places: Tensor, counts: Sequence[int]) -> Tensor:
        """Return this rank's part of some indices that are ordered by rank, repeated once for each rank."""
        mine: Tensor = places.split(tuple(counts))[self.channel.rank]
        # Each peer gets other columns of the same rows.
        return mine.repeat(self.channel.size)

    def start_split(
        self, rows: Tensor, cut: SliceCut, site: Site, direction: int, row_block: RowBlock | None = None
    ) -> Work:
        """Start to send all columns of own rows and receive this rank's columns of all rows; no gradient.

        Shapes:
            rows ``[n, D]``; received ``[V, d]``, or ``[rows of the block, d]`` with a row block.
        """
        rank, ranks = self.channel.rank, range(self.channel.size)
        counts = self.counts if row_block is None else row_block.counts
        rows = rows if row_block is None else rows.index_select(0, row_block.own)
        mine, own = cut.taken(rank), counts[rank]
        request = site.request(
            _words(direction),
            direction,
            # Blocks of different widths are exchanged flat, so the counts are counts of numbers:
            #
            #     to peer p      [n, d_p] of own rows          from peer p    [n_p, d] in own columns
            [own * cut.taken(peer) for peer in ranks],
            [count * mine for count in counts],
            width=cut.width,
            row_ids=self._own_places
            if row_block is None
            else self._repeated(row_block.all, row_block.counts),
            kind="transpose",
            blocks=([(own, cut.taken(peer)) for peer in ranks], [(count, mine) for count in counts]),
        )
        numbers = torch.cat([rows[:, cut.of(peer)].reshape(-1) for peer in ranks])
        # The blocks of all ranks have one width here, so behind each other they are the matrix itself.
        work = self.channel.start(numbers, request)
        return _Shaped(work, lambda received: received.view(sum(counts), mine))

    def start_gather(
        self, part: Tensor, cut: SliceCut, site: Site, direction: int, row_block: RowBlock | None = None
    ) -> Work:
        """Start to send this rank's columns of all rows and receive all columns of own rows; no gradient.

        Shapes:
            part ``[V, d]``, or ``[rows of the block, d]`` with a row block; received ``[n, D]``, or the
            block's own rows.
        """
        rank, ranks = self.channel.rank, range(self.channel.size)
        counts = self.counts if row_block is None else row_block.counts
        mine, own = cut.taken(rank), counts[rank]
        comes = [own * cut.taken(peer) for peer in ranks]
        request = site.request(
            _words(direction),
            direction,
            [count * mine for count in counts],
            comes,
            width=cut.width,
            row_ids=self._places if row_block is None else row_block.all,
            kind="transpose",
            blocks=([(count, mine) for count in counts], [(own, cut.taken(peer)) for peer in ranks]),
        )
        work = self.channel.start(part.reshape(-1), request)

        def side_by_side(received: Tensor) -> Tensor:
            out = part.new_zeros(own, cut.width) if cut.overlaps else part.new_empty(own, cut.width)
            for peer, piece in enumerate(received.split(comes)):
                place, piece = out[:, cut.of(peer)], piece.view(own, cut.taken(peer))
                if cut.overlaps:
                    place += piece  # several ranks read these columns: their gradients add up
                else:
                    place.copy_(piece)
            return out

        return _Shaped(work, side_by_side)


class _Shaped(Work):
    """An exchange in progress, with a function that shapes what is received."""

    def __init__(self, work: Work, do: Callable[[Tensor], Tensor]) -> None:
        self._work, self._do = work, do

    def wait(self) -> Tensor:
        """Wait for the exchange and return the shaped rows."""
        return self._do(self._work.wait())

    @contextmanager
    def borrow(self) -> Iterator[Tensor]:
        """Yield the shaped rows for the length of a block."""
        with self._work.borrow() as received:
            yield self._do(received)


def _words(direction: int) -> str:
    way = "feature slices" if direction in (SPLIT, GATHER_BACK) else "vertex slices"
    return f"{way} {'forward' if direction in (SPLIT, GATHER) else 'backward'}"
