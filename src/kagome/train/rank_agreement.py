"""Rank agreement: check that all ranks train with the same optimizer, scheduler, loss and metric.

Where it sits: ``trainer`` compares what :func:`facts_of` returns on each rank; ``callbacks`` uses
:class:`ModelMarks` to find what a callback has changed.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from functools import partial
from types import CodeType
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from kagome.checkpoint.best_weights import bits, mark, unlike_on_ranks
from kagome.comm.channel import Channel
from kagome.config.toml_io import own_name
from kagome.errors import ConfigError

Facts = Mapping[str, str]
"""Values that ranks compare, by the name that an error message uses."""

NOTHING: Final = "none"
LONGEST: Final = 64
"""The most characters of a value in an error, and the most numbers of a tensor that is compared by value."""
TRIAL: Final = "the loss of made-up rows"
CLOSE: Final = 1e-3
"""Relative tolerance for the trial loss of two ranks, which may run on two kinds of machine."""
DEPTH: Final = 8
"""How deep nested lists and dicts are compared."""


def facts_of(optimizer: Optimizer, scheduler: Any, trial: float | None = None) -> dict[str, str]:
    """Return the optimizer's class, groups and hyperparameters, and the scheduler's class and plain state.

    Args:
        optimizer: The run's optimizer.
        scheduler: The run's scheduler, or None.
        trial: The value of the user's loss on made-up rows; None where it was not tried.
    """
    found = {"the optimizer": type(optimizer).__qualname__}
    found[TRIAL] = NOTHING if trial is None else repr(trial)
    found["the scheduler"] = NOTHING if scheduler is None else type(scheduler).__qualname__
    found["the number of param_groups"] = str(len(optimizer.param_groups))
    for place, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            shown = len(value) if key == "params" else value
            found[f"optimizer.param_groups[{place}][{key!r}]"] = _plain(shown)
    if type(scheduler).__module__.startswith("torch."):  # a user's own scheduler may keep the time of day
        found |= _state_of_scheduler(scheduler)
    return found


def _state_of_scheduler(scheduler: Any) -> dict[str, str]:
    held = getattr(scheduler, "__dict__", {})
    return {f"the scheduler's {name}": _plain(value) for name, value in held.items() if name != "optimizer"}


def code_of(given: object) -> str:
    """Describe a name, a function or a callable object by its code, so that ranks can compare it.

    Two ranks of one script get the same text for the same thing. Differences
    that the code does not show appear in the trial loss (:data:`TRIAL`).
    """
    if given is None or isinstance(given, str | bool | int | float):
        return repr(given)
    if isinstance(given, partial):
        bound = ", ".join(
            [*map(_plain, given.args), *(f"{k}={_plain(v)}" for k, v in given.keywords.items())]
        )
        return f"{code_of(given.func)} of {bound}"
    called: Any = given
    # A callable object: the code of the method that a call runs.
    if not hasattr(given, "__code__"):
        called = getattr(type(given), "forward" if isinstance(given, nn.Module) else "__call__", None)
    code = getattr(called, "__code__", None)
    text = own_name(given)
    defaults = _plain(getattr(called, "__defaults__", None))
    return text if code is None else f"{text} #{_digest(code)} {defaults}"


def refuse_unlike(found: Sequence[Facts]) -> None:
    """Raise an error if ranks would train with different settings.

    Args:
        found: The facts of each rank, by rank.

    Raises:
        ConfigError: Naming the first difference.
    """
    for rank, theirs in enumerate(found):
        for name in {**found[0], **theirs} if theirs != found[0] else ():
            # A name may exist on one rank only, such as a param group that only one rank added.
            one, other = found[0].get(name, NOTHING), theirs.get(name, NOTHING)
            if one != other and not (name == TRIAL and _near(one, other)):
                raise ConfigError(
                    "the same optimizer, scheduler, loss and metric on all ranks",
                    f"{name}: {one[:LONGEST]} on rank 0 and {other[:LONGEST]} on rank {rank}",
                    where=f"rank {rank}",
                    hint="give and change them on every rank in the same way",
                )


def refuse_unlike_codes(world: Channel, given: Mapping[str, object]) -> None:
    """Raise an error if ranks have different code for loss or metric. All ranks call it.

    Raises:
        ConfigError: Naming the first loss or metric that differs.
    """
    mine = {f"the {name}": code_of(value) for name, value in given.items()}
    found: Any = world.gather_objects(mine, "compare the ranks' loss and metric")
    refuse_unlike(found)


def compared(world: Channel, model: nn.Module, rules: Facts, changed: bool, *, whole: bool) -> bool:
    """Compare the weights that ranks train, and the settings they train with. All ranks call it.

    Args:
        world: All ranks.
        model: The model that is trained.
        rules: What :func:`facts_of` returns on this rank.
        changed: Whether the model's weights were changed on this rank.
        whole: Whether each rank has the current weights of all stages.

    Returns:
        Whether weights were changed on any rank.

    Raises:
        ConfigError: If the settings differ.
        ModelError: If weights were changed so that they differ.
    """
    # One checksum per parameter is sent instead of its values.
    sums = [bits(parameter) for parameter in model.parameters()]
    found: Any = world.gather_objects((changed, sums, rules), "compare the ranks' weights")
    refuse_unlike([theirs for *_, theirs in found])
    anywhere = any(each for each, *_ in found)
    # In a pipeline a rank's copies of other stages' weights are old until they are joined, so ranks only have
    # to agree if `whole` is true.
    if anywhere and whole and any(theirs != sums for _, theirs, _ in found):
        raise unlike_on_ranks(model, [theirs for _, theirs, _ in found])
    return anywhere


class ModelMarks:
    """Marks of the state that a callback on one rank must not change.

    Args:
        model: The model, which all ranks share.
        optimizer: The optimizer, which all ranks share.
        scheduler: The scheduler, which all ranks share; None for none.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, scheduler: Any) -> None:
        self._model, self._optimizer, self._scheduler = model, optimizer, scheduler

    def facts(self) -> dict[str, str]:
        """Return what :func:`facts_of` says at present."""
        return facts_of(self._optimizer, self._scheduler)

    def now(self, *, alone: bool) -> dict[str, Any]:
        """Return marks that a change alters: of the model; with ``alone`` of optimizer and scheduler too.

        Args:
            alone: Whether the callback runs on this rank only, so that it may change nothing that ranks
                share.

        Cost:
            One pass over weights and buffers; with ``alone``, over the optimizer's state too.
        """
        found: dict[str, Any] = {"model": mark(self._model)}
        if alone:
            found["optimizer"] = facts_of(self._optimizer, None), _state_of(self._optimizer)
            found["scheduler"] = _state_of_scheduler(self._scheduler)
        return found


