"""Check: compare outputs and gradients of a user's model, split and whole, on a small sample of the graph.

Where it sits: ``train.trainer`` runs it before the first training of a model, ``kagome check`` and
``kagome.check`` on demand. The ranks of the split are threads of this process
(``comm.in_process.thread_group``), so it takes a second and needs no peers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Literal

import torch
from torch import Tensor, nn
from torch_geometric.data import Data, HeteroData

from kagome import config
from kagome.comm.channel import Channel
from kagome.components.model_setup import model_copy
from kagome.components.rank_zero import by_first
from kagome.components.wrappers import as_written, refuse_no_module, unwrapped
from kagome.config.fields import check_kind
from kagome.errors import CheckError, ConfigError, ModelError
from kagome.graph.partition.partition import Partition, split_all
from kagome.graph.partition.sets_partition import Part, SetsPartition, scored_rows
from kagome.graph.structure.attributes import Sorted
from kagome.graph.structure.hetero import SetsData
from kagome.graph.structure.validate import validate
from kagome.model.copies import copied
from kagome.model.exact.handlers import HANDLERS
from kagome.profile.subgraph import cast, fitted, numbered_sample, take_sample
from kagome.verify.sets_sample import cast_sets, cut_sets, has_tables, sample_sets, sets_part
from kagome.verify.trace import DRAWS, Trace, WholeFailedError, no_draw, split_of, whole_of
from kagome.verify.unbiased import Bias

TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-4}
"""The largest difference, relative to the largest entry, that counts as rounding."""

FLOAT32_INSIDE = 1e-5
"""Largest float64 difference that may come from a cast to float32 in the model; float32 then decides."""

VERTICES: Final = 200
"""The number of vertices in the sample."""


@dataclass(frozen=True)
class ComparedTensor:
    """The comparison of one tensor.

    Args:
        name: A module's path (and which call of it), or a parameter's name.
        kind: ``output``, ``gradient`` or ``buffer``; of a sharded model also ``loss`` and
            ``second derivative``.
        error: Largest difference over the largest entry.
    """

    name: str
    kind: str
    error: float


@dataclass(frozen=True)
class CheckResult:
    """The result of a check.

    Args:
        first: The first tensor that differs, in the order of the forward pass, then of gradients; else None.
        rows: All compared tensors.
        parts: Ranks of the split.
        tensor: How many of them slice the features of one part.
        vertices: Vertices of the sample.
        edges: Edges of the sample.
        dtype: The number type it ran in.
        seconds: The time that it took.
        unseen: A sentence on what was not compared; empty if everything was.
    """

    first: ComparedTensor | None
    rows: tuple[ComparedTensor, ...] = field(repr=False)
    parts: int
    tensor: int
    vertices: int
    edges: int
    dtype: str
    seconds: float
    unseen: str = ""

    @property
    def worst(self) -> float:
        """The largest of all differences."""
        return max((row.error for row in self.rows), default=0.0)

    def text(self) -> str:
        """Describe the result in one line."""
        verdict = "equal" if self.first is None else f"differ first at {self.first.name} ({self.first.kind})"
        sliced = f" (features over {self.tensor})" if self.tensor > 1 else ""
        split = f"split over {self.parts}{sliced} and whole"
        compared = split if self.parts > 1 else "one rank and plain PyG"
        unseen = f"; {self.unseen}" if self.unseen else ""
        return (
            f"{compared} {verdict}: {len(self.rows)} tensors, "
            f"largest difference {self.worst:.1e} of the largest entry "
            f"({self.dtype}; {self.vertices} vertices, {self.edges} edges; {self.seconds:.1f} s){unseen}"
        )

    def raise_if_different(self) -> None:
        """Raise an error if split and whole differ.

        Raises:
            CheckError: Naming the first layer that differs.
        """
        if self.first is not None:
            raise CheckError(
                f"the model to give the same on {self.parts} parts as on the whole graph",
                f"the {self.first.kind} of {self.first.name}, which differs by {self.first.error:.1e} "
                "of its largest entry",
                where="a sample of your graph",
                hint="a layer there mixes vertices other than through edges; kagome check shows all rows",
            )


@as_written
def check(
    model: nn.Module,
    data: Data | HeteroData | Part,
    *,
    parts: int = 3,
    vertices: int = VERTICES,
    seed: int = 0,
    tensor: int = 1,
    fast: bool = True,
    partial_sums: bool = False,
) -> CheckResult:
    """Run a model on a sample of a graph, whole and split, and compare everything.

    Args:
        model: The user's module; a copy is run.
        data: A graph, or a rank's part (its own vertices and the edges among them are sampled).
        parts: Ranks of the split.
        vertices: Vertices of the sample; of several vertex sets so many times their number.
        seed: The seed of the sample, the split and the weights of the sum that is differentiated.
        tensor: How many ranks slice features together, where features can be sliced.
        fast: Whether kernels reduce the messages of the split.
        partial_sums: Whether parts send partial sums in place of rows where these are fewer.

    Returns:
        The result; see :meth:`CheckResult.raise_if_different`.

    Raises:
        ModelError: If the model is not a module, or fails on the whole sample or on a part.
        DataError: If the graph has a fault.
        ConfigError: If a number has the wrong type or is too small, or ``parts`` is not a multiple of
            ``tensor``.

    Example:
        >>> import kagome
        >>> from torch_geometric.nn import GAT
        >>> data = kagome.load("sbm:vertices=60,degree=4,features=6,classes=3,communities=3")
        >>> result = kagome.check(GAT(6, 8, num_layers=2, out_channels=3), data, parts=2)
        >>> result.first is None  # no tensor differs
        True
    """
    begun = time.perf_counter()
    refuse_no_module(model, "check(model, ...)")
    options = _options_of(parts, seed, tensor, fast, partial_sums)
    check_kind("vertices", vertices, int, least=1)
    if isinstance(data, HeteroData):
        data = sets_part(data)
    elif not isinstance(data, Partition | SetsPartition | Sorted):
        data = validate(data)[0]
    # The order of attempts. A sample is renumbered, 0 to 199, which suits most models:
    #    sample            plain PyG runs it ──> compared
    #    sample            forward names vertices by number ──┬─> all N vertices with the sample's edges
    #    sample            plain PyG fails (a table of N rows) ┘
    own_copy = model_copy(unwrapped(model))
    sample, unseen = _sample(own_copy, data, int(vertices), options.seed), ""
    try:
        found = _on_sample(own_copy, data, sample, options)
        if found.numbered and _vertices(sample) != _vertices(data):
            whole = _numbered(data, sample, int(vertices), options.seed)
            unseen = "" if whole is not None else _TOO_MANY.format(_vertices(data))
            sample = sample if whole is None else whole
            found = found if whole is None else _on_sample(own_copy, data, whole, options)
    # A failure of plain PyG is not a difference of split and whole. The
    # sample may be what does not suit the model.
    except WholeFailedError as failure:
        whole = _numbered(data, sample, int(vertices), options.seed)
        if whole is None:
            raise _no_sample(failure, _vertices(sample)) from failure.cause
        sample = whole
        try:
            found = _on_sample(own_copy, data, sample, options)
        except WholeFailedError as again:
            raise _no_sample(again, _vertices(sample)) from again.cause
    return CheckResult(
        first=found.first,
        rows=tuple(found.rows),
        parts=options.parts,
        tensor=options.tensor,
        vertices=_vertices(sample),
        edges=sum(each.index.size(1) for each in sample.graph.edges.values())
        if isinstance(sample, SetsData)
        else sample.edge_index.size(1),
        dtype=str(found.dtype).removeprefix("torch."),
        seconds=time.perf_counter() - begun,
        unseen=unseen,
    )


_TOO_MANY: Final = "what goes by the numbers of {:,} vertices is not compared: they are too many for a check"


def _sample(model: nn.Module, data: Data | Part, vertices: int, seed: int) -> Data | SetsData:
    """Return a sample of a graph; with all vertices of several sets if the model has a row for each."""
    if not isinstance(data, SetsPartition):
        return take_sample(data, vertices, seed)
    whole = _numbered(data, None, vertices, seed) if has_tables(model, data) else None
    return whole or sample_sets(data, vertices * len(data.names), seed)


def _numbered(
    data: Data | Part, sample: Data | SetsData | None, vertices: int, seed: int
) -> Data | SetsData | None:
    """Return the sample's edges among all vertices of the graph; None if these are too many, or there."""
    if isinstance(data, SetsPartition):
        if sample is not None and _vertices(sample) == _vertices(data):
            return None
        return sample_sets(data, vertices * len(data.names), seed, numbered=True)
    assert isinstance(sample, Data)
    return numbered_sample(data, sample)


