"""Model setup: prepare a user's model for training: lazy shapes, decoupling if asked, rank 0's weights.

Where it sits: ``train.trainer`` calls :func:`set_up_model` once it has its part; ``train.admission`` gives
lazy layers their shapes with it.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from kagome.comm.channel import Channel
from kagome.comm.mesh import Mesh
from kagome.config import CutSettings
from kagome.errors import ModelError
from kagome.graph.partition.partition import Partition
from kagome.graph.partition.sets_partition import Part, SetsPartition, by_type
from kagome.graph.structure import splits
from kagome.graph.structure.attributes import tensors_of
from kagome.intercept.hooks import forget
from kagome.model.copies import copied
from kagome.model.decouple.decouple import decouple
from kagome.model.forward_call import ForwardCall, told
from kagome.model.sparse_buffers import laid_out


def set_up_model(
    model: nn.Module, part: Part, mesh: Mesh, settings: CutSettings
) -> tuple[nn.Module, tuple[str, ...]]:
    """Return the model to train, on this rank's device with rank 0's weights, and notes on it.

    Args:
        model: The user's module.
        part: This rank's part.
        mesh: All ranks.
        settings: How the run is split.

    Raises:
        ModelError: If it is to be decoupled and cannot be.
    """
    model = model.to(mesh.device)
    materialise(model, part, mesh.device)
    notes: tuple[str, ...] = ()
    if settings.decouple and isinstance(part, Partition):  # refused for several vertex sets
        model = decouple(model, few_rows(part, mesh.device))
        notes = (*notes, f"decoupled: {model.text()}")
    broadcast_weights(model, mesh.world)
    return model, notes


def unlike(model: nn.Module, part: Partition, names: Collection[str]) -> str:
    """Suggest a fix for inputs whose number type no weight has: PyTorch does not multiply two types.

    Args:
        model: The user's module.
        part: A part of the graph.
        names: Inputs that forward gets.

    Returns:
        The suggestion; empty where all types are those of weights.
    """
    # Masks (bool) and labels are never multiplied by a weight.
    types = {p.dtype for p in model.parameters() if p.is_floating_point()}
    given = {**tensors_of(part.shared), **part.nodes, **part.edges}
    found = [name for name in names if name in given and given[name].dtype not in types and name != "y"]
    found = [name for name in found if given[name].dtype != torch.bool]
    if not types or not found:
        return ""
    to = _short(min(types, key=str))
    kinds = ", ".join(f"data.{name} is {_short(given[name].dtype)}" for name in found)
    floats = [name for name in found if given[name].is_floating_point()] or found
    cure = ", ".join(f"data.{name} = data.{name}.to(torch.{to})" for name in floats)
    return f"{kinds} and the weights are {to}: {cure}"


def refused_input(model: nn.Module, part: Partition, names: Collection[str], error: Exception) -> Exception:
    """Return the error of a failed forward pass; it explains input types that differ from the weights'."""
    cure = unlike(model, part, names)
    # Words of torch's messages about number types that do not fit. Any other error has another cause.
    words = ("dtype", "Long", "Double", "Half", "Int", "expected scalar type", "not implemented for")
    if not cure or not any(word in str(error) for word in words):
        return error
    kinds, _, change = cure.partition(": ")
    return ModelError(
        "forward to run on the data as it is given",
        f"{type(error).__name__}: {str(error).splitlines()[0]}; {kinds}",
        hint=change,
    )


def input_notes(model: nn.Module, part: Part, uses: Collection[str]) -> tuple[str, ...]:
    """Return a note on what forward gets of the data, and what remains unused.

    Args:
        model: The user's module.
        part: A part of the graph.
        uses: Attributes that the loss reads.

    Raises:
        ModelError: If forward asks for an attribute that cannot be given to it.
    """
    if not isinstance(part, Partition):
        return _notes_of_sets(model, part, uses)
    names = part.names
    refuse_asked(model, part)
    calling = ForwardCall.of(model, names)
    wanted = calling.wants(names)
    kinds = {**dict.fromkeys(part.nodes, "a row a vertex"), **dict.fromkeys(part.edges, "a row an edge")}
    kinds |= dict.fromkeys(part.shared, "the same on all ranks")
    shown = ", ".join(f"{name} ({kinds[name]})" if name in kinds else name for name in wanted)
    known = {"num_nodes", "edge_index", *wanted, *uses, *splits.NAMES}
    left = [name for name in names if name not in known]
    note = f"forward gets {shown}"
    if left:
        note += f"; not used of the data: {', '.join(left)}"
    if part.refused:
        note += f"; not given to any model: {'; '.join(part.refused.values())}"
    return (note,)


def _notes_of_sets(model: nn.Module, part: SetsPartition, uses: Collection[str]) -> tuple[str, ...]:
    dicts = by_type(part, part.nodes, [{"edge_index": None, **each.part.edges} for each in part.edges])
    names = [*part.shared, *(name for name in dicts if f"{name}_dict" in dicts)]
    calling = ForwardCall.of(model, {*part.shared, *dicts})
    if calling.by_data:
        raise ModelError(
            "x_dict, edge_index_dict and the like as arguments of forward",
            "a forward of one argument, which is no attribute of the data",
            hint="forward(x_dict, edge_index_dict)",
        )
    wanted = calling.wants(names)
    known = {*(name.removesuffix("_dict") for name in wanted), *uses, *splits.NAMES}
    left = [name for name in names if name not in known]
    rest = f"; not used of the data: {', '.join(left)}" if left else ""
    return (f"forward gets {', '.join(wanted)} (of all vertex types){rest}",)


