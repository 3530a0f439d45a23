"""Saved: checkpoints and partitions, altered in bytes, facts and tensors, with right checksums or wrong."""

from __future__ import annotations

import json
import math
import random
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kagome.storage import sealed_files

from .harness import Case, alter_plain, alter_text, command, hostile
from .kind_flags import SMALL

RUNS = {
    "plain": (),
    "sage": ("--train.weight-decay", "0.01", "--model.name", "sage"),
    "history": ("--parallel.chunks", "2", "--parallel.cross-chunk", "history"),
}
"""Runs of four epochs with a checkpoint every second."""
EPOCHS = 6
HOSTILE_IDS = (-1, -(2**40), 0, 1, 59, 60, 10**6, 2**40, 2**62)


@dataclass(frozen=True)
class Given:
    """What a case is run on.

    Args:
        base: The valid input's name.
        folder: The altered one.
        sealed: Whether its checksums are right.
        trains: Whether it is trained with; it is only read otherwise, which costs a tenth.
    """

    base: str
    folder: Path
    sealed_files: bool
    trains: bool = True


def kagome(words: tuple[str, ...], cwd: Path) -> None:
    """Run a command in a process of its own."""
    line = [sys.executable, "-m", "kagome", *words]
    subprocess.run(line, check=True, capture_output=True, cwd=cwd)


def alter_bytes(rng: random.Random, file: Path) -> str:
    """Alter a file as disks and copies do."""
    ways = ("flip", "cut", "grow", "zeros", "empty", "gone", "folder", "binary")
    way = rng.choices(ways, (10, 3, 1, 2, 1, 1, 1, 1))[0]
    held = bytearray(file.read_bytes()) if file.is_file() else bytearray()
    at = rng.randrange(max(len(held), 1))
    if way == "flip" and held:
        held[at] ^= 1 << rng.randrange(8)
    elif way == "cut":
        del held[at:]
    elif way == "grow":
        held += rng.randbytes(50)
    elif way == "zeros":
        held[at : at + 64] = bytes(len(held[at : at + 64]))
    elif way == "binary":
        held = bytearray(rng.randbytes(500))
    elif way == "empty":
        held.clear()
    shutil.rmtree(file) if file.is_dir() else file.unlink(missing_ok=True)
    if way == "folder":
        file.mkdir()
    elif way != "gone":
        file.write_bytes(held)
    return f"{file.name}: {way} at {at}"


def alter_json(rng: random.Random, file: Path) -> str:
    """Alter a file of JSON as people do."""
    text = file.read_text(encoding="utf-8")
    if rng.random() < 0.2:
        altered = alter_text(rng, text)
        file.write_text(altered.text)
        return f"{file.name}: {altered.said[0]}"
    if rng.random() < 0.05:
        file.write_text("[" * 10_000 + "]" * 10_000)
        return f"{file.name}: lists nested 10,000 deep"
    value, said = alter_plain(rng, json.loads(text))
    file.write_text(json.dumps(value))
    return f"{file.name}: {said}"


def alter_tensor(rng: random.Random, tensor: Tensor) -> tuple[Tensor, str]:
    """Alter a tensor's values, shape or type."""
    way = rng.choice(
        ("value", "value", "values", "shorter", "longer", "turned", "type", "flat", "scalar", "order")
    )
    flat, count = tensor.clone().view(-1), tensor.numel()
    if way in ("value", "values") and count:
        places = torch.tensor([rng.randrange(count) for _ in range(1 if way == "value" else 5)])
        new: float | int = rng.choice(HOSTILE_IDS)
        if tensor.is_floating_point():
            new = rng.choice((math.nan, math.inf, 1e30, -1.0, 0.0))
        elif tensor.dtype == torch.bool:
            new = rng.choice((0, 1))
        flat[places] = new
        return flat.view(tensor.shape), f"{places.tolist()} is {new}"
    if way == "shorter" and tensor.dim() and tensor.size(0):
        return tensor[:-1].clone(), way
    if way == "longer" and tensor.dim() and tensor.size(0):
        return torch.cat([tensor, tensor[-1:]]), way
    if way == "turned" and tensor.dim() == 2:
        return tensor.t().contiguous(), way
    if way == "type":
        kind = rng.choice((torch.float64, torch.int32, torch.int64, torch.float16, torch.bool, torch.uint8))
        return tensor.to(kind), f"is {kind}"
    if way == "scalar":
        return torch.tensor(1.0), way
    if way == "order" and tensor.dim():
        return tensor.flip(0).clone(), way
    return tensor.reshape(-1).clone(), "flat"


