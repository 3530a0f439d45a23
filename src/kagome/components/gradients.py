"""Gradients: their sum over the ranks, started bucket by bucket while backward still runs.

Where it sits: ``train.graph_engine`` enters it around each backward. Sums travel on the mesh's lane for
weights, apart from halo rows.

::

    parameters, last one first     [ w3 b3 | w2 b2 | w1 b1 + loss, stop, ... ]
    backward ----------------------->      ^       ^       ^  a bucket is sent when it is complete
                                                              and all buckets before it were sent
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, Final

import torch
from torch import Tensor, nn

from kagome.comm.all_reduce import AllReduceWork
from kagome.comm.channel import Channel
from kagome.comm.codec import CASTS
from kagome.comm.transport.device import to_device
from kagome.config import SumCodec
from kagome.errors import ModelError

BUCKET_BYTES: Final = 128 * 1024
"""The least bytes of a bucket, if there are that many: a smaller message costs its latency only."""
MOST_BUCKETS: Final = 32
"""The most buckets; larger models have larger buckets instead."""


Hooks = MutableMapping[int, Callable[..., Any]]


def buckets_of(
    parameters: Sequence[nn.Parameter], size: int, late: frozenset[int] = frozenset()
) -> list[tuple[int, ...]]:
    """Divide the parameters into buckets, in the order in which backward is likely to reach them.

    Args:
        parameters: In the order of registration.
        size: Bytes that close a bucket.
        late: Indices of parameters that some rank has no gradient for: they come last and delay no other.

    Returns:
        The indices of each bucket's parameters, which are of one number type.
    """
    backwards = range(len(parameters) - 1, -1, -1)
    order = [p for p in backwards if p not in late] + [p for p in backwards if p in late]
    done: list[tuple[int, ...]] = []
    # One open bucket per number type, and per "late" or not: values of two types cannot share a message, and
    # a bucket waits for its latest gradient.
    open_: dict[tuple[torch.dtype, bool], list[int]] = {}
    for place in order:
        key = (parameters[place].dtype, place in late)
        held = open_.setdefault(key, [])
        held.append(place)
        if sum(parameters[p].nbytes for p in held) >= size:
            done.append(tuple(open_.pop(key)))
    # Buckets in the order of their last parameter, which is the order in which backward completes them.
    at = {place: number for number, place in enumerate(order)}
    return sorted([*done, *map(tuple, open_.values())], key=lambda bucket: at[bucket[-1]])


def message_bytes(parameters: Sequence[nn.Parameter], notes: int) -> tuple[int, ...]:
    """Return the bytes of each bucket's message: gradients, a number for each, and notes in one bucket.

    Args:
        parameters: In the order of registration.
        notes: The number of further values that are summed along.
    """
    # Buckets are of one type in most models: that of the first parameter.
    size, head = _suited(parameters), _head_type(parameters[0].dtype).itemsize if parameters else 0
    sums = [
        sum(parameters[place].nbytes + head for place in bucket) for bucket in buckets_of(parameters, size)
    ]
    return (*sums[:-1], sums[-1] + (notes + 1) * head) if sums else ()


def _suited(parameters: Sequence[nn.Parameter]) -> int:
    return max(BUCKET_BYTES, sum(p.nbytes for p in parameters) // MOST_BUCKETS)


def _head_type(dtype: torch.dtype) -> torch.dtype:
    """Return the type of the numbers that travel with gradients: the gradients', but float32 for halves."""
    return dtype if dtype.itemsize > 2 else torch.float32


# [Note: message of a bucket] The gradients of a bucket are summed in one message with a few numbers in front:
#
#     [ 1 or 0 for each parameter ][ notes, in one bucket only ][ gradient of p0 ][ gradient of p1 ] ...
#
# The 1 says that this rank has a gradient, so the sum says how many ranks have one. A parameter without any
# keeps None, as on one rank: with zeros in its place Adam's moments and weight decay would move it. The notes
# (the loss, requests to stop) travel along because a message of their own would cost another latency.
#
# bfloat16 has 8 significant bits: the loss would be rounded, and counts be wrong from 257 ranks on. So the
# numbers in front of gradients of 16 bits are a message of their own, in float32.