def _vertices(data: Data | Part | SetsData) -> int:
    """Return the number of vertices of a graph, of all its sets."""
    if isinstance(data, SetsPartition):
        return sum(data.sizes)
    if isinstance(data, SetsData):
        return sum(each.count for each in data.graph.vertices.values())
    return int(data.num_nodes or 0)


@dataclass(frozen=True)
class _Options:
    """The arguments of :func:`check` that say how it splits and runs the model."""

    parts: int
    seed: int
    tensor: int
    fast: bool
    partial_sums: bool


def _options_of(parts: int, seed: int, tensor: int, fast: bool, partial_sums: bool) -> _Options:
    """Check those arguments of :func:`check` and return them."""
    for name, value in (("parts", parts), ("tensor", tensor)):
        check_kind(name, value, int, least=1)
    check_kind("seed", seed, int)
    check_kind("fast", fast, bool)
    check_kind("partial_sums", partial_sums, bool)
    if parts % tensor:
        raise ConfigError("tensor to be a divisor of parts", f"{tensor}, of {parts} parts")
    return _Options(int(parts), int(seed), int(tensor), fast, partial_sums)


@dataclass(frozen=True)
class _Found:
    """The result on one sample, and whether forward identified vertices by their index."""

    rows: list[ComparedTensor]
    first: ComparedTensor | None
    dtype: torch.dtype
    numbered: bool


