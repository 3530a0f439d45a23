"""Outcome: what a run gave, joined from all ranks - rows in original order, the values of the summary.

Where it sits: ``train.trainer`` asks it for predictions and at the end of a run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_flatten_with_path, tree_unflatten

from kagome.comm.channel import Channel
from kagome.components.task import has_rows
from kagome.errors import ConfigError
from kagome.graph.partition.partition import Partition
from kagome.graph.partition.store import Meta
from kagome.records.epoch import EpochRecord
from kagome.records.pipeline import pipeline_summary
from kagome.records.spans import Span, Spans
from kagome.report.summary import summary


def original_order(rows: Any, part: Partition, channel: Channel, action: str) -> Any:
    """Own rows of all ranks, joined in the vertices' original order on rank 0; None elsewhere.

    Shapes:
        ``[n, ...]`` -> ``[N, ...]``; of a nest each tensor.

    Cost:
        N rows and N ids to rank 0.
    """
    if not isinstance(rows, Tensor):
        leaves, form = tree_flatten(rows)
        count = part.own.numel()
        whole = [original_order(o, part, channel, action) if has_rows(o, count) else o for o in leaves]
        return None if channel.rank else tree_unflatten(whole, form)
    found = channel.gather_rows(rows, action=action, dst=0)
    ids = channel.gather_rows(part.own.to(rows.device), action=f"{action}: ids", dst=0)
    if found is None or ids is None:
        return None
    joined = torch.cat(found)
    out = torch.empty_like(joined)
    out[torch.cat(ids)] = joined
    return out


def arrays_of(scores: Any) -> dict[str, Any]:
    """The arrays of a ``.npz`` file of scores: ``scores``, or of a nest ``scores.0``, ``scores.name`` ...

    Texts and None, which forward may give beside them, are left out.
    """
    leaves = [("", scores)] if isinstance(scores, Tensor) else tree_flatten_with_path(scores)[0]
    return {
        "scores" + "".join(f".{_key(key)}" for key in path): as_array(leaf)
        for path, leaf in leaves
        if isinstance(leaf, Tensor | bool | int | float)
    }


def as_array(value: Any) -> Any:
    """A tensor or a number for NumPy, which has no bfloat16."""
    if not isinstance(value, Tensor):
        return np.asarray(value)
    kept = value.detach().cpu()
    return (kept.float() if kept.dtype in (torch.bfloat16, torch.float16) else kept).numpy()


def _key(key: Any) -> str:
    """A place in a nest, as a word."""
    return str(getattr(key, "key", getattr(key, "idx", key)))


def write_scores(path: Path, scores: Any) -> str:
    """Write scores to a ``.npy`` file, or as :func:`arrays_of` to a ``.npz`` file, that appears whole.

    Returns:
        Their shape, or their names with their shapes, in words.

    Raises:
        ConfigError: If it cannot be written.
    """
    arrays = arrays_of(scores)
    if path.suffix == ".npy" and len(arrays) > 1:
        raise ConfigError(
            "a .npy file holds one array",
            f"the model gives {len(arrays)}: {', '.join(arrays)}",
            hint=f"--out {path.with_suffix('.npz').name}",
        )
    fresh = path.with_name(f".{path.name}")
    try:
        with fresh.open("wb") as file:
            if path.suffix == ".npy":
                np.save(file, *arrays.values())
            else:
                np.savez_compressed(file, **arrays)
        fresh.rename(path)
    except OSError as error:
        raise ConfigError(f"scores go to {path}", f"it cannot be written: {error}") from None
    shapes = {name: " x ".join(f"{size:,}" for size in each.shape) for name, each in arrays.items()}
    if len(shapes) == 1:
        return next(iter(shapes.values()))
    return ", ".join(f"{name}: {shape or 'a number'}" for name, shape in shapes.items())


def outcome(
    records: Sequence[EpochRecord],
    spans: Spans,
    memory: tuple[int, dict[str, Any]],
    channel: Channel,
    meta: Meta,
    facts: Mapping[str, Any],
) -> tuple[dict[str, Any], list[list[Span]]]:
    """The summary's values, and the spans of all ranks. All ranks call it.

    Args:
        records: All epochs.
        spans: Of this rank.
        memory: Peak memory of this rank, bytes; what it holds, predicted and measured.
        channel: All ranks.
        meta: Of the whole graph.
        facts: What every rank knows by itself: the other arguments of :func:`kagome.report.summary.summary`.
    """
    gathered: Any = channel.gather_objects((*memory, spans.as_list(), spans.seconds()), "reports", [Span])
    peaks, held, all_spans, phases = (list(column) for column in zip(*gathered, strict=True))
    values = summary(
        records=records,
        peak_memory_bytes=peaks,
        memory=held,
        phases=phases,
        partition=_quality_rows(meta),
        pipeline=pipeline_summary(all_spans),
        **facts,
    )
    return values, all_spans


def _quality_rows(meta: Meta) -> dict[str, Any]:
    quality = meta.quality
    columns = ("part", "vertices", "edges", "halo", "halo share")
    return {
        "partitioner": meta.method,
        "cut": quality.cut,
        "advice": list(quality.advice),
        "rows": [dict(zip(columns, row, strict=True)) for row in quality.table()],
    }
