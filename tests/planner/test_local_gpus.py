"""Plans for ranks that will compute on GPUs are plans for GPUs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch_geometric.nn import GCN

import kagome
from kagome.autoplan import local_gpus as gpus, plan as autoplan
from kagome.autoplan.local_gpus import COPIED, STAGED, cluster_of, local_gpus
from kagome.planner.cluster import CORE


class Machine:
    """GPUs that copy 1 TB/s within themselves (each byte read and written) and 0.1 TB/s to each other."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
        self.now, self.end = 0.0, 0.0
        monkeypatch.setattr(gpus, "visible", lambda: ("cuda", count))
        monkeypatch.setattr(gpus, "time", SimpleNamespace(perf_counter=lambda: self.now))
        monkeypatch.setattr(torch, "empty", lambda *_, device, **__: self.tensor(device))
        monkeypatch.setattr(torch.accelerator, "synchronize", self.synchronize)
        monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda d: (1e9 * (8 - d.index), 8e9))

    def synchronize(self, device: torch.device) -> None:
        self.now = max(self.now, self.end)

    def tensor(self, device: torch.device) -> Any:
        def copy_(rows: Any) -> None:  # returns at once
            self.end = self.now + (2 * COPIED / 1e12 if rows.device == device else COPIED / 1e11)

        return SimpleNamespace(device=device, copy_=copy_)


def test_gpus_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(monkeypatch, 4)
    found = local_gpus(2)
    assert found is not None
    assert (found.name, found.devices, found.memory) == ("2 GPUs of this machine", 2, 7e9)
    assert found.speed == pytest.approx(1e12 / CORE)
    assert found.inside == found.between == pytest.approx(1e11)


def test_ranks_that_share_gpus_have_a_share_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(monkeypatch, 1)
    found = local_gpus(3)
    assert found is not None
    assert found.memory == pytest.approx(8e9 / 3)
    assert found.speed == pytest.approx(1e12 / CORE / 3)
    assert found.inside == STAGED


def test_without_gpus_the_cores_are_planned_for() -> None:
    assert local_gpus(2) is None


def test_plans_are_for_the_gpus_that_ranks_would_have(monkeypatch: pytest.MonkeyPatch) -> None:
    data = kagome.load("sbm:vertices=60,degree=4,features=6,classes=3,communities=3")
    there = cluster_of(2, 2, 80e9, 3000e9, 200e9)
    monkeypatch.setattr(autoplan, "local_gpus", lambda ranks: there)
    monkeypatch.setattr(autoplan, "here", lambda *_: pytest.fail("planned for the cores"))
    found = kagome.plan(GCN(6, 8, num_layers=2, out_channels=3), data, devices=2)
    (note,) = [note for note in found.facts["notes"] if "a GPU counts" in note]
    assert "2 GPUs of this machine" in note
    assert "200 of them" in note
