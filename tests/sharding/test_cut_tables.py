"""Cut tables: each rank trains its own rows of an embedding, as one process trains all of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch_geometric.nn as pyg
from test_shard import WORLDS, N, both, grads, graph, net_of
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.data import Data

import kagome
from kagome.comm.channel import Channel
from kagome.graph.partition import store
from kagome.graph.partition.partition import split_all
from kagome.graph.structure.validate import validate

D = 6
EDGES = 90


class LightGCN(nn.Module):
    """Three propagations of a table of all vertices, read in one of several ways."""

    def __init__(self, read: str = "weight") -> None:
        super().__init__()
        self.table, self.read = nn.Embedding(N, D), read
        self.scale = nn.Parameter(torch.ones(D))
        self.strength = nn.Parameter(torch.linspace(0.5, 1.5, EDGES))
        self.register_buffer("ids", torch.arange(N), persistent=False)
        self.hops = nn.ModuleList(pyg.LGConv(normalize=False) for _ in range(3))

    def forward(self, edge_index: Tensor, n_id: Tensor | None = None) -> Tensor:
        reads: dict[str, Callable[[], Tensor]] = {
            "weight": lambda: self.table.weight,
            "arange": lambda: self.table(torch.arange(N)),
            "buffer": lambda: self.table(self.ids),
            "n_id": lambda: self.table(n_id),
            "index": lambda: self.table.weight[n_id],
            "select": lambda: self.table.weight.index_select(0, self.ids),
            "edges": lambda: (
                self.table.weight
                + torch.zeros_like(self.table.weight).index_add(0, edge_index[1], self.table(edge_index[0]))
            ),
            "batch": lambda: self.table.weight + self.table(torch.tensor([3, 1, 3])).sum(0),
            "slices": lambda: torch.cat([self.table.weight[:9] * 2, self.table.weight[9:]]),
        }
        h = reads[self.read]() * self.scale
        out = h / 4
        for hop in self.hops:
            h = hop(h, edge_index, self.strength)
            out = out + h / 4
        return out


CUT = ("table.weight", "strength")


def made(read: str = "weight") -> LightGCN:
    torch.manual_seed(5)
    return LightGCN(read).double()


def fed(edges: int = EDGES) -> Data:
    data = graph(edges)
    data.x, data.n_id = None, torch.arange(N)
    return data


def opened(channel: Channel | None, model: nn.Module, data: Any, **more: Any) -> Any:
    return net_of(channel, model, data, **({} if channel is None else {"cut": CUT, **more}))


def bpr(channel: Channel | None, net: Any, model: LightGCN, data: Data, step: int) -> Tensor:
    """The loss of LightGCN, with a penalty on the rows that the pairs start from."""
    size, rank = (1, 0) if channel is None else (channel.size, channel.rank)
    drawn = torch.randint(0, N, (2, 31), generator=torch.Generator().manual_seed(step))
    h = net(data.edge_index, data.n_id)
    (user, item), other = (
        net.pairs(h, drawn[:, rank::size]),
        net.read(h, net.negatives(31, seed=7, step=step)[1]),
    )
    first = net.read(model.table.weight, drawn[0, rank::size])
    score = (user * item).sum(1) - (user * other).sum(1)
    return 0.1 * net.mean(first**2) - net.mean(functional.logsigmoid(score))


def trained(channel: Channel | None, read: str) -> dict[str, Tensor]:
    """Three steps of Adam, by an optimizer made before the model is sharded, with clipped gradients."""
    data, model = fed(), made(read)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, weight_decay=0.01)
    found = {}
    with opened(channel, model, data) as net:
        for step in range(3):
            loss = bpr(channel, net, model, data, step)
            optimizer.zero_grad()
            loss.backward()
            if channel is None:
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            else:
                norm = net.clip_grad_norm_(0.05)
                rows = {net.own().numel(), net.own("edges").numel()}
                cut = [p for name, p in model.named_parameters() if name in CUT]
                assert {p.size(0) for p in cut} == rows or channel.size == 1
                assert all(optimizer.state[p]["exp_avg"].shape == p.shape for p in cut if step)
            optimizer.step()
            found |= {f"loss {step}": loss.detach(), f"norm {step}": norm.detach()}
        state = (model if channel is None else net).state_dict()
        found |= {f"state of {name}": value.clone() for name, value in state.items()}
    assert model.table.weight.shape == (N, D)
    assert not model._state_dict_hooks
    return found | grads(model) | {name: p.detach().clone() for name, p in model.state_dict().items()}


@pytest.mark.every
@pytest.mark.parametrize("world", WORLDS)
def test_training_is_that_of_one_process(ranks: Any, world: int) -> None:
    both(ranks, world, trained, "weight")


@pytest.mark.every
@pytest.mark.parametrize("read", ["arange", "buffer", "n_id", "index", "select", "edges", "batch", "slices"])
def test_reads_of_a_table(ranks: Any, read: str) -> None:
    both(ranks, 3, trained, read)


def on_no_part(channel: Channel | None, folder: str) -> dict[str, Tensor]:
    """Two backward passes, the first within ``no_sync``, on parts of very different sizes; one is empty."""
    data, model = fed(), made()
    with opened(channel, model, data if channel is None else folder) as net:
        edges = data.edge_index if channel is None else net.inputs["edge_index"]
        with nullcontext() if channel is None else net.no_sync():
            net.mean(net(edges) ** 2).backward()
        if channel is not None:
            assert model.table.weight.grad is None
            assert model.table.weight.size(0) == [20, 3, 0][channel.rank]
        net.mean(net(edges).tanh()).backward()
        found = {}
        for norm in (float("inf"), 1.0):
            plain = partial(torch.nn.utils.clip_grad_norm_, model.parameters())
            clip = plain if channel is None else net.clip_grad_norm_
            found[f"norm {norm}"] = clip(0.01, norm_type=norm)
    return found | grads(model)


def test_uneven_and_empty_parts(ranks: Any, tmp_path: Path) -> None:
    clean, _ = validate(fed())
    owner = (torch.arange(N) >= 20).long()
    meta, _ = store.measure(clean, owner, 3, fingerprint="test", method="test", seed=0)
    store.save(split_all(clean, owner, 3, fingerprint="test"), tmp_path, meta)
    both(ranks, 3, on_no_part, str(tmp_path))


def half(channel: Channel, saved: dict[str, Any] | None) -> dict[str, Any]:
    """Two steps from a checkpoint, if there is one; a checkpoint after them."""
    data, model = fed(), made()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    if saved is not None and channel.rank:
        # Rank 0's values count: others need none of a cut table.
        model.table = nn.Embedding(N, D, device="meta", dtype=torch.float64)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    first = 0
    with kagome.shard(model, data, cut=CUT, log=str) as net:
        if saved is not None:
            first = 2
            net.load_state_dict(saved["model"])
            net.load_optimizer_state_dict(optimizer, saved["optimizer"])
        for step in range(first, first + 2):
            optimizer.zero_grad()
            bpr(channel, net, model, data, step).backward()
            optimizer.step()
        state = {"model": deepcopy(net.state_dict()), "optimizer": net.optimizer_state_dict(optimizer)}
        alone = net.state_dict(rank0_only=True), net.optimizer_state_dict(optimizer, rank0_only=True)
    for each, whole in zip(alone, state.values(), strict=True):
        assert bool(each) == (channel.rank == 0)
        if each:
            torch.testing.assert_close(dict(each), dict(whole), rtol=0, atol=0)
    return state


@pytest.mark.every
@pytest.mark.parametrize("worlds", [(4, 2), (1, 3)])
def test_resume_on_other_ranks(ranks: Any, worlds: tuple[int, int]) -> None:
    expected = ranks(1, half, ranks(1, half, None)[0])[0]
    saved = ranks(worlds[0], half, None)[0]
    assert saved["optimizer"]["state"][0]["exp_avg"].shape == torch.Size([D])
    for found in ranks(worlds[1], half, saved):
        torch.testing.assert_close(dict(found["model"]), dict(expected["model"]), rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(
            found["optimizer"]["state"], expected["optimizer"]["state"], rtol=1e-10, atol=1e-10
        )


def averaged(channel: Channel) -> dict[str, Tensor]:
    """An average of weights beside the model holds own rows; its state dict is whole."""
    data, model = fed(), made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with kagome.shard(model, data, cut=True, log=str) as net:
        mean = torch.optim.swa_utils.AveragedModel(net)
        for step in range(2):
            optimizer.zero_grad()
            bpr(channel, net, model, data, step).backward()
            optimizer.step()
            mean.update_parameters(net)
        assert mean.module.table.weight.shape == model.table.weight.shape
        return {name: value.clone() for name, value in mean.state_dict().items()}


def test_an_average_of_weights(ranks: Any) -> None:
    (expected,) = ranks(1, averaged)
    for found in ranks(2, averaged):
        assert found["module.table.weight"].shape == (N, D)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def clipped_by_torch(channel: Channel) -> str:
    """Torch's norm of one rank's rows parts the ranks' weights, which the next forward passes find."""
    data, model = fed(), made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with kagome.shard(model, data, cut=CUT, log=str) as net:
        try:
            for step in range(4):
                optimizer.zero_grad()
                bpr(channel, net, model, data, step).backward()
                torch.nn.utils.clip_grad_norm_(net.parameters(), 0.01)
                optimizer.step()
        except kagome.KagomeError as error:
            return str(error)
    return ""


