"""Layer replay: repeats the torch calls of a layer's last call on other rows, without running its Python.

Where it sits: ``intercept.hooks`` calls it around the forward of each layer; each interceptor has one.
``propagate`` does the same for ``propagate`` alone, where the rest of a layer has to run.

::

    conv(x, edge_index)    the first calls    run and recorded: first propagate, then every torch call
                           from then on       the recorded calls, on x' and the current weights

It serves only unchanged layers of PyG, with modules of torch or PyG inside, because a user's code may do more
than torch shows. Another hook, setting, weight, shape or mode makes it another call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing

from kagome.placement.placement import Placement
from kagome.replay.arguments import Guards, Rows, State, fits, guards_of, leaves_of, state_of
from kagome.replay.propagate import plain
from kagome.replay.recorded_ops import CallRecorder, Op

# Two calls for each of training and evaluation: the first teaches ``propagate`` alone, because its inside is
# not recorded; in the second the recorder finds the sum that ``propagate`` deferred.
TRIES = 4
"""Number of calls of a layer that are recorded, learned or not: the cost of recording has a bound."""
_OWN = ("torch_geometric.nn.", "torch.nn.")


@dataclass(frozen=True, slots=True, eq=False)
class Learned:
    """A recorded call and what it did.

    Args:
        guards: The guard of each argument.
        rows: The positions of arguments that differ in each call, each tensor once.
        placements: The placements of those arguments.
        state: The state of the layer and of all modules in it.
        ops: The torch calls that it made.
        out: The position of its result among the values.
        bare: Whether the layer has no other hooks than the interceptor's.
    """

    guards: Guards
    rows: tuple[int, ...]
    placements: tuple[Placement | None, ...]
    state: tuple[State, ...]
    ops: tuple[Op, ...]
    out: int
    bare: bool

    def fits(self, scope: Any, leaves: Sequence[Any]) -> bool:
        """Return True if a call's arguments match the recorded ones."""
        # Rows that have become constant are another call: what is computed from constants alone is cached.
        return fits(self.guards, leaves) and all(
            _same(scope.placements.get(leaves[place]), placement)
            and not scope.constants.is_constant(leaves[place])
            for place, placement in zip(self.rows, self.placements, strict=True)
        )

    def replay(self, scope: Any, leaves: Sequence[Any]) -> Any:
        """Repeat the recorded calls on other rows."""
        # Positions are those of the recording: the arguments, then each call's results in turn.
        values = [leaves[place] for place in self.rows]
        for op in self.ops:
            out = op.replay(scope, values)
            if isinstance(out, Tensor):
                values.append(out)
            else:
                values.extend(out)
        return values[self.out]


class States:
    """The state of a layer and of all modules in it, read once an epoch, and again where it has changed.

    A forward may change it between two calls: other weights (``torch.func.functional_call``), or another
    dropout rate. Each call therefore compares settings and weights, which takes a hundredth of the time of
    the rest.

    Args:
        layer: The layer.
        path: Its path in the model.
    """

    def __init__(self, layer: nn.Module, path: str) -> None:
        self.layer, self.path = layer, path
        self._fields: list[tuple[dict[str, Any], tuple[str, ...]]] = []
        self._epoch = -1
        self._looked: list[Any] = []
        self._known: tuple[State, ...] = ()

    def now(self, epoch: int) -> tuple[State, ...]:
        """Return the state in an epoch."""
        # The first call of an epoch reads everything; later ones
        # compare only what a forward can change itself.
        if not self._fields or self._epoch != epoch or self._looks() != self._looked:
            modules = list(self.layer.modules())
            self._fields = [(vars(module), _settings(module)) for module in modules]
            self._epoch, self._looked = epoch, self._looks()
            self._known = tuple(state_of(module) for module in modules)
        return self._known

    def _looks(self) -> list[Any]:
        """Return the settings, and the identities of weights and modules."""
        found: list[Any] = []
        for own, names in self._fields:
            # An attribute that was added or removed changes the count; one that was set again shows below.
            found.append(len(own))
            found += [value if type(value) in _PLAIN else id(value) for value in map(own.get, names)]
            for table in _TABLES:
                if held := own[table]:
                    found += map(id, held.values())
        return found


_TABLES = ("_parameters", "_buffers", "_modules")
_PLAIN = frozenset((bool, int, float, str, type(None)))


def _settings(module: nn.Module) -> tuple[str, ...]:
    return tuple(name for name, value in vars(module).items() if type(value) in _PLAIN)


