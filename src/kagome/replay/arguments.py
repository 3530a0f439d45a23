"""Stand-ins: what a call was given, so that a later call can be held against it.

Where it sits: ``propagate`` and ``layer_calls`` keep a tuple of these with what they have learned of a call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

State = tuple[tuple[str, Any], ...]
_CODE = (FunctionType, MethodType, BuiltinFunctionType, type)


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Stands for rows that are others in each call.

    Args:
        shape: Theirs.
        stride: Theirs: a layer may ask whether they are contiguous.
        dtype: Their type.
        grad: Whether they need a gradient.
        first: The first place that was given the same tensor.
    """

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    grad: bool
    first: int

    def fits(self, leaf: Any, leaves: Sequence[Any]) -> bool:
        """Whether rows may take the place of those."""
        return (
            type(leaf) is Tensor
            and leaf.shape == self.shape
            and leaf.stride() == self.stride
            and leaf.dtype == self.dtype
            and leaf.requires_grad == self.grad
            and leaf is leaves[self.first]
        )


@dataclass(frozen=True, slots=True, eq=False)
class Lasts:
    """Stands for a tensor that lasts.

    Args:
        tensor: The tensor.
        version: How often it had been written to.
    """

    tensor: Tensor
    version: int

    def fits(self, leaf: Any, leaves: Sequence[Any]) -> bool:
        """Whether it is this one."""
        return leaf is self.tensor and leaf._version == self.version


@dataclass(frozen=True, slots=True, eq=False)
class Other:
    """Stands for what is no tensor.

    Args:
        value: A number, a word, None or the like.
    """

    value: Any

    def fits(self, leaf: Any, leaves: Sequence[Any]) -> bool:
        """Whether it is the same."""
        return type(leaf) is type(self.value) and bool(leaf == self.value)


StandIns = tuple[Rows | Lasts | Other, ...]


def stand_ins(leaves: Sequence[Any], lasting: Callable[[Tensor], bool]) -> StandIns | None:
    """What stands for each value of a call; None where a call that is given one of them is not to be kept."""
    found: list[Rows | Lasts | Other] = []
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            if leaf is not None and not isinstance(leaf, (bool, int, float, str)):
                return None
            found.append(Other(leaf))
        elif lasting(leaf):
            found.append(Lasts(leaf, leaf._version))
        elif type(leaf) is not Tensor or leaf.layout is not torch.strided:
            return None
        else:
            first = next(at for at, other in enumerate(leaves) if other is leaf)
            found.append(Rows(leaf.shape, leaf.stride(), leaf.dtype, leaf.requires_grad, first))
    return tuple(found)


def fits(given: StandIns, leaves: Sequence[Any]) -> bool:
    """Whether a call is given what stood at each place."""
    return len(leaves) == len(given) and all(
        stand_in.fits(leaf, leaves) for stand_in, leaf in zip(given, leaves, strict=True)
    )


def leaves_of(values: Any) -> Iterator[Any]:
    """What nests of tuples, lists and tables hold, in order; lengths and names count too."""
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
    """A module's settings, its code, what was put on it, and which weights and modules it has."""
    found: list[tuple[str, Any]] = []
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
