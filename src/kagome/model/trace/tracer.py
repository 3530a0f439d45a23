"""Tracer: records the calls of a forward in both modes, by running it once on proxies.

Where it sits: ``shapes.trace`` calls it. torch.fx patches ``torch.nn.Module`` while it traces, and this
module patches torch and PyG. No other thread may run a model meanwhile.
"""

from __future__ import annotations

import builtins
import linecache
import operator
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import FrameType, TracebackType
from typing import Any

import torch
import torch_geometric
from torch import Tensor, fx, nn
from torch.autograd.function import _SingleLevelFunction
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch_geometric.nn import Aggregation, MessagePassing
from torch_geometric.nn.models import MLP, JumpingKnowledge

from kagome.errors import ModelError
from kagome.model import forward_call as calling_file
from kagome.model.exact.dropout import DRAWS
from kagome.model.forward_call import ForwardCall
from kagome.model.trace.graph import Constant

CURE = "put these lines into a module of its own: what cannot be followed is one operator"
"""Hint for a forward that a pipeline of independent samples cannot trace."""
HINT = "name the layers that follow each other: --parallel.layers conv1 conv2 ..."

# PyG's models and ``Sequential`` are made of layers, between which a pipeline may cut. PyG's functions, and
# torch's that make tensors, look at values, which a proxy does not have: each is recorded as one call.
_LOOKED_INTO = ("torch_geometric.nn.models", "torch_geometric.nn.sequential")
_FUNCTIONS = (torch_geometric.utils, torch_geometric.nn.pool, torch_geometric.nn.functional)
_MAKERS = ("arange", "zeros", "ones", "full", "empty", "eye", "linspace", "tensor")
_DRAWS = tuple(name for name in DRAWS if not name.startswith("_") and not name.endswith("_"))
_SEEDS: tuple[Callable[..., Any], ...] = (torch.manual_seed, torch.seed, torch.set_rng_state)
_DEVICES = ("cpu", "cuda")


class UntraceableError(Exception):
    """A forward does something that steps run one by one would not do."""


class AutocastError(UntraceableError):
    """A forward turns autocast on or off, which steps run by themselves would not know."""


