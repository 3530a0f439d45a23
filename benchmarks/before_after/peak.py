"""The peak memory of one rank, or of a rival, above imports and graph: one process, one line of JSON.

Run by ``headline_rows.py`` as ``python peak.py SIDE MODEL GRAPH EPOCHS FOLDER`` with the ``src`` of a
checkout on the path, this one's or an older one's.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

BENCHMARKS = Path(__file__).parents[1]
sys.path.insert(0, str(BENCHMARKS / "single_device"))

import numba  # noqa: E402, F401 - an import of Kagome's, as DGL's own is one of DGL: no part of what a run takes
import rivals  # noqa: E402
import sides  # noqa: E402
import torch  # noqa: E402
from trial import Trial  # noqa: E402

import graphs  # noqa: E402

OLDER = find_spec("kagome.records") is None
"""Whether the checkout is from before the folders were what they are."""
Memory = import_module("kagome.report.meters" if OLDER else "kagome.records.epoch").Memory


def main(side: str, model: str, graph: str, epochs: int, folder: Path) -> None:
    """Train, and print the peak of the process and the last loss."""
    threads = os.cpu_count() or 1
    torch.set_num_threads(threads)
    # One epoch comes before those that ``sides`` times; none is left out for the time that it takes.
    trial = Trial(
        side=side, graph=graph, model=model, warm=1, epochs=epochs - 1, seconds=1e9, threads=threads
    )
    data = graphs.load(graph, None, folder)
    if side == "dgl":
        rivals.needed()  # its imports do not count
    memory = Memory()
    found = sides.train(trial, data)
    # Where the kernel keeps no peak from here on, the imports' own peak may be in it: no figure then.
    if not memory.exact:
        raise SystemExit("the kernel's high-water mark cannot be set back here")
    kagome = str(Path(import_module("kagome").__file__ or "").parent)
    print(json.dumps({"peak": memory.peak(), "loss": found["losses"][-1], "kagome": kagome}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), Path(sys.argv[5]))
