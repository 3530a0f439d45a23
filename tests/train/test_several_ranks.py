"""Trainer on several ranks: saved parts, empty parts, odd models; every refusal reaches every rank."""

from __future__ import annotations

import copy
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import nn
from torch_geometric.data import Data

from kagome import Parallel, Trainer, config
from kagome.comm.channel import Channel
from kagome.errors import KagomeError, ModelError
from kagome.launch.launcher import start_local
from kagome.train import data as source
from odd_models import ODD_MODELS
from training import CLASSES, FEATURES, QUIET, Gcn, graph, losses, model, settings

SBM = f"sbm:vertices=90,degree=6,features={FEATURES},classes={CLASSES},communities=4"


def outcome(mine: nn.Module, data: Any, epochs: int = 3, **given: Any) -> dict[str, Any] | str:
    """What came out, or the error's leaf and text."""
    train = given.pop("train", settings())
    try:
        with Trainer(mine, data, train=train, report=QUIET, **given) as trainer:
            summary = trainer.fit(epochs)
            return {
                "losses": losses(trainer),
                "test": summary["test_metric"],
                "scores": trainer.predict(),
                "own": trainer.part.own,
                "notes": trainer.notes,
                "weights": {k: v.clone() for k, v in mine.state_dict().items()},
                "grads": {k: p.grad is None for k, p in mine.named_parameters()},
            }
    except KagomeError as error:
        return f"{type(error).__name__}: {error}"


def same(found: list[dict], alone: dict, atol: float = 1e-9) -> None:
    torch.testing.assert_close(found[0]["losses"], alone["losses"], rtol=0, atol=atol)
    torch.testing.assert_close(found[0]["scores"], alone["scores"], rtol=0, atol=100 * atol)
    assert found[0]["test"] == alone["test"]
    for other in found:
        assert other["losses"] == found[0]["losses"]
        for key, value in other["weights"].items():
            assert torch.equal(value, found[0]["weights"][key]), key


def frozen_between(channel: Channel, parallel: dict[str, Any]) -> Any:
    """Train, freeze a layer, train on, and ask for what cannot be: that it learns again."""
    torch.manual_seed(1)
    mine = pyg.GCN(FEATURES, 8, 3, CLASSES).double()
    mine.convs[2].requires_grad_(False)
    given = graph()
    given.x, given.val_mask = given.x.double(), torch.zeros_like(given.val_mask)  # the last epoch is the best
    with Trainer(mine, given, parallel=Parallel(**parallel), train=settings(), report=QUIET) as trainer:
        trainer.fit(2)
        before = {k: v.clone() for k, v in mine.state_dict().items()}
        mine.convs[0].requires_grad_(False)
        trainer.fit(4)
        moved = [k for k, v in mine.state_dict().items() if not torch.equal(v, before[k])]
        mine.requires_grad_(True)
        with pytest.raises(ModelError) as refusal:
            trainer.fit(6)
        return {"losses": losses(trainer), "moved": moved, "refusal": str(refusal.value)}


@pytest.mark.parametrize(
    "parallel",
    [{"graph": 2}, {"pipe": 2, "chunks": 1}, {"pipe": 2, "chunks": 3, "cross_chunk": "exact"}],
    ids=["parts", "one chunk", "exact chunks"],
)
def test_a_layer_may_be_frozen_between_two_fits_but_not_unfrozen(ranks, parallel):
    alone = ranks(1, frozen_between, {})[0]
    assert alone["moved"] == ["convs.1.bias", "convs.1.lin.weight"]
    assert "got convs.2.bias and 1 more, which did not then and do now" in alone["refusal"]
    for found in ranks(2, frozen_between, parallel):
        torch.testing.assert_close(found.pop("losses"), alone["losses"], rtol=0, atol=1e-9)
        assert found == {key: alone[key] for key in ("moved", "refusal")}