def alter_tensors(rng: random.Random, file: Path) -> str:
    """Alter a file of tensors as a program does; it stays one."""
    found, text = sealed_files.read_tensors(file)
    tensors = {name: tensor.clone() for name, tensor in found.items()}
    name = rng.choice(sorted(tensors))
    way = rng.choices(("tensor", "remove", "rename", "double", "facts"), (12, 2, 1, 1, 5 if text else 0))[0]
    said = way
    if way == "tensor":
        tensors[name], said = alter_tensor(rng, tensors[name])
    elif way == "remove":
        del tensors[name]
    elif way == "rename":
        tensors[f"{name}{rng.choice(('2', '.x', '/1'))}"] = tensors.pop(name)
    elif way == "double":
        tensors[name] = tensors[rng.choice(sorted(tensors))].clone()
    else:
        value, said = alter_plain(rng, json.loads(text))
        text, name = json.dumps(value), "facts"
    file.unlink()
    sealed_files.write_tensors(file, tensors, text, sync=False)
    return f"{file.name}: {name} {said}"


def reseal(folder: Path, page: str) -> bool:
    """Make a page's checksums right, as one who edits on purpose would; False where it is no page."""
    try:
        facts = json.loads((folder / page).read_text())
        facts.pop(sealed_files.SEAL, None)
        if isinstance(facts.get("files"), dict):
            for name in facts["files"]:
                if (folder / name).is_file():
                    facts["files"][name] = list(vars(sealed_files._seal_of(folder / name)).values())
        sealed_files.write_page(folder / page, facts)
    except (OSError, ValueError, AttributeError, TypeError, RecursionError):
        return False
    return True


def alter(rng: random.Random, folder: Path, page: str) -> tuple[list[str], bool]:
    """Alter one or two files of a folder that has a page.

    Returns:
        What was altered, and whether the checksums are right.
    """
    said = []
    again = rng.random() < 0.6
    for _ in range(rng.choice((1, 1, 1, 2))):
        file = rng.choice(sorted(path for path in folder.iterdir() if path.is_file()) or [folder / page])
        way = rng.choices(("bytes", "content"), (1, 5) if again else (5, 2))[0]
        try:
            kind = alter_json if file.suffix == ".json" else alter_tensors
            said.append((alter_bytes if way == "bytes" else kind)(rng, file))
        except (ValueError, OSError, RecursionError):
            said.append(alter_bytes(rng, file))
    return said, again and reseal(folder, page)


class Checkpoint:
    """Runs that go on from an altered checkpoint."""

    name, seconds = "checkpoint", 60.0

    def prepare(self, shared: Path) -> None:
        """Train each of ``RUNS``, and let it go on as it is."""
        self._shared, self._expected = shared, {}
        for name, words in RUNS.items():
            line = ("--data.name", SMALL, *words, "--report.no-progress", "--report.no-page")
            kagome(("train", *line, "--train.epochs", "4", "--train.save-every", "2", "--out", name), shared)
            again = f"{name} again"
            kagome(("train", "--resume", name, "--train.epochs", str(EPOCHS), "--out", again), shared)
            self._expected[name] = losses(shared / again)

    def make(self, rng: random.Random, folder: Path) -> Case:
        """A run of which the newest checkpoint, or what names it, is altered."""
        name = rng.choice(list(RUNS))
        run = folder / "run"
        shutil.copytree(self._shared / name, run)
        newest = run / "checkpoints" / "epoch-000004"
        right = False
        if rng.random() < 0.1:
            pointer = run / "checkpoints" / "latest"
            if rng.random() < 0.5:
                pointer.write_text(str(hostile(rng)), errors="replace")
                said = [f"latest: {pointer.read_text(errors='replace')[:60]!r}"]
            else:
                said = [alter_bytes(rng, pointer)]
        elif rng.random() < 0.05:
            newest.rename(newest.with_name(rng.choice(("epoch-4", "epoch-000009", "epoch-x", "other"))))
            said = ["the newest has another name"]
        else:
            said, right = alter(rng, newest, "place.json")
        trains = rng.random() < 0.12
        what = f"{name}; {'; '.join(said)}; sealed {right}; {'trained' if trains else 'read'}"
        return Case(what, Given(name, run, right, trains), (run,))

    def run(self, case: Case) -> Any:
        """Go on, in another folder; or read all that a run that goes on would."""
        if not case.given.trains:
            return read(case.given.folder)
        words = ["train", "--resume", str(case.given.folder), "--train.epochs", str(EPOCHS), "--out", "again"]
        return command(words)

    def sane(self, case: Case, result: Any) -> str:
        """The run is the one that it would have been; finite, where the checkpoint was edited on purpose."""
        if not case.given.trains:
            valid = read(self._shared / case.given.base)
            differs = not case.given.sealed and not alike(result, valid)
            return "what was read is another than what was written" if differs else ""
        found = losses(Path("again"))
        if [epoch for epoch, _ in found][-1:] != [EPOCHS]:
            return f"it did epochs {[epoch for epoch, _ in found]}"
        if case.given.sealed:
            odd = [loss for _, loss in found if loss is None or not math.isfinite(loss)]
            return f"losses {found}" if odd and "nan" not in case.what and "inf" not in case.what else ""
        expected = self._expected[case.given.base]
        return "" if found == expected else f"losses {found}, and {expected} without the alteration"


