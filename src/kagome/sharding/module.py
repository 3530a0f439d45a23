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
from typing import Any, Self

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch_geometric.data import Data

from kagome.comm.mesh import Mesh
from kagome.components.parallelize import ParallelModel
from kagome.components.task import draws_of
from kagome.deferred.lazy_tensor import LazyTensor, now
from kagome.errors import ModelError
from kagome.graph.partition.partition import Partition
from kagome.halo.forward_pass import ForwardPass
from kagome.launch.finalizer import Finalizer
from kagome.model.copies import copied
from kagome.sharding.boundary import Boundary
from kagome.sharding.cut_tables import CutTables
from kagome.sharding.gradient_norm import refuse_apart
from kagome.sharding.gradient_sync import GradientSync
from kagome.sharding.model_state import ModelState
from kagome.sharding.placing import Placer, Rows


class ShardedModel(ModelState):
    """A model on this rank's part of a graph; :func:`kagome.shard` makes one.

    Its parameters, buffers and ``state_dict`` are the model's own objects, under the same names. All ranks
    call it alike.

    Args:
        model: The user's module.
        parallel: The model on this rank's part.
        mesh: The ranks.
        part: This rank's part.
        given: The graph as the user gave it; None if it was read from files.
        beside: Modules that run outside of the model.
        stack: What is closed at the end.
        tables: Parameters of which this rank has its own rows.
    """

    model: nn.Module
    _parallel: ParallelModel

    def __init__(
        self,
        model: nn.Module,
        parallel: ParallelModel,
        mesh: Mesh,
        part: Partition,
        given: Data | None,
        beside: Sequence[nn.Module],
        stack: ExitStack,
        tables: CutTables,
    ) -> None:
        super().__init__()
        # The same dicts, so that parameters(), state_dict() and to() are the model's.
        for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[name] = getattr(model, name)
        self.training = model.training
        self._mesh, self._part = mesh, part
        self._sync = GradientSync((model, *beside), mesh.weights, tables.parameters)
        self._boundary = Boundary(self._sync, mesh.graph, part.own.numel())
        self._placer = Placer(parallel.scope, part, mesh.graph, self._boundary, given)
        self._tables = tables
        tables.keep()
        if tables:
            tables.watch(model, self)
        # Not by assignment, which would register the model as a layer of its own.
        self.__dict__["model"] = model
        self.__dict__["_parallel"] = parallel
        self._reads = None
        self._known_modules = tuple(map(id, model.modules()))
        self._checked: set[bool] = set()
        self.step = 0
        """The number of forward passes with gradient so far. Dropout draws other numbers in each; set it when
        a run continues."""
        self._closing = weakref.finalize(self, Finalizer(stack.close, _nothing))

    @property
    def rank(self) -> int:
        """The number of this rank among those that share the graph."""
        return self._mesh.graph.rank

    @property
    def ranks(self) -> int:
        """The number of ranks that share the graph."""
        return self._mesh.graph.size

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
        part = self._part
        share = f"{part.own.numel():,} of {part.num_nodes:,} vertices, part {part.part} of {part.num_parts}"
        return f"ShardedModel({share}): {self.model!r}"

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """Return a copy of the plain model, as an average of weights keeps.

        A cut table has own rows in the copy too, so that an average takes them; its ``state_dict`` is whole.
        """
        return copied(self.model)

    def train(self, mode: bool = True) -> Self:
        """Set training mode, as the model's own ``train`` does."""
        self.model.train(mode)
        self.training = mode
        return self

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
        self._refuse_unusable()
        training = torch.is_grad_enabled()
        self._sync.refresh()
        self.step += training
        # At steps 2, 4, 8, ...: torch's norm over cut tables may part the ranks' weights at any step, and the
        # check reads all of them.
        if training and self._tables and self.step > 1 and not self.step & (self.step - 1):
            refuse_apart(self._sync.shared, self._mesh.graph)
        checked = training in self._checked
        try:
            args, kwargs = self._placer.arguments(args, kwargs)
            with draws_of(self._parallel.options.seed, self.step):
                out = self._parallel.forward(
                    self.step,
                    training=training,
                    checked=not checked,
                    explain=None if checked else self._explained,
                    call=lambda: tree_map(_computed, function(*args, **kwargs), is_leaf=_is_lazy),
                )
        except Exception as error:
            self._mesh.graph.report_error(error)
            raise
        if not checked:
            self._refuse_own_numbers(out)
        self._checked.add(training)
        forward_pass = self._parallel.scope.forward.forward_pass
        forward_pass.outlives = True
        return tree_map(lambda leaf: self._left(leaf, forward_pass), out)

    def _left(self, leaf: Any, forward_pass: ForwardPass) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.requires_grad:
            return leaf
        return self._boundary.leave(leaf, forward_pass, rows=self._placer.is_rows(leaf))

    def _refuse_own_numbers(self, out: Any) -> None:
        """Refuse outputs without rows that differ between ranks. All ranks call it, after a first pass."""
        leaves = [
            leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor) and not self._placer.is_rows(leaf)
        ]
        mine: list[list[Any]] = [
            [list(leaf.shape), float(leaf.detach().double().sum().real)] for leaf in leaves
        ]
        for other in self._mesh.graph.gather_objects(mine, "outputs that all ranks share"):
            assert isinstance(other, list)
            for (shape, total), (their_shape, theirs) in zip(mine, other, strict=True):
                # Equal to rounding: GPUs of several kinds may compute other last digits.
                if shape != their_shape or abs(total - theirs) > 1e-4 * max(abs(total), abs(theirs)):
                    raise ModelError(
                        "outputs with own rows, or the same on all ranks",
                        f"one of shape {shape} and sum {total:.6g} here, of shape {their_shape} and sum "
                        f"{theirs:.6g} on another rank",
                        hint="a mean or sum over all rows by torch, or a row a vertex",
                    )

    def _refuse_unusable(self) -> None:
        if not self._closing.alive:
            raise ModelError(
                "an open sharded model", "one that is closed", hint="kagome.shard(model, graph) again"
            )
        if tuple(map(id, self.model.modules())) != self._known_modules:
            raise ModelError(
                "the layers that the model had when it was sharded",
                "others",
                hint="close it, change the model, and shard it again",
            )

    def _explained(self, error: Exception) -> Exception:
        """Return the error for a first call that failed on a part."""
        if self._mesh.graph.size == 1:
            return error
        words = (str(error).strip().splitlines() or [""])[0]
        return ModelError(
            "forward to run on a part of the graph as it does on the whole",
            f"{type(error).__name__} on a part: {words[:300]}",
            where=self._parallel.scope.forward.fault,
            hint="net.place(tensor, rows, axis=...) for an argument whose rows its sizes do not say",
        )

    # Rows -----------------------------------------------------------------------------------------

    def own(self, rows: Rows = "vertices") -> Tensor:
        """Return the ids of this rank's own vertices, or the positions of its own edges, in the whole graph.

        Shapes:
            ``[n]`` or ``[e]``, int64, ascending.
        """
        return self._placer.own(rows)

    def place(self, value: Tensor, rows: Rows = "vertices", *, axis: int = 0) -> Tensor:
        """Return this rank's rows of a tensor, and record along which axis they lie.

        Args:
            value: All rows of the graph, or this rank's own.
            rows: What they belong to.
            axis: The axis of the rows.

        Raises:
            ModelError: If the axis has another number of rows.
        """
        return self._placer.place(value, rows, axis)

    def gather(self, value: Tensor, rows: Rows = "vertices", *, axis: int = 0) -> Tensor | None:
        """Return the rows of all ranks in the graph's own order on rank 0; None on the others.

        All ranks call it. There is no gradient.

        Args:
            value: Own rows, such as the model's output.
            rows: What they belong to.
            axis: The axis of the rows.

        Cost:
            All rows and their ids are sent to rank 0.
        """
        channel, own = self._mesh.graph, self.own(rows)
        front = self._own_rows_first(value, rows, axis, "net.gather")
        found = channel.gather_rows(front, action=f"gather of {rows}", dst=0)
        ids = channel.gather_rows(own, action=f"gather of {rows}: ids", dst=0)
        if found is None or ids is None or channel.rank:
            return None
        joined = torch.cat(found)
        out = torch.empty_like(joined)
        out[torch.cat(ids)] = joined
        return out.movedim(0, range(value.dim())[axis])

    def save(self, value: Tensor, folder: str | Path, rows: Rows = "vertices", *, axis: int = 0) -> Path:
        """Write own rows and their ids to a file of this rank, for results that no rank can hold.

        Args:
            value: Own rows, such as the model's output.
            folder: Where to write; made if it is not there.
            rows: What they belong to.
            axis: The axis of the rows.

        Returns:
            The file, ``rows-RANK-of-RANKS.safetensors``, with the tensors ``ids`` and ``rows``.

        Raises:
            ModelError: If the axis has another number of rows than this rank owns.
        """
        front = self._own_rows_first(value, rows, axis, "net.save").cpu()
        path = Path(folder) / f"rows-{self.rank:05}-of-{self.ranks:05}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({"ids": self.own(rows).cpu().contiguous(), "rows": front}, path)
        return path

    def _own_rows_first(self, value: Tensor, rows: Rows, axis: int, where: str) -> Tensor:
        """Return own rows along axis 0, without gradient.

        Raises:
            ModelError: If there are more or fewer of them.
        """
        axis, own = range(value.dim())[axis], self.own(rows)
        if value.size(axis) != own.numel():
            raise ModelError(
                f"{own.numel():,} own rows of {rows} along axis {axis}",
                f"{value.size(axis):,} in shape {list(value.shape)}",
                where=f"{where}, rank {self.rank}",
            )
        return value.detach().movedim(axis, 0).contiguous()

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
        if self._closing.alive:
            self._tables.join()
        self._closing()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self._closing.alive:
            self._mesh.graph.report_error(error)
            self._tables.release()  # other ranks may not come to gather rows
        self.close()


def _nothing() -> None:
    """Close nothing: no file is open."""


def _is_lazy(value: Any) -> bool:
    return isinstance(value, LazyTensor)


def _computed(value: Any) -> Any:
    return now(value) if isinstance(value, LazyTensor) else value
