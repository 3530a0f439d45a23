"""Kind 5: derivatives inside forward or in the loss, which training differentiates again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.utils import scatter

import forces
from by_hand import graph
from cases import Case, with_targets

FEATURES, WIDTH = 6, 8


def molecule(columns: int = 4) -> Data:
    """The sample graph, whose vertices have a place in space, with so many float targets."""
    return with_targets(graph(), columns)


def gradient(of: Tensor, by: Tensor, **more: Any) -> Tensor:
    """A derivative that can be differentiated again."""
    found: Tensor = torch.autograd.grad(of, by, create_graph=True, **more)[0]
    return found


class Smooth(nn.Module):
    """Convolutions of features and places, smooth in both."""

    def __init__(self, outputs: int, layer: Callable[..., nn.Module] = pyg.GraphConv) -> None:
        super().__init__()
        self.embed = nn.Linear(FEATURES + 3, WIDTH)
        self.one, self.two = layer(WIDTH, WIDTH), layer(WIDTH, outputs)

    def field(self, x: Tensor, pos: Tensor, edge_index: Tensor) -> Tensor:
        h = self.embed(torch.cat([x, pos.sin()], -1)).tanh()
        return self.two(self.one(h, edge_index).tanh(), edge_index)

    def forward(self, x: Tensor, pos: Tensor, edge_index: Tensor) -> Tensor:
        """Each kind of derivative has its own."""
        raise NotImplementedError


class Penalised(Smooth):
    """The loss asks for the derivative by the places that forward keeps."""

    def forward(self, x: Tensor, pos: Tensor, edge_index: Tensor) -> Tensor:
        self.pos = pos.detach().clone().requires_grad_()
        with torch.enable_grad():
            return self.field(x, self.pos, edge_index)


class PenalisedInput(Smooth):
    """The loss asks for the derivative by the features that forward keeps."""

    def forward(self, x: Tensor, pos: Tensor, edge_index: Tensor) -> Tensor:
        self.x = x.detach().requires_grad_()
        with torch.enable_grad():
            return self.field(self.x, pos, edge_index)


class PenalisedHidden(Smooth):
    """The loss asks for the derivative by hidden rows that forward keeps."""

    def forward(self, x: Tensor, pos: Tensor, edge_index: Tensor) -> Tensor:
        self.hidden = self.embed(torch.cat([x, pos.sin()], -1)).tanh()
        return self.two(self.one(self.hidden, edge_index).tanh(), edge_index)


class Slope(Smooth):
    """The norm of a derivative is a further column: a gradient penalty that the loss weighs."""

    def forward(self, x: Tensor, pos: Tensor, edge_index: Tensor) -> Tensor:
        pos = pos.detach().requires_grad_()
        with torch.enable_grad():
            out = self.field(x, pos, edge_index)
            steep = gradient(out.sum(), pos).square().sum(-1, keepdim=True)
        return torch.cat([out, steep], -1)


class OnlyForces(Smooth):
    """Forces alone are learned."""

    def forward(self, x: Tensor, pos: Tensor, edge_index: Tensor) -> Tensor:
        pos = pos.detach().requires_grad_()
        with torch.enable_grad():
            return -gradient(self.field(x, pos, edge_index).sum(), pos)


class ByEdges(nn.Module):
    """Forces along edges, summed at both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(FEATURES, WIDTH)
        self.pair = nn.Sequential(nn.Linear(2 * WIDTH + 1, WIDTH), nn.SiLU(), nn.Linear(WIDTH, 1))

    def forward(self, x: Tensor, pos: Tensor, edge_index: Tensor) -> Tensor:
        h = self.lin(x).tanh()
        source, target = edge_index
        along = (pos[source] - pos[target]).detach().requires_grad_()
        with torch.enable_grad():
            length = (along.square().sum(-1, keepdim=True) + 0.1).sqrt()
            energy = self.pair(torch.cat([h[source], h[target], length], -1))
            push = gradient(energy.sum(), along)
        size = x.size(0)
        return scatter(push, source, 0, size, reduce="sum") - scatter(push, target, 0, size, reduce="sum")


class Stress(Smooth):
    """The derivative by a strain that all vertices share, beside the energies."""

    def forward(self, x: Tensor, pos: Tensor, edge_index: Tensor) -> Tensor:
        with torch.enable_grad():
            strain = torch.zeros(3, 3, dtype=pos.dtype, requires_grad=True)
            energy = self.field(x, pos + pos @ strain, edge_index)
            stress = gradient(energy.sum(), strain)
        return torch.cat([energy, stress.diagonal().expand(x.size(0), 3)], -1)


class Jacobian(Smooth):
    """The derivative of each output column, one after the other."""

    def forward(self, x: Tensor, pos: Tensor, edge_index: Tensor) -> Tensor:
        pos = pos.detach().requires_grad_()
        with torch.enable_grad():
            out = self.field(x, pos, edge_index)
            rows = [gradient(out[:, column].sum(), pos) for column in range(out.size(1))]
        return torch.stack(rows, 1).flatten(1)


