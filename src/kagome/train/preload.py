"""Preload: import what every rank of a training run needs, in the process from which ranks are forked.

Where it sits: ``cli`` names it to ``launch``. If an import fails, for lack of memory for example, the rank
that needs the module reports it: the process from which ranks are forked cannot report to anyone.
"""

from __future__ import annotations

from contextlib import suppress

from kagome.launch.gc import uncollected

with suppress(Exception), uncollected():
    import kagome.kernels.cpu.dispatch
    import kagome.model.zoo
    import kagome.train.trainer  # noqa: F401
    from kagome.kernels.base.jit import load_compiler

    # Each rank would do it at its first kernel, and so would the process that cuts the graph.
    load_compiler()
