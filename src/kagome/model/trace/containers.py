"""Container contents: lists, dicts, sets and objects on modules, in which a trace would leave its proxies.

Where it sits: ``shapes.trace`` compares them between the traces of a model, and restores them.

::

    self.aux["h"] = h                               served: each forward pass writes what it reads
    if "n" not in self.cache: self.cache["n"] = n   refused: later forward passes differ from the first
    self.seen.append(h)                             refused: it grows with each forward pass
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, Final

import torch
from torch import Tensor, fx, nn

from kagome.model.trace.graph import Constant

_LIBRARIES: Final = ("torch.", "torch_geometric.", "kagome.", "builtins", "functools", "numpy")
_NO_BOXES: Final = (nn.Module, Tensor, fx.Proxy, fx.Node, type, FunctionType, MethodType, ModuleType)
# Names that every module has: ``training``, ``_parameters``, hooks. A forward does not keep values there.
_OF_MODULES: Final = frozenset(vars(nn.Module()))
_DEEP: Final = 3
"""Depth of nested containers that is examined."""
_VALUE: Final = "a value"


class Contents:
    """Contents of containers on the user's own modules: dicts, lists, sets, deques, attributes of objects.

    Args:
        model: The user's module.
    """

    def __init__(self, model: nn.Module) -> None:
        self._roots = [
            (f"{path}.{name}" if path else name, value)
            for path, module in model.named_modules()
            if not type(module).__module__.startswith(_LIBRARIES)
            for name, value in vars(module).items()
            if name not in _OF_MODULES
        ]
        # Each container once, though several attributes may refer to it, with a shallow copy.
        found = {
            id(container): container for _, value in self._roots for container in _containers(value, _DEEP)
        }
        self._before = [(container, _copied(container)) for container in found.values()]
        self._first = self.form()

    def form(self) -> list[Any]:
        """Return the present contents in a comparable form, with one word for every proxy of a trace."""
        return [_form(value, _DEEP) for _, value in self._roots]

    def changed(self) -> str:
        """Return the first attribute whose contents have changed; empty if there is none."""
        pairs = zip(self._roots, self._first, self.form(), strict=True)
        return next((label for (label, _), before, now in pairs if before != now), "")

    def restore(self) -> None:
        """Put back the contents that were there at first."""
        for container, before in self._before:
            if not _same(container, before):
                container.clear()
                (container.extend if isinstance(container, list | deque) else container.update)(before)


def _containers(value: Any, deep: int) -> Iterator[Any]:
    """Yield the containers in a value, including the value itself."""
    inner = _inner(value)
    if inner is None or deep == 0:
        return
    # A tuple cannot change, so it is looked into and never restored.
    if not isinstance(value, tuple):
        yield inner
    for each in inner.values() if isinstance(inner, dict) else inner:
        yield from _containers(each, deep - 1)


def _inner(value: Any) -> Any:
    """Return the contents of a container; None if the value is not one."""
    if isinstance(value, dict | list | set | deque | tuple):
        return value
    if isinstance(value, (*_NO_BOXES, BuiltinFunctionType)) or type(value).__module__.startswith(_LIBRARIES):
        return None
    held = getattr(value, "__dict__", None)
    return held if isinstance(held, dict) else None


def _copied(container: Any) -> Any:
    return (
        dict(container)
        if isinstance(container, dict)
        else set(container)
        if isinstance(container, set)
        else list(container)
    )


def _same(container: Any, before: Any) -> bool:
    """Return whether a container holds the same objects; comparing by value would be recorded as a call."""
    if len(container) != len(before):
        return False
    if isinstance(container, set):
        return {id(each) for each in container} == {id(each) for each in before}
    if isinstance(container, dict):
        pairs = zip(container.items(), before.items(), strict=True)
        return all(key is old and value is was for (key, value), (old, was) in pairs)
    return all(one is other for one, other in zip(container, before, strict=True))


def _form(value: Any, deep: int) -> Any:
    # Each trace makes proxies of its own: that there is one is all that two traces can have in common.
    if isinstance(value, fx.Proxy | fx.Node):
        return _VALUE
    if isinstance(value, Tensor):
        return Constant(value) if value.layout is torch.strided else id(value)
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return type(value), value
    inner = _inner(value) if deep else None
    if inner is None:
        return id(value)
    if isinstance(inner, dict):
        return [(_form(key, 0), _form(each, deep - 1)) for key, each in inner.items()]
    return [_form(each, deep - 1) for each in inner]