class Gradients:
    """Sum parameters' gradients over the ranks: the same bits on all of them, whatever the buckets.

    A parameter without a gradient on every rank keeps None; on some ranks, it counts as zeros there. The
    first sum begins after backward. It learns which parameters every rank has a gradient for, and whether
    backward visits a parameter twice (reentrant checkpoints do); if so, all later sums run after backward
    too.

    Args:
        parameters: Those that need a gradient, the same on all ranks; they may be frozen later.
        channel: The mesh's lane for weights. With one rank gradients stay as they are.
        size: Bytes of a bucket; by default what suits the parameters.
        codec: How gradients are encoded in messages; counts and notes are sent uncompressed.
        pieces: Whether backward runs chunk by chunk, so that a gradient is complete after the last chunk.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        channel: Channel,
        *,
        size: int | None = None,
        codec: SumCodec = "none",
        pieces: bool = False,
    ) -> None:
        self.parameters, self.channel, self.codec = list(parameters), channel, codec
        self.uncoded = 0
        """Bytes that this rank would have sent without a codec, since the last :meth:`take_uncoded`."""
        self.size = _suited(self.parameters) if size is None else size
        # nccl needs all collectives in one order on all ranks, and gradients come in different orders where
        # a rank has no training vertex: two communicators would deadlock.
        self.overlaps: bool | None = None if channel.lanes and not pieces else False
        self._own_hooks = GradientHooks(self.parameters if channel.size > 1 or pieces else ())
        self._cut(frozenset())
        self._begin((), "")

    def _cut(self, late: frozenset[int]) -> None:
        # The same on all ranks, because `late` comes from sums: rank 0's third message is every rank's third
        # message.
        self.buckets = buckets_of(self.parameters, self.size, late)
        self._home = {place: number for number, b in enumerate(self.buckets) for place in b}
        # The notes' type is that of the first parameter, whatever the buckets.
        self._bearer = self._home.get(0, 0)

    def _begin(self, notes: Sequence[Tensor | float], action: str) -> None:
        self._notes, self._action = notes, action
        self._missing = [len(bucket) for bucket in self.buckets]
        self._under_way: list[list[AllReduceWork]] = []
        self._seen: set[int] = set()
        self._again = False

    @contextmanager
    def during(self, notes: Sequence[Tensor | float], action: str) -> Iterator[None]:
        """Drop old gradients before one backward in a block, and start summing new ones as they come.

        Args:
            notes: Numbers to be summed along, known before backward.
            action: The description of the sum, for errors.
        """
        # Freed before backward: gradients are views of the last messages, which would stay in memory beside
        # the new ones.
        for parameter in self.parameters:
            parameter.grad = None
        self._begin(notes, action)
        self._own_hooks.take_off()
        hooked = enumerate(self.parameters) if self.channel.size > 1 and self.overlaps is not False else ()
        hooks = [
            p.register_post_accumulate_grad_hook(self._hook(place))
            for place, p in hooked
            if p.requires_grad  # one that was frozen since is summed after backward
        ]
        try:
            yield
        except BaseException:
            self._under_way.clear()  # a work holds its connections open
            raise
        finally:
            for hook in hooks:
                hook.remove()
            self._own_hooks.put_back()

    def sum_now(self, action: str) -> None:
        """Sum the gradients that the parameters hold, after a backward that has ended. All ranks call it."""
        self._begin((), action)
        self.finish()

    def finish(self) -> list[float]:
        """Wait for the sums and store each parameter's summed gradient.

        Returns:
            The notes, summed over the ranks.

        Raises:
            CommError: If a peer was late or lost.

        Cost:
            The gradients' bytes, a number a parameter and the notes: see :meth:`Channel.start_all_reduce`.
        """
        if self.channel.size == 1:
            return [float(note) for note in self._notes]
        try:
            # Buckets that backward did not complete are sent now: those with a parameter without a gradient
            # here, or all of them if sums do not overlap with backward.
            while len(self._under_way) < len(self.buckets):
                self._set_off()
            # Begin the second rounds of all sums before the first wait, so that they travel together.
            for pending in chain.from_iterable(self._under_way):
                pending.advance()
            sums = [[pending.wait() for pending in works] for works in self._under_way]
        finally:
            self._under_way = []
        notes: list[float] = []
        late: set[int] = set()
        for number, (bucket, summed) in enumerate(zip(self.buckets, sums, strict=True)):
            # See [Note: message of a bucket]. The one more is `_again`, which `_set_off` puts behind the
            # notes.
            heads = len(bucket) + (len(self._notes) + 1 if number == self._bearer else 0)
            row, flat = summed if len(summed) > 1 else (summed[0][:heads], summed[0][heads:])
            head = (row.real if row.is_complex() else row).tolist()
            notes = head[len(bucket) :] or notes
            offset = 0
            for place, owners in zip(bucket, head, strict=False):
                parameter = self.parameters[place]
                piece = flat[offset : offset + parameter.numel()].view(parameter.shape)
                parameter.grad = piece if owners else None
                offset += parameter.numel()
                if owners != self.channel.size:
                    late.add(place)
        # Decided once, after the first sums: no overlap if any rank saw a parameter twice. Parameters without
        # a gradient on some rank move to the last buckets, so that the others need not wait for them.
        if self.overlaps is None:
            self.overlaps = not notes[-1]
            self._cut(frozenset(late))
        return notes[:-1]

    def tell_hooks(self) -> None:
        """Run a user's gradient hooks, once gradients are sums over all ranks and chunks."""
        self._own_hooks.run()

    def take_uncoded(self) -> int:
        """Return the bytes that this rank would have sent without a codec since the last call."""
        taken, self.uncoded = self.uncoded, 0
        return taken

    def _hook(self, place: int) -> object:
        def arrived(_: Tensor) -> None:
            number = self._home[place]
            # A reentrant checkpoint runs a backward of its own for each of its blocks, and visits a shared
            # weight once in each: the gradient was not complete at the first visit.
            if place in self._seen:
                self._again = True
                if number < len(self._under_way):
                    raise ModelError(
                        "backward to come to each parameter once, as it did in the first epoch",
                        f"twice to one of shape {list(self.parameters[place].shape)}",
                        hint="no torch.utils.checkpoint in the model; --model.recompute does it by layer",
                    )
                return
            self._seen.add(place)
            self._missing[number] -= 1
            # Send buckets in one order on all ranks: a bucket that is complete early waits.
            while self.overlaps and len(self._under_way) < len(self.buckets):
                if self._missing[len(self._under_way)]:
                    break
                self._set_off()

        return arrived

    def _set_off(self) -> None:
        """Start the sum of the next bucket: which gradients exist, notes in one bucket, the gradients."""
        number = len(self._under_way)
        held = [self.parameters[place] for place in self.buckets[number]]
        dtype, device = held[0].dtype, held[0].device
        head: list[Tensor | float] = [float(p.grad is not None) for p in held]
        # The notes are in the bucket of the first parameter only.
        if number == self._bearer:
            head += [*self._notes, float(self._again)]
        # Notes that are tensors are copied on the device. A float() here would wait for the GPU.
        known = [0.0 if isinstance(h, Tensor) else h for h in head]
        row = to_device(torch.tensor(known, dtype=_head_type(dtype)), device)
        for at, value in enumerate(head):
            if isinstance(value, Tensor):
                row[at] = value.detach()
        # Embeddings may have sparse gradients, whose indices differ between ranks. Their sum is dense.
        flat = [
            (p.new_zeros(p.numel()) if p.grad is None else p.grad.to_dense().reshape(-1)).detach()
            for p in held
        ]
        # The codec applies behind the head: counts and notes must stay exact.
        exact, cast = row.numel(), CASTS.get(self.codec)
        values = [(torch.cat([row, *flat]), exact)]
        if row.dtype != dtype:
            values = [(row, exact), (torch.cat(flat), 0)]
        works = [
            self.channel.start_all_reduce(each, action=self._action, cast=cast, exact=exact)
            for each, exact in values
        ]
        self.uncoded += sum(work.uncast for work in works)
        self._under_way.append(works)


