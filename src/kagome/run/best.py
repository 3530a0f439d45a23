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
            self.waited = epoch - self.epoch
            return
        self.epoch, self.metric, self.waited = epoch, metric, 0
        self.weights = None  # the old copy goes before there is a new one
        self.weights = None if metric is None else _copy(model)

    def restore(self, model: nn.Module, epoch: int) -> dict[str, Tensor] | None:
        """Give the model the best epoch's weights.

        Args:
            model: With those of the last epoch.
            epoch: The last epoch.

        Returns:
            Those that it had, where they are others.
        """
        if self.weights is None or self.epoch == epoch:
            return None
        last = _copy(model)
        model.load_state_dict(self.weights)
        return last

    def place(self, epoch: int, seed: int, world_size: int, fingerprint: str) -> checkpoint.Place:
        """What a checkpoint says of the run."""
        return checkpoint.Place(epoch, seed, self.epoch, self.metric, self.waited, world_size, fingerprint)


def _copy(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}
