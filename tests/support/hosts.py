"""Emulated hosts for tests, where this machine can make them."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import cluster as emulated

NAME = f"kagome-{os.environ.get('PYTEST_XDIST_WORKER', 'test')}"
"""Of a cluster: each worker of a test run has its own, as there is one of a name at a time."""


def need_cluster() -> None:
    """Skip where no cluster can be made."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    for name in ("ip", "tc"):
        if shutil.which(name) is None:
            pytest.skip(f"there is no {name}")
    try:
        with emulated.Cluster(1, 100, name=NAME):
            pass
    except emulated.NotPermittedError as error:
        pytest.skip(str(error))
