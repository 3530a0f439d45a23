"""A run goes on, and a trained model scores, on another number of ranks than before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from test_shard import C, F, N, graph
from torch import Tensor, nn
from torch_geometric.data import Data

import kagome
from kagome.comm.channel import Channel

TIGHT = {"rtol": 1e-10, "atol": 1e-10}


def network(columns: int = F) -> nn.Module:
    torch.manual_seed(5)
    return pyg.GCN(columns, 8, num_layers=3, out_channels=C, dropout=0.5).double()


def curve(channel: Channel, folder: str, first: int, last: int) -> list[float]:
    """Losses from one step to another; what step ``first`` left is read, and what ``last`` leaves written."""
    data, model, found = graph(), network(), []
    with kagome.shard(model, data, log=str, seed=4) as net:
        optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
        y = net.place(data.y)
        if first:
            saved = torch.load(f"{folder}/{first}.pt")
            net.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            net.step = saved["step"]
        for _ in range(first, last):
            loss = net.mean((net(data.x, data.edge_index) - y) ** 2)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        if net.rank == 0:
            saved = {
                "model": net.state_dict(),
                "optimizer": optimizer.state_dict(),
                "step": net.step,
            }
            torch.save(saved, f"{folder}/{last}.pt")
    return found


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 2)])
def test_a_run_goes_on_with_other_ranks_as_if_it_had_never_ended(
    ranks: Any, before: int, after: int, tmp_path: Path
) -> None:
    (whole,) = ranks(1, curve, str(tmp_path), 0, 6)
    assert len(set(whole)) == 6
    first = ranks(before, curve, str(tmp_path), 0, 3)[0]
    second = ranks(after, curve, str(tmp_path), 3, 6)[0]
    torch.testing.assert_close([*first, *second], whole, **TIGHT)


def scores(channel: Channel, where: str, columns: int) -> Tensor | None:
    """Scores of a graph without labels or masks, by the weights of a run."""
    data, model = graph(), network(columns)
    with torch.no_grad():  # of another model, if the weights were not read
        for parameter in model.parameters():
            if not nn.parameter.is_lazy(parameter):
                parameter.fill_(channel.rank)
    if channel.rank == 0:
        kagome.load_weights(model, where)
    with kagome.shard(model, Data(x=data.x, edge_index=data.edge_index), log=str) as net, torch.no_grad():
        net.eval()
        return net.gather(net(data.x, data.edge_index))


def trained(channel: Channel, out: str) -> None:
    data = graph()
    data.y = data.y.argmax(1)
    data.train_mask = torch.arange(N) < 15
    data.val_mask, data.test_mask = ~data.train_mask, torch.zeros(N, dtype=torch.bool)
    kagome.Trainer(network(), data, train=kagome.Train(lr=0.05, save_every=1), out=out).fit(3)


@pytest.mark.parametrize("columns", [F, -1])
def test_a_run_gives_a_model_that_scores_on_any_ranks(ranks: Any, columns: int, tmp_path: Path) -> None:
    out = tmp_path / "run"
    ranks(2, trained, str(out))
    model, data = network(), graph()
    kagome.load_weights(model, out)
    expected = model.eval()(data.x, data.edge_index).detach()
    assert not torch.equal(expected, network().eval()(data.x, data.edge_index))
    for where in (out, out / "checkpoints", out / "model.safetensors"):
        for world in (1, 3):
            torch.testing.assert_close(ranks(world, scores, str(where), columns)[0], expected, **TIGHT)


def test_weights_of_another_model_are_refused_and_leave_it_as_it_was(ranks: Any, tmp_path: Path) -> None:
    ranks(1, trained, str(tmp_path / "run"))
    for other in (pyg.GCN(F, 9, 3, C).double(), pyg.GraphSAGE(-1, 8, 3, C), pyg.GCN(-1, 9, 3, C).double()):
        with pytest.raises(kagome.KagomeError, match="weights of this model"):
            kagome.load_weights(other, tmp_path / "run")
    other = pyg.GCN(F, 9, 3, C)
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(kagome.KagomeError, match="weights of this model"):
        kagome.load_weights(other, tmp_path / "run")
    torch.testing.assert_close(other.state_dict(), before, rtol=0, atol=0)
    with pytest.raises(kagome.KagomeError, match="no such file or folder"):
        kagome.load_weights(other, tmp_path / "nowhere")
