"""Functional: opens functions of ``torch.nn.functional``, so that their own calls are seen one by one.

Where it sits: modes that watch torch calls (``intercept.interceptor``, ``model.operators.sample_dropout``)
use it for functions that torch writes in Python.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any


@cache
def opened(func: FunctionType) -> Callable[..., Any]:
    """Return the function with a copy of its globals in which no torch call is overridden."""
    # Such a function begins with ``if has_torch_function(...): return handle_torch_function(...)``. With that
    # test off its body runs, and the mode sees the calls in it.
    names = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    never = dict.fromkeys(names, lambda *_: False)
    out = FunctionType(
        func.__code__, {**func.__globals__, **never}, func.__name__, func.__defaults__, func.__closure__
    )
    out.__kwdefaults__ = func.__kwdefaults__
    return out
