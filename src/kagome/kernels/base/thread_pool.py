"""Crew: threads that share one kernel's rows, and what every loop is compiled with.

Where it sits: under the loops. A loop is a plain serial function over rows [low, high) that lets go of the
interpreter's lock; ``share`` cuts the rows into pieces of about equal work and threads take them in order.
So there is no parallel runtime beside torch's: a second OpenMP pool would spin against torch's after every
call, numba's own work queue may not be entered by two Python threads at once, and here the number of threads
is ``torch.get_num_threads()`` at each call, without a setting. A row is done by one thread, in one order:
results do not depend on their number.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import cache, partial
from itertools import count
from math import prod
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
import numpy as np
import torch
from numba.core.compiler_lock import global_compiler_lock
from numba.extending import register_jitable
from torch import Tensor

Loop = TypeVar("Loop", bound=Callable[..., Any])

PIECE = 1 << 15
"""Numbers read by the least piece of work that is worth handing over."""
PIECES = 4
"""Pieces a thread, so that a slow one holds up the others for a quarter of its share at most."""
FIXED = 64
"""The most pieces where sums over pieces are added up: their number must not follow the threads."""


def compiled(loop: Loop) -> Loop:
    """Compile a loop when first called and keep the machine code on disk.

    Products and sums may be fused, no more: the same bits on every call. The loop may not make arrays, so
    that numba need not count who holds a view of a row, which costs more than summing a narrow one.
    """
    return _compiled(loop, False)


def roomy(loop: Loop) -> Loop:
    """As ``compiled``; the loop may make arrays."""
    return _compiled(loop, True)


def strict(loop: Loop) -> Loop:
    """As ``compiled``, and every product and sum is rounded: the bits of the same sums in plain PyTorch."""
    return _compiled(loop, False, fused=False)


def _compiled(loop: Loop, arrays: bool, *, fused: bool = True) -> Loop:
    fast = {"contract"} if fused else set()
    made = numba.njit(cache=True, nogil=True, error_model="numpy", fastmath=fast, _nrt=arrays)(loop)
    made.compile = partial(_alone, made, made.compile)
    return cast(Loop, made)


def _alone(made: Any, compile_it: Callable[..., Any], types: Any) -> Any:
    """Compile while no other process does: ranks that start together find the first one's machine code."""
    place = Path(made.stats.cache_path) / f"{made.py_func.__module__}.{made.py_func.__qualname__}.lock"
    # numba's own lock comes first, so that no thread holds a file that one who compiles is waiting for.
    with global_compiler_lock, ExitStack() as held:
        with suppress(OSError):  # a folder that cannot be written to has nothing to wait for
            place.parent.mkdir(parents=True, exist_ok=True)
            fcntl.flock(held.enter_context(place.open("w")), fcntl.LOCK_EX)
        return compile_it(types)


def inlined(loop: Loop) -> Loop:
    """A function for loops to call; compiled with them."""
    return cast(Loop, register_jitable(loop))


def array(t: Tensor) -> Any:
    """The tensor's numbers as a contiguous numpy array, without a copy where it is contiguous."""
    t = t.detach() if t.requires_grad else t
    return (t if t.is_contiguous() else t.contiguous()).numpy()


def flat(t: Tensor) -> Any:
    """As ``array``, with all axes but the first made one."""
    return array(t).reshape(t.size(0), prod(t.shape[1:]))


def share(work: Callable[[int, int], None], begin: Any, end: Any, width: int) -> None:
    """Call ``work(low, high)`` on row ranges that cover all rows, by as many threads as torch uses.

    Args:
        work: Does rows [low, high); calls a compiled loop.
        begin: Where each row's entries begin.
        end: Where they end.
        width: Numbers an entry.

    Cost:
        Some 20 microseconds where more than one thread is worth it, else one.
    """
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
    """As ``share``, for rows of equal work.

    Args:
        work: Does rows [low, high).
        rows: How many rows.
        width: Numbers a row.
    """
    threads = torch.get_num_threads()
    pieces = min(threads * PIECES, rows * width // PIECE, rows)
    if threads == 1 or pieces <= 1:
        if rows:
            work(0, rows)
        return
    each(lambda k: work(rows * k // pieces, rows * (k + 1) // pieces), pieces)


def cuts_of(begin: Any, end: Any, width: int) -> Any:
    """Row numbers that cut the rows into at most ``FIXED`` ranges of about equal work, whatever the threads.

    Args:
        begin: Where each row's entries begin.
        end: Where they end.
        width: Numbers an entry.

    Returns:
        One row number more than there are ranges.
    """
    edges = int(end[-1] - begin[0]) if begin.size else 0
    return _cuts(begin, edges, min(max((edges + begin.size) * width // PIECE, 1), FIXED))


def each(work: Callable[[int], None], pieces: int) -> None:
    """Call ``work(k)`` for every piece, by as many threads as torch uses, in order as threads come free."""
    number = count()

    def take() -> None:
        while (k := next(number)) < pieces:
            work(k)

    helpers = [_pool(os.getpid()).submit(take) for _ in range(min(torch.get_num_threads(), pieces) - 1)]
    try:
        take()
    finally:
        # A helper that never began has nothing left to do: do not wait behind another rank's work.
        begun = [helper for helper in helpers if not helper.cancel()]
        for helper in begun:
            helper.result()


@cache  # threads do not survive a fork: a pool a process
def _pool(process: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(os.cpu_count() or 1, 2), thread_name_prefix=f"kernels-{process}")


def _cuts(begin: Any, edges: int, pieces: int) -> Any:
    cuts = np.empty(pieces + 1, np.int64)
    _cut(begin, edges, cuts)
    return cuts


@compiled
def _cut(begin: Any, edges: int, cuts: Any) -> None:
    # A row costs about as much as an entry beside its entries: it is written.
    rows, pieces = begin.size, cuts.size - 1
    cuts[0], cuts[pieces] = 0, rows
    for k in range(1, pieces):
        want = (edges + rows) * k // pieces
        low, high = cuts[k - 1], rows
        while low < high:
            middle = (low + high) // 2
            if begin[middle] - begin[0] + middle < want:
                low = middle + 1
            else:
                high = middle
        cuts[k] = low
