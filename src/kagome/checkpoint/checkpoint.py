"""Checkpoints: weights, optimizer and position of a run; plain data with checksums, replaced when whole.

Where it sits: ``train.trainer`` saves and loads. Nothing in a checkpoint depends on the number of ranks,
except rows that the same ranks may read again. Random draws need no state of their own: they follow from the
seed and the epoch.

::

    epoch-000007/rank-00000.safetensors    a share of the weights and of the optimizer; rows of this rank
                 rank-00001.safetensors    another share
                 rest.json                 all but tensors: scheduler, groups of the optimizer, controllers
                 place.json                the position of the run, and the checksums of the files above
    latest                                 the name of the newest
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from torch import Tensor, nn
from torch.optim import Optimizer

from kagome.checkpoint.epoch_state import SECTION, EpochState, Named, RestoredState, checked
from kagome.checkpoint.files import (
    ASIDE,
    FORMAT,
    LATEST,
    NAME,
    PAGE,
    REST,
    RunPosition,
    aside_of,
    damaged,
    number_of,
    offer,
    read_page,
    reason_of,
    whole_ones,
)
from kagome.comm.channel import Channel
from kagome.comm.serialization import ObjectError, pack, unpack
from kagome.errors import CheckpointError, KagomeError
from kagome.model.state import load_state, state_of
from kagome.storage import sealed_files
from kagome.storage.atomic import write_text
from kagome.storage.sealed_files import Seal, SealError

KEEP: Final = 2
"""Whole checkpoints that are kept; older ones are removed."""
_KEPT: Final = "rest"
"""Section of the tensors inside the nested values of ``rest.json``."""


# Writing -----------------------------------------------------------------------------------------


def save(
    folder: str | Path,
    place: RunPosition,
    channel: Channel,
    *,
    model: nn.Module,
    optimizer: Optimizer,
    scheduler: Any = None,
    best: Mapping[str, Tensor] | None = None,
    epoch_state: EpochState | None = None,
) -> Path:
    """Write a checkpoint beside the last one, then make it the latest. All ranks call it.

    Args:
        folder: The run's ``checkpoints`` folder.
        place: The position of the run.
        channel: All ranks.
        model: Weights and buffers, the same on all ranks.
        optimizer: The optimizer, with the same state on all ranks.
        scheduler: A learning rate scheduler with ``state_dict``, or None.
        best: The weights of the best epoch, if they are not the current ones.
        epoch_state: The state of the last epoch that this rank's next epoch may read.

    Returns:
        The checkpoint's folder.

    Raises:
        CheckpointError: If it cannot be written; the last one is then untouched.

    Cost:
        Each rank writes its share of what all ranks have, and what it alone has.
    """
    folder = Path(folder)
    fresh, target = _places(folder, place.epoch)
    file = f"rank-{channel.rank:05d}.safetensors"
    _agree(channel, _make_room(fresh) if channel.rank == 0 else "", target)
    # Without a shared disk, the first host's checkpoint is whole but lacks the other hosts' rows.
    writers = [rank for rank, sees in enumerate(channel.gather_objects(fresh.is_dir(), "disk")) if sees]
    writes = channel.rank in writers
    # A rank that does not write has its rows in no file, so it names none.
    plain = None if epoch_state is None or not writes else epoch_state.plain(file)
    kept = channel.gather_objects(plain, "what epochs hand on", [Named])
    state: dict[str, Tensor] = {}
    fault, seal = "", None
    try:
        # Every rank has the whole state, so ranks need no message to divide the writing.
        state = _state(model, optimizer, best)
        if writes:
            mine = {each: state[each] for each in _shares(state, len(writers))[writers.index(channel.rank)]}
            mine |= {} if epoch_state is None else epoch_state.tensors
            seal = sealed_files.write_tensors(fresh / file, mine)
    except Exception as error:  # a state that cannot be written ends all ranks, not only this one
        fault = reason_of(error)
    seals: list[Any] = channel.gather_objects((fault, file, seal), "written", [Seal])
    fault = next((fault for fault, *_ in seals if fault), "")
    if channel.rank == 0:
        files = {file: seal for _, file, seal in seals if seal is not None}
        fault = fault or _publish(folder, place, state, files, optimizer, scheduler, epoch_state, kept)
        if fault:
            shutil.rmtree(fresh, ignore_errors=True)  # frees the disk; the last whole one stays
    _agree(channel, fault, target)
    return target


def _publish(
    folder: Path,
    place: RunPosition,
    state: Mapping[str, Tensor],
    files: dict[str, Seal],
    optimizer: Optimizer,
    scheduler: Any,
    epoch_state: EpochState | None,
    kept: list[Any],
) -> str:
    """Write all but the tensors, and make the checkpoint the latest; return the fault, or an empty text."""
    fresh, target = _places(folder, place.epoch)
    aside = aside_of(target)
    try:
        rest = {
            "scheduler": None if scheduler is None else _without_functions(scheduler.state_dict()),
            **_plain_of(optimizer),
            "forms": _forms(_under(state, "optimizer")),
            "guards": {} if epoch_state is None else dict(epoch_state.controllers),
            "carried": [rank for rank in kept if rank is not None],
        }
        _finish(fresh, place, rest, files)
        # Steps in the order in which a crash is harmless: the whole folder gets its name, then the pointer
        # moves to it, and only then are older checkpoints removed. A folder cannot replace another in one
        # step, so one of the same epoch is set aside, where `latest` finds it.
        if target.exists():
            shutil.rmtree(aside, ignore_errors=True)
            target.rename(aside)
        fresh.rename(target)
        write_text(folder / LATEST, target.name + "\n", sync=True)
        sealed_files.sync_folder(folder)
        _remove_others(folder, target.name)
    except Exception as error:
        if not target.exists():
            with suppress(OSError):
                aside.rename(target)
        return reason_of(error)
    return ""


def _places(folder: Path, epoch: int) -> tuple[Path, Path]:
    """Return where a checkpoint is written, and where it goes once it is whole."""
    name = f"epoch-{epoch:06d}"
    return folder / f".{name}.new", folder / name


def _make_room(fresh: Path) -> str:
    try:
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
    except OSError as error:
        return reason_of(error)
    return ""


def _agree(channel: Channel, fault: str, target: Path) -> None:
    """Raise an error on every rank if any has a fault, so that no rank waits for one that has given up."""
    whole = whole_ones(target.parent)[:1] if fault else []
    faults: list[Any] = channel.gather_objects((fault, whole), "checkpoint")
    met, last = next((each for each in faults if each[0]), ("", []))
    if met:
        stays = f"; the last whole one is {last[0]}" if last else "; there is no whole one yet"
        raise CheckpointError(
            f"a checkpoint to be written to {target}",
            f"{met}{stays}",
            hint="free some disk, then --resume; a scheduler's and an optimizer's state must be plain data",
        )


def _finish(fresh: Path, place: RunPosition, rest: Mapping[str, Any], files: dict[str, Seal]) -> None:
    """Write all but the tensors, and the page that says what a whole checkpoint is."""
    tree, tensors = pack(rest, [Named])
    if tensors:
        held = {f"{_KEPT}.{number}": tensor for number, tensor in enumerate(tensors)}
        files[f"{_KEPT}.safetensors"] = sealed_files.write_tensors(fresh / f"{_KEPT}.safetensors", held)
    files[REST] = sealed_files.write_text(fresh / REST, json.dumps(tree, allow_nan=False))
    facts = {"format": FORMAT, **_as_json(place), "files": sealed_files.told_of(files)}
    # The page is written last. It has the checksums of all other files, so a folder with a page is complete.
    sealed_files.write_page(fresh / PAGE, facts)
    sealed_files.sync_folder(fresh)


def _as_json(place: RunPosition) -> dict[str, Any]:
    return {name: pack(value)[0] for name, value in asdict(place).items()}


def _shares(state: Mapping[str, Tensor], count: int) -> list[list[str]]:
    """Divide names among some ranks so that bytes are about equal; the same on all of them."""
    shares: list[list[str]] = [[] for _ in range(count)]
    sizes = [0] * count
    # Largest first, each to the rank with the fewest bytes. Names decide ties, so all ranks divide alike.
    for name in sorted(state, key=lambda name: (-state[name].nbytes, name)):
        least = sizes.index(min(sizes))
        shares[least].append(name)
        sizes[least] += state[name].nbytes
    return shares


def _remove_others(folder: Path, newest: str) -> None:
    """Keep the newest few; remove later epochs of a course that was left (a fresh start, an older resume)."""
    # A folder of another name may be a user's copy.
    found = sorted((path.name for path in folder.glob("epoch-*") if NAME.fullmatch(path.name)), key=number_of)
    kept = [name for name in found if number_of(name) <= number_of(newest)][-KEEP:]
    for path in (*(folder / name for name in set(found) - set(kept)), *folder.glob(ASIDE.format("epoch-*"))):
        shutil.rmtree(path, ignore_errors=True)


def _state(model: nn.Module, optimizer: Optimizer, best: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    """Return all tensors that are the same on all ranks, by section and name."""
    state = {f"model.{name}": value for name, value in state_of(model).items()}
    # state_dict numbers parameters in the order of the groups, which is equal on all ranks.
    for index, values in optimizer.state_dict()["state"].items():
        found = {key: value for key, value in values.items() if isinstance(value, Tensor)}
        state.update({f"optimizer.{index}/{key}": value for key, value in found.items()})
    state.update({f"best.{name}": value for name, value in (best or {}).items()})
    odd = next((name for name, value in state.items() if not isinstance(value, Tensor)), None)
    if odd is not None:
        raise SealError(f"{odd} is a {type(state[odd]).__name__}, and no tensor")
    return state


def _under(state: Mapping[str, Tensor], section: str) -> dict[str, Tensor]:
    start = f"{section}."
    return {name.removeprefix(start): value for name, value in state.items() if name.startswith(start)}


def _forms(tensors: Mapping[str, Tensor]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the type and shape of each tensor, by name."""
    return {name: (str(tensors[name].dtype), tuple(tensors[name].shape)) for name in sorted(tensors)}


