"""Catalog of data sets: short names, the PyG classes behind them, and the folders of their raw files.

Where it sits: ``load`` looks names up here; ``raw_files`` looks for the files.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any, NamedTuple

from kagome.errors import DataError


class Entry(NamedTuple):
    """A class of ``torch_geometric.datasets``, its ``name`` argument and the usual folder of its files."""

    kind: str
    name: str | None
    folder: str


_SHORT = {
    "Cora": ("Planetoid", "Cora"),
    "CiteSeer": ("Planetoid", "CiteSeer"),
    "PubMed": ("Planetoid", "PubMed"),
    "Reddit": ("Reddit", None),
    "Flickr": ("Flickr", None),
    "Tolokers": ("HeterophilousGraphDataset", "Tolokers"),
    "Minesweeper": ("HeterophilousGraphDataset", "Minesweeper"),
    "squirrel": ("WikipediaNetwork", "squirrel"),
    "chameleon": ("WikipediaNetwork", "chameleon"),
    "actor": ("Actor", None),
    "cornell5": ("LINKXDataset", "cornell5"),
    "johnshopkins55": ("LINKXDataset", "johnshopkins55"),
    "flickr-attributed": ("AttributedGraphDataset", "Flickr"),
    "blogcatalog-attributed": ("AttributedGraphDataset", "BlogCatalog"),
}
_FOLDERS = {
    "Planetoid": "planetoid",
    "HeterophilousGraphDataset": "heterophilous",
    "WikipediaNetwork": "wikipedia_network",
    "Actor": "actor",
    "AttributedGraphDataset": "attributed",
    "LINKXDataset": "linkx",
    "Reddit": "reddit",
    "Flickr": "flickr",
}


def names() -> tuple[str, ...]:
    """Return the short names of data sets."""
    return tuple(_SHORT)


def find(name: str) -> Entry:
    """Return the entry for a short name, in any case, or for ``pyg:Class[:name]``.

    Raises:
        DataError: If the name is unknown; the error lists the ways to name a data set.
    """
    if name.startswith("pyg:"):
        kind, _, inner = name.removeprefix("pyg:").partition(":")
        return Entry(kind, inner or None, _FOLDERS.get(kind, kind))
    for short, (kind, inner_name) in _SHORT.items():
        if short.casefold() == name.casefold():
            return Entry(kind, inner_name, _FOLDERS[kind])
    raise DataError(
        f"the name of a data set: digits, sbm:vertices=..., {', '.join(names())}, pyg:Class[:name], "
        "ogb:NAME, npz:FILE, pt:FILE or python:package.module:function",
        f"{name!r}",
        where="data.name",
    )


def class_of(entry: Entry) -> type:
    """Return the class that an entry names; it must be constructible from a root and a name alone.

    Raises:
        DataError: If there is no such class, it needs more arguments, or a name is missing or unexpected.
    """
    import torch_geometric.datasets  # takes a third of a second, and most graphs need none of these classes

    kind = getattr(torch_geometric.datasets, entry.kind, None)
    if not inspect.isclass(kind):
        raise DataError(
            "the name of a class in torch_geometric.datasets",
            f"{entry.kind!r}",
            where="data.name",
        )
    # A wrong call would fail inside PyG with a TypeError that says nothing of data sets.
    if takes(kind, "name") and _required(kind, "name") and entry.name is None:
        raise DataError(
            f"a name for pyg:{entry.kind}",
            "none",
            hint=f"pyg:{entry.kind}:NAME",
            where="data.name",
        )
    if entry.name is not None and not takes(kind, "name"):
        raise DataError(f"pyg:{entry.kind} without a name", f"{entry.name!r}", where="data.name")
    more = [
        name
        for name in inspect.signature(kind).parameters
        if name not in ("root", "name") and _required(kind, name)
    ]
    if more:
        raise DataError(
            f"pyg:{entry.kind} to need no arguments but root and name",
            f"{', '.join(more)}, which it needs as well",
            hint="write a function that returns its Data: --data.name python:package.module:function",
        )
    return kind


def takes(kind: type, argument: str) -> bool:
    """Return whether the class's constructor accepts this argument."""
    return argument in inspect.signature(kind).parameters


def _required(kind: type, argument: str) -> bool:
    parameter = inspect.signature(kind).parameters[argument]
    return parameter.default is parameter.empty and parameter.kind not in (
        parameter.VAR_KEYWORD,
        parameter.VAR_POSITIONAL,
    )


def arguments(entry: Entry, root: Path | None) -> dict[str, str]:
    """Return the arguments that the class is constructed with."""
    given = {} if root is None else {"root": str(root)}
    return given if entry.name is None else {**given, "name": entry.name}


class Stopped(Exception):  # noqa: N818 - an answer, not a fault
    """Exception that stops a class's constructor once its raw files are known."""

    def __init__(self, raw_paths: list[str]) -> None:
        self.raw_paths = raw_paths


def raw_files(kind: type, entry: Entry) -> list[Path] | None:
    """Return the raw files' paths under the class's root, found by starting its constructor and stopping it.

    Raises:
        DataError: If the class does not accept this name.
    """

    # PyG's Dataset.__init__ calls _download, if the class has raw files, and then _process.
    def stop(self: Any) -> None:
        raise Stopped(self.raw_paths)

    def stop_later(self: Any) -> None:
        raise Stopped([])  # a class that downloads nothing goes straight to processing

    if not takes(kind, "root"):
        return None
    # Only a prefix, which is taken off the paths again.
    nowhere = "/nowhere"
    try:
        type(kind.__name__, (kind,), {"_download": stop, "_process": stop_later})(
            **arguments(entry, Path(nowhere))
        )
    except Stopped as found:
        return [Path(path).relative_to(nowhere) for path in found.raw_paths]
    # PyG's classes raise these for a name that they do not know.
    except (AssertionError, KeyError, ValueError, AttributeError) as error:
        raise DataError(
            f"a name that {entry.kind} knows",
            f"{entry.name!r} ({type(error).__name__} {error})".replace(" )", ")"),
            where=f"pyg:{entry.kind}:{entry.name}",
        ) from None
    return None
