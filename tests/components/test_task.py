"""Task: what a block draws leaves all generators as they were."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

from kagome.components.task import draws_of, undisturbed


@pytest.mark.parametrize("block", [lambda: draws_of(0, 1), undisturbed])
def test_the_generators_of_all_accelerators_are_restored(monkeypatch: Any, block: Any) -> None:
    """Those of accelerators were seeded anew and kept that. There are two here, which a dict stands for."""
    states = {0: "first", 1: "second"}
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: states[device])
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: states.update({device: state}))
    opened: AbstractContextManager[None] = block()
    with opened:
        states.update({0: "seeded", 1: "seeded"})
    assert states == {0: "first", 1: "second"}