def _on_sample(own_copy: nn.Module, data: Data | Part, sample: Data | SetsData, options: _Options) -> _Found:
    """Compare on a sample in float64, or in float32 where the model requires it.

    Raises:
        WholeFailedError: If plain PyG does not run the model on the sample.
    """
    # float64 tells rounding (1e-15) from a wrong result; a wrong sum of few
    # entries may look like float32's rounding.
    attempts = [torch.float64, torch.float32]
    while True:
        dtype = attempts.pop(0)
        try:
            rows, numbered = _compare(own_copy.to(dtype), *_cut(sample, dtype, options), dtype, options)
        except WholeFailedError:
            if not attempts:
                raise
            # A layer that requires float32 gets it; a table over edges is cut to the sample's edges.
            cuts = isinstance(sample, Data) and not isinstance(data, SetsPartition)
            attempts = [dtype, *attempts] if cuts and fitted(own_copy, data, sample) else attempts
            continue
        first = next((row for row in rows if not row.error <= TOLERANCE[dtype]), None)
        # Up to FLOAT32_INSIDE the model may have cast to float32 by
        # itself; the second attempt has its tolerance.
        if first is None or max(row.error for row in rows) > FLOAT32_INSIDE or not attempts:
            return _Found(rows, first, dtype, numbered)


def _cut(sample: Data | SetsData, dtype: torch.dtype, options: _Options) -> tuple[Part, list[Part]]:
    """Return a sample in a number type as one part, and as several."""
    # A random cut: most edges cross parts, so that a mistake at the border shows.
    if isinstance(sample, SetsData):
        sample = cast_sets(sample, dtype)
        return cut_sets(sample, 1, options.seed)[0], [*cut_sets(sample, options.parts, options.seed)]
    sample = cast(sample, dtype)
    generator = torch.Generator().manual_seed(options.seed)
    owner = torch.randint(0, options.parts, (int(sample.num_nodes or 0),), generator=generator)
    return split_all(sample, torch.zeros_like(owner), 1)[0], [*split_all(sample, owner, options.parts)]


def _no_sample(failure: WholeFailedError, count: int) -> ModelError:
    return ModelError(
        f"the model to run on {count:,} vertices of your graph in plain PyTorch Geometric",
        f"{type(failure.cause).__name__}: {failure.cause}",
        where=failure.where,
        hint="if it runs on the whole graph: let sizes come from what forward is given (x.size(0))",
    )


Way = Literal["fast", "plain", "pyg"]
"""How one rank runs a model: with kernels, with messages edge by edge, or as plain PyG does."""


def before_first(
    model: nn.Module,
    part: Part,
    channel: Channel,
    settings: config.Run,
    goes: Callable[[Way], None] | None = None,
) -> tuple[str, ...]:
    """Compare with plain PyG before the first forward pass. All ranks call it.

    Args:
        model: The user's module.
        part: This rank's part.
        channel: All ranks.
        settings: The run's settings.
        goes: Called on a single rank that has the whole graph, with the way to run the model.

    Returns:
        Notes on the comparison.

    Raises:
        CheckError: If split and whole differ.
        ModelError: As :func:`check_on_first`.
    """
    # One rank with the whole graph is special: if Kagome's way differs from PyG's, it can run as PyG does.
    if channel.size > 1 or goes is None:
        return check_on_first(model, part, channel, settings)
    way, message = way_alone(model, part, settings)
    goes(way)
    return (message,)


