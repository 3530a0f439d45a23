"""Opened: a function of ``torch.nn.functional`` whose own calls are seen one by one, not as one call.

Where it sits: modes that watch torch calls (``intercept.interceptor``, ``model.operators.sample_dropout``)
look into those that torch writes in Python.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any


@cache
def opened(func: FunctionType) -> Callable[..., Any]:
    """The function with a view of its globals in which nobody overrides torch calls."""
    names = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    never = dict.fromkeys(names, lambda *_: False)
    out = FunctionType(
        func.__code__, {**func.__globals__, **never}, func.__name__, func.__defaults__, func.__closure__
    )
    out.__kwdefaults__ = func.__kwdefaults__
    return out
