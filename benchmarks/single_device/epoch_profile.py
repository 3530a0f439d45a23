"""Where does an epoch's time go? One epoch under torch.profiler: PyG; Kagome without and with fast paths.

Run: python benchmarks/single_device/epoch_profile.py --data ../shared/data --graph made --models gcn gat
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trial import Trial, environment

HERE = Path(__file__).parent
GROUPS = ("aggregation", "dense products", "elementwise and other operators", "optimizer",
          "Python and what no operator shows")  # fmt: skip
GATHERS = ("index_select", "index_add", "index_put", "aten::index", "gather", "scatter", "segment", "sparse",
           "embedding", "sort", "unique", "bincount", "repeat_interleave")  # fmt: skip
DENSE = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "mkldnn_linear", "mkldnn::_linear",
         "aten::dot", "aten::mv")  # fmt: skip
KERNEL = "kernel: "
SIDES = ("edge_index", "csr", "kagome-no-fast", "kagome")
WARM = 2
"""Epochs before the one that is profiled."""


def main() -> None:
    """Profile each side in a process of its own; write ``results_profile.json`` and ``.md``."""
    options = arguments()
    if options.one:
        options.one_out.write_text(json.dumps(profiled(Trial(**json.loads(options.one)), options)))
        return
    told: list[dict[str, Any]] = []
    for model in options.models:
        for side in options.sides:
            trial = Trial(
                side=side,
                graph=options.graph,
                model=model,
                layers=options.layers,
                hidden=options.hidden,
                dropout=options.dropout,
                epochs=2,
                threads=options.threads,
            )
            told.append(apart(trial, options))
            print(model, side, told[-1].get("groups") or told[-1]["error"], flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "results_profile.json").write_text(json.dumps(told, indent=1) + "\n")
    (options.out / "results_profile.md").write_text(text(told))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="folder of raw data sets")
    parser.add_argument("--graph", default="made", help="ego-twitter, Cornell5, made or sbm:...")
    parser.add_argument("--models", nargs="*", default=["gcn", "sage", "gat"])
    parser.add_argument(
        "--sides", nargs="*", choices=SIDES, default=["edge_index", "kagome-no-fast", "kagome"]
    )
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--top", type=int, default=12, help="operators listed a side")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--runs", type=Path, default=HERE / "runs")
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--one-out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.smoke:
        options.graph, options.models, options.sides = "tiny", ["gcn"], ["edge_index", "kagome"]
    return options


def apart(trial: Trial, options: argparse.Namespace) -> dict[str, Any]:
    """The profile of one side, made in a process of its own."""
    options.runs.mkdir(parents=True, exist_ok=True)
    out = options.runs / f"profile-{trial.file(0)}"
    words = ["--one", json.dumps(asdict(trial)), "--one-out", str(out), "--runs", str(options.runs)]
    words += ["--data", str(options.data)] if options.data else []
    command = [sys.executable, str(HERE / "epoch_profile.py"), *words, "--top", str(options.top)]
    done = subprocess.run(command, env=environment(trial.threads), capture_output=True, text=True)
    if done.returncode:
        return {"side": trial.side, "model": trial.model, "error": done.stderr.strip().splitlines()[-1]}
    return dict(json.loads(out.read_text()))


# In the process of its own -----------------------------------------------------------------------


def profiled(trial: Trial, options: argparse.Namespace) -> dict[str, Any]:
    """Train, with the profiler on from the zeroing of the gradients to the end of the step of one epoch.

    The optimizer marks the epoch: so evaluation is outside, and the side is trained as it always is.
    """
    import sides
    import torch
    from torch.profiler import ProfilerActivity, profile, record_function

    import graphs

    torch.set_num_threads(trial.threads)
    graph = graphs.load(trial.graph, options.data, options.runs / "graphs")
    if trial.side.startswith("kagome"):
        name_kernels(record_function)
    found: dict[str, Any] = {}

    class Marked(torch.optim.Adam):
        """Adam that starts and stops the profiler around one epoch."""

        done = 0
        prof: Any = None

        def zero_grad(self, set_to_none: bool = True) -> None:
            if self.done == WARM and self.prof is None:
                self.prof = profile(activities=[ProfilerActivity.CPU], acc_events=True)
                self.prof.start()
                self.epoch = record_function("epoch")
                self.epoch.__enter__()
            super().zero_grad(set_to_none)

        def step(self, closure: Any = None) -> Any:
            with record_function("optimizer"):
                value = super().step(closure)
            self.done += 1
            if self.prof is not None and not found:
                self.epoch.__exit__(None, None, None)
                self.prof.stop()
                found.update(sorted_out(self.prof.events(), options.top))
            return value

    def marked(parameters: Iterable[Any]) -> Marked:
        return Marked(parameters, lr=sides.LR, weight_decay=sides.WEIGHT_DECAY)

    result = sides.train(trial, graph, marked)
    plain = sorted(result["seconds"])[len(result["seconds"]) // 2]
    return {"side": trial.side, "model": trial.model, "graph": trial.graph, "layers": trial.layers,
            "hidden": trial.hidden, "epoch_seconds_around": plain, **found}  # fmt: skip


def name_kernels(record_function: Any) -> None:
    """Give each compiled kernel of Kagome a name in the profile, in this process alone."""
    try:
        from kagome.kernels import ops
    except ImportError:
        return  # a version without kernels of its own

    def named(name: str, do: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with record_function(KERNEL + name):
                return do(*args, **kwargs)

        return call

    for name, do in list(vars(ops).items()):
        # What ``ops`` imports is not its own: the choice of a kernel, types and the caches of layouts.
        own = inspect.isfunction(do) and do.__module__ == ops.__name__
        if own and not name.startswith("_") and name not in ("backend_of", "supports"):
            setattr(ops, name, named(name, do))


def sorted_out(events: Any, top: int) -> dict[str, Any]:
    """Milliseconds by group, which add up to the epoch, and the operators that take most."""
    (whole,) = [e for e in events if e.name == "epoch"]
    groups = dict.fromkeys(GROUPS, 0.0)
    operators: dict[str, list[float]] = {}
    for event in events:
        if event is whole or not inside(event, whole):
            continue
        taken = event.self_cpu_time_total / 1e3
        groups[group_of(event)] += taken
        kept = operators.setdefault(event.name, [0.0, 0.0])
        kept[0] += taken
        kept[1] += 1
    total = whole.time_range.elapsed_us() / 1e3
    groups[GROUPS[-1]] += max(0.0, total - sum(groups.values()))
    most = sorted(operators.items(), key=lambda item: -item[1][0])[:top]
    return {
        "epoch_ms": total,
        "groups": groups,
        "operators": [{"name": name, "ms": ms, "calls": int(calls)} for name, (ms, calls) in most],
    }


def inside(event: Any, whole: Any) -> bool:
    """Whether an event of the training thread lies in the epoch."""
    begins, ends = whole.time_range.start, whole.time_range.end
    return event.thread == whole.thread and begins <= event.time_range.start and event.time_range.end <= ends


def group_of(event: Any) -> str:
    """The group of an event, by its name and by what it runs in."""
    above = event
    while above is not None:
        if above.name == "optimizer":
            return "optimizer"
        if above.name.startswith(KERNEL):
            return "aggregation"
        above = above.cpu_parent
    name = event.name
    if name.startswith(DENSE):
        return "dense products"
    if name.startswith("aten::"):
        return "aggregation" if any(word in name for word in GATHERS) else GROUPS[2]
    return GROUPS[-1]


# Text --------------------------------------------------------------------------------------------


def text(told: list[dict[str, Any]]) -> str:
    """Groups side by side for each model, then the operators of each side."""
    parts = []
    for model in dict.fromkeys(t["model"] for t in told):
        some = [t for t in told if t["model"] == model and "error" not in t]
        missing = [f"{t['side']}: {t['error']}" for t in told if t["model"] == model and "error" in t]
        lines = [f"## {model}", ""]
        if some:
            heads = [{"edge_index": "PyG edge_index", "csr": "PyG CSR", "kagome": "Kagome",
                      "kagome-no-fast": "Kagome, no fast paths"}[t["side"]] for t in some]  # fmt: skip
            lines += [f"| where | {' | '.join(heads)} |", "|---" * (len(some) + 1) + "|"]
            for group in GROUPS:
                cells = [
                    f"{t['groups'][group]:,.1f} ms ({t['groups'][group] / t['epoch_ms']:.0%})" for t in some
                ]
                lines.append(f"| {group} | {' | '.join(cells)} |")
            whole = (f"{t['epoch_ms']:,.1f} ms" for t in some)
            lines.append(f"| the epoch, profiled | {' | '.join(whole)} |")
            around = (f"{1e3 * t['epoch_seconds_around']:,.1f} ms" for t in some)
            lines.append(f"| epochs around it, median | {' | '.join(around)} |")
        for t in some:
            lines += ["", f"{t['side']}, operators by their own time:", "", "| operator | time | calls |"]
            lines += ["|---|---|---|"]
            lines += [f"| `{o['name'].strip()}` | {o['ms']:,.1f} ms | {o['calls']} |" for o in t["operators"]]
        parts.append("\n".join([*lines, *([""] if missing else []), *missing]))
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    main()
