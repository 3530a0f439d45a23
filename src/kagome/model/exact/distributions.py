"""Laws: what torch's draws make of uniform numbers, so that a vertex draws the same on any ranks.

Where it sits: ``handlers`` gives a law the numbers of each row, from :mod:`draws`; ``verify.trace`` its mean.

::

    torch.normal(mean, std)     number of (row, call, column)  ──law──>  mean + std * normal

To make another draw exact: write a law that takes (number, given), and add it to :data:`LAWS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor

Number = Callable[[tuple[int, ...], int], Tensor]
"""``number(shape, place)``: uniform ones in (0, 1), float64; other places of a call are other numbers."""
Given = dict[str, Any]
Law = Callable[[Number, Given], Any]

PIECE: Final = 32.0
"""Mean of what is drawn in one go, where counts add up: less than a float64's exponent allows."""
TRIES: Final = 64
"""Of a rejection that takes 19 of 20 numbers: none is left after so many."""


def normal(uniform: Tensor) -> Tensor:
    """Standard normal numbers of uniform ones."""
    return torch.erfinv(uniform * 2 - 1) * math.sqrt(2)


def _uniform(number: Number, given: Given) -> Any:
    low, high = given.get("from", 0.0), given.get("to", 1.0)
    return low + (high - low) * number(given["shape"], 0)


def _normal(number: Number, given: Given) -> Any:
    mean, std = given.get("mean", 0.0), given.get("std", 1.0)
    drawn = normal(number(given["shape"], 0))
    if not isinstance(mean, Tensor) and not isinstance(std, Tensor):
        return mean + std * drawn
    kind = (mean if isinstance(mean, Tensor) else std).dtype
    return mean + std * drawn.to(kind)


def _log_normal(number: Number, given: Given) -> Any:
    return (given.get("mean", 1.0) + given.get("std", 2.0) * normal(number(given["shape"], 0))).exp()


def _exponential(number: Number, given: Given) -> Any:
    return -number(given["shape"], 0).log() / given.get("lambd", 1.0)


def _cauchy(number: Number, given: Given) -> Any:
    turned = torch.tan(math.pi * (number(given["shape"], 0) - 0.5))
    return given.get("median", 0.0) + given.get("sigma", 1.0) * turned


def _geometric(number: Number, given: Given) -> Any:
    return (number(given["shape"], 0).log() / math.log1p(-given["p"])).ceil().clamp(min=1)


def _bernoulli(number: Number, given: Given) -> Any:
    p = given.get("p")
    return number(given["shape"], 0) < (given["input"] if p is None else p)


def _integers(number: Number, given: Given) -> Any:
    low, high = given.get("low", 0), given["high"]
    # Two numbers of 32 bits: ids reach beyond one.
    wide = ((number(given["shape"], 0) * 2**32).floor() + number(given["shape"], 1)) / 2**32
    return low + (wide.clamp(max=1 - 2**-53) * (high - low)).long()


def _random(number: Number, given: Given) -> Any:
    low, high, kind = given.get("from", 0), given.get("to"), given["input"].dtype
    if high is None and "from" in given:
        low, high = 0, low
    if high is None:
        high = 2 ** round(1 - math.log2(torch.finfo(kind).eps)) if kind.is_floating_point else None
        high = torch.iinfo(kind).max if high is None else high
    return _integers(number, {"shape": given["shape"], "low": low, "high": high})


def _multinomial(number: Number, given: Given) -> Any:
    """Categories of each row; without replacement, the first ones of a race with a runner each."""
    p, count = given["input"].detach().double(), given["num_samples"]
    if given.get("replacement", False):
        shares = p.cumsum(-1)
        drawn = number((*p.shape[:-1], count), 0) * shares[..., -1:]
        # No category of probability 0 at the end of a row.
        last = p.size(-1) - 1 - p.flip(-1).ne(0).int().argmax(-1, keepdim=True)
        return torch.minimum(torch.searchsorted(shares, drawn, right=True), last)
    race = -number(tuple(p.shape), 0).log() / p
    return race.topk(count, -1, largest=False).indices


