"""Kind 10: what a model computes in backward: hooks of tensors and modules, own autograd functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import register_multi_grad_hook
from torch_geometric.data import Data

from by_hand import graph
from cases import Case, with_targets

FEATURES, WIDTH, OUT = 6, 8, 4
Hook = Callable[[Tensor], Any]


def data() -> Data:
    """The sample graph with float targets."""
    return with_targets(graph())


class Two(nn.Module):
    """Two convolutions, and between them what a case does with the hidden rows."""

    def __init__(self, middle: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.one, self.lin, self.two = (
            pyg.SAGEConv(FEATURES, WIDTH),
            nn.Linear(WIDTH, WIDTH),
            pyg.SAGEConv(WIDTH, OUT),
        )
        self.middle, self.seen = middle, list[Any]()

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = self.one(x, edge_index).tanh()
        return self.two(self.middle(self, h, edge_index), edge_index)


def hooked(hook: Hook, of: Callable[[Tensor], Tensor] = lambda h: h * 1) -> Case:
    """A hook of what is made of the hidden rows, which is added to them."""

    def middle(model: Any, h: Tensor, edge_index: Tensor) -> Tensor:
        made = of(h)
        if made.requires_grad:
            made.register_hook(hook)
        return h + made

    return Case(partial(Two, middle), data)


class Late(Two):
    """A hook that is put there in the third epoch, when no check looks."""

    def __init__(self) -> None:
        super().__init__(lambda model, h, edge_index: model.late(h * 1))
        self.epoch = 0

    def late(self, h: Tensor) -> Tensor:
        self.epoch += self.training
        if self.epoch >= 3 and h.requires_grad:
            h.register_hook(lambda g: g - g.mean(0))
        return h


def applied(function: Callable[..., Tensor]) -> Case:
    """An autograd function of the hidden rows."""
    return Case(partial(Two, lambda model, h, edge_index: h + function(h)), data)


def watched(put: Callable[[Any], Any]) -> Case:
    """Hooks on a linear layer in the middle, or on the convolutions beside it."""

    def build() -> nn.Module:
        model = Two(lambda model, h, edge_index: model.lin(h))
        put(model)
        return model

    return Case(build, data)


def middle(function: Callable[[Any, Tensor, Tensor], Tensor]) -> Case:
    """Something else in the middle."""
    return Case(partial(Two, function), data)


class Reverse(Function):
    """Gradient reversal, as domain adaptation has it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, alpha: float) -> Tensor:
        ctx.alpha = alpha
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return -ctx.alpha * grad, None


class Same(Function):
    """Gradient reversal whose forward returns what it is given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.neg() * 0.3


reverse, same = Reverse.apply, Same.apply  # bound before any training, as users do


class Sign(Function):
    """A straight-through estimator: the gradient of what lies within 1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        grad = grad.clone()
        grad[x.abs() > 0.5] = 0
        return grad


class Rounded(Function):
    """A straight-through estimator that passes all on, clamped."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (x * 4).round() / 4

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return F.hardtanh(grad, -0.001, 0.001)


class Exponent(Function):
    """A function that saves its output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = x.exp()
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.saved_tensors[0]


class ByOutput(Exponent):
    """Its backward looks at all rows of the output that it saved."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad / ctx.saved_tensors[0].norm()


class ByInput(Sign):
    """Its backward looks at all rows of the input that it saved."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad / ctx.saved_tensors[0].abs().max()


class Softmax(Function):
    """A softmax of each row by hand, with ``setup_context``."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.softmax(-1)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return y * (grad - (grad * y).sum(-1, keepdim=True))


class Linear(Function):
    """The linear layer of PyTorch's notes: gradients of weights are sums over rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t() + bias

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x, grad.sum(0)


class MeanLinear(Linear):
    """The gradient of the weight is a mean over rows."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x, grad.mean(0)


class SmoothedLinear(Linear):
    """The gradient of the rows has their mean taken away, by a sum."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return (grad - grad.sum(0) / 30) @ weight, grad.t() @ x, grad.sum(0)


