"""The fake device: its memory, what it refuses, and what it counts."""

from __future__ import annotations

import pytest
import torch

from fake_gpu import cuda


def on_a_device() -> dict[str, object]:
    x = torch.arange(6.0).view(2, 3).cuda()
    y = (x @ x.T).relu()
    return {"device": str(y.device), "y": y.cpu(), "library": None}


def test_it_computes_what_the_cpu_computes(devices):
    (found,) = devices.run(1, on_a_device)
    x = torch.arange(6.0).view(2, 3)
    assert found["device"] == "cuda:0"
    assert torch.equal(found["y"], x @ x.T)
