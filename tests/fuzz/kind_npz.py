"""Npz files: arrays of other types, shapes, values and byte orders, broken headers, packed archives."""

from __future__ import annotations

import io
import math
import random
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from .harness import Case

N, E, F, C = 30, 90, 5, 3


def base(draw: np.random.Generator, *, csr: bool) -> dict[str, Any]:
    """A valid graph."""
    source, target = draw.integers(0, N, (2, E))
    given: dict[str, Any] = {"x": draw.normal(size=(N, F)).astype(np.float32), "y": draw.integers(0, C, N)}
    for place, name in enumerate(("train_mask", "val_mask", "test_mask")):
        given[name] = np.arange(N) % 3 == place
    if not csr:
        return {**given, "edge_index": np.stack([source, target])}
    order = np.argsort(source, kind="stable")
    pointer = np.concatenate([[0], np.cumsum(np.bincount(source, minlength=N))])
    return {**given, "indptr": pointer, "indices": target[order]}


DTYPES = (
    *("<f2", ">f4", ">f8", "<f8", "g", "c8", "c16", "?", "i1", "u1", "<i2", ">i4", ">i8", "u2", "u4", "u8"),
    *("U5", "S3", "M8[s]", "m8[s]", "O", "i4,f4"),
)
NUMBERS = (math.nan, math.inf, -math.inf, -1, 0, 1e12, 1e300, 2**62, 0.5, -7)


def _type(rng: random.Random, value: Any) -> Any:
    kind = np.dtype(rng.choice(DTYPES))
    try:
        with np.errstate(all="ignore"):
            return np.asarray(value).astype(kind)
    except TypeError:  # records are cast to nothing else
        return np.asarray(value)


def _shape(rng: random.Random, value: Any) -> Any:
    ways: tuple[Callable[[Any], Any], ...] = (
        lambda v: v[..., None],
        lambda v: v[None],
        lambda v: v.T,
        lambda v: v[:-1],
        lambda v: v[:0],
        lambda v: v.reshape(-1),
        lambda v: np.concatenate([v, v]),
        lambda v: v.flat[0] if v.size else v,
        lambda v: np.stack([v, v], -1),
        lambda v: v[:, :0] if v.ndim > 1 else v[:1],
        lambda v: np.asfortranarray(v[::-1]),
    )
    return np.asarray(rng.choice(ways)(np.asarray(value)))


def _value(rng: random.Random, value: Any) -> Any:
    made = np.array(value)
    number = rng.choice(NUMBERS)
    if made.dtype.kind in "iub" and not (math.isfinite(number) and abs(number) < 2**62):
        made = made.astype(np.float64)
    if made.size:
        with np.errstate(all="ignore"):
            made.flat[rng.randrange(made.size)] = number
    return made


def _more(rng: random.Random, given: dict[str, Any]) -> str:
    name = rng.choice(
        (
            "notes",
            "num_nodes",
            "edge_weight",
            "edge_attr",
            "keys",
            "_store",
            "a b",
            "u",
            "name",
            "other_index",
        )
    )
    options: tuple[Any, ...] = (
        rng.choice(NUMBERS),
        10**12,
        N,
        np.ones(N),
        np.ones(E),
        np.ones(E) > 0,
        np.ones((E, 2)),
        np.ones((2, 7), int),
        np.array("text"),
        np.array(["a", "b"]),
        np.full(E, math.nan),
        np.arange(3),
        np.ones((1, 4)),
    )
    given[name] = np.asarray(rng.choice(options))
    return f"more: {name} {given[name].dtype} {given[name].shape}"


def _packed(header: bytes, body: bytes) -> bytes:
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + body


HEADERS = (
    "{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000, 5), }",
    "{'descr': '<f4', 'fortran_order': False, 'shape': (-1, 5), }",
    "{'descr': '<f4', 'fortran_order': False, 'shape': (30, 5.5), }",
    "{'descr': 'nothing', 'fortran_order': False, 'shape': (30, 5), }",
    "{'descr': '<f4', 'shape': (30, 5), }",
    "{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (30,), }",
    "[" * 500,
    "{'descr': '|O', 'fortran_order': False, 'shape': (30,), }",
    "",
)


