"""Step exchange: an exchange of rows in which late rows and residuals of codecs age by training steps.

Where it sits: in front of ``halo.compressed_exchange``, which counts the age of rows in epochs. This exchange
replaces the number of a forward pass by that of its training step.

::

    forward         1    2    backward    3    4    backward    5
    training step   1    1                2    2                3
    call in it      1    2                1    2                1

A training step ends with a backward. The second call of a step, as in a roll-out, reads the late rows of the
second call of the step before, not those of the first call. A forward pass in evaluation mode belongs to no
step, and its rows are exact.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Final

from torch import Tensor

from kagome.comm.exchange import ExchangeRequest, Op, SiteExchange, Work
from kagome.comm.stats import Kind
from kagome.errors import ModelError
from kagome.halo.compressed_exchange import CompressedExchange

# [Note: why by calls] Late rows are kept by site, and a site is a module and the number of its call in one
# forward pass. A step of several forward passes would meet a site several times:
#
#     roll-out of two, by forward passes       by calls of a step
#     forward 1   reads rows of 0              step 1, call 1   reads rows of step 0, call 1
#     forward 2   reads rows of 1: the field   step 1, call 2   reads rows of step 0, call 2
#                 of a moment before
#     backward 2, then backward 1: older       each call's gradients wait for those of the same call
#                 than what was read last
#
# So each call of a step has sites of its own. If a step has fewer calls than the one before, the rows of the
# others grow too old, and the next step that has such calls waits for its own.
REMEMBERED: Final = 10_000
"""Number of forward passes whose backward may still come."""


@dataclass(frozen=True)
class Call:
    """The place of one forward pass in the training loop.

    Args:
        step: The training step, counted from 1.
        number: Which call of the step it is, counted from 1.
    """

    step: int
    number: int


class StepExchange:
    """An exchange whose rows age by training steps.

    Args:
        inner: Encodes, selects and delays rows by epochs.
    """

    def __init__(self, inner: CompressedExchange) -> None:
        self.inner = inner
        settings = inner.state.settings
        self._ages = settings.max_age > 0 or settings.error_feedback
        """Whether rows of the step before are kept; if so, each exchange of a forward pass runs once."""
        self._calls: OrderedDict[int, Call | None] = OrderedDict()
        self._last, self._backwards = Call(1, 0), 0
        self._returned: dict[Hashable, int] = {}
        """For each site's backward direction, the forward pass whose backward it last carried."""

    @property
    def rank(self) -> int:
        """Number of this rank in the group."""
        return self.inner.rank

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return self.inner.size

    @property
    def exact(self) -> bool:
        """Whether all rows are sent unchanged and none is late."""
        return self.inner.exact

    def begin(self, forward: int, backwards: int, *, trains: bool) -> None:
        """Note a forward pass that begins. All ranks call it alike.

        Args:
            forward: The number of the forward pass.
            backwards: The number of backward passes that have ended before it.
            trains: Whether its rows may be inexact: in training mode, with gradient.
        """
        if not trains:
            # A message that is not received blocks those sent long after it, and any number of evaluations
            # may follow before the next step receives the late rows.
            self.settle()
            self._calls[forward] = None
            return
        # Before the first forward pass there may have been backward passes of other losses.
        last, ended = self._last, backwards > self._backwards and self._last.number > 0
        self._last = Call(last.step + 1, 1) if ended else Call(last.step, last.number + 1)
        self._backwards = backwards
        self._calls[forward] = self._last
        # By their number, not by what the garbage collector has freed: all ranks must forget alike.
        while len(self._calls) > REMEMBERED:
            self._calls.popitem(last=False)

    def settle(self) -> None:
        """Receive what is still in transit. All ranks call it."""
        self.inner.settle()

    def start(self, rows: Tensor, request: ExchangeRequest) -> Work:
        """Begin an exchange of rows: see :meth:`Exchange.start`.

        Raises:
            ModelError: If it belongs to a second backward, or to one that comes too late.
        """
        site = request.site
        if site is None or not site.training or self.size == 1:
            return self.inner.start(rows, request)
        if site.epoch not in self._calls:
            raise ModelError(
                f"a backward within {REMEMBERED:,} forward passes of its own forward pass",
                f"one of forward pass {site.epoch}",
                where=site.name,
            )
        call = self._calls[site.epoch]
        # A derivative in evaluation, such as forces: forward and backward are exact.
        if call is None:
            return self.inner.start(rows, replace(request, site=replace(site, training=False)))
        if not self._ages:
            return self.inner.start(rows, request)  # the forward pass's own number: new draws in each
        self._refuse_again(site, call)
        name, times = site.site if isinstance(site.site, tuple) else (site.site, 1)
        key = (name, times) if call.number == 1 else (f"{name} (forward {call.number} of a step)", times)
        return self.inner.start(rows, replace(request, site=replace(site, site=key, epoch=call.step)))

    def _refuse_again(self, site: SiteExchange, call: Call) -> None:
        """Refuse a second backward of a forward pass, a derivative of one, and a backward out of order.

        Raises:
            ModelError: If the exchange is one of theirs.
        """
        # Direction 0 has its backward in 3, and 2 in 1: see [Note: directions] in comm.exchange.
        back = (site.site, site.direction if site.backward else 3 - site.direction, call.number)
        returned = self._returned.get(back, -1)
        # A forward direction comes again where a backward is differentiated. A forward pass that restarts
        # without fast paths repeats it too, but before any backward.
        if site.backward:
            self._returned[back] = max(site.epoch, returned)
        if returned >= site.epoch or (site.backward and call.step < self._last.step):
            raise ModelError(
                "one backward of each forward pass, in the order of the training steps, for max_age and "
                "error_feedback",
                "a second backward, a derivative of a derivative, or a backward of an earlier training step",
                where=site.name,
                hint="codec=... alone, or halo_sample, which keep no rows from step to step",
            )

    def all_reduce(
        self,
        tensor: Tensor,
        op: Op = "sum",
        *,
        action: str,
        kind: Kind = "statistics",
        key: Hashable = None,
    ) -> Tensor:
        """Return the sum, maximum or minimum over all ranks, without encoding."""
        return self.inner.all_reduce(tensor, op, action=action, kind=kind, key=key)
