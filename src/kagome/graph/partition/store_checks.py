"""Store checks: whether a part that was read is consistent in itself and with the page of its partition.

Where it sits: ``store.load_part`` calls it before a part is used. A file may be undamaged and still hold what
no partition has, because another program wrote or edited it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any, Final

import torch
from torch import Tensor

from kagome.graph.partition.partition import Partition
from kagome.graph.partition.quality import Quality
from kagome.graph.structure.attributes import tensors_of

Attributes = Mapping[str, tuple[str, tuple[int, ...]]]
"""Type of each attribute, and its shape without the rows that parts divide: the same in all parts."""
COUNTS: Final = ("part", "num_parts", "num_nodes", "num_edges", "last_vertex")


def attributes_of(piece: Partition) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return type and trailing shape of each attribute of a part: ``node.x``, ``edge.edge_attr``."""
    named = [("node", piece.nodes, 1), ("edge", piece.edges, 1), ("shared", tensors_of(piece.shared), 0)]
    return {
        f"{kind}.{name}": (str(value.dtype), tuple(value.shape[first:]))
        for kind, values, first in named
        for name, value in values.items()
    }


def fault_of(piece: Partition, quality: Quality, attributes: Attributes) -> str:
    """Return the first fault of a part, or ``""`` if it has none.

    Args:
        piece: The part that was read.
        quality: The counts of all parts, from the page.
        attributes: Types and shapes of the attributes, from the page.

    Cost: some passes over ids and edges, and a sort of the halo.
    """
    # In this order: each check relies on shapes and ranges that those before it have established.
    for check in (_counts, _ids, _lists, _edges, _attributes):
        fault = check(piece, quality, attributes)
        if fault:
            return fault
    return ""


def quality_fault(quality: Quality, parts: int, num_nodes: int, num_edges: int) -> str:
    """Return the first fault of the counts on a page, or ``""`` if they have none."""
    for name in ("vertices", "in_edges", "halo"):
        counts = getattr(quality, name)
        if len(counts) != parts or any(type(count) is not int or count < 0 for count in counts):
            return f"quality.{name} is no count for each of {parts} parts"
    if quality.weights and (
        len(quality.weights) != parts
        or not all(type(each) in (int, float) and 0 < each < inf for each in quality.weights)
    ):
        return f"quality.weights is no weight for each of {parts} parts"
    if (quality.num_parts, quality.num_nodes, quality.num_edges) != (parts, num_nodes, num_edges):
        found = (quality.num_parts, quality.num_nodes, quality.num_edges)
        return f"quality is of {found} parts, vertices and edges, the page of {(parts, num_nodes, num_edges)}"
    if sum(quality.vertices) != num_nodes:
        return f"num_nodes is {num_nodes:,}, and the parts have {sum(quality.vertices):,} vertices"
    if sum(quality.in_edges) != num_edges:
        return f"num_edges is {num_edges:,}, and the parts have {sum(quality.in_edges):,} edges"
    return ""


def _counts(piece: Partition, quality: Quality, _: Attributes) -> str:
    for name in COUNTS:
        value = getattr(piece, name)
        if type(value) is not int or value < (-1 if name == "last_vertex" else 0):
            return f"{name} is {str(value)[:40]!r}"
    if (piece.num_nodes, piece.num_edges) != (quality.num_nodes, quality.num_edges):
        return (
            f"it is of a graph of {piece.num_nodes:,} vertices and {piece.num_edges:,} edges, the page of "
            f"one of {quality.num_nodes:,} and {quality.num_edges:,}"
        )
    if piece.last_vertex >= piece.num_nodes:
        return f"last_vertex is {piece.last_vertex}, and ids end at {piece.num_nodes - 1}"
    for name in ("own", "halo", "edge_ids", "send", "edge_index"):
        value = getattr(piece, name)
        if value.dtype != torch.int64 or value.dim() != (2 if name == "edge_index" else 1):
            return f"{name} has the shape {list(value.shape)} and the type {value.dtype}"
    if piece.edge_index.size(0) != 2 or piece.edge_index.size(1) != piece.edge_ids.numel():
        return f"edge_index is {list(piece.edge_index.shape)}, and edge_ids {list(piece.edge_ids.shape)}"
    found = (piece.own.numel(), piece.edge_ids.numel(), piece.halo.numel())
    told = tuple(getattr(quality, name)[piece.part] for name in ("vertices", "in_edges", "halo"))
    if found != told:
        return f"it has {found} vertices, in-edges and halo rows, and the page says {told}"
    return ""


