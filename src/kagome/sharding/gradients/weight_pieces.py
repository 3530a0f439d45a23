"""Weight pieces: parameters that ``fully_shard`` cuts over copies of the parts, and their gradients' pieces.

Where it sits: ``gradient_sync`` sums the gradients that it finds here over the graph's ranks.

::

    2 copies of 2 parts      a weight in pieces over the copies     its gradient
    copy 0   part 0 part 1   forward reads all of it: the leaf      FSDP: the mean over copies, a piece a rank
    copy 1   part 0 part 1   the optimizer has a piece              then here: the sum of the piece over parts

Both are sums, so their order does not matter. FSDP comes first, and each rank sends its piece alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from kagome.comm.channel import Channel
from kagome.errors import ModelError

_HINT = 'fully_shard(net, mesh=mesh["data"]), once, around what kagome.shard(mesh=mesh["graph"]) returned'


@dataclass(frozen=True)
class Trained:
    """A parameter that is trained.

    Args:
        parameter: What the optimizer has.
        leaf: What forward reads: the same, or all of a parameter of which the optimizer has a piece.
        node: The node of autograd that adds to a leaf's gradient. FSDP frees the leaf's memory after forward,
            and torch makes no view of it then; None if the leaf is the parameter, which may change its shape.
    """

    parameter: nn.Parameter
    leaf: nn.Parameter
    node: Any = None

    @property
    def accumulator(self) -> Any:
        """The node of autograd that adds to the leaf's gradient."""
        return accumulator_of(self.leaf) if self.node is None else self.node

    def same(self, other: Trained) -> bool:
        """Return whether both are the same objects."""
        return self.parameter is other.parameter and self.leaf is other.leaf


def accumulator_of(leaf: nn.Parameter) -> Any:
    """Return the node of autograd that adds to a parameter's gradient."""
    with torch.enable_grad():  # a backward without create_graph runs with gradients off
        node = leaf.expand_as(leaf).grad_fn
    assert node is not None
    return node.next_functions[0][0]


def trained(modules: Sequence[nn.Module], net: nn.Module | None = None) -> list[Trained]:
    """Return the trained parameters of some modules, each once. Called while forward runs.

    Args:
        modules: The modules.
        net: The sharded model, around which there may be FSDP.
    """
    groups: Any = net._get_fsdp_state()._fsdp_param_groups if isinstance(net, FSDPModule) else ()
    pieces = {
        id(each._unsharded_param): each.sharded_param
        for group in groups
        for each in group.fsdp_params
        if hasattr(each, "_unsharded_param")
    }
    every = chain.from_iterable(module.parameters() for module in modules)
    found = {
        id(p): Trained(pieces[id(p)], p, accumulator_of(p)) if id(p) in pieces else Trained(p, p)
        for p in every
        if p.requires_grad
    }
    return list(found.values())


def piece_of(parameter: nn.Parameter) -> nn.Parameter:
    """Return a parameter itself, or a stand-in of this rank's piece, which has gradients of its shape."""
    return nn.Parameter(parameter.to_local().detach()) if isinstance(parameter, DTensor) else parameter


def take_gradient(piece: nn.Parameter, parameter: nn.Parameter) -> None:
    """Give a stand-in the piece of the gradient that a parameter has."""
    gradient = parameter.grad
    if piece is not parameter:
        piece.grad = gradient.to_local() if isinstance(gradient, DTensor) else None


def give_gradient(piece: nn.Parameter, parameter: nn.Parameter) -> None:
    """Give a parameter the gradient whose piece its stand-in has."""
    if piece is parameter or not isinstance(parameter, DTensor):
        return
    gradient, piece.grad = piece.grad, None
    parameter.grad = None if gradient is None else _like(parameter, gradient)


def _like(parameter: DTensor, piece: Tensor) -> DTensor:
    mesh, placements = parameter.device_mesh, parameter.placements
    shape, stride = parameter.shape, parameter.stride()
    return DTensor.from_local(piece, mesh, placements, run_check=False, shape=shape, stride=stride)


def refuse_pieces(net: nn.Module, beside: Sequence[nn.Module], channel: Channel, *, cut: bool) -> None:
    """Refuse weights in pieces, except of the whole net over the ranks of copies. Called while forward runs.

    Args:
        net: The sharded model.
        beside: Modules that run outside of the model.
        channel: The channel of the ranks that share the graph.
        cut: Whether it has cut tables.

    Raises:
        ModelError: If layers are wrapped, or FSDP's ranks share the graph, or its hooks have not run.
    """
    every = chain.from_iterable(module.modules() for module in (net, *beside))
    inside = (each for each in every if each is not net)
    layers = [type(each).__name__ for each in inside if isinstance(each, FSDPModule)]
    flat = [type(p).__name__ for p in net.parameters() if type(p).__name__ == "FlatParameter"]
    if layers or flat:
        raise ModelError(
            "weights that forward finds whole, or that fully_shard has cut for the whole net",
            f"{'FSDPModule ' + layers[0] if layers else flat[0]} in the model or beside it",
            where="net(...)",
            hint=_HINT,
        )
    if not isinstance(net, FSDPModule):
        return
    pieces = [p for p in net.parameters() if isinstance(p, DTensor)]
    if pieces or cut:
        raise ModelError(
            "net(...), in which FSDPModule has gathered the weights, without cut tables",
            "tables that are cut" if cut else "weights in pieces, as net.run and kagome.check find them",
            where="net(...)",
            hint="DistributedDataParallel in place of fully_shard",
        )
    group = channel.group or dist.group.WORLD
    sharing = set(dist.get_process_group_ranks(group)) - {dist.get_rank()} if channel.size > 1 else set()
    meshes = [
        each.parameter.device_mesh for each in trained([net], net) if isinstance(each.parameter, DTensor)
    ]
    for ranks in (mesh.mesh.view(-1).tolist() for mesh in meshes):
        if sharing & set(ranks):
            raise ModelError(
                "an FSDPModule over copies of the graph's parts, whose ranks have the same part",
                f"one over ranks {', '.join(map(str, ranks))}, some of which share the graph",
                where="net(...)",
                hint=_HINT,
            )
