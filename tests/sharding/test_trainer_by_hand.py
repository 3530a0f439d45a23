"""What a Trainer does, by a loop over ``kagome.shard``: the recipes of ``docs/own-loop.md``."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from test_shard import WORLDS
from torch import Tensor
from torch.nn import functional
from torch_geometric.data import Data
from torch_geometric.nn import GCN

import kagome
from kagome.comm.channel import Channel
from training import CLASSES, FEATURES, QUIET, graph, losses, settings

TABLE = (0.5, 2.0, 1.0, 0.25)
EPOCHS, PATIENCE, EVERY, KEEP = 40, 4, 3, 2


def labelled(kind: str) -> Data:
    """A graph in float64 with labels of a kind: class ids, some of them -1; columns with NaN; numbers."""
    data = graph(torch.float64)
    generator = torch.Generator().manual_seed(4)
    missing = torch.rand(data.num_nodes, generator=generator) < 0.2
    data.weight = torch.rand(data.num_nodes, generator=generator, dtype=torch.float64)
    if kind == "no label":
        data.y = torch.where(missing, -1, data.y)
    elif kind == "bce":
        data.y = functional.one_hot(data.y, CLASSES).double()
        data.y[missing, 1] = torch.nan
    elif kind in ("mse", "mae", "huber"):
        data.y = 3 * torch.randn(data.num_nodes, CLASSES, generator=generator, dtype=torch.float64)
    return data


Loss = Callable[[Any, Tensor, Tensor, Tensor], Tensor]
RECIPES: dict[str, tuple[dict[str, Any], Loss]] = {
    "class weights": (
        {"class_weight": TABLE},
        lambda net, out, y, _: net.mean(
            functional.cross_entropy(out, y, reduction="none"), weight=torch.tensor(TABLE)[y]
        ),
    ),
    "vertex weights": (
        {"sample_weight": "weight"},
        lambda net, out, y, w: net.mean(functional.cross_entropy(out, y, reduction="none"), weight=w),
    ),
    "no label": (
        {"ignore_index": -1},
        lambda net, out, y, _: net.mean(functional.cross_entropy(out[y >= 0], y[y >= 0], reduction="none")),
    ),
    "bce": (
        {"loss": "bce"},
        lambda net, out, y, _: net.mean(
            functional.binary_cross_entropy_with_logits(out, y.nan_to_num(), reduction="none"),
            weight=(~y.isnan()).to(out.dtype),
        ),
    ),
    "mse": ({"loss": "mse"}, lambda net, out, y, _: net.mean(functional.mse_loss(out, y, reduction="none"))),
    "mae": ({"loss": "mae"}, lambda net, out, y, _: net.mean(functional.l1_loss(out, y, reduction="none"))),
    "huber": (
        {"loss": "huber"},
        lambda net, out, y, _: net.mean(functional.huber_loss(out, y, reduction="none")),
    ),
}


def model_of() -> GCN:
    torch.manual_seed(0)
    return GCN(FEATURES, 8, num_layers=2, out_channels=CLASSES).double()


def by_hand(channel: Channel, kind: str, folder: str) -> dict[str, Any]:
    """Losses and scores; the weights of the best epoch, early stopping and the last checkpoints."""
    data, model, run = labelled(kind), model_of(), Path(folder)
    lost, found = RECIPES[kind][1], []
    with kagome.shard(model, data, log=str) as net:
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01, weight_decay=5e-4)
        y, train, val, weight = (net.place(data[n]) for n in ("y", "train_mask", "val_mask", "weight"))
        best, best_epoch, best_weights = -1.0, 0, {}
        for epoch in range(1, EPOCHS + 1):
            loss = lost(net, net(data.x, data.edge_index)[train], y[train], weight[train])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
            if kind != "class weights":
                continue
            scores = net.eval_step(data.x, data.edge_index)
            accuracy = kagome.metrics.score(net, "accuracy", scores[val], y[val])
            assert accuracy is not None
            if accuracy > best:
                best, best_epoch = accuracy, epoch
                best_weights = {name: value.clone() for name, value in net.state_dict().items()}
            if epoch % EVERY == 0:
                dcp.save({"training": net.stateful(optimizer)}, checkpoint_id=run / f"epoch-{epoch:05}")
                if net.rank == 0:
                    for old in sorted(run.glob("epoch-*"))[:-KEEP]:
                        shutil.rmtree(old)
            if epoch - best_epoch >= PATIENCE:
                break
    return {"losses": found, "best": best_epoch, "accuracy": best, "weights": best_weights}


def by_trainer(channel: Channel, kind: str) -> dict[str, Any]:
    more = {"patience": PATIENCE} if kind == "class weights" else {}
    train = settings(epochs=EPOCHS, **RECIPES[kind][0], **more)
    with kagome.Trainer(model_of(), labelled(kind), train=train, report=QUIET) as trainer:
        summary = trainer.fit()
        return {
            "losses": losses(trainer),
            "best": summary["best_epoch"],
            "accuracy": max(each.val_metric for each in trainer.records if each.val_metric is not None),
            "weights": trainer.best_weights(),
        }


@pytest.mark.some(1)
@pytest.mark.parametrize("world", WORLDS)
def test_best_weights_early_stopping_and_the_last_checkpoints(ranks: Any, tmp_path: Path, world: int) -> None:
    wanted = ranks(1, by_trainer, "class weights")[0]
    assert PATIENCE < len(wanted["losses"]) < EPOCHS
    for found in ranks(world, by_hand, "class weights", str(tmp_path)):
        torch.testing.assert_close(found["losses"], wanted["losses"], rtol=1e-10, atol=1e-10)
        assert (found["best"], found["accuracy"]) == (wanted["best"], wanted["accuracy"])
        torch.testing.assert_close(found["weights"], wanted["weights"], rtol=1e-8, atol=1e-10)
    last = len(wanted["losses"]) // EVERY * EVERY
    kept = [f"epoch-{epoch:05}" for epoch in range(EVERY, last + 1, EVERY)][-KEEP:]
    assert sorted(path.name for path in tmp_path.iterdir()) == kept


@pytest.mark.some(1, each="kind")
@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("kind", [each for each in RECIPES if each != "class weights"])
def test_losses_by_name(ranks: Any, world: int, kind: str) -> None:
    wanted = ranks(1, by_trainer, kind)[0]["losses"]
    for found in ranks(world, by_hand, kind, ""):
        torch.testing.assert_close(found["losses"], wanted, rtol=1e-10, atol=1e-10)


def in_bf16(channel: Channel | None, casts: bool) -> list[float]:
    """Losses of a loop under autocast, plain or over ``kagome.shard``."""
    data, model = graph(torch.float32), model_of().float()
    with nullcontext() if channel is None else kagome.shard(model, data, log=str) as net:
        optimizer, found = torch.optim.Adam(model.parameters(), lr=0.01), []
        y = data.y if channel is None else net.place(data.y)
        for _ in range(4):
            with torch.autocast("cpu", torch.bfloat16, enabled=casts):
                out = (model if channel is None else net)(data.x, data.edge_index)
            values = functional.cross_entropy(out.float(), y, reduction="none")
            loss = values.mean() if channel is None else net.mean(values)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_autocast_around_a_call(ranks: Any, world: int) -> None:
    exact, wanted = in_bf16(None, False), in_bf16(None, True)
    for found in ranks(world, in_bf16, True):
        assert found == pytest.approx(wanted, abs=0.01)
        assert found != pytest.approx(exact, abs=1e-6)
