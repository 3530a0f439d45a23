"""Kind 6: what reads all weights: the loss, forward, the optimizer; also those that another rank trains."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim import SGD, Optimizer
from torch_geometric.data import Data

from by_hand import graph
from cases import Case, with_targets
from weight_readers import PENALTIES, Net, optimizer_of

FEATURES, WIDTH, OUT = 6, 8, 4
Penalty = Callable[[Any], Tensor]


def data() -> Data:
    """The sample graph with float targets."""
    return with_targets(graph())


def error(out: Tensor, y: Tensor) -> Tensor:
    """The mean squared error of each row."""
    return F.mse_loss(out, y, reduction="none").mean(1)


def penalised(build: Callable[[], nn.Module], penalty: Penalty, **more: Any) -> Case:
    """A penalty on weights, added to the loss."""

    def loss(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda out, y: error(out, y) + 0.01 * penalty(model)

    def plain(model: nn.Module, out: Tensor, data: Data) -> Tensor:
        chosen = data.train_mask
        return error(out[chosen], data.y[chosen]).mean() + 0.01 * penalty(model)

    return Case(build, data, plain=plain, loss=loss, **more)


def net(inside: str = "") -> nn.Module:
    """Four layers."""
    return Net(inside, FEATURES, OUT)


class Three(nn.Module):
    """Three layers whose weights a case does something with."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(FEATURES, WIDTH)
        self.one, self.two = pyg.SAGEConv(WIDTH, WIDTH), pyg.SAGEConv(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, OUT)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = self.one(self.inp(x).tanh(), edge_index).tanh()
        return self.out(self.two(h, edge_index).tanh())


class Wrapper(nn.Module):
    """A model in another that shows its first weight and the norm of all as properties."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Three()

    @property
    def first(self) -> Tensor:
        return self.net.inp.weight

    @property
    def norm(self) -> Tensor:
        return torch.stack([p.square().sum() for p in self.net.parameters()]).sum()

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.net(x, edge_index)


class Lightning(Wrapper):
    """A wrapper whose method gives the penalty."""

    def regulariser(self) -> Tensor:
        return sum(m.weight.abs().sum() for m in self.modules() if isinstance(m, nn.Linear))


class Tied(nn.Module):
    """The last layer has the first one's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(FEATURES, WIDTH)
        self.inp, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.one, self.two = pyg.SAGEConv(WIDTH, WIDTH), pyg.SAGEConv(WIDTH, OUT)
        self.out.weight = self.inp.weight

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = self.one(self.inp(self.embed(x)).tanh(), edge_index).tanh()
        return self.two(self.out(h).tanh(), edge_index)


class TiedTransposed(nn.Module):
    """An autoencoder whose decoder is its encoder, transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(FEATURES, WIDTH)
        self.one, self.two = pyg.SAGEConv(WIDTH, WIDTH), pyg.SAGEConv(WIDTH, WIDTH)
        self.last = nn.Linear(FEATURES, OUT)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = self.two(self.one(self.inp(x).tanh(), edge_index).tanh(), edge_index)
        return self.last(F.linear(h, self.inp.weight.t()))


class SharedLayer(nn.Module):
    """One convolution, run three times."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.conv, self.out = (
            nn.Linear(FEATURES, WIDTH),
            pyg.SAGEConv(WIDTH, WIDTH),
            nn.Linear(WIDTH, OUT),
        )

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = self.inp(x).tanh()
        for _ in range(3):
            h = self.conv(h, edge_index).tanh()
        return self.out(h)


def changed(change: Callable[[Three], Any]) -> Callable[[], nn.Module]:
    """Three layers that something is done to."""

    def build() -> nn.Module:
        model = Three()
        change(model)
        return model

    return build


class Symmetric(nn.Module):
    """A parametrization: the symmetric part."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).t()


class Positive(nn.Module):
    """A parametrization: above 0."""

    def forward(self, weight: Tensor) -> Tensor:
        return F.softplus(weight)


class LowRank(nn.Module):
    """A parametrization: a frozen weight and a product of two small ones (LoRA)."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(rows, 2) * 0.1), nn.Parameter(torch.randn(2, columns) * 0.1)

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.a @ self.b


def low_rank(model: Three) -> None:
    model.inp.weight.requires_grad_(False)
    parametrize.register_parametrization(model.inp, "weight", LowRank(WIDTH, FEATURES))


def pruned(model: Three) -> None:
    prune.l1_unstructured(model.inp, "weight", amount=0.3)
    prune.random_unstructured(model.two.lin_l, "weight", amount=0.0)


