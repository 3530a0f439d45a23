"""Report page of a run: one HTML file that opens offline, without scripts.

Where it sits: the end of the flow; ``kagome train`` and ``kagome report`` call :func:`write_page` on a run
directory.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

from kagome.errors import shortened
from kagome.report.page import sections
from kagome.report.page.html import document
from kagome.report.run_data import RunFolder, read_folder
from kagome.storage.atomic import write_text

Drawn = TypeVar("Drawn")
BROKEN: Final = (
    *(TypeError, ValueError, KeyError, IndexError, AttributeError),
    *(ArithmeticError, AssertionError, RecursionError, StopIteration),
)
"""Exceptions that a section raises if a run's files hold values that no run writes."""


def write_page(folder: str | Path) -> Path:
    """Write ``report.html`` into a run directory and return its path; see :func:`report`."""
    return report(folder)[1]


def report(folder: str | Path) -> tuple[RunFolder, Path]:
    """Write ``report.html`` into a run directory.

    Args:
        folder: The run directory, with ``metrics.jsonl`` or ``summary.json``, and optionally ``config.toml``
            and ``trace.json``.

    Returns:
        The run as it was read, with a sentence for each fault of its files; the page's path.

    Raises:
        ConfigError: If there is no such folder, or it holds no files of a run.
    """
    run = read_folder(folder)
    text = page_html(run)
    return run, write_text(run.path / "report.html", text)


def page_html(run: RunFolder) -> str:
    """Return the page of a run as HTML; empty sections are left out.

    A section is also left out if its values are not those of a run; ``run.faults`` then says so.
    """
    title, facts = _drawn(run, title_of, ("A run", ""))
    parts = [
        _drawn(run, draw, "")
        for draw in (
            *(sections.figures, sections.bottleneck, sections.learning, sections.time, sections.timeline),
            *(sections.pipeline, _costs, sections.crossing, sections.partition),
            *(sections.notes, sections.settings),
        )
    ]
    first = _drawn(run, sections.warnings, "")
    return document(title, facts, (first, *parts), f"Kagome, run directory {run.path.resolve()}")


def _costs(run: RunFolder) -> str:
    return sections.beside(sections.traffic(run), sections.memory(run))


def _drawn(run: RunFolder, draw: Callable[[RunFolder], Drawn], without: Drawn) -> Drawn:
    """Return a section, or ``without`` if the run's files hold values that the section cannot show."""
    try:
        return draw(run)
    except BROKEN as error:
        found = shortened(f"{type(error).__name__}: {error}", 200)
        run.faults.append(
            f"the page leaves {draw.__name__.strip('_')} out: the run's files hold other values ({found})"
        )
        return without


def title_of(run: RunFolder) -> tuple[str, str]:
    """Return the title and the line below it, which say what was trained and on what; not yet escaped."""
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
    """Describe the mesh axes above one, and the partitioner and the codec if they matter."""
    axes = [f"{axis} {parallel[axis]}" for axis in ("pipe", "graph", "tensor") if _above_one(parallel, axis)]
    if axes and parallel.get("partitioner") and _above_one(parallel, "graph"):
        axes.append(f"{parallel['partitioner']} partition")
    if parallel.get("codec", "none") != "none":
        axes.append(f"{parallel['codec']} codec")
    return axes


def _above_one(parallel: dict[str, Any], axis: str) -> bool:
    size = parallel.get(axis)
    return isinstance(size, int) and size > 1
