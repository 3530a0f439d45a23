"""Way: how a model will be run, for those who foresee what that costs.

Where it sits: ``memory.estimate`` and ``epoch_costs`` measure by it; ``train.admission`` and
``autoplan.plan`` say which.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RunMode:
    """How a model will be run.

    Args:
        several: Whether on more than one rank.
        fast: Whether messages are reduced by kernels.
        recompute: Whether layers run again in backward.
        amp: Whether in bf16 autocast.
        seed: Of the run.
    """

    several: bool
    fast: bool = True
    recompute: bool = False
    amp: bool = False
    seed: int = 0
