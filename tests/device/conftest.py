"""What the tests on fake devices share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from bed import bed
from fake_gpu.build import CannotBuildError, build

from pool import Pool


@pytest.fixture(scope="session")
def devices() -> Iterator[Pool]:
    """Ranks with a fake GPU each; skips where none can be built."""
    try:
        build()
    except CannotBuildError as error:
        pytest.skip(str(error))
    ranks = bed()
    yield ranks
    ranks.close()
