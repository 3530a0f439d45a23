"""Runs: folders of finished and unfinished runs, of which files are altered, for ``kagome report``."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import tomllib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from .harness import Case, Ended, alter_plain, alter_text, command
from .kind_files import toml
from .kind_flags import SMALL

VOID = (
    "meta",
    "rect",
    "line",
    "circle",
    "path",
    "polyline",
    "br",
    "input",
    "use",
    "link",
    "polygon",
    "img",
    "hr",
)
FILES = {"summary.json": 6, "metrics.jsonl": 3, "trace.json": 2, "config.toml": 2}
"""What is altered, and how often."""
RUNS = {
    "one rank": ("--train.epochs", "3"),
    "parts": ("--nproc", "2", "--train.epochs", "3", "--parallel.codec", "int4"),
    "a pipeline": ("--parallel.pipe", "2", "--train.epochs", "3"),
}
"""Runs of which reports show all that they can show."""


class Page(HTMLParser):
    """Whether a page is whole: tags closed in their order, and nothing that runs."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.wrong: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note an open tag."""
        if tag in ("script", "iframe", "object", "embed") or any(name.startswith("on") for name, _ in attrs):
            self.wrong.append(f"<{tag}> {attrs}")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        """Close it."""
        if tag in VOID:
            return
        if not self.open or self.open.pop() != tag:
            self.wrong.append(f"</{tag}> closes another")


class Runs:
    """Folders of runs."""

    name, seconds = "runs", 40.0

    def prepare(self, shared: Path) -> None:
        """Train each of ``RUNS`` once."""
        self._shared = shared
        for name, words in RUNS.items():
            line = ["train", "--data.name", SMALL, *words, "--out", name, "--report.no-progress"]
            subprocess.run(
                [sys.executable, "-m", "kagome", *line], check=True, capture_output=True, cwd=shared
            )
            for place in ("checkpoints", "report.html", "predictions.npz", "model.safetensors"):
                path = shared / name / place
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def make(self, rng: random.Random, folder: Path) -> Case:
        """A run's folder, of which one or two files are altered or missing."""
        name = rng.choice(list(RUNS))
        run = folder / "run"
        shutil.copytree(self._shared / name, run)
        said = [name]
        for _ in range(rng.choice((1, 1, 2))):
            there = [each for each in FILES if (run / each).exists()]
            file = run / rng.choices(there, [FILES[each] for each in there])[0]
            said.append(f"{file.name}: {self._alter(rng, file)}")
        return Case("; ".join(said), run, tuple(run / each for each in FILES if (run / each).is_file()))

    def _alter(self, rng: random.Random, file: Path) -> str:
        way = rng.choices(("value", "text", "gone", "folder", "deep", "binary"), (16, 6, 1, 1, 1, 1))[0]
        if not file.is_file():
            return "already altered"
        text = file.read_text(encoding="utf-8", errors="replace")
        if way == "value":
            try:
                made, said = self._value(rng, file.suffix, text)
            except (ValueError, IndexError, RecursionError):  # what it altered before may be nested deep
                way = "text"
            else:
                file.write_text(made)
                return said
        if way == "text":
            altered = alter_text(rng, text)
            file.write_text(altered.text)
            return altered.said[0]
        if way == "binary":
            file.write_bytes(rng.randbytes(200))
        elif way == "deep":
            file.write_text("x = " * (file.suffix == ".toml") + "[" * 10_000 + "]" * 10_000)
        else:
            file.unlink()
            if way == "folder":
                file.mkdir()
        return way

    def _value(self, rng: random.Random, suffix: str, text: str) -> tuple[str, str]:
        if suffix == ".toml":
            value, said = alter_plain(rng, tomllib.loads(text))
            return toml(value), said
        if suffix == ".jsonl":
            rows = [json.loads(line) for line in text.splitlines()]
            at = rng.randrange(len(rows))
            rows[at], said = alter_plain(rng, rows[at])
            return "".join(json.dumps(row) + "\n" for row in rows), f"line {at}: {said}"
        value, said = alter_plain(rng, json.loads(text))
        return json.dumps(value), said

    def run(self, case: Case) -> Any:
        """Write its page."""
        return command(["report", str(case.given)])

    def sane(self, case: Case, result: Ended) -> str:
        """The page is whole, and nothing in it runs."""
        text = (case.given / "report.html").read_text(encoding="utf-8")
        page = Page()
        page.feed(text)
        if page.wrong or page.open:
            return f"the page: {page.wrong[:5]}, open {page.open[:5]}"
        words = text.replace(">", " ").replace("<", " ").split()
        found = [word for word in words if word.strip('";,%') in ("nan", "inf", "-inf", "NaN")]
        # What a file holds is shown as it has it; 1e999 is read as infinity.
        given = any(word in case.what.lower() for word in ("nan", "inf", "1e999"))
        return f"the page says {found[:5]}" if found and not given else ""


KINDS = (Runs(),)
