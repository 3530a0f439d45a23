"""Layers that run again in backward, on several vertex sets: exact, with slices, codecs and late rows."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from test_inexact_sets import FEEDBACK, LATE, SAMPLED, STEPS, bought, rows, shop, shop_graph
from test_shard import WORLDS, both, grads, of_first
from test_vertex_sets import LAYERS, SIZES, Fields, hetero, net_of
from torch import Tensor

import kagome
from kagome.comm.channel import Channel
from kagome.recompute import checkpoint


def by_types(channel: Channel | None, kind: str, settings: dict[str, Any]) -> dict[str, Tensor]:
    """A model of ``HeteroData``: the loss over all types, and gradients of two backward passes."""
    torch.manual_seed(5)
    data = hetero()
    model = Fields(LAYERS[kind], {"paper": 5, "author": 6, "field": 7}).double()
    more: dict[str, Any] = {}
    if channel is None:
        with torch.no_grad():  # lazy layers take their shapes; sharded ones without this call
            model(data.x_dict, data.edge_index_dict, data.edge_attr_dict)
    else:
        more = {"recompute": True, "parallel": kagome.Parallel(**settings)}
    with patch.object(checkpoint, "_kept", wraps=checkpoint._kept) as kept:
        with net_of(channel, model, data, **more) as net:
            for _ in range(2):
                out = net(data.x_dict, data.edge_index_dict, data.edge_attr_dict)
                loss = sum(net.mean(each**2) for each in out.values() if each is not None)
                loss.backward()
            whole = {kind: net.gather(each, kind) for kind, each in out.items() if each is not None}
        assert channel is None or kept.called
    shown = {f"out {k}": of_first(channel, each, (SIZES[k], 4)) for k, each in whole.items()}
    return grads(model) | {"loss": loss.detach()} | shown


@pytest.mark.some(1, each="kind")
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("kind", ["sage", "gat", "transformer", "hgt", "to_hetero"])
def test_layers_of_several_vertex_types_run_again(ranks: Any, world: int, kind: str) -> None:
    both(ranks, world, by_types, kind, {})


@pytest.mark.parametrize(("world", "settings"), [(2, {"tensor": 2}), (4, {"tensor": 2, "graph": 2})])
@pytest.mark.parametrize("kind", ["sage", "hgt"])
def test_slices_of_several_vertex_types_run_again(
    ranks: Any, world: int, settings: dict[str, Any], kind: str
) -> None:
    both(ranks, world, by_types, kind, settings)


def by_sets(channel: Channel, settings: dict[str, Any], again: bool) -> tuple[list[Any], int]:
    """Losses and gradients of some steps over a ``kagome.Graph``, and the bytes of its halo."""
    model, (user, item), found = shop(), rows(), []
    cut = kagome.Parallel(guard=False, **settings)
    with kagome.shard(model, shop_graph(), parallel=cut, recompute=again, log=str) as net:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(STEPS):
            optimizer.zero_grad()
            users, items = net(user, item, bought(), bought().flip(0).contiguous())
            loss = net.mean((users - 1) ** 2) + net.mean(items**2)
            loss.backward()
            optimizer.step()
            found.append(grads(model) | {"loss": loss.detach()})
        return found, net.traffic.bytes["halo"]


EXCHANGES: dict[str, dict[str, Any]] = {
    "exact": {},
    "codec": {"codec": "int8"},
    "late": LATE,
    "feedback": FEEDBACK,
    "sampled": SAMPLED,
}


@pytest.mark.some(1, each="name")
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", EXCHANGES)
def test_what_runs_again_reads_the_rows_that_came(ranks: Any, world: int, name: str) -> None:
    """Inexact rows are those of the first run: as many bytes, and the same gradients in each step."""
    wanted, found = (ranks(world, by_sets, EXCHANGES[name], again) for again in (False, True))
    for (one, sent), (other, again) in zip(wanted, found, strict=True):
        assert (sent > 0, sent) == (world > 1, again)
        for step, more in zip(one, other, strict=True):
            assert step.keys() == more.keys()
            for name, value in step.items():
                torch.testing.assert_close(
                    more[name], value, rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}"
                )


def held_edges(channel: Channel) -> str:
    model, (user, item) = shop(), rows()
    model.register_buffer("edges", bought())
    try:
        with kagome.shard(model, shop_graph(), recompute=True, log=str) as net:
            net(user, item, bought(), bought().flip(0).contiguous())
    except kagome.KagomeError as error:
        return str(error)
    return "nothing"


def test_edges_that_the_model_holds_are_refused(ranks: Any) -> None:
    for said in ranks(2, held_edges, spoils=True):
        assert "edges as arguments of forward, with recompute=True" in said
