"""Which variants ``make test`` runs: what marks and costs let, and one of each test that is not slow."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

import costs
import shorter


@dataclass(frozen=True)
class Item:
    """What the choice asks of a test."""

    nodeid: str
    marks: dict[str, pytest.Mark] = field(default_factory=dict)
    fixturenames: tuple[str, ...] = ()

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return self.marks.get(name)


def chosen(monkeypatch: pytest.MonkeyPatch, items: list[Item], seconds: dict[str, float]) -> list[str]:
    monkeypatch.setattr(costs, "known", lambda: seconds)
    config: Any = SimpleNamespace(
        args=[],
        getoption=lambda name: None,
        hook=SimpleNamespace(pytest_deselected=lambda items: None),
    )
    given: Any = list(items)
    shorter.pytest_collection_modifyitems(config, given)
    return [item.nodeid for item in given]


def variants(count: int, **rest: Any) -> list[Item]:
    return [Item(f"a.py::test[{number}]", **rest) for number in range(count)]


RANKS = {"fixturenames": ("ranks",)}
SOME = {"marks": {"some": pytest.mark.some(3).mark}}
EVERY = {"marks": {"every": pytest.mark.every.mark}}


@pytest.mark.parametrize(
    ("rest", "seconds", "count"),
    [
        ({}, None, 20),
        ({}, 0.5, 12),
        ({}, 100.0, 1),
        (RANKS, None, 1),
        (RANKS | EVERY, 100.0, 20),
        (EVERY, None, 20),
        (SOME, None, 3),
        (SOME, 0.5, 3),
        (RANKS | SOME, 2.5, 2),
    ],
)
def test_variants_are_as_many_as_the_mark_and_the_cost_let(
    monkeypatch: pytest.MonkeyPatch, rest: dict[str, Any], seconds: float | None, count: int
) -> None:
    known = {} if seconds is None else {"a.py::test": seconds}
    found = chosen(monkeypatch, variants(20, **rest), known)
    assert len(found) == count
    assert found == chosen(monkeypatch, variants(20, **rest), known)


def test_a_slow_variant_is_left_out_and_takes_no_others_place(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = [
        Item(f"a.py::test[slow {number}]", {"slow": pytest.mark.slow.mark}, ("ranks",)) for number in range(9)
    ]
    assert chosen(monkeypatch, [*slow, *variants(1, **RANKS)], {}) == ["a.py::test[0]"]


def test_costs_are_means_over_variants_and_what_did_not_run_is_known_from_before() -> None:
    log = """
2.00s call     tests/a.py::test_one[x]
1.00s setup    tests/a.py::test_one[x]
3.00s call     tests/a.py::test_one[a b]
0.20s call     tests/a.py::test_small
0.01s setup    tests/a.py::test_that_was_skipped
"""
    before = {"tests/a.py::test_that_was_skipped": 7.0, "tests/a.py::test_one": 9.0}
    assert costs.written(log, before) == {
        "tests/a.py::test_one": 3.0,
        "tests/a.py::test_that_was_skipped": 7.0,
    }
