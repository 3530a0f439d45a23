"""Harness: one case of a kind in a process of its own, and how it ended.

Where it sits: ``kind_*.py`` describe inputs by ``Kind``; ``runner`` runs many cases by ``run_case``.

A case is run in a process forked of this one, which has imported torch and Kagome: so a case costs what the
tried code costs. The process has a time limit, a limit of memory and of file sizes, a session of its own, and
a folder that is removed afterwards. Draws follow from kind, seed and number, so any case can be run again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import hashlib
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

Outcome = Literal["accepted", "refused", "traceback", "hang", "nonsense"]
OUTCOMES: tuple[Outcome, ...] = ("accepted", "refused", "traceback", "hang", "nonsense")
FAULTS: tuple[Outcome, ...] = ("traceback", "hang", "nonsense")
"""Outcomes that must not be."""

LONGEST = 2_000
"""Characters of a message that a person still reads."""
MEMORY = 12 * 2**30
"""Bytes of address space of a case: more is refused by the system, as on a machine that has no more."""
FILE = 2**30
"""Bytes of a file that a case may write."""
OUTSIDE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID")
"""Variables of the environment that a case must not see."""


@dataclass(frozen=True)
class Case:
    """One altered input.

    Args:
        what: What was altered, for people.
        given: What ``Kind.run`` needs.
        keeps: Files and folders that must be the same afterwards, whatever the outcome.
    """

    what: str
    given: Any = None
    keeps: tuple[Path, ...] = ()


class Kind(Protocol):
    """A kind of input: how a valid one is altered, used, and judged.

    ``prepare`` is called once in this process; all else runs in the process of a case, whose current folder
    is the case's own.
    """

    name: str
    seconds: float
    """What a case may take; the limit is generous, as the machine may be busy."""

    def prepare(self, shared: Path) -> None:
        """Make what all cases read, such as a valid input, in a folder that they share; once."""

    def make(self, rng: random.Random, folder: Path) -> Case:
        """Alter a valid input, by draws of ``rng`` alone; files go to ``folder``."""
        ...

    def run(self, case: Case) -> Any:
        """Use the input. A ``KagomeError``, or an exit with one message, is a refusal."""
        ...

    def sane(self, case: Case, result: Any) -> str:
        """What is wrong with the result of an accepted input; nothing if it is right."""
        ...


@dataclass(frozen=True)
class Result:
    """How a case ended.

    Args:
        kind: Its kind.
        seed: The seed of the series.
        case: Its number.
        outcome: See ``OUTCOMES``.
        what: What was altered.
        said: The message of a refusal, the last lines of a traceback, or what is wrong.
        seconds: That it took.
    """

    kind: str
    seed: int
    case: int
    outcome: Outcome
    what: str
    said: str
    seconds: float

    def line(self) -> str:
        """One line of JSON; of a refusal its beginning."""
        said = self.said if self.outcome in FAULTS else self.said[:240]
        return json.dumps({**dataclasses.asdict(self), "said": said, "seconds": round(self.seconds, 2)})


@dataclass(frozen=True)
class Ended:
    """How a command ended that was not refused.

    Args:
        code: Its exit code.
        out: What it wrote to standard output.
        err: What it wrote to standard error.
    """

    code: int
    out: str
    err: str


class RefusedError(Exception):
    """A command ended with a code other than 0."""


def command(words: Sequence[str], *, fine: Sequence[int] = (0,)) -> Ended:
    """Run ``kagome ...`` in this process.

    Args:
        words: Its arguments.
        fine: Exit codes that are no refusal.

    Raises:
        RefusedError: If it ends with another code; what it wrote is judged by the harness.
    """
    from kagome.cli import main

    code: object = 0
    try:
        main(list(words))
    except SystemExit as left:
        code = left.code
    sys.stdout.flush()
    sys.stderr.flush()
    if code not in (None, *fine):
        raise RefusedError(f"exit code {code}")
    return Ended(
        int(str(code or 0)), *(Path(f"../{name}").read_text(errors="replace") for name in ("out", "err"))
    )


def run_case(kind: Kind, seed: int, number: int, *, memory: int = MEMORY, keep: bool = False) -> Result:
    """Run one case of a prepared kind.

    Args:
        kind: The kind.
        seed: Of the series.
        number: Of the case.
        memory: Bytes of address space.
        keep: Leave the folder, and say where it is.
    """
    folder = Path(tempfile.mkdtemp(prefix="kagome-fuzz-"))
    (folder / "work").mkdir()
    begun = time.monotonic()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        try:
            _in_child(kind, seed, number, folder, memory)
        finally:
            os._exit(0)
    status = _wait(child, begun + kind.seconds)
    late = status is None
    seconds = time.monotonic() - begun
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)  # what it has started
    if late:
        os.waitpid(child, 0)
    made, told = (_read(folder / name) for name in ("made", "told"))
    what = str(made.get("what", "the case could not be made"))
    outcome, said = told.get("outcome"), str(told.get("said", ""))
    if late:
        outcome, said = "hang", _tail((folder / "hang").read_text(errors="replace"), 12)
    elif outcome is None:
        ended = f"the process ended with status {status}"
        outcome, said = "traceback", f"{ended}: {_tail((folder / 'err').read_text(errors='replace'), 12)}"
    if keep:
        print(f"folder: {folder}", file=sys.stderr)
    else:
        shutil.rmtree(folder, ignore_errors=True)
    return Result(kind.name, seed, number, outcome, what, _plain(said, folder), seconds)


def _wait(child: int, until: float) -> int | None:
    """The status that a process ended with; None if it did not in time."""
    nap = 0.002
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status
        if time.monotonic() > until:
            return None
        time.sleep(nap)
        nap = min(1.5 * nap, 0.05)


def _in_child(kind: Kind, seed: int, number: int, folder: Path, memory: int) -> None:
    os.setsid()
    for place, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND), place)
    sys.stdout, sys.stderr = (os.fdopen(place, "w", closefd=False, encoding="utf-8") for place in (1, 2))
    os.chdir(folder / "work")
    for name in OUTSIDE:
        os.environ.pop(name, None)
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE, FILE))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    hang = (folder / "hang").open("w")
    # Says where it stands, a little before it is killed.
    faulthandler.dump_traceback_later(0.9 * kind.seconds, file=hang)
    try:
        case = kind.make(random.Random(f"{kind.name}/{seed}/{number}"), folder / "work")
    except BaseException:
        _write(folder / "told", outcome="traceback", said=f"Kind.make: {traceback.format_exc()}")
        return
    _write(folder / "made", what=case.what)
    before = [digest(path) for path in case.keeps]
    outcome, said = _judged(kind, case, folder)
    if outcome not in FAULTS:
        changed = [path.name for path, mark in zip(case.keeps, before, strict=True) if digest(path) != mark]
        if changed:
            outcome, said = "nonsense", f"{', '.join(changed)} was changed; {said}"
    _write(folder / "told", outcome=outcome, said=said)


def _judged(kind: Kind, case: Case, folder: Path) -> tuple[Outcome, str]:
    from kagome.errors import KagomeError

    refusal: str | None = None
    try:
        result = kind.run(case)
    except KagomeError as error:
        refusal = f"kagome: error: {error}"
        print(refusal, file=sys.stderr)
    except RefusedError as error:
        refusal = str(error)
    except BaseException:
        return "traceback", _tail(traceback.format_exc(), 14)
    sys.stdout.flush()
    sys.stderr.flush()
    written = "".join((folder / name).read_text(errors="replace") for name in ("out", "err"))
    if "Traceback (most recent call last)" in written:
        return "traceback", _tail(written, 14)
    if refusal is not None:
        return _refused(written, refusal)
    try:
        wrong = kind.sane(case, result)
    except Exception:
        wrong = f"it could not be judged: {_tail(traceback.format_exc(), 6)}"
    return ("nonsense", wrong) if wrong else ("accepted", "")


def _refused(written: str, how: str) -> tuple[Outcome, str]:
    """A refusal is one message that a person can read."""
    found = re.findall(r"^kagome: error: .*(?:\n  .*)*", written, re.MULTILINE)
    if not found:  # the box of the flags' parser
        found = re.findall(r"^[╭+][─-].*(?:\n[│|├].*)*", written, re.MULTILINE)
    if not found:
        return "traceback", f"{how} without a message: {_tail(written, 8)}"
    if len(found) > 1:
        return "nonsense", f"{len(found)} messages: {' / '.join(found)[:LONGEST]}"
    if len(found[0]) > LONGEST:
        return "nonsense", f"a message of {len(found[0]):,} characters: {found[0][:200]}"
    return "refused", found[0]


def digest(path: Path) -> str:
    """A mark of a file's content, or of all files of a folder."""
    mark = hashlib.sha256()
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        mark.update(str(file.relative_to(path)).encode())
        if file.is_file():
            mark.update(file.read_bytes())
    return mark.hexdigest()


