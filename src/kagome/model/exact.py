"""Exact: what a split must not change - statistics over all vertices, dropout, attention over all vertices.

Where it sits: ``HANDLERS`` answer torch calls by name for ``neighbors.intercept``; they know a tensor's row
axis from its mark and reach the other ranks through the scope. Rules for single layer classes are in
``rules``.

To make another call exact: write a handler that takes (scope, name, func, args, kwargs), returns
NotImplemented where it has nothing to say, and add it to ``HANDLERS``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from kagome.errors import ModelError
from kagome.model import draws


class Scope(Protocol):
    """What a handler may ask of the running interception."""

    @property
    def size(self) -> int:
        """Ranks that share the graph."""

    @property
    def own(self) -> int:
        """Own vertices."""

    @property
    def epoch(self) -> int:
        """The running epoch."""

    seed: int

    def axis(self, tensor: Any) -> int | None:
        """The row axis of a tensor with a row a vertex or an edge."""

    def of_vertices(self, tensor: Any) -> bool:
        """Whether the rows are vertices."""

    def like(self, out: Tensor, tensor: Tensor, axis: int | None = None) -> Tensor:
        """Mark ``out`` as having the rows of ``tensor``."""

    def total(self, part: Tensor) -> Tensor:
        """Sum over ranks, with gradient."""

    def greatest(self, part: Tensor) -> Tensor:
        """Maximum over ranks, without gradient."""

    def made(self, name: str, args: Any, kwargs: Any) -> Tensor | None:
        """What ``torch.zeros`` or the like gives for a counted number of rows; None for any other size."""

    def call(self) -> tuple[str, int]:
        """Module path and number of this draw."""

    def where(self) -> str:
        """Module path."""

    def row_ids(self) -> Tensor:
        """Original ids of own vertices."""

    def pair_words(self, tensor: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """Source, target, copy of an edge tensor's rows."""


Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Func = Callable[..., Any]


def _argument(args: Args, kwargs: Kwargs, place: int, name: str, default: Any = None) -> Any:
    return kwargs.get(name, args[place] if len(args) > place else default)


# Draws -------------------------------------------------------------------------------------------


def _keys(scope: Scope, x: Tensor, what: str) -> tuple[Tensor, int]:
    """A word a row of ``x`` for this draw, and the row axis."""
    path, index = scope.call()
    key = draws.call_key(scope.seed, scope.epoch, path, index)
    axis = scope.axis(x)
    ids: Tensor | None = None
    if (axis is None and x.dim() and x.size(0) == scope.own) or (axis is not None and scope.of_vertices(x)):
        # Without a mark (an operation that torch does not show) a row a vertex is the likely reading.
        ids, axis = scope.row_ids(), axis or 0
    elif axis is not None:
        words = scope.pair_words(x)
        ids = None if words is None else draws.edge_ids(*words)
    if ids is None or axis is None:
        raise ModelError(
            f"{what} draws a number for each vertex or each edge",
            f"it was given a tensor of shape {tuple(x.shape)} whose rows are neither",
            where=path,
            hint=f"apply {what} to a tensor with a row a vertex or a row an edge",
        )
    return draws.row_keys(ids, key), axis


def _dropout(scope: Scope, name: str, func: Func, args: Args, kwargs: Kwargs) -> Any:
    x: Tensor = args[0] if args else kwargs["input"]
    p = float(_argument(args, kwargs, 1, "p", 0.5))
    if not 0.0 <= p <= 1.0:
        return NotImplemented
    training = _argument(args, kwargs, 2, "train" if name != "dropout" else "training", True)
    if not training or p == 0.0:
        return NotImplemented
    keys, axis = _keys(scope, x, "dropout")
    if name == "dropout_" or _argument(args, kwargs, 3, "inplace", False):
        return x.mul_(draws.dropout(torch.ones_like(x), keys, p, axis))
    return scope.like(draws.dropout(x, keys, p, axis), x)


