"""Exact reductions: sums, means, variances, extremes and products over all vertices or edges of all ranks.

Where it sits: ``handlers`` adds these handlers to its own. A reduction over the row axis of a tensor runs
locally first; its small result is reduced over the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kagome.errors import ModelError
from kagome.model.exact.scope import Args, Func, Handler, Kwargs, Scope, argument
from kagome.user_frame import from_library, user_line

Dims = tuple[int, ...]
Given = dict[str, Any]

_PLAIN = ("dim", "keepdim")
SIGNATURES: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("sum", "mean", "amax", "amin", "max", "min", "any", "all", "logsumexp", "nansum"), _PLAIN
    ),
    "count_nonzero": ("dim",),
    **dict.fromkeys(("var", "std", "var_mean", "std_mean"), ("dim", "unbiased", "keepdim")),
    **dict.fromkeys(("norm", "linalg_norm", "linalg_vector_norm"), ("p", "dim", "keepdim")),
    "normalize": ("p", "dim", "eps"),
    **dict.fromkeys(("median", "nanmedian", "mode", "argmax", "argmin", "unique"), _PLAIN),
    **dict.fromkeys(("sort", "argsort"), ("dim", "descending")),
    **dict.fromkeys(("topk", "kthvalue"), ("k", "dim")),
}
"""Names of the arguments after the input, by position."""

# Calls whose default axis is the last one, and calls whose result is made of rows in order, which no small
# reduction over ranks can give.
_LAST = frozenset(["sort", "argsort", "topk", "kthvalue", "mode"])
_ORDERS = _LAST | {"median", "nanmedian", "argmax", "argmin", "unique"}


def count_rows(scope: Scope, x: Tensor, dims: Dims) -> float:
    """Return the number of entries that all ranks hold along ``dims``."""
    # A mask may have chosen the rows, so only the ranks together know their number.
    local = math.prod(x.size(d) for d in dims)
    return float(scope.ranks.total(torch.tensor(float(local), dtype=torch.float64, device=x.device)))


def _reduce(scope: Scope, name: str, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Answer a reduction over the row axis by one over all ranks' rows."""
    x = args[0] if args else kwargs.get("input")
    axis = scope.axes.of(x)
    if axis is None or scope.size == 1 or not isinstance(x, Tensor):
        return NotImplemented
    given = _given(name, args, kwargs)
    if given is None:
        return NotImplemented
    dims = _dims(name, given, x)
    if axis not in dims:
        return NotImplemented
    if name in _ORDERS:
        by_place = name in ("sort", "argsort") and not x.is_floating_point()  # groups edges by type
        rows = scope.axes.of_vertices(x) and x.is_floating_point()
        if not rows and (by_place or from_library()):
            # Local: PyG's aggregations sort edges by target, its typed layers sort vertices by type.
            return NotImplemented
        raise ModelError(
            "a layer to read other vertices through edges, or to take sums, means or extremes of all",
            f"a call of {name!r} over all {'vertices' if scope.axes.of_vertices(x) else 'edges'}",
            where="; ".join(filter(None, (scope.where(), user_line()))),
            hint="take it out of forward, or train on one rank",
        )
    return _REDUCTIONS[name](scope, x, dims, bool(given.get("keepdim", False)), given)


def _given(name: str, args: Args, kwargs: Kwargs) -> Given | None:
    """Return the arguments by name; None for a call of another form (``torch.max(a, b)``)."""
    given = {**dict(zip(SIGNATURES[name], args[1:], strict=False)), **kwargs}
    if name == "count_nonzero" and len(args) > 2:
        given["dim"] = args[1:]
    # A second tensor makes it an elementwise call, which works row by row.
    if any(isinstance(value, Tensor) for key, value in given.items() if key not in ("input", "out")):
        return None
    for old, new in (("axis", "dim"), ("ord", "p")):
        if old in given:
            given[new] = given.pop(old)
    if isinstance(given.get("dim"), bool):  # x.var(False)
        given["unbiased"] = given.pop("dim")
    return given


def _dims(name: str, given: Given, x: Tensor) -> Dims:
    dim = given.get("dim", 1 if name == "normalize" else -1 if name in _LAST else None)
    if dim is None or (isinstance(dim, (tuple, list)) and not dim):
        return tuple(range(x.dim()))
    return tuple(int(d) % x.dim() for d in (dim if isinstance(dim, (tuple, list)) else (dim,)))


