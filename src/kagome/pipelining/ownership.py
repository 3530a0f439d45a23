"""Owners: which rank of a pipeline holds which weight, and how the others come by it.

Where it sits: ``chunk_engine`` trains the weights of a rank's stages there alone; before weights are saved,
kept as the best or given back to the user, every rank is given every stage's.
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
from kagome.errors import CheckpointError
from kagome.model.buffers import Buffers
from kagome.model.sparse_buffers import laid_out
from kagome.model.split.stages import Stage, shared_parameters
from kagome.pipelining.buffer_isolation import BufferIsolation


class ParameterOwnership:
    """Who holds what.

    Args:
        model: The user's module.
        stages: All stages.
        pipe: The ranks that hold this part.
        changed: Names of the buffers that a forward changes.

    Attributes:
        parameters: Those that this rank trains.
        buffers: Those that its stages use.
    """

    def __init__(self, model: nn.Module, stages: Sequence[Stage], pipe: Channel, changed: Set[str]) -> None:
        self.model, self.pipe, self.mine = model, pipe, pipe.rank
        self.shared = shared_parameters(stages)
        """Weights that several ranks have, with these."""
        self.of: dict[str, int] = {}
        """The rank of each parameter and buffer; of shared ones that of the first stage that uses it."""
        for stage in reversed(stages):
            self.of.update(dict.fromkeys((*stage.parameters, *stage.buffers), stage.rank))
        for stage in stages:  # what a forward changes has one stage
            self.of.update(dict.fromkeys(changed & set(stage.buffers), stage.rank))
        held = {name for stage in stages if stage.rank == self.mine for name in stage.parameters}
        self.parameters = [p for name, p in model.named_parameters() if name in held and p.requires_grad]
        used = Counter(name for stage in stages for name in set(stage.buffers))
        here = {name for stage in stages if stage.rank == self.mine for name in stage.buffers}
        self.buffers = Buffers(model, here)
        self._moved, self._alone = set(changed & here), {name for name, count in used.items() if count == 1}

    def foreign(self) -> dict[str, Tensor]:
        """The weights that other ranks train, by name: old here until they are shared."""
        mine = {id(parameter) for parameter in self.parameters}
        named = self.model.named_parameters()
        return {name: p for name, p in named if p.requires_grad and id(p) not in mine}

    def moving(self) -> list[Tensor]:
        """Those of this rank's buffers that a forward is known to change, as they are now."""
        return [tensor for name, tensor in self.buffers.now().items() if name in self._moved]

    def moved(self, watches: bool) -> BufferIsolation:
        """What lets chunks move this rank's buffers in one pass; ``watches``: and finds others that move."""
        return BufferIsolation(self.buffers, self._moved, self._alone, watches=watches)

    def sum_shared(self) -> None:
        """Sum gradients of weights that several ranks use; the others keep none. All of them call it."""
        parameters = dict(self.model.named_parameters())
        for name in sorted(self.shared):
            parameter = parameters[name]
            grad = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            found = self.pipe.all_reduce(grad, action=f"shared weights {name}", kind="weights")
            parameter.grad = found if self.mine in self.shared[name] else None

    def clip(self, parameters: Sequence[nn.Parameter], most: float) -> None:
        """Make the gradient of all stages no longer than this. All ranks call it."""
        factor = most / (self.products(parameters)[0] ** 0.5 + 1e-6)
        if factor < 1.0:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)

    def products(
        self, parameters: Sequence[nn.Parameter], others: Sequence[Tensor | None] | None = None
    ) -> tuple[float, float, float]:
        """Over all stages' gradients: squares of theirs, of others, and products; shared weights count once.

        Args:
            parameters: This stage's.
            others: Other gradients of them, one each; none count as zeros.
        """
        names = {id(p): name for name, p in self.model.named_parameters()}
        pairs = zip(parameters, others or [None] * len(parameters), strict=True)
        found = products(pair for pair in pairs if self.of[names[id(pair[0])]] == self.mine)
        found = self.pipe.all_reduce(found.to(self.pipe.device), action="norm of gradients", kind="weights")
        one, other_, both = found.tolist()
        return one, other_, both

    def share(self, state: Mapping[str, Tensor], action: str) -> None:
        """Give every rank what each owns of a state dict, in place. All of them call it.

        Cost:
            The weights' bytes, from each rank to the others.
        """
        if self.pipe.size == 1:
            return
        with torch.no_grad():
            for rank in range(self.pipe.size):
                owned = [tensor for name, tensor in state.items() if self.of.get(name, 0) == rank]
                held = [piece for tensor in owned for piece in laid_out(tensor)]
                for tensor, came in zip(held, self._broadcast(held, rank, action), strict=True):
                    if rank != self.mine:
                        tensor.copy_(came)

    def _broadcast(self, tensors: Sequence[Tensor], rank: int, action: str) -> list[Tensor]:
        if not tensors:
            return []
        flat = torch.cat([tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in tensors])
        came = self.pipe.broadcast(flat, rank, action=action)
        parts = came.split([tensor.nbytes for tensor in tensors])
        return [
            part.clone().view(tensor.dtype).view(tensor.shape)
            for part, tensor in zip(parts, tensors, strict=True)
        ]

    def share_optimizer(self, optimizer: Optimizer) -> None:
        """Give every rank the optimizer's state of each: to save it. All of them call it."""
        if self.pipe.size == 1:
            return
        named = dict(self.model.named_parameters())
        for rank in range(self.pipe.size):
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
    """Facts that the other ranks can be told; the error where they cannot."""
    try:
        pack(facts)
    except ObjectError as error:
        return CheckpointError(
            "an optimizer's state is to be saved",
            str(error),
            hint="state of tensors and plain values: numbers, texts, lists, dicts",
        )
    return facts


def _facts(state: Mapping[str, Any]) -> dict[str, Any]:
    """What an optimizer keeps of one weight: shape, type and whether it lies on the device; else itself."""
    return {
        key: (tuple(value.shape), value.dtype, value.device.type != "cpu")
        if isinstance(value, Tensor)
        else value
        for key, value in state.items()
    }
