"""Losses: the objective of a run, by name, a user's own, or guessed from the labels, and its checks.

Where it sits: ``optimizers`` asks once, before the first epoch.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from kagome.components.task import draws_of
from kagome.config import Train
from kagome.errors import ConfigError, DataError
from kagome.graph.structure.labels import Labels
from kagome.objective.objective import LIMIT, NONE, OTHERS, Loss, Objective, Target, split


def objective_of(
    loss: Loss | str | None,
    facts: Labels,
    train: Train,
    vertices: int,
    *,
    inputs: Mapping[str, str] | None = None,
    nodes: Collection[str] = ("y",),
    shared: Collection[str] = (),
    alone: bool = False,
) -> Objective:
    """Return the objective of a run, checked against the labels; try a user's loss on made-up rows.

    Args:
        loss: A name, a user's own, or None for the one in the settings.
        facts: The facts about the labels.
        train: The settings.
        vertices: The number of vertices of the whole graph.
        inputs: The attribute of each further argument of a user's loss, where the user names them.
        nodes: Attributes that have a row a vertex.
        shared: Attributes that are the same on all ranks.
        alone: Whether the loss is always given all rows at once: one rank, one chunk.

    Raises:
        ConfigError: If settings clash, or the mean over all ranks would change the loss.
        DataError: If the labels do not fit the loss.
    """
    if loss is None or isinstance(loss, str):
        return _named(loss or train.loss, facts, train, vertices, inputs, nodes)
    if not callable(loss):
        raise ConfigError("loss to be a name or loss(out, y)", f"a {type(loss).__name__}", hint="loss='mse'")
    if train.class_weight or train.sample_weight:
        name = "class_weight" if train.class_weight else "sample_weight"
        raise ConfigError(
            f"train.{name} with a built-in loss",
            "a loss of your own",
            hint="return (values, weights) from it: their weighted mean is taken",
        )
    more = _arguments(loss, dict(inputs or {}), (*nodes, *shared))
    # Arguments with a row a vertex are cut to the rows in question, others are passed whole.
    rows, rest = ({k: v for k, v in more.items() if (v in nodes) is way} for way in (True, False))
    return _tried(Objective("", facts, loss, train.ignore_index, rows=rows, shared=rest, alone=alone))


def _named(
    name: str,
    facts: Labels,
    train: Train,
    vertices: int,
    inputs: Mapping[str, str] | None,
    names: Collection[str],
) -> Objective:
    if name not in ("auto", "cross_entropy", "bce", *OTHERS):
        known = "auto, cross_entropy, bce, mse, mae, huber"
        raise ConfigError(f"loss to be one of {known}, or loss(out, y)", repr(name))
    if inputs and set(inputs) != {"weight"}:
        raise ConfigError(
            "loss_inputs to name arguments of your own loss, or weight for a built-in one",
            ", ".join(inputs),
        )
    # loss_inputs={"weight": ...} is the same as train.sample_weight for a built-in loss.
    weight = train.sample_weight or (inputs or {}).get("weight")
    if weight is not None and weight not in names:
        raise ConfigError(
            f"an attribute of the data for train.sample_weight: {weight!r}",
            f"data with {', '.join(names)}",
        )
    if name == "auto":
        name = _guessed(facts, vertices)
    # -1 marks "no label" in many data sets with integer labels. It is
    # an ordinary number for mse and the like.
    ignore = train.ignore_index
    if ignore is None and name in ("cross_entropy", "bce"):
        ignore = NONE
    objective = Objective(name, facts, None, ignore, train.class_weight, weight)
    _check_labels(objective, vertices, asked=train.ignore_index is not None)
    _check_class_weight(objective)
    return objective


def _guessed(facts: Labels, vertices: int) -> str:
    """Return the default loss: cross entropy for class ids, binary cross entropy for labels of 0 and 1."""
    if facts.task == "multilabel":
        return "bce"
    if facts.single and (facts.whole or facts.least < NONE):
        return "cross_entropy"  # its checks name the first row that is not a class
    # The row that speaks most against class ids, so that the user can look at it.
    row = facts.odd if facts.odd >= 0 else facts.least_row if facts.least < 0 else facts.most_row
    kind = "whole numbers as class labels" if facts.single else "0 and 1 in a y of several columns"
    raise DataError(
        f"{kind}, as no loss is named",
        f"another number in row {row} of y (y is {facts.text()}, from {facts.least:g} to {facts.most:g})",
        where="data.y",
        hint="--train.loss mse (loss='mse') for numbers, cross_entropy or bce for soft labels",
    )


def _check_labels(objective: Objective, vertices: int, *, asked: bool) -> None:
    facts, name = objective.facts, objective.name
    if name in OTHERS:
        return
    if name == "cross_entropy" and facts.single:
        _check_ids(objective, vertices, asked=asked)
        return
    if len(facts.shape) > 1:
        raise DataError(f"y [N] or [N, C] for {name}", facts.text(), where="data.y")
    # The entry that is out of range: the smallest, unless bce has one above 1.
    low, row = facts.least, facts.least_row
    if name == "bce" and facts.most > 1:
        low, row = facts.most, facts.most_row
    # -1 stands for "no label" in integer columns too, and all other entries are larger.
    if low < 0 and low == objective.ignore and not facts.floating:
        return
    if not low >= 0 or (name == "bce" and low > 1):
        raise DataError(
            f"numbers from 0 to 1, and NaN for no label, in y {facts.text()} for {name}"
            if name == "bce"
            else "shares of classes, from 0 up, in the columns of y for cross_entropy",
            f"{low:g} in row {row} of y",
            where="data.y",
            hint="loss='mse' for other numbers",
        )


def _check_ids(objective: Objective, vertices: int, *, asked: bool) -> None:
    # More classes than vertices are hardly classes: ids or hashes
    # would make an output of millions of columns.
    facts, limit = objective.facts, max(vertices, LIMIT)
    if not facts.whole:
        raise DataError(
            "whole numbers as class labels",
            f"another number in row {facts.odd} of y ({facts.text()}, {facts.least:g} to {facts.most:g})",
            where="data.y",
            hint="loss='mse' for numbers, loss='bce' for shares from 0 to 1",
        )
    # Labels -1 and 1 are two classes in some data sets (SVM style), but -1 would be taken for "no label".
    if facts.both and objective.ignore == NONE and not asked:
        raise DataError(
            "-1 to mean that there is no label, with cross_entropy",
            "the labels -1 and 1, which would leave one class",
            where="data.y",
            hint="data.y = (data.y + 1) // 2; or train.ignore_index=-1, if -1 is none; or a loss of your own",
        )
    low = facts.least if facts.least != objective.ignore else 0
    if low < 0 or facts.most >= limit:
        low, row = (low, facts.least_row) if low < 0 else (facts.most, facts.most_row)
        none = "" if objective.ignore is None else f"{objective.ignore} for none, "
        raise DataError(
            f"class labels from 0 to C - 1 ({none}at most {limit:,} classes)",
            f"y[{row}] = {low:.0f}" if abs(low) < 1e19 else f"y[{row}] = {low:g}",
            where="data.y",
            hint="loss='mse' for numbers",
        )


def _check_class_weight(objective: Objective) -> None:
    table = objective.class_weight
    if not table:
        return
    if objective.name != "cross_entropy":
        raise ConfigError(
            "the loss cross_entropy, with one class a vertex, for train.class_weight",
            objective.name,
            hint="return (values, weights) from a loss of your own",
        )
    # The ignored label may be the last class, and the model may still have a column for it.
    widths = {objective.outputs, max(objective.outputs, (objective.ignore or 0) + 1)}
    if len(table) not in widths or not all(0 <= each < float("inf") for each in table) or not any(table):
        raise ConfigError(
            f"train.class_weight with a weight from 0 up for each of {objective.outputs} classes",
            f"{list(table)}",
        )


def _arguments(loss: Loss, named: dict[str, str], names: Collection[str]) -> dict[str, str]:
    """Return the attribute of each further argument of a user's loss."""
    # Order: what the user names, then an attribute of the argument's name, then `weight` for the first one.
    more = _further(loss)
    odd = [name for name in named if more is not None and name not in more]
    gone = [name for name in named.values() if name not in names]
    if odd or gone:
        raise ConfigError(
            "loss_inputs={argument: attribute}, an argument of the loss and an attribute of the data",
            f"a loss that takes {', '.join(more or ()) or 'no other argument'}; data with {', '.join(names)}",
            where=f"loss_inputs: {(odd or gone)[0]!r}",
        )
    found = dict(named)
    for place, (name, needed) in enumerate((more or {}).items()):
        if name in found:
            continue
        own = not _of_torch(loss)  # in torch's losses, weight is one number a class
        attribute = (
            name if name in names else "weight" if place == 0 and needed and "weight" in names else None
        )
        if attribute is not None and (needed or own):
            found[name] = attribute
        elif needed:
            raise ConfigError(
                f"an attribute of the data for loss(out, y, {name})",
                f"data with {', '.join(names)}",
                hint=f"data.{name}, a row a vertex; or loss_inputs={{{name!r}: an attribute's name}}",
            )
    return found


