"""Data loading: turn a name and a few flags into a validated PyG ``Data``.

Where it sits: the first step of every command. ``train``, ``autoplan`` and ``cli`` call :func:`load_data`,
unless each rank loads its part of a saved partition (``graph.partition.store``).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch_geometric.data import Data, HeteroData

from kagome import config
from kagome.errors import ConfigError
from kagome.graph.datasets import builtin, catalog, edits, raw_files as rawfiles, sources
from kagome.graph.structure.attributes import Notes
from kagome.graph.structure.validate import validate, validate_edges

__all__ = ["load_data", "load_graph", "validate"]


def load_data(settings: config.Data) -> Data:
    """Load a graph by name and apply the data flags.

    Args:
        settings: The name, the folder of raw files, and the flags.

    Returns:
        A clean graph with ``x``, ``edge_index``, ``y``, one mask of one dimension each for training,
        validation and test, and all its other attributes. ``data.notes`` holds the sentences to print at the
        start of the run; a later :func:`~kagome.graph.structure.validate.validate` returns them again. The
        split is already
        chosen: validate the result with ``split=0``.

    Raises:
        DataError: If the data set is unknown, cannot be obtained, or has a fault.

    Cost: raw files of a known data set are processed once; a download happens only if they are nowhere.
    """
    return _with_flags(*_named(settings.name, Path(settings.root).expanduser()), settings)


def load_graph(settings: config.Data) -> Data | HeteroData:
    """Load a graph of one vertex set or of several.

    Args:
        settings: As for :func:`load_data`.

    Returns:
        What :func:`load_data` returns; a graph of several vertex sets as it was given.

    Raises:
        ConfigError: If flags would change a graph of several vertex sets.
        DataError: As :func:`load_data`.
    """
    found, left = _named(settings.name, Path(settings.root).expanduser())
    if not isinstance(found, HeteroData):
        return _with_flags(found, left, settings)
    plain = config.Data()
    names = ("undirected", "self_loops", "project")
    asked = [f"data.{name}" for name in names if getattr(settings, name) != getattr(plain, name)]
    if asked:
        raise ConfigError(
            "a graph of several vertex types as it is given",
            f"{', '.join(asked)}, for graphs of one vertex type",
            hint="torch_geometric.transforms.ToUndirected() and the like in your own function",
        )
    return found


def _with_flags(found: Any, left: list[str], settings: config.Data) -> Data:
    # Flags need sound edges, so these are checked first. All else is checked after the flags have changed it.
    graph, all_notes = validate_edges(found)
    all_notes += left
    # Features are made for any graph that has none, labels only for a file, which may hold a bare graph to
    # measure speed with.
    all_notes += edits.make_up(graph, labels=settings.name.startswith("npz:"))
    if settings.project is not None:
        # Sparse features are projected before validation would make them dense.
        graph.x, note = edits.project(graph.x, settings.project)
        all_notes.append(note)
    if settings.undirected:
        graph = edits.add_reverse(graph)
    if settings.self_loops:
        graph = edits.add_self_loops(graph)
    clean, notes = validate(graph, split=settings.split)
    clean.notes = Notes(dict.fromkeys(all_notes + notes))
    return clean


def _named(name: str, root: Path) -> tuple[Any, list[str]]:
    """Return a data set, and notes about reading it."""
    kind, _, rest = name.partition(":")
    if name == "digits":
        return builtin.digits(), []
    if kind == "sbm":
        return builtin.sbm(name), []
    if kind == "npz":
        return sources.load_npz(rest, root)
    if kind == "python":
        return sources.load_function(rest), []
    if kind == "pt":
        return sources.load_pt(rest, root), []
    if kind == "ogb":
        return sources.load_ogb(rest, root), []
    return rawfiles.load_pyg(catalog.find(name), root), []


def raw_files(settings: config.Data) -> list[Path] | None:
    """Return the files that decide what :func:`load_data` returns.

    Returns:
        The files; empty for a data set that settings alone decide. None if they are unknown: for a user's
        function, or for files that are yet to be downloaded.

    Raises:
        DataError: If there is no such data set.
    """
    name, root = settings.name, Path(settings.root).expanduser()
    kind, _, rest = name.partition(":")
    if name == "digits" or kind == "sbm":
        return []
    if kind == "python":
        return None
    if kind in ("npz", "pt"):
        file = sources.file_at(rest, root)
        return None if file is None else [file]
    if kind == "ogb":
        return sources.ogb_files(rest, root) or None
    return rawfiles.pyg_files(catalog.find(name), root) or None
