"""The figures that Kagome shows first, of another commit and of this one, by turns, with rivals beside.

Run: python benchmarks/before_after/headline.py --before CHECKOUT    (resumes where it stopped; see README.md)
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
# What runs in this process prepares graphs: with this checkout's code, wherever another is installed.
sys.path.insert(0, str(ROOT / "src"))

import headline_rows as rows  # noqa: E402
from headline_table import Line, missing, same_training, table  # noqa: E402

Kept = dict[str, dict[str, dict[int, dict[str, Any]]]]
"""What each run found: by row, by job, by turn."""


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path, required=True, help="a checkout of the other commit")
    parser.add_argument("--rows", nargs="+", choices=list(rows.ROWS), default=list(rows.ROWS))
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("KAGOME_DATA", "data")))
    parser.add_argument("--runs", type=Path, default=HERE / "runs" / "headline")
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument("--fresh", action="store_true", help="throw away what was run before")
    parser.add_argument("--smoke", action="store_true", help="tiny graphs, to see that it works")
    options = parser.parse_args()
    for name in ("before", "data", "runs", "out"):
        setattr(options, name, getattr(options, name).resolve())
    return options


def source_of(checkout: Path) -> str:
    """What tells one state of a checkout's ``src`` from another: git's hash, and one of later changes."""

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", str(checkout), *words], capture_output=True, text=True, check=True
        ).stdout

    changed = git("diff", "HEAD", "--", "src") + git("ls-files", "-o", "--exclude-standard", "--", "src")
    mark = f"+{hashlib.sha256(changed.encode()).hexdigest()[:8]}" if changed else ""
    return git("rev-parse", "HEAD:src").strip()[:12] + mark


def own_code(checkout: Path) -> None:
    """Check that a process with a checkout's variables runs that checkout's code.

    Raises:
        SystemExit: If an installed Kagome comes before it.
    """
    command = [sys.executable, "-c", "import kagome; print(kagome.__file__)"]
    env = rows.environment(checkout)
    found = subprocess.run(
        command, env=env, cwd="/", capture_output=True, text=True, check=True
    ).stdout.strip()
    if not Path(found).is_relative_to(checkout / "src"):
        raise SystemExit(f"a process of {checkout} runs the code of {found}")


def facts(place: rows.Place) -> dict[str, Any]:
    """What all runs of a table have in common; runs with anything else must not be in it."""
    versions = {}
    for name in ("torch", "torch_geometric", "dgl", "torchgpipe"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "not installed"
    return {
        "sources": {side: source_of(checkout) for side, checkout in place.checkouts.items()},
        "versions": versions,
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "sizes": asdict(place.sizes),
    }


def kept_before(path: Path, now: Mapping[str, Any], *, fresh: bool) -> Kept:
    """What was run before with the same sources, versions and sizes.

    Raises:
        SystemExit: If it was run with others.
    """
    if fresh or not path.exists():
        return {}
    told = json.loads(path.read_text())
    if told["facts"] != now:
        other = [name for name in now if told["facts"].get(name) != now[name]]
        raise SystemExit(f"{path} is of other {' and '.join(other)}: give --fresh, or another --out")
    return {
        row: {job: {int(turn): one for turn, one in turns.items()} for job, turns in jobs.items()}
        for row, jobs in told["runs"].items()
    }


def once(job: rows.Job, place: rows.Place) -> dict[str, Any]:
    """What a job finds; a rival that cannot run says why."""
    if not job.needs:
        return {**job.run(place), "at": round(time.time())}
    if find_spec(job.needs) is None:
        return {"error": "not installed"}
    try:
        return {**job.run(place), "at": round(time.time())}
    except SystemExit as error:
        return {"error": (str(error).strip().splitlines() or ["failed"])[-1]}


class Headline:
    """Rows taken by turns, and kept after each run.

    Args:
        options: Of the command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        checkouts = {"before": options.before, "now": ROOT}
        for checkout in checkouts.values():
            own_code(checkout)
        # A folder for each state of the sources: no cache of another state is read.
        folders = {side: options.runs / f"{side}-{source_of(each)}" for side, each in checkouts.items()}
        sizes = rows.SMOKE if options.smoke else rows.Sizes()
        self.place = rows.Place(checkouts, folders, options.runs / "data", sizes)
        for folder in (*folders.values(), options.out):
            folder.mkdir(parents=True, exist_ok=True)
        self.facts = facts(self.place)
        self.path = options.out / "results_headline.json"
        self.kept = kept_before(self.path, self.facts, fresh=options.fresh)

    def run(self) -> list[str]:
        """Run what is missing of the rows that are wanted; return what went wrong, a row that failed each."""
        self._prepare()
        faults = []
        for name in self.options.rows:
            try:
                self._row(name)
            # A row that fails leaves the others to be measured: a quiet machine does not come again soon.
            except (SystemExit, subprocess.CalledProcessError) as error:
                faults.append(f"{name}: {error}")
                print(f"FAILED {faults[-1]}", flush=True)
        return faults

    def _row(self, name: str) -> None:
        row, found = rows.ROWS[name](), self.kept.setdefault(name, {})
        left = missing(list(row.jobs), found, self.options.turns)
        warm = [job for job in row.jobs if row.jobs[job].warm and any(job == each for _, each in left)]
        # A smoke run tells no time and no memory, and so compiles where it measures.
        for job in () if self.options.smoke else warm:
            print(f"{name}: {job}, not counted", flush=True)
            row.jobs[job].run(self.place)
        for turn, job in left:
            one = once(row.jobs[job], self.place)
            found.setdefault(job, {})[turn] = one
            print(f"{name}, turn {turn}: {job}: {one}", flush=True)
            self.write()

    def _prepare(self) -> None:
        """Copy Cora, and make the graph that both sides read."""
        if "start" in self.options.rows:
            # A copy: what is made of the raw files may be written beside them.
            part = Path("planetoid", "Cora", "raw")
            shutil.copytree(self.options.data / part, self.place.data / part, dirs_exist_ok=True)
        if {"memory", "pipeline"} & set(self.options.rows):
            import graphs

            graphs.load(self.place.sizes.graph, None, rows.GRAPHS)

    def write(self) -> None:
        """Both files of results."""
        told = {"facts": self.facts, "runs": self.kept}
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(told, indent=1) + "\n")
        part.replace(self.path)
        (self.options.out / "results_headline.md").write_text(self.text())

    def text(self) -> str:
        """The table of all rows that were run, and what is to be known of it."""
        sources, versions = self.facts["sources"], self.facts["versions"]
        notes = [f"{name} {number}" for name, number in versions.items()]
        parts = [
            f"Medians (least to most). Ratios are of the same turn. Before: `src` {sources['before']}, now: "
            f"{sources['now']}. {', '.join(notes)}; {self.facts['machine']}.\n"
        ]
        for name in rows.ROWS:
            if name in self.kept:
                lines: list[Line] = list(rows.ROWS[name]().lines)
                parts += [f"## {name.capitalize()}\n", table(lines, self.kept[name])]
                parts += [same_training(lines, self.kept[name])]
        return "\n".join(part for part in parts if part)


def main() -> None:
    """Run the rows and print the table."""
    options = parsed()
    # Each start would compile all of Kagome's source without bytecode.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    if not options.smoke:
        total = 0.0
        for name in options.rows:
            row = rows.ROWS[name]()
            seconds = row.once + options.turns * row.turn
            total += seconds
            print(f"{name}: about {seconds / 60:.0f} minutes on a quiet machine of two cores", flush=True)
        print(f"together: about {total / 60:.0f} minutes", flush=True)
    headline = Headline(options)
    faults = headline.run()
    headline.write()
    print(headline.text())
    if faults:
        raise SystemExit("\n".join(faults))


if __name__ == "__main__":
    main()
