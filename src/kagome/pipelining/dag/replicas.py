"""Replicas: which ranks train which weights, the sums of their gradients, and the exchange of all weights.

Where it sits: ``pipeline`` sums gradients after the last backward, and joins weights for ``state_dict``.

The loss is a sum over samples, divided by the size of the batch. The gradient of a weight is therefore the
sum over the replicas of each stage that uses it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import permutations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from kagome.comm.channel import Channel
from kagome.comm.transport.routes import Route
from kagome.model.operators.pieces import Piece
from kagome.pipelining.dag.sample_layout import SampleLayout


class ReplicaWeights:
    """The ranks that hold each weight and buffer, and the exchanges between them.

    Args:
        model: The user's module, in full on every rank.
        pieces: All stages.
        layout: Which ranks run which stage.
        channel: The channel between all ranks.
    """

    def __init__(
        self, model: nn.Module, pieces: Sequence[Piece], layout: SampleLayout, channel: Channel
    ) -> None:
        self.model, self.channel = model, channel
        self.parameters = dict(model.named_parameters())
        self.holders: dict[str, tuple[int, ...]] = {}
        """For each weight or buffer, the ranks that use it; the value of the first one counts."""
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
        """The weights that it does not train, which are out of date here until they are joined."""
        self._groups: dict[tuple[tuple[int, ...], torch.dtype], list[str]] = {}
        for name, weight in self.parameters.items():
            ranks = self.holders.get(name, ())
            if len(ranks) > 1 and weight.requires_grad:
                self._groups.setdefault((ranks, weight.dtype), []).append(name)

    def routes(self) -> set[Route]:
        """Return the routes of the sums: from each holder of a weight or buffer to each other one."""
        return {Route(*pair) for ranks in self.holders.values() for pair in permutations(set(ranks), 2)}

    def sum_gradients(self, update: int) -> None:
        """Sum the gradients of weights that several ranks train; the result is bitwise equal on all of them.

        Cost:
            Of d ranks that share b bytes of weights, each sends 2 b (d - 1) / d bytes.
        """
        # All ranks go through the groups in one order. A rank may be in several, whose sums would otherwise
        # wait for each other in a circle.
        for (ranks, _), names in sorted(self._groups.items(), key=lambda item: item[0][0]):
            if self.channel.rank not in ranks:
                continue
            weights = [self.parameters[name] for name in names]
            # A number behind the gradients counts the ranks that have one. If none has, the gradient stays
            # None as in training on one rank, and an optimizer leaves the weight unchanged.
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
        """Average the running statistics of batch norms over the replicas of each stage.

        All replicas count alike, as all batches do in a running statistic, though shares of a micro-batch may
        differ by one sample.
        """
        named = {
            f"{path}.{name}": buffer
            for path, module in self.model.named_modules()
            if isinstance(module, _BatchNorm)
            for name, buffer in module.named_buffers(recurse=False)
        }
        groups: dict[tuple[tuple[int, ...], torch.dtype], list[Tensor]] = {}
        for name, ranks in self.holders.items():
            # Only floating-point buffers: `num_batches_tracked` counts alike on all replicas.
            if name in named and len(ranks) > 1 and named[name].is_floating_point():
                groups.setdefault((ranks, named[name].dtype), []).append(named[name])
        for (ranks, _), buffers in sorted(groups.items(), key=lambda item: item[0][0]):
            if self.channel.rank in ranks:
                flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
                total = _summed(flat, ranks, self.channel, f"buffers, update {update}") / len(ranks)
                _fill(buffers, total)

    def join(self) -> None:
        """Give every rank the weights and buffers of all ranks. All ranks call it."""
        named = {**self.parameters, **dict(self.model.named_buffers())}
        for owner in range(self.channel.size):
            # Names that no stage uses belong to rank 0.
            self._share((t for name, t in named.items() if self.holders.get(name, (0,))[0] == owner), owner)

    def share_first(self) -> None:
        """Give every rank the weights and buffers of rank 0. All ranks call it."""
        self._share((*self.parameters.values(), *self.model.buffers()), 0)

    def _share(self, tensors: Iterable[Tensor], owner: int) -> None:
        """Give every rank one rank's values of some tensors, in a message for each dtype."""
        by_type: dict[torch.dtype, list[Tensor]] = {}
        for tensor in tensors:
            by_type.setdefault(tensor.dtype, []).append(tensor)
        for group in by_type.values():
            flat = torch.cat([tensor.detach().reshape(-1) for tensor in group])
            _fill(group, self.channel.broadcast(flat, owner, action=f"weights of rank {owner}"))


def _fill(tensors: Iterable[Tensor], flat: Tensor) -> None:
    at = 0
    with torch.no_grad():
        for tensor in tensors:
            tensor.copy_(flat[at : at + tensor.numel()].view_as(tensor))
            at += tensor.numel()


def _summed(flat: Tensor, ranks: Sequence[int], channel: Channel, action: str) -> Tensor:
    """Sum a tensor over some ranks, which all call it: each sums one piece in rank order and shares it."""
    # Reduce-scatter, then all-gather, by messages from one rank to one:
    #
    #     round 1   rank i receives piece i from all, and adds them in rank order
    #     round 2   rank i sends its sum to all
    #
    # Each piece is summed by one rank only, so all ranks have the same bits.
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
