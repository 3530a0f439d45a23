"""Regroup: where a view puts the rows of vertices or edges when it merges or splits axes.

Where it sits: ``scope.batches`` asks it for ``view``, ``reshape``, ``flatten`` and ``unflatten``. It takes
the shapes of the whole graph, the same on all ranks: a part may have one row, or none, and its own
shapes then fit several ways.

::

    [A * copies * N * each, B]     N rows, in copies * A samples, with each * B entries a row
      -> [A, N, C]     copies 1, each 1        x.view(batch, -1, C)
      -> [A * N, C]    copies A, each 1        x.reshape(batch * N, C): a batch flattened into rows
      -> [A, N * H, D] copies 1, each H        x.view(batch, N * H, D)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import Tensor

from kagome.placement.symbolic_size import as_place


@dataclass(frozen=True, slots=True)
class Group:
    """The rows along an axis.

    Args:
        axis: The axis.
        copies: How many samples follow one another along it.
        each: How many consecutive entries belong to a row.
    """

    axis: int
    copies: int = 1
    each: int = 1


def regrouped(shape: Sequence[int], group: Group, rows: int, out: Sequence[int]) -> Group | None:
    """Return where a view of a tensor has its rows.

    Args:
        shape: The tensor's shape in the whole graph.
        group: Its rows.
        rows: The number of rows of one sample.
        out: The view's shape in the whole graph.

    Returns:
        The view's rows; None if entries of several rows meet, or of one sample and the next.

    Example:
        >>> regrouped([4, 100, 8], Group(1), 100, [400, 8])
        Group(axis=0, copies=4, each=1)
        >>> regrouped([400, 8], Group(0, copies=4), 100, [100, 32]) is None
        True
    """
    # Entries before row 0 of a sample, and of one row: a view changes neither.
    before = prod(shape[: group.axis]) * group.copies
    within = prod(shape[group.axis + 1 :]) * group.each
    have = 1
    for axis, size in enumerate(out):
        rest = prod(out[axis + 1 :])
        if have and before % have == 0 and rest and within % rest == 0:
            found = Group(axis, before // have, within // rest)
            if found.copies and found.each and size == found.copies * rows * found.each:
                return found
        have *= size
    return None


def whole_view(
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    shape: Sequence[int],
    whole_of: Callable[[Tensor], list[int]],
) -> list[int] | None:
    """Return the shape that a view has in the whole graph; None if the call does not say.

    Args:
        name: The call: one of ``axis_rules.VIEWS``.
        args: Its positional arguments.
        kwargs: Its named arguments.
        shape: The shape of the tensor that is viewed, in the whole graph.
        whole_of: The shape of another tensor in the whole graph.
    """
    shape = list(shape)
    if name in ("view_as", "reshape_as"):
        other = args[1] if len(args) > 1 else kwargs.get("other")
        return whole_of(other) if isinstance(other, Tensor) else None
    if name == "flatten":
        given = dict(zip(("start_dim", "end_dim"), args[1:], strict=False)) | kwargs
        ends = given.get("start_dim", 0), given.get("end_dim", -1)
        first, last = (range(len(shape))[end] for end in ends)
        return [*shape[:first], prod(shape[first : last + 1]), *shape[last + 1 :]]
    if name == "unflatten":
        given = dict(zip(("dim", "sizes"), args[1:], strict=False)) | kwargs
        at = range(len(shape))[given["dim"]]
        pieces = _sizes(given["sizes"], shape[at])
        return None if pieces is None else [*shape[:at], *pieces, *shape[at + 1 :]]
    sizes = kwargs.get("size", kwargs.get("shape", args[1:]))
    if isinstance(sizes, tuple | list) and len(sizes) == 1 and isinstance(sizes[0], tuple | list):
        sizes = sizes[0]
    return _sizes(sizes, prod(shape))


def _sizes(given: Any, entries: int) -> list[int] | None:
    """Return sizes with -1 replaced; None if they do not hold this many entries."""
    if not isinstance(given, tuple | list) or not all(isinstance(each, int) for each in given):
        return None
    sizes = [int(as_place(each)) for each in given]
    if -1 in sizes:
        known = prod(each for each in sizes if each != -1)
        if not known or entries % known:
            return None
        sizes[sizes.index(-1)] = entries // known
    return sizes if prod(sizes) == entries else None
