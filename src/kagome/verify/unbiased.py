"""Drawn: layers for which a share of their neighbours' rows, made as much larger, is not right on the mean.

Where it sits: ``check`` asks before a run with ``halo_sample`` trains.

With a share p, a row is read as ``x / p`` where it is drawn, else as 0. A message m of it is right on the
mean where ``p m(x / p) + (1 - p) m(0) = m(x)``: where it is a multiple of the row, and what else it adds does
not depend on it. Only sums and averages of such messages are right, too. Gathers of a model's own, without
PyG's message passing, are not looked at.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing, aggr
from torch_geometric.nn.aggr.fused import FusedAggregation

from kagome.errors import ModelError

OFF: Final = 1e-4
"""By what share of their length messages may be off: rounding, in float32."""
RIGHT: Final = (aggr.SumAggregation, aggr.MeanAggregation)
HOLDERS: Final = (aggr.MultiAggregation, aggr.DegreeScalerAggregation, FusedAggregation)
"""Aggregations of others' results."""


class Bias:
    """What layers of a model are off by on the mean, watched while it runs.

    Args:
        model: Run as plain PyG does, between entering and leaving.
        share: Of the rows that are drawn.
    """

    def __init__(self, model: nn.Module, share: float) -> None:
        self.model, self.share = model, share
        self.found: dict[str, str] = {}
        """Path of a layer -> what is not right on the mean in it."""
        self._undo: list[Callable[[], object]] = []

    def __enter__(self) -> Bias:
        for path, module in self.model.named_modules():
            if isinstance(module, MessagePassing):
                handle = module.register_message_forward_pre_hook(self._look(path))
                self._undo.append(handle.remove)
                self._watch_edges(path, module)
        return self

    def __exit__(self, *_: object) -> None:
        for undo in self._undo:
            undo()
        self._undo = []

    def refusal(self) -> ModelError | None:
        """Of the first layer; None where all are right."""
        for path, why in self.found.items():
            return ModelError(
                f"halo_sample={self.share} draws rows, which is right on the mean for sums of messages that "
                "are multiples of a neighbour's row",
                f"{type(self.model.get_submodule(path)).__name__} {why}",
                where=path or "the model",
                hint="no halo_sample, or a layer that sums rows times weights: GCNConv, SAGEConv, GINConv",
            )
        return None

    def _look(self, path: str) -> Callable[[MessagePassing, tuple[dict[str, Any]]], None]:
        def look(module: MessagePassing, given: tuple[dict[str, Any]]) -> None:
            (known,) = given
            off = self._off(module.message, known)
            if off is None:
                return
            if not off <= OFF:
                self.found.setdefault(path, f"has messages that are off by {off:.0%} of their length there")
            other = _other_than_sums(module)
            if other is not None:
                self.found.setdefault(path, f"reduces them by {other}")

        return look

    def _watch_edges(self, path: str, module: MessagePassing) -> None:
        """An edge's value multiplies a row in most messages: where it comes from that row, it is wrong."""
        inner, names = module.edge_update, inspect.signature(module.edge_update)

        def edge_update(*args: Any, **kwargs: Any) -> Any:
            known = dict(names.bind(*args, **kwargs).arguments)
            if self._off(inner, known, constant=True):
                self.found.setdefault(path, "computes a value of each edge from the rows at its ends")
            return inner(*args, **kwargs)

        module.__dict__["edge_update"] = edge_update
        self._undo.append(lambda: module.__dict__.pop("edge_update", None))

    def _off(
        self, function: Callable[..., Any], known: dict[str, Any], *, constant: bool = False
    ) -> float | None:
        """By what share of their length values of drawn rows are off; None where no row is drawn.

        Args:
            function: Of rows.
            known: Its arguments by name.
            constant: Ask how far values of a drawn row are from those of the row itself.
        """
        # What needs no gradient is sent whole, once.
        rows = {name: value for name, value in known.items() if _drawn(name, value)}
        if not rows:
            return None

        def at(factor: float) -> Any:
            return function(**{**known, **{name: factor * value for name, value in rows.items()}})

        with torch.no_grad():
            try:
                often, never, whole = at(1 / self.share), at(0.0), at(1.0)
            except Exception:  # a user's function of rows that there never are: it will say so in training
                return 0.0
            if not isinstance(whole, Tensor) or not whole.numel():
                return 0.0
            wrong = often - whole if constant else self.share * often + (1 - self.share) * never - whole
            return 0.0 if not whole.any() and not wrong.any() else float(wrong.norm() / whole.norm())


def _drawn(name: str, value: object) -> bool:
    return (
        name.endswith("_j")
        and isinstance(value, Tensor)
        and value.is_floating_point()
        and value.requires_grad
    )


def _other_than_sums(module: MessagePassing) -> str | None:
    """The class of a layer's reduction that is no sum of messages; None where all are."""
    for each in module.aggr_module.modules() if module.aggr_module is not None else ():
        if isinstance(each, aggr.Aggregation) and not isinstance(each, (*RIGHT, *HOLDERS)):
            return type(each).__name__
    return None