def _ids(piece: Partition, *_: object) -> str:
    fault = (
        _outside("own", piece.own, piece.num_nodes)
        or _outside("halo", piece.halo, piece.num_nodes)
        or _outside("edge_ids", piece.edge_ids, piece.num_edges)
        or _unordered("own", piece.own)
        or _unordered("edge_ids", piece.edge_ids)
    )
    if fault or not piece.halo.numel():
        return fault
    # The halo is ordered by owner, so duplicates are looked for in a sorted copy.
    ordered = piece.halo.sort().values
    if bool((ordered[1:] == ordered[:-1]).any()):
        return "halo names a vertex twice"
    if piece.own.numel():
        # ``own`` ascends, which is checked above.
        place = torch.searchsorted(piece.own, piece.halo).clamp_(max=piece.own.numel() - 1)
        both = piece.own[place] == piece.halo
        if bool(both.any()):
            return f"vertex {int(piece.halo[both][0])} is in own and in the halo"
    return ""


def _lists(piece: Partition, *_: object) -> str:
    fault = _outside("send", piece.send, piece.own.numel())
    if fault:
        return fault
    for name, rows in (("send", piece.send), ("recv", piece.halo)):
        counts: Sequence[Any] = getattr(piece, f"{name}_counts")
        if len(counts) != piece.num_parts or any(type(count) is not int or count < 0 for count in counts):
            return f"{name}_counts is no count for each of {piece.num_parts} parts"
        # A part sends itself nothing.
        if sum(counts) != rows.numel() or counts[piece.part]:
            own = counts[piece.part]
            return f"{name}_counts come to {sum(counts):,}, {own:,} of them its own, for {len(rows):,} rows"
        within = torch.repeat_interleave(torch.tensor(counts))
        # Ascending for each peer; from one peer to the next a fall is right.
        falls = (rows[1:] <= rows[:-1]) & (within[1:] == within[:-1])
        if bool(falls.any()):
            return f"the rows of {name}_counts are not in order, from place {int(falls.nonzero()[0])}"
    return ""


def _edges(piece: Partition, *_: object) -> str:
    source, target = piece.edge_index
    # Sources may be halo rows, targets are own rows.
    rows = piece.own.numel() + piece.halo.numel()
    fault = _outside("edge_index[0]", source, rows) or _outside("edge_index[1]", target, piece.own.numel())
    if fault or not piece.halo.numel():
        return fault
    # A halo row exists because an edge reads it.
    read = torch.zeros(rows, dtype=torch.bool)
    read[source] = True
    if not bool(read[piece.own.numel() :].all()):
        lost = int((~read[piece.own.numel() :]).nonzero()[0])
        return f"no edge reads vertex {int(piece.halo[lost])} of the halo"
    return ""


def _attributes(piece: Partition, _: Quality, attributes: Attributes) -> str:
    for kind, values, rows in (
        ("vertex", piece.nodes, piece.own.numel()),
        ("edge", piece.edges, piece.edge_ids.numel()),
    ):
        for name, value in values.items():
            if value.dim() == 0 or value.size(0) != rows:
                return f"{name} is {list(value.shape)}, where a row for each {kind} of {rows:,} belongs"
    found = attributes_of(piece)
    for name in (*found, *attributes):
        if found.get(name) != attributes.get(name):
            here, there = _form_text(found.get(name)), _form_text(attributes.get(name))
            return f"{name} is {here} here, and {there} in the page"
    return ""


def _form_text(facts: tuple[str, tuple[int, ...]] | None) -> str:
    return "missing" if facts is None else f"{facts[0]} {list(facts[1])}"


def _outside(name: str, ids: Tensor, end: int) -> str:
    if not ids.numel():
        return ""
    least, most = (int(each) for each in ids.aminmax())
    if least >= 0 and most < end:
        return ""
    return f"{name} holds {least if least < 0 else most}, and its ids run from 0 to {end - 1}"


def _unordered(name: str, ids: Tensor) -> str:
    falls = ids[1:] <= ids[:-1]
    return f"{name} is not ascending at place {int(falls.nonzero()[0]) + 1}" if bool(falls.any()) else ""