def _counted(
    number: Number, mean: Tensor, pieces: Tensor, chance: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """Counts that are sums of ``pieces``, each found by adding up chances until they pass a uniform number.

    Args:
        number: The numbers of the call.
        mean: Of a piece, for its shape.
        pieces: How many an entry adds up.
        chance: Of a count (the first argument), given that of the count before it (the second).
    """
    total = torch.zeros_like(mean)
    for piece in range(int(pieces.max()) if pieces.numel() else 0):
        drawn, count = number(tuple(mean.shape), piece), torch.zeros_like(mean)
        each = chance(count, torch.zeros_like(mean))
        whole = each.clone()
        on = (drawn > whole) & (each > 0) & (piece < pieces)
        while bool(on.any()):
            count = count + on
            each = torch.where(on, chance(count, each), each)
            whole = torch.where(on, whole + each, whole)
            # Beyond the mean, chances too small for the sum end it.
            on = on & (drawn > whole) & ((count < mean) | (each > 1e-18))
        total = total + torch.where(piece < pieces, count, 0.0)
    return total


def _poisson(number: Number, given: Given) -> Any:
    rate = given["input"].detach().double()
    pieces = (rate / PIECE).ceil()
    mean = rate / pieces.clamp(min=1)

    def chance(count: Tensor, before: Tensor) -> Tensor:
        return torch.where(count == 0, (-mean).exp(), before * mean / count.clamp(min=1))

    return _counted(number, mean, pieces, chance)


def _binomial(number: Number, given: Given) -> Any:
    trials, p = torch.broadcast_tensors(given["count"].detach().double(), given["prob"].detach().double())
    # Of rare failures the successes follow: chances are added up from a likely end.
    rare = torch.minimum(p, 1 - p)
    pieces = (trials / PIECE).ceil()
    each = (trials / pieces.clamp(min=1)).floor()
    more = trials - each * pieces
    counts = torch.zeros_like(rare)
    for part, (size, many) in enumerate(((each + 1, more), (each, pieces - more))):

        def chance(count: Tensor, before: Tensor, size: Tensor = size) -> Tensor:
            odds = before * (size - count + 1) / count.clamp(min=1) * rare / (1 - rare)
            return torch.where(count == 0, (size * torch.log1p(-rare)).exp(), odds.clamp(min=0))

        def apart(shape: tuple[int, ...], place: int, part: int = part) -> Tensor:
            return number(shape, 2 * place + part)

        counts = counts + _counted(apart, rare * size, many, chance)
    return torch.where(p > 0.5, trials - counts, counts)


def _gamma(number: Number, given: Given) -> Any:
    shape: Tensor = given["input"]
    out: Tensor = _Gamma.apply(shape, _of_gamma(number, shape.detach().double()).to(shape.dtype))  # type: ignore[no-untyped-call]
    return out


def _of_gamma(number: Number, alpha: Tensor) -> Tensor:
    """Source: Marsaglia and Tsang, A Simple Method for Generating Gamma Variables, 2000."""
    size = tuple(alpha.shape)
    d = torch.where(alpha < 1, alpha + 1, alpha) - 1 / 3
    c, out = 1 / (9 * d).sqrt(), d
    on = torch.ones_like(alpha, dtype=torch.bool)
    for turn in range(TRIES):
        z = normal(number(size, 2 * turn + 1))
        v = (1 + c * z) ** 3
        u = number(size, 2 * turn + 2)
        fits = (v > 0) & (u.log() < z * z / 2 + d * (1 - v + v.clamp(min=1e-300).log()))
        out = torch.where(on & fits, d * v, out)
        on = on & ~fits
        if not bool(on.any()):
            break
    boost = torch.where(alpha < 1, number(size, 0) ** (1 / alpha), 1.0)
    return (out * boost).clamp(min=torch.finfo(torch.float64).tiny)


class _Gamma(torch.autograd.Function):
    """What was drawn, with the gradient that torch gives a gamma number."""

    @staticmethod
    def forward(ctx: Any, alpha: Tensor, drawn: Tensor) -> Tensor:
        ctx.save_for_backward(alpha, drawn)
        return drawn

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        alpha, drawn = ctx.saved_tensors
        return grads[0] * torch._standard_gamma_grad(alpha, drawn), None


def _dirichlet(number: Number, given: Given) -> Any:
    drawn = _of_gamma(number, given["input"].detach().double())
    return drawn / drawn.sum(-1, keepdim=True)


LAWS: Final[Mapping[str, Law]] = {
    **dict.fromkeys(("rand", "rand_like", "uniform_"), _uniform),
    **dict.fromkeys(("randn", "randn_like", "normal", "normal_"), _normal),
    **dict.fromkeys(("randint", "randint_like"), _integers),
    **dict.fromkeys(("bernoulli", "bernoulli_"), _bernoulli),
    "exponential_": _exponential,
    "cauchy_": _cauchy,
    "geometric_": _geometric,
    "log_normal_": _log_normal,
    "random_": _random,
    "multinomial": _multinomial,
    "poisson": _poisson,
    "binomial": _binomial,
    "_standard_gamma": _gamma,
    "_sample_dirichlet": _dirichlet,
}
"""Torch's draw -> what it makes of uniform numbers."""

SIGNATURES: Final[Mapping[str, tuple[str, ...]]] = {
    **dict.fromkeys(("bernoulli", "bernoulli_"), ("p",)),
    "uniform_": ("from", "to"),
    **dict.fromkeys(("normal_", "log_normal_"), ("mean", "std")),
    "exponential_": ("lambd",),
    "cauchy_": ("median", "sigma"),
    "geometric_": ("p",),
    "random_": ("from", "to"),
    "multinomial": ("num_samples", "replacement"),
}
"""What the positions after the first tensor mean."""


def given_of(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given:
    """The arguments of a draw by name.

    Args:
        name: Of :data:`LAWS`.
        args: By place.
        kwargs: By name.
    """
    if name in ("rand", "randn"):
        size = args[0] if len(args) == 1 and isinstance(args[0], (tuple, list)) else args
        return {"size": size, **kwargs}
    if name in ("randint", "randint_like"):
        names: tuple[str, ...] = ("low", "high", "size") if name == "randint" else ("input", "low", "high")
        short = len(args) + sum(each in kwargs for each in names) < len(names)
        names = tuple(each for each in names if not (short and each == "low" and each not in kwargs))
    elif name in ("normal", "binomial"):
        names = ("mean", "std", "size") if name == "normal" else ("count", "prob")
    else:
        names = ("input", *SIGNATURES.get(name, ()))
    return {**dict(zip(names, args, strict=False)), **kwargs}


def handed_out(name: str, given: Given, rows: Tensor, out: Tensor) -> Tensor:
    """What a draw gives: numbers of the kind that torch gives, or the tensor that it writes to.

    Args:
        name: Of :data:`LAWS`.
        given: What it was given.
        rows: A tensor of the shape and kind that it has.
        out: What the law gave.
    """
    if not name.endswith("_"):
        return out if name == "multinomial" else out.to(given.get("dtype") or rows.dtype)
    written: Tensor = given["input"]
    with torch.no_grad():
        return written.copy_(out)


def likely(name: str, given: Given) -> Tensor:
    """Numbers of a law that are the same for equal rows: what a check takes for what is drawn.

    Args:
        name: Of :data:`LAWS`.
        given: What the law is given, and the shape.
    """
    device = next((value.device for value in given.values() if isinstance(value, Tensor)), None)

    def same(shape: tuple[int, ...], place: int) -> Tensor:  # of which no law makes 0
        return torch.full(shape, 0.7, dtype=torch.float64, device=given.get("device") or device)

    if name == "multinomial":  # of equal chances rounding would choose
        rows = given["input"].shape[:-1]
        return torch.arange(given["num_samples"], device=device).expand(*rows, given["num_samples"])
    return torch.ones(given["shape"], device=device) if "bernoulli" in name else LAWS[name](same, given)