class JacobianOfTorch(Smooth):
    """``torch.autograd.functional.jacobian`` of column sums."""

    def forward(self, x: Tensor, pos: Tensor, edge_index: Tensor) -> Tensor:
        with torch.enable_grad():
            found = torch.autograd.functional.jacobian(
                lambda p: self.field(x, p, edge_index).sum(0), pos, create_graph=True
            )
        return found.transpose(0, 1).flatten(1)


class FuncGrad(Smooth):
    """``torch.func.grad`` of the energy."""

    def forward(self, x: Tensor, pos: Tensor, edge_index: Tensor) -> Tensor:
        return -torch.func.grad(lambda p: self.field(x, p, edge_index).sum())(pos)


class FuncJacobian(Smooth):
    """``torch.func.jacrev`` of a map of rows, mapped over rows: per-row derivatives before a convolution."""

    def forward(self, x: Tensor, pos: Tensor, edge_index: Tensor) -> Tensor:
        def local(place: Tensor, features: Tensor) -> Tensor:
            return self.embed(torch.cat([features, place.sin()], -1)).tanh()

        slopes = torch.func.vmap(torch.func.jacrev(local))(pos, x)
        return self.two(self.one(slopes.sum(-1), edge_index).tanh(), edge_index)


class HessianVector(Smooth):
    """A Hessian times a vector, by two derivatives."""

    def forward(self, x: Tensor, pos: Tensor, edge_index: Tensor) -> Tensor:
        pos = pos.detach().requires_grad_()
        with torch.enable_grad():
            energy = self.field(x, pos, edge_index).sum()
            first = gradient(energy, pos)
            return gradient((first * pos.detach().cos()).sum(), pos)


