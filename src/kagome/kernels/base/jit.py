"""Compiled: plain loops over numpy arrays as machine code, kept on disk.

Where it sits: a leaf; ``graph`` and ``planner`` make their inner loops with it. ``kernels`` has its own way,
for loops that several threads share.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

Loop = TypeVar("Loop", bound=Callable[..., Any])


def compiled(loop: Loop) -> Loop:
    """Compile a plain loop once and keep the machine code on disk; one thread, so that ranks do not crowd."""
    try:
        return cast(Loop, numba.njit(cache=True, nogil=True)(loop))
    except RuntimeError:  # neither the package's folder nor the user's cache can be written
        return cast(Loop, numba.njit(nogil=True)(loop))
