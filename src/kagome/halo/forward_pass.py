"""Turn: one forward of the whole model and the backward that belongs to it; its collectives are sites.

Where it sits: ``intercept.interceptor`` begins one a forward; ``exchange`` numbers every collective by it.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from kagome.comm.exchange import Blocks, Trip
from kagome.errors import ModelError

if TYPE_CHECKING:
    from kagome.halo.comm_recorder import RecordedRows
    from kagome.halo.exchange import Carrier

SiteKey = tuple[str, int]
SumKey = tuple[SiteKey, str]
"""A sum of a site, with the words that say which of its sums it is."""
_NO_CHECKPOINT = "leave torch.utils.checkpoint out of the model, and let --model.recompute do the same"


class Backward(Protocol):
    """Something of a user's that runs in backward."""

    def refused(self) -> ModelError:
        """The error for a call that all ranks would have to make together."""

    def summed(self, part: Tensor) -> Tensor:
        """A sum over this rank's rows, as a rank's share of what all have."""


class ForwardPass:
    """One forward of the whole model and the backward that belongs to it.

    Args:
        epoch: The epoch, for messages, headers and dropout.
        checked: Compare headers with the peers before each exchange.
        device: Where the token lives.
        grad: Whether a backward follows.
        named: How often each site was come to before, in earlier stages of this rank.
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
        self.aside = False
        """Whether what runs is kept for all forwards: such a read is no site of later ones."""
        self.seed = torch.initial_seed()
        """That of torch's generator when the forward began."""
        self.differentiates = False
        """Whether a derivative is taken inside forward: its backward is seen to."""
        self._inner: list[Tensor] = []
        self._named: Counter[str] = Counter() if named is None else named
        self.backward: Backward | None = None  # what of a user's runs in backward now
        self.pardoned: Any = None  # the hook by which ``recompute`` lets a layer run again

    @property
    def outside(self) -> bool:
        """Whether the forward has ended and backward has not begun: the loss is computed."""
        return self.over and torch._C._current_graph_task_id() == -1

    def refuse_outside(self, where: str) -> None:
        """Refuse a read of neighbours by the loss: it has some rows of the output, and no graph.

        Raises:
            ModelError: If the loss is being computed.
        """
        if self.outside:
            raise ModelError(
                "neighbours are read in the forward pass",
                "the loss runs a layer that reads them after it",
                where=where,
                hint="run it in forward, and return what the loss needs; or train on one rank",
            )

    def refuse_again(self, where: str) -> None:
        """Refuse what runs in backward: it recomputes what nobody sees."""
        if self.backward is not None:
            raise self.backward.refused()
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True) if self.grad else None
        top = hooks[0] if hooks else None
        if (self.over and not self.outside) or (
            top is not self.pardoned and "checkpoint" in getattr(top, "__qualname__", "")
        ):
            raise ModelError(
                "each layer runs once in the forward pass",
                "activation checkpointing runs one again during backward, with its exchange or its draws",
                where=where,
                hint=_NO_CHECKPOINT,
            )

    def begin(self, site: str, *, grad: bool = False) -> Site:
        """Number the next collective of this forward; ``grad``: backward will come back to it."""
        self.refuse_again(site)
        self.refuse_outside(site)
        if self.grad and not torch.is_grad_enabled() and _in_checkpoint():
            # It would run the layer again in backward, in an autograd of its own that skips ours silently.
            raise ModelError(
                "training keeps the gradient of every read of neighbours",
                "reentrant activation checkpointing switches gradients off around it",
                where=site,
                hint=_NO_CHECKPOINT,
            )
        self.collectives += 1
        name = f"{site} (kept)" if self.aside else site
        self._named[name] += 1
        key = (name, self._named[name])
        trains, grad = self.grad and not self.aside, grad and self.follows()
        return Site(site, self.collectives, self.epoch, self.checked, grad, key, trains, self.aside)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Around what is kept for all forwards: later ones do not come to its reads."""
        before, self.aside = self.aside, True
        try:
            yield
        finally:
            self.aside = before

    @contextmanager
    def asking(self, channel: RecordedRows, where: str) -> Iterator[None]:
        """Around a question to the peers that is kept for all forwards. It is not the user's computation."""
        self.refuse_again(where)
        with torch._C.DisableTorchFunction(), channel.aside():
            yield

    @contextmanager
    def differentiating(self) -> Iterator[None]:
        """Around a derivative that is taken inside forward.

        Its collectives pass on a token of their own: along the forward's, each later derivative would visit
        them, and what it does then the next one.
        """
        outer, self.token = self.token, torch.zeros_like(self.token, requires_grad=torch.is_grad_enabled())
        self.differentiates = True
        try:
            yield
        finally:
            self.differentiates = False
            if self.token.grad_fn is not None:
                self._inner.append(self.token)
            self.token = outer

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Around a backward pass over a step of the forward, between two steps."""
        self.running = False
        try:
            yield
        finally:
            self.running = True

    def end(self) -> None:
        """The forward has ended: one token stands for all."""
        self.running, self.over = False, True
        for token in self._inner:
            self.token = self.token + token
        self._inner.clear()

    def follows(self) -> bool:
        """Whether backward may come back to what is done now: in evaluation only to what the model allows."""
        return torch.is_grad_enabled()


def transformed() -> bool:
    """Whether a transform of ``torch.func`` is running: it has tensors of its own, which carry no marks."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def inside(found: Callable[[], ForwardPass | None]) -> ForwardPass | None:
    """The turn in whose forward a derivative is taken now; None in the backward after it.

    Args:
        found: Gives the turn, or None where it is gone.

    Raises:
        ModelError: If nobody sees to this backward: it would sum what each rank differentiates, or be on one
            rank while others wait.
    """
    turn = found()
    if turn is not None and turn.differentiates:
        return turn
    over = turn is None or not turn.running
    if over and not torch.is_grad_enabled():
        return None
    raise ModelError(
        "gradients are taken after the loss, or by torch.autograd.grad inside forward",
        "the loss takes a derivative of the model" if over else "backward() is called inside forward",
        where="the loss" if over else "forward",
        hint="take the derivative inside forward, torch.autograd.grad(energy.sum(), pos, create_graph=True), "
        "and give it out as further columns; or train on one rank",
    )


