"""Balance: a row of weighted steps cut into pieces whose heaviest is as light as can be.

Where it sits: ``stages`` says what each piece would weigh and send.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_ROUNDING = 1e-9
"""Sums of seconds that differ by no more are equal."""

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


def best_cuts(seconds: Sequence[float], allowed: NDArray[np.bool_], cost: Floats, pieces: int) -> list[int]:
    """Where the pieces begin and the last one ends: the heaviest is as light as can be, then the cost least.

    Args:
        seconds: Of each of n steps.
        allowed: Which pieces there may be.
        cost: Of each piece.
        pieces: How many; no more than there can be.

    Shapes:
        allowed, cost: ``[n + 1, n + 1]``.

    Cost:
        ``pieces * n * n`` time, ``n * n`` numbers.
    """
    sums = np.concatenate([[0.0], np.cumsum(np.asarray(seconds, dtype=np.float64))])
    weight = np.where(allowed, sums[None, :] - sums[:, None], np.inf)
    start = np.full(len(sums), np.inf)
    start[0] = 0.0
    heaviest = start
    for _ in range(pieces):
        heaviest = np.maximum(heaviest[:, None], weight).min(axis=0)
    assert np.isfinite(heaviest[-1]), "fewer pieces are possible"
    light = weight <= heaviest[-1] + _ROUNDING * max(float(sums[-1]), 0.0)
    cost = np.where(light, cost, np.inf)
    least, came = start, []
    for _ in range(pieces):
        sent = least[:, None] + cost
        # Of equal ones the latest begin: what follows a layer stays with it.
        came.append(len(sent) - 1 - sent[::-1].argmin(axis=0))
        least = sent.min(axis=0)
    cuts = [len(sums) - 1]
    for back in reversed(came):
        cuts.append(int(back[cuts[-1]]))
    return cuts[::-1]
