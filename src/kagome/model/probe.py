"""Probe: run a model's steps on a few samples; where samples lie in each value, and that none reads another.

Where it sits: ``branches`` cuts a graph by what it finds; ``run.dag`` refuses what it refuses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves

from kagome.errors import DataError, KagomeError, ModelError
from kagome.model.calling import Calling
from kagome.model.likeness import refuse_unlike
from kagome.model.masks import Call, Masks, Place, place_of
from kagome.model.samples import count_of, rows_of
from kagome.model.steps import LayerGraph, Step

MOST = 4
"""Samples of the larger run."""


@dataclass(frozen=True)
class Fact:
    """What a step gives.

    Args:
        kind: A tensor with samples, a tensor without, several tensors in one value, or no tensor.
        axis: The samples'.
        shape: Without that axis.
        dtype: None where it is not one tensor.
        grad: Whether it needs a gradient.
    """

    kind: str
    axis: int = 0
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    grad: bool = False

    @property
    def bytes(self) -> int:
        """Bytes of a sample."""
        return 0 if self.dtype is None else torch.Size(self.shape).numel() * self.dtype.itemsize

    def shape_of(self, samples: int) -> tuple[int, ...]:
        """The shape for so many samples."""
        return (*self.shape[: self.axis], samples, *self.shape[self.axis :])


@dataclass(frozen=True)
class Probe:
    """What was found of a model.

    Args:
        facts: By step.
        places: Where samples lie at each dropout.
    """

    facts: Mapping[str, Fact]
    places: Mapping[Call, Place | None]


def probe(
    model: nn.Module,
    graph: LayerGraph,
    inputs: Mapping[str, Tensor],
    *,
    batch_norm: str = "refuse",
) -> Probe:
    """Run all steps on up to 4 samples, and on all of these but the first; compare value by value.

    Modes and buffers of the model, and torch's generator, are as they were afterwards.

    Args:
        model: The user's module.
        graph: Of the model.
        inputs: Two samples or more.
        batch_norm: ``refuse``, or ``micro-batch``: each micro-batch has statistics of its own.

    Raises:
        ModelError: If a step gives a sample another value when other samples are there or not, if it changes
            a buffer, or if samples lie along no axis of their own.
        DataError: If there is one sample alone.

    Cost:
        Two forwards of a few samples; four with dropout.
    """
    count = min(count_of(inputs), MOST)
    if count < 2:
        raise DataError("a sample batch has 2 samples or more, to tell them apart", f"it has {count}")
    _check_norms(model, batch_norm)
    sizes = (count, count - 1)
    noted = [Masks(0), Masks(0)]
    with _untouched(model, batch_norm):
        runs = [
            _values(model, graph, inputs, count - size, count, masks)
            for size, masks in zip(sizes, noted, strict=True)
        ]
        places: dict[Call, Place | None] = {}
        for call, shape in noted[0].shapes.items():
            try:
                places[call] = place_of(shape, sizes[0], noted[1].shapes[call], sizes[1], several=True)
            except (ValueError, KeyError):
                raise ModelError(
                    "a mask of dropout is drawn for each sample",
                    f"samples have no axis of their own in a tensor of shape {list(shape)}",
                    where=call[0],
                    hint="drop from tensors with samples along axis 0",
                ) from None
        facts = {step.name: _fact(runs[0][step.name], runs[1][step.name], sizes) for step in graph.steps}
        _compare(graph, facts, *runs)
        if places:
            drawn = [_values(model, graph, inputs, count - size, count, Masks(0, places)) for size in sizes]
            _compare(graph, facts, *drawn)
    return Probe(facts, places)


def compare(model: nn.Module, graph: LayerGraph, inputs: Mapping[str, Tensor], *, batch_norm: str) -> None:
    """Refuse steps that do not give what forward gives, on up to 4 samples, of which nothing is dropped.

    Args:
        model: The user's module.
        graph: Its steps, as they are to be run.
        inputs: Two samples or more.
        batch_norm: As :func:`probe`.

    Raises:
        ModelError: If they differ.

    Cost:
        Four forwards of a few samples.
    """
    rows = rows_of(inputs, 0, min(count_of(inputs), MOST))
    given = {name: value.clone() for name, value in rows.items()}
    masks = Masks(0)

    @contextmanager
    def on(training: bool) -> Iterator[None]:
        with _untouched(model, batch_norm), masks.on(0, torch.arange(count_of(rows))):
            if not training:
                model.eval()
            yield
        for name, value in rows.items():  # forward may have written to them
            given[name].copy_(value)

    calling = Calling.named_as(model, given)
    refuse_unlike(model, graph, given, on=on, before=masks.at, calling=calling)


@dataclass(frozen=True)
class _Seen:
    """A tensor as it was, and whether it needed a gradient."""

    value: Tensor
    grad: bool


def _values(
    model: nn.Module, graph: LayerGraph, inputs: Mapping[str, Tensor], first: int, last: int, masks: Masks
) -> dict[str, Any]:
    """Every step's value, as it was when the step gave it."""
    found: dict[str, Any] = {}

    def after(step: Step, value: Any) -> None:
        # A copy, as a later step may change it in place.
        tensor = isinstance(value, Tensor)
        found[step.name] = _Seen(value.detach().clone(), value.requires_grad) if tensor else value

    rows = {name: value.clone() for name, value in rows_of(inputs, first, last).items()}
    with masks.on(0, torch.arange(first, last)), torch.enable_grad():
        begun: list[Step] = []

        def before(step: Step) -> None:
            begun[:] = [step]
            masks.at(step)

        try:
            graph.run(model, rows, training=True, before=before, after=after)
        except KagomeError:
            raise
        except Exception as error:
            raise ModelError(
                "a pipeline runs each step of the model on a few samples",
                f"{begun[0].name!r} raised {type(error).__name__}: {error}",
                where=begun[0].line or begun[0].path,
                hint="try the model on the sample batch by itself",
            ) from error
    return found


