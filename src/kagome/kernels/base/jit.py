"""Compiler for single-threaded loops: plain loops over numpy arrays become machine code that is kept on disk.

Where it sits: a leaf; ``graph`` and ``planner`` compile their inner loops with it. Kernels use
``thread_pool`` instead, for loops that several threads share.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

Loop = TypeVar("Loop", bound=Callable[..., Any])


def compiled(loop: Loop) -> Loop:
    """Compile a plain loop once and keep the machine code on disk; it runs on one thread."""
    try:
        return cast(Loop, numba.njit(cache=True, nogil=True)(loop))
    except RuntimeError:  # neither the package's folder nor the user's cache is writable
        return cast(Loop, numba.njit(nogil=True)(loop))
