"""Which variants ``make test`` runs, in which order, and when leaving out tests fails a run."""

from __future__ import annotations

import re
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
    stash: pytest.Stash = field(default_factory=pytest.Stash)

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return self.marks.get(name)


def chosen(
    monkeypatch: pytest.MonkeyPatch, items: list[Item], seconds: dict[str, float], until: float | None = None
) -> list[Item]:
    monkeypatch.setattr(costs, "known", lambda: seconds)
    config: Any = SimpleNamespace(
        args=[],
        getoption={"--all-tests": False, "--until": until}.get,
        hook=SimpleNamespace(pytest_deselected=lambda items: None),
    )
    given: Any = list(items)
    shorter.pytest_collection_modifyitems(config, given)
    return list(given)


def variants(count: int, **rest: Any) -> list[Item]:
    return [Item(f"a.py::test[{number}]", **rest) for number in range(count)]


def names(items: list[Item]) -> list[str]:
    return [item.nodeid for item in items]


RANKS = {"fixturenames": ("ranks",)}
SOME = {"marks": {"some": pytest.mark.some(3).mark}}
EVERY = {"marks": {"every": pytest.mark.every.mark}}


@pytest.mark.parametrize(
    ("rest", "count"),
    [({}, 20), (RANKS, 1), (RANKS | EVERY, 20), (EVERY, 20), (SOME, 3), (RANKS | SOME, 3)],
)
def test_variants_are_as_many_as_the_mark_says(
    monkeypatch: pytest.MonkeyPatch, rest: dict[str, Any], count: int
) -> None:
    found = names(chosen(monkeypatch, variants(20, **rest), {"a.py::test": 100.0}))
    assert len(found) == count
    assert found == names(chosen(monkeypatch, variants(20, **rest), {}))
    limited = names(chosen(monkeypatch, variants(20, **rest), {"a.py::test": 100.0}, until=0.0))
    assert sorted(limited) == sorted(found)  # a limit of time changes their order alone


@pytest.mark.parametrize(("seconds", "first"), [(None, 20), (0.5, 12), (2.5, 2), (100.0, 1)])
def test_variants_beyond_the_budget_come_last_and_are_spare(
    monkeypatch: pytest.MonkeyPatch, seconds: float | None, first: int
) -> None:
    known = {"b.py::dear": 200.0} | ({} if seconds is None else {"a.py::test": seconds})
    found = chosen(monkeypatch, [*variants(20), Item("b.py::dear")], known, until=0.0)
    spare = [item.stash.get(shorter._spare, False) for item in found]
    assert spare == [False] * (first + 1) + [True] * (20 - first)
    assert found[first].nodeid == "b.py::dear"


@pytest.mark.parametrize(("spare", "why"), [(True, shorter.SPARE), (False, shorter.LATE)])
def test_what_would_begin_late_is_skipped_and_says_why(spare: bool, why: str) -> None:
    item: Any = SimpleNamespace(config=SimpleNamespace(getoption={"--until": 1.0}.get), stash=pytest.Stash())
    item.stash[shorter._spare] = spare
    with pytest.raises(pytest.skip.Exception, match=re.escape(why)):
        shorter.pytest_runtest_setup(item)


@pytest.mark.parametrize(
    ("late", "spare", "fails"), [(10, 0, False), (11, 0, True), (10, 90, False), (11, 90, True)]
)
def test_a_run_that_leaves_out_more_than_a_tenth_fails(late: int, spare: int, fails: bool) -> None:
    """Of 100 tests; spare variants are neither counted nor counted among."""
    skipped = [SimpleNamespace(longrepr=why) for why in (*[shorter.LATE] * late, *[shorter.SPARE] * spare)]
    stats = {"passed": [object()] * (100 - late), "skipped": skipped}
    manager = SimpleNamespace(get_plugin=lambda name: SimpleNamespace(stats=stats))
    session: Any = SimpleNamespace(config=SimpleNamespace(pluginmanager=manager), exitstatus=0)
    shorter.pytest_sessionfinish(session)
    assert bool(session.exitstatus) == fails


def test_a_slow_variant_is_left_out_and_takes_no_others_place(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = [
        Item(f"a.py::test[slow {number}]", {"slow": pytest.mark.slow.mark}, ("ranks",)) for number in range(9)
    ]
    assert names(chosen(monkeypatch, [*slow, *variants(1, **RANKS)], {})) == ["a.py::test[0]"]


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
