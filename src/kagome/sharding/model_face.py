"""Model face: what a sharded model shares with the user's model, which stays its own object.

Where it sits: ``collectives`` and ``results`` build on it, and so do both sharded models. Parameters, buffers
and layers are in the dicts of the user's model, under the same names: the face has no copy of them.
"""

from __future__ import annotations

import weakref
from typing import Any, Self

from torch import nn

from kagome.comm.mesh import Mesh
from kagome.comm.stats import Traffic
from kagome.errors import ModelError


class ModelFace(nn.Module):
    """A module that stands for a user's model on several ranks.

    Args:
        model: The user's module.
        mesh: The ranks.
    """

    model: nn.Module
    _closing: weakref.finalize[Any, Any]

    def __init__(self, model: nn.Module, mesh: Mesh) -> None:
        super().__init__()
        # The same dicts, so that parameters(), state_dict() and to() are the model's.
        for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[name] = getattr(model, name)
        # Not by assignment, which would register the model as a layer of its own.
        self.__dict__["model"] = model
        self.training = model.training
        self._mesh = mesh

    @property
    def rank(self) -> int:
        """The number of this rank's part, among the ranks that share the graph."""
        return self._mesh.graph.rank

    @property
    def ranks(self) -> int:
        """The number of ranks that share the graph, which is that of its parts."""
        return self._mesh.graph.size

    @property
    def traffic(self) -> Traffic:
        """What this rank has sent since the start: bytes and messages by kind, and the time of waits.

        ``halo`` are rows of neighbours and their gradients, ``stage`` values and gradients between stages,
        ``weights`` the sums of gradients. Each call returns a copy of its own.

        Example:
            >>> import kagome
            >>> from torch_geometric.nn import GCN
            >>> data = kagome.load("digits")
            >>> with kagome.shard(GCN(64, 16, num_layers=2, out_channels=1), data) as net:
            ...     before = net.traffic
            ...     out = net(data.x, data.edge_index)
            ...     net.traffic.since(before).bytes["halo"]  # one rank sends nothing
            0
        """
        return self._mesh.world.traffic.copy()

    def train(self, mode: bool = True) -> Self:
        """Set training mode, as the model's own ``train`` does; a step of a pipeline sets its own mode."""
        self.model.train(mode)
        self.training = mode
        return self

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load a whole ``state_dict``; all ranks load the same, and keep own rows of a cut table."""
        return self.model.load_state_dict(*args, **kwargs)

    def refuse_unusable(self) -> None:
        """Refuse a net that is closed.

        Raises:
            ModelError: If it is one.
        """
        if not self._closing.alive:
            raise ModelError(
                "an open sharded model", "one that is closed", hint="kagome.shard(model, graph) again"
            )

    def __enter__(self) -> Self:
        return self


def no_files() -> None:
    """Close nothing: a sharded model has no file open, which any thread could close."""
