"""A command that trains on one rank starts again with the allocator's setting, once, and as it was."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kagome.cli import trains_alone
from kagome.launch.allocator import MERGING, TUNABLES, merging

BUILDER = """
import os, sys
from torch_geometric.nn import GCN

def model(in_channels, out_channels):
    print("BUILT", os.environ.get("GLIBC_TUNABLES"), sys.flags.utf8_mode, os.getpid(), flush=True)
    return GCN(in_channels, 4, 2, out_channels)
"""


@pytest.mark.parametrize(
    ("words", "alone"),
    [
        ([], False),
        (["train"], False),
        (["check", "--nproc", "1"], False),
        (["train", "--data.name", "digits"], True),
        (["train", "--nproc", "1"], True),
        (["train", "--nproc=1", "--data.name", "digits"], True),
        (["train", "--nproc", "2"], False),
        (["train", "--nproc=3"], False),
        (["train", "--nproc"], False),
    ],
)
def test_commands_that_may_train_as_one_rank(words, alone):
    assert trains_alone(words) is alone


@pytest.mark.parametrize("given", [None, "glibc.malloc.arena_max=1"])
def test_a_training_on_one_rank_is_started_again_with_the_setting(tmp_path: Path, given: str | None):
    (tmp_path / "my.py").write_text(BUILDER)
    variables = {name: value for name, value in os.environ.items() if name != TUNABLES}
    variables |= {} if given is None else {TUNABLES: given}
    words = ["train", "--model.name", "python:my:model", "--train.epochs", "1", "--train.no-check"]
    begun = subprocess.Popen(
        [sys.executable, "-X", "utf8", "-m", "kagome", *words, "--out", str(tmp_path / "run")],
        cwd=tmp_path,
        env=variables | {"PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{tmp_path}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    told, _ = begun.communicate(timeout=300)
    assert begun.returncode == 0, told
    built = next(line for line in told.splitlines() if line.startswith("BUILT"))
    expected = given or (MERGING if merging({}) else None)
    # The same process, Python's own flags and words, and a user's setting as it was.
    assert built == f"BUILT {expected} 1 {begun.pid}"
