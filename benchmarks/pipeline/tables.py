"""Tables: what the rows of the speed experiment say, as figures and as Markdown.

Where it sits: ``speed.py`` measures the rows and writes what is made of them here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, geometric_mean, median
from typing import Any

Row = Mapping[str, Any]
BASE = "graph"
"""The mesh that the others are compared with: graph parallelism alone."""
EXPOSED = 0.7
"""Share of a graph-parallel epoch in exposed communication at which speed-ups are averaged."""
USUAL = 100
"""Hidden width of models whose name says none."""
FREE = 10_000
"""Mbit/s from which on a link costs next to nothing: what ranks still wait for is each other."""


def cases(rows: Sequence[Row]) -> dict[tuple[str, str], dict[float, dict[str, Row]]]:
    """Rows that were measured, by graph and model, rate (slowest link first) and mesh."""
    found: dict[tuple[str, str], dict[float, dict[str, Row]]] = {}
    for row in sorted((row for row in rows if "error" not in row), key=lambda row: float(row["rate"])):
        width = row.get("hidden", USUAL)
        model = row["model"] if width == USUAL else f"{row['model']}, hidden {width}"
        case = found.setdefault((row["graph"], model), {})
        case.setdefault(float(row["rate"]), {})[row["mesh"]] = row
    return found


# Interpolation ---------------------------------------------------------------------------------------


def crossing(points: Sequence[tuple[float, float]], level: float) -> float | None:
    """The highest rate at which a figure has a level: a straight line over the rate's logarithm.

    Args:
        points: Rate and figure, rates rising.
        level: The figure that is looked for.

    Returns:
        None where no two neighbouring points lie on both sides of the level.
    """
    for (left, before), (right, after) in reversed(list(itertools.pairwise(points))):
        if before != after and min(before, after) <= level <= max(before, after):
            part = (level - before) / (after - before)
            return math.exp(math.log(left) + part * (math.log(right) - math.log(left)))
    return None


def at(points: Sequence[tuple[float, float]], rate: float) -> float | None:
    """A positive figure at a rate between two measured ones: a straight line over both logarithms."""
    for (left, before), (right, after) in itertools.pairwise(points):
        if left <= rate <= right:
            part = (math.log(rate) - math.log(left)) / (math.log(right) - math.log(left))
            return math.exp(math.log(before) + part * (math.log(after) - math.log(before)))
    return None


def speedups(case: Mapping[float, Mapping[str, Row]], mesh: str) -> list[tuple[float, float]]:
    """Rate and times faster than graph parallelism, where both were measured."""
    return [
        (rate, meshes[BASE]["epoch_seconds"] / meshes[mesh]["epoch_seconds"])
        for rate, meshes in case.items()
        if BASE in meshes and mesh in meshes
    ]


def exposed(case: Mapping[float, Mapping[str, Row]]) -> list[tuple[float, float]]:
    """Rate and share of a graph-parallel epoch in exposed communication."""
    return [(rate, meshes[BASE]["exposed_share"]) for rate, meshes in case.items() if BASE in meshes]


def of_links(case: Mapping[float, Mapping[str, Row]], rate: float) -> float | None:
    """The share of a graph-parallel epoch that a link of :data:`FREE` saves; None if none was measured."""
    free = [meshes[BASE] for measured, meshes in case.items() if measured >= FREE and BASE in meshes]
    if not free or BASE not in case[rate]:
        return None
    return 1 - float(free[-1]["epoch_seconds"] / case[rate][BASE]["epoch_seconds"])


def conclusions(rows: Sequence[Row]) -> dict[str, Any]:
    """Speed-ups at the rate at which graph parallelism is exposed for :data:`EXPOSED` of its epoch.

    Returns:
        ``cases``, one a graph and model (None for what lies outside the measured rates), and ``average`` by
        mesh: ``arithmetic``, ``geometric``, ``cases`` (how many it is of), ``of`` (how many there are).
    """
    told: list[dict[str, Any]] = []
    meshes = [mesh for mesh in dict.fromkeys(row["mesh"] for row in rows) if mesh != BASE]
    for (graph, model), case in cases(rows).items():
        shares = exposed(case)
        rate = crossing(shares, EXPOSED)
        faster = {mesh: speedups(case, mesh) for mesh in meshes}
        told.append(
            {
                "graph": graph,
                "model": model,
                "exposed": [min(s for _, s in shares), max(s for _, s in shares)] if shares else None,
                "rate": rate,
                "speedup": {mesh: None if rate is None else at(faster[mesh], rate) for mesh in meshes},
                "even_rate": {
                    mesh: crossing([(r, math.log(t)) for r, t in faster[mesh]], 0.0) for mesh in meshes
                },
                "speedups": {mesh: [times for _, times in faster[mesh]] for mesh in meshes},
            }
        )
    average = {}
    for mesh in meshes:
        found = [one["speedup"][mesh] for one in told if one["speedup"][mesh] is not None]
        average[mesh] = {
            "arithmetic": fmean(found) if found else None,
            "geometric": geometric_mean(found) if found else None,
            "cases": len(found),
            "of": len(told),
        }
    return {"exposed": EXPOSED, "cases": told, "average": average}


# Markdown --------------------------------------------------------------------------------------------


def page(facts: Mapping[str, Any], rows: Sequence[Row], names: Mapping[str, str]) -> str:
    """All tables.

    Args:
        facts: What is the same for all rows.
        rows: As ``results_speed.json`` has them.
        names: What each mesh is called.
    """
    lines = [
        f"{facts['hosts']} emulated hosts, one rank of one thread each, on {facts['machine']}; "
        f"{facts['cpu_share']:.2f} cores a host ({facts['quota']}); torch {facts['torch']}; "
        f"{facts['layers']} layers, hidden {USUAL} where no other width is named; medians of "
        f"{facts['epochs']} epochs.",
        "",
        "*Exposed* is the time in which a rank waits for what others send (mean over ranks), as a share of "
        "its epoch: links, and ranks that are behind. *Due to links* is what a link of at least "
        f"{FREE / 1000:g} Gbit/s saves, where one was measured (`--rates {FREE}`).",
        "",
    ]
    lines += [*measured(rows, names), "", *concluded(rows, names), *bubbles(rows, names)]
    failed = [row for row in rows if "error" in row]
    if failed:
        lines += ["", "Failed:", ""]
        lines += [f"* {row['key']}: {row['error'].splitlines()[-1]}" for row in failed]
    return "\n".join(lines) + "\n"


def measured(rows: Sequence[Row], names: Mapping[str, str]) -> list[str]:
    """A line for each graph, model and rate."""
    meshes = [mesh for mesh in names if any(row["mesh"] == mesh for row in rows)]
    others = [mesh for mesh in meshes if mesh != BASE]
    heads = ["graph", "model", "Mbit/s", *(f"{names[mesh]}, s an epoch" for mesh in meshes)]
    heads += [f"{names[mesh]}: times faster" for mesh in others]
    heads += [f"{names[mesh]}, MB sent" for mesh in meshes]
    heads += [f"{names[mesh]}: of graph's bytes" for mesh in others]
    heads += [*(f"{names[mesh]}, exposed" for mesh in meshes), f"{names.get(BASE, BASE)}, due to links"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for (graph, model), case in cases(rows).items():
        for rate, line in case.items():
            cells = [graph, model, f"{rate:g}"]
            cells += [_cell(line, mesh, lambda row: f"{row['epoch_seconds']:.3f}") for mesh in meshes]
            cells += [_ratio(line, BASE, mesh, lambda row: row["epoch_seconds"]) for mesh in others]
            cells += [_cell(line, mesh, lambda row: f"{_sent(row) / 1e6:,.1f}") for mesh in meshes]
            cells += [_ratio(line, mesh, BASE, _sent) for mesh in others]
            cells += [_cell(line, mesh, lambda row: f"{row['exposed_share']:.0%}") for mesh in meshes]
            share = of_links(case, rate)
            cells.append("-" if share is None else f"{share:.0%}")
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def concluded(rows: Sequence[Row], names: Mapping[str, str]) -> list[str]:
    """A line for each graph and model: the rate of :data:`EXPOSED`, speed-ups there, even rates; averages."""
    found = conclusions(rows)
    meshes = list(found["average"])
    heads = ["graph", "model", f"rate of {EXPOSED:.0%} exposed, Mbit/s"]
    heads += [f"{names[mesh]}: times faster there" for mesh in meshes]
    heads += [f"{names[mesh]}: as fast as {names[BASE]} at, Mbit/s" for mesh in meshes]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for one in found["cases"]:
        cells = [one["graph"], one["model"], _rate(one)]
        cells += ["-" if one["speedup"][m] is None else f"{one['speedup'][m]:.2f}" for m in meshes]
        cells += [_even(one["even_rate"][m], one["speedups"][m]) for m in meshes]
        lines.append(f"| {' | '.join(cells)} |")
    lines.append("")
    for mesh, average in found["average"].items():
        if average["cases"]:
            lines.append(
                f"{names[mesh]}, where {names[BASE]} is exposed for {EXPOSED:.0%} of its epoch: "
                f"{average['arithmetic']:.2f} times faster on average, {average['geometric']:.2f} as a "
                f"geometric mean ({average['cases']} of {average['of']} cases have that rate among theirs).  "
            )
    return lines


def bubbles(rows: Sequence[Row], names: Mapping[str, str]) -> list[str]:
    """A line for each pipeline and rate: its bubble beside the simulated one; how far they are apart."""
    lines: list[str] = []
    apart: list[float] = []
    for (graph, model), case in cases(rows).items():
        for rate, line in case.items():
            found = {mesh: row["bubble"] for mesh, row in line.items() if row.get("bubble")}
            for mesh, both in found.items():
                lines.append(
                    f"| {graph} | {model} | {names[mesh]} | {rate:g} | {both['measured']:.0%} "
                    f"| {both['simulated']:.0%} |"
                )
                apart.append(both["measured"] - both["simulated"])
    if not lines:
        return []
    head = [
        "",
        "The *bubble* is the share of all ranks' time, from an epoch's first action to its last, without "
        "computing; *simulated* is the same order with the seconds of each action of that epoch, and a "
        f"message's bytes over the link's rate. They are {median(map(abs, apart)):.1%} of an epoch apart in "
        f"the middle, {max(map(abs, apart)):.1%} at most ({len(apart)} rows).",
        "",
        "| graph | model | mesh | Mbit/s | bubble, measured | simulated |",
        "|---|---|---|---|---|---|",
    ]
    return head + lines


def _sent(row: Row) -> float:
    return float(row["bytes_per_epoch"]["total"])


def _cell(line: Mapping[str, Row], mesh: str, text: Callable[[Row], str]) -> str:
    return text(line[mesh]) if mesh in line else "-"


def _ratio(line: Mapping[str, Row], above: str, below: str, figure: Callable[[Row], float]) -> str:
    if above not in line or below not in line or not figure(line[below]):
        return "-"
    return f"{figure(line[above]) / figure(line[below]):.2f}"


def _rate(one: Mapping[str, Any]) -> str:
    if one["rate"] is not None:
        return f"{one['rate']:.0f}"
    if one["exposed"] is None:
        return "-"
    low, high = one["exposed"]
    return f"none: {low:.0%} to {high:.0%}"


def _even(rate: float | None, times: Sequence[float]) -> str:
    if rate is not None:
        return f"{rate:.0f}"
    if not times:
        return "-"
    return "none: always faster" if min(times) > 1 else "none: always slower"
