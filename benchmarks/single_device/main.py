"""Is Kagome faster than PyG on one device? Against PyG with edge_index and with a CSR adjacency, in turns.

The group ``webs`` has DGL as a side too, where it is installed.

Run: python benchmarks/single_device/main.py --data ../shared/data  (resumes where it stopped)
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from trial import Figure, Result, Trial, figure, interleaved, prepare, ratio, run, warm_up

HERE = Path(__file__).parent
HEADLINE = ("gcn", "gin", "sage", "gat")
ZOO = ("gcn", "sage", "gin", "gat", "gatv2", "pna", "edgecnn", "gcn2", "appnp", "sgc", "deepgcn", "resgcn+",
       "transformer")  # fmt: skip
NO_CSR = {
    "gat": "a weight an edge comes out of every forward; the layer has no product with an adjacency",
    "gatv2": "as gat",
    "transformer": "as gat",
    "pna": "four reductions of an MLP of both ends of an edge",
    "edgecnn": "an MLP of both ends of an edge",
    "deepgcn": "a learned softmax over the in-edges",
}
"""Why PyG has no product with a CSR adjacency in these; the others are run with one."""
GRAPHS = ("ego-twitter", "Cornell5", "made")
WEBS = ("cnr-2000-like", "soc-Epinions-like")
GROUPS = ("headline", "dropout", "zoo", "webs")
SIDES = {
    "edge_index": "PyG edge_index",
    "csr": "PyG CSR",
    "dgl": "DGL",
    "kagome": "Kagome",
    "kagome-no-fast": "Kagome, no fast paths",
}
"""Names in the tables, in the order of columns; DGL and the last one are shown where they were run."""
FASTER = {"gcn": 8.0, "gin": 8.0, "sage": 5.0, "gat": 3.0}
"""Least times faster than ``edge_index``; than CSR: 1.5, and GAT in at most a third of the memory."""
FASTER_THAN_CSR = 1.5
LESS_MEMORY = 3.0


@dataclass(frozen=True)
class Row:
    """One line of a table: a model on a graph, and the side that each trial of it is."""

    group: str
    graph: str
    model: str
    dropout: float
    trials: tuple[Trial, ...]


def rows(options: argparse.Namespace) -> list[Row]:
    """The grid that was asked for."""
    made: list[Row] = []
    plan = {
        "headline": [(graph, model, 0.0, 3) for graph in options.graphs for model in HEADLINE],
        "dropout": [(options.zoo_graph, model, 0.5, 3) for model in HEADLINE],
        "zoo": [(options.zoo_graph, model, 0.0, 2) for model in ZOO],
        "webs": [(graph, model, 0.0, 3) for graph in options.webs for model in ("gcn", "sage", "gat")],
    }
    for group in options.group:
        for graph, model, dropout, layers in plan[group]:
            if options.only and model not in options.only:
                continue
            common = {"graph": graph, "model": model, "dropout": dropout, "layers": layers}
            limits = {"epochs": options.epochs, "seconds": options.seconds, "threads": options.threads}
            sides = sides_of(group, model)
            sides += ["kagome-no-fast"] if options.before else []
            trials = tuple(Trial(side=side, **common, **limits) for side in sides)  # type: ignore[arg-type]
            made.append(Row(group, graph, model, dropout, trials))
    return made


def sides_of(group: str, model: str) -> list[str]:
    """Which sides run a model: on the webs PyG in the faster of its ways, and DGL where it is installed."""
    csr = [] if model in NO_CSR else ["csr"]
    if group == "webs":
        return [*(csr or ["edge_index"]), *(["dgl"] if importlib.util.find_spec("dgl") else []), "kagome"]
    return ["edge_index", *csr, "kagome"]


def main() -> None:
    """Run the grid and write ``results.json`` and ``results.md``."""
    options = arguments()
    grid = rows(options)
    do = partial(run, runs=options.runs, data=options.data, fresh=options.fresh, limit=options.limit)
    ours = [trial for row in grid for trial in row.trials if trial.side == "kagome"]
    there = all((options.runs / t.file(turn)).exists() for t in ours for turn in range(options.zoo_turns))
    if not options.smoke and (options.fresh or not there):
        warm_up(sorted({row.model for row in grid}), options.runs, options.threads)
    prepare([row.graph for row in grid], options.runs, options.data, options.threads)
    told = []
    for row in grid:  # the sides of one row meet the machine in the same minutes
        turns = options.zoo_turns if row.group == "zoo" else options.turns
        found = interleaved(row.trials, turns, do, lambda line: print(line, flush=True))
        told.append(told_of(row, found))
    facts = {
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "torch": version("torch"),
        "torch_geometric": version("torch_geometric"),
        "threads": options.threads,
        "turns": options.turns,
        "zoo_turns": options.zoo_turns,
        "epochs": options.epochs,
        "seconds": options.seconds,
    }
    told = beside_others(told, options)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "results.json").write_text(json.dumps({"facts": facts, "rows": told}, indent=1) + "\n")
    (options.out / "results.md").write_text(tables(told))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder of raw data sets")
    parser.add_argument("--group", nargs="*", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--graphs", nargs="*", default=list(GRAPHS), help="of the headline models")
    parser.add_argument("--webs", nargs="*", default=list(WEBS), help="graphs of the group webs")
    parser.add_argument("--zoo-graph", default="made", help="of the zoo and of the rows with dropout")
    parser.add_argument("--only", nargs="*", help="models")
    parser.add_argument("--before", action="store_true", help="Kagome without its fast paths, too")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--zoo-turns", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=5, help="timed epochs of a run, at most")
    parser.add_argument("--seconds", type=float, default=4.0, help="of timed epochs a run, about; at least 2")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds after which a run is ended")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--fresh", action="store_true", help="run again what is there")
    parser.add_argument("--runs", type=Path, default=HERE / "runs")
    parser.add_argument("--out", type=Path, default=HERE, help="folder of the results")
    parser.add_argument("--smoke", action="store_true", help="a tiny graph, to see that it works")
    options = parser.parse_args()
    if options.smoke:
        options.graphs, options.zoo_graph, options.turns, options.epochs = ["tiny"], "tiny", 1, 2
        options.zoo_turns, options.webs = 1, ["tiny-web", "tiny-social"]
        options.group = ["headline"] if options.group == list(GROUPS) else options.group
        options.only = options.only or ["gcn"]
    return options


def beside_others(told: list[dict[str, Any]], options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows, with those that an earlier call measured and this one did not, in the order of groups."""
    earlier = options.out / "results.json"
    then = json.loads(earlier.read_text())["rows"] if earlier.exists() and not options.smoke else []
    rows_by_name = {(row["group"], row["graph"], row["model"]): row for row in [*then, *told]}
    return sorted(rows_by_name.values(), key=lambda row: list(GROUPS).index(row["group"]))


