"""Chunks and reads by id have the same bits where ``index_add_`` has no order of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from collisions import as_on_a_gpu
from kagome.comm.channel import Channel
from pipelines import trained


def as_atomic(channel: Channel, *args: Any) -> tuple[Any, int]:
    with as_on_a_gpu() as found:
        told = trained(channel, *args)
    assert found.sums
    return told, len(found.twice)


@pytest.mark.parametrize("how", ["history", "exact"])
def test_chunks_of_three_parts(ranks, how):
    mesh = {"graph": 3, "chunks": 2, "cross_chunk": how}
    plain = ranks(3, trained, "sage", mesh, 3)
    for (found, twice), wanted in zip(ranks(3, as_atomic, "sage", mesh, 3), plain, strict=True):
        assert not twice
        assert found["losses"] == wanted["losses"]
        for name, weight in found["weights"].items():
            assert torch.equal(weight, wanted["weights"][name]), name
