"""Candidates: predicts what each way to split a training costs, and ranks them, each with a reason.

Where it sits: pure arithmetic on what ``autoplan.workload`` has measured; it loads no torch.

::

    seconds per epoch = computing of the slowest rank + waits for its messages
    bytes             = rows exchanged, times the bytes of a row
    memory            = what the fullest rank holds
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import prod
from typing import Any

from kagome.errors import PlanError
from kagome.planner.cluster import Cluster
from kagome.planner.cost_model import CostRates, Load, Sliced, computing, halos, passes, summed
from kagome.records.units import seconds_text
from kagome.schedule.simulator import Simulation

Setting = int | bool | str | tuple[float, ...]
"""The value of a setting of ``Parallel``."""


@dataclass(frozen=True)
class Candidate:
    """One way to split a training, and its predicted costs.

    Args:
        settings: The settings of ``Parallel`` that differ from those of one rank.
        exact: Whether the results equal those of one rank.
        epoch_seconds: Predicted seconds of an epoch.
        compute_seconds: The seconds of these that the slowest rank computes.
        exposed_seconds: The seconds of these that are spent waiting for messages and other stages.
        bytes_per_epoch: Bytes sent by all ranks in an epoch, by kind.
        memory_bytes: Bytes held by the fullest rank.
        uncertain: The relative uncertainty of the bytes, if the cut was estimated.
        seconds_off: The relative uncertainty of the seconds.
        reason: A sentence that compares it with another candidate.
        busy: The seconds that each rank computes; one value stands for all ranks if they are alike. Empty for
            a pipeline.
        held: Bytes held by each rank, in the order of ranks; empty if all may hold as much as the fullest.
        moved: Bytes of these that autograd saves for backward, in the order of ``held``; one value, that of
            the fullest rank, if ``held`` is empty. Empty if unknown.
        inner: Bytes of activations that are on a rank at a time if all others are away, or computed again:
            those of one layer, or of one chunk. In the order of ``moved``; empty if unknown.
        knob: Why the cut holds fewer activations than it could, and what that costs; empty if it does not.
        run: The simulation of a pipeline's stages, without waits for neighbours and sums. Kept for the best
            plans only.
    """

    settings: Mapping[str, Setting]
    exact: bool
    epoch_seconds: float
    compute_seconds: float
    exposed_seconds: float
    bytes_per_epoch: Mapping[str, int]
    memory_bytes: float
    uncertain: float = 0.0
    reason: str = ""
    busy: tuple[float, ...] = ()
    held: tuple[float, ...] = ()
    moved: tuple[float, ...] = ()
    inner: tuple[float, ...] = ()
    knob: str = ""
    run: Simulation | None = field(default=None, repr=False, compare=False)
    seconds_off: float = 0.0

    @property
    def name(self) -> str:
        """The settings as a user would write them."""
        return " ".join(f"{key}={value}" for key, value in self.settings.items()) or "one rank"

    @property
    def ranks(self) -> int:
        """The number of ranks that it takes."""
        sizes = (self.settings.get(axis, 1) for axis in ("pipe", "graph", "tensor"))
        return prod(size for size in sizes if isinstance(size, int))

    def lacks(self, cluster: Cluster) -> tuple[float, float] | None:
        """Return the bytes that the rank which lacks most would hold, and what it has; None if all fit."""
        there = cluster.memories(self.ranks)
        # Slices and stages say only what the fullest rank holds, which may be any.
        held = self.held if len(self.held) == len(there) else (self.memory_bytes,) * len(there)
        need, has = max(zip(held, there, strict=True), key=lambda pair: pair[0] / pair[1])
        return None if need <= has else (need, has)

    @property
    def total_bytes(self) -> int:
        """The bytes of all kinds in an epoch."""
        return sum(self.bytes_per_epoch.values())

    def record(self) -> dict[str, object]:
        """Return all fields except the simulation, as JSON values."""
        # asdict would copy the whole simulation, with thousands of actions, so it is removed first.
        told = asdict(replace(self, run=None))
        del told["run"]
        return {**told, "name": self.name}


@dataclass(frozen=True)
class Plans:
    """Candidates ranked by predicted time.

    Args:
        fitting: The candidates that fit the memory, the fastest first. An inexact one comes before an exact
            one only if it is at least ``WORTH`` times as fast.
        refused: The other candidates, each with the reason.
        facts: The facts that the predictions are based on.
    """

    fitting: tuple[Candidate, ...]
    refused: tuple[tuple[Candidate, str], ...]
    facts: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        """Return the plans as JSON text, the best first."""
        plans = [one.record() for one in self.fitting]
        refused = [{**one.record(), "refused": why} for one, why in self.refused]
        return json.dumps({"plans": plans, "refused": refused, "facts": dict(self.facts)}, indent=1)


WORTH = 1.1
"""How many times as fast an inexact plan must be to rank before an exact one: about the error of predictions
(benchmarks/planner)."""
OFF = 0.09
"""Median relative error of predicted seconds if two measurements agree (benchmarks/planner)."""
DRAWN = 3
"""Number of best plans whose simulation is kept."""
HIDES = 0.9
"""Share of the transfers that overlap with computing, of those that could: with late rows between emulated
hosts it was 0.88 or more in 11 of 12 settings (benchmarks/wire)."""
ROUNDS = 2
"""Rounds of messages to each other rank in an all-reduce of gradients."""


def parts(
    parts: int,
    loads: Sequence[Load],
    rates: CostRates,
    cluster: Cluster,
    uncertain: float,
    *,
    decoupled: bool = False,
    onebit: bool = False,
    halved: bool = False,
    late: bool = False,
    weights: tuple[float, ...] = (),
) -> Candidate:
    """Predict graph parallelism, with one rank per part.

    Args:
        parts: The number of parts.
        loads: The load of each part; a single load stands for all parts if they are alike.
        rates: The measured costs of the model.
        cluster: The cluster that it runs on.
        uncertain: The relative uncertainty of the halo.
        decoupled: Whether the model is decoupled.
        onebit: Whether rows of other parts are encoded at one bit per number.
        halved: Whether gradients of weights are summed in bf16.
        late: Whether rows of other parts are those of the epoch before, so that transfers between hosts
            overlap with it.
        weights: The weights of the parts that the loads are cut by; () if the parts are alike.
    """
    # A row is encoded at one end and decoded at the other, forward and backward: each rank does half of both
    # for the rows that it sends and for those that it reads. rates.coding is the time of both halves.
    coding = rates.coding * (rates.forward + rates.backward) / 2 if onebit else 0.0
    # A single rank may use all threads of the machine, while the rates are those of one rank among several.
    paces = [pace * (rates.alone if parts == 1 else 1.0) for pace in cluster.paces(parts)]
    coded = replace(rates, forward=rates.coded[0], backward=rates.coded[1]) if onebit else rates
    # bf16 has half the bytes of float32.
    messages = [size / 2 for size in rates.weights] if halved else rates.weights
    sums, link = summed(parts, messages), cluster.bandwidth(parts)
    # One load may stand for all parts, and ranks may be of unlike speed.
    each = loads if len(loads) == parts else [loads[0]] * parts
    busy = tuple(
        (computing(rates, load.rows, load.edges, load.sent + load.halo) + coding * (load.sent + load.halo))
        / pace
        for load, pace in zip(each, paces, strict=True)
    )
    # All ranks meet at every exchange. The slowest rank between two exchanges is not always the same one,
    # which makes an epoch longer than that of the rank that is slowest overall.
    compute = max(busy) * (rates.uneven if parts > 1 else 1.0)
    most, halo = halos(coded, loads, parts)
    # Rows that are in flight while a rank computes cost no time, except for the tenth that HIDES leaves. Late
    # rows have the whole epoch to arrive, others only until the layer that reads them. Within a host late
    # rows hide no more than others, and each is one pass through memory more.
    comes, near = most / link, cluster.one_host(parts)
    waits = comes - HIDES * min(comes, compute * (1.0 if late and not near else rates.meanwhile))
    waits += comes * (passes(late=late) / passes() - 1) if near else 0.0
    waits += sums / link
    # A rank sends its messages one after another: parts - 1 of them at each meeting.
    waits += cluster.latency * (parts - 1) * (rates.meetings + ROUNDS * len(rates.weights))
    settings = settings_of(decoupled, graph=parts)
    settings |= {"part_weights": weights} if weights else {}
    settings |= {"codec": "onebit"} if onebit else {}
    settings |= {"codec_weights": "bf16"} if halved else {}
    settings |= {"max_age": 1} if late else {}
    return Candidate(
        settings,
        not (decoupled or onebit or halved or late),
        compute + waits,
        compute,
        waits,
        {} if parts == 1 else {"halo": round(halo), "weights": round(sums * parts)},
        max(load.memory for load in loads),
        uncertain if parts > 1 else 0.0,
        busy=busy,
        held=tuple(load.memory for load in each),
        moved=tuple(load.activations for load in each),
        inner=_inner(each),
    )


def slices(
    sliced: Sliced,
    loads: Sequence[Load],
    rates: CostRates,
    cluster: Cluster,
    uncertain: float = 0.0,
    *,
    groups: int = 1,
    decoupled: bool,
) -> Candidate:
    """Predict feature slices, on several ranks of each part.

    Args:
        sliced: The number of slices, and their costs.
        loads: The load of each part as if one rank had it, with the memory of a real rank. A single load
            stands for all parts if they are alike.
        rates: The measured costs of the model.
        cluster: The cluster that it runs on; the ranks of a part are consecutive.
        uncertain: The relative uncertainty of the halo.
        groups: The number of parts.
        decoupled: Whether the model is decoupled.
    """
    count = sliced.count
    size = count * groups
    # One load may stand for all parts.
    rows = [load.rows for load in loads] if len(loads) == groups else [loads[0].rows] * groups
    pace = cluster.pace(size)
    most, halo = halos(rates, loads, groups) if groups > 1 else (0.0, 0.0)
    sums = summed(size, rates.weights)
    # Rows exchanged between parts are sliced too.
    busy = tuple(
        (sliced.computing(load) + rates.exchanged * (load.sent + load.halo) / count) / pace for load in loads
    )
    # sliced.sent counts the transposes of all ranks together. The part with the most rows has the largest
    # share, which its `count` ranks send over links within the group.
    waits = sliced.sent * max(rows) / max(sum(rows), 1) / count / cluster.bandwidth(count)
    waits += (most / count + sums) / cluster.bandwidth(size)
    # Transposes go to the count - 1 ranks of the own part, halo rows
    # to the size - count ranks of other parts.
    messages = (count - 1) * sliced.meetings + (size - count) * rates.meetings
    waits += cluster.latency * (messages + (size - 1) * ROUNDS * len(rates.weights))
    sent = {"transpose": round(sliced.sent), "weights": round(sums * size)}
    fullest = max(loads, key=lambda load: load.memory)
    return Candidate(
        settings_of(decoupled, graph=groups, tensor=count),
        not decoupled,
        max(busy) + waits,
        max(busy),
        waits,
        {"halo": round(halo), **sent} if groups > 1 else sent,
        fullest.memory,
        uncertain if groups > 1 else 0.0,
        busy=busy,
        moved=(fullest.activations,),
        inner=_inner([fullest]),
    )


def _inner(loads: Sequence[Load]) -> tuple[float, ...]:
    """Return the activations of one layer on each rank; () if unknown, as where no layer runs again."""
    # Layers run again on all ranks or on none.
    found = [load.inner for load in loads if load.inner is not None]
    return tuple(found) if len(found) == len(loads) else ()


def settings_of(decoupled: bool, **axes: int) -> dict[str, Setting]:
    """Return the settings that a user would write for a mesh."""
    mesh: dict[str, Setting] = {axis: size for axis, size in axes.items() if size > 1}
    return {**mesh, "decouple": True} if decoupled else mesh


def weighed(one: Candidate) -> float:
    """Return the seconds by which a candidate ranks: an inexact one counts as if it were slower."""
    return one.epoch_seconds * (1.0 if one.exact else WORTH)


def size_text(size: float) -> str:
    """Return bytes as gigabytes, the unit in which a plan's table shows memory of this size."""
    return f"{size / 1e9:.3g} GB"


