"""Activations that wait elsewhere: the same gradients to the bit, memory given back, nothing left behind."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from kagome import Parallel, Trainer
from kagome.comm.channel import Channel
from kagome.components import offload
from kagome.components.offload import Offload, _InFile
from kagome.errors import ConfigError
from training import QUIET, graph, losses, model, settings

CPU = torch.device("cpu")
ROWS = 2_000
"""Rows so many that a layer's are moved."""


def disk(stays: Callable[[Tensor], bool] = lambda tensor: False) -> Offload:
    return Offload(Parallel(activations="disk"), CPU, stays)


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 4))


def gradients(module: nn.Module, x: Tensor, moved: Offload) -> list[Tensor]:
    with moved.saving():
        out = module(x)
    out.square().sum().backward()
    return [p.grad.clone() for p in module.parameters() if p.grad is not None]


@pytest.mark.parametrize("where", ["device", "disk"])
def test_gradients_are_the_same_to_the_bit(where: Any) -> None:
    x = torch.randn(ROWS, 16)
    plain = gradients(layers(), x, Offload(Parallel(), CPU, lambda tensor: False))
    moved = Offload(Parallel(activations=where), CPU, lambda tensor: False)
    for one, other in zip(plain, gradients(layers(), x, moved), strict=True):
        assert torch.equal(one, other)
    assert (moved.most > 0) == (where == "disk")


def test_memory_is_given_back_until_backward() -> None:
    """What was saved is in a file: the tensor's own memory is gone while its node still lives."""
    x = torch.randn(ROWS, 32, requires_grad=True)
    with disk().saving():
        inner = x * 2
        out = inner.sin()
    storage = StorageWeakRef(inner.untyped_storage())
    del inner
    assert storage.expired()
    (grad,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(grad, 2 * (2 * x.detach()).cos())


def test_one_that_two_nodes_save_goes_once() -> None:
    moved, x = disk(), torch.randn(ROWS, 32, requires_grad=True)
    with moved.saving():
        inner = x * 2
        out = inner.sin() + inner.cos()
    assert moved.most == ROWS * 32 * 4
    out.sum().backward()
    expected = 2 * ((2 * x).cos() - (2 * x).sin())
    torch.testing.assert_close(x.grad, expected.detach())


def test_weights_what_is_kept_anyhow_and_small_ones_stay() -> None:
    features, weight = torch.randn(ROWS, 64), torch.randn(64, 300, requires_grad=True)
    moved = disk(lambda tensor: tensor is features)
    with moved.saving():
        out = features @ weight
        small = (out[:4] * out[:4]).sum()
    assert moved.most == 0
    small.backward()
    assert weight.grad is not None


def test_files_have_no_name_and_a_full_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    kept = _InFile(torch.randn(ROWS, 32), str(tmp_path))
    assert list(tmp_path.iterdir()) == []
    assert kept.back().shape == (ROWS, 32)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(offload.os, "posix_fallocate", full)
    with pytest.raises(ConfigError, match=r"256,000 bytes of room in(.|\n)*free(.|\n)*TMPDIR"):
        _InFile(torch.randn(ROWS, 32), str(tmp_path))


def run(channel: Channel, name: str, cut: dict[str, Any]) -> dict[str, Any]:
    mine = model(name, 0.4)
    with Trainer(
        mine,
        graph(torch.float32, 6_000),
        parallel=Parallel(**cut),
        train=settings(epochs=3, check=True),
        report=QUIET,
    ) as trainer:
        summary = trainer.fit()
        return {"losses": losses(trainer), "moved": summary.get("activations_moved_bytes")}


@pytest.mark.some(2)
@pytest.mark.parametrize("name", ["gcn", "gat"])
@pytest.mark.parametrize(
    "cut", [{}, {"graph": 2}, {"tensor": 2, "memory_gib": 0.01}, {"pipe": 2, "chunks": 2}]
)
def test_a_run_does_not_know_where_its_activations_wait(
    ranks: Callable[..., list], name: str, cut: dict[str, Any]
) -> None:
    size = cut.get("graph", cut.get("tensor", cut.get("pipe", 1)))
    here, there = (ranks(size, run, name, {**cut, "activations": way})[0] for way in ("device", "disk"))
    assert here["losses"] == there["losses"]
    assert here["moved"] is None
    assert there["moved"] > 0


def test_host_memory_is_where_a_cpu_s_are_already(ranks: Callable[..., list]) -> None:
    assert ranks(1, run, "gcn", {"activations": "host"})[0]["moved"] is None


def test_layers_that_run_again_have_nothing_to_move() -> None:
    cut = Parallel(activations="disk")
    with (
        pytest.raises(ConfigError, match="recompute=True, which lets them save nothing"),
        Trainer(model("gcn"), graph(), parallel=cut, train=settings(), report=QUIET, recompute=True),
    ):
        pass
