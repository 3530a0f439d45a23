"""Embedding bags: ``F.embedding_bag``, sums of a table's rows by numbers held per vertex or edge.

Where it sits: one of the ``interceptor``'s handlers, on a part of the graph::

    ids [N, k], table [V, d]     one row per vertex: each bag lies wholly on this part
    ids [T], offsets [N]         refused: a bag ends where the next vertex's begins, on another part
    rows of vertices as table    refused: they are read by numbers, not by edges
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from kagome.errors import ModelError
from kagome.placement.placement import ALIGNED, IDS, VERTICES, PlacementKind
from kagome.positions.position_scope import Args, Func, Kwargs, PositionScope
from kagome.user_frame import user_line


def bag(scope: PositionScope, name: str, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Answer ``F.embedding_bag(ids, table)`` with one bag per vertex or edge.

    Shapes:
        ids ``[n, k]``, table ``[V, d]`` -> ``[n, d]``.

    Raises:
        ModelError: If a part's own rows do not determine its bags.
    """
    if not scope.parted or func is not functional.embedding_bag:
        return NotImplemented
    given = dict(zip(("input", "weight", "offsets", "max_norm"), args, strict=False)) | kwargs
    held = {
        key: placement
        for key, value in given.items()
        if (placement := scope.placements.get(value)) is not None
    }
    if not held:
        return NotImplemented
    ids, bags = given["input"], held.get("input")
    if (table := held.get("weight")) is not None and table.kind in (*VERTICES, PlacementKind.LOST):
        raise _refused(
            scope,
            "one that reads rows of vertices by numbers",
            "x[edge_index[0]], and a sum of them by edge_index[1] (index_add, scatter)",
        )
    # With offsets, ids are one list [T] in the order of bags. A part cannot know where its first bag begins.
    if given.get("offsets") is not None or bags is None or not isinstance(ids, Tensor) or ids.dim() != 2:
        raise _refused(
            scope,
            "bags of which each ends where that of the next vertex or edge begins, on another part",
            "a row of k numbers for each vertex, F.embedding_bag(ids [N, k], table)",
        )
    # ``max_norm`` rescales the rows that are read in the table itself. Each part would do so for the rows
    # that it reads, and the tables of the ranks would differ.
    if bags.kind not in ALIGNED or bags.kind in IDS or bags.axis or given.get("max_norm") is not None:
        raise _refused(
            scope,
            "one that goes by numbers of vertices, or changes its table",
            "F.embedding, and a sum over axis 1",
        )
    with torch._C.DisableTorchFunction():
        out = func(*args, **kwargs)
    kind = PlacementKind.ROWS if bags.kind is PlacementKind.NUMBERS else bags.kind
    return scope.placements.put(out, replace(bags, kind=kind))


def _refused(scope: PositionScope, got: str, hint: str) -> ModelError:
    return ModelError(
        "F.embedding_bag to sum rows of a table for each vertex or edge",
        got,
        where="; ".join(filter(None, (scope.where(), user_line()))),
        hint=f"{hint}; or train on one rank",
    )


HANDLERS: dict[str, Callable[..., Any]] = {"embedding_bag": bag}
