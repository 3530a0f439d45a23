"""Checkpoints: weights, optimizer, the run's place; in torch's distributed format, replaced only when whole.

Where it sits: ``trainer`` saves and loads; nothing in a checkpoint depends on the number of ranks, but rows
that the same ranks may read again. Draws need no state of their own: they follow from the seed and the epoch.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.state_dict_saver import save as save_state
from torch.optim import Optimizer

from kagome.comm.channel import Channel
from kagome.errors import CheckpointError
from kagome.report.files import write_json, write_text
from kagome.run.carried import SECTION, UNREADABLE, Carried, Named, Told, reason

KEEP = 2
"""Whole checkpoints that stay; older ones are removed."""

REST = "rest.pt"
"""What is no tensor of a checkpoint: the scheduler, the optimizer's groups, what guards know."""


@dataclass(frozen=True)
class Place:
    """Where a run stands after an epoch.

    Args:
        epoch: Epochs done.
        seed: The run's seed.
        best_epoch: The epoch with the best validation metric, 0 before any.
        best_metric: That metric.
        waited: Epochs since then, up to the last evaluation.
        world_size: Ranks that wrote it; a resume may have others.
        fingerprint: Of graph, method, seed and parts.
    """

    epoch: int
    seed: int
    best_epoch: int
    best_metric: float | None
    waited: int
    world_size: int
    fingerprint: str


def save(
    folder: str | Path,
    place: Place,
    channel: Channel,
    *,
    model: nn.Module,
    optimizer: Optimizer,
    scheduler: Any = None,
    best: Mapping[str, Tensor] | None = None,
    carried: Carried | None = None,
) -> Path:
    """Write a checkpoint beside the last one, then make it the latest. All ranks call it.

    Args:
        folder: The run's ``checkpoints`` folder.
        place: Where the run stands.
        channel: All ranks.
        model: Weights and buffers.
        optimizer: Its state.
        scheduler: A learning rate scheduler with ``state_dict``, or None.
        best: The weights of the best epoch, if they are not the current ones.
        carried: What this rank's next epoch may read of the last one.

    Returns:
        The checkpoint's folder.

    Raises:
        CheckpointError: If it cannot be written; the last one is then untouched.
    """
    folder = Path(folder)
    name = f"epoch-{place.epoch:06d}"
    fresh, target = folder / f".{name}.new", folder / name
    state = _state(model, optimizer, best)
    if carried is not None:
        state[SECTION] = carried.tensors
    kept = channel.gather_objects(
        None if carried is None else carried.plain(), "what epochs hand on", [Named]
    )
    _agree(channel, _make_room(fresh) if channel.rank == 0 else "", target)
    fault = ""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            save_state(state, checkpoint_id=fresh, no_dist=not dist.is_initialized())
        if channel.rank == 0:
            rest = {
                "scheduler": None if scheduler is None else scheduler.state_dict(),
                **_plain_of(optimizer),
                "guards": {} if carried is None else carried.guards,
                "carried": [rank for rank in kept if rank is not None],
            }
            torch.save(rest, fresh / REST)
            write_json(fresh / "place.json", {**asdict(place), "best_saved": best is not None})
            shutil.rmtree(target, ignore_errors=True)
            fresh.rename(target)
            write_text(folder / "latest", name + "\n")
            _remove_others(folder, name)
    except Exception as error:  # a state that cannot be written ends all ranks, not one
        fault = f"it cannot be: {reason(error)}"
    _agree(channel, fault, target)
    return target


def _make_room(fresh: Path) -> str:
    try:
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
    except OSError as error:
        return f"it cannot be: {error}"
    return ""


def _agree(channel: Channel, fault: str, target: Path) -> None:
    """Every rank raises what any of them met: none goes on to wait for another that has given up."""
    faults = [found for found in channel.gather_objects(fault, "checkpoint") if found]
    if faults:
        raise CheckpointError(
            f"a checkpoint was to be written to {target}",
            str(faults[0]),
            hint="free some disk; a scheduler's state must be what pickle takes",
        )


def _remove_others(folder: Path, newest: str) -> None:
    """Keep the newest few; later epochs are of a course that was left (a fresh start, an older resume)."""
    found = sorted(path.name for path in folder.glob("epoch-*"))
    kept = [name for name in found if name <= newest][-KEEP:]
    for name in set(found) - set(kept):
        shutil.rmtree(folder / name, ignore_errors=True)