class Standardised(Three):
    """Weights standardised in forward."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        weight = self.inp.weight
        weight = (weight - weight.mean(1, keepdim=True)) / weight.std(1, keepdim=True)
        h = self.one(F.linear(x, weight, self.inp.bias).tanh(), edge_index).tanh()
        return self.out(self.two(h, edge_index).tanh())


class Hyper(Three):
    """The last layer's weight is made by another layer from the first one's."""

    def __init__(self) -> None:
        super().__init__()
        self.maker = nn.Linear(WIDTH * FEATURES, OUT * WIDTH)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = self.two(self.one(self.inp(x).tanh(), edge_index).tanh(), edge_index)
        return F.linear(h, self.maker(self.inp.weight.flatten()).view(OUT, WIDTH))


class Called(Three):
    """The layers are run with other weights than their own, by ``torch.func.functional_call``."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        less = {name: 0.9 * p for name, p in self.inp.named_parameters()}
        h = torch.func.functional_call(self.inp, less, (x,)).tanh()
        h = self.one(h, edge_index).tanh()
        return self.out(self.two(h, edge_index).tanh())


class Gains(Three):
    """The gain of the output is a norm of the first weight, kept by forward as a buffer as well."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("norm", torch.ones(()))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        self.norm = self.inp.weight.norm().detach()
        return super().forward(x, edge_index) * self.inp.weight.norm()


class Uncertain(Three):
    """A logarithm of a variance that the loss alone uses."""

    def __init__(self) -> None:
        super().__init__()
        self.log_var = nn.Parameter(torch.zeros(OUT))


def uncertain(model: Any, out: Tensor, y: Tensor) -> Tensor:
    return ((out - y).square() * (-model.log_var).exp() + model.log_var).mean(1)


class Centres(Three):
    """Centres that the loss alone uses."""

    def __init__(self) -> None:
        super().__init__()
        self.centres = nn.Parameter(torch.randn(3, OUT))


def to_centres(model: Any, out: Tensor, y: Tensor) -> Tensor:
    return error(out, y) + 0.1 * torch.cdist(out, model.centres).min(1).values


class Prior(Three):
    """A buffer that the loss reads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("prior", torch.tensor([0.5, 1.0, 2.0, 0.25]))


def by_prior(model: Any, out: Tensor, y: Tensor) -> Tensor:
    return ((out - y).square() * model.prior).mean(1)


class Normed(Three):
    """A batch norm whose running mean the loss reads."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = self.norm(self.one(self.inp(x).tanh(), edge_index)).tanh()
        return self.out(self.two(h, edge_index).tanh())


def by_running(model: Any, out: Tensor, y: Tensor) -> Tensor:
    return error(out, y) * (1 + model.norm.running_mean.square().sum())


class Steps(Three):
    """A counter that forward moves in training and the loss reads: a warm-up."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
        return super().forward(x, edge_index)


def by_steps(model: Any, out: Tensor, y: Tensor) -> Tensor:
    return error(out, y) * model.steps / 10


def own(build: Callable[[], nn.Module], loss: Callable[[Any, Tensor, Tensor], Tensor], **more: Any) -> Case:
    """A loss of the model, the output and the targets."""

    def plain(model: nn.Module, out: Tensor, data: Data) -> Tensor:
        return loss(model, out[data.train_mask], data.y[data.train_mask]).mean()

    return Case(build, data, plain=plain, loss=lambda model: partial(loss, model), **more)


