"""Named module: imports a module that a user has named, from the current folder or an installed package.

Where it sits: data sets and models of the form ``python:package.module:function`` are looked up by it.
Nothing of the current folder is imported unless a user names it: a ``numba.py`` that is there never runs.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from types import ModuleType


def named_module(name: str) -> ModuleType:
    """Return a module by its name, from the current folder if it has one, else from Python's path.

    Imports inside a module of the current folder find other modules there too, after those of Python's path.

    Args:
        name: The module's name, such as ``package.module``.

    Raises:
        Exception: The error that the import raised.
    """
    here, top = os.getcwd(), name.partition(".")[0]
    if here not in sys.path:
        sys.path.append(here)
    if top not in sys.modules:
        spec = PathFinder.find_spec(top, [here])
        if spec is not None and spec.loader is not None:
            module = sys.modules[top] = module_from_spec(spec)
            try:
                spec.loader.exec_module(module)
            except BaseException:
                del sys.modules[top]
                raise
    return import_module(name)


def leave_current_folder() -> None:
    """Move the current folder, which ``python -m`` has put first, to the end of Python's path."""
    if sys.path and sys.path[0] in ("", os.getcwd()) and not sys.flags.safe_path:
        sys.path.append(sys.path.pop(0))
