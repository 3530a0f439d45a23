"""Costs: what a variant of each test takes, by which ``shorter`` chooses variants and orders tests.

Where it sits: ``shorter`` reads ``golden/costs.json``. After tests were added, write it anew::

    python -m pytest -n 3 --dist load --durations=0 -vv > log; python tests/costs.py log

Tests that the log does not have keep what was known of them.
"""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from pathlib import Path

FILE = Path(__file__).parent / "golden" / "costs.json"
LEAST = 0.25
"""Seconds from which a test is listed."""
LINE = re.compile(r"([\d.]+)s (call|setup|teardown)\s+(tests/\S+?)(?:\[.*)?$")


def known() -> dict[str, float]:
    """Seconds of a variant of each test that is listed."""
    found: dict[str, float] = json.loads(FILE.read_text())
    return found


def written(log: str, before: dict[str, float]) -> dict[str, float]:
    """The mean seconds of a variant of each test in pytest's list of durations; others as before."""
    seconds: dict[str, float] = defaultdict(float)
    variants: dict[str, int] = defaultdict(int)
    for line in log.splitlines():
        if (match := LINE.search(line)) is not None:
            seconds[match[3]] += float(match[1])
            variants[match[3]] += match[2] == "call"
    found = {name: round(seconds[name] / count, 2) for name, count in variants.items() if count}
    return {name: cost for name, cost in sorted({**before, **found}.items()) if cost >= LEAST}


if __name__ == "__main__":
    FILE.write_text(json.dumps(written(Path(sys.argv[1]).read_text(), known()), indent=1) + "\n")
