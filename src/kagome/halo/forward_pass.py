"""Forward pass: one forward of the whole model and its backward; it numbers the collectives as sites.

Where it sits: ``intercept.interceptor`` begins one for each forward; ``exchange`` asks it for a site for
every collective.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from kagome.comm.exchange import Blocks, Exchange, ExchangeRequest, SiteExchange
from kagome.comm.stats import Kind
from kagome.errors import ModelError

if TYPE_CHECKING:
    from kagome.halo.comm_recorder import RecordedRows

SiteKey = tuple[str, int]
SumKey = tuple[SiteKey, str]
"""A sum at a site, with the words that say which of the site's sums it is."""
_NO_CHECKPOINT = "leave torch.utils.checkpoint out of the model, and let --model.recompute do the same"


class Backward(Protocol):
    """Code of a user's that runs during backward."""

    def refused(self) -> ModelError:
        """Return the error for a call that all ranks would have to make together."""

    def summed(self, part: Tensor) -> Tensor:
        """Return a sum over this rank's rows, as this rank's share of the global sum."""


# [Note: the way of the token] See [Note: token] in ``halo.exchange`` for what the token is. In one pass of
# two layers it goes this way:
#
#     forward     token [1] ──> site 1 ──> [2] ──> site 2 ──> [3] ──> loss + token [4]
#                                 │                  │
#                               rows               rows
#     backward    site 1 <──────────────── site 2 <────────────────── loss
#
#     [1] a zero that requires grad, made when the pass begins
#     [2] the autograd function of the exchange returns it as a second result, so it depends on site 1
#     [3] site 2 takes the token of [2], not of [1]: so sites form a chain, which backward goes in reverse
#     [4] the engine adds it to the loss, also on a rank whose loss is 0 because it has no training vertex
#
# The numbers of the sites in the pass (``collectives``) are the same on all ranks for the same reason that
# the forward is: each rank runs the same model. Ranks compare them in the first epoch, and error messages
# name them.


