"""Stop: SIGTERM is remembered until the epoch is done, so that it can be saved first.

Where it sits: ``trainer`` runs its epochs inside.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def asked_to_stop(can_save: bool) -> Iterator[list[int]]:
    """Collect SIGTERMs while inside; what was set before is set again afterwards.

    Args:
        can_save: Without a folder to save to, or outside the main thread, SIGTERM does what it always did.

    Yields:
        A list that is empty until a signal came. A second signal changes nothing.
    """
    asked: list[int] = []
    if not can_save or threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def note(number: int, _frame: FrameType | None) -> None:
        asked.append(number)

    before = signal.signal(signal.SIGTERM, note)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGTERM, before)