def test_a_norm_of_one_rank_is_found(ranks: Any) -> None:
    for told in ranks(2, clipped_by_torch):
        assert "net.clip_grad_norm_" in told


def refusal(channel: Channel, case: str) -> str:
    """The error of a table that cannot be cut, or be read or loaded as asked."""
    data, model = fed(N if case == "ambiguous" else EDGES), made("n_id")
    cut: Any = {"unknown": ("tabel.weight",), "size": ("scale",), "text": "table.weight"}.get(case, CUT)
    if case == "option":
        model.table = nn.Embedding(N, D, padding_idx=0).double()
    if case == "order":
        data.n_id = torch.arange(N).flip(0)
    if case == "none":
        cut, model = True, pyg.GCN(4, 4, 1).double()
    try:
        with kagome.shard(model, data, cut=cut, log=str) as net:
            if case == "load":
                net.load_state_dict({name: value[:5] for name, value in net.state_dict().items()})
            net(data.edge_index, data.n_id)
    except kagome.KagomeError as error:
        return str(error)
    return ""


@pytest.mark.every
@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("unknown", "the name of a parameter of the model"),
        ("size", "scale of shape \\[6\\]; a graph of 23 vertices and 90 edges"),
        ("text", 'cut=\\("embedding.weight",\\)'),
        ("ambiguous", "a graph of 23 vertices and 23 edges"),
        ("none", "a parameter with a row for each vertex or edge"),
        ("option", "padding_idx=0"),
        ("order", "read by numbers of other rows"),
        ("load", "a tensor with all rows, \\[23, 6\\]"),
    ],
)
def test_refusals(ranks: Any, case: str, words: str) -> None:
    for told in ranks(2, refusal, case):
        assert re.search(words, told), told