def latest(folder: str | Path) -> Path:
    """The newest whole checkpoint of a run.

    Args:
        folder: The run's folder, its ``checkpoints`` folder, or one checkpoint.

    Raises:
        CheckpointError: If there is none.
    """
    folder = Path(folder)
    if (folder / "place.json").exists():
        return folder
    place = folder / "checkpoints" if (folder / "checkpoints").is_dir() else folder
    pointer = place / "latest"
    named = place / pointer.read_text().strip() if pointer.exists() else None
    if named is None or not (named / "place.json").exists():
        whole = [path.parent for path in sorted(place.glob("epoch-*/place.json"))]
        if not whole:
            raise CheckpointError(
                f"a checkpoint was expected in {folder}",
                "there is no whole one",
                hint="kagome train --out DIR writes them to DIR/checkpoints",
            )
        named = whole[-1]
    return named


def load(
    folder: str | Path,
    *,
    model: nn.Module,
    optimizer: Optimizer,
    scheduler: Any = None,
    seed: int | None = None,
) -> tuple[Place, dict[str, Tensor] | None, Told]:
    """Read a checkpoint into a model and an optimizer, on any number of ranks. All ranks call it.

    Args:
        folder: What :func:`latest` gave.
        model: Of the same shapes.
        optimizer: Of the same kind.
        scheduler: The scheduler, if the run has one.
        seed: The run's seed: draws follow from it; None takes any.

    Returns:
        Where the run stood, the weights of its best epoch, and what its last epoch handed on.

    Raises:
        CheckpointError: If it is damaged, of another model or of another seed.
    """
    folder = Path(folder)
    try:
        facts = json.loads((folder / "place.json").read_text())
        has_best = facts.pop("best_saved")
        place = Place(**facts)
        _refuse_other_seed(seed, place, folder)  # while the model is as it was
        kept = torch.load(folder / REST, weights_only=False)
        state = _state(model, None, model.state_dict() if has_best else None)
        state["optimizer"] = _room_for_optimizer(folder)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            load_state(state, checkpoint_id=folder, no_dist=not dist.is_initialized())
        model.load_state_dict(state["model"])
        _give_optimizer(optimizer, state["optimizer"], kept)
        if scheduler is not None and kept["scheduler"] is not None:
            scheduler.load_state_dict(kept["scheduler"])
    except UNREADABLE as error:
        raise CheckpointError(
            f"a checkpoint of this model was expected in {folder}",
            f"it cannot be read: {reason(error)}",
            hint="the same --model settings as the run that wrote it",
        ) from None
    told = Told(folder, place.epoch, kept.get("guards", {}), kept.get("carried", []))
    return place, dict(state["best"]) if has_best else None, told


def _refuse_other_seed(seed: int | None, place: Place, folder: Path) -> None:
    if seed not in (None, place.seed):
        raise CheckpointError(
            f"a run with seed {seed} was to go on",
            f"the checkpoint has seed {place.seed}",
            where=str(folder),
            hint=f"--train.seed {place.seed}",
        )


def _state(
    model: nn.Module, optimizer: Optimizer | None, best: Mapping[str, Tensor] | None
) -> dict[str, Any]:
    state: dict[str, Any] = {"model": {name: value.clone() for name, value in model.state_dict().items()}}
    if optimizer is not None:
        tensors = optimizer.state_dict()["state"]
        state["optimizer"] = {
            f"{index}/{key}": value.detach().clone()
            for index, values in tensors.items()
            for key, value in values.items()
            if isinstance(value, Tensor)
        }
    if best is not None:
        state["best"] = {name: value.clone() for name, value in best.items()}
    return state


# The optimizer: a parameter that never had a gradient has no state, and gets none here. (torch's own
# get_optimizer_state_dict makes some by a step on zeros, so that it asks for more than was saved.)


def _plain_of(optimizer: Optimizer) -> dict[str, Any]:
    """All of an optimizer's state that is no tensor."""
    state = optimizer.state_dict()
    plain = {
        index: {key: value for key, value in values.items() if not isinstance(value, Tensor)}
        for index, values in state["state"].items()
    }
    return {"groups": state["param_groups"], "state": plain}


def _room_for_optimizer(folder: Path) -> dict[str, Tensor]:
    found = FileSystemReader(folder).read_metadata().state_dict_metadata
    return {
        name.removeprefix("optimizer."): torch.empty(facts.size, dtype=facts.properties.dtype)
        for name, facts in found.items()
        if name.startswith("optimizer.") and isinstance(facts, TensorStorageMetadata)
    }


def _give_optimizer(optimizer: Optimizer, tensors: Mapping[str, Tensor], kept: Mapping[str, Any]) -> None:
    state: dict[int, dict[str, Any]] = {index: dict(values) for index, values in kept["state"].items()}
    for name, value in tensors.items():
        index, _, key = name.partition("/")
        state.setdefault(int(index), {})[key] = value
    optimizer.load_state_dict({"state": state, "param_groups": kept["groups"]})
