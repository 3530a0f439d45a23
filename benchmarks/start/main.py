"""Measures what passes before the first epoch has ended: imports, machine code, phases of a rank, wall time.

Run as ``python benchmarks/start/main.py PART``; see README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SOURCE = HERE.parents[1] / "src"
IMPORTS = {
    "kagome --help": "import kagome.cli.app",
    "launcher": "import kagome.cli.app, kagome.launch.launcher",
    "plain PyG": "import torch_geometric.nn",
    "plain PyG, its optimizer made": "import torch_geometric.nn, torch._dynamo",
    "process that ranks are forked of": "import kagome.train.preload",
}
"""What each process of a start imports."""
PLAIN = """
import torch, sys
from torch_geometric.data import Data
from torch_geometric.nn import GCN
import numpy as np
torch.manual_seed(0)
x, y = torch.rand(2708, 1433), torch.randint(7, (2708,))
edge_index = torch.randint(2708, (2, 10556))
model = GCN(1433, 64, num_layers=2, out_channels=7, dropout=0.5)
optimizer = torch.optim.Adam(model.parameters())
torch.nn.functional.cross_entropy(model(x, edge_index), y).backward()
optimizer.step()
"""
"""An epoch of plain PyG on a graph of Cora's size."""
PHASES = {
    "Trainer._open": "connect, load, cut, set up",
    "Trainer._check": "check of the model",
    "Admission.predict": "memory of ranks",
    "Trainer._one_epoch": "first epoch and evaluation",
}


# Imports -----------------------------------------------------------------------------------------


def imported(code: str) -> dict[str, Any]:
    """Return the modules that a line of imports loads, and the processor seconds of each package."""
    import importlib._bootstrap as bootstrap

    find = bootstrap._find_and_load_unlocked  # type: ignore[attr-defined]
    own: dict[str, float] = {}
    inner = [0.0]

    def timed(name: str, import_: Any) -> Any:
        begin = time.process_time()
        inner.append(0.0)
        try:
            return find(name, import_)
        finally:
            whole = time.process_time() - begin
            nested = inner.pop()
            inner[-1] += whole
            words = name.split(".")
            package = ".".join(words[:2]) if words[0] in ("torch", "torch_geometric") else words[0]
            own[package] = own.get(package, 0.0) + whole - nested

    before = set(sys.modules)
    bootstrap._find_and_load_unlocked = timed  # type: ignore[attr-defined]
    begin = time.process_time()
    exec(code, {})
    seconds = time.process_time() - begin
    most = dict(sorted(own.items(), key=lambda item: -item[1])[:12])
    return {"seconds": seconds, "modules": len(set(sys.modules) - before), "packages": most}


def imports(options: argparse.Namespace) -> dict[str, Any]:
    """Import what each process imports, each in a fresh process."""
    found = {}
    for name, code in IMPORTS.items():
        command = [sys.executable, __file__, "--imported", code]
        done = subprocess.run(command, env=_environment(options), capture_output=True, text=True, check=True)
        found[name] = json.loads(done.stdout.splitlines()[-1])
    return found


# Machine code and phases of a rank ---------------------------------------------------------------


