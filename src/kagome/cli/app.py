"""The command line: kagome train | predict | plan | check | partition | report | doctor.

Flags come from the same dataclasses as the API.

Where it sits: it reads flags and TOML into ``config.Run``, starts ranks if none are running, and calls
``train`` and the other packages. A user's mistake ends in one message and a non-zero exit code, never in a
traceback from Kagome's code.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

from kagome import config
from kagome.config import toml_io
from kagome.config.commands import (
    COMMANDS,
    CheckCommand,
    DoctorCommand,
    PartitionCommand,
    PlanCommand,
    PredictCommand,
    ReportCommand,
    TrainCommand,
)
from kagome.config.fields import path_of
from kagome.errors import CheckError, CheckpointError, ConfigError, KagomeError, shortened
from kagome.kernels.base.kept_code import missing
from kagome.launch.environment import environment
from kagome.launch.os_errors import end_with, in_words
from kagome.run_dir.claim import continues_run, refuse_taken

if TYPE_CHECKING:
    from torch import nn

    from kagome.comm.channel import Channel
    from kagome.graph.partition.sets_partition import Part
    from kagome.graph.partition.store import Meta
    from kagome.train.trainer import Trainer

DEFAULT_RANKS = 2
"""Number of local ranks of ``kagome train`` without any flags."""
MESH_FLAGS = ("--nproc", "--parallel.graph", "--parallel.pipe", "--parallel.tensor", "--parallel.plan")
"""Flags that make a resumed run be split anew."""
LOADED = ("kagome.train.preload",)
"""Modules that every rank of a training imports."""
AHEAD = ("kagome.cli.ahead",)
"""Programs that compile loops while ranks import torch."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command, and exit with its code."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help"):
        print(_usage())
        raise SystemExit(0 if args else 2)
    if args[0] == "--version":
        from kagome import __version__

        print(f"kagome {__version__}")
        return
    try:
        code = _run(args[0], args[1:])
    except KeyboardInterrupt:
        # 128 + SIGINT, as a shell reports a process that Ctrl-C ended.
        code = 130
    except Exception as error:
        found = in_words(error)
        # An unexpected error, a fault of Kagome, keeps its traceback.
        if found is None:
            raise
        code = _told(found)
    raise SystemExit(code)


def _told(error: KagomeError) -> int:
    """Print an error, and return the exit code for it."""
    # A value in the message may hold characters that the terminal cannot show.
    text = str(error).encode(sys.stderr.encoding or "utf-8", "backslashreplace").decode(errors="replace")
    print(f"kagome: error: {text}", file=sys.stderr)
    return 2 if isinstance(error, ConfigError) else 1


def _usage() -> str:
    rows = "\n".join(
        f"  kagome {name:<10}{str(kind.__doc__).splitlines()[0]}" for name, kind in COMMANDS.items()
    )
    return (
        "Kagome trains one graph neural network on one whole large graph across many ranks.\n\n"
        f"{rows}\n\nkagome COMMAND --help lists a command's flags."
    )


def _run(name: str, args: list[str]) -> int:
    if name not in COMMANDS:
        raise ConfigError(f"a command of {', '.join(COMMANDS)}", repr(name), hint="kagome --help")
    actions: dict[str, Callable[[list[str]], int]] = {
        "train": _train,
        "predict": _predict,
        "plan": _plan,
        "check": _check,
        "partition": _partition,
        "report": _report,
        "doctor": _doctor,
    }
    return actions[name](args)


LONGEST_WORD = 4_096
"""Most characters of one word of a command line; no path is longer."""


def _parse(kind: Any, args: list[str], name: str, default: Any = None) -> Any:
    for word in args:
        if len(word) > LONGEST_WORD:
            raise ConfigError(
                f"a flag and its value to have up to {LONGEST_WORD:,} characters each",
                f"one with {len(word):,}: {word[:60]}...",
            )
    # With a default, tyro shows and keeps the values of a file or of a resumed run.
    extra = {} if default is None else {"default": default}
    found = tyro.cli(kind, args=args, prog=f"kagome {name}", description=str(kind.__doc__), **extra)
    for flag, value in vars(found).items():  # config sections check their own values
        if isinstance(value, str):
            path_of(value, f"--{flag.replace('_', '-')}")
    return found


# train -------------------------------------------------------------------------------------------


