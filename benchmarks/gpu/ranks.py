"""Several ranks on one GPU: every strategy, over gloo with tensors that lie on the GPU.

NCCL refuses two ranks on one GPU. Over gloo messages pass through the host: these runs say nothing of speed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import checks
import made
import torch
from main import Row, Visit

import kagome
from kagome import Parallel, Train
from kagome.launch.launcher import start_local

Case = tuple[str, str, int, dict[str, object]]
CASES: tuple[Case, ...] = (
    ("parts", "GCN", 2, {}),
    ("parts", "SAGE", 4, {}),
    ("parts", "GAT", 3, {}),
    ("parts", "Transformer", 2, {}),
    ("parts", "MeshGraphNet", 2, {}),
    ("bf16 codec", "GCN", 2, {"codec": "bf16"}),
    ("one bit", "GCN", 2, {"codec": "onebit"}),
    ("int4, weights in bf16", "GCN", 2, {"codec": "int4", "codec_weights": "bf16"}),
    ("late rows", "GCN", 2, {"max_age": 1}),
    ("sampled rows", "SAGE", 2, {"halo_sample": 0.5}),
    ("slices", "GCN", 2, {"tensor": 2}),
    ("slices", "GAT", 2, {"tensor": 2}),
    ("decoupled", "GCN", 2, {"tensor": 2, "decouple": True}),
    ("memory bound", "GCN", 2, {"tensor": 2, "memory_gib": 0.01}),
    ("pipe, history", "GCN", 2, {"pipe": 2, "chunks": 4}),
    ("pipe, exact", "GCN", 2, {"pipe": 2, "chunks": 4, "cross_chunk": "exact"}),
    ("pipe, drop", "SAGE", 2, {"pipe": 2, "chunks": 4, "cross_chunk": "drop"}),
    ("pipe of 4, stages_per_rank", "GCN", 2, {"pipe": 2, "stages_per_rank": 2, "chunks": 4}),
    ("hybrid", "GCN", 4, {"pipe": 2, "graph": 2, "chunks": 4}),
    ("activations on the host", "GCN", 2, {"activations": "host"}),
)
"""Name, model, ranks, and what ``Parallel`` gets."""


def work(cases: Sequence[Case], small: bool, path: str) -> None:
    """A rank of all runs of one number of ranks: each on the GPU, then on the CPU; rank 0 writes results."""
    for name, model, _, parallel in cases:
        row: Row = {"name": f"{name}: {model}, {int(os.environ.get('WORLD_SIZE', '1'))} ranks"}
        try:
            on, found = train(model, parallel, small)
            with checks.gpus_hidden():
                _, plain = train(model, parallel, small)
        except Exception as error:
            lines = [line for line in str(error).splitlines() if line.strip()]
            row |= {"ok": False, "why": f"{type(error).__name__}: {' / '.join(lines[:3])[:400]}"}
        else:
            far = max(abs(a - b) / abs(b) for a, b in zip(found, plain, strict=True))
            expected = "cuda:0" if torch.cuda.is_available() else "cpu"
            row |= {"ok": far < 2e-3 and on == expected, "device": on, "far": far}
        if os.environ.get("RANK", "0") == "0":
            with Path(path).open("a") as file:
                file.write(json.dumps(row) + "\n")


def train(name: str, parallel: dict[str, object], small: bool) -> tuple[str, list[float]]:
    """One run: this rank's device and the losses."""
    vertices, count = (256, 3000) if small else (4096, 60_000)
    data = made.dataset(vertices, count, 32, 5, edge=made.reads_edges(name))
    model = made.model(name, 32, 32, 5, layers=4, dropout=0.0)
    settings = Train(epochs=5, eval_every=10**6, check=False, timeout=40)
    with kagome.Trainer(model, data, parallel=Parallel(**parallel), train=settings) as trainer:  # type: ignore[arg-type]
        trainer.fit()
        return str(trainer.mesh.device), [record.loss for record in trainer.records]


def strategies(visit: Visit) -> Iterator[Row]:
    """Each strategy's losses on the GPU beside the same ranks' on the CPU."""
    chosen = CASES[::4] if visit.small else CASES
    for ranks in sorted({case[2] for case in chosen}):
        if visit.left() < 60:
            yield {"name": "(out of time)", "at": f"{ranks} ranks"}
            return
        cases, path = [case for case in chosen if case[2] == ranks], visit.out / f"strategies_{ranks}.jsonl"
        path.unlink(missing_ok=True)
        try:
            start_local(ranks, work, cases, visit.small, str(path))
        except Exception as error:
            yield {
                "name": f"{ranks} ranks",
                "ok": False,
                "why": f"{type(error).__name__}: {str(error)[-600:]}",
            }
        if path.is_file():
            yield from (json.loads(line) for line in path.read_text().splitlines())
