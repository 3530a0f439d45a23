"""Models that cannot be split, on two parts without the check: what the marks refuse, and what they miss."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_models_by_hand import FOUND, REFUSED
from torch import nn

import place_models
from by_hand import Body, ByHand, graph
from convolutions import double_precision
from kagome.errors import ModelError
from kagome.verify.check import check

MORE: dict[str, tuple[Body, dict[str, Callable[[], nn.Module]]]] = {
    "distances": (lambda m, x, e, d: torch.cdist(x, x).softmax(1) @ x, {}),
    "all pairs by einsum": (lambda m, x, e, d: torch.einsum("id,jd->ij", x, x).softmax(1) @ x, {}),
    "all pairs by broadcast": (lambda m, x, e, d: (x[:, None] * x[None]).sum(1), {}),
    "covariance": (lambda m, x, e, d: x @ torch.cov(x.t()), {}),
    "correlation": (lambda m, x, e, d: x @ torch.corrcoef(x.t()), {}),
    "frequencies": (lambda m, x, e, d: torch.fft.fft(x, dim=0).real, {}),
    "directions": (lambda m, x, e, d: torch.linalg.svd(x, full_matrices=False)[0], {}),
    "quantile": (lambda m, x, e, d: x - torch.quantile(x, 0.3, dim=0), {}),
    "rank": (lambda m, x, e, d: x * x.argsort(0).argsort(0), {}),
    "third": (lambda m, x, e, d: x - x.kthvalue(3, 0).values, {}),
    "largest": (lambda m, x, e, d: x - x.topk(3, 0).values.mean(0), {}),
    "running maximum": (lambda m, x, e, d: x.cummax(0).values, {}),
    "running product": (lambda m, x, e, d: x.sigmoid().cumprod(0), {}),
    "smoothed": (lambda m, x, e, d: F.avg_pool1d(x.t()[None], 3, 1, 1)[0].t(), {}),
    "convolved": (lambda m, x, e, d: m.c(x.t()[None])[0].t(), {"c": lambda: nn.Conv1d(8, 8, 3, padding=1)}),
    "padded": (lambda m, x, e, d: F.pad(x, (0, 0, 1, 0))[:-1], {}),
    "histogram": (lambda m, x, e, d: x * torch.histc(x.detach(), 4).softmax(0)[0], {}),
    "kinds in order": (lambda m, x, e, d: x * torch.unique(x.detach()[:, 0].round()).numel(), {}),
    "one by one": (lambda m, x, e, d: torch.stack([row * i for i, row in enumerate(x)]), {}),
    "transposed blocks": (lambda m, x, e, d: x.t().reshape(x.shape), {}),
    "a list": (lambda m, x, e, d: x - torch.tensor(x.tolist()).mean(0), {}),
    "drawn by numpy": (lambda m, x, e, d: x * torch.from_numpy(np.random.rand(*x.shape)), {}),
    "causal attention": (lambda m, x, e, d: F.scaled_dot_product_attention(x, x, x, is_causal=True), {}),
    "drawn among all": (lambda m, x, e, d: x * torch.multinomial(x.softmax(0)[:, 0], 3).sum(), {}),
}

ODD = {
    **MORE,
    **{f"by hand: {name}": found[:2] for name, found in {**REFUSED, **FOUND}.items()},
    **{f"by place: {name}": found[:2] for name, found in place_models.REFUSED.items()},
}
MISSED = {"by hand: mean through memory", "drawn by numpy"}
"""Silently wrong without the check: what is not of torch, where no mark goes."""


def outcome(name: str) -> str:
    """``refused`` by the marks, ``fails`` on a part, ``equal``, or ``wrong``."""
    body, modules = ODD[name]
    with double_precision():
        torch.manual_seed(0)
        try:
            found = check(ByHand(body, **modules), graph(), parts=2)
        except ModelError as error:
            part = error.expected == "the model to run on a part of the graph as it runs on the whole"
            return "fails" if part else "refused"
    return "wrong" if found.first is not None else "equal"


@pytest.mark.slow
def test_the_marks_refuse_what_they_can_know_without_the_check() -> None:
    found: dict[str, set[str]] = defaultdict(set)
    for name in ODD:
        found[outcome(name)].add(name)
    assert found["wrong"] == MISSED
    assert found["refused"] == ODD.keys() - MISSED
    assert len(ODD) >= 50
