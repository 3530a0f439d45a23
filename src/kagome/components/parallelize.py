"""Parallelize: puts a user's model on one part of a graph, runs it there, and takes everything off again.

Where it sits: engines, checks, memory estimates and profiles call it; no other code puts a model on a part.
Interceptor, layer rules, forward hooks and recomputation come from the packages below, one piece each.

::

    net = parallelize(model, part, channel, options)
    with net:                                            on:  1 layer rules, 2 hooks, 3 recomputation
        out = net.forward(epoch, training=True)          own rows, as on the whole graph
                                                         off: 3 recomputation, 2 hooks, 1 layer rules

A layer that no split supports is refused where the block begins, and the model is unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial, wraps
from types import TracebackType
from typing import Any, Final, Self, TypeVar, cast

import torch
from torch import nn

from kagome.comm.exchange import Exchange
from kagome.config import Parallel, PartialSums, Train
from kagome.deferred.lazy_tensor import EscapeError
from kagome.errors import KagomeError, ModelError
from kagome.feature_parallel.tiled_reduce import TileBound
from kagome.graph.partition.partition import Partition
from kagome.graph.partition.sets_partition import SetsPartition
from kagome.halo.exchange import HaloExchange
from kagome.halo.forward_pass import ForwardPass
from kagome.intercept.gather_scatter import Handler
from kagome.intercept.hooks import install, is_installed
from kagome.intercept.interceptor import Interceptor
from kagome.launch.allocator import FreedMemory
from kagome.model.buffers import Buffers
from kagome.model.exact.handlers import HANDLERS
from kagome.model.exact.layer_rules import apply_rules
from kagome.model.forward_call import ForwardCall
from kagome.recompute.checkpoint import recompute

CPU: Final = torch.device("cpu")
UNSPLIT: Final = Parallel()


@dataclass(frozen=True)
class PartOptions:
    """How a model runs on a part.

    Args:
        device: The device that the model runs on.
        seed: The seed of random draws.
        fast: Whether messages are deferred and reduced by kernels.
        tensor: The number of ranks that slice the features of one part.
        sums_only: Whether only a sample of other parts' rows is read, which is unbiased for sums alone.
        memory: The most bytes of working memory that a sum over feature slices uses; None for no bound.
        recompute: Whether each layer keeps its inputs only, and runs again in backward.
        amp: Whether forward runs under bf16 autocast.
        partial_sums: When sums over neighbours are partly taken by the ranks that own the rows.
    """

    device: torch.device = CPU
    seed: int = 0
    fast: bool = True
    tensor: int = 1
    sums_only: bool = False
    memory: int | None = None
    recompute: bool = False
    amp: bool = False
    partial_sums: PartialSums = "auto"

    @staticmethod
    def of(
        train: Train,
        device: torch.device = CPU,
        parallel: Parallel = UNSPLIT,
        *,
        fast: bool,
        recompute: bool = False,
    ) -> PartOptions:
        """Return the options that a run's settings ask for."""
        return PartOptions(
            device,
            train.seed,
            fast,
            parallel.tensor,
            sums_only=parallel.halo_sample < 1,
            memory=None if parallel.memory_gib is None else int(parallel.memory_gib * 2**30),
            # A plan holds settings of ``Parallel`` alone, so recomputation is one of these too.
            recompute=recompute or parallel.activations == "recompute",
            amp=train.amp == "bf16",
            partial_sums=parallel.partial_sums_sent,
        )


def parallelize(
    model: nn.Module,
    part: Partition | SetsPartition,
    channel: Exchange,
    options: PartOptions,
    *,
    handlers: Mapping[str, Handler] = HANDLERS,
    tell: Callable[[BaseException], None] | None = None,
) -> ParallelModel:
    """Make a model run on one part as if it were the whole graph, inside ``with`` blocks.

    Args:
        model: The user's module. It stays the user's own object, with the same parameters.
        part: This rank's part.
        channel: The channel to the other parts, or a wrapper that encodes or delays rows.
        options: How the model runs.
        handlers: The torch calls that are answered in place of torch, by name.
        tell: See :class:`ParallelModel`.
    """
    scope = interceptor_of(part, channel, options, handlers=handlers)
    return ParallelModel(model, scope, options, tell=tell)


def interceptor_of(
    part: Partition | SetsPartition,
    channel: Exchange,
    options: PartOptions,
    *,
    rows: HaloExchange | None = None,
    handlers: Mapping[str, Handler] = HANDLERS,
    kind: type[Interceptor] = Interceptor,
) -> Interceptor:
    """Make the interceptor of a part or a chunk.

    Args:
        part: The part or chunk.
        channel: The channel to the others.
        options: How the model runs.
        rows: The provider of halo rows, if it is not an exchange by the part's own lists.
        handlers: The torch calls that are answered in place of torch, by name.
        kind: The class of the interceptor.
    """
    scope = kind(
        part,
        channel,
        device=options.device,
        seed=options.seed,
        handlers=handlers,
        fast=options.fast,
        rows=rows,
        tensor=options.tensor,
        sums_only=options.sums_only,
        partial_sums=options.partial_sums,
    )
    if options.memory is not None:
        scope.sliced.bound = TileBound(options.memory, options.device)
    return scope


