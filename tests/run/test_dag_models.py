"""Modules of many kinds give plain training's numbers in a pipeline, or are refused in a sentence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from unseen import MODELS, piped, plain

EXACT: dict[str, Any] = {"rtol": 0.0, "atol": 1e-10}


@pytest.mark.parametrize("world", [1, 2])
def test_gradients_are_plain_trainings(ranks, world):
    found = ranks(world, piped, list(MODELS))
    for name in MODELS:
        losses, gradients, scores, state = plain(name)
        seen = set()
        for rank in found:
            assert not isinstance(rank[name], str), f"{name}: {rank[name]}"
            assert rank[name][0] == pytest.approx(losses, rel=0, abs=1e-10), name
            torch.testing.assert_close(rank[name][2], scores, **EXACT, msg=name)
            torch.testing.assert_close(rank[name][3], state, **EXACT, msg=name)
            for key, gradient in rank[name][1].items():
                torch.testing.assert_close(gradient, gradients[key], **EXACT, msg=f"{name}: {key}")
                seen.add(key)
        assert seen >= {key for key, gradient in gradients.items() if gradient is not None}, name
