"""Run results: predictions in the vertices' original order and the summary, collected from all ranks.

Where it sits: ``train.trainer`` asks for predictions, and for the summary at the end of a run.
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
from kagome.storage.atomic import draft


def original_order(rows: Any, part: Partition, channel: Channel, action: str) -> Any:
    """Return the rows of all ranks in the vertices' original order on rank 0; None on other ranks.

    Shapes:
        ``[n, ...]`` -> ``[N, ...]``; in a nest, for each tensor.

    Cost:
        N rows and N ids sent to rank 0.
    """
    if not isinstance(rows, Tensor):
        # Each leaf is gathered by a collective of its own, so all ranks must have the same nest. Leaves
        # without a row per vertex (strings, losses) stay as rank 0 has them.
        leaves, form = tree_flatten(rows)
        count = part.own.numel()
        whole = [original_order(o, part, channel, action) if has_rows(o, count) else o for o in leaves]
        return None if channel.rank else tree_unflatten(whole, form)
    found = channel.gather_rows(rows, action=action, dst=0)
    ids = channel.gather_rows(part.own.to(rows.device), action=f"{action}: ids", dst=0)
    if found is None or ids is None:
        return None
    joined = torch.cat(found)
    # Rows arrive part by part. `ids` are their numbers in the whole graph and name each vertex once.
    out = torch.empty_like(joined)
    out[torch.cat(ids)] = joined
    return out


def arrays_of(scores: Any) -> dict[str, Any]:
    """Return the arrays of a ``.npz`` file: ``scores``, or for a nest ``scores.0``, ``scores.name`` etc.

    Strings and None, which forward may return beside them, are left out.
    """
    leaves = [("", scores)] if isinstance(scores, Tensor) else tree_flatten_with_path(scores)[0]
    return {
        "scores" + "".join(f".{_key(key)}" for key in path): as_array(leaf)
        for path, leaf in leaves
        if isinstance(leaf, Tensor | bool | int | float)
    }


def as_array(value: Any) -> Any:
    """Return a tensor or a number as a NumPy array; float16 and bfloat16 become float32."""
    if not isinstance(value, Tensor):
        return np.asarray(value)
    kept = value.detach().cpu()
    return (kept.float() if kept.dtype in (torch.bfloat16, torch.float16) else kept).numpy()


def _key(key: Any) -> str:
    """Return the name of a position in a nest."""
    # pytree keys: MappingKey has `key`, SequenceKey has `idx`.
    return str(getattr(key, "key", getattr(key, "idx", key)))


def write_scores(path: Path, scores: Any) -> str:
    """Write scores atomically to a ``.npy`` file, or to a ``.npz`` file as :func:`arrays_of` names them.

    Returns:
        The shape of the scores, or the arrays' names and shapes, in words.

    Raises:
        ConfigError: If the file cannot be written.
    """
    arrays = arrays_of(scores)
    if path.suffix == ".npy" and len(arrays) > 1:
        raise ConfigError(
            "one array for a .npy file",
            f"{len(arrays)} from the model: {', '.join(arrays)}",
            hint=f"--out {path.with_suffix('.npz').name}",
        )
    try:
        with draft(path) as beside, beside.open("wb") as file:
            if path.suffix == ".npy":
                np.save(file, *arrays.values())
            else:
                np.savez_compressed(file, **arrays)
    except OSError as error:
        raise ConfigError(f"scores to be written to {path}", f"{error}") from None
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
    """Return the summary's values, and the spans of all ranks. All ranks call it.

    Args:
        records: The records of all epochs.
        spans: The spans of this rank.
        memory: Peak memory of this rank in bytes, and its memory by kind, predicted and measured.
        channel: The channel of all ranks.
        meta: Metadata of the whole graph's partition.
        facts: Values that every rank knows by itself: the other arguments of
            :func:`kagome.report.summary.summary`.
    """
    # One message for all values of a rank: tuples of (peak, memory by kind, spans, seconds by phase).
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
    columns = ("part", "vertices", "edges", "sent", "halo", "halo share")
    return {
        "partitioner": meta.method,
        "cut": quality.cut,
        "advice": list(quality.advice),
        "rows": [dict(zip(columns, row, strict=True)) for row in quality.table()],
    }
