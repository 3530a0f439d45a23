"""One run: a side trains a model in this process, and says what the process and its tensors took.

Where it sits: ``main`` starts it in a process of its own.
"""

from __future__ import annotations

import json
import resource
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numba  # noqa: F401 - counts as an import, not as memory of a run
import rivals
import sides
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import Data
from trial import Trial

import graphs
from kagome import Trainer
from kagome.config import Report, Train
from kagome.launch.allocator import freed_bytes
from kagome.memory.live_tensors import LiveTensors, peak_of
from kagome.memory.tensor_bytes import TensorMemory, optimizer_tensors
from kagome.model.saved_tensor_hook import SavedTensors
from kagome.records.epoch import Memory


def main(what: dict[str, Any], runs: Path) -> None:
    """Run it and print the result as one line of JSON."""
    torch.set_num_threads(what["threads"])
    trial = Trial(side=what["side"], graph=what["graph"], model=what["model"], threads=what["threads"])
    graph = graphs.load(trial.graph, None, runs / "graphs")
    if trial.side == "dgl":
        rivals.needed()  # its imports do not count
    memory, usage = Memory(), Usage()
    optimizer = usage.optimizer
    if trial.side == "kagome":
        found = by_kagome(trial, graph, optimizer, what["epochs"], watched=what["watched"])
    else:
        found = by_torch(trial, graph, optimizer, what["epochs"], watched=what["watched"])
    if not what["watched"]:
        found = {"peak": memory.peak(), "freed": freed_bytes() or 0, **usage.an_epoch(), **found}
    print(json.dumps(found))


class Usage:
    """Processor time and page faults at the end of each step but the first."""

    def __init__(self) -> None:
        self.at: list[tuple[int, float, float]] = []

    def optimizer(self, parameters: Iterable[Any]) -> torch.optim.Optimizer:
        """Return the optimizer of all sides, which notes the usage after each of its steps."""
        made = sides.adam(parameters)
        made.register_step_post_hook(lambda *_: self.note())
        return made

    def note(self) -> None:
        """Note the usage so far."""
        used = resource.getrusage(resource.RUSAGE_SELF)
        self.at.append((used.ru_minflt, used.ru_stime, used.ru_utime + used.ru_stime))

    def an_epoch(self) -> dict[str, float]:
        """Return the mean of the epochs after the first."""
        count = max(len(self.at) - 1, 1)
        faults, system, processor = (
            (last - first) / count for first, last in zip(self.at[0], self.at[-1], strict=True)
        )
        return {"faults": faults, "system": system, "processor": processor}


def by_kagome(
    trial: Trial, graph: Data, optimizer: sides.MakeOptimizer, epochs: int, *, watched: bool
) -> dict[str, Any]:
    """Train by the public face; the report lists the tensors."""
    settings = Train(
        epochs=epochs, eval_every=10**6, check=False, lr=sides.LR, weight_decay=sides.WEIGHT_DECAY
    )
    report = Report(page=False, trace=False, progress=False, memory=watched)
    model = sides.built(trial, graph)
    with Trainer(model, graph, optimizer=optimizer, train=settings, report=report) as trainer:
        done = trainer.fit()
        losses = [record.loss for record in trainer.records]
    return {"peak_tensors": done["memory"][0]["peak_tensors"]} if watched else {"losses": losses}


def by_torch(
    trial: Trial, graph: Data, optimizer: sides.MakeOptimizer, epochs: int, *, watched: bool
) -> dict[str, Any]:
    """Train as users of PyG and of DGL write it."""
    if trial.side == "dgl":
        model, edges = rivals.model_of(trial, graph), rivals.graph_of(trial, graph)
    else:
        model = sides.built(trial, graph)
        edges = sides.adjacency(model, graph) if trial.side == "csr" else graph.edge_index
    steps = optimizer(model.parameters())

    def epoch(saved: SavedTensors | None = None) -> tuple[float, frozenset[int]]:
        model.train()
        steps.zero_grad()
        if saved is None:
            out = model(graph.x, edges)
        else:
            with saved.recording():
                out = model(graph.x, edges)
        loss = F.cross_entropy(out[graph.train_mask], graph.y[graph.train_mask])
        kept = [] if saved is None else [t for t in saved.alive() if t.layout is torch.strided]
        places = frozenset(tensor.untyped_storage().data_ptr() for tensor in kept)
        del out, kept
        loss.backward()
        steps.step()
        return float(loss.detach()), places

    if not watched:
        return {"losses": [epoch()[0] for _ in range(epochs)]}
    before = held(model, steps, graph, edges)
    live = LiveTensors(torch.device("cpu"), running(model), before.held)
    with live:
        _, saved = epoch(SavedTensors())
    peak = peak_of(live, before, held(model, steps, graph, edges), saved)
    return {"peak_tensors": peak.as_dict()}


def running(model: nn.Module) -> Callable[[], str]:
    """Return a function that names the module which runs."""
    path: list[str] = []

    def left(*_: Any) -> None:  # whatever a hook returns would take the place of the output
        path.pop()

    for name, module in model.named_modules():
        module.register_forward_pre_hook(lambda *_, name=name: path.append(name))
        module.register_forward_hook(left)
    return lambda: path[-1] if path else ""


def held(model: nn.Module, steps: torch.optim.Optimizer, graph: Data, edges: Any) -> TensorMemory:
    """Count what a plain loop holds from one epoch to the next."""
    memory = TensorMemory(graph.num_nodes, 0, torch.device("cpu"))
    memory.add("weights", model.parameters())
    memory.add("gradients", (p.grad for p in model.parameters() if p.grad is not None))
    memory.add("optimizer", optimizer_tensors(steps))
    memory.add("features", [graph.x, graph.y, graph.train_mask, graph.val_mask, graph.test_mask])
    memory.add("edges", [graph.edge_index])
    if isinstance(edges, Tensor) and edges.layout is torch.sparse_csr:
        memory.add("edges", [edges.crow_indices(), edges.col_indices(), edges.values()])
    return memory
