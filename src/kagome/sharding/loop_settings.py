"""Loop settings: the settings of ``Parallel`` that a loop of the user's own can have, and their exchange.

Where it sits: ``shard`` asks here before it puts a model on a part. What a ``Trainer`` decides from epoch to
epoch, by probes, is refused by name: a loop of the user's own has no epoch in which Kagome could probe.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Final

from kagome.comm.mesh import Mesh
from kagome.config import Parallel
from kagome.config.parallel import PipelineSettings
from kagome.errors import ConfigError
from kagome.halo.compressed_exchange import CompressedExchange
from kagome.sharding.step_exchange import StepExchange

SERVED: Final = frozenset(
    [
        # How the graph and the features are cut.
        "graph",
        "tensor",
        "partitioner",
        "reuse",
        "shared_memory",
        "memory_gib",
        # How rows and gradients are sent: by the Trainer's own exchange.
        "codec",
        "codec_backward",
        "codec_weights",
        "error_feedback",
        "max_age",
        "sync_every",
        "smoothing",
        "halo_sample",
        "partial_sums",
        # No probe runs; with guard=False no note says so.
        "guard",
    ]
)
"""The settings of ``Parallel`` that a loop of the user's own can have."""
SERVED_VALUES: Final = {"activations": ("device", "recompute")}
"""Of settings that it can have in part, the values besides the default."""
STAGED: Final = (
    frozenset(field.name for field in fields(PipelineSettings))
    | SERVED
    | {
        "pipe",
        "stages_per_rank",
        "codec_stage",
    }
)
"""Those that it can have with ``net.train_step`` on a pipe axis or with chunks."""
NEAREST: Final = {
    "skip_drift": "max_age=1, or halo_sample=0.5",
    "adaptive_bits": "codec='int4', error_feedback=True",
    "activations": "kagome.shard(recompute=True)",
    "codec_stage": "codec='bf16'",
    "decouple": "kagome.Trainer",
    "plan": "Parallel(graph=...), or kagome.Trainer",
    "allow": "Parallel(graph=...), or kagome.Trainer",
}
"""For each refused setting, the nearest one that works."""
WATCHED: Final = ("codec", "codec_backward", "codec_stage", "max_age", "halo_sample")
"""Settings whose effect on the gradient a ``Trainer`` measures."""


def is_staged(parallel: Parallel) -> bool:
    """Return whether a step runs by a schedule, of stages or of chunks."""
    return parallel.pipe > 1 or (parallel.chunks or 1) > 1


def refuse_unserved(parallel: Parallel) -> None:
    """Refuse settings of pipelines where there is none, and what a ``Trainer`` decides from epoch to epoch.

    Raises:
        ConfigError: Naming the first of them, and the nearest that works.
    """
    plain = Parallel()
    served = STAGED if is_staged(parallel) else SERVED
    for field in fields(plain):
        value = getattr(parallel, field.name)
        known = field.name in served or value in SERVED_VALUES.get(field.name, ())
        if not known and value != getattr(plain, field.name):
            raise ConfigError(
                "settings that a training loop of your own can have",
                f"{field.name}={value!r}",
                where="kagome.shard(parallel=...)",
                hint=NEAREST.get(field.name, "Parallel(graph=...); kagome.Trainer takes all settings"),
            )
    if parallel.sync_every == "auto" and not is_staged(parallel):
        raise ConfigError(
            "settings that a training loop of your own can have",
            "sync_every='auto', which a Trainer decides from epoch to epoch",
            where="kagome.shard(parallel=...)",
            hint="sync_every=4, a number of training steps",
        )


def refuse_beside_stages(
    beside: Sequence[object], mesh: object | None, *, recompute: bool, tensor: int
) -> None:
    """Refuse what a pipeline of the user's own loop cannot have.

    Raises:
        ConfigError: Naming the first of it.
    """
    clashes = {
        "beside=[...], whose gradients no stage computes": bool(beside),
        "mesh=..., one axis of a DeviceMesh": mesh is not None,
        "recompute=True, where a layer's rows have gone on by then": recompute,
        f"tensor={tensor}": tensor > 1,
    }
    for clash, found in clashes.items():
        if found:
            raise ConfigError(
                "a pipe axis or chunks by themselves, or with graph=...",
                clash,
                where="kagome.shard(...)",
                hint="Parallel(graph=...), which takes all of these",
            )


def note_unwatched(parallel: Parallel, log: Callable[[str], None]) -> None:
    """Note the settings that make gradients approximate, as nothing measures by how much.

    Args:
        parallel: The settings, fitted to the ranks.
        log: Called with the note, unless ``guard=False`` says that it is known.
    """
    plain = Parallel()
    named = [name for name in WATCHED if getattr(parallel, name) != getattr(plain, name)]
    if (parallel.chunks or 1) > 1 and parallel.cross_chunk != "exact":
        named.append(f"cross_chunk={parallel.cross_chunk!r}")
    if named and parallel.guard:
        log(
            f"{', '.join(named)}: gradients are approximate, and no probe measures how far they are off, as "
            "kagome.Trainer does; guard=False leaves this note out."
        )


def exchange_of(
    parallel: Parallel, ranks: Mesh, seed: int, log: Callable[[str], None]
) -> tuple[CompressedExchange | StepExchange, StepExchange | None]:
    """Return the exchange of rows that settings ask for, and the same one again if its rows age by steps.

    Args:
        parallel: The settings, fitted to the ranks.
        ranks: The ranks.
        seed: The seed of the codecs' draws.
        log: Called with a note where rows are inexact and nothing measures what that costs.
    """
    # Late rows are waited for in the next step. On a channel of their own they hold up no other message.
    exchange = CompressedExchange(ranks.graph, parallel, seed, late=ranks.graph.patient)
    if exchange.exact:
        return exchange, None
    note_unwatched(parallel, log)
    steps = StepExchange(exchange)
    return steps, steps
