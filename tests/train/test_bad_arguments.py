"""Doors: whatever a caller gives where something else belongs ends in one sentence of ours."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch_geometric.nn as pyg
from torch import nn
from torch.optim import SGD, SparseAdam
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, StepLR
from torch_geometric.data import Data, HeteroData

import kagome
from kagome import Parallel, Trainer
from kagome.errors import CheckpointError, ConfigError, DataError, ModelError, PlanError, ResourceError
from kagome.graph.structure.attributes import attributes_of
from kagome.graph.structure.validate import validate
from training import QUIET, settings

N = 12


def small(**attributes: Any) -> Data:
    ring = torch.arange(N)
    mask = ring % 3 == 0
    data = Data(
        x=torch.randn(N, 4, generator=torch.Generator().manual_seed(0)),
        y=ring % 3,
        edge_index=torch.stack([torch.cat([ring, ring]), torch.cat([ring.roll(1), ring.roll(2)])]),
        train_mask=mask,
        val_mask=mask.roll(1),
        test_mask=mask.roll(2),
    )
    for name, value in attributes.items():
        data[name] = value
    return data


def model() -> nn.Module:
    torch.manual_seed(0)
    return pyg.GCNConv(4, 3)


class Forward(nn.Module):
    """A linear layer, and what a test makes of it."""

    def __init__(self, then: Callable[..., Any]) -> None:
        super().__init__()
        self.map, self.then = nn.Linear(4, 3), then

    def forward(self, x: Any, edge_index: Any) -> Any:
        return self.then(self.map(x), edge_index)


def trained(module: nn.Module, data: Data, **given: Any) -> None:
    given = {"train": settings(epochs=2), "report": QUIET, **given}
    with Trainer(module, data, **given) as trainer:
        trainer.fit()


NESTED = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
JAGGED = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)


@pytest.mark.parametrize(
    ("value", "kind"),
    [(torch.ones(N, 2, device="meta"), "meta"), (NESTED, "nested"), (JAGGED, "nested")],
)
def test_an_attribute_without_numbers_is_left_out_by_name(value: Any, kind: str) -> None:
    data = small(odd=value)
    with Trainer(model(), data, train=settings(epochs=1), report=QUIET) as trainer:
        trainer.fit()
        assert any(f"data.odd is a {kind} tensor" in note for note in trainer.notes)


@pytest.mark.parametrize("view", ["conj", "neg"])
def test_a_view_of_other_bytes_is_cut_as_the_numbers_it_shows(view: str) -> None:
    z = torch.randn(N, 2, dtype=torch.complex64)
    value = z.conj() if view == "conj" else z.conj().imag
    assert value.is_conj() or value.is_neg()
    clean, _ = validate(small(odd=value))
    kept = attributes_of(clean).nodes["odd"]
    assert torch.equal(kept, value.clone())
    assert not kept.is_conj()
    assert not kept.is_neg()
    trained(model(), small(odd=value))


NO_EDGES: dict[str, Any] = {
    "text": "hello",
    "bytes": b"abc",
    "texts": ["a", "b"],
    "ragged": [[0, 1], [1]],
    "dict": {"a": [1]},
    "set": {1, 2},
    "function": len,
    "data": Data(x=torch.ones(3, 2)),
    "objects": np.array([object()] * 4, dtype=object),
    "words": np.array(["x"] * 4),
    "huge": 10**40,
    "huge list": [[10**40], [1]],
    "meta": torch.zeros(2, 5, dtype=torch.int64, device="meta"),
    "meta matrix": torch.eye(N).to_sparse().to("meta"),
    "cube": torch.ones(2, 2, 2).to_sparse(),
    "blocks": torch.eye(N).to_sparse_bsr((2, 2)),
    "nested": JAGGED,
}


@pytest.mark.parametrize("what", NO_EDGES)
def test_edges_that_are_none(what: str) -> None:
    with pytest.raises(DataError, match=r"edge_index|adjacency"):
        validate(small(edge_index=NO_EDGES[what]))


FLOATS = torch.rand(N, 4)
NO_NUMBERS: dict[str, dict[str, Any]] = {
    "y uint16": {"y": (torch.arange(N) % 3).to(torch.uint16)},
    "y uint64": {"y": (torch.arange(N) % 3).to(torch.uint64)},
    "y float8": {"y": FLOATS.to(torch.float8_e4m3fn)},
    "y quantized": {"y": torch.quantize_per_tensor(FLOATS, 0.1, 0, torch.qint8)},
    "y nested": {"y": NESTED},
    "x quantized": {"x": torch.quantize_per_tensor(FLOATS, 0.1, 0, torch.qint8)},
    "mask sparse": {"train_mask": torch.eye(N).to_sparse()},
    "mask csr": {"train_mask": torch.eye(N).to_sparse_csr()},
    "mask nested": {"train_mask": NESTED},
    "mask meta": {"val_mask": torch.ones(N, dtype=torch.bool, device="meta")},
    "adj_t": {"edge_index": None, "adj_t": "none"},
}


@pytest.mark.parametrize("what", NO_NUMBERS)
def test_attributes_that_training_reads_and_cannot(what: str) -> None:
    (name, *_), given = what.split(), NO_NUMBERS[what]
    with pytest.raises(DataError, match=name):
        validate(small(**given))


@pytest.mark.parametrize(
    "x",
    [
        torch.rand(N),
        torch.arange(N),
        torch.zeros(N, 0),
        torch.rand(N, 2, 6),
        FLOATS.to(torch.float8_e5m2),
    ],
    ids=["1-d", "whole numbers", "no columns", "3-d", "float8"],
)
def test_features_that_a_layer_cannot_take(x: torch.Tensor) -> None:
    with pytest.raises(ModelError, match="expected forward to run on the data"):
        trained(pyg.SAGEConv(4, 3), small(x=x))


def test_float8_features_that_forward_casts_are_taken() -> None:
    class Casts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = model()

        def forward(self, x: Any, edge_index: Any) -> Any:
            return self.layer(x.float(), edge_index)

    trained(Casts(), small(x=FLOATS.to(torch.float8_e5m2)))


@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_an_adjacency_of_another_type_than_the_weights(layout: str) -> None:
    edges, values = small().edge_index, torch.full((2 * N,), 2.0)
    matrix = torch.sparse_coo_tensor(edges, values, (N, N)).coalesce()
    given = small(x=small().x.double(), edge_index=matrix if layout == "coo" else matrix.to_sparse_csr())
    with pytest.raises(ModelError, match="expected forward to run on the data"):
        trained(pyg.SAGEConv(4, 3).double(), given)


def divides(*_: Any) -> Any:
    return 1 / 0


def stops(*_: Any) -> Any:
    return next(iter(()))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "divides": lambda: Forward(divides),
    "stops": lambda: Forward(stops),
    "list": lambda: nn.ModuleList([nn.Linear(4, 3)]),
    "scripted": lambda: torch.jit.script(nn.Linear(4, 3)),  # type: ignore[no-any-return, unused-ignore]
    "complex": lambda: Forward(lambda out, _: out * 1j),
    "meta": lambda: nn.Linear(4, 3, device="meta"),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("what", MODELS)
def test_models_that_cannot_run(what: str) -> None:
    with pytest.raises(ModelError) as caught:
        trained(MODELS[what](), small())
    if what == "divides":
        assert "ZeroDivisionError: division by zero" in caught.value.got
        assert "test_bad_arguments.py, line" in caught.value.where
        assert isinstance(caught.value.__cause__, ZeroDivisionError)


SETTINGS: dict[str, dict[str, Any]] = {
    "loss_inputs number": {"loss_inputs": 3},
    "loss_inputs list": {"loss_inputs": ["x"]},
    "loss_inputs empty list": {"loss_inputs": []},
    "loss_inputs text": {"loss_inputs": "x"},
    "parallel number": {"parallel": 3},
    "parallel text": {"parallel": "x"},
    "parallel dict": {"parallel": {}},
    "train number": {"train": 3},
    "train list": {"train": []},
    "report number": {"report": 3},
    "report dict": {"report": {}},
    "overwrite number": {"overwrite": 3},
    "overwrite text": {"overwrite": "x"},
    "overwrite none": {"overwrite": None},
    "out number": {"out": 3},
    "out bytes": {"out": b"x"},
    "optimizer raises": {"optimizer": lambda _: 1 / 0},
    "optimizer rate": {"optimizer": lambda params: SGD(params, lr=-1)},
    "optimizer empty": {"optimizer": lambda _: SGD([], lr=0.1)},
    "optimizer sparse": {"optimizer": lambda params: SparseAdam(list(params))},
    "scheduler class": {"scheduler": StepLR},
    "scheduler raises": {"scheduler": lambda o: LambdaLR(o, lambda _: "x")},  # type: ignore[arg-type, return-value]
    "scheduler short": {"scheduler": lambda o: OneCycleLR(o, 0.1, total_steps=1)},
}


@pytest.mark.parametrize("what", SETTINGS)
def test_settings_of_another_kind(what: str) -> None:
    with pytest.raises(ConfigError, match=what.split()[0]):
        trained(model(), small(), **SETTINGS[what])


def test_a_rate_that_is_planned_for_too_few_epochs_is_refused_before_the_first() -> None:
    with Trainer(
        model(),
        small(),
        scheduler=lambda o: OneCycleLR(o, 0.1, total_steps=3),
        train=settings(),
        report=QUIET,
    ) as trainer:
        trainer.fit(2)
        with pytest.raises(ConfigError, match=r"OneCycleLR with 1 left"):
            trainer.fit(4)
        assert trainer.epoch == 2
        trainer.fit(3)
        assert trainer.epoch == 3


@pytest.fixture(scope="module")
def trainer() -> Any:
    with Trainer(model(), small(), train=settings(epochs=1), report=QUIET) as one:
        yield one


NO_EPOCHS = ["x", [1], torch.tensor([1, 2]), math.inf, 10**30, math.nan, -1, 1.5, True]


@pytest.mark.parametrize("epochs", NO_EPOCHS, ids=str)
def test_epochs_that_are_no_number_of_them(trainer: Trainer, epochs: Any) -> None:
    with pytest.raises(ConfigError, match="epochs to be"):
        trainer.fit(epochs)


NO_PATHS = {"number": 3, "none": None, "bytes": b"x", "tensor": torch.tensor(2), "lock": threading.Lock()}


@pytest.mark.parametrize("where", NO_PATHS.values(), ids=NO_PATHS)
def test_a_folder_that_is_no_path(trainer: Trainer, where: Any) -> None:
    with pytest.raises(ConfigError, match="to be a text or a path"):
        trainer.load(where)
    if where is not None:
        with pytest.raises(ConfigError, match="to be a text or a path"):
            trainer.fit(resume=where)
    with pytest.raises(CheckpointError):
        trainer.load(Path("/nowhere"))


# check and plan -----------------------------------------------------------------------------------


NO_MODELS: dict[str, Any] = {"none": None, "text": "x", "class": nn.Linear, "list": [nn.Linear(4, 3)]}
NO_GRAPHS: dict[str, Any] = {
    "none": None,
    "text": "digits",
    "number": 3,
    "list": [small()],
    "path": Path("/nowhere"),
    "kinds": HeteroData(),
    "empty": Data(),
}


@pytest.mark.parametrize("call", [kagome.check, kagome.plan])
@pytest.mark.parametrize("what", NO_MODELS)
def test_a_model_that_is_none_is_not_checked(call: Any, what: str) -> None:
    with pytest.raises(ModelError, match=r"a torch.nn.Module in"):
        call(NO_MODELS[what], small())


@pytest.mark.parametrize("call", [kagome.check, kagome.plan])
@pytest.mark.parametrize("what", NO_GRAPHS)
def test_a_graph_that_is_none_is_not_checked(call: Any, what: str) -> None:
    with pytest.raises(DataError):
        call(model(), NO_GRAPHS[what])


@pytest.mark.parametrize("module", [nn.Identity(), Forward(divides)], ids=["no weights", "raises"])
def test_a_model_that_cannot_be_planned(module: nn.Module) -> None:
    with pytest.raises(ModelError):
        kagome.plan(module, small(), reuse=False)


COUNTS: tuple[Any, ...] = (None, "x", 0, -1, 1.5, math.nan, [1], True, torch.tensor(2))
OF_CHECK: dict[str, tuple[Any, ...]] = {
    "parts": COUNTS,
    "vertices": COUNTS,
    "tensor": (*COUNTS, 2, 10**30),
    "seed": (None, "x", 1.5, math.inf, 10**30, True),
    "fast": (None, "x", 1, []),
}
OF_PLAN: dict[str, tuple[Any, ...]] = {
    "devices": (*COUNTS, 10**30),
    "cluster": (3, True, [1]),
    "allow": (None, 3, "x", [1], ("x",)),
    "train": (3, "x", [], {}),
    "reuse": (None, 3, "x", [1]),
    "fast": (3, "x"),
}


@pytest.mark.parametrize("name", OF_CHECK)
def test_arguments_of_check_of_another_kind(name: str) -> None:
    for value in OF_CHECK[name]:
        with pytest.raises(ConfigError, match=f"{name} to be"):
            kagome.check(model(), small(), **{name: value})


@pytest.mark.parametrize("name", OF_PLAN)
def test_arguments_of_plan_of_another_kind(name: str) -> None:
    for value in OF_PLAN[name]:
        with pytest.raises(ConfigError, match=f"{name} to be"):
            kagome.plan(model(), small(), **{name: value})


@pytest.mark.parametrize("plan", [None, 3, b"x"])
def test_a_plan_that_is_no_file(plan: Any) -> None:
    with pytest.raises(ConfigError, match="to be a text"):
        Parallel(plan=plan)


def test_a_setting_that_load_does_not_know() -> None:
    with pytest.raises(ConfigError, match="got 'foo'"):
        kagome.load("digits", foo=1)
    with pytest.raises(ResourceError, match="projected to 1,000,000,000 columns"):
        kagome.load("sbm:vertices=50", project=10**9)


@pytest.mark.parametrize("layer", [pyg.SAGEConv, pyg.GCNConv])
@pytest.mark.parametrize("vertices", [1, 2, 5])
@pytest.mark.parametrize("parts", [2, 3])
def test_a_graph_of_few_vertices_leaves_parts_without_rows(layer: Any, vertices: int, parts: int) -> None:
    # Columns were once counted in the first row, and a part without one was refused.
    ring = torch.arange(vertices)
    given = Data(x=torch.rand(vertices, 4), edge_index=torch.stack([ring, ring.roll(1)]))
    found = kagome.check(layer(4, 3), given, parts=parts)
    assert found.first is None
    assert found.vertices == vertices


# pipeline -----------------------------------------------------------------------------------------


X, SQUARED = torch.rand(8, 4), nn.MSELoss(reduction="none")
OF_PIPELINE: dict[str, tuple[Any, ...]] = {
    "loss": (None, "x", 3),
    "plan": (3, [1], math.nan),
    "batch": ("x", [1], math.nan, 0, True),
    "channel": ("x", 3),
    "seed": ("x", None),
    "devices": ("x", [1]),
    "batch_norm": ("x", None),
    "optimizer": ("x", [], 0),
}


@pytest.mark.parametrize("name", OF_PIPELINE)
def test_arguments_of_pipeline_of_another_kind(name: str) -> None:
    for value in OF_PIPELINE[name]:
        with pytest.raises(ConfigError, match=f"{name}(=...)? to be"):
            kagome.pipeline(nn.Linear(4, 2), X, **{"loss": SQUARED, name: value})


def test_targets_and_states_that_do_not_fit_a_pipeline() -> None:
    with pytest.raises(PlanError, match=r"nowhere.json, which cannot be read"):
        kagome.pipeline(nn.Linear(4, 2), X, loss=SQUARED, plan="/nowhere.json")
    with kagome.pipeline(nn.Linear(4, 2), X, loss=SQUARED) as pipe:
        before = {name: value.clone() for name, value in pipe.state_dict().items()}
        for target in (None, "x", torch.tensor(1.0), torch.zeros(1, 2), torch.zeros(0, 2)):
            for call in (pipe.step, pipe.evaluate):
                with pytest.raises(DataError, match="target"):
                    call(X, target)
        for call in (pipe.step, pipe.evaluate):
            with pytest.raises(ConfigError, match=r"loss\(out, target\)"):
                call(X, torch.zeros(8, 5))
        with pytest.raises(DataError, match="one sample or more"):
            pipe.evaluate(X[:0], torch.zeros(0, 2))
        other = {**before, "bias": torch.ones(2), "weight": torch.ones(3, 4)}
        for state in (None, "x", {}, other):
            with pytest.raises(CheckpointError, match="state dict"):
                pipe.load_state_dict(state)
        assert all(torch.equal(value, before[name]) for name, value in pipe.state_dict().items())
        assert math.isfinite(pipe.step(X, torch.zeros(8, 2)))