def _train(args: list[str]) -> int:
    command = parse_train(args)
    settings = config.Run(
        **{name: getattr(command, name) for name in ("data", "model", "parallel", "train", "report")}
    )
    for name, low in (("nproc", 1), ("max_restarts", 0)):
        value = getattr(command, name)
        if value is not None and value < low:
            raise ConfigError(f"--{name.replace('_', '-')} to be a number from {low} up", f"{value}")
    resume = command.resume
    if resume is not None and not Path(resume).is_dir() and settings == config.Run():
        raise CheckpointError(
            "--resume to be the folder of a run, or one for a run that begins",
            f"no folder {resume}, and no settings that say what to train",
            hint="ls runs/",
        )
    # After a restart the folder holds this very run.
    if command.out is not None and environment().restarts == 0:
        refuse_taken(command.out, resume=resume, overwrite=command.overwrite)
    out = command.out or (None if resume is None else str(_run_folder(resume)))
    # Ranks run already (torchrun, Slurm, or our own launcher), and this is one of them.
    if environment().source != "single":
        return train_rank(settings, out, resume, command.overwrite)
    # The number of ranks: the flag, else that of the resumed run, else what the mesh asks for. Without any
    # flag two ranks show what Kagome does.
    nproc = command.nproc or _saved_ranks(settings, resume, args) or _ranks(settings)
    nproc = nproc or (1 if args else DEFAULT_RANKS)
    if settings.parallel.plan == "auto":
        from kagome.autoplan.plan import chosen
        from kagome.report.page.plan_page import write_plans

        settings, plans = chosen(settings, nproc, _builder(settings.model, settings.train))
        nproc = plans.fitting[0].ranks
        out = out or _new_folder(settings)
        Path(out).mkdir(parents=True, exist_ok=True)
        # Ranks get the settings of the plan; the folder keeps how they were chosen.
        (Path(out) / "plan.json").write_text(plans.to_json())
        write_plans(Path(out) / "plan.html", plans)
    settings.parallel.fit(nproc)
    # One rank needs no process of its own, unless it is to be started again after its death.
    if nproc == 1 and command.max_restarts == 0:
        return train_rank(settings, out, resume, command.overwrite)
    from kagome.launch.launcher import start_local

    start_local(
        nproc,
        train_rank,
        settings,
        out or _new_folder(settings),
        resume,
        command.overwrite,
        loaded=LOADED,
        # Next to nothing to ask, and a second process that imports numba is spared.
        beside=AHEAD if missing() else (),
        restarts=command.max_restarts,
    )
    return 0


def _checkpoint(folder: str | None) -> Path | None:
    """Return the newest checkpoint of a run; None if it has none.

    Raises:
        CheckpointError: If it has checkpoints, and the newest cannot be determined.
    """
    if folder is None or not Path(folder).is_dir():
        return None
    inside = Path(folder) / "checkpoints"
    place = inside if inside.is_dir() else Path(folder)
    names = ("latest", "epoch-*", "place.json")
    if not any(found for name in names for found in place.glob(name)):
        return None
    from kagome.checkpoint.files import latest

    return latest(folder)


