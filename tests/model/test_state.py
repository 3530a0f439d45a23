"""State of a model whose layers leave a parameter out of their state dict: nothing of it is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch.nn.utils import prune

from kagome import Trainer
from kagome.comm.channel import Channel
from kagome.config import Parallel
from kagome.model.state import load_state, state_of
from training import QUIET, graph, settings


class Pruned(nn.Module):
    """Layers of PyG's ``Linear``, which writes ``weight`` whatever is learned in its place."""

    def __init__(self) -> None:
        super().__init__()
        self.one = pyg.SAGEConv(8, 8)
        self.two = pyg.SAGEConv(8, 4)
        for layer in (self.one, self.two):
            prune.l1_unstructured(layer.lin_l, "weight", amount=0.3)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.two(self.one(x, edge_index).relu(), edge_index)


def made() -> Pruned:
    torch.manual_seed(2)
    return Pruned().double()


def test_what_a_layer_leaves_out_is_kept_and_given_back():
    model = made()
    assert "one.lin_l.weight_orig" not in model.state_dict(), "PyG writes it by now: this file can go"
    state = {name: value.clone() for name, value in state_of(model).items()}
    assert {name for name, _ in model.named_parameters()} <= state.keys()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)
    load_state(model, state)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, state[name]), name


class Deaf(nn.Linear):
    """Neither writes its weight nor takes it."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}bias"] = self.bias if keep_vars else self.bias.detach()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        with torch.no_grad():
            self.bias.copy_(state_dict[f"{prefix}bias"])


def test_what_a_layer_does_not_take_is_given_all_the_same():
    model = Deaf(3, 2)
    state = {name: value + 1.0 for name, value in state_of(model).items()}
    load_state(model, state)
    assert torch.equal(model.weight, state["weight"])
    assert torch.equal(model.bias, state["bias"])


@pytest.mark.parametrize("wrong", ["missing", "more"])
def test_another_model_s_state_is_an_error(wrong: str):
    model = nn.Linear(3, 2)
    state: dict[str, Any] = dict(state_of(model))
    state = {"bias": state["bias"]} if wrong == "missing" else {**state, "other": torch.zeros(1)}
    with pytest.raises(RuntimeError, match="weight" if wrong == "missing" else "other"):
        load_state(model, state)


def trained(channel: Channel, parallel: dict[str, Any], out: str) -> tuple[dict[str, Tensor], list[float]]:
    """Weights and losses of six epochs in one go, or of three and three more of a checkpoint."""

    def trainer(**given: Any) -> Trainer:
        return Trainer(
            made(),
            graph(torch.float64),
            parallel=Parallel(**parallel),
            train=settings(),
            report=QUIET,
            **given,
        )

    with trainer(out=out) as first:
        first.fit(3)
    with trainer() as second:
        second.fit(6, resume=out, restore_best=False)
        weights = {name: p.detach().clone() for name, p in second.model.named_parameters()}
        best = second.best_weights()
        assert "two.lin_l.weight_orig" in best
        second.fit(7)  # which leaves the model with the best epoch's
        return weights, [float(record.loss or 0.0) for record in second.records]


MESHES = [(1, {}), (2, {}), (2, {"pipe": 2, "chunks": 2, "cross_chunk": "exact"})]


@pytest.mark.parametrize(("world", "parallel"), MESHES)
def test_a_pruned_model_trains_goes_on_and_is_restored(ranks, tmp_path: Path, world, parallel):
    """In a pipeline the ranks were refused for weights that had never been joined."""
    with Trainer(made(), graph(torch.float64), train=settings(), report=QUIET) as trainer:
        trainer.fit(6, restore_best=False)
        expected = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
        losses = [float(record.loss or 0.0) for record in trainer.records]
    for weights, found in ranks(world, trained, parallel, str(tmp_path / "run")):
        assert found[:6] == pytest.approx(losses, rel=1e-9)
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-8, atol=1e-10)
