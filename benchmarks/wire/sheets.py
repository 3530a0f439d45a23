"""What do sheets gain? Coded rows to one peer, on one sheet or on up to four, between two emulated hosts.

Run: python benchmarks/wire/sheets.py    (as root: it makes network namespaces; a minute)

Each turn sends the same rows in both ways, each way after the other host has come as far. What is timed is
coding, sending and restoring, both hosts at once; a host has one core, nothing else runs.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import tyro

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from cluster import Cluster, NotPermittedError, end_on_sigterm  # noqa: E402

NEVER = 10**15


@dataclass(frozen=True, kw_only=True)
class Options:
    """Send coded rows between two hosts, on one sheet and on several."""

    rows: int = 50_000
    """Rows each way."""
    width: int = 256
    """Columns."""
    rates: tuple[float, ...] = (200.0, 1000.0, 5000.0)
    """Mbit/s of each link, each way."""
    codecs: tuple[str, ...] = ("onebit", "int4")
    """Codecs."""
    turns: int = 15
    """Turns of both ways, after two that are not counted."""
    share: float = 0.9
    """Cores of each host."""
    rank: str = ""
    """Used by itself: the codec that a rank sends by."""


def main() -> None:
    """Time both ways at each rate; write ``results_sheets.json`` and ``.md``."""
    options = tyro.cli(Options, description=__doc__)
    if options.rank:
        send(options)
        return
    end_on_sigterm()
    rows = []
    try:
        with Cluster(2, options.rates[0], options.share, name="kagome-sheets") as cluster:
            for codec in options.codecs:
                for rate in options.rates:
                    cluster.shape(rate)
                    words = [sys.executable, str(HERE / "sheets.py"), "--rank", codec]
                    words += ["--rows", str(options.rows), "--width", str(options.width)]
                    words += ["--turns", str(options.turns)]
                    threads = dict.fromkeys(("OMP_NUM_THREADS", "NUMBA_NUM_THREADS"), "1")
                    ends = cluster.launch(words, env=threads, seconds=300)
                    if any(end.returncode for end in ends):
                        raise SystemExit(ends[0].stderr[-2000:] + ends[1].stderr[-2000:])
                    rows.append({"codec": codec, "rate": rate, **json.loads(ends[0].stdout.splitlines()[-1])})
                    print(rows[-1], flush=True)
    except NotPermittedError as error:
        print(f"sheets.py: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    (HERE / "results_sheets.json").write_text(json.dumps(rows, indent=1) + "\n")
    (HERE / "results_sheets.md").write_text(table(options, rows))


def send(options: Options) -> None:
    """What a rank does: prints seconds of each turn, by way."""
    import torch

    from kagome.comm import codec as codecs
    from kagome.comm.exchange import BytesRequest
    from kagome.comm.mesh import open_mesh
    from kagome.config import Parallel
    from kagome.halo.encoded_message import Writer, incoming_rows, plain

    with open_mesh(Parallel(graph=2, shared_memory=False)) as mesh:
        channel, codec = mesh.graph, codecs.Codec(options.rank)
        counts = [0 if peer == channel.rank else options.rows for peer in range(2)]
        rows = torch.randn(options.rows, options.width)
        letters, row_ids = plain(codec, counts), torch.arange(options.rows)
        found: dict[str, list[float]] = {"one": [], "several": []}
        for turn in range(options.turns + 2):
            for way, least in (("one", NEVER), ("several", codecs.LEAST_SEGMENT)):
                with mock.patch.object(codecs, "LEAST_SEGMENT", least):
                    channel.barrier("a turn")
                    begun = time.perf_counter()
                    sizes = letters.segments(options.width, rows.dtype)
                    writer = Writer(letters, rows, None, row_ids, turn, where="a turn")
                    coming = channel.start_bytes(BytesRequest(writer.write, sizes, sizes, "a turn"))
                    incoming_rows(coming, letters, torch.empty_like(rows)).wait()
                    if turn >= 2:
                        found[way].append(time.perf_counter() - begun)
        sizes = sum(letters.segments(options.width, rows.dtype)[1 - channel.rank])
    print(json.dumps({"bytes": sizes, **found}))


def table(options: Options, rows: list[dict[str, Any]]) -> str:
    """What was found, as Markdown."""
    lines = [
        f"Two emulated hosts of {options.share:g} cores, one rank of one thread each, {platform.machine()}; "
        f"{options.rows:,} x {options.width} floats each way; median of {options.turns} turns (least, most).",
        "",
        "| codec | MB each way | Mbit/s | wire alone, ms | one sheet, ms | up to four, ms | less time |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        one, several = ([1e3 * each for each in row[way]] for way in ("one", "several"))
        wire = row["bytes"] * 8 / row["rate"] / 1e3
        told = [f"{median(each):.1f} ({min(each):.1f} to {max(each):.1f})" for each in (one, several)]
        lines.append(
            f"| {row['codec']} | {row['bytes'] / 1e6:.2f} | {row['rate']:g} | {wire:.1f} | "
            f"{told[0]} | {told[1]} | {median(one) / median(several):.2f} times |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