def noted_rank(notes: str, work: Callable[..., int], *args: Any) -> int:
    """Run the work of a rank, and write down what it compiles and loads, and how long its phases take."""
    from numba.core import caching, event

    from kagome.train.admission import Admission
    from kagome.train.trainer import Trainer

    rank = os.environ.get("RANK", "0")
    found: dict[str, Any] = {"compiled": [], "loaded": [], "phases": {}}

    class Listener(event.Listener):  # type: ignore[misc]
        depth, begun = 0, 0.0

        def on_start(self, event: Any) -> None:
            self.begun = self.begun if self.depth else time.process_time()
            self.depth += 1

        def on_end(self, event: Any) -> None:
            self.depth -= 1
            if self.depth == 0:
                loop = event.data["dispatcher"].py_func
                row = [_name(loop), str(event.data["args"]), time.process_time() - self.begun]
                found["compiled"].append(row)

    def loading(self: Any, signature: Any, context: Any) -> Any:
        begin = time.process_time()
        loaded = load(self, signature, context)
        if loaded is not None:
            found["loaded"].append([_name(self._py_func), str(signature), time.process_time() - begin])
        return loaded

    def phase(kind: type, name: str) -> None:
        before = getattr(kind, name)

        def timed(*each: Any, **more: Any) -> Any:
            clock, begin = time.perf_counter(), time.process_time()
            try:
                return before(*each, **more)
            finally:
                seconds = [time.process_time() - begin, time.perf_counter() - clock]
                found["phases"].setdefault(f"{kind.__name__}.{name}", seconds)

        setattr(kind, name, timed)

    load, caching.Cache.load_overload = caching.Cache.load_overload, loading
    event.register("numba:compile", Listener())
    for name in PHASES:
        phase({"Trainer": Trainer, "Admission": Admission}[name.partition(".")[0]], name.partition(".")[2])
    try:
        return work(*args)
    finally:
        found["seconds"] = time.process_time()
        Path(notes, f"rank-{rank}.json").write_text(json.dumps(found))


def _name(loop: Any) -> str:
    held = [cell.cell_contents for cell in loop.__closure__ or ()]
    widths = [str(each) for each in held if isinstance(each, int)]
    return f"{loop.__module__}.{loop.__qualname__}{'(' + ', '.join(widths) + ')' if widths else ''}"


def noted_run(arguments: list[str], notes: str) -> None:
    """Run ``kagome`` in this process, with ranks that take notes."""
    from kagome.cli import app
    from kagome.launch import launcher

    started = launcher.start_local

    def start(nproc: int, function: Callable[..., object], *args: object, **more: Any) -> object:
        return started(nproc, noted_rank, notes, function, *args, **more)

    launcher.start_local = start
    app.main(arguments)


