"""Row counts: handlers of torch calls that ask how many rows there are, or compute with the answer.

Where it sits: ``gather_scatter`` puts them among its handlers. What a count of rows means where is in
``placement.symbolic_size``.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from kagome.placement.axis_rules import attribute
from kagome.placement.placement import ALIGNED, IDS, VERTICES, Placement, PlacementKind
from kagome.placement.symbolic_size import Entries, NoneHere, NoRowsHere, Shown, SymbolicSize, behind
from kagome.placement.torch_calls import Args, Func, Kwargs
from kagome.positions import edge_positions
from kagome.positions.position_scope import PositionScope
from kagome.user_frame import by_kagome, from_library


def size(scope: PositionScope, name: str, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Answer ``x.size(0)`` and ``x.shape`` of ids or of a tensor with one row per vertex or edge."""
    if name == "__get__" and attribute(func) != "shape":
        return NotImplemented
    placement = scope.placements.get(args[0])
    if placement is None or placement.kind is PlacementKind.MIXED:
        return NotImplemented
    size = list(func(args[0]))
    if placement.kind is PlacementKind.LOCAL and math.prod(size) != size[0]:
        return NotImplemented  # not a list of positions
    axis = len(size) - 1 if placement.kind in IDS else placement.axis
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    if dim is not None and dim not in (axis, axis - len(size)):
        return func(*args, **kwargs)  # torch checks that the axis exists
    what = placement if placement.axis == 0 else replace(placement, axis=0)
    if placement.kind in IDS:
        what = Placement(
            PlacementKind.PAIRS,
            placement.view,
            0,
            args[0] if placement.kind is PlacementKind.EDGES else placement.edges,
        )
    kind = edge_positions.counts(scope, what)
    count = kind(size[axis], what, lambda: scope.ranks.number_of(what, int(count)))
    count.divided = scope.batches.divided
    # User code sees the whole graph's number. PyG's and Kagome's own code allocates rows of this part.
    told = scope.parted and scope.ranks.knows_number(what) and not from_library() and not by_kagome()
    size[axis] = Shown.of(count) if told else count
    return torch.Size(size) if dim is None else size[axis]


def numel(scope: PositionScope, name: str, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Answer ``x.numel()``, so that ranks without edges take the same branch as their peers."""
    tensor = args[0] if args else kwargs["input"]
    placement = scope.placements.get(tensor)
    if not scope.parted or placement is None or placement.kind not in (*ALIGNED, *IDS, PlacementKind.LOCAL):
        return NotImplemented
    # GATConv returns early if ``index.numel() == 0``. A rank without edges must not skip its peers'
    # collectives.
    if from_library():
        if placement.kind in IDS and not func(tensor):
            return NoneHere(0)
        # HANConv returns early without rows of a vertex type.
        rows = scope.sets.several and placement.kind in VERTICES
        return NoRowsHere(0) if rows and not func(tensor) else NotImplemented
    sizes = behind(size(scope, "size", Tensor.size, (tensor,), {}))
    at = (
        next((at for at, each in enumerate(sizes) if isinstance(each, SymbolicSize)), None) if sizes else None
    )
    if at is None:
        return NotImplemented
    each = math.prod(int(other) for place, other in enumerate(sizes) if place != at)
    flat = placement.kind in VERTICES and at == 0 and placement.subset is None
    return Entries.of(
        sizes[at], each, placement.merged(each) if flat else Placement(PlacementKind.LOST, origin=name)
    )


def make(scope: PositionScope, name: str, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Mark ``torch.zeros(x.size(0))`` as a row per vertex, ``x.new_ones(3, row.size(0))`` as one per edge."""
    place = int(name.startswith("new"))
    size = args[place] if len(args) > place else kwargs.get("size")
    sizes = size if isinstance(size, (tuple, list)) else args[place:]
    axis = next((at for at, each in enumerate(sizes) if isinstance(each, SymbolicSize)), None)
    if axis is None:
        return NotImplemented
    count = sizes[axis]
    assert isinstance(count, SymbolicSize)
    if count.placement.kind is PlacementKind.LOCAL:
        return NotImplemented
    return scope.placements.put(func(*args, **kwargs), replace(count.placement, axis=axis))


def widened(scope: PositionScope, name: str, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Mark ``bias.expand(x.size(0), -1)`` as one row per vertex, all of them equal."""
    size = args[1] if len(args) == 2 and isinstance(args[1], (tuple, list)) else args[1:]
    axis = next((at for at, each in enumerate(size) if isinstance(each, SymbolicSize)), None)
    base = args[0]
    if axis is None or not isinstance(base, Tensor) or scope.placements.get(base) is not None:
        return NotImplemented
    at, count = base.dim() - len(size) + axis, size[axis]
    assert isinstance(count, SymbolicSize)
    if (at >= 0 and base.size(at) != 1) or count.placement.kind is PlacementKind.LOCAL:
        return NotImplemented
    return scope.placements.put(func(*args, **kwargs), replace(count.placement, axis=axis))


def scale(scope: PositionScope, name: str, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Answer ``x.sum(0) / x.size(0)`` with the number of rows on all ranks."""
    if not any(isinstance(value, SymbolicSize) for value in args):
        return NotImplemented
    given = [value.of_all() if isinstance(value, SymbolicSize) else value for value in args]
    out = func(*given, **kwargs)
    scope.placements.spread(name, args, kwargs, out)
    return out


def number(scope: PositionScope, name: str, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Answer ``x - x.size(0)`` or ``torch.tensor(x.size(0))`` in user code with the count over all ranks."""
    # In ``torch.full(size, fill)`` the size stays this part's number; only the fill value is converted.
    at = range(len(args)) if name not in FILLS else (FILLS[name],)
    named = [key for key in kwargs if key not in ("size", "dim")]
    found = [args[place] for place in at if place < len(args)] + [kwargs[key] for key in named]
    if not any(map(_counts, found)) or not scope.parted or from_library() or by_kagome():
        return NotImplemented
    given = tuple(_whole(value) if place in at else value for place, value in enumerate(args))
    return scope.__torch_function__(
        func, (), given, {**kwargs, **{key: _whole(kwargs[key]) for key in named}}
    )


def _counts(value: Any) -> bool:
    if type(value) in (list, tuple):
        return any(isinstance(each, SymbolicSize) for each in value)
    return isinstance(value, SymbolicSize)


def _whole(value: Any) -> Any:
    if type(value) in (list, tuple) and _counts(value):
        return type(value)(map(_whole, value))
    return value.of_all() if isinstance(value, SymbolicSize) else value


FILLS: Final = {"full": 1, "full_like": 1, "new_full": 2}
"""Calls with a size and a fill value, and the position of the fill value."""
RECKON: Final = (
    *("add", "add_", "sub", "sub_", "subtract", "rsub", "__radd__", "__rsub__", "pow", "pow_", "__rpow__"),
    *("gt", "ge", "lt", "le", "eq", "ne", "__gt__", "__ge__", "__lt__", "__le__", "__eq__", "__ne__"),
    *(
        "clamp",
        "clamp_",
        "clamp_min",
        "clamp_max",
        "clip",
        "hardtanh",
        "masked_fill",
        "masked_fill_",
        "fill_",
    ),
    *("floor_divide", "__floordiv__", "__rfloordiv__", "remainder", "fmod", "__mod__", "where", "lerp"),
    *("addcdiv", "addcmul", "mul_", "div_", "tensor", "as_tensor", "new_tensor", "scalar_tensor"),
)
"""Calls whose number arguments are not sizes."""
