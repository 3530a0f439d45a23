"""The garbage collector, while epochs run, leaves alone what was there before them."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kagome import Parallel, Trainer
from kagome.launch.gc import FEW, set_aside
from kagome.profile.step_shapes import SAMPLE
from pipelines import HIDDEN, Gcnii, data, model
from training import QUIET, settings


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.unfreeze()


def test_full_collections_go_through_what_epochs_made():
    seen: list[int] = []

    def loss(out: Tensor, y: Tensor) -> Tensor:
        seen.append(len(gc.get_objects(generation=2)))
        return F.cross_entropy(out, y, reduction="none")

    before = len(gc.get_objects())
    with Trainer(model("gcn"), data(), loss=loss, train=settings(), report=QUIET) as trainer:
        trainer.fit(FEW)
    assert before > 100_000
    assert max(seen[-3:]) < before / 10
    assert gc.get_freeze_count() == 0


@set_aside(FEW)
def fail() -> None:
    assert gc.get_freeze_count() > 0
    raise ZeroDivisionError


def test_it_ends_with_an_error():
    with pytest.raises(ZeroDivisionError):
        fail()
    assert gc.get_freeze_count() == 0


def test_a_few_epochs_are_not_worth_a_full_collection():
    with set_aside(FEW - 1):
        assert gc.get_freeze_count() == 0


def test_who_has_set_objects_aside_keeps_them_there():
    gc.freeze()
    with set_aside(FEW):
        pass
    assert gc.get_freeze_count() > 0


def test_cycles_of_epochs_are_still_collected():
    class Held:
        def __init__(self) -> None:
            self.me, self.rows = self, torch.zeros(2)

    with set_aside(FEW):
        Held()
        assert gc.collect() > 0


@pytest.mark.parametrize("chunks", [1, 3])
def test_features_lie_once_beside_the_user_s(chunks):
    """A part, its chunks, all of them together: each has held a copy of its own."""
    given, width = data(), 37
    given.x = torch.randn(given.num_nodes, width, dtype=torch.float64)
    net = Gcnii()
    net.first = torch.nn.Linear(width, HIDDEN)
    cut = Parallel(chunks=chunks)
    with Trainer(net.double(), given, parallel=cut, train=settings(), report=QUIET) as trainer:
        trainer.fit(1)
        gc.collect()
        held = (each for each in gc.get_objects() if type(each) is Tensor and not each.is_nested)
        found = [each for each in held if each.shape[1:] == (width,)]
        rows = {each.untyped_storage().data_ptr(): each.size(0) for each in found if each.size(0) > HIDDEN}
        assert 2 * given.num_nodes <= sum(rows.values()) <= 2 * given.num_nodes + SAMPLE
