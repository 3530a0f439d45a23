"""Parallel: how training is split, in five groups of settings that make one flat set of names.

Where it sits: frozen dataclasses without torch, beside ``settings``. What reads one group alone takes that
group: an exchange takes ``ExchangeSettings``, and any :class:`Parallel` is one.

::

    CutSettings     PipelineSettings    ExchangeSettings    MemorySettings    PlanSettings
         └─────────────────┴────────────────────┴──────────────────┴────────────────┘
                                            Parallel
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from kagome.config import plan_io, validation
from kagome.config.fields import at_least, check_kinds
from kagome.errors import ConfigError

Partitioner = Literal["auto", "metis", "streaming", "contiguous", "random", "coordinates"]
CrossChunk = Literal["history", "drop", "exact"]
Activations = Literal["auto", "device", "host", "recompute"]
Schedule = Literal["auto", "fill-drain", "1f1b", "kfkb"]
SumCodec = Literal["none", "fp32", "bf16"]
CodecName = Literal["none", "fp32", "bf16", "fp16", "int8", "int4", "int2", "onebit"]
PartialSums = Literal["auto", "on", "off"]
Allowed = Literal["decoupled", "history", "onebit", "stale"]
LEAST_EDGES: Final = 100_000
"""Edges of the whole graph from which ``partial_sums="auto"`` looks for sums: below, an exchange is mostly
latency."""


@dataclass(frozen=True, kw_only=True)
class CutSettings:
    """How the graph, the layers and the features are divided among ranks."""

    graph: int | None = None
    """Number of parts that the graph is cut into; by default, as many as there are ranks for each stage."""
    pipe: int = 1
    """Number of ranks that share the model's layers, each with one stage of them."""
    stages_per_rank: int = 1
    """Stages of each such rank, assigned in rotation. With several, a few chunks fill the pipeline, but
    more values are sent."""
    tensor: int = 1
    """Number of slices that the features are cut into. Layers that treat each column separately sum over
    the whole graph, each rank some of the columns; other layers read a halo."""
    decouple: bool = False
    """Train a different model: first the maps of all layers, then all hops, so that traffic does not grow
    with depth (NeutronTP). For GCN, SAGE, GAT, GCN-II and R-GCN layers."""
    partitioner: Partitioner = "auto"
    """Method that assigns vertices to parts. ``auto`` uses METIS if it fits into memory, otherwise
    streaming. ``coordinates`` cuts along a space-filling curve through the attribute ``pos``."""
    part_weights: tuple[float, ...] = ()
    """Work of each part relative to the others, for ranks of unlike speed: 2 1 gives the first of two parts
    two thirds of the vertices and edges. By default all parts are alike."""
    reuse: bool = True
    """Keep partitions in the user's cache, and use them again while data, partitioner, seed and number of
    parts are the same."""


@dataclass(frozen=True, kw_only=True)
class PipelineSettings:
    """How the chunks of a part pass the stages of a pipeline."""

    chunks: int | None = None
    """Number of chunks of each part, which pass the stages one after another; by default 4 for each
    stage, or 1 without stages."""
    cross_chunk: CrossChunk = "history"
    """Rows of neighbours in other chunks: their last known rows (``history``), none (``drop``), or exact
    rows, with all chunks run layer by layer (``exact``)."""
    history_epochs: int = 20
    """Number of epochs for which historical rows are kept before they are refreshed."""
    cross_chunk_scale: float = 2.0
    """Scale of gradients sent from a later chunk to an earlier one. The default compensates for the half
    that arrives too late to be used."""
    shuffle_chunks: bool = True
    """Process the chunks in a different order in each epoch."""
    stale_gradients: bool = False
    """Pass gradients through historical rows to the next epoch, instead of scaling those that arrive in
    time (an ablation)."""
    guard: bool = True
    """Measure how far history changes the gradient. Before accuracy is lost, refresh the rows in every
    epoch and pass on the gradients of the epoch before, or run exact epochs."""
    schedule: Schedule = "auto"
    """Order in which the chunks pass the stages. ``auto`` uses fill-drain, or 1F1B if chunks are
    independent."""
    layers: tuple[str, ...] = ()
    """Names of modules that run one after another, for a model whose forward cannot be traced."""


