"""The compiled loops do what the same loops do in plain Python, and mend what can be mended."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from torch_geometric.data import Data

from graphs import multigraphs
from kagome.graph.datasets.builtin import sbm
from kagome.graph.structure import kernels
from kagome.kernels.base import jit


def plain(loop: Callable[..., Any]) -> Callable[..., Any]:
    return loop.py_func  # type: ignore[attr-defined, no-any-return]


def lists(data: Data) -> tuple[Any, Any, Any]:
    source, target = data.edge_index.int().numpy()
    indptr, indices = kernels.adjacency(source, target, data.num_nodes)
    return indptr, indices, np.bincount(target, minlength=data.num_nodes).astype(np.float64)


@settings(max_examples=30, deadline=None)
@given(multigraphs())
def test_adjacency_lists_both_ends(data: Data) -> None:
    indptr, indices, _ = lists(data)
    wanted: list[list[int]] = [[] for _ in range(data.num_nodes)]
    for s, t in data.edge_index.t().tolist():
        if s != t:
            wanted[s].append(t)
            wanted[t].append(s)
    found = [sorted(indices[indptr[v] : indptr[v + 1]].tolist()) for v in range(data.num_nodes)]
    assert found == [sorted(row) for row in wanted]
    again = plain(kernels.adjacency)(*data.edge_index.int().numpy(), data.num_nodes)
    assert np.array_equal(again[0], indptr)
    assert np.array_equal(again[1], indices)


@settings(max_examples=30, deadline=None)
@given(data=multigraphs(), parts=st.integers(1, 4), seed=st.integers(0, 9))
def test_compiled_is_plain(data: Data, parts: int, seed: int) -> None:
    indptr, indices, weight = lists(data)
    draw = np.random.default_rng(seed)
    shares = draw.dirichlet(np.full(parts, 4.0))
    bounds = np.stack([data.num_nodes * shares + 0.5, weight.sum() * shares + 1])
    start = draw.integers(0, parts, data.num_nodes)
    fast, slow = start.copy(), start.copy()
    kernels.mend(indptr, indices, weight, fast, bounds, 3)
    plain(kernels.mend)(indptr, indices, weight, slow, bounds, 3)
    assert fast.tolist() == slow.tolist()
    order = draw.permutation(data.num_nodes)
    fast, slow = np.full_like(start, -1), np.full_like(start, -1)
    kernels.stream(indptr, indices, order, weight, fast, bounds)
    plain(kernels.stream)(indptr, indices, order, weight, slow, bounds)
    assert fast.tolist() == slow.tolist()


@pytest.mark.parametrize("measure", ["vertices", "edges"])
def test_a_full_part_is_emptied_to_its_bound(measure: str) -> None:
    data = sbm("vertices=600,degree=8,communities=4,features=1,power=4")
    indptr, indices, weight = lists(data)
    owner = np.arange(600) % 4
    full = np.arange(600) < 300 if measure == "vertices" else weight > np.quantile(weight, 0.6)
    owner[full] = 0
    bounds = np.array([[1.2 * 150] * 4, [1.2 * weight.sum() / 4] * 4])
    kernels.mend(indptr, indices, weight, owner, bounds, 6)
    assert np.bincount(owner, minlength=4).max() <= bounds[0, 0]
    assert np.bincount(owner, weights=weight, minlength=4).max() <= bounds[1, 0]


def test_a_second_process_does_not_compile_again(tmp_path: Path) -> None:
    say = "s = squeeze.made.stats; print(sum(s.cache_hits.values()), sum(s.cache_misses.values()))"
    code = (
        f"import numpy as np; from kagome.graph.structure.edges import squeeze; squeeze(np.arange(3)); {say}"
    )
    said = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "KAGOME_COMPILE": "1"},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        ).stdout.split()
        for _ in range(2)
    ]
    assert said == [["0", "1"], ["1", "0"]]


def test_where_no_cache_can_be_written_it_is_compiled_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    real = jit.numba.njit

    def njit(**options: Any) -> Any:
        if options.get("cache"):
            raise RuntimeError("cannot cache function: no locator available")
        return real(**options)

    monkeypatch.setattr(jit.numba, "njit", njit)
    assert jit.compiled(lambda n: n + 1)(2) == 3
