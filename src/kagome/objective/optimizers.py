"""Optimizers: optimizer and scheduler of a run, with its loss and metric, a user's own or the default.

Where it sits: ``train.trainer`` asks it once, before the engine is made.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau

from kagome.comm.channel import Channel
from kagome.comm.mesh import Mesh
from kagome.config import Model, Parallel, Report, Run, Train
from kagome.config.fields import check_kind, shown
from kagome.config.toml_io import own_name
from kagome.errors import ConfigError, DataError, KagomeError, ModelError
from kagome.graph.partition.partition import Partition
from kagome.graph.partition.store import Meta
from kagome.graph.structure import splits
from kagome.graph.structure.labels import Labels, joined, labels_of
from kagome.launch.os_errors import in_words
from kagome.objective.losses import objective_of
from kagome.objective.metrics import Metric, Own, metric_of
from kagome.objective.objective import Loss, Objective
from kagome.user_frame import raised_at


@dataclass(frozen=True)
class Wishes:
    """The loss, metric, optimizer and scheduler that a user passes to a Trainer.

    Args:
        loss: A name, ``loss(out, y)``, or None for the one in the settings.
        metric: A name, ``metric(out, y)``, or None for the one in the settings.
        loss_inputs: The attribute of each further argument of the loss.
        optimizer: ``callable(params)``.
        scheduler: ``callable(optimizer)``.

    Raises:
        ConfigError: If ``loss_inputs`` is not a dict of texts.
    """

    loss: Loss | str | None = None
    metric: Own | str | None = None
    loss_inputs: Mapping[str, str] | None = None
    optimizer: Callable[[Any], Optimizer] | None = None
    scheduler: Callable[[Optimizer], Any] | None = None

    def __post_init__(self) -> None:
        given = self.loss_inputs
        if given is None:
            return
        if not isinstance(given, Mapping) or not all(isinstance(t, str) for t in (*given, *given.values())):
            raise ConfigError(
                "loss_inputs to be a dict of argument: attribute, both texts",
                shown(given),
                hint='loss_inputs={"w": "weight"}',
            )

    @property
    def own(self) -> dict[str, str]:
        """The loss and the metric that are functions, by their names in code."""
        given = {"loss": self.loss, "metric": self.metric}
        return {key: own_name(value) for key, value in given.items() if callable(value)}


def run_of(model: Model, parallel: object, train: object, report: object) -> Run:
    """Return the settings of a run, with defaults where nothing was given.

    Raises:
        ConfigError: If one is of another class.
    """
    given = {"parallel": (parallel, Parallel), "train": (train, Train), "report": (report, Report)}
    for name, (value, kind) in given.items():
        check_kind(name, value, kind | None)
    chosen: Any = {name: kind() if value is None else value for name, (value, kind) in given.items()}
    return Run(model=model, **chosen)


def named(train: Train, loss: object, metric: object) -> Train:
    """Return the settings with the loss and metric that a user gave by name, which the run's folder records.

    Raises:
        ConfigError: If there is no such name.
    """
    given = {key: value for key, value in (("loss", loss), ("metric", metric)) if isinstance(value, str)}
    return replace(train, **given)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Criteria:
    """The objective and the metric of a run.

    Args:
        objective: The loss.
        metric: The score.
        notes: Notes on labels and masks.
    """

    objective: Objective
    metric: Metric
    notes: tuple[str, ...] = ()

    def fitted(self, out: Any, log: Callable[[str], object]) -> Criteria:
        """Return the criteria with a metric that fits the model's output; a change of it is noted once."""
        metric = self.metric.fitted(out)
        if metric.name != self.metric.name:
            log(
                "the metric is the loss: a loss of your own does not say what the output's columns stand for "
                f"(metric={self.metric.name!r} takes scores above 0 for a label, or the largest of a column "
                "a class; train.metric_columns names the columns)."
            )
        return self if metric is self.metric else replace(self, metric=metric)


