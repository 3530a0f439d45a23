"""Loss state: what a user's loss stores besides its arguments, saved and put back around trial calls.

Where it sits: ``objective`` calls a loss more often than once an epoch, to check it and to score by it.
Counters, running means and lists that the loss keeps (in attributes, closures, globals or buffers) continue
as if those calls had not happened. State that cannot be seen, such as a generator's position, cannot be put
back: ``objective`` refuses such a loss.
"""

from __future__ import annotations

import functools
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from kagome.components.task import undisturbed
from kagome.model.buffers import LIBRARIES

DEPTH: Final = 8
"""How deep nested objects are searched for state."""
MOST: Final = 5_000
"""The most objects that are searched."""
WATCHED: Final = 64 * 2**20
"""The most bytes of a tensor that is copied, unless it is a buffer."""

PutBack = Callable[[], bool]
"""A function that restores an object, and returns whether the object had changed."""


class Moves:
    """Whether a call has changed what a function holds; known after the block."""

    moved = False


@contextmanager
def unmoved(function: Any) -> Iterator[Moves]:
    """Put back all state of a function, and of all random generators, after a block that may call it.

    Args:
        function: A function, a module, or any callable object; None for none.
    """
    with torch._C.DisableTorchFunction():
        # A mode of torch functions may be active: an interceptor must not see the clones that are made here.
        kept = _kept(function)
    found = Moves()
    # Trial calls must not draw from the generators that the run draws from.
    with undisturbed():
        try:
            yield found
        finally:
            with torch._C.DisableTorchFunction(), torch.no_grad():
                found.moved = sum(put_back() for put_back in kept) > 0  # a sum, so that all are restored


def _kept(function: Any) -> list[PutBack]:
    """Return the functions that restore each object which a function can reach."""
    found: list[PutBack] = []
    seen: dict[int, Any] = {}  # keeps the objects alive, so that no id is reused
    # Depth first over what the function can reach. Depth and number are bounded: a loss may hold a data set.
    todo = [(function, DEPTH)]
    while todo and len(seen) < MOST:
        thing, depth = todo.pop()
        if depth == 0 or id(thing) in seen or _is_plain(thing):
            continue
        seen[id(thing)] = thing
        more, puts = _parts(thing)
        found += puts
        todo += [(each, depth - 1) for each in more]
    return found


def _is_plain(thing: Any) -> bool:
    return thing is None or isinstance(thing, int | float | complex | str | bytes | ModuleType | CodeType)


def _parts(thing: Any) -> tuple[list[Any], list[PutBack]]:
    """Return what an object holds, and the functions that restore the object itself."""
    # Weights are trained, not kept by the loss: the optimizer alone changes them.
    if isinstance(thing, Tensor):
        return [], [] if isinstance(thing, nn.Parameter) else _tensor(thing, most=WATCHED)
    if isinstance(thing, FunctionType):
        return _function(thing)
    if isinstance(thing, MethodType):
        return [thing.__self__, thing.__func__], []
    if isinstance(thing, functools.partial):
        return [thing.func, *thing.args, *thing.keywords.values()], []
    if isinstance(thing, nn.Module):
        return _module(thing)
    if isinstance(thing, dict):
        return list(thing.values()), [_mapping(thing)]
    if isinstance(thing, list | deque | set):
        return list(thing), [_several(thing)]
    if isinstance(thing, tuple | frozenset):
        return list(thing), []
    if isinstance(thing, torch.Generator | random.Random | np.random.Generator | np.ndarray):
        return [], _foreign(thing)
    # Objects of libraries are left alone: their attributes are not a loss's state, and may be anything.
    if isinstance(thing, type) or not _of_user(type(thing).__module__):
        return [], []
    held = getattr(thing, "__dict__", {})
    # The function behind a callable object may keep state in its globals or closure.
    call = vars(type(thing)).get("__call__")
    return [*held.values(), call], [_mapping(held), *map(_class, _classes(thing))]


def _of_user(module: str | None) -> bool:
    name = f"{module or 'builtins'}."
    # __main__ is where a user's script runs.
    return not name.startswith((*LIBRARIES, "kagome.", "numpy.")) and (
        name.split(".")[0] == "__main__" or name.split(".")[0] not in sys.stdlib_module_names
    )


def _classes(thing: Any) -> list[type]:
    return [each for each in type(thing).__mro__ if _of_user(each.__module__)]


