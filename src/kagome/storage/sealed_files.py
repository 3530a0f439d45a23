"""Sealed files: tensors and pages of facts with checksums that show whether they were altered.

Where it sits: ``checkpoint.checkpoint`` and ``graph.partition.store`` read and write with it. A page is JSON
with a checksum of itself and of the files beside it; tensors are safetensors files. Neither can contain
executable content. A checksum detects accidents (a disk, a copy, an editor), not deliberate forgery.
"""

from __future__ import annotations

import json
import os
import stat
import zlib
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from kagome.storage.text_files import json_text

SEAL: Final = "seal"
"""The field of a page that holds its checksum."""
_BLOCK: Final = 1 << 22
_OTHERS: Final = "other types"
_KNOWN: Final = frozenset(
    {
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    }
)
"""Types that every version of safetensors supports; tensors of other types are stored as bytes."""


class SealError(ValueError):
    """Error of a file that is missing, damaged, or cannot be written."""


@dataclass(frozen=True)
class Seal:
    """Size and checksum of a file at the time it was written.

    Args:
        bytes: The file's size.
        crc32: The file's checksum, 8 hexadecimal digits.
    """

    bytes: int
    crc32: str


# Pages -------------------------------------------------------------------------------------------


def write_page(path: Path, facts: Mapping[str, Any]) -> None:
    """Write facts as JSON with a checksum, and sync the file to disk.

    Raises:
        OSError: If the file cannot be written.
    """
    write_text(path, json.dumps({**facts, SEAL: _mark(facts)}, indent=1, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> Seal:
    """Write a text file, and sync it to disk.

    Raises:
        OSError: If the file cannot be written.
    """
    path.write_text(text, encoding="utf-8")
    return _seal_of(path, sync=True)


def read_page(path: Path) -> dict[str, Any]:
    """Return the facts that :func:`write_page` was given.

    Raises:
        SealError: If the file is missing, is not a page, or has been altered.
    """
    try:
        with _opened(path) as file:
            facts = json_text(file.read().decode("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        # SealError is a ValueError itself, and has its own text.
        if isinstance(error, SealError):
            raise
        raise SealError(f"{path.name} is damaged: {_line(error)}") from None
    if not isinstance(facts, dict) or not isinstance(facts.get(SEAL), str):
        raise SealError(f"{path.name} is damaged: it has no checksum")
    mark = facts.pop(SEAL)
    if mark != _mark(facts):
        raise SealError(f"{path.name} has been altered: its checksum is {_mark(facts)}, and says {mark[:20]}")
    return facts


def _mark(facts: Mapping[str, Any]) -> str:
    # Of the values, not of the file's bytes: indentation and the order of keys do not count.
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    return f"{zlib.crc32(text.encode()):08x}"


# Tensors -----------------------------------------------------------------------------------------


def write_tensors(path: Path, tensors: Mapping[str, Tensor], facts: str = "", *, sync: bool = True) -> Seal:
    """Write tensors to a safetensors file.

    Args:
        path: The file, ``*.safetensors``.
        tensors: The tensors by name, on any device.
        facts: A text to store with them.
        sync: Whether to wait until the file is on disk.

    Raises:
        OSError: If the file cannot be written.
        SealError: If a tensor is sparse or quantised.

    Shapes:
        any of any type.

    Cost: the file is read once more, at about 3 GB/s.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    held = {name: _dense(name, tensor) for name, tensor in tensors.items()}
    others = {name: [str(t.dtype), list(t.shape)] for name, t in held.items() if t.dtype not in _KNOWN}
    # Complex numbers and float8, for example: stored as bytes, with type and shape in the metadata.
    held |= {name: held[name].view(-1).view(torch.uint8) for name in others}
    # safetensors refuses tensors that share memory; a tensor that shares none needs no copy.
    sharing = Counter(tensor.untyped_storage().data_ptr() for tensor in held.values() if tensor.numel())
    alone = {
        name: tensor if sharing[tensor.untyped_storage().data_ptr()] < 2 else tensor.clone()
        for name, tensor in held.items()
    }
    try:
        save_file(alone, path, metadata={"kagome": facts, _OTHERS: json.dumps(others)})
    except SafetensorError as error:
        raise OSError(_line(error)) from None
    return _seal_of(path, sync=sync)


def read_tensors(
    path: Path, names: Collection[str] | None = None, *, but: str = ""
) -> tuple[dict[str, Tensor], str]:
    """Return tensors of a file, and the text stored with them.

    Args:
        path: The file.
        names: Names of the tensors to read; all if None.
        but: Leave out tensors with names of this section, ``but.*``.

    Raises:
        SealError: If the file is missing or damaged, or a named tensor is not in it.
    """
    from safetensors import SafetensorError, safe_open

    # For its error messages, and because opening a pipe would wait.
    _opened(path).close()
    try:
        with safe_open(path, framework="pt") as opened:
            told = opened.metadata() or {}
            there = [name for name in opened.keys() if not but or not name.startswith(f"{but}.")]  # noqa: SIM118
            lost = sorted(set(names or ()) - set(there))
            if lost:
                raise SealError(f"{path.name} has no tensor {lost[0]!r}")
            found = {name: opened.get_tensor(name) for name in (there if names is None else names)}
        for name, (kind, shape) in json.loads(told.get(_OTHERS, "{}")).items():
            if name in found:
                found[name] = found[name].view(_dtype(kind)).view(shape)
    except (SafetensorError, OSError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        if isinstance(error, SealError):
            raise
        raise SealError(f"{path.name} is damaged: {_line(error)}") from None
    return found, str(told.get("kagome", ""))


def _dense(name: str, tensor: Tensor) -> Tensor:
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise SealError(f"{name} is a {tensor.layout} tensor, which cannot be saved")
    # A conjugate or negative view shares its memory with the original and only has a bit set.
    return tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name.removeprefix("torch."))
    if not isinstance(found, torch.dtype):
        raise SealError(f"no type is called {name[:40]!r}")
    return found


# Seals -------------------------------------------------------------------------------------------


def verify(path: Path, seal: Seal) -> None:
    """Compare a file's size and checksum with those of the time it was written.

    Raises:
        SealError: If the file is missing or has been altered.

    Cost: the file is read once, at about 3 GB/s.
    """
    verify_size(path, seal)
    try:
        found = _seal_of(path)
    except OSError as error:
        raise SealError(f"{path.name} cannot be read: {error.strerror}") from None
    if found != seal:
        raise SealError(f"{path.name} has been altered: its checksum is {found.crc32}, and was {seal.crc32}")


def verify_size(path: Path, seal: Seal) -> None:
    """Compare only a file's size with that of the time it was written.

    Raises:
        SealError: If the file is missing or its size differs.
    """
    with _opened(path) as file:
        size = os.fstat(file.fileno()).st_size
    if size != seal.bytes:
        raise SealError(f"{path.name} has been altered: it has {size:,} bytes, and had {seal.bytes:,}")


def seals_of(told: object) -> dict[str, Seal]:
    """Return the seals stored in a page, by file name.

    Raises:
        SealError: If the value has another form, or a name leads to another folder.
    """
    if not isinstance(told, dict):
        raise SealError("it names no files")
    seals = {}
    for name, facts in told.items():
        # A page may be altered by hand: a name such as "../x" must not lead to another folder.
        if not isinstance(facts, list) or len(facts) != 2 or name != Path(name).name or name in ("", ".."):
            raise SealError(f"it names a file {name[:40]!r}")
        size, mark = facts
        if type(size) is not int or not isinstance(mark, str):
            raise SealError(f"it has no checksum of {name[:40]!r}")
        seals[name] = Seal(size, mark)
    return seals


def told_of(seals: Mapping[str, Seal]) -> dict[str, list[Any]]:
    """Return seals in the form in which a page stores them; :func:`seals_of` reads them back."""
    return {name: [seal.bytes, seal.crc32] for name, seal in seals.items()}


def sync_folder(folder: Path) -> None:
    """Sync the names in a folder to disk, where the system can."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        # Some file systems cannot sync a folder: a rename may be lost in a power failure, but not the data.
        pass
    finally:
        os.close(descriptor)


def _seal_of(path: Path, *, sync: bool = False) -> Seal:
    mark = size = 0
    with _opened(path) as file:
        # Synced before it is read back. The checksum is of the file, so it also covers the writing itself.
        if sync:
            os.fsync(file.fileno())
        while block := file.read(_BLOCK):
            mark, size = zlib.crc32(block, mark), size + len(block)
    return Seal(size, f"{mark:08x}")


def _opened(path: Path) -> Any:
    """Open a regular file for reading; anything else, such as a folder or a pipe, raises SealError."""
    try:
        facts = path.stat()
        if not stat.S_ISREG(facts.st_mode):
            raise SealError(f"{path.name} is no file")
        return path.open("rb")
    except (OSError, ValueError) as error:
        if isinstance(error, SealError):
            raise
        missing = isinstance(error, FileNotFoundError)
        text = "is missing" if missing else f"cannot be read: {getattr(error, 'strerror', None) or error}"
        raise SealError(f"{path.name} {text}") from None


def _line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__
