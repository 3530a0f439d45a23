"""Sides: the same training by Kagome, by PyG with ``edge_index`` or a CSR adjacency, and by DGL.

Where it sits: ``trial`` calls :func:`measure` in a process of its own; ``epoch_profile`` calls :func:`train`.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numba  # noqa: F401 - counts as an import, not as memory of a run
import rivals
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Adam, Optimizer
from torch_geometric.data import Data
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from trial import Result, Trial

import graphs
from kagome import Trainer
from kagome.config import Model, Report, Train
from kagome.model.zoo import build_model

LR, WEIGHT_DECAY = 0.01, 5e-4

MakeOptimizer = Callable[[Iterable[Any]], Optimizer]


def adam(parameters: Iterable[Any]) -> Optimizer:
    """The optimizer of all sides."""
    return Adam(parameters, lr=LR, weight_decay=WEIGHT_DECAY)


def built(trial: Trial, graph: Data) -> nn.Module:
    """The zoo's model, with the same first weights on every side."""
    torch.manual_seed(0)
    degree = torch.bincount(graph.edge_index[1], minlength=graph.num_nodes)
    return build_model(
        Model(
            name=trial.model,
            layers=trial.layers,
            hidden=trial.hidden,
            heads=trial.heads,
            dropout=trial.dropout,
        ),
        in_channels=graph.x.size(1),
        out_channels=int(graph.y.max()) + 1,
        num_nodes=graph.num_nodes,
        degree_histogram=torch.bincount(degree),
    )


def timed_epochs(trial: Trial, before: float) -> int:
    """How many epochs are timed, the one before them having taken so long."""
    return max(2, min(trial.epochs, int(trial.seconds / max(before, 1e-9))))


def train(trial: Trial, graph: Data, optimizer: MakeOptimizer = adam) -> Result:
    """Train by the trial's side: warm epochs, then the timed ones; evaluation is not in their seconds."""
    if trial.side == "dgl":
        return by_loop(trial, rivals.model_of(trial, graph), graph, optimizer)
    model = built(trial, graph)
    if trial.side.startswith("kagome"):
        return by_kagome(trial, model, graph, optimizer)
    return by_loop(trial, model, graph, optimizer)


def by_kagome(trial: Trial, model: nn.Module, graph: Data, optimizer: MakeOptimizer) -> Result:
    """Kagome on one rank, by its public face."""
    if trial.side == "kagome-no-fast" and not has_fast_setting():
        raise SystemExit("this version of Kagome has no fast paths to turn off")
    settings = Train(epochs=10**6, eval_every=10**6, check=False, lr=LR, weight_decay=WEIGHT_DECAY)
    given: dict[str, Any] = {"fast": False} if trial.side == "kagome-no-fast" else {}
    trainer = Trainer(
        model,
        graph,
        optimizer=optimizer,
        train=settings,
        report=Report(page=False, trace=False, progress=False),
        **given,
    )
    with trainer:
        begun = trainer.fit(trial.warm)
        trainer.fit(trial.warm + timed_epochs(trial, trainer.records[-1].seconds))
    records = trainer.records
    return {
        "seconds": [r.seconds for r in records[trial.warm :]],
        "first": records[0].seconds,
        "set_up": begun["set_up_seconds"],
        "losses": [r.loss for r in records],
    }


def by_loop(trial: Trial, model: nn.Module, graph: Data, optimizer: MakeOptimizer) -> Result:
    """PyG and DGL as their users write it."""
    begun = time.perf_counter()
    edges: Any = graph.edge_index
    if trial.side == "csr":
        edges = adjacency(model, graph)
    elif trial.side == "dgl":
        edges = rivals.graph_of(trial, graph)
    x, y, mask = graph.x, graph.y, graph.train_mask
    steps = optimizer(model.parameters())
    set_up = time.perf_counter() - begun

    def epoch() -> tuple[float, float]:
        begun = time.perf_counter()
        model.train()
        steps.zero_grad()
        out = model(x, edges)
        loss = F.cross_entropy(out[mask], y[mask])
        loss.backward()
        steps.step()
        return time.perf_counter() - begun, float(loss.detach())

    found = [epoch() for _ in range(trial.warm)]
    found += [epoch() for _ in range(timed_epochs(trial, found[-1][0]))]
    return {
        "seconds": [seconds for seconds, _ in found[trial.warm :]],
        "first": found[0][0],
        "set_up": set_up,
        "losses": [loss for _, loss in found],
    }


def adjacency(model: nn.Module, graph: Data) -> Tensor:
    """The transposed adjacency as torch's CSR; layers that normalise it are given it normalised."""
    edge_index, weight = graph.edge_index, torch.ones(graph.edge_index.size(1))
    normalising = [m for m in model.modules() if isinstance(getattr(m, "normalize", None), bool)]
    # GCN, GCNII and APPNP; SAGE has a setting of this name for something else, and SGC has none.
    normalising = [m for m in normalising if hasattr(m, "add_self_loops")]
    if normalising:
        edge_index, weight = gcn_norm(edge_index, None, graph.num_nodes, dtype=torch.float32)
        for layer in normalising:
            layer.normalize = False  # type: ignore[assignment]
    size = (graph.num_nodes, graph.num_nodes)
    return torch.sparse_coo_tensor(edge_index.flip(0), weight, size).to_sparse_csr()


def has_fast_setting() -> bool:
    """Whether this Kagome has fast paths that can be turned off."""
    return "fast" in inspect.signature(Trainer.__init__).parameters


def measure(trial: Trial, out: Path, runs: Path, data: Path | None) -> None:
    """Run one trial in this process and write its result."""
    # Imported here: an older Kagome, whose sides are run too, has it elsewhere.
    from kagome.records.epoch import Memory

    torch.set_num_threads(trial.threads)
    graph = graphs.load(trial.graph, data, runs / "graphs")
    if trial.side == "dgl":
        rivals.needed()  # its imports do not count
    memory = Memory()
    result = train(trial, graph)
    peak = memory.peak()
    facts = {
        "peak": peak,
        "absolute": memory.start + peak,
        "exact": memory.exact,
        "vertices": graph.num_nodes,
        "edges": graph.edge_index.size(1),
    }
    out.write_text(json.dumps({**result, **facts}))


def prepare(name: str, runs: Path, data: Path | None) -> None:
    """Make a graph's file, so that no trial's memory or time holds the making of its graph."""
    graphs.load(name, data, runs / "graphs")


def warm(models: Iterable[str], runs: Path) -> None:
    """One epoch of each model on a tiny graph, so that compiled kernels lie in their cache."""
    graph = graphs.load("tiny", None, runs / "graphs")
    for name in models:
        train(dataclasses.replace(Trial(side="kagome", graph="tiny", model=name), epochs=1), graph)
