"""Checkpoints: weights, optimizer, the run's place; plain data with checksums, replaced only when whole.

Where it sits: ``trainer`` saves and loads; nothing in a checkpoint depends on the number of ranks, but rows
that the same ranks may read again. Draws need no state of their own: they follow from the seed and the epoch.

::

    epoch-000007/rank-00000.safetensors    a share of the weights and of the optimizer; rows of this rank
                 rank-00001.safetensors    another one
                 rest.json                 what is no tensor: scheduler, groups of the optimizer, guards
                 place.json                where the run stands, and the checksums of the files above
    latest                                 the name of the newest
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final, get_type_hints

from torch import Tensor, nn
from torch.optim import Optimizer

from kagome import sealed
from kagome.comm.channel import Channel
from kagome.comm.objects import ObjectError, pack, unpack
from kagome.errors import CheckpointError, KagomeError
from kagome.kinds import fits, path_of
from kagome.model.state import load_state, state_of
from kagome.report.files import write_text
from kagome.run.carried import SECTION, Carried, Named, Told, checked
from kagome.sealed import Seal, SealError

KEEP: Final = 2
"""Whole checkpoints that stay; older ones are removed."""
FORMAT: Final = 2
PAGE: Final = "place.json"
REST: Final = "rest.json"
LATEST: Final = "latest"
_NAME: Final = re.compile(r"epoch-\d{6,12}")
_KEPT: Final = "rest"
"""Section of the tensors that lie somewhere in what is no tensor."""


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
        graph: Its name by its content, however it was cut.
    """

    epoch: int
    seed: int
    best_epoch: int
    best_metric: float | None
    waited: int
    world_size: int
    graph: str