def ranked(
    candidates: Sequence[Candidate], cluster: Cluster, facts: Mapping[str, object] | None = None
) -> Plans:
    """Rank the candidates that fit by predicted time, give each a reason, and refuse the others.

    The time of an inexact candidate counts ``WORTH`` times. Late rows within one host are refused.

    Raises:
        PlanError: If no candidate fits.
    """
    idle = [(one, why) for one in candidates if (why := _late_in_vain(one, candidates, cluster))]
    vain = {id(one) for one, _ in idle}
    lacking = [(one, one.lacks(cluster)) for one in candidates if id(one) not in vain]
    fitting = sorted(
        (one for one, lack in lacking if lack is None),
        # An inexact plan ranks first only if it is faster by more than the error of a prediction.
        key=weighed,
    )
    refused = [
        (
            replace(one, run=None),
            f"needs {size_text(lack[0])} a rank, and a rank has {size_text(lack[1])}",
        )
        for one, lack in lacking
        if lack is not None
    ]
    if not fitting:
        # The plan nearest to fitting tells the user how much memory is missing.
        least, lack = min(
            ((one, lack) for one, lack in lacking if lack is not None),
            key=lambda pair: pair[1][0] / pair[1][1],
        )
        raise PlanError(
            f"a cut that fits {cluster.size} devices of {size_text(lack[1])}",
            f"{least.name}, which needs least, at {size_text(lack[0])} a rank",
            hint="more devices, a narrower model, or --allow history decoupled",
        )
    told = [
        # A page draws the first few plans only, and a simulation of many chunks is large.
        _with_reason(one if place < DRAWN else replace(one, run=None), fitting)
        for place, one in enumerate(fitting)
    ]
    return Plans(tuple(told), (*idle, *refused), facts or {})


