"""Thread pool: threads that share the rows of one kernel, and the settings that every loop is compiled with.

Where it sits: below the numba loops. A loop is a plain serial function over rows [low, high) that releases
the interpreter's lock. ``share`` cuts the rows into pieces of about equal work, and threads take the pieces
in order. No parallel runtime runs beside torch's: a second OpenMP pool would spin against torch's after every
call, and numba's own work queue may not be entered by two Python threads at once. The number of threads is
``torch.get_num_threads()`` at each call, so it needs no setting. Each row is computed by one thread in one
order, so results do not depend on the number of threads.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import count
from math import prod
from typing import Any, TypeVar, cast

import numba
import numpy as np
import torch
from torch import Tensor

from kagome.kernels.base.jit import alone

Loop = TypeVar("Loop", bound=Callable[..., Any])

PIECE = 1 << 15
"""Numbers read by the smallest piece of work that is worth another thread."""
PIECES = 4
"""Pieces per thread: a slow thread delays the others by a quarter of its share at most."""
FIXED = 64
"""Most pieces where sums over pieces are added up: their number must not depend on the number of threads."""


def compiled(loop: Loop) -> Loop:
    """Compile a loop on its first call and keep the machine code on disk.

    Products and sums may be fused and nothing else is reordered, so every call gives the same bits. The loop
    may not create arrays: numba then need not count references to views of a row, which would cost more than
    summing a narrow row.
    """
    return _compiled(loop, False)


def roomy(loop: Loop) -> Loop:
    """Compile as ``compiled`` does, for loops that create arrays."""
    return _compiled(loop, True)


def strict(loop: Loop) -> Loop:
    """Compile as ``compiled`` does, but round every product and sum: same bits as plain PyTorch."""
    return _compiled(loop, False, fused=False)


def _compiled(loop: Loop, arrays: bool, *, fused: bool = True) -> Loop:
    # Of LLVM's fast-math flags only ``contract`` is safe here: it fuses a product with a sum, but reorders no
    # sum.
    fast = {"contract"} if fused else set()
    # numpy's error model: a division by zero gives inf or NaN, as in torch, and the loop has no branch for
    # it.
    made = numba.njit(cache=True, nogil=True, error_model="numpy", fastmath=fast, _nrt=arrays)(loop)
    return cast(Loop, alone(made))


def array(t: Tensor) -> Any:
    """Return the tensor's values as a contiguous numpy array; only a non-contiguous tensor is copied."""
    t = t.detach() if t.requires_grad else t
    return (t if t.is_contiguous() else t.contiguous()).numpy()


def flat(t: Tensor) -> Any:
    """Return the tensor as a contiguous numpy array of two axes: the first, and all others joined."""
    return array(t).reshape(t.size(0), prod(t.shape[1:]))


def share(work: Callable[[int, int], None], begin: Any, end: Any, width: int) -> None:
    """Call ``work(low, high)`` on row ranges that cover all rows, with as many threads as torch uses.

    Args:
        work: Computes rows [low, high) by calling a compiled loop.
        begin: Where each row's entries begin.
        end: Where each row's entries end.
        width: Numbers read per entry.

    Cost:
        About 20 microseconds if several threads are worth it, otherwise 1 microsecond.
    """
    # One thread needs no cuts, and its count of edges would only cost time in small graphs.
    threads, rows = torch.get_num_threads(), begin.size
    edges = int(end[-1] - begin[0]) if rows and threads > 1 else 0
    pieces = min(threads * PIECES, (edges + rows) * width // PIECE, rows)
    if threads == 1 or pieces <= 1:
        if rows:
            work(0, rows)
        return
    cuts = _cuts(begin, edges, pieces)
    each(lambda k: work(cuts[k], cuts[k + 1]), pieces)


def spread(work: Callable[[int, int], None], rows: int, width: int) -> None:
    """Call ``work(low, high)`` on row ranges as ``share`` does, for rows of equal work.

    Args:
        work: Computes rows [low, high).
        rows: The number of rows.
        width: Numbers read per row.
    """
    threads = torch.get_num_threads()
    pieces = min(threads * PIECES, rows * width // PIECE, rows)
    if threads == 1 or pieces <= 1:
        if rows:
            work(0, rows)
        return
    each(lambda k: work(rows * k // pieces, rows * (k + 1) // pieces), pieces)


def cuts_of(begin: Any, end: Any, width: int) -> Any:
    """Return row numbers that cut the rows into at most ``FIXED`` ranges of about equal work.

    The ranges do not depend on the number of threads.

    Args:
        begin: Where each row's entries begin.
        end: Where each row's entries end.
        width: Numbers read per entry.

    Returns:
        The bounds of the ranges, one row number more than there are ranges.
    """
    edges = int(end[-1] - begin[0]) if begin.size else 0
    return _cuts(begin, edges, min(max((edges + begin.size) * width // PIECE, 1), FIXED))


def each(work: Callable[[int], None], pieces: int) -> None:
    """Call ``work(k)`` for every piece, on as many threads as torch uses, in order."""
    # ``next`` on a count is atomic under the interpreter's lock, so each piece is taken by one thread.
    number = count()

    def take() -> None:
        while (k := next(number)) < pieces:
            work(k)

    helpers = [_pool(os.getpid()).submit(take) for _ in range(min(torch.get_num_threads(), pieces) - 1)]
    try:
        take()
    finally:
        # A helper that has not begun has nothing left to do; waiting for it would wait for another rank's
        # work.
        begun = [helper for helper in helpers if not helper.cancel()]
        for helper in begun:
            helper.result()


@cache  # threads do not survive a fork, so each process has its own pool
def _pool(process: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(os.cpu_count() or 1, 2), thread_name_prefix=f"kernels-{process}")


def _cuts(begin: Any, edges: int, pieces: int) -> Any:
    cuts = np.empty(pieces + 1, np.int64)
    _cut(begin, edges, cuts)
    return cuts


@compiled
def _cut(begin: Any, edges: int, cuts: Any) -> None:
    # Writing a row costs about as much as reading one entry, so a row counts as one more entry.
    rows, pieces = begin.size, cuts.size - 1
    cuts[0], cuts[pieces] = 0, rows
    for k in range(1, pieces):
        want = (edges + rows) * k // pieces
        # The work before a row grows with its number, so each cut is found by bisection.
        low, high = cuts[k - 1], rows
        while low < high:
            middle = (low + high) // 2
            if begin[middle] - begin[0] + middle < want:
                low = middle + 1
            else:
                high = middle
        cuts[k] = low
