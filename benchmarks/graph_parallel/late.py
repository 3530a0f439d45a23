"""Do late and sampled rows pay, and partial sums? On one host, and between emulated ones, by turns.

Run: python benchmarks/graph_parallel/late.py                        (one host; resumes where it stopped)
     python benchmarks/graph_parallel/late.py --rates 50 200 1000    (as root: two emulated hosts as well)
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from speed import GRAPH, HIDDEN, cut, kagome

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from cluster import Cluster, NotPermittedError, end_on_sigterm  # noqa: E402

RANKS, LAYERS = 2, 3
WAYS: Mapping[str, Sequence[str]] = {
    "exact": (),
    "exact, no sums": ("--parallel.partial-sums", "off"),
    "late": ("--parallel.max-age", "1"),
    "sampled": ("--parallel.halo-sample", "0.1"),
}
SETTLED = 2
"""Epochs of a run that do not count: the first fills what the others read, for late rows the second too."""
HOST = "one host"
SAID = "exact rows are forecast to be faster here"


def run(way: str, place: str, turn: int, options: argparse.Namespace, cluster: Cluster | None) -> Any:
    """One run's summary, from its folder, with the median epoch."""
    words = f"late-{place}-{options.model}-{way}-{turn}-{options.epochs}-{options.threads}"
    words = words.replace(",", "").replace(" ", "-").replace("/", "-")
    folder = options.runs / (words + ("-tiny" if options.smoke else ""))
    done = folder / "summary.json"
    if options.fresh or not done.exists():
        shutil.rmtree(folder, ignore_errors=True)
        command = ["train", "--data.partition", str(cut(RANKS, options)), "--out", str(folder)]
        command += ["--model.name", options.model, "--model.layers", str(LAYERS)]
        command += ["--model.hidden", str(HIDDEN), "--model.dropout", "0"]
        command += ["--train.epochs", str(options.epochs), "--train.eval-every", str(options.epochs)]
        command += ["--train.no-check", "--report.no-page", "--report.no-trace"]
        # A probe computes an epoch twice, and the guard may make late rows wait: here each epoch is alike.
        command += ["--parallel.graph", str(RANKS), "--parallel.no-guard", *WAYS[way]]
        if cluster is None:
            kagome(options, *command, "--nproc", str(RANKS))
        else:
            apart(cluster, command, options)
    found = dict(json.loads(done.read_text()))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    # The last epoch evaluates, which its seconds do not have in them, but late rows are then waited for.
    found["seconds"] = statistics.median(line["seconds"] for line in lines[SETTLED:-1])
    found["loss"] = lines[-1]["loss"]
    return found


def apart(cluster: Cluster, command: Sequence[str], options: argparse.Namespace) -> None:
    """Run a command as one rank a host; these hosts share this machine's memory, which ranks must not use.

    Raises:
        SystemExit: If a rank fails, with the last lines of what it said.
    """
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")
    words = [sys.executable, "-m", "kagome", *command, "--parallel.no-shared-memory"]
    for rank in cluster.launch(words, RANKS, dict.fromkeys(names, str(options.threads))):
        if rank.returncode:
            raise SystemExit("\n".join((rank.stderr or rank.stdout).splitlines()[-20:]))


def row(place: str, found: Mapping[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """One place's figures."""
    seconds = {way: [one["seconds"] for one in runs] for way, runs in found.items()}
    ratios = {
        way: [one / exact for one, exact in zip(each, seconds["exact"], strict=True)]
        for way, each in seconds.items()
    }
    return {
        "place": place,
        "seconds": {way: spread(each) for way, each in seconds.items()},
        "of_exact": {way: spread(each) for way, each in ratios.items()},
        "peak_memory_bytes": {
            way: statistics.median(max(one["peak_memory_bytes"]) for one in runs)
            for way, runs in found.items()
        },
        "bytes_per_epoch": {way: runs[0]["bytes_per_epoch"]["total"] for way, runs in found.items()},
        "said": {way: any(SAID in note for note in runs[0]["notes"]) for way, runs in found.items()},
    }


def spread(values: Sequence[float]) -> list[float]:
    """The median, the least and the most."""
    return [statistics.median(values), min(values), max(values)]


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as Markdown, a line a place and way."""
    lines = [
        "| ranks | rows | an epoch | of exact rows' | peak memory, a rank | sent an epoch | told at start |",
        "|---" * 7 + "|",
    ]
    for one in rows:
        for way in WAYS:
            middle, low, high = (1e3 * each for each in one["seconds"][way])
            share, least, most = one["of_exact"][way]
            cells = [one["place"], way, f"{middle:,.0f} ms ({low:,.0f} to {high:,.0f})"]
            cells += [f"{share:.2f} ({least:.2f} to {most:.2f})"]
            cells += [f"{one[name][way] / 1e6:,.0f} MB" for name in ("peak_memory_bytes", "bytes_per_epoch")]
            cells += ["exact rows are faster" if one["said"][way] else "-"]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rates", type=float, nargs="*", default=[], help="Mbit/s of emulated hosts' links")
    parser.add_argument("--model", default="sage")
    parser.add_argument("--epochs", type=int, default=12, help=f"{SETTLED} and the last do not count")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="a rank")
    parser.add_argument("--fresh", action="store_true", help="run again what is there")
    parser.add_argument("--runs", type=Path, default=HERE / "runs")
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument("--smoke", action="store_true", help="a tiny graph, to see that it works")
    parser.set_defaults(env={})
    options = parser.parse_args()
    if options.smoke:
        options.turns, options.epochs = 1, SETTLED + 2
    return options


def main() -> None:
    """Run the grid and write ``results_late.json`` and ``results_late.md`` after each place."""
    options, rows = parsed(), []
    end_on_sigterm()
    options.runs.mkdir(parents=True, exist_ok=True)
    options.out.mkdir(parents=True, exist_ok=True)
    for rate in (None, *options.rates):
        place = HOST if rate is None else f"{RANKS} hosts, {rate:g} Mbit/s"
        found: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
        with ExitStack() as stack:
            cluster = None
            if rate is not None:
                try:
                    cluster = stack.enter_context(Cluster(RANKS, rate, name="kagome-late"))
                except NotPermittedError as error:
                    raise SystemExit(f"late.py: {error}") from None
            for turn in range(options.turns):
                # Who goes first alternates: a slow minute of the machine is not always one way's.
                for way in sorted(WAYS, reverse=bool(turn % 2)):
                    found[way].append(run(way, place, turn, options, cluster))
        rows.append(row(place, found))
        print(rows[-1], flush=True)
        write(rows, options)


def write(rows: Sequence[Mapping[str, Any]], options: argparse.Namespace) -> None:
    """Both files of results."""
    import torch

    facts = {
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "torch": torch.__version__,
        "graph": GRAPH,
        "model": f"{options.model}, {LAYERS} layers, hidden {HIDDEN}",
        "threads": options.threads,
        "epochs": options.epochs,
        "turns": options.turns,
    }
    told = json.dumps({"facts": facts, "rows": rows}, indent=1) + "\n"
    (options.out / "results_late.json").write_text(told)
    (options.out / "results_late.md").write_text(table(rows))


if __name__ == "__main__":
    main()