def used_between(channel: Channel, parallel: dict[str, Any], uses: bool) -> Any:
    """Train, use the model as the user's own or not at all, and train on."""
    given = graph()
    given.x, given.val_mask = given.x.double(), torch.zeros_like(given.val_mask)
    torch.manual_seed(1)
    mine = pyg.GCN(FEATURES, 8, 3, CLASSES, dropout=0.3, cached=True).double()
    more: dict[str, Any] = {"parallel": Parallel(**parallel), "train": settings(), "report": QUIET}
    with Trainer(mine, given, **more) as trainer:
        trainer.fit(2)
        if uses:
            scores = trainer.predict()
            with torch.no_grad():
                alone = mine.eval()(given.x, given.edge_index)  # it caches the whole graph's edges
            torch.testing.assert_close(scores, alone if channel.rank == 0 else alone[trainer.part.own])
            for copied in (copy.deepcopy(mine), pickle.loads(pickle.dumps(mine))):
                with Trainer(copied, given, **more) as other:
                    other.fit(2)
                    assert losses(other)[-1] < losses(trainer)[0]
        trainer.fit(4)
        return losses(trainer)


@pytest.mark.some(1)
@pytest.mark.parametrize(
    "parallel",
    [{"graph": 2}, {"pipe": 2, "chunks": 1}, {"pipe": 2, "chunks": 3, "cross_chunk": "exact"}],
    ids=["parts", "one chunk", "exact chunks"],
)
def test_between_two_calls_of_a_trainer_the_model_is_the_users(ranks, parallel):
    alone = ranks(1, used_between, {}, False)[0]
    for found in [*ranks(1, used_between, {}, True), *ranks(2, used_between, parallel, True)]:
        torch.testing.assert_close(found, alone, rtol=0, atol=1e-9)


def by_folder(channel: Channel, folder: str) -> Any:
    return outcome(model("gat", 0.3), Path(folder))


def in_memory(channel: Channel) -> Any:
    import kagome

    return outcome(model("gat", 0.3), kagome.load(SBM))


def test_a_saved_partition_trains_as_the_graph_in_memory(ranks, tmp_path):
    source.prepare(config.Data(name=SBM), method="random", seed=3, parts=3, folder=tmp_path / "parts")
    found = ranks(3, by_folder, str(tmp_path / "parts"))
    same(found, ranks(1, in_memory)[0], atol=1e-4)
    for other in found[1:]:  # rank 0 has all scores, the others their own rows
        torch.testing.assert_close(other["scores"], found[0]["scores"][other["own"]])


