"""Task: what a run learns and how it is scored - losses with a value a row, metrics that add up over ranks.

Where it sits: ``engine`` and ``trainer`` ask it for losses and scores; sums over ranks go through the channel
they pass in.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Literal, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kagome.config import Metric
from kagome.errors import ConfigError, ModelError

Loss = Callable[[Tensor, Tensor], Tensor]
Kind = Literal["multiclass", "multilabel"]


class Sums(Protocol):
    """What this file needs of a channel: see :class:`kagome.comm.channel.Channel`."""

    @property
    def rank(self) -> int:
        """The number of this rank."""

    def all_reduce(
        self, tensor: Tensor, op: Literal["sum"] = "sum", *, action: str, kind: Literal["other"]
    ) -> Tensor:
        """Sum over ranks."""

    def gather_rows(
        self, rows: Tensor, *, action: str, kind: Literal["other"] = "other", dst: int | None = None
    ) -> list[Tensor] | None:
        """Rows of all ranks."""


def kind_of(y: Tensor) -> Kind:
    """One class a vertex, or several yes-or-no labels a vertex."""
    return "multilabel" if y.dim() > 1 else "multiclass"


def default_loss(kind: Kind, classes: int) -> Loss:
    """Cross entropy, or binary cross entropy a label (and of two classes, where one column is given).

    Args:
        kind: What the labels are.
        classes: Classes, or labels a vertex may have.

    Returns:
        A loss with a value a row; it raises a ModelError for an output of another width.

    Shapes:
        ``out [n, C]``, ``y [n]`` or ``[n, C]`` -> ``[n]``.
    """

    def loss(out: Tensor, y: Tensor) -> Tensor:
        single = kind == "multiclass" and classes <= 2 and (out.dim() == 1 or out.shape[1:] == (1,))
        if single:
            return F.binary_cross_entropy_with_logits(out.view(-1), y.to(out.dtype), reduction="none")
        if out.dim() != 2 or (out.size(1) != classes if kind == "multilabel" else out.size(1) < classes):
            raise ModelError(
                f"the model gives {classes} columns, one a {'label' if kind == 'multilabel' else 'class'}",
                f"its output has the shape {list(out.shape)}",
                hint=f"out_channels={classes} in the last layer, or a loss of your own",
            )
        if kind == "multilabel":
            return F.binary_cross_entropy_with_logits(out, y.to(out.dtype), reduction="none").mean(1)
        return F.cross_entropy(out, y, reduction="none")

    return loss


def checked_loss(loss: Loss, sample: Tensor, y: Tensor) -> Loss:
    """A loss that gives a value a row, or a plain sum; one that averages by itself is refused.

    A mean over a rank's rows is not the mean over all rows, so it would depend on the number of ranks.

    Args:
        loss: The user's.
        sample: A few rows of output, made up.
        y: Labels for them.

    Raises:
        ConfigError: If the loss of all rows is not the sum of the losses of some and the others.
    """
    whole = loss(sample, y)
    if whole.dim() > 0:
        if whole.size(0) != sample.size(0):
            raise ConfigError(
                f"loss(out, y) gives a value a row: {sample.size(0)}", f"it gave {whole.size(0)}"
            )
        return loss
    cut = sample.size(0) // 3 or 1
    parts = loss(sample[:cut], y[:cut]) + loss(sample[cut:], y[cut:])
    if not torch.allclose(whole, parts, rtol=1e-4):
        raise ConfigError(
            "loss(out, y) gives a value a row, or their sum",
            f"the loss of {sample.size(0)} rows is {float(whole):.6g}, that of {cut} and the other "
            f"{sample.size(0) - cut} is {float(parts):.6g}: it averages over the rows of one rank",
            hint='CrossEntropyLoss(reduction="none"); Kagome takes the mean over all training vertices',
        )
    return loss


def row_sum(value: Tensor) -> Tensor:
    """The sum over rows of what a loss gave; further axes are averaged."""
    return value if value.dim() == 0 else value.flatten(1).mean(1).sum() if value.dim() > 1 else value.sum()


def metric_name(metric: Metric, kind: Kind, classes: int) -> str:
    """The metric that ``auto`` stands for; one that does not suit the labels is refused."""
    if metric == "auto":
        return "f1_micro" if kind == "multilabel" else "accuracy"
    if metric == "accuracy" and kind == "multilabel":
        raise ConfigError(
            "accuracy needs one class a vertex", "the labels are several a vertex", hint="f1_micro"
        )
    if metric == "roc_auc" and kind == "multiclass" and classes > 2:
        raise ConfigError(
            "roc_auc needs two classes or several labels", f"there are {classes} classes", hint="accuracy"
        )
    return metric


def scores(
    name: str, out: Tensor, y: Tensor, masks: dict[str, Tensor], channel: Sums, action: str
) -> dict[str, float | None]:
    """A metric over each mask's vertices of all ranks; each vertex counts once, at its owner.

    Args:
        name: ``accuracy``, ``f1_micro`` or ``roc_auc``.
        out: Own rows' scores.
        y: Own rows' labels.
        masks: Own rows' masks by split.
        channel: For the sums.
        action: What this is, for errors.

    Returns:
        The metric by split; None where a split has no vertex, or only one class (roc_auc).

    Shapes:
        ``out [n, C]``, ``y [n]`` or ``[n, C]``, masks ``[n]``.

    Cost:
        A few numbers a split; for roc_auc a score and a label a vertex to rank 0.
    """
    if name == "roc_auc":
        return {split: _roc_auc(out[mask], y[mask], channel, action) for split, mask in masks.items()}
    rows = [_counts(name, out[mask], y[mask]) for mask in masks.values()]
    summed = channel.all_reduce(torch.stack(rows), action=action, kind="other").tolist()
    return {split: (good / all_ if all_ else None) for split, (good, all_) in zip(masks, summed, strict=True)}


def _counts(name: str, out: Tensor, y: Tensor) -> Tensor:
    if y.dim() > 1:
        chosen, true = out > 0, y > 0
        hits = (chosen & true).sum()
        pair = [2 * hits, chosen.sum() + true.sum()]
    else:
        chosen = (out.squeeze(1) > 0).long() if out.size(1) == 1 else out.argmax(1)
        pair = [(chosen == y).sum(), torch.tensor(y.numel(), device=y.device)]
    return torch.stack(pair).double()


def _roc_auc(out: Tensor, y: Tensor, channel: Sums, action: str) -> float | None:
    from sklearn.metrics import roc_auc_score

    score = out.float()
    if y.dim() == 1:
        score = score.squeeze(1) if score.size(1) == 1 else score[:, 1] - score[:, 0]
        score, y = score.unsqueeze(1), y.unsqueeze(1)
    table = torch.cat([score, y.float()], dim=1)
    rows = channel.gather_rows(table, action=action, dst=0)
    value = torch.full((1,), float("nan"), dtype=torch.float64, device=out.device)
    if rows is not None:
        guess, label = (part.cpu().numpy() for part in torch.cat(rows).chunk(2, dim=1))
        columns = [c for c in range(label.shape[1]) if 0 < label[:, c].sum() < label.shape[0]]
        if columns:
            value.fill_(sum(float(roc_auc_score(label[:, c], guess[:, c])) for c in columns) / len(columns))
    else:
        value.zero_()
    found = float(channel.all_reduce(value, action=action, kind="other"))
    return None if found != found else found


def check_finite(loss: float, epoch: int) -> None:
    """Refuse to go on from a loss that is no number, or none that can be gone on from.

    Raises:
        ModelError: If it is not finite.
    """
    if not math.isfinite(loss):
        raise ModelError(
            "training goes on with a finite loss",
            f"the loss is {loss}",
            where=f"epoch {epoch}",
            hint="a lower --train.lr, --train.clip 1.0, or a look at the features' scale",
        )


def check_rows(out: object, own: int, rank: int) -> Tensor:
    """A model's output, which has a row for each of so many vertices.

    Raises:
        ModelError: If it has not.
    """
    if not isinstance(out, Tensor) or out.dim() == 0 or out.size(0) != own:
        found = f"shape {tuple(out.shape)}" if isinstance(out, Tensor) else type(out).__name__
        raise ModelError(
            f"the model gives a row of scores for each of the part's {own} vertices",
            f"it gave {found}",
            where=f"rank {rank}",
            hint="return one tensor with a row a vertex",
        )
    return out


@contextmanager
def draws_of(seed: int, epoch: int) -> Iterator[None]:
    """What a layer still draws from torch's own generator repeats with the epoch, on any ranks."""
    # Seeding devices that are not there formats the whole stack for each of their kinds: half a millisecond.
    seeds = torch.manual_seed if torch.accelerator.is_available() else torch.default_generator.manual_seed
    with torch.random.fork_rng(devices=[]):
        seeds((seed * 1_000_003 + epoch) % 2**63)
        yield


@contextmanager
def undisturbed() -> Iterator[None]:
    """Whatever draws inside, all generators go on as if it had not."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


@contextmanager
def unmoved(buffers: Iterable[Tensor]) -> Iterator[None]:
    """Buffers are afterwards as they were: what is computed twice moves them once."""
    before = [(buffer, buffer.clone()) for buffer in buffers]
    yield
    with torch.no_grad():
        for buffer, value in before:
            buffer.copy_(value)


def columns(out: Tensor) -> Tensor:
    """Scores with a column, if it is one alone."""
    return out if out.dim() > 1 else out.unsqueeze(1)
