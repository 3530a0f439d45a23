"""Parameter ownership: which rank of a pipeline trains which weight, and how other ranks receive it.

Where it sits: ``chunk_engine`` trains the weights of a stage on that stage's rank alone. Before weights are
saved, kept as the best or returned to the user, every rank receives the weights of all stages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from kagome.adaptive.gradient_probe import products
from kagome.comm.channel import Channel
from kagome.comm.serialization import ObjectError, pack
from kagome.comm.transport.device import to_device
from kagome.errors import CheckpointError
from kagome.model.buffers import Buffers
from kagome.model.sparse_buffers import laid_out
from kagome.model.split.stages import Stage, shared_parameters
from kagome.pipelining.buffer_isolation import BufferIsolation

# [Note: shared weights] Stages on ranks 0 and 1 both use w2, as tied embeddings do:
#
#     rank 0   trains and owns w1 w2    its value of w3 is old until weights are shared (foreign)
#     rank 1   trains w2 w3, owns w3    its value of w1 is old
#
# The gradient of w2 is the sum over both ranks, so both make the same step and have the same value. For
# norms, checkpoints and `share` it counts once, by its owner.


class ParameterOwnership:
    """The owner rank of each parameter and buffer, and the transfers that follow from it.

    Args:
        model: The user's module.
        stages: All stages.
        pipe: The channel between the ranks that hold this part.
        changed: Names of the buffers that a forward changes.

    Attributes:
        parameters: The parameters that this rank trains.
        buffers: The buffers that this rank's stages use.
    """

    def __init__(self, model: nn.Module, stages: Sequence[Stage], pipe: Channel, changed: Set[str]) -> None:
        self.model, self.pipe, self.mine = model, pipe, pipe.rank
        self.shared = shared_parameters(stages)
        """The weights that several ranks train, each with these ranks."""
        self.of: dict[str, int] = {}
        """The owner of each parameter and buffer; shared ones belong to the first stage that uses them."""
        # Reversed, so that the first stage that uses a name writes last and owns it.
        for stage in reversed(stages):
            self.of.update(dict.fromkeys((*stage.parameters, *stage.buffers), stage.rank))
        for stage in stages:  # a buffer that a forward changes belongs to one stage
            self.of.update(dict.fromkeys(changed & set(stage.buffers), stage.rank))
        held = {name for stage in stages if stage.rank == self.mine for name in stage.parameters}
        self.parameters = [p for name, p in model.named_parameters() if name in held and p.requires_grad]
        used = Counter(name for stage in stages for name in set(stage.buffers))
        here = {name for stage in stages if stage.rank == self.mine for name in stage.buffers}
        self.buffers = Buffers(model, here)
        self._changed, self._alone = set(changed & here), {name for name, count in used.items() if count == 1}

    def foreign(self) -> dict[str, Tensor]:
        """Return the weights that other ranks train, by name; out of date here until they are shared."""
        mine = {id(parameter) for parameter in self.parameters}
        named = self.model.named_parameters()
        return {name: p for name, p in named if p.requires_grad and id(p) not in mine}

    def moving(self) -> list[Tensor]:
        """Return the current tensors of this rank's buffers that a forward is known to change."""
        return [tensor for name, tensor in self.buffers.now().items() if name in self._changed]

    def isolation(self, watches: bool) -> BufferIsolation:
        """Isolate this rank's buffers by chunk in one pass; ``watches`` looks for further changing ones."""
        return BufferIsolation(self.buffers, self._changed, self._alone, watches=watches)

    def sum_shared(self) -> None:
        """Sum the gradients of shared weights, and drop them on ranks that do not train the weight.

        All ranks of the pipeline call it.
        """
        parameters = dict(self.model.named_parameters())
        for name in sorted(self.shared):
            parameter = parameters[name]
            # All ranks of the pipe axis take part in the sum, also those that do not use the weight.
            grad = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            found = self.pipe.all_reduce(grad, action=f"shared weights {name}", kind="weights")
            parameter.grad = found if self.mine in self.shared[name] else None

    def clip(self, parameters: Sequence[nn.Parameter], most: float) -> None:
        """Clip the norm of all stages' gradients together to ``most``. All ranks call it."""
        # As torch's clip_grad_norm_ computes it, with the norm over all stages: a rank alone has a part of
        # the sum.
        factor = most / (self.products(parameters)[0] ** 0.5 + 1e-6)
        if factor < 1.0:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)

    def products(
        self, parameters: Sequence[nn.Parameter], others: Sequence[Tensor | None] | None = None
    ) -> tuple[float, float, float]:
        """Return the sums of squares of two gradients over all stages, and their dot product.

        Shared weights count once. All ranks call it.

        Args:
            parameters: The parameters that this rank trains, with the first gradient.
            others: The second gradient, an entry for each parameter; None counts as zeros.
        """
        names = {id(p): name for name, p in self.model.named_parameters()}
        pairs = zip(parameters, others or [None] * len(parameters), strict=True)
        # By owner, so that a shared weight, which several ranks train, enters the sum once.
        found = products(pair for pair in pairs if self.of[names[id(pair[0])]] == self.mine)
        found = to_device(found, self.pipe.device)
        found = self.pipe.all_reduce(found, action="norm of gradients", kind="weights")
        one, other_, both = found.tolist()
        return one, other_, both

    def share(self, state: Mapping[str, Tensor], action: str) -> None:
        """Give every rank the entries of a state dict that the others own, in place. All ranks call it.

        Cost:
            The bytes of the weights, from each owner to all other ranks.
        """
        if self.pipe.size == 1:
            return
        with torch.no_grad():
            for rank in range(self.pipe.size):
                # Names that no stage uses belong to rank 0.
                owned = [tensor for name, tensor in state.items() if self.of.get(name, 0) == rank]
                held = [piece for tensor in owned for piece in laid_out(tensor)]
                for tensor, came in zip(held, self._broadcast(held, rank, action), strict=True):
                    if rank != self.mine:
                        tensor.copy_(came)

    def _broadcast(self, tensors: Sequence[Tensor], rank: int, action: str) -> list[Tensor]:
        if not tensors:
            return []
        # As bytes, so that one message holds tensors of all number types.
        flat = torch.cat([tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in tensors])
        came = self.pipe.broadcast(flat, rank, action=action)
        parts = came.split([tensor.nbytes for tensor in tensors])
        return [
            part.clone().view(tensor.dtype).view(tensor.shape)
            for part, tensor in zip(parts, tensors, strict=True)
        ]

    def share_optimizer(self, optimizer: Optimizer) -> None:
        """Give every rank the optimizer's state of all ranks, so that it can be saved. All ranks call it."""
        if self.pipe.size == 1:
            return
        named = dict(self.model.named_parameters())
        for rank in range(self.pipe.size):
            # Sorted: both ends must list the tensors of the message in one order.
            names = sorted(name for name in named if self.of.get(name, 0) == rank)
            facts: list[tuple[str, dict[str, Any]]] = []
            if rank == self.mine:
                facts = [
                    (name, _facts(optimizer.state[named[name]]))
                    for name in names
                    if named[name] in optimizer.state
                ]
            told: Any = self.pipe.gather_objects(_plain(facts), "optimizer state")[rank]
            if isinstance(told, CheckpointError):
                raise told
            tensors = [
                optimizer.state[named[name]][key]
                if rank == self.mine
                # Receivers only need shapes and types here, to split the message; `came` has the values.
                else torch.empty(fact[0], dtype=fact[1], device=self.pipe.device if fact[2] else "cpu")
                for name, entries in told
                for key, fact in entries.items()
                if isinstance(fact, tuple)
            ]
            came = iter(self._broadcast([t.to(self.pipe.device) for t in tensors], rank, "optimizer state"))
            if rank == self.mine:
                continue
            for name, entries in told:
                optimizer.state[named[name]] = {
                    key: next(came).to(self.pipe.device if fact[2] else "cpu")
                    if isinstance(fact, tuple)
                    else fact
                    for key, fact in entries.items()
                }

    def forget_others(self, optimizer: Optimizer) -> None:
        """Drop the optimizer's state of weights that this rank does not train."""
        mine = {id(parameter) for parameter in self.parameters}
        for parameter in [p for p in optimizer.state if id(p) not in mine]:
            del optimizer.state[parameter]


def _plain(facts: list[tuple[str, dict[str, Any]]]) -> object:
    """Return the facts if they can be sent to other ranks, else the error that says why not."""
    try:
        pack(facts)
    except ObjectError as error:
        return CheckpointError(
            "an optimizer's state that can be saved",
            f"one that cannot: {error}",
            hint="state of tensors and plain values: numbers, texts, lists, dicts",
        )
    return facts


def _facts(state: Mapping[str, Any]) -> dict[str, Any]:
    """Describe each entry of a weight's optimizer state.

    Returns:
        For a tensor its shape, its dtype and whether it lies on the device; any other value is its own
        description.
    """
    return {
        key: (tuple(value.shape), value.dtype, value.device.type != "cpu")
        if isinstance(value, Tensor)
        else value
        for key, value in state.items()
    }
