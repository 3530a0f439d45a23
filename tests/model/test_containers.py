"""Lists and dicts of modules are as they were after a trace; what is kept between forwards is refused."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kagome.errors import ModelError
from kagome.model.trace.shapes import trace


class Holder:
    """A plain object of a user's."""

    def __init__(self) -> None:
        self.last: Any = None


class Keeps(nn.Module):
    """A model that keeps values outside of its attributes."""

    def __init__(self, lines: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.lin, self.lines = nn.Linear(3, 3), lines
        self.cache: dict[str, Any] = {"deep": {}}
        self.seen: list[Any] = []
        self.some: set[Any] = set()
        self.holder = Holder()

    def forward(self, x: Tensor) -> Tensor:
        return self.lines(self, self.lin(x))


def _once(m: Any, h: Tensor) -> Tensor:
    if "n" not in m.cache:
        m.cache["n"] = h.sum(0)
    return h - m.cache["n"]


def _deep(m: Any, h: Tensor) -> Tensor:
    return h - m.cache["deep"].setdefault("n", h.sum(0))


def _all(m: Any, h: Tensor) -> Tensor:
    m.seen.append(h)
    return h.tanh()


def _both(m: Any, h: Tensor) -> Tensor:
    out = h if m.holder.last is None else h + m.holder.last
    m.holder.last = h
    return out


def _marks(m: Any, h: Tensor) -> Tensor:
    m.some.add(h)
    return h


def _count(m: Any, h: Tensor) -> Tensor:
    m.cache["calls"] = m.cache.get("calls", 0) + 1
    return h


def _this(m: Any, h: Tensor) -> Tensor:
    m.cache["h"], m.holder.last = h, {"sum": h.sum(0)}
    return m.cache["h"] - m.holder.last["sum"]


def _state(m: Keeps) -> Any:
    return dict(m.cache), dict(m.cache["deep"]), list(m.seen), set(m.some), dict(vars(m.holder))


@pytest.mark.parametrize(
    ("lines", "where"),
    [
        (_once, "cache"),
        (_deep, "cache"),
        (_all, "seen"),
        (_both, "holder"),
        (_marks, "some"),
        (_count, "cache"),
    ],
)
def test_what_is_kept_between_forwards_is_refused(lines: Callable[..., Tensor], where: str) -> None:
    model = Keeps(lines)
    with pytest.raises(
        ModelError, match=rf"got one that keeps values in {where} from one forward to the next"
    ):
        trace(model, ["x"])
    assert _state(model) == _state(Keeps(lines))


def test_what_each_forward_writes_and_reads_is_served() -> None:
    torch.manual_seed(0)
    model, x = Keeps(_this), torch.randn(5, 3)
    expected = model(x)
    model.cache.pop("h")
    model.holder.last = None
    graph = trace(model, ["x"])
    assert _state(model) == _state(Keeps(_this))
    values = graph.run(model, {"x": x}, training=True, keep=[graph.output])
    assert torch.equal(values[graph.output], expected)


def test_a_value_of_an_earlier_trace_is_refused_wherever_it_lies() -> None:
    kept = SimpleNamespace(table={})  # outside of the model

    def lines(m: Any, h: Tensor) -> Tensor:
        if "n" not in kept.table:
            kept.table["n"] = h.sum(0)
        return h - kept.table["n"]

    with pytest.raises(ModelError, match="an object that outlives it"):
        trace(Keeps(lines), ["x"])