def _sum(scope: Scope, x: Tensor, dims: Dims, keepdim: bool, given: Given) -> Tensor:
    return scope.ranks.total(x.sum(dims, keepdim=keepdim, dtype=given.get("dtype")))


def _nansum(scope: Scope, x: Tensor, dims: Dims, keepdim: bool, given: Given) -> Tensor:
    return scope.ranks.total(x.nansum(dims, keepdim=keepdim, dtype=given.get("dtype")))


def _count_nonzero(scope: Scope, x: Tensor, dims: Dims, keepdim: bool, given: Given) -> Tensor:
    return scope.ranks.total((x != 0).sum(dims))


def _mean(scope: Scope, x: Tensor, dims: Dims, keepdim: bool, given: Given) -> Tensor:
    return _sum(scope, x, dims, keepdim, given) / count_rows(scope, x, dims)


def _var_mean(scope: Scope, x: Tensor, dims: Dims, keepdim: bool, given: Given) -> tuple[Tensor, Tensor]:
    # ``unbiased`` is the older name: False means a correction of 0.
    correction = given.get("correction", 0 if given.get("unbiased") is False else 1)
    count = count_rows(scope, x, dims)
    # Around the mean of all rows, in a second sum: sum x^2 - N mean^2 would cancel digits.
    mean = scope.ranks.total(x.sum(dims, keepdim=True)) / count
    var = scope.ranks.total((x - mean).square().sum(dims, keepdim=keepdim))
    var = var / max(count - (1 if correction is None else correction), 0.0)
    return var, mean if keepdim else mean.reshape(var.shape)


def _var(scope: Scope, x: Tensor, dims: Dims, keepdim: bool, given: Given) -> Tensor:
    return _var_mean(scope, x, dims, keepdim, given)[0]


def _root(squares: Tensor) -> Tensor:
    """Return the square root, with torch's gradient for a norm or a deviation of 0, which is 0."""
    # The derivative of sqrt at 0 is infinite, and 0 * inf is NaN: the root is taken of 1 there instead.
    none = squares == 0
    return torch.where(none, squares, squares.masked_fill(none, 1.0).sqrt())


def _std(scope: Scope, x: Tensor, dims: Dims, keepdim: bool, given: Given) -> Tensor:
    return _root(_var(scope, x, dims, keepdim, given))


def _std_mean(scope: Scope, x: Tensor, dims: Dims, keepdim: bool, given: Given) -> tuple[Tensor, Tensor]:
    var, mean = _var_mean(scope, x, dims, keepdim, given)
    return _root(var), mean


def _norm(scope: Scope, x: Tensor, dims: Dims, keepdim: bool, given: Given) -> Any:
    p = given.get("p", 2)
    if p in (2, "fro", None):
        return _root(scope.ranks.total(x.square().sum(dims, keepdim=keepdim)))
    if p == 1:
        return scope.ranks.total(x.abs().sum(dims, keepdim=keepdim))
    return NotImplemented


def _matrix_norm(scope: Scope, x: Tensor, dims: Dims, keepdim: bool, given: Given) -> Any:
    """Answer ``torch.linalg.norm``, whose number is a matrix norm over two axes or a whole matrix."""
    named = given.get("dim")
    two = x.dim() == 2 if named is None else isinstance(named, (tuple, list)) and len(named) == 2
    if two and given.get("p") not in (None, "fro"):
        return NotImplemented
    return _norm(scope, x, dims, keepdim, given)


def _normalize(scope: Scope, x: Tensor, dims: Dims, keepdim: bool, given: Given) -> Any:
    length = _norm(scope, x, dims, True, given)
    return (
        length
        if length is NotImplemented
        else scope.axes.like(x / length.clamp_min(given.get("eps", 1e-12)), x)
    )


def _logsumexp(scope: Scope, x: Tensor, dims: Dims, keepdim: bool, given: Given) -> Tensor:
    # log sum exp(x) = top + log sum exp(x - top). A row of -inf alone would give -inf - -inf.
    top = _highest(scope, x, dims)
    top = top.masked_fill(top.isinf(), 0.0)
    whole = scope.ranks.total((x - top).exp().sum(dims, keepdim=True)).log() + top
    return whole if keepdim else _squeezed(whole, dims)


