"""Is a pipeline that drops no edge faster than torch's own that drops them? 8 GCN layers on a made graph.

Run: python benchmarks/pipeline/made.py    (two sides in turns, one thread a rank)

Kagome: ``Trainer(model, data, parallel=Parallel(pipe=S, chunks=K))`` with history, no edge dropped.
torch: ``torch.distributed.pipelining.ScheduleGPipe`` over PyG's GCNConv with a normalised CSR adjacency a
micro-batch, the fastest way that PyG has; vertices in the same METIS order, edges between micro-batches lost.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import dataclass, field
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
    """Time both sides."""

    cuts: list[str] = field(default_factory=lambda: ["2x4", "4x8"])
    """Stages x chunks."""
    turns: int = 2
    """Turns of both sides."""
    epochs: int = 24
    """Epochs a turn; the first three are left out."""
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


def kagome_side(options: Options, stages: int, chunks: int, data: Any) -> dict[str, Any]:
    """Kagome's epochs."""
    from kagome import Parallel, Trainer
    from kagome.config import Report, Train

    torch.manual_seed(0)
    classes = int(data.y.max()) + 1
    model = Layers([data.x.size(1), *[HIDDEN] * (LAYERS - 1), classes], last=True)
    trainer = Trainer(
        model,
        data,
        parallel=Parallel(pipe=stages, chunks=chunks),
        train=Train(check=False, eval_every=10_000, lr=0.01),
        report=Report(progress=False),
    )
    found = trainer.fit(options.epochs)
    seconds = [record.seconds for record in trainer.records]
    trainer.close()
    return {
        "seconds": seconds,
        "losses": [r.loss for r in trainer.records],
        "pipeline": found.get("pipeline"),
    }


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


def torch_side(options: Options, stages: int, chunks: int, data: Any) -> dict[str, Any]:
    """torch.distributed.pipelining's epochs."""
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
    from torch_geometric.nn.conv.gcn_conv import gcn_norm

    from kagome.graph.partitioners import assign

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, count = dist.get_rank(), data.num_nodes
    owner = assign("metis", data.edge_index, count, chunks, 0)
    order = torch.argsort(owner, stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(count)
    size = count // chunks  # torch wants micro-batches of one shape
    edge_index, x, y = place[data.edge_index], data.x[order][: size * chunks], data.y[order][: size * chunks]
    train = data.train_mask[order][: size * chunks]
    adjacencies, kept = [], 0
    for chunk in range(chunks):
        low, high = chunk * size, (chunk + 1) * size
        inside = ((edge_index >= low) & (edge_index < high)).all(0)
        kept += int(inside.sum())
        ends, weight = gcn_norm(edge_index[:, inside] - low, None, size)
        adjacency = torch.sparse_coo_tensor(ends.flip(0), weight, (size, size)).coalesce().to_sparse_csr()
        adjacencies.append(adjacency)
    torch.manual_seed(0)
    widths = [x.size(1), *[HIDDEN] * (LAYERS - 1), int(y.max()) + 1]
    per = LAYERS // stages
    mine = Layers(widths[rank * per : (rank + 1) * per + 1], last=rank == stages - 1)
    for conv in mine.convs:
        conv.normalize = False
    stage = PipelineStage(Piece(mine, adjacencies), rank, stages, torch.device("cpu"))
    weights = train.float() * chunks / train.sum()

    def loss(out: Tensor, target: Tensor) -> Tensor:
        rows = nn.functional.cross_entropy(out, target[:, 0].long(), reduction="none")
        return (rows * target[:, 1]).sum()

    schedule = ScheduleGPipe(stage, chunks, loss_fn=loss)
    optimizer = torch.optim.Adam(mine.parameters(), lr=0.01, weight_decay=5e-4)
    target = torch.stack([y.float(), weights], 1)
    seconds, all_losses = [], []
    for _ in range(options.epochs):
        dist.barrier()
        begun = time.perf_counter()
        optimizer.zero_grad()
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(x)
        elif rank == stages - 1:
            schedule.step(target=target, losses=losses)
        else:
            schedule.step()
        optimizer.step()
        dist.barrier()
        seconds.append(time.perf_counter() - begun)
        all_losses.append(float(torch.stack(losses).mean().detach()) if losses else None)
    dist.destroy_process_group()
    return {"seconds": seconds, "losses": all_losses, "edges kept": kept / data.edge_index.size(1)}


def rank_main(options: Options) -> None:
    """One rank of one side; rank 0 prints what it found."""
    import graphs

    data = graphs.load(options.graph, None, HERE / "runs" / "graphs")
    stages, chunks = map(int, options.cut.split("x"))
    side = kagome_side if options.side == "kagome" else torch_side
    found = side(options, stages, chunks, data)
    if os.environ.get("RANK", "0") == "0":
        print("FOUND " + json.dumps(found))


def main(options: Options) -> None:
    """Time both sides in turns and write the table."""
    if options.side:
        rank_main(options)
        return
    import graphs

    graphs.load(options.graph, None, HERE / "runs" / "graphs")
    rows: dict[str, dict[str, list[float]]] = {}
    facts: dict[str, Any] = {}
    for cut in options.cuts:
        for turn in range(options.turns):
            for side in ("torch", "kagome"):
                command = ["torchrun", "--nproc-per-node", cut.split("x")[0], __file__, "--side", side]
                command += ["--cut", cut, "--epochs", str(options.epochs), "--graph", options.graph]
                env = {**os.environ, "OMP_NUM_THREADS": "1"}
                out = subprocess.run(command, env=env, capture_output=True, text=True)
                line = next((li for li in out.stdout.splitlines() if li.startswith("FOUND ")), None)
                if line is None:
                    raise SystemExit(f"{side} {cut} failed:\n{out.stderr[-3000:]}")
                found = json.loads(line[6:])
                rows.setdefault(cut, {}).setdefault(side, []).append(median(found["seconds"][3:]))
                found["mean"] = fmean(found["seconds"][3:])
                facts[f"{cut} {side} turn {turn}"] = {k: v for k, v in found.items() if k != "losses"}
                print(cut, side, f"turn {turn}:", f"{1000 * rows[cut][side][-1]:,.0f} ms", flush=True)
    results = {"machine": platform.processor(), "torch": torch.__version__, "rows": rows, "facts": facts}
    (HERE / "results_made.json").write_text(json.dumps(results, indent=1) + "\n")
    head = "| stages x chunks | torch, edges dropped | Kagome, none | times faster | mean of all epochs |"
    lines = [head, "|---|---|---|---|---|"]
    for cut, sides in rows.items():
        ratios = sorted(a / b for a, b in zip(sides["torch"], sides["kagome"], strict=True))
        means = [facts[f"{cut} kagome turn {turn}"]["mean"] for turn in range(options.turns)]
        lines.append(
            f"| {cut} | {1000 * median(sides['torch']):,.0f} ms | {1000 * median(sides['kagome']):,.0f} ms "
            f"| {median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}) | {1000 * median(means):,.0f} ms |"
        )
    (HERE / "results_made.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
