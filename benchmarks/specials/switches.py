"""Switches: how often a special is used, and what takes its place where it is switched off.

Where it sits: ``side.py`` calls :func:`prepare` before it trains. Nothing here is a setting of Kagome: the
plain path is put in by hand. Specials that a flag switches off have no entry in ``OFF``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import plain
from torch_geometric.nn import MessagePassing

from kagome.comm.transport.mailbox import Mailbox
from kagome.components import forward_reuse
from kagome.deferred import reduce
from kagome.halo.forward_pass import transformed
from kagome.intercept import hooks
from kagome.kernels.cpu import edges, exp, gatv2_scores, min_max, simd, softmax, spmm
from kagome.kernels.quantize import cpu as codec_loops
from kagome.positions.vertex_tables import given_rows
from kagome.replay.layer_calls import LayerReplay
from kagome.replay.propagate import PropagateCache
from kagome.sparse_ops import sparse_features

PREFETCHING = (edges, gatv2_scores, min_max, softmax, spmm)
"""Modules that ask how far ahead to prefetch."""
NEVER = 1 << 62
"""More bytes than any array has."""
SUMS = ("add_one", "add_two", "add_four", "add_products", "dot")
SCORES = ("add_bent", "bent_dot")


class Uses:
    """How often a special was used by this process.

    Args:
        special: Its name.
    """

    def __init__(self, special: str) -> None:
        self.special, self.calls = special, 0

    def count(self, owner: Any, name: str, fits: Callable[[Any], bool] = lambda _found: True) -> None:
        """Count the calls of a function or method whose results count."""
        inner = getattr(owner, name)

        @wraps(inner)
        def outer(*args: Any, **kwargs: Any) -> Any:
            found = inner(*args, **kwargs)
            self.calls += fits(found)
            return found

        setattr(owner, name, outer)

    @property
    def number(self) -> int:
        """Uses so far; of code inside compiled loops, how often it was compiled into this side's loops."""
        if self.special not in COMPILED:
            return self.calls
        path = _ledger(self.special)
        return len(path.read_text().splitlines()) if path.exists() else 0


def prepare(special: str, *, off: bool) -> Uses:
    """Switch a special off if asked to, and count its uses from now on."""
    if off and special in OFF:
        OFF[special]()
    uses = Uses(special)
    for name, mark in COMPILED.items():  # a folder of machine code serves the sides of many specials
        mark(lambda name=name: _note(name))
    if special in COUNTED:
        COUNTED[special](uses)
    return uses


# Counting ----------------------------------------------------------------------------------------


def _count_replay(uses: Uses) -> None:
    _count_layers(uses)
    uses.count(PropagateCache, "call", lambda found: found is not None)


def _count_layers(uses: Uses) -> None:
    uses.count(LayerReplay, "call", lambda found: found is not None)


def _count_prefetch(uses: Uses) -> None:
    for module in PREFETCHING:
        uses.count(module, "ahead_of", lambda found: found > 0)


COUNTED: dict[str, Callable[[Uses], None]] = {
    "replay": _count_replay,
    "replay of layers": _count_layers,
    "prefetch": _count_prefetch,
    "shared memory": lambda uses: uses.count(Mailbox, "put"),
    "forward reuse": lambda uses: uses.count(
        forward_reuse.ForwardReuse, "take", lambda found: found is not None
    ),
    "thin features": lambda uses: uses.count(sparse_features.SparseFeatures, "linear"),
}
"""How each special's calls are counted, but for those inside compiled loops."""


class _Noting:
    """A module that tells when something is asked of it."""

    def __init__(self, inner: Any, note: Callable[[], None]) -> None:
        self._inner, self._note = inner, note

    def __getattr__(self, name: str) -> Any:
        self._note()
        return getattr(self._inner, name)


def _at_making(kind: type) -> Callable[[Callable[[], None]], None]:
    """Return what makes each object of a class leave a note: one is made for each compiled call."""

    def mark(note: Callable[[], None]) -> None:
        inner = kind.__init__  # type: ignore[misc]

        def outer(self: Any, *args: Any) -> None:
            note()
            inner(self, *args)

        kind.__init__ = outer  # type: ignore[misc]

    return mark


def _at_typing(note: Callable[[], None]) -> None:
    """Leave a note when numba asks which exponential suits a type."""
    exp.types = _Noting(exp.types, note)


COMPILED: dict[str, Callable[[Callable[[], None]], None]] = {
    "vector steps": _at_making(simd._Lanes),
    "exponential": _at_typing,
}
"""Specials inside compiled loops: a note is left beside the machine code whenever one is compiled in."""


def _ledger(special: str) -> Path:
    return Path(os.environ["NUMBA_CACHE_DIR"]) / f"{special.replace(' ', '-')}.compiled"


def _note(special: str) -> None:
    path = _ledger(special)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write("1\n")


# Switching off -----------------------------------------------------------------------------------


def _no_layers() -> None:
    """Run each layer's own forward, as :class:`hooks._Watched` does where nothing can be replayed."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        scope = self.scope
        inside = not (scope.forward.forward_pass.outside or transformed())
        if inside and scope.parted and isinstance(self.layer, MessagePassing):
            axis = self.layer.node_dim
            args, kwargs = given_rows(scope, args, axis), given_rows(scope, kwargs, axis)
        return self.inner(*args, **kwargs)

    hooks._Watched.__call__ = forward  # type: ignore[method-assign]
    hooks._Watched.known = lambda self, args, kwargs: None  # type: ignore[method-assign]


def _no_replay() -> None:
    _no_layers()
    PropagateCache.call = lambda self, layer, args, kwargs: None  # type: ignore[method-assign]
    PropagateCache.learn = lambda self, layer, args, kwargs, out: None  # type: ignore[method-assign]


def _no_vectors() -> None:
    """Take numba's loops over columns: whole rows for a sum, a head's columns for attention."""
    for name in SUMS:
        setattr(spmm, name, getattr(plain, name))
    for name in SCORES:
        setattr(gatv2_scores, name, getattr(plain, name))
    spmm.WIDEST = spmm.WIDEST_WEIGHTED = 0


def _no_prefetch() -> None:
    for module in PREFETCHING:
        module.ahead_of = lambda x: 0  # type: ignore[attr-defined]
    codec_loops.SMALL = NEVER


def _no_exponential() -> None:
    """Take the C library's function, number by number."""
    softmax.exponential = min_max.exponential = np.exp


def _no_reuse() -> None:
    """Let each evaluation run its own forward pass."""
    made = forward_reuse.ForwardReuse.__init__

    def begin(self: Any, model: Any) -> None:
        made(self, model)
        self.allowed = False

    forward_reuse.ForwardReuse.__init__ = begin  # type: ignore[method-assign]


def _no_sparse() -> None:
    """Find no features that are worth a sparse product."""
    sparse_features.is_sparse = reduce.is_sparse = lambda rows, edges=None: False


OFF: dict[str, Callable[[], None]] = {
    "replay": _no_replay,
    "replay of layers": _no_layers,
    "vector steps": _no_vectors,
    "prefetch": _no_prefetch,
    "exponential": _no_exponential,
    "forward reuse": _no_reuse,
    "thin features": _no_sparse,
}
