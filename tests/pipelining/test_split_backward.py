"""A backward in two halves gives the gradients of one; the first half leaves weights alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from kagome.errors import ModelError
from kagome.model.operators.split_backward import SplitBackward

Case = tuple[nn.Module, Callable[[nn.Module, Tensor, Tensor], Sequence[Tensor]]]


class Doubled(torch.autograd.Function):
    """A user's function, which cannot compute one gradient alone."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return 2 * x * weight

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return 2 * gradient * weight, (2 * gradient * x).sum(0)


class User(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        return Doubled.apply(x, self.weight)


class Named(torch.autograd.Function):
    """A user's function, with an attribute that torch gives the nodes of weights."""

    @staticmethod
    def forward(ctx, x: Tensor, variable: str) -> Tensor:
        ctx.variable = variable
        return 3 * x

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return 3 * gradient, None


def layers(*more: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 6), *more, nn.Linear(6, 6))


def hooked(m: nn.Module, x: Tensor) -> Tensor:
    """Hooks on values, as a layer that scales its gradients has them."""
    first = m[0](x)
    first.register_hook(lambda gradient: 2 * gradient)
    beside = m[2](torch.ones(2, 6))
    beside.register_hook(lambda gradient: 3 * gradient)
    return m[1](first) * beside


def recomputed(m: nn.Module, x: Tensor, *, reentrant: bool) -> Tensor:
    return m[2](checkpoint(nn.Sequential(m[0], m[1]), x, use_reentrant=reentrant))


CASES: dict[str, Callable[[], Case]] = {
    "a chain": lambda: (layers(nn.Tanh(), nn.LayerNorm(6)), lambda m, x, y: [m(x)]),
    "in place": lambda: (layers(nn.ReLU(inplace=True)), lambda m, x, y: [m(x)]),
    "a view at the end": lambda: (layers(), lambda m, x, y: [m(x).view(3, 4), m(y)[:, :2]]),
    "one layer twice on a path": lambda: (layers(nn.Tanh()), lambda m, x, y: [m(m(m(x)))]),
    "groups that share a path": lambda: (
        layers(nn.Linear(6, 6)),
        lambda m, x, y: [m[0](m[1](m[0](m[2](m[1](x)))))],
    ),
    "beside all paths": lambda: (layers(), lambda m, x, y: [m[0](x), m[1](torch.ones(2, 6)) + m[0].bias]),
    "one behind another": lambda: (
        layers(),
        lambda m, x, y: [h := m[0](torch.ones(2, 6)), h, m[1](h).tanh()],
    ),
    "a path into one beside": lambda: (
        layers(),
        lambda m, x, y: [h := m[0](torch.ones(2, 6)), m[1](h * x) + h],
    ),
    "pieces of one value": lambda: (layers(), lambda m, x, y: list(m(torch.ones(2, 6)).split(3, 1))),
    "passed on": lambda: (layers(), lambda m, x, y: [x, m(x)]),
    "a sum over both": lambda: (layers(), lambda m, x, y: [(m(x) * m[0](y)).sum()]),
    "frozen": lambda: (layers(nn.Linear(6, 6).requires_grad_(False)), lambda m, x, y: [m(x)]),
    "weight norm": lambda: (layers(weight_norm(nn.Linear(6, 6))), lambda m, x, y: [m(m(x))]),
    "recurrent": lambda: (nn.GRU(6, 6, 2), lambda m, x, y: list(m(torch.stack([x, y])))),
    "attention": lambda: (
        nn.MultiheadAttention(6, 2),
        lambda m, x, y: [m(x, y, y)[0]],
    ),
    "a function of a user's": lambda: (layers(User()), lambda m, x, y: [m(x)]),
    "an attribute of a user's": lambda: (
        layers(),
        lambda m, x, y: [m[1](Named.apply(m[0](torch.ones(2, 6)), "relu")) * x],
    ),
    "hooks on values": lambda: (layers(nn.Linear(6, 6)), lambda m, x, y: [hooked(m, x)]),
    "sparse gradients": lambda: (
        nn.ModuleList([nn.Embedding(8, 6, sparse=True), nn.Linear(6, 6)]),
        lambda m, x, y: [m[1](x * m[0](torch.tensor([3, 3]))) + m[0](torch.tensor([3, 4]))],
    ),
    "recomputed": lambda: (layers(nn.Tanh()), lambda m, x, y: [recomputed(m, x, reentrant=False)]),
}


def dense(found: Tensor) -> Tensor:
    return found.to_dense() if found.is_sparse else found


def gradients(case: str, how: str) -> list[Tensor | None]:
    """All gradients after two micro-batches of a case."""
    torch.manual_seed(3)
    module, run = CASES[case]()
    module.double()
    found: list[Tensor | None] = []
    for _ in range(2):
        x, y = (torch.randn(2, 6, dtype=torch.float64, requires_grad=True) for _ in range(2))
        torch.set_default_dtype(torch.float64)
        try:
            roots = [root for root in run(module, x, y) if root.requires_grad]
        finally:
            torch.set_default_dtype(torch.float32)
        given = [None if root.dim() == 0 else torch.randn_like(root) for root in roots]
        if how == "whole":
            torch.autograd.backward(roots, given)
        else:
            before = [None if p.grad is None else p.grad.clone() for p in module.parameters()]
            split = SplitBackward(roots, given, [x, y])
            split.inputs()
            for weight, old in zip(module.parameters(), before, strict=True):
                if weight.dim() > 1:
                    assert (weight.grad is None) == (old is None)
                    assert old is None or torch.equal(dense(weight.grad), dense(old)), (
                        "the first half is for inputs and vectors alone"
                    )
            early = [None if leaf.grad is None else leaf.grad.clone() for leaf in (x, y)]
            split.weights()
            for leaf, old in zip((x, y), early, strict=True):
                assert old is None or torch.equal(leaf.grad, old), "the second half is for weights alone"
        found += [x.grad, y.grad]
    return found + [weight.grad for weight in module.parameters()]


@pytest.mark.parametrize("case", CASES)
def test_two_halves_are_a_whole(case: str) -> None:
    whole, split = gradients(case, "whole"), gradients(case, "split")
    assert any(each is not None for each in whole)
    for one, other in zip(whole, split, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(other, one, rtol=0, atol=1e-12)


def test_a_reentrant_checkpoint_is_refused_by_name() -> None:
    m, x = layers(nn.Tanh()), torch.randn(2, 6, requires_grad=True)
    with pytest.raises(ModelError, match="use_reentrant=True"):
        SplitBackward([recomputed(m, x, reentrant=True)], [torch.ones(2, 6)], [x])
