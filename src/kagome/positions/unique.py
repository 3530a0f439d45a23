"""Unique values: ``torch.unique`` and ``torch.bincount`` over what vertices or edges hold on all ranks.

Where it sits: one of the ``intercept.interceptor``'s handlers, on a part of the graph::

    for kind in edge_type.unique():     every rank loops over the same kinds, in the same order,
        out += conv[kind](x, ...)       including a rank whose part has no edge of a kind
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from kagome.placement.placement import ALIGNED, VERTICES, Placement, PlacementKind
from kagome.placement.symbolic_size import as_place
from kagome.positions.position_scope import Args, Func, Kwargs, PositionScope
from kagome.scope.rows import refused
from kagome.user_frame import from_library

WIDEST: Final = 2**22
"""Limit of the range between the least and the greatest value. Ranks compare one number per value in it."""


def unique(scope: PositionScope, name: str, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Answer ``unique(values, return_inverse, return_counts)`` for integers or booleans.

    Shapes:
        ``[k]`` values -> ``[u]``, equal on every rank; inverse ``[k]``, counts ``[u]``.

    Cost:
        One all-reduce of one number for each value from the least to the greatest.
    """
    values: Tensor = args[0] if args else kwargs["input"]
    placement = scope.placements.get(values)
    if not scope.parted or placement is None or placement.kind not in ALIGNED:
        return NotImplemented
    # HeteroBatchNorm updates its statistics of the types that there are: on all ranks, of those of all.
    more = any(kwargs.get(option) for option in ("return_inverse", "return_counts", "dim"))
    types = name == "unique" and placement.kind in VERTICES and not more
    if from_library() and (not types or values.is_floating_point()):
        return NotImplemented
    if name == "unique_consecutive" or kwargs.get("dim") is not None or values.is_floating_point():
        raise refused(scope, f"{name} of {values.dtype}, which tells a part's own values apart")
    with torch._C.DisableTorchFunction():
        whole = values.long()
    # Each rank marks which of the values from low to high it has; the maximum over ranks is their union.
    low, high = _ends(scope, whole)
    if high - low >= WIDEST:
        raise refused(scope, f"unique of values from {low:,} to {high:,}, which are more than ranks compare")
    with torch._C.DisableTorchFunction():
        there = torch.zeros(max(high - low + 1, 0), dtype=torch.float64, device=values.device)
        there[whole.reshape(-1) - low] = 1.0
    there = scope.ranks.greatest(there)
    with torch._C.DisableTorchFunction():
        found = there.nonzero().view(-1) + low
        # Position of each own value in the sorted list [u], as torch.unique returns it.
        inverse = torch.searchsorted(found, whole)
        counts = torch.bincount(inverse.reshape(-1), minlength=found.numel()).double()
    out = [found.to(values.dtype)]
    if kwargs.get("return_inverse"):
        out.append(scope.placements.put(inverse, _attribute(placement)))
    if kwargs.get("return_counts"):
        out.append(scope.ranks.total(counts).long())
    return out[0] if len(out) == 1 else tuple(out)


def _ends(scope: PositionScope, values: Tensor) -> tuple[int, int]:
    """Return the least and the greatest value over all ranks."""
    with torch._C.DisableTorchFunction():
        # max(-1 - v), which does not overflow as -v may, and max(v) in one all-reduce. Whole numbers: float64
        # rounds those beyond 2^53. A rank without values sends the least number, which never wins.
        far = torch.full((2,), torch.iinfo(torch.int64).min, device=values.device)
        if values.numel():
            far = torch.stack([~values.min(), values.max()])
    least, most = scope.ranks.greatest(far).tolist()
    return ~int(least), int(most)


def _attribute(placement: Placement) -> Placement:
    """Return the placement of values that vertices or edges hold."""
    return Placement(
        PlacementKind.ROWS if placement.kind is PlacementKind.NUMBERS else placement.kind,
        *(placement.view, placement.axis, placement.edges),
        subset=placement.subset,
        each=placement.each,
    )


def bincount(scope: PositionScope, name: str, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Answer ``bincount`` of integers that vertices or edges hold with the counts over all ranks."""
    values: Tensor = args[0] if args else kwargs["input"]
    placement = scope.placements.get(values)
    if not scope.parted or placement is None or placement.kind not in ALIGNED or from_library():
        return NotImplemented
    weights = kwargs.get("weights", args[1] if len(args) > 1 else None)
    least: Any = kwargs.get("minlength", args[2] if len(args) > 2 else 0)
    with torch._C.DisableTorchFunction():
        whole = values.long()
    _, high = _ends(scope, whole)
    with torch._C.DisableTorchFunction():
        # All ranks count up to the same greatest value, so that the counts can be summed.
        counts = torch.bincount(whole, weights, max(int(as_place(least)), high + 1))
    summed = scope.ranks.total(counts.double())
    if weights is None:
        return summed.long()  # torch returns integers for an empty input, even with weights
    return summed.to(torch.float32 if weights.dtype is torch.float32 else torch.float64)


HANDLERS: dict[str, Callable[..., Any]] = {
    "bincount": bincount,
    **dict.fromkeys(("unique", "unique_consecutive"), unique),
}