def as_shown(channel: Channel, folder: str) -> tuple[float, list[int]]:
    """The loop of the page about learned tables, with its checkpoint in a folder."""
    page = (Path(__file__).parents[2] / "docs" / "tables.md").read_text()
    (script,) = (each for each in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "cut=" in each)
    script, shard = script.replace("checkpoint.pt", f"{folder}/checkpoint.pt"), partial(kagome.shard, log=str)
    names: dict[str, Any] = {}
    with patch.object(kagome, "shard", shard):
        exec(compile(script, "tables.md", "exec"), names)
    return names["loss"].item(), list(names["model"].embedding.weight.shape)


def test_the_loop_of_the_page(ranks: Any, tmp_path: Path) -> None:
    found = [*ranks(1, as_shown, str(tmp_path)), *ranks(2, as_shown, str(tmp_path))]
    for loss, shape in found:
        assert loss == pytest.approx(found[0][0], abs=1e-5)
        assert loss < 1.0
        assert shape == [1797, 32]
    saved = torch.load(tmp_path / "checkpoint.pt")
    assert saved["model"]["embedding.weight"].shape == saved["optimizer"]["state"][0]["exp_avg"].shape


def copied(channel: Channel, copies: int) -> dict[str, Tensor]:
    """Copies of parts under ``DistributedDataParallel``, which loads and gives whole tensors, too."""
    mesh = init_device_mesh(
        "cpu", (copies, dist.get_world_size() // copies), mesh_dim_names=("data", "graph")
    )
    data, model = fed(), made()
    before = {name: value.clone() * 2 for name, value in model.state_dict().items()}
    with kagome.shard(model, data, mesh=mesh["graph"], cut=CUT, log=str) as net:
        wrapped = DistributedDataParallel(net, process_group=mesh.get_group("data"), broadcast_buffers=False)
        wrapped.load_state_dict({f"module.{name}": value for name, value in before.items()})
        loss = net.mean(wrapped(data.edge_index) ** 2) * (1 + mesh.get_local_rank("data"))
        loss.backward()
        state = wrapped.state_dict()
    assert {name: value.shape for name, value in model.state_dict().items()} == {
        name: value.shape for name, value in before.items()
    }
    return grads(model) | {name: state[f"module.{name}"].clone() for name in before}


@pytest.mark.every
@pytest.mark.parametrize(("world", "copies"), [(4, 2), (3, 1)])
def test_copies_of_parts(ranks: Any, world: int, copies: int) -> None:
    data, model = fed(), made()
    model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()})
    ((model(data.edge_index) ** 2).mean() * (1 + copies) / 2).backward()
    expected = grads(model) | model.state_dict()
    for found in ranks(world, copied, copies):
        torch.testing.assert_close(found, dict(expected), rtol=1e-10, atol=1e-10)


def sliced(channel: Channel | None, more: dict[str, Any]) -> dict[str, Tensor]:
    """One backward pass with other settings of the split."""
    data, model = fed(), made()
    with opened(channel, model, data, **more) as net:
        net.mean(net(data.edge_index).tanh() ** 2).backward()
    return grads(model)


@pytest.mark.every
@pytest.mark.parametrize(
    "more",
    [
        {"parallel": kagome.Parallel(tensor=2)},
        {"fast": False},
        {"recompute": True},
        {"parallel": kagome.Parallel(partitioner="contiguous")},
    ],
)
def test_other_settings(ranks: Any, more: dict[str, Any]) -> None:
    expected = sliced(None, {})
    for found in ranks(2, sliced, more):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def refused_late(channel: Channel) -> str:
    """A model that is on a part already, which is found after its table was cut."""
    data, model = fed(), made()
    before = model.table.weight.detach().clone()
    with kagome.shard(model, data, log=str):
        with pytest.raises(kagome.KagomeError) as error:
            kagome.shard(model, data, cut=CUT, log=str)
        assert torch.equal(before, model.table.weight)
    return str(error.value)


def test_a_refused_model_has_its_table(ranks: Any) -> None:
    assert all("a model that runs nowhere else" in told for told in ranks(2, refused_late))
