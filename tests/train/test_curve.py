"""The learning curve does not know the number of ranks, and on one rank without dropout it is plain PyG's."""

from __future__ import annotations

import pytest
import torch

from kagome import Trainer
from training import QUIET, curve, graph, losses, model, plain_losses, settings

EPOCHS = 10


@pytest.fixture(scope="module")
def one_rank():
    """Curves on one rank, each made once."""
    made: dict[tuple, dict] = {}

    def get(ranks, *key):
        if key not in made:
            made[key] = ranks(1, curve, *key)[0]
        return made[key]

    return get


def same(a: dict, b: dict, *, atol: float) -> None:
    torch.testing.assert_close(a["losses"], b["losses"], rtol=0, atol=atol)
    torch.testing.assert_close(a["weights"], b["weights"], rtol=0, atol=atol * 10)
    torch.testing.assert_close(a["scores"], b["scores"], rtol=0, atol=atol * 100)


@pytest.mark.some(4)
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("name", ["gcn", "gat"])
def test_with_dropout_and_batch_norm_the_curve_is_the_same_on_any_number_of_ranks(
    ranks, one_rank, world, name
):
    alone = one_rank(ranks, name, 0.5, torch.float64, EPOCHS)
    found = ranks(world, curve, name, 0.5, torch.float64, EPOCHS)
    same(found[0], alone, atol=1e-9)
    assert found[0]["metrics"] == alone["metrics"]
    assert found[0]["test"] == alone["test"]
    assert len(set(alone["losses"])) == EPOCHS
    assert alone["losses"][-1] < alone["losses"][0]
    for other in found[1:]:
        assert {key: other[key] for key in ("losses", "metrics", "test")} == {
            key: found[0][key] for key in ("losses", "metrics", "test")
        }
        for key, value in found[0]["weights"].items():
            assert torch.equal(value, other["weights"][key]), f"{key} drifts apart"


def test_dropout_is_on_and_follows_the_seed(ranks, one_rank):
    alone = one_rank(ranks, "gcn", 0.5, torch.float64, EPOCHS)
    without = one_rank(ranks, "gcn", 0.0, torch.float64, EPOCHS)
    assert abs(alone["losses"][0] - without["losses"][0]) > 1e-3
    other = model("gcn", 0.5, torch.float64)
    with Trainer(other, graph(torch.float64), train=settings(epochs=1, seed=7), report=QUIET) as trainer:
        trainer.fit()
        assert abs(losses(trainer)[0] - alone["losses"][0]) > 1e-6


def test_float32_agrees_to_rounding(ranks, one_rank):
    alone = one_rank(ranks, "gcn", 0.5, torch.float32, EPOCHS)
    torch.testing.assert_close(
        ranks(3, curve, "gcn", 0.5, torch.float32, EPOCHS)[0]["losses"], alone["losses"], rtol=0, atol=1e-4
    )


@pytest.mark.parametrize("name", ["gcn", "gat"])
def test_one_rank_without_dropout_is_a_plain_training_loop(name):
    data = graph(torch.float64)
    plain = model(name, 0.0, torch.float64)
    expected = plain_losses(plain, data, 5)
    mine = model(name, 0.0, torch.float64)
    # Without a validation set no epoch is the best: the weights are the last epoch's.
    data.val_mask = torch.zeros_like(data.val_mask)
    with Trainer(mine, data, train=settings(epochs=5), report=QUIET) as trainer:
        trainer.fit()
        torch.testing.assert_close(losses(trainer), expected, rtol=0, atol=1e-10)
        for key, value in plain.state_dict().items():
            torch.testing.assert_close(mine.state_dict()[key], value, rtol=0, atol=1e-10, msg=key)
