"""Propagate cache: defers again what a layer's propagate deferred last time, without running its Python.

Where it sits: ``intercept.hooks`` calls it around each ``propagate``; each interceptor has one.

::

    propagate(edge_index, x=x, edge_weight=w)   the first time    w * x[source] summed over in-edges, deferred
                            x=x', all else same  from then on     the same for x', in a tenth of the time

It serves only unchanged layers of PyG, because a user's code may do more than torch shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import MessagePassing

from kagome.deferred.lazy_tensor import LazyTensor
from kagome.deferred.message import EdgeSet, Message, Source
from kagome.deferred.reduce import Reduce, Total
from kagome.replay.arguments import Guards, Rows, State, fits, guards_of, leaves_of, state_of

CALLED = frozenset(("message", "aggregate", "update", "message_and_aggregate"))
"""Methods of a layer that ``propagate`` calls."""
_Key = tuple[int, bool, bool]
"""Key of a recipe: a layer, whether it trains, and whether gradients are on."""


@dataclass(frozen=True, slots=True, eq=False)
class Recipe:
    """The arguments of a call, and the sum that it deferred.

    Args:
        guards: The guard of each argument.
        layer: The layer that was called.
        state: The layer's settings at that time.
        place: The position of the rows that were summed.
        edges: The edges of the sum.
        has_halo: Whether those were all rows, own and halo.
        site: The name of the read.
        weight: The weight of each edge.
        how: Sum or mean.
    """

    guards: Guards
    layer: MessagePassing
    state: State
    place: int
    edges: EdgeSet
    has_halo: bool
    site: str
    weight: Tensor | None
    how: Reduce

    def fits(self, leaves: Sequence[Any]) -> bool:
        """Return True if a call matches the recorded one."""
        return (
            fits(self.guards, leaves)
            and not self.edges.deferral.constants.is_constant(leaves[self.place])
            and state_of(self.layer) == self.state
        )

    def of(self, rows: Tensor) -> Tensor:
        """Return the deferred sum of other rows."""
        # The message notes the rows' version now. A write to them before the sum is computed is then refused,
        # as it would be in a message of PyG's own gather.
        source = Source(rows, self.has_halo, self.site)
        return self.edges.rows(LazyTensor(Total(Message(self.edges, None, source, self.weight), self.how)))


class PropagateCache:
    """The last call of each layer's ``propagate`` in training, and the last one in evaluation.

    Args:
        scope: The interceptor.
    """

    def __init__(self, scope: Any) -> None:
        self.scope = scope
        self._recipes: dict[_Key, Recipe] = {}

    def call(self, layer: MessagePassing, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor | None:
        """Return what a call defers if it is like the last one; else None."""
        recipe, scope = self._recipes.get(_key(layer)), self.scope
        if recipe is None or not scope.forward.fast:
            return None
        with torch._C.DisableTorchFunction():  # this is not the user's computation
            leaves = tuple(leaves_of((args, kwargs)))
            if not recipe.fits(leaves):
                return None
            rows = leaves[recipe.place]
            out = recipe.of(rows)
            if scope.recorder is not None:
                scope.recorder.summed(recipe.of, rows, out)
            return out

    def learn(self, layer: MessagePassing, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
        """Record what a call deferred, if it is a sum of rows that it was given."""
        key = _key(layer)
        # A call that did not fit ends the old recipe, even if it teaches nothing: the next call is more
        # likely to be like this one.
        self._recipes.pop(key, None)
        # A value that is known already was computed inside
        # ``propagate``, by calls that the recipe would leave out.
        expr = out.expr if isinstance(out, LazyTensor) and out.value is None else None
        if not isinstance(expr, Total) or not plain(layer):
            return
        with torch._C.DisableTorchFunction():
            leaves, message = tuple(leaves_of((args, kwargs))), expr.message
            # Only rows that the caller passed can be replaced by others. Rows that ``message`` has mapped
            # first are not among the leaves.
            place = next((at for at, leaf in enumerate(leaves) if leaf is message.parts[0]), None)
            guards = guards_of(leaves, self.scope.constants.is_constant)
            if place is None or guards is None or not isinstance(guards[place], Rows):
                return
            source = message.source
            # An attention weight, say, is computed from the rows of this call.
            if source is None or not self.scope.constants.is_constant(message.weight):
                return
            edges, weight, how = message.edges, message.weight, expr.how
            self._recipes[key] = Recipe(
                guards, layer, state_of(layer), place, edges, source.has_halo, source.site, weight, how
            )


def _key(layer: MessagePassing) -> _Key:
    return id(layer), layer.training, torch.is_grad_enabled()


def plain(layer: MessagePassing) -> bool:
    """Return True if a layer is unchanged PyG code, called in one piece, with no hooks inside."""
    # With ``explain`` messages are masked; with ``decomposed_layers`` ``message`` runs once for each piece of
    # the columns. Hooks on single methods (``register_message_forward_hook``) are the user's code.
    own, kinds = vars(layer), (type(layer), type(layer.aggr_module))
    watched = (f"_{called}_forward{when}_hooks" for called in (*CALLED, "propagate") for when in ("", "_pre"))
    return (
        all(kind.__module__.startswith("torch_geometric.nn.") for kind in kinds)
        and not any(name in own for name in CALLED)
        and not any(own.get(table) for table in watched)
        and not layer.explain
        and layer.decomposed_layers == 1
    )
