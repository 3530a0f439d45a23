"""PyG's convolutions and models of users on a fake device, on two ranks: the CPU's outputs and gradients.

The two ranks are threads of one process, as in ``make gpu``; four processes share the cases.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

import pytest

from convolutions import CASES, sample_graph
from odd_models import MUST_BE_REFUSED, ODD_MODELS
from parity import case_build, odd

GPU = Path(__file__).parents[2] / "benchmarks" / "gpu"
REFUSED = {
    "MeshCNNConv": "can't convert cuda:0 device type tensor to numpy",  # PyG's layer computes on the host
}


def names(table: str) -> list[str]:
    if table == "odd models":
        return [name for name in ODD_MODELS if name not in MUST_BE_REFUSED]
    return [f"{case.name}-{case.variant}" for case in CASES if case.build is not None]


def tried(table: str, chosen: list[str]) -> list[tuple[str, str]]:
    """The process's share of the cases, each with what went wrong."""
    sys.path.insert(0, str(GPU))
    import checks

    found = []
    for name in chosen[int(os.environ["RANK"]) :: int(os.environ["WORLD_SIZE"])]:
        if table == "odd models":
            build, data, random = partial(odd, name), sample_graph(seed=1), name.endswith("dropout")
        else:
            case = next(case for case in CASES if f"{case.name}-{case.variant}" == name)
            build, random = case_build(case), case.random
            data = sample_graph(seed=1, groups_of_four=case.needs_groups_of_four)
        row = checks.verdict(name, partial(checks._alike, build, data, 2, random))
        found.append((name, str(row.get("why", ""))))
    return found


@pytest.mark.parametrize("table", ["convolutions", "odd models"])
def test_outputs_and_gradients_are_the_cpus(devices, table):
    chosen = names(table)
    assert len(chosen) > {"convolutions": 200, "odd models": 20}[table]
    found = dict(each for share in devices.run(4, tried, table, chosen, timeout=500) for each in share)
    assert sorted(found) == sorted(chosen)
    wrong = {name: why for name, why in found.items() if why}
    for name in [name for name in wrong if name.partition("-")[0] in REFUSED]:
        assert REFUSED[name.partition("-")[0]] in wrong.pop(name)
    assert not wrong
