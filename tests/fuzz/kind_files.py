"""Files: settings, plans and clusters, altered in their text or in one value."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kagome import config
from kagome.config import plan_io, toml_io
from kagome.planner.cluster import READY, Cluster

from .harness import Case, Ended, alter_plain, alter_text, command
from .kind_flags import SMALL, numbers_of, run_is_whole

DEEP = 10_000
LONG = 5_000
TEXTS: dict[str, Callable[[random.Random], str]] = {
    "lists nested 10,000 deep": lambda rng: (
        f"{rng.choice(('name', 'epochs', 'x'))} = {'[' * DEEP}{']' * DEEP}"
    ),
    "tables nested 10,000 deep": lambda rng: "x = " + "{a=" * DEEP + "1" + "}" * DEEP,
    "a key of 10,000 parts": lambda rng: ".".join("a" * DEEP) + " = 1",
    "a section of 10,000 parts": lambda rng: f"[{'.'.join('a' * DEEP)}]",
    "a whole number of 5,000 digits": lambda rng: f"{rng.choice(('epochs', 'hosts', 'seed'))} = {'9' * LONG}",
    "a hexadecimal number of 5,000 digits": lambda rng: f"seed = 0x{'f' * LONG}",
    "a number with 5,000 digits after its point": lambda rng: f"lr = 0.{'1' * LONG}",
    "a text of a million characters": lambda rng: f'name = "{"a" * 10**6}"',
    "a date": lambda rng: "epochs = 1979-05-27T07:32:00Z",
    "an array of tables": lambda rng: "[[train]]\nepochs = 1",
    "a section twice": lambda rng: "[train]\nepochs = 1\n[train]\nlr = 0.1",
    "binary": lambda rng: "".join(chr(rng.randrange(1, 256)) for _ in range(300)),
}
"""Whole files that nobody should write."""


def toml(value: Any) -> str:
    """Nested plain values as TOML; what TOML does not know is left out."""
    head, tables = [], []
    for key, inner in value.items() if isinstance(value, dict) else ():
        if isinstance(inner, dict):
            tables.append(f"[{json.dumps(key)}]\n" + "\n".join(_rows(inner)))
        elif inner is not None:
            head.append(f"{json.dumps(key)} = {_toml(inner)}")
    return "\n".join([*head, *tables]) + "\n"


def _rows(table: dict[str, Any]) -> list[str]:
    return [f"{json.dumps(key)} = {_toml(value)}" for key, value in table.items() if value is not None]


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return (
            "{" + ", ".join(f"{json.dumps(k)} = {_toml(v)}" for k, v in value.items() if v is not None) + "}"
        )
    if isinstance(value, list):
        return f"[{', '.join(_toml(each) for each in value if each is not None)}]"
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return hex(value) if value > 10**300 else str(value)
    return json.dumps(value, ensure_ascii=False)


class _File:
    """A kind of text file."""

    suffix = ".toml"
    whole_way = 0.3
    """Share of the cases that go on from reading the file to what the command does with it."""

    def base(self) -> tuple[str, Any]:
        """A valid file: its text, and its content; each kind of file has its own."""
        raise NotImplementedError

    def text(self, value: Any) -> str:
        """A content's text."""
        return toml(value)

    def prepare(self, shared: Path) -> None:
        """Nothing is shared."""

    def make(self, rng: random.Random, folder: Path) -> Case:
        """The valid file, altered in its text, in one or two values, or wholly."""
        file = folder / f"given{self.suffix}"
        text, value = self.base()
        way = rng.choices(("text", "value", "twice", "whole"), (8, 14, 5, 3))[0]
        if way == "text":
            altered = alter_text(rng, text)
            made, said = altered.text, altered.said[0]
        elif way == "whole":
            made, said = self.whole(rng)
        else:
            value, said = alter_plain(rng, value)
            if way == "twice":
                value, more = alter_plain(rng, value)
                said += f", {more}"
            made = self.text(value)
        file.write_text(made, encoding="utf-8", newline="")
        return Case(said, (file, rng.random() < self.whole_way), (file,))

    def whole(self, rng: random.Random) -> tuple[str, str]:
        """A file that has nothing of the valid one."""
        said = rng.choice(list(TEXTS))
        text = TEXTS[said](rng)
        return (f"[train]\n{text}" if rng.random() < 0.5 and "[[" not in text else text), said


class Toml(_File):
    """A run's settings, trained with."""

    name, seconds = "toml", 60.0

    def base(self) -> tuple[str, Any]:
        """A run of two epochs."""
        run = config.Run(data=config.Data(name=SMALL), train=config.Train(epochs=2, patience=5, clip=1.0))
        return toml_io.to_toml(run), json.loads(json.dumps(toml_io.as_dict(run)))

    def run(self, case: Case) -> Any:
        """Read it; of some, train with it."""
        file, trains = case.given
        run = toml_io.from_toml(file)
        if not trains:
            return None, run
        # The number of epochs is left to the flags: a file may ask for 10^12, which is its right.
        words = ["train", str(file), "--out", "run", "--train.epochs", "2", "--data.name", SMALL]
        return command(words), run

    def sane(self, case: Case, result: tuple[Ended | None, config.Run]) -> str:
        """The run is whole, and its settings are the file's."""
        file, trained = case.given
        asked = tomllib.loads(file.read_text(encoding="utf-8"))
        used = tomllib.loads(Path("run/config.toml").read_text() if trained else toml_io.to_toml(result[1]))
        for section, values in asked.items():
            for name, value in values.items():
                key = name.replace("-", "_")
                if key not in used.get(section, {}):
                    return f"{section}.{name} was dropped"
                found = used[section][key]
                if found != value and f"{section}.{key}" not in ("train.epochs", "data.name"):
                    return f"{section}.{name} is {value!r} in the file, {found!r} in the run"
        return run_is_whole(Path("run")) if trained else ""


