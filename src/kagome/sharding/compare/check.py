"""Check: the public function ``kagome.check``, of a model and a graph, or of a sharded model and a loss.

Where it sits: the public face. ``verify.check`` splits a sample of a graph in one process;
``sharding.comparison`` runs a sharded model and its user's loss on the ranks that there are.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch_geometric.data import Data, HeteroData

from kagome.components.rank_zero import by_first
from kagome.components.wrappers import as_written
from kagome.config.fields import check_kind
from kagome.errors import CheckError, ConfigError, KagomeError
from kagome.graph.partition.sets_partition import Part
from kagome.sharding.compare.comparison import Loss, Measured, Sample, run_split, run_whole
from kagome.sharding.module import ShardedModel
from kagome.sharding.pipelined import PipelinedModel
from kagome.sharding.rows.row_sets import RowSet
from kagome.verify import check as of_sample
from kagome.verify.check import TOLERANCE, CheckResult, ComparedTensor, error_of, largest


@overload
def check(
    model: ShardedModel,
    *inputs: Any,
    loss: Loss,
    second: bool = ...,
    dtype: torch.dtype = ...,
    **named: Any,
) -> CheckResult: ...
@overload
def check(
    model: nn.Module,
    data: Data | HeteroData | Part,
    /,
    *,
    parts: int = ...,
    vertices: int = ...,
    seed: int = ...,
    tensor: int = ...,
    fast: bool = ...,
    partial_sums: bool = ...,
) -> CheckResult: ...
@as_written
def check(model: nn.Module, *inputs: Any, **settings: Any) -> CheckResult:
    """Run a model split and whole, and compare everything.

    ``kagome.check(model, data)`` takes a sample of a graph, splits it in this process, and compares the
    outputs and gradients of all layers. ``kagome.check(net, *inputs, loss=...)`` takes what
    :func:`kagome.shard` returned and compares your loop with the model on the whole graph: outputs, the loss,
    the gradient of every parameter and of inputs that require grad. All ranks call it alike. It runs copies
    of the model, so that weights, gradients and buffers stay as they are.

    Args:
        model: The user's module, or a sharded model.
        inputs: Of a module the graph: a ``Data``, a ``HeteroData`` with labels, or a rank's part. Of a
            sharded model what the model takes: whole inputs, all rows of the graph, the same on all ranks.
        settings: Of a module ``parts=3``, the ranks of the split; ``vertices=200``, those of the sample;
            ``seed=0``; ``tensor=1``, the ranks that slice features together; ``fast=True``, whether kernels
            reduce messages; ``partial_sums=False``, whether parts send partial sums. Of a sharded model
            ``loss``, a function ``loss(net, out)`` of one number, which is called with the sharded model and
            own rows, and with the whole model, as a net of one rank, and all rows; ``second=False``, whether
            gradients of the gradients of inputs are compared; ``dtype=torch.float64``, in which both
            run; and inputs of the model by name.

    Returns:
        The result. Of a module, see :meth:`CheckResult.raise_if_different`; of a sharded model all is equal.

    Raises:
        CheckError: If a sharded model differs from the whole one, with what differs most.
        ModelError: If the model is not a module, or fails on the whole graph.
        DataError: If the graph has a fault.
        ConfigError: If a setting has the wrong type, is too small, or does not fit the others.

    Cost:
        Of a sharded model: two copies of the model on rank 0, one of which runs on the whole graph, and one
        on the other ranks.

    Example:
        >>> import kagome
        >>> from torch_geometric.nn import GAT, GCN
        >>> data = kagome.load("sbm:vertices=60,degree=4,features=6,classes=3,communities=3")
        >>> result = kagome.check(GAT(6, 8, num_layers=2, out_channels=3), data, parts=2)
        >>> result.first is None  # no tensor differs
        True
        >>> def loss(net, out):
        ...     return net.mean((out - net.place(data.x[:, :3])) ** 2)
        >>> with kagome.shard(GCN(6, 8, num_layers=2, out_channels=3), data) as net:
        ...     result = kagome.check(net, data.x, data.edge_index, loss=loss)
        >>> result.first is None
        True
    """
    if isinstance(model, PipelinedModel):
        raise ConfigError(
            "a model that is not in stages or chunks",
            "one of kagome.shard with a pipe axis or chunks",
            where="kagome.check(net, ...)",
            hint="kagome.check(model, data), or a net of kagome.shard with graph= alone",
        )
    if not isinstance(model, ShardedModel):
        return of_sample.check(model, *inputs, **settings)
    return _of_sharded(model, inputs, **settings)


def _of_sharded(
    net: ShardedModel,
    args: tuple[Any, ...],
    *,
    loss: Loss | None = None,
    second: bool = False,
    dtype: torch.dtype = torch.float64,
    **named: Any,
) -> CheckResult:
    begun = time.perf_counter()
    check_kind("second", second, bool)
    if not callable(loss):
        raise ConfigError(
            "a loss, a function of the net and its output",
            repr(loss),
            where="kagome.check(net, ..., loss=...)",
            hint="loss=lambda net, out: net.mean((out - net.place(y)) ** 2)",
        )
    if dtype not in TOLERANCE:
        raise ConfigError("dtype to be torch.float64 or torch.float32", repr(dtype))
    net.refuse_unusable()
    # A user may give the rows that `net.inputs` has; rank 0 needs those of the whole graph.
    args = tuple(_whole(net, value) for value in args)
    named = {name: _whole(net, value) for name, value in named.items()}
    sample = Sample(args, named, loss, second, dtype, net.step)
    # Rank 0 alone runs the whole graph. Its failure there is the user's, and ends all ranks with one error.
    channel, found = net._mesh.graph, _Whole(net._tables.first_rank_whole("check"))
    shapes = by_first(channel, lambda: found.run(net, sample), "check: the model on the whole graph")
    split = _run_split(net, sample)
    # The losses of all ranks, and not of rank 0 alone: a mean over own rows differs from rank to rank.
    losses: Any = channel.gather_objects(float(split.loss), "check: losses")
    joined = {name: _joined(net, name, value, shapes) for name, value in split.outputs.items()}

    def compare() -> CheckResult:
        assert found.measured is not None
        return _Compared(found.measured, split, joined, losses, dtype).result(
            net, time.perf_counter() - begun
        )

    return by_first(channel, compare, "check: comparison", [CheckResult, ComparedTensor])


def _whole(net: ShardedModel, value: Any) -> Any:
    """Return what the whole graph has in place of one of ``net.inputs``; any other input as it is."""
    given = net._given.to_dict() if isinstance(net._given, Data) else {}
    name = next((name for name, mine in net.inputs.items() if value is mine), "")
    return given.get(name, value)


@dataclass
class _Whole:
    """What rank 0 measured on the whole graph.

    Args:
        tables: All rows of cut tables, on rank 0.
    """

    tables: Mapping[str, Tensor]
    measured: Measured | None = None

    def run(self, net: ShardedModel, sample: Sample) -> Any:
        """Run it; return the shapes of its outputs."""
        self.measured = run_whole(net, sample, self.tables)
        return {name: list(value.shape) for name, value in self.measured.outputs.items()}


def _run_split(net: ShardedModel, sample: Sample) -> Measured:
    """Run the split side; a failure of the user's code there, which did not fail on the whole, is a fault.

    Raises:
        CheckError: For an error of the user's code.
    """
    try:
        return run_split(net, sample)
    except KagomeError as error:
        net._mesh.graph.report_error(error)
        raise
    # The same code has just run on the whole graph, so own rows are what it cannot take.
    except Exception as error:
        fault = CheckError(
            "the loss to run on own rows as it does on all rows",
            f"{type(error).__name__} on own rows alone: {error}",
            where=f"rank {net.rank}",
            hint="net.read(out, ids) or net.pairs(out, index) for ids of the whole graph, which do not "
            "number own rows; net.place(y) for the rows of a target",
        )
        net._mesh.graph.report_error(fault)
        raise fault from error


def _joined(net: ShardedModel, name: str, value: Tensor, shapes: dict[str, list[int]]) -> Tensor | list[Any]:
    """Return all rows of an output on rank 0, or the shapes of all ranks if they do not fit. All call it."""
    whole = shapes.get(name)
    mine: list[Any] = [
        [rows.name, axis]
        for axis in range(value.dim())
        for rows in net._rows.values()
        if _fits(value, whole, rows, axis)
    ]
    told: Any = net._mesh.graph.gather_objects([mine, list(value.shape)], "check: rows of outputs")
    # By counts alone an axis may fit by chance on one rank; it is one of rows if it fits on all.
    common = [each for each in mine if all(each in theirs for theirs, _ in told)]
    if list(value.shape) == whole and (not common or net.ranks == 1):
        return value
    if not common:
        return [shape for _, shape in told]
    rows, axis = common[0]
    found = net.gather(value, rows, axis=axis)
    return value if found is None else found


def _fits(value: Tensor, whole: list[int] | None, rows: RowSet, axis: int) -> bool:
    if whole is None or len(whole) != value.dim():
        return False
    rest = [size for place, size in enumerate(value.shape) if place != axis]
    return (
        value.size(axis) == rows.count
        and whole[axis] == rows.size
        and rest == [size for place, size in enumerate(whole) if place != axis]
    )


@dataclass(frozen=True)
class _Compared:
    """Both sides on rank 0."""

    whole: Measured
    split: Measured
    joined: dict[str, Tensor | list[Any]]
    losses: list[float]
    dtype: torch.dtype

    def result(self, net: ShardedModel, seconds: float) -> CheckResult:
        """Compare in the order of a step, and name what differs most in the first stage that differs.

        Raises:
            CheckError: If something differs.
        """
        # A wrong output makes everything after it wrong: the first stage that differs is the one to be told.
        rows = self._stage("output", self.whole.outputs, self._outputs())
        # Before the loss itself, which rank 0 may have right by chance.
        self._refuse_uneven_losses()
        rows += self._stage("loss", {"loss": self.whole.loss}, {"loss": self.split.loss})
        rows += self._stage("gradient", self.whole.gradients, self.split.gradients)
        rows += self._stage("second derivative", self.whole.seconds, self.split.seconds)
        return CheckResult(
            first=None,
            rows=tuple(rows),
            parts=net.ranks,
            tensor=net._parallel.options.tensor,
            vertices=sum(each.size for each in net._rows.vertices),
            edges=sum(each.size for each in net._rows.values() if each.ends is not None),
            dtype=str(self.dtype).removeprefix("torch."),
            seconds=seconds,
        )

    def _outputs(self) -> dict[str, Tensor]:
        for name, value in self.joined.items():
            if isinstance(value, list):
                expected = self.whole.outputs.get(name)
                raise CheckError(
                    f"{name} with own rows of what it has on the whole graph"
                    + ("" if expected is None else f", shape {list(expected.shape)}"),
                    f"shapes {', '.join(map(str, value))} on the ranks",
                    where="kagome.check",
                    hint="an output with a row a vertex or edge, or the same on all ranks",
                )
        return {name: value for name, value in self.joined.items() if isinstance(value, Tensor)}

    def _refuse_uneven_losses(self) -> None:
        # 1e-30 keeps a loss of 0 on all ranks from dividing by it.
        base = max(abs(float(self.whole.loss)), *map(abs, self.losses), 1e-30)
        if max(self.losses) - min(self.losses) > TOLERANCE[self.dtype] * base:
            raise CheckError(
                f"the loss of the whole graph on every rank, {float(self.whole.loss):.6g}",
                f"{', '.join(f'{each:.6g}' for each in self.losses)} on the ranks, "
                f"whose mean is {sum(self.losses) / len(self.losses):.6g}",
                where="kagome.check, loss",
                hint="net.mean(values) in place of values.mean(): it takes the rows of all ranks",
            )

    def _stage(self, kind: str, whole: dict[str, Tensor], split: dict[str, Tensor]) -> list[ComparedTensor]:
        # A gradient that is zero but for rounding is compared with the largest of its stage, not with itself.
        scale = max((largest(value) for value in whole.values()), default=0.0)
        alone = kind in ("output", "loss")
        rows, faults = [], []
        for name in dict.fromkeys([*whole, *split]):
            one = whole.get(name)
            other = split.get(name)
            like = one if one is not None else other
            assert like is not None
            # A parameter without a gradient on one side has one of zeros on the other, or differs.
            one, other = (torch.zeros_like(like) if each is None else each for each in (one, other))
            gap = float("inf")
            if one.shape == other.shape:
                gap = error_of(other.double().cpu(), one.double().cpu(), None if alone else scale)
            rows.append(ComparedTensor(name.removeprefix(f"{kind} of "), kind, gap))
            # Not `gap > ...`: a gap that is NaN is a fault.
            if not gap <= TOLERANCE[self.dtype]:
                faults.append((gap, name, one, other))
        if faults:
            raise self._fault(kind, faults)
        return rows

    def _fault(self, kind: str, faults: list[tuple[float, str, Tensor, Tensor]]) -> CheckError:
        gap, name, one, other = max(faults, key=lambda fault: fault[0])
        if one.shape != other.shape:
            wanted, got = f"shape {list(one.shape)}", f"shape {list(other.shape)}"
        else:
            place = int((other - one).abs().nan_to_num(torch.inf).argmax())
            at = [int(each) for each in torch.unravel_index(torch.tensor(place), one.shape)]
            entry = f"{at}" if at else ""
            wanted = f"{name}{entry} to be {float(one.flatten()[place]):.6g}, as on the whole graph"
            got = f"{float(other.flatten()[place]):.6g} on {len(self.losses)} ranks"
            # Four times a gradient on four ranks tells a user more than its largest difference.
            factor = _factor(one, other)
            got += (
                f", {factor:.4g} times that in all entries" if factor is not None and one.numel() > 1 else ""
            )
            got += (
                f"; the difference is {gap:.1e} of the largest entry, the most of {len(faults)} that differ"
            )
        return CheckError(wanted, got, where=f"kagome.check, {kind}", hint=self._hint(kind))

    def _hint(self, kind: str) -> str:
        own = sorted(self.whole.called)
        called = f"torch.distributed.{own[0]} is called by the model or the loss; " if own else ""
        if kind == "output":
            return called + (
                "ids of the whole graph do not number own rows, and a mean or sum by hand takes own rows "
                "alone: edges of the graph, net.read(rows, ids), net.place(ids)"
            )
        if kind == "loss":
            return (
                called + "net.mean, net.sum and net.max have the rows of all ranks, without a sum of your own"
            )
        return called + (
            "a collective of torch.distributed has no gradient, or one rank's share: net.mean, net.sum, "
            "net.read and net.pairs have one"
        )


def _factor(wanted: Tensor, got: Tensor) -> float | None:
    """Return the number by which all entries are multiplied, if there is one."""
    one, other = wanted.double().flatten(), got.double().flatten()
    square = float(one @ one)
    if not square > 0 or not bool(torch.isfinite(other).all()):
        return None
    factor = float(one @ other) / square
    rest = float((other - factor * one).abs().max())
    return factor if rest <= 1e-8 * float(one.abs().max()) else None
