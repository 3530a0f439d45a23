"""Amp: the autocast that a user has put around a pipeline's calls.

Where it sits: ``pipeline`` asks whether it is the one that the model was looked at under, as types of what
crosses follow it; ``stage_run`` and ``pipeline`` leave it for what plain training does outside of it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from kagome.errors import ConfigError


def autocast_now(device: torch.device) -> torch.dtype | None:
    """The type that autocast computes in; None where it is off."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def begin(device: torch.device, built: torch.dtype | None) -> None:
    """Check that autocast is what it was, and drop the copies of weights that it keeps in a block.

    They are from before the last update where a user has one block around several.

    Args:
        device: Of the model.
        built: What :func:`autocast_now` said when the pipeline was made.

    Raises:
        ConfigError: If it is another.
    """
    now = autocast_now(device)
    if now != built:
        raise ConfigError(
            "step and predict run under the autocast that kagome.pipeline was called under: "
            f"{'none' if built is None else built}",
            f"they run under {'none' if now is None else now}",
            hint="put kagome.pipeline, step and predict under the same torch.autocast, or all under none",
        )
    torch.clear_autocast_cache()


def without(device: torch.device) -> AbstractContextManager[object]:
    """No autocast in a block: backwards and optimizers run outside of it in plain training."""
    on = torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if on else nullcontext()
