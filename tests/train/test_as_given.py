"""Features, labels and attributes of any type and shape reach forward and loss as they were given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch_geometric.nn as pyg
from hypothesis import HealthCheck, given, settings, strategies as st
from torch import Tensor, nn
from torch_geometric.data import Data

from kagome import Trainer
from kagome.comm.channel import Channel
from training import QUIET, settings as training

VERTICES, EDGES = 23, 70
FLOATS = ("float16", "bfloat16", "float32", "float64")
TYPES = ("bool", "uint8", "int8", "int16", "int32", "int64", *FLOATS)
Form = tuple[str, tuple[int, ...], int]
"""A type, a shape and a seed."""


def drawn(form: Form) -> Tensor:
    kind, shape, seed = getattr(torch, form[0]), form[1], form[2]
    generator = torch.Generator().manual_seed(seed)
    if kind.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(kind)
    if kind == torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    facts = torch.iinfo(kind)
    return torch.randint(
        max(facts.min, -(2**40)), min(facts.max, 2**40) + 1, shape, generator=generator, dtype=kind
    )


class Echo(nn.Module):
    """Keeps what forward is given."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.seen = pyg.SAGEConv(1, 2), {}

    def forward(self, x: Tensor, edge_index: Tensor, extra: Any, more: Any = None) -> Tensor:
        if self.training:
            self.seen = {"x": x.detach().clone(), "extra": extra, "more": more}
        return self.conv(x.reshape(x.size(0), -1)[:, :1].float().sigmoid(), edge_index)


def echoed(channel: Channel, x: Form, y: Form, extra: Any, more: Any) -> Any:
    """What forward and loss saw on this rank, and the vertices that it has."""
    edge_index = torch.randint(VERTICES, (2, EDGES), generator=torch.Generator().manual_seed(1))
    data = Data(x=drawn(x), y=drawn(y), edge_index=edge_index)
    data.extra = drawn(extra) if isinstance(extra, tuple) else extra
    if more is not None:
        data.more = more
    data.train_mask = torch.ones(VERTICES, dtype=torch.bool)
    data.val_mask = data.test_mask = ~data.train_mask
    model, labels = Echo(), []

    def loss(out: Tensor, y: Tensor) -> Tensor:
        labels.append(y.clone())
        return out.square().mean(1)

    with Trainer(model, data, loss=loss, train=training(epochs=1), report=QUIET) as trainer:
        trainer.fit()
        return trainer.part.own.clone(), {**model.seen, "y": labels[-1]}


rows = st.tuples(
    st.sampled_from(TYPES),
    st.sampled_from([(VERTICES,), (VERTICES, 1), (VERTICES, 3), (VERTICES, 2, 3)]),
    st.integers(0, 99),
)
shared = st.tuples(
    st.sampled_from(TYPES), st.sampled_from([(), (1,), (5,), (1, 3), (4, 4), (2, 3, 1)]), st.integers(0, 99)
)
scalars = st.one_of(
    st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=5, alphabet="aé ")
)
plain = st.one_of(
    scalars,
    st.lists(scalars, max_size=3),
    st.dictionaries(st.text(max_size=3, alphabet="abc"), st.lists(scalars, max_size=2), max_size=2),
)


def same(found: Any, expected: Any) -> bool:
    if isinstance(expected, Tensor):
        return found.dtype == expected.dtype and torch.equal(found, expected)
    return type(found) is type(expected) and found == expected


@settings(max_examples=6, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from([1, 2]), rows, rows, st.one_of(shared, plain), plain)
def test_what_was_given_arrives(
    ranks: Callable[..., list], world: int, x: Form, y: Form, extra: Any, more: Any
) -> None:
    given_extra = drawn(extra) if isinstance(extra, tuple) else extra
    for own, seen in ranks(world, echoed, x, y, extra, more):
        assert same(seen["x"], drawn(x)[own])
        assert same(seen["y"], drawn(y)[own])
        assert same(seen["extra"], given_extra)
        assert same(seen["more"], more)
