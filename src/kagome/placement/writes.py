"""Writes: which tensors a torch call writes to, judged by its name.

Where it sits: ``positions.kept_tensors``, ``positions.vertex_tables`` and ``positions.edge_tables`` ask it
before a call that would write to a copy.
"""

from __future__ import annotations

from typing import Any, Final

from torch import Tensor

from kagome.placement.torch_calls import Args, Kwargs

IN_PLACE: Final = frozenset(
    f"__i{name}__"
    for name in (
        *("add", "sub", "mul", "div", "truediv", "floordiv", "mod", "pow", "matmul"),
        *("and", "or", "xor", "lshift", "rshift"),
    )
)
"""In-place operators: they write to their first argument, and their result replaces it."""
_NO_NUMBERS: Final = frozenset(["requires_grad_", "detach_", "share_memory_", "rename_", "squeeze_", "t_"])
"""In-place calls that change a tensor's properties, but none of its values."""


def writes(name: str) -> bool:
    """Return True if a call writes to its first argument and makes no other result."""
    # add_ and copy_ write, __add__ does not; IN_PLACE has the operators that do.
    return name == "__setitem__" or (
        name.endswith("_") and not name.endswith("__") and name not in _NO_NUMBERS
    )


def written_by(name: str, what: str, args: Args, kwargs: Kwargs) -> list[Tensor]:
    """Return the tensors that a call writes to.

    Args:
        name: The name of the call.
        what: The name of the attribute, if the call sets one.
        args: Positional arguments.
        kwargs: Named arguments.
    """
    found: list[Any] = []
    # ``x.data = y`` gives x other values without a call that ends in an underscore.
    if args and (writes(name) or name in IN_PLACE or (name == "__set__" and what == "data")):
        found = [args[0]]
    if kwargs.get("out") is not None:
        found.append(kwargs["out"])
    flat = (one for each in found for one in (each if isinstance(each, (tuple, list)) else (each,)))
    return [each for each in flat if isinstance(each, Tensor)]
