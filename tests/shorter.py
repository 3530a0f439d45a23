"""Shorter: which tests `make test` leaves to `make test-all`.

Where it sits: a plugin of ``conftest``. Two marks choose::

    @pytest.mark.slow        left out: a sibling proves the same sooner
    @pytest.mark.some(3)     of all its variants three run, drawn by their names
    @pytest.mark.some(3, each="kind")    three of each value of that parameter

A test that is named on the command line (``file.py::test``) runs whatever its mark.
"""

from __future__ import annotations

import zlib

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-tests", action="store_true", help="run those marked slow or some, too")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: runs in `make test-all` alone")
    config.addinivalue_line("markers", "some(count, each): of its variants so many run in `make test`")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--all-tests") or any("::" in arg for arg in config.args):
        return
    variants: dict[tuple[str, object], list[pytest.Item]] = {}
    for item in items:
        if (some := item.get_closest_marker("some")) is not None:
            value = item.callspec.params[some.kwargs["each"]] if "each" in some.kwargs else None
            variants.setdefault((item.nodeid.partition("[")[0], value), []).append(item)
    left = {id(item) for item in items if item.get_closest_marker("slow")}
    for each in variants.values():
        mark = each[0].get_closest_marker("some")
        assert mark is not None
        drawn = sorted(each, key=lambda item: zlib.crc32(item.nodeid.encode()))
        left.update(id(item) for item in drawn[mark.args[0] :])
    config.hook.pytest_deselected(items=[item for item in items if id(item) in left])
    items[:] = [item for item in items if id(item) not in left]