class Npz:
    """A graph in an npz file, trained on."""

    name, seconds = "npz", 60.0

    def prepare(self, shared: Path) -> None:
        """Nothing is shared."""

    def make(self, rng: random.Random, folder: Path) -> Case:
        """A valid graph with an array, its header, or the archive altered."""
        file = folder / "given.npz"
        given = base(np.random.default_rng(rng.randrange(2**32)), csr=rng.random() < 0.3)
        said = []
        way = rng.choices(("arrays", "header", "bytes", "large"), (20, 3, 5, 1))[0]
        for _ in range(rng.choice((1, 1, 1, 2)) if way == "arrays" else 0):
            said.append(self._alter(rng, given))
        np.savez(file, **given)
        if way == "header":
            said.append(self._header(rng, file, given))
        elif way == "bytes":
            said.append(self._bytes(rng, file))
        elif way == "large":
            given["x"] = np.zeros((N, 2**28 // (4 * N)), np.float32)
            np.savez_compressed(file, **given)
            said.append("an archive that unpacks to a quarter of a GiB")
        return Case(", ".join(said), file, (file,))

    def _alter(self, rng: random.Random, given: dict[str, Any]) -> str:
        name = rng.choice(list(given))
        how = rng.choice(("type", "shape", "value", "more", "gone"))
        if how == "more":
            return _more(rng, given)
        if how == "gone":
            del given[name]
            return f"without {name}"
        alter = {"type": _type, "shape": _shape, "value": _value}[how]
        given[name] = alter(rng, given[name])
        return f"{how} of {name}: {given[name].dtype} {given[name].shape}"

    def _header(self, rng: random.Random, file: Path, given: dict[str, Any]) -> str:
        name, header = rng.choice(list(given)), rng.choice(HEADERS)
        with zipfile.ZipFile(file, "w") as archive:
            for key, value in given.items():
                buffer = io.BytesIO()
                np.save(buffer, value)
                body = buffer.getvalue()
                archive.writestr(f"{key}.npy", _packed(header.encode(), body[128:]) if key == name else body)
        return f"header of {name}: {header[:60]}"

    def _bytes(self, rng: random.Random, file: Path) -> str:
        data = bytearray(file.read_bytes())
        if rng.random() < 0.4:
            cut = rng.randrange(len(data))
            file.write_bytes(data[:cut])
            return f"cut off after {cut} bytes"
        places = [rng.randrange(len(data)) for _ in range(rng.choice((1, 3, 20)))]
        for place in places:
            data[place] ^= 1 << rng.randrange(8)
        file.write_bytes(data)
        return f"{len(places)} bits flipped"

    def run(self, case: Case) -> Any:
        """One epoch of a small model."""
        from kagome import config
        from kagome.cli.app import _builder
        from kagome.graph.datasets.load import load_data
        from kagome.train.data import from_run
        from kagome.train.trainer import Trainer

        settings = config.Run(
            data=config.Data(name=f"npz:{case.given}"),
            model=config.Model(hidden=4),
            train=config.Train(epochs=1, check=False),
            report=config.Report(page=False, trace=False, progress=False),
        )
        build = _builder(settings.model, settings.train)
        with Trainer.from_settings(settings, partial(from_run, settings), build) as trainer:
            summary = trainer.fit()
        return summary, load_data(settings.data)

    def sane(self, case: Case, result: Any) -> str:
        """The graph is the file's: every array that means something has the file's values."""
        summary, data = result
        loss = summary.get("final_loss", 0.0)
        if loss is not None and not math.isfinite(loss):
            return f"the loss is {loss}"
        with np.load(case.given) as opened:
            given = {name: opened[name] for name in opened.files}
        for name in ("x", "y", "edge_index", "edge_weight", "edge_attr"):
            there = data[name].numpy() if name in data else None
            if name in given and (there is None or not np.array_equal(there, given[name], equal_nan=True)):
                return f"{name} is not the file's"
        for name in ("train_mask", "val_mask", "test_mask"):
            if name in given and not np.array_equal(
                data[name].numpy(), given[name].astype(bool).reshape(N, -1)[:, 0]
            ):
                return f"{name} is not the file's"
        if "indptr" in given and "edge_index" not in given:
            source = np.repeat(np.arange(len(given["indptr"]) - 1), np.diff(given["indptr"].astype(np.int64)))
            if not np.array_equal(
                data.edge_index.numpy(), np.stack([source, given["indices"].astype(np.int64)])
            ):
                return "the edges are not the file's"
        return ""


KINDS = [Npz()]
