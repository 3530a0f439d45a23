"""Trainer: epochs, evaluation, early stopping and predictions, with the same results on any number of ranks.

Where it sits: the public interface, and what ``kagome train`` runs on every rank. It opens the mesh, gets
this rank's part, checks the model, and drives an engine; results go to ``run_dir`` and ``report``.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from kagome import config
from kagome.checkpoint import checkpoint
from kagome.checkpoint.best_weights import BestWeights, copied, holds
from kagome.checkpoint.files import latest
from kagome.checkpoint.saved_weights import give_alike
from kagome.comm.channel import Channel
from kagome.comm.mesh import open_mesh
from kagome.components.model_setup import input_notes, set_up_model, unlabelled
from kagome.components.wrappers import as_written, refuse_no_module, unwrapped
from kagome.config import Loss as LossName, Metric as MetricName, Parallel, Report, Train
from kagome.config.fields import check_kind
from kagome.errors import ConfigError, DataError
from kagome.graph.partition.partition import graph_of
from kagome.graph.partition.sets_partition import Part, scored_rows, with_scored, without_attributes
from kagome.graph.partition.store import Meta
from kagome.launch.finalizer import Finalizer
from kagome.launch.gc import set_aside
from kagome.launch.signals import asked_to_stop, ended_by
from kagome.model.state import load_state, state_of
from kagome.objective import optimizers
from kagome.objective.metrics import Own
from kagome.objective.objective import Loss
from kagome.objective.optimizers import Wishes, named, run_of
from kagome.records.epoch import EpochRecord, Memory
from kagome.records.spans import Spans
from kagome.report.progress import Progress, warn
from kagome.run_dir.results import original_order, outcome
from kagome.run_dir.run_dir import RunWriter, earlier_records
from kagome.train import data as source
from kagome.train.admission import Admission
from kagome.train.callbacks import Callbacks
from kagome.train.engines import build_engine
from kagome.train.graph_engine import GraphEngine
from kagome.train.metrics_log import EpochLoop, EpochTimer
from kagome.train.rank_agreement import ModelMarks, compared, facts_of, refuse_unlike_codes
from kagome.train.sets_source import refuse_target
from kagome.verify.check import before_first

AFTER_IMPORTS: Final = Memory()
"""Resident size once everything is imported: peaks are measured from here."""

SPLITS: Final = ("train", "val", "test")

Source = Callable[[Channel], tuple[Part, Meta]]
Out = str | Path | Callable[[], str] | None
Build = Callable[[Part, Meta, Channel], nn.Module]


class Trainer:
    """Train one model on one graph, whole, over as many ranks as the script was started with.

    Args:
        model: A module over ``(x, edge_index, ...)`` (or one ``Data`` object). Further inputs are given by
            their names in the data. On several ranks all get rank 0's weights. ``torch.compile``,
            ``DistributedDataParallel`` and ``DataParallel`` around it are taken off; compiled layers and
            functions in it run uncompiled.
        data: A PyG ``Data``, the folder of a saved partition, or a ``HeteroData``. One vertex type of it has
            labels and masks; ``train.target_type`` names it if several have.
        parallel: How to split the work.
        loss: A name that ``train.loss`` takes, or ``loss(out, y)``: ``out`` is the model's output and ``y``
            the labels of some rows. It returns a value a row, their sum, or ``(values, weights)``, whose
            weighted mean is taken; on one rank it may return their mean. Further arguments are attributes of
            the data by name; a third one without such a name is ``data.weight``.
        metric: A name that ``train.metric`` takes, or ``metric(out, y)`` with a value a row. One with a
            ``compute(state)`` returns a state instead: tensors that add up over rows. Less is better if it
            has ``higher_is_better = False``.
        loss_inputs: ``{argument: attribute}`` for further arguments of the loss.
        optimizer: ``callable(params) -> Optimizer``; by default Adam with ``train``'s rate and weight decay.
        scheduler: ``callable(optimizer)``; stepped once an epoch. ``ReduceLROnPlateau`` gets the validation
            metric if there is one and its ``mode`` is the metric's direction, else the loss.
        train: Epochs, seed, metric, early stopping, ...
        report: What to report about the run.
        fast: Whether kernels reduce messages; if off, all runs as PyG runs it.
        recompute: Whether each layer keeps its inputs only, and runs again in backward, to save memory.
        out: Folder for the run's files; None writes none.
        overwrite: Whether a run that is already in the folder may be removed.
        callbacks: Objects with ``on_fit_start(trainer)``, ``on_epoch_end(record)``, ``on_checkpoint(path)``
            or ``on_fit_end(summary)``. They run on rank 0 alone, unless they set ``all_ranks = True``.

    A Trainer holds connections, memory and files until :meth:`close`, or the end of its ``with`` block.

    Raises:
        KagomeError: A subclass for each kind of fault in the data, the model, the settings or the ranks.

    Example:
        >>> import kagome
        >>> from torch_geometric.nn import GCN
        >>> with kagome.Trainer(GCN(64, 16, num_layers=2, out_channels=10), kagome.load("digits")) as trainer:
        ...     summary = trainer.fit(epochs=1)
        ...     trainer.predict().shape
        torch.Size([1797, 10])
    """

    def __init__(
        self,
        model: nn.Module,
        data: Any,
        *,
        parallel: Parallel | None = None,
        loss: Loss | LossName | None = None,
        metric: Own | MetricName | None = None,
        loss_inputs: Mapping[str, str] | None = None,
        optimizer: Callable[[Any], Optimizer] | None = None,
        scheduler: Callable[[Optimizer], Any] | None = None,
        train: Train | None = None,
        report: Report | None = None,
        fast: bool = True,
        recompute: bool = False,
        out: str | Path | None = None,
        overwrite: bool = False,
        callbacks: Sequence[object] = (),
    ) -> None:
        refuse_no_module(model, "Trainer(model, ...)")
        check_kind("out", out, str | Path | None)
        check_kind("overwrite", overwrite, bool)
        settings = run_of(config.Model(fast=fast, recompute=recompute), parallel, train, report)
        settings = replace(settings, train=named(settings.train, loss, metric))

        wishes = Wishes(loss, metric, loss_inputs, optimizer, scheduler)
        take = partial(source.from_given, data, settings)
        self._open(settings, take, lambda *_: model, wishes, out, overwrite, callbacks)

    @classmethod
    def from_settings(
        cls, settings: config.Run, take: Source, build: Build, *, out: Out = None, overwrite: bool = False
    ) -> Trainer:
        """Make the command line's Trainer: data by name, one part a rank, the model built from that part."""
        trainer = cls.__new__(cls)
        trainer._open(settings, take, build, Wishes(), out, overwrite)
        return trainer

    @as_written
    def _open(
        self,
        settings: config.Run,
        take: Source,
        build: Build,
        wishes: Wishes,
        out: Out,
        overwrite: bool,
        callbacks: Sequence[object] = (),
    ) -> None:
        self._begun, self.spans = time.perf_counter(), Spans(most=10_000)  # a pipeline has one an action
        self.settings, self.train = settings, settings.train
        self._stack, self._files = ExitStack(), ExitStack()  # any thread may close the files
        # Nothing on the stacks may refer to the trainer. What is still open ends with the process.
        self._closing = weakref.finalize(self, Finalizer(self._stack.close, self._files.close))
        try:
            mesh = open_mesh(settings.parallel, timeout=self.train.timeout, log=warn)
            self.mesh = self._stack.enter_context(mesh)
            self.channel, self.world = self.mesh.graph, self.mesh.world
            self.channel.timer = self.channel.patient.timer = self.spans.phase
            self.spans.align()
            self.spans.measure(self.mesh.device)
            self.notes: list[str] = []
            with self.spans.phase("load"):
                self.part, self.meta = source.for_all_stages(take, self.mesh, settings.parallel.chunks)
            refuse_target(self.part, self.train.target_type)
            self.scored = scored_rows(self.part)
            self._log(*self.mesh.notes, *self.meta.notes)
            torch.manual_seed(self.train.seed)
            given = unwrapped(build(self.part, self.meta, self.channel))
            with self.spans.phase("load"):
                self.model, notes = set_up_model(given, self.part, self.mesh, settings.parallel)
            self._log(*notes)
            self._learn(wishes)
            self._marks = ModelMarks(self.model, self.optimizer, self.scheduler)
            self._callbacks = Callbacks(callbacks, self.world, self._marks)
            chosen = (out() if self.mesh.rank == 0 else None) if callable(out) else out
            folder = self.world.gather_objects(chosen, "the run's folder")[0]
            self.writer = None
            if folder is not None:
                log = partial(_noted, self.notes, self.mesh.rank == 0 and settings.report.progress)
                self.writer = RunWriter(
                    str(folder), settings, self.world, own=wishes.own, overwrite=overwrite, log=log
                )
                self._files.callback(self.writer.close)
                self._stack.callback(self._files.close)
        except BaseException:
            self.close()
            raise

    def _learn(self, wishes: Wishes) -> None:
        optimizer, scheduler, settings = wishes.optimizer, wishes.scheduler, self.settings
        refuse_unlike_codes(self.world, {"loss": wishes.loss, "metric": wishes.metric})
        self._labelled = self.meta.labels is not None
        if self._labelled:
            found = optimizers.criteria_of(wishes, self.scored, self.meta, settings, self.mesh)
        else:  # it is scored and never trained on: nothing reads these labels
            found = optimizers.no_criteria(), unlabelled(self.scored)
        self.criteria, self.scored = found
        self.part = with_scored(self.part, self.scored)
        self._log(*self.criteria.notes)
        self._log(*input_notes(self.model, self.part, self.criteria.objective.uses))
        self._frozen = optimizers.frozen(self.model)
        self.optimizer = optimizers.optimizer_of(self.model, settings, optimizer, self.mesh)
        self._default_optimizer = optimizer is None and scheduler is None
        higher = self.criteria.metric.higher
        self.scheduler = optimizers.scheduler_of(self.optimizer, scheduler, higher=higher)
        self.timer = EpochTimer(self.world)
        self.engine = build_engine(
            self.model, self.part, self.mesh, settings=settings, criteria=self.criteria, phases=self.spans
        )
        self.admission = Admission(self.engine, self.optimizer, settings)
        if self.scheduler is not None and not isinstance(self.scheduler, LRScheduler):
            self.engine.forward_reuse.allowed = False  # a user's own might write to the weights unseen
        self.epoch, self._best, self._was_checked, self._is_whole = 0, BestWeights(), False, True
        self.records: list[EpochRecord] = []
        self._last: dict[str, Tensor] | None = None

    @as_written
    def fit(
        self, epochs: int | None = None, *, resume: str | Path | None = None, restore_best: bool = True
    ) -> dict[str, Any]:
        """Train until the given number of epochs is done.

        A second call continues with the last epoch's weights, or with yours if you have changed the model's
        weights in between, on all ranks alike. For a loop of one epoch each, with the weights of the last
        epoch in the model each time: ``trainer.fit(trainer.epoch + 1, restore_best=False)``.

        Args:
            epochs: Epochs in all, including those done before; by default ``train.epochs``.
            resume: A run's folder or a checkpoint to continue from.
            restore_best: Leave the weights of the best epoch in the model, by the validation metric; else
                those of the last epoch. :meth:`best_weights` and :meth:`last_weights` return either.

        Returns:
            The contents of ``summary.json``; its metrics are of the weights that the model is left with.

        Raises:
            CheckError: If the split and the whole model differ (``train.check``).
            ModelError: If weights were changed so that they differ between ranks.
            CallbackError: If a callback raised on another rank.
            KeyboardInterrupt: After Ctrl-C on one rank, once a checkpoint is saved (with ``out``).
            SystemExit: After SIGTERM with 143, after SIGHUP with 129, after Ctrl-C on several ranks with 130;
                on all ranks, whichever of them got the signal, and once a checkpoint is saved (with ``out``).
        """
        self._together("fit")
        self._need_labels("fit")
        optimizers.refuse_thawed(self.model, self._frozen)
        check_kind("epochs", epochs, int | None, least=0)
        epochs = self.train.epochs if epochs is None else int(epochs)
        self._go_on()
        self.engine.forward_reuse.anew()
        if resume is not None:
            self._resume(resume)
        if self.writer is not None:
            checkpoint.refuse_unsavable(self.optimizer, self.scheduler)
            self.writer.begin(resume=resume)
        optimizers.refuse_short(self.scheduler, epochs - self.epoch, self.train)
        if self.epoch >= epochs > 0:
            self._log(
                f"{self.epoch} epochs are done, and fit({epochs}) asks for {epochs} in all: none is left"
            )
        self._check()
        if self.part.nodes:
            with self.spans.phase("check"):
                self._log(*self.admission.predict(self.part, self.world))
                if isinstance(self.engine, GraphEngine):
                    self._log(*self.engine.forecast(self.part))
            self._log(*self.engine.take_notes())
            self.part = without_attributes(self.part)  # the engine holds its own inputs
            self.scored = scored_rows(self.part)
        set_up = time.perf_counter() - self._begun
        if self.writer is not None:
            self.writer.open(self.records, after=self.epoch)
        self._callbacks.call("on_fit_start", self)
        shown = self.settings.report.progress and self.mesh.rank == 0
        bar = Progress(epochs, done=self.epoch, metric_name=lambda: self.criteria.metric.name, enabled=shown)
        heard = self._callbacks.listens_to("on_epoch_end")
        noting = [self.records.append, bar.update, *([self.writer.record] if self.writer else [])]
        noting += [self._tell_callbacks] if heard else []
        self._is_whole, ending, heap = False, self.timer.ending(noting), set_aside(epochs - self.epoch)
        with asked_to_stop(self.writer is not None) as asked, bar, heap, ending, self.engine.net:
            loop = EpochLoop(epochs, asked, noting, delays=self.settings.parallel.max_age > 0 and not heard)
            while self.epoch < epochs and self._one_epoch(loop):
                pass
        self.engine.forward_reuse.drop()
        self.engine.exchange.keep()
        self.timer.drop()
        if self.writer is not None and self.epoch:
            self._save()
        self._join_weights()
        self._compare(True, whole=True)
        if restore_best and self._best.weights is not None:
            self.engine.join_weights(self._best.weights)
            self._last = self._best.restore(self.model, self.epoch)
        self._is_whole = True
        values = self._finish(set_up)
        self._callbacks.call("on_fit_end", values)
        return values

    def last_weights(self) -> dict[str, Tensor]:
        """Return a copy of the weights after the last epoch, as a state dict. All ranks call it.

        Cost: a copy of the weights; in a pipeline, also sending each stage's weights to the other stages.
        """
        self._together("last_weights")
        if self._last is not None:
            return copied(self._last)
        self._join_weights()
        return copied(state_of(self.model))

    def best_weights(self) -> dict[str, Tensor]:
        """Return a copy of the best epoch's weights, as a state dict. All ranks call it.

        Without an evaluation on validation vertices, the last epoch is the best.
        Cost: a copy of the weights; in a pipeline, also sending each stage's weights to the other stages.
        """
        self._together("best_weights")
        if self._best.weights is None:
            return self.last_weights()
        self.engine.join_weights(self._best.weights)
        return copied(self._best.weights)

    @as_written
    def evaluate(self, split: str = "test") -> float | None:
        """Return the metric over a split's vertices, with the model's present weights. All ranks call it.

        Raises:
            ConfigError: If there is no such split.
            DataError: If the data has no labels.
            CheckError: If the split and the whole model differ (``train.check``).
        """
        self._together("evaluate")
        self._need_labels("evaluate")
        if split not in SPLITS:
            raise ConfigError(f"one of {', '.join(SPLITS)} for evaluate", repr(split))
        self._check()
        return self._scores()[split]

    @as_written
    def predict(self) -> Any:
        """Return scores: of all vertices on rank 0, of own rows elsewhere. All ranks call it.

        Rank 0 returns them in the original order; of several vertex types, those of the type with labels. The
        present weights are used, and no labels are needed.

        Raises:
            CheckError: If the split and the whole model differ (``train.check``).

        Shapes: ``[N, C]`` on rank 0, ``[n, C]`` elsewhere; of a model with several outputs, each of them.

        Cost: N rows to rank 0.
        """
        self._together("predict")
        self._check()
        own = self.engine.evaluate(self.epoch)
        joined = original_order(own, self.scored, self.channel, "predictions")
        return own if joined is None or self.mesh.rank else joined

    def load(self, where: str | Path) -> None:
        """Load the best weights of a run into the model, to score or to train on. All ranks call it.

        Args:
            where: The folder of a run, of its ``checkpoints`` or of one of them, or a ``.safetensors`` file
                of weights under the model's own names.

        Raises:
            CheckpointError: If there are no such weights, they are damaged, or of another model.
        """
        self._together("load")
        give_alike(self.model, where, self.world)
        self._last, self._is_whole = None, True

    def close(self) -> None:
        """Leave the ranks and release all connections, threads and files. A second call does nothing.

        A Trainer that nothing refers to any more, or that is left at exit, closes itself in its own thread.
        """
        self._closing.detach()
        self._stack.__exit__(*sys.exc_info())  # after an error the wait for peers is shorter

    def __enter__(self) -> Trainer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Weights and callbacks -----------------------------------------------------------------------

    def _together(self, what: str) -> None:
        """Refuse a collective call on a closed Trainer, or by a callback on one rank alone."""
        if not self._closing.alive:
            hint = "call it inside the with block"
            raise ConfigError(f"the ranks of an open Trainer for {what}", "a closed one", hint=hint)
        self._callbacks.refuse_alone(what)

    def _need_labels(self, what: str) -> None:
        if not self._labelled:
            raise DataError(
                f"labels (data.y) for {what}",
                "data without them",
                hint="predict gives scores without labels",
            )

    def _check(self) -> None:
        """Compare with plain PyG on a sample, before the first forward pass."""
        if self._was_checked or not self.train.check:
            return
        with self.spans.phase("check"):
            goes = self.engine.goes if isinstance(self.engine, GraphEngine) else None
            self._log(*before_first(self.model, self.part, self.world, self.settings, goes))
        self._was_checked = True

    def _go_on(self) -> None:
        """Load the weights that training continues with; they must be the same on all ranks."""
        last = self._last
        # `_last` is set while the model holds the best epoch's weights: any other weights are the user's.
        changed = last is None or not holds(self.model, self._best.weights or {})
        if not self._compare(changed, whole=self._is_whole) and last is not None:
            load_state(self.model, last)
        elif last is not None:
            self._log("the model's weights were changed since the last fit: training goes on with them")
        self._last = None

    def _compare(self, changed: bool, *, whole: bool) -> bool:
        """Return whether weights were changed on some rank; ranks must agree on settings and weights."""
        rules = facts_of(self.optimizer, self.scheduler, self.criteria.objective.trial)
        return compared(self.world, self.model, rules, changed, whole=whole)

    def _join_weights(self) -> None:
        """Give every rank the weights of all stages, unless it has them."""
        if not self._is_whole:
            self.engine.join_weights()

    def _tell_callbacks(self, record: EpochRecord) -> None:
        self.engine.join_weights()  # a callback may read the model: an average of weights, a norm
        if self._callbacks.call("on_epoch_end", record):
            self.engine.forward_reuse.anew()  # the forward pass kept for the next epoch used the old model

    # Epochs --------------------------------------------------------------------------------------

    def _one_epoch(self, loop: EpochLoop) -> bool:
        """Train, evaluate and log an epoch, and save it if it is not the last; return whether one follows."""
        self.epoch += 1
        loss, stop = self._train_epoch(loop)
        evaluates = self._evaluates(loop, stop)
        val = self._evaluate_epoch(last=stop or self.epoch == loop.epochs) if evaluates else None
        if self.scheduler is not None:
            higher = self.criteria.metric.higher
            optimizers.step_scheduler(self.scheduler, loss, val, higher=higher, seen=evaluates)
        stop |= self.world.size == 1 and bool(loop.asked)  # in this epoch; no other rank needs to know
        more = self.epoch < loop.epochs and not 0 < (self.train.patience or 0) <= self._best.waited
        saves = stop or bool(more and self.train.save_every and self.epoch % self.train.save_every == 0)
        self.timer.flush(loop.noting, keep=loop.delays and not saves)
        if saves:
            self._save()
        if stop:
            self._log(f"asked to stop: epoch {self.epoch} is saved, go on with --resume")
            raise self._ended(loop.asked)
        return more

    def _train_epoch(self, loop: EpochLoop) -> tuple[float, bool]:
        """Make the epoch's weight update; return the loss before it, and whether a rank was asked to stop."""
        self.mesh.doing(f"epoch {self.epoch}")
        with self.timer.training():
            loss, stop = self.engine.train(self.epoch, self.optimizer, stop=bool(loop.asked))
            if self._evaluates(loop, stop):
                self.engine.exchange.settle()  # waiting for late rows counts to this epoch
        self._log(*self.engine.take_notes())
        self.timer.end(self.epoch, loss, self.engine.take_uncoded())
        return loss, stop

    def _evaluates(self, loop: EpochLoop, stop: bool) -> bool:
        return stop or self.epoch == loop.epochs or self.epoch % self.train.eval_every == 0

    def _evaluate_epoch(self, *, last: bool) -> float | None:
        """Score the epoch's weights and keep the best ones; return the validation score."""
        out = None
        if not last:
            with self.timer.training():  # the forward pass of the next epoch, which counts as training
                out = self.engine.look_ahead(self.epoch + 1)
        with self.spans.phase("evaluate", self.epoch):
            found = self._scores(out)
        self._best.observe(self.epoch, found["val"], self.model, higher=self.criteria.metric.higher)
        self.timer.scored(found["train"], found["val"], best_epoch=self._best.epoch)
        return found["val"]

    def _ended(self, asked: list[int]) -> BaseException:
        """Return the exception of a run that a signal on some rank has stopped. All ranks call it."""
        found: Any = self.world.gather_objects(asked[0] if asked else None, "how the run was stopped")
        return ended_by(next(number for number in found if number is not None), self.world.size)

    def _scores(self, out: Any = None) -> dict[str, float | None]:
        """Return the metric by split, with the present weights; ``out`` holds their scores, if known."""
        out = self.engine.evaluate(self.epoch) if out is None else out
        inputs = self.engine.inputs
        masks, action = {s: inputs[f"{s}_mask"] for s in SPLITS}, f"evaluation, epoch {self.epoch}"
        target = self.criteria.objective.target(inputs, slice(None))
        self.criteria = self.criteria.fitted(out, self._log)
        return self.criteria.metric.scores(out, target, masks, self.channel, action)

    # Checkpoints ----------------------------------------------------------------------------------

    def _save(self) -> None:
        if self.writer is None:
            return
        joined = self.engine.joined(self.optimizer, self._best.weights)
        with self.spans.phase("checkpoint", self.epoch), joined:
            path = checkpoint.save(
                self.writer.checkpoints,
                self._best.place(
                    self.epoch, self.train.seed, self.mesh.size, graph_of(self.meta.fingerprint)
                ),
                self.world,
                model=self.model,
                optimizer=self.optimizer,
                scheduler=self.scheduler,
                best=self._best.weights,
                epoch_state=self.engine.epoch_state(self.epoch) if self.train.save_rows else None,
            )
        self._callbacks.call("on_checkpoint", path)

    def _resume(self, where: str | Path) -> None:
        folder = latest(where)
        place, best, restored = checkpoint.load(
            folder,
            self.world,
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            seed=self.train.seed,
            graph=graph_of(self.meta.fingerprint),
        )
        if self._default_optimizer:
            optimizers.set_rates(self.optimizer, self.train)
        with checkpoint.fitting(folder):
            message = self.engine.resumed(self.optimizer, restored)
        self.epoch, self._best = place.epoch, BestWeights.at(place, best)
        self.records = earlier_records(self.world, folder, place.epoch)
        origin = f"written by {place.world_size} ranks, in {folder}"
        self._log(f"resumed after epoch {place.epoch}, {origin}{message}")

    def _finish(self, set_up: float) -> dict[str, Any]:
        with self.spans.phase("evaluate", self.epoch):
            found = self._scores()
        self._log(*self.engine.final_notes())
        facts: dict[str, Any] = {
            "test_metric": found["test"],
            "val_metric": found["val"],
            "metric_name": self.criteria.metric.name,
            "epochs": self.epoch,
            "best_epoch": self._best.epoch or None,
            "weights_epoch": (self.epoch if self._last is None else self._best.epoch) or None,
            **self.engine.facts(),
            "world_size": self.mesh.size,
            "parallel": asdict(self.settings.parallel.fit(self.mesh.size)),
            "seed": self.train.seed,
            "seconds_total": time.perf_counter() - self._begun,
            "set_up_seconds": set_up,
            "threads": self.mesh.threads,
            "notes": self.notes,
        }
        memory = self.admission.memory_report(self._best.weights, AFTER_IMPORTS)
        values, spans = outcome(self.records, self.spans, memory, self.world, self.meta, facts)
        if self.writer is not None:
            scores = self.predict()
            target = original_order(self.engine.inputs["y"], self.scored, self.channel, "labels")
            if target is not None and self.mesh.rank == 0:
                labels = self.criteria.metric.labels(scores)
                self.writer.finish(values, spans, scores, labels, target, self.model)
        return values

    def _log(self, *notes: str) -> None:
        for note in notes:
            _noted(self.notes, self.mesh.rank == 0 and self.settings.report.progress, note)


def _noted(notes: list[str], shown: bool, note: str) -> None:
    notes.append(note)
    if shown:
        warn(note)
