"""The benchmarks of what crosses between ranks run small and write the figures that they promise."""

from __future__ import annotations

import json
import platform
from pathlib import Path

import pytest
import torch

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


def test_a_delay_is_measured_where_nothing_is_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a delay steps are those of Adam given each gradient one step later, and the first twice."""
    monkeypatch.syspath_prepend(str(WIRE))
    import delay

    def walked(kind: type[torch.optim.Optimizer], *gradients: float) -> list[float]:
        weight = torch.nn.Parameter(torch.tensor([1.0]))
        optimizer, places = kind([weight], lr=0.5), []
        for gradient in gradients:
            weight.grad = torch.tensor([gradient])
            optimizer.step()
            places.append(weight.item())
        return places

    assert walked(delay.Delayed, 1.0, -4.0, 9.0) == walked(torch.optim.Adam, 1.0, 1.0, -4.0)
    assert walked(delay.Delayed, 1.0, -4.0, 9.0) != walked(torch.optim.Adam, 1.0, -4.0, 9.0)
    kept = {
        f"made/gcn/0.01/{kind}/{seed}": {"test": test + 0.01 * seed, "loss": loss}
        for kind, test, loss in (("own", 0.5, 1.0), ("delayed", 0.4, 1.5))
        for seed in range(3)
    }
    assert "| made | gcn | 0.01 | 3 | 51.00 | **-10.00 (-10.00 to -10.00)** | 1.000 | 1.500 |" in delay.table(
        kept
    )


def test_sheets_are_told_beside_the_wire_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(WIRE))
    import sheets

    rows = [{"codec": "onebit", "rate": 200.0, "bytes": 1e6, "one": [0.06, 0.05, 0.07], "several": [0.05]}]
    told = sheets.table(sheets.Options(), rows)
    line = "| onebit | 1.00 | 200 | 40.0 | 60.0 (50.0 to 70.0) | 50.0 (50.0 to 50.0) | 1.20 times |"
    assert line in told
