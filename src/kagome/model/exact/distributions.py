"""Distributions: torch's random draws made of uniform numbers, so that a vertex draws alike on any ranks.

Where it sits: ``handlers`` gives a law the uniform numbers of each row, from
:mod:`kagome.model.exact.dropout`; ``verify.trace`` uses typical values (:func:`likely`).

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
"""``number(shape, place)``: float64 uniform numbers in (0, 1); each place of a call has other numbers."""
Given = dict[str, Any]
Law = Callable[[Number, Given], Any]

PIECE: Final = 32.0
"""Largest mean drawn at once where counts add up; ``exp(-mean)`` must not underflow in float64."""
TRIES: Final = 64
"""Attempts of the rejection sampler, which accepts 19 of 20 numbers: all are accepted after so many."""


def normal(uniform: Tensor) -> Tensor:
    """Turn uniform numbers into standard normal ones."""
    # The inverse of the normal distribution function: sqrt(2) erfinv(2 u - 1).
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
    # The inverse of 1 - exp(-lambda t), with u in place of 1 - u. Numbers are never 0, so the log is finite.
    return -number(given["shape"], 0).log() / given.get("lambd", 1.0)


def _cauchy(number: Number, given: Given) -> Any:
    # The inverse of the Cauchy distribution function: tan(pi (u - 1/2)).
    turned = torch.tan(math.pi * (number(given["shape"], 0) - 0.5))
    return given.get("median", 0.0) + given.get("sigma", 1.0) * turned


def _geometric(number: Number, given: Given) -> Any:
    # The trial of the first success: the least k with 1 - (1 - p)^k >= 1 - u.
    return (number(given["shape"], 0).log() / math.log1p(-given["p"])).ceil().clamp(min=1)


def _bernoulli(number: Number, given: Given) -> Any:
    p = given.get("p")
    return number(given["shape"], 0) < (given["input"] if p is None else p)


def _integers(number: Number, given: Given) -> Any:
    low, high = given.get("low", 0), given["high"]
    # Two numbers of 32 bits, because the range may exceed one.
    wide = ((number(given["shape"], 0) * 2**32).floor() + number(given["shape"], 1)) / 2**32
    return low + (wide.clamp(max=1 - 2**-53) * (high - low)).long()


def _random(number: Number, given: Given) -> Any:
    low, high, kind = given.get("from", 0), given.get("to"), given["input"].dtype
    if high is None and "from" in given:
        low, high = 0, low
    if high is None:
        # As torch does: floats get integers that the type holds exactly, up to 2^24 for float32.
        high = 2 ** round(1 - math.log2(torch.finfo(kind).eps)) if kind.is_floating_point else None
        high = torch.iinfo(kind).max if high is None else high
    return _integers(number, {"shape": given["shape"], "low": low, "high": high})


def _multinomial(number: Number, given: Given) -> Any:
    """Draw categories of each row; without replacement, the first finishers of an exponential race."""
    p, count = given["input"].detach().double(), given["num_samples"]
    if given.get("replacement", False):
        shares = p.cumsum(-1)
        drawn = number((*p.shape[:-1], count), 0) * shares[..., -1:]
        # Rounding must not choose a category of probability 0 at the end of a row.
        last = p.size(-1) - 1 - p.flip(-1).ne(0).int().argmax(-1, keepdim=True)
        return torch.minimum(torch.searchsorted(shares, drawn, right=True), last)
    # -log(u) / p is exponential with rate p, so category i comes first with probability p_i / sum p, and the
    # order of the others is that of draws without replacement. A probability of 0 takes for ever.
    race = -number(tuple(p.shape), 0).log() / p
    return race.topk(count, -1, largest=False).indices


def _counted(
    number: Number, mean: Tensor, pieces: Tensor, chance: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """Draw counts that are sums of ``pieces``; each adds up probabilities until they pass a uniform number.

    Args:
        number: Uniform numbers of the call.
        mean: Mean of a piece, for its shape.
        pieces: Number of pieces that each entry adds up.
        chance: Probability of a count (first argument), given that of the count before it (second argument).
    """
    # For each piece: the count is the least k with P(0) + ... + P(k) >= u. All entries of the tensor search
    # together; ``on`` has those that have not arrived.
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
            # Beyond the mean, probabilities too small to change the sum end the search.
            on = on & (drawn > whole) & ((count < mean) | (each > 1e-18))
        total = total + torch.where(piece < pieces, count, 0.0)
    return total


def _poisson(number: Number, given: Given) -> Any:
    # A sum of independent Poisson numbers is Poisson with the sum of the means. P(k) = P(k - 1) mean / k.
    rate = given["input"].detach().double()
    pieces = (rate / PIECE).ceil()
    mean = rate / pieces.clamp(min=1)

    def chance(count: Tensor, before: Tensor) -> Tensor:
        return torch.where(count == 0, (-mean).exp(), before * mean / count.clamp(min=1))

    return _counted(number, mean, pieces, chance)


def _binomial(number: Number, given: Given) -> Any:
    trials, p = torch.broadcast_tensors(given["count"].detach().double(), given["prob"].detach().double())
    # Count the rarer outcome, so that probabilities are added up from a likely end.
    rare = torch.minimum(p, 1 - p)
    pieces = (trials / PIECE).ceil()
    each = (trials / pieces.clamp(min=1)).floor()
    more = trials - each * pieces
    # ``more`` pieces of each + 1 trials and the others of ``each`` trials make up all trials. Both kinds draw
    # numbers of their own: even places of a call for the one, odd places for the other.
    counts = torch.zeros_like(rare)
    for part, (size, many) in enumerate(((each + 1, more), (each, pieces - more))):

        def chance(count: Tensor, before: Tensor, size: Tensor = size) -> Tensor:
            # P(k) = P(k - 1) (n - k + 1) / k p / (1 - p); below 0 beyond k = n, where it is 0.
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
    """Draw gamma numbers of shape ``alpha`` by rejection, in float64.

    Source: Marsaglia and Tsang, A Simple Method for Generating Gamma Variables, 2000.
    """
    # Place 0 of the call is for the boost; attempt i takes places 2 i + 1 and 2 i + 2.
    size = tuple(alpha.shape)
    d = torch.where(alpha < 1, alpha + 1, alpha) - 1 / 3
    c, out = 1 / (9 * d).sqrt(), d
    on = torch.ones_like(alpha, dtype=torch.bool)
    for attempt in range(TRIES):
        z = normal(number(size, 2 * attempt + 1))
        v = (1 + c * z) ** 3
        u = number(size, 2 * attempt + 2)
        fits = (v > 0) & (u.log() < z * z / 2 + d * (1 - v + v.clamp(min=1e-300).log()))
        out = torch.where(on & fits, d * v, out)
        on = on & ~fits
        if not bool(on.any()):
            break
    # The method needs a shape of 1 or more: gamma(a) = gamma(a + 1) u^(1 / a).
    boost = torch.where(alpha < 1, number(size, 0) ** (1 / alpha), 1.0)
    return (out * boost).clamp(min=torch.finfo(torch.float64).tiny)


class _Gamma(torch.autograd.Function):
    """Autograd function of drawn gamma numbers, with torch's gradient by their shape."""

    @staticmethod
    def forward(ctx: Any, alpha: Tensor, drawn: Tensor) -> Tensor:
        ctx.save_for_backward(alpha, drawn)
        return drawn

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        alpha, drawn = ctx.saved_tensors
        return grads[0] * torch._standard_gamma_grad(alpha, drawn), None


