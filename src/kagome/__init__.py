"""Kagome trains one graph neural network on one whole large graph across many devices.

The public face is imported lazily, so that ``import kagome`` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_FACE = {
    "Trainer": "kagome.train.trainer",
    "Parallel": "kagome.config",
    "Report": "kagome.config",
    "Train": "kagome.config",
    "check": "kagome.sharding.compare.check",
    "load": "kagome.train.load",
    "load_rows": "kagome.storage.row_files",
    "load_weights": "kagome.checkpoint.saved_weights",
    "plan": "kagome.autoplan.plan",
    "shard": "kagome.sharding.shard",
    "Edges": "kagome.graph.structure.sets",
    "Graph": "kagome.graph.structure.sets",
    "Vertices": "kagome.graph.structure.sets",
    "pipeline": "kagome.pipelining.dag.pipeline",
    "KagomeError": "kagome.errors",
}

__all__ = [
    "Edges",
    "Graph",
    "KagomeError",
    "Parallel",
    "Report",
    "Train",
    "Trainer",
    "Vertices",
    "__version__",
    "check",
    "load",
    "load_rows",
    "load_weights",
    "pipeline",
    "plan",
    "shard",
]


def __getattr__(name: str) -> Any:
    if name == "metrics":
        return import_module("kagome.metrics")
    if name in _FACE:
        return getattr(import_module(_FACE[name]), name)
    raise AttributeError(f"module 'kagome' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted(__all__)
