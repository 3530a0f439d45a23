"""Opaque calls: functions that run outside Python, so that the torch calls inside them are hidden.

Where it sits: ``autograd_functions`` installs it. ``intercept.interceptor`` asks it about operators that
torch itself does not have. A part follows rows by the calls of a forward. It cannot see the calls of a
compiled function, so a mean inside one would be the mean of the part's own rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch._ops import OpOverload, OpOverloadPacket

from kagome.errors import ModelError
from kagome.placement.placement import tensors
from kagome.placement.torch_calls import Args, Func, Kwargs
from kagome.scope.rows import LocatedScope

_SCRIPTED: Final = "ScriptFunction"
"""The name that ``torch.jit.script`` gives to a function. A traced function keeps its own."""
_WAY: Final = "call the Python function or module that it was made of"
_OURS: Final = frozenset(["aten", "prim", "prims", "mkldnn", "quantized"])
"""Namespaces of torch's own operators."""
_BY_PYG: Final = {
    "pyg": "WITH_PYG_LIB",
    "torch_cluster": "WITH_TORCH_CLUSTER",
    "torch_scatter": "WITH_TORCH_SCATTER",
    "torch_sparse": "WITH_TORCH_SPARSE",
    "torch_spline_conv": "WITH_TORCH_SPLINE_CONV",
}
"""The flag in ``torch_geometric.typing`` that makes PyG use a library's operators if they are installed."""


def watch(running: Callable[[], Any]) -> Callable[[], None]:
    """Run scripted functions call by call where a part runs, and refuse those that cannot run so.

    Args:
        running: Returns the interceptor under which a part runs; None if there is none.

    Returns:
        A function that removes it.
    """
    # Python looks ``__call__`` up on the type, so it is replaced for all scripted functions and methods. Each
    # call asks whether a part runs.
    function, method = torch._C.ScriptFunction, torch._C.ScriptMethod
    plain = function.__call__, method.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        scope = running()
        if scope is not None and _has_rows(scope, args, kwargs):
            # Torch keeps the Python function for Dynamo. A traced function may take another branch in
            # Python than in its trace, so only a scripted one is run in this way.
            source = getattr(self, "_torchdynamo_inline", None)
            if getattr(self, "__name__", "") == _SCRIPTED and source is not None:
                return source(*args, **kwargs)
            raise _refused(scope, f"{self.name}, compiled by torch.jit")
        return plain[0](self, *args, **kwargs)

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        scope = running()
        # A method of a scripted module has no Python source to run instead.
        if scope is not None and _has_rows(scope, args, kwargs):
            raise _refused(scope, f"{self.name} of {self.owner._type().name()}, compiled by torch.jit")
        return plain[1](self, *args, **kwargs)

    for kind, put in ((function, call), (method, run)):
        setattr(kind, "__call__", put)  # noqa: B010 (mypy takes no assignment to a method)

    def remove() -> None:
        for kind, back in zip((function, method), plain, strict=True):
            setattr(kind, "__call__", back)  # noqa: B010

    return remove


def refuse_operator(scope: Any, func: Func, args: Args, kwargs: Kwargs) -> None:
    """Refuse an operator of a library or of the user that is given rows of a part.

    Raises:
        ModelError: If it is given any, since what it does with them is unknown.
    """
    if isinstance(func, OpOverload):
        space = func.namespace
    elif isinstance(func, OpOverloadPacket):
        space = func._qualified_op_name.partition("::")[0]
    else:
        return
    # Without rows of a part (weights, sizes) an operator gives the same on all ranks.
    if space not in _OURS and _has_rows(scope, args, kwargs):
        switch = _BY_PYG.get(space)
        way = switch and f"set torch_geometric.typing.{switch} = False before the model is made"
        raise _refused(scope, f"{space}::{func.__name__}, an operator that torch does not have", way or _WAY)


def _has_rows(scope: Any, args: Args, kwargs: Kwargs) -> bool:
    return any(scope.placements.get(tensor) is not None for tensor in tensors(args, kwargs))


def _refused(scope: LocatedScope, got: str, way: str = _WAY) -> ModelError:
    return ModelError(
        "each call inside forward to be visible on several ranks",
        f"{got}, which hides its calls",
        where=scope.where(),
        hint=f"{way}, or train on one rank",
    )
