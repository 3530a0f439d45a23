"""Axes: where a torch call moves the axis along which a tensor has a row a vertex or an edge.

Where it sits: ``marks`` asks it for each call whose arguments have such an axis. It knows shapes and call
names, nothing of graphs.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

LOSE = frozenset(
    [
        "nonzero",
        "topk",
        "unique",
        "unique_consecutive",
        "bincount",
        "roll",
        "histc",
        "multinomial",
        "argsort",
        "cumsum",
        "cumprod",
        "cummax",
        "searchsorted",
        "diag",
        "outer",
        "cdist",
        "corrcoef",
        "cov",
        "einsum",
        "tensordot",
        "addmm_",
        "addr",
        "baddbmm",
        "scatter_",
        "scatter",
        "index_put_",
        "gather",
        "index_select",
        "embedding_bag",
        "kron",
        "tril",
        "triu",
        "scatter_add_",
        "scatter_add",
        "scatter_reduce_",
        "scatter_reduce",
        "index_add_",
        "index_add",
        "take",
        "take_along_dim",
        "masked_select",
        "movedim",
        "moveaxis",
        "__set__",
    ]
)
_REDUCE = frozenset(
    [
        "sum",
        "mean",
        "var",
        "std",
        "amax",
        "amin",
        "max",
        "min",
        "prod",
        "norm",
        "logsumexp",
        "any",
        "all",
        "argmax",
        "argmin",
        "median",
        "nansum",
        "count_nonzero",
        "vector_norm",
        "nanmean",
        "mode",
        "logcumsumexp",
        "var_mean",
        "std_mean",
        "aminmax",
    ]
)
_PREFIX = frozenset(["view", "reshape", "unsqueeze", "squeeze", "flatten", "unflatten", "view_as"])


def place_of(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], base: Tensor, axis: int, rows: int, out: Tensor
) -> int | None:
    """The row axis of a call's result, or None where it has none.

    Args:
        name: The call's name.
        args: Its arguments.
        kwargs: Its named arguments.
        base: The argument that has the row axis.
        axis: That axis.
        rows: Its size.
        out: The result.
    """
    if name in LOSE:
        return None
    if name in _PREFIX:
        return _by_prefix(base, axis, rows, out)
    if name in ("t", "numpy_T", "T", "mT", "adjoint"):
        return base.dim() - 1 - axis if base.dim() == 2 else None
    if name in ("transpose", "swapaxes", "transpose_", "swapdims"):
        pair = {_positive(args[1], base), _positive(args[2], base)}
        return axis if axis not in pair else (pair - {axis} or {axis}).pop()
    if name == "permute":
        dims = args[1] if isinstance(args[1], (tuple, list)) else args[1:]
        places = [_positive(d, base) for d in dims]
        return places.index(axis)
    if name in ("matmul", "mm", "bmm", "__matmul__", "__rmatmul__"):
        return _by_product(args, base, axis, rows, out)
    if name in _REDUCE:
        return _by_reduction(args, kwargs, base, axis, out)
    if name in ("unbind", "select"):
        dim = _positive(kwargs.get("dim", args[1] if len(args) > 1 else 0), base)
        return None if dim == axis else axis - int(dim < axis)
    if name == "stack":
        dim = kwargs.get("dim", args[1] if len(args) > 1 else 0) % out.dim()
        return axis + int(dim <= axis)
    if name in ("cat", "concat", "concatenate", "hstack", "vstack"):
        dim = kwargs.get("dim", kwargs.get("axis", args[1] if len(args) > 1 else 0))
        dim = {"hstack": 1, "vstack": 0}.get(name, dim)
        return None if dim % out.dim() == axis else axis
    if name == "__getitem__":
        return _by_index(args[1], base, axis)
    if name in ("sort", "flip", "softmax", "log_softmax"):
        dim = kwargs.get("dim", args[1] if len(args) > 1 else -1)
        dims = dim if isinstance(dim, (tuple, list)) else (dim,)
        return None if axis in [_positive(d, base) for d in dims if isinstance(d, int)] else axis
    return _by_shape(base, axis, rows, out)


def _positive(dim: int, base: Tensor) -> int:
    return int(dim) % max(base.dim(), 1)


def _by_shape(base: Tensor, axis: int, rows: int, out: Tensor) -> int | None:
    """Element-wise calls line shapes up from the right; of two fitting axes the one of equal depth wins."""
    right = out.dim() - base.dim() + axis
    for place in (right, axis):
        if 0 <= place < out.dim() and out.size(place) == rows:
            return place
    return None


def _by_prefix(base: Tensor, axis: int, rows: int, out: Tensor) -> int | None:
    """Views keep the number of entries before the row axis."""
    want, have = 1, 1
    for size in base.shape[:axis]:
        want *= size
    for place, size in enumerate(out.shape):
        if have == want and size == rows:
            return place
        have *= size
    return None


def _by_product(args: tuple[Any, ...], base: Tensor, axis: int, rows: int, out: Tensor) -> int | None:
    left = args[0] is base
    inner = base.dim() - 1 if left else max(base.dim() - 2, 0)
    if axis == inner:
        return None  # the product sums over the rows: see exact.contraction
    if args[1 if left else 0].dim() == 1:
        return axis - int(axis > inner)  # a product with a vector takes the inner axis away
    return _by_shape(base, axis, rows, out) if base.dim() <= out.dim() else None


def _by_reduction(
    args: tuple[Any, ...], kwargs: dict[str, Any], base: Tensor, axis: int, out: Tensor
) -> int | None:
    dims = reduced(args, kwargs, base)
    if dims is None or axis in dims or out.dim() == 0:
        return None
    return axis if out.dim() == base.dim() else axis - sum(d < axis for d in dims)


def reduced(args: tuple[Any, ...], kwargs: dict[str, Any], base: Tensor) -> tuple[int, ...] | None:
    """The axes that a reduction runs over; None when it names none, which means all."""
    dim = kwargs.get("dim", kwargs.get("axis"))
    if dim is None:
        dim = next(
            (a for a in args[1:] if isinstance(a, (int, tuple, list)) and not isinstance(a, bool)), None
        )
    if dim is None or (isinstance(dim, (tuple, list)) and not dim):
        return None
    return tuple(_positive(d, base) for d in (dim if isinstance(dim, (tuple, list)) else (dim,)))


def _by_index(index: Any, base: Tensor, axis: int) -> int | None:
    parts = list(index) if isinstance(index, tuple) else [index]
    if any(isinstance(p, (Tensor, list)) for p in parts):
        whole = parts[0] == slice(None) if isinstance(parts[0], slice) else False
        return 0 if axis == 0 and whole else None
    if Ellipsis in parts:
        at = parts.index(Ellipsis)
        given = sum(p is not None for p in parts) - 1
        parts[at : at + 1] = [slice(None)] * (base.dim() - given)
    seen = place = 0
    for part in parts:
        if part is None:
            place += 1
            continue
        if seen == axis:
            return place if part == slice(None) else None
        seen, place = seen + 1, place + (0 if isinstance(part, int) else 1)
    return place + axis - seen


def attribute(func: Any) -> str:
    """The name of the tensor attribute that a ``__get__`` reads."""
    owner = getattr(func, "__self__", None)
    return str(getattr(owner, "__name__", "__get__"))
