"""What all tests share: a fixed seed, the pool of ranks, the folder of data sets."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import numpy as np
import pytest
import torch

from kagome.kernels.base.kept_code import AT_ONCE
from kagome.profile import cache, steady_times
from pool import Pool

pytest_plugins = ["shorter"]
# How long an example takes is the machine's business.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")
# Small loops run as plain Python until they are compiled; tests are about the compiled ones.
os.environ.setdefault(AT_ONCE, "1")


def pytest_report_header() -> str:
    return f"torch {torch.__version__}, {torch.get_num_threads()} threads"


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache folder of the tests' own, one for all workers; child processes inherit it."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = tmp_path_factory.getbasetemp().parent / "cache"
        folder.mkdir(exist_ok=True)
    else:
        folder = tmp_path_factory.mktemp("cache")
    before = os.environ.get("KAGOME_CACHE")
    os.environ["KAGOME_CACHE"] = str(folder)
    yield folder
    if before is None:
        del os.environ["KAGOME_CACHE"]
    else:
        os.environ["KAGOME_CACHE"] = before


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> None:
    # Python's own draws differ by test: PyG's Sequential names the forward that it writes by one of them,
    # and a process that meets a name again takes the forward that has it.
    random.seed(request.node.nodeid)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture
def one_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measurements are kept whether they agree or not, for tests of what is made of them.

    On a machine that computes something else they seldom agree, and each test would measure all anew.
    """
    monkeypatch.setattr(steady_times, "AGREE", math.inf)
    monkeypatch.setattr(cache, "AGREE", math.inf)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    workers = Pool()
    yield workers
    workers.close()


@pytest.fixture(scope="session")
def ranks(pool: Pool) -> Callable[..., list]:
    """``ranks(world, function, *args)`` runs ``function(channel, *args)`` on that many ranks."""
    return pool.run


@pytest.fixture(scope="session")
def devices() -> Iterator[Pool]:
    """Ranks with a fake GPU each, for the tests of ``tests/device``; skips where none can be built."""
    from bed import bed
    from fake_gpu.build import CannotBuildError, build

    try:
        build()
    except CannotBuildError as error:
        pytest.skip(str(error))
    workers = bed()
    yield workers
    workers.close()


@pytest.fixture(scope="session")
def data_folder() -> Path:
    folder = os.environ.get("KAGOME_DATA")
    if not folder:
        pytest.skip("KAGOME_DATA names no folder of data sets")
    return Path(folder)