class Normalised(Function):
    """The gradient is divided by its norm."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad / (grad.norm() + 1e-12)


class Mean(Function):
    """A mean over all rows, whose backward gives each row its part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.rows = x.size(0)
        return x.mean(0, keepdim=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.expand(ctx.rows, -1) / ctx.rows


class Steep(Function):
    """A sign of weights whose gradient is clamped."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.clamp(-0.001, 0.001)


class Reversal(nn.Module):
    """Gradient reversal as a module of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return reverse(x, 0.5)


def messages(hook: Hook) -> Case:
    """A hook of a row an edge."""

    def passed(model: Any, h: Tensor, edge_index: Tensor) -> Tensor:
        rows = h[edge_index[0]] * 0.1
        if rows.requires_grad:
            rows.register_hook(hook)
        return h.index_add(0, edge_index[1], rows)

    return middle(passed)


def several(hook: Callable[[Any], Any]) -> Case:
    """A hook that runs once several gradients are there."""

    def both(model: Any, h: Tensor, edge_index: Tensor) -> Tensor:
        one, two = h * 1, h.sin()
        if h.requires_grad:
            register_multi_grad_hook((one, two), hook)
        return one + two

    return middle(both)


def counting() -> Case:
    """A hook that counts, keeps its gradients and returns nothing."""

    def noted(model: Any, h: Tensor, edge_index: Tensor) -> Tensor:
        def hook(grad: Tensor) -> None:
            model.seen.append((grad.shape[1], grad.clone()))

        h = h * (1 + 0.1 * len(model.seen))
        if h.requires_grad:
            h.register_hook(hook)
        return h

    return middle(noted)


def in_place(grad: Tensor) -> None:
    grad.mul_(0.5).clamp_(-0.01, 0.01)


def scaled(grads: Any) -> Any:
    return tuple(grad * 0.5 for grad in grads)


def mean(h: Tensor) -> Tensor:
    return h.mean(0, keepdim=True)


def signed(model: Any, h: Tensor, edge_index: Tensor, function: Any = Sign) -> Tensor:
    """Rows times the signs of weights: a binarised layer."""
    return F.linear(h, function.apply(model.lin.weight), model.lin.bias)


def reversed_mean(model: Any, h: Tensor, edge_index: Tensor) -> Tensor:
    return h + same(h).mean(0)


def of_model(function: Any) -> Case:
    """A linear layer by hand."""
    return middle(lambda model, h, edge_index: function.apply(h, model.lin.weight, model.lin.bias))


def with_module(model: Any) -> None:
    model.lin = nn.Sequential(nn.Linear(WIDTH, WIDTH), Reversal())


SERVED: dict[str, Case] = {
    "a reversed gradient": applied(lambda h: reverse(h, 0.5)),
    "a reversed gradient, a module": watched(with_module),
    "a reversed gradient, a hook": hooked(lambda g: -0.5 * g),
    "a reversed gradient of a mean": hooked(lambda g: -0.5 * g, mean),
    "columns of a mean's gradient, one after another": hooked(
        lambda g: torch.cat([g[:, :4], 2 * g[:, 4:]], 1), mean
    ),
    "columns of a mean's gradient, stacked": hooked(
        lambda g: torch.stack([g[0], -g[0]], 0).sum(0)[None], mean
    ),
    "a reversed gradient, as it is given, of a mean": middle(reversed_mean),
    "a clamped gradient": hooked(lambda g: g.clamp(-0.001, 0.001)),
    "a clamped gradient, in place": hooked(in_place),
    "no number is replaced": hooked(lambda g: torch.nan_to_num(g) * 2),
    "rows of length 1": hooked(lambda g: F.normalize(g, dim=1) * 0.01),
    "rows clipped by their norm": hooked(
        lambda g: g * (0.002 / (g.norm(dim=-1, keepdim=True) + 1e-9)).clamp(max=1)
    ),
    "times the number of rows": hooked(lambda g: g * g.size(0) / 60),
    "a gradient of one number": hooked(lambda g: torch.full(g.shape, 0.01)),
    "a hook prints the shape": hooked(lambda g: print(g.shape)),
    "a hook counts": counting(),
    "messages clamped": messages(lambda g: g.clamp(-0.001, 0.001)),
    "a hook of two gradients": several(lambda grads: None),
    "a straight-through sign": applied(Sign.apply),
    "a straight-through sign of weights": middle(signed),
    "straight through, clamped": applied(Rounded.apply),
    "a saved output": applied(Exponent.apply),
    "a softmax by hand": applied(Softmax.apply),
    "a linear layer by hand": of_model(Linear),
    "a module's hook clamps": watched(
        lambda m: m.lin.register_full_backward_hook(lambda _, back, given: (back[0].clamp(-0.001, 0.001),))
    ),
    "a module's hook counts": watched(
        lambda m: m.lin.register_full_backward_hook(lambda _, back, given: m.seen.append(len(back)))
    ),
    "a module's hook before backward": watched(
        lambda m: m.lin.register_full_backward_pre_hook(lambda _, given: scaled(given))
    ),
    "a convolution's hook scales": watched(
        lambda m: m.two.register_full_backward_hook(lambda _, back, given: (back[0] * 0.5, *back[1:]))
    ),
    "a convolution's hook counts": watched(
        lambda m: m.two.register_full_backward_hook(lambda _, back, given: m.seen.append(len(given)))
    ),
}
REFUSED: dict[str, Case] = {
    "a gradient of length 1": hooked(lambda g: g / g.norm()),
    "a gradient less its mean": hooked(lambda g: g - g.mean(0)),
    "a gradient less its sum": hooked(lambda g: g - g.sum(0) / 30),
    "a gradient clipped by its norm": hooked(lambda g: g * (0.045 / (g.norm() + 1e-12)).clamp(max=1)),
    "columns of length 1": hooked(lambda g: F.normalize(g, dim=0)),
    "a gradient by its largest, in Python": hooked(lambda g: g * 0.5 if float(g.abs().max()) > 1e-9 else g),
    "a gradient out of torch": hooked(lambda g: torch.from_numpy(g.numpy() / abs(g.numpy()).max())),
    "a gradient that goes on": hooked(lambda g: g.cumsum(0)),
    "a gradient with noise": replace(hooked(lambda g: g + 0.01 * torch.randn_like(g)), draws=True),
    "a gradient less its first row": hooked(lambda g: g - g[0]),
    "a gradient in order": hooked(lambda g: g.sort(0).values),
    "a clamped gradient of a mean": hooked(lambda g: g.clamp(-0.001, 0.001), mean),
    "a gradient of a mean, of length 1": hooked(lambda g: g / g.norm(), mean),
    "messages' gradients of length 1": messages(lambda g: g / g.norm()),
    "a hook of two gradients that looks at all": several(lambda grads: grads[0].div_(grads[0].norm())),
    "a function of length 1": applied(Normalised.apply),
    "a function by its saved output": applied(ByOutput.apply),
    "a function by its saved input": applied(ByInput.apply),
    "a mean by hand": applied(Mean.apply),
    "a linear layer whose bias has a mean": of_model(MeanLinear),
    "a linear layer by hand, smoothed": of_model(SmoothedLinear),
    "a sign of weights, clamped": middle(partial(signed, function=Steep)),
    "a module's hook by the largest": watched(
        lambda m: m.lin.register_full_backward_hook(lambda _, back, given: (back[0] / back[0].abs().max(),))
    ),
    "a module's hook before backward, of length 1": watched(
        lambda m: m.lin.register_full_backward_pre_hook(lambda _, given: (given[0] / given[0].norm(),))
    ),
    "a module's hook by what was given": watched(
        lambda m: m.lin.register_full_backward_hook(lambda _, back, given: (back[0] / given[0].norm(),))
    ),
    "a convolution's hook of length 1": watched(
        lambda m: m.two.register_full_backward_hook(
            lambda _, back, given: (back[0] / back[0].norm(), *back[1:])
        )
    ),
}
CASES = SERVED | REFUSED
