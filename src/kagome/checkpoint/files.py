"""Files of a checkpoint: its page with the position of the run, and which checkpoint is the newest.

Where it sits: ``checkpoint`` writes and reads the rest; ``saved_weights`` and the command line ask for the
newest.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final, get_type_hints

from kagome.comm.serialization import ObjectError, unpack
from kagome.config.fields import fits, path_of
from kagome.errors import CheckpointError
from kagome.storage import sealed_files
from kagome.storage.sealed_files import Seal, SealError

FORMAT: Final = 2
PAGE: Final = "place.json"
REST: Final = "rest.json"
LATEST: Final = "latest"
NAME: Final = re.compile(r"epoch-\d{6,12}")
ASIDE: Final = ".{}.old"


@dataclass(frozen=True)
class RunPosition:
    """The position of a run after an epoch.

    Args:
        epoch: Epochs done.
        seed: The run's seed.
        best_epoch: The epoch with the best validation metric, 0 before any.
        best_metric: The metric of the best epoch.
        waited: Epochs since then, up to the last evaluation.
        world_size: Ranks that wrote it; a resume may have others.
        graph: The graph's name by its content, however it was partitioned.
    """

    epoch: int
    seed: int
    best_epoch: int
    best_metric: float | None
    waited: int
    world_size: int
    graph: str


def latest(folder: str | Path) -> Path:
    """Return the newest checkpoint of a run.

    Args:
        folder: The run's folder, its ``checkpoints`` folder, or one checkpoint.

    Raises:
        CheckpointError: If there is none, or the file that names the newest is damaged.
    """
    folder = path_of(folder, "resume")
    if (folder / PAGE).exists():
        return folder
    place = folder / "checkpoints" if (folder / "checkpoints").is_dir() else folder
    pointer = place / LATEST
    # A run that ended between the rename of its checkpoint and the pointer, or a copied folder without it.
    if not pointer.exists():
        found = sorted((p.parent for p in place.glob(f"epoch-*/{PAGE}")), key=lambda p: number_of(p.name))
        if not found:
            raise CheckpointError(
                f"a checkpoint in {folder}",
                "none that is whole",
                hint="kagome train --out DIR writes them to DIR/checkpoints",
            )
        return found[-1]
    with suppress(OSError, ValueError):
        name = pointer.open("rb").read(100).decode("ascii").strip() if pointer.is_file() else ""
        if NAME.fullmatch(name):
            named, aside = place / name, aside_of(place / name)
            # A run that ended while it saved this epoch again, before the new one had the name.
            return aside if aside.is_dir() and not named.exists() else named
    raise CheckpointError(
        f"the name of the newest checkpoint in {pointer}",
        "something else",
        hint=offer(place, ""),
    )


def aside_of(folder: Path) -> Path:
    """Return where a checkpoint is kept while another of the same epoch takes its place."""
    return folder.with_name(ASIDE.format(folder.name))


def whole_ones(place: Path, but: str = "") -> list[str]:
    """Return the paths of the checkpoints that are undamaged, the newest first."""
    found = sorted((p for p in place.glob("epoch-*") if p.name != but), key=lambda p: -number_of(p.name))
    whole = []
    for folder in found:
        with suppress(SealError, CheckpointError, ValueError):
            for name, seal in read_page(folder)[1].items():
                sealed_files.verify(folder / name, seal)
            whole.append(str(folder))
    return whole


def offer(place: Path, but: str) -> str:
    """Return a hint for a damaged checkpoint: an older one by name."""
    whole = whole_ones(place, but)
    if not whole:
        return "there is no other whole checkpoint beside it: begin anew"
    return f"--resume {whole[0]}, which is whole"


def damaged(folder: Path, fault: str) -> CheckpointError:
    """Return the error for a checkpoint that is damaged."""
    return CheckpointError(
        f"a whole checkpoint in {folder}",
        f"a damaged one: {fault[:400]}",
        hint=offer(folder.parent, folder.name),
    )


def read_page(folder: Path) -> tuple[RunPosition, dict[str, Seal]]:
    """Read the page of a checkpoint.

    Raises:
        SealError: If it is damaged, or of another version.
    """
    facts = sealed_files.read_page(folder / PAGE)
    if facts.pop("format", None) != FORMAT:
        raise SealError(f"{PAGE} is of another version of Kagome; this one reads format {FORMAT}")
    files = sealed_files.seals_of(facts.pop("files", None))
    hints = get_type_hints(RunPosition)
    # A metric may be nan or inf, which JSON does not have: `pack` writes such a float as a dict.
    try:
        given = unpack({"dict": [[name, value] for name, value in facts.items()]}, [])
    except ObjectError as error:
        raise SealError(f"{PAGE} is damaged: {error}") from None
    if set(given) != {field.name for field in fields(RunPosition)}:
        raise SealError(f"{PAGE} is damaged: it has {', '.join(map(str, given))[:200]}")
    for name, value in given.items():
        if not fits(value, hints[name]) or (isinstance(value, int) and value < 0 and name != "seed"):
            raise SealError(f"{PAGE} is damaged: {name} is {str(value)[:40]!r}")
    # A folder that was renamed by hand to another epoch; other names are left to the user.
    if folder.name != f"epoch-{given['epoch']:06d}" and NAME.fullmatch(folder.name):
        raise SealError(f"{PAGE} is of epoch {given['epoch']}, and the folder is {folder.name}")
    return RunPosition(**given), files


def number_of(name: str) -> int:
    """Return the epoch of a checkpoint by its folder's name; -1 for another folder."""
    return int(name.removeprefix("epoch-")) if NAME.fullmatch(name) else -1


def reason_of(error: BaseException) -> str:
    """Return the reason of an error in one line."""
    strerror = getattr(error, "strerror", None)
    lines = str(strerror or error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
