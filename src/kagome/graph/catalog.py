"""Catalog: short names of data sets, the PyG classes behind them, and the folders their raw files lie in.

Where it sits: ``data`` looks names up here; ``rawfiles`` looks for the files.
"""

from __future__ import annotations

from typing import NamedTuple

from kagome.errors import DataError


class Entry(NamedTuple):
    """A class of ``torch_geometric.datasets``, its ``name`` argument, the usual folder of its files."""

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
    """The short names."""
    return tuple(_SHORT)


def find(name: str) -> Entry:
    """What a short name or ``pyg:Class[:name]`` stands for; short names may be written in any case.

    Raises:
        DataError: If it is no name that Kagome knows; the ways to name a data set are listed.
    """
    if name.startswith("pyg:"):
        kind, _, inner = name.removeprefix("pyg:").partition(":")
        return Entry(kind, inner or None, _FOLDERS.get(kind, kind))
    for short, (kind, inner_name) in _SHORT.items():
        if short.casefold() == name.casefold():
            return Entry(kind, inner_name, _FOLDERS[kind])
    raise DataError(
        f"a data set of digits, sbm:vertices=..., {', '.join(names())}, pyg:Class[:name], ogb:NAME, "
        "npz:FILE, python:package.module:function was asked for",
        f"found {name!r}",
        where="data.name",
    )
