"""What every way of doing a kernel must give: edge lists of all sorts, and a check a kernel against autograd.

Where it sits: the tests of the loops, of plain PyTorch and of Triton run the same checks. The oracle picks
rows with one-hot matrices in float64, so it shares no line with what it judges.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType

import torch
from hypothesis import strategies as st
from torch import Tensor

from kagome.kernels import ops
from kagome.kernels.base.csr import Structure

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
SPANS = ("all", "own", "halo")


@dataclass(frozen=True, eq=False)
class Case:
    structure: Structure
    heads: int
    width: int
    dtype: torch.dtype
    generator: torch.Generator

    @property
    def device(self) -> torch.device:
        """Where the kernel's tensors lie. Numbers are drawn on the CPU, the same for all."""
        return self.structure.source.device

    def on(self, device: torch.device) -> Case:
        """The same case with its tensors on another device."""
        s = self.structure
        there = Structure(s.source.to(device), s.target.to(device), s.own, s.num_sources)
        return replace(self, structure=there)

    def draw(self, *shape: int) -> Tensor:
        drawn = torch.randn(shape, generator=self.generator, dtype=torch.float64)
        return drawn.to(self.device, self.dtype)

    def draw_few(self, *shape: int) -> Tensor:
        """Of few values, so that some are equal."""
        return torch.randint(-2, 3, shape, generator=self.generator).to(self.device, self.dtype)

    @property
    def to_target(self) -> Tensor:
        return one_hot(self.structure.target, self.structure.own).T

    @property
    def from_target(self) -> Tensor:
        return one_hot(self.structure.target, self.structure.own)

    @property
    def from_source(self) -> Tensor:
        return one_hot(self.structure.source, self.structure.num_sources)

    def same(self, found: Tensor, wanted: Tensor) -> None:
        assert found.dtype == self.dtype
        found, wanted, limit = found.double(), wanted.detach().double(), TOLERANCE[self.dtype]
        # Terms as large as the largest entry may cancel in another: eight roundings of that one.
        largest = float(wanted[wanted.isfinite()].abs().max()) if wanted.isfinite().any() else 0.0
        atol = max(limit, 8 * torch.finfo(self.dtype).eps * largest)
        torch.testing.assert_close(found, wanted, rtol=limit, atol=atol)


def one_hot(index: Tensor, size: int) -> Tensor:
    out = torch.zeros(index.numel(), size, dtype=torch.float64, device=index.device)
    out[torch.arange(index.numel(), device=index.device), index] = 1
    return out


def times(matrix: Tensor, x: Tensor) -> Tensor:
    return torch.einsum("ij,j...->i...", matrix, x)


def wide(*tensors: Tensor) -> list[Tensor]:
    return [t.double().requires_grad_() for t in tensors]


@st.composite
def cases(draw: Callable, dtypes: tuple = (torch.float32, torch.float64), most: int = 60) -> Case:
    """Edge lists with empty rows, no edges, no rows, equal edges, self-loops, halo rows, and any shape."""
    own = draw(st.integers(0, 9))
    num_sources = own + draw(st.integers(0, 5))
    edges = draw(st.integers(0, most)) if own else 0
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    hub = draw(st.integers(1, max(own, 1)))
    source = torch.randint(0, max(num_sources, 1), (edges,), generator=generator)
    target = torch.randint(0, hub, (edges,), generator=generator)
    if draw(st.booleans()):
        target = target.sort().values
    heads = draw(st.sampled_from([1, 2, 3, 8]))
    width = draw(st.sampled_from([1, 3, 4, 16]))
    return Case(
        Structure(source, target, own, num_sources), heads, width, draw(st.sampled_from(dtypes)), generator
    )


def _spanned(case: Case, span: str) -> Tensor:
    halo = case.structure.source >= case.structure.own
    return {"all": torch.ones_like(halo), "own": ~halo, "halo": halo}[span].double()