def criteria_of(
    wishes: Wishes, part: Partition, meta: Meta, settings: Run, mesh: Mesh
) -> tuple[Criteria, Partition]:
    """Return loss and metric, checked against the labels before training. All ranks call it.

    Args:
        wishes: The user's loss and metric.
        part: This rank's part.
        meta: The facts of the whole graph.
        settings: The run's settings.
        mesh: All ranks.

    Returns:
        The criteria, and this rank's part with masks restricted to labelled vertices.

    Raises:
        DataError: If there are no labels, they do not fit the loss, or no training vertex has a label.
        ConfigError: If settings clash, or the mean over all ranks would change a user's loss.
    """
    if meta.labels is None:
        raise DataError("labels (data.y) to train by", "data without them")
    train, channel = settings.train, mesh.graph
    objective = objective_of(
        wishes.loss,
        labels_that_count(meta.labels, part, train, channel),
        train,
        meta.num_nodes,
        inputs=wishes.loss_inputs,
        nodes=tuple(part.nodes),
        shared=tuple(part.shared),
        alone=is_alone(settings, mesh),
    )
    metric = metric_of(wishes.metric, objective, train)
    _refuse_weights(objective, part, channel)
    # Vertices without a label are taken out of all masks, so nothing later needs to know about them.
    labelled = objective.labelled(part.nodes["y"])
    nodes = {name: value & labelled if name in splits.NAMES else value for name, value in part.nodes.items()}
    given = [int(part.nodes[name].sum()) for name in splits.NAMES]
    kept = [int(nodes[name].sum()) for name in splits.NAMES]
    # Counts of all ranks, by one sum: masks as given, masks as kept, vertices without a label.
    mine = torch.tensor([*given, *kept, int((~labelled).sum())], device=channel.device)
    found = channel.all_reduce(mine, action="count labelled vertices", kind="other").tolist()
    return Criteria(objective, metric, _label_notes(objective, meta, found)), replace(part, nodes=nodes)


def labels_that_count(facts: Labels, part: Partition, train: Train, channel: Channel) -> Labels:
    """Return the facts of the labels without the one that the settings ignore. All ranks call it.

    Args:
        facts: The facts of all labels.
        part: This rank's part.
        train: The settings.
        channel: All ranks that have a part.
    """
    if train.ignore_index is None:
        return facts
    mine = labels_of(part.nodes["y"], train.ignore_index)
    # Rows of this part become original ids, so that an error names a row of the user's y.
    odd, least, most = (
        int(part.own[row]) if row >= 0 else row for row in (mine.odd, mine.least_row, mine.most_row)
    )
    mine = replace(mine, odd=odd, least_row=least, most_row=most)
    parts: Any = channel.gather_objects(mine, "labels besides the ignored one", (Labels,))
    return joined(parts)


def is_alone(settings: Run, mesh: Mesh) -> bool:
    """Return whether one rank computes all losses and gradients, of the whole graph at once."""
    return mesh.size == settings.parallel.fit(mesh.size).chunks == 1


def no_criteria() -> Criteria:
    """Return placeholder criteria for data without labels, which is scored and never trained on."""
    objective = objective_of(
        None, labels_of(torch.tensor([0, 1])), Train(), 2, inputs=None, nodes=(), shared=()
    )
    return Criteria(objective, metric_of(None, objective, Train()))


def _label_notes(objective: Objective, meta: Meta, found: Sequence[int]) -> tuple[str, ...]:
    """Return the notes on masks and labels of the whole graph."""
    given, kept, unlabelled = found[:3], found[3:6], found[6]
    none = "NaN" if objective.facts.floating else f"y = {objective.ignore}"
    notes = []
    if lost := sum(given) - sum(kept):
        notes.append(f"{lost:,} vertices without a label ({none}) are left out of the masks.")
    if unlabelled:
        notes.append(
            f"{unlabelled:,} of {meta.num_nodes:,} vertices have no label ({none}); they pass messages only."
        )
    if not kept[0]:
        raise splits.nobody(given[0], unlabelled, meta.num_nodes)
    notes += [
        f"{name} is empty: there is nothing to {word} on."
        for name, word, count in zip(splits.NAMES[1:], ("validate", "test"), kept[1:], strict=True)
        if not count
    ]
    facts = objective.facts
    if objective.name == "cross_entropy" and facts.single and facts.floating:
        notes.append(f"cross_entropy takes the labels as class ids: y is {facts.dtype}, of whole numbers.")
    return tuple(notes)


def _refuse_weights(objective: Objective, part: Partition, channel: Channel) -> None:
    """Check that sample weights are numbers from 0 up, one a vertex. All ranks call it."""
    if objective.weight is None:
        return
    name = objective.weight
    value, fault = part.nodes.get(name), ""
    if value is None or value.is_complex() or value.shape[1:] not in ((), (1,)):
        fault = "none" if value is None else f"the shape [N, {', '.join(map(str, value.shape[1:]))}]"
    elif value.numel() and not (bool(value.double().isfinite().all()) and float(value.double().min()) >= 0):
        fault = f"{float(value.double().min()):g}"
    faults = channel.gather_objects(fault, "check the weights of vertices")
    # All ranks raise the same error; a rank alone would leave its peers waiting in the next collective.
    fault = next((str(each) for each in faults if each), "")
    if fault:
        raise DataError(f"{name} to have a weight from 0 up for each vertex", fault, where=f"data.{name}")


