"""Check command: compares a split run with an unsplit one, for ``kagome check``.

Where it sits: ``cli.app`` calls :func:`checked`; ``verify.check`` does the comparison.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace

import torch
from torch import nn
from torch_geometric.data import HeteroData

from kagome.comm.channel import Channel
from kagome.components.model_setup import few_rows, materialise
from kagome.config import Parallel, Run
from kagome.graph.datasets.load import load_graph
from kagome.graph.partition.partition import Partition
from kagome.graph.partition.sets_partition import Part
from kagome.graph.partition.store import Meta
from kagome.model.decouple.decouple import decouple
from kagome.train.admission import foresee_split
from kagome.train.data import for_model, from_data
from kagome.train.engines import refuse_slices_by_pyg
from kagome.train.sets_source import from_hetero, refuse_for_sets
from kagome.verify.check import CheckResult, check, sums_sent

PARTS = 3
"""Number of parts to split into if no flag gives it."""
LEFT_OUT = {
    "pipelines of exact chunks change no number": ("pipe", "stages_per_rank", "schedule"),
    "rows that are old, dropped or drawn differ, and are meant to": ("max_age", "skip_drift", "halo_sample"),
    "codecs round": ("codec", "codec_backward", "codec_stage", "codec_weights"),
}
"""Settings that are left out of the comparison, by the reason."""


def checked(
    settings: Run, build: Callable[[Part, Meta, Channel], nn.Module], *, vertices: int
) -> tuple[CheckResult, tuple[str, ...]]:
    """Compare the model split as the settings say with the whole model, on a sample.

    Args:
        settings: The settings of the run to check.
        build: Makes the model.
        vertices: The number of vertices of the sample.

    Returns:
        The result of the comparison, and messages on settings that were left out and the memory that a rank
        would need.

    Raises:
        ConfigError: If the settings slice features without the kernels that sum slices.
        ModelError: If the model fails on the sample, or cannot be decoupled.
    """
    cut, seed = settings.parallel, settings.train.seed
    refuse_slices_by_pyg(settings, torch.device("cuda"))  # the device of the run's ranks, not of this check
    # One process without peers: the ranks of the check are threads on a sample.
    alone = Channel(None, "cpu")
    data = load_graph(settings.data)
    if isinstance(data, HeteroData):
        refuse_for_sets(cut, cut.graph or 1, "--parallel")
        found: tuple[Part, Meta] = from_hetero(data, replace(settings, parallel=Parallel()), alone)
    else:
        found = from_data(data, alone, method="contiguous", seed=0)
    part, meta = for_model(settings.model.name, *found)
    torch.manual_seed(seed)
    model = build(part, meta, alone)
    if not isinstance(part, Partition):
        materialise(model, part, torch.device("cpu"))
    # A decoupled model is another model, which is compared with itself, whole.
    if cut.decouple and isinstance(part, Partition):  # refused for several vertex types
        materialise(model, part, torch.device("cpu"))
        model = decouple(model, few_rows(part, torch.device("cpu")))
    # `parts` counts ranks: with slices each part has `tensor` of them.
    parts = (cut.graph or 1) * cut.tensor if cut.tensor > 1 else cut.graph or PARTS
    result = check(
        model,
        part,
        parts=parts,
        vertices=vertices,
        seed=seed,
        tensor=cut.tensor,
        fast=settings.model.fast,
        partial_sums=sums_sent(cut, part),
    )
    notes = left_out(cut)
    # The estimate of memory that needs no ranks covers parts of one vertex set only.
    if cut.tensor == 1 and cut.pipe == 1 and isinstance(part, Partition):
        notes = (*notes, foresee_split(model, part, settings, cut.graph or 1))
    return result, notes


def left_out(cut: Parallel) -> tuple[str, ...]:
    """Return a sentence for each kind of setting that is left out of the comparison."""
    usual = {field.name: field.default for field in fields(Parallel)}
    notes = []
    for why, names in LEFT_OUT.items():
        # Chunks read rows of an earlier epoch, unless they are exact.
        if "max_age" in names and cut.cross_chunk != "exact":
            names = ("chunks", *names)
        found = [f"{name}={getattr(cut, name)!r}" for name in names if getattr(cut, name) != usual[name]]
        if found:
            notes.append(f"compared without {', '.join(found)}: {why}")
    return tuple(notes)