def _state_of(optimizer: Optimizer) -> list[Any]:
    """Return a mark of all state that an optimizer keeps."""
    # Reading the state of a weight without one would create an empty entry.
    return [
        (id(weight), [(key, _kept(value)) for key, value in held.items()])
        for weight, held in optimizer.state.items()
        if held
    ]


def _kept(value: Any) -> Any:
    return (value._version, bits(value)) if isinstance(value, Tensor) else _plain(value)


def _plain(value: Any, depth: int = DEPTH) -> str:
    """Show numbers and texts in full, also inside lists and dicts; show anything else by its class."""
    if value is None or isinstance(value, str | bool | int | float | complex):
        return repr(value)
    if isinstance(value, Tensor):
        few = value.numel() <= LONGEST and value.layout is torch.strided
        return repr(value.detach().tolist()) if few else f"{list(value.shape)}"
    # Lists and dicts may contain themselves.
    within = depth > 0
    if isinstance(value, Mapping) and within:
        pairs = (f"{_plain(key, depth - 1)}: {_plain(each, depth - 1)}" for key, each in value.items())
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, list | tuple) and within:
        return "[" + ", ".join(_plain(each, depth - 1) for each in value) + "]"
    return type(value).__qualname__


def _digest(code: CodeType) -> str:
    # Bytecode, constants and names. The code object's own repr or hash would contain an address, which
    # differs between processes.
    text = hashlib.sha256(code.co_code)
    for const in code.co_consts:
        text.update((_digest(const) if isinstance(const, CodeType) else _plain(const)).encode())
    text.update(" ".join(code.co_names).encode())
    return text.hexdigest()[:8]


def _near(one: str, other: str) -> bool:
    return NOTHING in (one, other) or math.isclose(float(one), float(other), rel_tol=CLOSE)
