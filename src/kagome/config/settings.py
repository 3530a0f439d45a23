"""Run = Data + Model + Parallel + Train + Report: the one source of command line flags, TOML and docs.

Where it sits: frozen dataclasses without torch; ``cli.app`` turns them into flags, ``train`` reads them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from kagome.config import plan_io, validation
from kagome.config.fields import check_kinds
from kagome.errors import ConfigError

Partitioner = Literal["auto", "metis", "streaming", "contiguous", "random"]
CrossChunk = Literal["history", "drop", "exact"]
Activations = Literal["auto", "device", "host", "disk"]
Schedule = Literal["auto", "fill-drain", "1f1b", "kfkb"]
SumCodec = Literal["none", "fp32", "bf16"]
CodecName = Literal["none", "fp32", "bf16", "fp16", "int8", "int4", "int2", "onebit"]
LONGEST_TIMEOUT = 1e8
"""Seconds: three years."""
Allowed = Literal["decoupled", "history", "onebit", "stale"]
Loss = Literal["auto", "cross_entropy", "bce", "mse", "mae", "huber"]
Metric = Literal[
    "auto",
    "accuracy",
    "roc_auc",
    "average_precision",
    "f1_micro",
    "f1_macro",
    "mse",
    "mae",
    "rmse",
    "r2",
    "loss",
]


@dataclass(frozen=True, kw_only=True)
class Data:
    """The graph to train on: its name, its files, and what is done to it when it is loaded.

    Example:
        >>> from kagome.config import Data
        >>> Data(name="Cora", root="/data", undirected=True).name
        'Cora'
    """

    name: str = "digits"
    """Data set: ``digits``, ``sbm:vertices=...``, ``Cora``, ``pyg:Class[:name]``, ``ogb:NAME``, ``npz:FILE``,
    ``python:package.module:function``."""
    root: str = "data"
    """Folder with the data set's raw files; processed files are written beside them."""
    partition: str | None = None
    """Folder of a saved partition (``kagome partition``); each rank loads its own part only."""
    undirected: bool = False
    """Add the reverse of every edge."""
    self_loops: bool = False
    """Add the missing self-loops."""
    project: int | None = None
    """Project the features to this many columns, once, by a seeded random matrix."""
    split: int = 0
    """The number of the split to use if the data set has several; if it has no masks, the seed of the
    60/20/20 split that is made."""

    def __post_init__(self) -> None:
        check_kinds("data", self)
        at_least("data", self, project=1, split=0)


@dataclass(frozen=True, kw_only=True)
class Model:
    """The model to build: its layers, widths, dropout, and how Kagome runs it."""

    name: str = "gcn"
    """A name of the zoo (gcn, sage, gin, gat, gatv2, pna, edgecnn, gcn2, appnp, sgc, deepgcn, resgcn+,
    transformer) or ``python:package.module:function``."""
    layers: int = 2
    """Number of message passing layers."""
    hidden: int = 64
    """Width of the hidden layers."""
    dropout: float = 0.5
    """Share of entries dropped in training."""
    heads: int = 8
    """Attention heads, for the models that have them."""
    fast: bool = True
    """Reduce messages with kernels, without a tensor of one row for each edge. False runs every layer as
    PyG runs it."""
    recompute: bool = False
    """Keep only the inputs of each layer and compute the rest again in backward. No exchange is repeated."""

    def __post_init__(self) -> None:
        check_kinds("model", self)


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """How training is split over ranks. The defaults cut the graph into one part for each rank, exactly.

    Example:
        >>> import kagome
        >>> cut = kagome.Parallel(pipe=2).fit(world_size=6)  # what the open settings become on 6 ranks
        >>> cut.graph, cut.pipe, cut.chunks
        (3, 2, 8)
    """

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
    memory_gib: float | None = None
    """Limit, in GiB, of the working memory of a sum over feature slices. The graph is processed in
    chunks, and the rows of the next chunk are sent meanwhile."""
    activations: Activations = "auto"
    """Place where activations saved for backward are kept: on the ``device``, in ``host`` memory, or on
    ``disk`` (in TMPDIR). ``auto`` uses host memory on a GPU if ``memory_gib`` is set."""
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
    partitioner: Partitioner = "auto"
    """Method that assigns vertices to parts. ``auto`` uses METIS if it fits into memory, otherwise
    streaming."""
    reuse: bool = True
    """Keep partitions in the user's cache, and use them again while data, partitioner, seed and number of
    parts are the same."""
    shared_memory: bool = True
    """Pass large messages between ranks of one host through memory that both map, instead of a socket."""
    plan: str = "manual"
    """``manual`` uses the settings given here. ``auto`` predicts the cost of all cuts for --nproc ranks
    and takes the best. The name of a file that ``kagome plan --json`` wrote takes its first plan."""
    allow: tuple[Allowed, ...] = ()
    """Inexact methods that ``auto`` may use: another model (``decoupled``), rows of an earlier epoch in
    other chunks (``history``) or in other parts (``stale``), one bit for each number of those
    (``onebit``)."""

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

    def cutter(self, ranks: int) -> str:
        """Return the partitioner for this many ranks, those of one stage.

        Ranks that slice the features of one part need equal shares of it, whichever method cuts the parts.
        """
        if self.tensor == 1:
            return self.partitioner
        # One part for all ranks: no cut to find, only equal shares of it.
        if ranks == self.tensor:
            return "contiguous" if self.partitioner == "auto" else self.partitioner
        # For example "metis/2": parts by METIS, each dealt to 2 ranks.
        return f"{self.partitioner}/{self.tensor}"


