"""Losses: the mean over all ranks is plain PyTorch's; what no mean over ranks can be is refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kagome.config import Train
from kagome.errors import ConfigError, DataError, ModelError
from kagome.graph.structure.labels import labels_of
from kagome.objective.losses import objective_of
from kagome.objective.objective import Objective, Target

N, C = 101, 5
CUT = 30
NAN = float("nan")


def classes(count: int = C) -> Tensor:
    return torch.randint(0, count, (N,), generator=torch.Generator().manual_seed(3))


def scores(*shape: int) -> Tensor:
    return torch.randn(N, *shape, generator=torch.Generator().manual_seed(4))


def made(loss, y: Tensor, **given) -> Objective:
    train = Train(**{k: v for k, v in given.items() if k not in ("inputs", "nodes", "shared")})
    rest = {k: v for k, v in given.items() if k in ("inputs", "nodes", "shared")}
    return objective_of(loss, labels_of(y), train, N, **rest)


def mean(objective: Objective, out, inputs: dict[str, Tensor]) -> Tensor:
    """As two ranks have it: sums of some rows and of the others, over the sum of all weights."""
    lost, weight = [], 0.0
    for rows in (torch.arange(CUT), torch.arange(CUT, N)):
        target = objective.target(inputs, rows)
        value, given = objective.lost(out[rows], target)
        share = objective.share(target)
        weight += share if share is not None else float(given if given is not None else rows.numel())
        lost.append(value)
    return sum(lost) / weight


def checked(objective: Objective, out, y: Tensor) -> None:
    objective.check(out, objective.target({"y": y}, slice(None)))


y_hole = torch.where(torch.arange(N) % 4 == 0, -1, classes())
numbers = scores(3) * 2 + 1
holes = torch.where(scores(3) > 1, torch.full((N, 3), NAN), numbers)
bits = (scores(3) > 0).long()
holed_bits = torch.where(scores(3) > 1, torch.full((N, 3), NAN), bits.float())
W = torch.arange(1.0, C + 1)
area = torch.rand(N, generator=torch.Generator().manual_seed(5)) * 3

EQUAL = {
    "class ids": (None, {}, scores(C), classes(), lambda o, y: F.cross_entropy(o, y)),
    "ids in a column": (None, {}, scores(C), classes()[:, None], lambda o, y: F.cross_entropy(o, y[:, 0])),
    "whole floats": (None, {}, scores(C), classes().float(), lambda o, y: F.cross_entropy(o, y.long())),
    "int32": (None, {}, scores(C), classes().int(), lambda o, y: F.cross_entropy(o, y.long())),
    "-1 is none": (None, {}, scores(C), y_hole, lambda o, y: F.cross_entropy(o, y, ignore_index=-1)),
    "3 is none": (
        "cross_entropy",
        {"ignore_index": 3},
        scores(C),
        classes(),
        lambda o, y: F.cross_entropy(o, y, ignore_index=3),
    ),
    "more classes than labels": (None, {}, scores(C + 2), classes(), F.cross_entropy),
    "two classes in a column": (
        None,
        {},
        scores(1),
        classes(2),
        lambda o, y: F.binary_cross_entropy_with_logits(o[:, 0], y.float()),
    ),
    "truths": (
        None,
        {},
        scores(1),
        classes(2) > 0,
        lambda o, y: F.binary_cross_entropy_with_logits(o[:, 0], y.float()),
    ),
    "class weights": (
        "cross_entropy",
        {"class_weight": tuple(W.tolist())},
        scores(C),
        classes(),
        lambda o, y: F.cross_entropy(o, y, weight=W),
    ),
    "class weights and none": (
        "cross_entropy",
        {"class_weight": tuple(W.tolist())},
        scores(C),
        y_hole,
        lambda o, y: F.cross_entropy(o, y, weight=W, ignore_index=-1),
    ),
    "soft labels": (
        "cross_entropy",
        {},
        scores(C),
        scores(C).mul(3).softmax(1),
        lambda o, y: F.cross_entropy(o, y),
    ),
    "soft labels and class weights": (
        "cross_entropy",
        {"class_weight": tuple(W.tolist())},
        scores(C),
        scores(C).mul(3).softmax(1),
        lambda o, y: F.cross_entropy(o, y, weight=W),
    ),
    "several labels": (
        None,
        {},
        scores(3),
        bits,
        lambda o, y: F.binary_cross_entropy_with_logits(o, y.float()),
    ),
    "several labels with holes": (
        "bce",
        {},
        scores(3),
        holed_bits,
        lambda o, y: F.binary_cross_entropy_with_logits(o[~y.isnan()], y[~y.isnan()]),
    ),
    "soft yes and no": (
        "bce",
        {},
        scores(),
        scores().sigmoid(),
        F.binary_cross_entropy_with_logits,
    ),
    "mse": ("mse", {}, scores(3), numbers, F.mse_loss),
    "mse of one column": ("mse", {}, scores(1), numbers[:, 0], lambda o, y: F.mse_loss(o[:, 0], y)),
    "mse of a flat output": ("mse", {}, scores(), numbers[:, :1], lambda o, y: F.mse_loss(o, y[:, 0])),
    "mse of whole numbers": ("mse", {}, scores(1), classes(), lambda o, y: F.mse_loss(o[:, 0], y.float())),
    "mse of float64": ("mse", {}, scores(3), numbers.double(), lambda o, y: F.mse_loss(o, y.float())),
    "mse, -1 is a number": ("mse", {}, scores(1), y_hole, lambda o, y: F.mse_loss(o[:, 0], y.float())),
    "mae": ("mae", {}, scores(3), numbers, F.l1_loss),
    "huber": ("huber", {}, scores(3), numbers, F.huber_loss),
    "holes": ("mse", {}, scores(3), holes, lambda o, y: F.mse_loss(o[~y.isnan()], y[~y.isnan()])),
    "own, a value a row": (nn.CrossEntropyLoss(reduction="none"), {}, scores(C), classes(), F.cross_entropy),
    "own, a sum": (nn.CrossEntropyLoss(reduction="sum"), {}, scores(C), classes(), F.cross_entropy),
    "own, weights": (
        lambda o, y: (F.cross_entropy(o, y, reduction="none"), W[y]),
        {},
        scores(C),
        classes(),
        lambda o, y: F.cross_entropy(o, y, weight=W),
    ),
    "own, weights an entry": (
        lambda o, y: (F.mse_loss(o, y.nan_to_num(), reduction="none"), (~y.isnan()).float()),
        {},
        scores(3),
        holes,
        lambda o, y: F.mse_loss(o[~y.isnan()], y[~y.isnan()]),
    ),
    "own, -1 and 1": (
        lambda o, y: F.soft_margin_loss(o, y.to(o.dtype), reduction="none"),
        {},
        scores(),
        classes(2) * 2 - 1,
        lambda o, y: F.soft_margin_loss(o, y.to(o.dtype)),
    ),
}


@pytest.mark.parametrize("case", EQUAL)
def test_the_mean_is_plain_pytorch_s_with_its_gradient(case):
    loss, given, out, y, plain = EQUAL[case]
    objective = made(loss, y, **given)
    one, other = (out.double().clone().requires_grad_() for _ in range(2))
    if "class weights" in case or "weights" in case:
        W.data = W.data.double()
    y = y.double() if y.is_floating_point() and y.dtype == torch.float32 else y
    checked(objective, one, y)
    found = mean(objective, one, {"y": y})
    expected = plain(other, y.float().double() if y.dtype == torch.float64 else y)
    torch.testing.assert_close(found, expected.double(), rtol=1e-6, atol=1e-7)
    found.backward()
    expected.backward()
    torch.testing.assert_close(one.grad, other.grad, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", ["mse", "cross_entropy"])
def test_a_weight_a_vertex(name):
    y = numbers if name == "mse" else classes()
    out = scores(3 if name == "mse" else C)
    objective = made(name, y, sample_weight="area", nodes=("y", "area"))
    each = F.mse_loss if name == "mse" else F.cross_entropy
    each = each(out, y, reduction="none")
    each = each.mean(1) if name == "mse" else each
    expected = (each * area).sum() / area.sum()
    torch.testing.assert_close(mean(objective, out, {"y": y, "area": area}), expected)


def weighted(out, y, weight):
    return F.cross_entropy(out, y, reduction="none") * weight


def called_otherwise(out, y, w):
    return weighted(out, y, w)


def optional(out, y, weight=None):
    return weighted(out, y, 1.0 if weight is None else weight)


def chosen(out, y, weight=torch.tensor(1.0)):  # noqa: B008 - what is tried
    return weighted(out, y, weight)


@pytest.mark.parametrize(
    ("loss", "inputs", "attribute"),
    [
        (weighted, None, "weight"),
        (called_otherwise, None, "weight"),
        (optional, None, "weight"),
        (chosen, None, None),
        (weighted, {"weight": "area"}, "area"),
        (called_otherwise, {"w": "area"}, "area"),
        (lambda out, y, area: weighted(out, y, area), None, "area"),
        (lambda out, y, factor: weighted(out, y, factor), None, "factor"),
    ],
)
def test_further_arguments_of_a_loss_are_attributes_of_the_data(loss, inputs, attribute):
    values = {"y": classes(), "weight": area, "area": area + 1, "factor": 2.5}
    objective = made(loss, classes(), inputs=inputs, nodes=("y", "weight", "area"), shared=("factor",))
    used = values[attribute] if attribute else 1.0
    expected = (F.cross_entropy(scores(C), classes(), reduction="none") * used).mean()
    torch.testing.assert_close(mean(objective, scores(C), values), expected)
    assert objective.uses == {"y", *([attribute] if attribute else [])}


def test_an_argument_that_the_data_has_not():
    with pytest.raises(ConfigError, match=r"attribute of the data for loss\(out, y, w\)(.|\n)*loss_inputs="):
        made(called_otherwise, classes())
    with pytest.raises(ConfigError, match="loss_inputs: 'nothing'"):
        made(weighted, classes(), inputs={"weight": "nothing"}, nodes=("y", "weight"))


def test_a_weight_of_torch_is_a_weight_a_class_and_not_the_data_s():
    objective = made(lambda o, y: F.cross_entropy(o, y, reduction="none"), classes(), nodes=("y", "weight"))
    assert objective.uses == {"y"}


REFUSED = {
    "a mean": (nn.CrossEntropyLoss(), scores(C), classes(), r'averages over the rows(.|\n)*reduction="none"'),
    "a weighted mean": (
        nn.CrossEntropyLoss(weight=torch.arange(1.0, C + 1)),
        scores(C),
        classes(),
        r"averages over the rows(.|\n)*train\.class_weight, or return \(values, weights\)",
    ),
    "the square of a sum": (
        lambda o, y: F.cross_entropy(o, y, reduction="sum") ** 2,
        scores(C),
        classes(),
        "averages over the rows",
    ),
    "a mean that is 0 at first": (
        lambda o, y: (o - y).square().mean(),
        torch.zeros(101, 3),
        torch.zeros(101, 3),
        "averages over the rows",
    ),
    "a mean of small numbers": (
        lambda o, y: (o - y).square().mean(),
        torch.zeros(101, 3),
        torch.rand(101, 3) * 1e-5,
        "averages over the rows",
    ),
    "every row with every other": (
        nn.MSELoss(reduction="none"),
        scores(1),
        numbers[:, 0],
        r"a value a row: 101; got the shape \[101, 101\] \(out \[101, 1\] float32, y \[101\]",
    ),
    "every row with every other, added up": (
        nn.MSELoss(reduction="sum"),
        scores(1),
        numbers[:, 0],
        r"or their sum(.|\n)*out \[101, 1\] float32, y \[101\]",
    ),
    "a value a column": (
        lambda o, y: F.mse_loss(o, y, reduction="none").mean(0),
        scores(3),
        numbers,
        r"a value a row: \d+; got 3 values",
    ),
    "a value a row that knows the others": (
        lambda o, y: F.mse_loss(o, y, reduction="none").sum(1) - o.mean(),
        scores(3),
        numbers,
        "it looks at all rows of one rank",
    ),
    "torch's own error": (
        nn.CrossEntropyLoss(reduction="none"),
        scores(C),
        classes()[:, None],
        r"got RuntimeError: .*\(out \[101, 5\] float32, y \[101, 1\] int64\)",
    ),
    "a type that it does not take": (
        nn.CrossEntropyLoss(reduction="none"),
        scores(C),
        classes().int(),
        r"got RuntimeError: .*y \[101\] int32",
    ),
    "weights of another shape": (
        lambda o, y: (F.mse_loss(o, y, reduction="none"), torch.ones(3)),
        scores(3),
        numbers,
        r"got weights of shape \[3\]",
    ),
    "no tensor": (lambda o, y: 3.0, scores(3), numbers, "got float"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_loss_that_is_refused(case):
    loss, out, y, words = REFUSED[case]
    with pytest.raises(ConfigError, match=words):
        checked(made(loss, y), out, y)


@pytest.mark.parametrize("rows", [0, 1])
def test_a_rank_with_no_row_or_one_has_no_say(rows):
    for loss, y in ((None, classes()), ("mse", numbers), (nn.CrossEntropyLoss(reduction="none"), classes())):
        objective = made(loss, y)
        out = scores(3 if loss == "mse" else C)
        target = objective.target({"y": y}, torch.arange(rows))
        objective.check(out[:rows], target)
        assert objective.lost(out[:rows], target)[0].shape == ()


def test_a_sum_and_a_mean_that_are_0_at_first_are_told_apart():
    nothing = torch.zeros(101, 3)
    for how, learned in (("sum", False), ("mean", True)):
        objective = Objective("", labels_of(nothing), loss=nn.MSELoss(reduction=how), alone=True)
        checked(objective, nothing, nothing)
        assert objective.scalar.learned is learned


LABELS = {
    "below -1": (None, torch.tensor([0, 1, -2, 0]), r"0 to C - 1 \(-1 for none.*got y\[2\] = -2"),
    "too large": (None, torch.tensor([0, 1, 2, 10**9]), r"got y\[3\] = 1000000000"),
    "halves": (None, torch.tensor([0, 0.5, 1, 0]), r"whole numbers(.|\n)*row 1(.|\n)*loss='mse'"),
    "halves by name": ("cross_entropy", torch.tensor([0, 0.5, 1, 0]), r"whole numbers(.|\n)*row 1"),
    "several, not 0 and 1": (None, torch.full((4, 3), 2), r"0 and 1(.|\n)*row 0(.|\n)*loss='mse'"),
    "-1 and 1": (None, torch.tensor([-1, 1, 1, -1]), r"which would leave one class(.|\n)*// 2"),
    "bce above 1": ("bce", torch.tensor([0.0, 0.5, 1.5, 1.0]), "got 1.5 in row 2 of y"),
    "shares below 0": ("cross_entropy", torch.tensor([[0.5, -0.5]] * 4), "got -0.5 in row 0 of y"),
}


@pytest.mark.parametrize("case", LABELS)
def test_labels_that_do_not_fit(case):
    loss, y, words = LABELS[case]
    with pytest.raises(DataError, match=words):
        made(loss, y)


def test_settings_that_clash():
    for words, loss, y, given in (
        (
            "with a built-in loss",
            nn.CrossEntropyLoss(reduction="none"),
            classes(),
            {"class_weight": (1.0,)},
        ),
        ("each of 5 classes", None, classes(), {"class_weight": (1.0, 2.0)}),
        ("cross_entropy, .*; got mse", "mse", numbers, {"class_weight": (1.0,)}),
        ("an attribute of the data for", None, classes(), {"sample_weight": "nothing"}),
        ("loss to be one of", "nothing", classes(), {}),
    ):
        with pytest.raises(ConfigError, match=words):
            made(loss, y, **given)


@pytest.mark.parametrize(
    ("loss", "y", "shape", "words"),
    [
        (None, classes(), (3,), r"5 columns, one a class; got an output of shape \[101, 3\]"),
        ("mse", numbers, (4,), r"3 columns, one a number"),
        ("mse", numbers[:, 0], (2,), r"1 column, one a number"),
        (None, bits, (), r"3 columns, one a label"),
    ],
)
def test_an_output_of_another_width(loss, y, shape, words):
    with pytest.raises(ModelError, match=words):
        checked(made(loss, y), scores(*shape), y)


def test_labels_that_are_none_with_an_own_loss_only_when_asked():
    own = nn.CrossEntropyLoss(reduction="none")
    both = torch.tensor([1, -1, 1, 0])
    assert made(own, both).labelled(both).all()
    assert made(own, both, ignore_index=-1).labelled(both).tolist() == [True, False, True, True]
    assert made(None, both).labelled(both).tolist() == [True, False, True, True]
    rows = torch.tensor([[NAN, 1.0], [NAN, NAN]])
    assert made("mse", rows).labelled(rows).tolist() == [True, False]


def test_target_rows_are_those_asked_for():
    target = Target(classes(), rows={"w": area}, shared={"k": area})
    part = target.of(slice(3, 7))
    assert torch.equal(part.y, classes()[3:7])
    assert torch.equal(part.rows["w"], area[3:7])
    assert torch.equal(part.shared["k"], area)