def sums(way: ModuleType, case: Case) -> None:
    s, (h, c) = case.structure, (case.heads, case.width)
    edges = s.edges
    for shape, weight in [((h * c,), None), ((h * c,), (edges,)), ((h, c), (edges, h)), ((h, c), (edges,))]:
        x, scale = case.draw(s.num_sources, *shape), case.draw(s.own)
        w = None if weight is None else case.draw(*weight)
        for span in SPANS:
            messages = times(case.from_source, x.double())
            if w is not None:
                messages = messages * w.double().reshape(*w.shape, *[1] * (messages.dim() - w.dim()))
            kept = messages * _spanned(case, span).reshape(-1, *[1] * len(shape))
            wanted = times(case.to_target, kept)
            offset, read = (s.own, x[s.own :]) if span == "halo" else (0, x)
            case.same(way.sum_rows(s.by_target, read, w, span=span, offset=offset), wanted)
            scaled = wanted * scale.double().reshape(-1, *[1] * len(shape))
            into = case.draw(*wanted.shape)
            wanted = into.double() + scaled
            out = way.sum_rows(s.by_target, read, w, scale, span=span, offset=offset, into=into)
            assert out is into
            case.same(out, wanted)


def sums_turned(way: ModuleType, case: Case) -> None:
    """The backward of a sum: own rows and halo rows apart, by the transpose."""
    s, (h, c) = case.structure, (case.heads, case.width)
    x, w, g = case.draw(s.num_sources, h, c), case.draw(s.edges, h), case.draw(s.own, h, c)
    (wide_x, wide_w) = wide(x, w)
    out = times(case.to_target, times(case.from_source, wide_x) * wide_w.unsqueeze(-1))
    gx, gw = torch.autograd.grad(out, (wide_x, wide_w), g.double())
    own, halo = slice(0, s.own), slice(s.own, s.num_sources)
    for rows in (own, halo):
        case.same(way.sum_rows(s.by_source, g, w, rows=rows), gx[rows])
    case.same(way.dot_edges(s.by_target, g, x), gw)
    into = case.draw(s.edges, h)
    outside = into.clone()
    found = way.dot_edges(s.by_target, g, x[s.own :], span="halo", offset=s.own, into=into)
    assert found is into
    case.same(found, torch.where((s.source >= s.own).unsqueeze(1), gw, outside.double()))


def extremes(way: ModuleType, case: Case) -> None:
    s, width = case.structure, case.heads * case.width
    for sign in (1.0, -1.0):
        for of_edges in (False, True):
            x = case.draw_few(s.edges if of_edges else s.num_sources, width)
            g = case.draw(s.own, width)
            (wide_x,) = wide(x)
            rows = wide_x if of_edges else times(case.from_source, wide_x)
            met = case.to_target.unsqueeze(-1) > 0
            spread = torch.where(met, rows.unsqueeze(0) * sign, -torch.inf)
            some = (met.sum(1) > 0).expand(s.own, width)
            best = spread.amax(1) * sign if s.edges else g.new_zeros(s.own, width, dtype=torch.float64)
            best = torch.where(some, best, 0.0)
            ties = (
                torch.where(some, (met & (rows * sign == spread.amax(1, keepdim=True))).sum(1), 0)
                if (s.edges)
                else g.new_zeros(s.own, width)
            )
            if of_edges:
                found = way.extreme_edges(s.by_target, x, sign)
                back = way.extreme_edges_back(s.by_target, x, *found, g)
            else:
                found = way.extreme_rows(s.by_target, x, sign)
                back = way.extreme_back(s.by_source, x, *found, g)
            case.same(found[0], best)
            case.same(found[1], ties)
            wanted = torch.zeros_like(x)
            if s.edges:
                (wanted,) = torch.autograd.grad(best, wide_x, g.double())
            case.same(back, wanted)


def _softmax(case: Case, logits: Tensor) -> Tensor:
    """Within each target, along the first axis."""
    if not case.structure.edges:
        return logits
    met = case.to_target.reshape(case.structure.own, -1, *[1] * (logits.dim() - 1)) > 0
    top = torch.where(met, logits.unsqueeze(0), -torch.inf).amax(1).detach()
    top = torch.where(torch.isinf(top), 0.0, top)
    p = (logits - times(case.from_target, top)).exp()
    return p / times(case.from_target, times(case.to_target, p) + 1e-16)


def softmaxes(way: ModuleType, case: Case) -> None:
    s, h = case.structure, case.heads
    logits, g = case.draw(s.edges, h) * 5, case.draw(s.edges, h)
    (z,) = wide(logits)
    alpha = _softmax(case, z)
    found = way.softmax_edges(s.by_target, logits)
    case.same(found, alpha)
    case.same(way.softmax_edges_back(s.by_target, found, g), torch.autograd.grad(alpha, z, g.double())[0])

    a, b = case.draw(s.own, h), case.draw(s.num_sources, h)
    wide_a, wide_b = wide(a, b)
    z = times(case.from_target, wide_a) + times(case.from_source, wide_b)
    alpha = _softmax(case, torch.nn.functional.leaky_relu(z, 0.2))
    found = way.softmax_sum(s.by_target, a, b, 0.2)
    case.same(found, alpha)
    ga, gb = way.softmax_sum_back(s, a, b, 0.2, found, g)
    wanted = torch.autograd.grad(alpha, (wide_a, wide_b), g.double())
    case.same(ga, wanted[0])
    case.same(gb, wanted[1])


