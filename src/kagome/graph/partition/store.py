"""Partition store: partitions on disk, one safetensors file per part and one page of metadata.

A rank reads the page and its own part only. The page holds checksums of itself and of each part, so an
altered file is reported before it is used.

Where it sits: ``kagome partition`` saves here; each rank of ``kagome train --data.partition`` loads its part.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, get_type_hints

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch_geometric.data import Data

from kagome.config.fields import fits, path_of
from kagome.errors import PartitionError
from kagome.graph.partition.choice import PartitionMethod
from kagome.graph.partition.partition import Partition
from kagome.graph.partition.quality import Quality, measured
from kagome.graph.partition.store_checks import COUNTS, Attributes, attributes_of, fault_of, quality_fault
from kagome.graph.structure import nested_values
from kagome.graph.structure.attributes import Shared, tensors_of
from kagome.graph.structure.labels import Labels
from kagome.graph.structure.validate import facts_of
from kagome.storage import sealed_files, temporary
from kagome.storage.sealed_files import Seal, SealError

FORMAT: Final = 3
PAGE: Final = "partition.json"
_PLAIN: Final = ("own", "halo", "edge_index", "edge_ids", "send")


@dataclass(frozen=True, kw_only=True)
class Meta:
    """Metadata of a partition: what a rank knows of the whole graph without holding it.

    Args:
        fingerprint: The fingerprint that each part also holds.
        method: The partitioner's name.
        seed: The partitioner's seed.
        num_parts: The number of parts.
        num_nodes: The number of vertices of the whole graph.
        num_edges: The number of edges of the whole graph.
        features: The number of columns of x; 0 without x.
        labels: Facts about y; None without y.
        notes: Sentences about the data, printed at the start of a run.
        quality: The quality of the cut.
    """

    fingerprint: str
    method: str
    seed: int
    num_parts: int
    num_nodes: int
    num_edges: int
    features: int
    labels: Labels | None
    notes: tuple[str, ...]
    quality: Quality

    @property
    def num_classes(self) -> int:
        """Number of columns that a model must return if no loss is named; 0 without labels."""
        return 0 if self.labels is None else self.labels.outputs


def describe(
    data: Data,
    owner: Tensor,
    partitions: Sequence[Partition],
    *,
    method: str,
    seed: int,
    notes: Sequence[str] = (),
) -> Meta:
    """Return the metadata of a cut whose parts have been made.

    Args:
        data: The whole graph, validated.
        owner: The part of each vertex.
        partitions: All parts.
        method: The partitioner's name.
        seed: The partitioner's seed.
        notes: Sentences about the data.

    Returns:
        The metadata.

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
    """Return the metadata of a cut before its parts are made, and which parts read each vertex.

    Args:
        data: The whole graph, validated.
        owner: The part of each vertex.
        parts: The number of parts.
        fingerprint: The fingerprint that each part will hold.
        method: The partitioner's name.
        seed: The partitioner's seed.
        notes: Sentences about the data.

    Shapes:
        owner ``[N]``; readers ``[N, parts / 64]``, an argument of ``partition.extract``.
    """
    weights = PartitionMethod.parse(method).of_parts
    found, readers = measured(data.edge_index, owner, parts, weights)
    meta = Meta(
        fingerprint=fingerprint,
        method=method,
        seed=seed,
        num_parts=parts,
        num_nodes=int(data.num_nodes),
        num_edges=data.edge_index.size(1),
        features=0 if data.x is None else data.x.size(-1) if data.x.dim() > 1 else 1,
        labels=facts_of(data),
        notes=tuple(notes),
        quality=found,
    )
    return meta, readers


def save(partitions: Iterable[Partition], folder: str | Path, meta: Meta) -> None:
    """Write all parts into a temporary folder and rename it, so that the folder is complete once it exists.

    Args:
        partitions: All parts, in order; each is written before the next is asked for.
        folder: Where to write; an existing partition is replaced, any other content is an error.
        meta: The metadata, from :func:`describe`.

    Raises:
        PartitionError: If the folder holds something else or cannot be written.
    """
    folder = path_of(folder, "the folder of a partition")
    # A user's folder of something else, or a file, is never replaced.
    if folder.exists() and not (folder / PAGE).exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise PartitionError(
            f"{folder} to be new, empty or a partition",
            "other content",
            hint="take another folder",
        )
    # Beside the folder, thus on the same file system, so that each rename is one step.
    fresh = folder.with_name(f".{folder.name}.{os.getpid()}.new")
    stale = folder.with_name(f".{folder.name}.{os.getpid()}.old")
    # A process that was killed between the two renames below has left its ``.old`` as the only partition.
    for ending in ("new", "old") if (folder / PAGE).exists() else ("new",):
        temporary.clear(folder.parent, f".{folder.name}.*.{ending}")
    try:
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
        with temporary.held(fresh):
            _write(partitions, fresh, meta)
            # A folder cannot be renamed onto one with content: between the two renames there is no partition.
            if folder.exists():
                folder.rename(stale)
            try:
                fresh.rename(folder)
            except OSError:
                if stale.exists():
                    stale.rename(folder)  # the old partition is the only one
                raise
    except OSError as error:
        raise PartitionError(f"a partition to be written to {folder}", f"{error.strerror or error}") from None
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
        # If neither rename to ``folder`` worked, the old partition is the only one.
        if folder.exists():
            shutil.rmtree(stale, ignore_errors=True)


