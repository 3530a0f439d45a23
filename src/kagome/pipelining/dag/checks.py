"""Checks: all ranks have one plan, batches have one form, and a loss returns a value for each sample.

Where it sits: ``pipeline`` checks with them what a user passes in.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from copy import deepcopy
from typing import Any, cast

import torch
from torch import Tensor, nn

from kagome.comm.channel import Channel
from kagome.components.rank_zero import by_first
from kagome.components.wrappers import unwrapped
from kagome.errors import CheckpointError, ConfigError, DataError, KagomeError, ModelError, PlanError
from kagome.launch.os_errors import in_words
from kagome.model.operators.graph import Branches
from kagome.model.operators.samples import count_of
from kagome.objective.objective import Loss, row_sum
from kagome.planner.stages.operator_costs import OperatorGraph
from kagome.planner.stages.plan import StagePlan
from kagome.profile.operators import joint_norms, measured


def model_to_cut(model: nn.Module) -> nn.Module:
    """Return the module that a user wrote, without the wrappers around it.

    Raises:
        ModelError: If it is not a module, is compiled by TorchScript, or has no forward of its own.
    """
    if not isinstance(model, nn.Module):
        raise ModelError(
            "a torch.nn.Module, which a pipeline cuts",
            f"a {type(model).__name__}",
            hint="write it as the forward of a module",
        )
    model = unwrapped(model)
    if isinstance(model, torch.jit.ScriptModule):
        raise ModelError(
            "a module whose forward a pipeline can follow from layer to layer",
            f"a {type(model).__name__}, whose forward is compiled",
            hint="give the module that was scripted; scripted layers inside it are served",
        )
    # nn.Module's own `forward` only raises NotImplementedError.
    if getattr(model.forward, "__func__", None) is vars(nn.Module)["forward"]:
        raise ModelError(
            "a module whose forward a pipeline can follow from layer to layer",
            f"a {type(model).__name__} without a forward",
            hint="nn.Sequential, or a module of your own with a forward",
        )
    return model


Forms = Mapping[str, tuple[torch.Size, torch.dtype]]
"""For each input, the shape of a sample and its dtype."""


def forms_of(inputs: Mapping[str, Tensor]) -> Forms:
    """Return the shape and dtype of a sample of each input."""
    return {name: (value.shape[1:], value.dtype) for name, value in inputs.items()}


def check_forms(inputs: Mapping[str, Tensor], forms: Forms) -> None:
    """Check that samples have the forms of the sample batch, which the stages expect.

    Raises:
        DataError: If an input is missing, unknown, or of another shape or dtype.
    """
    for name in {**forms, **inputs}:
        if name not in forms:
            raise DataError(f"{', '.join(forms)}, as in the sample batch", f"{name!r} too")
        shape, dtype = forms[name]
        value = inputs.get(name)
        if value is None or value.shape[1:] != shape or value.dtype != dtype:
            raise DataError(
                f"samples of {name!r} to be {list(shape)} {dtype}, as in the sample batch",
                "none" if value is None else f"{list(value.shape[1:])} {value.dtype}",
                where=f"input {name!r}",
                hint="pad samples to one shape",
            )


def check_norms(model: nn.Module, branches: Branches, plan: StagePlan) -> None:
    """Check that each batch norm has at least two samples for its statistics.

    Raises:
        PlanError: If a replica with a batch norm computes one sample at a time.
    """
    joint = joint_norms(model, branches)
    for number, stage in enumerate(plan.stages):
        norm = next((joint[name] for name in stage.operators if name in joint), None)
        if norm is not None and stage.micro_batch // stage.devices < 2:
            raise too_few(norm, stage.micro_batch, stage.devices, f"stage {number}")


def too_few(norm: str, micro_batch: int, devices: int, where: str = "") -> PlanError:
    """Return the error for a batch norm that would see one sample."""
    return PlanError(
        'each replica to take 2 samples or more at a time with batch_norm="micro-batch"',
        f"1 for {norm!r}: micro-batches of {micro_batch} on {devices} devices",
        where=where,
        hint="a larger micro_batch in the plan, or a larger batch",
    )


def take_state(model: nn.Module, state: Any) -> None:
    """Load a whole state dict into a model; the model stays unchanged if it does not fit.

    Raises:
        CheckpointError: If it is not a state dict, or belongs to another model.

    Cost:
        A copy of the weights.
    """
    if not isinstance(state, Mapping):
        raise CheckpointError("a state dict, which holds weights by name", f"a {type(state).__name__}")
    # load_state_dict copies what fits before it raises, so the old values are needed to undo that.
    before = deepcopy(model.state_dict())
    try:
        model.load_state_dict(state)
    except Exception as error:
        model.load_state_dict(before)
        words = " ".join(str(error).split())
        raise in_words(error) or CheckpointError(
            "a state dict of this model", f"{type(error).__name__}: {words}"
        ) from error


def check_target(target: object, samples: int) -> None:
    """Check the target that a loss compares with the output.

    Raises:
        DataError: If it is not a tensor with a row for each sample, or the batch is empty.
    """
    if not isinstance(target, Tensor) or target.dim() == 0:
        got = f"a {type(target).__name__}" if not isinstance(target, Tensor) else "a tensor without axes"
        raise DataError("a target to be a tensor with samples along axis 0", got)
    if target.size(0) != samples or not samples:
        raise DataError(
            "a batch of one sample or more, and a target for each",
            f"{samples} samples and {target.size(0)} targets",
        )


def lost(loss: Loss, out: Tensor, target: Tensor) -> Tensor:
    """Return the sum of a loss over samples.

    Raises:
        ConfigError: If the loss does not return a value for each sample, or raises.
    """
    where = f"out {list(out.shape)}, target {list(target.shape)}"
    try:
        values = loss(out, target)
    except KagomeError:
        raise
    except Exception as error:
        words = (str(error).strip().splitlines() or [""])[0]
        raise in_words(error) or ConfigError(
            "loss(out, target) to be computed of the model's output and the target",
            f"{type(error).__name__}: {words[:300]}",
            where=where,
            hint="a target of the output's shape, or of class ids, as the loss takes it",
        ) from error
    if not isinstance(values, Tensor):
        raise ConfigError(
            "loss(out, target) to give a tensor with a value a sample",
            f"a {type(values).__name__}",
            where=where,
        )
    # Broadcasting of an output [N, 1] against a target [N] gives [N, N]: a silently wrong loss.
    more = values.dim() > 1 and values.numel() > max(out.numel(), target.numel())
    if values.dim() == 0 or values.size(0) != out.size(0) or more:
        raise ConfigError(
            f"loss(out, target) to give a value a sample: {out.size(0)}",
            f"the shape {list(values.shape)}",
            where=where,
            hint='reduction="none"; Kagome takes the mean over the batch',
        )
    return row_sum(values)


def agreed(plan: StagePlan, channel: Channel) -> StagePlan:
    """Return the plan after checking that all ranks have the same one.

    Raises:
        PlanError: If two ranks have different plans.
    """
    plans = channel.gather_objects(plan.to_json(), "plan")
    other = next((rank for rank, text in enumerate(plans) if text != plans[0]), None)
    if other is not None:
        raise PlanError(
            "one plan on all ranks",
            f"different ones on ranks 0 and {other}",
            where=f"rank {channel.rank}",
            hint="read it from one file on all ranks",
        )
    return plan


def common_zero(channel: Channel) -> float:
    """Return the clock value that spans count from; it is the same for all ranks of rank 0's host."""
    clocks = channel.gather_objects((socket.gethostname(), time.perf_counter()), "clocks")
    host, zero = cast("tuple[str, float]", clocks[0])
    mine, own = cast("tuple[str, float]", clocks[channel.rank])
    # perf_counter has no common zero on different hosts.
    return zero if host == mine else own


def rough_operators(
    model: nn.Module, branches: Branches, inputs: Mapping[str, Tensor], channel: Channel
) -> OperatorGraph:
    """Return the operators with their costs for a few samples, measured on rank 0 so that all plans agree."""

    def measure() -> str:
        return measured(model, branches, inputs, (min(4, count_of(inputs)),), repeats=1).to_json()

    return OperatorGraph.from_json(by_first(channel, measure, "operators"))
