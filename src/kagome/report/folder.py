"""A run directory, read: whatever of it is there.

Where it sits: between the files that a run leaves and the sections of ``page``.
"""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kagome.errors import ConfigError
from kagome.report.meters import EpochRecord, read_records
from kagome.report.spans import Span
from kagome.report.summary import summary
from kagome.report.timeline import read_trace


@dataclass(frozen=True)
class RunFolder:
    """What a run left behind."""

    path: Path
    """The run directory."""
    config: dict[str, Any]
    """Settings by section; empty where there are none."""
    records: list[EpochRecord]
    """The epochs."""
    summary: dict[str, Any]
    """``summary.json``, or what can be said from the epochs alone."""
    spans: list[list[Span]]
    """The trace's spans by rank; empty where there is none."""
    finished: bool
    """Whether the run wrote its summary."""
    faults: list[str]
    """What could not be read, in sentences."""

    def setting(self, section: str, name: str) -> Any:
        """A setting, or None."""
        values = self.config.get(section)
        return values.get(name) if isinstance(values, dict) else None


def read_folder(path: str | Path) -> RunFolder:
    """Read a run directory; what is missing is left out, what cannot be read is said.

    Args:
        path: The run directory.

    Returns:
        Its content.

    Raises:
        ConfigError: If it is no folder, or holds neither ``metrics.jsonl`` nor ``summary.json``.
    """
    path = Path(path)
    if not path.is_dir():
        raise ConfigError(f"a report of the run directory {path} was asked for", "there is no such folder")
    if not any((path / name).is_file() for name in ("metrics.jsonl", "summary.json")):
        raise ConfigError(
            f"a report of the run directory {path} was asked for",
            "neither metrics.jsonl nor summary.json is in it",
            hint="give the folder that kagome train named with --out; it holds both",
        )
    faults: list[str] = []
    config: dict[str, Any] = {}
    records: list[EpochRecord] = []
    found: dict[str, Any] = {}
    spans: list[list[Span]] = []
    try:
        if (path / "config.toml").is_file():
            config = tomllib.loads((path / "config.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        faults.append(f"config.toml cannot be read: {error}")
    try:
        if (path / "metrics.jsonl").is_file():
            records = read_records(path / "metrics.jsonl")
    except ConfigError as error:
        faults.append(str(error))
    try:
        if (path / "summary.json").is_file():
            found = json.loads((path / "summary.json").read_text(encoding="utf-8"))
            if not isinstance(found, dict):
                raise ValueError("it holds no object")
    except (OSError, ValueError) as error:
        found = {}
        faults.append(f"summary.json cannot be read: {error}")
    try:
        if (path / "trace.json").is_file():
            spans = read_trace(path / "trace.json")
    except ConfigError as error:
        faults.append(str(error))
    values = found or _provisional(records, config)
    return RunFolder(path, config, records, values, spans, bool(found), faults)


def _provisional(records: list[EpochRecord], config: dict[str, Any]) -> dict[str, Any]:
    """What the epochs alone tell of a run that did not end."""
    rated = [record for record in records if record.val_metric is not None]
    best = max(rated, key=lambda record: record.val_metric or 0.0, default=None)
    train, parallel = config.get("train", {}), config.get("parallel", {})
    metric = train.get("metric", "auto")
    values = summary(
        records=records,
        test_metric=None,
        val_metric=best.val_metric if best else None,
        metric_name="metric" if metric == "auto" else metric,
        best_epoch=best.epoch if best else None,
        peak_memory_bytes=[],
        world_size=0,
        parallel=parallel,
        seed=train.get("seed", 0),
    )
    if not records:
        values["bytes_per_epoch"] = {}
    return values