def _like_random(scope: Scope, name: str, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """``rand_like``, ``bernoulli`` and the like of a tensor with rows; ``torch.rand(x.size(0))``."""
    x: Any = args[0] if args else kwargs.get("input", kwargs.get("size"))
    if name in ("rand", "randn"):
        x = scope.made("empty", args, {k: v for k, v in kwargs.items() if k != "generator"})
    axis = scope.axis(x)
    if axis is None:
        return NotImplemented
    keys, axis = _keys(scope, x, name)
    rows = x.movedim(axis, 0)
    flat = draws.uniform(keys, rows[:1].numel() if rows.size(0) else 0)
    number = ((flat.double() + 0.5) / 2**32).reshape(rows.shape).movedim(0, axis)
    kind = kwargs.get("dtype") or x.dtype
    if name == "bernoulli":
        p = _argument(args, kwargs, 1, "p")
        out = (number < (x if p is None else p)).to(x.dtype)
    elif name.startswith("rand") and not name.startswith("randn"):
        out = number.to(kind)
    else:
        out = (torch.erfinv(number * 2 - 1) * math.sqrt(2)).to(kind)
    return scope.like(out, x)


# Statistics --------------------------------------------------------------------------------------


def _batch_norm(scope: Scope, name: str, func: Func, args: Args, kwargs: Kwargs) -> Any:
    x: Tensor = args[0]
    if not _argument(args, kwargs, 5, "training", False) or scope.size == 1:
        return NotImplemented
    return _normalise(scope, x, args, kwargs, tuple(d for d in range(x.dim()) if d != 1))


def _instance_norm(scope: Scope, name: str, func: Func, args: Args, kwargs: Kwargs) -> Any:
    x: Tensor = args[0]
    if (
        not _argument(args, kwargs, 5, "use_input_stats", True)
        or scope.size == 1
        or scope.axis(x) in (None, 0, 1)
    ):
        return NotImplemented
    if x.size(0) != 1:
        return NotImplemented
    return _normalise(scope, x, args, kwargs, tuple(range(2, x.dim())))


def _normalise(scope: Scope, x: Tensor, args: Args, kwargs: Kwargs, dims: tuple[int, ...]) -> Tensor:
    """Batch or instance norm with the statistics of all ranks' rows; running buffers get the global ones."""
    mean_buffer = _argument(args, kwargs, 1, "running_mean")
    var_buffer = _argument(args, kwargs, 2, "running_var")
    weight, bias = _argument(args, kwargs, 3, "weight"), _argument(args, kwargs, 4, "bias")
    momentum, eps = _argument(args, kwargs, 6, "momentum", 0.1), _argument(args, kwargs, 7, "eps", 1e-5)
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    count = _count(scope, x, dims)
    mean = scope.total(wide.sum(dims)) / count
    shape = [1 if d in dims else s for d, s in enumerate(x.shape)]
    centred = wide - mean.view(shape)
    var = scope.total(centred.square().sum(dims)) / count
    if mean_buffer is not None:
        with torch.no_grad():
            flat, spread = mean.detach().reshape(-1), var.detach().reshape(-1) * count / max(count - 1, 1)
            mean_buffer.mul_(1 - momentum).add_(flat.to(mean_buffer.dtype), alpha=momentum)
            var_buffer.mul_(1 - momentum).add_(spread.to(var_buffer.dtype), alpha=momentum)
    out = centred * (var + eps).rsqrt().view(shape)
    column = [1, -1] + [1] * (x.dim() - 2)
    if weight is not None:
        out = out * weight.view(column)
    if bias is not None:
        out = out + bias.view(column)
    return scope.like(out.to(x.dtype), x)


def _count(scope: Scope, x: Tensor, dims: tuple[int, ...]) -> float:
    """How many entries all ranks hold along ``dims``."""
    local = math.prod(x.size(d) for d in dims)
    return float(scope.total(torch.tensor(float(local), dtype=torch.float64, device=x.device)))


_SORTING = frozenset(
    ["median", "sort", "argsort", "topk", "argmax", "argmin", "kthvalue", "mode", "unique", "nanmedian"]
)


def _reduce(scope: Scope, name: str, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """A reduction over the row axis is one over all ranks' rows."""
    x = args[0] if args else kwargs.get("input")
    axis = scope.axis(x)
    if axis is None or scope.size == 1 or not isinstance(x, Tensor):
        return NotImplemented
    dims, plain = _dims(name, args, kwargs, x)
    if not plain or axis not in dims:
        return NotImplemented
    if name in _SORTING:
        if not scope.of_vertices(x) or not x.is_floating_point():
            # PyG's aggregations sort edges by their target, its typed layers sort vertices by type: local.
            return NotImplemented
        raise ModelError(
            "a layer reads other vertices through edges, or takes sums, means and extremes over all of them",
            f"it calls {name!r} over all vertices",
            where=scope.where(),
            hint="take it out of forward, or train on one rank",
        )
    keep = bool(kwargs.get("keepdim", any(a is True for a in args[2:]) and name not in ("var", "std")))
    return _REDUCTIONS[name](scope, x, dims, keep, args, kwargs)


def _dims(name: str, args: Args, kwargs: Kwargs, x: Tensor) -> tuple[tuple[int, ...], bool]:
    """The reduced axes, and whether this is a form of the call that the handlers know."""
    dim = kwargs.get("dim", kwargs.get("axis"))
    rest = list(args[1:])
    if name in ("norm", "vector_norm", "topk", "kthvalue"):
        p = kwargs.get("p", kwargs.get("ord", rest.pop(0) if rest else 2))
        if name in ("norm", "vector_norm") and p not in (2, 2.0, "fro", None):
            return (), False
    if dim is None:
        dim = next((a for a in rest if isinstance(a, (int, tuple, list)) and not isinstance(a, bool)), None)
    if any(isinstance(a, Tensor) for a in rest):
        return (), False  # torch.max(a, b) compares entry by entry
    if dim is None or (isinstance(dim, (tuple, list)) and not dim):
        if name in ("sort", "argsort", "topk", "kthvalue"):
            dim = -1
        else:
            return tuple(range(x.dim())), True
    given = dim if isinstance(dim, (tuple, list)) else (dim,)
    return tuple(int(d) % x.dim() for d in given), True


def _sum(scope: Scope, x: Tensor, dims: tuple[int, ...], keep: bool, args: Args, kwargs: Kwargs) -> Tensor:
    return scope.total(x.sum(dims, keepdim=keep, dtype=kwargs.get("dtype")))


def _mean(scope: Scope, x: Tensor, dims: tuple[int, ...], keep: bool, args: Args, kwargs: Kwargs) -> Tensor:
    return scope.total(x.sum(dims, keepdim=keep, dtype=kwargs.get("dtype"))) / _count(scope, x, dims)


def _var(scope: Scope, x: Tensor, dims: tuple[int, ...], keep: bool, args: Args, kwargs: Kwargs) -> Tensor:
    bias = next((a for a in args[1:] if isinstance(a, bool)), None)
    unbiased = kwargs.get("unbiased", True if bias is None else bias)
    correction = kwargs.get("correction", 1 if unbiased else 0)
    count = _count(scope, x, dims)
    mean = scope.total(x.sum(dims, keepdim=True)) / count
    square = scope.total((x - mean).square().sum(dims, keepdim=keep or bool(kwargs.get("keepdim", False))))
    return square / max(count - (1 if correction is None else correction), 0.0)


def _std(scope: Scope, x: Tensor, dims: tuple[int, ...], keep: bool, args: Args, kwargs: Kwargs) -> Tensor:
    return _var(scope, x, dims, keep, args, kwargs).sqrt()


def _norm(scope: Scope, x: Tensor, dims: tuple[int, ...], keep: bool, args: Args, kwargs: Kwargs) -> Tensor:
    return scope.total(x.square().sum(dims, keepdim=keep)).sqrt()


def _extreme(sign: int, picks: bool) -> Callable[..., Any]:
    def take(scope: Scope, x: Tensor, dims: tuple[int, ...], keep: bool, args: Args, kwargs: Kwargs) -> Any:
        if picks and (len(args) > 1 or "dim" in kwargs):
            return NotImplemented  # also asks for positions, which are local: the check will tell
        flat = x.to(torch.uint8) if x.dtype == torch.bool else x
        low = torch.finfo(flat.dtype).min if flat.is_floating_point() else torch.iinfo(flat.dtype).min
        signed = flat.detach() * sign if flat.dtype != torch.uint8 else flat.detach().long() * sign
        if signed.dtype == torch.long:
            low = torch.iinfo(torch.long).min + 1
        shape = [1 if d in dims else s for d, s in enumerate(x.shape)]
        local = signed.amax(dims, keepdim=True) if x.numel() else signed.new_full(shape, low)
        best = scope.greatest(local) * sign
        if x.requires_grad:
            # The gradient is shared evenly among equals, as amax does.
            same = (x.detach() == best).to(x.dtype)
            ties = scope.total(same.sum(dims, keepdim=True))
            best = best + scope.total((same * (x - x.detach())).sum(dims, keepdim=True)) / ties
        out = best.to(x.dtype) if x.dtype != torch.bool else best.bool()
        return out if keep else out.reshape([s for d, s in enumerate(shape) if d not in dims])

    return take


_REDUCTIONS: dict[str, Callable[..., Any]] = {
    "sum": _sum,
    "mean": _mean,
    "var": _var,
    "std": _std,
    "norm": _norm,
    "vector_norm": _norm,
    "amax": _extreme(1, picks=False),
    "amin": _extreme(-1, picks=False),
    "max": _extreme(1, picks=True),
    "min": _extreme(-1, picks=True),
    "any": _extreme(1, picks=False),
    "all": _extreme(-1, picks=False),
}


def _softmax(scope: Scope, name: str, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """A softmax over all vertices."""
    x = args[0] if args else kwargs["input"]
    axis, dim = scope.axis(x), _argument(args, kwargs, 1, "dim", -1)
    if axis is None or scope.size == 1 or dim is None or dim % x.dim() != axis or not scope.of_vertices(x):
        return NotImplemented
    shape = [1 if d == axis else s for d, s in enumerate(x.shape)]
    low = x.detach().amax(axis, keepdim=True) if x.numel() else x.new_full(shape, torch.finfo(x.dtype).min)
    shifted = x - scope.greatest(low)
    whole = scope.total(shifted.exp().sum(axis, keepdim=True))
    return scope.like(shifted.exp() / whole if name == "softmax" else shifted - whole.log(), x)


def _contract(scope: Scope, name: str, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """``x.t() @ y`` sums over all vertices."""
    if scope.size == 1 or len(args) < 2 or not all(isinstance(a, Tensor) for a in args[:2]):
        return NotImplemented
    left, right = args[:2]
    first, second = scope.axis(left), scope.axis(right)
    if first != left.dim() - 1 or second != max(right.dim() - 2, 0) or first is None or second is None:
        return NotImplemented
    return scope.total(func(*args, **kwargs))


def _view(scope: Scope, name: str, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """``x.view(x.size(0), heads, -1)`` of a part without rows: the -1 follows from the row's width."""
    x, shape = args[0], args[1] if len(args) == 2 and isinstance(args[1], (tuple, list)) else args[1:]
    if x.numel() or not all(isinstance(s, int) for s in shape) or -1 not in shape or 0 not in shape:
        return NotImplemented
    width = math.prod(s for s in x.shape if s) // math.prod(s for s in shape if s > 0)
    out: Tensor = func(x, [width if s == -1 else s for s in shape])
    return scope.like(out, x)


def _attention(scope: Scope, name: str, func: Func, args: Args, kwargs: Kwargs) -> Any:
    if _argument(args, kwargs, 4, "dropout_p", 0.0) > 0.0:
        raise ModelError(
            "dropout draws a number for each vertex or each edge",
            "attention over all vertices asks for dropout on a square of them",
            where=scope.where(),
            hint="set the attention's dropout to 0",
        )
    return NotImplemented


Handler = Callable[[Any, str, Func, Args, Kwargs], Any]

HANDLERS: Mapping[str, Handler] = {
    **dict.fromkeys(("dropout", "dropout_", "feature_dropout"), _dropout),
    **dict.fromkeys(("rand_like", "randn_like", "rand", "randn", "bernoulli"), _like_random),
    "batch_norm": _batch_norm,
    "instance_norm": _instance_norm,
    **dict.fromkeys([*_REDUCTIONS, *sorted(_SORTING)], _reduce),
    **dict.fromkeys(("softmax", "log_softmax"), _softmax),
    **dict.fromkeys(("matmul", "mm", "bmm", "__matmul__"), _contract),
    **dict.fromkeys(("view", "reshape"), _view),
    "scaled_dot_product_attention": _attention,
}
