"""Writes ``golden/host_waits.json`` anew: the waits of the host in an epoch, by strategy and place.

    PYTHONPATH=src:tests:tests/support python tests/device/write_host_waits.py [NAME ...]

With names only these are measured. A place that is new has no reason yet: write one, or mend it.
"""

from __future__ import annotations

import json
import sys

from bed import bed
from runs import both
from test_strategies import GOLDEN, RUNS


def main() -> None:
    table = json.loads(GOLDEN.read_text()) if GOLDEN.is_file() else {"waits": {}, "why": {}}
    ranks = bed()
    for name in sys.argv[1:] or RUNS:
        run = RUNS[name]
        found = [there.waits for there, _ in ranks.run(run.ranks, both, run)]
        places = sorted({place for each in found for place in each})
        table["waits"][name] = {place: max(each.get(place, 0) for each in found) for place in places}
        used = sorted({place for each in table["waits"].values() for place in each})
        table["why"] = {place: table["why"].get(place, "") for place in used}
        table["waits"] = {name: table["waits"][name] for name in RUNS if name in table["waits"]}
        GOLDEN.write_text(json.dumps(table, indent=1) + "\n")
        print(name, sum(table["waits"][name].values()), flush=True)
    ranks.close()


if __name__ == "__main__":
    main()
