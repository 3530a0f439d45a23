"""Gradient synchronization: after each backward, parameters have the gradient of the loss of all ranks.

Where it sits: :class:`kagome.sharding.module.ShardedModel` has one. The autograd functions of ``boundary``
call it when a backward reaches them; no call of the user's is needed.

::

    loss.backward()      first node of the model's output  ──> started(): old .grad set aside
                         ... layers, exchanges ...
                         last node                         ──> _finish(): sum over ranks / ranks, + old .grad

What the ranks minimize together is the *mean of their losses*, as with ``DistributedDataParallel``. A loss
from :meth:`ShardedModel.mean` is the same number on all ranks, and so is their mean. A term of weights alone,
such as a penalty, is counted once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.tensor import DTensor

from kagome.comm.channel import Channel
from kagome.components.gradients import GradientHooks, Gradients
from kagome.config import SumCodec
from kagome.errors import ModelError
from kagome.sharding.gradients.weight_pieces import (
    Trained,
    give_gradient,
    piece_of,
    take_gradient,
    trained,
)


class GradientSync:
    """The gradients of one model, averaged over ranks at the end of each backward pass.

    A gradient that was there before is kept and added to, so several backward passes accumulate.

    Args:
        modules: The user's module, and those that run beside it.
        channel: The mesh's lane for weights.
        codec: How gradients are encoded while they are summed.
        cut: Parameters of which each rank has its own rows: backward has summed their gradients already.

    Cost:
        One sum of all gradients over the ranks for each backward pass that is synchronized.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        channel: Channel,
        codec: SumCodec = "none",
        cut: Sequence[nn.Parameter] = (),
    ) -> None:
        self._modules, self._channel, self._codec = modules, channel, codec
        self._cut = frozenset(map(id, cut))
        self._task = -1
        self._trains = False
        self._before: list[Tensor | None] | None = None
        self._deferred: list[Tensor | None] = []
        self._syncs = True
        self._passes = 0
        self.backwards = 0
        """The number of backward passes that have ended, also within ``no_sync``."""
        self._renew(trained(self._modules))

    def _renew(self, learning: list[Trained]) -> None:
        """Take the parameters that are trained now; a user may have frozen some since."""
        self._trained = learning
        self._parameters = [each.parameter for each in self._trained]
        self._pieces = list(map(piece_of, self.shared))
        self._gradients = Gradients(self._pieces, self._channel, codec=self._codec, pieces=True)
        self._hooks = GradientHooks(self._parameters)
        self._deferred = [None] * len(self._parameters)

    def has(self, tensor: Tensor) -> bool:
        """Return whether a tensor is a parameter whose gradient is summed."""
        return any(tensor is each.leaf for each in self._trained)

    @property
    def shared(self) -> list[nn.Parameter]:
        """The trained parameters that are whole, and the same, on all ranks."""
        return [p for p in self._parameters if id(p) not in self._cut]

    @property
    def pieces(self) -> list[nn.Parameter]:
        """The shared parameters, with stand-ins of those of which the optimizer has a piece."""
        for piece, parameter in zip(self._pieces, self.shared, strict=True):
            take_gradient(piece, parameter)
        return self._pieces

    @property
    def cut(self) -> list[nn.Parameter]:
        """The trained parameters of which this rank has its own rows."""
        return [p for p in self._parameters if id(p) in self._cut]

    @property
    def training_now(self) -> bool:
        """Whether a backward runs that computes gradients of parameters."""
        return self._trains and self._task == torch._C._current_graph_task_id() != -1

    def refresh(self, net: nn.Module) -> None:
        """Prepare for a forward pass: finish what a failed backward left, and look which parameters train.

        Args:
            net: The sharded model, around which there may be FSDP.
        """
        self._restore()
        learning = trained(self._modules, net)
        if len(learning) != len(self._trained) or not all(map(Trained.same, learning, self._trained)):
            if any(each is not None for each in self._deferred):
                raise ModelError(
                    "the same trained parameters until the gradients of no_sync() are summed",
                    f"{len(learning)} in place of {len(self._parameters)}",
                    hint="freeze or unfreeze parameters after a backward outside no_sync()",
                )
            self._renew(learning)

    def started(self) -> bool:
        """Note that a backward has reached the model; return whether it computes gradients of parameters.

        ``torch.autograd.grad`` by an input does not: it is a derivative that the user asked for, as on one
        rank.

        Raises:
            ModelError: For ``torch.autograd.grad`` by parameters, which would give one rank's share.
        """
        task = torch._C._current_graph_task_id()
        # The number of the running backward: the first part of the model that it reaches prepares for it.
        if task == self._task:
            return self._trains
        self._restore()
        self._task, self._trains = task, self._reaches_parameters()
        if self._trains:
            # Set aside: what this backward writes is then its share alone, and only that may be summed.
            self._before = [_kept(p.grad) for p in self._parameters]
            for parameter in self._parameters:
                parameter.grad = None
            # A user's hooks are for summed gradients: they run once, after the sum.
            self._hooks.take_off()
            Variable._execution_engine.queue_callback(self._finish_last)
        return self._trains

    def _reaches_parameters(self) -> bool:
        try:
            return any(torch._C._will_engine_execute_node(each.accumulator) for each in self._trained)
        except RuntimeError as error:
            if "autograd.grad()" not in str(error):
                raise
            raise ModelError(
                "gradients of parameters by loss.backward(), which sums them over the ranks",
                "torch.autograd.grad by parameters, which would give one rank's share",
                hint="loss.backward(), then parameter.grad",
            ) from None

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Within a block, put off the sum over ranks: the first backward after it sums all."""
        before, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = before

    def _finish_last(self) -> None:
        """Finish after what others have queued: ``DistributedDataParallel`` writes its means there too."""
        Variable._execution_engine.queue_callback(self._finish)

    def _finish(self) -> None:
        """Sum the gradients of the backward that ends over the ranks, and add what was there before."""
        self._task = -1
        self.backwards += 1
        # What `no_sync` has put off is summed together with this share.
        found = [p.grad for p in self._parameters]
        self._deferred = [_added(one, other) for one, other in zip(self._deferred, found, strict=True)]
        if not self._syncs:
            self._deferred = [_kept(gradient) for gradient in self._deferred]
            self._restore()
            return
        for parameter, gradient in zip(self._parameters, self._deferred, strict=True):
            parameter.grad = gradient
        self._deferred = [None] * len(self._parameters)
        self._passes += 1
        pieces = self.pieces
        self._gradients.sum_now(f"sum of gradients, backward {self._passes}")
        for piece, parameter in zip(pieces, self.shared, strict=True):
            give_gradient(piece, parameter)
        self._agree()
        # The ranks minimize the mean of their losses, and each of them has the loss of all.
        for parameter in self._parameters:
            if parameter.grad is not None and self._channel.size > 1:
                parameter.grad.div_(self._channel.size)
        self._hooks.put_back()
        self._hooks.run()
        summed = [p.grad for p in self._parameters]
        self._restore()
        for parameter, gradient in zip(self._parameters, summed, strict=True):
            parameter.grad = _added(parameter.grad, gradient)

    def _agree(self) -> None:
        """Give a cut parameter zeros where another rank has a gradient of it, as a shared one gets.

        An optimizer skips a parameter without a gradient, so the ranks would count its steps differently.
        """
        if not self.cut or self._channel.size == 1:
            return
        # Shared parameters need no such message: theirs travels in front of their gradients.
        held = torch.tensor([float(p.grad is not None) for p in self.cut], device=self._channel.device)
        anywhere = self._channel.all_reduce(held, "max", action=f"gradients of tables, {self._passes}")
        for parameter, some in zip(self.cut, anywhere.tolist(), strict=True):
            if parameter.grad is None and some:
                parameter.grad = torch.zeros_like(parameter)

    def _restore(self) -> None:
        """Give parameters the gradients from before the backward that has ended or failed."""
        if self._before is None:
            return
        for parameter, gradient in zip(self._parameters, self._before, strict=True):
            parameter.grad = gradient
        self._hooks.put_back()
        self._before, self._task = None, -1


def _kept(gradient: Tensor | None) -> Tensor | None:
    """Return a gradient that the next backward does not overwrite.

    With ``gradient_as_bucket_view``, ``DistributedDataParallel`` makes gradients views of buckets that it
    writes to in each backward.
    """
    if gradient is None or isinstance(gradient, DTensor) or gradient.layout is not torch.strided:
        return gradient
    return gradient.clone() if gradient.untyped_storage().nbytes() > gradient.nbytes else gradient


def _added(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Return the sum of two gradients, in place of the first; None counts as zero."""
    if one is None or other is None:
        return other if one is None else one
    with torch.no_grad():
        return one.add_(other)
