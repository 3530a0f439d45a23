"""Run mode: how a model will be run, as far as its memory and time depend on it.

Where it sits: ``train.admission`` and ``autoplan.plan`` choose it; ``memory.estimate`` and ``epoch_costs``
measure under it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RunMode:
    """The settings of a run that decide what a step costs.

    Args:
        several: Whether the run has more than one rank.
        fast: Whether kernels reduce messages.
        recompute: Whether layers run again in backward.
        amp: Whether the run uses bf16 autocast.
        seed: The seed of the run.
    """

    several: bool
    fast: bool = True
    recompute: bool = False
    amp: bool = False
    seed: int = 0
