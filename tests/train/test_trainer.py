"""Trainer on one rank: early stop, best weights, odd models and data, each refusal with its words."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import nn
from torch_geometric.data import Data

import kagome
from kagome import Parallel, Trainer
from kagome.checkpoint.best_weights import BestWeights, bits, copied, holds
from kagome.errors import ConfigError, DataError, ModelError
from training import CLASSES, FEATURES, QUIET, VERTICES, Gcn, graph, losses, model, settings


def trained(mine: nn.Module, data: Data | None = None, epochs: int = 3, **given) -> Trainer:
    train = given.pop("train", settings())
    with Trainer(mine, graph() if data is None else data, train=train, report=QUIET, **given) as trainer:
        trainer.summary = trainer.fit(epochs)
        trainer.scores = trainer.predict()
    return trainer


class Scripted(nn.Module):
    """Gives right answers on validation vertices in some epochs only."""

    def __init__(self, data: Data, good: dict[int, float]) -> None:
        super().__init__()
        self.step, self.good, self.y = nn.Parameter(torch.zeros(1)), good, data.y
        self.evaluations = 0

    def forward(self, x, edge_index):
        out = torch.zeros(x.size(0), CLASSES) + self.step
        if not self.training:
            self.evaluations += 1
            share = self.good.get(self.evaluations, 0.0)
            right = torch.arange(x.size(0)) < share * x.size(0)
            out = out + F.one_hot(torch.where(right, self.y, (self.y + 1) % CLASSES), CLASSES) * 10.0
        return out


def scripted(good: dict[int, float], epochs: int, **train):
    data = graph()
    mine = Scripted(data, good)
    # The loss falls for ever: the parameter, moved each epoch, tells whose weights are left.
    optimizer = lambda params: torch.optim.SGD(params, lr=1.0)  # noqa: E731
    given = {"loss": lambda out, y: out.sum(1), "optimizer": optimizer, "train": settings(**train)}
    with Trainer(mine, data, report=QUIET, **given) as trainer:
        return trainer.fit(epochs), mine, trainer


def test_early_stop_and_the_first_of_equal_best_weights():
    summary, mine, _ = scripted({2: 0.9, 4: 0.9}, epochs=50, patience=3)
    assert (summary["best_epoch"], summary["epochs"]) == (2, 5)
    assert mine.step.item() == pytest.approx(-2 * CLASSES)


@pytest.mark.parametrize("higher", [True, False])
def test_any_number_is_better_than_nan(higher: bool) -> None:
    """The first NaN stayed the best for ever, and stopped the run early."""
    best, mine, nan = BestWeights(), Gcn(), float("nan")
    found = []
    for epoch, metric in enumerate((nan, nan, 0.5, nan, 0.5, 0.7 if higher else 0.3), start=1):
        best.observe(epoch, metric, mine, higher=higher)
        found.append((best.epoch, best.waited))
    assert found == [(1, 0), (1, 1), (3, 0), (3, 1), (3, 2), (6, 0)]


def test_weights_in_another_order_are_other_weights() -> None:
    """The sum of the bits was compared, which is the same in any order."""
    mine = nn.Linear(3, 2, dtype=torch.float64)
    kept = copied(mine.state_dict())
    assert holds(mine, kept)
    with torch.no_grad():
        mine.weight.copy_(mine.weight.flip(0))
    assert not holds(mine, kept)
    assert bits(mine.weight) != bits(kept["weight"])
    with torch.no_grad():
        mine.weight.copy_(kept["weight"])
    assert holds(mine, kept)
    for value in (torch.tensor(0.5).bfloat16(), torch.ones(0, 2), torch.eye(3, dtype=torch.cfloat).conj()):
        assert bits(value) == bits(value.clone())
    sparse = torch.eye(3).to_sparse_csr()
    assert bits(sparse) != bits(torch.eye(3).flip(0).to_sparse_csr())
    assert bits(torch.eye(3).t()) == bits(torch.eye(3))
    nan = torch.tensor([float("nan")])
    assert bits(nan) == bits(nan.clone())


def test_patience_counts_epochs_not_evaluations():
    """It counted evaluations: with eval_every=4 a patience of 5 waited for 20 epochs."""
    summary, _, trainer = scripted({1: 0.9}, epochs=50, patience=5, eval_every=4)
    assert (summary["best_epoch"], summary["epochs"]) == (4, 12)
    assert [r.epoch for r in trainer.records if r.val_metric is not None] == [4, 8, 12]


def test_the_last_epoch_is_evaluated_whatever_eval_every_says():
    trainer = trained(Gcn(), epochs=5, train=settings(eval_every=3))
    assert [r.epoch for r in trainer.records if r.train_metric is not None] == [3, 5]


def test_a_second_fit_goes_on_with_the_same_curve():
    """The best epoch's weights were taken for the last one's."""
    whole = trained(model("gcn", 0.3), epochs=12, train=settings(lr=0.2))
    mine = model("gcn", 0.3)
    with Trainer(mine, graph(), train=settings(lr=0.2), report=QUIET) as trainer:
        assert trainer.fit(10)["best_epoch"] < 10, "the test needs weights that differ"
        summary = trainer.fit(12)
        assert {k: summary[k] for k in ("epochs", "best_epoch", "test_metric")} == {
            k: whole.summary[k] for k in ("epochs", "best_epoch", "test_metric")
        }
        assert losses(trainer) == losses(whole)


@pytest.mark.parametrize("missing", ["val", "test"])
def test_without_a_validation_or_test_set(missing):
    data = graph()
    data[f"{missing}_mask"] = torch.zeros(VERTICES, dtype=torch.bool)
    summary = trained(Gcn(), data, epochs=4).summary
    assert summary[f"{missing}_metric"] is None
    assert summary["best_epoch"] == (4 if missing == "val" else summary["best_epoch"])
    assert summary["test_metric" if missing == "val" else "val_metric"] > 0.2


def test_no_epochs_at_all():
    summary = trained(Gcn(), epochs=0).summary
    assert (summary["epochs"], summary["best_epoch"]) == (0, None)
    assert summary["test_metric"] is not None


def test_predictions_are_the_plain_model_s_in_original_order():
    data, mine = graph(torch.float64), model("gat", 0.4, torch.float64)
    trainer = trained(mine, data)
    mine.eval()
    torch.testing.assert_close(trainer.scores, mine(data.x, data.edge_index).detach(), rtol=0, atol=1e-12)


def test_evaluate_by_name():
    data = graph()
    with Trainer(Gcn(), data, train=settings(), report=QUIET) as trainer:
        guess = trainer.predict().argmax(1)
        for split in ("train", "val", "test"):
            mask = data[f"{split}_mask"]
            assert trainer.evaluate(split) == pytest.approx(float((guess == data.y)[mask].float().mean()))
        with pytest.raises(ConfigError, match="train, val, test for evaluate; got 'nonsense'"):
            trainer.evaluate("nonsense")


def test_the_model_is_left_without_hooks_and_runs_as_before():
    data, mine = graph(), model("gat", 0.0)
    names = {path: set(vars(module)) for path, module in mine.named_modules()}

    def left_alone() -> None:
        for path, module in mine.named_modules():
            assert not module._forward_hooks, path
            assert not module._forward_pre_hooks, path
            assert set(vars(module)) == names[path], path

    with Trainer(mine, data, train=settings(lr=0.0, weight_decay=0.0), report=QUIET) as trainer:
        left_alone()
        with trainer.engine.net:
            assert any(m._forward_hooks for m in mine.modules())
            before = trainer.predict()
            assert any(m._forward_hooks for m in mine.modules())
        left_alone()
    trainer.close()  # twice does no harm
    torch.testing.assert_close(mine.eval()(data.x, data.edge_index), before)
    with Trainer(
        mine, data, train=settings(), report=QUIET, loss=lambda out, y: out.sum(1) * math.nan
    ) as trainer:
        with pytest.raises(ModelError, match="finite"):
            trainer.fit(2)
        left_alone()


def test_two_trainers_one_after_the_other_and_one_model_twice():
    first, second = trained(model("gcn")), trained(model("gcn"))
    assert losses(first) == losses(second)
    mine = model("gcn")
    trained(mine, epochs=2)
    again = trained(mine, graph(vertices=150), epochs=1)  # nothing is kept of the first graph
    assert again.scores.shape == (150, CLASSES)


# Models ------------------------------------------------------------------------------------------


class ByData(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Gcn()

    def forward(self, data):
        assert data.num_nodes == data.x.size(0)
        return self.inner(data.x, data.edge_index)


class ByOtherNames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Gcn()

    def forward(self, features, adjacency):
        return self.inner(features, adjacency)


@pytest.mark.parametrize("kind", [ByData, ByOtherNames])
def test_how_forward_names_its_inputs_changes_nothing(kind):
    torch.manual_seed(1)
    assert losses(trained(kind())) == losses(trained(model("gcn")))


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.edges = pyg.GCNConv(FEATURES + 1, 8), pyg.GATv2Conv(8, CLASSES, edge_dim=3)
        self.seen: set[str] = set()

    def forward(self, x, edge_index, edge_weight, edge_attr, *, age, absent=None):
        assert absent is None
        self.seen |= {f"{tuple(age.shape)}", f"{edge_weight.dim()}{edge_attr.dim()}"}
        x = self.conv(torch.cat([x, age.unsqueeze(1)], 1), edge_index, edge_weight).relu()
        return self.edges(x, edge_index, edge_attr)


def with_attributes() -> Data:
    data = graph()
    generator = torch.Generator().manual_seed(5)
    data.edge_weight = torch.rand(data.num_edges, generator=generator)
    data.edge_attr = torch.rand(data.num_edges, 3, generator=generator)
    data.age = torch.rand(VERTICES, generator=generator)
    return data


def test_inputs_by_name():
    mine, data = Named(), with_attributes()
    trainer = trained(mine, data)
    assert mine.seen == {f"({VERTICES},)", "12"}
    expected = mine.eval()(data.x, data.edge_index, data.edge_weight, data.edge_attr, age=data.age)
    torch.testing.assert_close(trainer.scores, expected.detach())
    with pytest.raises(ModelError, match=r"data with 'edge_weight' for forward\(.*\); got data with .*x"):
        trained(Named())


def test_lazy_layers_take_their_shapes_from_the_data():
    class Lazy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm = pyg.SAGEConv(-1, 8), nn.LazyBatchNorm1d()
            self.last = pyg.GATConv((-1, -1), CLASSES, add_self_loops=False)

        def forward(self, x, edge_index):
            return self.last(self.norm(self.first(x, edge_index)).relu(), edge_index)

    mine = Lazy()
    found = losses(trained(mine, epochs=8))
    assert found[-1] < found[0]
    assert mine.first.lin_l.weight.shape == (8, FEATURES)


def test_frozen_and_unused_parameters_do_not_move():
    mine = Gcn()
    mine.unused = nn.Linear(3, 3)
    for parameter in mine.first.parameters():
        parameter.requires_grad_(False)
    before = {k: v.clone() for k, v in mine.state_dict().items()}
    # Weight decay would move what has a gradient of zeros; None is left alone.
    trained(mine, optimizer=lambda params: torch.optim.SGD(params, lr=0.1, weight_decay=0.5, momentum=0.9))
    for key in ("unused.weight", "unused.bias", "first.lin.weight"):
        assert torch.equal(mine.state_dict()[key], before[key]), key
    assert mine.unused.weight.grad is None
    assert not torch.equal(mine.state_dict()["last.lin.weight"], before["last.lin.weight"])


def test_a_compiled_model_trains_as_the_plain_one():
    mine = torch.compile(model("gcn"))
    assert losses(trained(mine)) == losses(trained(model("gcn")))


class Gives(nn.Module):
    def __init__(self, what) -> None:
        super().__init__()
        self.lin, self.what = nn.Linear(FEATURES, CLASSES), what

    def forward(self, x, edge_index):
        return self.what(self.lin(x))


@pytest.mark.parametrize(
    ("what", "words"),
    [
        (
            lambda out: out[:-1],
            r"a row of scores for each of the part's 200 vertices; got shape \(199, 4\)",
        ),
        (lambda out: (out, out), "got tuple"),
        (lambda out: out.sum(), r"got shape \(\)"),
        (lambda out: out[:, :3], r"to give 4 columns, one a class; got an output of shape \[\d+, 3\]"),
        (lambda out: out[:, 0], r"4 columns.*got an output of shape \[\d+\]"),
    ],
)
def test_an_output_of_the_wrong_shape(what, words):
    with pytest.raises(ModelError, match=words):
        trained(Gives(what))


def test_a_loss_that_is_not_finite_ends_the_run_before_the_weights_are_spoilt():
    mine = Gives(lambda out: out * math.inf)
    with pytest.raises(ModelError, match="a finite loss; got nan") as caught:
        trained(mine)
    assert "epoch 1" in str(caught.value)
    assert all(p.isfinite().all() for p in mine.parameters())


def test_models_that_cannot_be_trained():
    class Nothing(nn.Module):
        def forward(self, x, edge_index):
            return x[:, :CLASSES]

    with pytest.raises(ModelError, match="none that require a gradient"):
        trained(Nothing())
    with pytest.raises(ModelError, match=r"a torch\.nn\.Module in .*; got function"):
        trained(lambda x, edge_index: x)


def test_data_that_cannot_be_trained_on():
    data = graph()
    del data.y
    with pytest.raises(DataError, match="label"):
        trained(Gcn(), data)
    with pytest.raises(DataError, match=r"a torch_geometric\.data\.Data; got a dict"):
        trained(Gcn(), {"x": 1})


def test_a_cut_for_another_number_of_ranks():
    with pytest.raises(ConfigError, match="2 ranks for the mesh graph=2; got 1"):
        trained(Gcn(), parallel=Parallel(graph=2))


def test_load_gives_what_trainer_takes():
    data = kagome.load("sbm:vertices=50,degree=4,features=8,classes=4,communities=4", undirected=True)
    assert trained(Gcn(), data, epochs=1).summary["epochs"] == 1
