"""Shorter: which tests `make test` leaves to `make test-all`.

Where it sits: a plugin of ``conftest``. Two marks choose::

    @pytest.mark.slow        left out: a sibling proves the same sooner
    @pytest.mark.some(3)     of all its variants three run, drawn by their names
    @pytest.mark.some(3, each="kind")    three of each value of that parameter
    @pytest.mark.every       all of its variants run, though it is a test on ranks

Of a test on ranks (one with the fixture ``ranks`` or ``pool``) without a mark, one variant of each test runs.
Whatever the marks but ``every``, no test runs more variants than ``BUDGET`` seconds let, by their costs
(``golden/costs.json``), and always one.

With ``--until TIME`` (seconds since 1970) tests run in the order of their costs, those marked ``every``
first. One that would begin later is skipped, with that reason. A run that skips more than a tenth of its
tests fails. ``.ci/run`` sets it, because its time is limited and machines differ by a factor of two.
``make test`` by itself has no such limit.

A test that is named on the command line (``file.py::test``) runs whatever its mark.
"""

from __future__ import annotations

import sys
import time
import zlib

import pytest

import costs

LATE = "the time for tests is over (--until)"
MOST = 0.1
"""Share of the tests that may be left out for want of time; a run that leaves out more fails."""
BUDGET = 6.0
"""Seconds that the variants of one test may take together, on the machine of the costs."""


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
        pytest.skip(f"{LATE}: `make test` runs it")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a run that left out more than a tenth of its tests for want of time."""
    terminal = session.config.pluginmanager.get_plugin("terminalreporter")
    stats = {} if terminal is None else terminal.stats
    late = sum(LATE in str(report.longrepr) for report in stats.get("skipped", []))
    done = sum(len(stats.get(outcome, [])) for outcome in ("passed", "failed", "skipped"))
    if late > MOST * done:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--all-tests") or any("::" in arg for arg in config.args):
        return
    seconds = costs.known()
    variants: dict[tuple[str, object], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("every") is None:
            some = item.get_closest_marker("some")
            each = item.callspec.params[some.kwargs["each"]] if some and "each" in some.kwargs else None
            variants.setdefault((_name(item), each), []).append(item)
    left = {id(item) for item in items if item.get_closest_marker("slow")}
    for group in variants.values():
        drawn = sorted((each for each in group if id(each) not in left), key=_draw)
        left.update(id(each) for each in drawn[_most(group[0], seconds) :])
    config.hook.pytest_deselected(items=[item for item in items if id(item) in left])
    items[:] = [item for item in items if id(item) not in left]
    if config.getoption("--until") is not None:
        items.sort(key=lambda item: _order(item, seconds))


def _draw(item: pytest.Item) -> int:
    """A number by which variants are drawn: the same in each run."""
    return zlib.crc32(item.nodeid.encode())


def _name(item: pytest.Item) -> str:
    """A test's path and name without its variant."""
    return item.nodeid.partition("[")[0]


def _most(item: pytest.Item, seconds: dict[str, float]) -> int:
    """How many variants of a test run: as its mark says, and no more than its budget lets."""
    some = item.get_closest_marker("some")
    cost = seconds.get(_name(item))
    limits = [*(some.args if some is not None else ()), *([1] if some is None and _on_ranks(item) else ())]
    if cost is not None:
        limits.append(max(1, int(BUDGET / cost)))
    return min(limits, default=sys.maxsize)


def _order(item: pytest.Item, seconds: dict[str, float]) -> float:
    """Return -1 for a test that must run, else its seconds, 0 if they are not known."""
    return -1 if item.get_closest_marker("every") is not None else seconds.get(_name(item), 0)


def _on_ranks(item: pytest.Item) -> bool:
    """Whether a test runs on the pool's ranks."""
    fixtures = getattr(item, "fixturenames", ())
    return "ranks" in fixtures or "pool" in fixtures