def told_of(row: Row, found: Sequence[Sequence[Result]]) -> dict[str, Any]:
    """A row's figures as plain values."""
    figures = {trial.side: figure(results) for trial, results in zip(row.trials, found, strict=True)}
    told: dict[str, Any] = {key: getattr(row, key) for key in ("group", "graph", "model", "dropout")}
    told["layers"] = row.trials[0].layers
    told["sides"] = {
        trial.side: side_told(figures[trial.side], results)
        for trial, results in zip(row.trials, found, strict=True)
    }
    ours = figures["kagome"]
    told["faster"] = {
        side: ratio(theirs, ours)
        for side, theirs in figures.items()
        if side != "kagome" and theirs is not None and ours is not None
    }
    told["loss_difference"] = loss_difference(row, found)
    return told


def side_told(found: Figure | None, results: Sequence[Result]) -> dict[str, Any]:
    if found is None:
        return {"error": next((str(r["error"]) for r in results if "error" in r), "no runs")}
    first = [r["first"] for r in results]
    return {
        "epoch_seconds": found.seconds,
        "spread": [found.low, found.high],
        "peak_memory_bytes": found.peak,
        "absolute_memory_bytes": found.absolute,
        "first_epoch_seconds": sorted(first)[len(first) // 2],
        "set_up_seconds": sorted(r["set_up"] for r in results)[len(results) // 2],
        "timed_epochs": [len(r["seconds"]) for r in results],
    }


def loss_difference(row: Row, found: Sequence[Sequence[Result]]) -> float | None:
    """The largest relative difference of Kagome's losses from PyG's over common epochs; without dropout."""
    by_side = {t.side: results[0] for t, results in zip(row.trials, found, strict=True) if results}
    pyg = "edge_index" if "edge_index" in by_side else "csr"
    ours, theirs = (by_side.get(side, {}).get("losses") for side in ("kagome", pyg))
    if row.dropout or not ours or not theirs:
        return None
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=False))


