"""Vertices told apart by their place: equal to plain PyG on any parts, or refused by name; none else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn

import edge_models
from by_hand import Body, ByHand, graph
from convolutions import double_precision
from kagome.errors import ModelError
from kagome.verify.check import check
from outcomes import outcome
from parity import assert_equal, random_owner, whole
from place_models import EXACT, PIECES, REFUSED, TWO, N


class Ends(ByHand):
    """What leaves the model went by places."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.body(self, self.first(x), edge_index, None)


@pytest.mark.parametrize(
    ("body", "word"),
    [
        (lambda m, x, e, d: x @ x.t(), "matmul|rows went"),
        (lambda m, x, e, d: torch.linalg.qr(x)[0], "qr"),
        (lambda m, x, e, d: x[:20], "size|vertices"),
    ],
)
def test_what_leaves_the_model_has_a_known_row_for_each_vertex(body: Body, word: str) -> None:
    with double_precision(), pytest.raises(ModelError, match=word):
        check(Ends(body), graph())


class Read(nn.Module):
    """A layer after rows that a list names, which may differ between ranks."""

    def __init__(self, how: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.how = nn.Linear(edge_models.FAN_IN, 8), how

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.first(x) + self.how(self.first(x))


@pytest.mark.parametrize("lists", [([3, 7], [7, 3]), ([0, 4], [-1, 4])])
def test_lists_in_another_order_on_another_rank_are_refused(lists: tuple[list[int], list[int]]) -> None:
    left = iter(lists)

    def build() -> nn.Module:
        ids = torch.tensor(next(left))
        return Read(lambda x: (x[ids] * torch.tensor([[1.0], [2.0]], dtype=x.dtype)).sum(0))

    found = outcome(build, edge_models.graph(), random_owner(edge_models.NODES, 2), 2)
    assert isinstance(found, str)
    assert "not the same on all ranks" in found


SQUEEZED: dict[str, Callable[[Tensor], Tensor]] = {
    "all axes": lambda x: x.squeeze().sum(0).tanh(),
    "all axes of columns": lambda x: x[:, :1].squeeze().sigmoid().unsqueeze(1),
    "the axis of rows": lambda x: x.squeeze(0).tanh(),
    "some axes": lambda x: torch.squeeze(x.view(1, -1, 8, 1), (0, 1, 3)).tanh(),
    "a mask's rows": lambda x: x[torch.arange(x.size(0)) % 4 == 1].squeeze().mean(0),
}


@pytest.mark.parametrize("name", SQUEEZED)
def test_squeeze_keeps_the_axis_of_rows_where_a_part_has_one(name: str) -> None:
    data, owner = edge_models.graph(), torch.zeros(edge_models.NODES, dtype=torch.long)
    owner[5] = 1
    owner[8:20] = 2
    found = outcome(lambda: Read(SQUEEZED[name]), data, owner, 3)
    assert not isinstance(found, str), found
    assert_equal(found, whole(lambda: Read(SQUEEZED[name]), data))


def test_squeeze_of_one_vertex_s_row_is_refused() -> None:
    found = outcome(
        lambda: Read(lambda x: x[5:6].squeeze(0)),
        edge_models.graph(),
        random_owner(edge_models.NODES, 2),
        2,
    )
    assert isinstance(found, str)
    assert "squeeze of the only row" in found


FAR: dict[str, Tensor] = {
    "above 2^53": torch.arange(N) + 2**53 + 3,
    "below -2^53": torch.arange(N) - 2**53 - 3 - N,
    "the least number": torch.full((N,), torch.iinfo(torch.int64).min),
}


@pytest.mark.parametrize("name", FAR)
def test_unique_of_large_numbers_is_exact(name: str) -> None:
    data = edge_models.graph()
    data.kind = FAR[name]

    class Kinds(Read):
        def forward(self, x: Tensor, edge_index: Tensor, kind: Tensor) -> Tensor:
            found, at = kind.unique(return_inverse=True)
            assert torch.equal(found, data.kind.unique())
            return self.first(x) * (at.to(x.dtype) / 7).sin().unsqueeze(1)

    found = outcome(lambda: Kinds(torch.tanh), data, random_owner(N, 3), 3)
    assert not isinstance(found, str), found
    assert_equal(found, whole(lambda: Kinds(torch.tanh), data))


MESHES = {"1 rank": (1, 1), "2 ranks": (2, 1), "3 ranks": (3, 1), "2 slices": (2, 2)}


@pytest.mark.some(60)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", EXACT)
def test_places_are_those_of_the_whole_graph(name: str, mesh: str) -> None:
    body, modules = EXACT[name]
    parts, tensor = MESHES[mesh]
    with double_precision():
        torch.manual_seed(0)
        result = check(ByHand(body, **modules), graph(), parts=parts, tensor=tensor)
    assert result.first is None, result.first
    assert result.worst < 1e-10


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_part_can_follow_is_refused_by_name_and_line(name: str) -> None:
    body, modules, word = REFUSED[name]
    with double_precision(), pytest.raises(ModelError, match=word) as caught:
        check(ByHand(body, **modules), graph())
    assert "place_models.py, line" in str(caught.value)
    assert caught.value.hint


@pytest.mark.parametrize("name", REFUSED)
def test_one_rank_refuses_nothing_of_it(name: str) -> None:
    body, modules, _ = REFUSED[name]
    with double_precision():
        torch.manual_seed(0)
        result = check(ByHand(body, **modules), graph(), parts=1)
    assert result.first is None, result.first


@given(
    steps=st.lists(st.sampled_from(sorted(PIECES)), min_size=1, max_size=4),
    ends=st.tuples(st.integers(0, N - 1), st.integers(0, N - 1)).map(sorted),
    parts=st.integers(1, 4),
)
@settings(deadline=None, max_examples=25)
def test_any_of_them_one_after_the_other(steps: list[str], ends: list[int], parts: int) -> None:
    def body(m, x, e, d):
        for step in steps:
            x = PIECES[step](m, x, *ends)
        return x

    with double_precision():
        torch.manual_seed(0)
        result = check(ByHand(body, **TWO), graph(), parts=parts)
    assert result.first is None, result.first
    assert result.worst < 1e-10
