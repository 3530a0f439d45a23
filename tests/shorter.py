"""Shorter: which tests `make test` leaves to `make test-all`.

Where it sits: a plugin of ``conftest``. Two marks choose::

    @pytest.mark.slow        left out: a sibling proves the same sooner
    @pytest.mark.some(3)     of all its variants three run, drawn by their names
    @pytest.mark.some(3, each="kind")    three of each value of that parameter
    @pytest.mark.every       all of its variants run, though it is a test on ranks

Of a test on ranks (one with the fixture ``ranks`` or ``pool``) without a mark, one variant of each test runs.

With ``--until TIME`` (seconds since 1970) tests run in the order of their costs (``golden/costs.json``),
those marked ``every`` first. One that would begin later is skipped, with that reason. A run that skips more
than a tenth of its tests fails. Variants of a test that take more than ``BUDGET`` seconds together run last,
and may be skipped without a count: others of the same test have run. ``.ci/run`` sets the time, because its
own is limited and machines differ by a factor of two. ``make test`` by itself has no such limit.

A test that is named on the command line (``file.py::test``) runs whatever its mark.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterable

import pytest

import costs

LATE = "the time for tests is over (--until)"
SPARE = "other variants of this test have run, and the time is over"
MOST = 0.1
"""Share of the tests that may be left out for want of time; a run that leaves out more fails."""
BUDGET = 6.0
"""Seconds of one test's variants, on the machine of the costs, after which its others run last."""
_spare = pytest.StashKey[bool]()
"""Whether a test is such a variant."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-tests", action="store_true", help="run those marked slow or some, too")
    parser.addoption("--until", type=float, help="skip tests that would begin later: seconds since 1970")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: runs in `make test-all` alone")
    config.addinivalue_line("markers", "every: all of its variants run in `make test`, too")
    config.addinivalue_line("markers", "some(count, each): of its variants so many run in `make test`")


def pytest_runtest_setup(item: pytest.Item) -> None:
    until = item.config.getoption("--until")
    if until is not None and time.time() > until:
        pytest.skip(f"{SPARE if item.stash.get(_spare, False) else LATE}: `make test` runs it")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a run that left out more than a tenth of its tests for want of time."""
    terminal = session.config.pluginmanager.get_plugin("terminalreporter")
    stats = {} if terminal is None else terminal.stats
    skipped = [str(report.longrepr) for report in stats.get("skipped", [])]
    late = sum(LATE in why for why in skipped)
    counted = sum(len(stats.get(outcome, [])) for outcome in ("passed", "failed", "skipped"))
    if late > MOST * (counted - sum(SPARE in why for why in skipped)):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--all-tests") or any("::" in arg for arg in config.args):
        return
    left = {id(item) for item in items if item.get_closest_marker("slow")}
    for variants in _grouped(item for item in items if id(item) not in left):
        mark = variants[0].get_closest_marker("some")
        if mark is not None or _on_ranks(variants[0]):
            left.update(id(item) for item in variants[1 if mark is None else mark.args[0] :])
    config.hook.pytest_deselected(items=[item for item in items if id(item) in left])
    items[:] = [item for item in items if id(item) not in left]
    if config.getoption("--until") is not None:
        _order(items, costs.known())


def _grouped(items: Iterable[pytest.Item]) -> list[list[pytest.Item]]:
    """The variants of each test, or of each value that ``some`` names, in an order drawn by their names.

    Tests marked ``every`` are in no group.
    """
    groups: dict[tuple[str, object], list[pytest.Item]] = {}
    for item in sorted(items, key=lambda item: zlib.crc32(item.nodeid.encode())):
        if item.get_closest_marker("every") is None:
            some = item.get_closest_marker("some")
            each = item.callspec.params[some.kwargs["each"]] if some and "each" in some.kwargs else None
            groups.setdefault((_name(item), each), []).append(item)
    return list(groups.values())


def _order(items: list[pytest.Item], seconds: dict[str, float]) -> None:
    """Put tests that must run first, then the others by their costs, and spare variants last."""
    for variants in _grouped(items):
        cost = seconds.get(_name(variants[0]))
        for item in variants[len(variants) if cost is None else max(1, int(BUDGET / cost)) :]:
            item.stash[_spare] = True

    def place(item: pytest.Item) -> tuple[int, float]:
        first, last = item.get_closest_marker("every") is not None, item.stash.get(_spare, False)
        return (0 if first else 2 if last else 1), 0.0 if first else seconds.get(_name(item), 0.0)

    items.sort(key=place)


def _name(item: pytest.Item) -> str:
    """A test's path and name without its variant."""
    return item.nodeid.partition("[")[0]


def _on_ranks(item: pytest.Item) -> bool:
    """Whether a test runs on the pool's ranks."""
    fixtures = getattr(item, "fixturenames", ())
    return "ranks" in fixtures or "pool" in fixtures