class Everything(nn.Module):
    """Inputs by name, a lazy layer, a frozen and an unused parameter, an output in a wide tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first = pyg.GCNConv(-1, 8, bias=False)
        self.edges = pyg.GATv2Conv(8, CLASSES, edge_dim=3)
        self.unused, self.frozen = nn.Linear(2, 2), nn.Linear(8, 8)
        self.frozen.requires_grad_(False)

    def forward(self, x, edge_index, edge_weight, edge_attr, *, age):
        x = self.first(torch.cat([x, age.unsqueeze(1)], 1), edge_index, edge_weight).relu()
        return self.edges(F.dropout(self.frozen(x), 0.4, self.training), edge_index, edge_attr)


class ByData(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Everything()

    def forward(self, data):
        return self.inner(data.x, data.edge_index, data.edge_weight, data.edge_attr, age=data.age)


def everything(channel: Channel, by_data: bool) -> Any:
    data = graph(torch.float64)
    generator = torch.Generator().manual_seed(5)
    data.edge_weight = torch.rand(data.num_edges, generator=generator, dtype=torch.float64)
    data.edge_attr = torch.rand(data.num_edges, 3, generator=generator, dtype=torch.float64)
    data.age = torch.rand(data.num_nodes, generator=generator, dtype=torch.float64)
    torch.manual_seed(channel.rank)
    mine = (ByData() if by_data else Everything()).double()
    torch.manual_seed(0)
    return outcome(mine, data, train=settings(seed=4, clip=0.5, weight_decay=0.1))


@pytest.mark.parametrize("by_data", [False, True])
def test_inputs_by_name_lazy_frozen_and_unused_layers(ranks, by_data):
    alone, found = ranks(1, everything, by_data)[0], ranks(3, everything, by_data)
    same(found, alone)
    for rank in found:
        assert {k.split(".")[-2] for k, none in rank["grads"].items() if none} == {"unused", "frozen"}


def few(channel: Channel, vertices: int) -> Any:
    """One training vertex, a path, and fewer vertices than ranks would like."""
    ids = torch.arange(vertices)
    data = Data(
        x=torch.eye(vertices, FEATURES).double(),
        edge_index=torch.stack([ids[:-1], ids[1:]]),
        y=ids % CLASSES,
        train_mask=ids == 1,
        val_mask=ids == 0,
        test_mask=ids == 2,
    )
    mine = model("gcn", 0.2, torch.float64)
    mine.norm = nn.LayerNorm(8).double()
    return outcome(mine, data)


@pytest.mark.parametrize("vertices", [3, 4])
def test_parts_without_a_training_vertex_or_any_vertex(ranks, vertices):
    alone = ranks(1, few, vertices)[0]
    assert isinstance(alone, dict), alone
    same(ranks(4, few, vertices), alone)


def several_labels(channel: Channel, metric: str) -> Any:
    data = graph(torch.float64)
    data.y = torch.stack([data.y % 2, data.y // 2, data.y == 1, data.y == 3], 1)
    # All labelled test vertices lie at one end: some rank has none of them.
    last = torch.arange(data.num_nodes) >= data.num_nodes - 9
    data.train_mask, data.val_mask, data.test_mask = data.train_mask & ~last, data.val_mask & ~last, last
    return outcome(
        model("gcn", 0.2, torch.float64),
        data,
        train=settings(metric=metric),
        parallel=config.Parallel(partitioner="contiguous"),
    )


@pytest.mark.parametrize("metric", ["auto", "roc_auc"])
def test_several_labels_with_splits_that_some_ranks_have_nothing_of(ranks, metric):
    """roc_auc of no rows at all was an error of torch's about a shape."""
    alone = ranks(1, several_labels, metric)[0]
    same(ranks(3, several_labels, metric), alone)


# Refusals ------------------------------------------------------------------------------------------


class Odd(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.inner, self.how = Gcn(), how

    def forward(self, x, edge_index):
        out = self.inner(x, edge_index)
        if self.how == "rows":
            return out[1:]
        if self.how == "columns":
            return out[:, :2]
        return out * float("nan") if self.how == "nan" else out


def refused(channel: Channel, how: str) -> Any:
    if how in ODD_MODELS:
        torch.manual_seed(0)
        return outcome(ODD_MODELS[how](FEATURES, CLASSES), graph(), train=settings(check=True))
    if how == "mean":
        return outcome(Gcn(), graph(), loss=nn.CrossEntropyLoss())
    if how == "graph=2":
        return outcome(Gcn(), graph(), parallel=config.Parallel(graph=2))
    return outcome(Odd(how), graph())


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("best_half", ["ModelError", "topk", "BestHalf"]),
        ("mean", ["ConfigError", 'reduction="none"']),
        ("graph=2", ["ConfigError", "2 ranks for the mesh graph=2", "got 3"]),
        ("rows", ["ModelError", "rows of some vertices only"]),
        ("columns", ["ModelError", "4 columns, one a class"]),
        ("nan", ["ModelError", "expected a finite loss; got nan", "epoch 1"]),
    ],
)
def test_refusals_reach_every_rank(ranks, how, words):
    for found in ranks(3, refused, how):
        assert isinstance(found, str)
        for word in words:
            assert word in found


def checked(channel: Channel) -> Any:
    return outcome(model("gat", 0.3), graph(), train=settings(check=True))


def test_the_check_says_what_it_compared_on_every_rank(ranks):
    for found in ranks(2, checked):
        assert any("check: split over 3 and whole equal" in note for note in found["notes"])


# Ranks of their own ----------------------------------------------------------------------------------


def twice() -> tuple[Any, Any]:
    return outcome(model("gcn", 0.3), graph()), outcome(model("gcn", 0.3), graph())


def test_two_trainers_one_after_the_other_in_started_ranks():
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "support")]
    first, second = start_local(2, twice)
    assert isinstance(first, dict), first
    assert isinstance(second, dict), second
    assert first["losses"] == second["losses"]