# Writing -----------------------------------------------------------------------------------------


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
        model: Weights and buffers, the same on all ranks.
        optimizer: Its state, the same on all ranks.
        scheduler: A learning rate scheduler with ``state_dict``, or None.
        best: The weights of the best epoch, if they are not the current ones.
        carried: What this rank's next epoch may read of the last one.

    Returns:
        The checkpoint's folder.

    Raises:
        CheckpointError: If it cannot be written; the last one is then untouched.

    Cost:
        Each rank writes its share of what all have, and what it alone has.
    """
    folder = Path(folder)
    fresh, target = _places(folder, place.epoch)
    file = f"rank-{channel.rank:05d}.safetensors"
    _agree(channel, _make_room(fresh) if channel.rank == 0 else "", target)
    # Where hosts share no disk, what the first has is whole without the others' rows.
    writers = [rank for rank, sees in enumerate(channel.gather_objects(fresh.is_dir(), "disk")) if sees]
    writes = channel.rank in writers
    told = None if carried is None or not writes else carried.plain(file)
    kept = channel.gather_objects(told, "what epochs hand on", [Named])
    state: dict[str, Tensor] = {}
    fault, seal = "", None
    try:
        state = _state(model, optimizer, best)
        if writes:
            mine = {each: state[each] for each in _shares(state, len(writers))[writers.index(channel.rank)]}
            mine |= {} if carried is None else carried.tensors
            seal = sealed.write_tensors(fresh / file, mine)
    except Exception as error:  # a state that cannot be written ends all ranks, not one
        fault = _reason(error)
    seals: list[Any] = channel.gather_objects((fault, file, seal), "written", [Seal])
    fault = next((fault for fault, *_ in seals if fault), "")
    if channel.rank == 0:
        files = {file: seal for _, file, seal in seals if seal is not None}
        fault = fault or _publish(folder, place, state, files, optimizer, scheduler, carried, kept)
        if fault:
            shutil.rmtree(fresh, ignore_errors=True)  # room for others; the last whole one stays
    _agree(channel, fault, target)
    return target


def _publish(
    folder: Path,
    place: Place,
    state: Mapping[str, Tensor],
    files: dict[str, Seal],
    optimizer: Optimizer,
    scheduler: Any,
    carried: Carried | None,
    kept: list[Any],
) -> str:
    """Write what is no tensor, and make the checkpoint the latest; what went wrong, or nothing."""
    fresh, target = _places(folder, place.epoch)
    try:
        rest = {
            "scheduler": None if scheduler is None else _without_functions(scheduler.state_dict()),
            **_plain_of(optimizer),
            "forms": _forms(_under(state, "optimizer")),
            "guards": {} if carried is None else dict(carried.guards),
            "carried": [rank for rank in kept if rank is not None],
        }
        _finish(fresh, place, rest, files)
        shutil.rmtree(target, ignore_errors=True)
        fresh.rename(target)
        write_text(folder / LATEST, target.name + "\n")
        sealed.sync_folder(folder)
        _remove_others(folder, target.name)
    except Exception as error:
        return _reason(error)
    return ""


def _places(folder: Path, epoch: int) -> tuple[Path, Path]:
    """Where a checkpoint is written, and where it goes once it is whole."""
    name = f"epoch-{epoch:06d}"
    return folder / f".{name}.new", folder / name


def _make_room(fresh: Path) -> str:
    try:
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
    except OSError as error:
        return _reason(error)
    return ""


def _agree(channel: Channel, fault: str, target: Path) -> None:
    """Every rank raises what any of them met: none goes on to wait for another that has given up."""
    whole = _whole(target.parent)[:1] if fault else []
    told: list[Any] = channel.gather_objects((fault, whole), "checkpoint")
    met, last = next((each for each in told if each[0]), ("", []))
    if met:
        stays = f"; the last whole one is {last[0]}" if last else "; there is no whole one yet"
        raise CheckpointError(
            f"a checkpoint was to be written to {target}",
            f"it cannot be: {met}{stays}",
            hint="free some disk, then --resume; a scheduler's and an optimizer's state must be plain data",
        )


def _finish(fresh: Path, place: Place, rest: Mapping[str, Any], files: dict[str, Seal]) -> None:
    """Write what is no tensor, and the page that says what a whole checkpoint is."""
    tree, tensors = pack(rest, [Named])
    if tensors:
        held = {f"{_KEPT}.{number}": tensor for number, tensor in enumerate(tensors)}
        files[f"{_KEPT}.safetensors"] = sealed.write_tensors(fresh / f"{_KEPT}.safetensors", held)
    files[REST] = sealed.write_text(fresh / REST, json.dumps(tree, allow_nan=False))
    facts = {"format": FORMAT, **_as_json(place), "files": sealed.told_of(files)}
    sealed.write_page(fresh / PAGE, facts)
    sealed.sync_folder(fresh)


def _as_json(place: Place) -> dict[str, Any]:
    return {name: pack(value)[0] for name, value in asdict(place).items()}


def _shares(state: Mapping[str, Tensor], count: int) -> list[list[str]]:
    """Names of about as many bytes for each of some ranks; the same on all of them."""
    shares: list[list[str]] = [[] for _ in range(count)]
    sizes = [0] * count
    for name in sorted(state, key=lambda name: (-state[name].nbytes, name)):
        least = sizes.index(min(sizes))
        shares[least].append(name)
        sizes[least] += state[name].nbytes
    return shares


def _remove_others(folder: Path, newest: str) -> None:
    """Keep the newest few; later epochs are of a course that was left (a fresh start, an older resume)."""
    # What has another name is somebody's copy.
    found = sorted((path.name for path in folder.glob("epoch-*") if _NAME.fullmatch(path.name)), key=_number)
    kept = [name for name in found if _number(name) <= _number(newest)][-KEEP:]
    for name in set(found) - set(kept):
        shutil.rmtree(folder / name, ignore_errors=True)


def _number(name: str) -> int:
    return int(name.removeprefix("epoch-")) if _NAME.fullmatch(name) else -1


def _reason(error: BaseException) -> str:
    """What happened, in one line."""
    strerror = getattr(error, "strerror", None)
    lines = str(strerror or error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _state(model: nn.Module, optimizer: Optimizer, best: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    """All tensors that are the same on all ranks, by section and name."""
    state = {f"model.{name}": value for name, value in state_of(model).items()}
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
    """Type and shape of each tensor, by name."""
    return {name: (str(tensors[name].dtype), tuple(tensors[name].shape)) for name in sorted(tensors)}


def _without_functions(state: Any) -> Any:
    """A scheduler's state without functions: the run that goes on has its own, as torch's LambdaLR does it.

    Schedulers of several have a state each.
    """
    if not isinstance(state, dict):
        return state
    plain = {name: value for name, value in state.items() if not callable(value)}
    if isinstance(plain.get("_schedulers"), list):
        plain["_schedulers"] = [_without_functions(each) for each in plain["_schedulers"]]
    return plain


def refuse_unsavable(optimizer: Optimizer, scheduler: Any) -> None:
    """Refuse a scheduler or groups that no checkpoint could hold, before anything is trained.

    Raises:
        CheckpointError: Naming what is no plain data.
    """
    states = {"optimizer": _plain_of(optimizer)}
    if scheduler is not None:
        states["scheduler"] = _without_functions(scheduler.state_dict())
    for name, state in states.items():
        try:
            pack(state)
        except ObjectError as error:
            raise CheckpointError(
                f"a run with a folder saves its {name}",
                f"in the {name}'s state_dict {error}",
                hint="a state_dict of tensors, numbers, texts, lists and dicts; or out=None",
            ) from None


# The optimizer: a parameter that never had a gradient has no state, and gets none here. (torch's own
# get_optimizer_state_dict makes some by a step on zeros, so that it asks for more than was saved.)


def _plain_of(optimizer: Optimizer) -> dict[str, Any]:
    """All of an optimizer's state that is no tensor by itself."""
    state = optimizer.state_dict()
    plain = {
        index: {key: value for key, value in values.items() if not isinstance(value, Tensor)}
        for index, values in state["state"].items()
    }
    return {"kind": type(optimizer).__name__, "groups": state["param_groups"], "state": plain}


