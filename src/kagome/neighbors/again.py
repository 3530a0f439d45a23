"""Again: what a layer's propagate put off the last time is put off again, without running its Python.

Where it sits: ``install`` asks it around each ``propagate``; each interception keeps one.

::

    propagate(edge_index, x=x, edge_weight=w)   the first time    w * x[source] summed over in-edges, put off
                            x=x', all else same  from then on     the same of x', in a tenth of the time

Only for layers of PyG as they are: code of the user's may do more than torch shows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import MessagePassing

from kagome.neighbors.lazy import Lazy
from kagome.neighbors.messages import EdgeSet, Message, Source
from kagome.neighbors.reduce import Reduce, Total

CALLED = frozenset(("message", "aggregate", "update", "message_and_aggregate"))
"""Methods of a layer that propagate calls."""

State = tuple[tuple[str, Any], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Stands for rows that are others in each call.

    Args:
        shape: Theirs.
        dtype: Their type.
        grad: Whether they need a gradient.
        first: The first place that was given the same tensor.
    """

    shape: torch.Size
    dtype: torch.dtype
    grad: bool
    first: int

    def fits(self, leaf: Any, leaves: Sequence[Any]) -> bool:
        """Whether rows may take the place of those."""
        return (
            type(leaf) is Tensor
            and leaf.shape == self.shape
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


@dataclass(frozen=True, slots=True, eq=False)
class Recipe:
    """What a call was given, and the sum that it put off.

    Args:
        given: What stood at each place.
        layer: Whose call.
        state: The layer's settings then.
        grad: Whether gradients were on.
        place: Where the rows stood that were summed.
        edges: The edges.
        whole: Whether those were all rows, own and halo.
        site: What the read is called.
        weight: One an edge.
        how: Sum or mean.
    """

    given: tuple[Rows | Lasts | Other, ...]
    layer: MessagePassing
    state: State
    grad: bool
    place: int
    edges: EdgeSet
    whole: bool
    site: str
    weight: Tensor | None
    how: Reduce

    def fits(self, leaves: Sequence[Any]) -> bool:
        """Whether a call is like that one."""
        return (
            len(leaves) == len(self.given)
            and all(stand_in.fits(leaf, leaves) for stand_in, leaf in zip(self.given, leaves, strict=True))
            and not self.edges.scope.lasting(leaves[self.place])
            and state_of(self.layer) == self.state
        )

    def of(self, rows: Tensor) -> Tensor:
        """The sum of other rows, put off."""
        source, roots = Source(rows, self.whole, self.site), ((rows, rows._version),)
        return self.edges.rows(
            Lazy(Total(Message(self.edges, None, source, self.weight, roots=roots), self.how))
        )


class Again:
    """The last call of each layer's ``propagate``.

    Args:
        scope: The interception.
    """

    def __init__(self, scope: Any) -> None:
        self.scope = scope
        self._recipes: dict[int, Recipe] = {}

    def call(self, layer: MessagePassing, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor | None:
        """What a call puts off, if it is like the last one; else None."""
        recipe = self._recipes.get(id(layer))
        if recipe is None or not self.scope.fast or torch.is_grad_enabled() != recipe.grad:
            return None
        with torch._C.DisableTorchFunction():  # it is not the user's computation
            leaves = tuple(_leaves((args, kwargs)))
            return recipe.of(leaves[recipe.place]) if recipe.fits(leaves) else None

    def learn(self, layer: MessagePassing, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
        """Keep what a call put off, if it is a sum of rows that it was given."""
        self._recipes.pop(id(layer), None)
        expr = out.expr if isinstance(out, Lazy) and out.value is None else None
        if not isinstance(expr, Total) or not _plain(layer):
            return
        with torch._C.DisableTorchFunction():
            leaves, message = tuple(_leaves((args, kwargs))), expr.message
            place = next((at for at, leaf in enumerate(leaves) if leaf is message.parts[0]), None)
            given = [self._stand_in(leaf, leaves) for leaf in leaves]
            known = [stand_in for stand_in in given if stand_in is not None]
            if place is None or len(known) < len(given) or not isinstance(given[place], Rows):
                return
            source = message.source
            if source is None or not self.scope.lasting(message.weight):
                return
            edges, weight, how = message.edges, message.weight, expr.how
            self._recipes[id(layer)] = Recipe(
                *(tuple(known), layer, state_of(layer), torch.is_grad_enabled(), place),
                *(edges, source.whole, source.site, weight, how),
            )

    def _stand_in(self, leaf: Any, leaves: Sequence[Any]) -> Rows | Lasts | Other | None:
        """What stands for a value; None where a call that is given it is not to be kept."""
        if not isinstance(leaf, Tensor):
            return Other(leaf) if leaf is None or isinstance(leaf, (bool, int, float, str)) else None
        if self.scope.lasting(leaf):
            return Lasts(leaf, leaf._version)
        if type(leaf) is not Tensor:
            return None
        first = next(at for at, other in enumerate(leaves) if other is leaf)
        return Rows(leaf.shape, leaf.dtype, leaf.requires_grad, first)


def state_of(layer: MessagePassing) -> State:
    """A layer's settings, its aggregation, and what was put on it: all but tensors and other tables."""
    found: list[tuple[str, Any]] = [("aggr_module", id(layer.aggr_module))]
    for name, value in vars(layer).items():
        if value is None or isinstance(value, (bool, int, float, str)):
            found.append((name, value))
        elif name in CALLED:
            found.append((name, id(value)))
        elif name.endswith("_hooks"):
            found.append((name, len(value)))
    return tuple(found)


def _plain(layer: MessagePassing) -> bool:
    """Whether a layer is PyG's as it is, called in one piece, and nobody watches what happens inside."""
    own, kinds = vars(layer), (type(layer), type(layer.aggr_module))
    watched = (f"_{called}_forward{when}_hooks" for called in (*CALLED, "propagate") for when in ("", "_pre"))
    return (
        all(kind.__module__.startswith("torch_geometric.nn.") for kind in kinds)
        and not any(name in own for name in CALLED)
        and not any(own.get(table) for table in watched)
        and not layer.explain
        and layer.decomposed_layers == 1
    )


def _leaves(values: Any) -> Iterator[Any]:
    """What nests of tuples, lists and tables hold, in order; names count too."""
    if isinstance(values, (tuple, list)):
        for value in values:
            yield from _leaves(value)
    elif isinstance(values, dict):
        for name, value in values.items():
            yield name
            yield from _leaves(value)
    else:
        yield values
