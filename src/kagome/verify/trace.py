"""Trace: all outputs and gradients of one forward and backward pass of a model, whole or split.

Where it sits: ``check`` compares two traces. The ranks of a split are threads of this process.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from kagome.comm.in_process.thread_group import ThreadChannel, ThreadGroup
from kagome.components.parallelize import PartOptions, parallelize
from kagome.components.task import has_rows, scores_of
from kagome.errors import CommError, KagomeError, ModelError
from kagome.graph.partition.partition import Partition
from kagome.graph.partition.sets_partition import Part, by_type, scored_rows
from kagome.graph.structure.sparse_adjacency import inputs_of
from kagome.intercept.interceptor import Interceptor
from kagome.model.copies import copied
from kagome.model.exact import dropout
from kagome.model.exact.distributions import LAWS, Given, given_of, handed_out, likely
from kagome.model.exact.handlers import HANDLERS, counted, drawn_for
from kagome.model.exact.scope import argument
from kagome.model.forward_call import ForwardCall
from kagome.user_code.functional import opened
from kagome.user_code.torch_checkpoint import once

_DROPS = {*dropout.DROPOUTS, *(f"dropout{dims}d" for dims in (1, 2, 3))}
_DROPS_INSIDE = "scaled_dot_product_attention"
DRAWS = frozenset(dropout.DRAWS) | _DROPS | {_DROPS_INSIDE}
"""Calls that draw random numbers: switched off where split and whole are compared with plain PyG."""


@dataclass
class Trace:
    """The record of one run: outputs by module in the order they were finished, and gradients by parameter.

    Args:
        outputs: Outputs by a module's path and call.
        grads: Gradients by parameter.
        buffers: Buffers by name, after the run.
        rows: Original ids of own rows.
        numbered: Whether forward identified vertices by their index.
    """

    outputs: dict[str, Tensor] = field(default_factory=dict)
    grads: dict[str, Tensor | None] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    rows: Tensor | None = None
    numbered: bool = False


class WholeFailedError(Exception):
    """The model failed on the whole sample: ``cause``, in the module ``where``."""

    def __init__(self, cause: Exception, where: str) -> None:
        super().__init__(str(cause))
        self.cause, self.where = cause, where


class _NoDraws(TorchFunctionMode):
    """Torch function mode for plain PyG without random draws, so that split and whole are comparable."""

    runs_once = True
    """Whether a checkpointed function runs once: in backward it would draw outside this mode."""
    run_once = nullcontext

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        found = no_draw(None, name, func, args, kwargs) if name in DRAWS else NotImplemented
        if found is not NotImplemented:
            return found
        # Functions of torch.nn.functional in Python hide their draws
        # from this mode, which is off inside a call.
        if isinstance(func, FunctionType) and func.__globals__ is vars(functional):
            with self:  # gumbel_softmax draws random numbers inside
                return opened(func)(*args, **kwargs)
        return func(*args, **kwargs)


def no_draw(scope: Any, name: str, func: Any, args: Any, kwargs: Any) -> Any:
    """Replace a draw by values that are the same for equal rows: dropout keeps all, rand gives one number."""
    if name in _DROPS:
        return args[0] if args else kwargs["input"]
    # A Python function: its inner calls come here one by one, see _NoDraws.
    if isinstance(func, FunctionType):
        return NotImplemented
    if name == _DROPS_INSIDE:
        return _undropped(scope, name, func, args, kwargs)
    # Draws with a law: each entry gets the same likely value, in the shape that the draw would have.
    if name in LAWS and kwargs.get("generator") is None:
        given = given_of(name, args, kwargs)
        rows = None if scope is None else drawn_for(scope, name, given)
        like = _like(name, given) if rows is None else rows
        given["shape"] = tuple(like.shape)
        out = handed_out(name, given, like, likely(name, given))
        return out if rows is None else scope.axes.like(out, rows)
    if name.startswith("rrelu"):
        bounds = (argument(args, kwargs, 1, "lower", 1 / 8), argument(args, kwargs, 2, "upper", 1 / 3))
        out = func(args[0] if args else kwargs["input"], *bounds, training=False)
        return out if scope is None else scope.axes.like(out, args[0] if args else kwargs["input"])
    if name in LAWS and scope is not None:  # drawn from a generator of the user's
        return HANDLERS[name](scope, name, func, args, kwargs)
    if scope is not None:
        args = counted(scope, name, args, kwargs)
    return dropout.seeded(func, args, kwargs, 0) if dropout.of_torch(func, kwargs) else func(*args, **kwargs)


def _undropped(scope: Any, name: str, func: Any, args: Any, kwargs: Any) -> Any:
    """Run attention without its dropout."""
    # dropout_p is the fifth argument: (query, key, value, attn_mask, dropout_p).
    args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
    kwargs = {**kwargs, "dropout_p": 0.0} if "dropout_p" in kwargs else kwargs
    found = NotImplemented if scope is None else HANDLERS[name](scope, name, func, args, kwargs)
    if found is NotImplemented:
        found = func(*args, **kwargs)
        if scope is not None:
            scope.placements.spread(name, args, kwargs, found)
    return found


def _like(name: str, given: Given) -> Tensor:
    """Return a tensor of the shape and type that a draw without rows returns."""
    if given.get("size") is not None:
        kind = given.get("dtype") or (torch.int64 if name == "randint" else None)
        return torch.empty(given["size"], dtype=kind, device=given.get("device"))
    tensors = [value for value in given.values() if isinstance(value, Tensor)]
    return tensors[0].expand(torch.broadcast_shapes(*(each.shape for each in tensors)))


def _watch(model: nn.Module, trace: Trace) -> Callable[[], None]:
    calls: dict[str, int] = {}

    def hook(name: str) -> Callable[..., None]:
        def keep(_module: nn.Module, _args: Any, out: Any) -> None:
            calls[name] = calls.get(name, 0) + 1
            # A layer with shared weights is called several times in a forward.
            label = name if calls[name] == 1 else f"{name} (call {calls[name]})"
            values = {label: out}
            if isinstance(out, (tuple, list)):
                values = {label: next((v for v in out if isinstance(v, Tensor)), None)}
            elif isinstance(out, dict):  # rows of several vertex types
                values = {f"{label}[{key!r}]": value for key, value in out.items()}
            for place, value in values.items():
                if isinstance(value, Tensor) and value.is_floating_point():
                    trace.outputs[place] = value.detach().clone()  # a reversible block frees its inputs

        return keep

    def begin(_module: nn.Module, _args: Any) -> None:
        calls.clear()  # a forward that begins again, without fast paths, is recorded alone
        trace.outputs.clear()

    handles = [
        m.register_forward_hook(hook(name or f"the model ({type(model).__name__})"))
        for name, m in model.named_modules()
        if not isinstance(m, torch.jit.ScriptModule)  # a ScriptModule takes no Python hooks
    ]
    if not isinstance(model, torch.jit.ScriptModule):
        handles.append(model.register_forward_pre_hook(begin))

    def unwatch() -> None:
        for handle in handles:
            handle.remove()

    return unwatch


def _backward(out: Any, ids: Tensor, token: Tensor | None, model: nn.Module, trace: Trace, seed: int) -> None:
    value = next((v for v in tree_leaves(out) if has_rows(v, ids.numel())), None)
    if value is None:
        shapes = [f"one of shape {list(leaf.shape)}" for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        raise ModelError(
            f"forward to give a tensor with a row for each of {ids.numel()} vertices, or several",
            f"{', '.join(shapes) or f'a {type(out).__name__} without any'}",
            hint="return a row a vertex, in the order of the vertices",
        )
    # Weights depend on the original id, so the sum is the same however rows are distributed. Columns have
    # different weights, because a softmax would have no gradient otherwise.
    weight = torch.sin(ids.to(value.dtype) * 12.9898 + seed) + 1.5
    columns = torch.linspace(1, 2, math.prod(value.shape[1:]), dtype=value.dtype, device=value.device)
    by_row = weight.view(-1, *[1] * (value.dim() - 1))
    loss = (value * by_row * columns.view(1, *value.shape[1:])).sum()
    # The token makes backward visit every exchange, also on a part whose rows reach no loss.
    loss = loss if token is None else loss + token
    if loss.requires_grad:
        loss.backward()
    trace.grads = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    trace.buffers = {name: b.detach().clone() for name, b in model.named_buffers() if b.is_floating_point()}


def _note_failure(name: str, failed: list[str]) -> Callable[..., None]:
    def note(_module: nn.Module, _args: Any, out: Any) -> None:
        if out is None:
            failed.append(name)  # hooks run after an error too, innermost first

    return note


def _inputs(part: Part) -> dict[str, Any]:
    """Return the inputs of forward on the whole graph, as plain PyG names them."""
    if not isinstance(part, Partition):
        of_edges = [{"edge_index": each.part.edge_index, **each.part.edges} for each in part.edges]
        return {**by_type(part, part.nodes, of_edges), **part.shared}
    # As the user's data has them: an adjacency, if it came as one.
    edges = inputs_of(part.edges, part.edge_index, part.own.numel())
    return {
        "num_nodes": part.num_nodes,
        **part.shared,
        "edge_index": part.edge_index,
        **part.nodes,
        **edges,
    }


def whole_of(model: nn.Module, part: Part, seed: int) -> Trace:
    """Run the model in one process, as plain PyG does, and return its trace."""
    ids, inputs = scored_rows(part).own, _inputs(part)
    trace = Trace(rows=ids)
    unwatch = _watch(model, trace)
    failed: list[str] = []
    handles = [
        module.register_forward_hook(_note_failure(name or type(model).__name__, failed), always_call=True)
        for name, module in model.named_modules()
        if not isinstance(module, torch.jit.ScriptModule)
    ]
    # A checkpointed function would run again in backward, outside of _NoDraws, with dropout on.
    undo = once()
    try:
        model.train()
        with _NoDraws():
            out = ForwardCall.of(model, set(inputs)).call(model, inputs)
        _backward(scores_of(out, part), ids, None, model, trace, seed)
    except KagomeError:
        raise
    except Exception as error:
        raise WholeFailedError(error, failed[0] if failed else type(model).__name__) from error
    finally:
        undo()
        unwatch()
        for handle in handles:
            handle.remove()
    return trace


def split_of(
    model: nn.Module,
    pieces: Sequence[Part],
    handlers: dict[str, Any],
    seed: int,
    *,
    tensor: int = 1,
    fast: bool = True,
    once_only: bool = False,
    partial_sums: bool = False,
) -> list[Trace]:
    """Run copies of the model on the pieces, each in a thread; return a trace for each piece.

    Args:
        model: The user's module.
        pieces: The part of each rank.
        handlers: The handlers of torch calls by name.
        seed: The seed of draws, and of the weights of the sum that is differentiated.
        tensor: How many ranks slice features together.
        fast: Whether kernels reduce messages.
        once_only: Whether a single piece saves what it would compute again in backward, as several pieces do.
        partial_sums: Whether pieces send partial sums in place of rows where these are fewer.
    """
    # Threads share memory, so each needs parameters, gradients and buffers of its own.
    copies = [copied(model) for _ in pieces]
    options = PartOptions(seed=seed, fast=fast, tensor=tensor, partial_sums="on" if partial_sums else "off")

    def work(channel: ThreadChannel) -> Trace:
        part, mine = pieces[channel.rank], copies[channel.rank]
        ids = scored_rows(part).own
        net, trace = parallelize(mine, part, channel, options, handlers=handlers), Trace(rows=ids)
        # On one rank a checkpointed function runs again in backward, on several it does not, because it would
        # exchange again. Draws are numbered, so both must run it equally often.
        net.scope.runs_once = net.scope.runs_once or once_only
        with net:
            _watch(mine, trace)
            mine.train()
            try:
                out = net.forward(1, training=True, checked=True)
                trace.numbered = net.scope.numbered
                scores = scores_of(out, part, net.scope.placements)
                _backward(scores, ids, net.scope.forward.forward_pass.token, mine, trace, seed)
            except KagomeError:
                raise
            except Exception as error:
                raise _part_failed(error, net.scope, channel.rank) from error
        return trace

    try:
        return ThreadGroup(len(pieces)).run(work)
    # Ranks compare the headers of their exchanges, and a thread that
    # comes to another exchange is a CommError.
    except CommError as error:
        raise ModelError(
            "every part to come to the same exchanges in the same order",
            f"{error.got} (expected {error.expected})",
            where=type(model).__name__,
            hint="a Python loop over rows, or a branch by what a part's rows hold, goes another "
            "way on each part: make it of torch calls over all rows, or train on one rank",
        ) from error


def _first_line(error: Exception) -> str:
    return ": ".join([type(error).__name__, *str(error).splitlines()[:1]])


def _part_failed(error: Exception, scope: Interceptor, rank: int) -> ModelError:
    # The user's own line, if the traceback has one outside of Kagome and torch.
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/kagome/" not in f.filename]
    line = next(
        (f"{f.name}, line {f.lineno}: {f.line}" for f in reversed(frames) if "/torch/" not in f.filename), ""
    )
    return ModelError(
        "the model to run on a part of the graph as it runs on the whole",
        f"{_first_line(error)}, on a part of {scope.own} vertices",
        where=f"{scope.forward.fault or 'forward'}{'; ' + line if line else ''}",
        hint="let sizes come from the input (x.size(0)), and reach other vertices through edges only",
    )