# Tables ------------------------------------------------------------------------------------------


def tables(told: Sequence[dict[str, Any]]) -> str:
    """All tables as Markdown: one a graph and group."""
    parts = []
    titles = {
        "headline": "{graph}, {layers} layers, hidden 128",
        "dropout": "{graph}, {layers} layers, hidden 128, dropout 0.5",
        "zoo": "{graph}, the whole zoo, {layers} layers, hidden 128",
        "webs": "{graph}, made, {layers} layers, hidden 128",
    }
    for group, graph in dict.fromkeys((t["group"], t["graph"]) for t in told):
        some = [t for t in told if (t["group"], t["graph"]) == (group, graph)]
        parts.append(f"## {titles[group].format(**some[0])}\n\n{table(some)}\n")
    without = [model for model in NO_CSR if any(t["model"] == model for t in told)]
    if without:
        reasons = "; ".join(f"{model}: {NO_CSR[model]}" for model in without)
        parts.append(f"No CSR adjacency in PyG: {reasons}.\n")
    return "\n".join(parts)


def table(told: Sequence[dict[str, Any]]) -> str:
    """One table: epoch, ratios with their spread beside their targets, memory."""
    ran = {side for t in told for side in t["sides"]}
    shown = [side for side in SIDES if side in ran or side not in ("dgl", "kagome-no-fast")]
    held = [side for side in shown if side != "kagome-no-fast"]
    rivals = [side for side in held if side != "kagome"]
    than = [
        "times faster than edge_index",
        *(f"than {SIDES[side].removeprefix('PyG ')}" for side in rivals[1:]),
    ]
    memory = " / ".join(SIDES[side].removeprefix("PyG ") for side in held)
    heads = ["model", *(SIDES[side] for side in shown), *than]
    heads += [f"peak memory: {memory}", "less than edge_index", "losses differ"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for t in told:
        sides, faster, least = t["sides"], t["faster"], targets(t)
        cells = [t["model"], *(seconds(sides.get(side)) for side in shown)]
        cells += [judged(faster.get(side), least[side]) for side in rivals]
        cells.append(" / ".join(megabytes(sides.get(side)) for side in held))
        cells.append(less_memory(t))
        differ = t["loss_difference"]
        cells.append("-" if differ is None else f"{differ:.0e}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def targets(t: dict[str, Any]) -> dict[str, float]:
    """Least ratio against each side: the zoo and the webs are to be no slower than any."""
    if t["group"] in ("zoo", "webs"):
        return {"edge_index": 1.0, "csr": 1.0, "dgl": 1.0}
    return {"edge_index": FASTER[t["model"]], "csr": FASTER_THAN_CSR}


def seconds(side: dict[str, Any] | None) -> str:
    if side is None:
        return "-"
    if "error" in side:
        return side["error"].splitlines()[0]
    low, high = (1e3 * s for s in side["spread"])
    return f"{1e3 * side['epoch_seconds']:,.0f} ms ({low:,.0f} to {high:,.0f})"


def megabytes(side: dict[str, Any] | None) -> str:
    return "-" if side is None or "error" in side else f"{side['peak_memory_bytes'] / 1e6:,.0f} MB"


def judged(found: Sequence[float] | None, target: float) -> str:
    """A ratio with its spread, and whether it reaches the target."""
    if found is None:
        return "-"
    middle, low, high = found
    mark = "yes" if middle >= target else "**no**"
    return f"{middle:.2f} ({low:.2f} to {high:.2f}); at least {target:g}: {mark}"


def less_memory(t: dict[str, Any]) -> str:
    sides = [t["sides"].get(side, {}).get("peak_memory_bytes") for side in ("edge_index", "kagome")]
    if None in sides or not sides[1]:
        return "-"
    times = sides[0] / sides[1]
    if t["group"] in ("zoo", "webs") or t["model"] != "gat":
        return f"{times:.1f} times"
    return f"{times:.1f} times; at least {LESS_MEMORY:g}: {'yes' if times >= LESS_MEMORY else '**no**'}"


if __name__ == "__main__":
    main()
