"""Host forecast: tells a user who asks for late or sampled rows on one host that exact rows are faster there.

Where it sits: ``train`` and ``sharding.shard`` ask for it once, before the first epoch or step;
``planner.cost_model`` has the arithmetic by which ``kagome plan`` leaves late rows out.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from torch import nn

from kagome.comm.channel import Channel
from kagome.components.model_setup import model_copy
from kagome.components.parallelize import PartOptions
from kagome.components.task import undisturbed
from kagome.config import Parallel
from kagome.graph.partition.partition import Partition
from kagome.graph.partition.sets_partition import Part
from kagome.planner.cluster import LOCAL
from kagome.planner.cost_model import passes
from kagome.profile.epoch_costs import halo_bytes
from kagome.profile.part_size import counts_of
from kagome.records.units import bytes_text, seconds_text

LARGEST: Final = 1 << 26
"""Most bytes of weights of a model that is measured: each rank of the trial has a copy, and gradients."""


class HostAccount(NamedTuple):
    """What one rank tells the others.

    Args:
        near: Whether it reads the rows of all its peers in their memory.
        rows: The rows that it sends or reads, whichever are more.
        row_bytes: Bytes of a row in forward and backward together, in all layers; None if not measured.
    """

    near: bool
    rows: int
    row_bytes: float | None


def host_forecast(
    model: nn.Module, part: Part, channel: Channel, parallel: Parallel, options: PartOptions
) -> tuple[str, ...]:
    """Return a note if late or sampled rows are forecast to be slower than exact rows. All ranks call it.

    Args:
        model: The model as the user gave it.
        part: This rank's part.
        channel: The ranks that exchange rows.
        parallel: How they exchange them.
        options: How the model runs.

    Returns:
        Nothing unless all ranks are on one host and share its memory. Nothing for encoded rows either, whose
        coding is a cost and a gain of its own; and nothing for a model with more than ``LARGEST`` bytes of
        weights, which is not measured.

    Cost:
        For late or sampled rows some numbers from every rank, and on rank 0 two epochs on a small graph.
    """
    late, share = parallel.max_age > 0, parallel.halo_sample
    plain = (parallel.codec, parallel.codec_backward or "none") == ("none", "none")
    if channel.size == 1 or not plain or not (late or share < 1) or not isinstance(part, Partition):
        return ()
    memory, counts = channel.shared_memory, counts_of(part)
    near = memory is not None and len(memory.peers) == channel.size - 1
    row_bytes = _row_bytes(model, part, options) if channel.rank == 0 else None
    mine = HostAccount(near, max(counts.sent, counts.halo), row_bytes)
    found: list[Any] = channel.gather_objects(mine, "forecast of exchanges", [HostAccount])
    accounts: list[HostAccount] = found
    each = accounts[0].row_bytes
    if not each or not all(account.near for account in accounts):
        return ()
    # All ranks wait for the one that exchanges most, as in ``kagome plan``.
    sent = each * max(account.rows for account in accounts)
    exact = sent / LOCAL
    asked = exact * passes(late=late, share=share) / passes()
    names = [name for name, set_so in (("late rows", late), ("sampled rows", share < 1)) if set_so]
    return (
        f"{' and '.join(names)}: exact rows are forecast to be faster here, as all ranks are on one host and "
        f"hand rows over in its memory: {seconds_text(exact)} an epoch for {bytes_text(sent)} of rows, "
        f"{seconds_text(asked)} as asked for; what they gain they gain between hosts",
    )


def _row_bytes(model: nn.Module, part: Partition, options: PartOptions) -> float | None:
    """Measure the bytes of a row in an epoch; None for a large model, or one that fails."""
    try:
        # A table that barely fits must not meet copies of itself for the sake of a note.
        if sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers())) > LARGEST:
            return None
        with undisturbed():
            return sum(halo_bytes(model_copy(model), part, options))
    except Exception:  # a forecast must never end a run
        return None
