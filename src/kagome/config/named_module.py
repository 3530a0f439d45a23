"""Named: a module that a user has named, from the current folder or installed.

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
    """A module by its name: of the current folder, where that has it, else of Python's path.

    What a module of the current folder imports may lie there too; it is looked for there last.

    Args:
        name: Such as ``package.module``.

    Raises:
        Exception: What importing it raised.
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
    """Take the current folder from the head of Python's path, where ``python -m`` has put it."""
    if sys.path and sys.path[0] in ("", os.getcwd()) and not sys.flags.safe_path:
        sys.path.append(sys.path.pop(0))
