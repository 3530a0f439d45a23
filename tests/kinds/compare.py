"""A case by a plain loop and by ``Trainer`` on a mesh: equal, refused by name, or a fault."""

from __future__ import annotations

import copy
import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cases import Case, called
from convolutions import double_precision
from kagome import Parallel, Trainer
from kagome.comm.channel import Channel
from kagome.config import Report, Train
from kagome.errors import CommError, KagomeError
from kagome.records.epoch import EpochRecord
from parity import alone

EPOCHS = 3
TOLERANCE = 1e-10
"""Of the largest entry, in float64."""
QUIET = Report(page=False, trace=False, progress=False)
MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "1 rank": (1, {}),
    "2 ranks": (2, {"graph": 2}),
    "3 ranks": (3, {"graph": 3}),
    "pipe, exact": (2, {"pipe": 2, "chunks": 2, "cross_chunk": "exact"}),
    "2 slices": (2, {"tensor": 2}),
}
KINDS: dict[str, str] = {
    "places": "1. rows told apart by place",
    "edges": "2. order and tables of edges",
    "attributes": "3. attributes of neither vertices nor edges",
    "labels": "4. labels and features as they are given",
    "derivatives": "5. derivatives of derivatives",
    "weights": "6. what reads all weights",
    "adjacency": "7. an adjacency with values",
    "flips": "8. edges turned round",
    "columns": "9. further columns, and metrics",
    "backward": "10. hooks and functions in backward",
    "kept": "11. what a model keeps between forwards",
}
"""Module ``kind_NAME``, and what its table is called."""


@dataclass(frozen=True)
class Left:
    """What training left."""

    losses: list[float]
    metrics: list[float]
    weights: dict[str, Tensor]
    out: list[Tensor]


@dataclass(frozen=True)
class Verdict:
    """What came of one case on one mesh."""

    word: str
    """``equal``, ``refused`` or ``fault``."""
    text: str
    """The largest difference, or what was said."""


def cases_of(kind: str) -> dict[str, Case]:
    """The cases of a kind."""
    found: dict[str, Case] = importlib.import_module(f"kind_{kind}").CASES
    return found


def made(case: Case) -> nn.Module:
    """The model, with the weights of one seed."""
    torch.manual_seed(0)
    return case.build().double()


def expected(kind: str, name: str) -> Left:
    """What the case must leave: the plain loop's, or one rank's if it draws random numbers."""
    case = cases_of(kind)[name]
    if not case.draws:
        return plain(case)
    left = trained(alone(), kind, name, {}, check=False)
    assert not isinstance(left, str), left
    return left


def meshes_of(case: Case) -> list[str]:
    """The meshes that a case is tried on."""
    return [mesh for mesh in MESHES if not (case.draws and mesh == "1 rank")]


def plain(case: Case) -> Left:
    """Train without Kagome."""
    with double_precision():
        model, data = made(case), case.data()
        optimizer = case.optimizer(model)(model.parameters())
        losses, metrics = [], []
        best: dict[str, Tensor] = {}
        for _ in range(EPOCHS):
            model.train()
            optimizer.zero_grad()
            loss = case.plain(model, called(model, data), data)
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
            if case.metric is not None:
                model.eval()
                with torch.no_grad():
                    metrics.append(case.metric(called(model, data), data, data.val_mask))
                before = metrics[:-1]
                if not before or (metrics[-1] < min(before) if case.lower else metrics[-1] > max(before)):
                    best = copy.deepcopy(model.state_dict())
        if best:
            model.load_state_dict(best)
        model.eval()
        with torch.no_grad():
            out = tensors(called(model, data))
        return Left(losses, metrics, model.state_dict(), out)


def tensors(out: Any) -> list[Tensor]:
    """The tensors of an output, in its own order."""
    if isinstance(out, Tensor):
        return [out.detach().clone()]
    if out is None or isinstance(out, (str, int, float)):
        return []
    each = out.values() if isinstance(out, dict) else out
    return [tensor for one in each for tensor in tensors(one)]


def trained(channel: Channel, kind: str, name: str, parallel: dict[str, Any], check: bool) -> Left | str:
    """Train by Kagome on these ranks; what it left, or the sentence that refused the case."""
    return ran(channel, cases_of(kind)[name], parallel, check)


