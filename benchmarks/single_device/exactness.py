"""What do dropout and norms cost that do not depend on the mesh? PyTorch's own beside Kagome's, in turns.

Run: python benchmarks/single_device/exactness.py
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
OPERATIONS = ("dropout", "batch norm", "instance norm", "graph norm", "pair norm", "layer norm")
GRAPH, TINY = "sbm:vertices=100000,degree=4,features=128", "sbm:vertices=300,degree=4,features=128,classes=4"
WIDTH = 128


def main() -> None:
    """Time all operations and write ``results_exactness.json`` and ``.md``."""
    options = arguments()
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"):
        os.environ[name] = str(options.threads)  # before anything starts its threads
    import torch

    import kagome

    torch.set_num_threads(options.threads)
    graph = kagome.load(TINY if options.smoke else GRAPH)
    rows = []
    for operation in options.only:
        rows.append(row(operation, graph, options))
        print(rows[-1], flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    told = {"threads": options.threads, "turns": options.turns, "repeats": options.repeats, "rows": rows}
    (options.out / "results_exactness.json").write_text(json.dumps(told, indent=1) + "\n")
    (options.out / "results_exactness.md").write_text(table(rows))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", choices=OPERATIONS, default=list(OPERATIONS))
    parser.add_argument("--repeats", type=int, default=6, help="of the operation in the model")
    parser.add_argument("--epochs", type=int, default=7, help="of a turn; the first two do not count")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--runs", type=Path, default=HERE / "runs", help="not used: it keeps nothing")
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    if options.smoke:
        options.only, options.repeats, options.epochs, options.turns = ["dropout"], 1, 3, 1
    return options


def row(operation: str, graph: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of one operation, forward and backward: an epoch with it less one without, divided."""
    found: dict[str, list[float]] = {"PyTorch": [], "Kagome": []}
    for _ in range(options.turns):
        for side, epochs in (("PyTorch", by_torch), ("Kagome", by_kagome)):
            times = [epochs(model_of(operation, count), graph, options) for count in (options.repeats, 0)]
            found[side].append(1e3 * (times[0] - times[1]) / options.repeats)
    return {
        "operation": operation,
        "ms": {side: [statistics.median(each), min(each), max(each)] for side, each in found.items()},
    }


def model_of(operation: str, repeats: int) -> Any:
    """A linear map, the operation so many times, and another linear map."""
    import torch
    from torch import nn
    from torch_geometric import nn as pyg

    makes: dict[str, Callable[[], nn.Module]] = {
        "dropout": lambda: nn.Dropout(0.5),
        "batch norm": lambda: nn.BatchNorm1d(WIDTH),
        "instance norm": lambda: pyg.InstanceNorm(WIDTH),
        "graph norm": lambda: pyg.GraphNorm(WIDTH),
        "pair norm": lambda: pyg.PairNorm(),
        "layer norm": lambda: nn.LayerNorm(WIDTH),
    }

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 16)
            self.between = nn.ModuleList(makes[operation]() for _ in range(repeats))

        def forward(self, x: Any, edge_index: Any) -> Any:
            x = self.first(x)
            for layer in self.between:
                x = layer(x)
            return self.last(x)

    return Stack()


def by_torch(model: Any, graph: Any, options: argparse.Namespace) -> float:
    """Seconds of the median epoch of a plain loop."""
    import torch

    steps = torch.optim.Adam(model.parameters(), lr=0.01)
    times = []
    for _ in range(options.epochs):
        begun = time.perf_counter()
        steps.zero_grad()
        out = model(graph.x, graph.edge_index)
        torch.nn.functional.cross_entropy(out[graph.train_mask], graph.y[graph.train_mask]).backward()
        steps.step()
        times.append(time.perf_counter() - begun)
    return statistics.median(times[2:])


def by_kagome(model: Any, graph: Any, options: argparse.Namespace) -> float:
    """Seconds of the median epoch of a Trainer on one rank, evaluation not counted."""
    from kagome import Trainer
    from kagome.config import Report, Train

    train = Train(epochs=options.epochs, eval_every=10**6, check=False)
    report = Report(page=False, trace=False, progress=False)
    with Trainer(model, graph, train=train, report=report) as trainer:
        trainer.fit()
        return statistics.median(record.seconds for record in trainer.records[2:])


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = ["| 100k rows of 128 | PyTorch's own | Kagome's | Kagome / PyTorch |", "|---|---|---|---|"]
    for each in rows:
        cells = [f"{m:,.1f} ms ({a:,.1f} to {b:,.1f})" for m, a, b in each["ms"].values()]
        ratio = each["ms"]["Kagome"][0] / each["ms"]["PyTorch"][0]
        lines.append(f"| {each['operation']} | {cells[0]} | {cells[1]} | {ratio:.2f} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
