"""Exact handlers: torch calls whose result a split must not change, from statistics and dropout to attention.

Where it sits: ``HANDLERS`` answer torch calls by name for ``intercept.interceptor``. A handler knows a
tensor's row axis from its placement, and reaches the other ranks through the scope. Rules for single layer
classes are in ``layer_rules``.

To make another call exact: write a handler that takes (scope, name, func, args, kwargs) and returns
NotImplemented where it does not apply, and add it to ``HANDLERS``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import FunctionType
from typing import Any, Final

import torch
from torch import Tensor

from kagome.model.exact import dropout
from kagome.model.exact.distributions import LAWS, Given, Number, given_of, handed_out
from kagome.model.exact.global_attention import ATTENTION
from kagome.model.exact.norms import NORMS
from kagome.model.exact.reductions import REDUCTIONS
from kagome.model.exact.scope import Args, Func, Handler, Kwargs, Scope, argument
from kagome.scope.rows import draw_refused

# Draws -------------------------------------------------------------------------------------------


def _ids(scope: Scope, x: Tensor, what: str) -> tuple[Tensor, int, int]:
    """Return a word for each row of ``x``, the key of this draw, and the row axis."""
    path, index = scope.forward.call()
    key = dropout.call_key(scope.seed, scope.forward.forward_pass.epoch, path, index)
    axis = scope.axes.of(x)
    if axis is not None and not scope.axes.of_vertices(x):
        counters = scope.ids.edge_counters(x, dropout.edge_ids)
        if counters is None:
            raise draw_refused(scope, what, f"it is not known of which edges the {x.size(axis)} rows are")
        return counters, key, axis
    if axis is not None:
        return scope.ids.row_counters(x), key, axis
    if x.dim() and not isinstance(x, torch.nn.Parameter) and _are_own(scope, x):
        if x.size(0) != scope.sets[0].own or scope.sets.several:
            raise draw_refused(scope, what, f"it is not known whose the {x.size(0)} rows are")
        return scope.ids.own(), key, 0
    # Neither vertices nor edges, but a virtual node or a weight: equal on every rank, so drawn alike.
    return torch.arange(x.size(0) if x.dim() else 1, device=x.device), key, 0


def _are_own(scope: Scope, x: Tensor) -> bool:
    """Return True if rows without a placement are own vertices'."""
    # They may come from an operation that torch does not show. All ranks must decide alike, whatever their
    # numbers of rows. With all rows on one rank both draws agree, and a chunk has no other rows to compare
    # with.
    if scope.size == 1:
        return not scope.sets.several and x.size(0) == scope.sets[0].own
    return not scope.ranks.have_equal(x)


def _as_seeded(scope: Scope, name: str, func: Func, args: Args, kwargs: Kwargs, x: Tensor) -> Any:
    """Draw as torch does once forward has seeded its generator; possible only where all rows are here."""
    if scope.parted:
        raise _refused_seed(scope, name)
    out = func(*args, **kwargs)
    return scope.axes.like(out, x) if isinstance(out, Tensor) else out


def _refused_seed(scope: Scope, name: str) -> Exception:
    return draw_refused(scope, name, "forward seeds torch's generator, which draws in the order of rows")


def _dropout(scope: Scope, name: str, func: Func, args: Args, kwargs: Kwargs) -> Any:
    # The cases, in order: torch's own errors and scalars; F's Python functions;
    # nothing to drop; a seed of the forward's own; attention that is deferred;
    # plain dropout by a kernel; feature, alpha and in-place dropout by a mask.
    x, p, training, in_place = dropout.call_of(name, func, args, kwargs)
    if not 0.0 <= p <= 1.0 or not x.dim():
        return NotImplemented
    if isinstance(func, FunctionType) and name != "dropout":
        return NotImplemented  # torch's Python function calls the native one of this name
    if not training or p == 0.0:
        return x if scope.deferral.drops_shares(x) else NotImplemented
    if scope.forward.own_seed():
        return _as_seeded(scope, name, func, args, kwargs, x)
    # GAT's attention weights [edges, heads] are not computed yet: the draw waits inside their expression.
    # ``first`` is the first head where a rank has a slice of them.
    if name == "dropout" and scope.deferral.drops_shares(x):
        ids, key, _ = _ids(scope, x, name)
        return scope.deferral.drop_shares(
            x, lambda part, counters, first: dropout.dropout(part, counters, key, p, 0, first), ids
        )
    if not name.startswith(("feature", "alpha")) and not in_place:
        ids, key, axis = _ids(scope, x, name)
        return scope.axes.like(dropout.dropout(x, ids, key, p, axis), x)
    keep_mask = _keep_mask(scope, x, name, p)
    shift: Tensor | float = 0.0
    if "alpha" in name:
        # Alpha dropout sets dropped entries to -_SELU and then maps a x + b, to keep mean 0 and variance 1:
        # a = length / _SELU = ((1 - p) (1 + p _SELU^2))^-1/2 and b = p length.
        # ``kept`` is 1 - p times the usual mask, so 1 or 0 for each entry.
        length = _SELU / math.sqrt((_SELU**2 * p + 1) * (1 - p)) if p < 1 else 0.0
        kept = keep_mask * (1 - p)
        keep_mask, shift = kept * (length / _SELU), (kept - (1 - p)) * length
    if in_place:
        return x.mul_(keep_mask).add_(shift) if "alpha" in name else x.mul_(keep_mask)
    return scope.axes.like(x * keep_mask + shift if "alpha" in name else x * keep_mask, x)