def _fact(large: Any, small: Any, sizes: tuple[int, int]) -> Fact:
    if not isinstance(large, _Seen) or not isinstance(small, _Seen):
        several = any(isinstance(leaf, Tensor) for leaf in tree_leaves(large))
        return Fact("several" if several else "none")
    value, grad = large.value, large.grad
    try:
        place = place_of(tuple(value.shape), sizes[0], tuple(small.value.shape), sizes[1])
    except ValueError:
        # Of such shape it may live within a stage; it is refused where it would have to cross.
        return Fact("odd", 0, tuple(value.shape), value.dtype, grad)
    if place is None:
        return Fact("fixed", 0, tuple(value.shape), value.dtype, grad)
    shape = tuple(value.shape[: place.axis]) + tuple(value.shape[place.axis + 1 :])
    return Fact("samples", place.axis, shape, value.dtype, grad)


def _compare(
    graph: LayerGraph, facts: Mapping[str, Fact], large: Mapping[str, Any], small: Mapping[str, Any]
) -> None:
    """Refuse the first step that gives a sample another value among others."""
    for step in graph.steps:
        fact = facts[step.name]
        if fact.kind not in ("samples", "fixed"):
            continue
        together, apart = large[step.name].value, small[step.name].value
        if fact.kind == "samples":
            together = together.narrow(fact.axis, 1, together.size(fact.axis) - 1)
        if not together.numel() or (torch.is_floating_point(together) and not together.isfinite().all()):
            continue
        wide = together.double(), apart.double()
        scale = max(float(wide[0].abs().max()), 1e-30)
        difference = float((wide[0] - wide[1]).abs().max()) / scale
        if difference > {torch.float64: 1e-9, torch.float32: 1e-4}.get(together.dtype, 2e-2):
            raise ModelError(
                "a pipeline takes samples that do not read each other",
                f"{step.name!r} gives a sample values that differ by {difference:.1e} of the largest when "
                "another sample is there or not",
                where=step.line or step.within or step.path,
                hint="take what mixes samples out of the model: a mean over the batch, say, or a draw of "
                "random numbers other than dropout",
            )


def _check_norms(model: nn.Module, batch_norm: str) -> None:
    if batch_norm not in ("refuse", "micro-batch"):
        raise ModelError("batch_norm is 'refuse' or 'micro-batch'", f"found {batch_norm!r}")
    if batch_norm == "refuse":
        for name, module in model.named_modules():
            if isinstance(module, _BatchNorm):
                raise ModelError(
                    "a pipeline takes samples that do not read each other",
                    f"{name!r} is a {type(module).__name__}: it takes the statistics of whoever is there",
                    where=name,
                    hint='LayerNorm or GroupNorm; or batch_norm="micro-batch": each has its own statistics',
                )


@contextmanager
def _untouched(model: nn.Module, batch_norm: str) -> Iterator[None]:
    """Training mode but for batch norms; afterwards all is as it was.

    Raises:
        ModelError: If a buffer was changed.
    """
    modes = [(module, module.training) for module in model.modules()]
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    try:
        model.train()
        for module, _ in modes:
            if batch_norm == "micro-batch" and isinstance(module, _BatchNorm):
                module.eval()
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        changed = []
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                if name in before and not torch.equal(before[name], buffer):
                    changed.append(name)
                    buffer.copy_(before[name])
        for module, mode in modes:
            module.training = mode
    if changed:
        raise ModelError(
            "the same samples give the same values in any micro-batches",
            f"forward changes the buffers {changed}",
            where=changed[0].rpartition(".")[0],
            hint="a module without a state of its own, or one stage alone",
        )
