"""The benchmarks of what crosses between ranks run small and write the figures that they promise."""

from __future__ import annotations

import json
import platform
from pathlib import Path

import warm

WIRE = Path(__file__).parents[1] / "benchmarks" / "wire"


def test_coding_is_timed_beside_plain_and_a_copy(tmp_path: Path) -> None:
    done = warm.run(WIRE / "coding.py", "--smoke", "--out", tmp_path, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads((tmp_path / "results_coding.json").read_text())
    rows = {row["what"]: row for row in told["rows"]}
    coded = {f"{verb}, {few} bits" for verb in ("encode", "decode") for few in (1, 2, 4, 8)}
    assert set(rows) == coded | {"copy", "read", "write", "cast to bf16", "cast from bf16"}
    for what, row in rows.items():
        assert set(row["seconds"]) == ({"loops", "plain"} if what in coded else {"torch"})
        for taken in row["seconds"].values():
            assert len(taken) == told["facts"]["turns"] == 2
            assert min(taken) > 0
        assert (row["floor"] is not None) == (what in coded)
    assert rows["encode, 1 bits"]["bytes"] == 90 * 20 * 4 + 90 * 6 + 12 * 20
    table = (tmp_path / "results_coding.md").read_text()
    assert all(f"| {what} |" in table for what in (*rows, "encode, 1 bits and decode, 1 bits"))
    assert platform.node() not in table
