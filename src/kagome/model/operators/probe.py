"""Sample probe: runs a model's steps on a few samples to find their axis in each value, and that none mix.

Where it sits: ``graph`` cuts a model by its findings; ``pipelining.dag`` refuses the models that it refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves

from kagome.errors import DataError, KagomeError, ModelError
from kagome.model.forward_call import ForwardCall
from kagome.model.operators.sample_dropout import Call, DropoutSite, Masks, place_of
from kagome.model.operators.samples import count_of, rows_of
from kagome.model.trace.equivalence import refuse_unlike
from kagome.model.trace.graph import LayerGraph, Step
from kagome.model.weight_hooks import hooks_off

MOST: Final = 4
"""Largest number of samples in a run."""
LARGEST: Final = 64
"""Largest number of samples of a batch that is compared with its halves."""
_ROUNDING: Final = dict.fromkeys((torch.float64, torch.complex128), 1e-9) | dict.fromkeys(
    (torch.float32, torch.complex64), 1e-4
)
"""Relative difference by type that counts as rounding; 2e-2 in other types."""
_SUMMED: Final = 300.0
"""Factor on rounding in sums of gradients, as a layer may compute in fewer digits than it returns."""
_SQUEEZED: Final = "name the axis that is meant: squeeze(-1), not squeeze()"
_PICKED: Final = "torch.where in place of rows that a mask picks: their number is not the samples'"
_APART: Final = (
    "take what mixes samples out of the model: a mean over the batch, say, or a draw of random numbers other "
    "than dropout; layers that take sequences need batch_first=True"
)


@dataclass(frozen=True)
class Fact:
    """The value of a step, as a probe saw it.

    Args:
        kind: ``samples`` for a tensor with a sample axis, ``fixed`` for one without, ``odd`` for one whose
            samples have no axis of their own, ``several`` for several tensors in one value, or ``none`` for
            no tensor.
        axis: Axis of the samples.
        shape: Shape without that axis.
        dtype: Type of the tensor; None if the value is not a single tensor.
        grad: Whether it requires a gradient.
    """

    kind: str
    axis: int = 0
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    grad: bool = False

    @property
    def told(self) -> str:
        """Return the kind and shape in words, for messages."""
        shape = f"a tensor of shape {list(self.shape)}"
        return {
            "samples": f"a tensor with samples along axis {self.axis}",
            "fixed": f"{shape} for any number of samples",
            "odd": f"{shape}, in which samples have no axis of their own",
            "several": "several tensors in one value",
        }.get(self.kind, "no tensor")

    @property
    def bytes(self) -> int:
        """Bytes of the value for each sample."""
        return 0 if self.dtype is None else torch.Size(self.shape).numel() * self.dtype.itemsize

    def shape_of(self, samples: int) -> tuple[int, ...]:
        """Return the shape for this number of samples."""
        return (*self.shape[: self.axis], samples, *self.shape[self.axis :])


@dataclass(frozen=True)
class Probe:
    """The findings about a model.

    Args:
        facts: Facts by name of the step.
        places: Axis of the samples at each dropout call.
    """

    facts: Mapping[str, Fact]
    places: Mapping[Call, DropoutSite | None]


def probe(
    model: nn.Module,
    graph: LayerGraph,
    inputs: Mapping[str, Tensor],
    *,
    batch_norm: str = "refuse",
) -> Probe:
    """Run all steps on up to 4 samples, on all of these but the first, and on the last; compare the values.

    Modes and buffers of the model, and torch's generator, are left as they were.

    Args:
        model: The user's module.
        graph: Steps of the model.
        inputs: Inputs of two samples or more, by name.
        batch_norm: ``refuse``, or ``micro-batch`` for separate statistics of each micro-batch.

    Raises:
        ModelError: If a sample's value depends on whether other samples are there, if a step changes a
            buffer, or if samples have no axis of their own.
        DataError: If there is only one sample.

    Cost:
        Three forward passes of a few samples; five with dropout.
    """
    count = min(count_of(inputs), MOST)
    if count < 2:
        raise DataError("a sample batch of 2 samples or more, to tell them apart", f"{count}")
    _check_layers(model, batch_norm)
    #     samples   0 1 2 3     the run of all
    #                 1 2 3     differs where one of them depends on 0; its shapes show the sample axis
    #                     3     differs where 3 depends on 1 or 2, and in code for a single sample
    #
    # The last ones, so that a value by position in the batch shows as well.
    sizes = (count, count - 1)
    noted = [Masks(0), Masks(0)]

    def last(size: int, masks: Masks) -> dict[str, Any]:
        return _values(model, graph, inputs, count - size, count, masks)

    with _untouched(model, batch_norm) as check_buffers:
        runs = [last(size, masks) for size, masks in zip(sizes, noted, strict=True)]
        check_buffers()
        places: dict[Call, DropoutSite | None] = {}
        for call, shape in noted[0].shapes.items():
            try:
                places[call] = place_of(shape, sizes[0], noted[1].shapes[call], sizes[1], several=True)
            except (ValueError, KeyError):
                raise ModelError(
                    "a dropout mask for each sample",
                    f"a tensor of shape {list(shape)}, in which samples have no axis of their own",
                    where=call[0],
                    hint="drop from tensors with samples along axis 0",
                ) from None
        facts = {step.name: _fact(runs[0][step.name], runs[1][step.name], sizes) for step in graph.steps}
        _compare(graph, facts, runs, sizes)
        _compare(graph, facts, [runs[0], last(1, Masks(0))], (count, 1))
        # Once more with masks, which must follow the samples and not their positions.
        if places:
            _compare(graph, facts, [last(size, Masks(0, places)) for size in sizes], sizes)
    return Probe(facts, places)


def compare(model: nn.Module, graph: LayerGraph, inputs: Mapping[str, Tensor], *, batch_norm: str) -> None:
    """Refuse steps that do not compute what forward computes, on up to 4 samples without dropout.

    Args:
        model: The user's module.
        graph: Its steps, as they will be run.
        inputs: Inputs of two samples or more, by name.
        batch_norm: As in :func:`probe`.

    Raises:
        ModelError: If they differ.

    Cost:
        Four forward passes of a few samples.
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

    calling = ForwardCall.named_as(model, given)
    refuse_unlike(model, graph, given, on=on, before=masks.at, calling=calling)


