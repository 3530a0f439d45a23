"""Units: numbers as people read them, such as bytes, seconds, shares and metrics.

Where it sits: used by the progress line, the final table, the page and its charts; imports nothing.
"""

from __future__ import annotations

import math


def bytes_text(count: float) -> str:
    """Return a number of bytes in decimal units.

    Args:
        count: The number of bytes.

    Returns:
        For example ``0 B``, ``812 B``, ``3.21 MB``.
    """
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        # 0.9995 of a unit would be rounded up to "1000" of the unit below.
        if abs(count) >= 0.9995 * size:
            return f"{_three_digits(count / size)} {unit}"
    return f"{count:.0f} B"


def seconds_text(seconds: float) -> str:
    """Return a duration in the unit that suits it.

    Args:
        seconds: The duration in seconds.

    Returns:
        For example ``340 µs``, ``41.2 ms``, ``3.05 s``, ``4 min 10 s``, ``2 h 05 min``.
    """
    # 3599.5 would be rounded to 60 minutes.
    if abs(seconds) >= 3599.5:
        hours, minutes = divmod(round(seconds / 60), 60)
        return f"{hours} h {minutes:02d} min"
    # Seconds up to two minutes: "119 s" reads better than "1 min 59 s", and 119.5 would be rounded to 120.
    if abs(seconds) >= 119.5:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest:02d} s"
    if abs(seconds) >= 0.9995:
        return f"{_three_digits(seconds)} s"
    if abs(seconds) >= 0.9995e-3:
        return f"{_three_digits(seconds * 1e3)} ms"
    return f"{_three_digits(seconds * 1e6)} µs" if seconds else "0 s"


def share_text(share: float) -> str:
    """Return a fraction as a percentage, for example ``37 %``; a small positive one is ``< 1 %``."""
    return "< 1 %" if 0 < share < 0.005 else f"{share * 100:.0f} %"


def metric_text(value: float | None) -> str:
    """Return a metric or a loss with four digits, or a dash for None."""
    if value is None or not math.isfinite(value):
        return "-"
    return f"{value:.4f}" if 1e-3 <= abs(value) < 1e4 or value == 0 else f"{value:.3g}"


def count_text(value: float) -> str:
    """Return a count with thin spaces between thousands; other numbers with three digits."""
    if float(value).is_integer():
        # A narrow no-break space, which neither breaks a line nor is read as a decimal comma.
        return f"{int(value):,}".replace(",", "\u202f")
    return _three_digits(value)


def epochs_text(count: int) -> str:
    """Return a number of epochs, for example ``1 epoch``, ``20 epochs``."""
    return f"{count} epoch{'' if count == 1 else 's'}"


def _three_digits(value: float) -> str:
    # Limits are where rounding would add a digit: 99.95 with one decimal is "100.0".
    size = abs(value)
    if size >= 99.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if size >= 9.995 else f"{value:.2f}"
