"""Memory by kind: what a rank holds in memory, predicted and measured side by side.

Where it sits: ``memory`` and ``train`` fill it; ``report.summary`` writes it, and ``report.page.page``
and the terminal's table show it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Final

from kagome.records.units import bytes_text

GRAVE: Final = ("weights", "features", "activations", "halo")
"""Kinds that a sentence names even if they are small, because a user can change them."""


@dataclass(frozen=True)
class MemoryByKind:
    """Bytes that one rank holds, by kind; a tensor's memory counts once, for the first kind that has it."""

    weights: int = 0
    """Parameters, buffers, and the best epoch's copy of both."""
    gradients: int = 0
    """Gradients of the parameters, from one backward to the next."""
    optimizer: int | None = 0
    """State of the optimizer; None if unknown."""
    features: int = 0
    """Features, labels, masks and all other data with a row per vertex."""
    edges: int = 0
    """Edges with their ids and attributes."""
    tables: int = 0
    """Results computed from the graph once: edges by target and by source, lists of rows to send, ids,
    normalisation, sums of constant features.
    """
    activations: int | None = 0
    """Tensors that autograd keeps from one forward for its backward; None if unknown."""
    halo: int | None = 0
    """Rows of other ranks that are kept until backward or permanently; None if unknown."""
    other: int | None = None
    """The rest of the measured peak: gradients of activations in flight, unused memory in the allocator,
    libraries. Predicted: what the largest layer saves while it runs again. None if no peak was measured, or
    no layer runs again.
    """

    @property
    def total(self) -> int:
        """The sum of all known kinds."""
        return sum(value or 0 for value in asdict(self).values())

    @property
    def known(self) -> bool:
        """Whether every kind is known except ``other``."""
        return all(getattr(self, name) is not None for name in KINDS if name != "other")

    def beside(self, peak: int) -> MemoryByKind:
        """Return a copy in which ``other`` is the rest up to a measured peak."""
        # The peak of the process may be below the sum: kinds need not be held at the same time.
        return replace(self, other=max(peak - replace(self, other=None).total, 0))

    def as_dict(self) -> dict[str, int | None]:
        """Return the kinds and ``total`` as plain values."""
        return {**asdict(self), "total": self.total}

    def text(self) -> str:
        """Return one phrase: ``1.2 GB (weights 3 MB, features 200 MB, ...)``."""
        parts = [(name, getattr(self, name)) for name in KINDS]
        told = [
            f"{name} {'unknown' if value is None else bytes_text(value)}"
            for name, value in parts
            if (name in GRAVE or _large(value, self.total)) and not (name == "other" and value is None)
        ]
        return f"{bytes_text(self.total)} ({', '.join(told)})"


KINDS: Final = tuple(field.name for field in fields(MemoryByKind))
"""The kinds, in the order in which they are shown."""


def _large(value: int | None, total: int) -> bool:
    # A twentieth of the whole, or unknown, which might be any size.
    return value is None or value * 20 >= max(total, 1)


def fullest(holdings: Sequence[MemoryByKind]) -> MemoryByKind:
    """Return the entry with the largest total."""
    return max(holdings, key=lambda one: one.total)


def side_by_side(predicted: MemoryByKind | None, measured: MemoryByKind) -> dict[str, Any]:
    """Return the entry of one rank in ``summary.json``."""
    return {
        "predicted": None if predicted is None else predicted.as_dict(),
        "measured": measured.as_dict(),
    }


def line(memory: Sequence[Mapping[str, Any]]) -> tuple[str, str] | None:
    """Return the fullest rank's line in the terminal's table, as name and text.

    Args:
        memory: The entries of ``summary.json``, one per rank.

    Returns:
        The name and the text, or None if nothing was measured.
    """
    ranks = [rank["measured"] for rank in memory if rank.get("measured")]
    if not ranks:
        return None
    full = max(ranks, key=lambda rank: rank.get("total") or 0)
    kinds = sorted((k for k in KINDS if full.get(k) and k != "other"), key=lambda k: -full[k])[:4]
    return "held on the fullest rank", ", ".join(f"{kind} {bytes_text(full[kind])}" for kind in kinds)


def table(memory: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return head and rows of the report's table: one row per kind, one column per rank.

    Args:
        memory: The entries of ``summary.json``, one per rank.
    """
    predicts = any(rank.get("predicted") for rank in memory)
    head = ["", *(f"rank {number}" for number in range(len(memory)))]
    rows = []
    for kind in (*KINDS, "total"):
        cells = [_cell(rank, kind, predicts) for rank in memory]
        if any(cells):
            rows.append([kind, *(cell or "-" for cell in cells)])
    return head, rows


def _cell(rank: Mapping[str, Any], kind: str, predicts: bool) -> str:
    found = (rank.get("measured") or {}).get(kind)
    guess = (rank.get("predicted") or {}).get(kind)
    # A kind that is empty on every rank gets no row.
    if not found and not guess:
        return ""
    text = "-" if found is None else bytes_text(found)
    if not predicts or kind in ("other", "total"):
        return text
    # "-" if nothing was predicted for the rank, "unknown" if this kind was not.
    told = "-" if not rank.get("predicted") else "unknown" if guess is None else bytes_text(guess)
    return f"{text} ({told})"