@dataclass(frozen=True, kw_only=True)
class ExchangeSettings:
    """How rows of other parts and other values are sent: codecs, staleness, sampling."""

    codec: CodecName = "none"
    """Encoding of the rows of other parts when they are sent. ``none`` keeps the tensor's own type;
    ``int8`` to ``onebit`` round at random, so that the mean is unbiased."""
    codec_backward: CodecName | None = None
    """Codec of their gradients; by default the same as ``codec``."""
    codec_stage: CodecName | None = None
    """Codec of the values sent between stages; by default they are sent unchanged."""
    codec_weights: SumCodec = "none"
    """Codec of weight gradients while they are summed over parts; ``bf16`` has the range of float32."""
    error_feedback: bool = False
    """Add the error of the codec on a row to the row that is sent next."""
    max_age: int = 0
    """Age, in epochs, that rows of other parts and their gradients may have. With 1 or more, they are
    sent while the next epoch computes."""
    sync_every: int | Literal["auto"] | None = None
    """Number of epochs after which an epoch waits for its own rows; ``auto``: an epoch waits after rows
    have moved far."""
    smoothing: float = 0.0
    """Weight of earlier epochs in late rows, as a moving average."""
    halo_sample: float = 1.0
    """Share of other parts' rows that an epoch reads. A different share is drawn each time and scaled up,
    so that sums are unbiased. For layers that sum or average rows times weights (GCN, SAGE, GIN); a layer
    whose message is another function of a row (EdgeConv, CG, ResGated) is refused."""
    skip_drift: float = 0.0
    """Do not send a row again if it moved by less than this share of its length, until it is ``max_age``
    epochs old; ``max_age`` must be at least 2."""
    adaptive_bits: bool = False
    """Distribute the codec's bits: more for rows that lose much and are read often."""
    partial_sums: PartialSums = "auto"
    """Send sums of rows in place of rows of other parts, where these are fewer and a layer sums or averages
    rows times fixed weights (GCN, SAGE, GIN). Exact up to rounding. ``on``: for each pair of parts that it
    saves a row; ``auto``: in graphs of 100,000 edges or more, for each pair that it saves a tenth."""
    shared_memory: bool = True
    """Pass large messages between ranks of one host through memory that both map, instead of a socket."""


@dataclass(frozen=True, kw_only=True)
class MemorySettings:
    """What limits the memory of a rank."""

    memory_gib: float | None = None
    """Limit, in GiB, of the working memory of a sum over feature slices. The graph is processed in
    chunks, and the rows of the next chunk are sent meanwhile."""
    activations: Activations = "auto"
    """Place where activations saved for backward are kept: on the ``device``, or in ``host`` memory.
    ``recompute`` keeps the inputs of each layer alone, as ``--model.recompute`` does. ``auto`` uses host
    memory on a GPU if ``memory_gib`` is set, and with ``plan="auto"`` what a cut needs to fit."""


@dataclass(frozen=True, kw_only=True)
class PlanSettings:
    """Where the settings of a cut are taken from."""

    plan: str = "manual"
    """``manual`` uses the settings given here. ``auto`` predicts the cost of all cuts for --nproc ranks
    and takes the best. The name of a file that ``kagome plan --json`` wrote takes its first plan."""
    allow: tuple[Allowed, ...] = ()
    """Inexact methods that ``auto`` may use: another model (``decoupled``), rows of an earlier epoch in
    other chunks (``history``) or in other parts (``stale``), one bit for each number of those
    (``onebit``)."""


