"""Data: how each rank gets its part, from a graph in memory, a saved partition, or settings.

Where it sits: the first step of ``trainer``. From settings, one process on each host loads the whole graph,
cuts it, writes the parts and ends (``host_parts``), so that no rank ever holds more than its own part. Where
the user's cache has the parts, that process does not run.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch_geometric.data import Data, HeteroData

from kagome import config
from kagome.comm.channel import Channel
from kagome.comm.exchange import ExchangeRequest
from kagome.comm.mesh import Mesh
from kagome.errors import DataError, KagomeError, PartitionError
from kagome.graph.datasets.load import load_data, load_graph
from kagome.graph.partition import cache, store
from kagome.graph.partition.choice import PartitionMethod, choose, is_auto
from kagome.graph.partition.partition import Partition, extract, fingerprint
from kagome.graph.partition.sets_partition import Part
from kagome.graph.partition.store import Meta
from kagome.graph.prepare import owners, prepare
from kagome.graph.prepare_process import Standby
from kagome.graph.structure.validate import validate
from kagome.kernels.first_calls import call_sums
from kagome.launch.host_memory import available_bytes
from kagome.train.host_parts import HostParts, Look, Offer
from kagome.train.sets_source import from_hetero

__all__ = [
    "degree_histogram",
    "for_all_stages",
    "for_model",
    "from_data",
    "from_folder",
    "from_given",
    "from_run",
    "from_settings",
    "prepare",
]


def for_all_stages(
    take: Callable[[Channel], tuple[Part, Meta]], mesh: Mesh, chunks: int | None = None
) -> tuple[Part, Meta]:
    """Return this rank's part; the ranks of the first stage take it and send it to the other stages.

    Args:
        take: Takes the part of a rank of the first stage.
        mesh: All ranks.
        chunks: The number of chunks of each part.

    Raises:
        KagomeError: The error that taking the part raised, on every rank.

    Cost:
        One part sent to each rank of the other stages.
    """
    if mesh.pipe.size == 1:
        own, meta = take(mesh.graph)
        whole = mesh.world.size == (chunks or 1) == 1
        return (uncut(own) if whole and isinstance(own, Partition) else own), meta
    found: object = None
    # The fault travels in place of the part: the ranks of later stages wait for it and would hang otherwise.
    if mesh.stage == 0:
        try:
            found = take(mesh.graph)
        except KagomeError as error:
            found = error
    # Attributes whose kind is unclear are only for a single rank that runs the whole graph, and are never
    # sent.
    if isinstance(found, tuple):
        found = replace(found[0], unclear={}), found[1]  # pipelines take graphs of one vertex set only
    found = mesh.pipe.gather_objects(found, "the part, for all stages", [Partition, Meta])[0]
    if isinstance(found, KagomeError):
        raise found
    part: tuple[Partition, Meta] = found  # type: ignore[assignment]
    return part


def uncut(part: Partition) -> Partition:
    """Return the whole graph for a single rank: forward receives attributes of unclear kind as they are."""
    refused = {name: why for name, why in part.refused.items() if name not in part.unclear}
    return replace(part, shared={**part.shared, **part.unclear}, refused=refused, unclear={})


def from_given(data: Any, settings: config.Run, channel: Channel) -> tuple[Part, Meta]:
    """Return this rank's part of what a user gives to a Trainer.

    Args:
        data: A PyG ``Data`` or ``HeteroData``, the same on every rank, or the folder of a saved partition.
        settings: The run's settings.
        channel: The graph group.

    Raises:
        DataError: If the data has a fault.
        PartitionError: If the folder has another number of parts than there are ranks, or is damaged.
    """
    if isinstance(data, str | Path):
        return from_folder(data, channel)
    if isinstance(data, HeteroData):
        return from_hetero(data, settings, channel)
    method, seed, reuse = settings.cut(channel.size)
    return from_data(data, channel, method=method, seed=seed, reuse=reuse)


def from_data(
    data: object, channel: Channel, *, method: str, seed: int, split: int = 0, reuse: bool = False
) -> tuple[Partition, Meta]:
    """Return this rank's part of a graph that every rank has in memory.

    Args:
        data: A PyG ``Data``, the same on every rank.
        channel: The graph group; rank 0 partitions and broadcasts the owners.
        method: The partitioner's name, or ``auto``.
        seed: The partitioner's seed.
        split: Which column of masks with several splits to use.
        reuse: Take the owners of vertices from the user's cache, and store them there.

    Raises:
        DataError: If the data has a fault.

    Cost:
        One number a vertex to each rank.
    """
    clean, notes = validate(data, split=split)
    return _from_clean(clean, notes, channel, method, seed, reuse)


def _from_clean(
    clean: Data, notes: Sequence[str], channel: Channel, method: str, seed: int, reuse: bool
) -> tuple[Partition, Meta]:
    count = int(clean.num_nodes or 0)
    available = None
    if is_auto(method) and channel.size > 1:  # rank 0 partitions, so its free memory decides
        available = channel.gather_objects(available_bytes(), "ask for rank 0's memory")[0]
    assert isinstance(available, int | None)
    method, choice_notes = choose(method, clean.edge_index, count, channel.size, available)
    mark = fingerprint(clean, method, seed, channel.size)
    # Compare before any message whose size depends on the graph: gloo aborts if sizes differ.
    marks = channel.gather_objects(mark, "compare the ranks' data")
    if len(set(marks)) > 1:
        raise PartitionError(
            "the same graph on every rank",
            f"another on rank {channel.rank} than elsewhere: fingerprints "
            f"{', '.join(sorted(set(map(str, marks))))}",
            hint="seed whatever makes the data, or load it from one file",
        )
    owner = torch.zeros(count, dtype=torch.int64, device=channel.device)
    entry = None
    if channel.rank == 0:
        found, entry = owners(
            clean, mark, method=method, seed=seed, parts=channel.size, kept=cache.opened(reuse)
        )
        owner = found.to(channel.device)
    # [vertices of the whole graph]: the part of each vertex.
    owner = channel.broadcast(owner, 0, action="broadcast of the partition").cpu()
    if entry is not None:
        choice_notes = (*choice_notes, cache.reused(entry))
    meta, readers = store.measure(
        clean, owner, channel.size, fingerprint=mark, method=method, seed=seed, notes=(*notes, *choice_notes)
    )
    return extract(clean, owner, channel.rank, channel.size, fingerprint=mark, readers=readers), meta


def from_folder(folder: str | Path, channel: Channel) -> tuple[Partition, Meta]:
    """Return this rank's part of a saved partition; the rank reads no other part.

    Raises:
        PartitionError: If the folder has another number of parts than there are ranks, or is damaged.
    """
    meta = store.load_meta(folder)
    if meta.num_parts != channel.size:
        raise PartitionError(
            f"as many parts as ranks, {channel.size}",
            f"{meta.num_parts} parts in {folder}",
            hint=f"start {meta.num_parts} ranks, or kagome partition --parts {channel.size}",
        )
    found: Partition | KagomeError
    # A rank whose part is damaged reports it in the gather, so that all ranks raise together.
    try:
        found = store.load_part(folder, channel.rank)
        mine: object = found.fingerprint, found.send_counts, found.recv_counts
    except KagomeError as error:
        found = mine = error
    told = channel.gather_objects(mine, "compare the ranks' parts")
    for each in (found, *told):
        if isinstance(each, KagomeError):
            raise each
    assert isinstance(found, Partition)
    facts = cast("list[tuple[str, tuple[int, ...], tuple[int, ...]]]", told)
    marks = [mark for mark, *_ in facts]
    if len(set(marks)) > 1:
        raise PartitionError("parts of one cut on all ranks", f"parts of {len(set(marks))}: {marks}")
    _refuse_unlike_lists(found, facts, channel, folder)
    return found, meta


def _refuse_unlike_lists(
    part: Partition,
    facts: Sequence[tuple[str, tuple[int, ...], tuple[int, ...]]],
    channel: Channel,
    folder: str | Path,
) -> None:
    """Raise an error if parts do not send each other the rows that they expect. All ranks call it.

    Cost:
        8 bytes a halo row.
    """
    # Both [parts, parts]: sends[i, j] is what part i sends to j, expects[j, i] is what part j expects from i.
    sends = torch.tensor([send for _, send, _ in facts]).view(channel.size, -1)
    expects = torch.tensor([recv for *_, recv in facts]).view(channel.size, -1)
    unlike = (sends != expects.t()).nonzero().tolist()
    if not unlike:
        # Equal counts may still be of different rows. The exchange of the rows' original ids shows it: they
        # must arrive as the receiver's halo.
        ids = part.own[part.send].to(channel.device)
        request = ExchangeRequest(part.send_counts, part.recv_counts, "compare the ranks' halos")
        came = channel.start(ids, request).wait()
        differs = not torch.equal(came.cpu(), part.halo)
        ranks = channel.gather_objects(differs, "compare the ranks' halos")
        unlike = [[rank] for rank, each in enumerate(ranks) if each]
    if unlike:
        raise PartitionError(
            f"parts in {folder} that send each other the rows that they expect",
            f"part {unlike[0][-1]}, which expects others",
            hint="make them again with kagome partition",
        )


def refuse_other_weights(folder: str | Path, meta: Meta, method: str) -> None:
    """Refuse weights that a saved partition was not cut by.

    Raises:
        PartitionError: If the method has weights, and the partition's has none or others.
    """
    # Without weights a run takes the parts as they are, as it does with another partitioner.
    asked, there = (PartitionMethod.parse(each).weights for each in (method, meta.method))
    if asked and asked != there:
        raise PartitionError(
            f"parts cut by part_weights={list(asked)} in {folder}",
            f"part_weights={list(there)}" if there else "parts that are alike",
            hint="leave part_weights out, or kagome partition --part-weights",
        )


def from_run(settings: config.Run, channel: Channel, standby: Standby | None = None) -> tuple[Part, Meta]:
    """Return this rank's part of the graph of a run of the command line, as its model takes it."""
    method, seed, reuse = settings.cut(channel.size)
    several = partial(from_hetero, settings=settings, channel=channel)
    found = from_settings(
        settings.data,
        channel,
        method=method,
        seed=seed,
        reuse=reuse,
        several=several,
        standby=standby,
        width=settings.model.hidden,
    )
    return for_model(settings.model.name, *found)


