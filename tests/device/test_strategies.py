"""Every way to split a run trains on fake devices under NCCL's rules: the CPU's losses, few waits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from runs import Found, Run, both

GOLDEN = Path(__file__).parents[1] / "golden" / "host_waits.json"
RUNS: dict[str, Run] = {
    "one rank": Run(1),
    "parts": Run(2),
    "parts of 4": Run(4, "SAGE"),
    "maxima": Run(2, "max"),
    "attention": Run(2, "GAT"),
    "attention 2": Run(2, "GATv2"),
    "edge features": Run(2, "Transformer"),
    "softmax sums": Run(2, "GEN"),
    "norms": Run(2, "norms"),
    "bf16": Run(2, parallel={"codec": "bf16"}),
    "fp16": Run(2, parallel={"codec": "fp16"}),
    "fp32": Run(2, parallel={"codec": "fp32"}),
    "int8": Run(2, parallel={"codec": "int8"}),
    "int4, adaptive": Run(2, parallel={"codec": "int4", "adaptive_bits": True}),
    "int2, error feedback": Run(2, parallel={"codec": "int2", "error_feedback": True}),
    "onebit": Run(4, parallel={"codec": "onebit"}),
    "weights in bf16": Run(2, parallel={"codec_weights": "bf16"}),
    "late": Run(2, parallel={"max_age": 1}),
    "late, smoothed": Run(2, parallel={"max_age": 1, "sync_every": "auto", "smoothing": 0.5}),
    "late, skipped": Run(4, "SAGE", {"max_age": 2, "skip_drift": 0.1}),
    "sampled": Run(2, parallel={"halo_sample": 0.5}),
    "recompute": Run(2, recompute=True),
    "activations on the host": Run(2, parallel={"activations": "host"}),
    "bf16 layers": Run(2, train={"amp": "bf16"}, near=2e-2),
    "slices": Run(2, parallel={"tensor": 2}),
    "slices of attention": Run(4, "GAT", {"tensor": 2}),
    "decoupled": Run(2, parallel={"tensor": 2, "decouple": True}),
    "memory bound": Run(2, parallel={"tensor": 2, "memory_gib": 0.00001}),
    "chunks": Run(1, parallel={"chunks": 3}),
    "chunks, exact": Run(1, parallel={"chunks": 3, "cross_chunk": "exact"}),
    "pipe, history": Run(2, parallel={"pipe": 2, "chunks": 4}),
    "pipe, exact": Run(2, parallel={"pipe": 2, "chunks": 4, "cross_chunk": "exact"}),
    "pipe, drop": Run(2, "SAGE", {"pipe": 2, "chunks": 4, "cross_chunk": "drop"}),
    "pipe of 4": Run(4, parallel={"pipe": 4, "chunks": 4}),
    "two stages a rank": Run(2, parallel={"pipe": 2, "stages_per_rank": 2, "chunks": 4}),
    "pipe of 4, drop": Run(4, "SAGE", {"pipe": 4, "chunks": 4, "cross_chunk": "drop"}),
    "hybrid": Run(4, parallel={"pipe": 2, "graph": 2, "chunks": 4}),
    "hybrid, coded": Run(
        4, parallel={"pipe": 2, "graph": 2, "chunks": 4, "codec": "bf16", "codec_stage": "bf16"}
    ),
}
WITH_ALL = {
    "attention 2",
    "softmax sums",
    "fp16",
    "fp32",
    "late, smoothed",
    "hybrid, coded",
    "chunks, exact",
    "maxima",
    "slices",
    "pipe of 4",
    "pipe, drop",
    "weights in bf16",
    "parts of 4",
}
"""Those that ``make test`` leaves out: a sibling goes nearly the same way."""


def said(name: str) -> dict[str, int]:
    table = json.loads(GOLDEN.read_text())
    assert all(place in table["why"] for place in table["waits"][name]), "each wait says why it stays"
    return table["waits"][name]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in WITH_ALL else name for name in RUNS]
)
def test_losses_are_the_cpus_and_the_host_does_not_wait_more_than_is_known(devices, name):
    run = RUNS[name]
    found = devices.run(run.ranks, both, run)
    for rank, (there, here) in enumerate(found):
        assert (there.device, here.device) == (f"cuda:{rank}", "cpu")
        same(there, here, run.near)
        more = {place: count for place, count in there.waits.items() if count > said(name).get(place, 0)}
        assert not more, "more waits of the host in an epoch than tests/golden/host_waits.json says"


def same(there: Found, here: Found, near: float) -> None:
    assert there.losses == pytest.approx(here.losses, rel=near)
    assert there.metric == pytest.approx(here.metric, abs=near)
    if here.scores is not None:
        torch.testing.assert_close(there.scores, here.scores, rtol=near, atol=near)
