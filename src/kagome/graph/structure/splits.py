"""Splits: masks of the vertices for training, validation and test.

Where it sits: ``graph.datasets.builtin`` draws its masks here; ``validate`` checks a user's masks here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from kagome.errors import DataError
from kagome.graph.structure.attributes import numbers_of

NAMES: Final = ("train_mask", "val_mask", "test_mask")
_HOLDS: Final = "hold true and false, or numbers"


def draw(num_nodes: int, seed: int, labelled: Tensor | None = None) -> dict[str, Tensor]:
    """Draw a random 60/20/20 split of the vertices.

    Args:
        num_nodes: The number of vertices.
        seed: The seed of the draw.
        labelled: Which vertices have a label; all by default.

    Returns:
        The masks, by name.

    Shapes:
        labelled and each mask ``[N]``, bool.
    """
    among = torch.arange(num_nodes) if labelled is None else labelled.nonzero().view(-1)
    count = among.numel()
    among = among[torch.randperm(count, generator=torch.Generator().manual_seed(seed))]
    # What rounding leaves over goes to the test.
    first, second = round(0.6 * count), round(0.6 * count) + round(0.2 * count)
    masks = {name: torch.zeros(num_nodes, dtype=torch.bool) for name in NAMES}
    for name, chosen in zip(NAMES, (among[:first], among[first:second], among[second:]), strict=True):
        masks[name][chosen] = True
    return masks


def settle(
    given: Mapping[str, object], num_nodes: int, labelled: Tensor, split: int, notes: list[str]
) -> dict[str, Tensor]:
    """Check the given masks, choose one of several splits, and draw the masks if none is given.

    The loss may leave out more vertices.

    Args:
        given: The user's masks by name; None or an absent name means that the mask is not given.
        num_nodes: The number of vertices.
        labelled: The vertices that a split is drawn from.
        split: The index among several splits, or the seed of the draw if no mask is given.
        notes: Sentences for the start of the run; this function appends its own.

    Returns:
        The three masks, by name.

    Raises:
        DataError: If a mask is malformed, two masks overlap, or the split does not exist.

    Shapes:
        given ``[N]`` or ``[N, splits]``; labelled and each mask ``[N]``, bool.
    """
    if split < 0:
        raise DataError("data.split to be 0 or more", f"{split}")
    if all(given.get(name) is None for name in NAMES):
        notes.append(f"No masks given: a 60/20/20 split of the labelled vertices is drawn with seed {split}.")
        if not bool(labelled.any()):
            raise nobody(0, num_nodes, num_nodes)
        # Vertices without a label are in no mask.
        return draw(num_nodes, split, labelled)
    # A mask that is not given is empty.
    masks = _choose({name: _mask(name, given.get(name), num_nodes) for name in NAMES}, split, notes)
    _refuse_overlap(masks)
    return masks


def of_ids(ids: object, given: Mapping[str, object], num_nodes: int) -> dict[str, object]:
    """Return masks of OGB's ``split_idx``: ids (or a mask) by ``train``, ``valid`` (or ``val``), ``test``.

    Args:
        ids: The user's ``split_idx``.
        given: The masks that the data also has.
        num_nodes: The number of vertices.

    Raises:
        DataError: If there are masks too, names are missing, or an entry is not a list of ids.
    """
    if not isinstance(ids, Mapping):
        raise DataError(
            "split_idx to be a dict of vertex ids by the names train, valid and test",
            f"a {type(ids).__name__}",
            where="data.split_idx",
            hint='data.split_idx = {"train": ..., "valid": ..., "test": ...}, or masks',
        )
    if given:
        raise DataError(
            "a split to be given once",
            f"split_idx and {', '.join(given)}",
            where="data.split_idx",
            hint="leave one of them out",
        )
    masks: dict[str, object] = {}
    # OGB's name is ``valid``; PyG's masks say ``val``.
    for name, words in zip(NAMES, (("train",), ("valid", "val"), ("test",)), strict=True):
        found = next((ids[word] for word in words if ids.get(word) is not None), None)
        if found is not None:
            masks[name] = _mask_of(f"split_idx[{words[0]!r}]", found, num_nodes)
    if not masks:
        raise DataError("split_idx to have train, valid and test", f"{', '.join(map(str, ids)) or 'nothing'}")
    return masks


def _mask_of(name: str, found: object, num_nodes: int) -> Tensor:
    chosen = numbers_of(name, found, _HOLDS)
    if chosen.dtype == torch.bool:
        return _mask(name, chosen, num_nodes)
    if chosen.dim() != 1 or chosen.is_floating_point() or chosen.is_complex():
        raise DataError(
            f"{name} to be a list of vertex ids",
            f"shape {list(chosen.shape)} of {chosen.dtype}",
            where=f"data.{name}",
        )
    odd = (chosen < 0) | (chosen >= num_nodes)
    if bool(odd.any()):
        raise DataError(
            f"vertex ids from 0 to {num_nodes - 1}",
            f"{int(chosen[odd][0])} in {name}",
            where=f"data.{name}",
        )
    mask = torch.zeros(num_nodes, dtype=torch.bool)
    mask[chosen.long()] = True
    return mask


def nobody(training: int, unlabelled: int, num_nodes: int) -> DataError:
    """Return the error for a split without a training vertex."""
    return DataError(
        "at least one vertex to train on",
        f"{training} of {num_nodes:,} vertices in train_mask, and {unlabelled:,} without a label",
        where="data.train_mask",
        hint="set data.train_mask, or leave all three masks out and a seeded split is drawn",
    )


def _mask(name: str, value: object, num_nodes: int) -> Tensor:
    if value is None:
        return torch.zeros(num_nodes, dtype=torch.bool)
    mask = numbers_of(name, value, _HOLDS)
    if mask.dim() not in (1, 2) or mask.size(0) != num_nodes:
        raise DataError(
            f"{name} to have a row for each of {num_nodes:,} vertices",
            f"shape {list(mask.shape)}",
            where=f"data.{name}",
            hint="a mask is a bool a vertex, not a list of vertex ids",
        )
    if mask.is_complex():
        raise DataError(f"{name} to hold true and false, or 0 and 1", f"{mask.dtype}")
    if mask.dtype != torch.bool:
        # NaN differs from both, so it is found as well.
        odd = (mask != 0) & (mask != 1)
        if odd.any():
            raise DataError(
                f"{name} to hold true and false, or 0 and 1",
                f"{mask[odd][0].item()} in row {int(odd.nonzero()[0, 0])}",
                where=f"data.{name}",
            )
    return mask.bool()


def _choose(masks: dict[str, Tensor], split: int, notes: list[str]) -> dict[str, Tensor]:
    """Return one column of each mask; a mask of one dimension serves every split (WikiCS's test)."""
    widths = {name: mask.size(1) for name, mask in masks.items() if mask.dim() == 2}
    # Only splits that every mask has.
    count = min(widths.values(), default=1)
    if split >= count:
        raise DataError(
            f"data.split to be less than the number of splits, {count}",
            f"{split}",
            where="data.split",
        )
    if count > 1:
        notes.append(f"Split {split} of {count} is used.")
    return {name: mask[:, split] if mask.dim() == 2 else mask for name, mask in masks.items()}


def _refuse_overlap(masks: dict[str, Tensor]) -> None:
    for i, first in enumerate(NAMES):
        for second in NAMES[i + 1 :]:
            both = (masks[first] & masks[second]).nonzero()
            if both.numel():
                raise DataError(
                    f"{first} and {second} to have no vertex in common",
                    f"{both.size(0):,} in both, the first of them vertex {int(both[0])}",
                    where=f"data.{first}",
                )
