"""Sharded model: a user's model on this rank's part of a graph, called from the user's own training loop.

Where it sits: ``kagome.shard`` makes one. ``placing`` cuts the inputs, ``components.parallelize`` runs the
model on the part, ``gradient_sync`` sums gradients, ``boundary`` is between them.

::

    out = net(x, edge_index)           own rows of x, own edges ──> model on the part ──> own rows
    loss = net.mean(mse(out, y))       one number on all ranks
    loss.backward()                    .grad is right on all ranks
    optimizer.step()                   the same step on all ranks
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves, tree_map
from torch_geometric.data import Data, HeteroData

from kagome.comm.mesh import Mesh
from kagome.components.parallelize import ParallelModel
from kagome.components.task import draws_of, refuse_own_values
from kagome.config import SumCodec
from kagome.deferred.lazy_tensor import LazyTensor, now
from kagome.errors import ModelError
from kagome.graph.structure.sets import Graph
from kagome.halo.forward_pass import ForwardPass
from kagome.launch.finalizer import Finalizer
from kagome.model.copies import copied
from kagome.sharding.gradients.boundary import Boundary
from kagome.sharding.gradients.gradient_norm import refuse_different_weights
from kagome.sharding.gradients.gradient_sync import GradientSync
from kagome.sharding.gradients.weight_pieces import refuse_pieces
from kagome.sharding.model_face import no_files
from kagome.sharding.model_state import ModelState
from kagome.sharding.results import written
from kagome.sharding.rows.cut_tables import CutTables
from kagome.sharding.rows.model_edges import ModelEdges
from kagome.sharding.rows.placing import Placer, edges_of
from kagome.sharding.rows.row_sets import RowSets
from kagome.sharding.rows.row_transfer import joined
from kagome.sharding.step_exchange import StepExchange
from kagome.storage.row_files import Format, refuse_format


class ShardedModel(ModelState):
    """A model on this rank's part of a graph; :func:`kagome.shard` makes one.

    Its parameters, buffers and ``state_dict`` are the model's own objects, under the same names. All ranks
    call it alike.

    Args:
        model: The user's module.
        parallel: The model on this rank's part.
        mesh: The ranks.
        given: The graph as the user gave it; None if it was read from files.
        beside: Modules that run outside of the model.
        stack: What is closed at the end.
        tables: Parameters of which this rank has its own rows.
        steps: The exchange in which inexact rows age by training steps; None where all rows are exact.
        codec_weights: How gradients are encoded while they are summed.
    """

    _parallel: ParallelModel

    def __init__(
        self,
        model: nn.Module,
        parallel: ParallelModel,
        mesh: Mesh,
        given: Data | HeteroData | Graph | None,
        beside: Sequence[nn.Module],
        stack: ExitStack,
        tables: CutTables,
        *,
        steps: StepExchange | None = None,
        codec_weights: SumCodec = "none",
    ) -> None:
        super().__init__(model, mesh)
        self._rows = RowSets(parallel.scope)
        self._given, self._beside = given, tuple(beside)
        self._sync = GradientSync((model, *beside), mesh.weights, codec_weights, tables.parameters)
        owned = tuple(each.count for each in self._rows.vertices)
        self._boundary = Boundary(self._sync, mesh.graph, owned)
        self._placer = Placer(parallel.scope, self._rows, mesh.graph, self._boundary, given)
        self._model_edges = ModelEdges(model, parallel.scope, edges_of(given))
        if self._model_edges and parallel.options.recompute:
            raise ModelError(
                "edges as arguments of forward, with recompute=True or activations='recompute'",
                "edges that the model holds, which a layer that runs again in backward would not find",
                hint="recompute=False, and activations='device'",
            )
        self._tables = tables
        tables.keep()
        if tables:
            tables.watch(model, self)
        # Not by assignment, which would register it as a layer.
        self.__dict__["_parallel"] = parallel
        self._reads, self._steps = {}, steps
        self._known_modules = tuple(map(id, model.modules()))
        self._checked: set[bool] = set()
        self.step = 0
        """The number of forward passes with gradient so far. Dropout draws other numbers in each; set it when
        a run continues."""
        self._ending = _Ending(stack)
        self._closing = weakref.finalize(self, Finalizer(self._ending, no_files))

    @property
    def inputs(self) -> Mapping[str, Any]:
        """What this rank's part has of the graph, by name: ``edge_index`` and attributes of own rows.

        They may be given to the model; a graph that was read from a folder is nowhere else.
        """
        return self._parallel.scope.inputs

    # The model's own face -------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["model"], name)

    def __repr__(self) -> str:
        shares = [f"{each.count:,} of {each.size:,} {each.name}" for each in self._rows.vertices]
        return f"ShardedModel({', '.join(shares)}, part {self.rank} of {self.ranks}): {self.model!r}"

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """Return a copy of the plain model, as an average of weights keeps.

        A cut table has own rows in the copy too, so that an average takes them; its ``state_dict`` is whole.
        """
        if not self._closing.alive:
            return copied(self.model)
        # Layers on a part hold methods of the part, which a copy would share.
        self._parallel.__exit__(None, None, None)
        try:
            return copied(self.model)
        finally:
            self._parallel.__enter__()

    # Forward --------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on this rank's share of the arguments. All ranks call it.

        Args:
            args: What the model's ``forward`` takes. A tensor with a row for each vertex of the graph, or for
                each of this rank's own, has rows; so has one with a row for each edge. Other tensors are the
                same on all ranks.
            kwargs: The same by name.

        Returns:
            What the model returns, with own rows.

        Raises:
            ModelError: If an argument cannot be placed, or the model cannot run on a part.

        Shapes:
            ``[n, ...]`` or ``[.., n, F]`` where the model returns ``[N, ...]`` or ``[.., N, F]``.
        """
        return self.run(self.model, *args, **kwargs)

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a function of the model as ``net(...)`` runs ``forward``. All ranks call it.

        Args:
            function: For example a method of the model: ``net.run(model.encode, x, edge_index)``.
            args: Its arguments.
            kwargs: Its arguments by name.
        """
        self.refuse_unusable()
        training = torch.is_grad_enabled()
        self._sync.refresh(self)
        self.step += training
        # At steps 2, 4, 8, ..., because this reads all weights. The ranks' weights diverge if a user clips by
        # torch's norm over cut tables.
        if training and self._tables and self.step > 1 and not self.step & (self.step - 1):
            refuse_different_weights(self._sync.shared, self._mesh.graph)
        if self._steps is not None:
            self._begin_step(self._steps, training=training)
        checked = training in self._checked
        try:
            args, kwargs = self._placer.arguments(args, kwargs)
            with draws_of(self._parallel.options.seed, self.step):
                out = self._parallel.forward(
                    self.step,
                    training=training,
                    checked=not checked,
                    explain=None if checked else self._explained,
                    call=lambda: self._called(function, args, kwargs),
                )
        except Exception as error:
            self._mesh.graph.report_error(error)
            raise
        if not checked:
            leaves = [each for each in tree_leaves(out) if isinstance(each, Tensor)]
            refuse_own_values([each for each in leaves if not self._placer.is_rows(each)], self._mesh.graph)
        self._checked.add(training)
        forward_pass = self._parallel.scope.forward.forward_pass
        forward_pass.outlives = True
        return tree_map(lambda leaf: self._left(leaf, forward_pass), out)

    def _called(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with self._model_edges.put_in():
            return tree_map(_computed, function(*args, **kwargs), is_leaf=_is_lazy)

    def _begin_step(self, steps: StepExchange, *, training: bool) -> None:
        """Note a forward pass; in evaluation, by mode or without gradient, its rows are exact."""
        if not training:
            steps.settle()
            return
        steps.begin(self.step, self._sync.backwards, trains=self.model.training)

    def _left(self, leaf: Any, forward_pass: ForwardPass) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.requires_grad:
            return leaf
        return self._boundary.leave(leaf, forward_pass, rows=self._placer.is_rows(leaf))

    def refuse_unusable(self) -> None:
        """Refuse a closed net, and a model whose layers have changed since.

        Raises:
            ModelError: Naming what changed.
        """
        super().refuse_unusable()
        if tuple(map(id, self.model.modules())) != self._known_modules:
            raise ModelError(
                "the layers that the model had when it was sharded",
                "others",
                hint="close it, change the model, and shard it again",
            )

        refuse_pieces(self, self._beside, self._mesh.graph, cut=bool(self._tables))
        if isinstance(self, FSDPModule) and self._mesh.graph.size == 1:
            # Kernels may read a table of the whole graph where it lies, as an array of NumPy. Torch does not
            # free memory that has been one, as FSDP does after each pass.
            self._parallel.scope.forward.fast = False

    def _explained(self, error: Exception) -> Exception:
        """Return the error for a first call that failed on a part."""
        if self._mesh.graph.size == 1:
            return error
        words = (str(error).strip().splitlines() or [""])[0]
        return ModelError(
            "forward to run on a part of the graph as it does on the whole",
            f"{type(error).__name__} on a part: {words[:300]}",
            where=", ".join(filter(None, (self._parallel.scope.forward.fault, f"rank {self.rank}"))),
            hint="net.place(tensor, rows, axis=...) for an argument whose rows its sizes do not say",
        )

    # Rows -----------------------------------------------------------------------------------------

    def own(self, rows: str | None = None) -> Tensor:
        """Return the ids of this rank's own vertices, or the positions of its own edges, in the whole graph.

        Args:
            rows: The name of a vertex set or edge set: ``"vertices"`` or ``"edges"`` for a graph with one
                kind of vertices, and by default its vertices.

        Shapes:
            ``[n]`` or ``[e]``, int64, ascending.
        """
        return self._rows.named(rows, "net.own").own

    def place(self, value: Tensor, rows: str | None = None, *, axis: int = 0) -> Tensor:
        """Return this rank's rows of a tensor, and record along which axis they lie.

        Args:
            value: All rows of the graph, or this rank's own.
            rows: What they belong to.
            axis: The axis of the rows.

        Raises:
            ModelError: If the axis has another number of rows.
        """
        return self._placer.place(value, self._rows.named(rows, "net.place"), axis)

    def gather(self, value: Tensor, rows: str | None = None, *, axis: int = 0) -> Tensor | None:
        """Return the rows of all ranks in the graph's own order on rank 0; None on the others.

        All ranks call it. There is no gradient.

        Args:
            value: Own rows, such as the model's output; or those of a flattened batch, one sample after the
                other.
            rows: What they belong to.
            axis: The axis of the rows.

        Raises:
            ModelError: On all ranks, if the axis has another number of rows than a rank owns.

        Shapes:
            ``[n, ...]`` -> ``[N, ...]``; of a flattened batch ``[B * n, ...]`` -> ``[B * N, ...]``.

        Cost:
            All rows and their ids are sent to rank 0.
        """
        front, ids, count = self._own_rows_first(value, rows, axis, "net.gather")
        out = joined(self._mesh.graph, front, ids, count, f"gather of {rows or 'rows'}", dst=0)
        return None if out is None else out.movedim(0, range(value.dim())[axis])

    def save(
        self,
        value: Tensor,
        folder: str | Path,
        rows: str | None = None,
        *,
        axis: int = 0,
        format: Format = "safetensors",
    ) -> Path:
        """Write own rows and their ids to a file of this rank, for results that no rank can hold.

        All ranks call it. :func:`kagome.load_rows` reads the files of all ranks back.

        Args:
            value: Own rows, such as the model's output; or those of a flattened batch, whose ids are those of
                the flattened rows of the whole graph.
            folder: Where to write; made if it is not there.
            rows: What they belong to.
            axis: The axis of the rows.
            format: ``safetensors``, ``npz``, or ``parquet``, which needs pyarrow.

        Returns:
            The file, ``rows-RANK-of-RANKS.FORMAT``, with ``ids``, ascending, and ``rows``.

        Raises:
            ModelError: On all ranks, if the axis has another number of rows than a rank owns.
            ConfigError: If there is no such format, or its package is not installed.
            DataError: If the format cannot hold the type of the rows.
        """
        refuse_format(format, "net.save")
        front, ids, _ = self._own_rows_first(value, rows, axis, "net.save")
        along = range(value.dim())[axis]
        return written(self._mesh.graph, folder, front, ids, axis=along, format=format)

    def _own_rows_first(
        self, value: Tensor, rows: str | None, axis: int, where: str
    ) -> tuple[Tensor, Tensor, int]:
        """Return own rows along axis 0, without gradient, their ids, and the number of rows of all ranks.

        All ranks call it: a rank that owns no row cannot see of how many samples a flattened batch is.

        Raises:
            ModelError: If there are more or fewer of them on a rank.
        """
        axis, named = range(value.dim())[axis], self._rows.named(rows, where)
        counts = {name: each.count for name, each in self._rows.items()}
        told: Any = self._mesh.graph.gather_objects([value.size(axis), counts], where)
        sizes, owned = zip(*told, strict=True)

        def of(name: str, copies: int) -> bool:
            return all(n == copies * own[name] for n, own in zip(sizes, owned, strict=True))

        copies = max(sum(sizes) // max(sum(own[named.name] for own in owned), 1), 1)
        others = [name for name in counts if name != named.name and of(name, 1)]
        # Rows of another set may be as many as those of a batch of this one.
        if not of(named.name, copies) or (copies > 1 and others):
            raise ModelError(
                f"{named.count:,} own rows of {named.name} along axis {axis}, or as many for each sample of "
                "a flattened batch",
                f"{value.size(axis):,} in shape {list(value.shape)}",
                where=f"{where}, rank {self.rank}",
                hint=self._other_axis(value, named.count),
            )
        shift = named.size * torch.arange(copies, device=named.own.device)
        ids = (named.own + shift.unsqueeze(1)).view(-1)
        return value.detach().movedim(axis, 0).contiguous(), ids, copies * named.size

    def _other_axis(self, value: Tensor, count: int) -> str:
        """Return a hint for rows that lie along another axis, or are those of another set."""
        axes = [f"axis={axis}" for axis, size in enumerate(value.shape) if size == count]
        sets = [f'"{each.name}" as the set' for each in self._rows.values() if each.count in value.shape]
        return next(iter((*axes, *sets)), "")

    # Training -------------------------------------------------------------------------------------

    def no_sync(self) -> AbstractContextManager[None]:
        """Put off the sum of gradients over ranks within a block.

        ``.grad`` stays as it is; the first backward after the block adds all of them.
        """
        return self._sync.deferred()

    def close(self) -> None:
        """Give the model back, with all rows of cut tables, and end what the ranks share.

        All ranks call it. After an error of one rank, cut tables stay with own rows: load a checkpoint then.
        """
        if self._steps is not None and self._closing.alive:
            self._steps.settle()
        if self._closing.alive:
            self._tables.join()
        self._closing()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self._closing.alive:
            self._mesh.graph.report_error(error)
            self._tables.release()  # other ranks may not come to gather rows
            self._ending.error = error
            self._closing()
        self.close()


class _Ending:
    """Closes what a sharded model has opened, and says whether an error ends it.

    After an error nobody reads what is still under way, such as late rows, so nobody waits for that.
    """

    def __init__(self, stack: ExitStack) -> None:
        self.stack = stack
        self.error: BaseException | None = None

    def __call__(self) -> None:
        # Dropped, because an error keeps the frames alive in which it was raised.
        error, self.error = self.error, None
        self.stack.__exit__(None if error is None else type(error), error, None)


def _is_lazy(value: Any) -> bool:
    return isinstance(value, LazyTensor)


def _computed(value: Any) -> Any:
    return now(value) if isinstance(value, LazyTensor) else value
