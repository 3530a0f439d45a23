"""What a model keeps is refused by name where forward writes a part's rows to it, in whatever epoch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import SAGEConv

from by_hand import graph
from convolutions import double_precision
from kagome import Parallel, Trainer
from kagome.comm.channel import Channel
from kagome.config import Report, Train
from kagome.errors import ModelError

WIDTH = 4


class Late(nn.Module):
    """A table that forward changes from the second epoch on.

    Args:
        how: What it does: see ``forward``.
        rows: Of the table.
    """

    def __init__(self, how: str, rows: int) -> None:
        super().__init__()
        self.conv, self.how, self.epoch = SAGEConv(6, WIDTH), how, 0
        self.register_buffer("bank", torch.zeros(rows, WIDTH))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = self.conv(x, edge_index)
        out = h + self.bank
        self.epoch += self.training
        if self.training and self.epoch >= 2:
            if self.how == "writes":
                self.bank.copy_(h.detach())
            elif self.how == "replaces":
                self.bank = 0.5 * self.bank + h.detach()
            else:
                self.bank.mul_(0.5).add_(h.detach().mean(0))
        return out


def _trained(channel: Channel, how: str) -> list[float] | str:
    data = graph()
    data.y = torch.linspace(-1, 1, 30 * WIDTH, dtype=torch.float64).view(30, WIDTH)
    data.train_mask, data.val_mask, data.test_mask = (torch.arange(30) % 2 == each for each in (0, 2, 1))
    with double_precision():
        torch.manual_seed(0)
        model = Late(how, int(data.num_nodes or 0)).double()
        settings = Train(check=False, epochs=3, timeout=20.0)
        with Trainer(
            model,
            data,
            loss="mse",
            train=settings,
            parallel=Parallel(graph=channel.size),
            report=Report(page=False, trace=False, progress=False),
        ) as trainer:
            try:
                trainer.fit()
            except ModelError as error:
                return f"{len(trainer.records)}: {error}"
            return [float(record.loss) for record in trainer.records]


@pytest.mark.parametrize("how", ["writes", "replaces"])
def test_a_table_that_is_written_to_in_a_later_epoch(ranks: Callable[..., list], how: str) -> None:
    for said in ranks(2, _trained, how):
        assert said.startswith("1: expected what a model keeps from one forward to the next"), said
        assert "bank" in said
        assert "Try: return these rows" in said


def test_what_all_ranks_write_alike_is_served(ranks: Callable[..., list]) -> None:
    (one,) = ranks(1, _trained, "scales")
    for found in ranks(2, _trained, "scales"):
        assert found == pytest.approx(one, rel=1e-10)
        assert len(found) == 3


@pytest.mark.parametrize("how", ["writes", "replaces"])
def test_one_rank_refuses_none(ranks: Callable[..., list], how: str) -> None:
    (found,) = ranks(1, _trained, how)
    assert len(found) == 3
    assert all(isinstance(loss, float) for loss in found)
