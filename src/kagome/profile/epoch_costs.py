"""Epoch costs: a model's seconds and exchanged bytes per row and edge, from epochs on small graphs.

Where it sits: ``autoplan.workload`` scales them to parts. ``memory.estimate`` does the same for memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from scipy.optimize import nnls
from torch import nn

from kagome.comm.codec import Codec
from kagome.comm.in_process.replay_channel import ReplayChannel
from kagome.comm.in_process.thread_group import ThreadGroup
from kagome.components.parallelize import CPU, PartOptions, parallelize
from kagome.config import Parallel
from kagome.errors import KagomeError
from kagome.graph.partition.covers import halo_cover
from kagome.graph.partition.partition import Partition, extract, kinds_of
from kagome.graph.structure.attributes import Sorted
from kagome.halo.compressed_exchange import CompressedExchange
from kagome.model.copies import copied
from kagome.planner.cost_model import CostRates, Timed, computing
from kagome.profile.part_size import counts_of
from kagome.profile.steady_times import again, clock, steady
from kagome.profile.synthetic_parts import drawn, made_pieces

SETTLED = 2
"""Epochs until all that a run keeps between epochs exists."""
WHOLE = Parallel()
"""Settings under which rows are exchanged whole and unencoded."""
UNEVEN = (128, 384, 1024)
"""Vertices at which the graph for encoded rows is cut; long messages make rounding negligible."""
SAMPLE = 4096, 128
"""Rows and columns that are encoded to time the codec."""
PATIENCE = 3600.0
"""Seconds that a rank waits until it may run by itself."""
EVEN = 64
"""Vertices of the graph on which transposes are counted; any small power of two of slices divides it."""


@dataclass(frozen=True)
class EpochCost:
    """The cost of one epoch on one rank.

    Args:
        seconds: Seconds of forward and backward.
        meanwhile: The seconds of these in which rows were in flight and the rank did not wait for them.
        spans: The seconds between successive collectives of all ranks.
        bytes: Bytes sent to peers, by kind.
    """

    seconds: float
    meanwhile: float
    spans: tuple[float, ...]
    bytes: Mapping[str, int]


def epochs(
    model: nn.Module,
    pieces: Sequence[Partition],
    count: int,
    options: PartOptions,
    cut: Parallel = WHOLE,
    *,
    turns: int = 0,
) -> list[list[EpochCost]]:
    """Run epochs of copies of a model without weight updates, one rank per piece, as threads.

    Args:
        model: The model; it stays unchanged.
        pieces: The part of each rank.
        count: The number of epochs that all ranks run together.
        options: How the model runs.
        cut: How it is split: the codec, and the number of feature slices.
        turns: The number of further epochs of each rank by itself, on the messages that it received in the
            last epoch before; more are run until two agree. Only these show what a rank computes, because
            threads of one process wait for each other and crowd the machine.

    Returns:
        For each rank the costs of its ``count + turns`` epochs, or of more.
    """
    # Threads share the process, so each rank needs weights and gradients of its own.
    models = [copied(model).train() for _ in pieces]
    group, seconds = ThreadGroup(len(pieces), timeout=PATIENCE), clock()

    def work(rank: int) -> list[EpochCost]:
        channel = ReplayChannel(group, rank, seconds)
        return _epochs(models[rank], pieces[rank], channel, count, turns, options, cut)

    return [work(0)] if len(pieces) == 1 else group.run(lambda c: work(c.rank))


def _epochs(
    model: nn.Module,
    piece: Partition,
    channel: ReplayChannel,
    count: int,
    turns: int,
    options: PartOptions,
    cut: Parallel,
) -> list[EpochCost]:
    exchange = CompressedExchange(channel, cut, options.seed)
    # The same objects as in a run, with threads in place of processes.
    options = replace(options, device=CPU, tensor=cut.tensor, partial_sums=cut.partial_sums_sent)
    net = parallelize(model, piece, exchange, options)
    found: list[EpochCost] = []

    def one() -> None:
        before, meanwhile, begun = dict(channel.bytes), channel.meanwhile, channel.clock()
        # `met` has the time of each collective; between two of them a rank computes without the others:
        #    begun ── span 0 ── met[0] ── span 1 ── met[1] ── ... ── span m ── end
        channel.met.clear()
        out = net.forward(len(found) + 1, training=True)
        # Any loss will do for time and bytes. The token makes backward visit each exchange.
        loss = out.float().square().mean() + net.scope.forward.forward_pass.token
        loss.backward()
        sent = {kind: value - before[kind] for kind, value in channel.bytes.items()}
        times = begun, *channel.met, channel.clock()
        spans = tuple(after - before for before, after in pairwise(times))
        found.append(EpochCost(times[-1] - begun, channel.meanwhile - meanwhile, spans, sent))
        model.zero_grad()

    with net:
        for epoch in range(count):
            # By the last common epoch constant rows are cached, and are not sent again.
            with channel.recording() if turns and epoch == count - 1 else nullcontext():
                one()
        # One rank at a time; the others wait at the end of each turn and leave the core alone.
        for mine in channel.turn() if turns else ():
            while mine and again([epoch.seconds for epoch in found[count:]], turns):
                with channel.replaying():
                    one()
    return found


def halo_bytes(model: nn.Module, part: Partition, options: PartOptions) -> tuple[float, float]:
    """Measure the halo bytes of an epoch: forward per row sent, and backward per row read.

    Args:
        model: The model.
        part: The part that attributes are drawn from.
        options: How the model runs.
    """
    pieces = made_pieces(part, several=True, loops=False, seed=options.seed)
    # Unencoded rows have whole numbers of bytes.
    sent, halo = _by_row(model, pieces, options, WHOLE)
    return float(round(sent)), float(round(halo))


def summed_share(model: nn.Module, part: Partition, options: PartOptions) -> float:
    """Measure the share of an epoch's halo bytes that are of rows which partial sums can replace.

    Args:
        model: The model.
        part: The part that attributes are drawn from.
        options: How the model runs.
    """
    pieces = made_pieces(part, several=True, loops=False, seed=options.seed)
    cuts = Parallel(partial_sums="off"), Parallel(partial_sums="on")
    rows, sums = (
        sum(each[-1].bytes["halo"] for each in epochs(model, pieces, SETTLED, options, cut)) for cut in cuts
    )
    read = fewer = 0
    for piece in pieces:
        source, target = piece.edge_index.numpy()
        cover = halo_cover(source, target, piece.own.numel(), piece.recv_counts)
        read, fewer = read + int(cover.read.sum()), fewer + int(cover.counts.sum())
    # Rows of both kinds have the widths of the model. All halo bytes are in proportion to rows:
    #    rows = c * read          sums = c * ((1 - share) * read + share * fewer)
    return 0.0 if not rows or read == fewer else (rows - sums) / rows * read / (read - fewer)


def _by_row(
    model: nn.Module, pieces: Sequence[Partition], options: PartOptions, cut: Parallel
) -> tuple[float, float]:
    found = [each[-1].bytes["halo"] for each in epochs(model, pieces, SETTLED, options, cut)]
    counts = [counts_of(piece) for piece in pieces]
    # bytes = forward * sent + backward * halo, over pieces whose numbers vary independently.
    units = np.array([[one.sent, one.halo] for one in counts], dtype=float)
    rates = np.linalg.lstsq(units, np.array(found, dtype=float), rcond=None)[0]
    return float(rates[0]), float(rates[1])


def coded(model: nn.Module, part: Partition, options: PartOptions) -> tuple[float, float]:
    """Measure halo bytes as :func:`halo_bytes` does, with rows encoded at one bit per number."""
    data = drawn(part, UNEVEN[-1], 4 * UNEVEN[-1], options.seed)
    # Three parts of 128, 256 and 640 vertices: with equal parts both rates could not be told apart.
    owner = torch.bucketize(torch.arange(UNEVEN[-1]), torch.tensor(UNEVEN[:-1]), right=True)
    pieces = [extract(data, owner, rank, len(UNEVEN)) for rank in range(len(UNEVEN))]
    return _by_row(model, pieces, options, Parallel(codec="onebit"))


def coding(turns: int = 3) -> tuple[float, float]:
    """Measure the seconds to encode a byte of floats at one bit per number and to decode it again.

    Returns:
        The seconds, and the relative difference of two measurements.
    """
    rows, codec = torch.rand(SAMPLE, generator=torch.Generator().manual_seed(0)), Codec("onebit")
    message = torch.empty(codec.size(*SAMPLE, rows.dtype), dtype=torch.uint8)
    # Draws of stochastic rounding depend on the row's id.
    row_ids, out, seconds = torch.arange(SAMPLE[0]), torch.empty_like(rows), clock()
    found: list[float] = []
    while again(found, turns):
        begun = seconds()
        codec.encode(rows, None, row_ids, 0, message, where="a sample")
        codec.decode(message, out)
        found.append(seconds() - begun)
    took, spread = steady(found)
    return took / rows.nbytes, spread


def transposes(model: nn.Module, part: Partition, options: PartOptions) -> tuple[float, float] | None:
    """Measure the bytes per vertex of the transposes in a settled epoch.

    Args:
        model: The model.
        part: The part that attributes are drawn from.
        options: How the model runs.

    Returns:
        ``a, b`` of the ``a (T - 1) / T + b (T - 1)`` bytes that T ranks send, fitted on two and four ranks:
        ``a`` for columns that are split between ranks, ``b`` for columns that every rank has (attention with
        fewer heads than ranks). None if the model makes no transpose.
    """
    if not options.fast or options.amp:
        return None  # the engine refuses feature slices here
    data = drawn(part, EVEN, 4 * EVEN, options.seed)

    def sent(count: int) -> float:
        # Contiguous equal shares: 64 vertices in 2 or in 4.
        owner = torch.arange(EVEN) * count // EVEN
        pieces = [extract(data, owner, rank, count) for rank in range(count)]
        found = epochs(model, pieces, SETTLED, options, Parallel(tensor=count))
        return sum(each[-1].bytes["transpose"] for each in found) / EVEN / (count - 1)

    try:
        two, four = sent(2), sent(4)
    except KagomeError:
        return None
    # `sent` has divided by T - 1: two = a / 2 + b and four = a / 4 + b.
    shared = max(0.0, 4 * (two - four))
    return (shared, max(0.0, two - shared / 2)) if two else None


def timed(
    model: nn.Module,
    cuts: Sequence[Sequence[Partition]],
    options: PartOptions,
    *,
    slices: int = 1,
    turns: int = 3,
) -> Timed:
    """Time ranks one by one, on parts of graphs or in feature slices.

    Args:
        model: The model; for slices one that makes transposes.
        cuts: Graphs of different sizes, each cut into parts. With slices, rows and edges are those of all
            ranks together, and seconds are those of the slowest rank between any two exchanges.
        options: How the model runs.
        slices: The number of feature slices.
        turns: The number of settled epochs of each rank; more are run until two agree, and those two count.
    """
    units, seconds, free, uneven, spreads = [], [], [], [], []
    for pieces in cuts:
        ran = epochs(model, pieces, SETTLED, options, Parallel(tensor=slices), turns=turns)
        found = [each[SETTLED:] for each in ran]
        free += [sum(e.meanwhile for e in each) / sum(e.seconds for e in each) for each in found]
        counts = [counts_of(piece) for piece in pieces]
        # Of each rank the two fastest epochs, which `steady` counts too.
        agreed = [sorted(each, key=lambda epoch: epoch.seconds)[:2] for each in found]  # [ranks][2]
        spans = np.array([np.mean([epoch.spans for epoch in each], axis=0) for each in agreed])
        # spans is [ranks, spans]. At each exchange all wait for the slowest, so the maxima over ranks add up.
        longest = float(spans.max(axis=0).sum())
        whole, apart = zip(*(steady([epoch.seconds for epoch in each]) for each in found), strict=True)
        spreads.append(max(apart))
        uneven.append(longest / max(whole))
        # Slices: all ranks work on the same rows, so each graph gives one equation.
        if slices > 1:
            units.append([1.0, sum(one.rows for one in counts), sum(one.edges for one in counts), 0.0])
            seconds.append(longest)
        else:
            units += [[1.0, one.rows, one.edges, one.sent + one.halo] for one in counts]
            seconds += whole
    # seconds = none + row * rows + edge * edges + exchanged * (sent + halo), over all parts of all graphs.
    none, row, edge, exchanged = _fitted(units, seconds)
    shares = min(1.0, float(np.median(free))), max(1.0, float(np.median(uneven)))
    return Timed(none, row, edge, exchanged, *shares, len(found[0][-1].spans) - 1, spread=max(spreads))


def shares_of(sample: Partition, count: int) -> list[Partition]:
    """Cut a graph into equal shares of its vertices, in their order."""
    n = sample.own.numel()
    data = Sorted(sample.edge_index, n, kinds_of(sample))
    owner = torch.arange(n) * count // n
    return [extract(data, owner, rank, count) for rank in range(count)]


def _fitted(units: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Fit the seconds of each unit, which are at least 0."""
    # Relative errors count, not seconds, so that small parts are predicted as well as large ones.
    table = np.array(units) / np.array(seconds)[:, None]
    # Non-negative least squares: noise may make a rate negative, with which large parts would cost less.
    scale = np.where(table.any(axis=0), table.max(axis=0), 1.0)
    solved, _ = nnls(table / scale, np.ones(len(seconds)))
    return [float(each) for each in solved / scale]


def alone(
    model: nn.Module, sample: Partition, rates: CostRates, options: PartOptions, most: int
) -> tuple[float, float]:
    """Measure the speed of a single rank with all threads, relative to what the rates predict.

    Args:
        model: The model.
        sample: A graph for one rank.
        rates: The rates of one rank among others, with the current number of threads.
        options: How the model runs.
        most: The number of threads that a single rank would have.

    Returns:
        The speed, at least 1, and the relative difference of two measurements.
    """
    share = torch.get_num_threads()
    torch.set_num_threads(max(most, share))
    try:
        (found,) = epochs(model, [sample], SETTLED, options, turns=3)
    finally:
        torch.set_num_threads(share)
    took, spread = steady([epoch.seconds for epoch in found[SETTLED:]])
    return max(1.0, computing(rates, sample.own.numel(), sample.edge_index.size(1)) / took), spread
