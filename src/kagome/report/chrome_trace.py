"""Chrome trace of a run: ``trace.json`` for Perfetto.

Where it sits: rank 0 writes it from the spans gathered from all ranks; ``run_data`` reads it back for the
charts of the page.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kagome.config.fields import shown
from kagome.errors import ConfigError
from kagome.records.spans import COMPUTE, MOVE, SET_UP, Span, action_of
from kagome.schedule.actions import Action
from kagome.storage import text_files
from kagome.storage.atomic import write_json

_CNAMES = {"F": "rail_response", "B": "rail_load", "SEND": "rail_idle", "RECV": "generic_work"}
"""Colours that chrome://tracing knows by name. Perfetto colours a slice by its name without numbers, so each
kind of action has its own colour there already.
"""


def write_trace(path: str | Path, spans_by_rank: Sequence[Sequence[Span]]) -> Path:
    """Write a trace that https://ui.perfetto.dev and chrome://tracing open, with one process per rank.

    Args:
        path: The file, usually ``trace.json`` of the run directory.
        spans_by_rank: One list per rank (:meth:`Spans.as_list`), with one common zero; the earliest start is
            0.

    Returns:
        The path.
    """
    zero = min((span.start for spans in spans_by_rank for span in spans), default=0.0)
    events: list[dict[str, Any]] = []
    for rank, spans in enumerate(spans_by_rank):
        # Metadata events ("ph": "M") name and order the processes; "X" is an event with begin and duration.
        for name, args in (
            ("process_name", {"name": f"rank {rank}"}),
            ("process_sort_index", {"sort_index": rank}),
            ("thread_name", {"name": "phases"}),
        ):
            events.append({"name": name, "ph": "M", "pid": rank, "tid": 0, "args": args})
        for span in spans:
            # Both ends are rounded to whole nanoseconds. A duration rounded by itself could let an inner span
            # end after its outer one, and Perfetto drops such spans.
            start, end = (round((t - zero) * 1e9) for t in (span.start, span.start + span.duration))
            action = action_of(span.name)
            event: dict[str, Any] = {
                "name": span.name,
                "cat": _category(span.name) if action is None else "pipeline",
                "ph": "X",
                "pid": rank,
                "tid": 0,
                # The format counts in microseconds; three decimals keep nanoseconds.
                "ts": start / 1e3,
                "dur": (end - start) / 1e3,
                "args": {} if span.epoch is None else {"epoch": span.epoch},
            }
            if action is not None:
                event["args"] |= _arguments(action)
                event["cname"] = _CNAMES[action.kind.value.split("_")[0]]
            events.append(event)
    return write_json(path, {"traceEvents": events, "displayTimeUnit": "ms"}, indent=None)


def read_trace(path: str | Path) -> list[list[Span]]:
    """Read the spans back from a trace.

    Args:
        path: A file that :func:`write_trace` wrote.

    Returns:
        One list per rank, in seconds after the trace's zero.

    Raises:
        ConfigError: If the file is not such a trace.
    """
    try:
        found = text_files.json_file(path)
        # The format also allows a bare list of events, which Kagome does not write.
        events = found.get("traceEvents") if isinstance(found, dict) else None
        if not isinstance(events, list):
            raise text_files.UnreadableError("it has no list of traceEvents")
        ranks: dict[int, list[Span]] = {}
        for event in events:
            # A rank without spans still has its metadata, and so an empty row in the chart.
            rank, span = _span(event)
            spans = ranks.setdefault(rank, [])
            spans += [] if span is None else [span]
    except text_files.UnreadableError as error:
        raise ConfigError(f"{path} to be a trace", f"one that cannot be read: {error}") from None
    return [ranks[rank] for rank in sorted(ranks)]


def _span(event: Any) -> tuple[int, Span | None]:
    """Return an event's rank, and its span if it is one.

    Raises:
        UnreadableError: If it is not an event that :func:`write_trace` writes.
    """
    rank = event.get("pid") if isinstance(event, dict) else None
    # Bounds on all numbers: charts allocate by rank and by time, and a trace may come from anywhere.
    if not isinstance(rank, int) or isinstance(rank, bool) or not 0 <= rank < 2**20:
        raise text_files.UnreadableError(f"an event has the pid {shown(rank, 80)}")
    if event.get("ph") != "X":
        return rank, None
    name, args = event.get("name"), event.get("args", {})
    epoch = args.get("epoch") if isinstance(args, dict) else None
    times = [event.get("ts"), event.get("dur")]
    fine = isinstance(name, str) and all(
        isinstance(time, int | float) and not isinstance(time, bool) and 0 <= time < 1e15 for time in times
    )
    if not fine or not (epoch is None or (type(epoch) is int and 0 <= epoch < 2**53)):
        raise text_files.UnreadableError(
            f"an event of rank {rank} has the name {shown(name, 80)}, ts {shown(times[0], 40)}, "
            f"dur {shown(times[1], 40)} and epoch {shown(epoch, 40)}"
        )
    return rank, Span(name, times[0] / 1e6, times[1] / 1e6, epoch)


def _arguments(action: Action) -> dict[str, Any]:
    """Return an action's arguments in the trace; the peer only if the action has one."""
    found = {
        "stage": action.stage,
        "chunk": action.chunk,
        "kind": action.kind.value,
        "peer": None if action.kind.computes else action.other,
    }
    return {name: value for name, value in found.items() if value is not None}


def _category(name: str) -> str:
    groups = {"compute": COMPUTE, "exchange": MOVE, "set-up": SET_UP}
    return next((group for group, names in groups.items() if name in names), "other")