def check_on_first(model: nn.Module, part: Part, channel: Channel, settings: config.Run) -> tuple[str, ...]:
    """Check on rank 0, with a sample of its own part, and share the result. All ranks call it.

    Returns:
        A note on the comparison.

    Raises:
        CheckError: If split and whole differ.
        ModelError: If a layer's output is biased when rows are drawn (``halo_sample``).
    """

    def look() -> CheckResult:
        cut, seed = settings.parallel, settings.train.seed
        # Split over three ranks, or over two parts of two slices each where both occur.
        # Several parts, each with slices: both kinds of exchange are tested then.
        both = 1 < cut.tensor * cut.pipe < channel.size
        parts, tensor = (4, 2) if cut.tensor > 1 and both else (3, 3 if cut.tensor > 1 else 1)
        result = check(
            model,
            part,
            seed=seed,
            parts=parts,
            tensor=tensor,
            fast=settings.model.fast,
            partial_sums=sums_sent(cut, part),
        )
        if cut.halo_sample < 1:
            refusal = biased(model, part, cut.halo_sample, seed)
            if refusal is not None:
                raise refusal
        return result

    found = by_first(channel, look, "check of the model", [CheckResult])
    found.raise_if_different()
    return (f"check: {found.text()}",)


def sums_sent(cut: config.Parallel, part: Part) -> bool:
    """Return whether a run with this part sends partial sums, so that a check on a sample sends them too."""
    of_sets = [part] if isinstance(part, Partition) else [each.part for each in part.edges]
    return any(config.sends_sums(cut.partial_sums_sent, each.num_edges) for each in of_sets)


def way_alone(model: nn.Module, part: Part, settings: config.Run) -> tuple[Way, str]:
    """Return how one rank with the whole graph runs a model: fast, if that gives what plain PyG gives.

    Returns:
        ``fast``, ``plain`` (messages edge by edge) or ``pyg`` (plain PyG, with nothing of Kagome in the
        forward pass), and a note.
    """
    # In order of speed; the first that agrees with plain PyG is taken.
    ways: list[Literal["fast", "plain"]] = ["fast", "plain"] if settings.model.fast else ["plain"]
    why = ""
    for way in ways:
        try:
            found = check(model, part, seed=settings.train.seed, parts=1, fast=way == "fast")
        except ModelError as error:
            if "plain PyTorch Geometric" in error.expected:  # the model runs on no sample of the graph
                return ways[0], f"the model was not compared with plain PyG: {error.got}"
            why = error.got
            continue
        if found.first is None:
            return way, f"check: {found.text()}"
        why = f"the {found.first.kind} of {found.first.name} is another than plain PyG's"
    return "pyg", f"the model runs as plain PyG runs it, without Kagome's own way: {why}"


def biased(model: nn.Module, part: Part, share: float, seed: int) -> ModelError | None:
    """Return the error for a model that is biased when rows are drawn; None if it is not."""
    sample = _sample(model, part, VERTICES, seed)
    # All vertices in one part.
    whole: Part
    if isinstance(sample, SetsData):
        whole = cut_sets(sample, 1, seed)[0]
    else:
        whole = split_all(sample, torch.zeros(int(sample.num_nodes or 0), dtype=torch.int64), 1)[0]
    with Bias(model_copy(model), share) as bias, suppress(WholeFailedError):
        whole_of(bias.model, whole, seed)  # the check ran it, in float64 if float32 fails
    return bias.refusal()


def _compare(
    model: nn.Module, whole_part: Part, pieces: list[Part], dtype: torch.dtype, options: _Options
) -> tuple[list[ComparedTensor], bool]:
    """Compare plain PyG with the split without draws, then one rank with the split with draws.

    Returns:
        The compared tensors; whether forward identified vertices by their index.
    """
    with _default(dtype):
        rows: list[ComparedTensor] = []
        # Plain PyG draws from torch's generator and Kagome from counters, so
        # their dropout masks differ: off for both.
        quiet = {**HANDLERS, **dict.fromkeys(DRAWS, no_draw)}
        whole = whole_of(copied(model), whole_part, options.seed)
        split_up = partial(
            split_of,
            model,
            pieces,
            seed=options.seed,
            tensor=options.tensor,
            fast=options.fast,
            partial_sums=options.partial_sums,
        )
        split = split_up(handlers=quiet)
        rows += _differences(whole, split, pieces, "")
        for name, buffer in whole.buffers.items():
            # Running statistics are sums over all vertices, so every rank has the whole's. A buffer with a
            # row a vertex has another shape on a part.
            shares = [trace.buffers[name] for trace in split]
            if all(share.shape == buffer.shape for share in shares):
                rows.append(
                    ComparedTensor(name, "buffer", max(error_of(share, buffer, None) for share in shares))
                )
        if options.parts > 1:
            # Compare again with dropout on, against Kagome on one rank: draws must not depend on the mesh.
            one = split_of(
                model, [whole_part], dict(HANDLERS), options.seed, fast=options.fast, once_only=True
            )
            many = split_up(handlers=dict(HANDLERS))
            rows += _differences(one[0], many, pieces, " with dropout")
        return rows, any(trace.numbered for trace in split)


