"""Measurements are taken once a day and machine, and again when anything changes that decides them."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch_geometric.nn import GCN, GCNConv

from kagome.autoplan import plan
from kagome.cli.app import _builder
from kagome.config import Data, Model
from kagome.config.commands import PlanCommand
from kagome.model.fingerprint import identity
from kagome.profile.cache import FRESH_SECONDS, MeasurementCache

SBM = "sbm:vertices=300,degree=8,features=10,classes=4,communities=4"


class Counting:
    def __init__(self) -> None:
        self.times = 0

    def __call__(self) -> list[int]:
        self.times += 1
        return [self.times]


def test_a_value_is_measured_once_until_its_facts_change(tmp_path: Path) -> None:
    measure = Counting()
    first = MeasurementCache(tmp_path)
    assert [first.value("it", [1, None], measure) for _ in range(2)] == [[1], [1]]
    assert not first.reused
    again = MeasurementCache(tmp_path)
    assert again.value("it", [1, None], measure) == [1]
    assert again.reused == {"it"}
    assert again.value("it", [2, None], measure) == [2]
    assert again.value("other", [1, None], measure) == [3]
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert MeasurementCache(tmp_path).value("it", [1, None], measure) == [4]
    finally:
        torch.set_num_threads(threads)


def test_without_a_folder_it_lives_as_long_as_its_object(tmp_path: Path) -> None:
    measure, kept = Counting(), MeasurementCache()
    assert [kept.value("it", 1, measure) for _ in range(2)] == [[1], [1]]
    assert MeasurementCache().value("it", 1, measure) == [2]


def test_old_and_damaged_values_are_measured_again(tmp_path: Path) -> None:
    measure = Counting()
    MeasurementCache(tmp_path).value("it", 1, measure)
    (file,) = tmp_path.iterdir()
    file.write_text("[")
    assert MeasurementCache(tmp_path).value("it", 1, measure) == [2]
    before = time.time() - FRESH_SECONDS - 60
    os.utime(file, (before, before))
    MeasurementCache(tmp_path).value("another", 1, measure)
    assert not file.exists()  # old ones go
    assert MeasurementCache(tmp_path).value("it", 1, measure) == [4]


def test_a_folder_that_cannot_be_written_is_none(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    measure = Counting()
    assert MeasurementCache(file / "below").value("it", 1, measure) == [1]


def test_models_that_cost_otherwise_are_others() -> None:
    def told(model: nn.Module) -> str:
        return json.dumps(identity(model))

    usual = told(GCN(10, 8, 2, 4))
    assert told(GCN(10, 8, 2, 4)) == usual  # whatever the weights are
    others = [
        GCN(10, 9, 2, 4),
        GCN(10, 8, 3, 4),
        GCN(10, 8, 2, 4, dropout=0.5),
        GCN(10, 8, 2, 4, act="elu"),
        GCN(10, 8, 2, 4, jk="cat"),
        GCN(10, 8, 2, 4).double(),
    ]
    frozen = GCN(10, 8, 2, 4)
    next(frozen.parameters()).requires_grad_(False)
    assert len({usual, *map(told, [*others, frozen])}) == len(others) + 2


def test_a_class_of_the_users_own_is_known_by_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "own_model_of_this_test.py"
    text = "from torch import nn\n\n\nclass Own(nn.Module):\n    def forward(self, x):\n        return x\n"
    file.write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    own = __import__(file.stem).Own
    before = identity(own())
    assert before == identity(own())
    file.write_text(text.replace("return x", "return 2 * x"))
    assert identity(own()) != before
    file.unlink()
    assert identity(own()) is None
    space: dict[str, type[nn.Module]] = {}
    exec("from torch import nn\nclass Typed(nn.Module):\n    pass", {"__name__": "nowhere"}, space)
    assert identity(space["Typed"]()) is None
    assert identity(nn.Sequential(GCNConv(2, 2))) is not None


@pytest.mark.slow
def test_a_second_plan_measures_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KAGOME_CACHE", str(tmp_path))
    monkeypatch.setattr("kagome.profile.cache.AGREE", 9.0)  # whatever else this machine does
    asked = PlanCommand(data=Data(name=SBM), model=Model(name="gcn", layers=2, hidden=8), allow=("onebit",))
    first = plan.planned(asked, _builder(asked.model, asked.train))
    assert "kagome: the model is measured: some twenty epochs" in capsys.readouterr().err
    again = plan.planned(asked, _builder(asked.model, asked.train))
    assert again.fitting == first.fitting
    assert "measured" not in capsys.readouterr().err
    assert again.facts["notes"]
    assert not first.facts["notes"]
    files = len(list((tmp_path / "measured").iterdir()))
    other = replace(asked, model=replace(asked.model, hidden=9))
    plan.planned(other, _builder(other.model, other.train))
    files, before = len(list((tmp_path / "measured").iterdir())), files
    assert files > before
    anew = replace(asked, reuse=False)
    assert not plan.planned(anew, _builder(anew.model, anew.train)).facts["notes"]
    assert len(list((tmp_path / "measured").iterdir())) == files
