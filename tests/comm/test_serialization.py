"""Objects between ranks and in files are plain data: what comes back is what went, and nothing runs."""

from __future__ import annotations

import contextlib
import json
import math
import pickle
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from kagome.comm.channel import Channel
from kagome.comm.serialization import ObjectError, from_bytes, pack, to_bytes, unpack
from kagome.errors import CommError, KagomeError, ModelError


class Pair(NamedTuple):
    left: int
    right: str | None


@dataclass(frozen=True)
class Inner:
    value: float
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outer:
    inner: Inner | None
    pairs: list[Pair]
    by_name: Mapping[str, torch.Tensor] = field(default_factory=dict)


def crossed(value: Any, *kinds: type) -> Any:
    return from_bytes(to_bytes(value, kinds), kinds)


def same(a: Any, b: Any) -> bool:
    """Equal in value and type, at every depth."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return a == b or (math.isnan(a) and math.isnan(b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(max_size=20)
KEYS = st.text(max_size=5) | st.integers() | st.tuples(st.text(max_size=3), st.integers())
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.frozensets(st.text(max_size=3), max_size=3)
    ),
    max_leaves=20,
)


@given(VALUES)
def test_plain_values_come_back_as_they_were(value):
    assert same(crossed(value), value)
    tree, tensors = pack(value)
    assert same(unpack(json.loads(json.dumps(tree, allow_nan=False)), tensors), value)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (5, 3)])
def test_tensors_come_back_as_they_were(dtype, shape):
    tensor = (torch.rand(shape) * 5).to(dtype)
    found = crossed([tensor, {"a": tensor.double().t() if tensor.dim() == 2 else tensor}])
    assert found[0].dtype == dtype
    assert torch.equal(found[0], tensor)
    found[0].zero_()
    assert not tensor.numel() or tensor.dtype == torch.bool or bool((tensor != 0).any())


def test_arrays_and_other_kinds_come_back_as_they_were():
    given = {
        "array": np.arange(6, dtype=">i4").reshape(2, 3),
        "empty": np.zeros((0, 2)),
        "number": np.float32(2.5),
        "counter": Counter({3: 2}),
        "ordered": OrderedDict([("b", 1), ("a", 2)]),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "size": torch.Size([2, 3]),
        "path": Path("a/b"),
    }
    found = crossed(given)
    np.testing.assert_array_equal(found.pop("array"), given.pop("array"))
    assert found.pop("empty").shape == given.pop("empty").shape
    assert found["number"].dtype == np.float32
    assert found == {**given, "size": (2, 3)}
    assert [type(found[name]) for name in ("counter", "ordered")] == [Counter, OrderedDict]


def test_records_bring_the_records_in_their_fields():
    outer = Outer(Inner(math.inf, ("a",)), [Pair(1, None)], {"x": torch.ones(2)})
    found = crossed(outer, Outer)
    assert (found.inner, found.pairs) == (outer.inner, outer.pairs)
    assert torch.equal(found.by_name["x"], torch.ones(2))
    with pytest.raises(ObjectError, match="Outer instead of plain data"):
        to_bytes(outer)
    with pytest.raises(ObjectError, match="no record 'Outer' was expected"):
        from_bytes(to_bytes(outer, [Outer]), [Pair])


def test_errors_cross_as_the_leaf_they_are():
    class EchoError(ModelError):
        """What a caller made of a leaf."""

    found = crossed(EchoError("a", "b", where="c", hint="d"))
    assert type(found) is ModelError
    assert (found.expected, found.got, found.where, found.hint) == ("a", "b", "c", "d")


@pytest.mark.parametrize(
    "value",
    [
        print,
        lambda: 0,
        object(),
        Exception("x"),
        torch.nn.Linear(1, 1),
        np.array([None]),
        torch.ones(2).to_sparse(),
    ],
)
def test_what_is_no_plain_data_is_not_written(value):
    with pytest.raises(ObjectError, match="instead of plain data"):
        to_bytes({"deep": [value]})


HOSTILE = [
    {"error": ["os", "a", "b", "c", "d"]},
    {"error": ["Final", "a", "b", "c", "d"]},
    {"record": ["Popen", "touch it"]},
    {"dtype": "load"},
    {"tensor": 7},
    {"tensor": -1},
    {"array": ["O", [1], 0]},
    {"array": ["<f8", [2**40], 0]},
    {"float": "1e9999"},
    {"device": "nowhere"},
    {"eval": "1"},
    {"tuple": "text"},
    {"dict": [[[], 1]]},
    {"dict": [[1]]},
    {"a": 1, "b": 2},
]


@pytest.mark.parametrize("tree", HOSTILE, ids=str)
def test_a_tree_that_is_none_is_refused(tree):
    with pytest.raises(ObjectError):
        unpack(tree, [torch.zeros(8, dtype=torch.uint8)])


def test_what_is_nested_too_deep_is_refused():
    deep = b"[" * 100_000 + b"]" * 100_000
    head = len(deep).to_bytes(8, "little") + deep
    with pytest.raises(ObjectError):
        from_bytes(torch.frombuffer(bytearray(head), dtype=torch.uint8))
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]
    with pytest.raises(ObjectError, match="too deep"):
        to_bytes(value)


@given(st.integers(0, 10_000), st.integers(1, 255), st.booleans())
def test_altered_bytes_give_a_value_or_one_error(place, flip, cut):
    packed = to_bytes([Outer(Inner(0.5), [Pair(1, "x")], {"x": torch.ones(3)}), {"a": (1, None)}], [Outer])
    place %= packed.numel()
    packed[place] ^= flip
    with contextlib.suppress(ObjectError):
        from_bytes(packed[:place] if cut else packed, [Outer])


class Runs:
    """What a pickle of it would do to the one who reads it."""

    def __init__(self, mark: str) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.write_text, (Path(self.mark), "it ran"))


def sends_a_pickle(channel: Channel, mark: str) -> str:
    """Rank 1 is not one of ours: it takes part in the exchange, with bytes of its own."""
    if channel.rank == 1:
        packed = torch.frombuffer(bytearray(pickle.dumps(Runs(mark))), dtype=torch.uint8)
        channel.gather_rows(packed, action="names")
        return ""
    try:
        channel.gather_objects("mine", "names")
    except CommError as error:
        return str(error)
    return "taken"


def test_a_pickle_of_a_peer_is_refused_and_does_not_run(ranks, tmp_path):
    mark = tmp_path / "ran"
    pickle.loads(pickle.dumps(Runs(str(mark))))
    assert mark.exists()  # it would
    mark.unlink()
    found = ranks(2, sends_a_pickle, str(mark))[0]
    assert "plain data for rank 0 from rank 1 in 'names'; got bytes that cannot be read" in found
    assert not mark.exists()


def raises_on_first(channel: Channel) -> str:
    from kagome.components.rank_zero import by_first

    def find() -> None:
        raise ZeroDivisionError("of the user's own")

    try:
        by_first(channel, find, "a look")
    except KagomeError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_foreign_error_crosses_as_text(ranks):
    for text in ranks(2, raises_on_first):
        assert text.startswith("ModelError")
        assert "ZeroDivisionError: of the user's own" in text
