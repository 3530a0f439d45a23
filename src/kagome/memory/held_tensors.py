"""Held tensors: every tensor that an interceptor keeps from one forward pass to the next, by kind.

Where it sits: ``memory.tensor_bytes`` counts them. This module knows what ``intercept.interceptor``,
``scope``, ``deferred.deferral`` and ``sparse_ops.edge_view`` keep, so that no module outside this folder has
to.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from kagome.graph.partition.partition import Partition
from kagome.graph.structure.attributes import tensors_of
from kagome.intercept.interceptor import Interceptor
from kagome.kernels.base.csr import CsrLayout, Structure


def holding(scope: Interceptor) -> Iterator[tuple[str, Tensor]]:
    """Yield each kept tensor with its kind: ``features``, ``edges``, ``send``, ``tables`` or ``kept``.

    Tensors of kind ``kept`` were computed once from the others; rows of other ranks are among them. Tensors
    may share memory and appear more than once; the first kind counts.
    """
    given, first = scope.given_part, scope.views[0]
    parts = [given] if isinstance(given, Partition) else [each.part for each in given.edges]
    # Before the inputs of forward, which mix attributes of vertices and of edges.
    for part in parts:
        for value in (part.edge_index, part.edge_ids, *part.edges.values()):
            yield "edges", value
    for view in scope.views:
        for value in (view.edge_index, view.given, view.edge_ids, *view.attributes.values()):
            yield "edges", value
        # The first view is of in-edges and has the part's own send list. A view of out-edges has another.
        yield ("send" if view is first else "tables"), view.rows.send
        yield "tables", view.ids
    for part in parts:
        yield "send", part.send
        for value in (part.own, part.halo):
            yield "tables", value
    nodes = [given.nodes] if isinstance(given, Partition) else given.nodes
    for rows in (scope.inputs, *nodes, *(v for v in scope.inputs.values() if isinstance(v, dict))):
        for value in tensors_of(rows).values():
            yield "features", value
    for structure in scope.deferral.structures():
        for value in _of_structure(structure):
            yield "tables", value
    for value in (*scope.constants.held(), *scope.ids.held(), *scope.reads.held_lists()):
        yield "kept", value


def _of_structure(structure: Structure) -> Iterator[Tensor]:
    """Yield the two ends of all edges, and those lazily built tensors that exist by now."""
    yield from (structure.source, structure.target)
    # A cached_property stores its value in the instance's __dict__. Reading it by attribute would build it.
    built = vars(structure)
    for name in ("by_target", "by_source"):
        if name in built:
            yield from _of_layout(built[name])
    if "degree" in built:
        yield built["degree"]
    if built.get("walked", structure) is not structure:
        yield from _of_structure(built["walked"])


def _of_layout(layout: CsrLayout) -> Iterator[Tensor]:
    yield from (layout.pointer, layout.middle, layout.column, layout.edge)
    for name in ("own", "halo"):
        part = vars(layout).get(name)
        # A layout whose columns are all own rows returns itself as `own`.
        if part is not None and part is not layout:
            yield from _of_layout(part)
