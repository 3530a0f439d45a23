"""How near to the floor is the aggregation alone? Kagome's kernel, DGL, MKL, torch.sparse.mm, PyG, in turns.

Run: python benchmarks/single_device/aggregation.py
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
WIDTHS = (64, 128, 256)
HEADS, HEAD_WIDTH = 8, 16


def main() -> None:
    """Time all methods and write ``results_aggregation.json`` and ``.md``."""
    options = arguments()
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"):
        os.environ[name] = str(options.threads)  # before anything starts its threads
    import torch

    torch.set_num_threads(options.threads)
    bench = Bench.make(options)
    cases = [("unweighted", width, 0) for width in options.widths]
    cases += [("weighted", width, 1) for width in options.widths]
    cases += [(f"{HEADS} heads of {HEAD_WIDTH}", HEADS * HEAD_WIDTH, HEADS)]
    rows = []
    for name, width, weights in cases:
        for back in (False, True):
            rows.append(bench.row(name, width, weights, back))
            short = {method: f"{1e3 * taken[0]:.1f} ms" for method, taken in rows[-1]["seconds"].items()}
            print(rows[-1]["case"], short, flush=True)
    facts = bench.facts()
    options.out.mkdir(parents=True, exist_ok=True)
    told = json.dumps({"facts": facts, "rows": rows}, indent=1) + "\n"
    (options.out / "results_aggregation.json").write_text(told)
    (options.out / "results_aggregation.md").write_text(text(facts, rows))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--graph", default="made", help="ego-twitter, Cornell5, made or sbm:...")
    parser.add_argument("--data", type=Path, help="folder of raw data sets")
    parser.add_argument("--widths", type=int, nargs="*", default=list(WIDTHS))
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--runs", type=Path, default=HERE / "runs")
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    if options.smoke:
        options.graph, options.widths, options.turns = "tiny", [16], 1
    return options


@dataclass
class Bench:
    """The graph in every method's own form, and what the machine reaches."""

    options: argparse.Namespace
    edge_index: Any
    vertices: int
    methods: dict[str, Callable[..., Any]]
    notes: list[str]
    wide: list[Any]

    @classmethod
    def make(cls, options: argparse.Namespace) -> Bench:
        """Load the graph, give it to the methods, measure the bandwidth."""
        import floor
        import methods

        import graphs

        graph = graphs.load(options.graph, options.data, options.runs / "graphs")
        known, notes = methods.known(graph.edge_index, graph.num_nodes)
        small = {"large": 1 << 20, "in_cache": 1 << 18, "turns": 1} if options.smoke else {}
        counts = sorted({1, options.threads})
        wide = [floor.bandwidth(threads, **small) for threads in counts]
        return cls(options, graph.edge_index, graph.num_nodes, known, notes, wide)

    def row(self, name: str, width: int, weights: int, back: bool) -> dict[str, Any]:
        """Times of all methods on one case, in turns, with the largest difference of their results."""
        import floor
        import torch

        draw = torch.Generator().manual_seed(width)
        shape = (self.vertices, weights, width // weights) if weights > 1 else (self.vertices, width)
        x = torch.randn(shape, generator=draw)
        grad = torch.randn(shape, generator=draw)
        edges = self.edge_index.size(1)
        weight = torch.rand((edges, weights) if weights > 1 else edges, generator=draw) if weights else None
        seconds: dict[str, list[float]] = {}
        ready, results = {}, {}
        for method, prepare in self.methods.items():
            do = prepare(x, weight)
            if do is not None:
                given = (do, x, weight)
                ready[method] = partial(_both, *given, grad) if back else partial(_forward, *given)
                results[method] = ready[method]()  # warm, and to compare
        for _ in range(self.options.turns):
            for method, run in ready.items():
                begun = time.perf_counter()
                run()
                seconds.setdefault(method, []).append(time.perf_counter() - begun)
        truth = results["PyG"]
        low = floor.floors(self.vertices, edges, width, weights, self.wide[-1])
        return {
            "case": f"{name}, F = {width}, {'forward + backward' if back else 'forward'}",
            "weights": weights,
            "width": width,
            "back": back,
            "seconds": {method: floor.spread(taken) for method, taken in seconds.items()},
            "difference": {m: float((r - truth).abs().max() / truth.abs().max()) for m, r in results.items()},
            "floors": None if back else asdict(low),
        }

    def facts(self) -> dict[str, Any]:
        """The machine and the graph."""
        import floor
        import torch

        return {
            "graph": self.options.graph,
            "vertices": self.vertices,
            "edges": self.edge_index.size(1),
            "threads": self.options.threads,
            "turns": self.options.turns,
            "torch": torch.__version__,
            "caches": floor.caches(),
            "bandwidth": [asdict(wide) for wide in self.wide],
            "notes": self.notes,
        }


def _forward(do: Callable[..., Any], x: Any, weight: Any) -> Any:
    import torch

    with torch.no_grad():
        return do(x, weight)


def _both(do: Callable[..., Any], x: Any, weight: Any, grad: Any) -> Any:
    """Forward and backward; weights an edge and head learn (attention), one weight an edge does not (GCN)."""
    x = x.detach().requires_grad_()
    learns = weight is not None and weight.dim() == 2
    weight = weight.detach().requires_grad_() if learns else weight
    do(x, weight).backward(grad)
    return x.grad


# Text --------------------------------------------------------------------------------------------


def text(facts: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """The tables as Markdown."""
    widths = ", ".join(f"{size} ({name})" for name, size in facts["caches"].items())
    lines = [
        f"Graph: {facts['graph']}, {facts['vertices']:,} vertices, {facts['edges']:,} edges; "
        f"{facts['threads']} threads; caches {widths}.",
        "",
        "| threads | read from memory | copied (read + written) | read from the last cache |",
        "|---|---|---|---|",
    ]
    for wide in facts["bandwidth"]:
        rates = (f"{wide[key] / 1e9:.1f} GB/s" for key in ("read", "copy", "cache"))
        lines.append(f"| {wide['threads']} | {' | '.join(rates)} |")
    methods = list(dict.fromkeys(name for row in rows for name in row["seconds"]))
    heads = ["case", *methods, "DGL / Kagome", "floor: once / from cache / gathered", "Kagome / floor once"]
    lines += ["", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in rows:
        cells = [row["case"], *(_time(row["seconds"].get(method)) for method in methods)]
        lines.append(f"| {' | '.join([*cells, *_judged(row)])} |")
    return "\n".join([*lines, "", *facts["notes"]]) + "\n"


def _time(seconds: Any) -> str:
    return "-" if seconds is None else f"{1e3 * seconds[0]:.1f} ({1e3 * seconds[1]:.1f}) ms"


def _judged(row: dict[str, Any]) -> list[str]:
    """Against DGL, and against the floors."""
    taken, low = row["seconds"], row["floors"]
    ours, theirs = taken.get("Kagome"), taken.get("DGL")
    against = "-"
    if ours and theirs:
        times = theirs[0] / ours[0]
        against = f"{times:.2f}: {'yes' if times >= 1 else '**no**'}"
    if low is None:
        return [against, "-", "-"]
    named = " / ".join(f"{1e3 * low[key]:.1f}" for key in ("once", "cached", "gathered"))
    return [against, f"{named} ms", f"{ours[0] / low['once']:.1f}" if ours else "-"]


if __name__ == "__main__":
    main()
