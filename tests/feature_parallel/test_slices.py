"""Trainer in feature slices: one curve on any number of ranks, checkpoints that move, a bound that holds."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch import nn

from kagome import Parallel, Trainer, config
from kagome.cli.app import _ranks
from kagome.comm.channel import Channel
from kagome.errors import ConfigError, KagomeError
from training import CLASSES, FEATURES, QUIET, graph, losses, model, settings

SIX = settings(epochs=6)


def gcn(hidden: int = 8) -> nn.Module:
    torch.manual_seed(2)
    return pyg.GCN(FEATURES, hidden, 3, CLASSES, dropout=0.5).double()


def attention() -> nn.Module:
    torch.manual_seed(2)
    return pyg.GAT(FEATURES, 8, 2, CLASSES, heads=2, dropout=0.4).double()


def run(
    channel: Channel, name: str, cut: dict[str, Any], out: str | None, resume: str | None
) -> dict[str, Any]:
    """Train, and what came of it."""
    made = {"plain": gcn, "wide": partial(gcn, 24), "attention": attention}
    mine = made.get(name, partial(model, name, 0.4, torch.float64))()
    with Trainer(
        mine, graph(torch.float64), parallel=Parallel(**cut), train=SIX, report=QUIET, out=out
    ) as trainer:
        summary = trainer.fit(resume=resume)
        return {
            "losses": losses(trainer),
            "summary": summary,
            "scores": trainer.predict(),
            "notes": trainer.notes,
            "weights": {k: v.clone() for k, v in mine.state_dict().items()},
            "axes": dict(trainer.mesh.axes),
        }


def trained(
    ranks: Callable[..., list],
    size: int,
    name: str,
    out: str | None = None,
    resume: str | None = None,
    **cut: Any,
) -> dict[str, Any]:
    return ranks(size, run, name, cut, out, resume)[0]


@pytest.mark.some(1)
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", ["gcn", "gat"])
def test_a_curve_does_not_know_how_many_slices(ranks: Callable[..., list], name: str, size: int) -> None:
    one, many = trained(ranks, 1, name), trained(ranks, size, name, tensor=size)
    torch.testing.assert_close(many["losses"], one["losses"], rtol=0, atol=1e-9)
    torch.testing.assert_close(many["scores"], one["scores"], rtol=0, atol=1e-7)
    assert many["summary"]["test_metric"] == one["summary"]["test_metric"]
    assert many["axes"] == {"pipe": 1, "graph": 1, "tensor": size}
    assert many["summary"]["bytes_per_epoch"]["transpose"] > 0


def checked(channel: Channel, graph_parts: int = 1) -> list[str]:
    """What is said where the split is compared with the whole first."""
    with Trainer(
        gcn(),
        graph(torch.float64),
        parallel=Parallel(tensor=2, graph=graph_parts),
        train=settings(check=True, epochs=1),
        report=QUIET,
    ) as trainer:
        trainer.fit()
        return trainer.notes


def test_the_check_splits_features_too(ranks: Callable[..., list]) -> None:
    notes = ranks(2, checked)[0]
    assert any("split over 3 (features over 3) and whole equal" in note for note in notes)


@pytest.mark.some(1)
@pytest.mark.parametrize("cut", [{}, {"tensor": 2}, {"tensor": 3, "memory_gib": 4e-5}, {"graph": 2}])
def test_a_decoupled_curve_is_its_own_on_one_rank(ranks: Callable[..., list], cut: dict[str, Any]) -> None:
    size = cut.get("tensor", cut.get("graph", 1))
    one = trained(ranks, 1, "plain", decouple=True)
    many = trained(ranks, size, "plain", decouple=True, **cut)
    torch.testing.assert_close(many["losses"], one["losses"], rtol=0, atol=1e-9)
    assert any(note.startswith("decoupled: all maps of GCN come first") for note in many["notes"])
    for name, value in one["weights"].items():  # the user's own module, trained in place
        torch.testing.assert_close(many["weights"][name], value, rtol=0, atol=1e-7)
    assert not torch.equal(one["weights"]["convs.0.lin.weight"], gcn().state_dict()["convs.0.lin.weight"])
    if "memory_gib" in cut:
        assert 0 < many["summary"]["working_memory_bytes"] <= cut["memory_gib"] * 2**30
    coupled = trained(ranks, 1, "plain")
    assert abs(coupled["losses"][-1] - one["losses"][-1]) > 1e-4


@pytest.mark.parametrize("cut", [{"tensor": 2}, {"graph": 2}])
def test_decoupled_attention_drops_the_same_weights_on_all_ranks(
    ranks: Callable[..., list], cut: dict[str, Any]
) -> None:
    one, two = (
        trained(ranks, size, "attention", decouple=True, **more) for size, more in ((1, {}), (2, cut))
    )
    torch.testing.assert_close(two["losses"], one["losses"], rtol=0, atol=1e-9)


def test_bytes_of_a_decoupled_epoch_do_not_grow_with_depth(ranks: Callable[..., list]) -> None:
    found = ranks(2, depths)[0]
    assert found[2] == found[5] > 0


def depths(channel: Channel) -> dict[int, int]:
    found = {}
    for layers in (2, 5):
        torch.manual_seed(0)
        mine = pyg.GCN(FEATURES, 8, layers, CLASSES)
        cut = Parallel(tensor=2, decouple=True)
        with Trainer(mine, graph(), parallel=cut, train=settings(eval_every=9), report=QUIET) as trainer:
            found[layers] = trainer.fit()["bytes_per_epoch"]["transpose"]
    return found


MESHES = [
    (1, {}),
    (2, {"tensor": 2}),
    (3, {"graph": 3}),
    (4, {"tensor": 2, "pipe": 2}),
    (4, {"tensor": 2, "graph": 2}),
]


@pytest.mark.some(1)
@pytest.mark.parametrize("place", range(len(MESHES)))
def test_checkpoints_move_between_slices_parts_and_one_rank(
    ranks: Callable[..., list], tmp_path: Path, place: int
) -> None:
    whole = trained(ranks, 1, "gcn")
    (first, one), (second, two) = MESHES[place], MESHES[(place + 1) % len(MESHES)]
    folder = str(tmp_path / "run")
    ranks(first, partial_run, one, folder)
    rest = trained(ranks, second, "gcn", resume=folder, **two)
    torch.testing.assert_close(rest["losses"][-3:], whole["losses"][-3:], rtol=0, atol=1e-9)


def partial_run(channel: Channel, cut: dict[str, Any], out: str) -> None:
    """The first half."""
    mine = model("gcn", 0.4, torch.float64)
    with Trainer(
        mine, graph(torch.float64), parallel=Parallel(**cut), train=SIX, report=QUIET, out=out
    ) as trainer:
        trainer.fit(3)


REFUSED: dict[str, tuple[dict[str, Any], int, str]] = {
    "bound": (
        {"tensor": 2, "graph": 2, "memory_gib": 1.0},
        4,
        "memory_gib=1.0 with graph=2, which is for",
    ),
    "chunks": ({"tensor": 2, "pipe": 2, "chunks": 4}, 4, "chunks=4, which is for parts"),
    "feedback": (
        {"tensor": 2, "codec": "onebit", "error_feedback": True},
        2,
        "error_feedback, which is for",
    ),
    "bits": ({"tensor": 2, "codec": "int4", "adaptive_bits": True}, 2, "adaptive_bits, which is for parts"),
    "late": ({"tensor": 2, "max_age": 1}, 2, "max_age=1, which is for parts"),
    "ranks": ({"tensor": 3}, 4, "3 ranks for the mesh tensor=3 x graph=1; got 4"),
    "no slices": ({"memory_gib": 1.0}, 2, "tensor=1, which has none"),
    "decoupled stages": (
        {"decouple": True, "pipe": 2},
        2,
        "pipe=2 and chunks=8, which cut it layer by",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_slices_do_not_go_with_is_refused(name: str) -> None:
    cut, size, words = REFUSED[name]
    with pytest.raises(ConfigError, match=words):
        Parallel(**cut).fit(size)


def test_a_bound_is_a_number_above_none() -> None:
    with pytest.raises(ConfigError, match=r"parallel\.memory_gib to be above 0"):
        Parallel(tensor=2, memory_gib=0.0)


def refused(channel: Channel, cut: dict[str, Any], given: dict[str, Any], **more: Any) -> str:
    """The error's text."""
    try:
        with Trainer(
            gcn(),
            graph(torch.float64),
            parallel=Parallel(tensor=2, **cut),
            train=settings(**given),
            report=QUIET,
            **more,
        ) as trainer:
            trainer.fit()
    except KagomeError as error:
        return str(error)
    return "nothing was refused"


