"""Run = Data + Model + Parallel + Train + Report: the one source of command line flags, TOML and docs.

Where it sits: frozen dataclasses without torch; ``cli.app`` turns them into flags, ``train`` reads them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from kagome.config.fields import at_least, check_kinds
from kagome.config.parallel import Parallel
from kagome.errors import ConfigError

LONGEST_TIMEOUT = 1e8
"""Seconds: three years."""
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
    ``pt:FILE``, ``python:package.module:function``."""
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
    target_type: str | None = None
    """In a graph with several vertex types, the one that is trained on and scored; by default the one with
    labels."""
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
    memory: bool = False
    """List a rank's largest tensors at the peak of its first epoch, which takes longer for it."""

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

    @property
    def recomputes(self) -> bool:
        """Whether layers run again in backward: by the model's own setting, or by that of a plan."""
        return self.model.recompute or self.parallel.activations == "recompute"

    def cut(self, ranks: int) -> tuple[str, int, bool]:
        """Return how vertices are cut for this many ranks: partitioner, seed, and whether to reuse a cut."""
        return self.parallel.cutter(ranks), self.train.seed, self.parallel.reuse
