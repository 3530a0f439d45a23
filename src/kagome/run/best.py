"""Best: the best epoch so far and its weights.

Where it sits: ``trainer`` shows it every evaluation; checkpoints carry it.
"""

from __future__ import annotations

from torch import Tensor, nn

from kagome.run import checkpoint


class Best:
    """The best epoch so far and its weights."""

    def __init__(self) -> None:
        self.epoch, self.waited = 0, 0
        self.metric: float | None = None
        self.weights: dict[str, Tensor] | None = None

    @classmethod
    def at(cls, place: checkpoint.Place, weights: dict[str, Tensor] | None) -> Best:
        """As a checkpoint has it."""
        best = cls()
        best.epoch, best.metric, best.waited = place.best_epoch, place.best_metric, place.waited
        best.weights = weights
        return best

    def see(self, epoch: int, metric: float | None, model: nn.Module) -> None:
        """Note an evaluation; of equals the first stays. Without a metric the last epoch is the best."""
        if metric is not None and self.metric is not None and metric <= self.metric:
            self.waited += 1
            return
        self.epoch, self.metric, self.waited = epoch, metric, 0
        self.weights = (
            None if metric is None else {k: v.detach().clone() for k, v in model.state_dict().items()}
        )

    def restore(self, model: nn.Module) -> None:
        """Give the model the best epoch's weights."""
        if self.weights is not None:
            model.load_state_dict(self.weights)

    def place(self, epoch: int, seed: int, world_size: int, fingerprint: str) -> checkpoint.Place:
        """What a checkpoint says of the run."""
        return checkpoint.Place(epoch, seed, self.epoch, self.metric, self.waited, world_size, fingerprint)
