"""Stage balance: cuts a sequence of weighted steps into pieces whose heaviest is as light as possible.

A step may have a weight in each of two passes. If all chunks pass forward before any comes back, each pass
takes as long as its heaviest piece, which may be another piece in the other pass.

Where it sits: ``stages`` supplies the weight of each step and the cost of each piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

_ROUNDING = 1e-9
"""Relative difference up to which two sums of seconds count as equal."""
BOUNDS: Final = 64
"""Largest number of bounds on the first pass that are tried."""
WORK: Final = 200_000_000
"""Approximate limit on the numbers examined to try these bounds."""
SLACK: Final = 0.05
"""Share by which the heaviest piece may exceed the least possible weight, to send fewer bytes. It is no more
than the difference between two measurements of the same steps."""
_HALVINGS: Final = 8

Floats = NDArray[np.float64]


def allowed_pieces(layers: Sequence[bool], barred: Sequence[bool]) -> NDArray[np.bool_]:
    """Return which pieces are allowed: they hold a layer, and neither end is barred.

    Args:
        layers: Whether each of n steps is a layer.
        barred: Whether a cut before each of n steps is ruled out.

    Shapes:
        ``[n + 1, n + 1]``: at ``[i, j]`` the piece of steps i to j - 1.
    """
    # Layers before each step, so held[j] > held[i] says that the piece [i, j) has one.
    held = np.concatenate([[0], np.cumsum(np.asarray(layers, dtype=np.int64))])
    open_ends = np.concatenate([~np.asarray(barred, dtype=bool), [True]])
    open_ends[0] = True
    return np.asarray((held[None, :] > held[:, None]) & open_ends[None, :] & open_ends[:, None])


def most_pieces(allowed: NDArray[np.bool_], limit: int) -> int:
    """Return the largest possible number of pieces, up to ``limit``."""
    reached: NDArray[np.bool_] = np.zeros(len(allowed), dtype=bool)
    reached[0] = True
    for pieces in range(1, limit + 1):
        reached = np.asarray((reached[:, None] & allowed).any(axis=0))
        # Merging two neighbours gives one piece less, so every smaller number is possible as well.
        if not reached[-1]:
            return pieces - 1
    return limit


def best_cuts(
    passes: Sequence[Sequence[float]],
    allowed: NDArray[np.bool_],
    cost: Floats,
    pieces: int,
    slack: float = 0.0,
) -> list[int]:
    """Return where pieces begin and the last one ends, for the lightest and then cheapest cuts.

    The heaviest piece may exceed the least possible weight by a share of ``slack``. Among such cuts those of
    the least cost are chosen, and among these the one whose heaviest piece is lightest, to a fraction of the
    slack.

    Args:
        passes: Seconds of each of n steps, in one pass or in two; with two, the sum of both heaviest pieces
            counts.
        allowed: Which pieces are allowed.
        cost: Cost of each piece.
        pieces: Number of pieces; it must be possible.
        slack: Share by which the heaviest piece may exceed the least possible weight.

    Shapes:
        allowed, cost: ``[n + 1, n + 1]``.

    Cost:
        ``pieces * n * n`` time, with two passes up to :data:`BOUNDS` times that; ``n * n`` numbers.
    """
    # Three goals in turn: the bound on the heaviest piece, then the least cost within it and its slack, then
    # by bisection the tightest bound that still has that cost.
    weights = [_weights(seconds, allowed) for seconds in passes]
    assert np.isfinite(_lightest(weights[0], pieces)), "fewer pieces are possible"
    one, *others = weights
    bounds = _together(one, others[0], pieces) if others else (_lightest(one, pieces),)

    def within(share: float) -> tuple[float, list[int]]:
        light = np.full(allowed.shape, fill_value=True)
        for weight, bound in zip(weights, bounds, strict=True):
            light &= weight <= bound * (1 + share) + _rounding(weight)
        return _cheapest(np.where(light, cost, np.inf), pieces)

    least, cuts = within(slack)
    cost_of_lightest, lightest = within(0.0)
    if cost_of_lightest <= least:
        return lightest
    low, high = 0.0, slack
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        found, nearer = within(middle)
        if found > least:
            low = middle
        else:
            high, cuts = middle, nearer
    return cuts


def _cheapest(cost: Floats, pieces: int) -> tuple[float, list[int]]:
    """Return the least cost of this number of pieces, and where they begin and the last one ends."""
    # least[j] after p rounds: the least cost of p pieces that end before step j. Each round adds one piece:
    # least'[j] = min over i of least[i] + cost[i, j].
    least, came = _start(len(cost)), []
    for _ in range(pieces):
        sent = least[:, None] + cost
        # Of equal cuts take the latest, so that functions after a layer stay with it.
        came.append(len(sent) - 1 - sent[::-1].argmin(axis=0))
        least = sent.min(axis=0)
    cuts = [len(cost) - 1]
    for back in reversed(came):
        cuts.append(int(back[cuts[-1]]))
    return float(least[-1]), cuts[::-1]


def _weights(seconds: Sequence[float], allowed: NDArray[np.bool_]) -> Floats:
    """Return the weight of each piece; infinite for a piece that is not allowed."""
    sums = np.concatenate([[0.0], np.cumsum(np.asarray(seconds, dtype=np.float64))])
    return np.where(allowed, sums[None, :] - sums[:, None], np.inf)


def _rounding(weight: Floats) -> float:
    return _ROUNDING * max(float(weight[0, -1]), 0.0) if np.isfinite(weight[0, -1]) else 0.0


def _start(ends: int) -> Floats:
    start = np.full(ends, np.inf)
    start[0] = 0.0
    return start


def _lightest(weight: Floats, pieces: int) -> float:
    """Return the least weight that the heaviest of these pieces can have; infinite if there are too many."""
    # As ``_cheapest``, with the maximum of the pieces in place of their sum.
    heaviest = _start(len(weight))
    for _ in range(pieces):
        heaviest = np.maximum(heaviest[:, None], weight).min(axis=0)
    return float(heaviest[-1])


def _together(one: Floats, other: Floats, pieces: int) -> tuple[float, float]:
    """Return the heaviest pieces' weights in two passes with the least sum, among the bounds tried."""
    # For each bound b on the first pass, the lightest second pass within it; the best sum of both wins. Only
    # weights of actual pieces matter as bounds, and where there are many, a sample of them is tried.
    least = _lightest(one, pieces)
    # No bound on the first pass need exceed its weight in the cuts where the second is lightest.
    free = np.where(other <= _lightest(other, pieces) + _rounding(other), one, np.inf)
    known = np.unique(one[np.isfinite(one) & (one >= least) & (one <= _lightest(free, pieces))])
    most = int(np.clip(WORK // (pieces * len(one) ** 2), 4, BOUNDS))
    tried = known[np.unique(np.linspace(0, len(known) - 1, most).round().astype(int))]

    def beside(bound: float) -> float:
        return _lightest(np.where(one <= bound + _rounding(one), other, np.inf), pieces)

    return min(((bound, beside(bound)) for bound in map(float, tried)), key=lambda pair: (sum(pair), pair))
