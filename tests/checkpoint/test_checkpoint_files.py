"""A checkpoint's files: what was altered is named at the door, nothing in them runs, a full disk is told."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import re
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim import lr_scheduler

from kagome import Trainer
from kagome.checkpoint import checkpoint
from kagome.checkpoint.checkpoint import RunPosition
from kagome.checkpoint.files import latest
from kagome.comm.channel import Channel
from kagome.errors import CheckpointError
from kagome.storage import sealed_files
from training import QUIET, Gcn, graph, settings

ALONE = Channel(None, "cpu")


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    torch.manual_seed(1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(5, 3)).square().sum().backward()
        optimizer.step()


def written(folder: Path, epoch: int = 7, **given: Any) -> Path:
    model = small()
    optimizer = torch.optim.Adam(model.parameters())
    stepped(model, optimizer)
    place = RunPosition(epoch, 0, epoch, 0.5, 0, 1, "mark")
    return checkpoint.save(folder, place, ALONE, model=model, optimizer=optimizer, **given)


def read(folder: Path) -> tuple[Any, nn.Module]:
    model = small()
    found = checkpoint.load(folder, ALONE, model=model, optimizer=torch.optim.Adam(model.parameters()))
    return found, model


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    for epoch in (6, 7):
        written(folder, epoch)
    return folder


@pytest.fixture
def pair(two, tmp_path) -> Path:
    return Path(shutil.copytree(two, tmp_path / "checkpoints"))


# Altered -------------------------------------------------------------------------------------------


def test_each_flipped_bit_is_noticed_and_the_older_one_is_offered(pair):
    newest, draw = pair / "epoch-000007", random.Random(0)
    for file in sorted(newest.iterdir()):
        whole = file.read_bytes()
        for _ in range(40):
            place = draw.randrange(len(whole))
            flipped = bytearray(whole)
            flipped[place] ^= 1 << draw.randrange(8)
            file.write_bytes(flipped)
            with pytest.raises(CheckpointError) as caught:
                read(newest)
            text = str(caught.value)
            assert file.name in text
            assert f"--resume {pair / 'epoch-000006'}, which is whole" in text
        file.write_bytes(whole)
    read(newest)


@pytest.mark.parametrize("name", [checkpoint.PAGE, checkpoint.REST, "rank-00000.safetensors"])
def test_files_that_are_gone_or_no_files_are_named(pair, name):
    newest = pair / "epoch-000007"
    (newest / name).unlink()
    with pytest.raises(CheckpointError, match=f"{name} is missing"):
        read(newest)
    (newest / name).mkdir()
    with pytest.raises(CheckpointError, match=f"{name} is no file"):
        read(newest)


def test_where_no_other_is_whole_none_is_offered(pair):
    for folder in pair.glob("epoch-*"):
        (folder / checkpoint.REST).write_text("{}")
    with pytest.raises(CheckpointError, match="no other whole checkpoint"):
        read(pair / "epoch-000007")


WRONG = {
    "epoch": [-1, "6", 6.5, None, True, [6], 10**30, 6],
    "seed": ["0", 0.5, None],
    "best_metric": ["high", [1]],
    "waited": [-1, None],
    "world_size": [{"tuple": [1]}],
    "graph": [3, None],
    "files": [
        None,
        [],
        {"../place.json": [1, "x"]},
        {"rest.json": "x"},
        {"rest.json": [-1, 5]},
        {"a": [1, "b"]},
    ],
    "format": [None, 99, "2"],
    "more": [1],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, some in WRONG.items() for value in some])
@pytest.mark.parametrize("resealed", [False, True])
def test_an_edited_page_is_refused_and_nothing_is_touched(pair, name, value, resealed):
    newest = pair / "epoch-000007"
    page = newest / checkpoint.PAGE
    facts = {**json.loads(page.read_text()), name: value}
    if resealed:
        facts.pop(sealed_files.SEAL)
        sealed_files.write_page(page, facts)
    else:
        page.write_text(json.dumps(facts))
    model = small()
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"epoch-000007; got a damaged one: \S+"):
        checkpoint.load(newest, ALONE, model=model, optimizer=torch.optim.Adam(model.parameters()))
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)


@pytest.mark.parametrize(
    "text", [b"", b"epoch-000007" * 1000, b"\xff\xfe\x00", b"../../etc", b"epoch-7", None]
)
def test_a_pointer_that_names_nothing_is_said_to(pair, text):
    pointer = pair / checkpoint.LATEST
    pointer.unlink()
    if text is None:
        pointer.mkdir()
    else:
        pointer.write_bytes(text)
    with pytest.raises(CheckpointError, match=rf"got something else(.|\n)*--resume {pair}/epoch-000007"):
        latest(pair)


def test_the_pointer_is_on_the_disk_before_it_gets_its_name(pair, monkeypatch):
    """After a power failure it may be empty otherwise, and is then refused."""
    synced: list[int] = []
    sync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (synced.append(os.fstat(file).st_ino), sync(file)))
    written(pair, 8)
    assert latest(pair).name == "epoch-000008"
    assert (pair / checkpoint.LATEST).stat().st_ino in synced


def test_without_a_pointer_the_newest_is_taken(pair):
    (pair / checkpoint.LATEST).unlink()
    assert latest(pair).name == "epoch-000007"


def test_another_optimizer_or_model_is_refused(pair):
    model = small()
    for optimizer, says in (
        (torch.optim.SGD(model.parameters()), "got the state of Adam, where this run has SGD"),
        (
            torch.optim.Adam(list(model.parameters())[:2]),
            r"groups of \[6\] parameters, where this run's has \[2\]",
        ),
    ):
        with pytest.raises(CheckpointError, match=says):
            checkpoint.load(pair / "epoch-000007", ALONE, model=model, optimizer=optimizer)
    other = small()
    other[0] = nn.Linear(3, 5)
    with pytest.raises(
        CheckpointError, match=r"0.weight as \[4, 3\] torch.float32, where the model has \[5, 3\]"
    ):
        checkpoint.load(
            pair / "epoch-000007", ALONE, model=other, optimizer=torch.optim.Adam(other.parameters())
        )


# Code ----------------------------------------------------------------------------------------------


class Runs:
    """What a pickle of it would do to the one who reads it."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.write_text, (self.mark, "it ran"))


