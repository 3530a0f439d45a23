"""Task: draws leave all generators as they were; outputs without rows are those of all ranks."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

from kagome.comm.channel import Channel
from kagome.components.task import draws_of, refuse_own_values, undisturbed
from kagome.errors import ModelError


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


def told(channel: Channel, case: str) -> str:
    rank = float(channel.rank)
    values = {
        "equal": [torch.tensor(3.0), torch.ones(2, 2)],
        "rounded": [torch.tensor(1.0 + 1e-6 * rank)],
        "no number": [torch.tensor(float("nan"))],
        "other": [torch.tensor(3.0), torch.tensor(rank)],
        "one is no number": [torch.tensor(float("nan") if rank else 1.0)],
        "shape": [torch.ones(2 + channel.rank)],
        "more": [torch.zeros(())] * (1 + channel.rank),
    }[case]
    try:
        refuse_own_values(values, channel)
    except ModelError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("case", "refused"),
    [
        ("equal", False),
        ("rounded", False),
        ("no number", False),
        ("other", True),
        ("one is no number", True),
        ("shape", True),
        ("more", True),
    ],
)
def test_outputs_without_rows_are_the_same_on_all_ranks(ranks: Any, case: str, refused: bool) -> None:
    for rank, said in enumerate(ranks(2, told, case)):
        assert bool(said) is refused, (rank, said)
        assert not refused or f"rank {rank}" in said
