"""Do coded and late rows cost accuracy? The same seeds with exact rows beside codecs, lateness and both.

Run: python benchmarks/wire/accuracy.py --data ../shared/data   (resumes where it stopped)
     python benchmarks/wire/accuracy.py --hours 0               (trains nothing, writes the tables again)

Every setting of a graph, a model and a seed runs in the same 4 ranks, one after the other. Rows are paired
with exact ones of the same sources: two versions of Kagome may round otherwise, which after 200 epochs can be
a point or three. So exact rows are run again for sources that have none; the others stay.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from statistics import fmean, median, stdev
from typing import TYPE_CHECKING, Any

import tyro
from scipy.stats import t as student

if TYPE_CHECKING:
    from kagome.config import Metric

HERE = Path(__file__).parent
GRAPHS: Mapping[str, dict[str, Any]] = {
    "cora": {"name": "Cora"},
    "squirrel": {"name": "squirrel", "undirected": True, "self_loops": True},
    "flickr": {"name": "flickr-attributed", "project": 128},
    "tolokers": {"name": "Tolokers"},
    "cornell5": {"name": "cornell5", "project": 128},
}
METRICS: Mapping[str, Metric] = {"tolokers": "roc_auc"}
"""Where accuracy says little: four of five Tolokers are of one class."""
EPOCHS: Mapping[str, int] = {"cornell5": 100, "tolokers/gat4": 100}
"""Of what takes so long an epoch that all its settings would take hours; else 200."""
NOT_LEARNT = {"flickr/gat4", "cornell5/gat4"}
"""Of which exact rows learn nothing (one class, in all epochs): differences there say nothing."""
MODELS: Mapping[str, dict[str, Any]] = {
    "gcn": {"name": "gcn", "layers": 3},
    "sage": {"name": "sage", "layers": 3},
    "gat2": {"name": "gat", "layers": 2},
    "gat4": {"name": "gat", "layers": 4},
    "gcn2": {"name": "gcn2", "layers": 8},
}
CODECS = ("none", "bf16", "int8", "int2", "onebit")
LATE: Mapping[str, dict[str, Any]] = {
    "waits": {},
    "late": {"max_age": 1},
    "E2": {"max_age": 1, "sync_every": 2},
    "E5": {"max_age": 1, "sync_every": 5},
    "E10": {"max_age": 1, "sync_every": 10},
    "E20": {"max_age": 1, "sync_every": 20},
    "auto": {"max_age": 1, "sync_every": "auto"},
    "smooth": {"max_age": 1, "smoothing": 0.8},  # the mean of earlier epochs' rows: PipeGCN's
    "skipped": {"skip_drift": 0.1, "max_age": 4},  # rows that have hardly moved: SANCUS's
    "drawn": {"halo_sample": 0.1},  # BNS-GCN's
    "shared": {"adaptive_bits": True},  # with a codec of 2 bits or 4: AdaQP's
}


Pair = tuple[int, str | None]
"""A seed, and the sources that it was run by (None: before these were noted)."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Train with exact rows and with coded and late ones."""

    data: str = "../shared/data"
    """Folder of raw data sets."""
    graphs: tuple[str, ...] = tuple(GRAPHS)
    """Graphs."""
    models: tuple[str, ...] = tuple(MODELS)
    """Models."""
    codecs: tuple[str, ...] = CODECS
    """Codecs."""
    late: tuple[str, ...] = ("waits", "late", "E2", "E5", "E10", "E20", "auto")
    """How late; besides these, smooth, and what else spares bytes: skipped, drawn, shared."""
    all_pairs: bool = False
    """Every codec with every lateness; else those of which one is ``waits``, ``none`` or ``onebit``."""
    seeds: int = 10
    """Seeds of each row."""
    epochs: int | None = None
    """Epochs of a run; by default ``EPOCHS``."""
    hidden: int = 64
    """Width."""
    ranks: int = 4
    """Parts of the graph."""
    guard: bool = True
    """Let the guard watch."""
    hours: float | None = None
    """Begin no run after so many hours; what is there stays."""
    out: Path = HERE
    """Folder of the results."""


@dataclass(frozen=True)
class Case:
    """One run."""

    graph: str
    model: str
    codec: str
    late: str
    guard: bool
    seed: int
    source: str
    epochs: int

    @property
    def exact(self) -> bool:
        """Whether this is what others are compared with."""
        return self.codec == "none" and self.late == "waits"

    @property
    def setting(self) -> str:
        """What is compared with exact rows."""
        return f"{self.codec} {self.late}{'' if self.guard else ' unguarded'}"

    @property
    def key(self) -> str:
        """Under which its result is kept."""
        key = f"{self.graph}/{self.model}/{self.setting}/{self.seed}"
        return f"{key}@{self.source}" if self.exact else key


