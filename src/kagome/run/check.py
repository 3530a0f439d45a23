"""Check: a user's model on a small sample of the user's graph, split against whole: outputs and gradients.

Where it sits: ``trainer`` runs it before the first training of a model, ``kagome check`` and ``kagome.check``
on demand. The ranks of the split are threads of this process (``comm.local``), so it takes a second and
needs no peers.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor, nn
from torch_geometric.data import Data

from kagome import config
from kagome.comm.channel import Channel
from kagome.errors import CheckError, ModelError
from kagome.graph.partition import Partition, split_all
from kagome.model.copies import copied
from kagome.model.exact import HANDLERS
from kagome.neighbors.install import forget
from kagome.run.drawn import Bias
from kagome.run.first import by_first
from kagome.run.sample import cast, fitted, take_sample
from kagome.run.trace import DRAWS, Trace, WholeFailedError, no_draw, split_of, whole_of
from kagome.run.wrappers import as_written, unwrapped

TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-4}
"""Largest difference, relative to the largest entry, that is rounding."""

FLOAT32_INSIDE = 1e-5
"""Up to this a float64 difference may come from a cast to float32 in the model: float32 then decides."""

VERTICES: Final = 200
"""Of the sample that is checked."""


@dataclass(frozen=True)
class Row:
    """One compared tensor.

    Args:
        name: A module's path (and which call of it), or a parameter's name.
        kind: ``output``, ``gradient`` or ``buffer``.
        error: Largest difference over the largest entry.
    """

    name: str
    kind: str
    error: float


@dataclass(frozen=True)
class CheckResult:
    """What a check found.

    Args:
        first: The first thing that differs, in the order of the forward pass, then of gradients; else None.
        rows: All that was compared.
        parts: Ranks of the split.
        tensor: How many of them slice the features of one part.
        vertices: Vertices of the sample.
        edges: Edges of the sample.
        dtype: The number type it ran in.
        seconds: How long it took.
    """

    first: Row | None
    rows: tuple[Row, ...] = field(repr=False)
    parts: int
    tensor: int
    vertices: int
    edges: int
    dtype: str
    seconds: float

    @property
    def worst(self) -> float:
        """The largest of all differences."""
        return max((row.error for row in self.rows), default=0.0)

    def text(self) -> str:
        """One line for a person."""
        verdict = "equal" if self.first is None else f"differ first at {self.first.name} ({self.first.kind})"
        sliced = f" (features over {self.tensor})" if self.tensor > 1 else ""
        return (
            f"split over {self.parts}{sliced} and whole {verdict}: {len(self.rows)} tensors, "
            f"largest difference {self.worst:.1e} of the largest entry "
            f"({self.dtype}; {self.vertices} vertices, {self.edges} edges; {self.seconds:.1f} s)"
        )

    def raise_if_different(self) -> None:
        """Refuse to go on where split and whole differ.

        Raises:
            CheckError: Naming the first layer that differs.
        """
        if self.first is not None:
            raise CheckError(
                f"the model gives the same on {self.parts} parts as on the whole graph",
                f"the {self.first.kind} of {self.first.name} differs by {self.first.error:.1e} "
                "of its largest entry",
                where="a sample of your graph",
                hint="a layer there mixes vertices other than through edges; kagome check shows all rows, "
                "--train.no-check goes on all the same",
            )


@as_written
def check(
    model: nn.Module,
    data: Data | Partition,
    *,
    parts: int = 3,
    vertices: int = VERTICES,
    seed: int = 0,
    tensor: int = 1,
    fast: bool = True,
) -> CheckResult:
    """Run a model on a sample of a graph, whole and split, and compare everything.

    Args:
        model: The user's module; a copy is run.
        data: A validated graph, or a rank's part (its own vertices and the edges among them are sampled).
        parts: Ranks of the split.
        vertices: Vertices of the sample.
        seed: Of the sample, the split and the weights of the sum that is differentiated.
        tensor: How many ranks slice features together, where they can be.
        fast: Whether messages of the split are reduced by kernels.

    Returns:
        What was found; see :meth:`CheckResult.raise_if_different`.

    Raises:
        ModelError: If the model fails on the whole sample, or on a part.
    """
    begun = time.perf_counter()
    sample = take_sample(data, vertices, seed)
    generator = torch.Generator().manual_seed(seed)
    count = int(sample.num_nodes or 0)
    owner = torch.randint(0, parts, (count,), generator=generator)
    model = unwrapped(model)
    twin = twin_of(model)
    attempts = [torch.float64, torch.float32]
    while attempts:
        dtype = attempts.pop(0)
        try:
            rows = _compare(twin.to(dtype), cast(sample, dtype), owner, parts, dtype, seed, tensor, fast)
        except WholeFailedError as failure:
            if attempts:  # a layer that insists on float32 gets it, and a table of the edges has the sample's
                attempts = [dtype, *attempts] if fitted(twin, data, sample) else attempts
                continue
            raise ModelError(
                f"the model runs on {count} vertices of your graph in one process",
                f"it raised {type(failure.cause).__name__}: {failure.cause}",
                where=failure.where,
                hint=_table_hint(model, int(data.num_nodes or 0)) or "run it once in plain PyTorch Geometric",
            ) from failure.cause
        first = next((row for row in rows if not row.error <= TOLERANCE[dtype]), None)
        if first is None or max(row.error for row in rows) > FLOAT32_INSIDE:
            break
    return CheckResult(
        first=first,
        rows=tuple(rows),
        parts=parts,
        tensor=tensor,
        vertices=count,
        edges=sample.edge_index.size(1),
        dtype=str(dtype).removeprefix("torch."),
        seconds=time.perf_counter() - begun,
    )


def _table_hint(model: nn.Module, vertices: int) -> str:
    """What to do about a parameter that has a row for each vertex of the whole graph; empty if none has."""
    tables = (name for name, p in model.named_parameters() if p.dim() > 1 and p.size(0) == vertices)
    name = next(tables, "")
    return name and (
        f"{name} has a row for each of {vertices} vertices: read those of the given vertices by number, with "
        f"data.n_id = torch.arange({vertices}) and forward(..., n_id)"
    )


def check_on_first(
    model: nn.Module, part: Partition, channel: Channel, settings: config.Run
) -> tuple[str, ...]:
    """Rank 0 checks on a sample of its own part; all ranks hear what came out. All ranks call it.

    Returns:
        What was compared, as a note; nothing on one rank with the graph in one chunk.

    Raises:
        CheckError: If split and whole differ.
        ModelError: If a layer's messages of drawn rows are not right on the mean (``halo_sample``).
    """
    if channel.size == 1 and (settings.parallel.chunks or 1) == 1:
        return ()

    def look() -> CheckResult:
        cut, seed = settings.parallel, settings.train.seed
        # Three of anything, and two by two where parts are sliced.
        both = 1 < cut.tensor * cut.pipe < channel.size
        parts, tensor = (4, 2) if cut.tensor > 1 and both else (3, 3 if cut.tensor > 1 else 1)
        result = check(model, part, seed=seed, parts=parts, tensor=tensor, fast=settings.model.fast)
        refusal = biased(model, part, cut.halo_sample, seed) if cut.halo_sample < 1 else None
        if refusal is not None:
            raise refusal
        return result

    found = by_first(channel, look, "check of the model", [CheckResult])
    found.raise_if_different()
    return (f"check: {found.text()}",)


def biased(model: nn.Module, part: Partition, share: float, seed: int) -> ModelError | None:
    """Why rows cannot be drawn for a model; None where they can."""
    sample = take_sample(part, VERTICES, seed)
    whole = split_all(sample, torch.zeros(int(sample.num_nodes or 0), dtype=torch.int64), 1)[0]
    with Bias(twin_of(model), share) as bias, suppress(WholeFailedError):
        whole_of(bias.model, whole, seed)  # what it cannot run in float32 was run by the check
    return bias.refusal()


def twin_of(model: nn.Module) -> nn.Module:
    """A copy of a model on the CPU, without what its layers have cached.

    Raises:
        ModelError: If it cannot be copied.
    """
    try:
        twin = copied(model).cpu()
    except Exception as error:
        raise ModelError(
            "the check runs a copy of the model",
            f"it cannot be copied: {type(error).__name__}: {error}",
            hint="let copy.deepcopy(model) work, or leave the check out (--train.no-check)",
        ) from error
    for module in twin.modules():
        forget(module)
    return twin


def _compare(
    model: nn.Module,
    sample: Data,
    owner: Tensor,
    parts: int,
    dtype: torch.dtype,
    seed: int,
    tensor: int,
    fast: bool,
) -> list[Row]:
    with _default(dtype):
        whole_data = split_all(sample, torch.zeros_like(owner), 1)[0]
        pieces = split_all(sample, owner, parts)
        rows: list[Row] = []
        quiet = {**HANDLERS, **dict.fromkeys(DRAWS, no_draw)}
        whole = whole_of(copied(model), whole_data, seed)
        split = split_of(model, pieces, quiet, seed, tensor=tensor, fast=fast)
        rows += _differences(whole, split, pieces, sample, "")
        for name, buffer in whole.buffers.items():
            shares = [trace.buffers[name] for trace in split]
            if all(share.shape == buffer.shape for share in shares):
                rows.append(Row(name, "buffer", max(_error(share, buffer, None) for share in shares)))
        # Once more with dropout on, against Kagome on one rank: draws must not know the mesh.
        one = split_of(model, [whole_data], dict(HANDLERS), seed, fast=fast)
        many = split_of(model, pieces, dict(HANDLERS), seed, tensor=tensor, fast=fast)
        rows += _differences(one[0], many, pieces, sample, " with dropout")
        return rows


@contextmanager
def _default(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


# Comparing ---------------------------------------------------------------------------------------


def _differences(
    whole: Trace, split: list[Trace], pieces: list[Partition], sample: Data, note: str
) -> list[Row]:
    rows: list[Row] = []
    count = int(sample.num_nodes or 0)
    for name, value in whole.outputs.items():
        found = [trace.outputs.get(name) for trace in split]
        if any(f is None for f in found):
            continue
        axis = _row_axis(value, [f for f in found if f is not None], pieces, count)
        if axis is None:
            continue
        joined = torch.zeros_like(value)
        for piece, part in zip(pieces, found, strict=True):
            assert part is not None
            joined.index_copy_(axis, piece.own, part.to(joined.dtype))
        rows.append(Row(name + note, "output", _error(joined, value, None)))
    scale = max(
        (float(g.abs().max()) for g in whole.grads.values() if g is not None and g.numel()), default=0.0
    )
    for name, grad in reversed(whole.grads.items()):
        shares = [trace.grads.get(name) for trace in split]
        if grad is None and all(s is None for s in shares):
            continue
        total = sum(
            (s for s in shares if s is not None),
            start=torch.zeros_like(next(g for g in (grad, *shares) if g is not None)),
        )
        rows.append(
            Row(
                name + note,
                "gradient",
                _error(total, torch.zeros_like(total) if grad is None else grad, scale),
            )
        )
    return rows


def _row_axis(value: Tensor, found: list[Tensor], pieces: list[Partition], count: int) -> int | None:
    for axis, size in enumerate(value.shape):
        rest = [s for a, s in enumerate(value.shape) if a != axis]
        fits = all(
            f.dim() == value.dim()
            and f.size(axis) == piece.own.numel()
            and [s for a, s in enumerate(f.shape) if a != axis] == rest
            for f, piece in zip(found, pieces, strict=True)
        )
        if size == count and fits:
            return axis
    return None


def _error(a: Tensor, b: Tensor, scale: float | None) -> float:
    if not a.numel():
        return 0.0
    both = torch.isnan(a) & torch.isnan(b) | (a == b)
    gap = torch.where(both, torch.zeros_like(a), (a - b).abs())
    largest = float(b[torch.isfinite(b)].abs().max()) if torch.isfinite(b).any() else 0.0
    base = max(largest, scale or 0.0, 1e-30)
    worst = float(gap.max()) / base
    return worst if worst == worst else float("inf")
