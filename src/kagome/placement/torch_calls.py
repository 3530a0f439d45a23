"""Torch calls: what a handler is given of an intercepted call.

Where it sits: below all modules that answer torch calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Func = Callable[..., Any]
"""The function that is called."""
Args = tuple[Any, ...]
"""Its arguments by position."""
Kwargs = dict[str, Any]
"""Its arguments by name."""
