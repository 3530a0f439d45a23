"""Heap: Python's garbage collector looks at what epochs make, not at all that was imported.

Where it sits: ``trainer`` enters it around its epochs. A full collection goes through half a million objects
of torch and PyG, 0.3 to 0.4 s; every rank does so in another epoch, and all others wait for it.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def set_aside() -> Iterator[None]:
    """For a block no collection looks at what is there now. Who has frozen objects before keeps them.

    Cost:
        One full collection.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
