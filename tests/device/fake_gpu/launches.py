"""Refuses what Triton would do wrong without a word: a kernel launched while another device is current.

Where it sits: Kagome's kernels run in plain PyTorch on the fake device, and PyTorch's operators choose the
device of their tensors. Triton launches on the thread's current device, whatever its tensors lie on.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from kagome.kernels import ops
from kagome.kernels.quantize import ops as quantize


class OtherDeviceError(RuntimeError):
    """A kernel on tensors of a device that is not the thread's current one."""


def start() -> None:
    """Check each call of a kernel of Kagome in this process."""
    for module in (ops, quantize):
        module._way = _checked(module._way)  # type: ignore[attr-defined]


def _checked(way: Any) -> Any:
    def checked(x: Tensor, *others: Any) -> Any:
        if x.is_cuda and x.device.index != torch.cuda.current_device():
            raise OtherDeviceError(
                f"a kernel on {x.device} in thread {threading.current_thread().name}, where cuda:"
                f"{torch.cuda.current_device()} is current: Triton would launch it there"
            )
        return way(x, *others)

    return checked
