"""Trials: what checks of a user's loss are made of - outputs to try it with, and the errors it may meet.

Where it sits: ``objective`` tries a loss with it before the first update.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from kagome.errors import ConfigError, ModelError


@dataclass(frozen=True)
class Tried:
    """What one call of a loss gave: values and weights, whether with a gradient."""

    values: Tensor
    weights: Tensor | None
    learns: bool
    moved: bool
    """Whether what the loss keeps was another afterwards."""


def check_shapes(values: Tensor, weights: Tensor | None, part: Tensor, count: int, where: str) -> None:
    """Refuse values that are not one a row, and weights of another number."""
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


def check_rows(values: Tensor, part: Tensor, cut: int, count: int, where: str) -> None:
    """Refuse values of rows that depend on other rows."""
    if not torch.allclose(values[:cut].double(), part.double(), rtol=1e-4, atol=1e-6, equal_nan=True):
        raise ConfigError(
            "loss(out, y) gives each row a value of its own",
            f"the values of the first {cut} of {count} rows change when the others are left out: it looks at "
            "all rows of one rank",
            where=where,
            hint='reduction="none", and no mean or norm over rows inside the loss',
        )


def check_gradient(values: Tensor, sample: Any, where: str) -> None:
    """Refuse a loss that cannot be differentiated by the output."""
    leaves = [leaf for leaf in tree_leaves(sample) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not leaves or not values.requires_grad:
        return
    try:
        torch.autograd.grad(values.sum(), leaves, allow_unused=True, retain_graph=True)
    except RuntimeError as error:
        raise ConfigError(
            "loss(out, y) can be differentiated by the model's output",
            f"it raised {type(error).__name__}: {first_line(error)}",
            where=where,
            hint="y.to(out.dtype) in the loss",
        ) from error


def learning(out: Any) -> bool:
    """Whether some part of an output has a gradient."""
    return any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(out))


def no_gradient(out: Any) -> ModelError:
    """The error for an output that trains no weight."""
    kinds = ", ".join(_form(leaf) for leaf in tree_leaves(out) if isinstance(leaf, Tensor))
    return ModelError(
        "the model's output has a gradient by its weights",
        f"it has none: {kinds}",
        hint="no detach(), no torch.no_grad() and no whole numbers on the way from the weights to the output",
    )


def lost_gradient(values: Tensor, where: str) -> ConfigError:
    """The error for a loss that trains no weight."""
    return ConfigError(
        "loss(out, y) has a gradient by the model's output",
        f"its value has none: {_form(values)}",
        where=where,
        hint="no detach(), no torch.no_grad() and no comparison on the way from out to the loss",
    )


def near(one: Tensor, other: Tensor) -> bool:
    """Whether two trials gave the same."""
    return one.shape == other.shape and torch.allclose(
        one.double(), other.double(), rtol=1e-4, atol=1e-6, equal_nan=True
    )


def leaf_of(value: Any) -> Any:
    """A part of an output, cut off from what it was computed by."""
    if not isinstance(value, Tensor):
        return value
    leaf = value.detach()
    return leaf.clone().requires_grad_() if leaf.is_floating_point() else leaf


def copied(out: Any) -> Any:
    """What a loss may write to."""
    return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, out)


def itself(out: Any) -> Any:
    """The output as it is."""
    return out


def still(value: Any) -> Any:
    """A part of an output without a gradient."""
    return value.detach().clone() if isinstance(value, Tensor) else value


def moved(value: Any) -> Any:
    """Another output, as far from this one as numbers of ordinary size are."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    steps = torch.linspace(0.5, 1.5, value.numel(), dtype=value.dtype, device=value.device)
    return value + steps.view(value.shape)


def pair(out: Any, y: Tensor) -> str:
    """Shapes and types of what a loss was given."""
    shown = ", ".join(_form(leaf) for leaf in tree_leaves(out) if isinstance(leaf, Tensor))
    return f"out {shown}, y {_form(y)}"


def _form(value: Tensor) -> str:
    return f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}"


def first_line(error: Exception) -> str:
    """What an error says first."""
    return (str(error).strip().split("\n") or [""])[0]


def cure(out: Any, y: Tensor, error: Exception) -> str:
    """What to try after a loss has raised."""
    text = str(error)
    if "differentiated Tensor" in text or "does not require grad" in text:
        return "take derivatives in forward, and return them beside the output; or train on one rank"
    if isinstance(out, Tensor) and out.dim() != y.dim():
        return "out and y of the shapes that the loss takes: y.squeeze(1), out.squeeze(1)"
    if any(word in text for word in ("dtype", "Long", "Float", "Double", "Int", "Char", "type")):
        return "y in the type that the loss takes: y.long(), y.to(out.dtype)"
    return "compute it once by hand of tensors of these shapes"
