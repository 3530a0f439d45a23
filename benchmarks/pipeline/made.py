"""Is a pipeline that drops no edge faster than torch's own that drops them? 8 GCN layers on a made graph.

Run: python benchmarks/pipeline/made.py    (all sides in turns, one thread a rank; goes on where it stopped)

A turn has all sides one after the other, so that a slow hour is every side's. Each result is kept in
``runs/made.json`` as it is found; ``--fresh`` throws them away. On a quiet machine of two cores five turns of
2 x 4 take about an hour.

kagome: ``Trainer(model, data, parallel=Parallel(pipe=S, chunks=K))`` with history, no edge dropped. Its guard
trusts history in some epochs and not in others; those are exact, and take the time of all stages one after
the other.
unguarded: the same without the guard, so every epoch but the first has history, as in GNNPipe.
dealt: without the guard, and each rank has two stages of half as many layers, which wait for each other less.
exact: ``cross_chunk="exact"``: all chunks pass a layer before any passes the next.
whole: Kagome in one process with as many threads as the others have ranks: no stages, no chunks, no messages.
floor: the products and sums of an epoch and nothing else, on as many threads, with Kagome's kernels.
torch: ``torch.distributed.pipelining.ScheduleGPipe`` over PyG's GCNConv with a normalised CSR adjacency a
micro-batch, the fastest way that PyG has; vertices in the same METIS order, edges between micro-batches lost.
torchgpipe: ``torchgpipe.GPipe`` over the same micro-batches, where it is installed
(``pip install --no-deps torchgpipe==0.0.7``). It is one process with a thread a device, and the CPU is one:
stages run one after the other, with as many threads for computing as the others have ranks. Its layers are a
product and a CSR product whose indices are int32, which MKL takes as they are, and whose transpose is kept.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
import tyro
from torch import Tensor, nn
from torch_geometric.nn import GCNConv

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "single_device"))
GRAPH = "sbm:vertices=100000,degree=21,features=128"
LAYERS, HIDDEN = 8, 128


@dataclass(frozen=True, kw_only=True)
class Options:
    """Time all sides."""

    sides: list[str] = field(default_factory=lambda: list(SIDES))
    """Which."""
    cuts: list[str] = field(default_factory=lambda: ["2x4"])
    """Stages x chunks."""
    turns: int = 5
    """Turns of all sides."""
    epochs: int = 24
    """Epochs a turn; the first three are left out."""
    long_epochs: int = 100
    """Epochs a turn with and without the guard: what it costs depends on how long a run is."""
    lr: float = 0.01
    """Adam's rate: the lower, the more the guard trusts history."""
    fresh: bool = False
    """Throw away what was measured before."""
    graph: str = GRAPH
    """The graph."""
    side: str = ""
    """Used by itself: the side that a rank runs."""
    cut: str = ""
    """Used by itself: stages x chunks of that side."""


class Layers(nn.Module):
    """GCN layers with relu between them."""

    def __init__(self, widths: list[int], last: bool) -> None:
        super().__init__()
        self.convs = nn.ModuleList([GCNConv(a, b) for a, b in pairwise(widths)])
        self.last = last

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Scores, or rows for the next stage."""
        for number, conv in enumerate(self.convs):
            x = conv(x, edge_index)
            if not self.last or number + 1 < len(self.convs):
                x = x.relu()
        return x


def kagome_side(options: Options, stages: int, chunks: int, data: Any, **settings: Any) -> dict[str, Any]:
    """Kagome's epochs, with more settings of ``Parallel``."""
    from kagome import Parallel, Trainer
    from kagome.config import Report, Train

    torch.manual_seed(0)
    classes = int(data.y.max()) + 1
    model = Layers([data.x.size(1), *[HIDDEN] * (LAYERS - 1), classes], last=True)
    trainer = Trainer(
        model,
        data,
        parallel=Parallel(**{"pipe": stages, "chunks": chunks, **settings}),
        train=Train(check=False, eval_every=10_000, lr=options.lr),
        report=Report(progress=False),
    )
    found = trainer.fit(options.epochs)
    seconds = [record.seconds for record in trainer.records]
    trainer.close()
    return {
        "seconds": seconds,
        "losses": [r.loss for r in trainer.records],
        "pipeline": found.get("pipeline"),
        "history": found.get("history"),
    }