def _dirichlet(number: Number, given: Given) -> Any:
    # Gamma numbers over their sum are Dirichlet.
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
"""Name of torch's draw -> the law that computes it from uniform numbers."""

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
"""Names of the arguments after the first tensor, by position."""


def given_of(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given:
    """Return the arguments of a draw by name.

    Args:
        name: A key of :data:`LAWS`.
        args: Arguments by position.
        kwargs: Arguments by name.
    """
    if name in ("rand", "randn"):
        size = args[0] if len(args) == 1 and isinstance(args[0], (tuple, list)) else args
        return {"size": size, **kwargs}
    if name in ("randint", "randint_like"):
        # ``randint(high, size)`` leaves out ``low``, which is the first argument of the long form.
        names: tuple[str, ...] = ("low", "high", "size") if name == "randint" else ("input", "low", "high")
        short = len(args) + sum(each in kwargs for each in names) < len(names)
        names = tuple(each for each in names if not (short and each == "low" and each not in kwargs))
    elif name in ("normal", "binomial"):
        names = ("mean", "std", "size") if name == "normal" else ("count", "prob")
    else:
        names = ("input", *SIGNATURES.get(name, ()))
    return {**dict(zip(names, args, strict=False)), **kwargs}


def handed_out(name: str, given: Given, rows: Tensor, out: Tensor) -> Tensor:
    """Return the result of a draw: numbers of the type that torch returns, or the tensor written in place.

    Args:
        name: A key of :data:`LAWS`.
        given: Arguments of the draw.
        rows: A tensor of the shape and type of the result.
        out: Numbers that the law returned.
    """
    if not name.endswith("_"):
        return out if name == "multinomial" else out.to(given.get("dtype") or rows.dtype)
    written: Tensor = given["input"]
    with torch.no_grad():
        return written.copy_(out)


def likely(name: str, given: Given) -> Tensor:
    """Return typical numbers of a law, equal for equal rows: a check uses them in place of random ones.

    Args:
        name: A key of :data:`LAWS`.
        given: Arguments of the draw, and the shape.
    """
    device = next((value.device for value in given.values() if isinstance(value, Tensor)), None)

    def same(shape: tuple[int, ...], place: int) -> Tensor:  # no law turns this number into 0
        return torch.full(shape, 0.7, dtype=torch.float64, device=given.get("device") or device)

    if name == "multinomial":  # between equal probabilities rounding would decide
        rows = given["input"].shape[:-1]
        return torch.arange(given["num_samples"], device=device).expand(*rows, given["num_samples"])
    # 0.7 would be above most probabilities: a mask of zeros, after which a check compares zeros.
    return torch.ones(given["shape"], device=device) if "bernoulli" in name else LAWS[name](same, given)
