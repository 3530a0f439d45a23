"""Chunk engine: trains one rank's pipeline stages over its part's chunks, by a program of actions.

Where it sits: ``train.trainer`` drives it in place of ``train.graph_engine.GraphEngine`` where the mesh has
stages or parts have chunks.

::

    history   0F2 0SEND_F2 0F0 0SEND_F0 ... 0RECV_B0 0B0 0RECV_B2 0B2     fill and drain, chunk by chunk
    exact     0F0 0SEND_F0 ... 0RECV_B0 0B0                               all chunks at once, stage by stage
    drop      0F0 0F1 0B0 0F2 0B1 ...                                     chunks are independent
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from kagome.adaptive.controller import EpochController, EpochPlan
from kagome.adaptive.gradient_probe import agreement
from kagome.adaptive.history import history_controller
from kagome.adaptive.report import ExchangeReport
from kagome.adaptive.rollback import Rollback
from kagome.adaptive.stage_codec import StageCodec
from kagome.checkpoint.epoch_state import EpochState, RestoredState, StateLayout, said_of
from kagome.comm.mesh import Mesh
from kagome.comm.transport.device import to_device
from kagome.comm.transport.routes import both_passes
from kagome.components import task
from kagome.components.engine import PhaseTimer, without_fast
from kagome.components.forward_reuse import ForwardReuse
from kagome.components.gradients import Gradients
from kagome.components.offload import Offload
from kagome.components.parallelize import ParallelModel, PartOptions, while_attached
from kagome.components.rank_zero import by_all, by_first
from kagome.config import Parallel, Train
from kagome.graph.partition.partition import Partition
from kagome.halo.resumed_rows import NOTHING, ResumedRows
from kagome.intercept.active import ActiveInterceptor
from kagome.intercept.interceptor import Interceptor
from kagome.memory.tensor_bytes import account
from kagome.model.split.stages import describe, links
from kagome.model.state import state_of
from kagome.objective.kept_rows import RefusesKept
from kagome.objective.loss_trials import copied
from kagome.objective.loss_weights import LossWeights
from kagome.objective.optimizers import Criteria
from kagome.pipelining.chunk_memory import ChunkActivations, ledger_of_chunks
from kagome.pipelining.chunk_passes import ChunkPasses, StageRuns
from kagome.pipelining.chunking import chunked
from kagome.pipelining.foreign_weights import (
    read_by_loss,
    refuse_mixing,
    unmoving,
    watch_hooks,
    watched,
    with_read,
)
from kagome.pipelining.ownership import ParameterOwnership
from kagome.pipelining.stage_run import StageCode, StageRun
from kagome.pipelining.staging import needed, stage_model
from kagome.records.memory import MemoryByKind


class ChunkEngine:
    """Trains and evaluates one rank's stages over the chunks of its part.

    Args:
        model: The user's module, already on the device, with the same weights on all ranks.
        part: This rank's part.
        mesh: All ranks.
        parallel: How to split, with every choice made.
        settings: The seed, gradient clipping and mixed precision.
        criteria: The loss and the metric.
        phases: Records the time of each action.
        fast: Whether messages are deferred and reduced by kernels.

    Raises:
        ModelError: If the model cannot be traced, or cut into that many stages.
    """

    def __init__(
        self,
        model: nn.Module,
        part: Partition,
        mesh: Mesh,
        *,
        parallel: Parallel,
        settings: Train,
        criteria: Criteria,
        phases: PhaseTimer,
        fast: bool = True,
    ) -> None:
        self.model, self.mesh, self.parallel, self.settings = model, mesh, parallel, settings
        self.criteria, self.phases, self.channel = criteria, phases, mesh.graph
        device = mesh.device
        options = PartOptions.of(settings, device, fast=fast)
        self.staging = stage_model(model, part, mesh.world, parallel, options)
        self.fast, self.recompute = fast and not self.staging.escape, False
        # Weights that the loss reads belong to the last stage too.
        read = by_first(mesh.world, lambda: self._read_by_loss(part), "weights that the loss reads")
        self.staging = replace(self.staging, stages=with_read(self.staging.stages, read))
        homes = [stage.rank for stage in self.staging.stages]
        mesh.pipe.open_routes(both_passes((homes[a], homes[b]) for a, b in links(self.staging.stages)))
        self.mine = [stage for stage in self.staging.stages if stage.rank == mesh.stage]
        part = needed(self.mine, part, criteria.objective.uses)
        options = PartOptions.of(settings, device, parallel, fast=self.fast)
        self.chunks = chunked(part, mesh.graph, parallel, options)
        # Rules and hooks on the model reach the running chunk's interceptor through `current`.
        self.current = ActiveInterceptor(self.chunks.scopes)
        self.net = ParallelModel(model, self.current.scope, options, tell=mesh.world.report_error)
        self.offload = Offload(parallel, device, lambda t: self.current.get().constants.is_constant(t))
        self.activations = ChunkActivations(self.offload, self.chunks, model)
        stages, changed = self.staging.stages, self.staging.survey.changed
        self.ownership = ParameterOwnership(model, stages, mesh.pipe, changed)
        self.foreign = self.ownership.foreign()
        self.codes = self._stage_codes()
        self.inputs = self._loss_inputs(part)
        self._train_rows, self._loss_rows = _training_rows(self.inputs), self._rows_of_chunks()
        self.gradients = Gradients(
            self.ownership.parameters, mesh.weights, codec=parallel.codec_weights, pieces=True
        )
        self._weighed = LossWeights(criteria.objective, mesh.graph)
        self._settle()
        self.rollback = Rollback(model, self.ownership.parameters, self.ownership.moving())
        self.exchange = self.chunks.exchange
        codec = StageCodec(parallel.codec_stage, settings.seed, mesh.stage)
        self.report = self._exchange_report(codec)
        history = None if self.chunks.tables is None else history_controller(parallel)
        self.controller = EpochController(parallel, self.report, self._log, history=history)
        self._drifts: tuple[float, ...] = ()
        self.chunk_passes = self._passes(codec)
        # Values of `EpochPlan.exact` for which messages and the loss were checked: exact passes have all
        # chunks at once, others one by one.
        self._checked: set[bool] = set()
        self._checks = self._stepped = False
        self.forward_reuse = ForwardReuse(model)
        self.layout = self._state_layout(part)
        self._notes = [self._describe()]
        if self.staging.escape:
            self._notes.append(without_fast(self.staging.escape, slices=parallel.tensor > 1))
        with self.net:  # an unsupported model is refused now
            pass

    def _exchange_report(self, codec: StageCodec) -> ExchangeReport:
        """Return the report of what crosses, with the codec where there are boundaries between stages."""
        between, sliced = codec if self.parallel.pipe > 1 else None, self.parallel.tensor > 1
        return ExchangeReport(self.mesh.world, self.exchange, self.gradients, between, sliced=sliced)

    def _passes(self, codec: StageCodec) -> ChunkPasses:
        """Return the passes of all chunks through this rank's stages."""
        return ChunkPasses(
            codes=self.codes,
            mesh=self.mesh,
            chunks=self.chunks,
            stages=self.staging.stages,
            phases=self.phases,
            isolation=self.ownership.isolation,
            lose=self._lose,
            codec=codec,
        )

    def _stage_codes(self) -> dict[int, StageCode]:
        """Return this rank's stages, ready to run, by number."""
        return {
            stage.number: StageCode(
                model=self.model,
                graph=self.staging.graph,
                survey=self.staging.survey,
                stage=stage,
                current=self.current,
                cast=self.net.cast,
                save_activations=self.activations.saving,
                foreign=self.foreign,
            )
            for stage in self.mine
        }

    def _loss_inputs(self, part: Partition) -> dict[str, Any]:
        """Return what the loss and the metric read of the part, on the device."""
        kept = {name for name in part.nodes if name.endswith("_mask")} | self.criteria.objective.uses
        rows = {name: value.to(self.mesh.device) for name, value in part.nodes.items() if name in kept}
        return {**rows, **{name: value for name, value in part.shared.items() if name in kept}}

    def _rows_of_chunks(self) -> dict[Interceptor, Tensor]:
        """Return each chunk's rows for the loss; none on a rank whose stages do not compute the output."""
        # Found once: the host waits for a device to tell how many rows are marked.
        loses = any(stage.output is not None for stage in self.mine)
        scopes = self.chunks.scopes if loses else ()
        return {scope: _training_rows(scope.inputs) for scope in scopes}

    def _state_layout(self, part: Partition) -> StateLayout:
        """Return which vertices and steps this rank has, by which a checkpoint's rows are given back."""
        ids = part.own if self.chunks.tables is None else self.chunks.tables.ids
        steps = [step.name for stage in self.mine for step in stage.steps]
        where, stage = self.mesh.part, self.mesh.stage
        return StateLayout.of(self.parallel, part.fingerprint, ids, part=where, stage=stage, steps=steps)

    def _settle(self) -> None:
        """Find the sum of the loss weights; a user's loss that returns weights is called with zero scores."""
        target = self.criteria.objective.target(self.inputs, self._train_rows)
        value = self.staging.survey.values[self.staging.graph.output]
        out = torch.zeros(target.y.size(0), *value.shape, dtype=value.dtype, device=self.mesh.device)
        self._weighed.settle(target, out)

    def _read_by_loss(self, part: Partition) -> tuple[str, ...]:
        """Find the weights that the loss reads, by calling it on made-up rows of the output."""
        value, objective = self.staging.survey.values[self.staging.graph.output], self.criteria.objective
        if value.dtype is None:
            return ()
        device, known = self.mesh.device, {**part.nodes, **part.shared}
        used = {name: known[name] for name in objective.uses if name in known}
        inputs = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in used.items()}
        # A few rows show which weights are read; values do not matter.
        rows = part.nodes["train_mask"].nonzero().view(-1)[:12].to(device)
        generator = torch.Generator().manual_seed(0)
        out = torch.randn(rows.numel(), *value.shape, generator=generator).to(device, value.dtype)
        if out.is_floating_point() and value.grad:
            out.requires_grad_()
        target = objective.target(inputs, rows)
        # With one chunk, buffers of the last stage have their final values when the loss runs. All others are
        # still changed by later chunks, or on another rank.
        last = next(stage for stage in self.staging.stages if stage.output is not None)
        alone = last.buffers if self.parallel.chunks == 1 else ()
        moved = self.staging.survey.changed.difference(alone)
        with unmoving({name: buffer for name, buffer in self.model.named_buffers() if name in moved}):
            # Checked here on all ranks: within an epoch only the last stage could refuse the loss.
            objective.check(out, target, trains=True, calls=self._loss_calls)
        self.criteria.metric.check(out)
        if self.parallel.pipe == 1:
            return ()
        with objective.tried():
            return read_by_loss(lambda: objective.lost(copied(out), target), self.model)

    @property
    def _loss_calls(self) -> str:
        """How the loss is called, for errors; empty if once an epoch on all ranks that need what it keeps."""
        if self.parallel.chunks != 1:
            return "once for each chunk"
        by_loss = self.criteria.metric.name == "loss" or self.criteria.metric.guessed
        return "on the last stage alone, while all score by it" if by_loss and self.parallel.pipe > 1 else ""

    def _describe(self) -> str:
        """Return the message that is logged before the first epoch."""
        slices = f", {self.parallel.tensor} feature slices in each" if self.parallel.tensor > 1 else ""
        words = f"pipeline: {len(self.staging.stages)} stages x {self.chunks.count} chunks{slices}"
        words += self.chunks.text()
        return f"{words}\n{describe(self.staging.stages, self.staging.survey, self.staging.seconds)}".rstrip()

    def take_uncoded(self) -> Mapping[str, int]:
        """Return the bytes that this rank would have sent without codecs since the last call, by kind."""
        return self.report.take()

    def facts(self) -> dict[str, Any]:
        """Return the facts of the exchanges for the summary. All ranks call it."""
        bound = self.chunks.whole.sliced.bound
        used = {} if bound is None else bound.used(self.mesh.world)
        return {**self.controller.facts(), **used, **self.offload.facts(self.mesh.world)}

    def final_notes(self) -> tuple[str, ...]:
        """Return the closing messages: what history, codecs and late rows were found to cost."""
        return self.controller.final_notes()

    def join_weights(self, weights: Mapping[str, Tensor] | None = None) -> None:
        """Fill this rank's model, or a copy of its weights, with those of all stages. All ranks call it."""
        state = state_of(self.model) if weights is None else weights
        self.ownership.share(state, "weights of all stages")

    @contextmanager
    def joined(self, optimizer: Optimizer, best: Mapping[str, Tensor] | None) -> Iterator[None]:
        """Hold the weights, optimizer state and best weights of all stages on every rank, within a block."""
        self.join_weights()
        if best is not None:
            self.join_weights(best)
        # Memory of the whole optimizer state is only needed while a checkpoint is written.
        self.ownership.share_optimizer(optimizer)
        yield
        self.ownership.forget_others(optimizer)

    def epoch_state(self, epoch: int) -> EpochState:
        """Return what the next epoch may read of this one: rows of other chunks, and controller states."""
        tables, entries = self.chunks.tables, [*self.exchange.known.state_entries(epoch)]
        if self.controller.history is not None and tables is not None:
            entries += [*tables.state_entries(epoch), *self.rollback.state_entries()]
        return EpochState.of(self.layout, self.controller.state_dict(), entries)

    def resumed(self, optimizer: Optimizer, restored: RestoredState) -> str:
        """Continue from a checkpoint whose weights and optimizer state have been read. All ranks call it.

        Args:
            optimizer: The optimizer of the model's parameters.
            restored: The state of exchanges and controllers from the checkpoint.

        Returns:
            A message on how training continues with history and late rows.
        """
        self.ownership.forget_others(optimizer)
        self.controller.load_state_dict(restored.controllers)
        history = self.controller.history
        resumed_rows, tables = (
            restored.resume_rows(self.layout, self.mesh.world, self.mesh.device),
            self.chunks.tables,
        )
        self._forget(resumed_rows or NOTHING)
        if resumed_rows is not None and history is not None and tables is not None:
            # Sites take their rows from the checkpoint when they are first reached, so one evaluation reaches
            # all of them. If a rank then lacks a site's rows, no rank uses any.
            self.evaluate(restored.epoch)  # it reaches all sites, and reads exactly what all forwards share
            if not all(self.mesh.world.gather_objects(tables.filled, "rows of all sites")):
                resumed_rows = None
                self._forget(NOTHING)
        if history is not None:
            kept = self.rollback.restore(resumed_rows or NOTHING, restored.epoch)
            every = all(self.mesh.world.gather_objects(kept, "weights that may be put back"))
            history.resume(rows=resumed_rows is not None, kept=every)
        return said_of(resumed_rows, late=self.exchange.late, history=history is not None)

    def _forget(self, resumed_rows: ResumedRows) -> None:
        """Drop the rows of earlier epochs, except those resumed from a checkpoint."""
        self.exchange.forget(resumed_rows)
        if self.chunks.tables is not None:
            self.chunks.tables.forget(resumed_rows)

    def take_notes(self) -> tuple[str, ...]:
        """Return the messages since the last call."""
        taken, self._notes = tuple(self._notes), []
        return taken

    def held(self, optimizer: Optimizer, best: Mapping[str, Tensor] | None) -> MemoryByKind:
        """Return the memory by kind that this rank holds between epochs, and its activations within one."""
        copies = [*(best or {}).values(), *self.rollback.tensors]
        ledger = ledger_of_chunks(self.chunks, self.model, copies)
        return account(ledger, self.model, optimizer, self.activations.bytes)

    # [Note: kinds of epoch] An epoch of chunks runs in one of three ways, and the history controller decides
    # which:
    #
    #     kind       passes                     neighbours in other chunks    tables keep afterwards
    #     history    one by one                 fresh or historical           the rows of the last refresh
    #     refresh    one by one                 fresh or historical           the rows of this epoch
    #     exact      all at once                fresh                         the rows of this epoch
    #     probe      history without a step,    both, one after the other     the rows of this epoch
    #                then exact
    #
    # ``drop`` and a single chunk have no tables and no choice. A careful epoch is a refresh that also passes
    # on gradients of the epoch before (``stale``). An exact epoch leaves its gradients at historical rows for
    # a careful one that may follow, which costs a table, so it does so only where the guard watches or the
    # user asks for it.

    # Epochs --------------------------------------------------------------------------------------

    @while_attached
    def train(self, epoch: int, optimizer: Optimizer, *, stop: bool = False) -> tuple[float, bool]:
        """Do one weight update: forward and backward of all chunks, gradient sum, clipping, optimizer step.

        Args:
            epoch: The epoch, counted from 1.
            optimizer: The optimizer of the model's parameters; those of other stages have no gradient here.
            stop: Whether this rank was asked to stop.

        Returns:
            The mean loss over all training vertices before the update; whether any rank was asked to stop.

        Raises:
            ModelError: If the loss is not finite.
        """
        plan, value, stops = self._passed(epoch, stop=stop)
        weights = self.controller.observe(epoch, plan, value)
        # A rollback takes the place of this epoch's step.
        if not self.rollback.apply(weights, optimizer):
            return value, stops
        with self.phases.phase("optimizer", epoch):
            self._step(optimizer)
        return value, stops

    def _passed(self, epoch: int, *, stop: bool = False) -> tuple[EpochPlan, float, bool]:
        """Run forward and backward of all chunks as the controller plans; return the mean loss."""
        self.model.train(True)
        self.net.freed.look()
        plan = self.controller.plan()
        lost = self._gradient(epoch, plan) if plan.guess is None else self._probed(epoch, plan)
        self.activations.done()
        self._checked |= {one.exact for one in (plan, plan.guess) if one is not None}
        value, stops = self._summed(epoch, lost, stop=stop)
        task.check_finite(value, epoch)
        return plan, value, stops

    @while_attached
    def gradient(self, step: int, *, fresh: bool) -> float:
        """Compute the gradient of one step of the user's own loop, which makes the update itself.

        All ranks call it. The guard must be off, because a rollback needs the update.

        Args:
            step: The step, counted from 1.
            fresh: Whether the loss is another one than in the last step, so that it is checked.

        Returns:
            The mean loss over all rows.
        """
        assert not self.parallel.guard
        # The first rows of each new loss are tried: it may average by itself, which chunks would change.
        self._checked = set() if fresh else self._checked
        # Weights that a loss gives with its values may be others in each step.
        self._weighed = LossWeights(self.criteria.objective, self.mesh.graph)
        self._settle()
        plan, value, _ = self._passed(step)
        self.controller.observe(step, plan, value)
        return value

    def _summed(self, epoch: int, lost: Tensor | float, *, stop: bool) -> tuple[float, bool]:
        """Return the loss over all ranks and whether any was asked to stop; sum how far rows moved."""
        with self.phases.phase("weights", epoch):
            # The loss is 0 on all ranks but those of the last stage, so the sum over the world is the mean
            # loss.
            mine = torch.tensor([0.0, float(stop), *self._moved(epoch)], dtype=torch.float64)
            mine, action = to_device(mine, self.mesh.device), f"loss, epoch {epoch}"
            mine[0] += lost
            value, stops, *moved = self.mesh.world.all_reduce(mine, action=action, kind="other").tolist()
        self.exchange.moved(moved, epoch)
        return value, stops > 0

    def _moved(self, epoch: int) -> list[float]:
        """Return how far rows of this part moved, if needed: the largest drift over the part's stages."""
        if not self._drifts:
            return []
        mine = to_device(torch.tensor(self._drifts, dtype=torch.float64), self.mesh.device)
        self._drifts = ()
        # All stages of a part then add the same value to the sums over all ranks, so the mean is over parts.
        found: list[float] = self.mesh.pipe.all_reduce(mine, "max", action=f"drift, epoch {epoch}").tolist()
        return found

    def _step(self, optimizer: Optimizer) -> None:
        """Clip the gradients and make the optimizer's step."""
        if self.settings.clip is not None:
            self.ownership.clip(self.gradients.parameters, self.settings.clip)
        if self._stepped:
            self._step_own(optimizer)
        else:  # one rank may refuse the optimizer where others do not
            by_all(self.mesh.world, lambda: self._step_own(optimizer), "the first update")
            self._stepped = True

    def _step_own(self, optimizer: Optimizer) -> None:
        if self.foreign and not self._stepped:
            refuse_mixing(optimizer)
        watch_hooks(optimizer, self.foreign)
        with watched(self.foreign, "the optimizer"):
            optimizer.step()

    def _probed(self, epoch: int, plan: EpochPlan) -> Tensor | float:
        """Compute the gradient of the plan's guess, then the exact one, which stays, and compare the two."""
        assert plan.guess is not None
        # See GraphEngine._probed: the guess is measured only, so buffers and a loss with state are put back
        # after it.
        with self.ownership.buffers.unmoved(), self.criteria.objective.tried():
            self._gradient(epoch, plan.guess, probes=True)
        guess = [None if p.grad is None else p.grad.clone() for p in self.gradients.parameters]
        with self.report.uncounted():
            lost = self._gradient(epoch, plan)
        agreed = agreement(*self.ownership.products(self.gradients.parameters, guess))
        drift = 0.0
        if plan.kind == "probe":
            assert self.chunks.tables is not None
            drift = self.chunks.tables.drift(self.mesh.world)
        self.controller.probed(epoch, plan, agreed, drift=drift)
        return lost

    def _gradient(self, epoch: int, plan: EpochPlan, *, probes: bool = False) -> Tensor | float:
        """Run all chunks forward and backward and sum gradients; return this rank's share of the loss."""
        for parameter in self.model.parameters():
            parameter.grad = None
        with (
            task.draws_of(self.settings.seed, epoch),
            self.controller.using(plan, probes=probes),
            self.gradients.during((), f"sum of gradients, epoch {epoch}"),
        ):
            stage_runs = self._trained(epoch, plan)
        # Of the epoch's first pass: in a probe that is the one whose rows may be late.
        self._drifts = self._drifts or self.exchange.drifts
        self._weighed.done()
        with self.phases.phase("weights", epoch):
            self.gradients.finish()
            # Sums over parts come first (`finish`), then sums over stages for shared weights. Hooks see the
            # final gradient.
            self.ownership.sum_shared()
            self.gradients.tell_hooks()
        return sum((stage_run.lost for stage_run in stage_runs.values()), 0.0)

    def _trained(self, epoch: int, plan: EpochPlan) -> StageRuns:
        """Run all chunks forward and backward, by the pass for this kind of epoch."""
        tables, self._checks = self.chunks.tables, plan.exact not in self._checked
        if self.parallel.cross_chunk == "drop" and tables is not None:
            return self.chunk_passes.one_by_one(epoch, None, checked=self._checks)
        if tables is None:
            return self.chunk_passes.at_once(epoch, training=True, checked=self._checks)
        history, stale = self.controller.history, self.parallel.stale_gradients
        if plan.exact:
            # [Note: kinds of epoch] above: a careful epoch may follow, and would read the gradients that are
            # kept here.
            leaves = history is not None and (stale or history.watch)
            stage_runs = self.chunk_passes.at_once(epoch, training=True, checked=self._checks, stale=leaves)
        else:
            stale = stale or (history is not None and history.careful)
            provider = self.chunks.history(epoch, refresh=plan.kind == "refresh", stale=stale)
            tables.begin(epoch, provider)
            stage_runs = self.chunk_passes.one_by_one(epoch, provider, checked=self._checks)
            # Sums statistics over all vertices, which the next epoch reads.
            with self.phases.phase("history", epoch):
                tables.end()
        if plan.exact or plan.kind == "refresh":
            tables.keep()
        return stage_runs

    def _log(self, message: str) -> None:
        if message:
            self._notes.append(message)

    def _lose(self, stage_run: StageRun) -> None:
        """Compute the loss of a stage run after its forward, if its stage computes the output."""
        self.activations.sample_peak()
        out = self._out(stage_run)
        if out is None:
            return
        rows = self._loss_rows[stage_run.scope]
        target, shown = self.criteria.objective.target(stage_run.scope.inputs, rows), out[rows]
        if self._checks:
            # Real rows, which may differ from the made-up ones that were tried before the first epoch.
            with RefusesKept(lambda tensor: stage_run.scope.axes.of(tensor) is not None, self.model):
                self.criteria.objective.check(shown, target, trains=True, calls=self._loss_calls)
            self.criteria.metric.check(out)
        if not rows.numel():
            return
        with watched(self.foreign, "the loss"):
            lost = self._weighed.mean(*self.criteria.objective.lost(shown, target))
        stage_run.lost = lost.detach().double()  # read once an epoch: the host would wait for each chunk
        stage_run.roots.append((lost, None))

    def _out(self, stage_run: StageRun) -> Tensor | None:
        """Return the model's output for a chunk; None if the run's stage does not compute it."""
        name = stage_run.code.stage.output
        if name is None:
            return None
        out = task.check_rows(stage_run.outs[name], stage_run.scope.own, self.mesh.rank)
        shown: Tensor = task.in_float32(out) if self.net.options.amp else out
        return shown

    # Evaluation ----------------------------------------------------------------------------------

    def look_ahead(self, epoch: int) -> Tensor | None:
        """Return None: the next epoch's chunks read rows that this one kept, so no forward can be reused."""
        return None

    @while_attached
    @torch.no_grad()
    def evaluate(self, epoch: int) -> Tensor:
        """Return exact scores of the part's own rows with dropout off, computed by the same stages.

        Shapes:
            ``[n, ...]``, as the model returns them.

        Cost:
            A transfer of the scores from the last stage to the others.
        """
        self.model.train(False)
        # A message that is not received blocks those sent long after it, and any number of evaluations may
        # follow before the next epoch receives the late rows.
        self.exchange.settle()
        stage_runs = self.chunk_passes.at_once(epoch, training=False)
        out = next((out for run in stage_runs.values() if (out := self._out(run)) is not None), None)
        value = self.staging.survey.values[self.staging.graph.output]
        if out is None:
            own = self.chunks.whole.own
            kind = torch.float32 if self.net.options.amp else value.dtype
            out = torch.empty(own, *value.shape, dtype=kind, device=self.mesh.device)
        return self.mesh.pipe.broadcast(out, self.parallel.pipe - 1, action=f"scores, epoch {epoch}")


def _training_rows(inputs: Mapping[str, Any]) -> Tensor:
    """Return the indices of the rows whose loss is trained on."""
    rows: Tensor = inputs["train_mask"].nonzero().view(-1)
    return rows