def whole_side(options: Options, stages: int, chunks: int, data: Any) -> dict[str, Any]:
    """Kagome's epochs on one rank, with a thread for each rank that others have."""
    torch.set_num_threads(stages)
    return kagome_side(options, stages, chunks, data, pipe=1, graph=1, chunks=1)


def floor_side(options: Options, stages: int, chunks: int, data: Any) -> dict[str, Any]:
    """Seconds of an epoch's products and sums, chunk by chunk, with all edges."""
    from kagome.graph.partition.partitioners import assign
    from kagome.kernels import ops
    from kagome.kernels.base.csr import Structure
    from kagome.sparse_ops import linear

    torch.set_num_threads(stages)
    count, widths = data.num_nodes, [data.x.size(1), *[HIDDEN] * (LAYERS - 1), int(data.y.max()) + 1]
    owner = assign("metis", data.edge_index, count, chunks, 0)
    place = torch.empty(count, dtype=torch.int64)
    place[torch.argsort(owner, stable=True)] = torch.arange(count)
    loops = torch.arange(count).expand(2, -1)
    source, target = torch.cat([place[data.edge_index], loops], 1)
    bounds = [0, *torch.bincount(owner, minlength=chunks).cumsum(0).tolist()]
    # Edges are their own transpose: one layout a chunk serves forward and backward.
    layouts = []
    for low, high in pairwise(bounds):
        mine = (target >= low) & (target < high)
        layouts.append(Structure(source[mine], target[mine] - low, high - low, count).by_target)
    factor, rows = torch.rand(count), {width: torch.randn(count, width) for width in set(widths)}
    weights = [torch.randn(b, a) for a, b in pairwise(widths)]
    seconds = []
    with torch.no_grad():
        for _ in range(options.epochs):
            begun = time.perf_counter()
            for layer, weight in enumerate(weights):
                given, made = rows[weight.size(1)], rows[weight.size(0)]
                for (low, high), layout in zip(pairwise(bounds), layouts, strict=True):
                    linear.linear(given[low:high], weight)
                    # As in its backward; the loss of a single layer would have further passes.
                    linear._of_weight(made[low:high], given[low:high])
                    # The first layer's sums are constant, and no gradient goes beyond it.
                    if layer:
                        linear.linear(made[low:high], weight.t().contiguous())
                        for _ in ("forward", "backward"):
                            ops.sum_rows(layout, made, None, factor[low:high])
            seconds.append(time.perf_counter() - begun)
    return {"seconds": seconds}


class Piece(nn.Module):
    """A stage of torch's pipeline: it counts its calls to know which micro-batch it is given."""

    def __init__(self, inner: Layers, adjacencies: list[Tensor]) -> None:
        super().__init__()
        self.inner, self.adjacencies, self.calls = inner, adjacencies, 0

    def forward(self, x: Tensor) -> Tensor:
        """Run the stage's layers on the next micro-batch."""
        adjacency = self.adjacencies[self.calls % len(self.adjacencies)]
        self.calls += 1
        out: Tensor = self.inner(x, adjacency)
        return out


