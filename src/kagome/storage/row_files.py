"""Row files: rows of vertices or edges that each rank writes to a file of its own, and one reader of all.

Where it sits: ``net.save`` writes with it; ``kagome.load_rows`` reads what all ranks wrote.

::

    net.save(out, folder)        rank 0 ──> rows-00000-of-00002.safetensors   ids [n], rows [n, ...]
                                 rank 1 ──> rows-00001-of-00002.safetensors
    kagome.load_rows(folder)     [N, ...], in the graph's order

Each file says which save it belongs to. So files of two saves in one folder are never mixed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from kagome.errors import ConfigError, DataError
from kagome.storage.atomic import draft

Format = Literal["safetensors", "npz", "parquet"]
"""The formats of a file of rows."""
ABOUT: Final = "kagome"
"""Where a file holds its :class:`Share`: the key of the metadata, in an ``npz`` the name of an array."""
_NAME: Final = re.compile(rf"rows-(\d+)-of-(\d+)\.({'|'.join(get_args(Format))})")


@dataclass(frozen=True)
class Share:
    """What a file of rows says of itself.

    Args:
        save: A text that all files of one save have.
        rank: The rank that wrote it.
        ranks: The number of ranks, and of files.
        total: The number of rows of all ranks.
        axis: The axis of the rows in the tensor that was saved.
        shape: The shape of one row.
    """

    save: str
    rank: int
    ranks: int
    total: int
    axis: int
    shape: list[int]


# Writing -----------------------------------------------------------------------------------------


def refuse_format(format: str, where: str) -> None:
    """Refuse an unknown format, or one whose package is not installed.

    Raises:
        ConfigError: If so.
    """
    if format not in get_args(Format):
        raise ConfigError(f"a format of {', '.join(get_args(Format))}", repr(format), where=where)
    if format == "parquet" and find_spec("pyarrow") is None:
        raise ConfigError(
            "the package pyarrow, for files of parquet",
            "none installed",
            where=where,
            hint="pip install pyarrow, or format='safetensors'",
        )


def write_rows(folder: Path, ids: Tensor, rows: Tensor, share: Share, format: Format) -> Path:
    """Write the rows of one rank to its file, completely or not at all.

    Args:
        folder: Where to write; made if it is not there.
        ids: The ids of the rows in the whole graph, ascending.
        rows: The rows, along axis 0.
        share: What the file says of itself.
        format: See :data:`Format`.

    Returns:
        The file.

    Raises:
        DataError: If the format cannot hold the type of the rows.

    Shapes:
        ids ``[n]``, rows ``[n, ...]``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rows-{share.rank:05}-of-{share.ranks:05}.{format}"
    ids, rows, about = ids.cpu().contiguous(), rows.detach().cpu().contiguous(), json.dumps(asdict(share))
    with draft(path) as beside:
        if format == "safetensors":
            from safetensors.torch import save_file

            save_file({"ids": ids, "rows": rows}, beside, metadata={ABOUT: about})
        elif format == "npz":
            # To an open file: given a path, NumPy would put ".npz" behind the draft's name.
            with beside.open("wb") as file:
                arrays: dict[str, Any] = {"ids": ids.numpy(), "rows": _array(rows, format)}
                arrays[ABOUT] = np.array(about)
                np.savez(file, **arrays)
        else:
            _write_parquet(beside, ids, _array(rows, format), about)
    return path


def _array(rows: Tensor, format: str) -> Any:
    try:
        # NumPy has no bfloat16 and no float8.
        return rows.numpy()
    except TypeError:
        raise DataError(
            f"rows of a type that {format} has", str(rows.dtype), hint="rows.float(), or format='safetensors'"
        ) from None