@contextmanager
def fitting(folder: Path) -> Iterator[None]:
    """Around what takes up again what a checkpoint's epochs handed on.

    Raises:
        CheckpointError: If it is nothing that this run could have handed on.
    """
    try:
        yield
    except KagomeError:
        raise
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RuntimeError) as error:
        raise CheckpointError(
            f"a run goes on with what the epochs of {folder} handed on",
            f"this run can make nothing of it: {type(error).__name__}: {_reason(error)}",
            hint=_offer(folder.parent, folder.name),
        ) from error


# Finding -----------------------------------------------------------------------------------------


def latest(folder: str | Path) -> Path:
    """The newest checkpoint of a run.

    Args:
        folder: The run's folder, its ``checkpoints`` folder, or one checkpoint.

    Raises:
        CheckpointError: If there is none, or the newest cannot be told or is not whole.
    """
    folder = path_of(folder, "resume")
    if (folder / PAGE).exists():
        return folder
    place = folder / "checkpoints" if (folder / "checkpoints").is_dir() else folder
    pointer = place / LATEST
    if not pointer.exists():
        found = sorted((p.parent for p in place.glob(f"epoch-*/{PAGE}")), key=lambda p: _number(p.name))
        if not found:
            raise CheckpointError(
                f"a checkpoint was expected in {folder}",
                "there is no whole one",
                hint="kagome train --out DIR writes them to DIR/checkpoints",
            )
        return found[-1]
    with suppress(OSError, ValueError):
        name = pointer.open("rb").read(100).decode("ascii").strip() if pointer.is_file() else ""
        if _NAME.fullmatch(name):
            return place / name
    raise CheckpointError(
        f"{pointer} holds the name of the newest checkpoint",
        "it holds something else",
        hint=_offer(place, ""),
    )


def _whole(place: Path, but: str = "") -> list[str]:
    """Checkpoints that are as they were written, the newest first, with their paths."""
    found = sorted((p for p in place.glob("epoch-*") if p.name != but), key=lambda p: -_number(p.name))
    whole = []
    for folder in found:
        with suppress(SealError, CheckpointError, ValueError):
            for name, seal in _page(folder)[1].items():
                sealed.verify(folder / name, seal)
            whole.append(str(folder))
    return whole


