"""The report page of a run: one HTML file that opens offline, without scripts.

Where it sits: the end of the flow; ``kagome train`` and ``kagome report`` call :func:`write_page` on a run
directory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kagome.report import sections
from kagome.report.files import write_text
from kagome.report.folder import RunFolder, read_folder
from kagome.report.html import document


def write_page(folder: str | Path) -> Path:
    """Write ``report.html`` into a run directory.

    Args:
        folder: The run directory: ``metrics.jsonl`` or ``summary.json``, and where they are there
            ``config.toml`` and ``trace.json``.

    Returns:
        The page's path.

    Raises:
        ConfigError: If there is no such folder or nothing of a run in it.
    """
    run = read_folder(folder)
    return write_text(run.path / "report.html", page_html(run))


def page_html(run: RunFolder) -> str:
    """The page of a run as HTML; sections without anything to say are left out."""
    title, facts = title_of(run)
    parts = (
        sections.warnings(run),
        sections.figures(run),
        sections.bottleneck(run),
        sections.learning(run),
        sections.time(run),
        sections.timeline(run),
        sections.pipeline(run),
        sections.beside(sections.traffic(run), sections.memory(run)),
        sections.crossing(run),
        sections.partition(run),
        sections.notes(run),
        sections.settings(run),
    )
    return document(title, facts, parts, f"Kagome, run directory {run.path.resolve()}")


def title_of(run: RunFolder) -> tuple[str, str]:
    """What was trained, and on what: the title and the line below it, not yet escaped."""
    model, data = run.setting("model", "name"), run.setting("data", "name")
    layers = run.setting("model", "layers")
    depth = f" with {layers} layer{'s' if layers != 1 else ''}" if layers and model else ""
    title = f"{model or 'A model'}{depth} on {data}" if data else f"{model or 'Run'}{depth}"
    values = run.summary
    facts: list[str] = []
    if ranks := values.get("world_size"):
        facts.append(f"{ranks} rank{'s' if ranks != 1 else ''}")
    cut = values.get("partition")
    chosen = {"partitioner": cut["partitioner"]} if isinstance(cut, dict) and "partitioner" in cut else {}
    facts += _mesh({**(values.get("parallel") or {}), **chosen})
    if epochs := values.get("epochs"):
        facts.append(f"{epochs} epoch{'s' if epochs != 1 else ''}")
    if values.get("seed") is not None:
        facts.append(f"seed {values['seed']}")
    return title, " · ".join(facts)


def _mesh(parallel: dict[str, Any]) -> list[str]:
    """The cut in words: mesh axes above one, the partitioner and the codec where they say something."""
    axes = [f"{axis} {parallel[axis]}" for axis in ("pipe", "graph", "tensor") if _above_one(parallel, axis)]
    if axes and parallel.get("partitioner") and _above_one(parallel, "graph"):
        axes.append(f"{parallel['partitioner']} partition")
    if parallel.get("codec", "none") != "none":
        axes.append(f"{parallel['codec']} codec")
    return axes


def _above_one(parallel: dict[str, Any], axis: str) -> bool:
    size = parallel.get(axis)
    return isinstance(size, int) and size > 1
