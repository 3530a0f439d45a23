"""Writes: which tensors a torch call writes to, by its name.

Where it sits: ``positions.kept_tensors``, ``positions.vertex_tables`` and ``positions.edge_tables`` ask it
before a call that would write to a copy.
"""

from __future__ import annotations

from typing import Any, Final

from torch import Tensor

IN_PLACE: Final = frozenset(
    f"__i{name}__"
    for name in (
        *("add", "sub", "mul", "div", "truediv", "floordiv", "mod", "pow", "matmul"),
        *("and", "or", "xor", "lshift", "rshift"),
    )
)
"""Operators that write to their first argument, and whose result is put in its place."""
_NO_NUMBERS: Final = frozenset(["requires_grad_", "detach_", "share_memory_", "rename_", "squeeze_", "t_"])
"""Calls that change what a tensor is, and none of its numbers."""


def writes(name: str) -> bool:
    """Whether a call writes to its first argument, and nothing else is made of it."""
    return name == "__setitem__" or (
        name.endswith("_") and not name.endswith("__") and name not in _NO_NUMBERS
    )


def written_by(name: str, what: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that a call writes to.

    Args:
        name: Of the call.
        what: Of an attribute that is set, its name.
        args: By place.
        kwargs: By name.
    """
    found: list[Any] = []
    if args and (writes(name) or name in IN_PLACE or (name == "__set__" and what == "data")):
        found = [args[0]]
    if kwargs.get("out") is not None:
        found.append(kwargs["out"])
    flat = (one for each in found for one in (each if isinstance(each, (tuple, list)) else (each,)))
    return [each for each in flat if isinstance(each, Tensor)]
