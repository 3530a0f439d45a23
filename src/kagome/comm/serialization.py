"""Serialization: plain data and Kagome's records as JSON and raw tensors; reading them never executes code.

Where it sits: ``channel`` sends objects to other ranks with it; ``checkpoint.checkpoint`` writes everything
that is not a tensor with it. Only a closed list of types is written or created: plain values, containers,
tensors, arrays, errors of Kagome, and the record classes that the caller names.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import json
import math
import typing
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from kagome import errors
from kagome.errors import KagomeError

ALIGNED: Final = 16
"""Tensors begin at multiples of this many bytes."""
_CONTAINERS: Final[Mapping[str, type]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
}
_MAPPINGS: Final[Mapping[str, type]] = {
    "dict": dict,
    "Counter": Counter,
    "OrderedDict": OrderedDict,
}


class ObjectError(ValueError):
    """A value of a type that cannot be written, or bytes that do not hold a value."""


def pack(value: object, kinds: Sequence[type] = ()) -> tuple[Any, list[Tensor]]:
    """Return a value as a JSON tree, and the tensors that it contains, on the CPU.

    Args:
        value: None, bool, int, float, str, bytes, a path, or a type or device of torch; lists, tuples, sets
            and mappings of these; tensors, NumPy arrays and numbers; errors of Kagome; records.
        kinds: The record classes that may occur: dataclasses and named tuples. The classes named in their
            fields are included.

    Raises:
        ObjectError: If the value contains anything else.
    """
    packing = _Packing({kind.__name__: kind for kind in _reached(tuple(kinds))})
    try:
        return packing.tree(value), packing.tensors
    except RecursionError:
        raise ObjectError("a value is nested too deep") from None


def unpack(tree: Any, tensors: Sequence[Tensor], kinds: Sequence[type] = ()) -> Any:
    """Return the value that :func:`pack` was given.

    Raises:
        ObjectError: If :func:`pack` cannot have produced this tree for these record classes.
    """
    known = {kind.__name__: kind for kind in _reached(tuple(kinds))}
    try:
        return _Unpacking(known, tensors).value(tree)
    except ObjectError:
        raise
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError, RuntimeError) as err:
        raise ObjectError(f"{type(err).__name__}: {err}") from None


def to_bytes(value: object, kinds: Sequence[type] = ()) -> Tensor:
    """Return a value as bytes; :func:`pack` says which values are accepted.

    Shapes:
        ``[bytes]``, uint8.

    Cost: one copy of its tensors.
    """
    tree, tensors = pack(value, kinds)
    # [ 8 bytes: length of head ][ head: tree, types and shapes as JSON, spaces ][ tensor ][ zeros ][ tensor ]
    #                                                                            ^ a multiple of ALIGNED
    head = json.dumps([tree, [[str(t.dtype), list(t.shape)] for t in tensors]], allow_nan=False).encode()
    head += b" " * (-(len(head) + 8) % ALIGNED)
    pieces = [torch.frombuffer(bytearray(len(head).to_bytes(8, "little") + head), dtype=torch.uint8)]
    for tensor in tensors:
        pieces += [raw(tensor), torch.zeros(-tensor.nbytes % ALIGNED, dtype=torch.uint8)]
    return torch.cat(pieces)


def from_bytes(packed: Tensor, kinds: Sequence[type] = ()) -> Any:
    """Return the value that :func:`to_bytes` was given. Its tensors own their memory.

    Raises:
        ObjectError: If the bytes do not come from :func:`to_bytes`.

    Shapes:
        packed ``[bytes]``, uint8, on the CPU.
    """
    try:
        size = int.from_bytes(packed[:8].numpy().tobytes(), "little")
        if packed.numel() < 8 or size > packed.numel() - 8:
            raise ObjectError(f"a head of {size:,} bytes in {packed.numel():,}")
        head = json.loads(packed[8 : 8 + size].numpy().tobytes(), parse_constant=_no_constant)
        tree, facts = head
        tensors, place = [], 8 + size
        for name, shape in facts:
            # The shape is checked before memory is allocated for it: damaged bytes must not exhaust the
            # memory.
            tensor = torch.empty(0, dtype=dtype_of(name)).new_empty(_sizes(shape, packed.numel()))
            if place + tensor.nbytes > packed.numel():
                raise ObjectError(f"a tensor of {tensor.nbytes:,} bytes in {packed.numel():,}")
            raw(tensor).copy_(packed[place : place + tensor.nbytes])
            tensors.append(tensor)
            place += tensor.nbytes + -tensor.nbytes % ALIGNED
    except ObjectError:
        raise
    except (ValueError, TypeError, RecursionError, RuntimeError) as err:
        raise ObjectError(f"{type(err).__name__}: {err}") from None
    return unpack(tree, tensors, kinds)


def dtype_of(name: object) -> torch.dtype:
    """Return the torch type of a name such as ``torch.float32``.

    Raises:
        ObjectError: If no type has this name.
    """
    found = getattr(torch, str(name).removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ObjectError(f"no type of torch is called {str(name)[:40]!r}")
    return found


def raw(tensor: Tensor) -> Tensor:
    """View the memory of a contiguous tensor as bytes.

    Shapes:
        any -> ``[bytes]``, uint8.
    """
    return tensor.view(-1).view(torch.uint8)


def _sizes(shape: object, limit: int) -> list[int]:
    """Check that a shape fits into the available bytes, before memory is allocated for it."""
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise ObjectError(f"a shape was expected, not {str(shape)[:40]}")
    if math.prod(shape) > limit:
        raise ObjectError(f"a tensor of {math.prod(shape):,} elements in {limit:,} bytes")
    return shape


def _no_constant(text: str) -> Any:
    raise ObjectError(f"{text} is no number here")


@functools.cache
def _reached(kinds: tuple[type, ...]) -> tuple[type, ...]:
    """Return the record classes and, recursively, those named in their fields."""
    found: dict[type, None] = {}
    ahead = list(kinds)
    while ahead:
        kind = ahead.pop()
        # Type hints also name plain types, unions and containers; only records have fields to follow.
        if kind in found or not _is_record(kind):
            continue
        found[kind] = None
        ahead += [each for hint in typing.get_type_hints(kind).values() for each in _named_in(hint)]
    # Records are written by class name alone, so two classes of one name would be mistaken for each other.
    names = Counter(kind.__name__ for kind in found)
    assert all(count == 1 for count in names.values()), names
    return tuple(found)


def _named_in(hint: Any) -> Iterator[type]:
    if isinstance(hint, type):
        yield hint
    for part in typing.get_args(hint):
        yield from _named_in(part)


def _is_record(kind: Any) -> bool:
    plain = isinstance(kind, type) and not issubclass(kind, KagomeError)
    return plain and (dataclasses.is_dataclass(kind) or hasattr(kind, "_fields"))


def _fields(kind: Any) -> tuple[str, ...]:
    return kind._fields if hasattr(kind, "_fields") else tuple(f.name for f in dataclasses.fields(kind))


@dataclasses.dataclass
class _Packing:
    """Conversion of one value to JSON, with its tensors collected separately."""

    kinds: Mapping[str, type]
    tensors: list[Tensor] = dataclasses.field(default_factory=list)

    def tree(self, value: Any) -> Any:
        """Return a value as JSON.

        A value of a type that JSON lacks becomes an object whose only key is its kind.
        """
        # Exact types, not ``isinstance``: an instance of a subclass (an ``IntEnum``) would be read back as
        # its base.
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return value
        # JSON has no infinities and no NaN.
        if kind is float:
            return value if math.isfinite(value) else {"float": repr(value)}
        if kind is list:
            return [self.tree(each) for each in value]
        # By identity: a class of the same name in another module is not the record that the caller named.
        if self.kinds.get(kind.__name__) is kind:
            return {"record": [kind.__name__, *(self.tree(getattr(value, name)) for name in _fields(kind))]}
        for name, container in _CONTAINERS.items():
            if kind is container:
                return {name: [self.tree(each) for each in value]}
        for name, mapping in _MAPPINGS.items():
            if kind is mapping:
                # Pairs, because keys of a JSON object can only be strings.
                return {name: [[self.tree(key), self.tree(each)] for key, each in value.items()]}
        return self._other(value)

    def _other(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return {"tensor": self._aside(value)}
        if isinstance(value, torch.Size):
            return {"tuple": list(value)}
        if isinstance(value, torch.dtype | torch.device):
            return {type(value).__name__: str(value)}
        if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
            form = "array" if isinstance(value, np.ndarray) else "number"
            # ``ascontiguousarray`` makes a vector of a 0-d array, so the shape is restored. ``frombuffer``
            # refuses an empty buffer, so an empty array borrows one byte, which is cut off again.
            held = np.ascontiguousarray(value).reshape(value.shape)
            memory = torch.frombuffer(bytearray(held.tobytes()) or bytearray(1), dtype=torch.uint8)
            return {form: [value.dtype.str, list(value.shape), self._aside(memory[: held.nbytes])]}
        if isinstance(value, bytes | bytearray):
            return {"bytes": base64.b64encode(value).decode("ascii")}
        if isinstance(value, Path):
            return {"path": str(value)}
        if isinstance(value, KagomeError):
            # A subclass that another module defines is written as its nearest base in ``kagome.errors``.
            leaf = next(k for k in type(value).__mro__ if getattr(errors, k.__name__, None) is k)
            return {"error": [leaf.__name__, value.expected, value.got, value.where, value.hint]}
        raise ObjectError(f"a {type(value).__module__}.{type(value).__qualname__} instead of plain data")

    def _aside(self, tensor: Tensor) -> int:
        # A FakeTensor has no memory to read.
        if tensor.layout is not torch.strided or tensor.is_quantized or type(tensor).__name__ == "FakeTensor":
            raise ObjectError(f"a tensor of layout {tensor.layout} instead of plain data")
        # ``conj()`` and the imaginary part of a conjugate only set a bit; the bytes in memory are unchanged.
        self.tensors.append(tensor.detach().resolve_conj().resolve_neg().cpu().contiguous())
        return len(self.tensors) - 1


@dataclasses.dataclass(frozen=True)
class _Unpacking:
    """Conversion of a JSON tree back to a value."""

    kinds: Mapping[str, type]
    tensors: Sequence[Tensor]

    def value(self, tree: Any) -> Any:
        """Return the value of a tree made by :class:`_Packing`."""
        if tree is None or isinstance(tree, bool | int | float | str):
            return tree
        if isinstance(tree, list):
            return [self.value(each) for each in tree]
        # Every object that ``_Packing`` writes has one key, the kind of the value.
        if not isinstance(tree, dict) or len(tree) != 1:
            raise ObjectError("an object of one key was expected")
        ((kind, held),) = tree.items()
        if kind in _CONTAINERS:
            return _CONTAINERS[kind](self.value(each) for each in _listed(held))
        if kind in _MAPPINGS:
            pairs = [_listed(pair, 2) for pair in _listed(held)]
            return _MAPPINGS[kind]({self.value(key): self.value(each) for key, each in pairs})
        rebuild: dict[str, Callable[[Any], Any]] = {
            "float": _float,
            "tensor": self._tensor,
            "dtype": dtype_of,
            "device": lambda name: torch.device(_text(name)),
            "array": self._array,
            "number": lambda facts: self._array(facts)[()],
            "bytes": lambda text: base64.b64decode(_text(text), validate=True),
            "path": lambda text: Path(_text(text)),
            "error": _error,
            "record": self._record,
        }
        if kind not in rebuild:
            raise ObjectError(f"no kind of value is called {kind[:40]!r}")
        return rebuild[kind](held)

    def _tensor(self, number: Any) -> Tensor:
        if type(number) is not int or not 0 <= number < len(self.tensors):
            raise ObjectError(f"there is no tensor {str(number)[:40]}")
        return self.tensors[number]

    def _array(self, facts: Any) -> Any:
        name, shape, number = _listed(facts, 3)
        kind, memory = np.dtype(_text(name)), self._tensor(number)
        if kind.kind not in "biufc" or memory.dtype != torch.uint8:
            raise ObjectError(f"no array is of type {kind}")
        return np.frombuffer(memory.numpy().tobytes(), kind).reshape(_sizes(shape, memory.numel())).copy()

    def _record(self, facts: Any) -> Any:
        name, *values = _listed(facts)
        kind = self.kinds.get(_text(name))
        if kind is None:
            raise ObjectError(f"no record {name[:40]!r} was expected")
        given = dict(zip(_fields(kind), map(self.value, values), strict=True))
        if hasattr(kind, "_fields"):
            return kind(**given)
        # Fields with ``init=False`` are set afterwards, past the guard of a frozen dataclass.
        of_init = {field.name for field in dataclasses.fields(kind) if field.init}
        instance = kind(**{name: value for name, value in given.items() if name in of_init})
        for name in given.keys() - of_init:
            object.__setattr__(instance, name, given[name])
        return instance


def _listed(held: Any, size: int | None = None) -> list[Any]:
    if not isinstance(held, list) or size not in (None, len(held)):
        raise ObjectError("a list was expected" + (f" of {size}" if size else ""))
    return held


def _text(held: Any) -> str:
    if not isinstance(held, str):
        raise ObjectError("a text was expected")
    return held


def _float(text: Any) -> float:
    if text not in ("inf", "-inf", "nan"):
        raise ObjectError(f"no number is called {str(text)[:40]!r}")
    return float(text)


def _error(facts: Any) -> KagomeError:
    leaf, expected, got, where, hint = map(_text, _listed(facts, 5))
    kind = getattr(errors, leaf, None)
    if not (isinstance(kind, type) and issubclass(kind, KagomeError)):
        raise ObjectError(f"no error is called {leaf[:40]!r}")
    return kind(expected, got, where=where, hint=hint)