def from_settings(
    settings: config.Data,
    channel: Channel,
    *,
    method: str,
    seed: int,
    reuse: bool = False,
    several: Callable[[HeteroData], tuple[Part, Meta]] | None = None,
    standby: Standby | None = None,
    width: int = 1,
) -> tuple[Part, Meta]:
    """Return this rank's part of a graph named by settings; see the module docstring.

    Args:
        settings: The graph.
        channel: The graph group.
        method: The partitioner's name, or ``auto``.
        seed: The partitioner's seed.
        reuse: Take the parts from the user's cache if nothing that decides them has changed; store them
            there.
        several: Takes the part of a graph of several vertex sets, which each rank loads; None refuses one.
        standby: The process that loads and cuts the graph if this is the first rank of its host; None starts
            one.
        width: Width of the model's hidden rows, for which kernels are made ready by ranks that wait.

    Raises:
        KagomeError: The error that loading or partitioning raised, on every rank.

    Cost:
        One more process on each host while the graph is loaded and partitioned, none where the parts are
        reused; the parts on the host's disk until all ranks have read them, or in the cache.
    """
    if settings.partition is not None:
        part, meta = from_folder(settings.partition, channel)
        refuse_other_weights(settings.partition, meta, method)
        return part, replace(meta, notes=(*meta.notes, *_unheeded(settings)))
    if channel.size == 1:
        data = load_graph(settings) if several else load_data(settings)
        if several and isinstance(data, HeteroData):
            return several(data)
        return _from_clean(data, data.notes, channel, method, seed, reuse)
    host = socket.gethostname()
    hosts = channel.gather_objects(host, "find the hosts")
    # The first rank of each host makes or finds the parts of its host; the others read what it offers.
    first = hosts.index(host) == channel.rank
    with ExitStack() as stack:
        source = None
        if first:
            source = HostParts(settings, method, seed, channel.size, cache.opened(reuse), standby)
        # All hosts partition alike: within the least free memory of any, by the partitioner of cached parts.
        facts = channel.gather_objects(source and source.look(), "look for kept parts", [Look])
        seen = [fact for fact in facts if isinstance(fact, Look)]
        if source is None and channel.device.type == "cpu":
            call_sums(width)  # there is time for it until the parts are made
        made = source and source.make(stack, seen)
        offers = channel.gather_objects(made, "load and cut the graph", [Offer])
        for offer in offers:
            if isinstance(offer, Offer) and offer.error is not None:
                raise offer.error
        place = offers[hosts.index(host)]
        assert isinstance(place, Offer)
        if not place.folder:
            data = load_graph(settings)
            if several and isinstance(data, HeteroData):
                return several(data)
            validate(data)  # refuses it
        try:
            part, meta = from_folder(place.folder, channel)
        except PartitionError as error:
            if source is None or not source.forget(place):
                raise
            hint = "start again: what was kept is thrown away, and the graph is cut anew"
            raise PartitionError(error.expected, error.got, where=error.where, hint=hint) from None
        # The stack removes temporary parts when the block ends.
        channel.barrier("all parts are read")
        if source is not None:
            source.end()
    return part, replace(meta, notes=(*meta.notes, *place.notes))


