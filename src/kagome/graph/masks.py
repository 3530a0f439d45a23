"""Masks: which vertices train, validate and test.

Where it sits: ``builtin`` draws its masks here; ``validate`` checks a user's masks here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from kagome.errors import DataError

NAMES: Final = ("train_mask", "val_mask", "test_mask")


def draw(num_nodes: int, seed: int, labelled: Tensor | None = None) -> dict[str, Tensor]:
    """Draw a 60/20/20 split.

    Args:
        num_nodes: Vertices.
        seed: Seed of the draw.
        labelled: Vertices that have a label; by default all have.

    Returns:
        The masks, by name.

    Shapes:
        labelled and each mask ``[N]``, bool.
    """
    among = torch.arange(num_nodes) if labelled is None else labelled.nonzero().view(-1)
    count = among.numel()
    among = among[torch.randperm(count, generator=torch.Generator().manual_seed(seed))]
    first, second = round(0.6 * count), round(0.6 * count) + round(0.2 * count)
    masks = {name: torch.zeros(num_nodes, dtype=torch.bool) for name in NAMES}
    for name, chosen in zip(NAMES, (among[:first], among[first:second], among[second:]), strict=True):
        masks[name][chosen] = True
    return masks


def settle(
    given: Mapping[str, object], num_nodes: int, labelled: Tensor, split: int, notes: list[str]
) -> dict[str, Tensor]:
    """Check given masks, choose one split of several, leave unlabelled vertices out; draw what is not given.

    Args:
        given: The user's masks by name; those that are None or absent are not given.
        num_nodes: Vertices.
        labelled: Vertices that have a label.
        split: Which of several splits; the seed of the draw where no mask is given.
        notes: Sentences for the start of the run; this function adds its own.

    Returns:
        The three masks, by name.

    Raises:
        DataError: If a mask is no mask, two overlap, the split does not exist, or no vertex trains.

    Shapes:
        given ``[N]`` or ``[N, splits]``; labelled and each mask ``[N]``, bool.
    """
    if split < 0:
        raise DataError("data.split takes a number from 0 up", f"it is {split}")
    unlabelled = num_nodes - int(labelled.sum())
    if all(given.get(name) is None for name in NAMES):
        notes.append(f"No masks given: a 60/20/20 split of the labelled vertices is drawn with seed {split}.")
        masks = draw(num_nodes, split, labelled)
    else:
        masks = _choose({name: _mask(name, given.get(name), num_nodes) for name in NAMES}, split, notes)
        _apart(masks)
        lost = sum(int((mask & ~labelled).sum()) for mask in masks.values())
        masks = {name: mask & labelled for name, mask in masks.items()}
        if lost:
            notes.append(f"{lost:,} vertices without a label (y = -1) are left out of the masks.")
    if unlabelled:
        notes.append(
            f"{unlabelled:,} of {num_nodes:,} vertices have no label (y = -1); they pass messages only."
        )
    if not masks["train_mask"].any():
        raise DataError(
            "at least one vertex must train",
            f"train_mask holds 0 of {num_nodes:,} vertices; {unlabelled:,} have no label",
            where="data.train_mask",
            hint="set data.train_mask, or leave all three masks out and a seeded split is drawn",
        )
    notes.extend(
        f"{name} is empty: there is nothing to {'validate' if name == 'val_mask' else 'test'} on."
        for name in NAMES[1:]
        if not masks[name].any()
    )
    return masks


def _mask(name: str, value: object, num_nodes: int) -> Tensor:
    if value is None:
        return torch.zeros(num_nodes, dtype=torch.bool)
    mask = torch.as_tensor(value).detach().cpu()
    if mask.dim() not in (1, 2) or mask.size(0) != num_nodes:
        raise DataError(
            f"{name} must have a row for each of {num_nodes:,} vertices",
            f"its shape is {list(mask.shape)}",
            where=f"data.{name}",
            hint="a mask is a bool a vertex, not a list of vertex ids",
        )
    if mask.dtype != torch.bool:
        odd = (mask != 0) & (mask != 1)
        if odd.any():
            raise DataError(
                f"{name} must hold true and false, or 0 and 1",
                f"row {int(odd.nonzero()[0, 0])} holds {mask[odd][0].item()}",
                where=f"data.{name}",
            )
    return mask.bool()


def _choose(masks: dict[str, Tensor], split: int, notes: list[str]) -> dict[str, Tensor]:
    """One column of masks of several splits; a mask of one dimension serves every split (WikiCS's test)."""
    widths = {name: mask.size(1) for name, mask in masks.items() if mask.dim() == 2}
    count = min(widths.values(), default=1)
    if split >= count:
        raise DataError(
            f"split {split} was asked for",
            f"there {'is 1 split' if count == 1 else f'are {count} splits'}, counted from 0",
            where="data.split",
        )
    if count > 1:
        notes.append(f"Split {split} of {count} is used.")
    return {name: mask[:, split] if mask.dim() == 2 else mask for name, mask in masks.items()}


def _apart(masks: dict[str, Tensor]) -> None:
    for i, first in enumerate(NAMES):
        for second in NAMES[i + 1 :]:
            both = (masks[first] & masks[second]).nonzero()
            if both.numel():
                raise DataError(
                    f"{first} and {second} must not share a vertex",
                    f"they share {both.size(0):,}, the first of them vertex {int(both[0])}",
                    where=f"data.{first}",
                )
