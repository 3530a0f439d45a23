"""Exact: what a split must not change - statistics over all vertices, dropout, attention over all vertices.

Where it sits: ``HANDLERS`` answer torch calls by name for ``neighbors.intercept``; they know a tensor's row
axis from its mark and reach the other ranks through the scope. Rules for single layer classes are in
``rules``.

To make another call exact: write a handler that takes (scope, name, func, args, kwargs), returns
NotImplemented where it has nothing to say, and add it to ``HANDLERS``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kagome.errors import ModelError
from kagome.model import draws
from kagome.model.norms import NORMS
from kagome.model.reductions import REDUCTIONS
from kagome.model.scope import Args, Func, Handler, Kwargs, Scope, argument

# Draws -------------------------------------------------------------------------------------------


def _ids(scope: Scope, x: Tensor, what: str) -> tuple[Tensor, int, int]:
    """A word a row of ``x``, the word of this draw, and the row axis."""
    path, index = scope.call()
    key = draws.call_key(scope.seed, scope.epoch, path, index)
    axis = scope.axis(x)
    ids: Tensor | None = None
    if (axis is None and x.dim() and x.size(0) == scope.own) or (axis is not None and scope.of_vertices(x)):
        # Without a mark (an operation that torch does not show) a row a vertex is the likely reading.
        ids, axis = scope.row_ids() if axis is None else scope.words_of(x), axis or 0
    elif axis is not None:
        ids = scope.pair_words(x, draws.edge_ids)
    elif x.dim():
        # Neither vertices nor edges, a virtual node or a weight: the same on every rank, so drawn alike.
        ids, axis = torch.arange(x.size(0), device=x.device), 0
    if ids is None or axis is None:
        raise ModelError(
            f"{what} draws a number for each vertex or each edge",
            f"it was given a tensor of shape {tuple(x.shape)} whose rows are neither",
            where=path,
            hint=f"apply {what} to a tensor with a row a vertex or a row an edge",
        )
    return ids, key, axis


def _dropout(scope: Scope, name: str, func: Func, args: Args, kwargs: Kwargs) -> Any:
    x: Tensor = args[0] if args else kwargs["input"]
    p = float(argument(args, kwargs, 1, "p", 0.5))
    if not 0.0 <= p <= 1.0:
        return NotImplemented
    training = argument(args, kwargs, 2, "train" if name != "dropout" else "training", True)
    if not training or p == 0.0:
        return x if scope.drops_shares(x) else NotImplemented
    ids, key, axis = _ids(scope, x, "dropout")
    if name == "dropout" and scope.drops_shares(x):
        return scope.drop_shares(
            x, lambda part, words, first: draws.dropout(part, words, key, p, 0, first), ids
        )
    if name == "feature_dropout" and x.dim() > 2:  # dropout1d: a number for a whole channel x[i, j]
        if axis > 1:
            raise ModelError(
                "a channel that is dropped belongs to one vertex",
                f"the rows lie along axis {axis}, so it is one channel of all of them",
                where=scope.where(),
                hint="give dropout1d a tensor [vertices, channels, ...]",
            )
        ones = x.new_ones(*x.shape[:2], *[1] * (x.dim() - 2))
        return scope.like(x * draws.dropout(ones, ids, key, p, axis), x)
    if name == "dropout_" or argument(args, kwargs, 3, "inplace", False):
        return x.mul_(draws.dropout(torch.ones_like(x), ids, key, p, axis))
    return scope.like(draws.dropout(x, ids, key, p, axis), x)


def _like_random(scope: Scope, name: str, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """``rand_like``, ``bernoulli`` and the like of a tensor with rows; ``torch.rand(x.size(0))``."""
    x: Any = args[0] if args else kwargs.get("input", kwargs.get("size"))
    if name in ("rand", "randn"):
        x = scope.made("empty", args, {k: v for k, v in kwargs.items() if k != "generator"})
    axis = scope.axis(x)
    if axis is None:
        return _shared(scope, name, func, args, kwargs)
    ids, key, axis = _ids(scope, x, name)
    rows = x.movedim(axis, 0)
    flat = draws.uniform(draws.row_keys(ids, key), rows[:1].numel() if rows.size(0) else 0)
    number = ((flat.double() + 0.5) / 2**32).reshape(rows.shape).movedim(0, axis)
    kind = kwargs.get("dtype") or x.dtype
    if name == "bernoulli":
        p = argument(args, kwargs, 1, "p")
        out = (number < (x if p is None else p)).to(x.dtype)
    elif name.startswith("rand") and not name.startswith("randn"):
        out = number.to(kind)
    else:
        out = (torch.erfinv(number * 2 - 1) * math.sqrt(2)).to(kind)
    return scope.like(out, x)


def _in_place(scope: Scope, name: str, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """``x.uniform_()`` and the like of a tensor with rows: the numbers of ``rand_like``, turned."""
    x: Tensor = args[0]
    if scope.axis(x) is None or not x.is_floating_point() or not draws.of_torch(func, kwargs):
        return _shared(scope, name, func, args, kwargs)
    ids, key, axis = _ids(scope, x, name)
    rows = x.movedim(axis, 0)
    flat = draws.uniform(draws.row_keys(ids, key), rows[:1].numel() if rows.size(0) else 0)
    number = ((flat.double() + 0.5) / 2**32).reshape(rows.shape).movedim(0, axis)
    if name == "uniform_":
        low, high = argument(args, kwargs, 1, "from", 0.0), argument(args, kwargs, 2, "to", 1.0)
        number = low + (high - low) * number
    elif name == "normal_":
        mean, std = argument(args, kwargs, 1, "mean", 0.0), argument(args, kwargs, 2, "std", 1.0)
        number = mean + std * math.sqrt(2) * torch.erfinv(number * 2 - 1)
    elif name == "exponential_":
        number = -number.log() / argument(args, kwargs, 1, "lambd", 1.0)
    else:
        number = (number < argument(args, kwargs, 1, "p", 0.5)).double()
    with torch.no_grad():
        x.copy_(number)
    return x


def _shared(scope: Scope, name: str, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """A draw that is no vertex's and no edge's: the same on every rank, in every stage and for every chunk.

    Torch's own generator stands elsewhere in each of them. What draws for rows is left to the check.
    """
    idle = name in ("rrelu", "rrelu_") and not argument(args, kwargs, 3, "training", False)
    if idle or not draws.of_torch(func, kwargs):
        return NotImplemented
    given = [*args, *kwargs.values()]
    inner = [each for value in given if isinstance(value, (tuple, list)) for each in value]
    if any(scope.counts(value) for value in (*given, *inner)):
        return NotImplemented
    path, index = scope.call()
    return draws.seeded(func, args, kwargs, draws.call_key(scope.seed, scope.epoch, path, index))


# Shapes, attention --------------------------------------------------------------------------------


def _view(scope: Scope, name: str, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """``x.view(x.size(0), heads, -1)`` of a part without rows: the -1 follows from the row's width."""
    x, shape = args[0], args[1] if len(args) == 2 and isinstance(args[1], (tuple, list)) else args[1:]
    if x.numel() or not all(isinstance(s, int) for s in shape) or -1 not in shape or 0 not in shape:
        return NotImplemented
    width = math.prod(s for s in x.shape if s) // math.prod(s for s in shape if s > 0)
    out: Tensor = func(x, [width if s == -1 else s for s in shape])
    return scope.like(out, x)