def optimizer_of(
    model: nn.Module,
    settings: Run,
    make: Callable[[Any], Optimizer] | None = None,
    mesh: Mesh | None = None,
) -> Optimizer:
    """Return the optimizer over all parameters that require a gradient.

    Args:
        model: The user's module.
        settings: The run's settings.
        make: ``callable(params)``; None for Adam.
        mesh: All ranks; None for one.

    Raises:
        ModelError: If no parameter requires a gradient.
        ConfigError: If ``make`` does not return an optimizer; or returns one that runs the model by itself,
            one without any of the model's weights, or, on several ranks or chunks, one with other weights
            too.
    """
    parameters = trained(model)
    if make is None:
        return torch.optim.Adam(parameters, lr=settings.train.lr, weight_decay=settings.train.weight_decay)
    # An instance has been made of parameters before they were moved to the device, or of another model.
    if isinstance(make, Optimizer) or not callable(make):
        raise ConfigError(
            "optimizer=... to be a callable(params) -> Optimizer",
            f"a {type(make).__name__}",
            hint="optimizer=lambda params: torch.optim.AdamW(params, lr=0.01)",
        )
    with _told("optimizer=... to make an optimizer of the model's parameters"):
        optimizer = make(parameters)
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            "optimizer=... to be a callable(params) -> Optimizer",
            f"one that gives {type(optimizer).__name__}",
        )
    # torch wraps step on the instance; the class shows the real signature.
    # LBFGS calls a closure that runs the model several times; an epoch here is one forward and backward.
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise ConfigError(
            "one forward pass, one backward pass and one step an epoch",
            f"{type(optimizer).__name__}, which runs the model several times within a step",
            hint="an optimizer whose step needs no closure: Adam, AdamW, SGD, ...",
        )
    _refuse_others(optimizer, model, alone=mesh is None or is_alone(settings, mesh))
    return optimizer