def refuse_asked(model: nn.Module, part: Partition) -> None:
    """Raise an error if forward asks by name for an attribute that cannot be given to it.

    Raises:
        ModelError: With the reason.
    """
    parameters = inspect.signature(model.forward).parameters
    for name, why in part.refused.items():
        if name in parameters:
            raise ModelError(
                f"forward({', '.join(parameters)}) to be given attributes of the data by name",
                f"one that it cannot be given: {why}",
                where=f"data.{name}",
            )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def unlabelled(part: Partition) -> Partition:
    """Add placeholder labels and masks to a part without labels, which is only scored."""
    count = part.own.numel()
    # All vertices count as training vertices, because a loss over none is refused; the loss is never
    # computed.
    none = {name: torch.zeros(count, dtype=torch.bool) for name in ("val_mask", "test_mask")}
    whole = {"train_mask": torch.ones(count, dtype=torch.bool), "y": torch.zeros(count, dtype=torch.int64)}
    return replace(part, nodes={**part.nodes, **none, **whole})


def broadcast_weights(model: nn.Module, channel: Channel, apart: Collection[Tensor] = ()) -> None:
    """Give all ranks rank 0's parameters and buffers, except those of which each rank has its own rows.

    Raises:
        ModelError: On all ranks, if a sparse tensor has more entries on one than on another.
    """
    if channel.size == 1:
        return
    own = {id(tensor) for tensor in apart}
    every = (*model.named_parameters(), *model.named_buffers())
    held = [(name, tensor) for name, tensor in every if id(tensor) not in own]
    with torch.no_grad():
        # gloo aborts if a broadcast has another size on one rank, so the sizes are compared first.
        counts = {name: t._nnz() for name, t in held if t.layout != torch.strided}
        each = channel.gather_objects(counts, "entries of sparse tensors")
        if any(found != each[0] for found in each):
            raise ModelError("the same model on all ranks", f"sparse tensors with {each} entries")
        for name, tensor in held:
            # The pieces share the tensor's memory.
            for piece in laid_out(tensor.detach()):
                piece.copy_(channel.broadcast(piece, 0, action=f"broadcast of {name}"))


def materialise(model: nn.Module, part: Part, device: torch.device) -> None:
    """Let lazy layers (``in_channels=-1``) take their shapes from a few rows of the data."""
    if is_lazy(model):
        call_once(model, few_rows(part, device))


def is_lazy(model: nn.Module) -> bool:
    """Return whether a layer of a model waits for its first input to take its shape."""
    return any(isinstance(p, nn.parameter.UninitializedParameter) for p in model.parameters())


def call_once(model: nn.Module, inputs: Mapping[str, Any]) -> None:
    """Let lazy layers take their shapes from some inputs, by their names.

    Raises:
        ModelError: If forward asks for others.
    """
    training = model.training
    # In eval mode the pass draws nothing, and BatchNorm does not count these made-up rows.
    model.eval()
    with torch.no_grad(), told():
        ForwardCall.of(model, set(inputs)).call(model, inputs)
    model.train(training)


def few_rows(part: Part, device: torch.device) -> dict[str, Any]:
    """Return two vertices and two edges with attributes like a part's, and what all parts share."""
    shared = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in part.shared.items()}
    if not isinstance(part, Partition):
        return {**few_of_sets(part, part.nodes, [each.part.edges for each in part.edges], device), **shared}
    like: dict[str, Any] = {
        name: torch.ones(2, *value.shape[1:], dtype=value.dtype, device=device)
        for name, value in (*part.nodes.items(), *part.edges.items())
    }
    # An edge in each direction: layers may expect an undirected graph.
    edge_index = torch.tensor([[0, 1], [1, 0]], device=device)
    return {"num_nodes": 2, **shared, **like, "edge_index": edge_index}


def few_of_sets(
    part: SetsPartition,
    nodes: Sequence[Mapping[str, Any]],
    edges: Sequence[Mapping[str, Any]],
    device: torch.device,
) -> dict[str, Any]:
    """Return two vertices of each set, and two edges of each edge set, by the names of forward's inputs.

    Args:
        part: A part, which knows the sets.
        nodes: Attributes with a row for each vertex, of each vertex set.
        edges: Attributes with a row for each edge, of each edge set.
        device: Where they are made.
    """

    def few(attributes: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {
            name: torch.ones(2, *value.shape[1:], dtype=value.dtype, device=device)
            for name, value in attributes.items()
        }

    # Between the first vertices: a learned table of the model may have one row.
    index = torch.zeros(2, 2, dtype=torch.int64, device=device)
    return by_type(part, [*map(few, nodes)], [{"edge_index": index, **few(each)} for each in edges])


def model_copy(model: nn.Module) -> nn.Module:
    """Return a copy of a model on the CPU, without what its layers have cached.

    Raises:
        ModelError: If it cannot be copied.
    """
    try:
        own_copy = copied(model).cpu()
    except Exception as error:
        raise ModelError(
            "a copy of the model for the check",
            f"{type(error).__name__}: {error}",
            hint="let copy.deepcopy(model) work",
        ) from error
    # A cached layer keeps the normalised edges of the user's graph, which do not fit another one.
    for module in own_copy.modules():
        forget(module)
    return own_copy