def _saved_ranks(settings: config.Run, resume: str | None, args: list[str]) -> int | None:
    """Return the number of ranks of a resumed run whose split is unchanged; None if it is set elsewhere."""
    import json

    # As many ranks as the run had, so that it continues bit for bit, unless a flag or a file says otherwise.
    resumed = _resumed(args)
    if resume is None or resumed is None or any(word.startswith(MESH_FLAGS) for word in args):
        return None
    if settings.parallel != toml_io.from_toml(resumed, saved=True).parallel:
        return None
    try:
        found = _checkpoint(resume)
        return None if found is None else int(json.loads((found / "place.json").read_text())["world_size"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None  # loading the checkpoint reports the error


def _ranks(settings: config.Run) -> int | None:
    """Return the number of ranks that the mesh settings give; None if they leave it open."""
    parallel = settings.parallel
    if parallel.tensor > 1:
        return (parallel.graph or len(parallel.part_weights) or 1) * parallel.pipe * parallel.tensor
    # Weights say how many parts there are, and so does a saved partition; without them, ranks decide.
    parts = parallel.graph or len(parallel.part_weights) or _parts(settings.data.partition)
    return parts if parts is None and parallel.pipe == 1 else (parts or 1) * parallel.pipe


def _parts(folder: str | None) -> int | None:
    """Return the number of parts of a saved partition; None if there is none.

    It is also None if the partition is unreadable, which loading it reports.
    """
    import json

    if folder is None:
        return None
    try:
        return int(json.loads((Path(folder) / "partition.json").read_text())["num_parts"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _run_folder(resume: str) -> Path:
    """Return the run folder, given that folder, its checkpoints folder or one of the checkpoints."""
    folder = Path(resume)
    # RUN, RUN/checkpoints and RUN/checkpoints/epoch-10 all name the run RUN.
    above = list(folder.resolve().parents)[:2]
    names = [folder.resolve().name, *(found.name for found in above)]
    inside = names.index("checkpoints") if "checkpoints" in names[:2] else None
    return folder if inside is None else above[inside]


def parse_train(args: list[str]) -> TrainCommand:
    """Parse the flags of ``kagome train``.

    Flags override a TOML file, which overrides the settings of a resumed run, which override the defaults.

    Raises:
        ConfigError: If the file is missing or invalid.
    """
    run = config.Run()
    resumed = _resumed(args)
    if resumed is not None:
        run = toml_io.from_toml(resumed, saved=True)
        if environment().source != "single" or any(word.startswith(MESH_FLAGS) for word in args):
            # The split does not change what the run learns, so the ranks at hand decide it.
            run = replace(run, parallel=replace(run.parallel, graph=None))
    # The only positional argument. A value of a flag cannot come first.
    if args and not args[0].startswith("-"):
        run = toml_io.from_toml(args[0], over=run)
        args = args[1:]
    command: TrainCommand = _parse(TrainCommand, args, "train", _over(TrainCommand(), run))
    return command


def _resumed(args: list[str], flag: str = "--resume") -> Path | None:
    """Return the settings file of the run that a flag names; None if there is none."""
    # By hand, before tyro parses: the settings of that run are tyro's defaults.
    for place, word in enumerate(args):
        follows = word == flag and place + 1 < len(args)
        folder = args[place + 1] if follows else word.partition(f"{flag}=")[2]
        # --checkpoint may name a file of weights, whose folder may be a run's.
        folder = str(Path(folder).parent) if folder and Path(folder).is_file() else folder
        if folder and (_run_folder(folder) / "config.toml").exists():
            return _run_folder(folder) / "config.toml"
    return None


def _over(default: TrainCommand, run: config.Run) -> TrainCommand:
    return replace(
        default, data=run.data, model=run.model, parallel=run.parallel, train=run.train, report=run.report
    )


def _new_folder(settings: config.Run) -> str:
    """Create a new folder for this run, named after its data and model."""
    name = "".join(c if c.isalnum() else "-" for c in f"{settings.data.name}-{settings.model.name}")[:60]
    for number in range(1, 10_000):
        folder = Path("runs") / f"{name}-{number:03d}"
        try:
            # mkdir is atomic, so two runs that start at once get different folders.
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return str(folder)
    raise ConfigError("a new folder under runs/", "9999 of this name already", hint="--out DIR")


def train_rank(settings: config.Run, out: str | None, resume: str | None, overwrite: bool = False) -> int:
    """Run the work of each rank of ``kagome train``.

    Args:
        settings: The settings of the run.
        out: The folder of the run; None lets rank 0 choose one.
        resume: The run to resume; None to start a new one.
        overwrite: Whether a run that is already in the folder may be removed.

    Returns:
        The exit code.
    """
    from kagome.graph.prepare_process import standing_by
    from kagome.train.data import from_run
    from kagome.train.trainer import Trainer

    ranks = environment()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with(os.getppid(), signal.SIGTERM)  # torchelastic does not signal its ranks if it is killed
    # A restarted run continues in its own folder.
    folder = resume or (out if ranks.restarts else None)
    with standing_by(ranks) as standby:
        trainer = Trainer.from_settings(
            settings,
            partial(from_run, settings, standby=standby),
            _builder(settings.model, settings.train),
            # A function, because rank 0 alone makes the folder, once the ranks are connected.
            out=out or (lambda: _new_folder(settings)),
            overwrite=overwrite or _begins_again(folder, out),
        )
    with trainer:
        values = trainer.fit(resume=_goes_on(trainer, folder))
        if trainer.mesh.rank == 0 and trainer.writer is not None:
            from kagome.report.summary import print_summary

            page = trainer.writer.folder / "report.html"
            print_summary(values, page if settings.report.page else None)
    return 0


def _begins_again(folder: str | None, out: str | None) -> bool:
    """Return whether a run that ended before its first checkpoint may be overwritten."""
    # A folder with a checkpoint is continued, whatever is returned here. Without checkpoint and summary its
    # files are those of a run that died early.
    if folder is None or out is None or not continues_run(Path(out), folder):
        return False
    return not (Path(out) / "summary.json").exists()


def _goes_on(trainer: Trainer, folder: str | None) -> str | None:
    """Return the folder to resume from; None if it has no checkpoint yet, so that a new run begins."""
    if folder is None:
        return None
    # Rank 0 decides for all, since other hosts may not see the folder yet, or at all.
    from kagome.components.rank_zero import by_first

    if by_first(trainer.world, lambda: _checkpoint(folder) is not None, "look for a checkpoint"):
        return folder
    if trainer.mesh.rank == 0:
        print(f"kagome: {folder} has no checkpoint yet: a new run begins", file=sys.stderr)
    return None


# predict -----------------------------------------------------------------------------------------


def _predict(args: list[str]) -> int:
    command = _parse_predict(args)
    sections = ("data", "model", "parallel", "train", "report")
    settings = config.Run(**{name: getattr(command, name) for name in sections})
    if command.nproc is not None and command.nproc < 1:
        raise ConfigError("--nproc to be a number from 1 up", f"{command.nproc}")
    out = Path(command.out)
    # Before any data is loaded, because scoring a large graph and then failing to write is a waste of hours.
    if out.suffix not in (".npz", ".npy") or out.is_dir() or not out.resolve().parent.is_dir():
        raise ConfigError("--out to be a .npz or .npy file in a folder that is there", repr(command.out))
    if not Path(command.checkpoint).exists():
        raise CheckpointError(
            "--checkpoint to be the folder of a run, a checkpoint, or a .safetensors file",
            f"no such file or folder: {command.checkpoint}",
            hint="ls runs/",
        )
    nproc = command.nproc or _ranks(settings) or 1
    if environment().source == "single" and nproc > 1:
        settings.parallel.fit(nproc)
        from kagome.launch.launcher import start_local

        start_local(nproc, predict_rank, settings, command.checkpoint, command.out, loaded=LOADED)
        return 0
    return predict_rank(settings, command.checkpoint, command.out)


def _parse_predict(args: list[str]) -> PredictCommand:
    """Parse the flags of ``kagome predict``, which override the settings of the run that has the weights."""
    run, found = config.Run(), _resumed(args, "--checkpoint")
    if found is not None:
        run = toml_io.from_toml(found, trains=False, saved=True)
        # The split does not change the scores, so ranks at hand decide the number of parts.
        free = replace(run.parallel, plan="manual", graph=None)
        words = any(word.startswith(MESH_FLAGS) for word in args) or environment().source != "single"
        run = replace(run, parallel=free if words else run.parallel)
    default = PredictCommand(
        checkpoint=tyro.MISSING,
        out=tyro.MISSING,
        data=run.data,
        model=run.model,
        parallel=run.parallel,
        train=run.train,
        report=run.report,
    )
    command: PredictCommand = _parse(PredictCommand, args, "predict", default)
    return command


def predict_rank(settings: config.Run, checkpoint: str, out: str) -> int:
    """Run the work of each rank of ``kagome predict``.

    Args:
        settings: The settings of the run and of the graph.
        checkpoint: The path of the weights.
        out: The file to write scores to.

    Returns:
        The exit code.
    """
    from kagome.checkpoint.saved_weights import columns_of, weights_at
    from kagome.graph.prepare_process import standing_by
    from kagome.run_dir.results import write_scores
    from kagome.train.data import from_run
    from kagome.train.trainer import Trainer

    def build(part: Part, meta: Meta, channel: Channel) -> nn.Module:
        def make(columns: int) -> nn.Module:
            return _builder(settings.model, settings.train, columns)(part, meta, channel)

        # The graph may have no labels, so the width of the output is read off the saved weights.
        return make(columns_of(weights_at(checkpoint), make) or meta.num_classes)

    with standing_by(environment()) as standby:
        trainer = Trainer.from_settings(settings, partial(from_run, settings, standby=standby), build)
    with trainer:
        trainer.load(checkpoint)
        scores = trainer.predict()
        if trainer.mesh.rank == 0:
            shape = write_scores(Path(out), scores)
            print(f"Scores: {out}   ({shape}, in the original order of vertices)")
    return 0


def _builder(
    settings: config.Model, train: config.Train, columns: int | None = None
) -> Callable[[Part, Meta, Channel], nn.Module]:
    """Return a function that makes the model; its output has ``columns``, or as many as the labels need."""

    def build(part: Part, meta: Meta, channel: Channel) -> nn.Module:
        from kagome.graph.partition.sets_partition import SetsPartition, scored_rows
        from kagome.model.zoo import build_model
        from kagome.objective.losses import objective_of
        from kagome.objective.optimizers import labels_that_count
        from kagome.train.data import degree_histogram

        scored = scored_rows(part)
        wide, labels, names = columns or 0, meta.labels, (tuple(scored.nodes), tuple(scored.shared))
        if columns is None and labels is not None:  # refuse invalid labels before they set the output's width
            labels = labels_that_count(labels, scored, train, channel)
            objective = objective_of(None, labels, train, meta.num_nodes, nodes=names[0], shared=names[1])
            wide = objective.outputs
        return build_model(
            settings,
            in_channels=meta.features,
            out_channels=wide,
            num_nodes=meta.num_nodes,
            # PNA scales by degrees of the whole graph; all ranks take part in counting them.
            degree_histogram=degree_histogram(scored, channel) if settings.name == "pna" else None,
            metadata=part.metadata if isinstance(part, SetsPartition) else None,
        )

    return build


# The others --------------------------------------------------------------------------------------


def _plan(args: list[str]) -> int:
    command: PlanCommand = _parse(PlanCommand, args, "plan")
    from kagome.autoplan.plan import planned

    found = planned(command, _builder(command.model, command.train))
    if command.json:
        print(found.to_json())
    else:
        from kagome.report.page.plan_page import write_plans
        from kagome.report.plan_table import print_plans

        print_plans(found)
        if command.page:
            print(f"page: {write_plans(command.page, found)}")
    return 0


def _check(args: list[str]) -> int:
    command: CheckCommand = _parse(CheckCommand, args, "check")
    from kagome.cli.check import checked

    run = config.Run(data=command.data, model=command.model, parallel=command.parallel, train=command.train)
    result, notes = checked(run, _builder(run.model, run.train), vertices=command.vertices)
    for row in result.rows:
        if command.all or row is result.first:
            print(f"{row.error:9.1e}  {row.kind:<9} {row.name}")
    for sentence in (result.text(), *notes):
        print(f"kagome check: {sentence}")
    try:
        result.raise_if_different()
    except CheckError as error:
        print(f"kagome: error: {error}", file=sys.stderr)
        return 1
    return 0


def _partition(args: list[str]) -> int:
    command: PartitionCommand = _parse(PartitionCommand, args, "partition")
    from kagome.graph.partition.covers import savings
    from kagome.train.data import prepare

    meta = prepare(
        command.data, method=command.method, seed=command.seed, parts=command.parts, folder=command.out
    )
    for note in meta.notes:
        print(f"kagome: {note}", file=sys.stderr)
    quality = meta.quality
    print(f"{'part':>4} {'vertices':>12} {'in-edges':>12} {'sent':>12} {'halo':>12} {'halo share':>10}")
    for part, vertices, edges, sent, halo, share in quality.table():
        print(f"{part:>4} {vertices:>12,} {edges:>12,} {sent:>12,} {halo:>12,} {share:>10.0%}")
    mean = "what its weight asks for" if quality.weights else "the mean"
    print(
        f"{quality.cut:.1%} of edges are cut; halo rows over vertices {quality.replication:.2f}; "
        f"fullest part over {mean}: vertices {quality.vertex_balance:.2f}, "
        f"in-edges {quality.edge_balance:.2f}; "
        f"most rows sent or read by a part, over the mean: {quality.row_balance:.2f}"
    )
    for sentence in (*savings(command.out, command.parts), *quality.advice):
        print(sentence)
    print(f"Parts: {command.out}   (kagome train --data.partition {command.out} --nproc {command.parts})")
    return 0


def _report(args: list[str]) -> int:
    command: ReportCommand = _parse(ReportCommand, args, "report")
    from kagome.report.page.page import report
    from kagome.report.summary import print_summary

    run, page = report(command.run)
    for fault in run.faults:
        print(f"kagome: {fault}", file=sys.stderr)
    try:
        # A provisional summary has figures that only look final.
        print_summary(run.summary if run.finished else {}, page)
    except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:
        print(
            f"kagome: summary.json holds what no run writes ({shortened(str(error), 200)})", file=sys.stderr
        )
        print(f"Report: {page}")
    return 0


def _doctor(args: list[str]) -> int:
    _parse(DoctorCommand, args, "doctor")
    from kagome.cli.doctor import examine

    return examine()


if __name__ == "__main__":
    main()
