"""Memory knobs: for cuts that do not fit, the cheapest way to hold fewer activations that makes them fit.

Where it sits: between the candidates that ``autoplan.workload`` predicts and ``candidates.ranked``, which
ranks and refuses them. Pure arithmetic; it loads no torch.

::

    cut that does not fit ──┬──> layers run again: predicted from measurements of its own      (recompute)
                            └──> activations in host memory: two copies over the device's link (host)
                                             └──> the fastest one that fits, with its cost in words

Both are exact, so no flag allows them. What changes numbers to save memory is no knob: see ``--allow``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from kagome.planner.candidates import Candidate, size_text, weighed
from kagome.planner.cluster import Cluster
from kagome.records.units import seconds_text

KNOB: Final = "activations"
"""The setting of ``Parallel`` that holds a plan's memory knob."""
ROUNDED: Final = 2.0
"""Most host bytes of a byte moved there: torch allocates pinned memory in powers of two."""


def eased(
    found: Sequence[Candidate], recomputed: Callable[[], Sequence[Candidate]], cluster: Cluster
) -> list[Candidate]:
    """Add to candidates that do not fit the same cuts with a memory knob.

    A knob makes no cut faster. So none is looked for where the cut alone would be no faster than the best one
    that fits, and nothing is measured for it.

    Args:
        found: The candidates without knobs.
        recomputed: Predicts the candidates with layers that run again in backward, as far as these can run
            so; called once, and only if a knob is looked for.
        cluster: The cluster that they run on.

    Returns:
        All candidates as they were, and for each cut of which a knob is looked for the fastest way that fits,
        else the way that lacks least. No way is added that does not hold less than the cut itself.
    """
    # With nothing that fits, any way is better than an error.
    best = min((weighed(one) for one in found if one.lacks(cluster) is None), default=None)
    wanted = [one for one in found if one.lacks(cluster) and (best is None or weighed(one) < best)]
    if not wanted:
        return list(found)
    twins = {one.name: one for one in recomputed()}
    more = (_cheapest(one, twins.get(one.name), cluster) for one in wanted)
    return [*found, *(one for one in more if one is not None)]


def _cheapest(one: Candidate, twin: Candidate | None, cluster: Cluster) -> Candidate | None:
    """Return the fastest knob of a cut that makes it fit, else the one that lacks least; None without any."""
    ways = [way for way in (run_again(one, twin), on_host(one, twin, cluster)) if way is not None]
    # A GCN layer, say, saves its inputs alone, so that running it again would only take time.
    ways = [_told(way, one, cluster) for way in ways if _short(way, cluster) < _short(one, cluster)]
    fitting = [way for way in ways if way.lacks(cluster) is None]
    if fitting:
        return min(fitting, key=lambda way: way.epoch_seconds)
    # One that lacks least is refused with its numbers, which say how far it is from fitting.
    return min(ways, key=lambda way: _short(way, cluster), default=None)


def run_again(one: Candidate, twin: Candidate | None) -> Candidate | None:
    """Return a cut whose layers run again in backward."""
    if twin is None:
        return None
    # Both are measured, at different moments. A second forward takes time, whatever the clock has said.
    more = max(twin.epoch_seconds - one.epoch_seconds, 0.0)
    return replace(
        twin,
        settings={**one.settings, KNOB: "recompute"},
        epoch_seconds=one.epoch_seconds + more,
        compute_seconds=max(twin.compute_seconds, one.compute_seconds),
        exposed_seconds=one.epoch_seconds + more - max(twin.compute_seconds, one.compute_seconds),
    )


def on_host(one: Candidate, twin: Candidate | None, cluster: Cluster) -> Candidate | None:
    """Return a cut whose activations wait in host memory; None if there is none, or nobody knows its size."""
    # One layer's activations are back on the device at a time. Of stages the chunks bound them; of others
    # they are known where layers have run again.
    back = one.inner or (twin.inner if twin is not None else ())
    if not (cluster.to_host and one.moved and len(back) == len(one.moved)):
        return None
    most = max(one.moved)
    # All ranks of a host share its memory; the fullest stands for each of them.
    if ROUNDED * most * min(one.ranks, cluster.devices) > cluster.host_memory:
        return None
    less = [moved - again for moved, again in zip(one.moved, back, strict=True)]
    # The copies run on the stream that computes, in forward and in backward.
    copies = 2 * most / cluster.to_host
    held = one.held or (one.memory_bytes,)
    each = tuple(bytes_ - away for bytes_, away in zip(held, less, strict=True))
    return replace(
        one,
        settings={**one.settings, KNOB: "host"},
        epoch_seconds=one.epoch_seconds + copies,
        compute_seconds=one.compute_seconds + copies,
        memory_bytes=max(each),
        held=each if one.held else (),
        busy=tuple(seconds + copies for seconds in one.busy),
    )


def _told(way: Candidate, one: Candidate, cluster: Cluster) -> Candidate:
    """Add to a cut with a knob why it has one, and what that costs."""
    lack = one.lacks(cluster)
    assert lack is not None
    costs = f"{seconds_text(way.epoch_seconds - one.epoch_seconds)} an epoch"
    if way.settings[KNOB] == "host":
        costs += f" and up to {size_text(ROUNDED * max(one.moved))} of host memory a rank"
    text = f"a rank has {size_text(lack[1])} and would need {size_text(lack[0])}"
    return replace(way, knob=f"{text} without {KNOB}={way.settings[KNOB]}, which costs {costs}")


def _short(one: Candidate, cluster: Cluster) -> float:
    """Return how many times the memory of the rank that lacks most it needs; 1 if all fit."""
    lack = one.lacks(cluster)
    return 1.0 if lack is None else lack[0] / lack[1]