def _in_checkpoint() -> bool:
    """Whether this runs under reentrant checkpointing, which is an autograd function."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        code = frame.f_code
        if code.co_name == "forward" and code.co_filename.endswith("torch/utils/checkpoint.py"):
            return True
    return False


@dataclass(frozen=True, slots=True)
class Site:
    """One collective of one forward: its name, its number, and whether peers compare headers.

    ``key`` is the same in every forward of every chunk: what lasts longer than a forward goes by it.
    ``trains``: it belongs to an epoch of training, and comes again in the next one. ``once``: all forwards
    share what is read, so that it does not come again.
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
        """What a rank that waits here says it does."""
        return f"{direction} of {self.name}, epoch {self.epoch}"

    def header(self, direction: int, width: int) -> tuple[int, ...] | None:
        """(direction, epoch, site, width, grad): what ranks agree on before rows of a size travel."""
        return (direction, self.epoch, self.number, width, int(self.grad)) if self.checked else None

    def trip(
        self,
        direction: int,
        stamps: Tensor,
        reads: Tensor | None = None,
        blocks: tuple[Blocks, Blocks] | None = None,
    ) -> Trip:
        """What its exchange in a direction is, to those who carry it."""
        known = stamps.new_empty(0) if reads is None else reads
        return Trip(self.key, direction, self.epoch, self.trains, stamps, known, blocks)

    def sum(self, channel: Carrier, part: Tensor, words: str) -> Tensor:
        """The sum of a part over the channel's ranks; words that end in "backward" are of gradients."""
        key: SumKey = self.key, words
        return channel.all_reduce(part, "sum", action=self.action(words), key=key)


def of_gradients(key: Hashable) -> bool:
    """Whether a sum comes in backward: by its words, not by the names of the user's modules."""
    return isinstance(key, tuple) and isinstance(key[-1], str) and key[-1].endswith("backward")
