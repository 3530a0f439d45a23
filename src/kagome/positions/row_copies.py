"""Row copies: rows that plain PyTorch returns as a view of a tensor, and that a part can only copy.

Where it sits: ``row_positions`` records them. ``intercept.interceptor`` checks here before a call that writes
in place.

::

    x[::2] *= 2          served: the assignment puts back what was written
    x[::2].mul_(2)       refused when the forward ends: the rows of x stay as they were
    v = x[5]; v += 1     refused likewise
"""

from __future__ import annotations

import torch
from torch import Tensor

from kagome.placement.weak_map import WeakTensorMap
from kagome.positions.position_scope import Args, PositionScope
from kagome.scope.rows import refused
from kagome.user_frame import user_line


class RowCopies:
    """The copies made in one forward, and which of them were written and not put back."""

    def __init__(self) -> None:
        self._held: WeakTensorMap[bool] = WeakTensorMap()
        self._open: list[tuple[Tensor, str]] = []

    def note(self, rows: Tensor) -> Tensor:
        """Record that a tensor would be a view in plain PyTorch, and return it."""
        self._held[rows] = True
        return rows

    def meet(self, name: str, args: Args) -> None:
        """Check a call that may write into a copy, or put back what was written."""
        # Every torch call of a part passes here.
        if not len(self._held) or not args or not isinstance(args[0], Tensor):
            return
        assigns = name == "__setitem__"
        # x[::2] *= 2 runs as three calls: rows = x[::2]; rows *= 2; x[::2] = rows. The third puts rows back.
        if assigns and len(args) > 2:
            self._open = [each for each in self._open if each[0] is not args[2]]
        if not assigns and (not name.endswith("_") or name.startswith("_")):
            return
        # Rows of a copy, v[0].zero_(), share its memory.
        with torch._C.DisableTorchFunction():
            whole = args[0]._base
        if args[0] in self._held or (whole is not None and whole in self._held):
            self._open.append((args[0], f"{name} ({user_line()})"))

    def end(self, scope: PositionScope) -> None:
        """Forget the copies at the end of a forward.

        Raises:
            ModelError: If a copy was written and not put back.
        """
        left, self._open = self._open, []
        self._held = WeakTensorMap()
        if left:
            raise refused(
                scope,
                f"{left[0][1]}, which writes in place into rows that were read by their place",
                hint="assign to the place itself: x[place] = value",
            )