def _further(loss: Loss) -> dict[str, bool] | None:
    """Return the arguments after ``out`` and ``y``, and which are required; None without a signature."""
    try:
        signature = inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss)
    except (TypeError, ValueError):
        return None
    given = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    # The first two are out and y, whatever their names.
    kept = [p for p in signature.parameters.values() if p.kind in (*given, inspect.Parameter.POSITIONAL_ONLY)]
    # A default value was chosen by the user; a default of None is to be filled.
    return {p.name: p.default is p.empty for p in kept[2:] if p.kind in given and _waits(p)}


def _waits(parameter: inspect.Parameter) -> bool:
    return parameter.default is parameter.empty or parameter.default is None


def _of_torch(loss: Any) -> bool:
    # partial(F.cross_entropy, reduction="none") is torch's loss too.
    while isinstance(loss, functools.partial):
        loss = loss.func
    home = type(loss).__module__ if isinstance(loss, nn.Module) else getattr(loss, "__module__", "") or ""
    return home.split(".")[0] == "torch"


def _tried(objective: Objective) -> Objective:
    """Try a user's loss on a few made-up rows; a loss that needs others is tried in the first epoch."""
    generator = torch.Generator().manual_seed(0)
    facts = objective.facts
    shape = (
        # Class ids: a column a class. Else an output of the labels' shape.
        (12, facts.classes) if facts.task == "multiclass" and facts.classes <= LIMIT else (12, *facts.shape)
    )
    out = torch.randn(shape, generator=generator)
    low, high = int(facts.least), max(int(facts.most), int(facts.least))
    # Within the range of the real labels, since a loss may look up a table by them.
    y = torch.randint(low, high + 1, (12, *facts.shape), generator=generator)
    # All made-up rows have a label, else their loss might be 0.
    if objective.ignore is not None and low == objective.ignore:
        y = y.clamp(min=low + 1)
    # Further arguments cannot be made up; the first epoch has real ones.
    if objective.rows or objective.shared:
        return replace(objective, pairs=None)
    target = Target(y.to(getattr(torch, facts.dtype)))
    try:
        # A loss may draw random numbers; the same ones on all ranks, which compare the trial's value.
        with objective.tried(), draws_of(0, 0):
            values, weights = split(objective._called(out, target))
    except (ConfigError, RuntimeError):
        return replace(objective, pairs=None)  # the loss takes outputs of another shape
    if not objective.alone:  # on one rank the real rows of the first epoch decide
        objective.check(out, target)
    return replace(objective, pairs=weights is not None, trial=float(values.detach().double().sum()))
