"""Shorter: which tests `make test` leaves to `make test-all`.

Where it sits: a plugin of ``conftest``. Two marks choose::

    @pytest.mark.slow        left out: a sibling proves the same sooner
    @pytest.mark.some(3)     of all its variants three run, drawn by their names
    @pytest.mark.some(3, each="kind")    three of each value of that parameter
    @pytest.mark.every       all of its variants run, though it is a test on ranks

Of a test on ranks (one with the fixture ``ranks`` or ``pool``) without a mark, one variant of each test runs.

With ``--until TIME`` (seconds since 1970) tests run in the order of their costs (``golden/costs.json``),
those marked ``every`` first. One that would begin later is skipped, with that reason. A run that skips
more than a tenth of its tests fails. ``.ci/run`` sets it, because its time is limited and machines differ
by a factor of two. ``make test`` by itself has no such limit.

A test that is named on the command line (``file.py::test``) runs whatever its mark.
"""

from __future__ import annotations

import json
import time
import zlib

import pytest

import costs

LATE = "the time for tests is over (--until)"
MOST = 0.1
"""Share of the tests that may be left out for want of time; a run that leaves out more fails."""


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
    variants: dict[tuple[str, object], list[pytest.Item]] = {}
    for item in items:
        some = item.get_closest_marker("some")
        if some is not None or _on_ranks(item):
            value = item.callspec.params[some.kwargs["each"]] if some and "each" in some.kwargs else None
            variants.setdefault((item.nodeid.partition("[")[0], value), []).append(item)
    left = {id(item) for item in items if item.get_closest_marker("slow")}
    for each in variants.values():
        mark = each[0].get_closest_marker("some")
        drawn = sorted(each, key=lambda item: zlib.crc32(item.nodeid.encode()))
        left.update(id(item) for item in drawn[1 if mark is None else mark.args[0] :])
    config.hook.pytest_deselected(items=[item for item in items if id(item) in left])
    items[:] = [item for item in items if id(item) not in left]
    if config.getoption("--until") is not None:
        seconds = json.loads(costs.FILE.read_text())
        items.sort(key=lambda item: _order(item, seconds))


def _order(item: pytest.Item, seconds: dict[str, int]) -> float:
    """Return -1 for a test that must run, 0 for one that costs little, else its seconds."""
    first = item.get_closest_marker("every") is not None
    return -1 if first else seconds.get(item.nodeid.partition("[")[0], 0)


def _on_ranks(item: pytest.Item) -> bool:
    """Whether a test runs on the pool's ranks, and no mark says that all of its variants count."""
    fixtures = getattr(item, "fixturenames", ())
    return ("ranks" in fixtures or "pool" in fixtures) and item.get_closest_marker("every") is None