def _write(partitions: Iterable[Partition], fresh: Path, meta: Meta) -> None:
    seals: dict[str, Seal] = {}
    attributes: dict[str, tuple[str, tuple[int, ...]]] = {}
    plain: dict[str, Any] = {}
    for piece in partitions:
        facts = {
            name: getattr(piece, name) for name in (*COUNTS, "send_counts", "recv_counts", "fingerprint")
        }
        file = _file(fresh, piece.part)
        # Parts are not synced: a crash may lose one, and its checksum on the synced page shows that.
        seals[file.name] = sealed_files.write_tensors(file, _tensors(piece), json.dumps(facts), sync=False)
        attributes = attributes_of(piece)
        shared = {k: nested_values.to_json(v) for k, v in piece.shared.items() if not isinstance(v, Tensor)}
        # The same in all parts, so one copy is on the page.
        plain = {"shared": shared, "refused": piece.refused}
    page = {"format": FORMAT, **dataclasses.asdict(meta), "attributes": attributes, **plain}
    sealed_files.write_page(fresh / PAGE, {**page, "files": sealed_files.told_of(seals)})


@dataclass(frozen=True)
class _Page:
    """The page of a partition: the metadata, and what is only needed to read and check the parts."""

    meta: Meta
    attributes: dict[str, tuple[str, tuple[int, ...]]]
    files: dict[str, Seal]
    shared: dict[str, Shared]
    refused: dict[str, str]


def load_meta(folder: str | Path) -> Meta:
    """Read the metadata of a saved partition.

    Raises:
        PartitionError: If there is none, or it cannot be read.
    """
    return _page(Path(folder)).meta


def verify_sizes(folder: str | Path) -> Meta:
    """Read the metadata of a saved partition after checking that its files have their recorded sizes.

    Raises:
        PartitionError: If there is none, or a file is missing or has another size.

    Cost: one ``stat`` of each file.
    """
    page = _page(Path(folder))
    try:
        for name, seal in page.files.items():
            sealed_files.verify_size(Path(folder) / name, seal)
    except SealError as error:
        raise _damaged(Path(folder), str(error)) from None
    return page.meta


def _page(folder: Path) -> _Page:
    path_of(folder, "the folder of a partition")
    if not (folder / PAGE).exists():
        raise PartitionError(
            f"a saved partition in {folder}",
            f"no {PAGE}",
            hint="kagome partition --data... --parts P --out DIR makes one",
        )
    try:
        facts = sealed_files.read_page(folder / PAGE)
        # Before anything else of the page, whose other fields may differ between formats.
        form = facts.pop("format", None)
        if form != FORMAT:
            raise SealError(f"{PAGE} has format {str(form)[:40]}, and this version reads format {FORMAT}")
        files = sealed_files.seals_of(facts.pop("files", None))
        attributes = {
            name: (str(kind), tuple(shape)) for name, (kind, shape) in facts.pop("attributes").items()
        }
        # JSON has no tuples.
        figures: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in facts.pop("quality").items()
        }
        labels = facts.pop("labels")
        if labels is not None:
            labels = Labels(**{**labels, "shape": tuple(labels["shape"])})
        plain = {k: nested_values.from_json(v) for k, v in facts.pop("shared").items()}, facts.pop("refused")
        meta = Meta(
            **{**facts, "notes": tuple(facts["notes"]), "labels": labels, "quality": Quality(**figures)}
        )
    except SealError as error:
        raise _damaged(folder, str(error)) from None
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise _damaged(folder, f"{PAGE} is damaged: {type(error).__name__}: {error}") from None
    # The number of files limits the set of names: a damaged ``num_parts`` could be huge.
    fault = (
        _meta_fault(meta, attributes)
        or _refused_fault(plain[1])
        or (
            "it does not name a file for each part"
            if set(files) != {_file(folder, part).name for part in range(min(meta.num_parts, len(files) + 1))}
            else ""
        )
    )
    if fault:
        raise _damaged(folder, f"{PAGE} is damaged: {fault}")
    return _Page(meta, attributes, files, *plain)