def _attention(scope: Scope, name: str, func: Func, args: Args, kwargs: Kwargs) -> Any:
    if argument(args, kwargs, 4, "dropout_p", 0.0) > 0.0:
        if scope.size == 1:
            path, index = scope.call()
            with torch.random.fork_rng():
                torch.manual_seed(draws.call_key(scope.seed, scope.epoch, path, index))
                return func(*args, **kwargs)
        raise ModelError(
            "dropout draws a number for each vertex or each edge",
            "attention drops within its kernel, which draws by the place of a rank's rows",
            where=scope.where(),
            hint="set the attention's dropout to 0, or drop from its weights: softmax, dropout, then @ value",
        )
    return NotImplemented


HANDLERS: Mapping[str, Handler] = {
    **dict.fromkeys(("dropout", "dropout_", "feature_dropout"), _dropout),
    **dict.fromkeys(draws.DRAWS, _shared),
    **dict.fromkeys(("uniform_", "normal_", "exponential_", "bernoulli_"), _in_place),
    **dict.fromkeys(("rand_like", "randn_like", "rand", "randn", "bernoulli"), _like_random),
    **NORMS,
    **REDUCTIONS,
    **dict.fromkeys(("view", "reshape"), _view),
    "scaled_dot_product_attention": _attention,
}
