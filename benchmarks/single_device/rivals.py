"""Rivals: DGL, imported beside a PyTorch that it does not know.

Where it sits: ``aggregation`` times it. It is the extra ``bench``; without it the benchmark leaves it out.
"""

from __future__ import annotations

import importlib
import os
import sys
from types import ModuleType
from typing import Any


class _Nothing(ModuleType):
    """A module of which every name is an empty class: enough for ``from . import graphbolt``."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def import_dgl() -> tuple[Any, str]:
    """DGL, or None and why it cannot be had.

    DGL 2.1's graphbolt loads a library built for PyTorch 2.0 to 2.2 and stops the import with any other. The
    kernels of message passing are in another library, which needs no PyTorch: so graphbolt is left out.
    """
    os.environ.setdefault("DGLBACKEND", "pytorch")
    # Also after a failed try, what is left in sys.modules must not be taken for DGL.
    sys.modules.setdefault("dgl.graphbolt", _Nothing("dgl.graphbolt"))
    try:
        dgl = importlib.import_module("dgl")
        return dgl, f"DGL {dgl.__version__}, without graphbolt"
    except Exception as error:  # an old package with a new PyTorch fails in its own ways
        for name in [n for n in sys.modules if n == "dgl" or n.startswith("dgl.")]:
            del sys.modules[name]
        return None, f"no DGL: {type(error).__name__}: {error}"
