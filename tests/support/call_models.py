"""Models with calls of torch that few use, and with draws of their own seed: what is served, what is refused.

Where it sits: ``user_code/test_seldom_calls`` checks each of them, ``kinds/kind_places`` trains each of them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import Tensor, nn

from by_hand import Body
from place_models import TWO, Mods


def seeded(draw: Body) -> Body:
    """A forward that draws after it has seeded torch's generator, and leaves that as it was."""

    def body(m, x, e, d):
        with torch.random.fork_rng():
            torch.manual_seed(3)
            return draw(m, x, e, d)

    return body


def own(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def pooled(m: nn.Module, x: Tensor, e: Tensor) -> Tensor:
    """Rows that a pooling layer has chosen, put back to their places."""
    chosen, _, _, _, places, _ = m.p(x, e)
    spread = torch.zeros_like(x)
    spread[places] = chosen
    return x + spread


@torch.jit.script
def scripted(x: Tensor) -> Tensor:
    return torch.relu(x - x.mean(0))


def centered(x: Tensor) -> Tensor:
    return x - x.mean(0)


class Centers(nn.Module):
    """Subtracts the mean of all rows."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


traced = torch.jit.trace(centered, torch.randn(5, 8))
scripted_module = torch.jit.script(Centers())
traced_module = torch.jit.trace(Centers(), torch.randn(5, 8))
operator = torch.library.custom_op("kagome_tests::centered", centered, mutates_args=())
operator.register_autograd(lambda context, grad: grad - grad.mean(0))

EXACT: dict[str, tuple[Body, Mods]] = {
    "a scripted function": (lambda m, x, e, d: scripted(x), {}),
    "a forked function": (lambda m, x, e, d: torch.jit.wait(torch.jit.fork(scripted, x)), {}),
    "a function traced over weights": (lambda m, x, e, d: x + traced(m.u.weight).sum(0), TWO),
    "a compiled function": (lambda m, x, e, d: torch.compile(centered, backend="eager")(x), {}),
    "cosine of columns": (lambda m, x, e, d: x * F.cosine_similarity(x, m.u(x), dim=1)[:, None], TWO),
    "cosine to a vector": (lambda m, x, e, d: x * F.cosine_similarity(m.u.bias[None], x)[:, None], TWO),
    "cross of each row": (
        lambda m, x, e, d: torch.cat([torch.linalg.cross(x[:, :3], d.pos), x[:, 3:]], 1),
        {},
    ),
    "a column put in": (lambda m, x, e, d: torch.select_scatter(x, x.mean(1), 1, 2), {}),
    "columns put in": (lambda m, x, e, d: torch.slice_scatter(x, x[:, :2].tanh(), 1, 4, 6), {}),
    "a spectrum of each row": (lambda m, x, e, d: torch.fft.ifft(torch.fft.fft(x) * 0.5).real, {}),
    "trapezoids of each row": (lambda m, x, e, d: x * torch.trapezoid(x, dim=1)[:, None], {}),
    "an order by a generator": (
        lambda m, x, e, d: x + x[torch.randperm(x.size(0), generator=own())[:5]].sum(0),
        {},
    ),
    "places by a generator": (
        lambda m, x, e, d: x + x[torch.randint(0, x.size(0), (5,), generator=own())].sum(0),
        {},
    ),
    "rows by a generator": (
        lambda m, x, e, d: x * torch.rand(x.size(0), 1, generator=own(), dtype=x.dtype),
        {},
    ),
    "pooling by scores": (
        lambda m, x, e, d: pooled(m, x, e),
        {"p": lambda: pyg.SAGPooling(8, min_score=0.02)},
    ),
    "pooling by a least score": (
        lambda m, x, e, d: pooled(m, x, e),
        {"p": lambda: pyg.TopKPooling(8, min_score=0.02)},
    ),
}

SEEDED: dict[str, tuple[Body, Mods]] = {
    "rows by a seed": (seeded(lambda m, x, e, d: x * torch.rand(x.size(0), 8, dtype=x.dtype)), {}),
    "like rows by a seed": (seeded(lambda m, x, e, d: x + 0.1 * torch.randn_like(x)), {}),
    "two draws by a seed": (seeded(lambda m, x, e, d: x * torch.rand_like(x) + torch.randn_like(x)), {}),
    "a vector by a seed": (seeded(lambda m, x, e, d: x * torch.rand(8, dtype=x.dtype)), {}),
    "an order by a seed": (seeded(lambda m, x, e, d: x + x[torch.randperm(x.size(0))[:5]].sum(0)), {}),
    "dropout by a seed": (seeded(lambda m, x, e, d: F.dropout(x, 0.4)), {}),
    "edges by a seed": (
        seeded(lambda m, x, e, d: torch.zeros_like(x).index_add(0, e[1], x[e[0]] * torch.rand(e.size(1), 1))),
        {},
    ),
}
"""Equal on one rank, refused on several."""

REFUSED: dict[str, tuple[Body, Mods, str]] = {
    "a traced function": (lambda m, x, e, d: traced(x), {}, "compiled by torch.jit"),
    "a scripted module": (lambda m, x, e, d: scripted_module(x), {}, "compiled by torch.jit"),
    "a traced module": (lambda m, x, e, d: traced_module(x), {}, "compiled by torch.jit"),
    "an operator": (lambda m, x, e, d: operator(x), {}, "kagome_tests::centered"),
    "a named operator": (
        lambda m, x, e, d: torch.ops.kagome_tests.centered(x),
        {},
        "kagome_tests::centered",
    ),
    "a row put in": (lambda m, x, e, d: torch.select_scatter(x, x[3] * 2, 0, 5), {}, "select_scatter"),
    "rows put in": (lambda m, x, e, d: torch.slice_scatter(x, x[:4] * 2, 0, 5, 9), {}, "slice_scatter|size"),
    "a diagonal put in": (
        lambda m, x, e, d: torch.diagonal_scatter(x, x[0, :8] * 2),
        {},
        "diagonal_scatter|rows",
    ),
    "the masked scattered": (
        lambda m, x, e, d: x.masked_scatter(d.mask[:, None], m.u(x)),
        TWO,
        "masked_scatter",
    ),
    "entries put": (lambda m, x, e, d: x.put(torch.tensor([3, 9]), x[0, :2] * 2), {}, "put"),
    "memory by strides": (lambda m, x, e, d: x + x.as_strided((8,), (1,), 16), {}, "as_strided"),
    "a spectrum of columns": (lambda m, x, e, d: torch.fft.fft(x, dim=0).real, {}, "fft"),
    "a spectrum of all": (lambda m, x, e, d: torch.fft.fft2(x).real, {}, "fft"),
    "cosine of rows": (lambda m, x, e, d: x * F.cosine_similarity(x, m.u(x), dim=0), TWO, "cosine"),
}
