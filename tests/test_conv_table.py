"""The committed page of convolutions says what the registry says, and a difference would show in it."""

from __future__ import annotations

import re

import torch_geometric.nn.conv as pyg_conv

from conv_table import DIFFERENT, EXACT, PATH, expected_verdicts, table, tried
from convolutions import CASES

BUILT = [case for case in CASES if case.build is not None]


def rows_of(page: str) -> dict[str, list[str]]:
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if "|" in line
    ]
    return {row[0]: row[1:] for row in cells[2:]}


def test_the_committed_page_is_what_the_registry_gives() -> None:
    rows = rows_of(PATH.read_text(encoding="utf-8"))
    assert sorted(rows) == sorted(pyg_conv.__all__)
    assert {name: row[1] for name, row in rows.items()} == expected_verdicts()
    for name, row in rows.items():
        assert row[0] == tried(name), name
        assert re.fullmatch(r"\de[+-]\d+" if row[0] else "", row[2]), name


def test_the_committed_counts_are_those_of_its_rows() -> None:
    page = PATH.read_text(encoding="utf-8")
    exact = sum(row[1] == EXACT for row in rows_of(page).values())
    assert f"{exact} of {len(pyg_conv.__all__)} classes are exact" in page
    assert f"{len(BUILT)} variants were run" in page


def test_a_variant_that_differs_is_named() -> None:
    errors = dict.fromkeys(BUILT, 1e-16)
    bad = next(case for case in BUILT if case.name == "GATConv" and case.variant == "residual")
    for error in (1e-3, float("nan")):
        page = table({**errors, bad: error})
        assert rows_of(page)["GATConv"][1] == f"{DIFFERENT}: residual"
        assert "1 are not" in page
    assert rows_of(table(errors))["GATConv"][1] == EXACT