def _highest(scope: Scope, x: Tensor, dims: Dims, sign: int = 1) -> Tensor:
    """Return the largest (or smallest) entries of all ranks' rows, with kept axes and without gradient."""
    wide = x.detach() if x.is_floating_point() else x.detach().long()
    # ``sign`` turns a minimum into a maximum. The least integer
    # has no negative, so the next one stands for "no rows here".
    low = -math.inf if wide.is_floating_point() else torch.iinfo(wide.dtype).min + 1
    shape = [1 if d in dims else s for d, s in enumerate(x.shape)]
    local = (wide * sign).amax(dims, keepdim=True) if x.numel() else wide.new_full(shape, low)
    return scope.ranks.greatest(local) * sign


def _squeezed(x: Tensor, dims: Dims) -> Tensor:
    return x.reshape([s for d, s in enumerate(x.shape) if d not in dims])


def _nothing_of(x: Tensor, chosen: Tensor) -> Tensor:
    """Return zeros that pass their gradient to the chosen entries, unless those are infinite or NaN."""
    # An infinite entry would give inf - inf.
    kept = torch.where(chosen & x.detach().isfinite(), x, torch.zeros_like(x))
    return kept - kept.detach()


def _extreme(sign: int) -> Callable[..., Any]:
    def take(scope: Scope, x: Tensor, dims: Dims, keepdim: bool, given: Given) -> Tensor:
        best = _highest(scope, x, dims, sign)
        if x.requires_grad:
            # ``best`` has come without a gradient. A zero is added, with the gradient 1 / ties at each entry
            # that equals it: equal values share evenly, as in torch.amax.
            same = x.detach() == best
            ties = scope.ranks.total(same.to(x.dtype).sum(dims, keepdim=True))
            best = best + scope.ranks.total(_nothing_of(x, same).sum(dims, keepdim=True)) / ties
        best = best.to(x.dtype)
        return best if keepdim else _squeezed(best, dims)

    return take


def _picked(sign: int) -> Callable[..., Any]:
    """Answer ``x.max(0)``: values, whose gradient goes to the first of equal rows in the graph's order.

    The positions have no meaning on a part, so they get a placement by which reads with them are refused.
    """
    whole = _extreme(sign)
    kind = torch.return_types.max if sign == 1 else torch.return_types.min

    def take(scope: Scope, x: Tensor, dims: Dims, keepdim: bool, given: Given) -> Any:
        if given.get("dim") is None:
            return whole(scope, x, dims, keepdim, given)
        if not scope.axes.of_vertices(x):
            # The gradient goes to the first of equal edges, and no part knows which one that is.
            if x.requires_grad:
                raise ModelError(
                    "an extreme of all edges by a call whose gradient does not depend on their order",
                    f"x.{'max' if sign == 1 else 'min'}(dim) of edges, whose gradient does",
                    where="; ".join(filter(None, (scope.where(), user_line()))),
                    hint=f"x.{'amax' if sign == 1 else 'amin'}(dim), whose gradient equal edges share",
                )
            best = whole(scope, x, dims, keepdim, given)
            return kind((best, scope.axes.unknown_ids(torch.zeros_like(best, dtype=torch.long))))
        best = _highest(scope, x, dims, sign).to(x.dtype)
        shape = [-1 if d in dims else 1 for d in range(x.dim())]
        # Two extremes over the ranks: the value, and among the rows that have it the least original id.
        ids = scope.ids.row_counters(x).view(shape).expand(x.shape)
        far = torch.full_like(ids, torch.iinfo(torch.long).max)
        first = _highest(scope, torch.where(x.detach() == best, ids, far), dims, -1)
        if x.requires_grad:
            chosen = ids == first
            slope = _nothing_of(x, chosen).sum(dims, keepdim=True)
            counted = chosen.to(x.dtype).sum(dims, keepdim=True)
            slope, many = scope.ranks.total(torch.stack([slope, counted]))
            best = best + slope / many  # ``many`` is 1, unless a chunk stands for all vertices
        pair = (best, scope.axes.unknown_ids(first))
        return kind(
            pair if keepdim else (_squeezed(pair[0], dims), scope.axes.unknown_ids(_squeezed(pair[1], dims)))
        )

    return take


