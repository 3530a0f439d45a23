"""Colours: which of the style sheet's colours each phase, kind of bytes and share has.

Where it sits: ``report.charts`` and ``report.page`` use it; ``templates/style.css`` has the colours
themselves.
"""

from __future__ import annotations

_INKS = {
    # Cool colours compute, warm colours move data, grey does neither.
    "forward": "blue", "backward": "teal", "optimizer": "violet",
    "exchange": "orange", "weights": "amber", "sending": "orange",
    "evaluate": "grey", "checkpoint": "dim",
    "partition": "dim", "load": "grey", "check": "violet",
    # Kinds of bytes: a kind has the same colour everywhere.
    "halo": "orange", "stage": "rose", "transpose": "blue", "statistics": "teal", "other": "grey",
    # Shares of the diagnosis.
    "compute": "blue", "waiting": "rose", "memory": "violet",
}  # fmt: skip


def ink(name: str) -> str:
    """Return the colour class of a phase, a kind of bytes or a share; grey for those without one."""
    return f"ink-{_INKS.get(name, 'grey')}"
