"""Rows that an ``index_add_`` names twice: on a GPU their order, and so the sum's bits, are not fixed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kagome.kernels.base import ordered_sums

ADDS = (torch.ops.aten.index_add_.default, torch.ops.aten.index_add.default)


class Collisions(TorchDispatchMode):
    """Counts the sums by index, and collects those with a row that the index names twice."""

    def __init__(self) -> None:
        super().__init__()
        self.sums, self.twice = 0, list[tuple[int, ...]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in ADDS:
            self.sums += 1
            if args[2].unique().numel() < args[2].numel() and args[3].is_floating_point():
                self.twice.append(tuple(args[2].tolist()))
        return func(*args, **(kwargs or {}))


@contextmanager
def as_on_a_gpu() -> Iterator[Collisions]:
    """Take the ways of a device that adds by atomics, on the CPU."""
    with pytest.MonkeyPatch.context() as patch, Collisions() as found:
        patch.setattr(ordered_sums, "adds_in_order", lambda device: False)
        yield found