def _truth(sign: int) -> Callable[..., Any]:
    """Answer ``any`` and ``all``: numbers other than 0 are true."""
    whole = _extreme(sign)

    def take(scope: Scope, x: Tensor, dims: Dims, keepdim: bool, given: Given) -> Tensor:
        found: Tensor = whole(scope, (x != 0).long(), dims, keepdim, given) > 0  # right without any row, too
        return found.to(torch.uint8) if x.dtype == torch.uint8 else found  # as torch does

    return take


def _truth_of_all(what: str, scope: Scope, name: str, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Answer ``torch._is_all_true(x)``, with which ``torch.distributions`` checks its arguments."""
    return _reduce(scope, what, func, args, kwargs)


_REDUCTIONS: Mapping[str, Callable[..., Any]] = {
    "sum": _sum,
    "nansum": _nansum,
    "mean": _mean,
    "var": _var,
    "std": _std,
    "var_mean": _var_mean,
    "std_mean": _std_mean,
    **dict.fromkeys(("norm", "linalg_vector_norm"), _norm),
    "linalg_norm": _matrix_norm,
    "normalize": _normalize,
    "logsumexp": _logsumexp,
    "count_nonzero": _count_nonzero,
    "amax": _extreme(1),
    "amin": _extreme(-1),
    "max": _picked(1),
    "min": _picked(-1),
    "any": _truth(1),
    "all": _truth(-1),
}


def _softmax(scope: Scope, name: str, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Answer a softmax over all vertices, or over all edges."""
    x = args[0] if args else kwargs["input"]
    axis, dim = scope.axes.of(x), argument(args, kwargs, 1, "dim", -1)
    if axis is None or scope.size == 1 or dim is None or dim % x.dim() != axis:
        return NotImplemented
    z = -x if name == "softmin" else x  # functions of torch.special are called special_...
    # Two collectives: the maximum, so that exp does not overflow, and the sum. Softmax does not depend on the
    # shift, so the maximum needs no gradient.
    shifted = z - _highest(scope, z, (axis,))
    whole = scope.ranks.total(shifted.exp().sum(axis, keepdim=True))
    return scope.axes.like(
        shifted - whole.log() if name.endswith("log_softmax") else shifted.exp() / whole, x
    )


def _contract(scope: Scope, name: str, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Answer ``x.t() @ y`` by a sum over all vertices."""
    if scope.size == 1 or len(args) < 2 or not all(isinstance(a, Tensor) for a in args[:2]):
        return NotImplemented
    # The axis that a product sums over is the last of the left and the last but one of the right factor.
    left, right = args[:2]
    first, second = scope.axes.of(left), scope.axes.of(right)
    if first is None or first != left.dim() - 1 or second is None or second != max(right.dim() - 2, 0):
        return NotImplemented
    return scope.ranks.total(func(*args, **kwargs))


def _einsum(scope: Scope, name: str, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Answer ``einsum`` with a letter for the rows: they are summed over all ranks, or kept."""
    equation, operands = args[0], args[1:]
    operands = (
        tuple(operands[0]) if len(operands) == 1 and isinstance(operands[0], (tuple, list)) else operands
    )
    if scope.size == 1 or not isinstance(equation, str) or "." in equation or "->" not in equation:
        return NotImplemented
    # The letter of the row axis must be the same in all operands that have rows. In the result the rows are
    # kept; if the letter is missing there, they are summed, here and then over the ranks.
    left, _, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    marked = [
        (term[axis], x)
        for term, x in zip(terms, operands, strict=True)
        if (axis := scope.axes.of(x)) is not None
    ]
    if not marked or len({letter for letter, _ in marked}) > 1:
        return NotImplemented
    letter, x = marked[0]
    out: Tensor = func(*args, **kwargs)
    return scope.axes.like(out, x, right.index(letter)) if letter in right else scope.ranks.total(out)


REDUCTIONS: Mapping[str, Handler] = {
    **dict.fromkeys(SIGNATURES, _reduce),
    **dict.fromkeys(
        ("softmax", "log_softmax", "softmin", "special_softmax", "special_log_softmax"), _softmax
    ),
    **dict.fromkeys(("matmul", "mm", "bmm", "__matmul__", "mv", "dot", "vdot"), _contract),
    "einsum": _einsum,
    "_is_all_true": partial(_truth_of_all, "all"),
    "_is_any_true": partial(_truth_of_all, "any"),
}
