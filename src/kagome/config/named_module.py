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
    # Order of search:
    #    the named module          the current folder, then Python's path
    #    imports within it         Python's path, then the current folder (appended, not put first)
    # So a user's module "utils" is found, and a numba.py beside it does not replace numba.
    here, top = os.getcwd(), name.partition(".")[0]
    if here not in sys.path:
        sys.path.append(here)
    # A package of the current folder is loaded by its top; import_module finds the rest through it.
    if top not in sys.modules:
        spec = PathFinder.find_spec(top, [here])
        if spec is not None and spec.loader is not None:
            # Before it is executed, as the import system does it, for modules that import each other.
            module = sys.modules[top] = module_from_spec(spec)
            try:
                spec.loader.exec_module(module)
            except BaseException:
                del sys.modules[top]
                raise
    return import_module(name)


def leave_current_folder() -> None:
    """Move the current folder, which ``python -m`` has put first, to the end of Python's path."""
    # With -P or PYTHONSAFEPATH Python has not put the folder there.
    if sys.path and sys.path[0] in ("", os.getcwd()) and not sys.flags.safe_path:
        sys.path.append(sys.path.pop(0))