def _late_in_vain(one: Candidate, candidates: Sequence[Candidate], cluster: Cluster) -> str:
    """Return why late rows gain nothing in a candidate; empty if they may, or if none are late."""
    if "max_age" not in one.settings or not cluster.one_host(one.ranks):
        return ""
    waiting = {name: value for name, value in one.settings.items() if name != "max_age"}
    other = next((each for each in candidates if each.settings == waiting), None)
    if other is None:
        return ""
    return (
        f"late rows gain nothing among ranks of one host, which hand rows over in memory: "
        f"{seconds_text(one.epoch_seconds)} an epoch, {seconds_text(other.epoch_seconds)} with rows that "
        "are waited for"
    )


def _with_reason(one: Candidate, fitting: Sequence[Candidate]) -> Candidate:
    """Add the sentence that compares a candidate with the best, or the best with its runner-up."""
    best = fitting[0]
    # The best is compared with its runner-up, any other with the best.
    other = (fitting[1] if len(fitting) > 1 else None) if one is best else best
    share = one.exposed_seconds / one.epoch_seconds if one.epoch_seconds else 0.0
    what = "messages and other stages" if "pipe" in one.settings else "messages"
    waits = f"{share:.0%} of an epoch waits for {what}" if one.bytes_per_epoch else "nothing crosses"
    if other is None:
        text = f"the only one that fits; {waits}"
    else:
        ratio = max(one.epoch_seconds, other.epoch_seconds) / min(one.epoch_seconds, other.epoch_seconds)
        verb = "faster" if one.epoch_seconds < other.epoch_seconds else "slower"
        # The best may be slower than its runner-up: an exact plan ranks before a slightly faster inexact one.
        before = ", but exact" if one is best and verb == "slower" else ""
        text = f"{ratio:.2f} times {verb} than {other.name}{before}: {_why(one, other)}; {waits}"
    return replace(one, reason=f"{text}; {one.knob}" if one.knob else text)


def _why(one: Candidate, other: Candidate) -> str:
    computing = one.compute_seconds - other.compute_seconds
    waiting = one.exposed_seconds - other.exposed_seconds
    faster = computing + waiting < 0
    # The larger of the two differences has the sign of their sum, so it is the reason.
    if abs(computing) >= abs(waiting):
        return f"each rank computes {'less' if faster else 'more'}"
    return "less waiting" if faster else "more waiting"
