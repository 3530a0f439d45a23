"""Run data: the content of a run directory, as far as it exists.

Where it sits: between the files that a run leaves and the sections of ``report.page.page``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Final

from kagome.config.fields import shown
from kagome.errors import ConfigError
from kagome.records.epoch import EpochRecord, read_records
from kagome.records.spans import Span
from kagome.report.chrome_trace import read_trace
from kagome.report.summary import summary
from kagome.storage import text_files


@dataclass(frozen=True)
class RunFolder:
    """The files that a run left behind, parsed."""

    path: Path
    """The path of the run directory."""
    config: dict[str, Any]
    """Settings by section; empty if there are none."""
    records: list[EpochRecord]
    """The records of the epochs."""
    summary: dict[str, Any]
    """``summary.json``, or what follows from the epochs alone."""
    spans: list[list[Span]]
    """The trace's spans by rank; empty if there is no trace."""
    finished: bool
    """Whether the run wrote its summary."""
    faults: list[str]
    """Sentences about what could not be read."""

    def setting(self, section: str, name: str) -> Any:
        """Return a setting, or None if there is no such setting."""
        values = self.config.get(section)
        return values.get(name) if isinstance(values, dict) else None


def read_folder(path: str | Path) -> RunFolder:
    """Read a run directory; missing files are left out, unreadable ones are reported as faults.

    Args:
        path: The run directory.

    Returns:
        Its content.

    Raises:
        ConfigError: If it is not a folder, or holds neither ``metrics.jsonl`` nor ``summary.json``.
    """
    path = Path(path)
    if not path.is_dir():
        raise ConfigError(f"the run directory {path}", "no such folder")
    if not any((path / name).is_file() for name in ("metrics.jsonl", "summary.json")):
        raise ConfigError(
            f"{path} to be a run directory, with metrics.jsonl or summary.json",
            "a folder with neither",
            hint="give the folder that kagome train named with --out; it holds both",
        )
    # Each file is read by itself: a damaged one costs its own sections of the page.
    faults: list[str] = []
    config: dict[str, Any] = {}
    records: list[EpochRecord] = []
    found: dict[str, Any] = {}
    spans: list[list[Span]] = []
    try:
        if (path / "config.toml").exists():
            config = text_files.toml(path / "config.toml")
    except text_files.UnreadableError as error:
        faults.append(f"config.toml cannot be read: {error}")
    try:
        if (path / "metrics.jsonl").exists():
            records = read_records(path / "metrics.jsonl")
    except ConfigError as error:
        faults.append(str(error))
    try:
        if (path / "summary.json").exists():
            found = _known(text_files.json_file(path / "summary.json"), faults)
    except text_files.UnreadableError as error:
        faults.append(f"summary.json cannot be read: {error}")
    try:
        if (path / "trace.json").exists():
            spans = read_trace(path / "trace.json")
    except ConfigError as error:
        faults.append(str(error))
    # An unfinished run has no summary, only the records that were written after each epoch.
    values = found or _provisional(
        records, {name: each for name, each in config.items() if isinstance(each, dict)}
    )
    return RunFolder(path, config, records, values, spans, bool(found), faults)


SUMMARY: Final[Mapping[str, Any]] = {
    **dict.fromkeys(("test_metric", "val_metric", "epoch_seconds"), Real),
    **dict.fromkeys(("seconds_total", "set_up_seconds"), Real),
    **dict.fromkeys(("best_epoch", "epochs", "max_age", "world_size", "seed"), Integral),
    **dict.fromkeys(("working_memory_bytes", "activations_moved_bytes"), Integral),
    "metric_name": str,
    **{name: {} for name in ("bytes_per_epoch", "waited_per_epoch", "hidden_share")},
    **{name: [Integral] for name in ("peak_memory_bytes", "threads")},
    "notes": [str],
    **{name: [dict] for name in ("phases", "memory")},
    **dict.fromkeys(("predicted", "parallel", "pipeline", "crossing", "history", "partition"), dict),
}
"""Types of a summary's values: a number, text, list or object of these; ``{}`` is one of numbers."""
SIGNED: Final = frozenset({"test_metric", "val_metric"})
"""Numbers that may be below 0."""


def _known(found: Any, faults: list[str]) -> dict[str, Any]:
    """Return a summary without the values that no run writes; each of them is reported as a fault."""
    if not isinstance(found, dict):
        faults.append("summary.json holds no object")
        return {}
    kept = {}
    for name, value in found.items():
        # Names that this version does not know are kept: a newer version may have
        # written them, and no section reads them.
        if value is None or name not in SUMMARY or _is(value, SUMMARY[name], signed=name in SIGNED):
            kept[name] = value
        else:
            faults.append(f"summary.json: {name} is {shown(value, 80)}, which no run writes")
    return kept


def _is(value: Any, kind: Any, *, signed: bool = False) -> bool:
    if isinstance(kind, list):
        return isinstance(value, list) and all(_is(each, kind[0]) for each in value)
    if kind == {}:
        return isinstance(value, dict) and all(each is None or _is(each, Real) for each in value.values())
    if kind in (Real, Integral):
        # bool is an Integral in Python, and NaN is a float that json accepts.
        number = isinstance(value, kind) and not isinstance(value, bool)
        return number and isfinite(value) and (signed or value >= 0) and abs(value) < MOST
    return isinstance(value, kind)


MOST: Final = 1e21
"""Upper bound of every number that a run writes."""


def _provisional(records: list[EpochRecord], config: dict[str, Any]) -> dict[str, Any]:
    """Return what the epochs alone say about a run that did not end."""
    # Only the run knows which direction of a user's own metric is better; it records the best each time.
    known = next((record.best_epoch for record in reversed(records) if record.best_epoch is not None), None)
    best = next((record for record in records if record.epoch == known), None)
    train, parallel = config.get("train", {}), config.get("parallel", {})
    metric = str(train.get("metric", "auto")).rpartition(":")[2]  # for a function only its name
    values = summary(
        records=records,
        test_metric=None,
        val_metric=best.val_metric if best else None,
        metric_name="metric" if metric == "auto" else metric,
        epochs=records[-1].epoch if records else 0,
        best_epoch=known,
        peak_memory_bytes=[],
        world_size=0,
        parallel=parallel,
        seed=train.get("seed", 0),
    )
    # A mean of no epochs is not 0 bytes.
    if not records:
        values["bytes_per_epoch"] = {}
    return values
