"""Metrics: scores that add up over ranks, built-in or a user's own, and whether more of them is better.

Where it sits: ``optimizers`` chooses one before the first epoch; ``train.trainer`` asks it after each
evaluation. Sums over ranks use the channel that is passed in.

Most metrics are *states*: sums over rows, added over ranks, from which a number is made at the end. ROC AUC
and average precision need the order of all rows: their scores go to rank 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from kagome.comm.channel import Channel
from kagome.components.task import rows_of
from kagome.config import Train
from kagome.errors import ConfigError, ModelError
from kagome.objective.objective import OTHERS, Objective, Target

LOWER: Final = ("mse", "mae", "rmse", "loss")
"""Metrics for which less is better."""
NUMBERS: Final = ("mse", "mae", "rmse", "r2")
"""Metrics for numbers, as opposed to classes."""
RANKED: Final = ("roc_auc", "average_precision")
"""Metrics that depend on the order of all rows."""
_LOGITS: Final = (nn.BCEWithLogitsLoss, nn.MultiLabelSoftMarginLoss, nn.SoftMarginLoss)
"""Losses whose scores are above 0 where a label is likely."""

Own = Callable[[Any, Tensor], Any]
"""``metric(out, y)``: a value a row; or, with a ``compute(state)`` beside it, a state that adds up."""


@dataclass(frozen=True)
class Metric:
    """The metric by which a run is scored.

    Args:
        name: The name of a built-in metric, or of a user's own, for texts.
        objective: The objective of the run, with its loss and the label that stands for "no label".
        own: The user's own metric, if it is one.
        columns: Columns of the output that a built-in metric scores; empty for all.
        higher: Whether more is better.
        guessed: Whether it was chosen by the labels alone, beside a loss of the user's own. Then the loss
            replaces it if the output has other columns than the labels need, and no score is given if the
            loss takes derivatives by the output.
    """

    name: str
    objective: Objective
    own: Own | None = None
    columns: tuple[int, ...] = ()
    higher: bool = True
    guessed: bool = False

    def scores(
        self, out: Any, target: Target, masks: Mapping[str, Tensor], channel: Channel, action: str
    ) -> dict[str, float | None]:
        """Return the metric over each mask's vertices of all ranks; a vertex counts once, at its owner.

        Args:
            out: The model's output for own rows.
            target: Own rows' labels.
            masks: Own rows' masks by split.
            channel: The channel for the sums.
            action: The description of this evaluation, for errors.

        Returns:
            The metric by split; None where a split has no labelled vertex, or only one class (ROC AUC).

        Raises:
            ConfigError: If a user's metric gives neither a value a row nor a state.
            ModelError: If the output does not fit the metric.

        Shapes:
            out ``[n, C]`` or a nested structure of such tensors, masks ``[n]``.

        Cost:
            A few numbers a split, at most a few a class; for ROC AUC and average precision a score and a
            label a vertex to rank 0.
        """
        # Own rows alone: halo rows belong to another rank, which scores them.
        rows = {split: mask.nonzero().view(-1) for split, mask in masks.items()}
        cuts = {split: (rows_of(out, at, target.y.size(0)), target.of(at)) for split, at in rows.items()}
        found = self._found(cuts, channel, action)
        for split, value in found.items():
            # NaN is unequal to itself.
            if value is not None and value != value:
                raise ModelError(
                    f"the metric {self.name} of the {split} vertices to be a number",
                    "nan",
                    where=action,
                    hint="a look at the model's output for these vertices: it may be nan or infinite"
                    if self.own is None
                    else "leave vertices without a label out of the masks, or give them 0 in a state",
                )
        return found

    def _found(
        self, cuts: Mapping[str, tuple[Any, Target]], channel: Channel, action: str
    ) -> dict[str, float | None]:
        if self.own is None and self.name in RANKED:
            return {s: self._ranked(*cut, channel, action) for s, cut in cuts.items()}
        if self.own is None and self.name == "r2":
            return self._r2(cuts, channel, action)
        # All splits in one message. Every rank takes part, also one
        # without a vertex of a split: a state of zeros.
        states = [self._state(*cut) for cut in cuts.values()]
        summed = _summed(states, channel, action)
        return {split: self._final(state) for split, state in zip(cuts, summed, strict=True)}

    def check(self, out: Any) -> None:
        """Raise an error for an output that a built-in metric would misread.

        Raises:
            ModelError: If it has other columns than the labels ask for, and no setting names those to score.
        """
        if self.own is None and self.name != "loss" and not self.guessed:
            self._columns(out)

    def fitted(self, out: Any) -> Metric:
        """Return the metric that fits an output: the loss, if a guessed metric does not fit the columns."""
        if not self.guessed or self.name == "loss":
            return self
        try:
            rows = self._columns(out)
        except ModelError:
            return Metric("loss", self.objective, higher=False, guessed=True)
        # A label is a score above 0 or a probability above 1/2: a user's own loss does not say which.
        # argmax over classes does not depend on a threshold; a single column and several labels do.
        cut = rows.size(1) == 1 or not self.objective.classified
        if cut and not isinstance(self.objective.loss, _LOGITS):
            return Metric("loss", self.objective, higher=False, guessed=True)
        return replace(self, guessed=False)

    def labels(self, out: Any) -> Tensor | None:
        """Return the labels that scores stand for; None where the scores are numbers.

        Shapes:
            out ``[n]`` or ``[n, C]``; result ``[n]``, or ``[n, C]`` of 0 and 1 for several labels.
        """
        objective, facts = self.objective, self.objective.facts
        if not isinstance(out, Tensor) or out.dim() not in (1, 2) or facts.task == "regression":
            return None
        rows = out if out.dim() == 2 else out.unsqueeze(1)
        rows = rows[:, list(self.columns)] if self.columns else rows
        if not objective.classified:
            return (rows > 0).long() if objective.name not in OTHERS and facts.task == "multilabel" else None
        other = rows.size(1) < facts.classes or not (rows.size(1) == facts.classes or _takes_all(objective))
        if rows.size(1) != 1 and other:
            return None
        # One column is a logit of the second class.
        chosen = (rows[:, 0] > 0).long() if rows.size(1) == 1 else rows.argmax(1)
        # Labels -1 and 1: back from class ids 0 and 1.
        return 2 * chosen - 1 if facts.both else chosen

    # Built-in ------------------------------------------------------------------------------------

    def _columns(self, out: Any) -> Tensor:
        """Return the columns that are scored, ``[n, C]``."""
        if not isinstance(out, Tensor):
            raise ModelError(
                f"one tensor from the model for the metric {self.name}",
                f"a {type(out).__name__}",
                hint="metric=lambda out, y: a value a row",
            )
        rows = out if out.dim() > 1 else out.unsqueeze(1)
        # Numbers may have any shape a row; classes are columns.
        rows = rows.flatten(1) if rows.dim() > 2 and self.name in NUMBERS else rows
        if self.columns:
            if max(self.columns) >= rows.size(1):
                raise ModelError(
                    f"train.metric_columns to name columns of the output: {list(self.columns)}",
                    f"an output with {rows.size(1)}",
                )
            rows = rows[:, list(self.columns)]
        wanted = self._width()
        # Two classes by one column, see `labels`.
        single = wanted <= 2 and self.objective.classified and rows.size(1) == 1
        # A loss that takes all columns as classes says what they are; a user's own loss does not.
        classes = self.name not in NUMBERS and self.objective.classified and _takes_all(self.objective)
        wide = rows.size(1) > wanted and not classes
        if (rows.size(1) < wanted and not single) or wide:
            raise ModelError(
                f"{wanted} column{'s' * (wanted != 1)} for the metric {self.name}, as labels have",
                f"{rows.size(1)} from the model",
                hint="--train.metric-columns (train.metric_columns) names them, or an own metric(out, y)",
            )
        return rows

    def _width(self) -> int:
        facts = self.objective.facts
        if self.name in NUMBERS:
            return facts.columns
        return facts.classes if self.objective.classified else facts.columns

    def _state(self, out: Any, target: Target) -> Any:
        if self.own is not None:
            return self._own_state(out, target)
        if self.name == "loss":
            if not target.y.size(0):
                return torch.zeros(2, dtype=torch.float64, device=target.y.device)
            try:
                with self.objective.tried():
                    lost, weight = self.objective.lost(out, target)
            except ConfigError as error:
                # A loss with a derivative by the output (physics-informed) cannot run on an evaluation's
                # output. A guessed metric then gives no score.
                if not self.guessed or "does not require grad" not in error.got:
                    raise
                return torch.zeros(2, dtype=torch.float64, device=target.y.device)
            # [sum of weighted values, sum of weights]: their quotient after the sum over ranks is the mean.
            total = weight if weight is not None else torch.tensor(_share(target), dtype=torch.float64)
            return torch.stack([lost.detach().double(), total.to(lost.device).double()])
        rows, y = self._columns(out), target.y
        if self.name in NUMBERS:
            gap, there = self._gaps(rows, y)
            size = gap.abs() if self.name == "mae" else gap.square()
            # [sum of errors, number of labels], by column.
            return torch.stack([size.sum(0), there.sum(0).double()])
        return self._confusion(rows, y)

    def _gaps(self, rows: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        flat = y.reshape(y.size(0), self.objective.facts.columns).double()
        there = self._there(y)
        return torch.where(there, rows.double() - flat, torch.zeros_like(flat)), there

    def _there(self, y: Tensor) -> Tensor:
        found = self.objective.there(y)
        return found & ~y.reshape(found.shape).isnan() if y.is_floating_point() else found

    def _confusion(self, rows: Tensor, y: Tensor) -> Tensor:
        """Return hits, predictions and labels of each class or column."""
        facts = self.objective.facts
        if not self.objective.classified:
            there = self._there(y)
            if self.objective.name == "cross_entropy":  # shares of classes
                return self._counts(rows.argmax(1), y.argmax(1), there.all(1), rows.size(1))
            chosen, true = (rows > 0) & there, (y.reshape(rows.shape) > 0) & there
            return torch.stack([(chosen & true).sum(0), chosen.sum(0), true.sum(0)]).double()
        there = self._there(y).all(1)
        ids = torch.where(there, y.reshape(-1), torch.zeros_like(y.reshape(-1))).long()
        if facts.both:
            # -1 and 1 become class ids 0 and 1.
            ids = (ids + 1) // 2
        chosen = (rows.squeeze(1) > 0).long() if rows.size(1) == 1 else rows.argmax(1)
        width = max(facts.classes, rows.size(1))
        if facts.least < 0 and not facts.both:
            # With a user's own loss -1 may be a label like any other, for which the output has no column.
            ids, width = torch.where(ids < 0, width, ids), width + 1
        return self._counts(chosen, ids, there, width)

    def _counts(self, chosen: Tensor, true: Tensor, there: Tensor, classes: int) -> Tensor:
        """Return hits, predictions and labels of each class if the metric needs it, else of all together."""
        if self.name == "f1_macro":
            return _one_hot_counts(chosen, true, there, classes)
        # [hits, predictions, labels]: accuracy and micro F1 need no classes, so three numbers do.
        labels = there.sum()
        return torch.stack([(there & (chosen == true)).sum(), labels, labels]).double()

    def _final(self, state: Any) -> float | None:
        if self.own is not None:
            return self._own_final(state)
        if self.name == "loss":
            return float(state[0] / state[1]) if state[1] else None
        if self.name in NUMBERS:
            there = state[1] > 0
            if not bool(there.any()):
                return None
            # Columns count alike, as scikit-learn averages the outputs of a regression.
            each = state[0][there] / state[1][there]
            return float((each.sqrt() if self.name == "rmse" else each).mean())
        hits, chosen, true = state
        if self.name == "f1_macro":
            # As scikit-learn: macro F1 averages over classes that occur in labels or predictions, and over
            # all columns of several labels.
            seen = (
                (chosen + true > 0) if self.objective.classified else torch.ones_like(true, dtype=torch.bool)
            )
            if not bool(true.any()):
                return None
            # F1 = 2 TP / (2 TP + FP + FN) = 2 hits / (predictions + labels).
            return float((2 * hits / (chosen + true).clamp(min=1))[seen].mean())
        total = (chosen + true).sum()
        return float(2 * hits.sum() / total) if total else None

    def _r2(
        self, cuts: Mapping[str, tuple[Any, Target]], channel: Channel, action: str
    ) -> dict[str, float | None]:
        """Return scikit-learn's ``r2_score`` by split: that of each column, then their mean."""
        # First pass: [squared errors, number of labels, sum of labels], by column. The mean
        # of all ranks then centres the second one.
        first = []
        for out, target in cuts.values():
            gap, there = self._gaps(self._columns(out), target.y)
            flat = target.y.reshape(there.shape).double()
            sums = torch.where(there, flat, torch.zeros_like(flat)).sum(0)
            first.append(torch.stack([gap.square().sum(0), there.sum(0).double(), sums]))
        found = _summed(first, channel, action)
        # Sum squares around the mean in a second pass: in one pass large labels lose all their digits.
        second = []
        for (_, target), (_, count, sums) in zip(cuts.values(), found, strict=True):
            there = self._there(target.y)
            off = target.y.reshape(there.shape).double() - sums / count.clamp(min=1)
            second.append(torch.where(there, off, torch.zeros_like(off)).square().sum(0))
        spreads = _summed(second, channel, action)
        return {
            split: _r2_of(state, spread) for split, state, spread in zip(cuts, found, spreads, strict=True)
        }

    def _ranked(self, out: Any, target: Target, channel: Channel, action: str) -> float | None:
        from sklearn.metrics import average_precision_score, roc_auc_score

        function = roc_auc_score if self.name == "roc_auc" else average_precision_score
        score, y = self._columns(out).double(), target.y
        if self.objective.classified and score.size(1) == 2:
            # The difference of two logits is the logit of class 1 under
            # softmax, so it ranks as its probability.
            score = (score[:, 1] - score[:, 0]).unsqueeze(1)
        there = self._there(y)
        flat = y.reshape(there.shape).double()
        label = torch.where(there, flat, torch.full_like(flat, float("nan")))
        table = torch.cat([score, label], dim=1)  # [n, 2 * columns]
        rows = channel.gather_rows(table, action=action, dst=0)
        value = torch.zeros(1, dtype=torch.float64, device=table.device)
        if rows is not None:
            guess, true = (part.cpu().numpy() for part in torch.cat(rows).chunk(2, dim=1))
            found = []
            for column in range(true.shape[1]):
                # NaN marks a missing label.
                kept = true[:, column] == true[:, column]
                mine, scored = true[kept, column] > 0, guess[kept, column]
                if 0 < mine.sum() < mine.size:
                    whole = bool(np.isfinite(scored).all())  # scikit-learn takes finite scores only
                    found.append(float(function(mine, scored)) if whole else math.nan)
            # Other ranks have 0, so a sum over ranks hands rank 0's value to all. inf stands for "no value".
            value.fill_(sum(found) / len(found) if found else math.inf)
        total = float(channel.all_reduce(value, action=action, kind="other"))
        return None if math.isinf(total) else total

    # A user's own --------------------------------------------------------------------------------

    def _own_state(self, out: Any, target: Target) -> Any:
        assert self.own is not None
        there = self.objective.labelled(target.y).nonzero().view(-1)
        count, y = there.numel(), target.y[there]
        out = rows_of(out, there, target.y.size(0))
        # A metric by row is not called without rows; one with a state must return a state of the same shape.
        if not count and not hasattr(self.own, "compute"):
            return torch.zeros(2, dtype=torch.float64, device=y.device)
        found = self._called(out, y)
        if hasattr(self.own, "compute"):
            state = tree_map(lambda leaf: torch.as_tensor(leaf).detach().double(), found)
            return torch.tensor(float(count), dtype=torch.float64, device=y.device), state
        if (
            not isinstance(found, Tensor)
            or found.dim() == 0
            or found.size(0) != count
            or found.numel() != count
        ):
            got = (
                f"the shape {list(found.shape)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
            )
            raise ConfigError(
                f"metric(out, y) to give a value a row: {count}",
                got,
                hint="a state that adds up over ranks is for a metric with compute(state)",
            )
        value = found.detach().double().sum()
        return torch.stack([value, torch.tensor(float(count), dtype=torch.float64, device=value.device)])

    def _called(self, out: Any, y: Tensor) -> Any:
        assert self.own is not None
        try:
            with torch.no_grad():
                return self.own(out, y)
        except Exception as error:
            raise ConfigError(
                "metric(out, y) to run on the model's output and the labels as they were given",
                _error_text(error),
                where=f"y {list(y.shape)} {y.dtype}",
                hint="" if y.size(0) else "a state of no vertices too: a rank or a split may have none",
            ) from error

    def _own_final(self, state: Any) -> float | None:
        compute = getattr(self.own, "compute", None)
        if compute is not None:
            count, added = state
            if not count:
                return None
            try:
                found = compute(added)
                return None if found is None else float(found)
            except Exception as error:
                raise ConfigError(
                    "metric.compute(state) to give a number, or None, of a state that was added up",
                    _error_text(error),
                ) from error
        return float(state[0] / state[1]) if state[1] else None


