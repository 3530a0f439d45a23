"""Loss trials: helpers that check a user's loss on sample outputs, and the errors of those checks.

Where it sits: ``objective`` tries a loss with them before the first update.
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
    """The result of one call of a loss: values, weights, and whether they have a gradient."""

    values: Tensor
    weights: Tensor | None
    learns: bool
    moved: bool
    """Whether the call changed state that the loss keeps."""


def check_shapes(values: Tensor, weights: Tensor | None, part: Tensor, count: int, where: str) -> None:
    """Raise an error unless there is one value a row, and as many weights.

    Args:
        values: The values that the loss returned for all rows.
        weights: The weights beside the values, or None.
        part: The values that the loss returned for some of the rows.
        count: The number of rows.
        where: The shapes, for the error.

    Raises:
        ConfigError: If a shape is wrong.
    """
    # Values [n, n] are the usual fault: [n] minus [n, 1] is broadcast. Their last axis shrinks with the rows,
    # so it shows in `part`, also where n happens to be the number of classes.
    if values.size(0) != count or values.shape[1:] != part.shape[1:]:
        got = f"{values.size(0)} values" if values.dim() == 1 else f"the shape {list(values.shape)}"
        raise ConfigError(
            f"loss(out, y) to give a value a row: {count}",
            got,
            where=where,
            hint="out and y of one shape: out.squeeze(1), or y.unsqueeze(1)"
            if values.numel() > count
            else 'reduction="none"',
        )
    if weights is not None and (
        # Weights may lack trailing axes of the values: one weight a row for values of several columns.
        weights.dim() > values.dim() or weights.shape != values.shape[: weights.dim()]
    ):
        raise ConfigError(
            f"loss(out, y) to give (values, weights) of as many rows: {list(values.shape)}",
            f"weights of shape {list(weights.shape)}",
            where=where,
        )


def check_rows(values: Tensor, part: Tensor, cut: int, count: int, where: str) -> None:
    """Raise an error if the value of a row depends on other rows."""
    # A norm or softmax over rows gives values of the right shape that depend on which rows are there.
    if not torch.allclose(values[:cut].double(), part.double(), rtol=1e-4, atol=1e-6, equal_nan=True):
        raise ConfigError(
            "loss(out, y) to give each row a value of its own",
            f"other values of the first {cut} of {count} rows when the rest is left out: it looks at all "
            "rows of one rank",
            where=where,
            hint='reduction="none", and no mean or norm over rows inside the loss',
        )


def check_gradient(values: Tensor, sample: Any, where: str) -> None:
    """Raise an error if the loss cannot be differentiated by the output."""
    leaves = [leaf for leaf in tree_leaves(sample) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not leaves or not values.requires_grad:
        return
    try:
        # Some losses run forward on integer labels and fail in backward. Other leaves may be unused, such as
        # a second output that is only returned.
        torch.autograd.grad(values.sum(), leaves, allow_unused=True, retain_graph=True)
    except RuntimeError as error:
        raise ConfigError(
            "loss(out, y) to have a derivative by the model's output",
            f"{type(error).__name__}: {first_line(error)}",
            where=where,
            hint="y.to(out.dtype) in the loss",
        ) from error


def learning(out: Any) -> bool:
    """Return whether some tensor of an output has a gradient."""
    return any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(out))


def no_gradient(out: Any) -> ModelError:
    """Return the error for an output without a gradient, which trains no weight."""
    kinds = ", ".join(_form(leaf) for leaf in tree_leaves(out) if isinstance(leaf, Tensor))
    return ModelError(
        "the model's output to have a gradient by its weights",
        f"an output without one: {kinds}",
        hint="no detach(), no torch.no_grad() and no whole numbers on the way from the weights to the output",
    )


def lost_gradient(values: Tensor, where: str) -> ConfigError:
    """Return the error for a loss without a gradient, which trains no weight."""
    return ConfigError(
        "loss(out, y) to have a gradient by the model's output",
        f"a value without one: {_form(values)}",
        where=where,
        hint="no detach(), no torch.no_grad() and no comparison on the way from out to the loss",
    )


def near(one: Tensor, other: Tensor) -> bool:
    """Return whether two trials gave the same values, up to rounding."""
    return one.shape == other.shape and torch.allclose(
        one.double(), other.double(), rtol=1e-4, atol=1e-6, equal_nan=True
    )


def leaf_of(value: Any) -> Any:
    """Detach a part of an output from its computation, as a leaf that needs a gradient if it can."""
    if not isinstance(value, Tensor):
        return value
    leaf = value.detach()
    # Integers and booleans in an output, such as ids, cannot require a gradient.
    return leaf.clone().requires_grad_() if leaf.is_floating_point() else leaf


def copied(out: Any) -> Any:
    """Return a copy of an output, which a loss may write to."""
    return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, out)


def itself(out: Any) -> Any:
    """Return the output as it is."""
    return out


def still(value: Any) -> Any:
    """Return a detached copy of a part of an output."""
    return value.detach().clone() if isinstance(value, Tensor) else value


def moved(value: Any) -> Any:
    """Return another output, which differs from this one by numbers of ordinary size."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    # Different for each entry, so that a loss of differences is not 0 for it either.
    steps = torch.linspace(0.5, 1.5, value.numel(), dtype=value.dtype, device=value.device)
    return value + steps.view(value.shape)


def pair(out: Any, y: Tensor) -> str:
    """Describe the shapes and types that a loss was given."""
    shown = ", ".join(_form(leaf) for leaf in tree_leaves(out) if isinstance(leaf, Tensor))
    return f"out {shown}, y {_form(y)}"


def _form(value: Tensor) -> str:
    return f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}"


def first_line(error: Exception) -> str:
    """Return the first line of an error's message."""
    return (str(error).strip().split("\n") or [""])[0]


def cure(out: Any, y: Tensor, error: Exception) -> str:
    """Suggest a fix after a loss has raised an error."""
    text = str(error)
    # Messages of autograd.grad for a tensor that is not in the graph: the trial's copy cut it off.
    if "differentiated Tensor" in text or "does not require grad" in text:
        return "take derivatives in forward, and return them beside the output; or train on one rank"
    if isinstance(out, Tensor) and out.dim() != y.dim():
        return "out and y of the shapes that the loss takes: y.squeeze(1), out.squeeze(1)"
    if any(word in text for word in ("dtype", "Long", "Float", "Double", "Int", "Char", "type")):
        return "y in the type that the loss takes: y.long(), y.to(out.dtype)"
    return "compute it once by hand of tensors of these shapes"
