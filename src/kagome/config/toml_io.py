"""TOML: write a run's settings as plain values and as TOML, and read them back.

Where it sits: ``cli.app`` reads settings files with it, ``run_dir.run_dir`` writes a run's own.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, get_args, get_origin

from kagome.config import Run
from kagome.config.fields import WITHDRAWN, fits, hints_of, unfit
from kagome.errors import ConfigError
from kagome.storage import text_files


def as_dict(run: Run) -> dict[str, dict[str, Any]]:
    """Return the run as nested plain values. Fields that are None are left out: TOML has no null."""
    return {
        section: {key: value for key, value in values.items() if value is not None}
        for section, values in dataclasses.asdict(run).items()
    }


OWN: Final = "python:"
"""Prefix that marks a loss or metric in a run's settings as a function of the user's."""


def own_name(given: object) -> str:
    """Return how settings name a function of the user's: by its module and its name."""
    # A function, a partial of one, a module or another callable: its class names the last two.
    code = getattr(given, "func", given)  # what a partial calls
    code = code if hasattr(code, "__qualname__") else type(code)
    return f"{OWN}{getattr(code, '__module__', None) or 'builtins'}:{code.__qualname__}"


def to_toml(run: Run, own: Mapping[str, str] | None = None) -> str:
    """Return the run as TOML text, which :func:`from_toml` can read.

    Args:
        run: The settings.
        own: The texts that stand for losses and metrics that are functions; see :func:`own_name`.
    """
    lines: list[str] = []
    for section, values in as_dict(run).items():
        # A function has no value in TOML, so its name is written, which from_toml refuses if it is needed.
        values |= (own or {}) if section == "train" else {}
        lines.append(f"[{section}]")
        lines += [f"{key} = {_toml_value(value)}" for key, value in values.items()]
        lines.append("")
    return "\n".join(lines)


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON's escapes are TOML's, but for one character that only TOML forbids.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007F")
    return repr(list(value) if isinstance(value, tuple) else value)


def from_toml(path: str | Path, *, over: Run | None = None, trains: bool = True, saved: bool = False) -> Run:
    """Read a run from a TOML file; what it leaves out is as in another run, or by default.

    Args:
        path: The file.
        over: The other run.
        trains: Whether a loss or metric that was a function in Python is needed; else it is left out.
        saved: Whether it is the file of a run that goes on: withdrawn values become what replaces them.

    Raises:
        ConfigError: If the file is missing, is no TOML, names an unknown section or setting, or a function
            that is needed.
    """
    try:
        table = text_files.toml(path)
    except text_files.UnreadableError as error:
        raise ConfigError(
            f"{path} to be a settings file of TOML", f"one that cannot be read: {error}"
        ) from None
    # from_dict refuses a section that is no table; here it must only not fail.
    train = table.get("train")
    train = train if isinstance(train, dict) else {}
    for key in [key for key in ("loss", "metric") if _is_own(train.get(key))]:
        if trains:
            raise ConfigError(
                f"train.{key} to be a name",
                f"the function {train[key].removeprefix(OWN)} of this run, which Python gave",
                where=str(path),
                hint=f"Trainer(..., {key}=...).fit(resume=...) goes on with it",
            )
        del train[key]
    for (name, value), (near, _) in WITHDRAWN.items() if saved else ():
        section, _, key = name.partition(".")
        values = table.get(section)
        if isinstance(values, dict) and values.get(key) == value:
            values[key] = near
    return from_dict(table, where=str(path), over=over)


def _is_own(value: object) -> bool:
    return isinstance(value, str) and value.startswith(OWN)


def from_dict(table: dict[str, Any], *, where: str = "", over: Run | None = None) -> Run:
    """Build a run from nested plain values; what is left out is as in another run, or by default.

    Args:
        table: The settings of each section, by section and name.
        where: The file that they come from, for errors.
        over: The run that has what the table leaves out.

    Raises:
        ConfigError: If a section or a setting is unknown, or a value has the wrong type.

    Example:
        >>> from_dict({"train": {"epochs": 20}, "parallel": {"pipe": 2}}).parallel.pipe
        2
    """
    over = over or Run()
    sections = {f.name: f.default_factory for f in dataclasses.fields(Run)}
    parts: dict[str, Any] = {}
    for section, values in table.items():
        if section not in sections:
            raise ConfigError(f"one of the sections {', '.join(sections)}", f"[{section}]", where=where)
        kind: Any = sections[section]
        if not isinstance(values, dict):
            raise ConfigError(f"[{section}] to be a section of settings", f"{values!r}", where=where)
        hints, given = hints_of(kind), {}
        for key, value in values.items():
            name = key.replace("-", "_")  # as the flags are written
            if name not in hints:
                known = ", ".join(hints)
                raise ConfigError(f"a setting of [{section}]: {known}", f"{key!r}", where=where)
            given[name] = _typed(f"{section}.{name}", value, hints[name], where)
        # replace() calls __post_init__, so values out of range are refused with their names.
        parts[section] = dataclasses.replace(getattr(over, section), **given)
    return dataclasses.replace(over, **parts)


def _typed(name: str, value: Any, hint: Any, where: str) -> Any:
    """Return the value in the type of its field."""
    if not fits(value, hint):
        raise unfit(name, value, hint, where)
    if get_origin(hint) is tuple:
        return tuple(value)
    # "lr = 1" in TOML is an integer; the setting is a float, as in Python's own dataclass. True is an int
    # too, but fits() has refused it.
    return float(value) if float in (hint, *get_args(hint)) and type(value) is int else value