def for_model(name: str, part: Part, meta: Meta) -> tuple[Part, Meta]:
    """Convert a part for a named model: the zoo's models take float32, a user's model any data.

    Args:
        name: ``model.name``.
        part: The part as the data has it.
        meta: The facts of the partition.

    Raises:
        DataError: If the data is not what the zoo's models take.
    """
    if name.startswith("python:"):
        return part, meta
    if not isinstance(part, Partition):
        raise DataError(
            f"a graph of one vertex type for the model {name}",
            f"one of several: {', '.join(part.names)}",
            hint="--model.name python:package.module:function, a model over x_dict and edge_index_dict",
        )
    x, turned = part.nodes.get("x"), []
    if x is None or x.dim() > 2 or x.is_complex() or 0 in x.shape[1:]:
        got = "data without x" if x is None else f"{[meta.num_nodes, *x.shape[1:]]}"
        raise DataError(f"real features x [N, F] for the model {name}", got, where="data.x")

    def floats(attribute: str, value: torch.Tensor) -> torch.Tensor:
        rows = value.unsqueeze(1) if attribute == "x" and value.dim() == 1 else value
        # Complex edge attributes are left alone: `.float()` would drop the imaginary half.
        if rows.dtype == torch.float32 or rows.is_complex():
            return rows
        turned.append(f"data.{attribute} is {str(rows.dtype).removeprefix('torch.')}")
        return rows.float()

    nodes = {k: floats(k, v) if k == "x" else v for k, v in part.nodes.items()}
    kinds = ("edge_weight", "edge_attr")
    edges = {k: floats(k, v) if k in kinds else v for k, v in part.edges.items()}
    part = replace(part, nodes=nodes, edges=edges)
    if not turned:
        return part, meta
    note = f"{', '.join(turned)}: {name} computes in float32"
    return part, replace(meta, notes=(*meta.notes, note))


