"""Axis rules: where a torch call moves the axis along which a tensor has one row per vertex or edge.

Where it sits: ``placement`` asks it for each call whose arguments have such an axis. It knows shapes and call
names, nothing of graphs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kagome.placement.torch_calls import Args, Kwargs

LOSE = frozenset(
    [
        "nonzero",
        "unique",
        "unique_consecutive",
        "bincount",
        "histc",
        "multinomial",
        "searchsorted",
        "diag",
        "outer",
        "corrcoef",
        "cov",
        "einsum",
        "tensordot",
        "addmm_",
        "addr",
        "baddbmm",
        "index_put_",
        "embedding_bag",
        "kron",
        "tril",
        "triu",
        "scatter_reduce_",
        "scatter_reduce",
        "index_add_",
        "index_add",
        "take",
        "masked_select",
        "movedim",
        "moveaxis",
        "inner",
        "fill_diagonal_",
        "tril_",
        "triu_",
        "msort",
        "__set__",
        *("as_strided", "as_strided_", "as_strided_copy", "as_strided_scatter", "resize_", "resize_as_"),
        *("diagonal", "diagonal_copy", "diagonal_scatter", "linalg_diagonal", "diag_embed", "vander"),
        *("masked_scatter", "masked_scatter_", "put", "put_", "nonzero_static", "sum_to_size", "addbmm"),
        *("combinations", "cartesian_prod", "meshgrid", "sampled_addmm", "sparse_sampled_addmm"),
        *("geqrf", "orgqr", "ormqr", "lstsq", "triangular_solve", "stft", "istft", "embedding_renorm_"),
        *(
            f"{name}_copy"
            for name in ("unfold", "view", "expand", "transpose", "permute", "t", "unbind", "narrow")
        ),
        *(
            f"{name}_copy"
            for name in ("select", "slice", "split", "split_with_sizes", "squeeze", "unsqueeze")
        ),
    ]
)
"""Calls after which the row axis is unknown, or whose result mixes rows."""
# Calls that remove the axes they are given, or all axes.
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
        "var_mean",
        "std_mean",
        "aminmax",
    ]
)
_RUNS = frozenset(
    [
        "sort",
        "argsort",
        "flip",
        "cumsum",
        "cumprod",
        "cummax",
        "cummin",
        "cumsum_",
        "cumprod_",
        "logcumsumexp",
        "glu",
        "diff",
    ]
)
"""Calls that run along one axis, the last by default, and keep the others."""
_SHARES = frozenset(["softmax", "log_softmax", "softmin", "special_softmax", "special_log_softmax"])
"""Calls that run along one axis, and whose result matches their input entry by entry."""
_AMONG = frozenset(["topk", "kthvalue", "roll"])
"""Calls that run along one axis, given after another number, and keep the others."""
# Calls that reorder axes; some are attributes, whose name is that of the getter.
_TURNS = frozenset(
    [
        "t",
        "numpy_T",
        "T",
        "H",
        "mT",
        "mH",
        "adjoint",
        "transpose",
        "swapaxes",
        "transpose_",
        "swapdims",
        "permute",
    ]
)
# Calls that lay tensors side by side, along an axis that exists or, for ``stack``, a new one.
JOINS = frozenset(["stack", "cat", "concat", "concatenate", "hstack", "vstack"])
_BY_AXIS = frozenset(
    [
        "gather",
        "take_along_dim",
        "scatter",
        "scatter_",
        "scatter_add",
        "scatter_add_",
        "index_select",
    ]
)
"""Calls that read or write along one axis by number, and keep the others of their first argument."""
_ALONG: dict[str, tuple[int, Any]] = {
    **dict.fromkeys(("select_scatter", "slice_scatter"), (2, 0)),
    **dict.fromkeys(("index_reduce", "index_reduce_"), (1, None)),
    **dict.fromkeys(("trapz", "trapezoid", "cumulative_trapezoid"), (2, -1)),
    **dict.fromkeys(("cross", "linalg_cross"), (2, -1)),
    "cosine_similarity": (2, 1),
    **dict.fromkeys(
        (f"fft_{way}{kind}fft" for way in ("", "i") for kind in ("", "r", "h")),
        (2, -1),
    ),
    **dict.fromkeys((f"fft_{way}{kind}fft2" for way in ("", "i") for kind in ("", "r", "h")), (2, (-2, -1))),
    **dict.fromkeys((f"fft_{way}{kind}fftn" for way in ("", "i") for kind in ("", "r", "h")), (2, None)),
    **dict.fromkeys(("fft_fftshift", "fft_ifftshift"), (1, None)),
}
"""Calls along named axes: the position of that argument, and its default. None stands for all axes."""
# The calls of torch behind nn.GRU, nn.LSTM and nn.RNN.
_RECURRENT = frozenset(["gru", "lstm", "rnn_tanh", "rnn_relu"])
_MIXING = ("linalg_", "fft_", "svd", "qr", "pca_lowrank", "lu", "cholesky", "inverse", "pinverse", "matrix_")
"""Prefixes of calls that mix all rows of a matrix, and treat each matrix of a batch by itself."""
_BATCHED = {
    **{
        f"{kind}{d}d": d + 2 for kind in ("conv", "conv_transpose", "avg_pool", "max_pool") for d in (1, 2, 3)
    },
    **{f"adaptive_{kind}_pool{d}d": d + 2 for kind in ("avg", "max") for d in (1, 2, 3)},
    "interpolate": 3,
    "group_norm": 2,
    "local_response_norm": 3,
    "lp_pool1d": 3,
    "lp_pool2d": 4,
}
"""Calls that treat each sample of the first axis by itself, and the least number of axes for that."""
ELEMENTWISE = frozenset(
    [
        *("add", "radd", "iadd", "sub", "rsub", "isub", "subtract", "mul", "rmul", "imul", "multiply"),
        *("div", "truediv", "rtruediv", "rdiv", "idiv", "itruediv", "true_divide", "divide", "pow", "rpow"),
        *("floor_divide", "floordiv", "rfloordiv", "remainder", "fmod", "mod", "rmod", "addcmul", "addcdiv"),
        *(
            "maximum",
            "minimum",
            "max",
            "min",
            "fmax",
            "fmin",
            "where",
            "lerp",
            "masked_fill",
            "copy",
            "clamp",
        ),
        *("eq", "ne", "lt", "le", "gt", "ge", "isclose", "atan2", "hypot", "copysign", "logaddexp", "xlogy"),
        *("logical_and", "logical_or", "logical_xor", "bitwise_and", "bitwise_or", "bitwise_xor"),
        *("and", "or", "xor", "iand", "ior", "rand", "ror", "rxor"),
        *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"),
        *("cat", "concat", "concatenate", "stack", "hstack"),
    ]
)
"""Calls that combine rows of one tensor with the same rows of another, by name without underscores."""
# Views: entries keep their order, so the number of entries before the row axis identifies it.
VIEWS = frozenset(["view", "reshape", "flatten", "unflatten", "view_as", "reshape_as"])
"""Calls that merge and split axes: see ``scope.batches``."""
PREFIX = VIEWS | {"unsqueeze", "squeeze"}


def place_of(
    name: str, args: Args, kwargs: Kwargs, base: Tensor, axis: int, rows: int, out: Tensor
) -> int | None:
    """Return the row axis of a call's result, or None if it has none.

    Args:
        name: The call's name.
        args: Its positional arguments.
        kwargs: Its named arguments.
        base: The argument that has the row axis.
        axis: That axis.
        rows: The size of that axis.
        out: The result.
    """
    # Where a name is in several sets, the first rule below is the one that counts.
    if name in LOSE:
        return None
    if name in PREFIX:
        return _by_view(name, args, kwargs, base, axis, rows, out)
    if name in _TURNS:
        return _by_transpose(name, args, base, axis)
    # [..., P, M], [..., R, M] -> [..., P, R]
    if name == "cdist":  # rows against points that are not rows: see ``placement`` for rows against rows
        inner, outer = base.dim() - 2, out.dim() - (2 if args[0] is base else 1)
        return outer if axis == inner else axis if axis < inner else None
    if name in ("matmul", "mm", "bmm", "__matmul__", "__rmatmul__"):
        return _by_product(args, base, axis, rows, out)
    if name in _REDUCE and not of_two(name, args, kwargs):
        return _by_reduction(args, kwargs, base, axis, out)
    if name in ("unbind", "select"):
        named: Any = kwargs.get("dim", args[1] if len(args) > 1 else 0)
        dim = _positive(named, base)
        # The axis vanishes: axes behind it move left. One row alone has no axis of rows.
        return None if dim == axis else axis - int(dim < axis)
    if name in JOINS:
        return _by_join(name, args, kwargs, axis, out)
    if name == "__getitem__":
        return _by_index(args[1], base, axis)
    if name in ("embedding", "one_hot"):
        return axis
    # gather(dim, index) has the shape of the index: rows stay only if the result has as many.
    if name in _BY_AXIS:
        along = kwargs.get("dim", next((a for a in args[1:] if isinstance(a, int)), None))
        kept = along is not None and args and args[0] is base and _positive(along, base) != axis
        return axis if kept and out.dim() == base.dim() and out.size(axis) == rows else None
    if name in _ALONG:
        return _by_named(name, args, kwargs, base, axis, out)
    if name in _RECURRENT:
        return _by_recurrence(args, base, axis, rows, out)
    if name in _BATCHED or name.startswith(_MIXING):
        # A convolution treats each sample of axis 0 by itself, a call on matrices each entry of the axes
        # before the last two.
        kept = axis == 0 and base.dim() >= _BATCHED[name] if name in _BATCHED else axis < base.dim() - 2
        return axis if kept and out.dim() > axis and out.size(axis) == rows else None
    if name in ("renorm", "renorm_"):  # each row by itself, or along the other axes
        given: Any = kwargs.get("dim", args[2] if len(args) > 2 else 0)
        return axis if _positive(given, base) == axis else None
    if name in ("layer_norm", "rms_norm"):
        shape: Any = kwargs.get("normalized_shape", args[1] if len(args) > 1 else ())
        # The trailing ``len(shape)`` axes are normalized together.
        return axis if axis < base.dim() - len(shape) else None
    if name in _SHARES:
        return axis
    if name in _RUNS or name in _AMONG:
        return _by_run(name, args, kwargs, base, axis)
    return _by_shape(base, axis, rows, out)


def _by_view(
    name: str, args: Args, kwargs: Kwargs, base: Tensor, axis: int, rows: int, out: Tensor
) -> int | None:
    """Follow the row axis through a view, which keeps the entries in their order."""
    if name == "unsqueeze":
        named: Any = kwargs.get("dim", args[1] if len(args) > 1 else 0)
        dim = named % out.dim()
        # A new axis at ``dim`` moves those from ``dim`` on to the right.
        return axis + int(dim <= axis)
    if name == "squeeze":
        return _by_squeeze(args, kwargs, base, axis)
    return _by_prefix(base, axis, rows, out, _given_shape(name, args, kwargs))


def _by_transpose(name: str, args: Args, base: Tensor, axis: int) -> int | None:
    """Follow the row axis through a call that reorders axes."""
    if name == "permute":
        dims = args[1] if isinstance(args[1], (tuple, list)) else args[1:]
        return [_positive(d, base) for d in dims].index(axis)
    if name in ("transpose", "swapaxes", "transpose_", "swapdims"):
        # transpose(0, 0) swaps an axis with itself, so the pair has one element.
        pair = {_positive(args[1], base), _positive(args[2], base)}
        return axis if axis not in pair else (pair - {axis} or {axis}).pop()
    if name in ("mT", "mH", "adjoint") and axis < base.dim() - 2:
        return axis
    if name in ("mT", "mH", "adjoint"):
        return 2 * base.dim() - 3 - axis  # the last two are swapped
    return base.dim() - 1 - axis  # all axes are reversed; t takes two at most


def _by_join(name: str, args: Args, kwargs: Kwargs, axis: int, out: Tensor) -> int | None:
    """Follow the row axis through a concatenation or a stack."""
    dim: Any = kwargs.get("dim", kwargs.get("axis", args[1] if len(args) > 1 else 0))
    # hstack joins along axis 1, and vectors along axis 0, which is 1 % 1.
    dim = {"hstack": 1, "vstack": 0}.get(name, dim) % out.dim()
    if name == "stack":
        return axis + int(dim <= axis)
    # Along the row axis rows of several tensors follow each other: see ``positions.row_order.cat``.
    return None if dim == axis else axis


def _by_named(name: str, args: Args, kwargs: Kwargs, base: Tensor, axis: int, out: Tensor) -> int | None:
    """Follow the row axis through calls of :data:`_ALONG`, which keep all axes that they do not name."""
    at, default = _ALONG[name]
    named = kwargs.get("dim", kwargs.get("axis", args[at] if len(args) > at else default))
    if named is None:
        return None
    dims = {_positive(dim, base) for dim in (named if isinstance(named, (tuple, list)) else (named,))}
    # x.select_scatter(src, ...) writes to x: the result has the rows of x, but not those of src.
    writes = name.startswith(("select_", "slice_", "index_"))
    if axis in dims or (writes and base is not args[0]):
        return None
    # cosine_similarity removes the axis that it names; fft and cross keep it.
    return axis if out.dim() == base.dim() else axis - sum(dim < axis for dim in dims)


def _by_run(name: str, args: Args, kwargs: Kwargs, base: Tensor, axis: int) -> int | None:
    """Follow the row axis through calls that run along some axes."""
    # topk(k, dim), kthvalue(k, dim) and roll(shifts, dims) name the axis behind another number.
    place = 2 if name in _AMONG else 1
    dim = kwargs.get("dim", kwargs.get("dims", args[place] if len(args) > place else -1))
    dims = dim if isinstance(dim, (tuple, list)) else (dim,)
    return None if axis in [_positive(d, base) for d in dims if isinstance(d, int)] else axis


def _positive(dim: int, base: Tensor) -> int:
    return int(dim) % max(base.dim(), 1)


def _by_shape(base: Tensor, axis: int, rows: int, out: Tensor) -> int | None:
    """Find the row axis after an element-wise call. Shapes align from the right; equal depth wins."""
    # First the axis that broadcasting aligns with the row axis, then the same axis counted from the left.
    right = out.dim() - base.dim() + axis
    for place in (right, axis):
        if 0 <= place < out.dim() and out.size(place) == rows:
            return place
    return None


def _by_prefix(
    base: Tensor, axis: int, rows: int, out: Tensor, given: tuple[Any, ...] | None = None
) -> int | None:
    """Find the row axis after a view, which keeps the number of entries before that axis.

    Where a part has one row, axes of size 1 fit as well. The one that was not given as a plain 1 is then
    taken.
    """
    # base [A, rows, B] -> out [a1, a2, rows, b]: the row axis still has A = a1 * a2 entries before it.
    want, have = base.shape[:axis].numel(), 1
    fits = []
    for place, size in enumerate(out.shape):
        if have == want and size == rows:
            fits.append(place)
        have *= size
    if len(fits) > 1 and given is not None and len(given) == out.dim():
        fits = [place for place in fits if type(given[place]) is not int or given[place] != 1] or fits
    return fits[0] if fits else None


def _given_shape(name: str, args: Args, kwargs: Kwargs) -> tuple[Any, ...] | None:
    """Return the sizes that ``view`` and ``reshape`` were given."""
    if name not in ("view", "reshape"):
        return None
    sizes: Any = kwargs.get("size", kwargs.get("shape", args[1:]))
    return tuple(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)) else tuple(sizes)


def _by_recurrence(args: Args, base: Tensor, axis: int, rows: int, out: Tensor) -> int | None:
    """Follow the axis of samples through a recurrent layer, whose final states put it elsewhere."""
    # ``batch_first`` is the last argument. Input [L, B, F], or [B, L, F] with it.
    first = bool(args[-1]) if args and isinstance(args[-1], bool) else False
    if base.dim() != 3 or axis != (0 if first else 1):
        return None
    # Outputs have the layout of the input. Final states are [layers, B, H] in both layouts.
    return 0 if first and out.size(0) == rows and out.size(1) == base.size(1) else 1


def _by_squeeze(args: Args, kwargs: Kwargs, base: Tensor, axis: int) -> int | None:
    dims = kwargs.get("dim", args[1] if len(args) > 1 else None)
    if dims is None:
        # On a part with one row, squeeze() removes the row axis, which other parts keep.
        gone = [d for d in range(base.dim()) if base.size(d) == 1]
    else:
        named = [_positive(d, base) for d in (dims if isinstance(dims, (tuple, list)) else (dims,))]
        gone = [d for d in named if base.size(d) == 1]
    return None if axis in gone else axis - sum(d < axis for d in gone)


def merged(base: Tensor, axis: int, each: int, out: Tensor) -> tuple[int, int] | None:
    """Find where a view merged the row axis with the axes after it, or split them again.

    Args:
        base: The tensor that was viewed.
        axis: Its row axis.
        each: Entries along it that belong to one row.
        out: The view.

    Returns:
        The axis, and how many entries of it belong to one row; None if rows are no longer separate.
    """
    # base [A, rows * each, B] -> out [A, rows * new, C]: a row keeps its each * B = new * C entries.
    rows = base.size(axis) // each
    entries = each * base.shape[axis + 1 :].numel()
    want, have = base.shape[:axis].numel(), 1
    for place, size in enumerate(out.shape):
        rest = out.shape[place + 1 :].numel()
        if have == want and rest and entries % rest == 0 and (entries // rest) * rows == size and entries:
            return place, entries // rest
        have *= size
    return None


def _by_product(args: Args, base: Tensor, axis: int, rows: int, out: Tensor) -> int | None:
    left = args[0] is base
    # [.., p, k] @ [.., k, q]: the sum runs over the last axis on the left, the last but one on the right.
    inner = base.dim() - 1 if left else max(base.dim() - 2, 0)
    if axis == inner:
        return None  # the product sums over the rows: see ``model.exact.reductions``
    if args[1 if left else 0].dim() == 1:
        return axis - int(axis > inner)  # a product with a vector removes the inner axis
    return _by_shape(base, axis, rows, out) if base.dim() <= out.dim() else None


def _by_reduction(args: Args, kwargs: Kwargs, base: Tensor, axis: int, out: Tensor) -> int | None:
    dims = reduced(args, kwargs, base)
    if dims is None or axis in dims or out.dim() == 0:
        return None
    return axis if out.dim() == base.dim() else axis - sum(d < axis for d in dims)


def of_two(name: str, args: Args, kwargs: Kwargs) -> bool:
    """Return True for ``torch.max(a, b)`` and ``torch.min(a, b)``, which are element-wise."""
    return name in ("max", "min") and isinstance(
        kwargs.get("other", args[1] if len(args) > 1 else None), Tensor
    )


def reduced(args: Args, kwargs: Kwargs, base: Tensor) -> tuple[int, ...] | None:
    """Return the axes that a reduction runs over; None if it names none, which means all."""
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
        # x[:, ids] selects columns. An index at the row axis itself is answered by handlers.
        whole = parts[0] == slice(None) if isinstance(parts[0], slice) else False
        # x[:, a, :, b]: of index tensors that are not side by side, torch puts the axes first. Integers are
        # taken out before.
        kinds = [isinstance(p, (Tensor, list)) for p in parts if not isinstance(p, int)]
        apart = False in kinds[kinds.index(True) : len(kinds) - kinds[::-1].index(True)]
        return 0 if axis == 0 and whole and not apart else None
    if Ellipsis in parts:
        at = parts.index(Ellipsis)
        # ``...`` stands for as many full slices as axes are not named; None names no axis.
        given = sum(p is not None for p in parts) - 1
        parts[at : at + 1] = [slice(None)] * (base.dim() - given)
    # ``seen`` counts axes of the base, ``place`` axes of the result: an integer uses up one and makes none.
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
    """Return the name of the tensor attribute that a ``__get__`` reads."""
    # The getter of ``x.shape`` is ``Tensor.shape.__get__``, bound to the descriptor that has the name.
    owner = getattr(func, "__self__", None)
    return str(getattr(owner, "__name__", "__get__"))


def ids_behind_axes(base: Any, index: Any) -> tuple[int, Tensor] | None:
    """Return axis and ids of ``x[:, row]``, ``x[..., row, :]`` and the like; None for any other index."""
    if not isinstance(index, tuple) or not isinstance(base, Tensor):
        return None
    ids = [(place, each) for place, each in enumerate(index) if isinstance(each, Tensor)]
    if len(ids) != 1 or ids[0][0] == 0 or ids[0][1].dim() != 1 or ids[0][1].dtype == torch.bool:
        return None
    place, row = ids[0]
    others = [each for each in index if each is not row]
    if not all(each is Ellipsis or (isinstance(each, slice) and each == slice(None)) for each in others):
        return None
    behind = len(index) - 1 - place
    after_dots = any(each is Ellipsis for each in index[:place])
    return (base.dim() - 1 - behind if after_dots else place), row
