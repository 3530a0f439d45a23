"""Graph engine: one rank's whole model on its part; it trains an epoch or evaluates.

Where it sits: ``trainer`` tells it which epoch to train or to evaluate. It puts the model on its part by
``components.parallelize`` and sums gradients over the ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from kagome.adaptive.controller import EpochController, EpochPlan
from kagome.adaptive.gradient_probe import agreement, products
from kagome.adaptive.report import ExchangeReport
from kagome.checkpoint.epoch_state import EpochState, RestoredState, StateLayout, said_of
from kagome.comm.channel import Channel
from kagome.components.engine import PhaseTimer, without_fast
from kagome.components.forward_reuse import Forward, ForwardReuse
from kagome.components.gradients import Gradients
from kagome.components.model_setup import refused_input
from kagome.components.offload import Offload
from kagome.components.parallelize import PartOptions, parallelize, while_attached
from kagome.components.rank_zero import by_all
from kagome.components.task import (
    check_finite,
    check_rows,
    draws_of,
    in_float32,
    refuse_own_values,
    rows_of,
    scores_of,
)
from kagome.config import Parallel, Train
from kagome.deferred.lazy_tensor import EscapeError
from kagome.errors import ModelError
from kagome.graph.partition.partition import Partition
from kagome.graph.partition.sets_partition import Part, scored_rows
from kagome.halo.compressed_exchange import CompressedExchange
from kagome.halo.resumed_rows import NOTHING
from kagome.launch.os_errors import in_words
from kagome.memory.live_tensors import LiveTensors, peak_of
from kagome.memory.tensor_bytes import SavedMemory, TensorMemory, account, ledger_of
from kagome.model.buffers import Buffers
from kagome.model.forward_call import failed
from kagome.objective.kept_rows import RefusesKept
from kagome.objective.loss_weights import LossWeights
from kagome.objective.optimizers import Criteria, step_optimizer
from kagome.profile.host_forecast import host_forecast
from kagome.records.memory import MemoryByKind
from kagome.records.peak_tensors import PeakTensors
from kagome.user_frame import raised_at


class GraphEngine:
    """The engine of one rank that runs all layers on its part.

    Args:
        model: The user's module, already on the device, with the same weights on all ranks.
        part: This rank's part.
        channel: The channel to the ranks of the other parts.
        weights: The channel on which gradients are summed.
        parallel: How rows are exchanged, and how stale they may be.
        settings: Seed, clipping, mixed precision.
        criteria: The loss and the metric.
        phases: Receives the time of each phase.
        fast: Whether messages are deferred and reduced by kernels.
        recompute: Whether each layer keeps its inputs only, and runs again in backward.
        records_peak: Whether the first epoch records what its tensors are at their peak.

    Attributes:
        peak_tensors: What the first epoch has recorded; None before, and where it records nothing.
    """

    def __init__(
        self,
        model: nn.Module,
        part: Part,
        channel: Channel,
        *,
        weights: Channel,
        parallel: Parallel,
        settings: Train,
        criteria: Criteria,
        phases: PhaseTimer,
        fast: bool = True,
        recompute: bool = False,
        records_peak: bool = False,
    ) -> None:
        self.model, self.channel, self.settings, self.phases = model, channel, settings, phases
        self.criteria, self.objective = criteria, criteria.objective
        # Late rows are waited for in the next epoch. On a channel of their own they do not hold up later
        # messages.
        self.exchange = CompressedExchange(channel, parallel, settings.seed, late=channel.patient)
        options = PartOptions.of(settings, channel.device, parallel, fast=fast, recompute=recompute)
        self.net = parallelize(model, part, self.exchange, options, tell=channel.report_error)
        self.scope = self.net.scope
        with self.net:  # an unsupported model is refused now
            pass
        # Layers that are recomputed save next to nothing.
        moved = replace(parallel, activations="device") if options.recompute else parallel
        self.offload = Offload(moved, channel.device, self.scope.constants.is_constant)
        self._notes: list[str] = []
        if fast and options.amp and channel.device.type == "cpu":
            self._notes.append(
                "bf16 has no compiled kernels on a CPU: messages are computed edge by edge, in more time and "
                "memory than float32 takes with them."
            )
        self.parallel, self.recompute = parallel, options.recompute
        scored = scored_rows(part)
        self.own = scored.own.numel()
        """The number of own vertices that have scores."""
        # [training vertices of this part], local ids.
        self.train_rows = scored.nodes["train_mask"].nonzero().view(-1).to(channel.device)
        self.target = self.objective.target(self.inputs, self.train_rows)
        self._weighed = LossWeights(self.objective, channel)
        # Without an output only the weights of Kagome's own losses are known; a user's loss is settled in the
        # first epoch.
        self._weighed.settle(self.target, None)
        self.layout = StateLayout.of(parallel, part.fingerprint, scored.own, part=channel.rank)
        learning = [p for p in model.parameters() if p.requires_grad]
        self.gradients = Gradients(learning, weights, codec=parallel.codec_weights)
        self.report = ExchangeReport(channel, self.exchange, self.gradients, sliced=parallel.tensor > 1)
        self.controller = EpochController(parallel, self.report, self._log, alone=channel.size == 1)
        self.forward_reuse = ForwardReuse(model)
        if not self.exchange.exact:
            self.forward_reuse.allowed = False  # training reads approximate rows, evaluation exact ones
        self._checked = False
        self.saved: Mapping[str, int] | None = None
        self._saved_places: frozenset[int] = frozenset()
        self._records_peak = records_peak
        self.peak_tensors: PeakTensors | None = None

    @property
    def inputs(self) -> Mapping[str, Any]:
        """The attributes of own scored rows, by name, and what all ranks share."""
        part, inputs = self.scope.given_part, self.scope.inputs
        if isinstance(part, Partition):
            return inputs
        kind = part.names[part.target]
        shared = {name: inputs[name] for name in part.shared}
        return {**shared, **{name: inputs[f"{name}_dict"][kind] for name in part.nodes[part.target]}}

    @property
    def fast(self) -> bool:
        """Whether messages are deferred and reduced by kernels; a forward pass may turn it off."""
        return self.scope.forward.fast

    def held(self, optimizer: Optimizer, best: Mapping[str, Tensor] | None) -> MemoryByKind:
        """Return the memory that this rank holds, with what the first forward pass saved."""
        return account(self._ledger((best or {}).values()), self.model, optimizer, self.saved)

    def _ledger(self, copies: Iterable[Tensor] = ()) -> TensorMemory:
        ledger = ledger_of(self.scope, self.model, copies)
        ledger.add("tables", [self.train_rows])
        return ledger

    @contextmanager
    def _recording_peak(self, optimizer: Optimizer) -> Iterator[None]:
        """Record what the tensors of the block are at their peak."""
        before = self._ledger()
        live = LiveTensors(self.channel.device, self.scope.forward.where, before.held)
        with live:
            yield
        after = self._ledger()
        account(after, self.model, optimizer, None)
        self.peak_tensors = peak_of(live, before, after, self._saved_places)

    def join_weights(self, weights: Mapping[str, Tensor] | None = None) -> None:
        """Do nothing: with one stage, this rank has all weights already."""

    @contextmanager
    def joined(self, optimizer: Optimizer, best: Mapping[str, Tensor] | None) -> Iterator[None]:
        """Enter a block that needs the weights of all stages: this rank has them already."""
        yield

    def epoch_state(self, epoch: int) -> EpochState:
        """Return the state that the next epoch may read, and that of the precision controller."""
        return EpochState.of(
            self.layout, self.controller.state_dict(), self.exchange.known.state_entries(epoch)
        )

    def resumed(self, optimizer: Optimizer, restored: RestoredState) -> str:
        """Continue from a checkpoint whose weights and optimizer state were loaded. All ranks call it.

        Args:
            optimizer: The optimizer over the model's parameters.
            restored: The state of the last epoch, from the checkpoint.

        Returns:
            How the run continues with late rows.
        """
        self.controller.load_state_dict(restored.controllers)
        resumed_rows = restored.resume_rows(self.layout, self.channel, self.channel.device)
        self.exchange.forget(resumed_rows or NOTHING)
        return said_of(resumed_rows, late=self.exchange.late)

    def goes(self, way: Literal["fast", "plain", "pyg"]) -> None:
        """Set how one rank with the whole graph runs the model: see ``check.way_alone``."""
        # Fast paths that an escape has turned off stay off.
        self.scope.forward.fast = self.scope.forward.fast and way == "fast"
        self.scope.plain = way == "pyg"

    def _explained(self, error: Exception) -> Exception:
        """Return the error to raise for one that the user's forward raised."""
        if _transformed(error) and not _of_hooks(error):
            return self._untransformed(error)
        found = refused_input(self.model, self.scope.part, self.net.calling.wants(self.scope.inputs), error)
        if found is not error or self._checked:
            return found  # if it has run before: an error of its own, with its traceback
        if self.channel.size == 1:
            return in_words(error) or failed(error)
        return self._unlike_whole(error)

    def _unlike_whole(self, error: Exception) -> ModelError:
        """Return the error for a model that cannot run on a part of the graph."""
        words = (str(error).strip().splitlines() or [""])[0]
        return ModelError(
            "forward and backward to run on a part of the graph as they do on the whole",
            f"{type(error).__name__} on a part: {words[:300]}",
            where="; ".join(filter(None, (self.scope.forward.fault, raised_at(error)))),
            hint="train on one rank, which runs what plain PyTorch Geometric runs",
        )

    def _untransformed(self, error: Exception) -> ModelError:
        """Return the error for a ``torch.func`` transform that reaches a layer it cannot go through."""
        kind = EscapeError if self.scope.forward.fast else ModelError
        return kind(
            "derivatives inside forward by torch.autograd.grad",
            f"torch.func (grad, vjp, jacrev, vmap) through a layer: {str(error).splitlines()[0][:200]}",
            hint="torch.autograd.grad(..., create_graph=True)",
        )

    @while_attached
    def forward(self, epoch: int, *, training: bool) -> Any:
        """Run the model and return the scores of own rows.

        Shapes:
            ``[n, C]``, or a nested structure of such tensors.

        Raises:
            ModelError: If the output does not have one row a vertex.
        """
        self.model.train(training)
        fast = self.fast
        out = self.net.forward(epoch, training=training, checked=not self._checked, explain=self._explained)
        if fast and not self.fast:
            self._notes.append(without_fast(self.net.escape, slices=self.scope.sliced.on))
        # One rank may return anything beside its rows. Several ranks may return numbers, which must be equal,
        # because a tensor of another shape could be a value of this part alone.
        beside: Literal["any", "numbers"] = "any" if self.channel.size == 1 else "numbers"
        scores = scores_of(out, self.scope.given_part, self.scope.placements)
        rows = check_rows(scores, self.own, self.channel.rank, beside=beside)
        # Reuse compares and keeps one tensor of scores; a nest is evaluated on its own.
        if not isinstance(rows, Tensor):
            self.forward_reuse.allowed = False
        return in_float32(rows) if self.net.options.amp else rows

    @while_attached
    def train(self, epoch: int, optimizer: Optimizer, *, stop: bool = False) -> tuple[float, bool]:
        """Make one weight update: forward, loss, backward, the sum of gradients, clipping, step.

        Args:
            epoch: The epoch's number, counted from 1.
            optimizer: The optimizer over the model's parameters.
            stop: Whether this rank was asked to stop.

        Returns:
            The mean loss over all training vertices before the update; whether any rank was asked to stop.

        Raises:
            ModelError: If the loss is not finite on some rank.
            ConfigError: If the loss averages over rows by itself.
        """
        recording = self._recording_peak(optimizer) if self._records_peak and not self._checked else None
        with recording or nullcontext():
            # Gradients of the last epoch are freed before the forward pass saves its activations.
            optimizer.zero_grad(set_to_none=True)
            plan = self.controller.plan()
            value, stops = (self._gradient if plan.guess is None else self._probed)(epoch, plan, stop)
            check_finite(value, epoch)
            self.controller.observe(epoch, plan, value)
            # Gradients are sums over all ranks by now, and equal on all of them, so each rank clips by the
            # same norm and makes the same step.
            with self.phases.phase("optimizer", epoch):
                if self.settings.clip is not None:
                    nn.utils.clip_grad_norm_(self.gradients.parameters, self.settings.clip)
                step_optimizer(optimizer)
        return value, stops > 0

    def _probed(self, epoch: int, plan: EpochPlan, stop: bool) -> tuple[float, float]:
        """Compute the gradient from compressed or stale rows, then the exact one, and compare the two."""
        assert plan.guess is not None
        # The approximate gradient is only measured. Its pass must leave no trace in buffers or in a loss that
        # keeps state, because the exact pass below is the epoch's real one.
        with Buffers(self.model).unmoved(), self.objective.tried():
            self._gradient(epoch, plan.guess, stop, probes=True)
        guess = [None if p.grad is None else p.grad.clone() for p in self.gradients.parameters]
        with self.report.uncounted():
            found = self._gradient(epoch, plan, stop)
        squares = products(zip(self.gradients.parameters, guess, strict=True)).tolist()
        self.controller.probed(epoch, plan, agreement(*squares))
        return found

    def _log(self, message: str) -> None:
        if message:
            self._notes.append(message)

    def _gradient(
        self, epoch: int, plan: EpochPlan, stop: bool, *, probes: bool = False
    ) -> tuple[float, float]:
        """Run forward, backward and the sum of gradients; return the loss and the number of stop requests."""
        compares = self.forward_reuse.asks
        with (
            draws_of(self.settings.seed, epoch),
            self.controller.using(plan, probes=probes),
        ):
            # An evaluation may have run this epoch's forward pass already, with the same weights.
            forward = self.forward_reuse.take(epoch) or self._train_forward(epoch, watched=compares)
            with self.phases.phase("forward", epoch):
                out = forward.out
                rows = self.train_rows
                shown = rows_of(out, rows, self.own)
                if not self._checked:
                    leaves = [each for each in tree_leaves(out) if isinstance(each, Tensor)]
                    refuse_own_values([each for each in leaves if each.dim() == 0], self.channel)
                    by_all(self.channel, lambda: self._check(shown, out), "check loss and metric")
                    self._weighed.settle(self.target, shown)
                # A rank without training vertices has no loss, but takes part in backward through the token.
                lost = None
                if rows.numel():
                    lost = self._weighed.mean(*self.objective.lost(shown, self.target))
                    self._weighed.done()
            # The loss, a request to stop, and a failed comparison travel with the gradients.
            notes = (
                0.0 if lost is None else lost.detach(),
                float(stop),
                float(compares and self.forward_reuse.differs(forward)),
                *self.exchange.drifts,
            )
            with (
                self.phases.phase("backward", epoch),
                self.gradients.during(notes, f"sum of gradients, epoch {epoch}"),
            ):
                # [Note: token] in halo.exchange: it makes backward visit every site on every rank.
                whole = forward.token if lost is None else lost + forward.token.to(lost.dtype)
                # False only where this rank has neither a training vertex nor an exchange with a gradient.
                if whole.requires_grad:
                    self._backward(whole)
        self._checked = True
        with self.phases.phase("weights", epoch):
            value, stops, doubts, *drift = self.gradients.finish()
            self.gradients.tell_hooks()
        # The drifts are sums over all ranks, so all ranks decide alike whether the next epoch waits.
        self.exchange.moved(drift, epoch)
        if compares:
            self.forward_reuse.allowed = not doubts
        return value, stops

    def _backward(self, whole: Tensor) -> None:
        try:
            whole.backward()
        except RuntimeError as error:
            if self.channel.size == 1 or self._checked or "second time" not in str(error):
                raise
            raise self._unlike_whole(error) from error

    def _check(self, shown: Any, out: Any) -> None:
        with self._without_kept():
            self.objective.check(shown, self.target, trains=True)
        self.criteria.metric.check(out)

    def _without_kept(self) -> AbstractContextManager[Any]:
        if self.channel.size == 1:
            return nullcontext()
        return RefusesKept(lambda tensor: self.scope.axes.of(tensor) is not None, self.model)

    def take_uncoded(self) -> Mapping[str, int]:
        """Return the bytes, by kind, that this rank would have sent without codecs since the last call."""
        return self.report.take()

    def facts(self) -> dict[str, Any]:
        """Return what the summary reports about exchanged rows and moved memory. All ranks call it."""
        bound = self.scope.sliced.bound
        used = {} if bound is None else bound.used(self.channel)
        used |= self.offload.facts(self.channel)
        return {**self.controller.facts(), **used}

    def final_notes(self) -> tuple[str, ...]:
        """Return the notes for the end of a run."""
        summed = self.scope.deferral.summed
        return (*(() if summed is None else summed.notes()), *self.controller.final_notes())

    def forecast(self, part: Part) -> tuple[str, ...]:
        """Return a note if rows as they are asked for are forecast to be slower than exact rows."""
        options = PartOptions.of(self.settings, fast=self.fast, recompute=self.recompute)
        return host_forecast(self.model, part, self.channel, self.parallel, options)

    def take_notes(self) -> tuple[str, ...]:
        """Return the notes on forward passes since the last call."""
        taken, self._notes = tuple(self._notes), []
        return taken

    def _train_forward(self, epoch: int, *, watched: bool) -> Forward:
        self.model.train(True)
        if not self._checked:
            buffers = Buffers(self.model)
            before = buffers.now(), buffers.copies()
            try:
                return self._kept(epoch, SavedMemory(self.scope, self.model), watched=watched)
            except (RuntimeError, ModelError) as error:  # as torch raises it, or in words
                if not _of_hooks(error):
                    raise
                buffers.restore(*before)  # torch.func takes no such hooks: this memory is not measured
        return self._kept(epoch, None, watched=watched)

    def _kept(self, epoch: int, saved: SavedMemory | None, *, watched: bool) -> Forward:
        with (
            self.phases.phase("forward", epoch),
            self.forward_reuse.watching(watched) as unchanged,
            saved or nullcontext(),
            self.offload.saving(),
        ):
            out = self.forward(epoch, training=True)
        if saved is not None:
            self.saved, self._saved_places = saved.bytes, saved.places
        # `draws` counts dropout and other random calls that handlers answered, which torch's generator does
        # not show.
        plain = unchanged[0] and self.scope.forward.draws == 0
        return Forward(epoch, out, self.scope.forward.forward_pass.token, plain, self.forward_reuse.state())

    def look_ahead(self, epoch: int) -> Tensor | None:
        """Run the forward pass of the coming epoch, keep it for that epoch's update, and return its scores.

        Args:
            epoch: The coming epoch.

        Returns:
            What :meth:`evaluate` would return; None where evaluation must run its own forward pass.

        Shapes:
            ``[n, C]``.
        """
        if not self.forward_reuse.allowed:
            return None
        # BatchNorm and the like write to their buffers in training mode. If the pass turns out not to be
        # plain, its epoch runs it again, and the buffers must not change twice.
        buffers = Buffers(self.model)
        tensors, before = buffers.now(), buffers.copies()
        with draws_of(self.settings.seed, epoch):
            forward = self._train_forward(epoch, watched=True)
        # Ranks must agree: an evaluation of its own makes collectives that a reused pass does not make.
        doubt = torch.tensor(float(not forward.plain), device=self.channel.device)
        if self.channel.all_reduce(doubt, "max", action=f"plain forward, epoch {epoch}", kind="other"):
            self.forward_reuse.allowed = False
            buffers.restore(tensors, before)  # the coming epoch runs this forward pass again
            return None
        self.forward_reuse.keep(forward)
        found: Tensor = forward.out.detach()
        return found

    @torch.no_grad()
    def evaluate(self, epoch: int) -> Any:
        """Return exact scores of own rows with dropout off, distributed like training.

        Shapes:
            ``[n, ...]`` as the model returns it, or a nested structure of such tensors.
        """
        # A message that is not received blocks those sent long after it, and any number of evaluations may
        # follow before the next epoch receives the late rows.
        self.exchange.settle()
        out = self.forward(epoch, training=False)
        if isinstance(out, Tensor):
            self.forward_reuse.evaluated(out)
        return out


def _transformed(error: Exception) -> bool:
    """Return whether an error comes from a ``torch.func`` transform that met code it cannot go through."""
    return any(word in str(error) for word in ("torch.func", "functorch"))


def _of_hooks(error: Exception) -> bool:
    return "saved tensor hooks" in str(error)
