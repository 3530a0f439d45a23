"""Hetero graphs: check a user's ``HeteroData``, and find the vertex set that has the labels.

Where it sits: ``train.sets_source`` passes a ``HeteroData`` through :func:`validate_sets` before it is cut.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from kagome.errors import ConfigError, DataError
from kagome.graph.structure import splits
from kagome.graph.structure.attributes import Shared, plain, unboxed
from kagome.graph.structure.labels import Labels, labels_of
from kagome.graph.structure.sets import Graph
from kagome.graph.structure.validate import features, validate_rows

Attributes = Mapping[str, Mapping[str, Tensor]]
"""Tensors with a row a vertex or edge, by the name of the set and their own."""


@dataclass(frozen=True)
class SetsData:
    """A validated graph of several vertex sets, with its attributes.

    Args:
        graph: The vertex sets and edge sets.
        nodes: The attributes of each vertex set.
        edges: The attributes of each edge set.
        shared: Attributes of the whole graph: tensors, numbers and texts.
        target: The vertex set that is trained on and scored.
        labels: Facts about its labels; None without y.
        notes: Sentences to print at the start of a run.
    """

    graph: Graph
    nodes: Attributes
    edges: Attributes
    shared: Mapping[str, Shared]
    target: str
    labels: Labels | None
    notes: tuple[str, ...]

    def fingerprint(self) -> str:
        """Return hexadecimal digits that change with any edge, attribute, label or mask.

        Cost: one reading of all tensors, about 1 GB/s.
        """
        digest = hashlib.blake2b(self.target.encode(), digest_size=16)
        sets = {name: {"index": each.index} for name, each in self.graph.edges.items()}
        for kind, vertices in self.graph.vertices.items():
            digest.update(f"{kind} {vertices.count}".encode())
        for name, each in self.graph.edges.items():
            digest.update(f"{name} {each.source} {each.target}".encode())
        shared = {"": {k: v for k, v in self.shared.items() if isinstance(v, Tensor)}}
        digest.update(repr({k: v for k, v in self.shared.items() if k not in shared[""]}).encode())
        for held in (sets, self.nodes, self.edges, shared):
            for name, attributes in held.items():
                for key, value in sorted(attributes.items()):
                    # The same bytes under another name, type or shape are another graph.
                    digest.update(f"{name} {key} {value.dtype} {list(value.shape)}".encode())
                    # As bytes, since NumPy has no bfloat16.
                    digest.update(value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()


def validate_sets(data: HeteroData, *, target: str | None = None, split: int = 0) -> SetsData:
    """Check a graph of several vertex sets, and bring its labels and masks into the form training reads.

    The given object is never changed.

    Args:
        data: The graph. Labels ``y`` and masks are attributes of one vertex type.
        target: The vertex type that is trained on and scored; by default the only one with labels and masks,
            or the only one with labels.
        split: The index among several given splits, or the seed of a 60/20/20 split if there are no masks.

    Raises:
        DataError: If it has a fault, or no vertex type, or several, could be the target.
        ConfigError: If there is no vertex type of the target's name.
    """
    target = _target(data, target)
    graph, notes = Graph.of(data), list[str]()
    nodes: dict[str, dict[str, Tensor]] = {}
    for kind, vertices in graph.vertices.items():
        given = {name: unboxed(value) for name, value in data[kind].to_dict().items() if name != "num_nodes"}
        try:
            if kind == target:
                found = validate_rows(Data(**given, num_nodes=vertices.count), vertices.count, split, notes)
            else:
                found = {k: features(v, vertices.count, notes) if k == "x" else v for k, v in given.items()}
        except DataError as error:
            where = error.where.replace("data.", f"data[{kind!r}].") or f"data[{kind!r}]"
            raise DataError(error.expected, error.got, where=where, hint=error.hint) from None
        nodes[kind] = _with_rows(kind, found, vertices.count, notes)
    edges = {
        name: _with_rows(name, found, graph.edges[name].index.size(1), notes)
        for name, found in Graph.attributes(data).items()
        if name in graph.edges
    }
    y = nodes[target].get("y")
    shared = {k: unboxed(v) for k, v in data._global_store.items()}
    return SetsData(
        graph,
        nodes,
        edges,
        {k: v for k, v in shared.items() if isinstance(v, Tensor | bool | int | float | str)},
        target,
        None if y is None else labels_of(y),
        tuple(dict.fromkeys(notes)),
    )


def _with_rows(kind: str, given: Mapping[str, Any], count: int, notes: list[str]) -> dict[str, Tensor]:
    """Return the attributes with so many rows; notes name the others. Edges and counts are no attributes."""
    found = {
        name: plain(value)
        for name, value in given.items()
        if isinstance(value, Tensor) and value.dim() and value.size(0) == count and name != "edge_index"
    }
    others = [name for name in given if name not in (*found, "edge_index", "num_nodes")]
    if others:
        notes.append(f"{', '.join(others)} of {kind}, without a row for each, are given to no model.")
    return found


def _target(data: HeteroData, target: str | None) -> str:
    kinds = data.node_types
    if target is not None:
        if target not in kinds:
            raise ConfigError(
                f"train.target_type to be a vertex type of the data: {', '.join(map(repr, kinds))}",
                repr(target),
            )
        return target
    labelled = [kind for kind in kinds if data[kind].get("y") is not None]
    names = (*splits.NAMES, "split_idx")
    split = [kind for kind in labelled if any(data[kind].get(name) is not None for name in names)]
    found = split or labelled
    if len(found) != 1:
        raise DataError(
            "labels y on one vertex type",
            f"labels on {', '.join(map(repr, found))}" if found else "a HeteroData without y",
            hint='Train(target_type="paper") names the vertex type to train on'
            if found
            else 'data["paper"].y = ...; Train(target_type="paper") scores a type without labels',
        )
    return str(found[0])
