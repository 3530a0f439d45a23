"""What each input says now that once ended in a traceback, in silence, or not at all.

Run as ``python benchmarks/faults/listed.py``; it writes ``listed.md``. The random series are ``tests/fuzz``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from kagome.storage import sealed_files

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LIMIT = 120.0
"""Seconds that a command may take."""
SBM = "sbm:vertices=60,degree=4,features=6,classes=3,communities=3"
TRAIN = ("train", "--nproc", "1", "--train.epochs", "1", "--report.no-progress", "--out", "out")
Make = Callable[[Path], tuple[str, ...]]


@dataclass(frozen=True)
class Input:
    """One input.

    Args:
        group: What is altered.
        name: How.
        make: Makes it in a folder, and gives the command that reads it.
    """

    group: str
    name: str
    make: Make


@dataclass(frozen=True)
class Said:
    """How a command ended.

    Args:
        code: Its exit code; None where it did not end.
        text: What it said, in one line.
        fault: Whether that is a traceback, a hang, or nothing at all.
    """

    code: int | None
    text: str
    fault: bool


# Graphs ------------------------------------------------------------------------------------------


def arrays() -> dict[str, Any]:
    """A sound graph."""
    i = np.arange(60)
    source, target = np.concatenate([i, i]), np.concatenate([(i + 1) % 60, (i + 7) % 60])
    return {
        "x": ((i[:, None] * np.arange(3, 9)) % 11 / 8).astype(np.float32),
        "edge_index": np.stack([np.concatenate([source, target]), np.concatenate([target, source])]),
        "y": (i * 5 // 7) % 3,
        "train_mask": i % 4 != 3,
        "val_mask": i % 8 == 3,
        "test_mask": i % 8 == 7,
    }


def graph(**changed: Any) -> Make:
    """A graph with some arrays replaced, or taken away where None."""

    def make(folder: Path) -> tuple[str, ...]:
        found = {key: value for key, value in (arrays() | changed).items() if value is not None}
        np.savez(folder / "graph.npz", **found)
        return (*TRAIN, "--data.name", "npz:graph.npz", "--model.hidden", "8")

    return make


def claiming(shape: str) -> Make:
    """An archive whose header of ``x`` says another shape than it holds."""

    def make(folder: Path) -> tuple[str, ...]:
        words = graph()(folder)
        with zipfile.ZipFile(folder / "graph.npz") as old, zipfile.ZipFile(folder / "new.npz", "w") as new:
            for item in old.namelist():
                held = old.read(item)
                if item == "x.npy":
                    head = held[:128].replace(b"(60, 6)", shape.encode())
                    held = head[:127].ljust(127)[:127] + b"\n" + held[128:]
                new.writestr(item, held)
        (folder / "new.npz").replace(folder / "graph.npz")
        return words

    return make


def unpacking(folder: Path) -> tuple[str, ...]:
    """A small archive that holds a gigabyte of zeros beside the graph."""
    words = graph()(folder)
    header = "{'descr': '|u1', 'fortran_order': False, 'shape': (1073741824,), }".ljust(117).encode()
    with (
        zipfile.ZipFile(folder / "graph.npz", "a", zipfile.ZIP_DEFLATED) as held,
        held.open("notes.npy", "w", force_zip64=True) as entry,
    ):
        entry.write(b"\x93NUMPY\x01\x00" + (118).to_bytes(2, "little") + header + b"\n")
        for _ in range(1024):
            entry.write(bytes(2**20))
    return words


X = arrays()["x"]
GRAPHS: dict[str, Make] = {
    "x of another byte order": graph(x=X.astype(">f4")),
    "x of longdouble": graph(x=X.astype(np.longdouble)),
    "x of complex numbers": graph(x=X.astype(np.complex64)),
    "x of half precision": graph(x=X.astype(np.float16)),
    "x with no axis": graph(x=np.float32(3)),
    "x with three axes": graph(x=np.zeros((60, 2, 3), np.float32)),
    "num_nodes is NaN": graph(num_nodes=np.nan),
    "num_nodes is inf": graph(num_nodes=np.inf),
    "num_nodes is an array": graph(num_nodes=np.array([60, 60])),
    "num_nodes is 10^12": graph(num_nodes=10**12),
    "a header that claims terabytes": claiming("(999999999999, 6)"),
    "edge_weight of bools": graph(edge_weight=np.ones(240, bool)),
    "edge_weight of two columns": graph(edge_weight=np.ones((240, 2), np.float32)),
    "CSR of a wrong dimension": graph(
        edge_index=None, indptr=np.zeros((2, 61), int), indices=np.zeros(4, int)
    ),
    "an unrelated array, notes": graph(notes=np.arange(5)),
    "an archive that unpacks to a gigabyte": unpacking,
}

# Numbers that no machine holds ---------------------------------------------------------------------


def words(*given: str) -> Make:
    """A command alone."""
    return lambda _folder: given


NUMBERS: dict[str, Make] = {
    " ".join(flag): words(*TRAIN, "--data.name", SBM, *flag)
    for flag in (
        ("--model.layers", "999999999999"),
        ("--model.hidden", "100000000000"),
        ("--model.hidden", "1.5"),
        ("--train.seed", "18446744073709551616"),
        ("--train.lr", "1e300"),
        ("--train.lr", "inf"),
    )
}
PLANS: dict[str, Make] = {
    " ".join(flag): words("plan", "--devices", "2", *flag)
    for flag in (
        ("--vertices", "0"),
        ("--vertices", "-1", "--edges", "-1"),
        ("--vertices", "100", "--edges", "-1"),
        ("--vertices", "100", "--edges", "300", "--features", "4", "--classes", "0"),
        ("--devices", "0", "--data.name", SBM),
    )
}


def cluster(**changed: str) -> Make:
    """A cluster's file with some values replaced."""

    def make(folder: Path) -> tuple[str, ...]:
        facts = {
            "name": '"two"',
            "hosts": "1",
            "devices": "2",
            "memory": "4e9",
            "speed": "1.0",
            "inside": "1e9",
            "between": "1e9",
        }
        lines = [f"{key} = {value}\n" for key, value in (facts | changed).items()]
        (folder / "cluster.toml").write_text("".join(lines))
        return ("plan", "--data.name", SBM, "--cluster", "cluster.toml")

    return make


