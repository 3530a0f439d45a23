"""Operator profile: measures the seconds and bytes of a module's operators on this machine.

Where it sits: the stage planners of ``planner.stages``, which do not load torch, plan over the graph that it
returns.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves, tree_map_only

from kagome.errors import KagomeError, ModelError
from kagome.model.buffers import Buffers
from kagome.model.operators.graph import Branches, branches_of
from kagome.model.operators.pieces import Piece
from kagome.model.operators.sample_dropout import Masks
from kagome.model.operators.samples import Batch, count_of, inputs_of
from kagome.model.operators.split_backward import SplitBackward
from kagome.model.saved_tensor_hook import SavedTensors
from kagome.model.trace.graph import Step
from kagome.model.weight_hooks import hooks_off
from kagome.planner.stages.operator_costs import Operator, OperatorGraph, Table

SIZES: Final = (1, 2, 4, 8, 16, 32, 64)


def measure(
    model: nn.Module,
    sample_batch: Batch,
    sizes: Sequence[int] = SIZES,
    *,
    repeats: int = 3,
    batch_norm: str = "refuse",
    halves: bool = False,
) -> OperatorGraph:
    """Measure each operator of a module alone, forward and backward.

    Args:
        model: The module, on the device to measure; its weights, gradients, buffers and modes stay unchanged.
        sample_batch: At least two samples; they are repeated for sizes that need more.
        sizes: The micro-batch sizes to measure, in ascending order.
        repeats: The number of timed runs of each operator, of which the fastest counts; an untimed run comes
            first.
        batch_norm: ``refuse`` or ``micro-batch``.
        halves: Whether the backward is measured in two halves as well, by as many runs again.

    Returns:
        The graph of operators in topological order.

    Raises:
        DataError: If the sample does not fit the model.
        ModelError: If the model cannot be traced, or if its samples depend on each other.

    Cost:
        ``repeats + 2`` forwards and ``repeats + 1`` backwards for each size.
    """
    branches = branches_of(model, sample_batch, batch_norm=batch_norm)
    return measured(model, branches, inputs_of(model, sample_batch), sizes, repeats=repeats, halves=halves)


def measured(
    model: nn.Module,
    branches: Branches,
    inputs: Mapping[str, Tensor],
    sizes: Sequence[int],
    *,
    repeats: int = 3,
    halves: bool = False,
) -> OperatorGraph:
    """Measure a module whose graph of operators is already known; see :func:`measure`."""
    found: dict[str, list[_Run]] = {name: [] for name in branches.operators}
    # All that a measurement changes is put back: gradients, buffers, modes, generators and hooks.
    pieces = {name: branches.alone(name) for name in branches.operators}
    gradients = [(weight, weight.grad) for weight in model.parameters()]
    buffers = Buffers(model)
    tensors, before = buffers.now(), buffers.copies()
    modes = [(module, module.training) for module in model.modules()]
    model.train()
    for weight, _ in gradients:
        weight.grad = None
    try:
        # Hooks of a user's weights would run once for each measurement.
        with torch.random.fork_rng(devices=[]), hooks_off(model.parameters()):
            for size in sizes:
                with _telling(f"{size} samples"):
                    bench = _Bench(model, branches, inputs, size)
                for name, piece in pieces.items():
                    with _telling(f"operator {name!r}"):
                        # The first run allocates and fills caches, so it counts only if it is the only one.
                        # By turns, so that a change of the machine's pace meets both kinds.
                        ways = (False, True) if halves else (False,)
                        turns = [[bench.run(piece, halves=way) for way in ways] for _ in range(repeats + 1)]
                    found[name].append(_fastest(turns[1 if repeats else 0 :]))
    finally:
        for weight, gradient in gradients:
            weight.grad = gradient
        buffers.restore(tensors, before)
        for module, mode in modes:
            module.training = mode
    return _costs(model, branches, pieces, sizes, found)


def _costs(
    model: nn.Module,
    branches: Branches,
    pieces: Mapping[str, Piece],
    sizes: Sequence[int],
    found: Mapping[str, Sequence[_Run]],
) -> OperatorGraph:
    """Return the operators with the seconds and bytes that were measured at each size."""
    weights = {name: weight.nbytes for name, weight in model.named_parameters()}
    joint = joint_norms(model, branches)
    return OperatorGraph(
        tuple(
            Operator(
                name,
                branches.reads(name),
                tuple((size, run.forward) for size, run in zip(sizes, found[name], strict=True)),
                tuple((size, run.backward) for size, run in zip(sizes, found[name], strict=True)),
                weights=sum(weights[weight] for weight in piece.parameters),
                output=sum(branches.facts[value].bytes for value in piece.given),
                # Bytes a sample at the largest size, where what does not grow with samples weighs least.
                kept=found[name][-1].kept // sizes[-1],
                least=2 if name in joint else 1,
                first_half=_halves(sizes, found[name], 0),
                second_half=_halves(sizes, found[name], 1),
            )
            for name, piece in pieces.items()
        )
    )


@dataclass(frozen=True)
class _Run:
    """Seconds and bytes of an operator that ran once; those of the halves only if it ran for them."""

    forward: float
    backward: float
    kept: int
    halves: tuple[float, float] | None = None


def _fastest(turns: Sequence[Sequence[_Run]]) -> _Run:
    """Return the shortest times of some turns: a run, and perhaps one with a backward in two halves."""
    runs, split = [turn[0] for turn in turns], [run.halves for turn in turns for run in turn if run.halves]
    return _Run(
        min(run.forward for run in runs),
        min(run.backward for run in runs),
        runs[0].kept,
        (min(first for first, _ in split), min(second for _, second in split)) if split else None,
    )


def _halves(sizes: Sequence[int], runs: Sequence[_Run], half: int) -> Table:
    return tuple((size, run.halves[half]) for size, run in zip(sizes, runs, strict=True) if run.halves)


@contextmanager
def _telling(where: str) -> Iterator[None]:
    """Turn an error of the model in this block into one that says where it happened.

    Raises:
        ModelError: For any error that is not Kagome's own.
    """
    try:
        yield
    except KagomeError:
        raise
    except Exception as error:
        raise ModelError(
            "a pipeline's operators to run forward and backward by themselves, to be timed",
            f"{type(error).__name__}: {error}",
            where=where,
            hint="try one forward and backward of the model on the sample batch by itself",
        ) from error


def joint_norms(model: nn.Module, branches: Branches) -> dict[str, str]:
    """Return the operators with a batch norm that needs two samples, each with the path of the norm.

    A single sample with several positions, such as an image, is enough for a batch norm.
    """
    found: dict[str, str] = {}
    for operator, steps in branches.operators.items():
        for step in steps:
            if step.kind != "module":
                continue
            module, shape = model.get_submodule(step.path), branches.facts[step.name].shape
            norms = [name for name, inner in module.named_modules() if isinstance(inner, _BatchNorm)]
            # The shape is that of the module's output. It is the norm's own shape only if the module is the
            # norm; of a norm within a module the shape is unknown, so two samples are required.
            if norms and (norms != [""] or math.prod(shape[1:]) == 1):
                found[operator] = ".".join(part for part in (step.path, norms[0]) if part)
    return found


class _Bench:
    """A forward of one micro-batch size whose values are stored, so that each operator can run alone."""

    def __init__(self, model: nn.Module, branches: Branches, inputs: Mapping[str, Tensor], size: int) -> None:
        self.model, self.branches = model, branches
        # Samples are repeated in turn if the size is larger than the sample batch.
        rows = torch.arange(size) % count_of(inputs)
        self.inputs = {name: value[rows.to(value.device)] for name, value in inputs.items()}
        self.device = next(iter(self.inputs.values())).device
        self.masks = Masks(0, branches.places)
        self.ids = torch.arange(size)
        self.own = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
        self.values: dict[str, Any] = {}
        graph = branches.graph

        # Values that some operator reads from another are cloned: later steps may write to them in place.
        def after(step: Step, value: Any) -> None:
            if step.name in graph_taken:
                self.values[step.name] = tree_map_only(Tensor, Tensor.clone, value)

        graph_taken = {v for name in branches.operators for v in branches.alone(name).taken}
        with self.masks.on(0, self.ids), torch.no_grad():
            # A step may write to its input, and later runs need the inputs unchanged.
            copies = {name: value.clone() for name, value in self.inputs.items()}
            graph.run(model, copies, training=True, before=self.masks.at, after=after)

    def run(self, piece: Piece, *, halves: bool = False) -> _Run:
        """Run an operator once, forward and backward, in two halves if they are asked for."""
        values: dict[str, Any] = dict(self.inputs)
        read: list[Tensor] = []
        for name in piece.taken:
            # Leaves of their own, so that backward ends at this operator.
            values[name] = tree_map_only(Tensor, Tensor.detach, self.values[name])
            if self.branches.facts[name].grad:
                read.append(values[name].requires_grad_())
        # The operator writes to these in place, which autograd refuses on a leaf.
        for name in piece.copied:
            values[name] = values[name].clone()
        graph = self.branches.graph
        outs: dict[str, Any] = {}

        def forward() -> None:
            outs.update(
                graph.run(
                    self.model,
                    values,
                    training=True,
                    steps=piece.steps,
                    before=self.masks.at,
                    keep=piece.given,
                )
            )

        saved = SavedTensors()
        with self.masks.on(0, self.ids), torch.enable_grad(), saved.recording():
            there = self._timed(forward)
        kept: dict[int, int] = {}
        for tensor in saved.take():
            # Views of one storage are saved once; weights are counted separately.
            place = tensor.untyped_storage().data_ptr()
            if place not in self.own:
                kept[place] = max(kept.get(place, 0), tensor.nbytes)
        leaves = tree_leaves(outs)
        roots = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
        ones = [torch.ones_like(root) for root in roots]
        if not halves:
            back = self._timed(lambda: torch.autograd.backward(roots, ones)) if roots else 0.0
            return _Run(there, back, sum(kept.values()))
        # Without a gradient there is no half, which costs nothing.
        if not roots:
            return _Run(there, 0.0, sum(kept.values()), (0.0, 0.0))
        return _Run(there, 0.0, sum(kept.values()), self._split(roots, ones, read))

    def _split(self, roots: list[Tensor], ones: list[Tensor], read: list[Tensor]) -> tuple[float, float]:
        """Run a backward in two halves, and return the seconds of each."""
        split: list[SplitBackward] = []

        # To find the paths is part of the first half, as in a stage.
        def first() -> None:
            split.append(SplitBackward(roots, ones, read))
            split[0].inputs()

        return self._timed(first), self._timed(lambda: split[0].weights())

    def _timed(self, work: Callable[[], None]) -> float:
        self._wait()
        begun = time.perf_counter()
        work()
        self._wait()
        return time.perf_counter() - begun

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
