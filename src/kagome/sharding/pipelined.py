"""Pipelined model: a user's model in stages, trained step by step from the user's own training loop.

Where it sits: ``kagome.shard`` makes one where ``Parallel`` has a pipe axis or chunks. It is a thin face of
``pipelining.chunk_engine``, which runs forward, loss and backward of all chunks by a schedule.

::

    net.train_step(x, edge_index, target=y, loss=fn)
        stage 0    F0 F1 F2 F3 ............ B3 B2 B1 B0
        stage 1       F0 F1 F2 F3  loss  B3 B2 B1 B0    .grad of each stage's weights, the loss on all ranks
    optimizer.step()                                    each rank steps the weights of its stages
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from inspect import signature
from types import TracebackType
from typing import Any, Final, NoReturn

import torch
from torch import Tensor, nn
from torch_geometric.data import Data

from kagome.comm.mesh import Mesh
from kagome.config import Parallel, Train
from kagome.errors import ModelError
from kagome.graph.partition.partition import Partition
from kagome.launch.finalizer import Finalizer
from kagome.model.forward_call import ForwardCall
from kagome.objective.metrics import metric_of
from kagome.objective.optimizers import Criteria
from kagome.pipelining.chunk_engine import ChunkEngine
from kagome.sharding.model_face import no_files
from kagome.sharding.results import PartRows
from kagome.sharding.train_step import PLACES, Loss, StepObjective, no_step, tensors_of

SINGLE: Final = "on a pipe axis a step is a schedule of many passes, and no rank has the whole output"


class PipelinedModel(PartRows):
    """A model whose stages lie on several ranks; :func:`kagome.shard` makes one. All ranks call it alike.

    ``net(...)`` is refused; :meth:`train_step` trains and :meth:`eval_step` evaluates. Between steps a rank
    has the present weights of its own stages alone; :meth:`state_dict` and :meth:`close` share them.

    Args:
        model: The user's module.
        part: This rank's part.
        mesh: The ranks.
        parallel: How to split, with every choice made.
        train: The seed and the time limit.
        given: The graph as the user gave it; None if it was read from files.
        stack: What is closed at the end.
        fast: Whether kernels reduce messages.
    """

    _engine: ChunkEngine

    def __init__(
        self,
        model: nn.Module,
        part: Partition,
        mesh: Mesh,
        parallel: Parallel,
        train: Train,
        given: Data | None,
        stack: ExitStack,
        *,
        fast: bool,
    ) -> None:
        super().__init__(model, mesh)
        # Without attributes: a rank holds those that its stages read alone, in chunks.
        self._part, self._given = replace(part, nodes={}, edges={}), given
        self._attributes = frozenset(part.names)
        self._call = no_step()
        objective = StepObjective.of(self._call)
        engine = ChunkEngine(
            model,
            _marked(model, part),
            mesh,
            # No probes: they need the optimizer's step, which is the user's.
            parallel=replace(parallel, guard=False),
            settings=train,
            criteria=Criteria(objective, metric_of(None, objective, train)),
            phases=_Untimed(),
            fast=fast,
        )
        self.__dict__["_engine"] = engine
        self._names = ForwardCall.of(model, set(part.names)).wants(part.names)
        self._versions = {} if given is None else _versions(given)
        self._known_code: object = None
        self.step = 0
        """The number of training steps so far. Dropout draws other numbers in each; set it when a run
        continues."""
        self._closing = weakref.finalize(self, Finalizer(stack.close, no_files))

    # The model's own face -------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """The number of this rank among all: of all stages, and of all parts of the graph."""
        return self._mesh.rank

    @property
    def ranks(self) -> int:
        """The number of ranks of all stages and parts."""
        return self._mesh.size

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's own ``state_dict``, whole on every rank. All ranks call it.

        Cost:
            The weights of each stage, sent to the ranks of the others.
        """
        self._engine.join_weights()
        return self.model.state_dict(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        """Refuse a copy, which would have old weights of other stages.

        Raises:
            ModelError: Always.
        """
        raise ModelError(
            "weights of all stages by net.state_dict()",
            "a copy of a model in stages",
            hint="net.state_dict()",
        )

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse a single forward pass.

        Raises:
            ModelError: Always.
        """
        raise ModelError(
            "net.train_step(..., loss=...) or net.eval_step(...)",
            f"net(...): {SINGLE}",
            hint="use net.train_step, which runs forward, loss and backward; or Parallel(graph=...)",
        )

    def take_notes(self) -> tuple[str, ...]:
        """Return the notes since the last call: how the model was cut into stages, for example."""
        notes: tuple[str, ...] = self._engine.take_notes()
        return notes

    # Steps ----------------------------------------------------------------------------------------

    def train_step(
        self, *args: Any, target: Tensor | Sequence[Tensor] = (), loss: Loss, **kwargs: Any
    ) -> Tensor:
        """Run forward, loss and backward of all chunks and stages. All ranks call it.

        ``.grad`` of the weights of this rank's stages gets the gradient of the mean loss, added to what is
        there; other weights have none. The user steps the optimizer.

        Args:
            args: What the model's ``forward`` takes: attributes of the graph.
            target: One tensor or several with a row a vertex: all of the graph's rows, or own rows.
            loss: ``loss(out, *targets)`` of some rows: a value a row, or ``(values, weights)``.
            kwargs: The same as ``args``, by name.

        Returns:
            The mean loss over all rows of all ranks, on every rank, without gradient.

        Raises:
            ModelError: If an argument is no attribute of the graph, or the loss is not finite.

        Shapes:
            ``[]``, float64.
        """
        self._prepare(args, kwargs)
        self._call.loss = loss
        self._call.targets = [self.place(each) for each in tensors_of(target)]
        # A lambda in a loop is another object in each step, with the same code.
        code = getattr(loss, "__code__", loss)
        fresh, self._known_code = code is not self._known_code, code
        self.step += 1
        parameters = self._engine.gradients.parameters
        # The engine drops old gradients before its backward, so that they do not stay in memory beside the
        # sums over parts. Here they may be those of an earlier step of the same update, which count.
        before = [p.grad for p in parameters]
        value = self._engine.gradient(self.step, fresh=fresh)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, before, strict=True):
                if gradient is not None:
                    found = parameter.grad  # None where this step's loss does not depend on the weight
                    parameter.grad = gradient if found is None else gradient.add_(found)
        return torch.tensor(value, dtype=torch.float64, device=self._mesh.device)

    def eval_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the exact output for own rows, on every stage's ranks, with dropout off. All ranks call it.

        Args:
            args: As :meth:`train_step` takes them.
            kwargs: As :meth:`train_step` takes them.

        Shapes:
            ``[n, ...]``, as the model returns it.
        """
        self._prepare(args, kwargs)
        # The engine sets evaluation mode, and would leave it so.
        training = self.training
        try:
            return self._engine.evaluate(self.step)
        finally:
            self.train(training)

    def _prepare(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Refuse inputs that are not the graph's own: stages hold these in chunks since the start.

        Raises:
            ModelError: Naming the first of them.
        """
        self.refuse_unusable()
        bound = signature(self.model.forward).bind(*args, **kwargs).arguments if args or kwargs else {}
        # Arguments of forward by the names that the graph has for them: forward(h, edges) gets x, edge_index.
        names = dict(zip(signature(self.model.forward).parameters, self._names, strict=False))
        for name, value in bound.items():
            if not self._is_given(value, name if name in self._attributes else names.get(name, name)):
                raise ModelError(
                    "inputs of a pipeline to be attributes of the graph, which its chunks hold",
                    f"another value for {name!r} of forward, or one that was changed in place",
                    where="net.train_step",
                    hint=f"data.{name} = ... before kagome.shard; or Parallel(graph=...), for other inputs "
                    "in each step",
                )

    def _is_given(self, value: Any, name: str) -> bool:
        """Return whether an argument is what the graph had when its parts were taken."""
        if value is self._given:
            return True
        # A graph that was read from a folder cannot be compared: its steps take no inputs at all.
        known = {} if self._given is None else self._given.to_dict()
        # Chunks hold what the graph had. A tensor that was written to since has a later version.
        if name not in known or (name in self._versions and self._versions[name] != known[name]._version):
            return False
        if isinstance(value, Tensor) and isinstance(known[name], Tensor) and value is not known[name]:
            same = value.shape == known[name].shape and value.dtype == known[name].dtype
            return same and torch.equal(value, known[name])
        return value is known[name] or (isinstance(value, str | int | float) and bool(value == known[name]))

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the gradients of all stages down to a norm, as a whole, and return it. All ranks call it.

        ``torch.nn.utils.clip_grad_norm_`` would take the norm of one rank's stages.
        """
        parameters, ownership = self._engine.gradients.parameters, self._engine.ownership
        norm = ownership.products(parameters)[0] ** 0.5
        ownership.clip(parameters, max_norm)
        return torch.tensor(norm, dtype=torch.float64)

    def no_sync(self) -> AbstractContextManager[None]:
        """Refuse to put sums of gradients off: a step is one schedule.

        Raises:
            ModelError: Always.
        """
        raise ModelError(
            "a step whose gradients are summed in it",
            "net.no_sync() on a pipe axis",
            hint="several net.train_step before optimizer.step() add up in .grad",
        )

    # End ------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Give the model back, with the weights of all stages, and end what the ranks share."""
        if self._closing.alive:
            # Late rows that no step will read: peers wait until they are taken.
            self._engine.exchange.settle()
            # The model is the user's again, who may evaluate it whole.
            self._engine.join_weights()
        self._closing()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        # Peers may be gone: weights are not joined, and nothing is waited for.
        if self._closing.alive:
            self._mesh.world.report_error(error)
        self._closing()


class _Untimed:
    """Phases of a step, which nobody times here."""

    def phase(self, name: str, epoch: int | None = None) -> AbstractContextManager[Any]:
        """Return a context that does nothing."""
        return nullcontext()


def _versions(data: Data) -> dict[str, int]:
    """Return the version of each tensor of a graph, which a change in place raises."""
    return {name: value._version for name, value in data.to_dict().items() if isinstance(value, Tensor)}


def _marked(model: nn.Module, part: Partition) -> Partition:
    """Return a part whose vertices are numbered and all trained on.

    Raises:
        ModelError: If forward reads the mask that this would change.
    """
    if "train_mask" in signature(model.forward).parameters:
        raise ModelError(
            "a forward without train_mask: in a loop of your own all rows are trained on, by their weights",
            "one that reads it",
            hint="another name for the attribute that forward reads",
        )
    # The engine computes losses on the rows of this mask, and finds their targets by their numbers.
    count = part.own.numel()
    marks = {"train_mask": torch.ones(count, dtype=torch.bool), PLACES: torch.arange(count)}
    return replace(part, nodes={**part.nodes, **marks})