def _write_parquet(path: Path, ids: Tensor, rows: Any, about: str) -> None:
    """Write ids and rows as two columns; rows of several numbers are lists of one length."""
    import pyarrow
    from pyarrow import parquet

    # One column, since wide rows as columns of their own would be thousands.
    try:
        column = pyarrow.array(rows.reshape(-1))
    except pyarrow.ArrowException as error:
        raise DataError(
            "rows of a type that parquet has", str(rows.dtype), hint=f"format='npz': {error}"
        ) from None
    if rows.ndim > 1:
        column = pyarrow.FixedSizeListArray.from_arrays(column, int(np.prod(rows.shape[1:])))
    # The metadata of the schema is the file's, and other readers skip it.
    table = pyarrow.table({"ids": ids.numpy(), "rows": column})
    parquet.write_table(table.replace_schema_metadata({ABOUT: about}), path)


# Reading -----------------------------------------------------------------------------------------


def load_rows(folder: str | Path) -> Tensor:
    """Return the rows that all ranks wrote with ``net.save``, in the graph's own order.

    One process calls it; the files may be of any number of ranks.

    Args:
        folder: The folder that ``net.save`` was given.

    Returns:
        The rows of all vertices or edges, as ``net.gather`` returns them on rank 0.

    Raises:
        DataError: If a file is missing or damaged, files are of two saves, or a row occurs twice or not at
            all.

    Shapes:
        ``[N, ...]``, or with the rows along the axis that ``net.save`` was given.

    Cost:
        The memory of all rows, and of one file.

    Example:
        >>> import tempfile, torch, kagome
        >>> from torch_geometric.nn import GCN
        >>> data, folder = kagome.load("digits"), tempfile.mkdtemp()
        >>> with kagome.shard(GCN(64, 16, num_layers=2, out_channels=10), data) as net, torch.no_grad():
        ...     path = net.save(net(data.x, data.edge_index), folder)
        >>> kagome.load_rows(folder).shape
        torch.Size([1797, 10])
    """
    folder = Path(folder)
    paths = sorted(path for path in folder.glob("rows-*") if _NAME.fullmatch(path.name))
    if not paths:
        got = "one of its files" if folder.is_file() else "none"
        raise DataError("a folder with files of net.save", got, where=str(folder))
    # Allocated by what the first file says; then one file at a time is in memory.
    found: Tensor | None = None
    seen = torch.zeros(0, dtype=torch.bool)
    first: Share | None = None
    for path in paths:
        share, ids, rows = _read(path)
        if first is None or found is None:
            first = share
            _refuse_missing(folder, paths, share)
            found = torch.empty(share.total, *share.shape, dtype=rows.dtype)
            seen = torch.zeros(share.total, dtype=torch.bool)
        _refuse_mixed(folder, path, share, first)
        _refuse_damaged(path, share, ids, rows, found)
        _refuse_twice(path, ids, seen)
        seen[ids] = True
        found[ids] = rows
    # Each file was whole, but their ids may leave some out.
    assert found is not None
    assert first is not None
    if not bool(seen.all()):
        lost = (~seen).nonzero().view(-1)
        raise DataError(
            f"all {first.total:,} rows",
            f"{lost.numel():,} missing, such as {int(lost[0])}",
            where=str(folder),
        )
    return found.movedim(0, first.axis)


def _refuse_twice(path: Path, ids: Tensor, seen: Tensor) -> None:
    """Refuse rows that are there a second time: in the files before this one, or within it."""
    different, counts = ids.unique(return_counts=True)
    twice = torch.cat([ids[seen[ids]], different[counts > 1]])
    if twice.numel():
        raise DataError("each row once", f"row {int(twice[0])} a second time", where=str(path))