class LayerReplay:
    """The last recorded call of each layer, by training mode and by whether gradients are on.

    Args:
        scope: The interceptor.
    """

    def __init__(self, scope: Any) -> None:
        self.scope, self.on = scope, True
        self._learned: dict[tuple[int, bool, bool], Learned] = {}
        self._tries: dict[int, int] = {}

    def call(self, states: States, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Return the result of a call if it is like the last one; else None."""
        scope, layer = self.scope, states.layer
        learned = self._learned.get((id(layer), layer.training, torch.is_grad_enabled()))
        if learned is None or not self._may():
            return None
        with torch._C.DisableTorchFunction():  # this is not the user's computation
            leaves = tuple(leaves_of((args, kwargs)))
            if learned.state != states.now(scope.forward.forward_pass.epoch) or not learned.fits(
                scope, leaves
            ):
                return None
            return learned.replay(scope, leaves)

    def call_module(self, states: States, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Replay a call of the module itself without torch's hooks; None if one of them must run."""
        scope, layer = self.scope, states.layer
        learned = self._learned.get((id(layer), layer.training, torch.is_grad_enabled()))
        if learned is None or not learned.bare:
            return None
        # From here on, do what the hooks of ``intercept.hooks`` and torch
        # would do around a call that is not replayed: refuse reruns, count the
        # running layers, name the layer that failed, compute what it deferred.
        scope.forward.forward_pass.refuse_rerun(states.path)
        passes = isinstance(layer, MessagePassing)
        scope.forward.layers += passes
        try:
            out = self.call(states, args, kwargs)
        except BaseException:
            scope.forward.fault = scope.forward.fault or states.path
            raise
        if out is None:
            # The caller now calls the module, whose pre-hook counts the layer.
            scope.forward.layers -= passes
            return None
        return scope.deferral.leave_layer(out) if passes else out

    def _may(self) -> bool:
        scope = self.scope
        # A recording holds what torch computed under certain conditions. None of these may differ in a
        # replay: fast paths, which defer sums; feature slices, whose sums are other expressions; autocast,
        # which changes types inside a call; a seed that forward set, which makes draws depend on their order.
        # While a layer is being recorded, layers inside it must show their calls.
        if nn.modules.module._has_any_global_hook():  # includes modules inside the layer
            return False
        able = self.on and scope.forward.fast and not scope.sliced.on and scope.recorder is None
        return able and not _cast() and not scope.forward.own_seed()

    def watch(self, states: States, args: Sequence[Any], kwargs: dict[str, Any]) -> CallRecorder | None:
        """Start to record a call that begins, if there is something to learn from it; else return None."""
        layer = states.layer
        if self._tries.get(id(layer), 0) >= TRIES or not self._may():
            return None
        with torch._C.DisableTorchFunction():
            self._tries[id(layer)] = self._tries.get(id(layer), 0) + 1
            leaves = tuple(leaves_of((args, kwargs)))
            guards = guards_of(leaves, self.scope.constants.is_constant)
            if guards is None or not _plain(layer):
                return None
            rows = [leaves[place] for place in _rows(guards)]
            fixed = (*layer.parameters(), *layer.buffers())
            self.scope.recorder = CallRecorder(self.scope, rows, fixed)
        return self.scope.recorder  # type: ignore[no-any-return]

    def learn(
        self, recorder: CallRecorder, states: States, args: Sequence[Any], kwargs: Any, out: Any
    ) -> None:
        """Keep the recording of a call that has ended, if it is complete."""
        layer, scope = states.layer, self.scope
        with torch._C.DisableTorchFunction():
            place = recorder.place_of(out)
            leaves = tuple(leaves_of((args, kwargs)))
            guards = guards_of(leaves, scope.constants.is_constant)
            if place is None or guards is None:
                return
            rows = _rows(guards)
            placements = tuple(scope.placements.get(leaves[at]) for at in rows)
            key = id(layer), layer.training, torch.is_grad_enabled()
            state = tuple(state_of(module) for module in layer.modules())
            self._learned[key] = Learned(
                guards, rows, placements, state, tuple(recorder.ops), place, _bare(layer)
            )


def _rows(guards: Guards) -> tuple[int, ...]:
    return tuple(at for at, one in enumerate(guards) if isinstance(one, Rows) and one.first == at)


def _same(one: Placement | None, other: Placement | None) -> bool:
    """Return True if two placements are equal and refer to the same edges and vertices."""
    # Edges and subsets are tensors or hold some; ``==`` would compare their values, or be ambiguous.
    if one is other:
        return True
    if one is None or other is None or one.edges is not other.edges or one.each != other.each:
        return False
    if one.subset is not other.subset and not (one.subset is not None and one.subset.same(other.subset)):
        return False
    return one.fields == other.fields


def _cast() -> bool:
    return torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")


def _plain(layer: nn.Module) -> bool:
    """Return True if a layer and its modules are unchanged torch or PyG code, with no hooks inside."""
    if isinstance(layer, MessagePassing) and not plain(layer):
        return False
    modules = list(layer.modules())
    own = all(type(module).__module__.startswith(_OWN) for module in modules)
    return own and all(_bare(module) for module in modules if module is not layer)


def _bare(module: nn.Module) -> bool:
    """Return True if a module has no other hooks than the interceptor's one of each kind."""
    # A layer that takes out-edges or a sparse matrix has a further pre-hook of the interceptor's, which must
    # run: it converts the arguments.
    ours = len(module._forward_hooks) == 1 and len(module._forward_pre_hooks) == 1
    return ours and not module._backward_hooks and not module._backward_pre_hooks