def source_of() -> str:
    """A short name for what Kagome's files hold."""
    import kagome

    folder = Path(kagome.__file__).parent
    held = sha256(b"".join(path.read_bytes() for path in sorted(folder.rglob("*.py"))))
    return held.hexdigest()[:8]


def cases(options: Options, source: str) -> Iterator[Case]:
    """All runs, in an order in which a stop leaves the same of all settings."""
    for seed in range(options.seeds):
        for graph in options.graphs:
            for model in options.models:
                usual = EPOCHS.get(f"{graph}/{model}", EPOCHS.get(graph, 200))
                epochs = options.epochs or usual
                for codec in options.codecs:
                    for late in options.late:
                        if not (options.all_pairs or late == "waits" or codec in ("none", "onebit")):
                            continue
                        guard = options.guard or (codec == "none" and late == "waits")
                        yield Case(graph, model, codec, late, guard, seed, source, epochs)


def read(path: Path) -> dict[str, Any]:
    """All results."""
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def put(path: Path, key: str, value: Any) -> None:
    """Keep one result; stopped at any moment, the file is whole."""
    kept = read(path) | {key: value}
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = ",\n".join(f"{json.dumps(name)}: {json.dumps(kept[name])}" for name in sorted(kept))
    new = path.with_suffix(".tmp")
    new.write_text(f"{{\n{rows}\n}}\n")
    os.replace(new, path)


def work(options: Options, wanted: Sequence[Case]) -> None:
    """What each rank does: one run after the other, on one graph."""
    import torch

    from kagome.config import Data
    from kagome.graph.datasets.load import load_data

    torch.set_num_threads(1)
    data = load_data(Data(root=options.data, **GRAPHS[wanted[0].graph]))
    root = int(os.environ.get("RANK", "0")) == 0
    for case in wanted:
        found = trained(options, case, data)
        if root:
            put(options.out / "results_accuracy.json", case.key, found)
            print(f"{case.key}: {found['test']:.4f}, {found['seconds'] * 1e3:.0f} ms an epoch", flush=True)