@dataclass(frozen=True)
class Dropped:
    """The graph in micro-batches of one size, without the edges between them.

    Args:
        x: Features, micro-batch after micro-batch.
        y: Labels.
        weights: Of each vertex in the mean loss over training vertices.
        adjacencies: Normalised, CSR, of each micro-batch.
        kept: Share of the edges.
    """

    x: Tensor
    y: Tensor
    weights: Tensor
    adjacencies: list[Tensor]
    kept: float

    @classmethod
    def of(cls, data: Any, chunks: int) -> Dropped:
        """Vertices in METIS order; those that are left over are left out."""
        from torch_geometric.nn.conv.gcn_conv import gcn_norm

        from kagome.graph.partition.partitioners import assign

        count = data.num_nodes
        owner = assign("metis", data.edge_index, count, chunks, 0)
        order = torch.argsort(owner, stable=True)
        place = torch.empty_like(order)
        place[order] = torch.arange(count)
        size = count // chunks  # torch wants micro-batches of one shape
        edge_index, order = place[data.edge_index], order[: size * chunks]
        adjacencies, kept = [], 0
        for chunk in range(chunks):
            low, high = chunk * size, (chunk + 1) * size
            inside = ((edge_index >= low) & (edge_index < high)).all(0)
            kept += int(inside.sum())
            ends, weight = gcn_norm(edge_index[:, inside] - low, None, size)
            adjacency = torch.sparse_coo_tensor(ends.flip(0), weight, (size, size)).coalesce()
            adjacencies.append(adjacency.to_sparse_csr())
        train = data.train_mask[order].float()
        share = kept / data.edge_index.size(1)
        return cls(data.x[order], data.y[order], train / train.sum(), adjacencies, share)

    @property
    def widths(self) -> list[int]:
        """Of the rows before, between and after the layers."""
        return [self.x.size(1), *[HIDDEN] * (LAYERS - 1), int(self.y.max()) + 1]


def torch_side(options: Options, stages: int, chunks: int, data: Any) -> dict[str, Any]:
    """torch.distributed.pipelining's epochs."""
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, given = dist.get_rank(), Dropped.of(data, chunks)
    torch.manual_seed(0)
    widths, per = given.widths, LAYERS // stages
    mine = Layers(widths[rank * per : (rank + 1) * per + 1], last=rank == stages - 1)
    for conv in mine.convs:
        conv.normalize = False
    stage = PipelineStage(Piece(mine, given.adjacencies), rank, stages, torch.device("cpu"))

    def loss(out: Tensor, target: Tensor) -> Tensor:
        rows = nn.functional.cross_entropy(out, target[:, 0].long(), reduction="none")
        return (rows * target[:, 1]).sum()

    schedule = ScheduleGPipe(stage, chunks, loss_fn=loss)
    optimizer = torch.optim.Adam(mine.parameters(), lr=options.lr, weight_decay=5e-4)
    target = torch.stack([given.y.float(), given.weights * chunks], 1)
    seconds, all_losses = [], []
    for _ in range(options.epochs):
        dist.barrier()
        begun = time.perf_counter()
        optimizer.zero_grad()
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(given.x)
        elif rank == stages - 1:
            schedule.step(target=target, losses=losses)
        else:
            schedule.step()
        optimizer.step()
        dist.barrier()
        seconds.append(time.perf_counter() - begun)
        all_losses.append(float(torch.stack(losses).mean().detach()) if losses else None)
    dist.destroy_process_group()
    return {"seconds": seconds, "losses": all_losses, "edges kept": given.kept}