_SELU: Final = 1.7580993408473766
"""Absolute value of a dropped entry in a self-normalising network before rescaling; it is negative."""


def _keep_mask(scope: Scope, x: Tensor, name: str, p: float) -> Tensor:
    """Return 0 where an entry, or a whole channel ``x[i, j]``, is dropped, else ``1 / (1 - p)``."""
    if not name.startswith("feature") or x.dim() < 3:
        ids, key, axis = _ids(scope, x, name)
        return dropout.dropout(torch.ones_like(x), ids, key, p, axis)
    ones = dropout.channels(x)
    # The mask is [x.size(0), x.size(1), 1, ...]. With rows of vertices further inside, all ranks must draw
    # the same one: a parameter counts as a tensor without rows.
    if (scope.axes.of(x) or 0) > 1:  # one channel of all rows
        ids, key, axis = _ids(scope, torch.nn.Parameter(ones), name)
    else:
        ids, key, axis = _ids(scope, x, name)
    return dropout.dropout(ones, ids, key, p, axis)


def _rrelu(scope: Scope, name: str, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Answer ``rrelu``: leaky ReLUs with a random slope for each entry."""
    x: Tensor = args[0] if args else kwargs["input"]
    if not argument(args, kwargs, 3, "training", False) or not dropout.of_torch(func, kwargs):
        return NotImplemented
    if scope.forward.own_seed():
        return _as_seeded(scope, name, func, args, kwargs, x)
    low, high = argument(args, kwargs, 1, "lower", 1 / 8), argument(args, kwargs, 2, "upper", 1 / 3)
    slope = low + (high - low) * _numbers(*_ids(scope, x, name))(tuple(x.shape), 0).to(x.dtype)
    # Slope 1 for positive entries, so that one product is the layer and its gradient.
    factor = torch.where(x.detach() <= 0, slope, torch.ones_like(slope))
    return x.mul_(factor) if name.endswith("_") else scope.axes.like(x * factor, x)


def _numbers(ids: Tensor, key: int, axis: int) -> Number:
    """Return the function that gives uniform numbers of these rows for a shape."""
    keys = dropout.row_keys(ids, key)

    def number(shape: tuple[int, ...], place: int) -> Tensor:
        # [rows, columns] with all other axes as columns. Each place of a call has columns of its own.
        # (u + 1/2) / 2^32 is never 0 or 1, of which laws take the log.
        rest = [size for at, size in enumerate(shape) if at != axis]
        columns = math.prod(rest)
        flat = dropout.uniform(keys, columns, place * columns)
        return ((flat.double() + 0.5) / 2**32).reshape(keys.numel(), *rest).movedim(0, axis)

    return number


def _drawn(scope: Scope, name: str, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Answer a draw of rows by its law: ``rand_like``, ``x.uniform_()``, ``torch.normal(x, 1.0)``, ..."""
    given = given_of(name, args, kwargs)
    found = drawn_for(scope, name, given)
    if found is None:
        return _shared(scope, name, func, args, kwargs)
    if kwargs.get("generator") is not None or scope.forward.own_seed():
        return _by_generator(scope, name, func, args, kwargs, found)
    given["shape"] = tuple(found.shape)
    out = LAWS[name](_numbers(*_ids(scope, found, name)), given)
    return scope.axes.like(handed_out(name, given, found, out), found)


def drawn_for(scope: Scope, name: str, given: Given) -> Tensor | None:
    """Return a tensor with the shape, type and rows of a draw's result; None if the result has no rows.

    Raises:
        ModelError: If the draw chooses among the rows instead of drawing for each row.
    """
    if given.get("size") is not None:
        # A size that counts rows (``torch.rand(x.size(0), 3)``) gives
        # a tensor with rows; ``made`` returns None for any other.
        kind = given.get("dtype") or (torch.int64 if name == "randint" else None)
        return scope.made("empty", (given["size"],), {"dtype": kind, "device": given.get("device")})
    tensors = [value for value in given.values() if isinstance(value, Tensor)]
    base = next((each for each in tensors if scope.axes.of(each) is not None), None)
    if base is None:
        return None
    if (
        scope.parted
        and name in ("multinomial", "_sample_dirichlet")
        and scope.axes.of(base) == base.dim() - 1
    ):
        raise draw_refused(scope, name, "it draws among all vertices or edges")
    # ``torch.normal(mean [n, 1], std [3])`` draws [n, 3]: the row axis counts from the end.
    shape = torch.broadcast_shapes(*(each.shape for each in tensors))
    if base.shape == shape:
        return base
    axis = scope.axes.of(base)
    assert axis is not None
    return scope.axes.like(base.expand(shape), base, axis + len(shape) - base.dim())


def _by_generator(scope: Scope, name: str, func: Func, args: Args, kwargs: Kwargs, rows: Tensor) -> Any:
    """Draw with the user's own generator: each rank draws all vertices' numbers and keeps its own."""
    if not scope.parted or kwargs.get("generator") is None:
        return _as_seeded(scope, name, func, args, kwargs, rows)
    given = given_of(name, args, kwargs)
    sized = given.get("size") is not None
    if not scope.axes.of_each_vertex(rows) or not (sized or name.endswith(("_", "_like"))):
        raise draw_refused(scope, name, "a generator of your own draws in the order of the rows")
    axis = scope.axes.of(rows)
    assert axis is not None
    # The generator is in the same state on all ranks, and stays so only if all draw equally many numbers.
    placement = scope.axes.placements.get(rows)
    assert placement is not None
    shape = [scope.sets.of(placement).size if at == axis else size for at, size in enumerate(rows.shape)]
    if sized:
        values = [given[each] for each in ("low", "high", "mean", "std") if each in given]
        whole = func(*values, size=shape, dtype=rows.dtype, generator=given["generator"])
    else:
        whole = func(rows.new_empty(shape), *args[1:], **kwargs)
    own = whole.index_select(axis, scope.ids.own(placement.vertex_set))
    return scope.axes.like(handed_out(name, given, rows, own), rows)


def _shared(scope: Scope, name: str, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Answer a draw of neither vertices nor edges: the same on every rank, in every stage and chunk.

    Torch's own generator is in another state in each of them.
    """
    # A function of torch's in Python runs, and its native draw comes here in turn.
    if isinstance(func, FunctionType):
        return NotImplemented
    args = counted(scope, name, args, kwargs)
    if kwargs.get("generator") is not None or (scope.forward.own_seed() and not scope.parted):
        return func(*args, **kwargs)
    if scope.forward.own_seed():
        raise _refused_seed(scope, name)
    path, index = scope.forward.call()
    return dropout.seeded(
        func, args, kwargs, dropout.call_key(scope.seed, scope.forward.forward_pass.epoch, path, index)
    )


def counted(scope: Scope, name: str, args: Args, kwargs: Kwargs) -> Args:
    """Return the arguments of a draw without rows: ``torch.randperm(x.size(0))`` orders all vertices.

    Raises:
        ModelError: If another draw depends on the number of a rank's rows.
    """
    # A symbolic size stands for the number of own rows; a permutation is over all vertices of the graph.
    numbers = [scope.axes.vertices_counted(value) for value in args]
    args = tuple(value if n is None else n for value, n in zip(args, numbers, strict=True))
    given = [*args, *kwargs.values()]
    inner = [each for value in given if isinstance(value, (tuple, list)) for each in value]
    if scope.parted and any(scope.axes.counts(value) for value in (*given, *inner)):
        raise draw_refused(scope, name, "it goes by the number of a rank's rows")
    return args


# Shapes --------------------------------------------------------------------------------


def _view(scope: Scope, name: str, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Answer ``x.view(x.size(0), heads, -1)`` of a part without rows: -1 follows from the row's width."""
    x, shape = args[0], args[1] if len(args) == 2 and isinstance(args[1], (tuple, list)) else args[1:]
    if x.numel() or not all(isinstance(s, int) for s in shape) or -1 not in shape or 0 not in shape:
        return NotImplemented
    # torch cannot infer -1 for 0 entries: x [0, 12] viewed as [0, 3, -1] has 12 / 3 columns.
    width = math.prod(s for s in x.shape if s) // math.prod(s for s in shape if s > 0)
    out: Tensor = func(x, [width if s == -1 else s for s in shape])
    return scope.axes.like(out, x)


HANDLERS: Mapping[str, Handler] = {
    **dict.fromkeys(dropout.DROPOUTS, _dropout),
    **dict.fromkeys(dropout.DRAWS, _shared),
    **dict.fromkeys(LAWS, _drawn),
    **dict.fromkeys(("rrelu", "rrelu_"), _rrelu),
    **NORMS,
    **REDUCTIONS,
    **dict.fromkeys(("view", "reshape"), _view),
    **ATTENTION,
}