@contextmanager
def _default(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


# Comparing ---------------------------------------------------------------------------------------


def _differences(whole: Trace, split: list[Trace], pieces: Sequence[Part], note: str) -> list[ComparedTensor]:
    rows: list[ComparedTensor] = []
    for name, value in whole.outputs.items():
        found = [trace.outputs.get(name) for trace in split]
        there = [each for each in found if each is not None]
        if len(there) < len(found):
            continue
        # An output without a row a vertex (a loss, an attention of edges) has no counterpart to put together.
        # Sets of equal sizes on all parts are told apart by which of them fits.
        errors = [
            _joined_error(value, there, own, axis)
            for own, count in _vertex_sets(pieces)
            if (axis := _row_axis(value, there, own, count)) is not None
        ]
        if errors:
            rows.append(ComparedTensor(name + note, "output", min(errors)))
    # The largest gradient of all: a gradient that is 0 up to rounding, as of a
    # bias before a norm, has no scale of its own.
    scale = max(
        (float(g.abs().max()) for g in whole.grads.values() if g is not None and g.numel()), default=0.0
    )
    # From the loss backwards: the first that differs is the nearest to the cause.
    for name, grad in reversed(whole.grads.items()):
        shares = [trace.grads.get(name) for trace in split]
        if grad is None and all(s is None for s in shares):
            continue
        # Each rank has the gradient of its own rows' loss; the sum over ranks is the whole's.
        total = sum(
            (s for s in shares if s is not None),
            start=torch.zeros_like(next(g for g in (grad, *shares) if g is not None)),
        )
        rows.append(
            ComparedTensor(
                name + note,
                "gradient",
                error_of(total, torch.zeros_like(total) if grad is None else grad, scale),
            )
        )
    return rows


def _vertex_sets(pieces: Sequence[Part]) -> list[tuple[list[Tensor], int]]:
    """Return, for each vertex set, the ids of own vertices of each piece, and the number of all vertices."""
    first = pieces[0]
    if isinstance(first, Partition):
        return [([scored_rows(piece).own for piece in pieces], first.num_nodes)]
    sets = [piece for piece in pieces if isinstance(piece, SetsPartition)]
    return [([piece.own[number] for piece in sets], size) for number, size in enumerate(first.sizes)]


def _joined_error(value: Tensor, found: list[Tensor], own: list[Tensor], axis: int) -> float:
    """Return how far own rows of all parts, put together, are from the output of the whole graph."""
    joined = torch.zeros_like(value)
    for ids, part in zip(own, found, strict=True):
        joined.index_copy_(axis, ids, part.to(joined.dtype))
    return error_of(joined, value, None)


def _row_axis(value: Tensor, found: list[Tensor], own: list[Tensor], count: int) -> int | None:
    for axis, size in enumerate(value.shape):
        rest = [s for a, s in enumerate(value.shape) if a != axis]
        fits = all(
            f.dim() == value.dim()
            and f.size(axis) == ids.numel()
            and [s for a, s in enumerate(f.shape) if a != axis] == rest
            for f, ids in zip(found, own, strict=True)
        )
        # The axis along which the whole has all vertices and each part its own, and all other sizes agree.
        if size == count and fits:
            return axis
    return None


def error_of(got: Tensor, wanted: Tensor, scale: float | None) -> float:
    """Return the largest difference over the largest entry; infinite for NaN on one side only.

    Args:
        got: One tensor.
        wanted: The other, of the same shape.
        scale: The least that a difference is divided by.
    """
    if not got.numel():
        return 0.0
    # Equal infinities differ by NaN, and NaN is unequal to itself: both count as equal here.
    both = torch.isnan(got) & torch.isnan(wanted) | (got == wanted)
    gap = torch.where(both, torch.zeros_like(got), (got - wanted).abs())
    worst = float(gap.max()) / max(largest(wanted), scale or 0.0, 1e-30)
    return worst if worst == worst else float("inf")


def largest(value: Tensor) -> float:
    """Return the largest absolute value of the finite entries; 0 of none."""
    finite = value[torch.isfinite(value)]
    return float(finite.abs().max()) if finite.numel() else 0.0