class GradientHooks:
    """A user's hooks on parameters' gradients, run once the gradients are summed over all ranks.

    Autograd would run them on the share of one rank or of one chunk: a clamp or a norm of a share is not a
    share of the clamp or norm of the sum.

    Args:
        parameters: The parameters that are trained.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._of_tensor: dict[int, Hooks] = {}
        self._after: dict[int, Hooks] = {}

    def take_off(self) -> None:
        """Take the hooks off before a backward; they run in :meth:`run`."""
        for place, parameter in enumerate(self._parameters):
            for name, taken in (
                ("_backward_hooks", self._of_tensor),
                ("_post_accumulate_grad_hooks", self._after),
            ):
                hooks: Hooks | None = getattr(parameter, name)
                if hooks:
                    taken[place] = dict(hooks)
                    hooks.clear()  # autograd refers to this very dict

    def put_back(self) -> None:
        """Put the hooks back after the backward, also after one that failed."""
        for place, parameter in enumerate(self._parameters):
            for name, taken in (
                ("_backward_hooks", self._of_tensor),
                ("_post_accumulate_grad_hooks", self._after),
            ):
                if place in taken:
                    getattr(parameter, name).update(taken[place])

    def run(self) -> None:
        """Run the hooks, as autograd would have, on the gradients that the parameters hold now."""
        for place in sorted({*self._of_tensor, *self._after}):
            parameter = self._parameters[place]
            if parameter.grad is None:
                continue
            # Autograd runs tensor hooks before the accumulation, whose result they may replace, and the
            # others after it.
            for hook in self._of_tensor.get(place, {}).values():
                changed = hook(parameter.grad)
                parameter.grad = parameter.grad if changed is None else changed
            for hook in self._after.get(place, {}).values():
                hook(parameter)
        self._of_tensor, self._after = {}, {}