class _Drawn(TorchFunctionMode):
    """Refuses a random draw that is not recorded: it would be made once, while tracing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in DRAWS and not any(isinstance(leaf, fx.Proxy) for leaf in tree_leaves((args, kwargs))):
            raise UntraceableError(f"it draws numbers by {name}")
        return func(*args, **(kwargs or {}))


class FaultError(Exception):
    """A forward could not be traced to its end.

    Args:
        path: The module in whose forward tracing stopped; empty for the model's own.
        cause: The exception that stopped it.
    """

    def __init__(self, path: str, cause: Exception) -> None:
        super().__init__(path)
        self.path, self.cause = path, cause

    def told(self, hint: str, autocast: str) -> ModelError:
        """Return the error for the user, with the line of the forward and a hint."""
        name, number = _frame_of(self.cause.__traceback__) or ("", 0)
        text = str(self.cause).strip().split("\n")[0] or type(self.cause).__name__
        code = linecache.getline(name, number).strip()
        got = f"{code!r}, which stops it: {text}" if code else f"one that this stops: {text}"
        where = f"{name}:{number}" if name else ""
        hint = autocast if isinstance(self.cause, AutocastError) else hint
        expected = "a forward that a pipeline can follow from layer to layer"
        return ModelError(expected, got, where=where, hint=hint)


def is_whole(module: nn.Module) -> bool:
    """Return whether a module is one step, whose inside is not traced."""
    home = type(module).__module__
    # Torch's containers are traced into, although their home would make them one step.
    if isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict):
        return False
    if home.startswith(("torch.nn", "torch.ao.nn")) or isinstance(module, torch.jit.ScriptModule):
        return True
    if isinstance(module, MessagePassing | MLP | JumpingKnowledge):
        return True
    return home.startswith("torch_geometric.nn.") and not home.startswith(_LOOKED_INTO)


class _Value(fx.Proxy):
    """Proxy of a value, to which forward may write by ``x[...] = value``."""

    def __setitem__(self, key: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, key, value), {})


class _Weight(_Value):
    """Proxy of a weight or a buffer: its shape is known, and forward may branch on it."""

    def __init__(self, node: fx.Node, tracer: fx.Tracer, value: Tensor) -> None:
        super().__init__(node, tracer)
        self._value = value

    def size(self, dim: int | None = None) -> Any:
        """Return the size of the weight, or of one of its axes."""
        return self._value.size() if dim is None else self._value.size(dim)

    def dim(self) -> int:
        """Return the number of axes of the weight."""
        return self._value.dim()

    def numel(self) -> int:
        """Return the number of entries of the weight."""
        return self._value.numel()

    @property
    def shape(self) -> torch.Size:
        """The shape of the weight or buffer."""
        return self._value.shape

    @property
    def ndim(self) -> int:
        """The number of axes of the weight, as in :meth:`dim`."""
        return self._value.ndim

    @property
    def requires_grad(self) -> bool:
        """Whether the weight requires a gradient."""
        return self._value.requires_grad


class Tracer(fx.Tracer):
    """Records the calls of one forward.

    Args:
        model: The user's module, in one mode.
        calling: How it is called.
        names: Inputs that the data has.
        whole: Paths of modules to treat as one step, besides those that always are.
        plain: Inputs that are numbers and strings; they are recorded as constants.
    """

    def __init__(
        self,
        model: nn.Module,
        calling: ForwardCall,
        names: Collection[str],
        whole: Collection[str],
        plain: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self._model, self._calling, self._whole = model, calling, whole
        self._plain = dict(plain or {})
        self._names = list(names) if calling.by_data else [*calling.places, *calling.named]
        self._stack: list[str] = []
        self._fault: str | None = None
        self._autocast = _autocast()
        self._paths: dict[int, str] = {}
        for path, module in model.named_modules():
            for name, value in vars(module).items():
                if isinstance(value, Tensor):
                    self._paths[id(value)] = f"{path}.{name}" if path else name
        # In the order of these lines: a parameter's registered name wins over an attribute that refers to it.
        self._paths |= {id(value): name for name, value in model.named_buffers()}
        self._paths |= {id(value): name for name, value in model.named_parameters()}

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """Return the proxy for the value of a call."""
        return _Value(node, self)

    def noted(self) -> fx.Graph:
        """Trace the model and return the graph of its calls.

        Raises:
            FaultError: If some forward cannot be traced.
        """
        try:
            # Tracing leaves no mark on the run that follows: torch's generator is put back.
            with torch.enable_grad(), torch.random.fork_rng(devices=[]), _Drawn():
                return self.trace(self._model)
        except Exception as error:
            raise FaultError(self._fault or "", error) from error

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Any, list[Any]]:
        """Return a function that calls the model on its inputs, named as the data names them."""
        inputs: dict[str, Any] = {name: self._plain[name] for name in self._names if name in self._plain}
        for name in self._names:
            if name not in self._plain:
                inputs[name] = self.create_proxy("placeholder", name, (), {})

        def root() -> Any:
            with self._patched():
                return self._calling.call(self._model, inputs)

        return root, []

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Return whether a module is recorded as one step."""
        return is_whole(m) or module_qualified_name in self._whole

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Record a module's call or trace into it; remember the innermost one that fails."""
        path = self.path_of_module(m)
        if self.is_leaf_module(m, path):
            return super().call_module(m, forward, args, kwargs)
        self._stack.append(path)
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception:
            if self._fault is None:
                self._fault = path
            raise
        finally:
            self._stack.pop()

    def create_node(self, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **more: Any) -> fx.Node:
        """Record a call, with its line and whether gradients are enabled."""
        # ``_stack`` is empty outside of the model's own forward, where ``ForwardCall`` prepares the inputs.
        if self._stack and _autocast() != self._autocast:
            raise AutocastError("it calls under a torch.autocast of its own")
        if self._stack and torch.is_inference_mode_enabled():
            raise UntraceableError("it calls under torch.inference_mode; torch.no_grad can be followed")
        node = super().create_node(kind, target, args, kwargs, *rest, **more)
        line = _line_of(sys._getframe()) if self._stack else None
        node.meta["within"] = self._stack[-1] if self._stack else ""
        node.meta["line"] = f"{line[0]}:{line[1]}" if line else ""
        node.meta["grad"] = torch.is_grad_enabled()
        return node

    def create_arg(self, a: Any) -> Any:
        """Record an argument; tensors go by their path, or as constants if the model does not hold them."""
        if isinstance(a, Tensor):
            path = self._paths.get(id(a))
            if path is not None:
                return self.create_node("get_attr", path, (), {})
            # A tensor of a global or a closure: no module holds it, so no stage would train it.
            if a.requires_grad:
                raise UntraceableError("it computes with weights that no layer of its own reads")
            return self.create_node("call_function", Constant(a), (), {}, name="constant")
        return super().create_arg(a)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, fx.Proxy]) -> Any:
        """Record a weight or buffer that a forward reads, once each."""
        path = self._paths.get(id(attr_val)) if isinstance(attr_val, Tensor) else None
        if path is None:
            return attr_val
        if path not in parameter_proxy_cache:
            node = self.create_node("get_attr", path, (), {})
            parameter_proxy_cache[path] = _Weight(node, self, attr_val)
        return parameter_proxy_cache[path]

    @contextmanager
    def _patched(self) -> Iterator[None]:
        """Record calls that proxies must not run into as one call each, for the length of a block."""
        undo: list[Callable[[], None]] = []

        def put(owner: Any, name: str, value: Any) -> None:
            undo.append(partial(setattr, owner, name, vars(owner)[name]))
            setattr(owner, name, value)

        def refuse(module: nn.Module, name: str, value: Any) -> None:
            raise UntraceableError(f"it sets {name!r} on a module of type {type(module).__name__}")

        def named(module: nn.Module, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
            for name, weight in listed(module, *args, **kwargs):
                yield name, self.getattr(name, weight, seen)

        def differentiate(*args: Any, **kwargs: Any) -> Any:
            raise UntraceableError("it takes a derivative by torch.autograd.grad, which no cut may divide")

        def aggregate(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return nn.Module.__call__(module, *args, **kwargs)

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            if any(isinstance(leaf, fx.Proxy) for leaf in tree_leaves((args, kwargs))):
                return self.create_proxy("call_function", inner.__get__(None, cls), args, kwargs)
            return super(_SingleLevelFunction, cls).apply(*args, **kwargs)  # type: ignore[misc]

        # What is patched, and what would go wrong without it:
        #
        #     Module.__setattr__     forward leaves a proxy on a module, which later code would find there
        #     named_parameters       a penalty on weights would be computed once and recorded as a constant
        #     Aggregation.__call__   PyG checks sizes there, on which a proxy cannot branch
        #     Function.apply         torch's C++ code would refuse a proxy
        #     functions, in all modules that import them by name; ``len``, which must return an int
        inner = vars(torch.autograd.Function)["apply"]
        listed, seen = nn.Module.named_parameters, dict[str, fx.Proxy]()
        wrappers = self._wrappers() | {id(torch.autograd.grad): differentiate}
        homes = (torch, torch.autograd, torch_geometric.nn, *_FUNCTIONS)
        tables = [vars(home) for home in homes]
        users: list[dict[str, Any]] = []
        for module in self._model.modules():
            if not is_whole(module):
                users.append(getattr(module.forward, "__globals__", {}))
                users.append(vars(sys.modules.get(type(module).__module__, torch)))
        try:
            put(nn.Module, "__setattr__", refuse)
            put(nn.Module, "named_parameters", named)
            put(Aggregation, "__call__", aggregate)
            # Patch below Function.apply, because users bind that at import: ``reverse = Reverse.apply``.
            before = vars(_SingleLevelFunction).get("apply")
            undo.append(partial(_restore, before))
            _SingleLevelFunction.apply = classmethod(apply)  # type: ignore[attr-defined]
            for table in {id(table): table for table in (*tables, *users)}.values():
                # A list, made at once: another thread's first warning adds a name to a module.
                old = {name: value for name, value in list(table.items()) if id(value) in wrappers}
                undo.append(partial(table.update, old))
                table.update({name: wrappers[id(value)] for name, value in old.items()})
            put(builtins, "len", self._length(len))
            yield
        finally:
            for take_back in reversed(undo):
                take_back()

    def _length(self, inner: Callable[[Any], int]) -> Callable[[Any], Any]:
        """Return a ``len`` that records a user's call on a proxy.

        All other code calls it too while it is replaced.
        """

        def length(value: Any) -> Any:
            # The prefix is also that of PyG, whose functions are recorded as a whole.
            home = str(sys._getframe(1).f_globals.get("__name__", ""))
            if isinstance(value, fx.Proxy) and not home.startswith("torch"):
                return self.create_proxy("call_function", inner, (value,), {})
            return inner(value)

        return length

    def _wrappers(self) -> dict[int, Callable[..., Any]]:
        """Return the replacements of functions while tracing, by the function's id."""
        functions = [
            value
            for module in _FUNCTIONS
            for name, value in vars(module).items()
            if not name.startswith("_") and callable(value) and not isinstance(value, type)
        ]
        functions += [getattr(torch, name) for name in _MAKERS]
        wrappers = {id(function): self._noting(function, always=False) for function in functions}
        wrappers |= {id(function): self._refusing(function.__name__) for function in _SEEDS}
        # A draw that reads no proxy would be made once, while tracing.
        return wrappers | {id(f): self._noting(f, always=True) for f in (getattr(torch, n) for n in _DRAWS)}

    def _refusing(self, name: str) -> Callable[..., Any]:
        def seeds(*_args: Any, **_kwargs: Any) -> Any:
            raise UntraceableError(
                f"it seeds torch's generator ({name}), which steps run one by one would not"
            )

        return seeds

    def _noting(self, function: Callable[..., Any], *, always: bool) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            if always or any(isinstance(leaf, fx.Proxy) for leaf in tree_leaves((args, kwargs))):
                return self.create_proxy("call_function", function, args, kwargs)
            return function(*args, **kwargs)

        return noted


def _restore(apply: Any) -> None:
    """Restore the method that applied autograd functions before tracing, or remove the patch."""
    if apply is not None:
        _SingleLevelFunction.apply = apply  # type: ignore[attr-defined]
    else:
        del _SingleLevelFunction.apply  # type: ignore[attr-defined]


def _autocast() -> tuple[bool, ...]:
    return tuple(torch.is_autocast_enabled(device) for device in _DEVICES)


def _chosen(lines: list[tuple[str, int]]) -> tuple[str, int] | None:
    """Return the innermost line of the user's code, else of PyG's; ``lines`` are ordered innermost first."""
    torch_home = torch.__path__[0]
    pyg_home = torch_geometric.__path__[0]
    ours = (__file__, calling_file.__file__)
    others = [line for line in lines if not line[0].startswith(torch_home + "/") and line[0] not in ours]
    users = [line for line in others if not line[0].startswith(pyg_home)]
    return next(iter(users or others), None)


def _line_of(frame: FrameType | None) -> tuple[str, int] | None:
    lines = []
    # Frames outside of ``ForwardCall`` are those of the caller of the trace, and tell nothing about forward.
    while frame is not None and frame.f_code.co_filename != calling_file.__file__:
        lines.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return _chosen(lines)


def _frame_of(trace: TracebackType | None) -> tuple[str, int] | None:
    lines: list[tuple[str, int]] = []
    inside = False
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        inside = inside or name == calling_file.__file__
        if inside:
            lines.insert(0, (name, trace.tb_lineno))
        trace = trace.tb_next
    return _chosen(lines)
