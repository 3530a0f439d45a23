"""Trainer on a ``HeteroData``: the curve of a plain PyG loop on any number of ranks, and what is refused."""

from __future__ import annotations

import copy
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.data import HeteroData

import kagome
from by_hand import in_memory
from kagome import Parallel, Trainer
from kagome.comm.channel import Channel
from kagome.errors import CheckError, ConfigError, DataError, KagomeError, ModelError
from training import QUIET, host_apart, losses, settings

SIZES = {"paper": 41, "author": 17, "field": 3}
WIDTHS = {"paper": 5, "author": 6, "field": 7}
CLASSES = 4
LINKS = {
    ("author", "writes", "paper"): 90,
    ("paper", "by", "author"): 80,
    ("paper", "cites", "paper"): 110,
    ("field", "holds", "paper"): 60,
    ("paper", "about", "field"): 50,
}


def library(labels: str = "classes") -> HeteroData:
    """Three vertex types: papers have labels and masks; fields have no features, and there are three."""
    generator = torch.Generator().manual_seed(3)
    data = HeteroData()
    for kind in ("author", "paper"):
        data[kind].x = torch.randn(SIZES[kind], WIDTHS[kind], generator=generator, dtype=torch.float64)
    data["field"].num_nodes = SIZES["field"]
    for (source, relation, target), count in LINKS.items():
        ends = [torch.randint(SIZES[kind], (count,), generator=generator) for kind in (source, target)]
        data[source, relation, target].edge_index = torch.stack(ends)
        attr = torch.randn(count, 2, generator=generator, dtype=torch.float64)
        data[source, relation, target].edge_attr = attr
    papers = torch.arange(SIZES["paper"])
    for place, name in enumerate(("train_mask", "val_mask", "test_mask")):
        data["paper"][name] = (papers % 5).clamp(max=2) == place
    data["paper"].y = {
        "classes": lambda: torch.randint(CLASSES, (papers.numel(),), generator=generator),
        "several": lambda: torch.randint(2, (papers.numel(), CLASSES), generator=generator),
        "numbers": lambda: torch.randn(papers.numel(), CLASSES, generator=generator, dtype=torch.float64),
    }[labels]()
    return data


class Fields(nn.Module):
    """Layers over all vertex types, with a learned table for the one without features."""

    def __init__(self, layers: nn.Module, out: int) -> None:
        super().__init__()
        self.table, self.layers = nn.Embedding(SIZES["field"], WIDTHS["field"]), layers
        self.out = nn.Linear(out, CLASSES)

    def forward(self, x_dict: dict[str, Tensor], edge_index_dict: dict[Any, Tensor]) -> Tensor:
        h = self.layers({**x_dict, "field": self.table.weight}, edge_index_dict)
        return self.out(h["paper"])