def ran(channel: Channel, case: Case, parallel: dict[str, Any], check: bool) -> Left | str:
    """As :func:`trained`, of a case by itself."""
    records: list[EpochRecord] = []
    with double_precision():
        try:
            model = made(case)
            with Trainer(
                model,
                (case.ours or case.data)(),
                loss=case.loss(model),
                optimizer=case.optimizer(model),
                train=Train(**{"check": check, "timeout": 20.0, "epochs": EPOCHS, **case.train}),
                parallel=Parallel(**parallel),
                report=QUIET,
                **case.given,
            ) as trainer:
                records = trainer.records
                trainer.fit()
                losses = [float(record.loss) for record in records]
                metrics = [float(record.val_metric) for record in records] if case.metric else []
                weights = {key: value.clone() for key, value in model.state_dict().items()}
                out = trainer.predict()
                return Left(losses, metrics, weights, tensors(out) if channel.rank == 0 else [])
        except CommError:
            raise
        except KagomeError as error:
            if records:
                raise AssertionError(f"refused after {len(records)} epochs: {error}") from error
            return f"{type(error).__name__}: {error}"


def verdict(ranks: Callable[..., list], kind: str, name: str, mesh: str, whole: Left) -> Verdict:
    """What comes of a case on a mesh.

    The check before training is left out first. What differs then, or is refused when others have begun
    (they tell a CommError), is run with it: the check must refuse it before.
    """
    world, parallel = MESHES[mesh]
    found = Verdict("fault", "not run")
    for check in (False, True):
        try:
            found = judged(ranks(world, trained, kind, name, parallel, check), whole)
        except CommError as error:
            found = Verdict("late", f"CommError: {error}")
        except Exception as error:
            return Verdict("fault", f"{type(error).__name__}: {error}"[:1000])
        if found.word not in ("different", "late"):
            return found
    return Verdict("fault", found.text)


def judged(left: list[Left | str], expected: Left) -> Verdict:
    """What ranks left, or said, against what they must leave."""
    said = [each for each in left if isinstance(each, str)]
    if len(said) == len(left):
        return Verdict("refused", said[0])
    if said:
        return Verdict("fault", f"one rank refuses, another does not: {said[0]}")
    gaps = {
        place: gap
        for rank, each in enumerate(left)
        if not isinstance(each, str)
        for place, gap in differences(each, expected, whole=rank == 0).items()
    }
    worst = max(gaps, key=lambda place: math.inf if math.isnan(gaps[place]) else gaps[place])
    if not gaps[worst] <= TOLERANCE:
        return Verdict("different", f"{worst}: {gaps[worst]:.1e}")
    return Verdict("equal", f"{gaps[worst]:.0e}")


def differences(found: Left, expected: Left, *, whole: bool) -> dict[str, float]:
    """The largest difference of each thing that training left, of its own largest entry.

    Args:
        found: What one rank left.
        expected: What the plain loop left.
        whole: Whether this rank has the scores of all vertices.
    """
    gaps = {
        "loss": _gap(torch.tensor(found.losses), torch.tensor(expected.losses)),
        "metric": _gap(torch.tensor(found.metrics), torch.tensor(expected.metrics)),
    }
    assert found.weights.keys() == expected.weights.keys()
    gaps |= {key: _gap(found.weights[key], value) for key, value in expected.weights.items()}
    if whole:
        assert len(found.out) == len(expected.out)
        for place, (ours, theirs) in enumerate(zip(found.out, expected.out, strict=True)):
            gaps[f"output {place}"] = _gap(ours, theirs)
    return gaps


def _gap(ours: Tensor, theirs: Tensor) -> float:
    if ours.shape != theirs.shape:
        return math.nan
    ours, theirs = (value.to_dense() if value.layout != torch.strided else value for value in (ours, theirs))
    if not theirs.numel():
        return 0.0
    if not theirs.is_floating_point():
        return 0.0 if torch.equal(ours, theirs) else math.nan
    base = float(theirs.abs().max())
    gap = float((ours.double() - theirs.double()).abs().max())
    return gap / base if base else gap
