"""Rows that all ranks wrote come back in the graph's order, whatever the format, or not at all."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_shard import N, graph, model_of
from torch import Tensor

import kagome
from kagome.comm.channel import Channel
from kagome.storage import row_files

FORMATS = ("safetensors", "npz", "parquet")
needs_pyarrow = pytest.mark.skipif(find_spec("pyarrow") is None, reason="pyarrow is not installed")


def saved(channel: Channel, folder: str, formats: tuple[str, ...]) -> list[Tensor | None]:
    """Save outputs of several shapes and types; return what ``net.gather`` gives."""
    data, found = graph(), []
    with kagome.shard(model_of("gat"), data, log=str) as net, torch.no_grad():
        out = net(data.x, data.edge_index, data.edge_attr)
        pairs = net.place(torch.arange(90.0), "edges")
        values: dict[str, tuple[Tensor, Any, int]] = {
            "rows": (out, "vertices", 0),
            "batch": (torch.stack([out, 2 * out]).float(), "vertices", 1),
            "label": (out.argmax(1), "vertices", 0),
            "flag": (out > 0, "vertices", 0),
            "edges": (pairs, "edges", 0),
        }
        for name, (value, rows, axis) in values.items():
            for format in formats:
                path = net.save(value, f"{folder}/{format}/{name}", rows, axis=axis, format=format)
                assert path.name == f"rows-{net.rank:05}-of-{net.ranks:05}.{format}"
            found.append(net.gather(value, rows, axis=axis))
        if "safetensors" in formats:
            net.save(out.bfloat16(), f"{folder}/safetensors/bfloat16")
            with pytest.raises(kagome.KagomeError, match=r"(?s)torch\.bfloat16.*rows\.float\(\)"):
                net.save(out.bfloat16(), f"{folder}/refused", format="npz")
    return found


@pytest.mark.every
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("format", [*FORMATS[:2], pytest.param("parquet", marks=needs_pyarrow)])
def test_rows_come_back_in_the_order_of_the_graph(
    ranks: Any, world: int, format: str, tmp_path: Path
) -> None:
    gathered = ranks(world, saved, str(tmp_path), (format,))[0]
    for name, expected in zip(["rows", "batch", "label", "flag", "edges"], gathered, strict=True):
        found = kagome.load_rows(tmp_path / format / name)
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected), name
    assert not list(tmp_path.rglob("*.tmp"))
    if format == "safetensors":
        rounded = kagome.load_rows(tmp_path / format / "bfloat16")
        assert torch.equal(rounded, gathered[0].bfloat16())
        for path in (tmp_path / format / "rows").iterdir():
            ids = load_file(path)["ids"]
            assert torch.equal(ids, ids.sort().values)


def twice(channel: Channel, folder: str) -> None:
    """Two saves of the same rows into two folders."""
    data = graph()
    with kagome.shard(model_of("gcn"), data, log=str) as net, torch.no_grad():
        out = net(data.x, data.edge_index)
        for name in ("one", "two"):
            net.save(out, f"{folder}/{name}")


@pytest.fixture
def folders(ranks: Any, tmp_path: Path) -> Path:
    ranks(2, twice, str(tmp_path))
    return tmp_path


def altered(path: Path, **changes: Any) -> None:
    """Write a file again with other tensors and what it said of itself."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        told = file.metadata()
    save_file({**load_file(path), **changes}, path, metadata=told)


def test_files_that_are_no_whole_save_are_refused(folders: Path) -> None:
    one, two = ([folders / f / f"rows-0000{r}-of-00002.safetensors" for r in (0, 1)] for f in ("one", "two"))
    expected, before = kagome.load_rows(folders / "one"), one[1].read_bytes()

    def refused(words: str) -> None:
        with pytest.raises(kagome.KagomeError, match=words):
            kagome.load_rows(folders / "one")
        one[1].write_bytes(before)
        assert torch.equal(kagome.load_rows(folders / "one"), expected)

    one[1].unlink()
    refused("a file of each of 2 ranks; got none of rank 1")
    shutil.copy(two[1], one[1])
    refused("files of one save; got rows-00001-of-00002.safetensors of another")
    one[1].write_bytes(before[:-9])
    refused("a file that net.save wrote")
    held, first = load_file(one[1]), load_file(one[0])["ids"]
    altered(one[1], ids=torch.cat([first[:1], held["ids"][1:]]))
    refused(f"each row once; got row {int(first[0])} a second time")
    altered(one[1], ids=torch.cat([held["ids"][1:2], held["ids"][1:]]))
    refused(f"each row once; got row {int(held['ids'][1])} a second time")
    altered(one[1], ids=held["ids"][1:], rows=held["rows"][1:])
    refused(f"all 23 rows; got 1 missing, such as {int(held['ids'][0])}")
    altered(one[1], ids=held["ids"] + N)
    refused("ids from 0 to 22")
    altered(one[1], rows=held["rows"].float())
    refused("float64; got")
    extra = folders / "one" / "rows-00002-of-00003.safetensors"
    shutil.copy(two[1], extra)
    with pytest.raises(kagome.KagomeError, match=r"files of one save, by 2 ranks; got files of another"):
        kagome.load_rows(folders / "one")
    with pytest.raises(kagome.KagomeError, match=r"a folder with files of net\.save"):
        kagome.load_rows(folders)
    with pytest.raises(kagome.KagomeError, match="got one of its files"):
        kagome.load_rows(extra)


def formats_refused(channel: Channel) -> list[str]:
    found = []
    with kagome.shard(model_of("gcn"), graph(), log=str) as net:
        x: Any = net.place(graph().x)
        for format, there in (("csv", None), ("parquet", None)):
            with (
                patch.object(row_files, "find_spec", lambda name, there=there: there),
                pytest.raises(kagome.KagomeError) as error,
            ):
                net.save(x, "nowhere", format=format)  # type: ignore[arg-type]
            found.append(str(error.value))
    return found


def test_a_format_that_there_is_not_is_refused(ranks: Any) -> None:
    for csv, parquet in ranks(2, formats_refused):
        assert "safetensors, npz, parquet; got 'csv'" in csv
        assert "the package pyarrow" in parquet
    assert not Path("nowhere").exists()
