"""Run directory: the files of a run, each written by rank 0 as soon as its content is known.

Where it sits: ``train.trainer`` writes through it; ``report.page.page`` reads the folder.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_model
from torch import Tensor, nn

from kagome import config
from kagome.comm.channel import Channel
from kagome.components.rank_zero import by_first
from kagome.config import toml_io
from kagome.errors import KagomeError
from kagome.records.epoch import EpochRecord, JsonLines, read_records
from kagome.records.spans import Span
from kagome.report.progress import TensorBoard, warn
from kagome.run_dir.claim import Claim, continues_run, refuse_taken, remove_run, unwritable
from kagome.run_dir.results import arrays_of, as_array
from kagome.storage.atomic import draft, write_text


class RunWriter:
    """Writer of one run's folder, which rank 0 claims until the writer is closed. All ranks create one.

    Args:
        folder: The folder; it is created if it does not exist.
        settings: The settings, written to ``config.toml``.
        channel: The channel of all ranks. Only rank 0 writes, except for checkpoints.
        own: Text for ``config.toml`` in place of a loss and a metric that are functions, by name.
        overwrite: Whether another run in the folder may be removed.
        log: Called with a sentence to print.

    Raises:
        ConfigError: On all ranks, if the folder cannot be created, belongs to another run, or contains other
            files.
    """

    def __init__(
        self,
        folder: str | Path,
        settings: config.Run,
        channel: Channel,
        *,
        own: Mapping[str, str] | None = None,
        overwrite: bool = False,
        log: Callable[[str], None] = warn,
    ) -> None:
        self.folder, self.settings, self.channel, self.own = Path(folder), settings, channel, own
        self.writes, self.overwrite, self._log = channel.rank == 0, overwrite, log
        self.checkpoints = self.folder / "checkpoints"
        self._claim: Claim | None = None
        self._begun = False
        self._lines: JsonLines | None = None
        self._board: TensorBoard | None = None
        self._records: list[EpochRecord] = []
        # The folder is claimed when the Trainer is made, before it is known whether fit is called at all. Its
        # files are only written or removed in `begin`.
        self._together(self._take, "the run's folder")

    def _take(self) -> None:
        self._claim = Claim(self.folder)

    def _together(self, act: Callable[[], None], action: str) -> None:
        """Run a function on rank 0, and raise its error on every rank."""
        fault: KagomeError | None = None
        if self.writes:
            try:
                with self._worded():
                    act()
            except KagomeError as error:
                fault = error
        # Rank 0's fault is shared: if it raised alone, the other ranks would wait in their next collective.
        fault = cast("KagomeError | None", self.channel.gather_objects(fault, action)[0])
        if fault is not None:
            raise fault

    @contextmanager
    def _worded(self) -> Iterator[None]:
        """Wrap writes, so that a full disk or a similar fault becomes a ConfigError."""
        try:
            yield
        except (OSError, SafetensorError) as error:
            raise unwritable(self.folder, error) from None

    def begin(self, *, resume: str | Path | None) -> None:
        """Prepare the folder before the first epoch, without overwriting another run. All ranks call it.

        Args:
            resume: The folder or checkpoint that the run resumes from, or None.

        Raises:
            ConfigError: If the folder contains another run.
        """
        if self._begun:
            return

        def look() -> None:
            refuse_taken(self.folder, resume=resume, overwrite=self.overwrite)
            # With --overwrite another run is only removed here, when training begins: data, model or settings
            # that were refused before have left it untouched.
            if not continues_run(self.folder, resume):
                remove_run(self.folder)
            self._write_settings()

        self._together(look, "the run's folder")
        self._begun = True

    def _write_settings(self) -> None:
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        write_text(self.folder / "config.toml", toml_io.to_toml(self.settings, self.own))

    def open(self, before: Sequence[EpochRecord], *, after: int) -> None:
        """Begin ``metrics.jsonl``, or continue it after an epoch.

        Args:
            before: The known records of the epochs that are done.
            after: The last of these epochs; 0 begins the file.
        """
        if not self.writes:
            return
        with self._worded():
            self._records = list(before)
            if self._claim is not None and not self._claim.stands:
                self._make_again(after)
            self._lines = JsonLines(self.folder / "metrics.jsonl", before=before)
            if self.settings.report.tensorboard:
                self._board = TensorBoard(self.folder / "tensorboard", after=after or None)

    def record(self, record: EpochRecord) -> None:
        """Write the line of one epoch.

        Raises:
            ConfigError: If it cannot be written.
        """
        if self._lines is None:
            return
        with self._worded():
            # The folder may have been deleted since it was claimed, for example while a check or an epoch
            # ran.
            if self._claim is not None and not self._claim.stands:
                self._make_again(record.epoch - 1)
            self._records.append(record)
            self._lines.write(record)
            if self._board is not None:
                self._board.write(record)

    def _make_again(self, epoch: int) -> None:
        """Recreate a deleted folder from the known records, unless another run has taken its place."""
        self.close()
        self._take()
        self._write_settings()
        self._lines = JsonLines(self.folder / "metrics.jsonl", before=self._records)
        if self._board is not None:
            self._board = TensorBoard(self.folder / "tensorboard", after=epoch)
        self._log(
            f"the run's folder {self.folder} was deleted after epoch {epoch}: it is made again, "
            "without the checkpoints of earlier epochs"
        )

    def close(self) -> None:
        """Close the files and release the folder; a second call does nothing."""
        for stream in (self._lines, self._board, self._claim):
            if stream is not None:
                stream.close()

    def _predicted(self) -> dict[str, Any] | None:
        """Return the planner's prediction for this run.

        It is None if the planner did not choose the run's axes, or if its plan cannot be read.
        """
        path = self.folder / "plan.json"
        if not path.exists():
            return None
        # `fit` fills in the axes that the settings leave open, as the run itself did.
        cut = self.settings.parallel.fit(self.channel.size)
        try:
            plan = json.loads(path.read_text(encoding="utf-8"))["plans"][0]
            if any(getattr(cut, name) != value for name, value in plan["settings"].items()):
                return None  # a resumed run may have been split differently since
            sent = {str(kind): float(size) for kind, size in plan["bytes_per_epoch"].items()}
            return {
                "epoch_seconds": float(plan["epoch_seconds"]),
                "bytes_per_epoch": {**sent, "total": sum(sent.values())},
                "peak_memory_bytes": plan["memory_bytes"],
            }
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
            self._log(f"{path} is no plan, so that the summary has none: {type(error).__name__}")
            return None

    def finish(
        self,
        values: Mapping[str, Any],
        spans: Sequence[Sequence[Span]],
        scores: Any,
        label: Tensor | None,
        target: Tensor,
        model: nn.Module,
    ) -> None:
        """Write the files of a run's end: summary, predictions, weights, timeline, page.

        Args:
            values: The content of ``summary.json``.
            spans: One list of spans for each rank.
            scores: Scores of all vertices, in their original order: a tensor, or a nest of tensors and other
                results of forward.
            label: The predicted labels, if the scores stand for labels.
            target: The true labels.
            model: The model with the best epoch's weights, under the user's parameter names.

        Raises:
            ConfigError: If a file cannot be written.

        Shapes:
            ``scores [N, C]``, ``label [N]`` or ``[N, C]``, ``target [N, ...]``.
        """
        from kagome.report.chrome_trace import write_trace
        from kagome.report.summary import write_summary

        with self._worded():
            self.close()
            # The weights and predictions are written before summary.json, whose existence says that a run has
            # finished.
            given = arrays_of(scores)
            if label is not None:
                given["label"] = as_array(label)
            with draft(self.folder / "predictions.npz") as beside, beside.open("wb") as file:
                np.savez_compressed(file, target=as_array(target), **given)
            with draft(self.folder / "model.safetensors") as beside, torch.no_grad():
                save_model(model, str(beside))
            write_summary(self.folder / "summary.json", {**values, "predicted": self._predicted()})
            if self.settings.report.trace:
                write_trace(self.folder / "trace.json", spans)
            if self.settings.report.page:
                from kagome.report.page.page import write_page

                write_page(self.folder)


def earlier_records(channel: Channel, checkpoint: Path, epoch: int) -> list[EpochRecord]:
    """Return the available records of the epochs that led to a checkpoint. All ranks call it.

    Args:
        channel: The channel of all ranks.
        checkpoint: The checkpoint's folder.
        epoch: The last epoch that the checkpoint contains; later records belong to another run by now.

    Raises:
        ConfigError: If the folder's ``metrics.jsonl`` cannot be read.
    """
    # A checkpoint is RUN/checkpoints/epoch-N.
    path = checkpoint.resolve().parent.parent / "metrics.jsonl"

    def read() -> list[EpochRecord]:
        found = read_records(path) if path.is_file() else []
        return [record for record in found if record.epoch <= epoch]

    return by_first(channel, read, "earlier epochs", [EpochRecord])
