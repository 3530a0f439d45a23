"""Store: partitions on disk, a safetensors file a part and one page of facts; a rank needs no more.

Where it sits: ``kagome partition`` saves here, each rank of ``kagome train --data.partition`` loads its own.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch_geometric.data import Data

from kagome.errors import PartitionError
from kagome.graph.partition import Partition
from kagome.graph.quality import Quality, measured
from kagome.graph.validate import Task, num_classes, task

FORMAT: Final = 1
PAGE: Final = "partition.json"
_PLAIN: Final = ("own", "halo", "edge_index", "edge_ids", "send")
_COUNTS: Final = ("part", "num_parts", "num_nodes", "num_edges", "last_vertex")


@dataclass(frozen=True, kw_only=True)
class Meta:
    """What a rank knows of the whole graph without having it.

    Args:
        fingerprint: As in each part.
        method: Partitioner.
        seed: Its seed.
        num_parts: Parts.
        num_nodes: Vertices of the whole graph.
        num_edges: Edges of the whole graph.
        features: Columns of x.
        num_classes: Columns that a model must give.
        task: One class a vertex, or several labels at once.
        notes: Sentences on the data, said at the start of a run.
        quality: How good the cut is.
    """

    fingerprint: str
    method: str
    seed: int
    num_parts: int
    num_nodes: int
    num_edges: int
    features: int
    num_classes: int
    task: Task
    notes: tuple[str, ...]
    quality: Quality


def describe(
    data: Data,
    owner: Tensor,
    partitions: Sequence[Partition],
    *,
    method: str,
    seed: int,
    notes: Sequence[str] = (),
) -> Meta:
    """The facts that go with a cut.

    Args:
        data: The whole graph, validated.
        owner: Part of each vertex.
        partitions: All parts.
        method: Partitioner.
        seed: Its seed.
        notes: Sentences on the data.

    Returns:
        The facts.

    Shapes:
        owner ``[N]``.
    """
    return measure(
        data,
        owner,
        len(partitions),
        fingerprint=partitions[0].fingerprint,
        method=method,
        seed=seed,
        notes=notes,
    )[0]


def measure(
    data: Data,
    owner: Tensor,
    parts: int,
    *,
    fingerprint: str,
    method: str,
    seed: int,
    notes: Sequence[str] = (),
) -> tuple[Meta, NDArray[np.int64]]:
    """The facts that go with a cut before its parts are made, and which parts read each vertex.

    Args:
        data: The whole graph, validated.
        owner: Part of each vertex.
        parts: Parts.
        fingerprint: As in each part.
        method: Partitioner.
        seed: Its seed.
        notes: Sentences on the data.

    Shapes:
        owner ``[N]``; readers ``[N, parts / 64]``, what ``partition.extract`` takes.
    """
    found, readers = measured(data.edge_index, owner, parts)
    meta = Meta(
        fingerprint=fingerprint,
        method=method,
        seed=seed,
        num_parts=parts,
        num_nodes=int(data.num_nodes),
        num_edges=data.edge_index.size(1),
        features=data.x.size(-1),
        num_classes=num_classes(data),
        task=task(data),
        notes=tuple(notes),
        quality=found,
    )
    return meta, readers


def save(partitions: Iterable[Partition], folder: str | Path, meta: Meta) -> None:
    """Write all parts: into a folder beside, then renamed, so that a folder of that name is always whole.

    Args:
        partitions: All parts, in order; each is written before the next is asked for.
        folder: Where to; a partition that is there already is replaced, anything else is not.
        meta: The facts, from :func:`describe`.

    Raises:
        PartitionError: If the folder holds something else or cannot be written.
    """
    from safetensors.torch import save_file

    folder = Path(folder)
    if folder.exists() and not (folder / PAGE).exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise PartitionError(
            f"a partition was to be written to {folder}",
            "something else is there",
            hint="take another folder",
        )
    fresh = folder.with_name(f".{folder.name}.{os.getpid()}.new")
    stale = folder.with_name(f".{folder.name}.{os.getpid()}.old")
    try:
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
        for piece in partitions:
            facts = {
                name: getattr(piece, name) for name in (*_COUNTS, "send_counts", "recv_counts", "fingerprint")
            }
            save_file(_tensors(piece), _file(fresh, piece.part), metadata={"kagome": json.dumps(facts)})
        (fresh / PAGE).write_text(json.dumps({"format": FORMAT, **dataclasses.asdict(meta)}, indent=1) + "\n")
        if folder.exists():
            folder.rename(stale)
        fresh.rename(folder)
    except OSError as error:
        raise PartitionError(f"a partition was to be written to {folder}", f"it cannot be: {error}") from None
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
        if folder.exists():
            shutil.rmtree(stale, ignore_errors=True)


def load_meta(folder: str | Path) -> Meta:
    """Read the facts of a saved partition.

    Raises:
        PartitionError: If there is none, or it cannot be read.
    """
    page = Path(folder) / PAGE
    try:
        facts: dict[str, Any] = json.loads(page.read_text())
        form = facts.pop("format")
        figures: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in facts.pop("quality").items()
        }
        if form != FORMAT:
            raise PartitionError(
                f"this version reads partitions of format {FORMAT}",
                f"{page} has format {form}",
                hint="make it again with kagome partition",
            )
        return Meta(**{**facts, "notes": tuple(facts["notes"]), "quality": Quality(**figures)})
    except OSError as error:
        raise PartitionError(
            f"a saved partition was expected in {folder}",
            f"{PAGE} cannot be read: {error.strerror}",
            hint="kagome partition --data... --parts P --out DIR makes one",
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
        raise PartitionError(
            f"{page} must be a page that kagome partition wrote", f"it is damaged: {error}"
        ) from None


def load_part(folder: str | Path, part: int) -> Partition:
    """Read one part; no other is touched.

    Args:
        folder: Where :func:`save` wrote.
        part: Number of the part.

    Returns:
        The part.

    Raises:
        PartitionError: If it is missing, damaged, or of another cut than the folder's page says.
    """
    from safetensors import SafetensorError, safe_open

    meta = load_meta(folder)
    if not 0 <= part < meta.num_parts:
        raise PartitionError(
            f"part {part} was asked for",
            f"{folder} holds {meta.num_parts} parts, counted from 0",
            hint=f"use {meta.num_parts} graph parts, or partition again",
        )
    file = _file(Path(folder), part)
    if not file.exists():
        raise PartitionError(
            f"part {part} of {meta.num_parts} was expected in {folder}", f"{file.name} is missing"
        )
    try:
        with safe_open(file, framework="pt") as opened:
            facts = json.loads((opened.metadata() or {})["kagome"])
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - no mapping
        for name in ("send_counts", "recv_counts"):
            facts[name] = tuple(facts[name])
        nodes, edges = _under(tensors, "node."), _under(tensors, "edge.")
        piece = Partition(**facts, **{name: tensors[name] for name in _PLAIN}, nodes=nodes, edges=edges)
    except (SafetensorError, OSError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise PartitionError(
            f"{file} must be a part that kagome partition wrote",
            f"it is damaged: {error}",
            hint="make it again with kagome partition",
        ) from None
    if (piece.fingerprint, piece.part, piece.num_parts) != (meta.fingerprint, part, meta.num_parts):
        raise PartitionError(
            f"part {part} of {meta.num_parts} of the cut {meta.fingerprint} was expected",
            f"the file holds part {piece.part} of {piece.num_parts} of the cut {piece.fingerprint}",
            where=str(file),
            hint="make it again with kagome partition",
        )
    return piece


def _file(folder: Path, part: int) -> Path:
    return folder / f"part-{part:05d}.safetensors"


def _tensors(piece: Partition) -> dict[str, Tensor]:
    tensors = {name: getattr(piece, name) for name in _PLAIN}
    tensors |= {f"node.{name}": value for name, value in piece.nodes.items()}
    tensors |= {f"edge.{name}": value for name, value in piece.edges.items()}
    # safetensors refuses views that share memory; a tensor that has its memory to itself needs no copy.
    alone = Counter(value.untyped_storage().data_ptr() for value in tensors.values())
    return {
        name: value.contiguous()
        if alone[value.untyped_storage().data_ptr()] == 1
        else value.clone(memory_format=torch.contiguous_format)
        for name, value in tensors.items()
    }


def _under(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
