"""Outcomes: a model by Kagome on some ranks, as a result to compare, or the sentence that refused it.

Where it sits: tests of tables of models that must be equal to plain PyG or refused by name.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch_geometric.data import Data

from convolutions import double_precision
from kagome.comm.channel import Channel
from kagome.comm.in_process.thread_group import ThreadGroup
from kagome.errors import KagomeError
from parity import Build, Result, Share, alone, joined, parity, seeded


def outcome(build: Build, data: Data, owner: Tensor, world: int, **more: int) -> Result | str:
    """Train a model on so many ranks, each a thread.

    Args:
        build: Makes the model.
        data: The whole graph.
        owner: Part of each vertex.
        world: Ranks.
        more: As of ``parity``.

    Returns:
        What the ranks left, or what the first of them said when it refused the model.
    """
    with double_precision():
        # The ranks are threads, which share torch's generator: the models are made before.
        models = [seeded(build, 0) for _ in range(world)]
        return _outcome(models, data, owner, more)


def _outcome(models: list[nn.Module], data: Data, owner: Tensor, more: dict[str, int]) -> Result | str:
    def work(channel: Channel) -> Share:
        return parity(channel, lambda: models[channel.rank], data, owner, **more)

    try:
        shares = [work(alone())] if len(models) == 1 else ThreadGroup(len(models)).run(work)
    except KagomeError as refused:  # one rank's: the others' waits end with it
        return f"{type(refused).__name__}: {refused}"
    return joined(shares, data.num_nodes)