def trained(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that require a gradient.

    Raises:
        ModelError: If no parameter does.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise ModelError("a model with parameters to train", "none that require a gradient")
    return parameters


def _refuse_others(optimizer: Optimizer, model: nn.Module, *, alone: bool) -> None:
    """Refuse an optimizer that holds parameters outside the model.

    Over ranks, only gradients of the model's parameters are summed, and only their weights kept alike.
    """
    known = {id(parameter) for parameter in model.parameters()}
    held = [p for group in optimizer.param_groups for p in group["params"]]
    others = [parameter for parameter in held if id(parameter) not in known]
    # None of the model's: the run would train nothing.
    if len(others) == len(held):
        raise ConfigError(
            "an optimizer of parameters of the model that the Trainer was given",
            f"{type(optimizer).__name__} with {len(held)}, none of them the model's",
            hint="optimizer=lambda params: torch.optim.AdamW(params, lr=0.01), over the params it is given",
        )
    # Gradients of a loss's own weights are not summed over ranks, so copies would drift apart.
    if others and not alone:
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        raise ConfigError(
            "an optimizer of the model's parameters alone, on several ranks or chunks",
            f"{type(optimizer).__name__} with another of shape {list(others[0].shape)}{more}, of a loss or "
            "another module",
            hint="make that module a part of the model (model.loss = loss); or train on one rank",
        )


def frozen(model: nn.Module) -> frozenset[str]:
    """Return the names of the parameters that are not trained: they require no gradient."""
    return frozenset(name for name, p in model.named_parameters() if not p.requires_grad)


def refuse_thawed(model: nn.Module, before: frozenset[str]) -> None:
    """Refuse parameters that were unfrozen too late: no optimizer and no sum over ranks includes them.

    Args:
        model: The model as it is now.
        before: The names that ``frozen`` returned when optimizer and engine were made.

    Raises:
        ModelError: If one of them has been unfrozen since.
    """
    if thawed := sorted(before - frozen(model)):
        more = f" and {len(thawed) - 1} more" if len(thawed) > 1 else ""
        raise ModelError(
            "the same parameters to require a gradient as when the Trainer was made",
            f"{thawed[0]}{more}, which did not then and {'do' if more else 'does'} now",
            hint="make a new Trainer of this model, which keeps its weights, and fit with that",
        )


def set_rates(optimizer: Optimizer, train: Train) -> None:
    """Set the default optimizer's rates to the present settings, which may differ from a checkpoint's."""
    for group in optimizer.param_groups:
        group["lr"], group["weight_decay"] = train.lr, train.weight_decay


def scheduler_of(
    optimizer: Optimizer, make: Callable[[Optimizer], Any] | None, *, higher: bool = True
) -> Any:
    """Return the scheduler that sets the learning rate once an epoch, or None.

    Args:
        optimizer: The run's optimizer.
        make: ``callable(optimizer)``; None for no scheduler.
        higher: Whether more of the run's metric is better.

    Raises:
        ConfigError: If ``make`` returns an object without ``step``, the optimizer itself, a scheduler of
            another optimizer, or a ``ReduceLROnPlateau`` for a rising metric where less is better.
    """
    if make is None:
        return None
    with _told(
        "scheduler=... to make a scheduler of the optimizer",
        hint="scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 50)",
    ):
        scheduler = make(optimizer) if callable(make) else make
    if not callable(getattr(scheduler, "step", None)) or scheduler is make:
        raise ConfigError(
            "scheduler=... to be a callable(optimizer) that gives an object with a step()",
            f"a {type(scheduler).__name__}",
            hint="scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 50)",
        )
    if scheduler is optimizer:
        raise ConfigError(
            "scheduler=... to be a callable(optimizer) that gives a scheduler",
            f"the optimizer itself, a {type(scheduler).__name__}, which would step twice an epoch",
            hint="scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 50)",
        )
    # A scheduler need not have an attribute `optimizer`; one that has must turn the rates of this run.
    turned = getattr(scheduler, "optimizer", optimizer)
    if isinstance(turned, Optimizer) and turned is not optimizer:
        raise ConfigError(
            "a scheduler of the run's optimizer",
            f"{type(scheduler).__name__} of another {type(turned).__name__}",
            hint="scheduler=lambda optimizer: ..., made of the optimizer that it is given",
        )
    _refuse_plateau(scheduler, higher=higher)
    return scheduler


def _refuse_plateau(scheduler: Any, *, higher: bool) -> None:
    if isinstance(scheduler, ReduceLROnPlateau) and scheduler.mode == "max" and not higher:
        raise ConfigError(
            'a metric that rises, for ReduceLROnPlateau(mode="max")',
            "a metric of which less is better",
            hint='mode="min"',
        )


def refuse_short(scheduler: Any, epochs: int, train: Train) -> None:
    """Refuse, before the first epoch, a scheduler that raises an error after fewer steps than epochs.

    Args:
        scheduler: The run's scheduler.
        epochs: The number of epochs that are still to be trained.
        train: The settings; a run that may stop early is not refused.

    Raises:
        ConfigError: If the scheduler takes fewer steps.
    """
    # OneCycleLR raises an error in the step after its last; after hours of training that is too late.
    if isinstance(scheduler, OneCycleLR) and train.patience is None:
        left = scheduler.total_steps - scheduler.last_epoch
        if left < epochs:
            raise ConfigError(
                f"a scheduler with {epochs:,} steps for {epochs:,} epochs",
                f"OneCycleLR with {left:,} left",
                hint=f"total_steps={scheduler.last_epoch + epochs} or more; a step is an epoch here",
            )


def step_optimizer(optimizer: Optimizer) -> None:
    """Take one step of the optimizer.

    Raises:
        ConfigError: If the optimizer raises.
    """
    with _told("the optimizer to take a step an epoch"):
        optimizer.step()


@contextmanager
def _told(expected: str, hint: str = "") -> Iterator[None]:
    """Turn an exception of a user's code in this block into an error that names that code."""
    try:
        yield
    except KagomeError:
        raise
    except Exception as error:
        words = (str(error).strip().splitlines() or [""])[0]
        got = ": ".join(filter(None, (type(error).__name__, words[:300])))
        # Memory that ran out in the user's code is reported as that.
        raise in_words(error) or ConfigError(expected, got, where=raised_at(error), hint=hint) from error


def step_scheduler(
    scheduler: Any, loss: float, val_metric: float | None, *, higher: bool, seen: bool = True
) -> None:
    """Take one step of the scheduler; ``ReduceLROnPlateau`` gets the validation metric or the loss.

    It gets the validation metric if its mode fits the metric's direction, else the loss.

    Args:
        scheduler: The run's scheduler.
        loss: The epoch's loss.
        val_metric: The epoch's validation metric, if it was evaluated and there are validation vertices.
        higher: Whether more of the metric is better.
        seen: Whether the epoch was evaluated.

    Raises:
        ConfigError: If ``ReduceLROnPlateau`` waits for a rising metric where less is better, or where there
            is no metric.
    """
    _refuse_plateau(scheduler, higher=higher)
    if not isinstance(scheduler, ReduceLROnPlateau):
        with _told("the scheduler to take a step an epoch"):
            scheduler.step()
    # A falling quantity is wanted and the metric rises, so the loss stands in for it.
    elif scheduler.mode == "min" and higher:
        scheduler.step(loss)
    elif val_metric is not None:
        scheduler.step(val_metric)
    # The epoch was evaluated and has no score, so no later one will.
    # An epoch without evaluation takes no step.
    elif seen and scheduler.mode == "max":
        raise ConfigError(
            'a validation metric that rises, for ReduceLROnPlateau(mode="max")',
            "none: no vertex validates, or its score has no value",
            hint='data.val_mask, or mode="min" for the training loss',
        )
    elif seen:
        scheduler.step(loss)
