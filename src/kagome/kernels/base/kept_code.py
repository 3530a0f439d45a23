"""Kept machine code: which compiled loops of the first epoch are on disk, without numba or torch.

Where it sits: ``cli`` asks before it starts ranks, and ``cli.doctor`` tells the user.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from hashlib import sha1
from pathlib import Path
from types import MappingProxyType
from typing import Final

PACKAGE: Final = Path(__file__).parents[2]
"""The folder of Kagome's sources."""
AT_ONCE: Final = "KAGOME_COMPILE"
"""Variable that has loops be compiled at their first call, where plain code would stand in for them."""
LOOPS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "graph/structure/kernels.py": ("adjacency", "mend"),
        "graph/structure/edges.py": (
            *("read_by", "halo_counts", "halo_of", "sent_by", "edges_of", "shared", "squeeze"),
            *("sort_rows", "simple", "sent_counts"),
        ),
        "kernels/base/csr.py": ("_counted", "_ordered", "_transposed"),
        "kernels/cpu/spmm.py": ("_sum.locals.loop",),
        "model/exact/dropout.py": ("_drop_rows",),
    }
)
"""Loops that cut a graph and train a GCN, by the file that has them."""

SECONDS: Final[Mapping[str, float]] = MappingProxyType({"mend": 4.0, "sort_rows": 1.1, "": 0.5})
"""Seconds of a core that compiling takes, by the loop's name; of all others under an empty name."""


def missing() -> tuple[str, ...]:
    """Return the :data:`LOOPS` of which no machine code is on disk, as ``file: name``.

    Machine code that is older than its source does not count. Whether it suits the processor is not looked
    at: numba does that when it loads the code, and compiles again if need be.
    """
    return tuple(
        f"{file}: {name}" for file, names in LOOPS.items() for name in names if not _is_kept(file, name)
    )


def _is_kept(file: str, name: str) -> bool:
    source = PACKAGE / file
    # numba compares the time of the source, too, and ignores machine code of another.
    changed = source.stat().st_mtime
    # One index holds the machine code of all types of a loop's arguments.
    found = (
        index
        for folder in folders(source)
        for index in folder.glob(f"{source.stem}.{name}-*.py{sys.version_info[0]}{sys.version_info[1]}*.nbi")
    )
    return any(index.stat().st_mtime >= changed for index in found)


def folders(source: Path) -> tuple[Path, ...]:
    """Return the folders in which numba looks for the machine code of a source file, in its order."""
    # numba.core.caching: the folder's own name, and a hash of its path.
    place = str(source.resolve().parent)
    own = f"{Path(place).name}_{sha1(place.encode(), usedforsecurity=False).hexdigest()}"
    # A folder that the user names is the only one.
    given = os.environ.get("NUMBA_CACHE_DIR")
    if given:
        return (Path(given, own),)
    # Beside the source if that folder can be written, else in the user's cache.
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(place, "__pycache__"), home / "numba" / own
