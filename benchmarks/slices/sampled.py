"""An epoch of mini-batches with sampled neighbours: DGL's sampler and layers, gradients averaged over ranks.

Run by ``speed.py``, one process a host. Each holds the whole graph and all features, so no row crosses, as
it would where features are shared out; a training vertex has 10 sampled neighbours a layer.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, relu

import kagome
from kagome.launch.environment import environment

sys.path.insert(0, str(Path(__file__).parent.parent / "single_device"))

from rivals import import_dgl

FANOUT, BATCH = 10, 1000


class Stack(nn.Module):
    """DGL's GraphConv or GATConv, layer upon layer."""

    def __init__(self, dgl: Any, model: str, widths: list[int]) -> None:
        super().__init__()
        convs, last = [], len(widths) - 2
        for place, (fan_in, fan_out) in enumerate(pairwise(widths)):
            if model == "gcn":
                convs.append(dgl.nn.GraphConv(fan_in, fan_out, allow_zero_in_degree=True))
            else:
                heads = 1 if place == last else 8
                convs.append(dgl.nn.GATConv(fan_in, fan_out // heads, heads, allow_zero_in_degree=True))
        self.convs = nn.ModuleList(convs)

    def forward(self, blocks: list[Any], x: Tensor) -> Tensor:
        """Scores of the last block's targets.

        Shapes:
            ``[sources, F]`` -> ``[targets, C]``.
        """
        for place, (conv, block) in enumerate(zip(self.convs, blocks, strict=True)):
            x = conv(block, x).flatten(1)
            x = relu(x) if place < len(self.convs) - 1 else x
        return x


def main() -> None:
    """Train two epochs more than are timed; rank 0 writes their median."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=["gcn", "gat"], default="gcn")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--root", default="../shared/data")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data.name", dest="name", default="digits")
    parser.add_argument("--data.project", dest="project", type=int)
    parser.add_argument("--data.self-loops", dest="self_loops", action="store_true")
    options = parser.parse_args()
    ranks = environment()
    dist.init_process_group(
        "gloo", init_method=f"tcp://{ranks.host}:{ranks.port}", rank=ranks.rank, world_size=ranks.size
    )
    dgl, said = import_dgl()
    if dgl is None:
        raise SystemExit(said)
    import dgl.dataloading
    import dgl.nn

    data = kagome.load(
        options.name,
        root=options.root,
        project=options.project,
        self_loops=options.self_loops,
        undirected=True,
    )
    graph = dgl.graph((data.edge_index[0], data.edge_index[1]), num_nodes=data.num_nodes)
    classes = int(data.y.max()) + 1
    widths = [data.num_features, *[options.hidden] * (options.layers - 1), classes]
    torch.manual_seed(0)
    model = Stack(dgl, options.model, widths)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    seeds = data.train_mask.nonzero().view(-1)
    seeds = seeds[: seeds.numel() // ranks.size * ranks.size][ranks.rank :: ranks.size]
    sampler = dgl.dataloading.NeighborSampler([FANOUT] * options.layers)
    took = []
    for epoch in range(options.epochs + 1):
        order = torch.randperm(seeds.numel(), generator=torch.Generator().manual_seed(epoch))
        begun = time.perf_counter()
        for batch in seeds[order].split(BATCH):
            inputs, outputs, blocks = sampler.sample_blocks(graph, batch)
            loss = cross_entropy(model(blocks, data.x[inputs]), data.y[outputs].clamp(min=0))
            optimizer.zero_grad()
            loss.backward()
            flat = torch.cat([p.grad.view(-1) for p in model.parameters()])
            dist.all_reduce(flat)
            for parameter, grad in zip(
                model.parameters(), flat.split([p.numel() for p in model.parameters()]), strict=True
            ):
                parameter.grad.copy_(grad.view_as(parameter) / ranks.size)
            optimizer.step()
        took.append(time.perf_counter() - begun)
    if ranks.rank == 0:
        sent = sum(p.numel() * p.element_size() for p in model.parameters()) * 2 * (ranks.size - 1)
        found = {
            "epoch_seconds": statistics.median(took[1:]),
            "spread": [min(took[1:]), max(took[1:])],
            "bytes_per_epoch": {"total": sent * len(seeds.split(BATCH))},
            "batches": len(seeds.split(BATCH)),
            "with": said,
        }
        options.out.write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
