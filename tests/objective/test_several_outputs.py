"""A model that gives a dict or a tuple, with an own loss and metric: as in plain PyG."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import kagome
from kagome import Parallel, Trainer, check
from kagome.comm.channel import Channel
from kagome.config import Report, Train
from kagome.errors import ConfigError, KagomeError
from kagome.run_dir.results import write_scores

EPOCHS, RATE = 3, 0.01
QUIET = Report(page=False, trace=False, progress=False)


class Several(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.kind = pyg.SAGEConv(6, 8), kind
        self.scores, self.again = pyg.SAGEConv(8, 4), pyg.SAGEConv(8, 6)

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        h = self.first(x, edge_index).relu()
        scores, again = self.scores(h, edge_index), self.again(h, edge_index)
        return {
            "dict": {"scores": scores, "again": again},
            "tuple": (scores, again),
            "nest": {"scores": scores, "again": (again, h)},
        }[self.kind]


def two(out: Any) -> tuple[Tensor, Tensor]:
    """The scores and the features made again."""
    scores, again = (out["scores"], out["again"]) if isinstance(out, dict) else out
    return scores, again[0] if isinstance(again, tuple) else again


def loss(out: Any, y: Tensor) -> Tensor:
    scores, again = two(out)
    return F.cross_entropy(scores, y, reduction="none") + again.square().mean(1)


def hits(out: Any, y: Tensor) -> Tensor:
    return (two(out)[0].argmax(1) == y).double()


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=RATE)


def made(kind: str) -> tuple[nn.Module, Any]:
    data = kagome.load("sbm:vertices=120,degree=6,features=6,classes=4,communities=4")
    data.x = data.x.double()
    torch.manual_seed(1)
    return Several(kind).double(), data


def fitted(channel: Channel, kind: str, cut: dict[str, Any], metric: Any = hits) -> Any:
    model, data = made(kind)
    train = Train(epochs=EPOCHS, timeout=60.0)
    try:
        with Trainer(
            model,
            data,
            parallel=Parallel(**cut),
            loss=loss,
            metric=metric,
            optimizer=adam,
            train=train,
            report=QUIET,
        ) as t:
            t.fit()
            losses = [record.loss for record in t.records]
            return losses, t.predict(), t.part.own
    except KagomeError as error:
        return str(error)


def plain(kind: str) -> tuple[list[float], Any]:
    model, data = made(kind)
    optimizer, losses, best = adam(model.parameters()), [], (-1.0, None)
    for _ in range(EPOCHS):
        optimizer.zero_grad()
        out = model(data.x, data.edge_index)
        scores, again = (each[data.train_mask] for each in two(out))
        value = loss((scores, again), data.y[data.train_mask]).mean()
        value.backward()
        losses.append(float(value))
        optimizer.step()
        with torch.no_grad():
            out = model(data.x, data.edge_index)
        mark = float(hits(out, data.y)[data.val_mask].mean())
        if mark > best[0]:
            best = mark, out
    return losses, best[1]


@pytest.mark.some(3)
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("kind", ["dict", "tuple", "nest"])
def test_several_outputs_train_and_predict_as_in_plain_pyg(ranks, kind, world):
    losses, scores = plain(kind)
    for rank, found in enumerate(ranks(world, fitted, kind, {})):
        assert not isinstance(found, str), found
        assert found[0] == pytest.approx(losses, rel=1e-10)
        rows = slice(None) if rank == 0 else found[2]
        for ours, theirs in zip(tree_leaves(found[1]), tree_leaves(scores), strict=True):
            torch.testing.assert_close(ours, theirs[rows], rtol=0.0, atol=1e-10)


def test_stages_refuse_several_outputs_in_a_sentence(ranks):
    for found in ranks(2, fitted, "dict", {"pipe": 2, "chunks": 1}, spoils=True):
        assert "forward to return one tensor with a row a vertex, which a pipeline's last stage" in found
        assert "got a dict of 'scores', 'again'" in found


@pytest.mark.parametrize("kind", ["dict", "tuple", "nest"])
def test_the_check_compares_several_outputs(kind):
    found = check(*made(kind))
    assert found.first is None, found.text()


def test_a_metric_of_one_tensor_is_refused(ranks):
    for found in ranks(1, fitted, "dict", {}, "accuracy"):
        assert "one tensor from the model for the metric accuracy; got a dict" in found


class Beside(Several):
    """Scores with a number, a text and None beside them."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        h = self.first(x, edge_index).relu()
        return self.scores(h, edge_index), h.square().mean(), "a text", None, 3


def test_what_is_beside_the_scores_is_kept_or_left_out_of_the_files(tmp_path: Path) -> None:
    data = made("tuple")[1]
    with Trainer(
        Beside("tuple").double(),
        data,
        train=Train(epochs=1, check=False),
        loss=lambda out, y: F.cross_entropy(out[0], y, reduction="none"),
        metric=lambda out, y: (out[0].argmax(1) == y).double(),
        report=QUIET,
        out=tmp_path / "run",
    ) as trainer:
        trainer.fit()
        scores = trainer.predict()
    with np.load(tmp_path / "run" / "predictions.npz") as found:
        assert sorted(found) == ["scores.0", "scores.1", "scores.4", "target"]
        assert found["scores.0"].dtype == np.float64
        assert np.array_equal(found["scores.0"], scores[0].detach().numpy())
        assert found["scores.4"] == 3
    assert (
        write_scores(tmp_path / "a.npz", scores)
        == "scores.0: 120 x 4, scores.1: a number, scores.4: a number"
    )
    with pytest.raises(ConfigError, match=r"one array.*got 3 from the model: scores\.0(.|\n)*--out a\.npz"):
        write_scores(tmp_path / "a.npy", scores)
    assert write_scores(tmp_path / "b.npy", scores[0]) == "120 x 4"
