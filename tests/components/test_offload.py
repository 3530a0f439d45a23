"""Activations that wait elsewhere: the same gradients to the bit, memory given back, nothing left behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from kagome import Parallel, Trainer
from kagome.comm.channel import Channel
from kagome.components.offload import Offload, _InHost
from kagome.errors import ConfigError
from training import QUIET, graph, host_apart, losses, model, settings

CPU, GPU = torch.device("cpu"), torch.device("cuda")
"""Tensors here are on the CPU; whose device is said to be a GPU moves them all the same."""
ROWS = 2_000
"""Rows so many that a layer's are moved."""


def host(stays: Callable[[Tensor], bool] = lambda tensor: False, device: torch.device = GPU) -> Offload:
    return Offload(Parallel(activations="host"), device, stays)


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 4))


def gradients(module: nn.Module, x: Tensor, moved: Offload) -> list[Tensor]:
    with moved.saving():
        out = module(x)
    out.square().sum().backward()
    return [p.grad.clone() for p in module.parameters() if p.grad is not None]


@pytest.mark.parametrize("device", [CPU, GPU])
def test_gradients_are_the_same_to_the_bit(device: torch.device) -> None:
    x, moved = torch.randn(ROWS, 16), host(device=device)
    plain = gradients(layers(), x, Offload(Parallel(), GPU, lambda tensor: False))
    for one, other in zip(plain, gradients(layers(), x, moved), strict=True):
        assert torch.equal(one, other)
    assert (moved.most > 0) == (device == GPU)


def test_a_limit_of_memory_moves_them_on_a_gpu_alone() -> None:
    wanted = [
        (Parallel(tensor=2, memory_gib=1.0), GPU, True),
        (Parallel(tensor=2, memory_gib=1.0), CPU, False),
        (Parallel(tensor=2, memory_gib=1.0, activations="device"), GPU, False),
        (Parallel(), GPU, False),
    ]
    for cut, device, moves in wanted:
        assert Offload(cut, device, lambda tensor: False).moves == moves, cut


def test_memory_is_given_back_until_backward() -> None:
    """What was saved is a copy: the tensor's own memory is gone while its node still lives."""
    x = torch.randn(ROWS, 32, requires_grad=True)
    with host().saving():
        inner = x * 2
        out = inner.sin()
    storage = StorageWeakRef(inner.untyped_storage())
    del inner
    assert storage.expired()
    (grad,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(grad, 2 * (2 * x.detach()).cos())


def test_one_that_two_nodes_save_goes_once() -> None:
    moved, x = host(), torch.randn(ROWS, 32, requires_grad=True)
    with moved.saving():
        inner = x * 2
        out = inner.sin() + inner.cos()
    assert moved.most == ROWS * 32 * 4
    out.sum().backward()
    expected = 2 * ((2 * x).cos() - (2 * x).sin())
    torch.testing.assert_close(x.grad, expected.detach())


def test_weights_what_is_kept_anyhow_and_small_ones_stay() -> None:
    features, weight = torch.randn(ROWS, 64), torch.randn(64, 300, requires_grad=True)
    moved = host(lambda tensor: tensor is features)
    with moved.saving():
        out = features @ weight
        small = (out[:4] * out[:4]).sum()
    assert moved.most == 0
    small.backward()
    assert weight.grad is not None


def run(channel: Channel, name: str, cut: dict[str, Any]) -> dict[str, Any]:
    mine = model(name, 0.4)
    with (
        host_apart(),
        Trainer(
            mine,
            graph(torch.float32, 6_000),
            parallel=Parallel(**cut),
            train=settings(epochs=3, check=True),
            report=QUIET,
        ) as trainer,
    ):
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
    here, there = (ranks(size, run, name, {**cut, "activations": way})[0] for way in ("device", "host"))
    assert here["losses"] == there["losses"]
    assert here["moved"] is None
    assert there["moved"] > 0


def test_layers_that_run_again_have_nothing_to_move() -> None:
    cut = Parallel(activations="host")
    with (
        pytest.raises(ConfigError, match="recompute=True, which lets them save nothing"),
        Trainer(model("gcn"), graph(), parallel=cut, train=settings(), report=QUIET, recompute=True),
    ):
        pass


class OnGpu:
    """A tensor that says it is on a GPU, as far as a copy to the host asks."""

    device = GPU

    def detach(self) -> str:
        return "what was saved"


def test_a_gpu_copies_to_pinned_memory_while_the_host_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A copy to other memory, or one without ``non_blocking``, waits until the GPU has done all before it."""
    calls: list[Any] = []

    class Pinned:
        def copy_(self, source: Any, non_blocking: bool) -> None:
            calls.append((source, non_blocking))

        def to(self, device: torch.device, non_blocking: bool) -> str:
            calls.append((device, non_blocking))
            return "on the device"

    def made(like: Any, device: str, requires_grad: bool, pin_memory: bool) -> Pinned:
        calls.append((device, pin_memory))
        return Pinned()

    monkeypatch.setattr(torch, "empty_like", made)
    assert _InHost(OnGpu()).back() == "on the device"  # type: ignore[arg-type]
    assert calls == [("cpu", True), ("what was saved", True), (GPU, True)]