def default_chunks(pipe: int, tensor: int) -> int:
    """Return the default number of chunks of a part. Plans do not list the chunks if they have this number.

    Feature slices cover the whole graph, which passes the stages as one chunk.
    """
    return 4 * pipe if pipe > 1 and tensor == 1 else 1


@dataclass(frozen=True, kw_only=True)
class Train:
    """How the model is trained: epochs, learning rate, loss, metric, seed, checks and checkpoints.

    Example:
        >>> import kagome
        >>> kagome.Train(epochs=50, lr=0.005).weight_decay
        0.0005
    """

    epochs: int = 200
    """Number of weight updates. One epoch is one update over the whole graph."""
    seed: int = 0
    """Seed of weights, dropout and partition."""
    lr: float = 0.01
    """Adam's learning rate."""
    weight_decay: float = 5e-4
    """Adam's weight decay."""
    patience: int | None = None
    """Stop if the validation metric has not improved for this many epochs."""
    eval_every: int = 1
    """Number of epochs from one evaluation to the next."""
    clip: float | None = None
    """Largest allowed norm of the whole gradient; a longer gradient is scaled down."""
    amp: Literal["none", "bf16"] = "none"
    """Mixed precision: run the forward pass in bf16 autocast."""
    loss: Loss = "auto"
    """The loss. ``auto`` uses cross entropy for class ids, and binary cross entropy for several labels of
    0 and 1. Numbers need ``mse``, ``mae`` or ``huber``. A label that is NaN counts as missing, entry by
    entry."""
    ignore_index: int | None = None
    """The label that means a missing label; by default -1 with ``cross_entropy`` and ``bce``. Other
    losses, and a loss of your own, have no such label by default."""
    class_weight: tuple[float, ...] = ()
    """One weight for each class in ``cross_entropy``. The mean divides by the sum of the weights, as in
    PyTorch."""
    sample_weight: str | None = None
    """Name of the attribute with one weight for each vertex, for the weighted mean of a built-in loss."""
    metric: Metric = "auto"
    """The metric that is reported and that chooses the best epoch. ``auto`` uses accuracy for classes, F1
    (micro) for several labels per vertex, and RMSE or MAE for numbers. It uses the loss if you pass a
    loss of your own and the labels are not classes, or the output has other columns than the labels need."""
    metric_columns: tuple[int, ...] = ()
    """Columns of the model's output that the metric scores; by default all, one for each class or label."""
    check: bool = True
    """Before training, compare split and whole on a small sample of the graph, and refuse a run that is
    predicted to need far more memory than is free."""
    save_every: int | None = None
    """Number of epochs from one checkpoint to the next. The end of the run and SIGTERM always write one."""
    save_rows: bool = True
    """Store historical and late rows of the last epoch in checkpoints, so that the same number of ranks
    continues bit for bit."""
    timeout: float = 300.0
    """Seconds that a rank waits for another before it stops and names the late rank."""

    def __post_init__(self) -> None:
        check_kinds("train", self)
        at_least("train", self, epochs=0, eval_every=1, patience=1, save_every=1, lr=0, weight_decay=0)
        if any(column < 0 for column in self.metric_columns):
            raise ConfigError("train.metric_columns to be numbers from 0 up", f"{list(self.metric_columns)}")
        for name in ("clip", "timeout"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"train.{name} to be above 0", f"{value!r}")
        if self.timeout > LONGEST_TIMEOUT:
            raise ConfigError(f"train.timeout to be {LONGEST_TIMEOUT:g} seconds or less", f"{self.timeout!r}")


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a run reports besides its summary: page, timeline, progress line, TensorBoard events.

    Example:
        >>> import kagome
        >>> quiet = kagome.Report(page=False, trace=False, progress=False)
        >>> quiet.tensorboard
        False
    """

    page: bool = True
    """Write the report page."""
    trace: bool = True
    """Write the timeline (``trace.json``, opens in Perfetto)."""
    progress: bool = True
    """Show a progress line."""
    tensorboard: bool = False
    """Also write TensorBoard events (needs the extra ``tensorboard``)."""

    def __post_init__(self) -> None:
        check_kinds("report", self)


@dataclass(frozen=True, kw_only=True)
class Run:
    """All settings of one training run, in five sections.

    Example:
        >>> from kagome.config import Model, Run, Train
        >>> run = Run(model=Model(name="gat", layers=3), train=Train(epochs=20))
        >>> run.data.name, run.model.name, run.train.epochs
        ('digits', 'gat', 20)
    """

    data: Data = field(default_factory=Data)
    model: Model = field(default_factory=Model)
    parallel: Parallel = field(default_factory=Parallel)
    train: Train = field(default_factory=Train)
    report: Report = field(default_factory=Report)

    def cut(self, ranks: int) -> tuple[str, int, bool]:
        """Return how vertices are cut for this many ranks: partitioner, seed, and whether to reuse a cut."""
        return self.parallel.cutter(ranks), self.train.seed, self.parallel.reuse


def at_least(section: str, settings: object, **lows: float) -> None:
    """Refuse numbers below their lower bounds.

    Raises:
        ConfigError: Naming the first of them.
    """
    for name, low in lows.items():
        value = getattr(settings, name)
        # `not >=` rather than `<`, so that NaN is refused.
        if value is not None and not value >= low:
            raise ConfigError(f"{section}.{name} to be {low} or more", f"{value!r}")