class Relational(nn.Module):
    """R-GCN: a weight for each edge type, twice."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (WIDTHS, dict.fromkeys(WIDTHS, 8))
        self.convs = nn.ModuleList(
            pyg.HeteroConv({link: pyg.GraphConv((w[link[0]], w[link[2]]), 8, aggr="mean") for link in LINKS})
            for w in sizes
        )

    def forward(self, x: dict[str, Tensor], edges: dict[Any, Tensor]) -> dict[str, Tensor]:
        for conv in self.convs:
            x = {kind: rows.relu() for kind, rows in conv(x, edges).items()}
        return x


def model_of(kind: str) -> nn.Module:
    torch.manual_seed(5)
    metadata = (list(SIZES), list(LINKS))
    layers: nn.Module
    if kind == "to_hetero":
        layers = pyg.to_hetero(pyg.GraphSAGE((-1, -1), 8, num_layers=2), metadata)
    elif kind == "hgt":
        layers = pyg.HGTConv(WIDTHS, 8, metadata, heads=2)
    else:
        layers = Relational()
    mine = Fields(layers, 8).double()
    if kind == "to_hetero":
        given = library()
        with torch.no_grad():
            mine(given.x_dict, given.edge_index_dict)
    return mine


def plain(kind: str, epochs: int, labels: str = "classes") -> dict[str, Any]:
    """A loop of plain PyG, with the optimizer that a Trainer has by default."""
    data, mine = library(labels), model_of(kind)
    optimizer = torch.optim.Adam(mine.parameters(), lr=0.01, weight_decay=5e-4)
    lost: Any = {
        "classes": functional.cross_entropy,
        "several": lambda out, y: functional.binary_cross_entropy_with_logits(out, y.to(out.dtype)),
        "numbers": functional.mse_loss,
    }[labels]
    paper, found = data["paper"], []
    for _ in range(epochs):
        optimizer.zero_grad()
        out = mine(data.x_dict, data.edge_index_dict)
        loss = lost(out[paper.train_mask], paper.y[paper.train_mask])
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    with torch.no_grad():
        out = mine.eval()(data.x_dict, data.edge_index_dict)
    right = (out.argmax(1) == paper.y)[paper.test_mask] if labels == "classes" else torch.zeros(1)
    return {"losses": found, "scores": out, "accuracy": right.double().mean().item()}


def trained(channel: Channel, kind: str, labels: str, epochs: int, given: dict[str, Any]) -> dict[str, Any]:
    """The same by a Trainer on this many ranks."""
    train = settings(**{"epochs": epochs, **given.pop("train", {})})
    with Trainer(model_of(kind), library(labels), train=train, report=QUIET, **given) as trainer:
        summary = trainer.fit(restore_best=False)
        return {
            "losses": losses(trainer),
            "scores": trainer.predict(),
            "test": summary["test_metric"],
            "name": summary["metric_name"],
            "notes": trainer.notes,
            "own": trainer.scored.own,
        }


@pytest.mark.some(1, each="kind")
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", ["rgcn", "to_hetero", "hgt"])
def test_curve_scores_and_accuracy_of_plain_pyg(ranks: Any, world: int, kind: str) -> None:
    wanted = plain(kind, 5)
    every = ranks(world, trained, kind, "classes", 5, {"train": {"check": True}})
    for found in every:
        torch.testing.assert_close(found["losses"], wanted["losses"], rtol=1e-10, atol=1e-10)
        assert (found["name"], found["test"]) == ("accuracy", wanted["accuracy"])
        assert any(note.startswith("check: ") and " equal: " in note for note in found["notes"])
    torch.testing.assert_close(every[0]["scores"], wanted["scores"], rtol=1e-10, atol=1e-10)
    for found in every[1:]:
        torch.testing.assert_close(found["scores"], wanted["scores"][found["own"]], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("labels", "train", "name"),
    [("several", {}, "f1_micro"), ("numbers", {"loss": "mse", "metric": "r2"}, "r2")],
    ids=["several", "numbers"],
)
def test_other_labels(ranks: Any, labels: str, train: dict[str, Any], name: str) -> None:
    wanted, alone = plain("rgcn", 4, labels), ranks(1, trained, "rgcn", labels, 4, {"train": train})[0]
    for found in (alone, *ranks(3, trained, "rgcn", labels, 4, {"train": train})):
        torch.testing.assert_close(found["losses"], wanted["losses"], rtol=1e-10, atol=1e-10)
        assert found["name"] == name
        assert found["test"] == pytest.approx(alone["test"], abs=1e-12)


class Writes(Fields):
    """Writes to the dicts that it is given, which are new in each call, as those of ``data.x_dict``."""

    def forward(self, x_dict: dict[str, Tensor], edge_index_dict: dict[Any, Tensor]) -> Tensor:
        x_dict["field"], x_dict["paper"] = self.table.weight, 2 * x_dict["paper"]
        edge_index_dict.pop(("paper", "cites", "paper"))
        return self.out(self.layers(x_dict, edge_index_dict)["paper"])


def writing(channel: Channel | None) -> list[float]:
    torch.manual_seed(5)
    mine, data = Writes(Relational(), 8).double(), library()
    if channel is not None:
        with Trainer(mine, data, train=settings(epochs=4, check=True), report=QUIET) as trainer:
            trainer.fit()
            return [record.loss for record in trainer.records]
    optimizer, found = torch.optim.Adam(mine.parameters(), lr=0.01, weight_decay=5e-4), []
    for _ in range(4):
        optimizer.zero_grad()
        chosen = data["paper"].train_mask
        loss = functional.cross_entropy(
            mine(data.x_dict, data.edge_index_dict)[chosen], data["paper"].y[chosen]
        )
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_forward_may_write_to_its_dicts(ranks: Any, world: int) -> None:
    for found in ranks(world, writing):
        torch.testing.assert_close(found, writing(None), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", ["rgcn", "hgt"])
def test_slices_of_features(ranks: Any, kind: str) -> None:
    wanted = plain(kind, 4)
    for found in ranks(2, trained, kind, "classes", 4, {"parallel": Parallel(tensor=2)}):
        torch.testing.assert_close(found["losses"], wanted["losses"], rtol=1e-10, atol=1e-10)


def own_loop(channel: Channel, steps: int, given: dict[str, Any]) -> list[float]:
    """A loop over ``kagome.shard``, with what a Trainer does in an epoch."""
    data, mine = library(), model_of("rgcn")
    optimizer = torch.optim.Adam(mine.parameters(), lr=0.01, weight_decay=5e-4)
    found = []
    with kagome.shard(mine, data, log=str, **given) as net:
        y, chosen = (net.place(data["paper"][name], "paper") for name in ("y", "train_mask"))
        for _ in range(steps):
            optimizer.zero_grad()
            out = net(data.x_dict, data.edge_index_dict)
            loss = net.mean(functional.cross_entropy(out[chosen], y[chosen], reduction="none"))
            loss.backward()
            optimizer.step()
            found.append(loss.item())
    return found


def test_late_rows_are_those_of_an_own_loop(ranks: Any) -> None:
    given = {"parallel": Parallel(max_age=1, guard=False)}
    wanted = ranks(2, own_loop, 6, given)[0]
    assert wanted[-1] != pytest.approx(plain("rgcn", 6)["losses"][-1], abs=1e-9)  # some rows were late
    for found in ranks(2, trained, "rgcn", "classes", 6, given):
        torch.testing.assert_close(found["losses"], wanted, rtol=1e-10, atol=1e-10)


def likely(out: Tensor, y: Tensor) -> Tensor:
    """A metric of the user's own, a value a row."""
    return out.softmax(1).gather(1, y[:, None])[:, 0]