def from_start() -> Case:
    """L2-SP: a penalty on the distance to where training began."""

    def loss(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
        start = [p.detach().clone() for p in model.parameters()]

        def of(out: Tensor, y: Tensor) -> Tensor:
            pairs = zip(model.parameters(), start, strict=True)
            return error(out, y) + torch.stack([(p - q - 0.1).square().sum() for p, q in pairs]).sum()

        return of

    def plain(model: Any, out: Tensor, data: Data) -> Tensor:
        if not hasattr(model, "start"):
            object.__setattr__(model, "start", [p.detach().clone() for p in model.parameters()])
        pairs = zip(model.parameters(), model.start, strict=True)
        away = torch.stack([(p - q - 0.1).square().sum() for p, q in pairs]).sum()
        return error(out[data.train_mask], data.y[data.train_mask]).mean() + away

    return Case(Three, data, plain=plain, loss=loss)


class Taught(nn.Module):
    """A student and a frozen copy of it, its teacher: forward gives both outputs side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.student = Three()
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = self.teacher(x, edge_index)
        return torch.cat([self.student(x, edge_index), wanted], -1)


def taught(model: Any, out: Tensor, y: Tensor) -> Tensor:
    return error(out[:, :OUT], y) + 0.3 * error(out[:, :OUT] * 1.1, out[:, OUT:])


def teaching(model: Any) -> Callable[[Any], Optimizer]:
    """The teacher follows the student after each step."""

    def make(parameters: Any) -> Optimizer:
        made = SGD([p for p in parameters if p.requires_grad], lr=0.05)

        @torch.no_grad()
        def follow(*_: Any) -> None:
            for mean, p in zip(model.teacher.parameters(), model.student.parameters(), strict=True):
                mean.lerp_(p, 0.1)

        made.register_step_post_hook(follow)
        return made

    return make


def hooked(model: nn.Module, change: Callable[[nn.Module], None], when: str) -> Callable[[Any], Optimizer]:
    """SGD with a hook of all weights before or after each step."""

    def make(parameters: Any) -> Optimizer:
        made = SGD(parameters, lr=0.05)
        register = made.register_step_pre_hook if when == "before" else made.register_step_post_hook
        register(lambda *_: torch.no_grad()(change)(model))
        return made

    return make


def central(model: nn.Module) -> None:
    """Gradients without their mean."""
    for p in model.parameters():
        if p.grad is not None and p.dim() > 1:
            p.grad -= p.grad.mean(1, keepdim=True)


def clipped(model: nn.Module) -> None:
    """Gradients of a bounded norm."""
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def bounded(model: nn.Module) -> None:
    """Weights between two bounds."""
    for p in model.parameters():
        p.clamp_(-0.2, 0.2)


def max_norm(model: nn.Module) -> None:
    """Rows of a bounded norm."""
    for p in model.parameters():
        if p.dim() == 2:
            p.copy_(torch.renorm(p, 2, 0, 0.5))


def equal_norms(model: nn.Module) -> None:
    """All weights together have the norm 5."""
    total = torch.stack([p.square().sum() for p in model.parameters()]).sum().sqrt()
    for p in model.parameters():
        p.mul_(5 / total)


def after(change: Callable[[nn.Module], None], when: str = "after") -> Case:
    """A hook of the optimizer."""
    return Case(Three, data, optimizer=lambda model: hooked(model, change, when))


def groups(model: Any) -> Callable[[Any], Optimizer]:
    """Other rates for other layers, by the model's own names."""
    first = [{"params": model.inp.parameters(), "lr": 0.2}]
    rest = [p for name, p in model.named_parameters() if not name.startswith("inp.")]
    return lambda parameters: SGD([*first, {"params": rest}], lr=0.05)


def halved(model: Three) -> None:
    """Gradients of the first weight are halved by a hook of its own."""
    model.inp.weight.register_hook(lambda grad: grad / 2)


def averaged(model: nn.Module) -> Callable[[Any], Optimizer]:
    """An average of the weights by torch's own class, in a hook."""

    def make(parameters: Any) -> Optimizer:
        made, mean = SGD(parameters, lr=0.05), torch.optim.swa_utils.AveragedModel(model)
        made.register_step_post_hook(lambda *_: mean.update_parameters(model))
        return made

    return make


class Scaling(nn.Module):
    """A loss that is a module, with a weight a column."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, OUT, dtype=torch.float64))

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        return error(out * self.scale, y) + 0.1 * self.scale.square().sum()


class Centring(nn.Module):
    """A loss that is a module, with a running mean of what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(OUT, dtype=torch.float64))

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(0.1 * out.detach().mean(0))
        return error(out, y + self.mean)


def by_module(build: Callable[[], nn.Module], *, inside: bool = False, trained: bool = True) -> Case:
    """A loss that is a module: a part of the model, or beside it and trained by the same optimizer."""

    def beside(model: Any) -> nn.Module:
        if not hasattr(model, "beside"):
            (setattr if inside else object.__setattr__)(model, "beside", build())
        held: nn.Module = model.beside
        return held

    def plain(model: nn.Module, out: Tensor, data: Data) -> Tensor:
        return beside(model)(out[data.train_mask], data.y[data.train_mask]).mean()

    def optimizer(model: nn.Module) -> Callable[[Any], Optimizer]:
        more = [] if inside or not trained else list(beside(model).parameters())
        return lambda parameters: SGD([*parameters, *more], lr=0.05)

    def net() -> nn.Module:
        model = Three()
        beside(model)
        return model

    return Case(net if inside else Three, data, plain=plain, loss=beside, optimizer=optimizer)


def hooked_weights(hook: Callable[[Tensor], Tensor]) -> Case:
    """A hook of each weight's gradient."""

    def change(model: nn.Module) -> None:
        for p in model.parameters():
            p.register_hook(hook)

    return Case(changed(change), data)


def after_sums(model: nn.Module) -> None:
    """A hook of each weight after its gradient has come."""

    def halve(p: Tensor) -> None:
        assert p.grad is not None
        p.grad.div_(p.grad.norm() + 1)

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(halve)