def _function(function: FunctionType) -> tuple[list[Any], list[PutBack]]:
    # State of a function: closure cells (nonlocal), default values (def loss(out, y, seen=[])), its own
    # attributes, and globals that its code names.
    cells = list(function.__closure__ or ())
    held = [cell.cell_contents for cell in cells if _is_full(cell)]
    held += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    puts = [_mapping(function.__dict__), *(_cell(cell) for cell in cells if _is_full(cell))]
    held += list(function.__dict__.values())
    if _of_user(function.__module__):
        names = [name for name in _names(function.__code__) if name in function.__globals__]
        held += [function.__globals__[name] for name in names]
        puts += [_slots(function.__globals__, names)] if names else []
    return held, puts


def _names(code: CodeType) -> set[str]:
    """Return the globals that code may read or write."""
    # Functions within the function, lambdas and comprehensions have code of their own.
    inner = [_names(const) for const in code.co_consts if isinstance(const, CodeType)]
    return set(code.co_names).union(*inner)


def _is_full(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # nothing was put there yet
        return False


def _module(module: nn.Module) -> tuple[list[Any], list[PutBack]]:
    # Buffers of any module, torch's own too: running statistics. Other attributes of the user's modules only.
    buffers = [each for each in module._buffers.values() if each is not None]
    puts = [_mapping(module._buffers), *(put for each in buffers for put in _tensor(each))]
    held: list[Any] = list(module._modules.values())
    if _of_user(type(module).__module__):
        known = {"_parameters", "_buffers", "_modules"}
        held += [value for name, value in vars(module).items() if name not in known]
        # forward may use globals.
        held.append(type(module).forward)
        puts += [_mapping(vars(module)), *map(_class, _classes(module))]
    return held, puts


def _mapping(held: MutableMapping[str, Any]) -> PutBack:
    before = dict(held)

    def put_back() -> bool:
        # By identity: comparing values could run a user's __eq__, and is ambiguous for tensors.
        if len(before) == len(held) and all(name in held and held[name] is v for name, v in before.items()):
            return False
        for name in [name for name in held if name not in before]:
            del held[name]
        held.update(before)
        return True

    return put_back


def _slots(held: dict[str, Any], names: list[str]) -> PutBack:
    before = {name: held[name] for name in names}

    def put_back() -> bool:
        changed = [name for name, value in before.items() if held.get(name) is not value]
        held.update({name: before[name] for name in changed})
        return bool(changed)

    return put_back


def _class(kind: type) -> PutBack:
    # Counters as class attributes. vars() of a class is read-only, hence setattr.
    before = {k: v for k, v in list(vars(kind).items()) if _is_plain(v) and not k.startswith("__")}

    def put_back() -> bool:
        changed = [name for name, value in before.items() if vars(kind).get(name) is not value]
        for name in changed:
            setattr(kind, name, before[name])
        return bool(changed)

    return put_back


def _several(held: list[Any] | deque[Any] | set[Any]) -> PutBack:
    before = list(held)

    def put_back() -> bool:
        now = list(held)
        if len(now) == len(before) and all(one is other for one, other in zip(now, before, strict=True)):
            return False
        held.clear()
        held.update(before) if isinstance(held, set) else held.extend(before)
        return True

    return put_back


def _cell(cell: CellType) -> PutBack:
    before = cell.cell_contents

    def put_back() -> bool:
        changed = not _is_full(cell) or cell.cell_contents is not before
        cell.cell_contents = before
        return changed

    return put_back


def _tensor(tensor: Tensor, most: int | None = None) -> list[PutBack]:
    # A large tensor in a closure is data, not state; a copy of it for each trial would cost too much.
    if tensor.layout is not torch.strided or (most is not None and tensor.nbytes > most):
        return []
    before, version = tensor.detach().clone(), tensor._version

    def put_back() -> bool:
        # Writing an equal number would still be a change to a backward that has saved the tensor.
        changed = tensor._version != version
        if changed:
            tensor.detach().copy_(before)
        return changed

    return [put_back]


def _foreign(thing: Any) -> list[PutBack]:
    if isinstance(thing, np.ndarray):
        if thing.nbytes > WATCHED or not thing.flags.writeable:
            return []
        before = thing.copy()
        return [lambda: _if_other(thing.tobytes() != before.tobytes(), lambda: np.copyto(thing, before))]
    if isinstance(thing, torch.Generator):
        state = thing.get_state()
        return [lambda: _if_other(not torch.equal(thing.get_state(), state), lambda: thing.set_state(state))]
    if isinstance(thing, random.Random):
        drawn = thing.getstate()
        return [lambda: _if_other(thing.getstate() != drawn, lambda: thing.setstate(drawn))]
    # NumPy's state is a dict of arrays that == cannot compare, so it counts as changed.
    place = thing.bit_generator.state
    return [lambda: _if_other(True, lambda: setattr(thing.bit_generator, "state", place))]


def _if_other(other: bool, put_back: Callable[[], object]) -> bool:
    if other:
        put_back()
    return other