class Product(torch.autograd.Function):
    """A CSR matrix times rows; its transpose is kept, which torch would make anew in each backward."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, transpose: Tensor, rows: Tensor) -> Tensor:
        ctx.transpose = transpose
        return matrix @ rows

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, Tensor]:
        return None, None, ctx.transpose @ grads[0].contiguous()


def in_int32(matrix: Tensor) -> Tensor:
    """Return a CSR matrix whose indices MKL takes without converting them."""
    parts = matrix.crow_indices().to(torch.int32), matrix.col_indices().to(torch.int32)
    return torch.sparse_csr_tensor(*parts, matrix.values(), size=matrix.shape)


class Numbered(nn.Module):
    """A layer of torchgpipe's, GCN on a micro-batch, whose number each row has with it."""

    def __init__(self, before: int, after: int, adjacencies: list[tuple[Tensor, Tensor]], last: bool) -> None:
        super().__init__()
        self.lin, self.bias = nn.Linear(before, after, bias=False), nn.Parameter(torch.zeros(after))
        self.adjacencies, self.last = adjacencies, last

    def forward(self, given: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Run the layer on a micro-batch."""
        x, number = given
        out = Product.apply(*self.adjacencies[int(number[0])], self.lin(x)) + self.bias  # type: ignore[no-untyped-call]
        return (out if self.last else out.relu()), number


def torchgpipe_side(options: Options, stages: int, chunks: int, data: Any) -> dict[str, Any]:
    """Epochs of torchgpipe."""
    from torchgpipe import GPipe

    torch.set_num_threads(stages)
    given = Dropped.of(data, chunks)
    adjacencies = [(in_int32(each), in_int32(each.t().to_sparse_csr())) for each in given.adjacencies]
    torch.manual_seed(0)
    sizes = list(pairwise(given.widths))
    layers = [Numbered(*size, adjacencies, at + 1 == len(sizes)) for at, size in enumerate(sizes)]
    balance, devices = [LAYERS // stages] * stages, ["cpu"] * stages
    model = GPipe(nn.Sequential(*layers), balance, devices=devices, chunks=chunks, checkpoint="never")
    optimizer = torch.optim.Adam(model.parameters(), lr=options.lr, weight_decay=5e-4)
    number = torch.arange(chunks).repeat_interleave(given.x.size(0) // chunks).float()
    seconds, losses = [], []
    for _ in range(options.epochs):
        begun = time.perf_counter()
        optimizer.zero_grad()
        out, _ = model((given.x, number))
        loss = (nn.functional.cross_entropy(out, given.y, reduction="none") * given.weights).sum()
        loss.backward()
        optimizer.step()
        seconds.append(time.perf_counter() - begun)
        losses.append(float(loss.detach()))
    return {"seconds": seconds, "losses": losses, "edges kept": given.kept}


@dataclass(frozen=True)
class Side:
    """What is timed.

    Args:
        label: Head of its column.
        run: Its epochs, from the options, stages, chunks and the graph.
        ours: Whether it is Kagome's pipeline, set beside what is not.
        one_process: Whether one process has all stages, in place of a rank each.
        long: Whether a turn has as many epochs as a run in which the guard's cost is looked at.
    """

    label: str
    run: Callable[[Options, int, int, Any], dict[str, Any]]
    ours: bool = False
    one_process: bool = False
    long: bool = False


def _ours(label: str, *, long: bool = False, **settings: Any) -> Side:
    return Side(label, partial(kagome_side, **settings), ours=True, long=long)


SIDES = {
    "torch": Side("torch, edges dropped", torch_side),
    "torchgpipe": Side("torchgpipe, edges dropped", torchgpipe_side, one_process=True),
    "kagome": _ours("kagome, none", long=True),
    "unguarded": _ours("kagome without its guard, none", long=True, guard=False),
    "dealt": _ours("two stages a rank, no guard, none", guard=False, stages_per_rank=2),
    "exact": _ours("kagome exact, none", cross_chunk="exact"),
    "whole": Side("kagome in one process, none", whole_side, one_process=True),
    "floor": Side("products and sums alone, none", floor_side, one_process=True),
}


def rank_main(options: Options) -> None:
    """One rank of one side; rank 0 prints what it found."""
    import graphs

    data = graphs.load(options.graph, None, HERE / "runs" / "graphs")
    stages, chunks = map(int, options.cut.split("x"))
    found = SIDES[options.side].run(options, stages, chunks, data)
    if os.environ.get("RANK", "0") == "0":
        print("FOUND " + json.dumps(found))


def measured(options: Options, cut: str, side: str, env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Run one side once, in processes of its own, which have some variables besides."""
    ranks = 1 if SIDES[side].one_process else int(cut.split("x")[0])
    epochs = options.long_epochs if SIDES[side].long else options.epochs
    # The module and not the command torchrun, which may be of another environment, or not on the path.
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    command += [__file__, "--side", side]
    command += ["--cut", cut, "--epochs", str(epochs), "--graph", options.graph, "--lr", str(options.lr)]
    given = {**os.environ, **(env or {})}
    given.pop("OMP_NUM_THREADS", None)
    if ranks == 1:
        # A process that has all stages has as many threads as the others have ranks.
        given["OMP_NUM_THREADS"] = cut.split("x")[0]
    # Of several ranks each has one thread: torchrun sets this. Kagome's may use more while others wait.
    out = subprocess.run(command, env=given, capture_output=True, text=True)
    line = next((li for li in out.stdout.splitlines() if li.startswith("FOUND ")), None)
    if line is None:
        raise SystemExit(f"{side} {cut} failed:\n{out.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(line[6:])
    found["mean"] = fmean(found["seconds"][3:])
    found["loss"] = found.pop("losses", [None])[-1]
    return found


def main(options: Options) -> None:
    """Time all sides in turns and write the table."""
    if options.side:
        rank_main(options)
        return
    if unknown := [side for side in options.sides if side not in SIDES]:
        raise SystemExit(f"no side is called {', '.join(unknown)}: there are {', '.join(SIDES)}")
    sides = [side for side in options.sides if side != "torchgpipe" or find_spec("torchgpipe") is not None]
    if sides != options.sides:
        print("torchgpipe is not installed: it is left out", flush=True)
    import graphs

    graphs.load(options.graph, None, HERE / "runs" / "graphs")
    # What was measured with these settings, by cut, side and turn: a run that was broken off goes on here.
    name = "made" if options.lr == Options.lr else f"made_lr{options.lr:g}"
    kept = HERE / "runs" / f"{name}.json"
    kept.parent.mkdir(exist_ok=True)
    same = {name: getattr(options, name) for name in ("graph", "epochs", "long_epochs", "lr")}
    state: dict[str, Any] = {"settings": same, "facts": {}}
    if kept.exists() and not options.fresh and (old := json.loads(kept.read_text()))["settings"] == same:
        state = old
    facts: dict[str, Any] = state["facts"]
    for cut in options.cuts:
        for turn in range(options.turns):
            for side in sides:
                key = f"{cut} {side} turn {turn}"
                if key not in facts:
                    facts[key] = measured(options, cut, side)
                    kept.write_text(json.dumps(state) + "\n")
                print(key + ":", f"{1000 * median(facts[key]['seconds'][3:]):,.0f} ms", flush=True)
    rows = {
        cut: {
            side: [median(facts[f"{cut} {side} turn {turn}"]["seconds"][3:]) for turn in range(options.turns)]
            for side in sides
        }
        for cut in options.cuts
    }
    results = {"machine": platform.processor(), "torch": torch.__version__, "rows": rows, "facts": facts}
    (HERE / f"results_{name}.json").write_text(json.dumps(results, indent=1) + "\n")
    (HERE / f"results_{name}.md").write_text(table(rows, facts))


def table(rows: Mapping[str, Mapping[str, list[float]]], facts: Mapping[str, Any]) -> str:
    """Medians of an epoch, the mean of all epochs of Kagome, and its medians beside those of others.

    Args:
        rows: Seconds of the median epoch: by cut, by side, a turn each.
        facts: What each turn found; of those of Kagome, the ``mean`` of its epochs.

    Returns:
        Markdown, a row a cut.
    """
    sides = list(dict.fromkeys(side for found in rows.values() for side in found))
    ours = [side for side in sides if SIDES[side].ours]
    others = [side for side in sides if not SIDES[side].ours]
    guarded = {"kagome", "unguarded"} <= set(sides)
    head = ["stages x chunks", *(SIDES[side].label for side in sides)]
    head += [f"{side}: mean of all epochs" for side in ours]
    head += ["what the guard adds to a run"] * guarded
    head += [f"{side}: less time than {other}" for side in ours for other in others]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for cut, found in rows.items():
        cells = [cut, *(f"{1000 * median(found[side]):,.0f} ms" for side in sides)]
        means = {
            side: [facts[f"{cut} {side} turn {turn}"]["mean"] for turn in range(len(found[side]))]
            for side in ours
        }
        cells += [f"{1000 * median(means[side]):,.0f} ms" for side in ours]
        if guarded:
            more = [a / b - 1 for a, b in zip(means["kagome"], means["unguarded"], strict=True)]
            cells.append(f"{median(more):.0%}")
        for side in ours:
            for other in others:
                ratios = sorted(a / b for a, b in zip(found[other], found[side], strict=True))
                cells.append(f"{median(ratios):.2f} times ({ratios[0]:.2f} to {ratios[-1]:.2f})")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