class ForwardPass:
    """One forward pass of the whole model, with the backward pass that belongs to it.

    Args:
        epoch: The epoch, for error messages, headers and dropout.
        checked: Whether headers are compared with the peers before each exchange.
        device: Device of the token.
        grad: Whether a backward pass follows.
        named: How often each site was reached before, in earlier stages of this rank.
    """

    def __init__(
        self,
        epoch: int,
        *,
        checked: bool,
        device: torch.device,
        grad: bool,
        named: Counter[str] | None = None,
    ) -> None:
        self.epoch, self.checked, self.grad = epoch, checked, grad
        self.token = torch.zeros((), device=device, requires_grad=grad)
        self.collectives = 0
        self.running = self.over = False
        self.once = False
        """Whether the running code's results are cached for all forward passes, so that later passes do not
        reach its reads."""
        self.seed = torch.initial_seed()
        """Seed of torch's generator when the forward pass began."""
        self.outlives = False
        """Whether a loss outside may take derivatives of the outputs, with gradients of their own."""
        self.differentiates = False
        """Whether a derivative is being taken inside forward, whose backward pass is handled."""
        self._inner: list[Tensor] = []
        self._named: Counter[str] = Counter() if named is None else named
        self.backward: Backward | None = None  # the user code that runs in backward now
        self.pardoned: Any = None  # the hook with which ``recompute`` is allowed to run a layer again

    @property
    def outside(self) -> bool:
        """Whether forward has ended and backward has not begun, so that the loss is being computed."""
        # torch numbers the backward passes that are running; -1 means that none is.
        return self.over and torch._C._current_graph_task_id() == -1

    def refuse_outside(self, where: str) -> None:
        """Refuse reads of neighbours inside the loss, which has some rows of the output and no graph.

        Raises:
            ModelError: If the loss is being computed.
        """
        if self.outside:
            raise ModelError(
                "neighbours to be read in the forward pass",
                "a loss that runs a layer which reads them",
                where=where,
                hint="run it in forward, and return what the loss needs; or train on one rank",
            )

    def refuse_rerun(self, where: str) -> None:
        """Refuse collectives in code that runs during backward, such as a layer that a checkpoint reruns."""
        if self.backward is not None:
            raise self.backward.refused()
        # Two signs of a layer that will run twice:
        #
        #     in backward now (over, not outside)              it is the second run
        #     a saved-tensor hook named "...checkpoint..."     the first run, under use_reentrant=False
        #
        # The hook of Kagome's own recomputation is pardoned, since that replays exchanges instead of
        # repeating them.
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True) if self.grad else None
        top = hooks[0] if hooks else None
        if (self.over and not self.outside) or (
            top is not self.pardoned and "checkpoint" in getattr(top, "__qualname__", "")
        ):
            raise ModelError(
                "each layer to run once, in the forward pass",
                "activation checkpointing, which runs one again in backward, with its exchange or its draws",
                where=where,
                hint=_NO_CHECKPOINT,
            )

    def begin(self, site: str, *, grad: bool = False) -> Site:
        """Number the next collective of this forward pass. ``grad`` says whether backward will visit it."""
        self.refuse_rerun(site)
        self.refuse_outside(site)
        if self.grad and not torch.is_grad_enabled() and _in_checkpoint():
            # It would run the layer again in backward, in a separate graph that skips ours silently.
            raise ModelError(
                "training to keep the gradient of every read of neighbours",
                "reentrant activation checkpointing, which switches gradients off around it",
                where=site,
                hint=_NO_CHECKPOINT,
            )
        self.collectives += 1
        # A read whose result is cached comes in one epoch only. With a name of its own it does not shift the
        # numbers of the site's other reads, under which rows are stored from epoch to epoch.
        name = f"{site} (kept)" if self.once else site
        self._named[name] += 1
        key = (name, self._named[name])
        trains, grad = self.grad and not self.once, grad and self.follows()
        return Site(site, self.collectives, self.epoch, self.checked, grad, key, trains, self.once)

    @contextmanager
    def reading_once(self) -> Iterator[None]:
        """Wrap reads whose results are cached for all forward passes, so that later passes skip them."""
        before, self.once = self.once, True
        try:
            yield
        finally:
            self.once = before

    @contextmanager
    def asking(self, channel: RecordedRows, where: str) -> Iterator[None]:
        """Wrap a request to the peers whose result is cached for all forward passes.

        The request is not part of the user's computation.
        """
        self.refuse_rerun(where)
        # The interceptor is a TorchFunctionMode, which would take the request's tensors for the user's.
        with torch._C.DisableTorchFunction(), channel.unrecorded():
            yield

    @contextmanager
    def differentiating(self) -> Iterator[None]:
        """Wrap a derivative that is taken inside forward.

        Its collectives use a token of their own. With the token of the forward pass, each later derivative
        would visit these collectives, and the next one also those that it added.
        """
        outer, self.token = self.token, torch.zeros_like(self.token, requires_grad=torch.is_grad_enabled())
        self.differentiates = True
        try:
            yield
        finally:
            self.differentiates = False
            # The derivative met collectives. Their backward belongs to the loss's backward, so the token is
            # kept and joins the others at the end.
            if self.token.grad_fn is not None:
                self._inner.append(self.token)
            self.token = outer

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Wrap a backward pass over one step of the forward pass, between two steps."""
        self.running = False
        try:
            yield
        finally:
            self.running = True

    def end(self) -> None:
        """End the forward pass, and merge all tokens into one."""
        self.running, self.over = False, True
        for token in self._inner:
            self.token = self.token + token
        self._inner.clear()

    def follows(self) -> bool:
        """Return whether backward may visit what is computed now.

        In evaluation that is so only where the model enables gradients.
        """
        return torch.is_grad_enabled()


class RunningForward:
    """The forward pass of one part, and the modules and layers that are running in it.

    Args:
        device: Where the model runs.
        fast: Whether messages are deferred and reduced by kernels. False runs everything as PyG runs it.
    """

    def __init__(self, device: torch.device, *, fast: bool) -> None:
        self.fast = fast
        self.forward_pass = ForwardPass(0, checked=False, device=device, grad=False)
        self.path: list[str] = []
        """The modules that are running, outermost first."""
        self.arguments: list[dict[str, Any]] = []
        """The arguments of each ``propagate`` that is running."""
        self.draws = self.layers = 0
        """How often the forward has drawn, and how many message-passing layers are running."""
        self.fault = ""
        """The innermost module that an error has left."""

    def begin(self, forward_pass: ForwardPass) -> None:
        """Begin a forward pass: sites and draws are numbered from the start."""
        self.forward_pass, self.path, self.arguments, self.draws, self.layers = forward_pass, [], [], 0, 0

    def where(self) -> str:
        """Return the path of the running module, for names and messages."""
        return self.path[-1] if self.path else "the model's forward"

    def site(self, rows: Tensor) -> str:
        """Return the site name of a read: module path and, inside propagate, the argument's name."""
        # Innermost first: a ``propagate`` may run inside another one's message.
        for arguments in reversed(self.arguments):
            for name, value in arguments.items():
                if value is rows or (isinstance(value, (tuple, list)) and any(v is rows for v in value)):
                    return f"{self.where()}.{name}"
        return self.where()

    def call(self) -> tuple[str, int]:
        """Return the running module's path and the number of this draw within the forward."""
        self.forward_pass.refuse_rerun(self.where())
        self.draws += 1
        return self.where(), self.draws

    def own_seed(self) -> bool:
        """Return True if forward has seeded torch's generator since it began. Its draws are then its own."""
        return torch.initial_seed() != self.forward_pass.seed


