"""What autograd saves: recorded while it is held, freed with its graph, and checked as torch does."""

from __future__ import annotations

import pytest
import torch

from kagome.model.saved_tensor_hook import SavedTensors


def test_a_tensor_is_recorded_until_autograd_releases_it() -> None:
    saved, weight = SavedTensors(), torch.ones(3, requires_grad=True)
    with saved.recording():
        result = weight.exp()
    alone = weight.sigmoid()  # outside of the block
    (kept,) = saved.alive()
    assert kept.data_ptr() == result.data_ptr()
    assert kept.grad_fn is None
    (result.sum() + alone.sum()).backward()
    del kept
    assert saved.alive() == []


def test_a_result_that_its_own_node_saves_does_not_keep_the_node_alive() -> None:
    saved, weight = SavedTensors(), torch.ones(3, requires_grad=True)
    with saved.recording():
        result = weight.exp()
    del result
    assert saved.take() == []


def test_those_that_stay_outlive_their_graph_until_they_are_taken() -> None:
    saved, weight = SavedTensors(keeps=True), torch.ones(3, requires_grad=True)
    for count in (1, 2):
        with saved.recording():
            for _ in range(count):
                weight.exp().sum().backward()
        assert len(saved.alive()) == count
        assert len(saved.take()) == count
        assert saved.take() == []


def test_a_saved_tensor_that_was_written_to_is_refused() -> None:
    weight = torch.ones(3, requires_grad=True)
    with SavedTensors().recording():
        result = weight.exp()
    result.detach().add_(1)
    with pytest.raises(RuntimeError, match=r"modified by an inplace.*expected version 0"):
        result.sum().backward()
