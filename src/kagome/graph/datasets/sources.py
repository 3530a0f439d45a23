"""Data sources: graphs from a user's file, from a user's function, and from OGB.

Where it sits: ``load`` calls these for ``npz:``, ``pt:``, ``python:`` and ``ogb:``.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch_geometric.data import Data, HeteroData, storage
from torch_geometric.data.data import DataEdgeAttr, DataTensorAttr

from kagome.config.named_module import named_module
from kagome.errors import DataError
from kagome.graph.datasets.npz import read_npz


def load_npz(text: str, root: Path) -> tuple[Data, list[str]]:
    """Read a graph from an ``.npz`` file.

    Args:
        text: The path of the file; looked up as it is, in ``root``, and in ``$KAGOME_DATA``.
        root: The user's data folder.

    Returns:
        The content of the file, and sentences about arrays that are not read. Edges come from ``edge_index``
        (2 x E), or from ``indptr`` and ``indices`` (row v lists the vertices that v has an edge to). The
        other arrays of numbers become attributes.

    Raises:
        DataError: If the file is missing, truncated or not an npz file, has no edges in either form, or an
            array with a known name does not hold numbers.
    """
    path = _found(text, root)
    found, left = read_npz(path)
    given: dict[str, Any] = dict(found)
    if "edge_index" not in given:
        if "indptr" not in given or "indices" not in given:
            raise DataError(
                f"{path} to hold edge_index, or indptr and indices",
                f"{', '.join(given) or 'nothing'}",
            )
        # Row v of the matrix lists the targets of v, as in SciPy, and not its sources, as in adj_t.
        given["edge_index"] = _from_csr(given.pop("indptr"), given.pop("indices"), given, str(path))
    # In layers such as GCNConv, [E] times [E, 1] would silently be [E, E].
    weight = given.get("edge_weight")
    if isinstance(weight, torch.Tensor) and (weight.dim() != 1 or weight.dtype == torch.bool):
        raise DataError(
            "edge_weight to be one number an edge",
            f"shape {list(weight.shape)} of {str(weight.dtype).removeprefix('torch.')}",
            where=str(path),
            hint="several numbers an edge are edge_attr",
        )
    return Data(**given), left


def load_pt(text: str, root: Path) -> Any:
    """Read a PyG ``Data`` or ``HeteroData`` that ``torch.save`` wrote, without running code of the file.

    Args:
        text: The path of the file; looked up as it is, in ``root``, and in ``$KAGOME_DATA``.
        root: The user's data folder.

    Raises:
        DataError: If the file is missing, damaged, or holds classes other than PyG's graphs and tensors.
    """
    path = _found(text, root)
    kinds = [Data, HeteroData, DataEdgeAttr, DataTensorAttr]
    kinds += [storage.BaseStorage, storage.GlobalStorage, storage.NodeStorage, storage.EdgeStorage]
    try:
        with torch.serialization.safe_globals(kinds):
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise DataError(
            f"{path} to hold a Data or HeteroData, as torch.save writes it",
            f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}",
            where="data.name",
        ) from None


def _found(text: str, root: Path) -> Path:
    path = file_at(text, root)
    if path is None:
        raise DataError(
            f"the file {text}",
            f"no such file in {' or in '.join(str(base.absolute()) for base in _bases(root))}",
            where="data.name",
        )
    return path


def file_at(text: str, root: Path) -> Path | None:
    """Return where a user's file is found, or None."""
    return next((base / text for base in _bases(root) if (base / text).is_file()), None)


def _bases(root: Path) -> list[Path]:
    # A path may be absolute or relative to the current folder, so it is tried as it is first.
    return [Path(), root, *(Path(shared) for shared in [os.environ.get("KAGOME_DATA")] if shared)]


