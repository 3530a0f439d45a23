"""Arguments: guards for what a call was given, against which a later call is checked.

Where it sits: ``propagate`` and ``layer_calls`` keep a tuple of these guards with what they learned of a
call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

State = tuple[tuple[str, Any], ...]
# Values that are code. Layer rules and users set functions on single layers; another function, as told by its
# identity, makes another call.
_CODE = (FunctionType, MethodType, BuiltinFunctionType, type)


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Guard for rows that differ in each call.

    Args:
        shape: The shape of the rows.
        stride: Their strides; a layer may ask whether they are contiguous.
        dtype: Their type.
        grad: Whether they need a gradient.
        first: The position of the first argument that was the same tensor.
    """

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    grad: bool
    first: int

    def fits(self, leaf: Any, leaves: Sequence[Any]) -> bool:
        """Return True if these rows can take the place of the recorded ones."""
        return (
            # An exact type: a parameter is a weight, and a lazy tensor brings calls that were not recorded.
            type(leaf) is Tensor
            and leaf.shape == self.shape
            and leaf.stride() == self.stride
            and leaf.dtype == self.dtype
            and leaf.requires_grad == self.grad
            and leaf is leaves[self.first]
        )


@dataclass(frozen=True, slots=True, eq=False)
class SameTensor:
    """Guard for a tensor that is constant.

    Args:
        tensor: The tensor.
        version: Its version when it was recorded.
    """

    tensor: Tensor
    version: int

    def fits(self, leaf: Any, leaves: Sequence[Any]) -> bool:
        """Return True if the argument is this tensor, unchanged."""
        return leaf is self.tensor and leaf._version == self.version


@dataclass(frozen=True, slots=True, eq=False)
class Other:
    """Guard for an argument that is not a tensor.

    Args:
        value: A number, a string, None or the like.
    """

    value: Any

    def fits(self, leaf: Any, leaves: Sequence[Any]) -> bool:
        """Return True if the argument has the same type and value."""
        return type(leaf) is type(self.value) and bool(leaf == self.value)


Guards = tuple[Rows | SameTensor | Other, ...]


def guards_of(leaves: Sequence[Any], is_constant: Callable[[Tensor], bool]) -> Guards | None:
    """Return a guard for each value of a call; None if a value is of a kind that prevents replay."""
    found: list[Rows | SameTensor | Other] = []
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            if leaf is not None and not isinstance(leaf, (bool, int, float, str)):
                # A sparse matrix or another object may hold rows, which no guard would see.
                return None
            found.append(Other(leaf))
        elif is_constant(leaf):
            found.append(SameTensor(leaf, leaf._version))
        elif type(leaf) is not Tensor or leaf.layout is not torch.strided:
            return None
        else:
            # ``conv((x, x))`` reads one tensor in two places, and may sum it once. ``conv((x, y))`` differs.
            first = next(at for at, other in enumerate(leaves) if other is leaf)
            found.append(Rows(leaf.shape, leaf.stride(), leaf.dtype, leaf.requires_grad, first))
    return tuple(found)


def fits(guards: Guards, leaves: Sequence[Any]) -> bool:
    """Return True if each argument of a call passes its guard."""
    return len(leaves) == len(guards) and all(
        guard.fits(leaf, leaves) for guard, leaf in zip(guards, leaves, strict=True)
    )


def leaves_of(values: Any) -> Iterator[Any]:
    """Yield the values in nested tuples, lists and dicts, in order, with their lengths and names."""
    # Lengths and names are leaves too, so that ``(x, [y])`` and ``([x, y],)`` are two calls.
    if isinstance(values, (tuple, list)):
        yield len(values)
        for value in values:
            yield from leaves_of(value)
    elif isinstance(values, dict):
        for name, value in values.items():
            yield name
            yield from leaves_of(value)
    else:
        yield values


def state_of(module: nn.Module) -> State:
    """Return a module's settings, code and hook counts, and the identities of its weights and modules."""
    found: list[tuple[str, Any]] = []
    # Weights count by identity: a replay reads their present values, and an optimizer's step changes only
    # those. Hooks count by number: which ones they are was checked when the call was recorded.
    for name, value in vars(module).items():
        if value is None or isinstance(value, (bool, int, float, str)):
            found.append((name, value))
        elif isinstance(value, _CODE):
            found.append((name, id(value)))
        elif name.endswith("_hooks"):
            found.append((name, len(value)))
        elif name in ("_parameters", "_buffers", "_modules"):
            found += [(key, id(part)) for key, part in value.items()]
    return tuple(found)
