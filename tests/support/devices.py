"""Devices that are not there: torch's device queries answered as on a host with several GPUs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch


class CurrentDevice:
    """A current device per thread, 0 at first, as CUDA keeps it; replaces torch's own for a test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int = 4) -> None:
        self._local = threading.local()
        for name, answer in {
            "is_available": lambda: True,
            "device_count": lambda: count,
            "current_device_index": self.get,
            "device_index": self.set,
        }.items():
            monkeypatch.setattr(torch.accelerator, name, answer)

    def get(self) -> int:
        """Return the calling thread's device."""
        return getattr(self._local, "index", 0)

    @contextmanager
    def set(self, index: int | None) -> Iterator[None]:
        """Make a device the calling thread's own inside the block."""
        before = self.get()
        self._local.index = before if index is None else index
        yield
        self._local.index = before
