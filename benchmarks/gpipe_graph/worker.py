"""Worker: what each rank of a run does: train the model in one setting, seed after seed, and keep results.

Where it sits: ``main`` starts it on one rank a stage; rank 0 writes to the store.
"""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gat import DglGat, Gat
from settings import Kind, Setting, Store, key
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Adam
from torch_geometric.utils import subgraph

from kagome import Parallel, Trainer
from kagome.config import Data, Report, Train
from kagome.graph.datasets.load import load_data
from kagome.graph.partition.chunks import cut_part

LR, DECAY, EVERY = 5e-3, 5e-4, 5
WARM = 3
"""Epochs that are not timed: the first of them holds what is made once, one more has exact rows."""


@dataclass(frozen=True)
class Work:
    """What a worker is asked for.

    Args:
        graph: Name of the data set.
        root: Folder of raw data sets.
        epochs: Of each run.
        patience: Stop when validation has not risen for so many; None runs all.
        numbers: Seeds of runs to the end; or, with ``timed``, the turn.
        timed: Time epochs, evaluating nothing.
        facts: Kept with a time.
        store: Where results go.
    """

    graph: str
    root: str
    epochs: int
    patience: int | None
    numbers: tuple[int, ...]
    timed: bool
    facts: dict[str, Any]
    store: Path


def work(setting: Setting, asked: Work) -> None:
    """Do it, on every rank."""
    torch.set_num_threads(1)
    data = load_data(Data(name=asked.graph, root=asked.root))
    for number in asked.numbers:
        torch.manual_seed(number)
        run = trained if setting.side == "kagome" else plain
        row = run(setting, data, asked, number)
        if int(os.environ.get("RANK", "0")) == 0:
            kind: Kind = "time" if asked.timed else "accuracy"
            row |= asked.facts | {"epochs": asked.epochs, "patience": asked.patience}
            Store(asked.store).put(key(kind, asked.graph, setting.name, number), row)


# Kagome ------------------------------------------------------------------------------------------


def trained(setting: Setting, data: Any, asked: Work, seed: int) -> dict[str, Any]:
    """One run by Kagome's trainer."""
    model = Gat(data.num_features, int(data.y.max()) + 1)
    trainer = Trainer(
        model,
        data,
        parallel=Parallel(
            pipe=setting.pipe,
            chunks=setting.chunks,
            cross_chunk=setting.cross,
            partitioner=setting.partitioner,
        ),
        loss=lambda out, y: F.nll_loss(out, y, reduction="none"),
        train=Train(
            epochs=asked.epochs,
            patience=asked.patience,
            seed=seed,
            lr=LR,
            weight_decay=DECAY,
            eval_every=asked.epochs if asked.timed else EVERY,
            check=False,
        ),
        report=Report(page=False, trace=False, progress=False),
    )
    with trainer:
        told = trainer.fit()
        seconds = [record.seconds for record in trainer.records]
        part = trainer.part
        sent = told["bytes_per_epoch"]["total"]
    if asked.timed:
        return {"seconds": statistics.median(seconds[WARM:]), "bytes": sent}
    found = {
        "test": told["test_metric"],
        "val": told["val_metric"],
        "best_epoch": told["best_epoch"],
        "loss": trainer.records[-1].loss,
        **scores(model, data, data.edge_index, "plain"),
    }
    if setting.chunks > 1 and setting.cross == "drop":
        kept, shares = kept_edges(part, setting, data, seed)
        found |= {**shares, **scores(model, data, kept, "dropped")}
    return found


def kept_edges(part: Any, setting: Setting, data: Any, seed: int) -> tuple[Tensor, dict[str, float]]:
    """Edges inside micro-batches; which share of all is lost, and would be in a random order."""
    place = torch.zeros(data.num_nodes, dtype=torch.int64)
    pieces = cut_part(part, setting.chunks, method=setting.partitioner, seed=seed).pieces
    for piece in pieces:
        place[piece.part.own] = piece.number
    sizes = torch.tensor([piece.own for piece in pieces], dtype=torch.float64) / data.num_nodes
    inside = place[data.edge_index[0]] == place[data.edge_index[1]]
    shares = {"lost": 1 - float(inside.double().mean()), "by_chance": 1 - float(sizes.square().sum())}
    return data.edge_index[:, inside], shares


# Plain loops -------------------------------------------------------------------------------------


def plain(setting: Setting, data: Any, asked: Work, seed: int) -> dict[str, Any]:
    """One run by a loop as users of PyG and DGL write it; of evaluations the first best one counts."""
    classes = int(data.y.max()) + 1
    model: nn.Module = (
        DglGat(data.num_features, classes, data.edge_index, data.num_nodes)
        if setting.side == "dgl"
        else Gat(data.num_features, classes)
    )
    optimizer = Adam(model.parameters(), lr=LR, weight_decay=DECAY)
    seconds, loss = [], 0.0
    best: dict[str, Any] = {"val": -1.0}
    for epoch in range(1, asked.epochs + 1):
        begun = time.perf_counter()
        model.train()
        optimizer.zero_grad()
        loss = rebuilt(model, data, setting.chunks) if isinstance(model, Gat) else whole(model, data)
        optimizer.step()
        seconds.append(time.perf_counter() - begun)
        if not asked.timed and (epoch % EVERY == 0 or epoch == asked.epochs):
            found = scores(model, data, data.edge_index, "plain")
            if found["val_plain"] > best["val"]:
                best = {"test": found["test_plain"], "val": found["val_plain"], "best_epoch": epoch, **found}
            elif asked.patience and epoch - best["best_epoch"] >= asked.patience:
                break
    if asked.timed:
        return {"seconds": statistics.median(seconds[WARM:])}
    return {**best, "loss": loss}


def whole(model: nn.Module, data: Any) -> float:
    """Forward and backward over all vertices."""
    out = model(data.x, data.edge_index)
    loss = F.nll_loss(out[data.train_mask], data.y[data.train_mask])
    loss.backward()
    return float(loss.detach())


def rebuilt(model: Gat, data: Any, chunks: int) -> float:
    """Forward and backward of consecutive vertices at a time, each layer making its subgraph anew."""
    if chunks == 1:
        return whole(model, data)
    total, trains = 0.0, int(data.train_mask.sum())
    for ids in torch.arange(data.num_nodes).chunk(chunks):
        x = data.x[ids]
        for layer in (model.first, model.second):
            edges, _ = subgraph(ids, data.edge_index, relabel_nodes=True, num_nodes=data.num_nodes)
            x = layer(x, edges)
        mask = data.train_mask[ids]
        loss = F.nll_loss(x[mask], data.y[ids][mask], reduction="sum") / trains
        loss.backward()
        total += float(loss.detach())
    return total


@torch.no_grad()
def scores(model: nn.Module, data: Any, edge_index: Tensor, name: str) -> dict[str, float]:
    """Accuracies of a model on one process over these edges, dropout off."""
    model.eval()
    right = (model(data.x, edge_index).argmax(-1) == data.y).double()
    splits = ("train", "val", "test")
    return {f"{split}_{name}": float(right[data[f"{split}_mask"]].mean()) for split in splits}
