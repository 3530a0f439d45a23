"""Each fault of a graph has its own error, with both numbers; what is allowed passes, with a note."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from kagome.errors import DataError
from kagome.graph.structure.attributes import Notes, attributes_of
from kagome.graph.structure.labels import labels_of
from kagome.graph.structure.validate import MOST_VERTICES, check_count, validate

N = 6


def graph(**changed: Any) -> Data:
    """A path of six vertices, both ways, with a split; None takes a field away."""
    path = torch.arange(N - 1)
    forth = torch.stack([path, path + 1])
    fields: dict[str, Any] = {
        "x": torch.arange(2.0 * N).view(N, 2),
        "edge_index": torch.cat([forth, forth.flip(0)], dim=1),
        "y": torch.tensor([0, 1, 2, 0, 1, 2]),
        "train_mask": mask(0, 1, 2),
        "val_mask": mask(3),
        "test_mask": mask(4, 5),
    }
    fields.update(changed)
    return Data(**{name: value for name, value in fields.items() if value is not None})


def mask(*chosen: int) -> Tensor:
    made = torch.zeros(N, dtype=torch.bool)
    made[list(chosen)] = True
    return made


def edges(*pairs: tuple[int, int]) -> Tensor:
    return torch.tensor(pairs, dtype=torch.int64).t().reshape(2, -1)


NO_MASKS = {"train_mask": None, "val_mask": None, "test_mask": None}
NAN = float("nan")


def named(name: str) -> Data:
    made = graph()
    made[name] = torch.ones(N)
    return made


def with_nan(tensor: Tensor, *place: int) -> Tensor:
    changed = tensor.clone()
    changed[place] = NAN
    return changed


X = torch.ones(N, 2)
FAULTS: dict[str, tuple[object, list[str]]] = {
    "no Data": ([1, 2], ["list"]),
    "hetero": (HeteroData(a={"x": X}), ["HeteroData", "1 kinds of vertices"]),
    "no edges at all": (graph(edge_index=None), ["edge_index", "adj_t"]),
    "edges turned": (graph(edge_index=torch.zeros(5, 2, dtype=torch.long)), ["[2, E]", "[5, 2]", ".t()"]),
    "edges of one dimension": (graph(edge_index=torch.zeros(4, dtype=torch.long)), ["[2, E]", "[4]"]),
    "edges of floats": (graph(edge_index=torch.zeros(2, 3)), ["whole numbers", "float32"]),
    "id too large": (graph(edge_index=edges((0, 1), (2, 6))), ["6 vertices", "edge_index[1, 1] = 6"]),
    "id negative": (graph(edge_index=edges((0, 1), (-2, 3))), ["0 to 5", "edge_index[0, 1] = -2"]),
    "no vertices": (Data(x=torch.ones(0, 2), edge_index=edges()), ["at least one vertex", "0"]),
    "NaN feature": (graph(x=with_nan(X, 3, 1)), ["got nan in row 3 (x[3, 1])"]),
    "infinite feature": (graph(x=X / torch.tensor([[1.0, 1], *[[0.0, 1]] * 5])), ["row 1", "inf", "4 more"]),
    "rows of x": (graph(x=torch.ones(5, 2), num_nodes=N), ["6 vertices", "5"]),
    "complex x": (graph(x=torch.ones(N, 2, dtype=torch.complex64)), ["real", "complex64"]),
    "text for x": (graph(x="features"), ["x to be a tensor of numbers", "str"]),
    "x of no dimension": (graph(x=torch.tensor(3.0), num_nodes=N), ["6 vertices", "0"]),
    "texts for y": (graph(y=np.array(["a", "b"] * 3)), ["y to be a tensor of numbers", "<U1"]),
    "complex y": (graph(y=torch.ones(N, dtype=torch.complex64)), ["real", "complex64"]),
    "infinite label": (graph(y=torch.tensor([0, 1, float("inf"), 0, 1, 2])), ["got inf in row 2 of y"]),
    "num_nodes of halves": (graph(num_nodes=2.5), ["one whole number", "2.5"]),
    "num_nodes of an array": (graph(num_nodes=torch.ones(3)), ["one whole number", "array of [3]"]),
    "num_nodes NaN": (graph(num_nodes=float("nan")), ["one whole number", "nan"]),
    "num_nodes that no machine holds": (graph(num_nodes=10**13), ["at most", "1e+13"]),
    "masks and split_idx": (graph(split_idx={"train": torch.tensor([0])}), ["given once", "train_mask"]),
    "a name that no call takes": (named("self"), ["got the name self"]),
    "text for a mask": (graph(train_mask="all"), ["train_mask to hold true and false"]),
    "length of y": (graph(y=torch.zeros(5, dtype=torch.long)), ["6 vertices", "[5]"]),
    "overlap": (graph(val_mask=mask(2, 3)), ["train_mask and val_mask", "1", "vertex 2"]),
    "length of mask": (graph(val_mask=torch.ones(4, dtype=torch.bool)), ["val_mask", "6 vertices", "[4]"]),
    "mask of ids": (graph(train_mask=torch.tensor([0, 1, 2, 3, 4, 5])), ["true and false", "got 2 in row 2"]),
    "length of edge_weight": (graph(edge_weight=torch.ones(3)), ["edge_weight", "10 edges", "3"]),
    "length of edge_attr": (graph(edge_attr=torch.ones(11, 2)), ["edge_attr", "10 edges", "11"]),
    "NaN edge_weight": (graph(edge_weight=with_nan(torch.ones(10), 4)), ["edge_weight[4]", "nan"]),
    "NaN edge_attr": (graph(edge_attr=with_nan(torch.ones(10, 2), 4, 1)), ["edge_attr[4, 1]", "row 4"]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_has_its_own_error(fault: str) -> None:
    data, said = FAULTS[fault]
    with pytest.raises(DataError) as caught:
        validate(data)
    for words in said:
        assert words in str(caught.value)


def test_no_more_vertices_than_their_ids_and_edges_can_be_told_by() -> None:
    assert check_count(MOST_VERTICES) == MOST_VERTICES
    assert np.iinfo(np.int32).max == MOST_VERTICES - 1
    # The last edge's number, source * N + target, as ``topology`` and ``edits`` make it.
    last = np.array([MOST_VERTICES - 1]) * MOST_VERTICES + (MOST_VERTICES - 1)
    assert int(last[0]) == MOST_VERTICES**2 - 1
    for count in (MOST_VERTICES + 1, 4 * 10**9):
        with pytest.raises(DataError, match="at most 2,147,483,648 vertices; got num_nodes"):
            check_count(count)


def test_faults_are_told_apart() -> None:
    told = []
    for data, _ in FAULTS.values():
        with pytest.raises(DataError) as caught:
            validate(data)
        told.append(str(caught.value))
    assert len(set(told)) == len(told)


def test_without_labels_no_split_can_be_drawn() -> None:
    with pytest.raises(DataError, match="6 without a label"):
        validate(graph(y=torch.full((N,), -1), **NO_MASKS))


@pytest.mark.parametrize(("split", "given"), [(1, 1), (-1, 1), (3, 3)])
def test_a_split_that_is_not_there(split: int, given: int) -> None:
    masks = {name: graph()[name] for name in NO_MASKS}
    if given > 1:
        masks = {name: value[:, None].expand(-1, given) for name, value in masks.items()}
    with pytest.raises(DataError, match=str(split)):
        validate(graph(**masks), split=split)


def test_a_good_graph_passes_without_a_word() -> None:
    clean, notes = validate(graph())
    assert notes == []
    assert labels_of(clean.y).task == "multiclass"
    assert labels_of(clean.y).outputs == 3


def test_the_given_graph_is_left_alone() -> None:
    data = graph(y=torch.tensor([0, -1, 2, 0, 1, 2]), x=torch.ones(N, 2, dtype=torch.int64), junk="text")
    before = {
        name: value.clone() if isinstance(value, Tensor) else value for name, value in data.to_dict().items()
    }
    clean, _ = validate(data)
    clean.x, clean.train_mask = torch.zeros(N, 1), mask()
    assert set(data.keys()) == set(before)
    for name, value in before.items():
        assert torch.equal(data[name], value) if isinstance(value, Tensor) else data[name] == value


def test_masks_are_as_given_until_a_loss_says_what_stands_for_no_label() -> None:
    clean, notes = validate(graph(y=torch.tensor([0, -1, 2, 0, -1, 2])))
    assert torch.equal(clean.train_mask, mask(0, 1, 2))
    assert notes == []


def test_without_masks_a_seeded_split_is_drawn() -> None:
    y = torch.cat([torch.zeros(90, dtype=torch.long), torch.full((10,), -1)])
    data = Data(x=torch.ones(100, 1), y=y, edge_index=edges((0, 1)))
    first, notes = validate(data, split=3)
    again, _ = validate(data, split=3)
    other, _ = validate(data, split=4)
    assert any("seed 3" in note for note in notes)
    assert torch.equal(first.train_mask, again.train_mask)
    assert not torch.equal(first.train_mask, other.train_mask)
    sizes = [int(first[name].sum()) for name in NO_MASKS]
    assert sizes == [54, 18, 18]
    assert not any(first[name][90:].any() for name in NO_MASKS)


def test_a_split_is_chosen_and_a_single_mask_serves_all() -> None:
    several = torch.stack([mask(0), mask(1)], dim=1)
    clean, notes = validate(graph(train_mask=several, val_mask=torch.stack([mask(2), mask(3)], 1)), split=1)
    assert clean.train_mask.tolist() == mask(1).tolist()
    assert clean.val_mask.tolist() == mask(3).tolist()
    assert clean.test_mask.tolist() == mask(4, 5).tolist()
    assert "Split 1 of 2 is used." in notes


def test_masks_of_zeros_and_ones() -> None:
    clean, _ = validate(graph(train_mask=mask(0, 1).to(torch.uint8)))
    assert clean.train_mask.dtype == torch.bool


@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_sparse_features_are_made_dense(layout: str) -> None:
    x = torch.eye(N)
    clean, notes = validate(graph(x=x.to_sparse_coo() if layout == "coo" else x.to_sparse_csr()))
    assert torch.equal(clean.x, x)
    assert any("dense" in note for note in notes)


def test_huge_sparse_features_are_refused_with_a_way_out() -> None:
    wide = torch.sparse_coo_tensor(torch.zeros(2, 1, dtype=torch.long), torch.ones(1), (N, 2**33))
    with pytest.raises(DataError, match=r"--data\.project"):
        validate(graph(x=wide))


KINDS = [torch.bool, torch.uint8, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(N,), (N, 1), (N, 3), (N, 2, 4)])
@pytest.mark.parametrize("name", ["x", "y", "extra"])
def test_what_is_given_arrives_as_it_is(kind: torch.dtype, shape: tuple[int, ...], name: str) -> None:
    given = (torch.arange(torch.Size(shape).numel()) % 2).view(shape).to(kind)
    clean, notes = validate(graph(**{name: given}))
    assert clean[name].dtype == kind
    assert torch.equal(clean[name], given)
    assert notes == []


def test_large_ids_do_not_meet() -> None:
    ids = torch.tensor([2**24, 2**24 + 1, 2**53, 2**53 + 1, 2**62, 2**62 + 1])
    assert torch.equal(validate(graph(x=ids))[0].x, ids)


FACTS = {
    "classes": ([0, 1, 2, 0, 1, -1], "multiclass", 3),
    "a column": ([[0.0], [1], [2], [0], [1], [-1]], "multiclass", 3),
    "two truths": ([True, False] * 3, "multiclass", 2),
    "several": ([[0, 1, 1]] * N, "multilabel", 3),
    "numbers": ([0.5, 1, 2, 3, 4, 5], "regression", 1),
    "columns of numbers": ([[0.5, 2.0]] * N, "regression", 2),
    "NaN beside classes": ([NAN, 1.0, 0, 1, 0, 1], "multiclass", 2),
    "below -1": ([-2, 0, 0, 0, 0, 1], "regression", 1),
}


@pytest.mark.parametrize("case", FACTS)
def test_what_labels_look_like(case: str) -> None:
    y, kind, outputs = FACTS[case]
    facts = labels_of(torch.tensor(y))
    assert (facts.task, facts.outputs) == (kind, outputs)


def test_labels_of_minus_one_and_one_are_two_labels() -> None:
    both = torch.tensor([1, -1, 1, -1, 1, -1])
    assert labels_of(both).both
    assert not labels_of(torch.tensor([1, -1, 0, -1, 1, -1])).both
    clean, _ = validate(graph(y=both, **NO_MASKS))
    assert sum(int(clean[name].sum()) for name in NO_MASKS) == N, "a split is drawn from both"


def test_labels_that_are_nan_are_left_out_of_a_drawn_split() -> None:
    clean, _ = validate(graph(y=torch.tensor([NAN, 0.5, 1.5, NAN, 2.5, 3.5]), **NO_MASKS))
    drawn = sum(clean[name].int() for name in NO_MASKS)
    assert drawn.tolist() == [0, 1, 1, 0, 1, 1]


def test_without_features_and_labels() -> None:
    clean, notes = validate(graph(x=None, y=None))
    assert "x" not in clean
    assert "y" not in clean
    assert notes == []


@pytest.mark.parametrize("word", ["valid", "val"])
@pytest.mark.parametrize("kind", ["ids", "mask", "array"])
def test_a_split_by_ids_as_ogb_has_it(word: str, kind: str) -> None:
    made = {"train": [4, 0], word: [1], "test": [5, 2]}
    turn = {"ids": torch.tensor, "mask": lambda ids: mask(*ids), "array": np.array}[kind]
    clean, _ = validate(graph(split_idx={name: turn(ids) for name, ids in made.items()}, **NO_MASKS))
    assert [clean[name].nonzero().view(-1).tolist() for name in NO_MASKS] == [[0, 4], [1], [2, 5]]
    assert "split_idx" not in clean


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        ({"train": torch.tensor([7])}, "got 7 in split_idx"),
        ({"train": torch.ones(2, 2)}, "list of vertex ids"),
        ({"nothing": 1}, "got nothing"),
        ({"train": torch.tensor([0]), "test": torch.tensor([0])}, "got 1 in both"),
        ([torch.tensor([0]), torch.tensor([1])], "by the names train, valid and test; got a list"),
        ("train", "got a str"),
        (torch.tensor([0, 1]), "got a Tensor"),
    ],
)
def test_a_split_by_ids_that_is_none(ids: Any, said: str) -> None:
    with pytest.raises(DataError, match=said):
        validate(graph(split_idx=ids, **NO_MASKS))


def test_odd_edges_are_kept_and_counted() -> None:
    clean, notes = validate(graph(edge_index=edges((0, 1), (0, 1), (2, 2))))
    assert clean.edge_index.tolist() == [[0, 0, 2], [1, 1, 2]]
    said = " ".join(notes)
    for words in (
        "directed: 50%",
        "1 of 3 edges are duplicates",
        "1 self-loops",
        "3 of 6 vertices have no edge",
    ):
        assert words in said


def test_one_vertex_without_edges() -> None:
    clean, notes = validate(Data(x=torch.ones(1, 2), y=torch.tensor([0]), edge_index=edges()))
    assert clean.train_mask.tolist() == [True]
    assert any("no edges" in note for note in notes)


def test_int32_edges_and_arrays() -> None:
    data = graph(edge_index=graph().edge_index.int())
    data.x = np.ones((N, 2))
    clean, _ = validate(data)
    assert clean.edge_index.dtype == torch.int64
    assert clean.x.dtype == torch.float64


def test_adj_t_is_turned_into_edges() -> None:
    where, weight = edges((0, 1), (2, 3)), torch.tensor([2.0, 3.0])
    adjacency = torch.sparse_coo_tensor(where.flip(0), weight, (N, N)).to_sparse_csr()
    clean, _ = validate(graph(edge_index=None, adj_t=adjacency))
    assert clean.edge_index.tolist() == where.tolist()
    assert clean.edge_weight.tolist() == weight.tolist()
    assert "adj_t" not in clean


def test_every_attribute_has_a_kind() -> None:
    data = graph(pos=torch.ones(N, 3), edge_weight=torch.ones(10), kind=torch.zeros(10, 2), name="text")
    data.scalar, data.other, data.table = torch.tensor(1.0), torch.ones(17), {"a": 1}
    data.u, data.count, data.on, data.share = torch.randn(1, 3), 5, True, np.float64(0.5)
    data.edge_label_index, data.pairs = torch.zeros(2, 4, dtype=torch.long), torch.tensor([[1, 2], [3, 9]])
    data.links, data.sheet = torch.tensor([[1, 2, 3], [3, 4, 5]]), torch.eye(3).to_sparse_coo()
    data.edge_degree, data.notes = torch.ones(N), torch.ones(5)
    found = attributes_of(validate(data)[0])
    assert set(found.nodes) == {"x", "y", "pos", "edge_degree", "train_mask", "val_mask", "test_mask"}
    assert set(found.edges) == {"edge_weight", "kind"}
    assert set(found.shared) == {
        "name",
        "scalar",
        "other",
        "u",
        "count",
        "on",
        "share",
        "pairs",
        "notes",
        "table",
    }
    assert (found.shared["name"], found.shared["count"], found.shared["on"]) == ("text", 5, True)
    assert found.shared["share"] == 0.5
    assert set(found.refused) == {"edge_label_index", "links", "sheet"}
    assert "second list of edges" in found.refused["links"]
    assert found.shared["table"] == {"a": 1}


def test_as_many_edges_as_vertices() -> None:
    ring = torch.arange(N)
    data = graph(
        edge_index=torch.stack([ring, (ring + 1) % N]), edge_attr=torch.ones(N, 1), pos=torch.ones(N, 2)
    )
    data.node_kind, data.strength = torch.ones(N), torch.ones(N)
    found = attributes_of(validate(data)[0])
    assert {"pos", "node_kind", "train_mask"} <= set(found.nodes)
    assert set(found.edges) == {"edge_attr"}
    assert "edge_strength or node_strength" in attributes_of(data).refused["strength"]


def test_notes_of_an_earlier_call_come_first_and_once() -> None:
    clean, notes = validate(graph(**NO_MASKS))
    clean.notes = Notes(notes)
    assert validate(clean)[1] == notes


def test_a_gradient_of_the_user_is_not_touched() -> None:
    clean, _ = validate(graph(x=torch.ones(N, 2, requires_grad=True)))
    assert not clean.x.requires_grad
