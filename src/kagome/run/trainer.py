"""Trainer: epochs, evaluation, early stop, predictions in original ids - the same on any number of ranks.

Where it sits: the public face, and what ``kagome train`` runs on every rank. It opens the mesh, gets this
rank's part, checks the model, and drives ``engine``; what happened goes to ``report``.
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
from kagome.comm.channel import Channel
from kagome.comm.leaving import Leaving
from kagome.comm.mesh import open_mesh
from kagome.config import Loss as LossName
from kagome.config import Metric as MetricName
from kagome.config import Parallel, Report, Train
from kagome.errors import ConfigError, DataError
from kagome.graph.partition import Partition, graph_of
from kagome.graph.store import Meta
from kagome.kinds import check_kind
from kagome.model.state import load_state, state_of
from kagome.report.meters import EpochRecord, Memory
from kagome.report.progress import Progress, warn
from kagome.report.spans import Spans
from kagome.run import checkpoint, learning, source
from kagome.run.accounts import Accounts
from kagome.run.alike import Marks, compared, facts_of, refuse_unlike_codes
from kagome.run.best import Best, copied, holds
from kagome.run.callbacks import Callbacks
from kagome.run.check import before_first
from kagome.run.costs import Costs
from kagome.run.engine import Engine
from kagome.run.engines import engine_for
from kagome.run.folder import RunWriter, earlier_records
from kagome.run.heap import set_aside
from kagome.run.learning import Wishes, named, run_of
from kagome.run.metrics import Own
from kagome.run.objective import Loss
from kagome.run.outcome import original_order, outcome
from kagome.run.ready import asks, ready, unlabelled
from kagome.run.stop import asked_to_stop, ended_by
from kagome.run.weights import give_alike
from kagome.run.wrappers import as_written, refuse_no_module, unwrapped

AFTER_IMPORTS: Final = Memory()
"""Resident size once everything is imported: what peaks are measured from."""

SPLITS: Final = ("train", "val", "test")

Source = Callable[[Channel], tuple[Partition, Meta]]
Out = str | Path | Callable[[], str] | None
Build = Callable[[Partition, Meta, Channel], nn.Module]


class Trainer:
    """Train one model on one graph, whole, over as many ranks as the script was started with.

    Args:
        model: A module over ``(x, edge_index, ...)`` (or one ``Data`` object); further inputs by their names
            in the data. On several ranks all get rank 0's weights. ``torch.compile``,
            ``DistributedDataParallel`` and ``DataParallel`` around it are taken off; compiled layers and
            functions in it run as they were written.
        data: A PyG ``Data``, or the folder of a saved partition.
        parallel: How to split.
        loss: A name that ``train.loss`` takes, or ``loss(out, y)``: ``out`` and ``y`` are those of some
            rows, as the model gave and the data has them. It gives a value a row, their sum, or ``(values,
            weights)``, whose weighted mean is taken; on one rank it may give their mean. Further arguments
            are attributes of the data by name; a third one without such a name is ``data.weight``.
        metric: A name that ``train.metric`` takes, or ``metric(out, y)`` with a value a row. One that has a
            ``compute(state)`` gives a state instead, tensors that add up over rows. Less is better where it
            has ``higher_is_better = False``.
        loss_inputs: ``{argument: attribute}`` for further arguments of the loss.
        optimizer: ``callable(params) -> Optimizer``; by default Adam with ``train``'s rate and weight decay.
        scheduler: ``callable(optimizer)``; stepped once an epoch. ``ReduceLROnPlateau`` is told the
            validation metric where its ``mode`` is the metric's direction and there is one, else the loss.
        train: Epochs, seed, metric, early stop, ...
        report: What to say about the run.
        fast: Whether messages are reduced by kernels; off, all runs as PyG runs it.
        recompute: Whether each layer keeps its inputs only, and runs again in backward: less memory.
        out: Folder for the run's files; None writes none.
        overwrite: Whether a run that is there already may be removed.
        callbacks: Objects with some of ``on_fit_start(trainer)``, ``on_epoch_end(record)``,
            ``on_checkpoint(path)`` and ``on_fit_end(summary)``. They run on rank 0 alone, unless they say
            ``all_ranks = True``.

    A Trainer holds connections, memory and files until :meth:`close`, the end of its ``with`` block, or until
    nobody holds the Trainer.

    Raises:
        KagomeError: A leaf for each thing that is wrong with the data, the model, the settings or the ranks.
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

        def take(channel: Channel) -> tuple[Partition, Meta]:
            if isinstance(data, str | Path):
                return source.from_folder(data, channel)
            method, seed, reuse = settings.cut(channel.size)
            return source.from_data(data, channel, method=method, seed=seed, reuse=reuse)

        wishes = Wishes(loss, metric, loss_inputs, optimizer, scheduler)
        self._open(settings, take, lambda *_: model, wishes, out, overwrite, callbacks)

    @classmethod
    def from_settings(
        cls, settings: config.Run, build: Build, *, out: Out = None, overwrite: bool = False
    ) -> Trainer:
        """What the command line makes: data by name, a part a rank, the model built from it."""
        trainer = cls.__new__(cls)

        def take(channel: Channel) -> tuple[Partition, Meta]:
            method, seed, reuse = settings.cut(channel.size)
            found = source.from_settings(settings.data, channel, method=method, seed=seed, reuse=reuse)
            return source.for_model(settings.model.name, *found)

        trainer._open(settings, take, build, Wishes(), out, overwrite)
        return trainer

    # Setting up ----------------------------------------------------------------------------------

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
        self._stack = ExitStack()
        self.settings, self.train = settings, settings.train
        self._files = ExitStack()  # what any thread may close
        # Nothing on the stacks may hold the trainer. What is not gone before ends with the process.
        self._closing = weakref.finalize(self, Leaving(self._stack.close, self._files.close))
        try:
            mesh = open_mesh(settings.parallel, timeout=self.train.timeout, say=warn)
            self.mesh = self._stack.enter_context(mesh)
            self.channel, self.world = self.mesh.graph, self.mesh.world
            self.channel.timer = self.channel.patient.timer = self.spans.phase
            self.spans.align()
            self.notes: list[str] = []
            with self.spans.phase("load"):
                self.part, self.meta = source.for_all_stages(take, self.mesh, settings.parallel.chunks)
            self._say_all(self.meta.notes)
            torch.manual_seed(self.train.seed)
            given = unwrapped(build(self.part, self.meta, self.channel))
            with self.spans.phase("load"):
                self.model, said = ready(given, self.part, self.mesh, settings.parallel)
            self._say_all(said)
            self._learn(wishes)
            self._marks = Marks(self.model, self.optimizer, self.scheduler)
            self._callbacks = Callbacks(callbacks, self.world, self._marks)
            chosen = (out() if self.mesh.rank == 0 else None) if callable(out) else out
            folder = self.world.gather_objects(chosen, "the run's folder")[0]
            self.writer = None
            if folder is not None:
                say = partial(_noted, self.notes, self.mesh.rank == 0 and settings.report.progress)
                self.writer = RunWriter(
                    str(folder), settings, self.world, own=wishes.own, overwrite=overwrite, say=say
                )
                self._files.callback(self.writer.close)
                self._stack.callback(self._files.close)
        except BaseException:
            self.close()
            raise

    def _learn(self, wishes: Wishes) -> None:
        optimizer, scheduler = wishes.optimizer, wishes.scheduler
        refuse_unlike_codes(self.world, {"loss": wishes.loss, "metric": wishes.metric})
        self._labelled = self.meta.labels is not None
        if self._labelled:
            self.aim, self.part = learning.aim_of(wishes, self.part, self.meta, self.settings, self.mesh)
        else:  # it is scored and never trained: what stands for labels is read by nobody
            self.aim, self.part = learning.no_aim(), unlabelled(self.part)
        self._say_all(self.aim.notes)
        self._say_all(asks(self.model, self.part, self.aim.objective.uses))
        self._frozen = learning.frozen(self.model)
        self.optimizer = learning.optimizer_of(self.model, self.settings, optimizer, self.mesh)
        self._default_optimizer = optimizer is None and scheduler is None
        self.scheduler = learning.scheduler_of(self.optimizer, scheduler, higher=self.aim.metric.higher)
        self.costs = Costs(self.world)
        self.engine = engine_for(
            self.model, self.part, self.mesh, settings=self.settings, aim=self.aim, phases=self.spans
        )
        self.accounts = Accounts(self.engine, self.optimizer, self.settings)
        if self.scheduler is not None and not isinstance(self.scheduler, LRScheduler):
            self.engine.ahead.allowed = False  # it might write to the weights unseen
        self.epoch, self._best, self._was_checked, self._is_whole = 0, Best(), False, True
        self.records: list[EpochRecord] = []
        self._last: dict[str, Tensor] | None = None

    # Public --------------------------------------------------------------------------------------

    @as_written
    def fit(
        self, epochs: int | None = None, *, resume: str | Path | None = None, restore_best: bool = True
    ) -> dict[str, Any]:
        """Train until so many epochs are done.

        Called again it goes on with the last epoch's weights, or with yours where you have changed the
        model's in between, on all ranks alike. For a loop of one epoch each, with the weights of the last
        epoch in the model each time: ``trainer.fit(trainer.epoch + 1, restore_best=False)``.

        Args:
            epochs: Epochs in all, those before too; by default ``train.epochs``.
            resume: A run's folder or a checkpoint to go on from.
            restore_best: Leave the weights of the best epoch in the model, by the validation metric; else
                those of the last epoch. :meth:`best_weights` and :meth:`last_weights` give either.

        Returns:
            What ``summary.json`` holds; its metrics are of the weights that the model is left with.

        Raises:
            CheckError: If split and whole differ (``train.check``).
            ModelError: If the ranks' weights were changed so that they differ.
            CallbackError: If a callback raised on another rank.
            KeyboardInterrupt: After Ctrl-C on one rank, once a checkpoint is saved (with ``out``).
            SystemExit: Likewise after SIGTERM with 143, after SIGHUP with 129, after Ctrl-C on several ranks
                with 130; on all ranks, whichever of them was asked.
        """
        self._together("fit")
        self._need_labels("fit")
        learning.refuse_thawed(self.model, self._frozen)
        check_kind("epochs", epochs, int | None, least=0)
        epochs = self.train.epochs if epochs is None else int(epochs)
        self._go_on()
        self.engine.ahead.anew()
        if resume is not None:
            self._resume(resume)
        if self.writer is not None:
            checkpoint.refuse_unsavable(self.optimizer, self.scheduler)
            self.writer.begin(resume=resume)
        learning.refuse_short(self.scheduler, epochs - self.epoch, self.train)
        if self.epoch >= epochs > 0:
            self._say(
                f"{self.epoch} epochs are done, and fit({epochs}) asks for {epochs} in all: none is left"
            )
        self._check()
        if self.part.nodes:
            with self.spans.phase("check"):
                self._say_all(self.accounts.foresee(self.part, self.world))
            self._say_all(self.engine.take_notes())
            self.part = replace(self.part, nodes={}, edges={})  # the engine has what it needs
        set_up = time.perf_counter() - self._begun
        if self.writer is not None:
            self.writer.open(self.records, after=self.epoch)
        self._callbacks.tell("on_fit_start", self)
        shown = self.settings.report.progress and self.mesh.rank == 0
        progress = Progress(epochs, done=self.epoch, metric_name=self._metric_name, enabled=shown)
        noting = [self.records.append, progress.update, *([self.writer.record] if self.writer else [])]
        heard = self._callbacks.hear("on_epoch_end")
        noting += [self._tell_callbacks] if heard else []
        self._is_whole = False
        ending = self.costs.ending(noting)
        heap = set_aside(epochs - self.epoch)
        with asked_to_stop(self.writer is not None) as asked, progress, heap, ending, self.engine.installed:
            while self.epoch < epochs:
                stop, every = self._one_epoch(epochs, bool(asked)), self.train.save_every
                stop |= self.world.size == 1 and bool(asked)  # in this epoch; nobody need be told
                saves = stop or bool(every and self.epoch % every == 0)
                self.costs.tell(noting, keep=self.settings.parallel.max_age > 0 and not saves and not heard)
                if saves:
                    self._save()
                if stop:
                    self._say(f"asked to stop: epoch {self.epoch} is saved, go on with --resume")
                    raise self._ended(asked)
                if self.train.patience and self._best.waited >= self.train.patience:
                    break
        self.engine.ahead.drop()
        self.costs.drop()
        if self.writer is not None and self.epoch:
            self._save()
        self._join_weights()
        self._compare(True, whole=True)
        if restore_best and self._best.weights is not None:
            self.engine.join_weights(self._best.weights)
            self._last = self._best.restore(self.model, self.epoch)
        self._is_whole = True
        values = self._finish(set_up)
        self._callbacks.tell("on_fit_end", values)
        return values

    def last_weights(self) -> dict[str, Tensor]:
        """A copy of the weights after the last epoch, as a state dict. All ranks call it.

        Cost:
            A copy of the weights; in a pipeline, those of each stage to the others.
        """
        self._together("last_weights")
        if self._last is not None:
            return copied(self._last)
        self._join_weights()
        return copied(state_of(self.model))

    def best_weights(self) -> dict[str, Tensor]:
        """A copy of the weights of the best epoch so far, as a state dict. All ranks call it.

        Where nothing was evaluated on validation vertices, the last epoch is the best.

        Cost:
            A copy of the weights; in a pipeline, those of each stage to the others.
        """
        self._together("best_weights")
        if self._best.weights is None:
            return self.last_weights()
        self.engine.join_weights(self._best.weights)
        return copied(self._best.weights)

    @as_written
    def evaluate(self, split: str = "test") -> float | None:
        """The metric over a split's vertices, with the weights as they are. All ranks call it.

        Raises:
            ConfigError: If there is no such split.
            DataError: If the data has no labels.
            CheckError: If split and whole differ (``train.check``).
        """
        self._together("evaluate")
        self._need_labels("evaluate")
        if split not in SPLITS:
            raise ConfigError(f"evaluate takes one of {', '.join(SPLITS)}", f"it was given {split!r}")
        self._check()
        return self._scores()[split]

    @as_written
    def predict(self) -> Any:
        """Scores: of all vertices in original order on rank 0, of own rows elsewhere. All ranks call it.

        They are of the weights that the model holds; the data need have no labels.

        Raises:
            CheckError: If split and whole differ (``train.check``).

        Shapes:
            ``[N, C]`` on rank 0, ``[n, C]`` elsewhere; of a model that gives several tensors each of them.

        Cost:
            N rows to rank 0.
        """
        self._together("predict")
        self._check()
        own = self.engine.evaluate(self.epoch)
        joined = original_order(own, self.part, self.channel, "predictions")
        return own if joined is None or self.mesh.rank else joined

    def load(self, where: str | Path) -> None:
        """Give the model the best weights of a run: to score with them, or to train on. All ranks call it.

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
        """Leave the ranks, and let go of all connections, threads and files. It may be called twice.

        A Trainer that nobody holds any more, and one that is left at exit, closes by itself: the thread that
        made it does that.
        """
        self._closing.detach()
        self._stack.__exit__(*sys.exc_info())  # after an error peers are not waited for as long

    def __enter__(self) -> Trainer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Weights and callbacks -----------------------------------------------------------------------

    def _together(self, what: str) -> None:
        """Before what all ranks do together: refuse it where they are left, or where one rank is alone."""
        if not self._closing.alive:
            raise ConfigError(
                f"{what} needs the ranks", "this Trainer is closed", hint="call it inside the with block"
            )
        self._callbacks.refuse_alone(what)

    def _need_labels(self, what: str) -> None:
        if not self._labelled:
            raise DataError(
                f"{what} needs labels (data.y)",
                "the data has none",
                hint="predict gives scores without labels",
            )

    def _check(self) -> None:
        """Before the first forward: compare with plain PyG on a sample."""
        if self._was_checked or not self.train.check:
            return
        with self.spans.phase("check"):
            goes = self.engine.goes if isinstance(self.engine, Engine) else None
            self._say_all(before_first(self.model, self.part, self.world, self.settings, goes))
        self._was_checked = True

    def _go_on(self) -> None:
        """Give the model the weights that training goes on with; those of all ranks must be the same."""
        last = self._last
        changed = last is None or not holds(self.model, self._best.weights or {})
        if not self._compare(changed, whole=self._is_whole) and last is not None:
            load_state(self.model, last)
        elif last is not None:
            self._say("the model's weights were changed since the last fit: training goes on with them")
        self._last = None

    def _compare(self, changed: bool, *, whole: bool) -> bool:
        """Whether weights were changed on some rank; all ranks must train by one rule, and the same ones."""
        rules = facts_of(self.optimizer, self.scheduler, self.aim.objective.trial)
        return compared(self.world, self.model, rules, changed, whole=whole)

    def _join_weights(self) -> None:
        """Give every rank the weights of all stages, unless it has them."""
        if not self._is_whole:
            self.engine.join_weights()

    def _tell_callbacks(self, record: EpochRecord) -> None:
        self.engine.join_weights()  # a callback may read the model: an average of weights, a norm
        if self._callbacks.tell("on_epoch_end", record):
            self.engine.ahead.anew()  # what was computed ahead of this was another model's

    # Epochs --------------------------------------------------------------------------------------

    def _one_epoch(self, epochs: int, stop: bool) -> bool:
        epoch = self.epoch = self.epoch + 1
        self.mesh.doing(f"epoch {epoch}")
        with self.costs.training():
            loss, stopped = self.engine.train(epoch, self.optimizer, stop=stop)
            last = epoch == epochs or stopped
            if evaluates := last or epoch % self.train.eval_every == 0:
                self.engine.crossing.settle()  # what it waits for late rows is this epoch's
        self._say_all(self.engine.take_notes())
        self.costs.end(epoch, loss, self.engine.take_uncoded())
        val = None
        if evaluates:
            out = None
            if not last:
                with self.costs.training():  # of the next epoch: its forward
                    out = self.engine.look_ahead(epoch + 1)
            with self.spans.phase("evaluate", epoch):
                found = self._scores(out)
            val = found["val"]
            self._best.see(epoch, val, self.model, higher=self.aim.metric.higher)
            self.costs.scored(found["train"], val, best_epoch=self._best.epoch)
        if self.scheduler is not None:
            learning.step_scheduler(self.scheduler, loss, val, higher=self.aim.metric.higher, seen=evaluates)
        return stopped

    def _ended(self, asked: list[int]) -> BaseException:
        """How the run ends that a signal to some rank has stopped; all ranks call it."""
        found: Any = self.world.gather_objects(asked[0] if asked else None, "how the run was stopped")
        return ended_by(next(number for number in found if number is not None), self.world.size)

    def _scores(self, out: Any = None) -> dict[str, float | None]:
        """The metric by split, with the weights as they are; ``out`` are their scores, if known."""
        out = self.engine.evaluate(self.epoch) if out is None else out
        inputs = self.engine.inputs
        masks, action = {s: inputs[f"{s}_mask"] for s in SPLITS}, f"evaluation, epoch {self.epoch}"
        target = self.aim.objective.target(inputs, slice(None))
        self.aim = self.aim.fitted(out, self._say)
        return self.aim.metric.scores(out, target, masks, self.channel, action)

    def _metric_name(self) -> str:
        return self.aim.metric.name

    # Checkpoints ----------------------------------------------------------------------------------

    def _save(self) -> None:
        if self.writer is None:
            return
        with (
            self.spans.phase("checkpoint", self.epoch),
            self.engine.joined(self.optimizer, self._best.weights),
        ):
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
                carried=self.engine.carried(self.epoch) if self.train.save_rows else None,
            )
        self._callbacks.tell("on_checkpoint", path)

    def _resume(self, where: str | Path) -> None:
        folder = checkpoint.latest(where)
        place, best, told = checkpoint.load(
            folder,
            self.world,
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            seed=self.train.seed,
            graph=graph_of(self.meta.fingerprint),
        )
        if self._default_optimizer:
            learning.set_rates(self.optimizer, self.train)
        with checkpoint.fitting(folder):
            said = self.engine.resumed(self.optimizer, told)
        self.epoch, self._best = place.epoch, Best.at(place, best)
        self.records = earlier_records(self.world, folder, place.epoch)
        self._say(
            f"resumed after epoch {place.epoch}, written by {place.world_size} ranks, in {folder}{said}"
        )

    def _finish(self, set_up: float) -> dict[str, Any]:
        with self.spans.phase("evaluate", self.epoch):
            found = self._scores()
        self._say_all(self.engine.sum_up())
        facts: dict[str, Any] = {
            "test_metric": found["test"],
            "val_metric": found["val"],
            "metric_name": self._metric_name(),
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
        memory = self.accounts.told(self._best.weights, AFTER_IMPORTS)
        values, spans = outcome(self.records, self.spans, memory, self.world, self.meta, facts)
        if self.writer is not None:
            scores = self.predict()
            target = original_order(self.engine.inputs["y"], self.part, self.channel, "labels")
            if target is not None and self.mesh.rank == 0:
                self.writer.finish(values, spans, scores, self.aim.metric.labels(scores), target, self.model)
        return values

    def _say_all(self, notes: tuple[str, ...]) -> None:
        for note in notes:
            self._say(note)

    def _say(self, note: str) -> None:
        _noted(self.notes, self.mesh.rank == 0 and self.settings.report.progress, note)


def _noted(notes: list[str], shown: bool, note: str) -> None:
    notes.append(note)
    if shown:
        warn(note)
