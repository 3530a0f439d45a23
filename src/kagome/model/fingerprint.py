"""Identity: what tells one model from another where its costs are concerned.

Where it sits: ``autoplan.workload`` keeps what it measured of a model under it.
"""

from __future__ import annotations

import hashlib
import inspect
from itertools import chain
from pathlib import Path
from typing import Any

from torch import Tensor, nn

_PACKAGES = ("torch", "torch_geometric", "kagome")
"""Their versions tell what they do."""


def identity(model: nn.Module) -> list[object] | None:
    """All of a model that decides what an epoch of it costs, but its weights' values.

    Its modules with their settings, its parameters and buffers with shapes and types, and the text of each
    file that a class of the user's own stands in.

    Args:
        model: Any.

    Returns:
        As JSON has it; None where a class has no file (typed at a prompt), so that nobody can tell.

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
    return [modules, tensors, sorted(files.values())]


_HELD = ("_parameters", "_buffers", "_modules")
"""Told apart from other settings."""


def _plain(value: Any) -> object:
    """A setting as JSON has it; of what is no number, text or list of them its kind alone."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        return [list(value.shape), str(value.dtype)]
    if isinstance(value, tuple | list | set | frozenset):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return [[str(key), _plain(each)] for key, each in value.items()]
    return getattr(value, "__qualname__", None) or type(value).__qualname__