def _unheeded(settings: config.Data) -> tuple[str, ...]:
    """Return a note on data settings that a saved partition has already decided."""
    plain = config.Data()
    names = [f.name for f in fields(plain) if f.name not in ("partition", "root")]
    asked = [f"data.{name}" for name in names if getattr(settings, name) != getattr(plain, name)]
    if not asked:
        return ()
    return (f"the graph is as {settings.partition} has it: {', '.join(asked)} had their say when it was cut",)


def degree_histogram(part: Partition, channel: Channel) -> torch.Tensor:
    """Return how many vertices of the whole graph have 0, 1, 2, ... in-edges; PNA asks for it.

    Args:
        part: This rank's part.
        channel: The graph group.

    Shapes:
        ``[largest in-degree + 1]``, int64.
    """
    # A part has all in-edges of its own vertices, so these degrees are already those of the whole graph.
    degree = torch.bincount(part.edge_index[1], minlength=part.own.numel())
    top = degree.max() if degree.numel() else torch.zeros((), dtype=torch.int64)
    most = int(channel.all_reduce(top.to(channel.device), "max", action="largest degree", kind="other"))
    local = torch.bincount(degree, minlength=most + 1).to(channel.device)
    return channel.all_reduce(local, action="degrees", kind="other").cpu()
