"""Runner: many cases of a kind, kept as they come, so that a series goes on where it stopped.

Where it sits: ``python -m tests.fuzz`` and ``test_fuzz.py`` call it; ``harness`` runs each case.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import platform
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from .harness import FAULTS, OUTCOMES, Kind, Result, run_case

FOLDER = Path(__file__).parents[2] / "benchmarks" / "faults"
RESULTS, README = FOLDER / "results", FOLDER / "README.md"
BEGIN, END = "<!-- figures begin -->", "<!-- figures end -->"


def kinds() -> dict[str, Kind]:
    """All kinds of the files ``kind_*.py`` of this folder, by name."""
    found: dict[str, Kind] = {}
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        if module.name.startswith("kind_"):
            for kind in importlib.import_module(f".{module.name}", __package__).KINDS:
                assert kind.name not in found, f"two kinds are named {kind.name}"
                found[kind.name] = kind
    return found


def warm_up() -> None:
    """Import what cases need, so that processes forked of this one need not."""
    for name in (
        "kagome.train.trainer",
        "kagome.cli.check",
        "kagome.autoplan.plan",
        "kagome.model.zoo",
        "kagome.cli.app",
    ):
        importlib.import_module(name)


def run_many(
    kind: Kind, numbers: Iterable[int], seed: int, take: Callable[[Result], None], *, keep: bool = False
) -> None:
    """Run cases of a kind one after another.

    Args:
        kind: The kind.
        numbers: Of the cases.
        seed: Of the series.
        take: Called with each result.
        keep: Leave the cases' folders.
    """
    warm_up()
    shared = Path(tempfile.mkdtemp(prefix="kagome-fuzz-shared-"))
    before = os.environ.get("KAGOME_CACHE")
    os.environ["KAGOME_CACHE"] = str(shared / "cache")
    try:
        (shared / kind.name).mkdir()
        kind.prepare(shared / kind.name)
        for number in numbers:
            take(run_case(kind, seed, number, keep=keep))
    finally:
        os.environ.pop("KAGOME_CACHE")
        if before is not None:
            os.environ["KAGOME_CACHE"] = before
        shutil.rmtree(shared, ignore_errors=True)


def go_on(kind: Kind, cases: int, seed: int) -> list[Result]:
    """Run the cases of a series that were not run before; results are added to its file.

    Returns:
        All results of the series.
    """
    RESULTS.mkdir(parents=True, exist_ok=True)
    file = RESULTS / f"{kind.name}-{seed}.jsonl"
    before = read(file)
    numbers = [number for number in range(cases) if number not in {result.case for result in before}]
    counts = Counter(result.outcome for result in before)
    with file.open("a", encoding="utf-8") as lines:

        def take(result: Result) -> None:
            lines.write(result.line() + "\n")
            lines.flush()
            before.append(result)
            counts[result.outcome] += 1
            if result.outcome in FAULTS:
                print(
                    f"\n{result.outcome}: {kind.name} {result.case}: {result.what}\n{result.said}", flush=True
                )
            elif len(before) % 50 == 0:
                print(f"{kind.name}: {len(before)} of {cases}: {dict(counts)}", flush=True)

        run_many(kind, numbers, seed, take)
    return before


def read(file: Path) -> list[Result]:
    """The results of a file, sorted by case; none if it is not there."""
    if not file.exists():
        return []
    found = [Result(**json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines()]
    return sorted(found, key=lambda result: result.case)


def machine() -> str:
    """What this machine is."""
    import torch

    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return (
        f"{os.cpu_count()} cores ({platform.machine()}), {pages / 2**30:.0f} GiB, "
        f"Python {platform.python_version()}, torch {torch.__version__}"
    )


def table(results: Mapping[str, Sequence[Result]]) -> str:
    """A row a series: how many cases ended how."""
    rows = [f"| kind | cases | {' | '.join(OUTCOMES)} |", f"|---|---|{'---|' * len(OUTCOMES)}"]
    for name, found in sorted(results.items()):
        counts = Counter(result.outcome for result in found)
        rows.append(f"| {name} | {len(found):,} | {' | '.join(f'{counts[one]:,}' for one in OUTCOMES)} |")
    return "\n".join(rows)


def write_table() -> None:
    """Write the figures of all results into the README of ``benchmarks/faults``."""
    found = {file.stem: read(file) for file in sorted(RESULTS.glob("*.jsonl"))}
    text = README.read_text(encoding="utf-8")
    made = f"{BEGIN}\n\nMachine of the last run: {machine()}.\n\n{table(found)}\n\n{END}"
    README.write_text(
        re.sub(f"{re.escape(BEGIN)}.*{re.escape(END)}", lambda _: made, text, flags=re.DOTALL),
        encoding="utf-8",
    )


def main(options: Sequence[str] | None = None) -> None:
    """The command line; see ``--help``."""
    import argparse

    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--kind", nargs="*", default=None, help=f"of {', '.join(kinds())}; all by default")
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fresh", action="store_true", help="forget the results of this series first")
    parser.add_argument("--again", action="store_true", help="run those cases again that ended in a fault")
    parser.add_argument(
        "--case", type=int, nargs="*", help="run these alone, keep their folders, record nothing"
    )
    parser.add_argument("--table", action="store_true", help="only write the figures into the README")
    asked = parser.parse_args(options)
    known = kinds()
    for name in known if asked.kind is None else asked.kind:
        if asked.table:
            break
        if asked.case is not None:
            show = lambda result: print(f"{result.outcome}: {result.what}\n{result.said}\n", flush=True)  # noqa: E731
            run_many(known[name], asked.case, asked.seed, show, keep=True)
            continue
        file = RESULTS / f"{name}-{asked.seed}.jsonl"
        if asked.fresh:
            file.unlink(missing_ok=True)
        elif asked.again and file.exists():
            kept = [result for result in read(file) if result.outcome not in FAULTS]
            file.write_text("".join(result.line() + "\n" for result in kept), encoding="utf-8")
        found = go_on(known[name], asked.cases, asked.seed)
        print(table({f"{name}-{asked.seed}": found}))
    if asked.case is None:
        write_table()
    sys.stdout.flush()
