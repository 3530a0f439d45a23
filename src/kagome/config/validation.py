"""Clashes: settings of a cut that cannot work together, each refused with the nearest that works.

Where it sits: ``config.Parallel`` asks here when it is made, and again once the number of ranks is known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kagome.errors import ConfigError

if TYPE_CHECKING:
    from kagome.config import Parallel

WHOLE_PARTS = {"max_age": 0, "error_feedback": False, "halo_sample": 1.0, "adaptive_bits": False}
"""What rows of parts that are one chunk may have, and without it."""
SHARED_OUT = frozenset(("int2", "int4"))
"""Codecs whose bits a row may have fewer of, and more: not the fewest, not the most."""


def check(cut: Parallel) -> None:
    """Refuse what cannot work on any ranks.

    Raises:
        ConfigError: Naming what clashes.
    """
    if cut.graph is not None and cut.graph < 1:
        raise ConfigError("Parallel(graph=...) takes a number of parts from 1 up", f"it is {cut.graph}")
    if cut.memory_gib is not None and not cut.memory_gib > 0:
        raise ConfigError("parallel.memory_gib takes a number above 0", f"it is {cut.memory_gib}")
    if not 0 <= cut.smoothing < 1:
        raise ConfigError(
            "Parallel(smoothing=...) takes a share from 0 up, below 1", f"it is {cut.smoothing}"
        )
    if not 0 < cut.halo_sample <= 1:
        raise ConfigError("Parallel(halo_sample=...) takes a share, above 0", f"it is {cut.halo_sample}")
    if cut.schedule in ("1f1b", "kfkb") and cut.cross_chunk != "drop":
        raise ConfigError(
            f"schedule={cut.schedule!r} takes chunks that know nothing of each other",
            f"cross_chunk={cut.cross_chunk!r} lets them read each other's rows",
            hint="schedule='fill-drain', or cross_chunk='drop', which loses edges",
        )
    if cut.stages_per_rank > 1 and cut.pipe == 1:
        raise ConfigError(
            f"stages_per_rank={cut.stages_per_rank} deals the stages of a pipeline to its ranks",
            f"pipe={cut.pipe} is no pipeline",
            hint="pipe=2, or leave stages_per_rank out",
        )
    if cut.stages_per_rank > 1 and cut.schedule in ("1f1b", "kfkb"):
        raise ConfigError(
            f"schedule={cut.schedule!r} takes a stage a rank",
            f"stages_per_rank={cut.stages_per_rank}",
            hint="schedule='fill-drain'",
        )
    _planned(cut)
    _lateness(cut)
    _choice_of_rows(cut)


def _planned(cut: Parallel) -> None:
    if cut.allow and cut.plan != "auto":
        raise ConfigError(
            "allow says what plan='auto' may take", f"plan={cut.plan!r} chooses nothing", hint="plan='auto'"
        )
    mesh = {
        "graph": None,
        "pipe": 1,
        "stages_per_rank": 1,
        "tensor": 1,
        "decouple": False,
        "chunks": None,
        "cross_chunk": "history",
        "codec": "none",
        "max_age": 0,
    }
    for name, free in mesh.items():
        if cut.plan == "auto" and getattr(cut, name) != free:
            raise ConfigError(
                "plan='auto' chooses the cut",
                f"{name}={getattr(cut, name)!r} was set as well",
                hint="one of the two",
            )


def _lateness(cut: Parallel) -> None:
    every = cut.sync_every
    if isinstance(every, int) and every < 1:
        raise ConfigError(
            "Parallel(sync_every=...) takes a number of epochs from 1 up, or auto", f"it is {every!r}"
        )
    if every is not None and cut.max_age == 0:
        raise ConfigError(
            "sync_every says when rows that may be late are waited for",
            "max_age=0 lets none be late",
            hint="max_age=1",
        )
    if cut.smoothing > 0 and cut.max_age == 0:
        raise ConfigError(
            "smoothing averages rows that come late", "max_age=0 lets none be late", hint="max_age=1"
        )


def _choice_of_rows(cut: Parallel) -> None:
    if cut.skip_drift > 0 and cut.max_age < 2:
        raise ConfigError(
            "skip_drift lets rows be read that were not sent again",
            f"max_age={cut.max_age} asks for newer ones",
            hint="max_age=2 or more",
        )
    others = {"halo_sample": cut.halo_sample < 1, "skip_drift": cut.skip_drift > 0}
    for name in (name for name, chosen in others.items() if chosen and cut.error_feedback):
        raise ConfigError(
            "error_feedback adds what a codec lost to the row that is sent next",
            f"{name} sends other rows next",
            hint="one of the two",
        )
    if cut.error_feedback and {cut.codec, cut.codec_backward} <= {"none", None}:
        raise ConfigError(
            "error_feedback adds what a codec lost to the row that is sent next",
            f"codec={cut.codec!r} loses nothing",
            hint="codec='int2'",
        )
    chosen = [cut.halo_sample < 1, cut.skip_drift > 0, cut.adaptive_bits]
    if sum(chosen) > 1:
        raise ConfigError(
            "one of halo_sample, skip_drift and adaptive_bits chooses what crosses",
            f"{sum(chosen)} are set",
            hint="leave the others out",
        )
    if cut.adaptive_bits and not {cut.codec, cut.codec_backward} & SHARED_OUT:
        raise ConfigError(
            "adaptive_bits shares out the bits of int2 or int4, from 1 to 8 a row",
            f"codec={cut.codec!r} has none to share",
            hint="codec='int4'",
        )


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
        mesh = " x ".join(f"{axis}={size}" for axis, size in axes.items() if size > 1 or axis == "graph")
        set_here = [f"--parallel.{axis}" for axis, size in axes.items() if size > 1] or ["--parallel.graph"]
        raise ConfigError(
            f"the mesh {mesh} needs {need} ranks",
            f"there are {world_size}",
            hint=f"start {need} ranks (--nproc {need}), or change {', '.join(set_here)}",
        )
    for name, without in WHOLE_PARTS.items():
        if cut.chunks > 1 and getattr(cut, name) != without:
            raise ConfigError(
                f"{name}={getattr(cut, name)} takes parts that are one chunk",
                f"there are {cut.chunks} chunks a part, which have history of their own",
                hint=f"chunks=1, or leave {name} out",
            )
    if cut.decouple and (cut.pipe > 1 or cut.chunks > 1):
        raise ConfigError(
            "decouple moves all hops behind the layers' maps",
            f"pipe={cut.pipe}, chunks={cut.chunks} cut the model layer by layer",
            hint=f"tensor={max(cut.pipe, 2)} with decouple, or pipe without",
        )
    _slices(cut)
    _codecs(cut, world_size)


def _codecs(cut: Parallel, world_size: int) -> None:
    """Refuse codecs of what does not cross, and lateness."""
    codes = [name for name in ("codec", "codec_backward") if getattr(cut, name) not in ("none", None)]
    others = [name for name, without in WHOLE_PARTS.items() if getattr(cut, name) != without]
    for name in (*codes, *others):
        if cut.pipe > 1 and cut.graph == 1 and cut.tensor == 1:
            value = getattr(cut, name)
            raise ConfigError(
                f"{name}={value!r} is about rows of other parts",
                f"graph=1 has none, and pipe={cut.pipe} sends rows from stage to stage",
                hint=f"codec_stage={value!r}" if name in codes else f"leave {name} out, or graph=2",
            )
    if cut.codec_stage not in ("none", None) and cut.pipe == 1 and world_size > 1:
        raise ConfigError(
            f"codec_stage={cut.codec_stage!r} codes what goes from stage to stage",
            "pipe=1 is one stage",
            hint=f"codec={cut.codec_stage!r}, or pipe=2",
        )


def _slices(cut: Parallel) -> None:
    """Refuse what feature slices do not go with."""
    if cut.tensor == 1:
        if cut.memory_gib is not None:
            raise ConfigError(
                "parallel.memory_gib bounds the working memory of sums over feature slices",
                f"tensor={cut.tensor} has none",
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
    }
    for setting, clash in others.items():
        if clash:
            raise ConfigError(
                f"tensor={cut.tensor} slices the features of whole parts",
                f"{setting} is for parts that each rank has by itself",
                hint=f"tensor={cut.tensor} without it, or {setting} without tensor",
            )