def page(folder: Path, *, locked: bool) -> tuple[str, ...]:
    """A page that is a folder, or whose folder is no folder."""
    (folder / "page.html").mkdir() if not locked else (folder / "file").write_text("")
    return (
        "plan",
        "--data.name",
        SBM,
        "--devices",
        "2",
        "--page",
        "file/page.html" if locked else "page.html",
    )


def text(name: str, content: str | bytes, *command: str) -> Make:
    """A file with a content, and a command that reads it."""

    def make(folder: Path) -> tuple[str, ...]:
        held = content.encode() if isinstance(content, str) else content
        (folder / name).write_bytes(held)
        return command

    return make


TEXTS: dict[str, Make] = {
    "hosts = 10^9": cluster(hosts=str(10**9)),
    "devices = inf": cluster(devices="inf"),
    "devices = 1.5": cluster(devices="1.5"),
    "TOML nested 10,000 deep": text("a.toml", "x = " + "[" * 10_000 + "]" * 10_000, "train", "a.toml"),
    "TOML with an integer of 5,000 digits": text(
        "a.toml", f"[train]\nseed = {'9' * 5_000}", "train", "a.toml"
    ),
    "TOML with NUL in a path": text("a.toml", '[data]\nroot = "a\\u0000b"', "train", "a.toml"),
    "a plan of JSON nested 10,000 deep": text(
        "plan.json", "[" * 10_000, *TRAIN, "--data.name", SBM, "--parallel.plan", "plan.json"
    ),
    "a plan with an integer of 5,000 digits": text(
        "plan.json",
        '{"plans": [' + "9" * 5_000 + "]}",
        *TRAIN,
        "--data.name",
        SBM,
        "--parallel.plan",
        "plan.json",
    ),
    "a page that is a folder": lambda folder: page(folder, locked=False),
    "a page that cannot be written": lambda folder: page(folder, locked=True),
}

