"""Recorded operations: rows are found in whatever holds them, or the recording ends."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kagome.replay.recorded_ops import CallRecorder


def scope() -> Any:
    return SimpleNamespace(
        constants=SimpleNamespace(computed={}, is_constant=lambda tensor: False),
        placements=SimpleNamespace(get=lambda tensor: None),
        forward=SimpleNamespace(path=["layer"]),
        where=lambda: "layer",
    )


def recorded(place: Callable[[Tensor], Any], x: Tensor, out: Tensor) -> CallRecorder:
    recorder = CallRecorder(scope(), [x], [])
    given = (place(x),), {}
    recorder.torch_call(lambda value: taken(value), given, given, out, asked=False)
    return recorder


def taken(value: Any) -> Tensor:
    return value if isinstance(value, Tensor) else taken(value[-1])


PLACES: dict[str, Callable[[Tensor], Any]] = {
    "itself": lambda x: x,
    "a list": lambda x: [3, x],
    "a list in a tuple": lambda x: (3, [x]),
    "a tuple in a tuple in a list": lambda x: [3, (None, (x,))],
}
UNSEEN: dict[str, Callable[[Tensor], Any]] = {
    "a dict": lambda x: {"rows": x},
    "a dict in a list": lambda x: [{"rows": x}],
    "a start": lambda x: slice(x, None),
    "a step": lambda x: slice(None, None, x),
    "a slice in an index": lambda x: (slice(None), slice(None, x)),
}


@pytest.mark.parametrize("name", PLACES)
def test_other_rows_take_the_place_of_the_recorded_ones(name: str) -> None:
    x, y = torch.rand(3), torch.rand(3)
    recorder = recorded(PLACES[name], x, x.clone())
    assert recorder.sound
    (op,) = recorder.ops
    assert op.replay(scope(), [y]) is y


@pytest.mark.parametrize("name", UNSEEN)
def test_rows_in_anything_else_end_the_recording(name: str) -> None:
    x = torch.rand(())
    assert not recorded(UNSEEN[name], x, x.clone()).sound


def test_the_path_is_put_back_after_an_error() -> None:
    around, x = scope(), torch.rand(3)

    def fails(args: Any, kwargs: Any) -> Tensor:
        raise ZeroDivisionError

    recorder = CallRecorder(around, [x], [])
    recorder.answered(fails, ((x,), {}), ((x,), {}), x.clone(), asked=False)
    around.where = lambda: "another"
    with pytest.raises(ZeroDivisionError):
        recorder.ops[0].replay(around, [x])
    assert around.forward.path == ["layer"]