@pytest.mark.parametrize("form", ["pickle", "torch"])
@pytest.mark.parametrize("resealed", [False, True])
def test_no_file_of_a_checkpoint_can_run(pair, tmp_path, form, resealed):
    """Each file in turn is a pickle, and the page says that it belongs there."""
    mark = tmp_path / "ran"
    for name in ("place.json", "rest.json", "rank-00000.safetensors", "rest.pt", ".metadata", "0.distcp"):
        folder = Path(shutil.copytree(pair / "epoch-000007", tmp_path / name / "epoch-000007"))
        if form == "pickle":
            (folder / name).write_bytes(pickle.dumps(Runs(mark)))
        else:
            torch.save(Runs(mark), held := io.BytesIO())
            (folder / name).write_bytes(held.getvalue())
        if resealed and name != checkpoint.PAGE:
            facts = json.loads((folder / checkpoint.PAGE).read_text())
            facts.pop(sealed_files.SEAL)
            facts["files"][name] = list(vars(sealed_files._seal_of(folder / name)).values())
            sealed_files.write_page(folder / checkpoint.PAGE, facts)
        if name in ("place.json", "rest.json", "rank-00000.safetensors"):
            with pytest.raises(CheckpointError, match="damaged"):
                read(folder)
        else:
            read(folder)  # a file beside, which nobody reads
        assert not mark.exists()


def test_the_files_are_safetensors_and_json(two):
    newest = two / "epoch-000007"
    assert sorted(p.name for p in newest.iterdir()) == ["place.json", "rank-00000.safetensors", "rest.json"]
    json.loads((newest / "rest.json").read_text())
    assert "model.0.weight" in load_file(newest / "rank-00000.safetensors")


# What comes back -----------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type)
    and issubclass(kind, torch.optim.Optimizer)
    and name not in ("Optimizer", "SparseAdam", "LBFGS", "Muon")
}
OPTIMIZERS |= {
    "amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "tensor rate": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01), capturable=False, foreach=False),
    "two groups": lambda p: torch.optim.AdamW([{"params": [q], "lr": 0.1 / n} for n, q in enumerate(p, 1)]),
}


def alike(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b) and a.dtype == b.dtype
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(alike(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(alike, a, b))
    return bool(a == b)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_goes_on_to_the_bit(tmp_path, name):
    model = small()
    optimizer = OPTIMIZERS[name](model.parameters())
    stepped(model, optimizer)
    place = RunPosition(3, 0, 0, None, 0, 1, "")
    folder = checkpoint.save(tmp_path, place, ALONE, model=model, optimizer=optimizer)
    other = small()
    nn.init.zeros_(other[0].weight)
    again = OPTIMIZERS[name](other.parameters())
    checkpoint.load(folder, ALONE, model=other, optimizer=again)
    assert alike(again.state_dict(), optimizer.state_dict())
    for each, its in ((model, optimizer), (other, again)):
        stepped(each, its)
    assert alike(dict(other.state_dict()), dict(model.state_dict()))


def of_several(optimizer: Any, kind: Any) -> Any:
    inner = [lr_scheduler.ExponentialLR(optimizer, 0.9), lr_scheduler.MultiStepLR(optimizer, [2, 4])]
    return kind(optimizer, inner, [2]) if kind is lr_scheduler.SequentialLR else kind(inner)


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda e: 0.9**e),
    "multi-step": lambda o: lr_scheduler.MultiStepLR(o, [1, 4]),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, 20),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3, cycle_momentum=False),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "polynomial": lambda o: lr_scheduler.PolynomialLR(o, 9),
    "sequential": lambda o: of_several(o, lr_scheduler.SequentialLR),
    "chained": lambda o: of_several(o, lr_scheduler.ChainedScheduler),
    "swa": lambda o: torch.optim.swa_utils.SWALR(o, 0.05),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler_goes_on_to_the_bit(tmp_path, name):
    def made(model: nn.Module) -> tuple[Any, Any]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return optimizer, SCHEDULERS[name](optimizer)

    def rates(optimizer: Any, scheduler: Any, steps: int) -> list[float]:
        found = []
        for step in range(steps):
            optimizer.step()
            scheduler.step(*([1.0 + step] if name == "plateau" else []))
            found.append(float(optimizer.param_groups[0]["lr"]))
        return found

    optimizer, scheduler = made(model := small())
    rates(optimizer, scheduler, 3)
    place = RunPosition(3, 0, 0, float("nan"), 0, 1, "")
    folder = checkpoint.save(tmp_path, place, ALONE, model=model, optimizer=optimizer, scheduler=scheduler)
    other, again = made(twin := small())
    checkpoint.load(folder, ALONE, model=twin, optimizer=other, scheduler=again)
    assert rates(other, again, 6) == rates(optimizer, scheduler, 6)


