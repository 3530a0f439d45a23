"""Drawn: layers for which a share of their neighbours' rows, made as much larger, is not right on the mean.

Where it sits: ``check`` asks before a run with ``halo_sample`` trains.

With a share p, a row is read as ``x / p`` where it is drawn, else as 0. A message m of it is right on the
mean where ``p m(x / p) + (1 - p) m(0) = m(x)``: where it is a multiple of the row, and what else it adds does
not depend on it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing

from kagome.errors import ModelError

OFF: Final = 1e-4
"""By what share of their length messages may be off: rounding, in float32."""


class Bias:
    """What messages of a model are off by on the mean, watched while it runs.

    Args:
        model: Run as plain PyG does, between entering and leaving.
        share: Of the rows that are drawn.
    """

    def __init__(self, model: nn.Module, share: float) -> None:
        self.model, self.share = model, share
        self.found: dict[str, float] = {}
        """Path of a layer -> by what share of their length its messages are off, if by more than rounding."""
        self._undo: list[Callable[[], None]] = []

    def __enter__(self) -> Bias:
        for path, module in self.model.named_modules():
            if isinstance(module, MessagePassing):
                handle = module.register_message_forward_pre_hook(self._look(path))
                self._undo.append(handle.remove)
        return self

    def __exit__(self, *_: object) -> None:
        for undo in self._undo:
            undo()
        self._undo = []

    def refusal(self) -> ModelError | None:
        """Of the layer that is off most; None where none is."""
        if not self.found:
            return None
        path = max(self.found, key=lambda each: self.found[each])
        return ModelError(
            f"halo_sample={self.share} draws rows, which is right on the mean for messages that are "
            "multiples of a neighbour's row",
            f"on a sample those of {type(self.model.get_submodule(path)).__name__} are off by "
            f"{self.found[path]:.0%} of their length on the mean",
            where=path or "the model",
            hint="no halo_sample, or a layer that sums rows times weights: GCNConv, SAGEConv, GINConv",
        )

    def _look(self, path: str) -> Callable[[MessagePassing, tuple[dict[str, Any]]], None]:
        def look(module: MessagePassing, given: tuple[dict[str, Any]]) -> None:
            (known,) = given
            # What needs no gradient is sent whole, once.
            rows = {name: value for name, value in known.items() if _drawn(name, value)}
            if not rows:
                return

            def at(factor: float) -> Any:
                return module.message(**{**known, **{name: factor * value for name, value in rows.items()}})

            with torch.no_grad():
                often, never, whole = at(1 / self.share), at(0.0), at(1.0)
            if not isinstance(whole, Tensor) or whole.numel() == 0:
                return
            off = float((self.share * often + (1 - self.share) * never - whole).norm() / whole.norm())
            if off > OFF:
                self.found[path] = max(off, self.found.get(path, 0.0))

        return look


def _drawn(name: str, value: object) -> bool:
    return (
        name.endswith("_j")
        and isinstance(value, Tensor)
        and value.is_floating_point()
        and value.requires_grad
    )