def _without_functions(state: Any) -> Any:
    """Return a scheduler's state without functions, which a resumed run has itself, as in torch's LambdaLR.

    A scheduler made of several has a state for each.
    """
    if not isinstance(state, dict):
        return state
    plain = {name: value for name, value in state.items() if not callable(value)}
    if isinstance(plain.get("_schedulers"), list):
        plain["_schedulers"] = [_without_functions(each) for each in plain["_schedulers"]]
    return plain


def refuse_unsavable(optimizer: Optimizer, scheduler: Any) -> None:
    """Refuse, before training, a scheduler or optimizer groups that no checkpoint could hold.

    Raises:
        CheckpointError: Naming the value that is not plain data.
    """
    states = {"optimizer": _plain_of(optimizer)}
    if scheduler is not None:
        states["scheduler"] = _without_functions(scheduler.state_dict())
    for name, state in states.items():
        try:
            pack(state)
        except ObjectError as error:
            raise CheckpointError(
                f"a run with a folder to save its {name}",
                f"{error} in the {name}'s state_dict",
                hint="a state_dict of tensors, numbers, texts, lists and dicts; or out=None",
            ) from None


# The optimizer: a parameter that never had a gradient has no state, and gets none here. (torch's own
# get_optimizer_state_dict makes some by a step on zeros, so that it asks for more than was saved.)


