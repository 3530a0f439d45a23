"""Rates: what a model costs by row and edge, in seconds and in bytes that cross, from epochs on small graphs.

Where it sits: ``study`` scales them to parts; ``forecast`` does the same for memory.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import numpy as np
import torch
from scipy.optimize import nnls
from torch import nn
from torch_geometric.data import Data

from kagome.comm.codec import Codec
from kagome.comm.local import LocalChannel, LocalGroup
from kagome.config import Parallel
from kagome.errors import KagomeError
from kagome.graph.partition import Partition, extract
from kagome.model.calling import Calling
from kagome.model.exact import HANDLERS
from kagome.model.rules import apply_rules
from kagome.neighbors.crossing import Crossing
from kagome.neighbors.install import install
from kagome.neighbors.intercept import Interception
from kagome.neighbors.lazy import EscapeError
from kagome.neighbors.recompute import recompute
from kagome.planner.meshes import Rates, computing
from kagome.run.contention import crowding
from kagome.run.counts import counts_of
from kagome.run.forecast import Way
from kagome.run.kept import Kept
from kagome.run.made import drawn, made_pieces
from kagome.threads import cores

SETTLED = 2
"""Epochs until all that is kept for a run is there."""
WHOLE = Parallel()
"""Rows cross whole, as they are."""
UNEVEN = (128, 384, 1024)
"""Where a graph is cut on which coded rows are counted: messages long enough that rounding does not tell."""
SAMPLE = 4096, 128
"""Rows and columns that are coded to see how long that takes."""
EVEN = 64
"""Vertices of the graph on which transposes are counted: any small number of slices divides it."""


@dataclass(frozen=True)
class Epoch:
    """One epoch of one rank.

    Args:
        seconds: Forward and backward.
        busy: Of them, what this rank's thread computed.
        bytes: Sent to peers, by kind.
    """

    seconds: float
    busy: float
    bytes: Mapping[str, int]


def epochs(
    model: nn.Module, pieces: Sequence[Partition], count: int, way: Way, cut: Parallel = WHOLE
) -> list[list[Epoch]]:
    """Train copies of a model for some epochs, weights as they are; a rank a piece, as threads.

    Args:
        model: Left as it is.
        pieces: What each rank has.
        count: Epochs.
        way: How the model will be run.
        cut: Its codec, and whether ranks take columns where they can.
    """

    def run(way: Way) -> list[list[Epoch]]:
        models = [copy.deepcopy(model).train() for _ in pieces]
        if len(pieces) == 1:
            return [_epochs(models[0], pieces[0], LocalChannel(LocalGroup(1), 0), count, way, cut)]
        group = LocalGroup(len(pieces))
        return group.run(lambda c: _epochs(models[c.rank], pieces[c.rank], c, count, way, cut))

    try:
        return run(way)
    except EscapeError:
        return run(replace(way, fast=False))  # as the engine does


def _epochs(
    model: nn.Module, piece: Partition, channel: LocalChannel, count: int, way: Way, cut: Parallel
) -> list[Epoch]:
    road = Crossing(channel, cut, way.seed)
    scope = Interception(piece, road, seed=way.seed, handlers=HANDLERS, fast=way.fast, tensor=cut.tensor)
    undo, found = [apply_rules(model, scope), install(model, scope)], []
    if way.recompute:
        undo.append(recompute(model, scope))
    try:
        calling = Calling.of(model, set(scope.inputs))
        for epoch in range(1, count + 1):
            before, begun, busy = dict(channel.bytes), time.perf_counter(), time.thread_time()
            cast = torch.autocast("cpu", torch.bfloat16) if way.amp else nullcontext()
            with scope.running(epoch, training=True), cast:
                out = calling.call(model, scope.inputs)
            loss = out.float().square().mean() + scope.turn.token
            loss.backward()
            sent = {kind: value - before[kind] for kind, value in channel.bytes.items()}
            found.append(Epoch(time.perf_counter() - begun, time.thread_time() - busy, sent))
            model.zero_grad()
    finally:
        for take_off in reversed(undo):
            take_off()
    return found


def crossing(model: nn.Module, part: Partition, way: Way) -> tuple[float, float]:
    """Bytes of halos of a settled epoch: forward for a row that is sent, backward for one that is read.

    Args:
        model: Any.
        part: Where attributes are drawn from.
        way: How the model will be run.
    """
    sent, halo = _by_row(model, made_pieces(part, several=True, loops=False, seed=way.seed), way, WHOLE)
    return float(round(sent)), float(round(halo))


def _by_row(model: nn.Module, pieces: Sequence[Partition], way: Way, cut: Parallel) -> tuple[float, float]:
    found = [each[-1].bytes["halo"] for each in epochs(model, pieces, SETTLED, way, cut)]
    counts = [counts_of(piece) for piece in pieces]
    units = np.array([[one.sent, one.halo] for one in counts], dtype=float)
    rates = np.linalg.lstsq(units, np.array(found, dtype=float), rcond=None)[0]
    return float(rates[0]), float(rates[1])


def coded(model: nn.Module, part: Partition, way: Way) -> tuple[float, float]:
    """As :func:`crossing`, with one bit a number."""
    data = drawn(part, UNEVEN[-1], 4 * UNEVEN[-1], way.seed)
    owner = torch.bucketize(torch.arange(UNEVEN[-1]), torch.tensor(UNEVEN[:-1]), right=True)
    pieces = [extract(data, owner, rank, len(UNEVEN)) for rank in range(len(UNEVEN))]
    return _by_row(model, pieces, way, Parallel(codec="onebit"))


def coding(turns: int = 3) -> float:
    """Seconds to code a byte of floats with one bit a number and to restore it, on this machine."""
    rows, codec = torch.rand(SAMPLE, generator=torch.Generator().manual_seed(0)), Codec("onebit")
    message = torch.empty(codec.size(*SAMPLE, rows.dtype), dtype=torch.uint8)
    stamps, out, best = torch.arange(SAMPLE[0]), torch.empty_like(rows), float("inf")
    for _ in range(turns):
        begun = time.perf_counter()
        codec.encode(rows, None, stamps, 0, message, where="a sample")
        codec.decode(message, out)
        best = min(best, time.perf_counter() - begun)
    return best / rows.nbytes


def transposes(model: nn.Module, part: Partition, way: Way) -> tuple[float, float] | None:
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


def sliced(model: nn.Module, sample: Partition, way: Way, kept: Kept, turns: int = 3) -> tuple[float, float]:
    """Seconds that a rank in feature slices computes on a graph: whatever their number, and over all of them.

    Args:
        model: One that makes transposes.
        sample: A graph for one rank.
        way: How the model will be run.
        kept: Where it is looked for how ranks crowd this machine.
        turns: Settled epochs of each, of which the median counts.

    Returns:
        ``a, b`` of ``a + b / T``, from two and four slices: what cannot be cut by features is in ``a``.
    """
    n = sample.own.numel()
    data = Data(edge_index=sample.edge_index, num_nodes=n, **sample.nodes, **sample.edges)

    def busiest(count: int) -> float:
        owner = torch.arange(n) * count // n
        pieces = [extract(data, owner, rank, count) for rank in range(count)]
        found = epochs(model, pieces, SETTLED + turns, way, Parallel(tensor=count))
        each = zip(*(rank[SETTLED:] for rank in found), strict=True)
        return float(np.median([max(epoch.busy for epoch in ranks) for ranks in each]))

    # Ranks crowd this machine while they are timed; what is asked for is a core that has it to itself.
    two, four = (busiest(count) * crowding(min(count, len(cores())), kept) for count in (2, 4))
    alike = max(0.0, 2 * four - two)
    return alike, 4 * (four - alike)


def timed(
    model: nn.Module, samples: Sequence[Partition], way: Way, turns: int = 3
) -> tuple[float, float, float]:
    """Seconds of an epoch that has no rows, of a row and of an edge, on this machine; none below 0.

    Args:
        model: Any.
        samples: Graphs for one rank, of different sizes.
        way: How the model will be run.
        turns: Settled epochs of each, of which the median counts.
    """
    found = [epochs(model, [piece], SETTLED + turns, way)[0][SETTLED:] for piece in samples]
    seconds = np.array([np.median([epoch.seconds for epoch in each]) for each in found])
    units = np.array([[1.0, s.own.numel(), s.edge_index.size(1)] for s in samples])
    # Each sample counts by its share, not by its seconds: small parts are predicted too.
    solved, _ = nnls(units / seconds[:, None], np.ones(len(samples)))
    return float(solved[0]), float(solved[1]), float(solved[2])


def alone(model: nn.Module, sample: Partition, rates: Rates, way: Way, most: int) -> float:
    """How many times as fast a rank is that has all threads for itself; 1 where it has them already.

    Args:
        model: Any.
        sample: A graph for one rank.
        rates: With the threads that are set.
        way: How the model will be run.
        most: Threads that one rank would have.
    """
    share = torch.get_num_threads()
    if most <= share:
        return 1.0
    torch.set_num_threads(most)
    try:
        found = epochs(model, [sample], SETTLED + 3, way)[0][SETTLED:]
    finally:
        torch.set_num_threads(share)
    told = computing(rates, sample.own.numel(), sample.edge_index.size(1))
    return max(1.0, told / float(np.median([epoch.seconds for epoch in found])))