def ranks(options: argparse.Namespace) -> dict[str, Any]:
    """Start once with empty caches and once with full ones; return what the ranks noted."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        env = {**_environment(options), "NUMBA_CACHE_DIR": f"{folder}/numba"}
        env["KAGOME_CACHE"] = f"{folder}/cache"
        for name in ("empty caches", "warm"):
            notes = Path(folder, name)
            notes.mkdir()
            words = [*_arguments(options), "--out", f"{folder}/run-{name[0]}"]
            command = [sys.executable, __file__, "--noted", str(notes), *words]
            subprocess.run(command, env=env, check=True, stdout=subprocess.DEVNULL)
            rows = [json.loads(path.read_text()) for path in sorted(notes.glob("rank-*.json"))]
            found[name] = {f"rank {number}": row for number, row in enumerate(rows)}
    return found


# Wall time ---------------------------------------------------------------------------------------


def wall(options: argparse.Namespace) -> dict[str, list[float]]:
    """Return the seconds from the command to the end of the first epoch, of several starts by turns."""
    ways = {"plain PyG": plain_start, "kagome --help": help_start}
    ways |= {"warm": partial(kagome_start, cold=False), "empty caches": partial(kagome_start, cold=True)}
    found: dict[str, list[float]] = {name: [] for name in ways}
    with tempfile.TemporaryDirectory() as folder:
        kagome_start(options, Path(folder), cold=False)  # fills the caches
        for turn in range(options.turns):
            for name in sorted(ways, reverse=bool(turn % 2)):
                found[name].append(ways[name](options, Path(folder)))
    return found


def plain_start(options: argparse.Namespace, folder: Path) -> float:
    """Time a script of plain PyG with one epoch."""
    return _timed([sys.executable, "-c", PLAIN], _environment(options))


def help_start(options: argparse.Namespace, folder: Path) -> float:
    """Time ``kagome --help``."""
    return _timed([sys.executable, "-m", "kagome", "--help"], _environment(options))


def _timed(command: list[str], env: dict[str, str]) -> float:
    begin = time.perf_counter()
    subprocess.run(command, env=env, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begin


def kagome_start(options: argparse.Namespace, folder: Path, *, cold: bool) -> float:
    """Time ``kagome train`` to the line of the first epoch in ``metrics.jsonl``."""
    with tempfile.TemporaryDirectory() as name:
        place = Path(name) if cold else folder
        # Without __pycache__, a copy of the sources has to be compiled by Python, too.
        if not (place / "kagome").exists():
            shutil.copytree(
                options.source / "kagome", place / "kagome", ignore=shutil.ignore_patterns("__pycache__")
            )
        env = {**_environment(options), "PYTHONPATH": str(place), "NUMBA_CACHE_DIR": str(place / "numba")}
        env["KAGOME_CACHE"] = str(place / "cache")
        out = Path(name) / "run"
        command = [sys.executable, "-m", "kagome", *_arguments(options), "--out", str(out)]
        begin = time.perf_counter()
        # Where it is started it makes a folder of prepared data: each checkout's own, and not the user's.
        with subprocess.Popen(command, env=env, cwd=folder, stdout=subprocess.DEVNULL) as process:
            lines = out / "metrics.jsonl"
            while not (lines.exists() and lines.stat().st_size):
                if process.poll() not in (None, 0):
                    raise SystemExit(f"it ended with code {process.returncode}")
                time.sleep(0.005)
            return time.perf_counter() - begin


def _environment(options: argparse.Namespace) -> dict[str, str]:
    env = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    more = {"PYTHONPATH": str(options.source), "KAGOME_DATA": str(options.data.resolve())}
    return {**env, **more, "OMP_NUM_THREADS": "1"}


def _arguments(options: argparse.Namespace) -> list[str]:
    return ["train", "--nproc", "2", "--data.name", options.graph, "--train.epochs", "1"]


# Tables ------------------------------------------------------------------------------------------


def tables(found: dict[str, Any]) -> str:
    """Return all parts that were measured, as Markdown."""
    lines = ["# The start"]
    if "imports" in found:
        lines += ["", "## Imports", "", "| process | processor seconds | modules | most of it |"]
        lines += ["|---|---|---|---|"]
        for name, row in found["imports"].items():
            most = ", ".join(f"{key} {value:.2f}" for key, value in list(row["packages"].items())[:6])
            lines.append(f"| {name} | {row['seconds']:.2f} | {row['modules']:,} | {most} |")
    for start, rows in found.get("ranks", {}).items():
        lines += ["", f"## Ranks, {start}", "", "| rank | phase | processor seconds | wall seconds |"]
        lines += ["|---|---|---|---|"]
        for rank, row in rows.items():
            for phase, (seconds, clock) in row["phases"].items():
                lines.append(f"| {rank} | {PHASES[phase]} | {seconds:.2f} | {clock:.2f} |")
            for what in ("compiled", "loaded"):
                each = row[what]
                seconds = sum(one[-1] for one in each)
                lines.append(f"| {rank} | of these: {len(each)} functions {what} | {seconds:.2f} | |")
    if "wall" in found:
        lines += ["", "## Wall", "", "| start | seconds, median (least to most) |", "|---|---|"]
        for name, row in found["wall"].items():
            lines.append(f"| {name} | {statistics.median(row):.2f} ({min(row):.2f} to {max(row):.2f}) |")
    return "\n".join([*lines, ""])


def main() -> None:
    """Measure some parts, and write them beside those measured before."""
    if "--imported" in sys.argv:
        print(json.dumps(imported(sys.argv[sys.argv.index("--imported") + 1])))
        return
    if "--noted" in sys.argv:
        at = sys.argv.index("--noted")
        noted_run(sys.argv[at + 2 :], sys.argv[at + 1])
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parts: dict[str, Callable[[argparse.Namespace], Any]] = {"imports": imports, "ranks": ranks, "wall": wall}
    parser.add_argument("parts", nargs="*", choices=[[], *parts], default=list(parts))
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("KAGOME_DATA", "data")))
    parser.add_argument("--graph", default="Cora")
    parser.add_argument("--source", type=Path, default=SOURCE, help="src of the checkout that starts")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--out", type=Path, default=HERE)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "results.json"
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for name in options.parts:
        found[name] = parts[name](options)
        path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    (options.out / "results.md").write_text(tables(found), encoding="utf-8")
    print(tables(found))


if __name__ == "__main__":
    main()
