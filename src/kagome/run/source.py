"""Source: how each rank comes by its part - from a graph in memory, a saved partition, or settings.

Where it sits: the first step of ``trainer``. From settings, one process of each host loads the whole graph,
cuts it, writes the parts and ends, so that no rank ever holds more than its own.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch_geometric.data import Data

from kagome import config, errors
from kagome.comm.channel import Channel
from kagome.errors import KagomeError, PartitionError
from kagome.graph import store
from kagome.graph.data import load_data
from kagome.graph.partition import Partition, extract, fingerprint, split_all
from kagome.graph.partitioners import assign
from kagome.graph.quality import quality
from kagome.graph.store import Meta
from kagome.graph.validate import num_classes, task, validate


def from_data(
    data: object, channel: Channel, *, method: str, seed: int, split: int = 0
) -> tuple[Partition, Meta]:
    """The part of this rank, of a graph that every rank has in memory.

    Args:
        data: A PyG ``Data``; every rank gives the same.
        channel: The graph group; rank 0 cuts and tells the others.
        method: The partitioner's name.
        seed: Its seed.
        split: Which of several masks.

    Raises:
        DataError: If the data has a fault.

    Cost:
        One number a vertex to each rank.
    """
    clean, notes = validate(data, split=split)
    count = int(clean.num_nodes or 0)
    mark = fingerprint(clean, method, seed, channel.size)
    # Before anything whose size depends on the graph: gloo ends the process where sizes differ.
    marks = channel.gather_objects(mark, "compare the ranks' data")
    if len(set(marks)) > 1:
        raise PartitionError(
            "every rank gives the same graph",
            f"rank {channel.rank}'s differs from another's: fingerprints "
            f"{', '.join(sorted(set(map(str, marks))))}",
            hint="seed whatever makes the data, or load it from one file",
        )
    owner = torch.zeros(count, dtype=torch.int64, device=channel.device)
    if channel.rank == 0:
        owner = assign(method, clean.edge_index, count, channel.size, seed).to(channel.device)
    owner = channel.broadcast(owner, 0, action="broadcast of the partition").cpu()
    part = extract(clean, owner, channel.rank, channel.size, fingerprint=mark)
    meta = _meta(clean, notes, mark, method, seed, channel.size, owner)
    return part, meta


def _meta(
    data: Data, notes: list[str], mark: str, method: str, seed: int, parts: int, owner: torch.Tensor
) -> Meta:
    return Meta(
        fingerprint=mark,
        method=method,
        seed=seed,
        num_parts=parts,
        num_nodes=int(data.num_nodes or 0),
        num_edges=data.edge_index.size(1),
        features=data.x.size(-1),
        num_classes=num_classes(data),
        task=task(data),
        notes=tuple(notes),
        quality=quality(data.edge_index, owner, parts),
    )


def from_folder(folder: str | Path, channel: Channel) -> tuple[Partition, Meta]:
    """The part of this rank, of a saved partition; no other is read.

    Raises:
        PartitionError: If the folder has another number of parts than there are ranks, or is damaged.
    """
    meta = store.load_meta(folder)
    if meta.num_parts != channel.size:
        raise PartitionError(
            f"{channel.size} ranks need a partition of {channel.size} parts",
            f"{folder} holds {meta.num_parts}",
            hint=f"start {meta.num_parts} ranks, or kagome partition --parts {channel.size}",
        )
    part = store.load_part(folder, channel.rank)
    marks = channel.gather_objects(part.fingerprint, "compare the ranks' parts")
    if len(set(marks)) > 1:
        raise PartitionError(
            "all ranks read parts of one cut", f"they read parts of {len(set(marks))}: {marks}"
        )
    return part, meta


def from_settings(
    settings: config.Data, channel: Channel, *, method: str, seed: int
) -> tuple[Partition, Meta]:
    """The part of this rank, of a graph named by settings; see the head of this file.

    Raises:
        KagomeError: What loading or cutting raised, on every rank.

    Cost:
        One more process a host while the graph is loaded and cut; the parts on its disk until all have read.
    """
    if settings.partition is not None:
        part, meta = from_folder(settings.partition, channel)
        return part, dataclasses.replace(meta, notes=(*meta.notes, *_unheeded(settings)))
    if channel.size == 1:
        data = load_data(settings)
        part, meta = from_data(data, channel, method=method, seed=seed)
        return part, dataclasses.replace(meta, notes=tuple(dict.fromkeys((*data.notes, *meta.notes))))
    host = socket.gethostname()
    hosts = channel.gather_objects(host, "find the hosts")
    first = hosts.index(host) == channel.rank
    made: tuple[str, KagomeError | None] | None = None
    if first:
        folder = tempfile.mkdtemp(prefix="kagome-parts-")
        made = (folder, _prepare(settings, method, seed, channel.size, folder))
    try:
        offers = channel.gather_objects(made, "load and cut the graph")
        for offer in offers:
            if isinstance(offer, tuple) and offer[1] is not None:
                raise offer[1]
        place = offers[hosts.index(host)]
        assert isinstance(place, tuple)
        part, meta = from_folder(Path(place[0]) / "parts", channel)
        channel.barrier("all parts are read")
    finally:
        if made is not None:
            shutil.rmtree(made[0], ignore_errors=True)
    return part, meta


def _unheeded(settings: config.Data) -> tuple[str, ...]:
    """What was asked of the data that a saved partition has long decided."""
    plain = config.Data()
    names = [f.name for f in dataclasses.fields(plain) if f.name not in ("partition", "root")]
    asked = [f"data.{name}" for name in names if getattr(settings, name) != getattr(plain, name)]
    if not asked:
        return ()
    return (f"the graph is as {settings.partition} has it: {', '.join(asked)} had their say when it was cut",)


def _prepare(settings: config.Data, method: str, seed: int, parts: int, folder: str) -> KagomeError | None:
    """Run :func:`prepare` in a process of its own; its error, if it had one."""
    order = json.dumps([dataclasses.asdict(settings), method, seed, parts, folder])
    done = subprocess.run(
        [sys.executable, "-m", "kagome.run.source", order], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL
    )
    if done.returncode == 0:
        return None
    lines = done.stdout.decode(errors="replace").strip().splitlines()
    try:
        leaf, asked, found, where, hint = json.loads(lines[-1])
        kind: type[KagomeError] = getattr(errors, leaf)
        return kind(asked, found, where=where, hint=hint)
    except (IndexError, ValueError):
        return PartitionError(
            "the graph was to be loaded and cut in a process of its own",
            f"that process ended with {done.returncode}",
            hint="see its message above; with too little memory, kagome partition on a larger machine",
        )


def prepare(settings: config.Data, *, method: str, seed: int, parts: int, folder: str | Path) -> Meta:
    """Load a graph, cut it, and write its parts; what ``kagome partition`` does."""
    data = load_data(settings)
    owner = assign(method, data.edge_index, int(data.num_nodes or 0), parts, seed)
    mark = fingerprint(data, method, seed, parts)
    meta = _meta(data, list(data.notes), mark, method, seed, parts, owner)
    store.save(split_all(data, owner, parts, fingerprint=mark), folder, meta)
    return meta


def degree_histogram(part: Partition, channel: Channel) -> torch.Tensor:
    """How many vertices of the whole graph have 0, 1, 2, ... in-edges (PNA asks for it).

    Shapes:
        ``[largest in-degree + 1]``, int64.
    """
    degree = torch.bincount(part.edge_index[1], minlength=part.own.numel())
    top = degree.max() if degree.numel() else torch.zeros((), dtype=torch.int64)
    most = int(channel.all_reduce(top.to(channel.device), "max", action="largest degree", kind="other"))
    local = torch.bincount(degree, minlength=most + 1).to(channel.device)
    return channel.all_reduce(local, action="degrees", kind="other").cpu()


def _main(order: str) -> int:
    data, method, seed, parts, folder = json.loads(order)
    try:
        prepare(config.Data(**data), method=method, seed=seed, parts=parts, folder=Path(folder) / "parts")
    except KagomeError as error:
        print(json.dumps([type(error).__name__, error.asked, error.found, error.where, error.hint]))
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(_main(sys.argv[1]))
