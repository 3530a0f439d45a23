"""Stateful: what a user's loss holds besides its arguments, and may change when it is called.

Where it sits: ``objective`` calls a loss more often than once an epoch, to check it and to score by it.
Running means, power iterations and counters of modules that the loss holds go on as if it had not.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from torch import nn

from kagome.model.buffers import Buffers

DEPTH: Final = 4
"""Functions in functions that are looked into."""


def modules_of(function: Any, depth: int = DEPTH) -> list[nn.Module]:
    """The modules that a function holds: itself, its object, what is bound to it, what it closes over."""
    if isinstance(function, nn.Module):
        return [function]
    if depth == 0 or not callable(function):
        return []
    held: list[Any] = [getattr(function, "__self__", None)]
    if isinstance(function, functools.partial):
        held += [function.func, *function.args, *function.keywords.values()]
    held += list(getattr(function, "__defaults__", None) or ())
    for cell in getattr(function, "__closure__", None) or ():
        try:
            held.append(cell.cell_contents)
        except ValueError:  # nothing was put there yet
            continue
    return [module for each in held if each is not None for module in modules_of(each, depth - 1)]


@contextmanager
def unmoved(function: Any) -> Iterator[None]:
    """For a block, in which a function may be called any number of times: buffers it moves are put back."""
    held = [Buffers(module) for module in {id(each): each for each in modules_of(function)}.values()]
    before = [(each, each.now(), each.copies()) for each in held]
    versions = [{name: tensor._version for name, tensor in now.items()} for _, now, _ in before]
    yield
    for (buffers, tensors, values), known in zip(before, versions, strict=True):
        after = buffers.now()
        # A write of the same number would be one all the same to a backward that has kept the buffer.
        moved = [n for n, t in tensors.items() if after[n] is not t or t._version != known[n]]
        buffers.restore({n: tensors[n] for n in moved}, values)
