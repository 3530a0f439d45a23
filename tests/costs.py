"""Costs: which tests take long, so that a run with a deadline does them last.

Where it sits: ``shorter`` reads ``golden/costs.json``. After tests were added, write it anew::

    python -m pytest -n 3 --dist worksteal --durations=400 > log; python tests/costs.py log
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

FILE = Path(__file__).parent / "golden" / "costs.json"
LEAST = 4.0
"""Seconds from which a test is listed."""
LINE = re.compile(r"([\d.]+)s (?:call|setup|teardown)\s+(tests/\S+?)(?:\[.*)?$")


def written(log: str) -> dict[str, int]:
    """The seconds of the slowest variant of each test in pytest's list of durations."""
    found: dict[str, float] = {}
    for line in log.splitlines():
        if (match := LINE.match(line)) is not None:
            found[match[2]] = max(found.get(match[2], 0.0), float(match[1]))
    return {name: round(seconds) for name, seconds in sorted(found.items()) if seconds >= LEAST}


if __name__ == "__main__":
    FILE.write_text(json.dumps(written(Path(sys.argv[1]).read_text()), indent=1) + "\n")