class ParallelModel:
    """A user's model on a part, or on the chunks of one.

    The model is on the part inside ``with`` blocks, which may be nested. Between them it belongs to the user,
    who may call it on a whole graph, copy it, pickle it, or train it in another trainer. A block that begins
    raises :class:`ModelError` for a layer or a kept tensor that no split supports.

    Args:
        model: The user's module.
        scope: The interceptor of the part, or the proxy of the running chunk's.
        options: How the model runs.
        tell: Called with an error that ends such a block, to report it to the other ranks.

    Attributes:
        escape: Why a forward pass turned fast paths off; empty if none did.
        freed: What becomes of the memory that training passes free.
    """

    def __init__(
        self,
        model: nn.Module,
        scope: Interceptor,
        options: PartOptions,
        *,
        tell: Callable[[BaseException], None] | None = None,
    ) -> None:
        self.model, self.scope, self.options, self.escape = model, scope, options, ""
        self._tell, self._depth, self._trained, self._undo = tell, 0, False, ExitStack()
        self.freed = FreedMemory()

    def __enter__(self) -> Self:
        # `fit` holds a block open over all epochs; methods of the engine that enter it again only count.
        if not self._depth:
            self._undo = self._put_on()
        self._depth += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Peers are told before anything else, as they wait in a collective that this rank will not reach.
        if error is not None and self._tell is not None:
            self._tell(error)
        self._depth -= 1
        if not self._depth:
            self._undo.close()

    def _put_on(self) -> ExitStack:
        """Put everything on the model; return what removes it. An error leaves the model unchanged.

        Hooks wrap methods that rules have set, and recomputation wraps the hooks' methods. Each restores what
        it found, so the last is taken off first.
        """
        # If a rule refuses a layer, leaving this block takes off what is on so far. `pop_all` keeps it on
        # otherwise.
        if is_installed(self.model):
            raise ModelError(
                "a model that runs nowhere else",
                "one that is on a part of a graph already, by kagome.shard or by a Trainer",
                hint="net.close(), or leave its `with` block, first",
            )
        with ExitStack() as undo:
            if not self.scope.plain:
                undo.callback(apply_rules(self.model, self.scope))
                undo.callback(install(self.model, self.scope))
                if self.options.recompute:
                    undo.callback(recompute(self.model, self.scope))
            return undo.pop_all()

    @cached_property
    def calling(self) -> ForwardCall:
        """How forward is called with the part's inputs.

        Raises:
            ModelError: If forward asks for something that the data does not have.
        """
        return ForwardCall.of(self.model, set(self.scope.inputs))

    def cast(self) -> AbstractContextManager[object]:
        """Return the context of mixed precision, which is empty without it."""
        device = self.scope.device.type
        return torch.autocast(device, torch.bfloat16) if self.options.amp else nullcontext()

    @contextmanager
    def running(self, epoch: int, *, training: bool, checked: bool = False) -> Iterator[ForwardPass]:
        """Enter one forward pass, with mixed precision: see :meth:`Interceptor.running`."""
        if training:
            self.freed.look()
        with self.scope.running(epoch, training=training, checked=checked) as forward_pass, self.cast():
            yield forward_pass

    def forward(
        self,
        epoch: int,
        *,
        training: bool,
        checked: bool = False,
        explain: Callable[[Exception], Exception] | None = None,
        call: Callable[[], Any] | None = None,
    ) -> Any:
        """Run the model on own rows, without fast paths if they cannot follow it.

        All ranks call it, inside a ``with`` block.

        Args:
            epoch: The epoch, for draws, headers and messages.
            training: Whether a backward follows.
            checked: Whether ranks compare headers at every collective.
            explain: Returns the error to raise in place of one that is not Kagome's.
            call: Calls the model; by default with the part's inputs, by their names.
        """
        call = call or partial(self.calling.call, self.model, self.scope.inputs)
        # Only the first training pass can abandon a pass that has written to buffers: an escape depends on
        # the model's code, and shows up then.
        buffers = Buffers(self.model) if training and not self._trained and self.scope.forward.fast else None
        before = None if buffers is None else (buffers.now(), buffers.copies())
        try:
            with self.running(epoch, training=training, checked=checked):
                out = self._call(call, explain)
        except EscapeError as error:
            # All ranks run the same code, so all of them get here at the same call.
            self.scope.forward.fast, self.escape = False, error.got
            if buffers is not None and before is not None:
                buffers.restore(*before)  # the pass that was abandoned has changed some
            error.__traceback__ = None  # it would keep all tensors of that pass alive
            with self.running(epoch, training=training, checked=checked):
                out = self._call(call, explain)
        self._trained = self._trained or training
        return out

    def _call(self, call: Callable[[], Any], explain: Callable[[Exception], Exception] | None) -> Any:
        try:
            return call()
        except KagomeError:
            raise
        except Exception as error:
            found = error if explain is None else explain(error)
            if found is error:
                raise
            raise found from error


Method = TypeVar("Method", bound=Callable[..., Any])


def while_attached(method: Method) -> Method:
    """Decorate an engine's method that runs the model: the model is on its part during the call."""

    @wraps(method)
    def attached(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.net:
            return method(self, *args, **kwargs)

    return cast(Method, attached)
