"""The run directory: each file of a run, written by rank 0 as soon as it is known.

Where it sits: ``trainer`` writes through it; ``report.page`` reads the folder again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_model
from torch import Tensor, nn

from kagome import config, written
from kagome.errors import ConfigError
from kagome.report.files import write_text
from kagome.report.meters import EpochRecord, JsonLines, read_records
from kagome.report.progress import TensorBoard
from kagome.report.spans import Span


class RunWriter:
    """One run's folder.

    Args:
        folder: Made if it is not there.
        settings: Written to ``config.toml``.
        rank: Only rank 0 writes, but for checkpoints.

    Raises:
        ConfigError: If the folder cannot be made.
    """

    def __init__(self, folder: str | Path, settings: config.Run, rank: int) -> None:
        self.folder, self.settings, self.writes = Path(folder), settings, rank == 0
        self.checkpoints = self.folder / "checkpoints"
        self._lines: JsonLines | None = None
        self._board: TensorBoard | None = None
        if self.writes:
            try:
                self.checkpoints.mkdir(parents=True, exist_ok=True)
                write_text(self.folder / "config.toml", written.to_toml(settings))
            except OSError as error:
                raise ConfigError(
                    f"the run's files go to {self.folder}",
                    f"it cannot be written: {error}",
                    hint="another --out",
                ) from None

    def open(self, *, after: int) -> list[EpochRecord]:
        """Begin ``metrics.jsonl``, or go on with it after an epoch.

        Returns:
            The records up to that epoch.
        """
        if not self.writes:
            return []
        path = self.folder / "metrics.jsonl"
        self._lines = JsonLines(path, after=after or None)
        if self.settings.report.tensorboard:
            self._board = TensorBoard(self.folder / "tensorboard", after=after or None)
        return read_records(path) if after else []

    def record(self, record: EpochRecord) -> None:
        """Write one epoch's line."""
        if self._lines is not None:
            self._lines.write(record)
        if self._board is not None:
            self._board.write(record)

    def close(self) -> None:
        """Close the files; closing twice does no harm."""
        for stream in (self._lines, self._board):
            if stream is not None:
                stream.close()

    def _predicted(self) -> dict[str, Any] | None:
        """What the planner said of this run, if it chose the cut."""
        path = self.folder / "plan.json"
        if not path.exists():
            return None
        plan = json.loads(path.read_text())["plans"][0]
        return {
            "epoch_seconds": plan["epoch_seconds"],
            "bytes_per_epoch": {**plan["bytes_per_epoch"], "total": sum(plan["bytes_per_epoch"].values())},
            "peak_memory_bytes": plan["memory_bytes"],
        }

    def finish(
        self,
        values: Mapping[str, Any],
        spans: Sequence[Sequence[Span]],
        scores: Tensor,
        target: Tensor,
        model: nn.Module,
    ) -> None:
        """Write what is known at the end: summary, predictions, weights, timeline, page.

        Args:
            values: What ``summary.json`` holds.
            spans: One list a rank.
            scores: Of all vertices, in their original order.
            target: Their true labels.
            model: With the best epoch's weights, under the user's own names.

        Shapes:
            ``scores [N, C]``, ``target [N]`` or ``[N, C]``.
        """
        from kagome.report.summary import write_summary
        from kagome.report.timeline import write_trace

        self.close()
        score = scores.detach().float().cpu()
        several = target.dim() > 1
        single = (score[:, 0] > 0).long() if score.size(1) == 1 else score.argmax(1)
        label = (score > 0).long() if several else single
        fresh = self.folder / ".predictions.npz"
        np.savez_compressed(fresh, scores=score.numpy(), label=label.numpy(), target=target.cpu().numpy())
        fresh.rename(self.folder / "predictions.npz")
        with torch.no_grad():
            save_model(model, str(self.folder / ".model.safetensors"))
        (self.folder / ".model.safetensors").rename(self.folder / "model.safetensors")
        write_summary(self.folder / "summary.json", {**values, "predicted": self._predicted()})
        if self.settings.report.trace:
            write_trace(self.folder / "trace.json", spans)
        if self.settings.report.page:
            from kagome.report.page import write_page

            write_page(self.folder)
