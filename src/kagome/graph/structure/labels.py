"""Labels: facts about y that every rank knows, from which losses and metrics are chosen.

Where it sits: ``validate`` computes them from the whole graph, ``graph.partition.store`` keeps them with a
partition, and ``objective.objective`` chooses by them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import torch
from torch import Tensor

from kagome.errors import DataError

Task = Literal["multiclass", "multilabel", "regression"]
_SERVED: Final = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
)
"""Label types that are accepted; PyTorch cannot compute with its other types."""


@dataclass(frozen=True)
class Labels:
    """Facts about the labels y. NaN entries are left out of every fact except ``missing``.

    Args:
        dtype: The type of y, such as ``int64``.
        shape: The shape of y without its rows; empty for ``[N]``.
        least: The smallest entry; 0 if there is none.
        most: The largest entry; -1 if there is none.
        whole: Whether all entries are whole numbers.
        both: Whether the entries are exactly the two values -1 and 1.
        missing: The number of NaN entries.
        odd: The first row with an entry that is not a whole number, or -1.
        least_row: The first row with the smallest entry.
        most_row: The first row with the largest entry.
    """

    dtype: str
    shape: tuple[int, ...]
    least: float
    most: float
    whole: bool
    both: bool
    missing: int
    odd: int
    least_row: int
    most_row: int

    @property
    def columns(self) -> int:
        """The number of labels of each vertex."""
        # The product of no sizes is 1, so labels [N] have one column.
        return torch.Size(self.shape).numel()

    @property
    def single(self) -> bool:
        """Whether a row has one entry, as in ``[N]`` or ``[N, 1]``."""
        return self.columns == 1

    @property
    def floating(self) -> bool:
        """Whether the entries are floating point numbers."""
        return self.dtype.startswith(("float", "bfloat"))

    @property
    def classes(self) -> int:
        """The number of classes if the entries are class ids."""
        return max(int(self.most) + 1, 1) if self.whole else 1

    @property
    def task(self) -> Task:
        """Task that the labels suggest: multiclass, multilabel (columns of 0 and 1) or regression."""
        if not self.single:
            return "multilabel" if self.whole and self.least >= 0 and self.most <= 1 else "regression"
        return "multiclass" if self.whole and self.least >= -1 else "regression"

    @property
    def outputs(self) -> int:
        """Number of columns that a model must return if no loss is named."""
        return self.classes if self.task == "multiclass" else self.columns

    def outputs_for(self, loss: str) -> int:
        """Return the number of columns that a model must return for a built-in loss."""
        if loss == "cross_entropy" and self.single:
            return self.classes
        return self.columns if loss in ("cross_entropy", "bce", "mse", "mae", "huber") else self.outputs

    def text(self) -> str:
        """Return shape and type as text for messages."""
        return f"[{', '.join(['N', *map(str, self.shape)])}] {self.dtype}"


def labels_of(y: Tensor, ignore: int | None = None) -> Labels:
    """Return the facts about the labels y.

    Args:
        y: The labels.
        ignore: The value that marks a missing label; such entries are left out, as NaN entries are.

    Raises:
        DataError: If an entry is infinite or complex, or y has a type that PyTorch can only store.

    Shapes:
        y ``[N, ...]``.

    Cost: a few passes over y.
    """
    if y.dtype not in _SERVED and not y.is_complex():
        to = "float" if y.is_floating_point() else "long"
        raise DataError(
            "labels of a type that losses take",
            f"{y.dtype}",
            where="data.y",
            hint=f"data.y = data.y.{to}()",
        )
    flat = _flat(y)
    if y.is_complex():
        raise DataError("labels to be real numbers", _name(y), where="data.y")
    # [N, columns], NaN marks a missing entry.
    there = ~flat.isnan() if y.is_floating_point() else torch.ones_like(flat, dtype=torch.bool)
    base: dict[str, Any] = {"dtype": _name(y), "shape": tuple(y.shape[1:]), "missing": int((~there).sum())}
    if ignore is not None:
        there &= flat != ignore
    values = flat[there]
    if not values.numel():
        rest: dict[str, Any] = {"least": 0, "most": -1, "whole": True, "both": False}
        return Labels(**base, **rest, odd=-1, least_row=-1, most_row=-1)
    if y.is_floating_point() and not bool(values.isfinite().all()):
        row = int(flat.isinf().any(1).nonzero()[0])
        raise DataError(
            "labels to be finite numbers, or NaN where there is none",
            f"{flat[row][flat[row].isinf()][0].item()} in row {row} of y",
            where="data.y",
        )
    # Torch has no extremes of booleans.
    numbers = values.to(torch.int8) if y.dtype == torch.bool else values
    least, most = (end.item() for end in numbers.aminmax())
    # Whole numbers as floats (3.0) are class ids, too.
    fractional = (flat != flat.round()) & there if y.is_floating_point() else torch.zeros_like(there)
    halves = fractional.any(1).nonzero()
    both = (least, most) == (-1, 1) and not bool((values.abs() != 1).any())

    def first(value: float) -> int:
        return int((flat == value).any(1).nonzero()[0])

    return Labels(
        **base,
        least=least,
        most=most,
        whole=not halves.numel(),
        both=both,
        odd=int(halves[0]) if halves.numel() else -1,
        least_row=first(least),
        most_row=first(most),
    )


def joined(parts: Sequence[Labels]) -> Labels:
    """Combine the facts of all parts, whose rows are ids of the whole graph, into those of the graph."""
    first = replace(parts[0], missing=sum(each.missing for each in parts))
    some = [each for each in parts if each.least_row >= 0]
    if not some:
        return first
    # Of equal extremes the first row. The greatest is negated, so that ``min`` finds its first row too.
    least = min((each.least, each.least_row) for each in some)
    most = min((-each.most, each.most_row) for each in some)
    odd = [each.odd for each in some if each.odd >= 0]
    ends = {end for each in some for end in (each.least, each.most)}
    # Each part has the two labels -1 and 1, or one value alone.
    plain = all(each.both or each.least == each.most for each in some)
    return replace(
        first,
        least=least[0],
        most=-most[0],
        whole=not odd,
        both=plain and ends == {-1, 1},
        odd=min(odd, default=-1),
        least_row=least[1],
        most_row=most[1],
    )


def labelled(y: Tensor, facts: Labels) -> Tensor:
    """Return which vertices may have a label, before a loss says which value marks a missing one.

    A row of NaN has no label. A row of -1 in whole numbers has none either, unless the labels are -1 and 1.

    Shapes:
        y ``[N, ...]``; result ``[N]``, bool.
    """
    flat = _flat(y)
    there = torch.ones(y.size(0), dtype=torch.bool)
    if y.is_floating_point():
        there = ~flat.isnan().all(1)
    # Class ids begin at 0; data sets mark a missing one by -1.
    if facts.task == "multiclass" and not facts.both:
        there &= flat[:, 0] != -1
    return there


def _flat(y: Tensor) -> Tensor:
    """Return labels with one axis of columns, also of a part without vertices, which has no -1 to infer."""
    return y.unsqueeze(1) if y.dim() == 1 else y.flatten(1)


def _name(y: Tensor) -> str:
    return str(y.dtype).removeprefix("torch.")