class Plan(_File):
    """What ``kagome plan --json`` wrote, checked with."""

    name, seconds, suffix = "plan", 60.0, ".json"

    def prepare(self, shared: Path) -> None:
        """Let ``kagome plan`` write one."""
        words = [
            "plan",
            "--data.name",
            SMALL,
            "--json",
            "--devices",
            "4",
            "--allow",
            "history",
            "stale",
            "decoupled",
        ]
        self._text = subprocess.run(
            [sys.executable, "-m", "kagome", *words],
            check=True,
            capture_output=True,
            text=True,
            cwd=shared,
        ).stdout

    def base(self) -> tuple[str, Any]:
        """The plan; of its content the first plan's settings, so that most cases alter what is read."""
        return self._text, json.loads(self._text)

    def make(self, rng: random.Random, folder: Path) -> Case:
        """Half the cases alter a short plan, of which every value is read."""
        whole = self._text
        settings = rng.choice(json.loads(whole)["plans"])["settings"]
        if rng.random() < 0.5:
            self._text = json.dumps({"plans": [{"settings": settings}]})
        try:
            return super().make(rng, folder)
        finally:
            self._text = whole

    def text(self, value: Any) -> str:
        """As JSON, with Python's words for what is not finite."""
        return json.dumps(value)

    def whole(self, rng: random.Random) -> tuple[str, str]:
        """JSON that nobody should write."""
        texts = {
            "lists nested 10,000 deep": "[" * DEEP + "]" * DEEP,
            "objects nested 10,000 deep": '{"plans":' * DEEP + "1" + "}" * DEEP,
            "a whole number of 5,000 digits": f'{{"plans": [{{"settings": {{"graph": {"9" * LONG}}}}}]}}',
            "a key twice": '{"plans": [{"settings": {"graph": 2, "graph": 3}}]}',
            "settings in a list": '{"plans": [{"settings": [["graph", 2]]}]}',
            "two axes": json.dumps(
                {"plans": [{"settings": {name: rng.randint(-2, 9) for name in ("graph", "pipe")}}]}
            ),
        }
        said = rng.choice(list(texts))
        return texts[said], said

    def run(self, case: Case) -> Any:
        """Read it; of some, check with it."""
        file, checks = case.given
        cut = config.Parallel(plan=str(file))
        words = ["check", "--parallel.plan", str(file), "--data.name", SMALL, "--vertices", "30"]
        return command(words) if checks else None, cut

    def sane(self, case: Case, result: tuple[Ended | None, config.Parallel]) -> str:
        """Its settings are the first plan's."""
        ended, cut = result
        asked = json.loads(case.given[0].read_text(encoding="utf-8-sig"))["plans"][0]["settings"]
        used = asdict(cut)
        wrong = {name: (value, used.get(name)) for name, value in asked.items() if used.get(name) != value}
        unknown = set(asked) - set(plan_io.KINDS)
        if wrong or unknown:
            return f"the plan's settings and the run's: {wrong} {unknown}"
        return "" if ended is None or "equal" in ended.out else f"the check said {ended.out!r}"


class Clusters(_File):
    """A cluster, planned for."""

    name, seconds = "cluster", 60.0

    def base(self) -> tuple[str, Any]:
        """Two hosts of two devices."""
        value = {"name": "two", "hosts": 2, "devices": 2, "memory": 4e10, "speed": 20.0, "inside": 2e10}
        value |= {"between": 1e9, "latency": 1e-5, "crowded": 0.9, "cores": 64.0}
        return toml(value), value

    def run(self, case: Case) -> Any:
        """Read it; of some, plan for it."""
        file, plans = case.given
        if not plans:
            return Cluster.load(file)
        graph = ["--vertices", "3000", "--edges", "12000", "--features", "8", "--classes", "4"]
        return command(["plan", "--cluster", str(file), "--json", *graph])

    def sane(self, case: Case, result: Ended | Cluster) -> str:
        """What was read is the file's; plans are finite, and of no more ranks than there are devices."""
        asked = tomllib.loads(case.given[0].read_text(encoding="utf-8"))
        if set(asked) - set(asdict(READY["h100x8"])):
            return f"what is not known was dropped: {asked}"
        if any(
            isinstance(asked[name], bool) or int(asked[name]) != asked[name] for name in ("hosts", "devices")
        ):
            return f"hosts {asked['hosts']!r}, devices {asked['devices']!r}"
        if not isinstance(asked["name"], str):
            return f"a name of {asked['name']!r}"
        if isinstance(result, Cluster):
            used = asdict(result)
            wrong = {name: (value, used[name]) for name, value in asked.items() if used[name] != value}
            return f"the file's and the cluster's: {wrong}" if wrong else ""
        found = json.loads(result.out)
        bad = [number for number in numbers_of(found) if not (math.isfinite(number) and number >= 0)]
        if bad:
            return f"plans hold {bad}"
        most = asked["hosts"] * asked["devices"]
        meshes = [plan["settings"] for plan in found["plans"]]
        ranks = [math.prod(mesh.get(axis, 1) for axis in ("graph", "pipe", "tensor")) for mesh in meshes]
        return "" if ranks and max(ranks) <= most else f"plans of {ranks} ranks on {most} devices"


KINDS = (Toml(), Plan(), Clusters())