def _offer(place: Path, but: str) -> str:
    """What to try where a checkpoint is damaged: an older one by name."""
    whole = _whole(place, but)
    if not whole:
        return "there is no other whole checkpoint beside it: begin anew"
    return f"--resume {whole[0]}, which is whole"


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
) -> tuple[Place, dict[str, Tensor] | None, Told]:
    """Read a checkpoint into a model and an optimizer, on any number of ranks. All ranks call it.

    Nothing is changed unless all of it can be read and fits.

    Args:
        folder: What :func:`latest` gave.
        channel: All ranks.
        model: Of the same shapes.
        optimizer: Of the same kind.
        scheduler: The scheduler, if the run has one.
        seed: The run's seed: draws follow from it; None takes any.
        graph: The run's graph, by its content; None takes any.

    Returns:
        Where the run stood, the weights of its best epoch, and what its last epoch handed on.

    Raises:
        CheckpointError: If it is damaged, of another model, another seed or another graph.

    Cost:
        Each rank reads what all share, and verifies its share of the files.
    """
    folder = Path(folder)
    place, files = _verified(folder, channel)
    if seed not in (None, place.seed):
        raise CheckpointError(
            f"a run with seed {seed} was to go on",
            f"the checkpoint has seed {place.seed}",
            where=str(folder),
            hint=f"--train.seed {place.seed}",
        )
    if graph not in (None, place.graph):
        raise CheckpointError(
            f"a run on the graph {graph} was to go on",
            f"the checkpoint is of the graph {place.graph}: edges, features, labels or masks are others",
            where=str(folder),
            hint="the data that the run had; other data needs a new run, which may begin with its weights",
        )
    try:
        rest, sections = _read(folder, files)
        state: dict[int, dict[str, Any]] = {index: dict(values) for index, values in rest["state"].items()}
        for name, value in sections["optimizer"].items():
            index, _, key = name.partition("/")
            state.setdefault(int(index), {})[key] = value
        told = Told(folder, place.epoch, dict(rest["guards"]), [checked(r, files) for r in rest["carried"]])
        if _forms(sections["optimizer"]) != rest["forms"]:
            raise SealError("the optimizer's tensors are not those that it says")
        refused = misfit(model, sections["model"]) or misfit(model, sections["best"] or sections["model"])
        refused = refused or _other_optimizer(optimizer, rest["kind"], rest["groups"], state)
    except (SealError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(folder, f"{REST} does not fit: {type(error).__name__}: {_reason(error)}") from None
    if refused:
        raise CheckpointError(
            f"a checkpoint of this model was expected in {folder}",
            refused,
            hint="the same --model settings as the run that wrote it, the same optimizer",
        )
    _give(optimizer, scheduler, state, rest, folder)
    load_state(model, sections["model"])
    own = state_of(model)
    best = {name: value.to(own[name].device) for name, value in sections["best"].items()}
    return place, best or None, told


def best_weights(folder: str | Path) -> dict[str, Tensor]:
    """The weights of the best epoch that a checkpoint knows.

    Args:
        folder: What :func:`latest` gave.

    Raises:
        CheckpointError: If it is damaged.

    Cost:
        Reads and verifies all of its files but rows that are handed on.
    """
    folder = Path(folder)
    try:
        files = _page(folder)[1]
        for name, seal in files.items():
            sealed.verify(folder / name, seal)
        sections = _read(folder, files)[1]
    except (SealError, OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise _damaged(folder, _reason(error)) from None
    return sections["best"] or sections["model"]


def _give(optimizer: Optimizer, scheduler: Any, state: Any, rest: Mapping[str, Any], folder: Path) -> None:
    """Hand the optimizer and the scheduler what they had."""
    try:
        optimizer.load_state_dict({"state": state, "param_groups": rest["groups"]})
        if scheduler is not None and rest["scheduler"] is not None:
            scheduler.load_state_dict(rest["scheduler"])
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, IndexError) as error:
        raise CheckpointError(
            f"the optimizer and scheduler of the run in {folder} were expected",
            f"these do not take their state: {type(error).__name__}: {_reason(error)}",
            hint="the same optimizer and scheduler as the run that wrote it",
        ) from None


def _verified(folder: Path, channel: Channel) -> tuple[Place, dict[str, Seal]]:
    """The page of a checkpoint that is whole; each rank looks at some of its files."""
    fault, found = "", None
    try:
        found = _page(folder)
        for number, (name, seal) in enumerate(found[1].items()):
            if number % channel.size == channel.rank:
                sealed.verify(folder / name, seal)
    except SealError as error:
        fault = str(error)
    faults = [str(each) for each in channel.gather_objects(fault, "verify the checkpoint") if each]
    if faults:
        raise _damaged(folder, faults[0])
    assert found is not None
    return found


def _damaged(folder: Path, fault: str) -> CheckpointError:
    return CheckpointError(
        f"a whole checkpoint was expected in {folder}",
        f"it is damaged: {fault[:400]}",
        hint=_offer(folder.parent, folder.name),
    )


def _page(folder: Path) -> tuple[Place, dict[str, Seal]]:
    """Where the run stood by a checkpoint's page, and the checksums of its files.

    Raises:
        SealError: If it is damaged, or of another version.
    """
    facts = sealed.read_page(folder / PAGE)
    if facts.pop("format", None) != FORMAT:
        raise SealError(f"{PAGE} is of another version of Kagome; this one reads format {FORMAT}")
    files = sealed.seals_of(facts.pop("files", None))
    hints = get_type_hints(Place)
    try:
        given = unpack({"dict": [[name, value] for name, value in facts.items()]}, [])
    except ObjectError as error:
        raise SealError(f"{PAGE} is damaged: {error}") from None
    if set(given) != {field.name for field in fields(Place)}:
        raise SealError(f"{PAGE} is damaged: it has {', '.join(map(str, given))[:200]}")
    for name, value in given.items():
        if not fits(value, hints[name]) or (isinstance(value, int) and value < 0 and name != "seed"):
            raise SealError(f"{PAGE} is damaged: {name} is {str(value)[:40]!r}")
    if folder.name != f"epoch-{given['epoch']:06d}" and _NAME.fullmatch(folder.name):
        raise SealError(f"{PAGE} is of epoch {given['epoch']}, and the folder is {folder.name}")
    return Place(**given), files


def _read(folder: Path, files: Mapping[str, Seal]) -> tuple[Any, dict[str, dict[str, Tensor]]]:
    """What is no tensor, and the tensors that all ranks share, by section."""
    kept: list[Tensor] = []
    sections: dict[str, dict[str, Tensor]] = {"model": {}, "optimizer": {}, "best": {}}
    for name in files:
        if name == f"{_KEPT}.safetensors":
            held = sealed.read_tensors(folder / name)[0]
            kept = [held[f"{_KEPT}.{number}"] for number in range(len(held))]
        elif name.endswith(".safetensors"):
            shared = sealed.read_tensors(folder / name, but=SECTION)[0]
            for path, tensor in shared.items():
                section, _, short = path.partition(".")
                sections[section][short] = tensor.clone()  # memory of its own, not of the file
    rest = unpack(json.loads((folder / REST).read_text(encoding="utf-8")), kept, [Named])
    return rest, sections


def misfit(model: nn.Module, saved: Mapping[str, Tensor]) -> str:
    """How saved weights differ from a model's in names, shapes or types; empty where they do not."""
    own = state_of(model)
    for name in (*own, *saved):
        if name not in saved:
            return f"the model has {name}, which the checkpoint has not"
        if name not in own:
            return f"the checkpoint has {name}, which the model has not"
        one, other = saved[name], own[name]
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            return (
                f"it has {name} as {list(one.shape)} {one.dtype}, and the model as "
                f"{list(other.shape)} {other.dtype}"
            )
    return ""


def _other_optimizer(optimizer: Optimizer, kind: str, groups: list[Any], state: Mapping[int, Any]) -> str:
    """How a saved optimizer differs from this one in kind and groups; empty where it does not."""
    if type(optimizer).__name__ != kind:
        return f"it has the state of {kind}, and this run has {type(optimizer).__name__}"
    own = [len(group["params"]) for group in optimizer.param_groups]
    saved = [len(group["params"]) for group in groups]
    if own != saved:
        return f"its optimizer has groups of {saved} parameters, and this run's of {own}"
    if any(type(index) is not int or not 0 <= index < sum(own) for index in state):
        return f"its optimizer has the state of parameters {sorted(state)[-1:]}, and this run {sum(own)}"
    return ""
