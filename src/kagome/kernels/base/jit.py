"""Compiler for single-threaded loops: plain loops over numpy arrays become machine code that is kept on disk.

Where it sits: a leaf; ``graph`` and ``planner`` compile their inner loops with it. Kernels use
``thread_pool`` instead, for loops that several threads share. It imports no torch.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial, update_wrapper
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import numba
import numpy as np
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target
from numba.extending import register_jitable

from kagome.kernels.base.kept_code import AT_ONCE

Loop = TypeVar("Loop", bound=Callable[..., Any])

PLAIN: Final = 400_000
"""Array entries that a loop over whole numbers is given as plain Python, in all, before it is compiled. That
takes a few tenths of a second, and compiling takes as long."""


def compiled(loop: Loop) -> Loop:
    """Compile a plain loop once and keep the machine code on disk; it runs on one thread."""
    try:
        return cast(Loop, alone(numba.njit(cache=True, nogil=True)(loop)))
    except RuntimeError:  # neither the package's folder nor the user's cache is writable
        return cast(Loop, numba.njit(nogil=True)(loop))


def exact(made: Loop) -> Loop:
    """Have a compiled loop over whole numbers be compiled only where that is worth it.

    As long as its machine code is not on disk, it takes small arrays as plain Python. The result is the same
    to the bit. (That of a loop over floats would not be: a compiled one may fuse a product with a sum.)

    Args:
        made: A dispatcher of numba.
    """
    return cast(Loop, _Exact(made))


def inlined(loop: Loop) -> Loop:
    """Mark a function that compiled loops call; it is compiled with them."""
    return cast(Loop, register_jitable(loop))


def is_ready(made: Any) -> bool:
    """Return whether a loop was compiled by this process, or its machine code is on disk."""
    if made.signatures:
        return True
    # numba names an index file after the source file, the function and its line.
    code, source = made.py_func.__code__, Path(made.py_func.__code__.co_filename)
    name = made.py_func.__qualname__.replace("<", "").replace(">", "")
    found = Path(made.stats.cache_path or "").glob(f"{source.stem}.{name}-{code.co_firstlineno}.*.nbi")
    # Machine code that is older than its source is not loaded.
    return any(index.stat().st_mtime >= source.stat().st_mtime for index in found)


def load_compiler() -> None:
    """Have numba register its functions, which it otherwise does at the first call of any loop.

    Cost:
        0.3 s of a core.
    """
    cpu_target.typing_context.refresh()
    cpu_target.target_context.refresh()


class PlainFirst:
    """Decides whether plain code stands in for a loop that is not compiled yet and gives the same bits.

    Args:
        made: The loop, a dispatcher of numba.
        entries: Array entries that plain code is given, in all, before the loop is compiled.
    """

    def __init__(self, made: Any, entries: int) -> None:
        self._made, self._left = made, entries

    def takes(self, entries: int) -> bool:
        """Return whether plain code takes a call with so many array entries."""
        if self._left <= 0 or AT_ONCE in os.environ:
            return False
        # Counted in entries and not in seconds, although either is safe: both ways give the same bits.
        self._left -= entries
        if self._left > 0 and not is_ready(self._made):
            return True
        # Once compiled, a loop stays compiled: nothing is counted or looked up any more.
        self._left = 0
        return False


class _Exact:
    def __init__(self, made: Any) -> None:
        update_wrapper(self, made.py_func)
        self.made, self.py_func, self._first = made, made.py_func, PlainFirst(made, PLAIN)

    def __call__(self, *args: Any) -> Any:
        # Scalars weigh nothing; a loop's work is about the size of its arrays.
        plain = self._first.takes(sum(each.size for each in args if isinstance(each, np.ndarray)))
        return self.py_func(*args) if plain else self.made(*args)


def alone(made: Any) -> Any:
    """Have a loop be compiled by one process at a time; the others wait and load its machine code.

    Args:
        made: A dispatcher of numba that keeps its machine code on disk.
    """
    # A dispatcher calls its ``compile`` for each new combination of argument types.
    made.compile = partial(_compile_alone, made, made.compile)
    return made


def _compile_alone(made: Any, compile_it: Callable[..., Any], types: Any) -> Any:
    place = Path(made.stats.cache_path) / f"{made.py_func.__module__}.{made.py_func.__qualname__}.lock"
    # Take numba's own lock first, so that no thread holds the file lock while it waits for a compiling
    # thread.
    with global_compiler_lock, ExitStack() as held:
        with suppress(OSError):  # a folder that is not writable has no other process to wait for
            place.parent.mkdir(parents=True, exist_ok=True)
            fcntl.flock(held.enter_context(place.open("w")), fcntl.LOCK_EX)
        return compile_it(types)
