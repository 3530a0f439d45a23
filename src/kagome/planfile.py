"""Planfile: the settings of the first plan in a file that ``kagome plan --json`` wrote, or a user edited.

Where it sits: ``config.Parallel`` asks for it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from kagome.errors import ConfigError

KINDS: Mapping[str, type | tuple[type, ...]] = {
    "graph": int, "pipe": int, "stages_per_rank": int, "tensor": int, "chunks": int, "decouple": bool,
    "cross_chunk": str, "codec": str, "codec_weights": str, "max_age": int,
}  # fmt: skip
"""Settings that a plan may have."""


def load(file: str) -> dict[str, int | bool | str]:
    """The first plan's settings.

    Raises:
        ConfigError: If there is no such file, or it holds no plan.
    """
    path = Path(file)
    if not path.is_file():
        raise ConfigError(
            "plan=... takes manual, auto, or the file of a plan",
            f"there is no file {file}",
            hint="kagome plan --json > plan.json",
        )
    try:
        settings = json.loads(path.read_text())["plans"][0]["settings"]
        wrong = [
            f"{name}={value!r}"
            for name, value in settings.items()
            if name not in KINDS or type(value) is not KINDS[name]
        ]
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise ConfigError(
            "a plan's file is what kagome plan --json writes: plans, each with settings",
            f"{type(error).__name__}: {error}",
            where=file,
        ) from None
    if wrong:
        raise ConfigError(f"a plan sets {', '.join(KINDS)}", f"it has {', '.join(wrong)}", where=file)
    return dict(settings)
