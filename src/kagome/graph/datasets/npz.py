"""Npz reader: arrays of a file from an unknown writer, each checked before it is unpacked.

Where it sits: ``sources`` reads ``npz:`` data sets with it. Each header gives an array's size before its data
is read, so neither a broken header nor a compressed archive can demand more memory than there is.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch_geometric.data import Data

from kagome.errors import DataError
from kagome.launch.host_memory import available_bytes

KNOWN: Final = frozenset(
    {"x", "y", "edge_index", "indptr", "indices", "edge_weight", "edge_attr", "num_nodes"}
    | {"train_mask", "val_mask", "test_mask"}
)
"""Array names that have a meaning; such an array that cannot be read is an error."""
# Methods and properties of Data (keys, size, edge_attrs), which an attribute of that name would hide.
_OWN_NAMES: Final = frozenset(
    name for name in dir(Data) if name not in KNOWN and name not in ("pos", "batch", "time")
)


def read_npz(path: Path) -> tuple[dict[str, Tensor | str], list[str]]:
    """Return the arrays of a file as tensors, and sentences about those that cannot be converted.

    Args:
        path: The file.

    Raises:
        DataError: If it is not a complete npz file, an array with a known name does not hold numbers, or
            there is not enough memory for the unpacked arrays.

    Cost: the arrays, once.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            members, others = _members(archive, path)
            total = sum(info.file_size for info in members.values())
            room = available_bytes()
            if room is not None and total > room:
                raise DataError(
                    f"{total / 2**30:,.1f} GiB of free memory to unpack {path}",
                    f"{room / 2**30:,.1f} GiB",
                )
            arrays = {name: _array(archive, info, name, path) for name, info in members.items()}
    except DataError:
        raise
    except MemoryError:
        raise DataError(f"free memory to unpack {path}", "too little") from None
    except Exception as error:  # zipfile, zlib, tokenize and NumPy each have their own for broken bytes
        raise DataError(
            f"{path} to be a whole .npz file (numpy.savez)",
            f"one that cannot be read: {type(error).__name__} {str(error)[:200].rstrip('.')}",
            hint="it may be truncated; write it again",
        ) from None
    found: dict[str, Tensor | str] = {}
    left = [f"the file {name!r} in {path.name} is not read: it is no array (.npy)." for name in others]
    for name, value in arrays.items():
        why, held = _unfit(name), ""
        if isinstance(value, str):
            held = value
        elif not why and value.dtype.kind == "U" and value.ndim == 0:
            found[name] = str(value)
        elif not why:
            loaded = tensor_of(value)
            if isinstance(loaded, str):
                held = loaded
            else:
                found[name] = loaded
        if (why or held) and name in KNOWN:
            raise DataError(f"{name} to hold numbers", why or held, where=str(path))
        if why or held:
            left.append(f"the array {name!r} of {path.name} is not read: {why or f'it holds {held}'}.")
    return found, left


def tensor_of(array: NDArray[Any]) -> Tensor | str:
    """Return an array as a tensor of the same values, or the reason why that is impossible.

    Unsigned integers of a type that torch cannot compute with are converted to a wider type.
    """
    kind = array.dtype
    if kind.kind not in "biufc":
        return kind.name if kind.names is None else "records"
    # float128 and complex256.
    if kind.itemsize > (16 if kind.kind == "c" else 8):
        return f"{kind.name}, which torch has no type for: save it as float64"
    # Arrays from a machine of the other byte order.
    plain = array.astype(kind.newbyteorder("="), copy=False)
    # uint16 to uint64: torch stores these types, but has few operations for them.
    if kind.kind == "u" and kind.itemsize > 1:
        if kind.itemsize == 8 and plain.size and int(plain.max()) >= 2**63:
            return f"{int(plain.max())}, and whole numbers end at 2^63 - 1"
        plain = plain.astype(np.int32 if kind.itemsize == 2 else np.int64)
    return torch.from_numpy(np.ascontiguousarray(plain).reshape(plain.shape))


def _members(archive: zipfile.ZipFile, path: Path) -> tuple[dict[str, zipfile.ZipInfo], list[str]]:
    """Return the arrays of an archive by name, and the names of its other members."""
    found: dict[str, zipfile.ZipInfo] = {}
    others = []
    for info in archive.infolist():
        name = info.filename.removesuffix(".npy")
        if info.is_dir():
            continue
        if name == info.filename:
            archive.open(info).close()  # fails if the member's two names differ
            others.append(name)
            continue
        if name in found:
            raise DataError(f"{path} to hold each array once", f"{name!r} twice")
        found[name] = info
    return found, others


def _array(archive: zipfile.ZipFile, info: zipfile.ZipInfo, name: str, path: Path) -> NDArray[Any] | str:
    with archive.open(info) as stream:
        shape, turned, dtype = _header(stream)
        if dtype.hasobject:
            return "Python objects"
        count = 1
        for size in shape:
            count *= size
        # A header may claim any shape: it is compared with the bytes that are there before any are read.
        there = info.file_size - stream.tell()
        if any(size < 0 for size in shape) or count * dtype.itemsize != there:
            raise DataError(
                f"{path} to be a whole .npz file (numpy.savez)",
                f"{there:,} bytes of {name!r}, which has the shape {list(shape)} of {dtype} and "
                f"{count * dtype.itemsize:,} bytes by its header",
                hint="write it again",
            )
        data = bytearray(stream.read())
    if len(data) != there:
        raise EOFError(f"{name} ends after {len(data):,} of {there:,} bytes")
    flat: NDArray[Any] = np.frombuffer(data, dtype=dtype, count=count) if count else np.empty(0, dtype)
    # Fortran order: the last axis varies slowest.
    return flat.reshape(shape[::-1]).transpose() if turned else flat.reshape(shape)


def _header(stream: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    version = np.lib.format.read_magic(stream)
    if version == (1, 0):
        return np.lib.format.read_array_header_1_0(stream)  # type: ignore[no-any-return, unused-ignore]
    if version == (2, 0):
        return np.lib.format.read_array_header_2_0(stream)  # type: ignore[no-any-return, unused-ignore]
    raise ValueError(f"an array of format {version}")


def _unfit(name: str) -> str:
    """Return why a name cannot be an attribute's, or ``""`` if it can."""
    if not name.isidentifier() or name.startswith("_"):
        return "its name is none that an attribute may have"
    return "PyG's Data has something else of that name" if name in _OWN_NAMES else ""
