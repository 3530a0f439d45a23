"""Weights: which ranks have which, sums of their gradients, and everyone's for everyone.

Where it sits: ``pipeline`` sums gradients after the last backward, and joins weights where somebody asks.

A loss is a sum over samples, divided by the batch: so the gradient of a weight is the sum over the replicas
of each stage that uses it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from kagome.comm.channel import Channel
from kagome.model.operators.pieces import Piece
from kagome.pipelining.dag.sample_layout import SampleLayout


class ReplicaWeights:
    """Who has what.

    Args:
        model: The user's module, in full on every rank.
        pieces: All stages.
        layout: Which ranks have which stage.
        channel: All ranks.
    """

    def __init__(
        self, model: nn.Module, pieces: Sequence[Piece], layout: SampleLayout, channel: Channel
    ) -> None:
        self.model, self.channel = model, channel
        self.parameters = dict(model.named_parameters())
        self.holders: dict[str, tuple[int, ...]] = {}
        """By weight or buffer, the ranks that use it; the first one's counts."""
        for piece in pieces:
            ranks = tuple(layout.ranks(piece.number))
            for name in (*piece.parameters, *piece.buffers):
                self.holders[name] = (*self.holders.get(name, ()), *ranks)
        mine = channel.rank
        self.mine = {
            name: weight
            for name, weight in self.parameters.items()
            if mine in self.holders.get(name, ()) and weight.requires_grad
        }
        """The weights that this rank trains."""
        self.foreign: dict[str, Tensor] = {
            name: weight
            for name, weight in self.parameters.items()
            if name not in self.mine and weight.requires_grad
        }
        """Those that it does not, and that are old here until they are joined."""
        self._groups: dict[tuple[tuple[int, ...], torch.dtype], list[str]] = {}
        for name, weight in self.parameters.items():
            ranks = self.holders.get(name, ())
            if len(ranks) > 1 and weight.requires_grad:
                self._groups.setdefault((ranks, weight.dtype), []).append(name)

    def sum_gradients(self, update: int) -> None:
        """Sum the gradients of weights that several ranks have: the same bits on all of them.

        Cost:
            A rank of d that have b bytes of weights sends 2 (d - 1) / d of b.
        """
        for (ranks, _), names in sorted(self._groups.items(), key=lambda item: item[0][0]):
            if self.channel.rank not in ranks:
                continue
            weights = [self.parameters[name] for name in names]
            # Behind the gradients, how many ranks have one: where none does it stays None, as in training
            # on one rank, and an optimizer leaves the weight alone.
            has = [float(weight.grad is not None) for weight in weights]
            flat = torch.cat(
                [
                    *(w.new_zeros(w.numel()) if w.grad is None else w.grad.reshape(-1) for w in weights),
                    weights[0].new_tensor(has),
                ]
            )
            total = _summed(flat, ranks, self.channel, f"gradients of {names[0]} ..., update {update}")
            counts = total[-len(weights) :].tolist()
            parts = total[: -len(weights)].split([weight.numel() for weight in weights])
            for weight, part, count in zip(weights, parts, counts, strict=True):
                weight.grad = part.view_as(weight).clone() if count else None

    def average_buffers(self, update: int) -> None:
        """Give the replicas of a stage the mean of the running statistics that each has moved by itself."""
        named = {
            f"{path}.{name}": buffer
            for path, module in self.model.named_modules()
            if isinstance(module, _BatchNorm)
            for name, buffer in module.named_buffers(recurse=False)
        }
        groups: dict[tuple[tuple[int, ...], torch.dtype], list[Tensor]] = {}
        for name, ranks in self.holders.items():
            if name in named and len(ranks) > 1 and named[name].is_floating_point():
                groups.setdefault((ranks, named[name].dtype), []).append(named[name])
        for (ranks, _), buffers in sorted(groups.items(), key=lambda item: item[0][0]):
            if self.channel.rank in ranks:
                flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
                total = _summed(flat, ranks, self.channel, f"buffers, update {update}") / len(ranks)
                _fill(buffers, total)

    def join(self) -> None:
        """Give every rank every rank's weights and buffers. All ranks call it."""
        named = {**self.parameters, **dict(self.model.named_buffers())}
        for owner in range(self.channel.size):
            by_type: dict[torch.dtype, list[Tensor]] = {}
            for name, tensor in named.items():
                if self.holders.get(name, (0,))[0] == owner:
                    by_type.setdefault(tensor.dtype, []).append(tensor)
            for tensors in by_type.values():
                flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
                _fill(tensors, self.channel.broadcast(flat, owner, action=f"weights of rank {owner}"))

    def share_first(self) -> None:
        """Give every rank the weights and buffers of rank 0."""
        by_type: dict[torch.dtype, list[Tensor]] = {}
        for tensor in (*self.parameters.values(), *self.model.buffers()):
            by_type.setdefault(tensor.dtype, []).append(tensor)
        for tensors in by_type.values():
            flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
            _fill(tensors, self.channel.broadcast(flat, 0, action="weights of rank 0"))


def _fill(tensors: Iterable[Tensor], flat: Tensor) -> None:
    at = 0
    with torch.no_grad():
        for tensor in tensors:
            tensor.copy_(flat[at : at + tensor.numel()].view_as(tensor))
            at += tensor.numel()


def _summed(flat: Tensor, ranks: Sequence[int], channel: Channel, action: str) -> Tensor:
    """The sum over some ranks, which all call this: each adds a piece, in their order, and shares it."""
    pieces = list(torch.tensor_split(flat, len(ranks)))
    mine = ranks.index(channel.rank)
    peers = [(place, rank) for place, rank in enumerate(ranks) if rank != channel.rank]
    sent = [channel.start_send(pieces[at], rank, action=action, kind="weights") for at, rank in peers]
    shape, dtype = pieces[mine].shape, flat.dtype
    coming = [channel.start_receive(shape, dtype, rank, action=action, kind="weights") for _, rank in peers]
    found = {at: each.wait() for (at, _), each in zip(peers, coming, strict=True)}
    found[mine] = pieces[mine]
    total = found[0].clone()
    for at in range(1, len(ranks)):
        total += found[at]
    for each in sent:
        each.wait()
    sent = [channel.start_send(total, rank, action=action, kind="weights") for _, rank in peers]
    whole = {
        at: channel.start_receive(pieces[at].shape, dtype, rank, action=action, kind="weights")
        for at, rank in peers
    }
    joined = torch.cat([total if at == mine else whole[at].wait() for at in range(len(ranks))])
    for each in sent:
        each.wait()
    return joined
