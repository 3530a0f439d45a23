"""What a user sees: names, flags, settings, files of a run, checkpoint keys; kept in ``golden/surface.json``.

Where it sits: ``test_surface`` compares with the file. A change that means to alter the surface writes it
anew, and the file's diff says what::

    PYTHONPATH=tests python tests/surface.py
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout, suppress
from io import StringIO
from itertools import chain
from pathlib import Path
from typing import Any

from safetensors import safe_open

import kagome
from kagome import config, errors, metrics
from kagome.cli import app
from kagome.config.commands import COMMANDS

FOLDER = Path(__file__).parent / "golden"
FILE = FOLDER / "surface.json"
SAVED = FOLDER / "saved_run"
"""A run of three epochs on two ranks, and its graph, as an earlier version wrote them."""
BY_KIND = ("waited", "under_way", "waited_per_epoch", "hidden_share")
"""Tables with those kinds of messages that there were."""
RESUMED = 6
"""Epochs of that run when it has gone on."""


def names() -> dict[str, Any]:
    """Public names of the package with what they take; public methods of classes likewise."""
    found: dict[str, Any] = {}
    for name in kagome.__all__:
        value = getattr(kagome, name)
        if not callable(value):
            continue
        found[name] = _takes(value)
        if inspect.isclass(value):
            bases = [base for base in value.__mro__ if base.__module__.startswith("kagome")]
            for method, body in chain.from_iterable(vars(base).items() for base in reversed(bases)):
                if not method.startswith("_"):
                    found[f"{name}.{method}"] = _takes(body)
    found |= {f"metrics.{name}": _takes(getattr(metrics, name)) for name in metrics.__all__}
    leaves = (value for value in vars(errors).values() if inspect.isclass(value))
    found["errors"] = sorted(leaf.__name__ for leaf in leaves if issubclass(leaf, kagome.KagomeError))
    return found


def _takes(value: Any) -> list[str]:
    """The parameters of a function, with stars and whether they must be given."""
    if isinstance(value, (classmethod, staticmethod)):
        value = value.__func__
    if not callable(value):
        return ["a value"]
    try:
        given = inspect.signature(value).parameters.values()
    except ValueError:
        return []
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    return [
        f"{stars.get(each.kind, '')}{each.name}{'' if each.default is each.empty else '='}"
        f"{' (by name)' if each.kind is each.KEYWORD_ONLY else ''}"
        for each in given
    ]


def flags() -> dict[str, list[str]]:
    """The flags of each command, as its help shows them."""
    found = {}
    for command in COMMANDS:
        with redirect_stdout(StringIO()) as text, suppress(SystemExit):
            app.main([command, "--help"])
        found[command] = sorted(set(re.findall(r"--[a-z][a-z0-9.-]*[a-z0-9]", text.getvalue())))
    return found


def settings() -> dict[str, dict[str, str]]:
    """Each section and key of a settings file, with its default."""
    return {
        section.name: {
            key.name: repr(getattr(getattr(config.Run(), section.name), key.name))
            for key in dataclasses.fields(getattr(config.Run(), section.name))
        }
        for section in dataclasses.fields(config.Run)
    }


def train(folder: Path, *words: str, ranks: int = 2, start: Callable[..., Any]) -> None:
    """Train on the saved graph, as ``kagome train`` does.

    Args:
        folder: Where ``graph.npz`` lies and the run goes.
        words: Further flags.
        ranks: How many.
        start: Runs a command in a folder.
    """
    cut = ["--parallel.partitioner", "contiguous", "--parallel.no-reuse"]
    start(["train", "--nproc", str(ranks), *cut, "--report.no-progress", *words], folder)


def files_of(run: Path) -> dict[str, Any]:
    """What a run's folder holds: files, keys of JSON, names of tensors."""
    found: dict[str, Any] = {}
    for path in sorted(run.rglob("*")):
        if path.is_file() and path.name != ".kagome.lock":
            found[path.relative_to(run).as_posix()] = _content(path)
    return found


def _content(path: Path) -> Any:
    if path.suffix == ".json" and path.name != "trace.json":
        return sorted(_keys(json.loads(path.read_text())))
    if path.suffix == ".jsonl":
        return sorted({key for line in path.read_text().splitlines() for key in _keys(json.loads(line))})
    if path.suffix == ".safetensors":
        with safe_open(path, "pt") as tensors:
            return {name: list(tensors.get_slice(name).get_shape()) for name in sorted(tensors.keys())}
    return None


def _keys(value: Any, above: str = "") -> Iterator[str]:
    """Keys of tables inside tables; a checkpoint's are pairs under ``dict``."""
    if isinstance(value, list):
        for each in value:
            if (
                isinstance(each, list)
                and len(each) == 2
                and isinstance(each[0], str)
                and above.endswith("dict")
            ):
                yield f"{above}.{each[0]}"
            yield from _keys(each, above)
    elif isinstance(value, dict):
        for key, each in value.items():
            name = f"{above}.{key}" if above else str(key)
            yield name
            if key not in BY_KIND:
                yield from _keys(each, name)


def surface(run: Path) -> dict[str, Any]:
    """All of it; ``run`` is the folder of a run."""
    return {"names": names(), "flags": flags(), "settings": settings(), "run": files_of(run)}


def read() -> dict[str, Any]:
    """What is written down."""
    found: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def losses(run: Path) -> list[float]:
    """The loss of each epoch of a run."""
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def write() -> None:
    """Write the saved run, the losses with which it goes on, and the surface anew."""
    import subprocess
    import sys
    import tempfile

    def start(words: list[str], folder: Path) -> None:
        subprocess.run([sys.executable, "-m", "kagome", *words], cwd=folder, check=True)

    shared = ["--data.name", "npz:graph.npz", "--model.name", "sage", "--model.hidden", "8"]
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        shutil.copy(SAVED / "graph.npz", work)
        train(work, *shared, "--train.epochs", str(RESUMED), "--out", "whole", start=start)
        train(work, *shared, "--train.epochs", "3", "--out", "run", start=start)
        shutil.rmtree(SAVED / "run", ignore_errors=True)
        left = shutil.ignore_patterns("report.html", "trace.json")
        shutil.copytree(work / "run", SAVED / "run", ignore=left)
        (SAVED / "run" / ".kagome.lock").write_text("")  # it says who writes there
        (SAVED / "losses.json").write_text(json.dumps(losses(work / "whole")) + "\n", encoding="utf-8")
        FILE.write_text(json.dumps(surface(work / "run"), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    write()