# Checkpoints and partitions --------------------------------------------------------------------------

SHARED: dict[str, Path] = {}
"""A run and a partition to alter."""


def saved(alter: Callable[[Path], None], kind: str) -> Make:
    """A copy of what was saved, altered, and the command that goes on with it."""

    def make(folder: Path) -> tuple[str, ...]:
        graph()(folder)
        shutil.copytree(SHARED[kind], folder / kind)
        alter(folder / kind)
        if kind == "run":
            return ("train", "--resume", "run", "--train.epochs", "4", "--nproc", "2", "--report.no-progress")
        told = ("--data.name", "npz:graph.npz", "--data.partition", "parts", "--model.hidden", "8")
        return ("train", "--nproc", "2", "--train.epochs", "1", "--report.no-progress", "--out", "out", *told)

    return make


def newest(run: Path) -> Path:
    """A run's checkpoint."""
    return next((run / "checkpoints").glob("epoch-*"))


def flipped(name: str) -> Callable[[Path], None]:
    """One bit of a file is another."""

    def alter(run: Path) -> None:
        path = newest(run) / name
        held = bytearray(path.read_bytes())
        held[len(held) // 2] ^= 4
        path.write_bytes(held)

    return alter


def facts(folder: Path, name: str, **changed: Any) -> None:
    """Facts of a page are others, with a right checksum."""
    told = json.loads((folder / name).read_text())
    told.pop("seal")
    (folder / name).unlink()
    sealed_files.write_page(folder / name, told | changed)


def pointed(content: bytes | None) -> Callable[[Path], None]:
    """``latest`` holds something else, or is a folder."""

    def alter(run: Path) -> None:
        path = run / "checkpoints" / "latest"
        path.unlink()
        path.mkdir() if content is None else path.write_bytes(content)

    return alter


def place(**changed: Any) -> Callable[[Path], None]:
    """A checkpoint's page says something else."""
    return lambda run: facts(newest(run), "place.json", **changed)


def tensors(folder: Path, page_name: str, name: str, change: Callable[[dict[str, Any]], None]) -> None:
    """Tensors of a file are others, with right checksums."""
    held = load_file(folder / name)
    change(held)
    facts_of = safe_open(folder / name, "pt").metadata()
    save_file({key: value.contiguous() for key, value in held.items()}, folder / name, facts_of)
    told = json.loads((folder / page_name).read_text())["files"]
    written = (folder / name).read_bytes()
    facts(folder, page_name, files=told | {name: [len(written), f"{zlib.crc32(written):08x}"]})


def part(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    """Part 0 holds other tensors."""
    return lambda folder: tensors(folder, "partition.json", "part-00000.safetensors", change)


def change(key: str, how: Callable[[Any], Any]) -> Callable[[dict[str, Any]], None]:
    """The first tensor whose name has a key in it becomes another, or goes."""

    def do(held: dict[str, Any]) -> None:
        name = next(name for name in sorted(held) if key in name)
        found = how(held[name].clone())
        if found is None:
            del held[name]
        else:
            held[name] = found

    return do


def first(value: int) -> Callable[[Any], Any]:
    """The first entry becomes another."""

    def how(tensor: Any) -> Any:
        tensor.view(-1)[0] = value
        return tensor

    return how


def gone(_tensor: Any) -> None:
    """No tensor."""


CHECKPOINTS: dict[str, Make] = {
    name: saved(alter, "run")
    for name, alter in {
        "a flipped bit in place.json": flipped("place.json"),
        "a flipped bit in rest.json": flipped("rest.json"),
        "a flipped bit in a rank's tensors": flipped("rank-00000.safetensors"),
        "epoch is -1": place(epoch=-1),
        'epoch is "6"': place(epoch="6"),
        "epoch is 6.5": place(epoch=6.5),
        "epoch is None": place(epoch=None),
        "latest is long": pointed(b"epoch-000003" * 1000),
        "latest is binary": pointed(bytes(range(128, 256))),
        "latest is a folder": pointed(None),
        "state of another shape": lambda run: tensors(
            newest(run), "place.json", "rank-00000.safetensors", change("", lambda tensor: tensor[:1])
        ),
    }.items()
}
PARTS: dict[str, Make] = {
    name: saved(alter, "parts")
    for name, alter in {
        "ids that are negative": part(change("edge", first(-1))),
        "ids beyond": part(change("edge", first(10**6))),
        "ids of floats": part(change("edge", lambda t: t.float())),
        "ids turned": part(change("edge", lambda t: t.t() if t.dim() > 1 else t[:, None])),
        "own too short": part(change("own", lambda t: t[:-1])),
        "own missing": part(change("own", gone)),
        "send too short": part(change("send", lambda t: t[:-1])),
        "send missing": part(change("send", gone)),
        "a mask too short": part(change("train_mask", lambda t: t[:-1])),
        "a mask missing": part(change("train_mask", gone)),
        "labels out of range": part(change("node.y", first(10**9))),
        "features of another type": part(change("node.x", lambda t: t.int())),
        "num_nodes that is not true": lambda folder: facts(folder, "partition.json", num_nodes=61),
        "num_nodes that is huge": lambda folder: facts(folder, "partition.json", num_nodes=10**15),
        "num_nodes that is a text": lambda folder: facts(folder, "partition.json", num_nodes="many"),
    }.items()
}
INPUTS = [
    Input(group, name, make)
    for group, made in {
        "npz": GRAPHS,
        "numbers": NUMBERS,
        "kagome plan": PLANS,
        "TOML, JSON, clusters, pages": TEXTS,
        "checkpoint": CHECKPOINTS,
        "saved partition": PARTS,
    }.items()
    for name, make in made.items()
]


# Running -----------------------------------------------------------------------------------------


def command(given: tuple[str, ...], folder: Path) -> Said:
    """Run a command in a folder."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "COLUMNS": "500"}
    line = [sys.executable, "-m", "kagome", *given]
    try:
        done = subprocess.run(
            line, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT
        )
    except subprocess.TimeoutExpired:
        return Said(None, "", True)
    raw = "Traceback (most recent call last)" in done.stderr
    if done.returncode == 0:
        notes = [each for each in done.stderr.splitlines() if "graph.npz" in each or "notes" in each]
        return (
            Said(0, "trains" if given[0] == "train" else "plans", raw)
            if not notes
            else Said(0, notes[0], raw)
        )
    found = re.search(r"kagome: error: (.*?)(?:\n {2}Try: |\Z)", done.stderr, re.S)
    said = found[1] if found else " ".join(re.findall(r"│ (.*?) *│", done.stderr)[:1])
    told = " ".join(said.split())
    return Said(done.returncode, told.replace(str(folder) + "/", ""), raw or not told)


def tried(given: Input) -> Said:
    """Make an input in a folder of its own and run its command."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        return command(given.make(folder), folder)


def prepare(folder: Path) -> None:
    """Make the run and the partition that are altered."""
    graph()(folder)
    shared = ("--data.name", "npz:graph.npz")
    run = ("train", "--nproc", "2", *shared, "--model.hidden", "8", "--train.epochs", "3", "--out", "run")
    for given in (run, ("partition", *shared, "--parts", "2", "--out", "parts")):
        said = command(given, folder)
        assert said.code == 0, said
    SHARED.update(run=folder / "run", parts=folder / "parts")


def main() -> None:
    """Run all inputs and write ``listed.md``; the exit code is 1 if one of them ends in a fault."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="inputs whose group or name has this in it")
    parser.add_argument("--out", type=Path, default=HERE / "listed.md")
    options = parser.parse_args()
    chosen = [each for each in INPUTS if options.only in f"{each.group}: {each.name}"]
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(2) as pool:
        prepare(Path(name))
        found = list(pool.map(tried, chosen))
    lines = ["| input | exit code | what is said |", "|---|---|---|"]
    for given, said in zip(chosen, found, strict=True):
        code = "did not end" if said.code is None else said.code
        told = said.text.replace("|", "\\|")
        lines.append(f"| {given.group}: {given.name} | {code} | {told[:300]}{' **FAULT**' * said.fault} |")
    options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))
    raise SystemExit(any(said.fault for said in found))


if __name__ == "__main__":
    main()
