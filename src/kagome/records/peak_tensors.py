"""Peak tensors: what a rank held at the moment when its tensors took most memory, tensor by tensor.

Where it sits: ``memory.live_tensors`` fills it; ``report.page.page`` shows it and ``summary.json`` has it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from kagome.records.units import bytes_text

SHOWN: Final = 10
"""Tensors that are listed, the largest first."""


@dataclass(frozen=True)
class PeakTensor:
    """One tensor, or several that share their memory.

    Args:
        bytes: Bytes of the memory behind it.
        shape: Its shape.
        dtype: Its data type, for example ``float32``.
        layer: The module that made it, or that had called what backward was at; empty if none had.
        made_by: The operator, for example ``aten.relu``, with the node of autograd in backward; empty for
            what the rank held before the epoch.
        reason: Why it was held: a kind of ``MemoryByKind``, ``saved for backward``, ``in flight in forward``
            or ``in flight in backward``.
    """

    bytes: int
    shape: tuple[int, ...]
    dtype: str
    layer: str
    made_by: str
    reason: str


@dataclass(frozen=True)
class PeakTensors:
    """The tensors of one rank at their peak in one epoch, and what the allocator kept besides.

    Args:
        live: Bytes of all tensors at their peak, each memory counted once.
        allocator: Bytes that the allocator kept free at that moment, at most; None if it does not tell.
        largest: The largest tensors.
    """

    live: int
    allocator: int | None
    largest: tuple[PeakTensor, ...]

    @staticmethod
    def of(tensors: Sequence[PeakTensor], allocator: int | None) -> PeakTensors:
        """Return the record of all tensors that lived at the peak."""
        largest = sorted(tensors, key=lambda tensor: -tensor.bytes)[:SHOWN]
        return PeakTensors(sum(tensor.bytes for tensor in tensors), allocator, tuple(largest))

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, as ``summary.json`` holds them."""
        return asdict(self)


def fullest_peak(memory: Sequence[Mapping[str, Any]]) -> tuple[int, Mapping[str, Any]] | None:
    """Return the rank whose tensors took most, with its record; None if no rank recorded them.

    Args:
        memory: The entries of ``summary.json``, one per rank.
    """
    known = [(rank, each["peak_tensors"]) for rank, each in enumerate(memory) if each.get("peak_tensors")]
    return max(known, key=lambda found: found[1]["live"]) if known else None


def peak_line(peak: Mapping[str, Any]) -> str:
    """Return a sentence on one rank's peak: its tensors, and the allocator's share."""
    kept = peak.get("allocator")
    beside = "" if kept is None else f"; the allocator kept at most {bytes_text(kept)} of freed memory beside"
    return f"tensors took {bytes_text(peak['live'])} at their peak{beside}"


def peak_table(peak: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return head and rows of the report's table of one rank's largest tensors."""
    head = ["bytes", "shape", "layer", "made by", "held for"]
    rows = [
        [
            bytes_text(each["bytes"]),
            f"{each['dtype']} {list(each['shape'])}",
            each["layer"] or "-",
            each["made_by"] or "-",
            each["reason"],
        ]
        for each in peak["largest"]
    ]
    return head, rows
