"""Unbiasedness check: find layers whose output is biased under boundary sampling (``halo_sample < 1``).

Where it sits: ``check`` asks it before a run with ``halo_sample`` trains.

With a share p, a row is read as ``x / p`` if it is drawn, else as 0. A message m of the row is right on the
mean if ``p m(x / p) + (1 - p) m(0) = m(x)``, that is, if it is a multiple of the row plus a term that does
not depend on the row. Of such messages, only sums and averages are unbiased, too. Gathers that a
model makes itself, without PyG's message passing, are not checked.
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
"""Relative error of messages that counts as rounding in float32."""
RIGHT: Final = (aggr.SumAggregation, aggr.MeanAggregation)
HOLDERS: Final = (aggr.MultiAggregation, aggr.DegreeScalerAggregation, FusedAggregation)
"""Aggregations that combine the results of others."""


class Bias:
    """The bias of a model's layers, measured while the model runs.

    Args:
        model: The model, which runs as in plain PyG inside the ``with`` block.
        share: The share of rows that are drawn.
    """

    def __init__(self, model: nn.Module, share: float) -> None:
        self.model, self.share = model, share
        self.found: dict[str, str] = {}
        """The cause of the bias by the path of a layer."""
        self._undo: list[Callable[[], object]] = []

    def __enter__(self) -> Bias:
        for path, module in self.model.named_modules():
            if isinstance(module, MessagePassing):
                # PyG calls this hook with the arguments of `message`,
                # among them the rows x_j that would be drawn.
                handle = module.register_message_forward_pre_hook(self._look(path))
                self._undo.append(handle.remove)
                self._watch_edges(path, module)
        return self

    def __exit__(self, *_: object) -> None:
        for undo in self._undo:
            undo()
        self._undo = []

    def refusal(self) -> ModelError | None:
        """Return the error for the first biased layer; None if there is none."""
        for path, why in self.found.items():
            return ModelError(
                f"sums of messages that are multiples of a neighbour's row, for which alone "
                f"halo_sample={self.share} is right on the mean",
                f"{type(self.model.get_submodule(path)).__name__}, which {why}",
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
            # `not <=` also catches NaN.
            if not off <= OFF:
                self.found.setdefault(path, f"has messages that are off by {off:.0%} of their length there")
            # A maximum of unbiased messages is biased.
            other = _other_than_sums(module)
            if other is not None:
                self.found.setdefault(path, f"reduces them by {other}")

        return look

    def _watch_edges(self, path: str, module: MessagePassing) -> None:
        """Watch for edge values that are computed from rows: most messages multiply a row by them."""
        inner, names = module.edge_update, inspect.signature(module.edge_update)

        def edge_update(*args: Any, **kwargs: Any) -> Any:
            known = dict(names.bind(*args, **kwargs).arguments)
            if self._off(inner, known, constant=True):
                self.found.setdefault(path, "computes a value of each edge from the rows at its ends")
            return inner(*args, **kwargs)

        # On the instance, so that the class and other layers keep theirs.
        module.__dict__["edge_update"] = edge_update
        self._undo.append(lambda: module.__dict__.pop("edge_update", None))

    def _off(
        self, function: Callable[..., Any], known: dict[str, Any], *, constant: bool = False
    ) -> float | None:
        """Return the relative error of values of drawn rows on the mean; None where no row is drawn.

        Args:
            function: A function of rows.
            known: Its arguments by name.
            constant: Compare values of a drawn row with those of the row itself, in place of the mean.
        """
        # Rows that need no gradient are sent whole, once.
        rows = {name: value for name, value in known.items() if _drawn(name, value)}
        if not rows:
            return None

        def at(factor: float) -> Any:
            # Rows as a draw makes them: x / p, 0, or x itself.
            return function(**{**known, **{name: factor * value for name, value in rows.items()}})

        with torch.no_grad():
            try:
                # p m(x / p) + (1 - p) m(0) - m(x), see the head of the file.
                often, never, whole = at(1 / self.share), at(0.0), at(1.0)
            except Exception:  # the rows are made up: a real error will be raised in training
                return 0.0
            if not isinstance(whole, Tensor) or not whole.numel():
                return 0.0
            wrong = often - whole if constant else self.share * often + (1 - self.share) * never - whole
            return 0.0 if not whole.any() and not wrong.any() else float(wrong.norm() / whole.norm())


def _drawn(name: str, value: object) -> bool:
    return (
        # PyG's name for values of the source; x_i is the own row, which is never drawn.
        name.endswith("_j")
        and isinstance(value, Tensor)
        and value.is_floating_point()
        and value.requires_grad
    )


def _other_than_sums(module: MessagePassing) -> str | None:
    """Return the class of a layer's reduction that is not a sum or mean of messages; None if all are."""
    # An aggregation may hold others, such as Multi(mean, max): each of them counts.
    for each in module.aggr_module.modules() if module.aggr_module is not None else ():
        if isinstance(each, aggr.Aggregation) and not isinstance(each, (*RIGHT, *HOLDERS)):
            return type(each).__name__
    return None
