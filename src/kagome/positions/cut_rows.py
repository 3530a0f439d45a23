"""Cut rows: reads of a learned table of which each rank has its own rows, by the numbers of its vertices.

Where it sits: ``intercept.gather_scatter`` asks it before all other handlers of reads.
``kagome.shard(cut=...)`` gives such a parameter the placement of rows, so that all other calls take it for
rows of the part.

::

    embedding(arange(N)), embedding(n_id), weight[n_id]     own rows, if the numbers are the vertices' own
    embedding(edge_index[0]), embedding(batch)              as weight[edge_index[0]], weight[batch]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from kagome.placement.placement import Placement, PlacementKind
from kagome.positions.position_scope import Args, Func, Kwargs, PositionScope
from kagome.scope.rows import refused
from kagome.sparse_ops.edge_view import EdgeView


class CutScope(PositionScope, Protocol):
    """The interface of the running interceptor that this module uses."""

    views: list[EdgeView]


def read(scope: CutScope, name: str, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Answer a read of a cut table by numbers; all other reads are those of any rows.

    Raises:
        ModelError: If the numbers are not those of the rows' own vertices, or an option of ``F.embedding``
            is not a row's own.
    """
    table, ids = _read_of(name, args, kwargs)
    if type(table) is not nn.Parameter or not isinstance(ids, Tensor):
        return NotImplemented
    held = scope.placements.get(table)
    # A table that is whole on all ranks has no placement: ``vertex_tables`` and ``edge_tables`` read it.
    if held is None or held.kind not in (PlacementKind.ROWS, PlacementKind.PAIRS) or held.axis:
        return NotImplemented
    if name == "embedding":
        _refuse_options(scope, args, kwargs)
    # A mask selects among own rows, as it does of any rows.
    if ids.dtype not in (torch.int64, torch.int32):
        return NotImplemented
    numbers = _own_numbers(scope, held, ids)
    if numbers is None:
        # Ids of edges' ends, positions, or numbers that all ranks have: as rows of vertices are read.
        return (
            scope.__torch_function__(Tensor.__getitem__, (), (table, ids))
            if name == "embedding"
            else NotImplemented
        )
    scope.numbered = True
    with torch._C.DisableTorchFunction():
        if not torch.equal(numbers.to(torch.int64), _ids(scope, held)):
            # An exchange could bring such rows; but mostly a table in another order is a mistake.
            raise refused(
                scope,
                f"a cut table of shape {list(table.shape)} read by numbers of other rows, by each row",
                expected="rows of a cut table read by the numbers of their own vertices or edges",
                hint="leave this table out of cut=..., or order its rows as the graph's",
            )
        # A copy, as a read by ids is: a write to it must not reach the parameter.
        out = table.clone()
    return scope.placements.put(out, held)


def _read_of(name: str, args: Args, kwargs: Kwargs) -> tuple[Any, Any]:
    """Return the table and the numbers of a read; None for what is not a read along the first axis."""
    if name == "embedding":
        given = dict(zip(("input", "weight"), args, strict=False)) | kwargs
        return given.get("weight"), given.get("input")
    if name == "index_select":
        given = dict(zip(("input", "dim", "index"), args, strict=False)) | kwargs
        first = isinstance(given.get("input"), Tensor) and given.get("dim") in (0, -given["input"].dim())
        return (given["input"], given.get("index")) if first else (None, None)
    return (args[0], args[1]) if len(args) > 1 else (None, None)


def _own_numbers(scope: CutScope, held: Placement, ids: Tensor) -> Tensor | None:
    """Return the numbers that own rows hold, where each row of the graph holds one; else None."""
    placement = scope.placements.get(ids)
    vertices = held.kind is PlacementKind.ROWS
    if placement is None:
        # As many numbers as the graph has rows: a constant, or a buffer, with one for each of them.
        count = scope.sets[held.vertex_set].size if vertices else scope.views[held.view].count
        with torch._C.DisableTorchFunction():
            own = ids.dim() == 1 and ids.numel() == count
            return ids[_ids(scope, held)] if own else None
    # Numbers that came with the data are this rank's already.
    same = placement.kind is held.kind and placement.is_complete and ids.dim() == 1
    return ids if same else None


def _ids(scope: CutScope, held: Placement) -> Tensor:
    """Return the numbers of own vertices, or of own edges."""
    if held.kind is PlacementKind.ROWS:
        return scope.ids.own(held.vertex_set)
    return scope.views[held.view].edge_ids.to(scope.device)


def _refuse_options(scope: CutScope, args: Args, kwargs: Kwargs) -> None:
    """Refuse options of ``F.embedding`` by which rows are not independent of each other, or of their order.

    Raises:
        ModelError: Naming the first of them.
    """
    names = ("padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
    given = dict(zip(names, args[2:], strict=False)) | kwargs
    for option in ("padding_idx", "max_norm", "scale_grad_by_freq", "sparse"):
        value = given.get(option)
        if value is not None and value is not False:
            raise refused(
                scope,
                f"{option}={value}",
                expected="an embedding without options for a table that is cut",
                hint="leave it out of cut=..., or take the option away",
            )


HANDLERS: dict[str, Callable[..., Any]] = dict.fromkeys(("embedding", "__getitem__", "index_select"), read)