@dataclass(frozen=True, kw_only=True)
class Parallel(PlanSettings, MemorySettings, ExchangeSettings, PipelineSettings, CutSettings):
    """How training is split over ranks. The defaults cut the graph into one part for each rank, exactly.

    Example:
        >>> import kagome
        >>> cut = kagome.Parallel(pipe=2).fit(world_size=6)  # what the open settings become on 6 ranks
        >>> cut.graph, cut.pipe, cut.chunks
        (3, 2, 8)
    """

    def __post_init__(self) -> None:
        # A plan's file stands for settings, so it is read before they are checked.
        if self.plan not in ("manual", "auto"):
            self._take(plan_io.load(self.plan))
        check_kinds("parallel", self)
        at_least(
            "parallel",
            self,
            pipe=1,
            stages_per_rank=1,
            tensor=1,
            chunks=1,
            history_epochs=1,
            cross_chunk_scale=0,
            max_age=0,
            skip_drift=0,
        )
        validation.check(self)

    def _take(self, settings: Mapping[str, Any]) -> None:
        """Take the settings of a plan in place of defaults, as if they had been written out here.

        Raises:
            ConfigError: If one of them was set to another value.
        """
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        for name, value in settings.items():
            # A default cannot be told from the same value written out, so both give way to the plan.
            if getattr(self, name) not in (defaults[name], value):
                raise ConfigError(
                    f"{name}={value!r}, as the plan in {self.plan} has it",
                    f"{name}={getattr(self, name)!r}, which was set as well",
                    hint="one of the two",
                )
            # The dataclass is frozen; this runs in its __post_init__, before anyone has seen the object.
            object.__setattr__(self, name, value)
        object.__setattr__(self, "plan", "manual")

    def fit(self, world_size: int) -> Parallel:
        """Return the same cut for a given number of ranks, with every default resolved.

        Raises:
            ConfigError: If the cut needs another number of ranks, or settings conflict.
        """
        if self.plan == "auto":
            raise ConfigError(
                "plan='auto' in kagome train --nproc only, which predicts cuts before ranks start",
                f"{world_size} ranks that have started",
                hint="kagome plan --json > plan.json, then plan='plan.json' (--parallel.plan plan.json)",
            )
        # Rounded down: if the ranks do not divide, check_mesh refuses the product with its numbers.
        parts = world_size // (self.pipe * self.tensor) if self.graph is None else self.graph
        chunks = self.chunks or default_chunks(self.pipe, self.tensor)
        fitted = dataclasses.replace(self, graph=max(parts, 1), chunks=chunks)
        validation.check_mesh(fitted, world_size)
        return fitted

    @property
    def pattern(self) -> Schedule:
        """The schedule, with ``auto`` resolved."""
        # Under 1F1B a chunk's backward precedes later chunks' forward, so chunks must not read each other.
        alone = self.cross_chunk == "drop" and self.stages_per_rank == 1
        return ("1f1b" if alone else "fill-drain") if self.schedule == "auto" else self.schedule

    @property
    def partial_sums_sent(self) -> PartialSums:
        """When partial sums are sent: ``auto`` gives way to settings that need rows."""
        rows = self.tensor > 1 or any(validation.choosers(self).values())
        return "off" if rows and self.partial_sums == "auto" else self.partial_sums

    def cutter(self, ranks: int) -> str:
        """Return the partitioner for this many ranks, those of one stage.

        Ranks that slice the features of one part need equal shares of it, whichever method cuts the parts.
        """
        weights = ":".join(f"{weight:.12g}" for weight in self.part_weights)
        behind = f"@{weights}" if weights else ""
        if self.tensor == 1:
            return f"{self.partitioner}{behind}"
        if ranks == self.tensor:
            # One part for all ranks: no cut to find, only equal shares of it.
            return "contiguous" if self.partitioner == "auto" else self.partitioner
        # For example "metis/2": parts by METIS, each dealt to 2 ranks.
        return f"{self.partitioner}/{self.tensor}{behind}"


def sends_sums(setting: PartialSums, edges: int) -> bool:
    """Return whether parts of a graph of so many edges look for partial sums that save rows."""
    return setting == "on" or (setting == "auto" and edges >= LEAST_EDGES)


def default_chunks(pipe: int, tensor: int) -> int:
    """Return the default number of chunks of a part. Plans do not list the chunks if they have this number.

    Feature slices cover the whole graph, which passes the stages as one chunk.
    """
    return 4 * pipe if pipe > 1 and tensor == 1 else 1
