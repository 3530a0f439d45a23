"""The fake device: its memory and draws are its own, it refuses what CUDA refuses, and it counts."""

from __future__ import annotations

from typing import Any

import torch
from bed import library, waits
from torch import nn


def computed() -> dict[str, Any]:
    x = torch.arange(6.0).view(2, 3).to("cuda:1").requires_grad_()
    y = (x @ x.T).relu()
    y.sum().backward()
    assert x.grad is not None
    return {"device": str(y.device), "y": y.detach().cpu(), "grad": x.grad.cpu()}


def test_it_computes_what_the_cpu_computes(devices):
    (found,) = devices.run(1, computed)
    x = torch.arange(6.0).view(2, 3)
    assert found["device"] == "cuda:1"
    assert torch.equal(found["y"], x @ x.T)
    assert torch.equal(found["grad"], 2 * x.sum(0).expand(2, 3))


def refused() -> list[str]:
    here, there, host = torch.ones(3, device="cuda:0"), torch.ones(3, device="cuda:1"), torch.ones(3)
    found = []
    for wrong in (
        lambda: here + there,
        lambda: here + host,
        lambda: host[torch.tensor([0], device="cuda")],
        lambda: here.numpy(),
        lambda: torch.randn(2, device="cuda", generator=torch.Generator()),
        lambda: torch.empty(2**40, device="cuda"),
        lambda: torch.cuda.set_device(9),
    ):
        try:
            wrong()
        except (RuntimeError, TypeError, IndexError) as error:
            found.append(str(error))
    return found


def test_it_refuses_what_cuda_refuses(devices):
    (found,) = devices.run(1, refused)
    for text, said in zip(
        found,
        [
            "found at least two devices, cuda:0 and cuda:1",
            "found at least two devices, cuda:0 and cpu",
            "indices should be either on cpu or on the same device",
            "can't convert cuda:0 device type tensor to numpy",
            "Expected a 'cuda' device type for generator",
            "CUDA out of memory",
            "invalid device ordinal",
        ],
        strict=True,
    ):
        assert said in text


def counted() -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    x = torch.arange(4.0, device="cuda")
    pinned = torch.ones(4).pin_memory()
    library().take()
    waits().take()
    (x.view(2, 2) + 1).relu()
    x[x > 1] = 0.0
    x.copy_(pinned, non_blocking=True)
    quiet = library().take()
    x.sum().item()
    x[x > 0]
    x.copy_(torch.ones(4))
    torch.cuda.synchronize()
    event = torch.cuda.Event()
    event.record()
    event.synchronize()
    return quiet, library().take(), waits().take()


def test_it_counts_operators_copies_and_waits(devices):
    ((quiet, loud, places),) = devices.run(1, counted)
    assert quiet == {
        "copy:to device": 1,
        **{f"launch:{name}": 1 for name in ("add", "relu", "gt", "_index_put_impl_")},
    }
    assert {name: n for name, n in loud.items() if name.startswith("wait")} == {
        "wait:item:_local_scalar_dense": 1,
        "wait:size:nonzero": 1,
        "wait:to device:copy_": 1,
        "wait:synchronize:device": 1,
        "wait:synchronize:event": 1,
    }
    assert all(place.startswith("elsewhere") for place in places)
    assert sum(places.values()) == 5


def accounted() -> dict[str, Any]:
    torch.accelerator.set_device_index(2)
    before = torch.accelerator.memory_allocated()
    free = torch.accelerator.get_memory_info()[0]
    fresh = torch.empty(1000, device="cuda")
    found = {
        "device": str(fresh.device),
        "more": torch.cuda.memory_allocated() - before,
        "less": free - torch.cuda.mem_get_info()[0],
        "poisoned": bool(fresh.isnan().all()),
        "name": torch.cuda.get_device_properties(2).name,
    }
    del fresh
    return {
        **found,
        "left": torch.cuda.memory_allocated() - before,
        "peak": torch.cuda.max_memory_allocated() > 0,
    }


def test_memory_is_accounted_and_poisoned(devices):
    (found,) = devices.run(1, accounted)
    assert found == {
        "device": "cuda:2",
        "more": 4096,
        "less": 4096,
        "poisoned": True,
        "name": "Fake GPU",
        "left": 0,
        "peak": True,
    }


def drawn() -> list[torch.Tensor]:
    def draw() -> torch.Tensor:
        return torch.randn(3, device="cuda").cpu()

    torch.manual_seed(3)
    first, state = draw(), torch.cuda.get_rng_state()
    second = draw()
    torch.cuda.set_rng_state(state)
    again = draw()
    torch.manual_seed(3)
    return [first, draw(), second, again, torch.randn(3)]


def test_draws_are_the_devices_own(devices):
    (found,) = devices.run(1, drawn)
    first, seeded, second, again, host = found
    assert torch.equal(first, seeded)
    assert torch.equal(second, again)
    assert not torch.equal(first, host)


def cells() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Outputs and gradients of the layers that PyTorch fuses on a GPU, beside the CPU's."""
    pairs = []
    for make in (nn.GRU, nn.LSTM):
        torch.manual_seed(1)
        here = make(3, 4).double()
        there = make(3, 4).double()
        there.load_state_dict(here.state_dict())
        x = torch.randn(5, 2, 3, dtype=torch.float64)
        outs = [layer(x.to(next(layer.parameters()).device))[0] for layer in (here, there.cuda())]
        for out in outs:
            out.pow(2).sum().backward()
        pairs += [(a, b.cpu()) for a, b in [outs]]
        pairs += [(a.grad, b.grad.cpu()) for a, b in zip(here.parameters(), there.parameters(), strict=True)]
    return [(a.detach(), b.detach()) for a, b in pairs]


def test_fused_cells(devices):
    (found,) = devices.run(1, cells)
    for here, there in found:
        torch.testing.assert_close(there, here, rtol=1e-12, atol=1e-12)