def _error_text(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _share(target: Target) -> float:
    return float(target.y.size(0)) if target.weights is None else float(target.weights.sum())


def _summed(states: Sequence[Any], channel: Channel, action: str) -> list[Any]:
    """Return states added up over all ranks, with one message for all of them."""
    flat = [tree_flatten(state) for state in states]
    leaves = [leaf for found, _ in flat for leaf in found]
    whole = channel.all_reduce(
        torch.cat([leaf.reshape(-1).double() for leaf in leaves]), action=action, kind="other"
    )
    # All ranks have states of the same structure, so one vector holds them all.
    parts = iter(whole.split([leaf.numel() for leaf in leaves]))
    return [
        tree_unflatten([next(parts).view(leaf.shape).cpu() for leaf in found], spec) for found, spec in flat
    ]


def _one_hot_counts(chosen: Tensor, true: Tensor, there: Tensor, classes: int) -> Tensor:
    chosen, true = chosen[there], true[there]
    counts = [torch.bincount(ids, minlength=classes) for ids in (true[chosen == true], chosen, true)]
    return torch.stack(counts).double()


def _r2_of(state: Tensor, spread: Tensor) -> float | None:
    lost, count, _ = state
    there = count > 0
    if not bool(there.any()) or float(count.max()) < 2:
        return None
    return mean_r2(lost[there], spread[there])


def mean_r2(lost: Tensor, spread: Tensor) -> float:
    """Return the mean R2 of columns, from their sums of squares: of errors, and around the mean."""
    # As scikit-learn: constant labels score 1 if all are met, else 0.
    each = torch.where(
        spread > 0, 1 - lost / spread.clamp(min=torch.finfo(torch.float64).tiny), (lost == 0).double()
    )
    return float(each.mean())


def _takes_all(objective: Objective) -> bool:
    """Return whether the loss takes every column of the output as a class."""
    return objective.name == "cross_entropy" or isinstance(objective.loss, nn.CrossEntropyLoss | nn.NLLLoss)


def metric_of(metric: Own | str | None, objective: Objective, train: Train) -> Metric:
    """Return the metric of a run, checked against the labels.

    Args:
        metric: A name, a user's own, or None for the one in the settings.
        objective: The objective of the run.
        train: The settings.

    Raises:
        ConfigError: If the metric does not suit the labels.
    """
    if metric is not None and not isinstance(metric, str):
        if not callable(metric):
            raise ConfigError("metric to be a name or metric(out, y)", f"a {type(metric).__name__}")
        name = str(getattr(metric, "__name__", type(metric).__name__))
        higher = bool(getattr(metric, "higher_is_better", True))
        return Metric("metric" if name == "<lambda>" else name, objective, metric, higher=higher)
    name = metric or train.metric
    # Guessed is what no user asked for; only then may another metric replace it.
    guessed, name = name == "auto", _guessed(objective) if name == "auto" else name
    if name not in (*LOWER, *NUMBERS, *RANKED, "accuracy", "f1_micro", "f1_macro"):
        raise ConfigError("metric to be a name that train.metric takes, or metric(out, y)", repr(name))
    _suits(name, objective)
    columns = tuple(train.metric_columns)
    guessed &= not objective.name and not columns
    return Metric(name, objective, columns=columns, higher=name not in LOWER, guessed=guessed)


def _guessed(objective: Objective) -> str:
    """Return the name of the default metric for labels and loss."""
    facts = objective.facts
    if objective.name in ("mse", "huber"):
        return "rmse"
    if objective.name == "mae":
        return "mae"
    if objective.classified and not (facts.floating and not objective.name):
        return "accuracy"
    if objective.name == "cross_entropy":
        return "accuracy"
    return "f1_micro" if facts.task == "multilabel" and (objective.name or not facts.floating) else "loss"


def _suits(name: str, objective: Objective) -> None:
    facts = objective.facts
    if name in NUMBERS or name == "loss":
        return
    shares = objective.name == "cross_entropy" and not facts.single
    if not objective.classified and facts.task != "multilabel" and not shares:
        raise ConfigError(
            f"classes, or labels of 0 and 1, for {name}",
            f"y {facts.text()}, from {facts.least:g} to {facts.most:g}",
            hint="rmse, mae or r2",
        )
    if name == "accuracy" and not objective.classified and not shares:
        raise ConfigError("one class a vertex for accuracy", "several labels a vertex", hint="f1_micro")
    if name in RANKED and (shares or (objective.classified and facts.classes > 2)):
        raise ConfigError(
            f"two classes or several labels for {name}",
            f"{facts.classes if objective.classified else facts.columns} classes",
            hint="accuracy",
        )
