"""Balance: a row of weighted steps cut into pieces whose heaviest is as light as can be.

A step may have a weight in each of two passes. Where all goes one way before anything comes back, a pass
takes as long as its heaviest piece, which need not be the other one's.

Where it sits: ``stages`` says what each piece would weigh and send.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

_ROUNDING = 1e-9
"""Sums of seconds that differ by no more, as a share of all, are equal."""
BOUNDS: Final = 64
"""Bounds of a first pass that are tried at most."""
WORK: Final = 200_000_000
"""Numbers looked at for them, about."""
SLACK: Final = 0.05
"""What share the heaviest piece may weigh above the least, where less then crosses: no more than two
measurements of the same steps differ by."""
_HALVINGS: Final = 8

Floats = NDArray[np.float64]


def allowed_pieces(layers: Sequence[bool], barred: Sequence[bool]) -> NDArray[np.bool_]:
    """Which pieces there may be: they hold a layer, and neither end is barred.

    Args:
        layers: Whether each of n steps is a layer.
        barred: Whether there may be no cut before each of n steps.

    Shapes:
        ``[n + 1, n + 1]``: at ``[i, j]`` the piece of steps i to j - 1.
    """
    held = np.concatenate([[0], np.cumsum(np.asarray(layers, dtype=np.int64))])
    open_ends = np.concatenate([~np.asarray(barred, dtype=bool), [True]])
    open_ends[0] = True
    return np.asarray((held[None, :] > held[:, None]) & open_ends[None, :] & open_ends[:, None])


def most_pieces(allowed: NDArray[np.bool_], limit: int) -> int:
    """The largest number of pieces up to ``limit`` that there can be."""
    reached: NDArray[np.bool_] = np.zeros(len(allowed), dtype=bool)
    reached[0] = True
    for pieces in range(1, limit + 1):
        reached = np.asarray((reached[:, None] & allowed).any(axis=0))
        # Two neighbours make one piece: with fewer pieces it is always possible too.
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
    """Where the pieces begin and the last one ends: as light and as cheap as can be.

    The heaviest piece weighs at most so much more than it must. Of such cuts those of the least cost count,
    and of these the one whose heaviest is lightest, to a part of the slack.

    Args:
        passes: Seconds of each of n steps, in one pass or in two: of two the heaviest pieces' sum counts.
        allowed: Which pieces there may be.
        cost: Of each piece.
        pieces: How many; no more than there can be.
        slack: What share the heaviest may weigh above the least that it can.

    Shapes:
        allowed, cost: ``[n + 1, n + 1]``.

    Cost:
        ``pieces * n * n`` time, with two passes up to :data:`BOUNDS` times that; ``n * n`` numbers.
    """
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
    """The least cost of so many pieces in all, and where they begin and the last one ends."""
    least, came = _start(len(cost)), []
    for _ in range(pieces):
        sent = least[:, None] + cost
        # Of equal ones the latest begin: what follows a layer stays with it.
        came.append(len(sent) - 1 - sent[::-1].argmin(axis=0))
        least = sent.min(axis=0)
    cuts = [len(cost) - 1]
    for back in reversed(came):
        cuts.append(int(back[cuts[-1]]))
    return float(least[-1]), cuts[::-1]


def _weights(seconds: Sequence[float], allowed: NDArray[np.bool_]) -> Floats:
    """Of each piece; infinite where there may be none."""
    sums = np.concatenate([[0.0], np.cumsum(np.asarray(seconds, dtype=np.float64))])
    return np.where(allowed, sums[None, :] - sums[:, None], np.inf)


def _rounding(weight: Floats) -> float:
    return _ROUNDING * max(float(weight[0, -1]), 0.0) if np.isfinite(weight[0, -1]) else 0.0


def _start(ends: int) -> Floats:
    start = np.full(ends, np.inf)
    start[0] = 0.0
    return start


def _lightest(weight: Floats, pieces: int) -> float:
    """The least that the heaviest of so many pieces can weigh; infinite where there cannot be so many."""
    heaviest = _start(len(weight))
    for _ in range(pieces):
        heaviest = np.maximum(heaviest[:, None], weight).min(axis=0)
    return float(heaviest[-1])


def _together(one: Floats, other: Floats, pieces: int) -> tuple[float, float]:
    """Of two passes the heaviest pieces' weights whose sum is least, among the bounds that are tried."""
    least = _lightest(one, pieces)
    # Beyond what the first pass weighs where the second is as light as can be, nothing is gained.
    free = np.where(other <= _lightest(other, pieces) + _rounding(other), one, np.inf)
    known = np.unique(one[np.isfinite(one) & (one >= least) & (one <= _lightest(free, pieces))])
    most = int(np.clip(WORK // (pieces * len(one) ** 2), 4, BOUNDS))
    tried = known[np.unique(np.linspace(0, len(known) - 1, most).round().astype(int))]

    def beside(bound: float) -> float:
        return _lightest(np.where(one <= bound + _rounding(one), other, np.inf), pieces)

    return min(((bound, beside(bound)) for bound in map(float, tried)), key=lambda pair: (sum(pair), pair))