def test_a_bound_too_small_is_refused_on_every_rank(ranks: Callable[..., list]) -> None:
    for text in ranks(2, refused, {"memory_gib": 1e-7}, {}):
        assert "the in-edges of one vertex" in text


def by_pyg(channel: Channel) -> str:
    return refused(channel, {}, {}, fast=False)


def test_what_would_leave_no_slices_is_refused(ranks: Callable[..., list]) -> None:
    for text in ranks(2, by_pyg):
        assert "model.fast=False, which leaves them out" in text
    for text in ranks(2, refused, {}, {"amp": "bf16"}):
        assert "train.amp='bf16', without any on a CPU" in text


def recomputed(channel: Channel, cut: dict[str, Any]) -> list[float | None]:
    """Losses of layers that run again in backward."""
    with Trainer(
        gcn(), graph(torch.float64), parallel=Parallel(**cut), train=settings(), report=QUIET, recompute=True
    ) as trainer:
        trainer.fit()
        return losses(trainer)


@pytest.mark.some(1)
@pytest.mark.parametrize("bound", [{}, {"memory_gib": 4e-5}])
def test_layers_that_run_again_send_nothing_again(
    ranks: Callable[..., list], bound: dict[str, float]
) -> None:
    one = ranks(1, recomputed, {})[0]
    two = ranks(2, recomputed, {"tensor": 2, **bound})[0]
    torch.testing.assert_close(two, one, rtol=0, atol=1e-9)


