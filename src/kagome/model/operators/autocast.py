"""Autocast: mixed precision that a user has put around the calls of a pipeline.

Where it sits: ``pipeline`` checks that it is the one that the model was traced under, because it sets the
dtypes of the messages between stages. ``stage_run`` and ``pipeline`` turn it off for what plain training does
outside autocast.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from kagome.errors import ConfigError


def autocast_now(device: torch.device) -> torch.dtype | None:
    """Return the dtype that autocast computes in; None if it is off."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def begin(device: torch.device, built: torch.dtype | None) -> None:
    """Check that autocast is unchanged, and drop its cached copies of weights.

    If a user has one autocast block around several updates, the copies are older than the last update.

    Args:
        device: The device of the model.
        built: What :func:`autocast_now` returned when the pipeline was made.

    Raises:
        ConfigError: If autocast has changed since.
    """
    now = autocast_now(device)
    if now != built:
        raise ConfigError(
            "step and predict to run under the autocast that kagome.pipeline was called under: "
            f"{'none' if built is None else built}",
            "none" if now is None else f"{now}",
            hint="put kagome.pipeline, step and predict under the same torch.autocast, or all under none",
        )
    # torch itself clears it only at the end of the outermost autocast block.
    torch.clear_autocast_cache()


def without(device: torch.device) -> AbstractContextManager[object]:
    """Turn autocast off in a block: in plain training, backward and the optimizer run outside it."""
    on = torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if on else nullcontext()