def trained(
    options: Options, case: Case, data: Any, *, optimizer: Callable[[Any], Any] | None = None
) -> dict[str, Any]:
    """One run."""
    import torch
    from torch_geometric.utils import degree

    from kagome import Parallel, Trainer
    from kagome.config import Model, Report, Train
    from kagome.model.zoo import build_model

    torch.manual_seed(case.seed)
    settings = Model(hidden=options.hidden, dropout=0.5, **MODELS[case.model])
    counts = degree(data.edge_index[1], data.num_nodes, dtype=torch.long).bincount()
    model = build_model(
        settings,
        in_channels=data.num_features,
        out_channels=int(data.y.max()) + 1,
        num_nodes=data.num_nodes,
        degree_histogram=counts,
    )
    parallel = Parallel(codec=case.codec, guard=case.guard, partitioner="metis", **LATE[case.late])  # type: ignore[arg-type]
    trainer = Trainer(
        model,
        data,
        parallel=parallel,
        optimizer=optimizer,
        train=Train(
            epochs=case.epochs,
            seed=case.seed,
            eval_every=5,
            check=False,
            metric=METRICS.get(case.graph, "auto"),
        ),
        report=Report(page=False, trace=False, progress=False),
    )
    with trainer:
        told = trainer.fit()
        seconds = sorted(record.seconds for record in trainer.records)
        precision = trainer.engine.controller.precision
        return {
            "test": told["test_metric"],
            "val": told["val_metric"],
            "best_epoch": told["best_epoch"],
            "loss": trainer.records[-1].loss,
            "seconds": seconds[len(seconds) // 2],
            "halo_bytes": told["bytes_per_epoch"]["halo"],
            "cosines": [round(probe.cosine, 3) for probe in precision.found],
            "climbed": [(probe.epoch, probe.level.text()) for probe in precision.climbed],
            "epochs": case.epochs,
            "source": case.source,
        }


def main(options: Options) -> None:
    """Run what is missing, write the tables."""
    from kagome.launch.launcher import start_local

    path = options.out / "results_accuracy.json"
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"):
        os.environ[name] = "1"  # a rank is a device: one core
    kept = read(path)
    missing = [
        case for case in cases(options, source_of()) if kept.get(case.key, {}).get("epochs") != case.epochs
    ]
    begun = time.monotonic()
    for _, block in groupby(missing, key=lambda case: (case.graph, case.seed)):
        if options.hours is not None and time.monotonic() - begun >= options.hours * 3600:
            break
        start_local(options.ranks, work, options, list(block), loaded=("kagome.train.trainer",))
    kept = read(path)
    (options.out / "results_accuracy.md").write_text(f"{overall(kept)}\n{table(kept)}")


Rows = dict[tuple[str, str], dict[str, dict[Pair, Any]]]
"""Results by graph and model, by setting, by pair."""


def sorted_rows(kept: Mapping[str, Any]) -> Rows:
    """All results, in their places."""
    rows: Rows = {}
    for key, row in kept.items():
        graph, model, setting, seed = key.split("/")
        pair = int(seed.split("@")[0]), row.get("source")
        rows.setdefault((graph, model), {}).setdefault(setting, {})[pair] = row
    return dict(sorted(rows.items()))


def overall(kept: Mapping[str, Any]) -> str:
    """What settings cost over graphs and models where exact rows learn; each counts once, with its mean."""
    found: dict[str, list[float]] = {}
    for (graph, model), settings in sorted_rows(kept).items():
        if f"{graph}/{model}" in NOT_LEARNT:
            continue
        exact = settings.pop("none waits", {})
        for setting, every in settings.items():
            pairs = [
                (row["test"] - exact[pair]["test"]) * 100 for pair, row in every.items() if pair in exact
            ]
            if pairs:
                found.setdefault(setting, []).append(fmean(pairs))
    lines = [
        "| rows cross | graphs x models | difference to exact, 95 % | worst | median | best |",
        "|---|---|---|---|---|---|",
    ]
    for setting, means in sorted(found.items()):
        spread = " | ".join(f"{one:+.2f}" for one in (min(means), median(means), max(means)))
        lines.append(f"| {setting} | {len(means)} | {interval(means)} | {spread} |")
    return "\n".join(lines) + "\n"


def table(kept: Mapping[str, Any]) -> str:
    """Differences to exact rows in points, by graph and model; intervals over pairs of the same seed."""
    lines = [
        "| graph | model | rows cross | epochs | seeds | test % | difference to exact, 95 % "
        "| halo bytes | climbed | sources |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (graph, model), settings in sorted_rows(kept).items():
        exact = settings.get("none waits", {})
        for setting, every in sorted(settings.items(), key=lambda each: each[0] != "none waits"):
            found = {pair: row for pair, row in every.items() if pair in exact}
            if not found:
                continue
            seeds = {seed for seed, _ in found}  # one that several sources ran counts once, with its mean
            tests = [fmean(row["test"] * 100 for (s, _), row in found.items() if s == seed) for seed in seeds]
            pairs = [(found[s]["test"] - exact[s]["test"]) * 100 for s in found]
            share = [found[s]["halo_bytes"] / max(exact[s]["halo_bytes"], 1) for s in found]
            climbed = sum(bool(row["climbed"]) for row in found.values())
            lines.append(
                f"| {graph} | {model} | {setting} | {epochs_of(found.values())} | {len(tests)} "
                f"| {fmean(tests):.2f} | {'' if setting == 'none waits' else interval(pairs)} | "
                f"{f'{fmean(share):.1%}' if share else ''} | {climbed or ''} "
                f"| {', '.join(sorted({source or 'earlier' for _, source in found}))} |"
            )
    return "\n".join(lines) + "\n"


def epochs_of(rows: Iterable[Mapping[str, Any]]) -> str:
    """Epochs of runs."""
    epochs = sorted({int(row["epochs"]) for row in rows})
    return " to ".join(map(str, epochs))


def interval(pairs: Sequence[float]) -> str:
    """Mean and 95 % interval of paired differences; bold where all of it lies below -0.5."""
    if not pairs:
        return ""
    if len(pairs) == 1:
        return f"{pairs[0]:+.2f}"
    half = float(student.ppf(0.975, len(pairs) - 1)) * stdev(pairs) / math.sqrt(len(pairs))
    text = f"{fmean(pairs):+.2f} ({fmean(pairs) - half:+.2f} to {fmean(pairs) + half:+.2f})"
    return f"**{text}**" if fmean(pairs) + half < -0.5 else text


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
