"""Garbage collection: collections look at objects that epochs create, not at everything imported.

Where it sits: ``train.trainer`` enters :func:`set_aside` around its epochs, and ``train.preload`` imports
inside :func:`uncollected`. A full collection visits half a million objects of torch and PyG, which takes 0.3
to 0.4 s. Every rank collects in another epoch, and all others wait for it.
"""

from __future__ import annotations

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

FEW: Final = 10
"""Number of epochs below which a full collection beforehand costs more than it saves: a loop of ``fit`` calls
has one epoch each."""


@contextmanager
def set_aside(epochs: int) -> Iterator[None]:
    """Exclude the objects that exist now from collections inside the block.

    Objects frozen earlier stay frozen.

    Args:
        epochs: Number of epochs that the block may have; below :data:`FEW` nothing is done.

    Cost:
        One full collection.
    """
    # unfreeze would also thaw what somebody else froze.
    if epochs < FEW or gc.get_freeze_count():
        yield
        return
    # What is garbage now would be frozen with the rest and never be collected.
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def uncollected() -> Iterator[None]:
    """Exclude the objects that the block creates from all collections, in this process and in forks of it.

    For imports: they create objects that live as long as the process, and would be collected in vain dozens
    of times. A fork shares the pages of objects that no collection visits.
    """
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        # Without a collection before: what is garbage by now is little, and looking for it takes 0.3 s.
        gc.freeze()
        # At exit extension modules look for objects that were never freed, and print those that they find.
        atexit.register(gc.unfreeze)
        if before:
            gc.enable()
