"""Recomputation checkpoint: layers keep only their inputs, and run again in backward without exchanges.

Where it sits: ``components.parallelize`` puts it on a model after ``model.exact.layer_rules`` and
``intercept.hooks``. ``halo.comm_recorder`` keeps what was received from peers, and ``snapshot`` everything
else that a layer depends on. ``torch.utils.checkpoint`` drops and restores what autograd saves.

::

    forward     inputs ──> layer ──> outputs           kept: inputs, halo rows, sums over ranks
    backward    inputs ──> layer again <── recording   same draws, same statistics; nothing is sent
                              └──> what autograd had saved ──> gradients ──> halo gradients, once

[Note: again] Backward walks the graph of the first pass, whose exchanges and token are the only ones. The
second pass restores what the first had saved, in order, so it must make the same calls on the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch_geometric import nn as pyg

from kagome.deferred.lazy_tensor import now
from kagome.halo.comm_recorder import Record, tensors_of
from kagome.intercept.hooks import replaced
from kagome.intercept.interceptor import Interceptor
from kagome.model.saved_tensor_hook import SavedTensors
from kagome.recompute.snapshot import Given, LayerSnapshot, Standing, mapped, pardoned

LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential, pyg.Sequential)
"""Containers that hold a model's layers."""


def recompute(model: nn.Module, scope: Interceptor) -> Callable[[], None]:
    """Make each layer of a model keep only its inputs in training, and run again in backward.

    Args:
        model: The model, with its rules and the interceptor's hooks installed.
        scope: The interceptor.

    Returns:
        A function that removes it.

    Cost:
        Each layer's forward once more, without its exchanges. Between forward and backward the layers' inputs
        and what they received from peers are kept; beside these, one layer's inner tensors at a time.
    """
    # Torch restores saved tensors by their order. A call that is recorded in the first pass and replayed in
    # the second might save others.
    before, scope.layer_replay.on = scope.layer_replay.on, False
    # The forward of a scripted module cannot be replaced; its inner tensors are kept.
    undo = [
        _wrap(layer, scope) for layer in layers_of(model) if not isinstance(layer, torch.jit.ScriptModule)
    ]

    def remove() -> None:
        scope.layer_replay.on = before
        for take_off in undo:
            take_off()

    return remove


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the modules that run again, each as a whole.

    A list's child that is or contains a message-passing layer is one. If a list's only such child has lists
    of its own, its contents are searched instead. Message-passing layers outside any list count one by one.
    """
    return list({id(layer): layer for layer in _layers(model)}.values())


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    if isinstance(module, pyg.MessagePassing):
        yield module
        return
    # Three models, and what runs again as a whole in each:
    #
    #     convs = ModuleList(conv, conv)               each conv
    #     blocks = ModuleList(Block(norm, conv), ...)  each block, so that only its input is kept
    #     net = Sequential(Stack(blocks))              each block too: with Stack as a whole, backward would
    #                                                  hold the inner tensors of all blocks at once
    passing = [child for child in module.children() if _passes(child)]
    for child in passing:
        inside = any(isinstance(m, LISTS) and any(map(_passes, m.children())) for m in child.modules())
        # A list inside a list has no forward of its own, so its children are searched.
        whole = isinstance(module, LISTS) and not isinstance(child, (nn.ModuleList, nn.ModuleDict))
        if whole and not (inside and len(passing) == 1):
            yield child
        else:
            yield from _layers(child)


def _passes(module: nn.Module) -> bool:
    return any(isinstance(m, pyg.MessagePassing) for m in module.modules())


def _wrap(layer: nn.Module, scope: Interceptor) -> Callable[[], None]:
    inner = layer.forward

    @wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        # Evaluation has no backward. While the channel records or replays, this is a layer inside a layer
        # that runs again as a whole.
        if (
            not (scope.forward.forward_pass.grad and scope.forward.forward_pass.follows())
            or scope.channel.runs
        ):
            return inner(*args, **kwargs)
        return _kept(layer, inner, scope, args, kwargs)

    return replaced(layer, "forward", forward)


def _kept(
    layer: nn.Module, inner: Callable[..., Any], scope: Interceptor, args: Any, kwargs: dict[str, Any]
) -> Any:
    """Run a layer so that backward can run it again."""
    with torch._C.DisableTorchFunction():  # this is not the user's computation
        args, kwargs = mapped(args, now), mapped(kwargs, now)  # nothing deferred enters or leaves the layer
        # Rows that were read before the layer began would be found here and asked for in backward, where the
        # record does not have them.
        scope.reads.forget()
        given, standing, moment = Given(scope, args, kwargs), Standing(layer), LayerSnapshot(scope)
    record: Record = []
    ran = False

    def run(*tensors: Tensor) -> Any:
        # Torch calls this function twice: in forward, and in backward once a
        # saved tensor is asked for. ``hook`` is the one that torch has just
        # set, and tells this second run from a checkpoint of the user's.
        nonlocal ran
        hook = torch._C._autograd._top_saved_tensors_default_hooks(True)[0]
        if not ran:
            ran = True
            with scope.channel.recording(record), pardoned(scope.forward.forward_pass, hook):
                return mapped(inner(*args, **kwargs), now)
        restored, named = given.restored(tensors)
        with ExitStack() as stack:
            if scope.channel.reruns is not None:
                stack.enter_context(_counted(scope.channel.reruns, [*tensors, *tensors_of(record)]))
            # Backward runs outside of the interceptor. Its mode is entered last, when all state is back.
            for state in (moment.restored(hook), standing.restored(), scope.channel.replaying(record), scope):
                stack.enter_context(state)
            return mapped(inner(*restored, **named), now)

    try:
        # Without a tensor, torch would not know which devices' generators to keep.
        tensors = given.tensors or [torch.empty(0, device=scope.device)]
        return checkpoint(run, *tensors, use_reentrant=False)
    finally:
        with torch._C.DisableTorchFunction():
            standing.compare()
        scope.reads.forget()


@contextmanager
def _counted(reruns: list[list[Tensor]], given: Sequence[Tensor]) -> Iterator[None]:
    """Add what autograd saves in a second run to a list, without what the layer was given."""
    saved = SavedTensors(keeps=True)
    try:
        # Torch's own hook takes a saved tensor to the place where backward waits for it.
        with saved.recording(torch._C._autograd._top_saved_tensors_default_hooks(True)):
            yield
    finally:
        known = {tensor.untyped_storage().data_ptr() for tensor in given if tensor.layout == torch.strided}
        reruns.append(
            [
                tensor
                for tensor in saved.take()
                if tensor.layout != torch.strided or tensor.untyped_storage().data_ptr() not in known
            ]
        )
