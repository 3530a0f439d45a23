"""What autograd keeps, counted: known tensors, memory shared, halo rows, errors that hooks must not hide."""

from __future__ import annotations

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn

from kagome import Trainer
from kagome.memory.tensor_bytes import TensorMemory
from training import CLASSES, FEATURES, QUIET, graph, settings

HIDDEN = 12


class Rows(nn.Module):
    """Row by row: what is kept can be said by hand."""

    def __init__(self, act: str) -> None:
        super().__init__()
        self.act, self.first, self.last = act, nn.Linear(FEATURES, HIDDEN), nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = self.first(x)
        if self.act == "twice":  # exp keeps its result, and so does relu
            h = h.exp().relu()
        elif self.act == "in place":
            kept = h.exp()
            h = kept + 0
            kept.add_(1)
        elif self.act == "let go":
            self.lost = h.exp().sum().item()
            h = h.relu()
        else:
            h = h.relu()
        return self.last(h)


def trained(model: nn.Module) -> Trainer:
    trainer = Trainer(model, graph(), train=settings(), report=QUIET)
    trainer.fit(1)
    return trainer


@pytest.mark.parametrize(("act", "tensors"), [("relu", 1), ("twice", 2), ("let go", 1)])
def test_what_is_kept_is_counted_once_and_only_if_it_lasts(act: str, tensors: int) -> None:
    with trained(Rows(act)) as trainer:
        # relu's result is also what the last layer keeps; features and weights are held anyhow.
        assert trainer.engine.saved == {"activations": tensors * 4 * HIDDEN * 200, "halo": 0}


def test_a_tensor_written_to_in_place_is_still_found_out() -> None:
    trainer = Trainer(Rows("in place"), graph(), train=settings(), report=QUIET)
    with trainer, pytest.raises(RuntimeError, match="modified by an inplace operation"):
        trainer.fit(1)


def test_only_the_first_forward_is_watched() -> None:
    with trained(Rows("relu")) as trainer:
        saved = trainer.engine.saved
        trainer.fit(3)
        assert trainer.engine.saved is saved


def test_a_ledger_counts_memory_once_and_halo_rows_apart() -> None:
    ledger = TensorMemory(own=5, halo=3, device=torch.device("cpu"))
    whole, away, square = torch.zeros(8, 2), torch.zeros(3, 4), torch.zeros(5, 3)
    ledger.add("features", [square])
    ledger.add("activations", [whole, whole[:5], whole.view(-1), away, square.t()], rows=True)
    assert dict(ledger.bytes) == {"features": 60, "activations": 40, "halo": 24 + 48}
    ledger.add("tables", [torch.zeros(8, 2), torch.zeros(0, 8)])
    assert ledger.bytes["tables"] == 64


def keeps_halo(channel: object, name: str) -> dict[str, int]:
    torch.manual_seed(0)
    conv = {"gat": pyg.GATConv, "sage": pyg.SAGEConv}[name](FEATURES, CLASSES)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = conv

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.conv(x, edge_index)

    with Trainer(Net(), graph(), train=settings(), report=QUIET) as trainer:
        trainer.fit(1)
        plan = trainer.engine.scope.views[0].rows
        return {**(trainer.engine.saved or {}), "rows": plan.halo}


def test_attention_keeps_halo_rows_and_a_sum_does_not(ranks) -> None:
    for one in ranks(2, keeps_halo, "gat"):
        # Neighbours' values and their scores, for the gradient of attention.
        assert one["halo"] == 4 * (CLASSES + 1) * one["rows"] > 0
    for one in ranks(2, keeps_halo, "sage"):
        assert one["halo"] == 0
