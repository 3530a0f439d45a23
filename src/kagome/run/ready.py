"""Ready: a user's model before it is trained - lazy layers in shape, decoupled if asked, rank 0's weights.

Where it sits: ``trainer`` calls :func:`ready` once it has its part; ``accounts`` gives twins their shapes.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kagome.comm.channel import Channel
from kagome.comm.mesh import Mesh
from kagome.config import Parallel
from kagome.graph.partition import Partition
from kagome.model.calling import Calling
from kagome.model.decouple import decouple


def ready(
    model: nn.Module, part: Partition, mesh: Mesh, settings: Parallel
) -> tuple[nn.Module, tuple[str, ...]]:
    """The model that will be trained, on this rank's device, with rank 0's weights; and what to say of it.

    Raises:
        ModelError: If it is to be decoupled and cannot be.
    """
    model = model.to(mesh.device)
    materialise(model, part, mesh.device)
    said = unlike(model, part)
    if settings.decouple:
        model = decouple(model, few_rows(part, mesh.device))
        said = (*said, f"decoupled: {model.text()}")
    broadcast_weights(model, mesh.world)
    return model, said


def unlike(model: nn.Module, part: Partition) -> tuple[str, ...]:
    """What to say of inputs of a number type that no weight has: PyTorch multiplies no two types.

    It is not refused: a model may turn them itself, or not read them.
    """
    types = {p.dtype for p in model.parameters() if p.is_floating_point()}
    found = [
        (name, value.dtype)
        for name, value in (*part.nodes.items(), *part.edges.items())
        if name != "y" and value.is_floating_point() and value.dtype not in types
    ]
    if not types or not found:
        return ()
    weights = " and ".join(sorted(map(_short, types)))
    return tuple(
        f"data.{name} is {_short(given)} and the weights are {weights}: if forward fails for that, "
        f"data.{name} = data.{name}.to(torch.{_short(min(types, key=str))})"
        for name, given in found
    )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def broadcast_weights(model: nn.Module, channel: Channel) -> None:
    """Give all ranks rank 0's parameters and buffers."""
    if channel.size == 1:
        return
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            tensor.copy_(channel.broadcast(tensor, 0, action=f"broadcast of {name}"))


def materialise(model: nn.Module, part: Partition, device: torch.device) -> None:
    """Let lazy layers (``in_channels=-1``) take their shapes from a few rows of the data."""
    if not any(isinstance(p, nn.parameter.UninitializedParameter) for p in model.parameters()):
        return
    inputs = few_rows(part, device)
    training = model.training
    model.eval()
    with torch.no_grad():
        Calling.of(model, set(inputs)).call(model, inputs)
    model.train(training)


def few_rows(part: Partition, device: torch.device) -> dict[str, Tensor]:
    """Two vertices and two edges with attributes like a part's."""
    like = {
        name: torch.ones(2, *value.shape[1:], dtype=value.dtype, device=device)
        for name, value in (*part.nodes.items(), *part.edges.items())
    }
    return {**like, "edge_index": torch.tensor([[0, 1], [1, 0]], device=device)}