@pytest.mark.parametrize(
    "dtype", [torch.complex64, torch.complex128, torch.float64, torch.bfloat16, torch.uint16]
)
def test_weights_and_buffers_of_any_type(tmp_path, dtype):
    def made(value: int) -> nn.Module:
        model = nn.Linear(2, 2)
        model.register_buffer("other", torch.full((2, 3), value).to(dtype).t())
        model.register_buffer("none", torch.zeros(0, 3, dtype=dtype))
        return model

    model, other = made(7), made(0)
    place = RunPosition(3, 0, 0, None, 0, 1, "")
    folder = checkpoint.save(
        tmp_path, place, ALONE, model=model, optimizer=torch.optim.Adam(model.parameters())
    )
    checkpoint.load(folder, ALONE, model=other, optimizer=torch.optim.Adam(other.parameters()))
    assert alike(dict(other.state_dict()), dict(model.state_dict()))


# The disk ------------------------------------------------------------------------------------------


def saves_on_a_small_disk(channel: Channel, folder: str, small: int) -> str:
    """Files on this rank may have a few bytes only, if it is the small one's rank."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    mine = Gcn()
    place = RunPosition(8, 0, 8, None, 0, channel.size, "")
    if channel.rank == small:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200, limits[1]))
    try:
        checkpoint.save(
            Path(folder), place, channel, model=mine, optimizer=torch.optim.Adam(mine.parameters())
        )
    except CheckpointError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return "written"


@pytest.mark.parametrize("small", [0, 1])
def test_a_file_that_cannot_grow_ends_all_ranks_with_the_last_whole_one_by_name(ranks, pair, small):
    for text in ranks(2, saves_on_a_small_disk, str(pair), small):
        assert re.search(r"epoch-000008; got .*File too large.*; the last whole one is", text)
        assert str(pair / "epoch-000007") in text
    assert sorted(p.name for p in pair.iterdir()) == ["epoch-000006", "epoch-000007", "latest"]
    read(latest(pair))


def test_a_run_says_so_in_one_sentence(tmp_path):
    """The error that torch had for a write that fails is no Exception, and came through as a traceback."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Trainer(Gcn(), graph(), train=settings(save_every=1), report=QUIET, out=tmp_path / "run") as trainer:
        trainer.fit(1)
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, limits[1]))
        try:
            with pytest.raises(CheckpointError, match=r"; got .*the last whole one is .*epoch-000001"):
                trainer.fit(3)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)


class HoldsAnObject(lr_scheduler.ConstantLR):
    """A scheduler whose state is no plain data."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "rules": [object()]}


def test_a_scheduler_that_cannot_be_saved_is_refused_before_the_first_epoch(tmp_path):
    for out in (tmp_path / "run", None):
        with Trainer(
            Gcn(), graph(), train=settings(), report=QUIET, out=out, scheduler=HoldsAnObject
        ) as trainer:
            if out is None:
                trainer.fit(1)
                continue
            with pytest.raises(CheckpointError, match=r"a builtins\.object .* in the scheduler's state_dict"):
                trainer.fit(1)
            assert trainer.epoch == 0


def test_what_epochs_handed_on_and_nobody_can_use_is_an_error_of_ours(tmp_path):
    """Edited on purpose, with a right checksum."""
    with Trainer(Gcn(), graph(), train=settings(), report=QUIET, out=tmp_path / "run") as trainer:
        trainer.fit(2)
    folder = latest(tmp_path / "run")
    rest = (folder / "rest.json").read_text()
    assert '[["drifted", 0.0]' in rest or '"drifted", 0.0' in rest
    (folder / "rest.json").write_text(rest.replace('"drifted", 0.0', '"drifted", "much"'))
    facts = json.loads((folder / checkpoint.PAGE).read_text())
    facts.pop(sealed_files.SEAL)
    facts["files"]["rest.json"] = list(vars(sealed_files._seal_of(folder / "rest.json")).values())
    sealed_files.write_page(folder / checkpoint.PAGE, facts)
    with (
        pytest.raises(CheckpointError, match=r"does not fit: ValueError.*drifted is 'much'"),
        Trainer(Gcn(), graph(), train=settings(), report=QUIET) as trainer,
    ):
        trainer.fit(3, resume=tmp_path / "run")