class Keeping(Three):
    """Forward keeps hidden rows, and their mean square."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        self.hidden = self.one(self.inp(x).tanh(), edge_index).tanh()
        self.activity = self.hidden.square().mean()
        return self.out(self.two(self.hidden, edge_index).tanh())


class OneNorm(torch.optim.Optimizer):
    """A user's optimizer that divides by the norm of all gradients."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = sum(float(p.grad.square().sum()) for p in held) ** 0.5
        for p in held:
            p.sub_(0.05 * p.grad / norm)


CASES: dict[str, Case] = {
    **{f"a penalty: {name}": penalised(net, penalty) for name, penalty in PENALTIES.items()},
    **{
        f"forward reads weights: {inside}": Case(partial(net, inside), data)
        for inside in ("sum", "norm", "first")
    },
    **{
        f"an optimizer: {name}": Case(net, data, optimizer=partial(optimizer_of, name))
        for name in ("ema", "clip", "rate", "reading", "adamw", "one by one")
    },
    "a property of a wrapper": penalised(Wrapper, lambda m: m.first.abs().sum()),
    "a property of a wrapper, all weights": penalised(Wrapper, lambda m: m.norm),
    "a method of a wrapper": penalised(Lightning, lambda m: m.regulariser()),
    "the distance to the start": from_start(),
    "a tied weight": Case(Tied, data),
    "a tied weight and a penalty": penalised(Tied, lambda m: sum(p.abs().sum() for p in m.parameters())),
    "a tied weight, transposed": Case(TiedTransposed, data),
    "a layer run three times": Case(SharedLayer, data),
    "spectral_norm, a parametrization": Case(
        changed(lambda m: parametrizations.spectral_norm(m.inp, n_power_iterations=3)), data
    ),
    "spectral_norm, the older": Case(changed(lambda m: nn.utils.spectral_norm(m.out)), data),
    "weight_norm, a parametrization": Case(changed(lambda m: parametrizations.weight_norm(m.inp)), data),
    "weight_norm, of the last": Case(changed(lambda m: parametrizations.weight_norm(m.out)), data),
    "weight_norm and a penalty": penalised(
        changed(lambda m: parametrizations.weight_norm(m.inp)), lambda m: m.inp.weight.abs().sum()
    ),
    "orthogonal": Case(changed(lambda m: parametrizations.orthogonal(m.one.lin_l)), data),
    "symmetric": Case(
        changed(lambda m: parametrize.register_parametrization(m.one.lin_r, "weight", Symmetric())), data
    ),
    "positive": Case(
        changed(lambda m: parametrize.register_parametrization(m.out, "weight", Positive())), data
    ),
    "a low rank on a frozen weight": Case(changed(low_rank), data),
    "pruned": Case(changed(pruned), data),
    "standardised in forward": Case(Standardised, data),
    "a weight made of another": Case(Hyper, data),
    "functional_call": Case(Called, data),
    "a norm kept as a buffer": Case(Gains, data),
    "a parameter of the loss alone": own(Uncertain, uncertain),
    "centres of the loss alone": own(Centres, to_centres),
    "a buffer that the loss reads": own(Prior, by_prior),
    "running statistics that the loss reads": own(Normed, by_running),
    "a counter that the loss reads": own(Steps, by_steps),
    "a frozen teacher": own(Taught, taught, optimizer=lambda model: lambda ps: SGD(list(ps), lr=0.05)),
    "a teacher that follows": own(Taught, taught, optimizer=teaching),
    "gradients without their mean": after(central, "before"),
    "gradients clipped by a hook": after(clipped, "before"),
    "weights clamped by a hook": after(bounded),
    "rows bounded by a hook": after(max_norm),
    "all weights scaled by a hook": after(equal_norms),
    "rates by layer": Case(Three, data, optimizer=groups),
    "a hook of a weight's gradient": Case(changed(halved), data),
    "an averaged model": Case(Three, data, optimizer=averaged),
    "spectral_norm and a penalty": penalised(
        changed(lambda m: parametrizations.spectral_norm(m.inp)), lambda m: m.inp.weight.abs().sum()
    ),
    "a loss's own weights, beside the model": by_module(Scaling),
    "a loss's own weights, in the model": by_module(Scaling, inside=True),
    "a loss's running mean": by_module(Centring, trained=False),
    "gradients clamped by hooks of weights": hooked_weights(lambda grad: grad.clamp(-0.01, 0.01)),
    "gradients scaled by hooks of weights": hooked_weights(lambda grad: grad / (grad.norm() + 1)),
    "gradients scaled by hooks after them": Case(changed(after_sums), data),
    "hidden rows that forward keeps": own(
        Keeping, lambda model, out, y: error(out, y) + 0.1 * model.hidden.square().mean()
    ),
    "an own optimizer with one norm": Case(Three, data, optimizer=lambda model: OneNorm),
    "a mean that forward keeps": own(Keeping, lambda model, out, y: error(out, y) + 0.1 * model.activity),
}