def _write(path: Path, **values: object) -> None:
    path.write_text(json.dumps(values))


def _read(path: Path) -> Mapping[str, Any]:
    try:
        found: Mapping[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found


def _tail(text: str, lines: int) -> str:
    return "\n".join(text.strip().splitlines()[-lines:])[-LONGEST:]


def _plain(said: str, folder: Path) -> str:
    """What was said, without the names of folders of this machine."""
    source = str(Path(__file__).parents[2])
    for long, short in (
        (str(folder / "work"), "."),
        (str(folder), ".."),
        (source, "kagome"),
        (sys.prefix, "python"),
    ):
        said = said.replace(long, short)
    return said


@dataclass
class Altered:
    """A text altered at random, and in which words.

    Args:
        text: The text.
        said: What was done to it.
    """

    text: str
    said: list[str] = field(default_factory=list)


def alter_text(rng: random.Random, text: str) -> Altered:
    """Alter a text as crashes, editors and people do: cut, doubled, flipped, overwritten."""
    ways = ("cut", "flip", "drop", "double", "insert", "empty", "nul", "bom", "join")
    way = rng.choices(ways, (4, 6, 4, 4, 6, 1, 2, 1, 2))[0]
    at = rng.randrange(len(text) + 1)
    lines = text.splitlines(keepends=True)
    row = rng.randrange(max(len(lines), 1))
    if way == "cut":
        return Altered(text[:at], [f"cut after {at} characters"])
    if way == "flip" and text:
        at = min(at, len(text) - 1)
        other = chr((ord(text[at]) ^ (1 << rng.randrange(7))) % 0x250)
        return Altered(text[:at] + other + text[at + 1 :], [f"character {at} is {other!r} for {text[at]!r}"])
    if way in ("drop", "double", "join") and lines:
        kept = {"drop": [], "double": [lines[row]] * 2, "join": [lines[row].rstrip("\n")]}[way]
        return Altered("".join([*lines[:row], *kept, *lines[row + 1 :]]), [f"{way} line {row}"])
    if way == "insert":
        piece = rng.choice(
            ('"', "'", "[", "]", "{", "}", "=", "\\", "#", ",", "\t", "-", "1e999", "nan", "é", "\r", "\x07")
        )
        return Altered(text[:at] + piece + text[at:], [f"insert {piece!r} at {at}"])
    if way == "nul":
        return Altered(text[:at] + "\0" + text[at:], [f"a NUL at {at}"])
    if way == "bom":
        return Altered("\ufeff" + text, ["a byte order mark"])
    return Altered("", ["empty"])


HOSTILE: tuple[Any, ...] = (
    0, -1, 1, 2, 3, 7, 10**6, 10**12, 2**31, 2**63, 2**64, -(2**63), 10**400,
    0.0, -0.5, 0.3, 1.5, 1e-300, 1e30, 1e300, float("inf"), float("-inf"), float("nan"),
    True, False, "", " ", "0", "text", "1e3", "nan", "../..", "/", "/dev/null", "/dev/full", "a\0b", "é☃",
    "x" * 5000,     "<script>alert(1)</script>", "[bold]", "python:os:getcwd", "python:nowhere:f", None,
    [], [1], ["a"], {}, {"a": 1}, [[]], [None],
)  # fmt: skip
"""Values that somebody may put where another was."""


def hostile(rng: random.Random) -> Any:
    """One of ``HOSTILE``, or a number close to those that are in use."""
    if rng.random() < 0.25:
        return rng.choice(
            (rng.randint(-3, 9), rng.uniform(-2, 3), rng.choice(("gcn", "sage", "metis", "auto", "int4")))
        )
    return rng.choice(HOSTILE)


def alter_plain(rng: random.Random, value: Any) -> tuple[Any, str]:
    """Alter nested plain values, as JSON and TOML hold them, in one place.

    Returns:
        A copy, and what was done to it.
    """
    paths = list(_places(value, ()))
    path = rng.choice(paths)
    way = rng.choices(("replace", "remove", "add", "double"), (8, 2, 1, 1))[0]
    copy = json.loads(json.dumps(value))
    if not path:
        new = hostile(rng)
        return new, f"the whole is {_shown(new)}"
    inner = copy
    for key in path[:-1]:
        inner = inner[key]
    name, last = ".".join(map(str, path)), path[-1]
    if way == "remove":
        del inner[last]
        return copy, f"without {name}"
    if way == "add" and isinstance(inner, dict):
        inner[f"{last}{rng.choice(('', '_', '2', 'é'))}x"] = new = hostile(rng)
        return copy, f"beside {name} there is {_shown(new)}"
    if way == "double" and isinstance(inner, list):
        inner.append(inner[last])
        return copy, f"{name} twice"
    inner[last] = new = hostile(rng)
    return copy, f"{name} is {_shown(new)}"


def _places(value: Any, path: tuple[Any, ...]) -> Any:
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from _places(inner, (*path, key))


def _shown(value: Any) -> str:
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**30 else "10**400"
    return text if len(text) < 80 else f"{text[:60]}... ({len(text)} characters)"
