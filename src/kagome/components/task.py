"""Task: the context of an epoch: repeatable random draws, restored buffers, outputs with a row a vertex.

Where it sits: ``train.graph_engine``, ``pipelining.chunk_engine`` and what measures them use it; losses are
in ``objective.objective``, scores in ``objective.metrics``.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from itertools import zip_longest
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from kagome.comm.channel import Channel
from kagome.errors import ModelError
from kagome.graph.partition.partition import Partition
from kagome.graph.partition.sets_partition import Part
from kagome.placement.placement import Placements


def check_finite(loss: float, epoch: int) -> None:
    """Raise an error if the loss is NaN or infinite.

    Raises:
        ModelError: If it is not finite.
    """
    if not math.isfinite(loss):
        raise ModelError(
            "a finite loss",
            f"{loss}",
            where=f"epoch {epoch}",
            hint="a lower --train.lr, --train.clip 1.0, or a look at the features' scale",
        )


def has_rows(leaf: Any, count: int) -> bool:
    """Return whether a part of a model's output has a row for each of so many vertices."""
    return isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.size(0) == count


def rows_of(out: Any, rows: Tensor | slice, count: int) -> Any:
    """Return some rows of a model's output for so many vertices; parts without rows stay as they are."""
    return tree_map(lambda leaf: leaf[rows] if has_rows(leaf, count) else leaf, out)


def scores_of(out: Any, part: Part, placements: Placements | None = None) -> Any:
    """Return the output for the vertices that have scores; that of other vertex types may stand beside it.

    Args:
        out: What forward returned.
        part: The part that it ran on.
        placements: What is known of the output's rows, on a part of the graph.

    Raises:
        ModelError: If it has rows of another vertex set.
    """
    if isinstance(part, Partition):
        return out
    kind = part.names[part.target]
    if isinstance(out, Mapping) and not set(part.names).isdisjoint(out):
        if kind not in out:
            raise ModelError(f"scores of {kind} among those of vertex types", ", ".join(map(str, out)))
        out = out[kind]
    # Two sets may have equally many own rows on this rank, so the sizes do not say whose rows they are.
    for leaf in tree_leaves(out) if placements is not None else ():
        placement = placements.get(leaf) if isinstance(leaf, Tensor) and placements is not None else None
        if placement is not None and placement.vertex_set != part.target:
            raise ModelError(
                f"scores of {kind}",
                # Concatenated sets have numbers behind those of the graph.
                f"rows of {(*part.names, 'several')[min(placement.vertex_set, len(part.names))]}",
                hint=f"return h[{kind!r}], or a dict by vertex type; Train(target_type=...) names another",
            )
    return out


def check_rows(out: Any, own: int, rank: int, *, beside: Literal["none", "numbers", "any"] = "none") -> Any:
    """Return a model's output if it has a row a vertex; with several tensors at least one must have.

    Args:
        out: What forward returned.
        own: The number of vertices.
        rank: This rank, for the error.
        beside: What else the output may hold: numbers of the whole graph, such as a further loss, or
            anything.

    Raises:
        ModelError: If no tensor has a row a vertex, or the output holds something else.
    """
    # A leaf is either rows [own, ...], a tensor of another shape (`rowless`), or a number (0-dim or plain).
    leaves = tree_leaves(out)
    fits = [has_rows(leaf, own) for leaf in leaves]
    rowless = [
        isinstance(leaf, Tensor) and leaf.dim() > 0 and not fit
        for leaf, fit in zip(leaves, fits, strict=True)
    ]
    kept = any(fits) and (beside == "any" or (beside == "numbers" and not any(rowless)))
    if not kept and not (leaves and all(fits)):
        place = rowless.index(True) if any(rowless) else fits.index(False) if leaves else 0
        odd = out if isinstance(out, Tensor) or not leaves else leaves[place]
        got = f"shape {tuple(odd.shape)}" if isinstance(odd, Tensor) else type(odd).__name__
        raise ModelError(
            f"the model to give a row of scores for each of the part's {own} vertices",
            got,
            where=f"rank {rank}",
            hint="return a tensor with a row a vertex, or a tuple or dict of such",
        )
    return out


def refuse_own_values(leaves: Iterable[Tensor], channel: Channel) -> None:
    """Refuse outputs without rows that differ between ranks: they must be those of the whole graph.

    All ranks call it, after a first pass.

    Raises:
        ModelError: Naming what this rank and another one have.
    """
    mine: list[list[Any]] = [[list(each.shape), float(each.detach().double().sum().real)] for each in leaves]
    told: Any = channel.gather_objects(mine, "outputs that all ranks share")
    for rank, others in enumerate(told):
        for (shape, total), (their_shape, theirs) in zip_longest(mine, others, fillvalue=(None, math.nan)):
            # Equal to rounding: GPUs of several kinds may compute other last digits.
            same = math.isclose(total, theirs, rel_tol=1e-4) or (math.isnan(total) and math.isnan(theirs))
            if shape != their_shape or not same:
                raise ModelError(
                    "outputs with own rows, or the same on all ranks",
                    f"one of shape {shape} and sum {total:.6g} here, of shape {their_shape} and sum "
                    f"{theirs:.6g} on rank {channel.names[rank]}",
                    where=f"rank {channel.names[channel.rank]}",
                    hint="a mean or sum over all rows by torch, or a row a vertex",
                )


def forked() -> AbstractContextManager[None]:
    """Restore torch's generators after a block: that of the CPU, and those of all accelerators."""
    return torch.random.fork_rng(devices=range(torch.accelerator.device_count()))


@contextmanager
def draws_of(seed: int, epoch: int) -> Iterator[None]:
    """Seed torch's generator for a block, so that its draws depend on the epoch and not on the ranks."""
    # Seeding absent devices formats the whole stack for each device type: half a millisecond.
    seeds = torch.manual_seed if torch.accelerator.is_available() else torch.default_generator.manual_seed
    with forked():
        # Far from the small numbers that people choose, so that a seed set in forward differs from this.
        seeds((seed * 1_000_003 + epoch + 0x5851F42D4C957F2D) % 2**63)
        yield


@contextmanager
def undisturbed() -> Iterator[None]:
    """Restore all random generators after a block, whatever it draws."""
    # User code and PyG's transforms also draw from Python's and NumPy's generators.
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with forked():
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


@contextmanager
def unmoved(buffers: Iterable[Tensor]) -> Iterator[None]:
    """Restore buffers after a block, so that what is computed twice changes them once."""
    before = [(buffer, buffer.clone()) for buffer in buffers]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)


def in_float32(out: Any) -> Any:
    """Convert a model's output in bf16 to float32."""
    return tree_map(
        lambda leaf: leaf.float() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf, out
    )
