"""Chunk: what another chunk costs a layer on one core, beyond its rows.

Run: OMP_NUM_THREADS=1 python benchmarks/pipeline/chunk.py

The same graph passes a pipeline of 2 ranks in 4, 8 and 16 chunks with history, in turns: what both compute in
an epoch grows by a call of each layer a chunk. Of each count's epochs the least is kept; a line through them
has the slope.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from statistics import linear_regression
from tempfile import TemporaryDirectory

from kagome.records.spans import action_of
from kagome.report.chrome_trace import read_trace

GRAPH = "sbm:vertices=4000,degree=10,features=100,classes=5,communities=16"
CHUNKS = (4, 8, 16)
LAYERS, EPOCHS, TURNS = 32, 14, 2
WARM = 6
"""Epochs of a run that are not counted: tables and notes are made in them."""


def computed(model: str, chunks: int, folder: Path) -> list[float]:
    """Seconds that both ranks compute in each epoch of a run, after the first ones."""
    words = [sys.executable, "-m", "kagome", "train", "--nproc", "2", "--data.name", GRAPH]
    words += ["--model.name", model, "--model.layers", str(LAYERS), "--model.hidden", "100"]
    words += ["--parallel.graph", "1", "--parallel.pipe", "2", "--parallel.chunks", str(chunks)]
    words += ["--parallel.no-guard", "--train.epochs", str(EPOCHS), "--train.eval-every", "1000"]
    words += ["--train.no-check", "--report.no-page", "--report.no-progress", "--out", str(folder)]
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    seconds = dict.fromkeys(range(WARM, EPOCHS), 0.0)
    for spans in read_trace(folder / "trace.json"):
        for span in spans:
            action = action_of(span.name)
            if action is not None and action.kind.computes and span.epoch in seconds:
                seconds[span.epoch] += span.duration
    return list(seconds.values())


def main() -> None:
    """A line a model."""
    for model in ("gcn", "gcn2", "sage", "resgcn+"):
        least = dict.fromkeys(CHUNKS, float("inf"))
        for turn in range(TURNS):
            for chunks in CHUNKS:
                with TemporaryDirectory() as folder:
                    found = computed(model, chunks, Path(folder) / f"{turn}")
                least[chunks] = min(least[chunks], *found)
        slope, _ = linear_regression([LAYERS * chunks for chunks in CHUNKS], list(least.values()))
        told = ", ".join(f"{chunks} chunks {1e3 * seconds:.0f} ms" for chunks, seconds in least.items())
        print(f"{model}: {1e3 * slope:.2f} ms a chunk and layer ({told})", flush=True)


if __name__ == "__main__":
    main()
