"""Plan file: the settings of the first plan in a file that ``kagome plan --json`` wrote.

Where it sits: ``config.Parallel`` asks for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kagome.config.fields import WORDS, path_of, shown
from kagome.errors import ConfigError, shortened
from kagome.storage import text_files

KINDS: Mapping[str, type] = {
    "graph": int, "part_weights": list, "pipe": int, "stages_per_rank": int, "tensor": int, "chunks": int,
    "decouple": bool, "cross_chunk": str, "codec": str, "codec_weights": str, "max_age": int,
    "activations": str,
}  # fmt: skip
"""Settings that a plan may have."""


def load(file: str) -> dict[str, Any]:
    """Return the settings of the first plan in a file.

    Raises:
        ConfigError: If there is no such file, or it holds no plan.
    """
    path = path_of(file, "parallel.plan")
    where = shortened(str(path), 200)
    try:
        plans = text_files.json_file(path)
    except text_files.UnreadableError as error:
        raise ConfigError(
            "plan=... to be manual, auto, or the file of a plan",
            f"{where}, which cannot be read: {error}",
            hint="kagome plan --json > plan.json",
        ) from None
    settings = _first(plans)
    if settings is None:
        raise ConfigError(
            "a plan's file as kagome plan --json writes it: plans, each with settings",
            "a file without a first plan with settings",
            where=where,
        )
    unknown = [name for name in settings if name not in KINDS]
    if unknown:
        raise ConfigError(f"a plan to set {', '.join(KINDS)}", f"{unknown[0]!r}", where=where)
    for name, value in settings.items():
        # `is`, because True is an instance of int.
        if type(value) is not KINDS[name]:
            raise ConfigError(
                f"a plan's {name} to be {WORDS.get(KINDS[name], 'a list')}", shown(value), where=where
            )
    # JSON has no tuples, which settings are.
    return {name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()}


def _first(plans: Any) -> dict[str, Any] | None:
    """Return the first plan's settings, or None."""
    # A user may edit the file, so each level is tested before it is looked into.
    found = plans.get("plans") if isinstance(plans, dict) else None
    first = found[0] if isinstance(found, list) and found else None
    settings = first.get("settings") if isinstance(first, dict) else None
    return settings if isinstance(settings, dict) else None
