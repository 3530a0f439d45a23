"""Heap: Python's garbage collector looks at what epochs make, not at all that was imported.

Where it sits: ``train.trainer`` enters it around its epochs. A full collection goes through half a million
objects of torch and PyG, 0.3 to 0.4 s; every rank does so in another epoch, and all others wait for it.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

FEW: Final = 10
"""Epochs for which a full collection beforehand costs more than it spares: a loop of ``fit`` has one each."""


@contextmanager
def set_aside(epochs: int) -> Iterator[None]:
    """For a block no collection looks at what is there now. Who has frozen objects before keeps them.

    Args:
        epochs: That the block may have; before a few nothing is done.

    Cost:
        One full collection.
    """
    if epochs < FEW or gc.get_freeze_count():
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
