"""Run = Data + Model + Parallel + Train + Report: the one source of command line flags, TOML and docs.

Where it sits: frozen dataclasses without torch; ``cli.main`` turns them into flags, ``train`` reads them.
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
    """Folder of a saved partition (``kagome partition``): each rank loads its own part only."""
    undirected: bool = False
    """Add the reverse of every edge."""
    self_loops: bool = False
    """Add the missing self-loops."""
    project: int | None = None
    """Project the features to this many columns, once, by a seeded random matrix."""
    split: int = 0
    """Which of several given splits to use; without any masks, the seed of the 60/20/20 split made."""

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
    """Reduce messages by kernels, without a tensor of a row an edge; off, all runs as PyG runs it."""
    recompute: bool = False
    """Keep the inputs of each layer only, and compute the rest again in backward; nothing is sent again."""

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
    """Parts the graph is cut into; by default as many as there are ranks for each stage."""
    pipe: int = 1
    """Ranks that the model's layers are cut over: its stages."""
    stages_per_rank: int = 1
    """Stages of each of them, dealt round: with several, few chunks fill a pipeline, and more is sent."""
    tensor: int = 1
    """Slices that the features are cut into: layers whose columns do not meet sum over the whole graph, each
    rank some columns; other layers read a halo."""
    decouple: bool = False
    """Train another model: all the layers' maps first, then all their hops, so that depth sends nothing more
    (NeutronTP). For GCN, SAGE, GAT, GCN-II and R-GCN layers."""
    memory_gib: float | None = None
    """Bound of the working memory, in GiB, of a sum over feature slices: the graph passes in chunks, and rows
    of the next one travel meanwhile."""
    activations: Activations = "auto"
    """Where what backward needs of a forward waits for it: on the ``device``, in ``host`` memory, or on
    ``disk`` (in TMPDIR); ``auto`` takes host memory on a GPU where ``memory_gib`` is set."""
    chunks: int | None = None
    """Chunks of each part that pass the stages one after the other; by default 4 a stage, else 1."""
    cross_chunk: CrossChunk = "history"
    """Neighbours in other chunks: their last known rows, nothing (``drop``), or ``exact`` rows, layer by
    layer."""
    history_epochs: int = 20
    """Epochs for which historical rows are kept before they are taken anew."""
    cross_chunk_scale: float = 2.0
    """Factor of gradients that pass from one chunk to an earlier one: half of them are lost."""
    shuffle_chunks: bool = True
    """Take the chunks in another order each epoch."""
    stale_gradients: bool = False
    """Let historical rows pass on the gradients of the epoch before (an ablation; without the factor)."""
    guard: bool = True
    """Watch what history costs: before accuracy is lost take rows anew in each epoch, with gradients of the
    epoch before, or run exact epochs."""
    schedule: Schedule = "auto"
    """In which order chunks pass: ``auto`` takes fill-drain, and 1F1B where chunks are independent."""
    layers: tuple[str, ...] = ()
    """Names of modules that follow each other, for a model whose forward cannot be traced."""
    codec: CodecName = "none"
    """What rows of other parts look like on the wire: ``none`` is the tensor's own type; ``onebit`` to
    ``int8`` round at random, right on the mean."""
    codec_backward: CodecName | None = None
    """The same for gradients; by default as ``codec``."""
    codec_stage: CodecName | None = None
    """The same for what goes from stage to stage; by default as it is."""
    codec_weights: SumCodec = "none"
    """The same for gradients of weights while parts sum them: ``bf16`` has the range of float32."""
    error_feedback: bool = False
    """Add what a codec lost of a row to the row that is sent next."""
    max_age: int = 0
    """Epochs that rows of other parts, and their gradients, may be old: from 1 on they travel while the next
    epoch computes."""
    sync_every: int | Literal["auto"] | None = None
    """Wait for this epoch's rows in every so many epochs; ``auto``: when rows have moved far."""
    smoothing: float = 0.0
    """Share of earlier epochs in late rows: a moving average."""
    halo_sample: float = 1.0
    """Share of other parts' rows that is read in an epoch, other ones each time, made larger so that sums are
    right on the mean. For layers that sum or average rows times weights (GCN, SAGE, GIN): one whose
    message is another function of a row (EdgeConv, CG, ResGated) is refused."""
    skip_drift: float = 0.0
    """Do not send rows again that moved by less than this share of their length, until they are ``max_age``
    epochs old, which is 2 at least."""
    adaptive_bits: bool = False
    """Share out the codec's bits: more for rows that lose much and are read often."""
    partitioner: Partitioner = "auto"
    """How vertices are given to parts; ``auto`` takes METIS where it fits into memory, else streaming."""
    reuse: bool = True
    """Keep partitions in the user's cache, and use them again while data, partitioner, seed and parts are the
    same."""
    shared_memory: bool = True
    """Ranks of one host hand each other large messages in memory that both see, not through a socket."""
    plan: str = "manual"
    """``auto`` predicts all cuts for --nproc ranks and takes the best; a file that ``kagome plan --json``
    wrote gives its first plan; ``manual`` is what the settings here say."""
    allow: tuple[Allowed, ...] = ()
    """What ``auto`` may take: another model (``decoupled``), rows of an earlier epoch in other chunks
    (``history``) or of other parts (``stale``), one bit a number of those (``onebit``)."""

    def __post_init__(self) -> None:
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
        """Settings of a plan in place of defaults: from here on the mesh is as if it had been written out.

        Raises:
            ConfigError: If one of them was set here to another value.
        """
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        for name, value in settings.items():
            if getattr(self, name) not in (defaults[name], value):
                raise ConfigError(
                    f"{name}={value!r}, as the plan in {self.plan} has it",
                    f"{name}={getattr(self, name)!r}, which was set as well",
                    hint="one of the two",
                )
            object.__setattr__(self, name, value)
        object.__setattr__(self, "plan", "manual")

    def fit(self, world_size: int) -> Parallel:
        """The same cut for a given number of ranks, with nothing left open.

        Raises:
            ConfigError: If the cut needs another number of ranks, or settings clash on it.
        """
        if self.plan == "auto":
            raise ConfigError(
                "plan='auto' in kagome train --nproc only, which predicts cuts before ranks start",
                f"{world_size} ranks that have started",
                hint="kagome plan --json > plan.json, then plan='plan.json' (--parallel.plan plan.json)",
            )
        parts = world_size // (self.pipe * self.tensor) if self.graph is None else self.graph
        chunks = self.chunks or default_chunks(self.pipe, self.tensor)
        fitted = dataclasses.replace(self, graph=max(parts, 1), chunks=chunks)
        validation.check_mesh(fitted, world_size)
        return fitted

    @property
    def pattern(self) -> Schedule:
        """The schedule, with ``auto`` resolved."""
        alone = self.cross_chunk == "drop" and self.stages_per_rank == 1
        return ("1f1b" if alone else "fill-drain") if self.schedule == "auto" else self.schedule

    def cutter(self, ranks: int) -> str:
        """The partitioner of the vertices of so many ranks, those of one stage.

        Ranks that slice the features of one part want equal shares of it, however they are cut.
        """
        if self.tensor == 1:
            return self.partitioner
        if ranks == self.tensor:
            return "contiguous" if self.partitioner == "auto" else self.partitioner
        return f"{self.partitioner}/{self.tensor}"


