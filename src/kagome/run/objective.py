"""Objective: what a run learns - a loss by name or a user's own, and the mean that it is over all ranks.

Where it sits: ``learning`` makes one before the first epoch; ``engine`` and ``pipeline`` ask it for the loss
of their rows. Labels reach a user's loss as they were given; what a built-in loss needs otherwise it turns
itself.

The loss of a run is ``sum(weight * value) / sum(weight)`` over all training vertices of all ranks. A value
is of a row, or of an entry of a row with several columns. Its weight is 1, but for: 0 where there is no
label, the weight of its class, the weight of its vertex.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from kagome.errors import ConfigError, KagomeError, ModelError
from kagome.graph.labels import Labels
from kagome.run.stateful import unmoved
from kagome.run.task import rows_of

Loss = Callable[..., Any]
"""``loss(out, y)``: a value a row, their sum, or ``(values, weights)``; further arguments by name."""

NONE: Final = -1
"""What stands for "no label" among class ids, where nothing is said."""
OTHERS: Final = ("mse", "mae", "huber")
NOTHING: Final = 1e-6
"""A loss of one number below this says nothing of how it comes about."""
LIMIT: Final = 10_000
"""More classes than this, and than vertices, are vertex ids or hashes taken for labels."""


@dataclass(frozen=True)
class Target:
    """What a loss is compared with: of some rows.

    Args:
        y: Labels.
        weights: The weight of each value of a built-in loss.
        rows: Further arguments of a user's loss that have a row a vertex, by name.
        shared: Those that have not.

    Shapes:
        y ``[n, ...]``, weights ``[n]`` or ``[n, columns]``, rows ``[n, ...]``.
    """

    y: Tensor
    weights: Tensor | None = None
    rows: Mapping[str, Tensor] = field(default_factory=dict)
    shared: Mapping[str, Any] = field(default_factory=dict)

    def of(self, rows: Any) -> Target:
        """The same of some of the rows."""
        more = {name: value[rows] for name, value in self.rows.items()}
        return Target(self.y[rows], None if self.weights is None else self.weights[rows], more, self.shared)


class Scalar:
    """What a loss of one number is: the sum of its rows, or, where one rank has them all, what is learned."""

    def __init__(self) -> None:
        self.learned = False


@dataclass(frozen=True)
class Objective:
    """What a run learns.

    Args:
        name: Of a built-in loss; empty for a user's own.
        loss: The user's own.
        facts: What the labels hold.
        ignore: The label that stands for none; None where none does.
        class_weight: A weight a class; empty for none.
        weight: The attribute that holds a weight a vertex, for a built-in loss.
        rows: The attribute of each further argument of a user's loss that has a row a vertex.
        shared: The attribute of each that has not.
        trial: What a user's loss gave of made-up rows; None where it was not tried.
        pairs: Whether a user's loss gives weights beside its values; None where it could not be tried yet.
        alone: Whether a user's loss is always given all rows at once: then it may look from row to row.
        scalar: What the user's loss is if it gives one number; known after the first check of real rows.
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
        """Columns that a model must give."""
        return self.facts.outputs_for(self.name)

    @property
    def classified(self) -> bool:
        """Whether each label names one class by its id."""
        return self.facts.single and self.facts.task == "multiclass" and self.name not in OTHERS

    def target(self, inputs: Mapping[str, Any], rows: Tensor | slice) -> Target:
        """What the loss of some rows is compared with.

        Args:
            inputs: Attributes of own rows by name, and what all ranks share.
            rows: Places of the rows, or a slice of all.
        """
        more = {name: inputs[attribute][rows] for name, attribute in self.rows.items()}
        shared = {name: inputs[attribute] for name, attribute in self.shared.items()}
        y = inputs["y"][rows]
        if not self.name:
            return Target(y, None, more, shared)
        weight = None if self.weight is None else inputs[self.weight][rows].reshape(y.size(0))
        return Target(y, self.weights(y, weight))

    # Which rows have a label ---------------------------------------------------------------------

    def there(self, y: Tensor) -> Tensor:
        """Which entries of y are labels.

        Shapes:
            y ``[n, ...]``; result ``[n, columns]``, bool.
        """
        flat = y.reshape(y.size(0), self.facts.columns)
        found = torch.ones_like(flat, dtype=torch.bool)
        if self.name and y.is_floating_point():
            found = ~flat.isnan()
        if self.ignore is not None:
            found &= flat != self.ignore
        return found

    def labelled(self, y: Tensor) -> Tensor:
        """Which rows have a label.

        Shapes:
            y ``[n, ...]``; result ``[n]``, bool.
        """
        there = self.there(y)
        soft = self.name == "cross_entropy" and not self.facts.single
        return there.all(1) if soft else there.any(1)

    # Values and weights --------------------------------------------------------------------------

    def weights(self, y: Tensor, weight: Tensor | None = None) -> Tensor:
        """The weight of each value of a built-in loss: labels alone decide it.

        Shapes:
            y ``[n, ...]``, weight ``[n]``; result ``[n]`` for cross entropy, else ``[n, columns]``.
        """
        by_row = self.name == "cross_entropy"
        found = (self.labelled(y) if by_row else self.there(y)).to(torch.float64)
        if self.class_weight and self.facts.single:
            table = torch.tensor(self.class_weight, dtype=torch.float64, device=found.device)
            found = found * table[_ids(y, self.labelled(y))]
        if weight is not None:
            found = found * (weight.to(torch.float64) if by_row else weight.to(torch.float64)[:, None])
        return found

    def share(self, target: Target) -> float | None:
        """The sum of all weights of some rows; None where a user's loss says it with its values."""
        if target.weights is not None:
            return float(target.weights.sum())
        return None if self.pairs is not False else float(target.y.size(0))

    def lost(self, out: Any, target: Target) -> tuple[Tensor, Tensor | None]:
        """The sum of weighted values; and the sum of weights, if a user's loss says it.

        Args:
            out: The model's output for some rows.
            target: Of the same rows.

        Raises:
            ConfigError: If the loss cannot be computed of them.
            ModelError: If the output does not fit a built-in loss.

        Shapes:
            out ``[n, C]`` or a nest of such; the sum is a scalar.
        """
        if self.name:
            values = self._built_in(out, target)
            assert target.weights is not None
            return (values * target.weights.to(values.dtype)).sum(), None
        values, given = split(self._called(out, target))
        if given is None:
            # A mean of all rows: as a sum it is divided by their number again.
            return (values * target.y.size(0) if self.scalar.learned else row_sum(values)), None
        if given.requires_grad:
            raise ConfigError(
                "loss(out, y) gives (values, weights), and labels alone decide the weights",
                "the weights depend on the model's output",
                hint="weights.detach(), of y alone",
            )
        wide = given.view(*given.shape, *[1] * (values.dim() - given.dim())).expand_as(values)
        return (values * wide.to(values.dtype)).sum(), wide.double().sum()

    def _built_in(self, out: Any, target: Target) -> Tensor:
        if not isinstance(out, Tensor):
            raise self._odd(out)
        if out.is_complex():
            raise ModelError(
                f"loss {self.name!r} takes real numbers",
                f"the model gave {str(out.dtype).removeprefix('torch.')}",
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
            soft = torch.where(there[:, None], y, torch.zeros_like(y)).to(out.dtype)
            table = out.new_tensor(self.class_weight) if self.class_weight else None
            return F.cross_entropy(out, soft, table, reduction="none")
        ids = _ids(y, there)
        if self.facts.classes <= 2 and (out.dim() == 1 or out.shape[1:] == (1,)):
            return F.binary_cross_entropy_with_logits(out.view(-1), ids.to(out.dtype), reduction="none")
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
        """Output and labels with a column an entry; 0 where there is no label."""
        rows, columns = y.size(0), self.facts.columns
        if out.shape != y.shape and not (columns == 1 and out.shape[1:] in ((), (1,))):
            raise self._odd(out)
        flat = y.reshape(rows, columns)
        there = self.there(y)
        kept = torch.where(there, flat, torch.zeros_like(flat)).to(out.dtype)
        shown = out.reshape(rows, columns)
        return torch.where(there, shown, torch.zeros_like(shown)), kept

    def _odd(self, out: Any) -> ModelError:
        """The error for an output that does not fit the labels."""
        of, columns = {"cross_entropy": "class", "bce": "label"}.get(self.name, "number"), self.outputs
        shape = f"its output has the shape {list(out.shape)}" if isinstance(out, Tensor) else ""
        return ModelError(
            f"the model gives {columns} column{'s' * (columns != 1)}, one a {of}",
            shape or f"it gave {type(out).__name__}",
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
                "loss(out, y) is computed of the model's output and the labels as they were given",
                f"it raised {type(error).__name__}: {_first_line(error)}",
                where=_pair(out, target.y),
                hint=_cure(out, target.y, error),
            ) from error

    # Checks --------------------------------------------------------------------------------------

    def check(self, out: Any, target: Target) -> None:
        """Refuse a loss that the mean over all ranks would change.

        Args:
            out: The model's output for some rows.
            target: Of the same rows.

        Raises:
            ConfigError: If a user's loss gives more values than rows, or cannot be computed or
                differentiated; and, but for one that is given all rows at once, if it averages over its rows
                or mixes them.
        """
        with self.tried():
            self._check(out, target)

    def tried(self) -> AbstractContextManager[None]:
        """Around calls of the loss that train nothing: what it keeps of each call stays as it is."""
        return unmoved(self.loss)

    def _check(self, out: Any, target: Target) -> None:
        count = target.y.size(0)
        # Alone the loss may differentiate what forward kept: by the output as it is.
        sample = out if self.alone else tree_map(_leaf, out)
        if self.name:
            self._built_in(sample, target)
            return
        if count < 2:
            return
        values, weights = split(self._called(sample, target))
        if values.dim() == 0 and abs(float(values.detach())) < NOTHING:
            # A sum and a mean of nothing look alike.
            sample = tree_map(_moved, sample)
            values, weights = split(self._called(sample, target))
        where = _pair(out, target.y)
        cut = count // 3 or 1
        first, rest = slice(0, cut), slice(cut, None)

        def of(rows: Any) -> Tensor:
            return split(self._called(rows_of(sample, rows, count), target.of(rows)))[0]

        if values.dim() == 0:
            self._check_sum(values, of, first, rest, count, where)
        else:
            _check_shapes(values, weights, of(first), count, where)
            if not self.alone:
                _check_rows(values, of(first), cut, count, where)
        _check_gradient(values, sample, where)

    def _check_sum(
        self, whole: Tensor, of: Callable[[Any], Tensor], first: slice, rest: slice, count: int, where: str
    ) -> None:
        parts = of(first) + of(rest)
        if torch.allclose(whole, parts, rtol=1e-4, equal_nan=True):
            return
        if self.alone:
            self.scalar.learned = True
            return
        each = torch.stack([of(slice(row, row + 1)).double() for row in range(min(count, 64))]).mean()
        plain_mean = count <= 64 and torch.allclose(whole.double(), each, rtol=1e-4)
        way = (
            f'{_module(self.loss)}(reduction="none"); Kagome takes the mean over all training vertices'
            if plain_mean
            else 'reduction="none" for a mean over all training vertices; for PyTorch\'s weighted mean '
            "train.class_weight, or return (values, weights)"
        )
        raise ConfigError(
            "loss(out, y) gives a value a row, or their sum",
            f"the loss of {count} rows is {float(whole.detach()):.6g}, that of {first.stop} and the other "
            f"{count - first.stop} is {float(parts.detach()):.6g}: it averages over the rows of one rank",
            where=where,
            hint=way,
        )


def _module(loss: Loss | None) -> str:
    """The class of a loss that is a module, to call it by in a hint."""
    return type(loss).__name__ if isinstance(loss, nn.Module) else "CrossEntropyLoss"


def _check_shapes(values: Tensor, weights: Tensor | None, part: Tensor, count: int, where: str) -> None:
    if values.size(0) != count or values.shape[1:] != part.shape[1:]:
        found = (
            f"it gave {values.size(0)}" if values.dim() == 1 else f"it gave the shape {list(values.shape)}"
        )
        raise ConfigError(
            f"loss(out, y) gives a value a row: {count}",
            found,
            where=where,
            hint="out and y of one shape: out.squeeze(1), or y.unsqueeze(1)"
            if values.numel() > count
            else 'reduction="none"',
        )
    if weights is not None and (
        weights.dim() > values.dim() or weights.shape != values.shape[: weights.dim()]
    ):
        raise ConfigError(
            f"loss(out, y) gives (values, weights) of as many rows: {list(values.shape)}",
            f"the weights have the shape {list(weights.shape)}",
            where=where,
        )


def _check_rows(values: Tensor, part: Tensor, cut: int, count: int, where: str) -> None:
    if not torch.allclose(values[:cut].double(), part.double(), rtol=1e-4, atol=1e-6, equal_nan=True):
        raise ConfigError(
            "loss(out, y) gives each row a value of its own",
            f"the values of the first {cut} of {count} rows change when the others are left out: it looks at "
            "all rows of one rank",
            where=where,
            hint='reduction="none", and no mean or norm over rows inside the loss',
        )


def _check_gradient(values: Tensor, sample: Any, where: str) -> None:
    leaves = [leaf for leaf in tree_leaves(sample) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not leaves or not values.requires_grad:
        return
    try:
        torch.autograd.grad(values.sum(), leaves, allow_unused=True, retain_graph=True)
    except RuntimeError as error:
        raise ConfigError(
            "loss(out, y) can be differentiated by the model's output",
            f"it raised {type(error).__name__}: {_first_line(error)}",
            where=where,
            hint="y.to(out.dtype) in the loss",
        ) from error


def row_sum(value: Tensor) -> Tensor:
    """The sum over rows of what a loss gave; further axes are averaged."""
    return value if value.dim() == 0 else value.flatten(1).mean(1).sum() if value.dim() > 1 else value.sum()


def _ids(y: Tensor, there: Tensor) -> Tensor:
    """Class ids, 0 where there is no label."""
    flat = y.reshape(y.size(0))
    return torch.where(there, flat, torch.zeros_like(flat)).long()


def split(found: Any) -> tuple[Tensor, Tensor | None]:
    """What a user's loss gave, as values and weights."""
    if isinstance(found, tuple) and len(found) == 2:
        found, weights = found
    else:
        weights = None
    if isinstance(found, Tensor) and (weights is None or (isinstance(weights, Tensor) and found.dim() > 0)):
        return found, weights
    raise ConfigError(
        "loss(out, y) gives a tensor with a value a row, or (values, weights)",
        f"it gave {type(found).__name__}" + ("" if weights is None else f" and {type(weights).__name__}"),
        hint='reduction="none"',
    )


def _leaf(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    leaf = value.detach()
    return leaf.clone().requires_grad_() if leaf.is_floating_point() else leaf


def _moved(value: Any) -> Any:
    """Another output, as far from this one as numbers of ordinary size are."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    steps = torch.linspace(0.5, 1.5, value.numel(), dtype=value.dtype, device=value.device)
    return value + steps.view(value.shape)


def _pair(out: Any, y: Tensor) -> str:
    shown = ", ".join(_form(leaf) for leaf in tree_leaves(out) if isinstance(leaf, Tensor))
    return f"out {shown}, y {_form(y)}"


def _form(value: Tensor) -> str:
    return f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}"


def _first_line(error: Exception) -> str:
    return (str(error).strip().split("\n") or [""])[0]


def _cure(out: Any, y: Tensor, error: Exception) -> str:
    text = str(error)
    if "differentiated Tensor" in text or "does not require grad" in text:
        return "take derivatives in forward, and return them beside the output; or train on one rank"
    if isinstance(out, Tensor) and out.dim() != y.dim():
        return "out and y of the shapes that the loss takes: y.squeeze(1), out.squeeze(1)"
    if any(word in text for word in ("dtype", "Long", "Float", "Double", "Int", "Char", "type")):
        return "y in the type that the loss takes: y.long(), y.to(out.dtype)"
    return "compute it once by hand of tensors of these shapes"
