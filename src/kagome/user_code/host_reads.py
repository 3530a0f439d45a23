"""Host reads: lists, arrays and booleans that a user's forward reads from tensors; these have no placement.

Where it sits: one of the handlers of ``intercept.gather_scatter``, on a part of the graph::

    x.tolist(), x.numpy()       would give rows of a part for those of the graph: refused
    float(x.quantile(0.5))      a number made from lost rows: refused, as it is where it stays a tensor
    torch.equal(x, y)           true where it is true on all ranks, so that all take one branch
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from kagome.deferred.lazy_tensor import now
from kagome.placement.placement import ALIGNED, IDS, VERTICES, PlacementKind, tensors
from kagome.positions.position_scope import Args, Func, Kwargs, PositionScope
from kagome.scope.rows import lost, refused
from kagome.user_frame import by_kagome, from_library

_WHOLE: Final = ("tolist", "numpy", "__array__", "__dlpack__")
_ONE: Final = ("item", "__float__", "__int__", "__bool__", "__index__", "__complex__")


def _theirs(scope: PositionScope) -> bool:
    """Return True if the user's own code makes the call, on a part."""
    return scope.parted and not from_library() and not by_kagome()


def taken(scope: PositionScope, name: str, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Refuse ``x.tolist()``, ``x.numpy()`` and ``x.item()`` that would read a part's rows or lost rows."""
    placement = scope.placements.get(args[0])
    if placement is None or not _theirs(scope):
        return NotImplemented
    # One number made of lost rows, such as a quantile, is as wrong as the rows.
    if placement.kind is PlacementKind.LOST:
        raise lost(scope, placement)
    if name in _WHOLE and placement.kind in ALIGNED:
        rows = "vertices" if placement.kind in VERTICES else "edges"
        raise refused(
            scope,
            f"{name}, which takes a part's own {rows} out of torch for those of the graph",
            hint="compute it with tensors, or before training (an attribute of the Data); "
            "or train on one rank",
        )
    return NotImplemented


def alike(scope: PositionScope, name: str, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Answer ``torch.equal(x, y)`` and ``torch.allclose(x, y)`` of rows by whether it holds on all ranks.

    Cost:
        An all-reduce of one number.
    """
    placements = [
        placement
        for tensor in tensors(args, kwargs)
        if (placement := scope.placements.get(tensor)) is not None
    ]
    if not placements or not _theirs(scope):
        return NotImplemented
    gone = next((placement for placement in placements if placement.kind is PlacementKind.LOST), None)
    if gone is not None:
        raise lost(scope, gone)
    if not any(placement.kind in (*ALIGNED, *IDS) for placement in placements):
        return NotImplemented
    # The greatest of "it differs here": equal only where no rank differs. A rank without rows never does.
    with torch._C.DisableTorchFunction():
        same = func(*map(_now, args), **{key: _now(value) for key, value in kwargs.items()})
        differs = torch.tensor(0.0 if same else 1.0, dtype=torch.float64, device=scope.device)
    return not bool(scope.ranks.greatest(differs))


def _now(value: Any) -> Any:
    return now(value) if isinstance(value, Tensor) else value


HANDLERS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys((*_WHOLE, *_ONE), taken),
    **dict.fromkeys(("equal", "allclose"), alike),
}