@pytest.mark.parametrize("fast", [True, False])
def test_losses_and_metrics_of_ones_own(ranks: Any, fast: bool) -> None:
    given = {"loss": nn.CrossEntropyLoss(reduction="none"), "metric": likely, "fast": fast}
    wanted, paper = plain("rgcn", 4), library()["paper"]
    score = likely(wanted["scores"], paper.y)[paper.test_mask].mean().item()
    for found in ranks(2, trained, "rgcn", "classes", 4, given):
        torch.testing.assert_close(found["losses"], wanted["losses"], rtol=1e-10, atol=1e-10)
        assert found["test"] == pytest.approx(score, abs=1e-10)


def of_fields(channel: Channel, epochs: int, ignored: int | None) -> Any:
    """Labels on the type with three vertices: some rank has none of them, and another none to train on."""
    data = library()
    for name in ("y", "train_mask", "val_mask", "test_mask"):
        del data["paper"][name]
    field = data["field"]
    field.y, field.train_mask = torch.arange(3), torch.tensor([True, False, True])
    field.val_mask = ~field.train_mask

    class OfFields(Fields):
        def forward(self, x_dict: dict[str, Tensor], edge_index_dict: dict[Any, Tensor]) -> Any:
            h = self.layers({**x_dict, "field": self.table.weight}, edge_index_dict)
            return {"field": self.out(h["field"])}

    torch.manual_seed(4)
    mine = OfFields(Relational(), 8).double()
    train = settings(epochs=epochs, ignore_index=ignored)
    with Trainer(mine, data, train=train, report=QUIET) as trainer:
        trainer.fit(restore_best=False)
        return losses(trainer), trainer.scored.own.numel(), trainer.predict()