class Laplacian(Smooth):
    """Second derivatives by the own place: the residual of a physics-informed loss."""

    def forward(self, x: Tensor, pos: Tensor, edge_index: Tensor) -> Tensor:
        pos = pos.detach().requires_grad_()
        with torch.enable_grad():
            u = self.embed(torch.cat([x, pos.sin()], -1)).tanh().sum(-1, keepdim=True)
            first = gradient(u.sum(), pos)
            twice = sum(gradient(first[:, axis].sum(), pos)[:, axis] for axis in range(3))
            h = torch.cat([u, twice.unsqueeze(-1)], -1).repeat(1, WIDTH // 2)
        return self.two(self.one(h, edge_index).tanh(), edge_index)


class Advected(Smooth):
    """A derivative by features feeds the next layer."""

    def forward(self, x: Tensor, pos: Tensor, edge_index: Tensor) -> Tensor:
        pos = pos.detach().requires_grad_()
        with torch.enable_grad():
            h = self.one(self.embed(torch.cat([x, pos.sin()], -1)).tanh(), edge_index)
            flow = gradient(h.square().sum(), pos)
        return self.two(h.tanh() + F.pad(flow, (0, WIDTH - 3)), edge_index)


class Detached(Smooth):
    """A derivative that is a feature only: without a graph of its own."""

    def forward(self, x: Tensor, pos: Tensor, edge_index: Tensor) -> Tensor:
        pos = pos.detach().requires_grad_()
        with torch.enable_grad():
            h = self.embed(torch.cat([x, pos.sin()], -1)).tanh()
            flow = torch.autograd.grad(self.one(h, edge_index).square().sum(), pos, retain_graph=True)[0]
        return self.two(self.one(h, edge_index).tanh() + F.pad(flow, (0, WIDTH - 3)), edge_index)


class Attacked(Smooth):
    """Features moved by the sign of a derivative, which keeps no graph: adversarial training (FGSM)."""

    def forward(self, x: Tensor, pos: Tensor, edge_index: Tensor) -> Tensor:
        moved = x.detach().clone().requires_grad_()
        with torch.enable_grad():
            fooled = self.field(moved, pos, edge_index).square().sum()
            sign = torch.autograd.grad(fooled, moved)[0].sign()
        return self.field(x + 0.01 * sign, pos, edge_index)


class Denoised(Smooth):
    """Two steps downhill in energy, unrolled: what deep equilibrium and energy-based models do."""

    def forward(self, x: Tensor, pos: Tensor, edge_index: Tensor) -> Tensor:
        place = pos.detach().requires_grad_()
        with torch.enable_grad():
            for _ in range(2):
                place = place - 0.1 * gradient(self.field(x, place, edge_index).sum(), place)
        return place


class Hamiltonian(Smooth):
    """Places and momenta move by derivatives of one energy."""

    def __init__(self) -> None:
        super().__init__(1)

    def forward(self, x: Tensor, pos: Tensor, edge_index: Tensor) -> Tensor:
        state = torch.cat([x, pos], -1).detach().requires_grad_()
        with torch.enable_grad():
            energy = self.field(state[:, :FEATURES], state[:, FEATURES:], edge_index).sum()
            moved = gradient(energy, state)
        return torch.cat([moved[:, FEATURES:], -moved[:, :3]], -1)


def summed(model: Any, kept: str, scale: float, out: Tensor) -> Tensor:
    """The squared slope of all outputs by what forward kept."""
    return scale * gradient(out.sum(), getattr(model, kept)).square().sum()


def penalised(build: Callable[..., nn.Module], kept: str) -> Case:
    """A penalty on the slope of the training vertices' outputs, added to the loss."""

    def loss(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda out, y: F.mse_loss(out, y, reduction="none").mean(1) + summed(model, kept, 0.01, out)

    def plain(model: nn.Module, out: Tensor, data: Data) -> Tensor:
        out, y = out[data.train_mask], data.y[data.train_mask]
        return F.mse_loss(out, y) + summed(model, kept, 0.01, out)

    return Case(lambda: build(4), molecule, plain=plain, loss=loss)


def lenient() -> Case:
    """A penalty that is left out where the derivative cannot be had: it must not be, on several ranks."""

    def slope(model: Any, out: Tensor) -> Tensor:
        found = torch.autograd.grad(out.sum(), model.pos, create_graph=True, allow_unused=True)[0]
        return out.new_zeros(()) if found is None else 0.01 * found.square().sum()

    def loss(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda out, y: F.mse_loss(out, y, reduction="none").mean(1) + slope(model, out)

    def plain(model: nn.Module, out: Tensor, data: Data) -> Tensor:
        out, y = out[data.train_mask], data.y[data.train_mask]
        return F.mse_loss(out, y) + slope(model, out)

    return Case(lambda: Penalised(4), molecule, plain=plain, loss=loss)


def steep(out: Tensor, y: Tensor) -> Tensor:
    """Values a row, and a row's own share of the penalty."""
    return (out[:, :4] - y).square().mean(1) + 0.01 * out[:, 4]


def plain_steep(model: nn.Module, out: Tensor, data: Data) -> Tensor:
    out, y = out[data.train_mask], data.y[data.train_mask]
    return F.mse_loss(out[:, :4], y) + 0.01 * out[:, 4].mean()


CASES: dict[str, Case] = {
    **{f"forces: {name}": Case(partial(forces.build, name), molecule) for name in forces.BODIES},
    "forces: the input is made a leaf": Case(partial(forces.build, "gat", "input"), molecule),
    "forces: seeded by ones a vertex": Case(partial(forces.build, "cfconv", "rows"), molecule),
    "forces: by the vectors of edges": Case(partial(forces.build, "edge_mlp", "edges"), molecule),
    "forces: by the vectors of edges, attention": Case(
        partial(forces.build, "gatv2_edges", "edges"), molecule
    ),
    "forces: with dropout": Case(partial(forces.build, "cfconv", "clone", 0.3), molecule, draws=True),
    "forces alone": Case(lambda: OnlyForces(1), lambda: molecule(3)),
    "forces of pairs": Case(ByEdges, lambda: molecule(3)),
    "stress": Case(lambda: Stress(1), molecule),
    "a penalty in the loss, by places": penalised(Penalised, "pos"),
    "a penalty in the loss, by features": penalised(PenalisedInput, "x"),
    "a penalty in the loss, by hidden rows": penalised(PenalisedHidden, "hidden"),
    "a penalty in the loss, by attention": penalised(lambda o: Penalised(o, pyg.GATConv), "pos"),
    "a penalty in the loss, unused allowed": lenient(),
    "a penalty as a column": Case(lambda: Slope(4), molecule, plain=plain_steep, loss=lambda model: steep),
    "a Jacobian by hand": Case(lambda: Jacobian(2), lambda: molecule(6)),
    "a Jacobian of torch": Case(lambda: JacobianOfTorch(2), lambda: molecule(6)),
    "torch.func.grad": Case(lambda: FuncGrad(1), lambda: molecule(3)),
    "torch.func.jacrev of rows": Case(lambda: FuncJacobian(4), molecule),
    "a Hessian times a vector": Case(lambda: HessianVector(1), lambda: molecule(3)),
    "a Hessian times a vector, GCN": Case(lambda: HessianVector(1, pyg.GCNConv), lambda: molecule(3)),
    "a Laplacian of rows": Case(lambda: Laplacian(4), molecule),
    "a derivative feeds a layer": Case(lambda: Advected(4), molecule),
    "a derivative without a graph feeds a layer": Case(lambda: Detached(4), molecule),
    "features moved by a derivative's sign": Case(lambda: Attacked(4), molecule),
    "unrolled steps downhill": Case(lambda: Denoised(1), lambda: molecule(3)),
    "a Hamiltonian": Case(Hamiltonian, lambda: molecule(6)),
}
