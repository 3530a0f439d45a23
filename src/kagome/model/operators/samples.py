"""Sample batches: a batch as inputs by name, with samples along axis 0 of each.

Where it sits: ``pipelining.dag`` and ``profile.operators`` turn a user's batch into such inputs.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Final

from torch import Tensor, nn

from kagome.errors import DataError

Batch = Tensor | tuple[Tensor, ...] | list[Tensor] | Mapping[str, Tensor]
"""Samples along axis 0: one tensor, several by position, or several by the names of forward's arguments."""

_BY_PLACE: Final = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_STARS: Final[Mapping[Any, str]] = {
    inspect.Parameter.VAR_POSITIONAL: "*",
    inspect.Parameter.VAR_KEYWORD: "**",
}
_BY_NAME: Final = "a dict of tensors with the names of forward's arguments"
_NAME_ALL: Final = "name each input in forward's signature: what comes by * or ** has no name to go by"


def inputs_of(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """Return the tensors of a batch by the names of forward's arguments.

    Args:
        model: The user's module.
        batch: The batch.

    Raises:
        DataError: If an input is not a tensor or has no samples, if inputs differ in the number of samples,
            or if forward takes other inputs.

    Shapes:
        each ``[n, ...]``.
    """
    parameters = list(inspect.signature(model.forward).parameters.values())
    fixed = [p for p in parameters if p.kind in (*_BY_PLACE, inspect.Parameter.KEYWORD_ONLY)]
    call = f"forward({', '.join(_STARS.get(p.kind, '') + p.name for p in parameters)})"
    open_ended = len(fixed) < len(parameters)
    given: dict[str, Any]
    if isinstance(batch, Mapping):
        given = dict(batch)
    else:
        values = list(batch) if isinstance(batch, tuple | list) else [batch]
        places = [p.name for p in fixed if p.kind in _BY_PLACE]
        if len(values) > len(places):
            raise DataError(
                f"a batch of {len(places)} inputs by place for {call}",
                f"{len(values)}",
                hint=_NAME_ALL if open_ended else f"give {len(places)}, or name them: a dict of tensors",
            )
        given = dict(zip(places, values, strict=False))
    # ``*args`` and ``**kwargs`` have no names by which a stage could ask for its inputs.
    unknown = sorted(set(given) - {p.name for p in fixed})
    missing = [p.name for p in fixed if p.default is p.empty and p.name not in given]
    if unknown or missing or not given:
        raise DataError(
            f"a batch with what {call} takes",
            f"a batch without {missing}" if missing or not given else f"a batch with {unknown} as well",
            hint=_NAME_ALL if unknown and open_ended else _BY_NAME,
        )
    for name, value in given.items():
        if not isinstance(value, Tensor) or value.dim() == 0:
            axes = f" without axes as {name!r}" if isinstance(value, Tensor) else ""
            raise DataError(
                "a batch of tensors with samples along axis 0",
                f"a {type(value).__name__}{axes}",
                where=f"input {name!r}",
                hint="keep settings in the module; repeat what is the same for all samples",
            )
    counts = {name: value.size(0) for name, value in given.items()}
    if len(set(counts.values())) > 1:
        raise DataError(
            "all inputs of a batch to have the same samples along axis 0",
            ", ".join(f"{count} of {name}" for name, count in counts.items()),
        )
    return given


def count_of(inputs: Mapping[str, Tensor]) -> int:
    """Return the number of samples of a batch."""
    return next(iter(inputs.values())).size(0)


def rows_of(inputs: Mapping[str, Tensor], first: int, last: int) -> dict[str, Tensor]:
    """Return the samples from ``first`` to ``last - 1``, as views."""
    return {name: value[first:last] for name, value in inputs.items()}
