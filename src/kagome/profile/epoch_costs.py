"""Rates: what a model costs by row and edge, in seconds and in bytes that cross, from epochs on small graphs.

Where it sits: ``autoplan.workload`` scales them to parts; ``memory.estimate`` does the same for memory.
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
from kagome.config import Parallel
from kagome.deferred.lazy_tensor import EscapeError
from kagome.errors import KagomeError
from kagome.graph.partition.partition import Partition, extract, kinds_of
from kagome.graph.structure.attributes import Sorted
from kagome.halo.compressed_exchange import CompressedExchange
from kagome.intercept.hooks import install
from kagome.intercept.interceptor import Interceptor
from kagome.model.copies import copied
from kagome.model.exact.handlers import HANDLERS
from kagome.model.exact.layer_rules import apply_rules
from kagome.model.forward_call import ForwardCall
from kagome.planner.cost_model import CostRates, Timed, computing
from kagome.profile.part_size import counts_of
from kagome.profile.run_mode import RunMode
from kagome.profile.steady_times import again, clock, steady
from kagome.profile.synthetic_parts import drawn, made_pieces
from kagome.recompute.checkpoint import recompute

SETTLED = 2
"""Epochs until all that is kept for a run is there."""
WHOLE = Parallel()
"""Rows cross whole, as they are."""
UNEVEN = (128, 384, 1024)
"""Where a graph is cut on which coded rows are counted: messages long enough that rounding does not tell."""
SAMPLE = 4096, 128
"""Rows and columns that are coded to see how long that takes."""
PATIENCE = 3600.0
"""Seconds that a rank waits for its turn."""
EVEN = 64
"""Vertices of the graph on which transposes are counted: any small number of slices divides it."""


@dataclass(frozen=True)
class EpochCost:
    """One epoch of one rank.

    Args:
        seconds: Forward and backward.
        meanwhile: Of them, while rows were on their way that nobody had waited for yet.
        spans: The same from one exchange or sum of all ranks to the next, where it went on by itself.
        bytes: Sent to peers, by kind.
    """

    seconds: float
    meanwhile: float
    spans: tuple[float, ...]
    bytes: Mapping[str, int]


def epochs(
    model: nn.Module,
    pieces: Sequence[Partition],
    count: int,
    way: RunMode,
    cut: Parallel = WHOLE,
    *,
    turns: int = 0,
) -> list[list[EpochCost]]:
    """Train copies of a model for some epochs, weights as they are; a rank a piece, as threads.

    Args:
        model: Left as it is.
        pieces: What each rank has.
        count: Epochs of all ranks together.
        way: How the model will be run.
        cut: Its codec, and whether ranks take columns where they can.
        turns: Then so many of each rank by itself, or more until two agree, on what it heard in the last of
            those: only there are seconds what a rank computes, as threads of one process wait for each other
            and crowd the machine.

    Returns:
        Of each rank its ``count + turns`` epochs, or more.
    """

    def run(way: RunMode) -> list[list[EpochCost]]:
        models = [copied(model).train() for _ in pieces]
        group, seconds = ThreadGroup(len(pieces), timeout=PATIENCE), clock()

        def work(rank: int) -> list[EpochCost]:
            channel = ReplayChannel(group, rank, seconds)
            return _epochs(models[rank], pieces[rank], channel, count, turns, way, cut)

        return [work(0)] if len(pieces) == 1 else group.run(lambda c: work(c.rank))

    try:
        return run(way)
    except EscapeError:
        return run(replace(way, fast=False))  # as the engine does


def _epochs(
    model: nn.Module,
    piece: Partition,
    channel: ReplayChannel,
    count: int,
    turns: int,
    way: RunMode,
    cut: Parallel,
) -> list[EpochCost]:
    road = CompressedExchange(channel, cut, way.seed)
    scope = Interceptor(piece, road, seed=way.seed, handlers=HANDLERS, fast=way.fast, tensor=cut.tensor)
    undo = [apply_rules(model, scope), install(model, scope)]
    found: list[EpochCost] = []
    if way.recompute:
        undo.append(recompute(model, scope))
    try:
        calling = ForwardCall.of(model, set(scope.inputs))

        def one() -> None:
            before, meanwhile, begun = dict(channel.bytes), channel.meanwhile, channel.clock()
            cast = torch.autocast("cpu", torch.bfloat16) if way.amp else nullcontext()
            channel.met.clear()
            with scope.running(len(found) + 1, training=True), cast:
                out = calling.call(model, scope.inputs)
            loss = out.float().square().mean() + scope.turn.token
            loss.backward()
            sent = {kind: value - before[kind] for kind, value in channel.bytes.items()}
            times = begun, *channel.met, channel.clock()
            spans = tuple(after - before for before, after in pairwise(times))
            found.append(EpochCost(times[-1] - begun, channel.meanwhile - meanwhile, spans, sent))
            model.zero_grad()

        for epoch in range(count):
            with channel.recording() if turns and epoch == count - 1 else nullcontext():
                one()
        for mine in channel.turn() if turns else ():
            while mine and again([epoch.seconds for epoch in found[count:]], turns):
                with channel.replaying():
                    one()
    finally:
        for take_off in reversed(undo):
            take_off()
    return found


def crossing(model: nn.Module, part: Partition, way: RunMode) -> tuple[float, float]:
    """Bytes of halos of an epoch: forward for a row that is sent, backward for one that is read.

    Args:
        model: Any.
        part: Where attributes are drawn from.
        way: How the model will be run.
    """
    pieces = made_pieces(part, several=True, loops=False, seed=way.seed)
    sent, halo = _by_row(model, pieces, way, WHOLE)
    return float(round(sent)), float(round(halo))


def _by_row(
    model: nn.Module, pieces: Sequence[Partition], way: RunMode, cut: Parallel
) -> tuple[float, float]:
    found = [each[-1].bytes["halo"] for each in epochs(model, pieces, SETTLED, way, cut)]
    counts = [counts_of(piece) for piece in pieces]
    units = np.array([[one.sent, one.halo] for one in counts], dtype=float)
    rates = np.linalg.lstsq(units, np.array(found, dtype=float), rcond=None)[0]
    return float(rates[0]), float(rates[1])


def coded(model: nn.Module, part: Partition, way: RunMode) -> tuple[float, float]:
    """As :func:`crossing`, with one bit a number."""
    data = drawn(part, UNEVEN[-1], 4 * UNEVEN[-1], way.seed)
    owner = torch.bucketize(torch.arange(UNEVEN[-1]), torch.tensor(UNEVEN[:-1]), right=True)
    pieces = [extract(data, owner, rank, len(UNEVEN)) for rank in range(len(UNEVEN))]
    return _by_row(model, pieces, way, Parallel(codec="onebit"))


def coding(turns: int = 3) -> tuple[float, float]:
    """Seconds to code a byte of floats with one bit a number and to restore it, on this machine.

    Returns:
        The seconds, and by which share two measurements differed.
    """
    rows, codec = torch.rand(SAMPLE, generator=torch.Generator().manual_seed(0)), Codec("onebit")
    message = torch.empty(codec.size(*SAMPLE, rows.dtype), dtype=torch.uint8)
    stamps, out, seconds = torch.arange(SAMPLE[0]), torch.empty_like(rows), clock()
    found: list[float] = []
    while again(found, turns):
        begun = seconds()
        codec.encode(rows, None, stamps, 0, message, where="a sample")
        codec.decode(message, out)
        found.append(seconds() - begun)
    took, spread = steady(found)
    return took / rows.nbytes, spread


def transposes(model: nn.Module, part: Partition, way: RunMode) -> tuple[float, float] | None:
    """Bytes a vertex of a settled epoch's transposes; None if none is made.

    Args:
        model: Any.
        part: Where attributes are drawn from.
        way: How the model will be run.

    Returns:
        ``a, b`` of the ``a (T - 1) / T + b (T - 1)`` that T ranks send, from two and four: columns that are
        shared out, and those that every rank takes (attention on fewer heads than ranks).
    """
    if not way.fast or way.amp:
        return None  # refused by the engine
    data = drawn(part, EVEN, 4 * EVEN, way.seed)

    def sent(count: int) -> float:
        owner = torch.arange(EVEN) * count // EVEN
        pieces = [extract(data, owner, rank, count) for rank in range(count)]
        found = epochs(model, pieces, SETTLED, way, Parallel(tensor=count))
        return sum(each[-1].bytes["transpose"] for each in found) / EVEN / (count - 1)

    try:
        two, four = sent(2), sent(4)
    except KagomeError:
        return None
    shared = max(0.0, 4 * (two - four))
    return (shared, max(0.0, two - shared / 2)) if two else None


def timed(
    model: nn.Module, cuts: Sequence[Sequence[Partition]], way: RunMode, *, slices: int = 1, turns: int = 3
) -> Timed:
    """Time ranks, each by itself, in parts of graphs or in feature slices.

    Args:
        model: Any; for slices one that makes transposes.
        cuts: Of graphs of different sizes. In slices rows and edges are those of all ranks, and seconds are
            of whoever takes longest from one exchange to the next.
        way: How the model will be run.
        slices: Of features.
        turns: Settled epochs of each rank, or more until two agree; those two count.
    """
    units, seconds, free, uneven, spreads = [], [], [], [], []
    for pieces in cuts:
        ran = epochs(model, pieces, SETTLED, way, Parallel(tensor=slices), turns=turns)
        found = [each[SETTLED:] for each in ran]
        free += [sum(e.meanwhile for e in each) / sum(e.seconds for e in each) for each in found]
        counts = [counts_of(piece) for piece in pieces]
        agreed = [sorted(each, key=lambda epoch: epoch.seconds)[:2] for each in found]
        spans = np.array([np.mean([epoch.spans for epoch in each], axis=0) for each in agreed])
        longest = float(spans.max(axis=0).sum())
        whole, apart = zip(*(steady([epoch.seconds for epoch in each]) for each in found), strict=True)
        spreads.append(max(apart))
        uneven.append(longest / max(whole))
        if slices > 1:
            units.append([1.0, sum(one.rows for one in counts), sum(one.edges for one in counts), 0.0])
            seconds.append(longest)
        else:
            units += [[1.0, one.rows, one.edges, one.sent + one.halo] for one in counts]
            seconds += whole
    none, row, edge, crossed = _fitted(units, seconds)
    shares = min(1.0, float(np.median(free))), max(1.0, float(np.median(uneven)))
    return Timed(none, row, edge, crossed, *shares, len(found[0][-1].spans) - 1, spread=max(spreads))


def shares_of(sample: Partition, count: int) -> list[Partition]:
    """Equal shares of a graph's vertices, in their order."""
    n = sample.own.numel()
    data = Sorted(sample.edge_index, n, kinds_of(sample))
    owner = torch.arange(n) * count // n
    return [extract(data, owner, rank, count) for rank in range(count)]


def _fitted(units: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """What a unit of each kind takes, none below 0."""
    # Each sample counts by its share, not by its seconds: small parts are predicted too.
    table = np.array(units) / np.array(seconds)[:, None]
    scale = np.where(table.any(axis=0), table.max(axis=0), 1.0)
    solved, _ = nnls(table / scale, np.ones(len(seconds)))
    return [float(each) for each in solved / scale]


def alone(
    model: nn.Module, sample: Partition, rates: CostRates, way: RunMode, most: int
) -> tuple[float, float]:
    """How many times as fast as rates say one rank is that has the graph, and all threads, to itself.

    Args:
        model: Any.
        sample: A graph for one rank.
        rates: Of one rank among others, with the threads that are set.
        way: How the model will be run.
        most: Threads that one rank would have.

    Returns:
        That, and by which share two measurements differed.
    """
    share = torch.get_num_threads()
    torch.set_num_threads(max(most, share))
    try:
        (found,) = epochs(model, [sample], SETTLED, way, turns=3)
    finally:
        torch.set_num_threads(share)
    took, spread = steady([epoch.seconds for epoch in found[SETTLED:]])
    return max(1.0, computing(rates, sample.own.numel(), sample.edge_index.size(1)) / took), spread
