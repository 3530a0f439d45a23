"""The table ``benchmarks/exactness/README.md``: every case of every kind on every mesh.

Run as ``python -m tests.kinds.table [--kinds places ...]``. It goes on where it stopped: a case that is
in ``benchmarks/exactness/results/KIND.jsonl`` is not run again, unless it is named with ``--again``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))  # as pytest does

import torch

from compare import KINDS, MESHES, cases_of, expected, meshes_of, verdict
from pool import Pool

FOLDER = Path(__file__).parents[2] / "benchmarks" / "exactness"
BEGIN, END = "<!-- figures begin -->", "<!-- figures end -->"


def kept(kind: str) -> dict[tuple[str, str], dict[str, Any]]:
    """The rows of a kind that were run before."""
    path = FOLDER / "results" / f"{kind}.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    rows = [json.loads(line) for line in lines]
    return {(row["case"], row["mesh"]): row for row in rows}


def keep(kind: str, rows: dict[tuple[str, str], dict[str, Any]]) -> None:
    """Write the rows of a kind."""
    path = FOLDER / "results" / f"{kind}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(row) + "\n" for row in rows.values())
    # Errors name files of the checkout.
    path.write_text(lines.replace(f"{FOLDER.parents[1]}/", ""), encoding="utf-8")


def run(kind: str, pool: Pool, again: str | None) -> None:
    """Run what is missing of a kind."""
    cases, rows = cases_of(kind), kept(kind)
    rows = {key: row for key, row in rows.items() if key[0] in cases and key[1] in meshes_of(cases[key[0]])}
    for name, case in cases.items():
        left = [
            mesh
            for mesh in meshes_of(case)
            if (name, mesh) not in rows or again in (name, "all", rows[name, mesh]["verdict"])
        ]
        if not left:
            continue
        whole = expected(kind, name)
        for mesh in left:
            found = verdict(pool.run, kind, name, mesh, whole)
            rows[name, mesh] = {"case": name, "mesh": mesh, "verdict": found.word, "text": found.text}
            print(f"{kind}: {name}: {mesh}: {found.word}: {found.text[:300]}", flush=True)
        keep(kind, rows)
    keep(kind, rows)


def summary() -> str:
    """A row a kind: on each mesh, how many cases are equal and how many are refused."""
    lines = [
        f"| kind | cases | {' | '.join(MESHES)} | faults |",
        f"|---|---|{'---|' * len(MESHES)}---|",
    ]
    for kind, title in KINDS.items():
        rows = kept(kind)
        counts = {
            mesh: Counter(row["verdict"] for key, row in rows.items() if key[1] == mesh) for mesh in MESHES
        }
        cells = [f"{counts[mesh]['equal']} equal, {counts[mesh]['refused']} refused" for mesh in MESHES]
        faults = sum(count["fault"] for count in counts.values())
        lines.append(f"| {title} | {len({case for case, _ in rows})} | {' | '.join(cells)} | {faults} |")
    return "\n".join(lines)


def write() -> None:
    """Write the figures into the page."""
    path = FOLDER / "README.md"
    text = path.read_text(encoding="utf-8")
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    path.write_text(f"{before}{BEGIN}\n\n{summary()}\n\n{END}{after}", encoding="utf-8")


def main() -> int:
    """Run every case that is missing and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", nargs="+", choices=sorted(KINDS), default=list(KINDS))
    parser.add_argument("--again", help="a case, a verdict or 'all': run it again")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    pool = Pool()
    try:
        for kind in arguments.kinds:
            run(kind, pool, arguments.again)
    finally:
        pool.close()
    write()
    faults = [row for kind in KINDS for row in kept(kind).values() if row["verdict"] == "fault"]
    print(f"{len(faults)} faults")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