def read(run: Path) -> Any:
    """All that a run reads of its newest checkpoint."""
    from kagome.checkpoint import checkpoint
    from kagome.checkpoint.epoch_state import RestoredRows
    from kagome.checkpoint.files import latest
    from kagome.comm.channel import Channel
    from kagome.config import toml_io
    from kagome.model.zoo import build_model
    from kagome.objective import optimizers

    settings, folder = toml_io.from_toml(run / "config.toml"), latest(run)
    model = build_model(settings.model, in_channels=6, out_channels=3, num_nodes=60)
    optimizer = optimizers.optimizer_of(model, settings, None)
    place, best, told = checkpoint.load(
        folder, Channel(None, "cpu"), model=model, optimizer=optimizer, seed=0
    )
    rows = []
    for rank in told.ranks:
        entries = {(kind, key): state for kind, key, state in rank["entries"]}
        recalled = RestoredRows(told.folder, told.epoch + 1, torch.device("cpu"), entries)
        rows += [(*entry, recalled.take(*entry, told.epoch + 1)) for entry in entries]
    return place, best, dict(told.controllers), rows, model.state_dict(), optimizer.state_dict()


def alike(one: Any, other: Any) -> bool:
    """Whether nested values are equal, tensors too."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    return bool(one == other)


def losses(run: Path) -> list[tuple[int, float]]:
    """Epochs and their losses."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [(record["epoch"], record["loss"]) for record in map(json.loads, lines)]


class Partitions:
    """Saved partitions: of one part, trained on; of three, read part by part."""

    name, seconds = "partition", 60.0

    def prepare(self, shared: Path) -> None:
        """Cut a graph into one part and into three."""
        self._shared = shared
        for parts in (1, 3):
            kagome(
                ("partition", "--data.name", SMALL, "--parts", str(parts), "--out", f"parts-{parts}"), shared
            )
        train = ("train", "--data.partition", "parts-1", "--train.epochs", "2", "--out", "run")
        kagome((*train, "--report.no-progress"), shared)
        self._expected = losses(shared / "run")

    def make(self, rng: random.Random, folder: Path) -> Case:
        """A partition of which a file or two are altered."""
        name = rng.choices(("parts-1", "parts-3"), (1, 5))[0]
        shutil.copytree(self._shared / name, folder / "parts")
        said, right = alter(rng, folder / "parts", "partition.json")
        what = f"{name}; {'; '.join(said)}; sealed {right}"
        return Case(what, Given(name, folder / "parts", right), (folder / "parts",))

    def run(self, case: Case) -> Any:
        """Train on the one part, or read the three."""
        from kagome.graph.partition.store import load_part

        if case.given.base == "parts-1":
            line = [
                "train",
                "--data.partition",
                str(case.given.folder),
                "--train.epochs",
                "2",
                "--out",
                "run",
            ]
            return command(line)
        return [load_part(case.given.folder, part) for part in range(3)]

    def sane(self, case: Case, result: Any) -> str:
        """The same numbers; where it was edited on purpose, finite ones and ids that lead somewhere."""
        if case.given.base == "parts-1":
            found = losses(Path("run"))
            if case.given.sealed:
                return "" if all(math.isfinite(loss) for _, loss in found) else f"losses {found}"
            return "" if found == self._expected else f"losses {found}, and {self._expected} on the valid one"
        from kagome.graph.partition.store import load_part

        for part, piece in enumerate(result):
            rows = torch.cat([piece.own, piece.halo])
            rows[piece.edge_index[0]], piece.own[piece.edge_index[1]], piece.own[piece.send]
            if not case.given.sealed:
                valid = load_part(self._shared / "parts-3", part)
                for name in ("own", "halo", "edge_index", "edge_ids", "send"):
                    if not torch.equal(getattr(piece, name), getattr(valid, name)):
                        return f"{name} of part {part} is another"
        return ""


KINDS = (Checkpoint(), Partitions())
