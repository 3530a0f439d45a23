"""Engine choice: the graph engine runs the whole model on a part, the chunk engine runs stages and chunks.

Where it sits: ``trainer`` asks for one; both have the interface of ``components.engine.Engine``.
"""

from __future__ import annotations

import torch
from torch import nn

from kagome import config
from kagome.comm.mesh import Mesh
from kagome.components.engine import Engine, PhaseTimer
from kagome.errors import ConfigError
from kagome.graph.partition.partition import Partition
from kagome.graph.partition.sets_partition import Part
from kagome.objective.optimizers import Criteria
from kagome.pipelining.chunk_engine import ChunkEngine
from kagome.train.graph_engine import GraphEngine


def build_engine(
    model: nn.Module,
    part: Part,
    mesh: Mesh,
    *,
    settings: config.Run,
    criteria: Criteria,
    phases: PhaseTimer,
) -> Engine:
    """Return the engine that a mesh and its chunks need.

    Args:
        model: The user's module.
        part: This rank's part.
        mesh: All ranks.
        settings: The run's settings.
        criteria: The loss and the metric.
        phases: Receives the time of each phase.

    Raises:
        ConfigError: If settings clash.
        ModelError: If the model cannot be run in this way.
    """
    parallel = settings.parallel.fit(mesh.size)
    refuse_slices_by_pyg(settings, mesh.device)
    if settings.model.recompute and parallel.activations == "host":
        raise ConfigError(
            "layers that save for backward what parallel.activations='host' moves",
            "model.recompute=True, which lets them save nothing",
            hint="one of the two",
        )
    # One stage and one chunk: all rows of the part are there at once, so no table of historical rows is
    # needed.
    if parallel.pipe == 1 and parallel.chunks == 1:
        return GraphEngine(
            model,
            part,
            mesh.graph,
            weights=mesh.weights,
            parallel=parallel,
            settings=settings.train,
            criteria=criteria,
            phases=phases,
            fast=settings.model.fast,
            recompute=settings.model.recompute,
            records_peak=settings.report.memory,
        )
    assert isinstance(part, Partition)  # stages and chunks of several vertex sets are refused with the data
    if settings.recomputes:
        raise ConfigError(
            "a layer's rows to stay until it runs again in backward, for model.recompute or "
            "activations='recompute'",
            f"pipe={parallel.pipe}, chunks={parallel.chunks}, where they have gone on by then",
            hint="leave --model.recompute out, or --parallel.graph alone",
        )
    return ChunkEngine(
        model,
        part,
        mesh,
        parallel=parallel,
        settings=settings.train,
        criteria=criteria,
        phases=phases,
        fast=settings.model.fast,
    )


def refuse_slices_by_pyg(settings: config.Run, device: torch.device) -> None:
    """Raise an error if features are to be sliced where messages do not run through Kagome's kernels.

    Feature slices are summed by kernels. PyG's own gather and scatter cannot sum slices.

    Raises:
        ConfigError: If features are to be sliced there.
    """
    tensor, bare = settings.parallel.tensor, settings.train.amp == "bf16" and device.type == "cpu"
    if tensor > 1 and (bare or not settings.model.fast):
        raise ConfigError(
            f"kernels that sum columns for tensor={tensor}",
            "train.amp='bf16', without any on a CPU" if bare else "model.fast=False, which leaves them out",
            hint="leave it out, or graph instead of tensor",
        )