def transformed() -> bool:
    """Return whether a transform of ``torch.func`` is running; its tensors carry no placements."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def inside(found: Callable[[], ForwardPass | None]) -> ForwardPass | None:
    """Return the forward pass in which a derivative is being taken now; None in the backward pass after it.

    Args:
        found: Returns the forward pass, or None if it has been freed.

    Raises:
        ModelError: If this backward pass is not handled. It would add up derivatives taken on each rank, or
            run on one rank while others wait.
    """
    forward_pass = found()
    if forward_pass is not None and forward_pass.differentiates:
        return forward_pass
    if forward_pass is not None and forward_pass.outlives and torch.is_grad_enabled():
        return forward_pass  # the loss of a sharded model takes a derivative: all ranks run it
    # A freed forward pass ended long ago.
    over = forward_pass is None or not forward_pass.running
    if over and not torch.is_grad_enabled():
        return None
    raise ModelError(
        "gradients to be taken after the loss, or by torch.autograd.grad inside forward",
        "a loss that takes a derivative of the model" if over else "backward() inside forward",
        where="the loss" if over else "forward",
        hint="take the derivative inside forward, torch.autograd.grad(energy.sum(), pos, create_graph=True), "
        "and give it out as further columns; or train on one rank",
    )


def _in_checkpoint() -> bool:
    """Return whether this code runs under reentrant checkpointing, which is an autograd function."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        code = frame.f_code
        # ``CheckpointFunction.forward``: it runs the layer under ``no_grad``, and leaves no other trace.
        if code.co_name == "forward" and code.co_filename.endswith("torch/utils/checkpoint.py"):
            return True
    return False


@dataclass(frozen=True, slots=True)
class Site:
    """One collective of one forward pass: its name, its number, and whether peers compare headers.

    ``key`` is the same in every forward pass of every chunk, so state that outlives a pass is stored under
    it. ``trains`` says that the collective belongs to a training epoch and is repeated in the next one.
    ``once`` says that all forward passes share the result, so that it is not repeated.
    """

    name: str
    number: int
    epoch: int
    checked: bool
    grad: bool
    key: SiteKey
    trains: bool = False
    once: bool = False

    def action(self, direction: str) -> str:
        """Return the description of the operation for errors of a rank that waits in it."""
        return f"{direction} of {self.name}, epoch {self.epoch}"

    def header(self, direction: int, width: int) -> tuple[int, ...] | None:
        """Return (direction, epoch, site, width, grad), which ranks compare before rows are sent.

        It is None in a forward pass that is not checked.
        """
        return (direction, self.epoch, self.number, width, int(self.grad)) if self.checked else None

    def request(
        self,
        label: str,
        direction: int,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
        *,
        width: int,
        row_ids: Tensor,
        kind: Kind = "halo",
        index: Tensor | None = None,
        reads: Tensor | None = None,
        blocks: tuple[Blocks, Blocks] | None = None,
    ) -> ExchangeRequest:
        """Return the request for the site's exchange in one direction.

        Args:
            label: What is exchanged, for error messages: ``halo forward``.
            direction: As in :class:`SiteExchange`, whose other arguments are the same too.
            send_counts: Number of rows for each rank.
            recv_counts: Number of rows from each rank.
            width: Columns of a row, on which all ranks agree.
            row_ids: The ids of the rows that are sent.
            kind: Traffic kind that its bytes are counted under.
            index: Indices of the rows to send; all rows if None.
            reads: Number of edges that read each received row.
            blocks: Blocks of different widths in place of rows.
        """
        return ExchangeRequest(
            send_counts,
            recv_counts,
            self.action(label),
            kind,
            self.header(direction, width),
            index,
            SiteExchange(self.key, direction, self.epoch, self.trains, row_ids, reads, blocks),
        )

    def sum(self, channel: Exchange, part: Tensor, label: str) -> Tensor:
        """Return the sum of a tensor over the channel's ranks.

        A ``label`` that ends in "backward" marks gradients.
        """
        key: SumKey = self.key, label
        return channel.all_reduce(part, "sum", action=self.action(label), key=key)


def of_gradients(key: Hashable) -> bool:
    """Return whether a sum belongs to backward, as its label says; a module may have any name."""
    # A key is (site key, label): see :meth:`Site.sum`.
    return isinstance(key, tuple) and isinstance(key[-1], str) and key[-1].endswith("backward")