def _plain_of(optimizer: Optimizer) -> dict[str, Any]:
    """Return all of an optimizer's state except the tensors."""
    state = optimizer.state_dict()
    plain = {
        index: {key: value for key, value in values.items() if not isinstance(value, Tensor)}
        for index, values in state["state"].items()
    }
    return {"kind": type(optimizer).__name__, "groups": state["param_groups"], "state": plain}


@contextmanager
def fitting(folder: Path) -> Iterator[None]:
    """Report an error in the block, which restores the state of a checkpoint's epoch, as a misfit.

    Raises:
        CheckpointError: If this run cannot use that state.
    """
    try:
        yield
    except KagomeError:
        raise
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RuntimeError) as error:
        raise CheckpointError(
            f"a run that can go on with what the epochs of {folder} handed on",
            f"{type(error).__name__}: {reason_of(error)}",
            hint=offer(folder.parent, folder.name),
        ) from error


# Reading -----------------------------------------------------------------------------------------


def load(
    folder: str | Path,
    channel: Channel,
    *,
    model: nn.Module,
    optimizer: Optimizer,
    scheduler: Any = None,
    seed: int | None = None,
    graph: str | None = None,
) -> tuple[RunPosition, dict[str, Tensor] | None, RestoredState]:
    """Read a checkpoint into a model and an optimizer, on any number of ranks. All ranks call it.

    Nothing is changed unless all of it can be read and fits.

    Args:
        folder: A checkpoint, as :func:`latest` returns it.
        channel: All ranks.
        model: A model of the same shapes.
        optimizer: An optimizer of the same class.
        scheduler: The scheduler, if the run has one.
        seed: The run's seed: draws follow from it; None allows any.
        graph: The run's graph, by its content; None allows any.

    Returns:
        The position of the run, the weights of its best epoch, and the state of its last epoch.

    Raises:
        CheckpointError: If it is damaged, of another model, another seed or another graph.

    Cost:
        Each rank reads what all share, and verifies its share of the files.
    """
    folder = Path(folder)
    place, files = _verified(folder, channel)
    _refuse_other_run(folder, place, seed, graph)
    # All is read and compared before anything is loaded, so an error leaves model and optimizer unchanged.
    try:
        rest, sections = _read(folder, files)
        state: dict[int, dict[str, Any]] = {index: dict(values) for index, values in rest["state"].items()}
        # Names are "index/key", as `_state` makes them.
        for name, value in sections["optimizer"].items():
            index, _, key = name.partition("/")
            state.setdefault(int(index), {})[key] = value
        restored = RestoredState(
            folder, place.epoch, dict(rest["guards"]), [checked(r, files) for r in rest["carried"]]
        )
        if _forms(sections["optimizer"]) != rest["forms"]:
            raise SealError("the optimizer's tensors are not those that it says")
        other = misfit(model, sections["model"]) or misfit(model, sections["best"] or sections["model"])
        other = other or _other_optimizer(optimizer, rest["kind"], rest["groups"], state)
    except (SealError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise damaged(folder, f"{REST} does not fit: {type(error).__name__}: {reason_of(error)}") from None
    if other:
        raise CheckpointError(
            f"a checkpoint of this model in {folder}",
            other,
            hint="the same --model settings as the run that wrote it, the same optimizer",
        )
    _give(optimizer, scheduler, state, rest, folder)
    load_state(model, sections["model"])
    own = state_of(model)
    best = {name: value.to(own[name].device) for name, value in sections["best"].items()}
    return place, best or None, restored


def _refuse_other_run(folder: Path, place: RunPosition, seed: int | None, graph: str | None) -> None:
    """Refuse a checkpoint of another seed or another graph; None takes any."""
    if seed not in (None, place.seed):
        raise CheckpointError(
            f"a checkpoint with seed {seed}, for this run to go on",
            f"seed {place.seed}",
            where=str(folder),
            hint=f"--train.seed {place.seed}",
        )
    if graph not in (None, place.graph):
        raise CheckpointError(
            f"a checkpoint of the graph {graph}, for this run to go on",
            f"one of the graph {place.graph}, with other edges, features, labels or masks",
            where=str(folder),
            hint="the data that the run had; other data needs a new run, which may begin with its weights",
        )


def best_weights(folder: str | Path) -> dict[str, Tensor]:
    """Return the weights of the best epoch that a checkpoint holds.

    Args:
        folder: A checkpoint, as :func:`latest` returns it.

    Raises:
        CheckpointError: If it is damaged.

    Cost:
        Reads all weights, and verifies all files.
    """
    folder = Path(folder)
    try:
        files = read_page(folder)[1]
        for name, seal in files.items():
            sealed_files.verify(folder / name, seal)
        sections = _read(folder, files)[1]
    except (SealError, OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise damaged(folder, reason_of(error)) from None
    return sections["best"] or sections["model"]


def _give(optimizer: Optimizer, scheduler: Any, state: Any, rest: Mapping[str, Any], folder: Path) -> None:
    """Load the saved state into the optimizer and the scheduler."""
    try:
        optimizer.load_state_dict({"state": state, "param_groups": rest["groups"]})
        if scheduler is not None and rest["scheduler"] is not None:
            scheduler.load_state_dict(rest["scheduler"])
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, IndexError) as error:
        raise CheckpointError(
            f"an optimizer and scheduler that take the state of the run in {folder}",
            f"{type(error).__name__}: {reason_of(error)}",
            hint="the same optimizer and scheduler as the run that wrote it",
        ) from None


def _verified(folder: Path, channel: Channel) -> tuple[RunPosition, dict[str, Seal]]:
    """Return the page of a checkpoint that is whole; each rank verifies some of its files."""
    fault, found = "", None
    try:
        found = read_page(folder)
        for number, (name, seal) in enumerate(found[1].items()):
            # Checksums are divided among the ranks; each rank then reads what it needs without checking
            # again.
            if number % channel.size == channel.rank:
                sealed_files.verify(folder / name, seal)
    except SealError as error:
        fault = str(error)
    faults = [str(each) for each in channel.gather_objects(fault, "verify the checkpoint") if each]
    if faults:
        raise damaged(folder, faults[0])
    assert found is not None
    return found


def _read(folder: Path, files: Mapping[str, Seal]) -> tuple[Any, dict[str, dict[str, Tensor]]]:
    """Return all but the tensors, and the tensors that all ranks share, by section."""
    kept: list[Tensor] = []
    sections: dict[str, dict[str, Tensor]] = {"model": {}, "optimizer": {}, "best": {}}
    for name in files:
        if name == f"{_KEPT}.safetensors":
            held = sealed_files.read_tensors(folder / name)[0]
            kept = [held[f"{_KEPT}.{number}"] for number in range(len(held))]
        elif name.endswith(".safetensors"):
            # SECTION holds rows of single ranks, which RestoredRows reads when they are asked for.
            shared = sealed_files.read_tensors(folder / name, but=SECTION)[0]
            for path, tensor in shared.items():
                section, _, short = path.partition(".")
                sections[section][short] = tensor.clone()  # memory of its own, not of the file
    rest = unpack(json.loads((folder / REST).read_text(encoding="utf-8")), kept, [Named])
    return rest, sections


def misfit(model: nn.Module, saved: Mapping[str, Tensor]) -> str:
    """Return how saved weights differ from a model's in names, shapes or types; empty if they do not."""
    own = state_of(model)
    for name in (*own, *saved):
        if name not in saved:
            return f"a checkpoint without {name}, which the model has"
        if name not in own:
            return f"a checkpoint with {name}, which the model does not have"
        one, other = saved[name], own[name]
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            return (
                f"{name} as {list(one.shape)} {one.dtype}, where the model has "
                f"{list(other.shape)} {other.dtype}"
            )
    return ""


def _other_optimizer(optimizer: Optimizer, kind: str, groups: list[Any], state: Mapping[int, Any]) -> str:
    """Return how a saved optimizer differs from this one in class and groups; empty if it does not."""
    if type(optimizer).__name__ != kind:
        return f"the state of {kind}, where this run has {type(optimizer).__name__}"
    own = [len(group["params"]) for group in optimizer.param_groups]
    saved = [len(group["params"]) for group in groups]
    if own != saved:
        return f"an optimizer with groups of {saved} parameters, where this run's has {own}"
    if any(type(index) is not int or not 0 <= index < sum(own) for index in state):
        return f"the optimizer's state of parameters {sorted(state)[-1:]}, where this run has {sum(own)}"
    return ""
