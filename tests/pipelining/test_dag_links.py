"""The bandwidth of links is measured to the end of what a device was given, not to the end of giving it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kagome.pipelining.dag import auto_plan
from kagome.pipelining.dag.auto_plan import PROBE, bandwidth


class Asynchronous:
    """A channel of a GPU: a call returns at once, and the GPU takes two seconds for each."""

    size = 4
    device = torch.device("cpu")

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.ready = 100.0, 150.0  # the GPU is busy with something else until 150
        monkeypatch.setattr(auto_plan, "time", SimpleNamespace(perf_counter=lambda: self.now))
        monkeypatch.setattr(torch, "zeros", lambda count, device: self.tensor(count))

    def tensor(self, count: int) -> Any:
        def item() -> float:
            self.now = max(self.now, self.ready)
            return 0.0

        value = SimpleNamespace(item=item)
        return type("Numbers", (), {"nbytes": 4 * count, "__getitem__": lambda _, place: value})()

    def all_reduce(self, numbers: Any, *, action: str, kind: str) -> Any:
        self.ready = max(self.ready, self.now) + 2.0
        return numbers


def test_bandwidth_is_that_of_the_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    channel: Any = Asynchronous(monkeypatch)
    assert bandwidth(channel) == pytest.approx(2 * 3 / 4 * 4 * PROBE / 2.0)
