"""Forward reuse: evaluate with the scores of the next epoch's forward pass, where both compute the same.

Where it sits: ``train.graph_engine`` asks it at each forward pass. After the weight update of epoch e,
evaluation and the forward pass of epoch e + 1 use the same weights. They differ only if a model behaves
differently in training.

This is measured, not assumed. A forward pass in training must be *plain*: it draws no random number, and
writes to no buffer and to no number, text, tensor, list, dict or set that a module keeps. Also, once, the
scores of an evaluation must equal those of the forward pass after it, bit by bit, on all ranks. From then on
the coming forward pass runs before the evaluation and is kept for its own backward. If one is not plain,
reuse ends on all ranks, and evaluation runs on its own.
"""

from __future__ import annotations

import pickle
import random
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from kagome.model.sparse_buffers import laid_out

DEPTH: Final = 8
"""How deep nested lists and dicts are compared."""


@dataclass
class Forward:
    """A forward pass in training.

    Args:
        epoch: The epoch whose weight update it is for.
        out: Scores of own rows, with their autograd graph.
        token: The scalar that makes backward visit every site.
        plain: Whether it drew no random number and changed no state, like an evaluation.
        state: The state of the weights and buffers that it ran with.
    """

    epoch: int
    out: Tensor
    token: Tensor
    plain: bool
    state: tuple[Any, ...] = field(repr=False)


# [Note: states of reuse] `allowed` has three values, the same on all ranks:
#
#     None, no scores    an evaluation ran on its own          -> None, scores known
#     None, scores       the next training pass is plain and
#                        has the same scores on all ranks      -> True, else False
#     True               a pass run ahead is not plain         -> False
#     True               `anew`: the user's code has run       -> None, no scores
#     False              stays; evaluation runs on its own


class ForwardReuse:
    """Whether evaluation may share a forward pass, and the forward pass that it shares.

    Args:
        model: The user's module.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.allowed: bool | None = None
        self._scores: tuple[Tensor, tuple[Any, ...]] | None = None
        self._kept: Forward | None = None

    # Finding out ---------------------------------------------------------------------------------

    def evaluated(self, out: Tensor) -> None:
        """Note an evaluation that ran on its own; the next forward pass in training is compared with it."""
        if self.allowed is None:
            self._scores = (out, self.state())

    @property
    def asks(self) -> bool:
        """Whether the next forward pass in training is compared; the same on all ranks."""
        return self.allowed is None and self._scores is not None

    def differs(self, forward: Forward) -> bool:
        """Return whether a forward pass is not plain, or gave other scores than the evaluation before it."""
        if self._scores is None:
            return True
        (scores, state), self._scores = self._scores, None
        # Equal states: no weight was written between evaluation and forward pass, so equal scores say
        # something.
        return not (forward.plain and state == forward.state and torch.equal(scores, forward.out.detach()))

    def anew(self) -> None:
        """Forget the comparison after the user's code has run: reuse must be established again."""
        self._kept = self._scores = None
        # A refusal stays. A permission was found with the old code or weights.
        self.allowed = None if self.allowed else self.allowed

    # Keeping -------------------------------------------------------------------------------------

    def keep(self, forward: Forward) -> None:
        """Keep a forward pass for the update of its epoch."""
        self._kept = forward

    def drop(self) -> None:
        """Release the forward pass that was kept for an epoch that will not be trained."""
        self._kept = None

    def take(self, epoch: int) -> Forward | None:
        """Return the forward pass kept for an epoch, unless weights or buffers have changed since."""
        kept, self._kept = self._kept, None
        return kept if kept is not None and kept.epoch == epoch and kept.state == self.state() else None

    # What a forward must not change ----------------------------------------------------------------

    def state(self) -> tuple[Any, ...]:
        """Return which weights and buffers there are, and how often each was written to."""
        tensors = (*self.model.parameters(), *self.model.buffers())
        # `_version` counts writes in place, the address shows a tensor that was replaced through `.data`.
        return tuple((id(t), laid_out(t.detach())[-1].data_ptr(), t._version) for t in tensors)

    @contextmanager
    def watching(self, on: bool) -> Iterator[list[bool]]:
        """Watch a forward pass in a block; afterwards the list holds True if it surely changed no state."""
        found: list[bool] = []
        before = self._all() if on else None
        yield found
        found.append(before is not None and before == self._all())

    def _all(self) -> tuple[Any, ...]:
        # Counters that a forward pass advances, such as a step number for a warm-up, and what it keeps.
        kept = [_contents(vars(module)) for module in self.model.modules()]
        devices = {p.device for p in self.model.parameters() if p.is_cuda}
        # A draw that no handler answered advances one of these generators. NumPy's state holds an array,
        # whose `==` is elementwise, so bytes are compared.
        draws = (
            torch.get_rng_state().numpy().tobytes(),
            *(torch.cuda.get_rng_state(device).numpy().tobytes() for device in devices),
            random.getstate(),
            pickle.dumps(np.random.get_state()),
        )
        return self.state(), kept, draws


class _Same:
    """An object that equals itself alone; it is held, so that no other can have its address."""

    def __init__(self, held: object) -> None:
        self._held = held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._held is other._held

    __hash__ = None  # type: ignore[assignment]


def _contents(value: Any, depth: int = DEPTH) -> Any:
    """Return what can be compared of an attribute: numbers and texts, which tensors, which objects."""
    if value is None or isinstance(value, int | float | complex | str):
        return value
    if isinstance(value, Tensor):
        return _Same(value), None if value.is_inference() else value._version
    if isinstance(value, Mapping) and depth:
        return [(_contents(key, depth - 1), _contents(each, depth - 1)) for key, each in value.items()]
    if isinstance(value, list | tuple | set | deque) and depth:
        return [_contents(each, depth - 1) for each in value]
    return value.tobytes() if isinstance(value, np.ndarray) else _Same(value)
