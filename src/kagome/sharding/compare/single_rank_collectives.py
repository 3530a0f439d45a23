"""Single-rank collectives: ``torch.distributed`` acts within a block as in a group of one rank.

Where it sits: ``comparison`` runs the whole model on one rank in such a block. A model or loss that calls
``torch.distributed`` by itself would wait there for ranks that do not run it.

A collective of one rank is the identity. Here it has a gradient, which the collectives of
``torch.distributed`` lack: so the check finds a gradient that was lost in one of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor


class _Done:
    """The handle of a collective that has ended."""

    def wait(self, *_: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def _in_place(*args: Any, **kwargs: Any) -> None:
    """A collective that leaves its tensor as it is: a sum over one rank, a broadcast."""


def _into_list(out: list[Any], value: Any, *args: Any, **kwargs: Any) -> None:
    """Write what one rank gives to its place in a list; other places, of other ranks, are zero."""
    for place, each in enumerate(out):
        if not isinstance(value, Tensor):
            out[place] = value
        elif place == 0:
            each.copy_(value)
        else:
            each.zero_()


def _into_tensor(out: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> None:
    out.copy_(value.reshape(out.shape))


def _from_list(out: Tensor, values: list[Tensor], *args: Any, **kwargs: Any) -> None:
    out.copy_(values[0])


def _lists(out: list[Tensor], values: list[Tensor], *args: Any, **kwargs: Any) -> None:
    for each, value in zip(out, values, strict=True):
        each.copy_(value)


_ACTS: Final[dict[str, Callable[..., None]]] = {
    "all_reduce": _in_place,
    "reduce": _in_place,
    "broadcast": _in_place,
    "barrier": _in_place,
    "broadcast_object_list": _in_place,
    "all_gather": _into_list,
    "all_gather_object": _into_list,
    "all_gather_into_tensor": _into_tensor,
    "reduce_scatter_tensor": _into_tensor,
    "all_to_all_single": _into_tensor,
    "reduce_scatter": _from_list,
    "all_to_all": _lists,
}
_NUMBERS: Final = {"get_world_size": 1, "get_rank": 0}


@contextmanager
def single_rank_collectives() -> Iterator[set[str]]:
    """Replace the collectives, in all modules that have imported them.

    Yields:
        The names of those that were called.
    """
    called: set[str] = set()

    def instead(name: str) -> Callable[..., Any]:
        def act(*args: Any, **kwargs: Any) -> _Done:
            called.add(name)
            _ACTS[name](*args, **kwargs)
            return _Done()

        return act

    def number(value: int) -> Callable[..., int]:
        return lambda *args, **kwargs: value

    new: dict[str, Callable[..., Any]] = {name: instead(name) for name in _ACTS}
    new |= {name: number(value) for name, value in _NUMBERS.items()}
    by_id = {id(getattr(dist, name)): new[name] for name in new if hasattr(dist, name)}
    with ExitStack() as stack:
        for module in filter(_may_call, list(sys.modules.values())):
            for name, value in list(vars(module).items()):
                if id(value) in by_id:
                    stack.enter_context(patch.object(module, name, by_id[id(value)]))
        yield called


def _may_call(module: Any) -> bool:
    """Return whether a module may call collectives for the user: any but torch's inner ones and Kagome's."""
    name = getattr(module, "__name__", "")
    if not isinstance(name, str) or not isinstance(getattr(module, "__dict__", None), dict):
        return False
    own = name == "kagome" or name.startswith("kagome.")
    inner = name.startswith("torch.") and not name.startswith("torch.distributed")
    return not own and not inner
