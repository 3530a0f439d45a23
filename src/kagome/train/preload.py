"""Loaded: what every rank of a training imports, for the process that ranks are forked of.

Where it sits: ``cli`` names it to ``launch``. What cannot be imported, for want of memory say, is told by a
rank that needs it: the process that ranks are forked of has nobody to tell.
"""

from __future__ import annotations

from contextlib import suppress

with suppress(Exception):
    import kagome.model.zoo
    import kagome.train.trainer  # noqa: F401
