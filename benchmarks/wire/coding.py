"""What does a few-bit code cost? Loops beside plain PyTorch, a cast and a copy, on one thread, in turns.

Run: python benchmarks/wire/coding.py            (some three minutes)
     python benchmarks/wire/coding.py --smoke

All ways of one width meet the machine in the same minutes: each turn runs every one of them once. Busy
neighbours show in the spread and in the copy.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import tyro

HERE = Path(__file__).parent
HEADER = 6
"""Bytes a row beside its codes."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Time the few-bit codec on one thread."""

    rows: int = 100_000
    """Rows of a message."""
    widths: tuple[int, ...] = (128, 256)
    """Columns."""
    bits: tuple[int, ...] = (1, 2, 4, 8)
    """Bits a number."""
    turns: int = 15
    """Times that each way is run, after one that is not counted."""
    out: Path = HERE
    """Folder of the results."""
    smoke: bool = False
    """A small message and two turns."""

    def sized(self) -> Options:
        """With the sizes of a smoke test, if it is one."""
        return Options(rows=90, widths=(20,), turns=2, out=self.out, smoke=True) if self.smoke else self


def main() -> None:
    """Time all ways and write ``results_coding.json`` and ``.md``."""
    options = tyro.cli(Options, description=__doc__).sized()
    os.environ["OMP_NUM_THREADS"] = "1"  # before anything starts its threads
    import torch

    torch.set_num_threads(1)
    before = os.getloadavg()[0]
    rows = [row for width in options.widths for row in measure(options, width)]
    facts = {
        "machine": machine(),
        "busy": [round(before, 1), round(os.getloadavg()[0], 1)],
        "rows": options.rows,
        "turns": options.turns,
        "torch": torch.__version__,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    told = json.dumps({"facts": facts, "rows": rows}, indent=1) + "\n"
    (options.out / "results_coding.json").write_text(told)
    (options.out / "results_coding.md").write_text(text(facts, rows))


def machine() -> str:
    """The processor and its cores, in words."""
    name = platform.machine()
    told = Path("/proc/cpuinfo")
    for line in told.read_text().splitlines() if told.exists() else ():
        if line.startswith("model name"):
            name = f"{line.partition(':')[2].strip()} ({platform.machine()})"
            break
    return f"{name}, {os.cpu_count()} cores"


def measure(options: Options, width: int) -> list[dict[str, Any]]:
    """One row for each thing that is timed: seconds of each way's turns, and the bytes that must move."""
    import torch

    draw = torch.Generator().manual_seed(width)
    x = torch.randn(options.rows, width, generator=draw)
    copied, short = torch.empty_like(x), torch.empty_like(x, dtype=torch.bfloat16)
    of_rows = 4 * x.numel()
    # What is done, by what: then all in turns.
    doing: dict[tuple[str, str], Callable[[], Any]] = {
        ("copy", "torch"): partial(copied.copy_, x),
        ("read", "torch"): partial(torch.sum, x),
        ("write", "torch"): partial(copied.fill_, 1.0),
        ("cast to bf16", "torch"): partial(short.copy_, x),
        ("cast from bf16", "torch"): partial(copied.copy_, short),
    }
    moved = {"copy": 2 * of_rows, "read": of_rows, "write": of_rows}
    moved |= dict.fromkeys(("cast to bf16", "cast from bf16"), of_rows * 3 // 2)
    for few in options.bits:
        encode, decode = f"encode, {few} bits", f"decode, {few} bits"
        doing |= coders(x, copied, few, encode, decode)
        packed = HEADER * options.rows + -(-options.rows * few // 8) * width
        moved |= dict.fromkeys((encode, decode), of_rows + packed)
    seconds: dict[tuple[str, str], list[float]] = {key: [] for key in doing}
    for turn in range(options.turns + 1):
        for key, do in doing.items():
            begun = time.perf_counter()
            do()
            if turn:
                seconds[key].append(time.perf_counter() - begun)
    print(f"{width} columns: {options.turns} turns of {len(doing)}", flush=True)
    rate = {name: moved[name] / min(seconds[name, "torch"]) for name in ("read", "write")}
    return [
        {
            "width": width,
            "what": what,
            "bytes": moved[what],
            "seconds": {way: taken for (same, way), taken in seconds.items() if same == what},
            "floor": floor(what, of_rows, moved[what], rate),
        }
        for what in dict.fromkeys(what for what, _ in doing)
    ]


def floor(what: str, of_rows: int, moved: int, rate: dict[str, float]) -> float | None:
    """Seconds in which the bytes are read and written, at the best rates of the same turns."""
    if what.startswith("encode"):
        return of_rows / rate["read"] + (moved - of_rows) / rate["write"]
    if what.startswith("decode"):
        return of_rows / rate["write"] + (moved - of_rows) / rate["read"]
    return None


def coders(x: Any, out: Any, few: int, encode: str, decode: str) -> dict[tuple[str, str], Callable[[], Any]]:
    """Loops and plain PyTorch, which give the same bits."""
    import torch

    from kagome.kernels.quantize import cpu, ops

    row_ids = torch.arange(x.size(0))
    doing: dict[tuple[str, str], Callable[[], Any]] = {}
    kept = []
    for name, way in (("loops", cpu), ("plain", ops.ReferenceCodec)):
        body = torch.empty(ops.groups(x.size(0), few), x.size(1), dtype=torch.uint8)
        low, span, bad = way.encode(x, None, row_ids, few, few, body)
        assert bad == 0
        kept.append((low, span, body))
        doing[encode, name] = partial(way.encode, x, None, row_ids, few, few, body)
        doing[decode, name] = partial(way.decode, body, low, span, few, out)
    assert all(torch.equal(one, two) for one, two in zip(*kept, strict=True))
    return doing


# Text ---------------------------------------------------------------------------------------------


def text(facts: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """The tables as Markdown."""
    first, last = facts["busy"]
    lines = [
        f"{facts['rows']:,} rows of float32, one thread of {facts['machine']}; torch {facts['torch']}; "
        f"{facts['turns']} turns: median (least - most). The machine's load was {first} at the start and "
        f"{last} at the end, this run's own thread counted. Floor: the bytes that must be read and written "
        "at the best rates of the rows *read* and *write*; below 1, a loop writes faster than torch fills.",
    ]
    for width in dict.fromkeys(row["width"] for row in rows):
        mine = [row for row in rows if row["width"] == width]
        lines += ["", f"Width {width}:", "", "| | MB moved | torch | GB/s |", "|---|---|---|---|"]
        for row in mine:
            if row["floor"] is None:
                taken = row["seconds"]["torch"]
                rate = row["bytes"] / median(taken) / 1e9
                lines.append(f"| {row['what']} | {row['bytes'] / 1e6:.1f} | {told(taken)} | {rate:.1f} |")
        lines += ["", "| | MB moved | loops | plain | plain / loops | floor | loops / floor |"]
        lines.append("|---|---|---|---|---|---|---|")
        lines += [coded(row) for row in mine if row["floor"] is not None]
        lines += [both(mine)]
    return "\n".join(lines) + "\n"


def coded(row: dict[str, Any]) -> str:
    loops, plain = row["seconds"]["loops"], row["seconds"]["plain"]
    cells = [row["what"], f"{row['bytes'] / 1e6:.1f}", told(loops), told(plain)]
    cells += [f"{median(plain) / median(loops):.0f}", f"{1e3 * row['floor']:.1f} ms"]
    cells += [f"{median(loops) / row['floor']:.1f}"]
    return f"| {' | '.join(cells)} |"


def both(rows: Sequence[dict[str, Any]]) -> str:
    """Encode and decode of the fewest bits together, turn by turn."""
    pair = [row for row in rows if row["floor"] is not None][:2]
    taken = {
        way: [sum(turn) for turn in zip(*(row["seconds"][way] for row in pair), strict=True)]
        for way in ("loops", "plain")
    }
    what = " and ".join(row["what"] for row in pair)
    moved, low = sum(row["bytes"] for row in pair), sum(row["floor"] for row in pair)
    return coded({"what": what, "bytes": moved, "seconds": taken, "floor": low})


def told(seconds: Sequence[float]) -> str:
    least, most = 1e3 * min(seconds), 1e3 * max(seconds)
    return f"{1e3 * median(seconds):.1f} ({least:.1f} - {most:.1f}) ms"


if __name__ == "__main__":
    main()
