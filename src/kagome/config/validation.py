"""Validation: refuse settings of a cut that conflict, each with the nearest settings that work.

Where it sits: ``config.Parallel`` asks here when it is made, and again once the number of ranks is known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kagome.errors import ConfigError

if TYPE_CHECKING:
    from kagome.config import ExchangeSettings, Parallel

WHOLE_PARTS = {"max_age": 0, "error_feedback": False, "halo_sample": 1.0, "adaptive_bits": False}
"""Settings that need parts of one chunk, each with the value that switches it off."""
SHARED_OUT = frozenset(("int2", "int4"))
"""Codecs whose bits ``adaptive_bits`` can distribute: a row may get more bits than these, or fewer."""


def check(cut: Parallel) -> None:
    """Refuse settings that conflict on any number of ranks.

    Raises:
        ConfigError: Naming the settings that conflict.
    """
    if cut.graph is not None and cut.graph < 1:
        raise ConfigError("parallel.graph to be 1 or more", f"{cut.graph}")
    if cut.memory_gib is not None and not cut.memory_gib > 0:
        raise ConfigError("parallel.memory_gib to be above 0", f"{cut.memory_gib}")
    if not 0 <= cut.smoothing < 1:
        raise ConfigError("parallel.smoothing to be 0 or more, and below 1", f"{cut.smoothing}")
    if not 0 < cut.halo_sample <= 1:
        raise ConfigError("parallel.halo_sample to be above 0, and 1 or less", f"{cut.halo_sample}")
    if not all(weight > 0 for weight in cut.part_weights):
        raise ConfigError("parallel.part_weights to be above 0", f"{list(cut.part_weights)}")
    # A chunk's backward would start before later chunks, which read its rows, have run forward.
    if cut.schedule in ("1f1b", "kfkb") and cut.cross_chunk != "drop":
        raise ConfigError(
            f"chunks that know nothing of each other for schedule={cut.schedule!r}",
            f"cross_chunk={cut.cross_chunk!r}, which lets them read each other's rows",
            hint="schedule='fill-drain', or cross_chunk='drop', which loses edges",
        )
    if cut.stages_per_rank > 1 and cut.pipe == 1:
        raise ConfigError(
            f"a pipeline for stages_per_rank={cut.stages_per_rank}, which deals its stages to ranks",
            f"pipe={cut.pipe}, which is one stage",
            hint="pipe=2, or leave stages_per_rank out",
        )
    if cut.stages_per_rank > 1 and cut.schedule in ("1f1b", "kfkb"):
        raise ConfigError(
            f"one stage a rank for schedule={cut.schedule!r}",
            f"stages_per_rank={cut.stages_per_rank}",
            hint="schedule='fill-drain'",
        )
    _planned(cut)
    _lateness(cut)
    _choice_of_rows(cut)


def _planned(cut: Parallel) -> None:
    if cut.allow and cut.plan != "auto":
        raise ConfigError(
            "plan='auto' for allow, which says what it may take", f"plan={cut.plan!r}", hint="plan='auto'"
        )
    # What the planner chooses, each with its default; other settings
    # (partitioner, guard, timeouts) go together with it.
    mesh = {
        "graph": None,
        "pipe": 1,
        "stages_per_rank": 1,
        "tensor": 1,
        "part_weights": (),
        "decouple": False,
        "chunks": None,
        "cross_chunk": "history",
        "codec": "none",
        "max_age": 0,
    }
    for name, free in mesh.items():
        if cut.plan == "auto" and getattr(cut, name) != free:
            raise ConfigError(
                "plan='auto' to choose the cut",
                f"{name}={getattr(cut, name)!r}, which was set as well",
                hint="one of the two",
            )


def _lateness(cut: ExchangeSettings) -> None:
    every = cut.sync_every
    if isinstance(every, int) and every < 1:
        raise ConfigError("parallel.sync_every to be 1 epoch or more, or auto", f"{every!r}")
    if every is not None and cut.max_age == 0:
        raise ConfigError(
            "rows that may be late for sync_every, which says when they are waited for",
            "max_age=0, which lets none be late",
            hint="max_age=1",
        )
    if cut.smoothing > 0 and cut.max_age == 0:
        raise ConfigError(
            "rows that may be late for smoothing, which averages them",
            "max_age=0, which lets none be late",
            hint="max_age=1",
        )


def _choice_of_rows(cut: ExchangeSettings) -> None:
    # A row that is not sent again is one epoch older each time, so an age above 1 must be allowed.
    if cut.skip_drift > 0 and cut.max_age < 2:
        raise ConfigError(
            "rows that may be old for skip_drift, which does not send all of them again",
            f"max_age={cut.max_age}, which asks for newer ones",
            hint="max_age=2 or more",
        )
    others = {"halo_sample": cut.halo_sample < 1, "skip_drift": cut.skip_drift > 0}
    # The error belongs to a row of the last message; with drawn or skipped
    # rows there is no such row in the next one.
    for name in (name for name, chosen in others.items() if chosen and cut.error_feedback):
        raise ConfigError(
            "the same rows next for error_feedback, which adds what a codec lost to them",
            f"{name}, which sends other rows next",
            hint="one of the two",
        )
    if cut.error_feedback and {cut.codec, cut.codec_backward} <= {"none", None}:
        raise ConfigError(
            "a codec with losses for error_feedback, which adds them to the row that is sent next",
            f"codec={cut.codec!r}, which loses nothing",
            hint="codec='int2'",
        )
    # Each decides on its own which rows are sent, or how; there is no rule for two of them.
    chosen = [name for name, chooses in choosers(cut).items() if chooses]
    if len(chosen) > 1:
        raise ConfigError(
            "at most one of halo_sample, skip_drift and adaptive_bits to choose what crosses",
            f"{len(chosen)} of them",
            hint="leave the others out",
        )
    if chosen and cut.partial_sums == "on":
        raise ConfigError(
            f"rows of other parts for {chosen[0]}, which chooses among them",
            "partial_sums='on', which sends sums in place of some",
            hint="partial_sums='auto', which then sends rows",
        )
    if cut.adaptive_bits and not {cut.codec, cut.codec_backward} & SHARED_OUT:
        raise ConfigError(
            "codec int2 or int4 for adaptive_bits, which shares out their bits, 1 to 8 a row",
            f"codec={cut.codec!r}, which has none to share",
            hint="codec='int4'",
        )


def choosers(cut: ExchangeSettings) -> dict[str, bool]:
    """Return the settings that choose among rows, each with whether it is on."""
    return {
        "halo_sample": cut.halo_sample < 1,
        "skip_drift": cut.skip_drift > 0,
        "adaptive_bits": cut.adaptive_bits,
    }


def check_mesh(cut: Parallel, world_size: int) -> None:
    """Refuse what cannot work on so many ranks; parts and chunks of the cut are numbers by now.

    Raises:
        ConfigError: Naming what clashes.
    """
    assert cut.graph is not None
    assert cut.chunks is not None
    axes = {"pipe": cut.pipe, "tensor": cut.tensor, "graph": cut.graph}
    need = cut.pipe * cut.tensor * cut.graph
    if need != world_size:
        # Axes of size 1 are left out of the message, except `graph`, which is what most users set.
        mesh = " x ".join(f"{axis}={size}" for axis, size in axes.items() if size > 1 or axis == "graph")
        set_here = [f"--parallel.{axis}" for axis, size in axes.items() if size > 1] or ["--parallel.graph"]
        raise ConfigError(
            f"{need} ranks for the mesh {mesh}",
            f"{world_size}",
            hint=f"start {need} ranks (--nproc {need}), or change {', '.join(set_here)}",
        )
    if cut.part_weights and len(cut.part_weights) != cut.graph:
        raise ConfigError(
            f"a weight for each of {cut.graph} parts (graph={cut.graph})",
            f"part_weights={list(cut.part_weights)}",
            hint="part_weights=(2, 1) for two parts, or leave it out",
        )
    if cut.chunks > 1 and cut.partial_sums == "on":
        raise ConfigError(
            "parts of one chunk for partial_sums='on'",
            f"{cut.chunks} chunks a part, which send rows that other chunks read too",
            hint="chunks=1, or partial_sums='auto', which then sends rows",
        )
    # Chunks keep tables of historical rows, which know nothing of late or selected rows.
    for name, without in WHOLE_PARTS.items():
        if cut.chunks > 1 and getattr(cut, name) != without:
            raise ConfigError(
                f"parts of one chunk for {name}={getattr(cut, name)}",
                f"{cut.chunks} chunks a part, which have history of their own",
                hint=f"chunks=1, or leave {name} out",
            )
    if cut.decouple and (cut.pipe > 1 or cut.chunks > 1):
        raise ConfigError(
            "a model in one piece for decouple, which moves all hops behind the layers' maps",
            f"pipe={cut.pipe} and chunks={cut.chunks}, which cut it layer by layer",
            hint=f"tensor={max(cut.pipe, 2)} with decouple, or pipe without",
        )
    _slices(cut)
    _codecs(cut, world_size)


def _codecs(cut: Parallel, world_size: int) -> None:
    """Refuse codecs of what does not cross, and lateness."""
    codes = [name for name in ("codec", "codec_backward") if getattr(cut, name) not in ("none", None)]
    others = [name for name, without in WHOLE_PARTS.items() if getattr(cut, name) != without]
    for name in (*codes, *others):
        # With a single part no rows cross between parts. A codec that does
        # nothing is probably meant for the stages.
        if cut.pipe > 1 and cut.graph == 1 and cut.tensor == 1:
            value = getattr(cut, name)
            raise ConfigError(
                f"rows of other parts for {name}={value!r}",
                f"graph=1, which has none, and pipe={cut.pipe}, which sends rows from stage to stage",
                hint=f"codec_stage={value!r}" if name in codes else f"leave {name} out, or graph=2",
            )
    # On one rank nothing is sent at all, and any codec is allowed, so that a run can be tried on one.
    if cut.codec_stage not in ("none", None) and cut.pipe == 1 and world_size > 1:
        raise ConfigError(
            f"several stages for codec_stage={cut.codec_stage!r}, which codes what goes between them",
            "pipe=1, which is one stage",
            hint=f"codec={cut.codec_stage!r}, or pipe=2",
        )


def _slices(cut: Parallel) -> None:
    """Refuse what feature slices do not go with."""
    if cut.tensor == 1:
        if cut.memory_gib is not None:
            raise ConfigError(
                "feature slices for parallel.memory_gib, which bounds the memory of sums over them",
                f"tensor={cut.tensor}, which has none",
                hint="--parallel.tensor 2, or leave --parallel.memory-gib out",
            )
        return
    assert cut.graph is not None
    assert cut.chunks is not None
    others = {
        f"memory_gib={cut.memory_gib} with graph={cut.graph}": cut.memory_gib is not None and cut.graph > 1,
        f"chunks={cut.chunks}": cut.chunks > 1,
        f"max_age={cut.max_age}": cut.max_age > 0,
        f"halo_sample={cut.halo_sample}": cut.halo_sample < 1,
        "error_feedback": cut.error_feedback,
        "adaptive_bits": cut.adaptive_bits,
        "partial_sums='on'": cut.partial_sums == "on",
    }
    for setting, clash in others.items():
        if clash:
            raise ConfigError(
                f"whole parts for tensor={cut.tensor}, which slices their features",
                f"{setting}, which is for parts that each rank has by itself",
                hint=f"tensor={cut.tensor} without it, or {setting} without tensor",
            )