def _from_csr(indptr: torch.Tensor, indices: torch.Tensor, given: dict[str, Any], where: str) -> torch.Tensor:
    for name, value in (("indptr", indptr), ("indices", indices)):
        whole = not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)
        if value.dim() != 1 or not whole:
            raise DataError(
                f"{name} to be a list of whole numbers",
                f"shape {list(value.shape)} of {str(value.dtype).removeprefix('torch.')}",
                where=where,
            )
    indptr, indices = indptr.long(), indices.long()
    degree = indptr.diff()
    if (
        indptr.numel() < 1
        or int(indptr[0]) != 0
        or bool((degree < 0).any())
        or int(indptr[-1]) != indices.numel()
    ):
        ends = f"{int(indptr[0])} to {int(indptr[-1])}" if indptr.numel() else "an empty list"
        raise DataError(
            f"indptr to rise from 0 to the number of indices ({indices.numel():,})", ends, where=where
        )
    # Vertices without out-edges have rows of the matrix, too.
    given.setdefault("num_nodes", torch.tensor(degree.numel()))
    return torch.stack([torch.arange(degree.numel()).repeat_interleave(degree), indices])


def load_function(text: str) -> Any:
    """Call a user's function without arguments; exceptions of its own pass through unchanged.

    Args:
        text: ``package.module:function``; the current folder is searched too.

    Returns:
        What the function returns.

    Raises:
        DataError: If there is no such module or function.
    """
    module_name, _, name = text.partition(":")
    if not module_name or not name:
        raise DataError("python:package.module:function", f"python:{text}", where="data.name")
    try:
        module = named_module(module_name)
    except ModuleNotFoundError as error:
        raise DataError(
            f"the module {module_name}",
            f"no module {error.name}",
            where=f"python:{text}",
            hint=f"start in the folder that holds it ({os.getcwd()} is looked in), or install it",
        ) from None
    function = getattr(module, name, None)
    if not callable(function):
        raise DataError(
            f"{module_name} to have a function {name}",
            "none" if function is None else f"a {type(function).__name__}",
            where=f"python:{text}",
        )
    return function()


def load_ogb(name: str, root: Path) -> Data:
    """Load a node property prediction data set of the Open Graph Benchmark.

    Args:
        name: The name of the data set, such as ``ogbn-arxiv``.
        root: The user's data folder; OGB creates its own folder in it.

    Returns:
        The graph, with OGB's split as masks.

    Raises:
        DataError: If the package is missing, or the data set cannot be obtained.
    """
    try:
        from ogb.nodeproppred import PygNodePropPredDataset  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        raise DataError(
            f"the package ogb for ogb:{name}", "no such package", hint="pip install ogb"
        ) from None
    folder = _ogb_folder(name, root)
    try:
        # OGB prints, asks before large downloads, and reads its own files with torch's safe loader.
        with (
            contextlib.redirect_stdout(sys.stderr),
            torch.serialization.safe_globals([DataEdgeAttr, DataTensorAttr, storage.GlobalStorage]),
        ):
            dataset = PygNodePropPredDataset(name=name, root=str(root))
        data, ids = dataset[0], dataset.get_idx_split()
    except Exception as error:
        raise DataError(
            f"the data set ogb:{name}",
            f"none in {folder}, and a download that failed: {type(error).__name__} {error}",
            hint=f"put OGB's raw/ and split/ folders of {name} into {folder}",
        ) from None
    for ours, theirs in (("train_mask", "train"), ("val_mask", "valid"), ("test_mask", "test")):
        mask = torch.zeros(int(data.num_nodes), dtype=torch.bool)
        mask[ids[theirs]] = True
        data[ours] = mask
    return data


def ogb_files(name: str, root: Path) -> list[Path]:
    """Return the raw files of a data set that OGB has downloaded before; empty if it has not."""
    folder = _ogb_folder(name, root)
    return sorted(file for kind in ("raw", "split") for file in (folder / kind).rglob("*") if file.is_file())


def _ogb_folder(name: str, root: Path) -> Path:
    return root / name.replace("-", "_")