def default_chunks(pipe: int, tensor: int) -> int:
    """Chunks of a part where nothing is said: plans leave them out where they are these.

    Feature slices are of the whole graph: it passes the stages as one chunk.
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
    """Weight updates; one epoch is one update over the whole graph."""
    seed: int = 0
    """Seed of weights, dropout and partition."""
    lr: float = 0.01
    """Adam's learning rate."""
    weight_decay: float = 5e-4
    """Adam's weight decay."""
    patience: int | None = None
    """Stop when the validation metric has not become better for so many epochs."""
    eval_every: int = 1
    """Evaluate each so many epochs."""
    clip: float | None = None
    """Largest norm of the whole gradient."""
    amp: Literal["none", "bf16"] = "none"
    """Mixed precision: run the forward pass in bf16 autocast."""
    loss: Loss = "auto"
    """What is learned; ``auto`` takes cross entropy of class ids, and binary cross entropy of several labels
    of 0 and 1. Numbers want ``mse``, ``mae`` or ``huber``. A label that is NaN is none, entry by entry."""
    ignore_index: int | None = None
    """The label that stands for none; where nothing is said -1 with ``cross_entropy`` and ``bce``, and none
    with other losses and with your own."""
    class_weight: tuple[float, ...] = ()
    """A weight a class for ``cross_entropy``; the mean divides by the sum of weights, as PyTorch's."""
    sample_weight: str | None = None
    """The attribute of the data with a weight a vertex, for a built-in loss: a weighted mean."""
    metric: Metric = "auto"
    """What is reported, and chooses the best epoch; ``auto`` takes accuracy, F1 (micro) for several labels a
    vertex, RMSE or MAE for numbers, and the loss where a loss of your own meets labels that are no
    classes, or an output with other columns than the labels ask for."""
    metric_columns: tuple[int, ...] = ()
    """Columns of the model's output that the metric scores; by default all, one a class or label."""
    check: bool = True
    """Before training, compare split with whole on a small sample of the graph, and refuse a run that is
    foretold to want far more memory than is left."""
    save_every: int | None = None
    """Write a checkpoint each so many epochs (always one at the end and at SIGTERM)."""
    save_rows: bool = True
    """Checkpoints hold what history and late rows have of the last epoch: the same ranks go on to the bit."""
    timeout: float = 300.0
    """Seconds that a rank waits for another before it gives up and says for whom."""

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
        """How the vertices of so many ranks are cut: partitioner, seed, and whether a kept cut will do."""
        return self.parallel.cutter(ranks), self.train.seed, self.parallel.reuse


def at_least(section: str, settings: object, **lows: float) -> None:
    """Refuse numbers below their least.

    Raises:
        ConfigError: Naming the first.
    """
    for name, low in lows.items():
        value = getattr(settings, name)
        if value is not None and not value >= low:
            raise ConfigError(f"{section}.{name} to be {low} or more", f"{value!r}")