def test_the_command_line_starts_as_many_ranks_as_slices() -> None:
    assert _ranks(config.Run(parallel=Parallel(tensor=3))) == 3
    assert _ranks(config.Run(parallel=Parallel(tensor=2, graph=1))) == 2


def test_equal_parts_are_taken_where_no_cut_is_asked_for() -> None:
    assert Parallel(tensor=2).cutter(2) == "contiguous"
    assert Parallel(tensor=2, partitioner="metis").cutter(2) == "metis"
    assert Parallel().cutter(2) == "auto"
    assert Parallel(tensor=2).cutter(4) == "auto/2"
    assert Parallel(tensor=2, partitioner="random").cutter(6) == "random/2"


@pytest.mark.some(1)
@pytest.mark.parametrize("bound", [{}, {"memory_gib": 4e-5}])
@pytest.mark.parametrize("decouple", [False, True])
def test_few_bits_between_slices(ranks: Callable[..., list], decouple: bool, bound: dict[str, Any]) -> None:
    """Fewer bytes, counted before and after; a curve near the exact one; watched by probes."""
    cut = {"tensor": 2, "decouple": decouple, **bound}
    exact = trained(ranks, 2, "wide", **cut)
    found = trained(ranks, 2, "wide", codec="int8", **cut)
    again = trained(ranks, 2, "wide", codec="int8", **cut)
    assert found["losses"] == again["losses"] != exact["losses"]
    torch.testing.assert_close(found["losses"], exact["losses"], rtol=0.05, atol=0.05)
    crossing = found["summary"]["crossing"]
    assert crossing["codecs"]["transpose"] == crossing["codecs"]["transpose backward"] == "int8"
    assert 0 < max(crossing["errors"].values()) < 0.05
    assert crossing["probes"]["count"] > 0
    assert crossing["probes"]["lowest_cosine"] > 0.9
    sent = found["summary"]["bytes_per_epoch"]["transpose"]
    uncoded = crossing["bytes_uncoded_per_epoch"]["transpose"]
    # Of six epochs some are probes, which send exact rows besides. Decoupled, what travels is as narrow as
    # there are classes, so that headers leave little to save.
    assert sent < (0.95 if decouple else 0.75) * uncoded
    assert uncoded == exact["summary"]["bytes_per_epoch"]["transpose"]


