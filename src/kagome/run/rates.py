"""Rates: what a model costs by row and edge, in seconds and in bytes that cross, from epochs on small graphs.

Where it sits: ``planning`` scales them to parts; ``forecast`` does the same for memory.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import nnls
from torch import nn
from torch_geometric.data import Data

from kagome.comm.local import LocalChannel, LocalGroup
from kagome.errors import KagomeError
from kagome.graph.partition import Partition, extract
from kagome.model.calling import Calling
from kagome.model.exact import HANDLERS
from kagome.model.rules import apply_rules
from kagome.neighbors.install import install
from kagome.neighbors.intercept import Interception
from kagome.run.counts import counts_of
from kagome.run.made import made_pieces

SETTLED = 2
"""Epochs until all that is kept for a run is there."""
EVEN = 64
"""Vertices of the graph on which transposes are counted: any small number of slices divides it."""


@dataclass(frozen=True)
class Epoch:
    """One epoch of one rank.

    Args:
        seconds: Forward and backward.
        bytes: Sent to peers, by kind.
    """

    seconds: float
    bytes: Mapping[str, int]


def epochs(
    model: nn.Module, piece: Partition, channel: LocalChannel, count: int, *, slices: bool = False
) -> list[Epoch]:
    """Train a copy of a model for some epochs, weights as they are.

    Args:
        model: Left as it is.
        piece: What this rank has.
        channel: Threads, one a rank.
        count: Epochs.
        slices: Whether ranks take columns where they can.
    """
    model = copy.deepcopy(model).train()
    scope = Interception(piece, channel, handlers=HANDLERS, slices=slices)
    undo, found = [apply_rules(model, scope), install(model, scope)], []
    try:
        calling = Calling.of(model, set(scope.inputs))
        for epoch in range(1, count + 1):
            before, begun = dict(channel.bytes), time.perf_counter()
            with scope.running(epoch, training=True):
                out = calling.call(model, scope.inputs)
            loss = out.float().square().mean() + scope.turn.token
            loss.backward()
            sent = {kind: value - before[kind] for kind, value in channel.bytes.items()}
            found.append(Epoch(time.perf_counter() - begun, sent))
            model.zero_grad()
    finally:
        for take_off in reversed(undo):
            take_off()
    return found


def crossing(model: nn.Module, part: Partition, seed: int = 0) -> tuple[float, float]:
    """Bytes of halos of a settled epoch: forward for a row that is sent, backward for one that is read.

    Args:
        model: Any.
        part: Where attributes are drawn from.
        seed: Of the made graph.
    """
    pieces = made_pieces(part, several=True, loops=False, seed=seed)
    found = LocalGroup(len(pieces)).run(lambda c: epochs(model, pieces[c.rank], c, SETTLED)[-1].bytes)
    counts = [counts_of(piece) for piece in pieces]
    units = np.array([[one.sent, one.halo] for one in counts], dtype=float)
    rates = np.linalg.lstsq(units, np.array([each["halo"] for each in found], dtype=float), rcond=None)[0]
    return float(round(rates[0])), float(round(rates[1]))


def transposes(model: nn.Module, part: Partition, seed: int = 0) -> float | None:
    """Bytes a vertex of a settled epoch's transposes, as if all of a row crossed; None if none is made."""
    generator = torch.Generator().manual_seed(seed)
    features = {name: value[torch.arange(EVEN) % max(value.size(0), 1)] for name, value in part.nodes.items()}
    edge_index = torch.randint(0, EVEN, (2, 4 * EVEN), generator=generator)
    data = Data(edge_index=edge_index, num_nodes=EVEN, **features)
    owner = torch.arange(EVEN) // (EVEN // 2)
    pieces = [extract(data, owner, rank, 2) for rank in range(2)]
    try:
        found = LocalGroup(2).run(lambda c: epochs(model, pieces[c.rank], c, SETTLED, slices=True)[-1].bytes)
    except KagomeError:
        return None
    sent = sum(each["transpose"] for each in found)
    return 2 * sent / EVEN if sent else None  # of two ranks each sends half


def timed(
    model: nn.Module, samples: Sequence[Partition], turns: int = 3
) -> tuple[tuple[float, float, float], list[float]]:
    """Seconds of an epoch that has no rows, of a row and of an edge, on this machine.

    Args:
        model: Any.
        samples: Graphs for one rank, of different sizes.
        turns: Settled epochs of each, of which the median counts.

    Returns:
        The three, none below 0, and each sample's seconds.
    """
    found = []
    for piece in samples:
        each = epochs(model, piece, LocalChannel(LocalGroup(1), 0), SETTLED + turns)[SETTLED:]
        found.append(float(np.median([epoch.seconds for epoch in each])))
    units = np.array([[1.0, s.own.numel(), s.edge_index.size(1)] for s in samples])
    seconds = np.array(found)
    # Each sample counts by its share, not by its seconds: small parts are predicted too.
    solved, _ = nnls(units / seconds[:, None], np.ones(len(samples)))
    return (float(solved[0]), float(solved[1]), float(solved[2])), found