def _meta_fault(meta: Meta, attributes: Attributes) -> str:
    """Return the first fault of metadata that was read, or ``""`` if it has none."""
    for name, hint in get_type_hints(Meta).items():
        value = getattr(meta, name)
        if not fits(value, hint) or (type(value) is int and value < 0 and name != "seed"):
            return f"{name} is {str(value)[:40]!r}"
    for name, hint in get_type_hints(Quality).items():
        if not fits(getattr(meta.quality, name), hint):
            return f"quality.{name} is {str(getattr(meta.quality, name))[:40]!r}"
    for name, hint in get_type_hints(Labels).items() if meta.labels is not None else ():
        if not fits(getattr(meta.labels, name), hint):
            return f"labels.{name} is {str(getattr(meta.labels, name))[:40]!r}"
    # x of one dimension counts as one column, and has no width here.
    width = attributes.get("node.x", ("", ()))[1]
    if width and width[-1] != meta.features:
        return f"features is {meta.features}, and x has {width[-1]} columns"
    return quality_fault(meta.quality, meta.num_parts, meta.num_nodes, meta.num_edges)


def _refused_fault(refused: object) -> str:
    """Return the fault of the reasons for refused attributes, or ``""`` if they have none."""
    if not isinstance(refused, dict) or not all(isinstance(value, str) for value in refused.values()):
        return f"refused is {str(refused)[:40]!r}"
    return ""


def _labels_fault(y: Tensor | None, meta: Meta) -> str:
    """Return how labels contradict the facts on the page, or ``""`` if they agree."""
    facts = meta.labels
    if facts is None or y is None:
        return "" if facts is None and y is None else "y is in one of the page and the part, not in both"
    # NaN has no order, and torch has no extremes of booleans.
    values = y[~y.isnan()] if y.is_floating_point() else y.long()
    if not values.numel():
        return ""
    least, most = (end.item() for end in values.aminmax())
    if least >= facts.least and most <= facts.most:
        return ""
    return f"y goes from {least} to {most}, and the page says {facts.least} to {facts.most}"


def _damaged(folder: Path, fault: str) -> PartitionError:
    return PartitionError(
        f"{folder} to hold what kagome partition wrote",
        f"damaged files: {fault[:400]}",
        hint="make it again with kagome partition",
    )


def load_part(folder: str | Path, part: int) -> Partition:
    """Read one part; no other part is touched.

    Args:
        folder: The folder that :func:`save` wrote.
        part: The number of the part.

    Returns:
        The part.

    Raises:
        PartitionError: If the part is missing, damaged, or belongs to another cut than the page describes.
    """
    folder = Path(folder)
    page = _page(folder)
    meta = page.meta
    if not 0 <= part < meta.num_parts:
        raise PartitionError(
            f"a part from 0 to {meta.num_parts - 1} of the {meta.num_parts} parts in {folder}",
            f"part {part}",
            hint=f"use {meta.num_parts} graph parts, or partition again",
        )
    file = _file(folder, part)
    try:
        # The checksum first: a damaged file does not reach the parser.
        sealed_files.verify(file, page.files[file.name])
        tensors, text = sealed_files.read_tensors(file)
        facts: dict[str, Any] = json.loads(text)
        for name in ("send_counts", "recv_counts"):
            facts[name] = tuple(facts[name])
        nodes, edges = _under(tensors, "node."), _under(tensors, "edge.")
        facts |= {name: tensors[name] for name in _PLAIN}
        shared = page.shared | _under(tensors, "shared.")
        piece = Partition(**facts, nodes=nodes, edges=edges, shared=shared, refused=page.refused)
        # An undamaged part of another cut, copied into this folder by hand.
        if (piece.fingerprint, piece.part, piece.num_parts) != (meta.fingerprint, part, meta.num_parts):
            raise SealError(
                f"{file.name} holds part {piece.part} of {piece.num_parts} of the cut {piece.fingerprint}, "
                f"and part {part} of {meta.num_parts} of the cut {meta.fingerprint} was expected"
            )
        fault = fault_of(piece, meta.quality, page.attributes)
        fault = fault or _labels_fault(piece.nodes.get("y"), meta)
    except (SealError, KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        fault = str(error) if isinstance(error, SealError) else f"{file.name}: {error}"
        raise _damaged(folder, fault) from None
    if fault:
        raise _damaged(folder, f"{file.name}: {fault}")
    return piece


def _file(folder: Path, part: int) -> Path:
    return folder / f"part-{part:05d}.safetensors"


def _tensors(piece: Partition) -> dict[str, Tensor]:
    tensors = {name: getattr(piece, name) for name in _PLAIN}
    tensors |= {f"node.{name}": value for name, value in piece.nodes.items()}
    tensors |= {f"edge.{name}": value for name, value in piece.edges.items()}
    return tensors | {f"shared.{name}": value for name, value in tensors_of(piece.shared).items()}


def _under(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