@pytest.mark.parametrize("ignored", [None, 7])
def test_ranks_without_a_vertex_of_the_type(ranks: Any, ignored: int | None) -> None:
    (wanted, _, scores), found = ranks(1, of_fields, 4, None)[0], ranks(4, of_fields, 4, ignored)
    assert min(count for _, count, _ in found) == 0
    for each, *_ in found:
        torch.testing.assert_close(each, wanted, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(found[0][2], scores, rtol=1e-10, atol=1e-10)


def part_of_a_run(
    channel: Channel, folder: str, epochs: int, resume: bool, out: str | None
) -> dict[str, Any]:
    with Trainer(
        model_of("rgcn"), library(), train=settings(epochs=epochs), report=QUIET, out=out
    ) as trainer:
        trainer.fit(resume=folder if resume else None)
        return {"losses": losses(trainer), "best": trainer.best_weights()}


@pytest.mark.some(1)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_run_of_two_ranks_goes_on_with_any_number(ranks: Any, tmp_path: Path, world: int) -> None:
    whole = ranks(1, part_of_a_run, "", 6, False, None)[0]
    folder = str(tmp_path / "run")
    ranks(2, part_of_a_run, folder, 3, False, folder)
    for found in ranks(world, part_of_a_run, folder, 6, True, None):
        torch.testing.assert_close(found["losses"], whole["losses"], rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(found["best"], whole["best"], rtol=1e-8, atol=1e-10)


def inexact(channel: Channel) -> dict[str, Any]:
    """A codec, whose gradients the Trainer watches, layers that run again, early stopping, a callback."""
    seen: list[float] = []

    class Hears:
        def on_epoch_end(self, record: Any) -> None:
            seen.append(record.loss)

    parallel, train = Parallel(codec="bf16"), settings(epochs=60, patience=3)
    mine = model_of("rgcn")
    with Trainer(
        mine, library(), parallel=parallel, train=train, report=QUIET, recompute=True, callbacks=[Hears()]
    ) as trainer:
        summary = trainer.fit()
        return {
            "losses": losses(trainer),
            "seen": seen,
            "epochs": summary["epochs"],
            "best": summary["best_epoch"],
            "halo": [record.bytes.get("halo", 0) for record in trainer.records],
        }


def in_float32(channel: Channel | None, kind: str, given: dict[str, Any]) -> dict[str, Any]:
    """Losses of some epochs in float32, of a Trainer or of a plain loop under autocast; bytes moved."""
    data, mine = library(), model_of(kind).float()
    for name in ("paper", "author"):
        data[name].x = data[name].x.float()
    for link in LINKS:
        data[link].edge_attr = data[link].edge_attr.float()
    train = settings(epochs=4, check=True, amp="bf16" if given.get("amp") else "none")
    if channel is not None:
        parallel = Parallel(activations=given.get("activations", "auto"))
        again = bool(given.get("recompute"))
        with (
            host_apart() if given.get("activations") else nullcontext(),
            patch("kagome.components.offload.LEAST", 1),
            Trainer(
                mine, data, parallel=parallel, train=train, report=QUIET, fast=given["fast"], recompute=again
            ) as trainer,
        ):
            summary = trainer.fit(restore_best=False)
            return {"losses": losses(trainer), "moved": summary.get("activations_moved_bytes")}
    optimizer = torch.optim.Adam(mine.parameters(), lr=0.01, weight_decay=5e-4)
    paper, found = data["paper"], []
    for _ in range(4):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=bool(given.get("amp"))):
            out = mine(data.x_dict, data.edge_index_dict)
        loss = functional.cross_entropy(out.float()[paper.train_mask], paper.y[paper.train_mask])
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return {"losses": found}


@pytest.mark.some(1, each="kind")
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", ["rgcn", "to_hetero", "hgt"])
def test_bf16_is_that_of_plain_pyg_under_autocast(ranks: Any, world: int, kind: str) -> None:
    exact, wanted = (in_float32(None, kind, {"amp": amp})["losses"] for amp in (False, True))
    assert max(abs(one - other) for one, other in zip(exact, wanted, strict=True)) > 1e-4  # it has rounded
    for fast in (True, False):
        for found in ranks(world, in_float32, kind, {"amp": True, "fast": fast}):
            assert found["losses"] == pytest.approx(wanted, abs=0.02)
            assert found["losses"] != pytest.approx(exact, abs=1e-6)


@pytest.mark.some(1, each="kind")
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("kind", ["rgcn", "hgt"])
def test_activations_that_wait_in_host_memory(ranks: Any, world: int, kind: str) -> None:
    """The host stands for a device of its own: what is moved there and back changes no loss."""
    here, there = (
        ranks(world, in_float32, kind, {"activations": way, "fast": True}) for way in ("device", "host")
    )
    for one, other in zip(here, there, strict=True):
        assert one["losses"] == other["losses"]
        assert one["moved"] is None
        assert other["moved"] > 0
    assert here[0]["losses"] == pytest.approx(in_float32(None, kind, {})["losses"], abs=1e-5)


def test_codec_recompute_patience_and_callbacks(ranks: Any) -> None:
    wanted = plain("rgcn", 5)["losses"]
    first, second = ranks(2, inexact)
    assert first["losses"] == second["losses"] == first["seen"]
    assert not second["seen"]
    assert first["epochs"] == first["best"] + 3 < 60
    torch.testing.assert_close(first["losses"][:5], wanted[: len(first["losses"])][:5], rtol=0.02, atol=0.02)
    assert all(halo > 0 for halo in first["halo"])


class Named(nn.Module):
    """What a run gives forward by name, and an output of a given form."""

    def __init__(self, form: str) -> None:
        super().__init__()
        link = ("author", "writes", "paper")
        self.conv = pyg.HeteroConv({link: pyg.GATConv((6, 5), 8, edge_dim=2, add_self_loops=False)})
        self.back = pyg.SAGEConv((5, 6), CLASSES)
        self.out, self.form = nn.Linear(8, CLASSES), form

    def forward(self, x_dict: Any, edge_index_dict: Any, edge_attr_dict: Any, scale: Tensor) -> Any:
        h = self.conv(x_dict, edge_index_dict, edge_attr_dict=edge_attr_dict)["paper"]
        out = self.out(h * scale)
        if self.form == "rows":
            return out
        authors = self.back((x_dict["paper"], x_dict["author"]), edge_index_dict["paper", "by", "author"])
        return {"author": authors, **({"paper": out} if self.form == "types" else {})}


class OtherRows(Named):
    """Rows of authors, where those of papers are trained on."""

    def forward(self, x_dict: Any, edge_index_dict: Any, edge_attr_dict: Any, scale: Tensor) -> Any:
        return super().forward(x_dict, edge_index_dict, edge_attr_dict, scale)["author"]


def by_name(channel: Channel, form: str) -> Any:
    torch.manual_seed(2)
    mine = (OtherRows("types") if form == "other rows" else Named(form)).double()
    data = library()
    data.scale = torch.full((1,), 0.5, dtype=torch.float64)
    if form == "other rows":  # equally many, so that sizes say nothing
        data["author"].x = data["author"].x.repeat(3, 1)[: SIZES["paper"]]
    try:
        with Trainer(mine, data, train=settings(epochs=3), report=QUIET) as trainer:
            trainer.fit(restore_best=False)
            return losses(trainer), trainer.predict()
    except KagomeError as error:
        return f"{type(error).__name__}: {error}"


def test_attributes_by_name_and_outputs_by_type(ranks: Any) -> None:
    wanted = ranks(1, by_name, "rows")[0]
    for form in ("rows", "types"):
        for rank, found in enumerate(ranks(3, by_name, form)):
            torch.testing.assert_close(found[0], wanted[0], rtol=1e-10, atol=1e-10)
            if not rank:
                torch.testing.assert_close(found[1], wanted[1], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("form", ["author alone", "other rows"])
def test_scores_of_another_type_are_refused(ranks: Any, form: str) -> None:
    for found in ranks(2, by_name, form):
        assert found.startswith("ModelError"), found
        assert {"paper", "author"} <= {*re.findall(r"\w+", found)}


def unlabelled(channel: Channel) -> Any:
    """Scores of a graph without labels, of a type that is named."""
    data, mine = library(), model_of("rgcn")
    for name in ("y", "train_mask", "val_mask", "test_mask"):
        del data["paper"][name]
    with Trainer(mine, data, train=settings(target_type="paper"), report=QUIET) as trainer:
        with pytest.raises(DataError, match="labels"):
            trainer.fit()
        return trainer.predict(), mine(library().x_dict, library().edge_index_dict).detach()


def test_a_graph_without_labels_is_scored(ranks: Any) -> None:
    scores, wanted = ranks(2, unlabelled)[0]
    torch.testing.assert_close(scores, wanted, rtol=1e-10, atol=1e-10)


def changed(**held: Any) -> HeteroData:
    data = library()
    for kind, attributes in held.items():
        for name, value in attributes.items():
            data[kind][name] = value
    return data


FAULTS: dict[str, tuple[Any, dict[str, Any], type[KagomeError], list[str]]] = {
    "two types with labels": (
        changed(
            author={"y": torch.zeros(17, dtype=torch.long), "train_mask": torch.ones(17, dtype=torch.bool)}
        ),
        {},
        DataError,
        ["one vertex type", "'author', 'paper'", "target_type"],
    ),
    "no such type": (
        library(),
        {"train": settings(target_type="book")},
        ConfigError,
        ["target_type", "'book'"],
    ),
    "rows of y": (
        changed(paper={"y": torch.zeros(7, dtype=torch.long)}),
        {},
        DataError,
        ["41 vertices", "[7]", "data['paper'].y"],
    ),
    "NaN in another type": (
        changed(author={"x": torch.full((17, 6), float("nan"))}),
        {},
        DataError,
        ["finite", "data['author'].x"],
    ),
    "chunks": (
        library(),
        {"parallel": Parallel(chunks=2)},
        ConfigError,
        ["several vertex sets", "chunks=2"],
    ),
    "old rows": (
        library(),
        {"parallel": Parallel(skip_drift=0.1, max_age=2)},
        ConfigError,
        ["several vertex sets", "skip_drift=0.1"],
    ),
    "a Graph": (kagome.Graph.of(library()), {}, DataError, ["labels", "a Graph", "kagome.shard"]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_has_its_error(fault: str) -> None:
    data, given, kind, words = FAULTS[fault]
    with pytest.raises(kind) as refusal:
        Trainer(model_of("rgcn"), copy.copy(data), **{"train": settings(), "report": QUIET, **given})
    assert all(word in str(refusal.value) for word in words), str(refusal.value)


def test_what_no_model_is_given_is_noted() -> None:
    data = library()
    data["paper"].title, data["author"].odd = ["a"] * SIZES["paper"], torch.zeros(2)
    with Trainer(model_of("rgcn"), data, train=settings(), report=QUIET) as trainer:
        assert any("title of paper" in note for note in trainer.notes)
        assert any("odd of author" in note for note in trainer.notes)


def test_a_type_is_named_where_there_are_several() -> None:
    data = library()
    data["author"].y = torch.arange(17) % 2
    with Trainer(model_of("rgcn"), data, train=settings(target_type="paper"), report=QUIET) as trainer:
        trainer.fit(2)
        torch.testing.assert_close(losses(trainer), plain("rgcn", 2)["losses"], rtol=1e-10, atol=1e-10)


def test_forward_of_a_whole_graph_is_refused() -> None:
    class Takes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(5, CLASSES)

        def forward(self, graph: HeteroData) -> Tensor:
            return self.out(graph["paper"].x)

    with pytest.raises(ModelError, match="x_dict, edge_index_dict"):
        Trainer(Takes().double(), library(), train=settings(), report=QUIET)


def test_lazy_layers_take_their_shapes_from_the_data() -> None:
    data = library()
    for kind in [*data.edge_types]:
        if "field" in kind:
            del data[kind]
    del data["field"]
    torch.manual_seed(0)
    lazy = pyg.to_hetero(pyg.GraphSAGE((-1, -1), 8, 2, CLASSES), data.metadata()).double()
    with Trainer(lazy, data, train=settings(), report=QUIET) as trainer:
        trainer.fit(2)
        assert trainer.predict().shape == (SIZES["paper"], CLASSES)


class Hidden(nn.Module):
    """Adds the mean of all rows where no torch call shows it."""

    def forward(self, x: Tensor) -> Tensor:
        return x + float(in_memory(x).mean())


class Mixes(Fields):
    """A mean over the rows of one rank, which the check before training is to find."""

    def __init__(self, kind: str) -> None:
        super().__init__(Relational(), 8)
        self.hidden, self.kind = Hidden(), kind

    def forward(self, x_dict: dict[str, Tensor], edge_index_dict: dict[Any, Tensor]) -> Tensor:
        return super().forward({**x_dict, self.kind: self.hidden(x_dict[self.kind])}, edge_index_dict)


@pytest.mark.parametrize("kind", ["paper", "author"])
def test_the_check_finds_a_layer_that_mixes_rows_of_any_type(kind: str) -> None:
    assert kagome.check(model_of("rgcn"), library()).first is None
    found = kagome.check(Mixes(kind).double(), library())
    assert found.first is not None
    assert (found.first.name, found.first.kind) == ("hidden", "output")
    # One rank has all rows.
    torch.manual_seed(5)
    with Trainer(Mixes(kind).double(), library(), train=settings(check=True), report=QUIET) as trainer:
        trainer.fit(1)


def mixing(channel: Channel) -> str:
    with Trainer(Mixes("author").double(), library(), train=settings(check=True), report=QUIET) as trainer:
        with pytest.raises(CheckError) as refusal:
            trainer.fit(1)
        return str(refusal.value)


def test_several_ranks_refuse_it(ranks: Any) -> None:
    assert all("hidden" in found for found in ranks(2, mixing))
