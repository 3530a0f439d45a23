"""Pipeline: trains any module, cut into stages that form a DAG, batch by batch on all ranks.

Where it sits: it is ``kagome.pipeline``; every rank calls it with the same arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from kagome.comm.channel import Channel
from kagome.comm.mesh import open_mesh
from kagome.components.task import check_finite
from kagome.components.wrappers import as_written
from kagome.config import Parallel
from kagome.config.fields import check_kind
from kagome.errors import ConfigError, DataError, PlanError
from kagome.model.operators import autocast
from kagome.model.operators.graph import branches_of
from kagome.model.operators.probe import compare_halves
from kagome.model.operators.sample_dropout import Masks
from kagome.model.operators.samples import Batch, count_of, inputs_of
from kagome.model.weight_hooks import hooks_off, run_hooks
from kagome.objective.objective import Loss
from kagome.pipelining.dag.auto_plan import scheduled, searched
from kagome.pipelining.dag.checks import (
    agreed,
    check_forms,
    check_norms,
    check_target,
    common_zero,
    forms_of,
    lost,
    model_to_cut,
    rough_operators,
    take_state,
)
from kagome.pipelining.dag.replicas import ReplicaWeights
from kagome.pipelining.dag.same_batch import check_same
from kagome.pipelining.dag.sample_layout import SampleLayout
from kagome.pipelining.dag.sample_pass import SamplePass, forward_program, update_programs
from kagome.pipelining.dag.stage_run import DagStageCode, DagStageRun
from kagome.pipelining.foreign_weights import read_by_loss, refused, watch_hooks, watched
from kagome.planner.stages.default_plan import plan_of
from kagome.planner.stages.plan import StagePlan
from kagome.records.spans import Span, Spans
from kagome.report.page.stages_page import StageRow, write_stages
from kagome.schedule.actions import to_text
from kagome.storage.atomic import write_text

BatchNorm = Literal["refuse", "micro-batch"]
ScheduleName = Literal["auto", "kfkb", "zero-bubble"]


@as_written
def pipeline(
    model: nn.Module,
    sample_batch: Batch,
    *,
    loss: Loss,
    optimizer: Callable[[Any], Optimizer] | None = None,
    devices: int | None = None,
    plan: StagePlan | Path | str | None = None,
    batch: int | None = None,
    batch_norm: BatchNorm = "refuse",
    schedule: ScheduleName = "auto",
    seed: int = 0,
    channel: Channel | None = None,
) -> Pipeline:
    """Cut a module into stages that form a DAG, to be trained on all ranks; each rank calls this.

    Samples are independent: outputs, loss and gradients are those of plain training on one process.

    Args:
        model: The module, which is traced with torch.fx. Training starts from rank 0's weights. Wrappers by
            ``torch.compile`` and ``DistributedDataParallel`` are removed.
        sample_batch: A few samples or a batch, as forward takes them: a tensor, a tuple of tensors by
            position, or tensors by name. Samples lie along axis 0.
        loss: ``loss(out, target)`` returns a value for each sample (``reduction="none"``); training minimises
            the mean over the batch.
        optimizer: Makes the optimizer for a stage's weights; by default Adam with a learning rate of 0.001.
        devices: The number of ranks that must be present; by default any number will do.
        plan: A plan or its file. ``auto`` measures operators and links, and takes the plan that GraphPipe's
            search finds. The default is a chain of stages that take about the same time.
        batch: The number of samples in a batch; by default the plan's, else that of ``sample_batch``.
        batch_norm: ``refuse`` rejects batch norms. ``micro-batch`` lets each replica's share of a micro-batch
            have its own statistics, which differ from those of plain training.
        schedule: ``kfkb`` or ``zero-bubble``, in which the second half of each backward, the gradients of
            weights, fills gaps. ``auto`` is the plan's, and with ``plan="auto"`` the faster one by forecast.
        seed: The seed of dropout.
        channel: The channel between all ranks; by default the ranks that the environment names are joined,
            and ``close`` leaves them.

    Returns:
        This rank's end of the pipeline.

    Raises:
        DataError: If the sample does not fit the model.
        ModelError: If the model cannot be traced, if its traced steps compute other values than its forward,
            or if its samples depend on each other.
        PlanError: If the plan does not fit the model, the ranks or the batch.
        ScheduleError: If the micro-batch sizes of two stages do not fit each other.

    Cost:
        A few forwards and backwards of 4 samples, with ``auto`` of up to 64, and a broadcast of all weights
        from rank 0.

    Example:
        >>> import kagome
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        >>> x = torch.randn(16, 3)
        >>> with kagome.pipeline(model, x, loss=torch.nn.MSELoss(reduction="none")) as pipe:
        ...     losses = [pipe.step(x, x.sum(1, keepdim=True)) for _ in range(5)]
        >>> losses[-1] < losses[0]
        True
    """
    check_kind("channel", channel, Channel | None)
    wishes = PipelineOptions(
        loss, _adam if optimizer is None else optimizer, devices, plan, batch, batch_norm, schedule, seed
    )
    with ExitStack() as stack:
        world = channel or stack.enter_context(open_mesh(Parallel())).world
        # If this raises, leaving the block closes the mesh that was opened here. Afterwards the pipeline owns
        # it.
        pipe = Pipeline(model_to_cut(model), sample_batch, wishes, world)
        pipe._stack = stack.pop_all()
        return pipe


@dataclass(frozen=True)
class PipelineOptions:
    """The user's options for a pipeline besides the model; see :func:`pipeline`.

    Raises:
        ConfigError: If an option has the wrong type.
    """

    loss: Loss
    optimizer: Callable[[Any], Optimizer]
    devices: int | None
    plan: StagePlan | Path | str | None
    batch: int | None
    batch_norm: BatchNorm
    schedule: ScheduleName
    seed: int

    def __post_init__(self) -> None:
        if not callable(self.loss):
            raise ConfigError(
                "loss=... to be a callable, loss(out, target)",
                f"a {type(self.loss).__name__}",
                hint='loss=torch.nn.MSELoss(reduction="none")',
            )
        check_kind("plan", self.plan, StagePlan | Path | str | None)
        check_kind("batch", self.batch, int | None, least=1)
        check_kind("devices", self.devices, int | None)
        check_kind("batch_norm", self.batch_norm, BatchNorm)
        check_kind("schedule", self.schedule, ScheduleName)
        check_kind("seed", self.seed, int)
        if isinstance(self.optimizer, Optimizer) or not callable(self.optimizer):
            raise ConfigError(
                "optimizer=... to be a callable(params) -> Optimizer",
                f"a {type(self.optimizer).__name__}",
                hint="optimizer=lambda params: torch.optim.AdamW(params, lr=0.01)",
            )

    def check_devices(self, ranks: int) -> None:
        """Check that the number of ranks is the one that the user asked for.

        Raises:
            PlanError: If the numbers differ.
        """
        if self.devices is not None and self.devices != ranks:
            raise PlanError(
                f"as many ranks as devices={self.devices}",
                f"{ranks} ranks",
                hint=f"start {self.devices} ranks: torchrun --nproc-per-node {self.devices} ...",
            )


def _adam(weights: Iterable[Tensor]) -> Optimizer:
    return torch.optim.Adam(weights, lr=1e-3)


class Pipeline:
    """One rank's end of a pipeline; see :func:`pipeline`.

    Args:
        model: The module, without wrappers.
        sample_batch: A few samples or a batch.
        wishes: The user's options.
        channel: The channel between all ranks.

    Attributes:
        plan: The plan that is run.
        operators: The model's operators by the names that a plan uses, with their costs; the costs are rough
            unless a plan was searched for.
        program: The programs of all stages as text, one line for each stage.
        stage: The number of this rank's stage.
    """

    def __init__(
        self, model: nn.Module, sample_batch: Batch, wishes: PipelineOptions, channel: Channel
    ) -> None:
        wishes.check_devices(channel.size)
        self._stack = ExitStack()
        self.model, self.channel, self._loss = model.to(channel.device), channel, wishes.loss
        self._update = 0
        self._last_loss: float | None = None
        self._autocast = autocast.autocast_now(channel.device)
        inputs = self._moved(inputs_of(model, sample_batch))
        self._branches = branches_of(model, inputs, batch_norm=wishes.batch_norm)
        plan = wishes.plan
        if plan == "auto":
            samples = wishes.batch or count_of(inputs)
            self.operators, plan = searched(
                self.model, self._branches, inputs, channel, samples, wishes.schedule
            )
        else:
            self.operators = rough_operators(self.model, self._branches, inputs, channel)
        bound, count = self._branches.bound, count_of(inputs)
        chosen = plan_of(plan, self.operators, bound, channel.size, wishes.batch, count)
        self.plan = scheduled(agreed(chosen, channel), self.operators, channel, wishes.schedule)
        check_norms(model, self._branches, self.plan)
        graph = self._branches.graph
        # Samples must not depend on each other: the outputs of half a batch are compared with those of the
        # whole.
        compare_halves(model, graph, inputs, self.plan.batch, batch_norm=wishes.batch_norm)
        shape = self.plan.shape(self.operators)
        self._pieces = self._branches.pieces([stage.operators for stage in self.plan.stages])
        self._layout = SampleLayout.of(self.plan)
        self.stage, self._replica = self._layout.seat(channel.rank)
        programs = update_programs(self._branches, self._pieces, self.plan.programs(shape))
        self.program = to_text(programs)
        self._programs, self._program = programs, programs[self.stage]
        self._forms = forms_of(inputs)
        self._code = DagStageCode(
            model, self._branches, self._pieces[self.stage], Masks(wishes.seed, self._branches.places)
        )
        self._weights = ReplicaWeights(model, self._pieces, self._layout, channel)
        channel.open_routes(self._layout.routes(self._pieces) | self._weights.routes())
        # Before the optimizer is made, whose constructor may read the weights.
        self._weights.share_first()
        own = list(self._weights.mine.values())
        self.optimizer = wishes.optimizer(own) if own else None
        self._spans = Spans(most=100_000)
        self._spans.align(common_zero(channel))
        self._spans.measure(channel.device)

    # Public ----------------------------------------------------------------------------------------

    @as_written
    def step(self, batch: Batch, target: Tensor) -> float:
        """Do one synchronous update of all weights; gradients stay in the weights that this rank trains.

        Args:
            batch: A batch of the plan's size, the same on all ranks; each rank takes its own samples.
            target: The target that the loss compares the output with, samples along axis 0.

        Returns:
            The mean loss over the batch, before the update.

        Raises:
            DataError: If the batch has another size, its samples another shape, or ranks have other batches.
            ConfigError: If autocast has changed since the pipeline was made.
            ModelError: If the loss is not finite; weights then stay unchanged.
            CommError: If a peer was late or lost.
        """
        inputs = self._checked(batch)
        if count_of(inputs) != self.plan.batch:
            raise DataError(
                f"a batch of {self.plan.batch} samples, as in the plan",
                f"{count_of(inputs)}",
                hint="drop the last, shorter batch; evaluate and predict take any number",
            )
        check_target(target, self.plan.batch)
        target = target.to(self.channel.device)
        check_same(self.channel, (*inputs.values(), target), f"the batch of update {self._update + 1}")
        self._update += 1
        update = self._update
        self.model.train()
        # Of all weights, also those of other stages: a gradient that a user's code left there would be stale.
        self.model.zero_grad(set_to_none=True)
        total = torch.zeros((), dtype=torch.float64, device=self.channel.device)

        # Once, with the first real target.
        if update == 1:
            self._refuse_foreign(target)

        def lose(out: Tensor, samples: range) -> Tensor:
            # Divided by the whole batch, so that losses and gradients of micro-batches and replicas are
            # summed.
            return lost(self._loss, out, target[samples.start : samples.stop]) / self.plan.batch

        def done(stage_run: DagStageRun) -> None:
            if stage_run.loss is not None:
                total.add_(stage_run.loss.detach().double())

        current = SamplePass(self._code, self._layout, self._program, self.channel, self._spans)
        # Hooks on gradients would see the share of a micro-batch; `run_hooks` runs them on the sums.
        with hooks_off(self._weights.mine.values()):
            current.run(inputs, update, training=True, lose=lose, done=done)
        with self._spans.phase("weights", update):
            self._weights.sum_gradients(update)
            self._weights.average_buffers(update)
            found = self.channel.all_reduce(total, action=f"loss, update {update}", kind="other")
        # After the sum over all ranks, so that all of them raise.
        check_finite(float(found), update)
        self._last_loss = float(found)
        foreign = self._weights.foreign
        # In plain training hooks and the optimizer run outside autocast.
        with watched(foreign, "a hook of a weight", grads=True), autocast.without(self.channel.device):
            run_hooks(self._weights.mine.values())
        if self.optimizer is not None:
            watch_hooks(self.optimizer, foreign)
            alone = autocast.without(self.channel.device)
            with self._spans.phase("optimizer", update), watched(foreign, "the optimizer"), alone:
                self.optimizer.step()
        return self._last_loss

    @as_written
    def predict(self, batch: Batch) -> Tensor:
        """Return the model's output in evaluation mode, for any number of samples.

        Args:
            batch: A batch of any size, the same on all ranks.

        Returns:
            The output of all samples, on all ranks.

        Cost:
            A transfer of the output from the ranks that compute it to all others.
        """
        inputs = self._checked(batch)
        check_same(self.channel, inputs.values(), "a batch to predict")
        layout = self._layout.even(count_of(inputs))
        program = forward_program(self._pieces, layout.chunks(self.stage), self.stage)
        name, found = self._branches.graph.output, dict[int, Tensor]()
        fact = self._branches.facts[name]

        def done(stage_run: DagStageRun) -> None:
            if name in stage_run.outs and self._code.piece.output == name:
                found[stage_run.samples.start] = stage_run.outs[name]

        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        try:
            SamplePass(self._code, layout, program, self.channel, self._spans).run(
                inputs, self._update, training=False, done=done
            )
        finally:
            for module, training in modes:
                module.training = training
        # Ranks without output, and an empty batch, contribute zero rows to the gather.
        none = torch.zeros(fact.shape_of(0), dtype=fact.dtype, device=self.channel.device)
        own = torch.cat([none, *(found[start] for start in sorted(found))])
        parts = self.channel.gather_rows(own, action="predictions")
        assert parts is not None
        last = next(piece.number for piece in self._pieces if piece.output is not None)
        joined = torch.empty(fact.shape_of(layout.batch), dtype=fact.dtype, device=self.channel.device)
        for replica, rank in enumerate(layout.ranks(last)):
            # A replica's rows are gathered micro-batch by micro-batch; `rows` are their places in the batch.
            rows = [i for c in range(layout.chunks(last)) for i in layout.samples(last, c, replica)]
            joined[torch.tensor(rows, dtype=torch.int64, device=joined.device)] = parts[rank]
        return joined

    def evaluate(self, batch: Batch, target: Tensor) -> float:
        """Return the mean loss in evaluation mode, over any number of samples."""
        out = self.predict(batch)
        check_target(target, out.size(0))
        check_same(self.channel, [target], "a target to evaluate")
        with torch.no_grad():
            return float(lost(self._loss, out, target.to(out.device))) / out.size(0)

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict of the whole model, on all ranks. All ranks call it."""
        self._weights.join()
        return self.model.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state dict of the whole model. All ranks call it, each with one that fits; rank 0's counts.

        Raises:
            CheckpointError: If it does not fit the model.
        """
        take_state(self.model, state)
        self._weights.share_first()

    def gradients(self) -> dict[str, Tensor | None]:
        """Return the last update's gradients of the weights that this rank trains, by full name."""
        return {name: weight.grad for name, weight in self._weights.mine.items()}

    @property
    def spans(self) -> list[Span]:
        """Spans of this rank, one for each action (``1F0``), timed from a zero that a host's ranks share."""
        return self._spans.as_list()

    def all_spans(self) -> list[list[Span]]:
        """Return every rank's spans, for ``report.chrome_trace.write_trace``. All ranks call it."""
        return cast("list[list[Span]]", self.channel.gather_objects(self.spans, "spans", [Span]))

    def report(self, folder: Path | str) -> Path | None:
        """Write a report so far: ``report.html``, ``summary.json``, ``trace.json`` and ``plan.json``.

        All ranks call it; rank 0 writes.

        Args:
            folder: The folder to write to; it is created if it is missing.

        Returns:
            The path of the page on rank 0, None elsewhere.

        Cost:
            The spans of the first 20 and the last 50 updates, from all ranks to all.
        """
        mine = dict(self.channel.traffic.bytes)  # read before the report itself sends anything
        sent = cast("list[dict[str, int]]", self.channel.gather_objects(mine, "bytes by kind"))
        spans = self.all_spans()
        if self.channel.rank:
            return None
        shape, weights = self.plan.shape(self.operators), self.operators.by_name
        rows = [
            StageRow(
                stage.operators,
                stage.devices,
                stage.micro_batch,
                stage.k,
                shape.sources(number),
                sum(weights[name].weights for name in stage.operators),
            )
            for number, stage in enumerate(self.plan.stages)
        ]
        kinds = sorted({kind for each in sent for kind in each})
        facts = {
            "title": f"{type(self.model).__name__} in stages",
            "batch": self.plan.batch,
            "updates": self._update,
            "last_loss": self._last_loss,
            "schedule": self.plan.schedule,
            "why": self.plan.why,
            "bytes": {kind: sum(each.get(kind, 0) for each in sent) for kind in kinds},
        }
        write_text(Path(folder) / "plan.json", self.plan.to_json())
        return write_stages(folder, rows, self._programs, spans, facts)

    def close(self) -> None:
        """Leave the group of ranks, if the pipeline has joined it."""
        self._stack.close()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    # Inside ----------------------------------------------------------------------------------------

    def _refuse_foreign(self, target: Tensor) -> None:
        """Refuse a loss that reads weights of other stages than the last, by trying a made-up output."""
        fact, few = self._branches.facts[self._branches.graph.output], target[:4]
        out = torch.randn(fact.shape_of(few.size(0)), generator=torch.Generator().manual_seed(0))
        out = out.to(self.channel.device, fact.dtype).requires_grad_()
        read = read_by_loss(lambda: self._loss(out, few), self.model)
        last = next(piece.number for piece in self._pieces if piece.output is not None)
        ranks = set(self._layout.ranks(last))
        # A weight is up to date on the last stage's ranks only if all of them train it.
        if old := [name for name in read if not ranks <= set(self._weights.holders.get(name, ()))]:
            raise refused(old, "the loss")

    def _moved(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: value.to(self.channel.device) for name, value in inputs.items()}

    def _checked(self, batch: Batch) -> dict[str, Tensor]:
        inputs = self._moved(inputs_of(self.model, batch))
        check_forms(inputs, self._forms)
        autocast.begin(self.channel.device, self._autocast)
        return inputs
