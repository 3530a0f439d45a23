"""Model fingerprint: identifies a model by everything that decides what an epoch of it costs.

Where it sits: ``autoplan.workload`` keeps its measurements of a model under the fingerprint.
"""

from __future__ import annotations

import hashlib
import inspect
from itertools import chain
from pathlib import Path
from typing import Any

from torch import Tensor, nn

_PACKAGES = ("torch", "torch_geometric", "kagome")
"""Packages whose files are not hashed: their versions identify their code."""


def identity(model: nn.Module) -> list[object] | None:
    """Return everything of a model that decides the cost of an epoch; the weights' values do not.

    It consists of the modules with their settings, the shapes and types of parameters and buffers, and the
    text of each file that defines one of the user's own classes.

    Args:
        model: The model.

    Returns:
        JSON values; None if a class has no source file (for example, one typed at a prompt).

    Cost:
        A look at each module; each file is read once.
    """
    files: dict[str, str] = {}
    modules: list[object] = []
    for name, module in model.named_modules():
        kind = type(module)
        if kind.__module__.partition(".")[0] not in _PACKAGES:
            try:
                file = inspect.getfile(kind)
                files[file] = hashlib.blake2b(Path(file).read_bytes(), digest_size=16).hexdigest()
            except (OSError, TypeError):
                return None
        settings = {key: _plain(value) for key, value in vars(module).items() if key not in _HELD}
        modules.append([name, kind.__module__, kind.__qualname__, settings])
    tensors = [
        [name, list(tensor.shape), str(tensor.dtype), tensor.requires_grad]
        for name, tensor in chain(model.named_parameters(), model.named_buffers())
    ]
    # Contents without paths: a project that was moved finds its measurements again.
    return [modules, tensors, sorted(files.values())]


_HELD = ("_parameters", "_buffers", "_modules")
"""Attributes of a module that are not settings: their tensors and modules are listed separately."""


def _plain(value: Any) -> object:
    """Return a setting as a JSON value; a value that JSON cannot hold is represented by its type."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        return [list(value.shape), str(value.dtype)]
    if isinstance(value, tuple | list | set | frozenset):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return [[str(key), _plain(each)] for key, each in value.items()]
    # A function or class by its name, never by ``repr``, which may have an address in it.
    return getattr(value, "__qualname__", None) or type(value).__qualname__
