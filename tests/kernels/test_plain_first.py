"""Loops that plain code stands in for: the same bits, compiled once that is worth it, and known on disk."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from kagome.kernels.base import jit, kept_code
from kagome.kernels.base.csr import grouped, turned
from kagome.model.exact import dropout as module


class Made:
    """Stands for a dispatcher without machine code."""

    def __init__(self, path: Path) -> None:
        self.py_func, self.signatures, self.calls = plus, [], 0
        self.stats = type("Stats", (), {"cache_path": str(path)})

    def __call__(self, one: Any, other: int) -> Any:
        self.calls += 1
        return plus(one, other)


def plus(one: Any, other: int) -> Any:
    return one + other


@pytest.fixture
def at_leisure(monkeypatch):
    """Tests have loops compiled at once; here that is not wanted."""
    monkeypatch.delenv(kept_code.AT_ONCE)


def test_small_calls_are_plain_until_they_add_up(tmp_path, monkeypatch, at_leisure):
    monkeypatch.setattr(jit, "PLAIN", 100)
    made = Made(tmp_path)
    loop: Any = jit.exact(made)
    assert loop.py_func is plus
    found = [int(loop(np.arange(30), 2).sum()) for _ in range(5)]
    assert found == [495] * 5
    assert made.calls == 2  # 30, 60 and 90 entries were plain
    large: Any = jit.exact(Made(tmp_path))
    large(np.arange(1000), 2)
    assert large.made.calls == 1


def test_machine_code_on_disk_is_used_from_the_first_call(tmp_path, at_leisure):
    made = Made(tmp_path)
    (tmp_path / f"{Path(__file__).stem}.plus-{plus.__code__.co_firstlineno}.py311.nbi").touch()
    loop: Any = jit.exact(made)
    loop(np.arange(3), 2)
    assert made.calls == 1
    os.utime(next(tmp_path.iterdir()), (0, 0))  # older than the source
    assert not jit.is_ready(made)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 9)), max_size=80),
    st.integers(0, 10),
    st.integers(0, 40),
)
def test_layouts_are_the_same_as_of_plain_python(ends, own, more):
    """A row of more than ``SHORT`` entries is sorted another way."""
    pairs = np.array([*ends, *[(3, 9 - k % 7) for k in range(more)]], np.int64).reshape(-1, 2)
    major, minor = np.ascontiguousarray(pairs[:, 0]), np.ascontiguousarray(pairs[:, 1])
    order = np.lexsort((np.arange(major.size), minor, major))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jit.PlainFirst, "takes", lambda self, entries: True)
        pointer, middle, column, edge = grouped(major, minor, 7, own)
        back = turned(pointer, column, edge, 10)
    assert edge.tolist() == order.tolist()
    assert column.tolist() == minor[order].tolist()
    assert middle.tolist() == [
        int(pointer[i] + (column[pointer[i] : pointer[i + 1]] < own).sum()) for i in range(7)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jit.PlainFirst, "takes", lambda self, entries: False)
        for plain, made in zip((pointer, middle, column, edge), grouped(major, minor, 7, own), strict=True):
            assert plain.tolist() == made.tolist()
        for plain, made in zip(back, turned(pointer, column, edge, 10), strict=True):
            assert plain.tolist() == made.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dropout_has_the_same_bits_before_and_after_it_is_compiled(monkeypatch, dtype):
    x = torch.randn(50, 37, dtype=dtype, generator=torch.Generator().manual_seed(1))
    found = []
    for plain in (True, False):
        monkeypatch.setattr(jit.PlainFirst, "takes", lambda self, entries, plain=plain: plain)
        found.append(module.dropout(x, torch.arange(50) * 7, 11, 0.4))
    bits = torch.int32 if dtype == torch.float32 else torch.int64
    assert torch.equal(found[0].view(bits), found[1].view(bits))


AHEAD = """
import sys
from kagome.kernels.base.kept_code import LOOPS, missing
print(len(missing()))
from kagome.cli import ahead
ahead.cut()
print({'torch'} & set(sys.modules))
ahead.trained()
print(missing())
from kagome import config
from kagome.graph.prepare import prepare
from kagome.graph.structure import edges, kernels
name = "sbm:vertices=60,degree=4,features=3,classes=3,communities=3"
prepare(config.Data(name=name), method="metis", seed=0, parts=2, folder=sys.argv[1])
loops = {"mend": kernels.mend, "adjacency": kernels.adjacency.made}
loops |= {name: getattr(edges, name).made for name in LOOPS["graph/structure/edges.py"]}
print({name: len(loop.signatures) for name, loop in loops.items() if len(loop.signatures) != 1})
"""


def test_what_is_compiled_ahead_is_what_a_start_needs(tmp_path):
    """Doctor's table names it, and a cut compiles nothing more."""
    env = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "numba"), kept_code.AT_ONCE: "1"}
    command = [sys.executable, "-c", AHEAD, str(tmp_path / "parts")]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    named = sum(map(len, kept_code.LOOPS.values()))
    assert done.stdout.splitlines() == [str(named), "set()", "()", "{}"], done.stderr


def test_doctor_says_what_a_first_start_compiles(monkeypatch):
    from kagome.cli import doctor

    monkeypatch.setattr(doctor, "missing", lambda: ("graph/structure/kernels.py: mend", "a.py: b"))
    told = doctor._first_start()
    assert told.startswith(f"2 of {sum(map(len, kept_code.LOOPS.values()))} loops")
    seconds = kept_code.SECONDS["mend"] + kept_code.SECONDS[""]
    assert f"about {seconds:.0f} s of a core" in told
    monkeypatch.setattr(doctor, "missing", tuple)
    assert "is on disk" in doctor._first_start()


def test_where_numba_keeps_machine_code(monkeypatch, tmp_path):
    from kagome.graph.structure import kernels

    source = kept_code.PACKAGE / "graph/structure/kernels.py"
    assert Path(kernels.mend.stats.cache_path) in kept_code.folders(source)
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    (folder,) = kept_code.folders(source)
    code = "from kagome.graph.structure import kernels; print(kernels.mend.stats.cache_path)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(folder)