@pytest.mark.some(1)
@pytest.mark.parametrize("name", ["gcn", "gat", "plain"])
@pytest.mark.parametrize("bound", [{}, {"memory_gib": 4e-5}])
def test_stages_of_slices(ranks: Callable[..., list], name: str, bound: dict[str, Any]) -> None:
    """Each stage's ranks slice the features of its layers, and give the next stage their own vertices."""
    one, many = trained(ranks, 1, name), trained(ranks, 4, name, tensor=2, pipe=2, **bound)
    torch.testing.assert_close(many["losses"], one["losses"], rtol=0, atol=1e-9)
    torch.testing.assert_close(many["scores"], one["scores"], rtol=0, atol=1e-7)
    assert many["axes"] == {"pipe": 2, "graph": 1, "tensor": 2}
    assert any("2 stages x 1 chunks, 2 feature slices in each" in note for note in many["notes"])
    sent = many["summary"]["bytes_per_epoch"]
    assert sent["transpose"] > 0
    assert sent["stage"] > 0
    if bound:
        assert 0 < many["summary"]["working_memory_bytes"] <= bound["memory_gib"] * 2**30


@pytest.mark.some(1)
@pytest.mark.parametrize("name", ["gcn", "gat", "plain"])
@pytest.mark.parametrize("more", [{}, {"decouple": True}])
def test_parts_whose_features_are_sliced(ranks: Callable[..., list], name: str, more: dict[str, Any]) -> None:
    """Between parts goes a halo, each row once in as many columns as a rank has; within one, transposes."""
    name = "plain" if more else name
    one, many = trained(ranks, 1, name, **more), trained(ranks, 4, name, tensor=2, graph=2, **more)
    torch.testing.assert_close(many["losses"], one["losses"], rtol=0, atol=1e-9)
    torch.testing.assert_close(many["scores"], one["scores"], rtol=0, atol=1e-7)
    assert many["axes"] == {"pipe": 1, "graph": 2, "tensor": 2}
    sent = many["summary"]["bytes_per_epoch"]
    assert sent["transpose"] > 0
    assert sent["halo"] > 0


def test_the_check_knows_parts_of_slices(ranks: Callable[..., list]) -> None:
    notes = ranks(4, checked, 2)[0]
    assert any("split over 4 (features over 2) and whole equal" in note for note in notes)


def test_a_halo_of_slices_may_have_few_bits(ranks: Callable[..., list]) -> None:
    exact, few = (
        trained(ranks, 4, "wide", tensor=2, graph=2, guard=False, codec=codec)["summary"]["bytes_per_epoch"]
        for codec in ("none", "int8")
    )
    assert few["halo"] < 0.4 * exact["halo"]
    assert few["transpose"] < 0.4 * exact["transpose"]


class Led(nn.Module):
    """No read of its convolutions is of constant features: each is made again."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(FEATURES, 8).double()
        self.convs = nn.ModuleList([pyg.GCNConv(8, 8), pyg.GCNConv(8, CLASSES)]).double()

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        return self.convs[1](self.convs[0](self.first(x), edge_index).relu(), edge_index)


def again(channel: Channel, cut: dict[str, Any]) -> list[list[float | None]]:
    """Losses of a run whose layers run once more in backward, and of one whose layers do not."""
    found = []
    for recompute in (True, False):
        with Trainer(
            gcn(),
            graph(torch.float64),
            parallel=Parallel(**cut),
            train=SIX,
            report=QUIET,
            recompute=recompute,
        ) as trainer:
            trainer.fit()
            found.append(losses(trainer))
    return found


@pytest.mark.some(1)
@pytest.mark.parametrize("cut", [{"tensor": 2}, {"tensor": 2, "graph": 2}])
def test_layers_of_slices_run_again_without_asking(ranks: Callable[..., list], cut: dict[str, Any]) -> None:
    size = cut["tensor"] * cut.get("graph", 1)
    one, other = ranks(size, again, cut)[0]
    torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
