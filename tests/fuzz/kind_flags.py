"""Flags: command lines with hostile values, unknown words and words that are missing."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import re
import tomllib
from pathlib import Path
from typing import Any

from kagome import config
from kagome.config import commands

from .harness import Case, Ended, command, hostile

SMALL = "sbm:vertices=60,degree=4,features=6,classes=3,communities=3"
BASES: dict[str, tuple[str, ...]] = {
    "train": ("--data.name", SMALL, "--train.epochs", "2", "--out", "run"),
    "check": ("--data.name", SMALL, "--vertices", "30"),
    "partition": ("--data.name", SMALL, "--out", "parts"),
    "plan": ("--data.name", SMALL, "--page", "page.html"),
    "report": ("given",),
    "doctor": ("--nonsense",),
}
"""A valid line of each command; doctor, which starts two ranks each time, is tried with mistakes only."""
SHARES = (10, 3, 3, 3, 1, 1)


def flags_of(kind: Any) -> list[tuple[str, Any]]:
    """All flags of a command, and their defaults."""
    found: list[tuple[str, Any]] = []
    for field in dataclasses.fields(kind):
        if field.default_factory is not dataclasses.MISSING and dataclasses.is_dataclass(
            field.default_factory
        ):
            inner = dataclasses.fields(field.default_factory)
            found += [(f"--{field.name}.{each.name.replace('_', '-')}", each.default) for each in inner]
        else:
            found.append((f"--{field.name.replace('_', '-')}", field.default))
    return found


def numbers_of(value: Any) -> list[float]:
    """All numbers in nested plain values."""
    if isinstance(value, bool):
        return []
    if isinstance(value, int | float):
        return [float(value)]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [number for item in items for number in numbers_of(item)]


def run_is_whole(folder: Path) -> str:
    """What is wrong with a finished run's folder, whatever its settings were."""
    settings = tomllib.loads((folder / "config.toml").read_text())
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((folder / "summary.json").read_text())
    train = config.Train(**settings["train"])
    if len(lines) != train.epochs and train.patience is None:
        return f"{len(lines)} epochs for {train.epochs}"
    losses = [line["loss"] for line in lines]
    if any(loss is None or not math.isfinite(loss) for loss in losses) and not summary.get("notes"):
        return f"losses {losses}, and no note says so"
    metric = summary["test_metric"]
    if (
        train.epochs
        and metric is not None
        and not 0 <= metric <= 1
        and summary["metric_name"] in config_metrics()
    ):
        return f"a test metric of {metric}"
    return ""


def config_metrics() -> tuple[str, ...]:
    """Metrics between 0 and 1."""
    return ("accuracy", "roc_auc", "f1_micro")


class Flags:
    """Command lines."""

    name, seconds = "flags", 60.0

    def prepare(self, shared: Path) -> None:
        """Nothing is shared."""

    def make(self, rng: random.Random, folder: Path) -> Case:
        """A valid line, of which one to three words are altered."""
        (name,) = rng.choices(list(BASES), SHARES)
        (folder / "given").mkdir()
        (folder / "given" / "note.txt").write_text("of somebody else")
        words = [name, *BASES[name]]
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            self._alter(rng, words, flags_of(commands.COMMANDS[name]))
        shown = " ".join(word if len(word) < 100 else f"{word[:40]}..." for word in words)
        return Case(shown, words, (folder / "given" / "note.txt",))

    def _alter(self, rng: random.Random, words: list[str], flags: list[tuple[str, Any]]) -> None:
        way = rng.choices(
            ("value", "missing", "unknown", "positional", "drop", "command"), (20, 1, 1, 1, 1, 0.3)
        )[0]
        flag, default = rng.choice(flags) if flags else ("--x", 1)
        if way == "value" and isinstance(default, bool):
            head, _, last = flag.rpartition(".")
            words.append(rng.choice((flag, f"{head}.no-{last}" if head else f"--no-{flag[2:]}", f"{flag}=1")))
        elif way == "value":
            value = hostile(rng)
            if flag == "--train.epochs" and isinstance(value, int | float) and value > 9:
                value = 9  # as many epochs as one likes are anybody's right, and take their time
            text = str(value) if not isinstance(value, int) or abs(value) < 10**30 else "1" * 400
            text = text.replace("\0", "\ufffd")  # no command line holds a NUL
            words += rng.choice(([flag, text], [f"{flag}={text}"]))
        elif way == "missing":
            words.append(flag)
        elif way == "unknown":
            words.append(
                rng.choice(("--nonsense", "--data.nonsense=1", "--train.epoch", "-x", "--", "--help"))
            )
        elif way == "positional":
            words.insert(
                1, rng.choice(("nowhere.toml", "given", "given/note.txt", "", ".", "/dev/null", "é" * 300))
            )
        elif way == "drop" and len(words) > 1:
            del words[rng.randrange(1, len(words))]
        elif way == "command":
            words[0] = rng.choice(("", "trains", "TRAIN", "--version", "-h"))

    def run(self, case: Case) -> Any:
        """Run the command."""
        return command(case.given)

    def sane(self, case: Case, result: Ended) -> str:
        """What is wrong with what a command has written."""
        words: list[str] = case.given
        if not result.out.strip():
            return "it said nothing"
        if words[0] == "train" and "usage:" not in result.out:
            folders = [found.parent for found in Path().rglob("summary.json")]
            if len(folders) != 1:
                return f"{len(folders)} runs"
            return run_is_whole(folders[0])
        if words[0] == "check" and re.search(r"\b0 vertices", result.out):
            return result.out
        if words[0] == "plan" and "--json" in words:
            found = numbers_of(json.loads(result.out))
            if not all(math.isfinite(number) and number >= 0 for number in found):
                return f"numbers of plans: {found}"
        return ""


KINDS = (Flags(),)