def attention(case: Case, width: int) -> None:
    """Sums that attention weighs, and their gradients."""
    s, h = case.structure, case.heads
    a, b, x = case.draw(s.own, h), case.draw(s.num_sources, h), case.draw(s.num_sources, h, width)
    g = case.draw(s.own, h, width)
    parts = wide(a, b, x)
    z = times(case.from_target, parts[0]) + times(case.from_source, parts[1])
    alpha = _softmax(case, torch.nn.functional.leaky_relu(z, 0.2))
    out = times(case.to_target, alpha.unsqueeze(-1) * times(case.from_source, parts[2]))
    case.same(ops.attention_sum(s.by_target, a, b, 0.2, x), out)
    wanted = torch.autograd.grad(out, parts, g.double())
    found = ops.attention_sum_back(s, a, b, 0.2, x, g)
    for one, other in zip(found, wanted, strict=True):
        case.same(one, other)


def leaky(way: ModuleType, case: Case) -> None:
    s, (h, c) = case.structure, (case.heads, case.width)
    a, b, att, g = (
        case.draw(s.own, h, c),
        case.draw(s.num_sources, h, c),
        case.draw(h, c),
        case.draw(s.edges, h),
    )
    parts = wide(a, b, att)
    z = times(case.from_target, parts[0]) + times(case.from_source, parts[1])
    logits = (torch.nn.functional.leaky_relu(z, 0.2) * parts[2]).sum(-1)
    case.same(way.leaky_dots(s.by_target, a, b, att, 0.2), logits)
    wanted = torch.autograd.grad(logits, parts, g.double())
    for found, want in zip(way.leaky_dots_back(s, a, b, att, 0.2, g), wanted, strict=True):
        case.same(found, want)


def moves(way: ModuleType, case: Case) -> None:
    s, (h, c) = case.structure, (case.heads, case.width)
    a, b, g = case.draw(s.own, h, c), case.draw(s.num_sources, h, c), case.draw(s.edges, h, c)
    for index in (s.source, s.source.int()):
        case.same(way.gather(index, b), times(case.from_source, b.double()))
    table, which, scale = b.clone(), torch.arange(s.own, device=case.device).flip(0), case.draw(s.own)
    place = torch.randperm(s.num_sources)[: s.own].to(case.device)
    wanted = b.double().index_add(0, place, a.double()[which] * scale.double().view(-1, 1, 1))
    way.add_rows(table, place, a, which, scale)
    case.same(table, wanted)
    case.same(way.sum_edges(s.by_target, g), times(case.to_target, g.double()))
    case.same(
        way.sum_edges(s.by_source, g, slice(1, s.num_sources)), times(case.from_source.T, g.double())[1:]
    )
    for slope in (None, 0.2):
        parts = wide(a, b)
        z = times(case.from_target, parts[0]) + times(case.from_source, parts[1])
        z = z if slope is None else torch.nn.functional.leaky_relu(z, slope)
        case.same(way.join_edges(s, a, b, slope), z)
        wanted = torch.autograd.grad(z, parts, g.double())
        for found, want in zip(way.join_edges_back(s, a, b, slope, g), wanted, strict=True):
            case.same(found, want)


def columns(way: ModuleType, case: Case) -> None:
    s, width = case.structure, case.heads * case.width
    z, m, g = case.draw(s.num_sources, width) * 5, case.draw(s.num_sources, width), case.draw(s.own, width)
    parts = wide(z, m)
    p = _softmax(case, times(case.from_source, parts[0]))
    wanted = times(case.to_target, p * times(case.from_source, parts[1]))
    out, top, total = way.column_softmax(s.by_target, z, m)
    case.same(out, wanted)
    assert torch.equal((total > 0).any(1), s.degree > 0)
    gradients = torch.autograd.grad(wanted, parts, g.double())
    for found, want in zip(
        way.column_softmax_back(s.by_source, z, m, out, top, total, g), gradients, strict=True
    ):
        case.same(found, want)


CHECKS = (sums, sums_turned, extremes, softmaxes, leaky, moves, columns)