def _refuse_missing(folder: Path, paths: list[Path], share: Share) -> None:
    """Refuse a folder that has not one file of each rank.

    Raises:
        DataError: Naming the ranks.
    """
    # By the names alone, before any file but the first is read.
    numbers = [tuple(map(int, found.groups()[:2])) for p in paths if (found := _NAME.fullmatch(p.name))]
    others = [path for path, (_, ranks) in zip(paths, numbers, strict=True) if ranks != share.ranks]
    if others or len(numbers) > len(set(numbers)):
        raise DataError(
            f"files of one save, by {share.ranks} ranks",
            f"files of another: {(others or paths)[-1].name} beside {paths[0].name}",
            where=str(folder),
            hint="an empty folder for each net.save with other ranks or another format",
        )
    lost = sorted(set(range(share.ranks)) - {rank for rank, _ in numbers})
    if lost:
        raise DataError(
            f"a file of each of {share.ranks} ranks",
            f"none of rank {', '.join(map(str, lost[:8]))}",
            where=str(folder),
            hint="all ranks call net.save; copy the files of all machines into one folder",
        )


def _refuse_mixed(folder: Path, path: Path, share: Share, first: Share) -> None:
    """Refuse files that two calls of ``net.save`` wrote."""
    # All that a file says of itself, but for its rank.
    one, other = ({**asdict(each), "rank": 0} for each in (share, first))
    if one != other:
        raise DataError(
            "files of one save",
            f"{path.name} of another than the files before it",
            where=str(folder),
            hint="a save that was interrupted, or two runs with one folder: save again",
        )


def _refuse_damaged(path: Path, share: Share, ids: Tensor, rows: Tensor, found: Tensor) -> None:
    """Refuse ids that are out of range, or are not those of the rows."""
    fits = ids.dtype == torch.int64 and ids.dim() == 1 and list(rows.shape) == [ids.numel(), *share.shape]
    if not fits or rows.dtype != found.dtype:
        raise DataError(
            f"ids [n] and rows [n, {', '.join(map(str, share.shape))}] of {found.dtype}",
            f"ids {list(ids.shape)} and rows {list(rows.shape)} of {rows.dtype}",
            where=str(path),
        )
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < share.total:
        raise DataError(
            f"ids from 0 to {share.total - 1}", f"{int(ids.min())} to {int(ids.max())}", where=str(path)
        )


def _read(path: Path) -> tuple[Share, Tensor, Tensor]:
    """Return what a file says of itself, its ids and its rows.

    Raises:
        DataError: If it cannot be read.
        ConfigError: If pyarrow is needed and not installed.
    """
    refuse_format(path.suffix[1:], "kagome.load_rows")
    try:
        about, ids, rows = _READERS[path.suffix](path)
        share = Share(**json.loads(about))
        # JSON of another writer may have other types.
        if [type(each) for each in asdict(share).values()] != [str, int, int, int, int, list]:
            raise ValueError("it says other things of itself")
        return share, ids, rows.reshape(ids.numel(), *share.shape)
    except Exception as error:  # each reader has exceptions of its own for a damaged file
        words = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DataError(
            "a file that net.save wrote", f"{type(error).__name__}: {words}", where=str(path)
        ) from None


def _safetensors(path: Path) -> tuple[str, Tensor, Tensor]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        return file.metadata()[ABOUT], file.get_tensor("ids"), file.get_tensor("rows")


def _npz(path: Path) -> tuple[str, Tensor, Tensor]:
    with np.load(path, allow_pickle=False) as file:
        return str(file[ABOUT]), torch.from_numpy(file["ids"]), torch.from_numpy(file["rows"])


def _parquet(path: Path) -> tuple[str, Tensor, Tensor]:
    from pyarrow import parquet

    table = parquet.read_table(path)
    ids, rows = (table.column(name).combine_chunks() for name in ("ids", "rows"))
    # ``flatten`` gives the numbers of all lists in a row; their shape is that of the metadata.
    if hasattr(rows, "flatten") and hasattr(rows.type, "list_size"):
        rows = rows.flatten()
    # A copy, because Arrow's memory may not be written to.
    arrays = (torch.from_numpy(np.array(each.to_numpy(zero_copy_only=False))) for each in (ids, rows))
    return table.schema.metadata[ABOUT.encode()].decode(), *arrays


_READERS: Final[Mapping[str, Any]] = {".safetensors": _safetensors, ".npz": _npz, ".parquet": _parquet}
