"""Objective: the loss of a run, built-in or a user's own, and its mean over all ranks.

Where it sits: ``optimizers`` makes one before the first epoch; ``train.graph_engine`` and
``pipelining.chunk_engine`` ask it for the loss of their rows. Labels reach a user's loss as they were given;
a built-in loss converts labels itself where it needs another form.

The loss of a run is ``sum(weight * value) / sum(weight)`` over all training vertices of all ranks. There is
one value a row, or one for each entry of a row with several columns. The weight of a value is 1, times the
weight of its class and of its vertex if there are any; it is 0 where there is no label.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from kagome.components.task import rows_of
from kagome.errors import ConfigError, KagomeError, ModelError
from kagome.graph.structure.labels import Labels
from kagome.objective.loss_state import Moves, unmoved
from kagome.objective.loss_trials import (
    Tried,
    check_gradient,
    check_rows,
    check_shapes,
    copied,
    cure,
    first_line,
    itself,
    leaf_of,
    learning,
    lost_gradient,
    moved,
    near,
    no_gradient,
    pair,
    still,
)

Loss = Callable[..., Any]
"""``loss(out, y)``: a value a row, their sum, or ``(values, weights)``; further arguments by name."""

NONE: Final = -1
"""The class id that stands for "no label" unless a setting names another."""
OTHERS: Final = ("mse", "mae", "huber")
NOTHING: Final = 1e-6
"""Absolute value of a trial loss below which a sum cannot be told from a mean."""
LIMIT: Final = 10_000
"""Above this many classes, and more than vertices, labels are taken to be vertex ids or hashes."""


@dataclass(frozen=True)
class Target:
    """The labels and weights that a loss compares the output of some rows with.

    Args:
        y: Labels.
        weights: The weight of each value of a built-in loss.
        rows: Further arguments of a user's loss that have a row a vertex, by name.
        shared: Further arguments without a row a vertex, by name.

    Shapes:
        y ``[n, ...]``, weights ``[n]`` or ``[n, columns]``, rows ``[n, ...]``.
    """

    y: Tensor
    weights: Tensor | None = None
    rows: Mapping[str, Tensor] = field(default_factory=dict)
    shared: Mapping[str, Any] = field(default_factory=dict)

    def of(self, rows: Any) -> Target:
        """Return the target of some of the rows."""
        more = {name: value[rows] for name, value in self.rows.items()}
        return Target(self.y[rows], None if self.weights is None else self.weights[rows], more, self.shared)


class Scalar:
    """Whether a loss of one number is trained on as it is (``learned``), or is the sum of its rows.

    One number may be more than a sum only where one rank has all rows.
    """

    def __init__(self) -> None:
        self.learned = False


@dataclass(frozen=True)
class Objective:
    """The objective of a run: a loss, and how labels and weights enter it.

    Args:
        name: The name of a built-in loss; empty for a user's own.
        facts: The facts about the labels.
        loss: The user's own loss.
        ignore: The label that stands for "no label"; None if there is no such label.
        class_weight: One weight for each class; empty if classes count alike.
        weight: The attribute with one weight for each vertex, for a built-in loss.
        rows: The attribute of each further argument of a user's loss that has a row a vertex.
        shared: The attribute of each further argument without a row a vertex.
        pairs: Whether a user's loss returns weights with its values; None if it could not be tried yet.
        alone: Whether a user's loss is always given all rows at once; then a row's value may depend on
            others.
        scalar: How a user's loss of one number is trained on; known after the first check of real rows.
        trial: The value of a user's loss on made-up rows; None if it was not tried.
    """

    name: str
    facts: Labels
    loss: Loss | None = None
    ignore: int | None = None
    class_weight: tuple[float, ...] = ()
    weight: str | None = None
    rows: Mapping[str, str] = field(default_factory=dict)
    shared: Mapping[str, str] = field(default_factory=dict)
    pairs: bool | None = False
    alone: bool = False
    scalar: Scalar = field(default_factory=Scalar, compare=False)
    trial: float | None = None

    @property
    def uses(self) -> frozenset[str]:
        """Attributes of the data that the loss reads."""
        more = (*self.rows.values(), *self.shared.values())
        return frozenset({"y", *more, *([self.weight] if self.weight else [])})

    @property
    def outputs(self) -> int:
        """The number of output columns that the loss needs from a model."""
        return self.facts.outputs_for(self.name)

    @property
    def classified(self) -> bool:
        """Whether each label names one class by its id."""
        return self.facts.single and self.facts.task == "multiclass" and self.name not in OTHERS

    def target(self, inputs: Mapping[str, Any], rows: Tensor | slice) -> Target:
        """Return the labels and weights that the loss of some rows needs.

        Args:
            inputs: Attributes of own rows by name, and what all ranks share.
            rows: Indices of the rows, or a slice of all.
        """
        more = {name: inputs[attribute][rows] for name, attribute in self.rows.items()}
        shared = {name: inputs[attribute] for name, attribute in self.shared.items()}
        # A user's loss gets labels as they are and weighs its values itself.
        y = inputs["y"][rows]
        if not self.name:
            return Target(y, None, more, shared)
        weight = None if self.weight is None else inputs[self.weight][rows].reshape(y.size(0))
        return Target(y, self.weights(y, weight))

    # Which rows have a label ---------------------------------------------------------------------

    def there(self, y: Tensor) -> Tensor:
        """Return which entries of y are labels.

        Shapes:
            y ``[n, ...]``; result ``[n, columns]``, bool.
        """
        flat = y.reshape(y.size(0), self.facts.columns)
        found = torch.ones_like(flat, dtype=torch.bool)
        # NaN stands for "no label" in built-in losses; a user's loss may do anything with it.
        if self.name and y.is_floating_point():
            found = ~flat.isnan()
        if self.ignore is not None:
            found &= flat != self.ignore
        return found

    def labelled(self, y: Tensor) -> Tensor:
        """Return which rows have a label.

        Shapes:
            y ``[n, ...]``; result ``[n]``, bool.
        """
        there = self.there(y)
        # Shares of classes belong together, so a row with one missing share has no label. Columns of other
        # losses are labels of their own.
        soft = self.name == "cross_entropy" and not self.facts.single
        return there.all(1) if soft else there.any(1)

    # Values and weights --------------------------------------------------------------------------

    def weights(self, y: Tensor, weight: Tensor | None = None) -> Tensor:
        """Return the weight of each value of a built-in loss, which depends on labels only.

        Shapes:
            y ``[n, ...]``, weight ``[n]``; result ``[n]`` for cross entropy, else ``[n, columns]``.
        """
        # Cross entropy makes one value of a row, however many columns it has.
        by_row = self.name == "cross_entropy"
        found = (self.labelled(y) if by_row else self.there(y)).to(torch.float64)
        if self.class_weight and self.facts.single:
            table = torch.tensor(self.class_weight, dtype=torch.float64, device=found.device)
            # Soft labels are weighted within torch's cross_entropy, class by class.
            found = found * table[_ids(y, self.labelled(y))]
        if weight is not None:
            found = found * (weight.to(torch.float64) if by_row else weight.to(torch.float64)[:, None])
        return found

    def share(self, target: Target) -> float | None:
        """Return the sum of all weights of some rows; None if a user's loss returns it with its values."""
        if target.weights is not None:
            return float(target.weights.sum())
        # A user's loss without weights of its own counts each row once.
        return None if self.pairs is not False else float(target.y.size(0))

    def lost(self, out: Any, target: Target) -> tuple[Tensor, Tensor | None]:
        """Return the sum of weighted values, and the sum of weights if a user's loss returns weights.

        Args:
            out: The model's output for some rows.
            target: The target of the same rows.

        Raises:
            ConfigError: If the loss cannot be computed for them.
            ModelError: If the output does not fit a built-in loss.

        Shapes:
            out ``[n, C]`` or a nested structure of such tensors; the sum is a scalar.
        """
        if self.name:
            values = self._built_in(out, target)
            assert target.weights is not None
            return (values * target.weights.to(values.dtype)).sum(), None
        values, given = split(self._called(out, target))
        if given is None:
            # A mean over all rows becomes a sum here, because it is divided by their number later.
            return (values * target.y.size(0) if self.scalar.learned else row_sum(values)), None
        if given.requires_grad:
            raise ConfigError(
                "loss(out, y) to give (values, weights), with weights that depend on labels alone",
                "weights that depend on the model's output",
                hint="weights.detach(), of y alone",
            )
        # Weights may be [n] for values of [n, columns].
        wide = given.view(*given.shape, *[1] * (values.dim() - given.dim())).expand_as(values)
        return (values * wide.to(values.dtype)).sum(), wide.double().sum()

    def _built_in(self, out: Any, target: Target) -> Tensor:
        if not isinstance(out, Tensor):
            raise self._odd(out)
        if out.is_complex():
            raise ModelError(
                f"real numbers from the model for loss {self.name!r}",
                str(out.dtype).removeprefix("torch."),
                hint="out.real or out.abs() at the end of forward, or a loss of your own",
            )
        if self.name == "cross_entropy":
            return self._cross_entropy(out, target)
        return self._bce(out, target) if self.name == "bce" else self._distance(out, target)

    def _cross_entropy(self, out: Tensor, target: Target) -> Tensor:
        y, there = target.y, self.labelled(target.y)
        if not self.facts.single:
            if out.shape != y.shape:
                raise self._odd(out)
            # A row without a label has weight 0, but 0 times NaN is NaN, so its labels become 0 first.
            soft = torch.where(there[:, None], y, torch.zeros_like(y)).to(out.dtype)
            table = out.new_tensor(self.class_weight) if self.class_weight else None
            return F.cross_entropy(out, soft, table, reduction="none")
        ids = _ids(y, there)
        # Two classes and one column: a single logit, of class 1.
        if self.facts.classes <= 2 and (out.dim() == 1 or out.shape[1:] == (1,)):
            return F.binary_cross_entropy_with_logits(out.view(-1), ids.to(out.dtype), reduction="none")
        # More columns than classes are allowed: a class may have no label in this data.
        if out.dim() != 2 or out.size(1) < self.facts.classes:
            raise self._odd(out)
        return F.cross_entropy(out, ids, reduction="none")

    def _bce(self, out: Tensor, target: Target) -> Tensor:
        return F.binary_cross_entropy_with_logits(*self._aligned(out, target.y), reduction="none")

    def _distance(self, out: Tensor, target: Target) -> Tensor:
        functions: dict[str, Callable[..., Tensor]] = {
            "mse": F.mse_loss,
            "mae": F.l1_loss,
            "huber": F.huber_loss,
        }
        return functions[self.name](*self._aligned(out, target.y), reduction="none")

    def _aligned(self, out: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return output and labels with one column an entry; both are 0 where there is no label."""
        rows, columns = y.size(0), self.facts.columns
        # [n] and [n, 1] are one label a row; torch's losses would broadcast them to [n, n] without an error.
        if out.shape != y.shape and not (columns == 1 and out.shape[1:] in ((), (1,))):
            raise self._odd(out)
        flat = y.reshape(rows, columns)
        # where() on both sides: the weight of a missing label is 0, but the gradient of 0 * NaN is NaN too.
        there = self.there(y)
        kept = torch.where(there, flat, torch.zeros_like(flat)).to(out.dtype)
        shown = out.reshape(rows, columns)
        return torch.where(there, shown, torch.zeros_like(shown)), kept

    def _odd(self, out: Any) -> ModelError:
        """Return the error for an output that does not fit the labels."""
        of, columns = {"cross_entropy": "class", "bce": "label"}.get(self.name, "number"), self.outputs
        shape = f"an output of shape {list(out.shape)}" if isinstance(out, Tensor) else ""
        return ModelError(
            f"the model to give {columns} column{'s' * (columns != 1)}, one a {of}",
            shape or type(out).__name__,
            hint=f"out_channels={columns} in the last layer, or a loss of your own",
        )

    def _called(self, out: Any, target: Target) -> Any:
        assert self.loss is not None
        try:
            return self.loss(out, target.y, **target.rows, **target.shared)
        except KagomeError:
            raise
        except Exception as error:
            raise ConfigError(
                "loss(out, y) to run on the model's output and the labels as they were given",
                f"{type(error).__name__}: {first_line(error)}",
                where=pair(out, target.y),
                hint=cure(out, target.y, error),
            ) from error

    # Checks --------------------------------------------------------------------------------------

    def check(self, out: Any, target: Target, *, trains: bool = False, calls: str = "") -> None:
        """Refuse a loss that the mean over all ranks would change, and one that trains nothing.

        Args:
            out: The model's output for some rows.
            target: The target of the same rows.
            trains: Whether the output is trained on, so that it must have a gradient.
            calls: How the loss is called, if not once an epoch on every rank; else empty.

        Raises:
            ConfigError: If a user's loss gives more values than rows, cannot be computed or differentiated,
                or keeps state that cannot be put back. Also if it averages over its rows or mixes them,
                unless it is always given all rows at once.
            ModelError: If the output has no gradient.
        """
        with torch.enable_grad():
            if not self.name:
                self._check(out, target, trains=trains, calls=calls)
                return
            self._built_in(out, target)
            # A rank without training rows has an output of no rows, which tells nothing.
            if trains and target.y.size(0) and not learning(out):
                raise no_gradient(out)

    def tried(self) -> AbstractContextManager[Moves]:
        """Return a context for trial calls of the loss: state that the loss keeps is put back afterwards."""
        return unmoved(self.loss)

    def _check(self, out: Any, target: Target, *, trains: bool, calls: str) -> None:
        # The trials, on the first real rows. Each puts the loss's state and the generators back:
        #    all rows, twice      the same values, with a gradient by the output
        #    first third, rest    one number: their sum is the whole. A value a row: the same values in parts
        #    again, after others  state that moved does not depend on the rows seen
        count, where = target.y.size(0), pair(out, target.y)
        if not count:
            return
        # On one rank the loss may differentiate by the output itself, so it gets no copy.
        sample = out if self.alone else tree_map(leaf_of, out)
        found, fresh = self._first(sample, target, where)
        values, weights = found.values, found.weights
        if not found.learns and (trains or learning(sample)):
            raise no_gradient(out) if trains and not learning(out) else lost_gradient(values, where)
        # The output needs no gradient. A loss with parameters of its own may still learn.
        if trains and not learning(out) and not self._tried(tree_map(still, out), target).learns:
            raise no_gradient(out)
        # A single row cannot be cut in two.
        if count < 2:
            return
        if values.dim() == 0 and abs(float(values)) < NOTHING:
            # For values near 0 a sum and a mean look alike.
            sample = tree_map(moved, sample)
            values = self._tried(fresh(sample), target).values
        cut = count // 3 or 1
        first, rest = slice(0, cut), slice(cut, None)

        def of(rows: Any) -> Tensor:
            return self._tried(fresh(rows_of(sample, rows, count)), target.of(rows)).values

        # One number may be the sum over rows or their mean; values by row show which rows they depend on.
        if values.dim() == 0:
            self._check_sum(values, of, first, rest, count, where)
        else:
            check_shapes(values, weights, of(first), count, where)
            if not self.alone:
                check_rows(values, of(first), cut, count, where)
        # On several ranks each copy of the loss sees other rows, so its state would differ from rank to rank.
        if found.moved and not self.alone:
            some = fresh(rows_of(sample, first, count)), target.of(first)
            self._check_kept((fresh(sample), target), some, where, calls)

    def _first(self, sample: Any, target: Target, where: str) -> tuple[Tried, Callable[[Any], Any]]:
        """Try the loss for the first time; return the result and how to make further samples."""
        # A loss may write to its arguments, so every trial gets a copy if it can.
        fresh: Callable[[Any], Any] = copied
        try:
            found = self._tried(fresh(sample), target, by=sample, where=where)
        except ConfigError:
            if not self.alone:
                raise
            fresh = itself  # a copy would break a derivative of one part of the output by another
            found = self._tried(sample, target, by=sample, where=where)
        # The same rows again: other values come from state that could not be put back.
        again = self._tried(fresh(sample), target)
        if not near(found.values, again.values):
            raise ConfigError(
                "loss(out, y) to give the same of the same out and y when it is tried again",
                f"{float(found.values.double().sum()):.6g} and then "
                f"{float(again.values.double().sum()):.6g}: it keeps state that cannot be put back",
                where=where,
                hint="keep it in an attribute of the loss: a number, a list or a tensor",
            )
        return found, fresh

    def _tried(self, out: Any, target: Target, *, by: Any = None, where: str = "") -> Tried:
        """Call the loss once and put its state back; with ``by``, try its gradient by those tensors."""
        with self.tried() as moves:
            values, weights = split(self._called(out, target))
            if by is not None:
                check_gradient(values, by, where)
        return Tried(values.detach(), weights, values.requires_grad, moves.moved)

    def _check_kept(
        self, whole: tuple[Any, Target], some: tuple[Any, Target], where: str, calls: str
    ) -> None:
        """Check that state which a loss keeps between calls does not depend on the rows of one rank."""

        def after(*before: tuple[Any, Target]) -> Tensor:
            # Calls in a row without putting state back in between; afterwards it is put back as a whole.
            with self.tried():
                for each in before:
                    self._called(copied(each[0]), each[1])
                return split(self._called(copied(some[0]), some[1]))[0].detach()

        if not near(after(whole), after(some)):
            raise ConfigError(
                "what loss(out, y) keeps from call to call to be the same on all ranks",
                "a state that depends on the rows that it was given, and changes what it gives later",
                where=where,
                hint="train on one rank, or keep what does not depend on rows: the number of calls",
            )
        # Stages and chunks call the loss several times an epoch: a
        # schedule that counts calls would run too fast.
        if calls and not near(after(), after(some)):
            raise ConfigError(
                "one call an epoch, on all ranks, of a loss(out, y) that changes from call to call",
                f"a loss that is called {calls}",
                where=where,
                hint="no pipeline and no chunks, which leave one call an epoch on each rank",
            )

    def _check_sum(
        self, whole: Tensor, of: Callable[[Any], Tensor], first: slice, rest: slice, count: int, where: str
    ) -> None:
        parts = of(first) + of(rest)
        if torch.allclose(whole, parts, rtol=1e-4, equal_nan=True):
            return
        # One rank has all rows at once, so a mean is right there, and it is trained on as it is.
        if self.alone:
            self.scalar.learned = True
            return
        # A plain mean is the mean of the values of single rows; a weighted one (class weights) is not. The
        # hint depends on it. 64 rows bound the time.
        each = torch.stack([of(slice(row, row + 1)).double() for row in range(min(count, 64))]).mean()
        plain_mean = count <= 64 and torch.allclose(whole.double(), each, rtol=1e-4)
        way = (
            f'{_module(self.loss)}(reduction="none"); Kagome takes the mean over all training vertices'
            if plain_mean
            else 'reduction="none" for a mean over all training vertices; for PyTorch\'s weighted mean '
            "train.class_weight, or return (values, weights)"
        )
        raise ConfigError(
            "loss(out, y) to give a value a row, or their sum",
            f"{float(whole.detach()):.6g} for {count} rows, {float(parts.detach()):.6g} for {first.stop} and "
            f"the other {count - first.stop}: it averages over the rows of one rank",
            where=where,
            hint=way,
        )


def _module(loss: Loss | None) -> str:
    """Return the class name of a loss module, for the call that a hint suggests."""
    return type(loss).__name__ if isinstance(loss, nn.Module) else "CrossEntropyLoss"


def row_sum(value: Tensor) -> Tensor:
    """Return the sum over rows of a loss's values; further axes are averaged."""
    return value if value.dim() == 0 else value.flatten(1).mean(1).sum() if value.dim() > 1 else value.sum()


def _ids(y: Tensor, there: Tensor) -> Tensor:
    """Return class ids, 0 where there is no label."""
    flat = y.reshape(y.size(0))
    return torch.where(there, flat, torch.zeros_like(flat)).long()


def split(found: Any) -> tuple[Tensor, Tensor | None]:
    """Split the result of a user's loss into values and weights."""
    if isinstance(found, tuple) and len(found) == 2:
        found, weights = found
    else:
        weights = None
    if isinstance(found, Tensor) and (weights is None or (isinstance(weights, Tensor) and found.dim() > 0)):
        return found, weights
    raise ConfigError(
        "loss(out, y) to give a tensor with a value a row, or (values, weights)",
        type(found).__name__ + ("" if weights is None else f" and {type(weights).__name__}"),
        hint='reduction="none"',
    )
