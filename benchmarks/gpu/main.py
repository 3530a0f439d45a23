"""Does Kagome hold and pay on a GPU? Checks first, then figures, each step on its own and within a budget.

Run as ``make gpu``, or ``python benchmarks/gpu/main.py --out FOLDER [STEP ...]``; see README.md.

::

    FOLDER/results.jsonl    a line for each result, as soon as it is there; a step that is done is skipped
    FOLDER/results.md       the same as a table, written at the end of each step, and printed last
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests" / "support"), str(HERE)]

Row = dict[str, object]
STEPS: dict[str, str] = {
    "machine": "machine:machine",
    "kernels": "checks:kernels",
    "large": "checks:large",
    "draws": "checks:draws",
    "curves": "checks:curves",
    "convolutions": "checks:convolutions",
    "odd_models": "checks:odd_models",
    "strategies": "ranks:strategies",
    "waits": "waits:waits",
    "ceilings": "epochs:ceilings",
    "kernel_speed": "kernels:rows",
    "epochs": "epochs:epochs",
    "large_epochs": "epochs:large_epochs",
    "profile": "epochs:profile",
    "compiled_epochs": "epochs:compiled_epochs",
}
"""Each step's generator, as ``module:function``, from what is cheap and tells most to what takes long."""


@dataclass(frozen=True)
class Visit:
    """What a step may use.

    Args:
        out: Folder for files of a step's own.
        small: Sizes for a machine without a GPU.
        limit: Seconds from the start of the process after which no step begins anything new.
        begun: When the process started, of ``time.monotonic``.
    """

    out: Path
    small: bool
    limit: float
    begun: float

    def left(self) -> float:
        """Seconds until the limit."""
        return self.limit - (time.monotonic() - self.begun)


def known(path: Path) -> list[Row]:
    """The results of earlier calls."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def run_step(name: str, visit: Visit, write: Callable[[Row], None]) -> None:
    """Run one step. A step that raises is written down, and its results until then are kept."""
    begun = time.monotonic()
    try:
        module, function = STEPS[name].split(":")
        steps: Callable[[Visit], Iterator[Row]] = getattr(import_module(module), function)
        for row in steps(visit):
            write({"step": name, **row})
            if visit.left() < 0:
                write({"step": name, "name": "(out of time)"})
                return
    except Exception as error:
        traceback.print_exc(limit=8)
        frames = [
            f"{f.filename.split('/')[-1]}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__)
        ]
        why = f"{type(error).__name__}: {str(error)[:300]} at {' > '.join(frames[-4:])}"
        write({"step": name, "name": "(failed)", "why": why})
        return
    write({"step": name, "name": "(done)", "seconds": round(time.monotonic() - begun, 1)})


def shown(value: object) -> str:
    """A value as a cell of the table."""
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "/")


def table(rows: list[Row]) -> str:
    """All results as a Markdown table."""
    lines = ["| step | name | result |", "|---|---|---|"]
    for row in rows:
        rest = ", ".join(f"{key} {shown(value)}" for key, value in row.items() if key not in ("step", "name"))
        lines.append(f"| {row['step']} | {row['name']} | {rest} |")
    return "\n".join(lines) + "\n"


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, default=HERE / "runs")
    parser.add_argument("--budget", type=float, default=540.0, help="seconds that the call may take")
    parser.add_argument("--small", action="store_true", help="sizes for a machine without a GPU")
    parser.add_argument(
        "steps", nargs="*", metavar="STEP", help=f"of {', '.join(STEPS)}; all if none is named"
    )
    chosen = parser.parse_args()
    if unknown := set(chosen.steps) - set(STEPS):
        parser.error(f"expected steps of {', '.join(STEPS)}; got {', '.join(sorted(unknown))}")
    return chosen


def main() -> None:
    """Run the steps that are not done yet, and print the table."""
    faulthandler.enable()
    chosen = arguments()
    chosen.out.mkdir(parents=True, exist_ok=True)
    path = chosen.out / "results.jsonl"
    visit = Visit(chosen.out, chosen.small, chosen.budget, time.monotonic())
    rows = known(path)
    done = {row["step"] for row in rows if row["name"] == "(done)"}

    def write(row: Row) -> None:
        rows.append(row)
        with path.open("a") as file:
            file.write(json.dumps(row, default=str) + "\n")
        print(
            "  ",
            row["name"],
            " ".join(f"{k}={shown(v)}" for k, v in row.items() if k not in ("step", "name")),
        )
        sys.stdout.flush()

    for name in chosen.steps or STEPS:
        if name in done or visit.left() < 15:
            print(f"== {name}: {'done before' if name in done else 'no time left'}", flush=True)
            continue
        print(f"== {name} ({time.monotonic() - visit.begun:.0f} s)", flush=True)
        run_step(name, visit, write)
        (chosen.out / "results.md").write_text(table(rows))
    print("\n" + table(rows))
    if any(row["name"] == "(failed)" or row.get("ok") is False for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
