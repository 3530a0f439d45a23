"""Copies of models, also of those whose layers keep what a forward computed."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from kagome.model.copies import copied


def normed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.utils.spectral_norm(nn.Linear(3, 4)), nn.ReLU(), nn.Linear(4, 2))


def test_a_weight_that_a_forward_left_is_copied_by_its_values():
    model, x = normed(), torch.ones(5, 3)
    model(x).sum().backward()
    with pytest.raises(RuntimeError, match="deepcopy"):
        copy.deepcopy(model)  # else this file is not needed
    twin = copied(model)
    left, right = model.eval()(x), twin.eval()(x)
    torch.testing.assert_close(left, right, rtol=0, atol=0)
    mine, theirs = (dict(each.named_parameters()) for each in (model, twin))
    assert all(mine[name] is not theirs[name] for name in mine)
    twin.train()(x).sum().backward()
    assert twin[0].weight_orig.grad is not None


def test_what_is_shared_is_not_copied():
    model = normed()
    model(torch.ones(5, 3))
    twin = copied(model, {id(p): p for p in model.parameters()})
    assert list(map(id, twin.parameters())) == list(map(id, model.parameters()))