def compare_halves(
    model: nn.Module, graph: LayerGraph, inputs: Mapping[str, Tensor], samples: int, *, batch_norm: str
) -> None:
    """Refuse a model whose values for a batch differ from those of its halves, which 4 samples may not show.

    Args:
        model: The user's module.
        graph: Its steps, as they will be run.
        inputs: Inputs of two samples or more, by name; they are repeated if a batch has more.
        samples: Number of samples of a batch, of which up to 64 are run.
        batch_norm: As in :func:`probe`.

    Raises:
        ModelError: If values differ, with the first step whose values do.

    Cost:
        Two forward passes of the batch without gradients; two more if they differ.
    """
    count = min(samples, LARGEST)
    if count <= MOST:
        return
    places = torch.arange(count)
    rows = {name: value[(places % value.size(0)).to(value.device)] for name, value in inputs.items()}
    bounds = ((0, count), (0, count // 2), (count // 2, count))
    with _untouched(model, batch_norm):
        runs = [_values(model, graph, rows, *bound, Masks(0), keep=[graph.output]) for bound in bounds]
        whole, *halves = (run[graph.output].value for run in runs)
        joined = torch.cat(halves) if halves[0].dim() else halves[0]
        held = (*model.parameters(), *rows.values(), whole)
        if whole.shape == joined.shape and _gap(whole, joined) <= _ROUNDING.get(
            _coarsest(t.dtype for t in held), 2e-2
        ):
            return
        sizes = (count, count - count // 2)
        seen = [_values(model, graph, rows, count - size, count, Masks(0)) for size in sizes]
        facts = {step.name: _fact(seen[0][step.name], seen[1][step.name], sizes) for step in graph.steps}
        _compare(graph, facts, seen, sizes)
    raise ModelError(
        "samples that do not read each other",
        f"outputs of {count} samples that are not those of their halves",
        hint=_APART,
    )


@dataclass(frozen=True)
class _Seen:
    """A copy of a tensor when its step returned it, and whether it required a gradient."""

    value: Tensor
    grad: bool


def _values(
    model: nn.Module,
    graph: LayerGraph,
    inputs: Mapping[str, Tensor],
    first: int,
    last: int,
    masks: Masks,
    *,
    keep: Collection[str] | None = None,
) -> dict[str, Any]:
    """Return the values as their steps returned them: all, or only those in ``keep`` without gradients."""
    found: dict[str, Any] = {}

    def after(step: Step, value: Any) -> None:
        if keep is not None and step.name not in keep:
            return
        # A copy, as a later step may change it in place.
        tensor = isinstance(value, Tensor)
        found[step.name] = _Seen(value.detach().clone(), value.requires_grad) if tensor else value

    rows = {name: value.clone() for name, value in rows_of(inputs, first, last).items()}
    with masks.on(0, torch.arange(first, last)), torch.set_grad_enabled(keep is None):
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
                "each step of the model to run on a few samples",
                f"{begun[0].called!r}, which raised {type(error).__name__}: {error}",
                where=begun[0].line or begun[0].path,
                hint="try the model on the sample batch by itself, and on one sample of it",
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
        # A value of such shape may stay within a stage. It is refused where it would have to be sent.
        return Fact("odd", 0, tuple(value.shape), value.dtype, grad)
    if place is None:
        return Fact("fixed", 0, tuple(value.shape), value.dtype, grad)
    shape = tuple(value.shape[: place.axis]) + tuple(value.shape[place.axis + 1 :])
    return Fact("samples", place.axis, shape, value.dtype, grad)


def _compare(
    graph: LayerGraph, facts: Mapping[str, Fact], runs: Sequence[Mapping[str, Any]], sizes: tuple[int, int]
) -> None:
    """Refuse the first step whose values for the last samples differ from those among all samples.

    Args:
        graph: Steps of the model.
        facts: Facts by name of the step.
        runs: Values of a run of all samples, and of a run of the last ones.
        sizes: Number of samples of each run.
    """
    rounding = _ROUNDING.get(_coarsest(fact.dtype for fact in facts.values()), 2e-2)
    count, size = sizes
    for step in graph.steps:
        fact = facts[step.name]
        # "odd" values stay inside a stage; their effect shows in the values that are made of them.
        if fact.kind not in ("samples", "fixed") or step.kind == "attribute":
            continue
        whole, apart = (run[step.name].value for run in runs)
        together = whole.narrow(fact.axis, count - size, size) if fact.kind == "samples" else whole
        if together.shape != apart.shape:
            raise ModelError(
                "a model that takes any number of samples at a time",
                f"{step.called!r}, which gives {count} of them the shape {list(whole.shape)}, and {size} of "
                f"them {list(apart.shape)}",
                where=step.line or step.within or step.path,
                hint=_SQUEEZED if apart.dim() < together.dim() else _PICKED,
            )
        difference = _gap(together, apart)
        if difference > rounding:
            raise ModelError(
                "samples that do not read each other",
                f"{step.called!r}, which gives a sample values that differ by {difference:.1e} of the "
                "largest when another sample is there or not",
                where=step.line or step.within or step.path,
                hint=_APART,
            )


def _gap(one: Tensor, other: Tensor) -> float:
    """Return the difference of two values, relative to the largest number; 0 if some are not finite."""
    if not one.numel() or not one.isfinite().all():
        return 0.0
    kind = torch.complex128 if one.is_complex() else torch.float64
    wide = one.to(kind), other.to(kind)
    return float((wide[0] - wide[1]).abs().max()) / max(float(wide[0].abs().max()), 1e-30)


def _coarsest(kinds: Iterable[torch.dtype | None]) -> torch.dtype:
    """Return the type with the fewest digits: a value computed in it is no more precise in another type."""
    floats = [kind for kind in kinds if kind is not None and (kind.is_floating_point or kind.is_complex)]
    return max(floats, key=lambda kind: torch.finfo(kind).eps, default=torch.float64)


def _largest(tensors: Iterable[Tensor | None]) -> float:
    return max((float(t.abs().max()) for t in tensors if t is not None and t.numel()), default=0.0)


def _gradients(
    model: nn.Module,
    graph: LayerGraph,
    inputs: Mapping[str, Tensor],
    weights: Iterable[Tensor],
    first: int,
    last: int,
) -> list[Tensor | None]:
    """Return the weights' gradients of some samples' outputs, with cotangents fixed by place in the batch."""
    masks, rows = Masks(0), {n: v.clone() for n, v in rows_of(inputs, first, last).items()}
    with masks.on(0, torch.arange(first, last)), torch.enable_grad():
        out = graph.run(model, rows, training=True, before=masks.at, keep=[graph.output])[graph.output]
    if not out.requires_grad:
        return [None for _ in weights]
    # Draw equally many numbers for any bounds, because their count changes all of them.
    pull = torch.randn(MOST, *out.shape[1:], generator=torch.Generator().manual_seed(0))[first:last]
    found = torch.autograd.grad(out, list(weights), pull.to(out.device, out.dtype), allow_unused=True)
    return [None if each is None else each.to_dense() for each in found]


def compare_gradients(
    model: nn.Module, graph: LayerGraph, inputs: Mapping[str, Tensor], *, batch_norm: str
) -> None:
    """Refuse a weight whose gradient over up to 4 samples is not the sum of its gradients over two parts.

    Args:
        model: The user's module.
        graph: Its steps, as they will be run.
        inputs: Inputs of two samples or more, by name.
        batch_norm: As in :func:`probe`.

    Raises:
        ModelError: With the name of one such weight, or the error of a backward.

    Cost:
        Three forward and backward passes of a few samples.
    """
    count = min(count_of(inputs), MOST)
    weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    if not weights:
        return

    def pulled(first: int, last: int) -> list[Tensor | None]:
        return _gradients(model, graph, inputs, weights.values(), first, last)

    with _untouched(model, batch_norm), hooks_off(weights.values()):
        try:
            whole, one, other = pulled(0, count), pulled(0, 1), pulled(1, count)
        except KagomeError:
            raise
        except Exception as error:
            raise ModelError(
                "the model's backward to run on a few samples",
                f"{type(error).__name__}: {error}",
                hint="try one forward and backward of the model on the sample batch by itself",
            ) from error
    largest = _largest((*whole, *one, *other))
    for name, total, *parts in zip(weights, whole, one, other, strict=True):
        # A pipeline adds the gradients of its micro-batches, so those of samples must add up.
        added = sum((part for part in parts if part is not None), torch.zeros(()))
        if total is None or not total.numel() or not total.isfinite().all():
            continue
        # The gradient of a bias before a norm is nothing but rounding error.
        rounding = _ROUNDING.get(total.dtype, 2e-2)
        allowed = max(min(_SUMMED * rounding, 0.1) * _largest((total, *parts)), rounding * largest)
        if float((total - added).abs().max()) > allowed:
            raise ModelError(
                "samples that do not read each other, whose gradients a pipeline sums",
                f"a gradient of {name!r} over {count} samples that is not the sum of theirs",
                where=name.rpartition(".")[0],
                hint="scale_grad_by_freq=False; or a backward that treats each sample by itself",
            )


def _check_layers(model: nn.Module, batch_norm: str) -> None:
    """Refuse torch layers known to mix samples, or to draw one dropout mask for several samples."""
    if batch_norm not in ("refuse", "micro-batch"):
        raise ModelError("batch_norm to be 'refuse' or 'micro-batch'", f"{batch_norm!r}")
    for name, module in model.named_modules():
        kind = type(module).__name__
        if isinstance(module, _BatchNorm) and batch_norm == "refuse":
            raise ModelError(
                "samples that do not read each other",
                f"{name!r}, a {kind}, which takes the statistics of all samples that are there",
                where=name,
                hint='LayerNorm or GroupNorm; or batch_norm="micro-batch": each has its own statistics',
            )
        # Such a kernel makes its masks inside, where ``Masks`` does not see a call.
        if isinstance(module, nn.RNNBase) and module.dropout and module.num_layers > 1:
            raise ModelError(
                "a dropout mask for each sample",
                f"{name!r}, a {kind} that drops within its kernel, with all samples of a micro-batch",
                where=name,
                hint=f"a {kind} a layer, each with num_layers=1, and nn.Dropout between them",
            )


@contextmanager
def _untouched(model: nn.Module, batch_norm: str) -> Iterator[Callable[[], None]]:
    """Set training mode for a block, except for batch norms; afterwards modes and buffers are as before.

    Yields:
        A function that raises an error if a buffer was changed so far.

    Raises:
        ModelError: If a buffer was changed.
    """
    modes = [(module, module.training) for module in model.modules()]
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}

    def check() -> None:
        buffers = {name: buffer for name, buffer in model.named_buffers() if name in before}
        changed = [name for name, buffer in buffers.items() if not torch.equal(before[name], buffer)]
        if changed:
            path = changed[0].rpartition(".")[0]
            counted = hasattr(model.get_submodule(path), "track_running_stats")
            raise ModelError(
                "the same samples to give the same values in any micro-batches",
                f"a forward that changes the buffers {changed}",
                where=path,
                hint="track_running_stats=False" if counted else "a forward that leaves its buffers alone",
            )

    try:
        model.train()
        for module, _ in modes:
            # With its buffers for statistics a norm mixes no samples, so that only other mixing shows.
            if batch_norm == "micro-batch" and isinstance(module, _BatchNorm):
                module.eval()
        with torch.random.fork_rng(devices=[]):
            yield check
        check()
    finally:
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                if name in before and not torch.equal(before[name], buffer):
                    buffer.copy_(before[name])
        for module, mode in modes:
            module.training = mode
