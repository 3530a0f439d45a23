"""Loss weights: the sum of all weights of a loss over all ranks, by which each rank divides its own sum.

Where it sits: ``train.graph_engine`` and ``pipelining.chunk_engine`` settle it before the first weight
update.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kagome.comm.channel import Channel
from kagome.errors import ConfigError, DataError
from kagome.objective.loss_trials import copied
from kagome.objective.objective import Objective, Target

# [Note: mean over ranks] The loss is one mean over all training vertices, not a mean of the ranks' means:
# parts have different numbers of them, and some have none.
#
#     rank 0    lost = 6.0, 4 vertices      6.0 / 6 = 1.0 ┐
#     rank 1    lost = 3.0, 2 vertices      3.0 / 6 = 0.5 ┼── sum 1.5 = 9.0 / 6
#     rank 2    lost = 0.0, 0 vertices      0.0 / 6 = 0.0 ┘
#
# Each rank divides by the total of all ranks, so gradients are summed over ranks and not averaged.


class LossWeights:
    """The number that a rank divides its sum of losses by, so that the sum over ranks is the mean over all.

    Args:
        objective: The loss.
        channel: The ranks that share the graph.
    """

    def __init__(self, objective: Objective, channel: Channel) -> None:
        self.objective, self.channel = objective, channel
        self.total: float | None = None
        self._own = 0.0
        self._seen: float | None = None

    def settle(self, target: Target, out: Any) -> None:
        """Find the sum of weights, once. All ranks call it.

        Args:
            target: The targets of this rank's training vertices.
            out: The model's output for them; None before there is one. A user's loss that gives weights needs
                it.

        Raises:
            DataError: If all weights are 0.
        """
        if self.total is not None:
            return
        share = self.objective.share(target)
        # The weights of a user's loss are known once it runs, so they need
        # the first output; its state is put back.
        if share is None:
            if out is None:
                return
            with self.objective.tried():
                # A loss may fail on no rows at all, so it is not called for them.
                weight = self.objective.lost(copied(out), target)[1] if target.y.size(0) else None
            share = float(target.y.size(0)) if weight is None else float(weight)
            self._own = share
        # float64 counts exactly; float32 stops doing so at 16.7 million vertices.
        mine = torch.tensor([share], dtype=torch.float64, device=self.channel.device)
        found = float(self.channel.all_reduce(mine, action="count training vertices", kind="other"))
        if not found > 0:
            raise DataError("the weights of all training vertices to have a sum above 0", f"{found:g}")
        self.total = found

    def mean(self, lost: Tensor, weight: Tensor | None) -> Tensor:
        """Return what some rows contribute to the mean.

        Args:
            lost: The rows' sum of weighted values.
            weight: The sum of the rows' weights, if a user's loss gives it.
        """
        assert self.total is not None
        if weight is not None:
            # Chunks and stages add their shares, until `done` compares the sum.
            self._seen = float(weight) + (self._seen or 0.0)
        return lost / self.total

    def done(self) -> None:
        """Check the weights at the end of an epoch, once all of its rows were added.

        Raises:
            ConfigError: If their sum is not the one that was settled.
        """
        seen, self._seen = self._seen, None
        # The total was settled once. Weights that drift with the
        # output would silently change the loss's scale.
        if seen is not None and not abs(seen - self._own) <= 1e-6 * max(abs(self._own), 1.0):
            raise ConfigError(
                "loss(out, y) to give (values, weights), with weights that depend on labels alone",
                f"weights whose sum was {self._own:g} and is {seen:g} now",
                hint="weights of y alone",
            )
