"""Meshes: what each cut of a graph's training would cost, ranked, with a reason.

Where it sits: pure arithmetic on what ``autoplan.workload`` measured or was told; loads no torch.

::

    seconds an epoch = slowest rank's computing + its messages: none of them is taken to hide behind it
    bytes            = rows that cross, times what a row costs
    memory           = what the fullest rank holds
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import prod

from kagome.errors import PlanError
from kagome.planner.cluster import Cluster
from kagome.planner.cost_model import CostRates, Load, Sliced, computing, halos, summed
from kagome.schedule.simulator import Simulation


@dataclass(frozen=True)
class Candidate:
    """One way to train, and what it is predicted to cost.

    Args:
        settings: Of ``Parallel`` that differ from one rank's.
        exact: Whether it gives what one rank gives.
        epoch_seconds: Predicted.
        compute_seconds: Of the slowest rank.
        exposed_seconds: Of waiting for messages and other stages.
        bytes_per_epoch: Of all ranks, by kind.
        memory_bytes: Of the fullest rank.
        uncertain: By which share bytes may be off, where a cut was estimated.
        seconds_off: By which share seconds may be off.
        reason: In one sentence.
        busy: Seconds that each rank computes; one stands for all where they are alike. Empty for a pipeline.
        run: What a pipeline's stages do over time; waiting for neighbours and sums comes on top. Of the best
            plans alone.
    """

    settings: Mapping[str, int | bool | str]
    exact: bool
    epoch_seconds: float
    compute_seconds: float
    exposed_seconds: float
    bytes_per_epoch: Mapping[str, int]
    memory_bytes: float
    uncertain: float = 0.0
    reason: str = ""
    busy: tuple[float, ...] = ()
    run: Simulation | None = field(default=None, repr=False, compare=False)
    seconds_off: float = 0.0

    @property
    def name(self) -> str:
        """As a user would write it."""
        return " ".join(f"{key}={value}" for key, value in self.settings.items()) or "one rank"

    @property
    def ranks(self) -> int:
        """How many it takes."""
        return prod(int(self.settings.get(axis, 1)) for axis in ("pipe", "graph", "tensor"))

    @property
    def total_bytes(self) -> int:
        """Of all kinds."""
        return sum(self.bytes_per_epoch.values())

    def record(self) -> dict[str, object]:
        """All but what its stages do over time, as JSON has it."""
        told = asdict(replace(self, run=None))
        del told["run"]
        return {**told, "name": self.name}


@dataclass(frozen=True)
class Plans:
    """Ranked candidates.

    Args:
        fitting: Those that fit, the fastest first; one that is not exact only where it is ``WORTH`` it.
        refused: The others, with why.
        facts: What they were predicted from.
    """

    fitting: tuple[Candidate, ...]
    refused: tuple[tuple[Candidate, str], ...]
    facts: Mapping[str, object] = field(default_factory=dict)

    def to_json(self) -> str:
        """As text: a list of plans, the best first."""
        plans = [one.record() for one in self.fitting]
        refused = [{**one.record(), "refused": why} for one, why in self.refused]
        return json.dumps({"plans": plans, "refused": refused, "facts": dict(self.facts)}, indent=1)


WORTH = 1.1
"""How many times as fast a plan that is not exact has to be to stand before one that is: about the error of
what is predicted (benchmarks/planner)."""
OFF = 0.09
"""By this share predicted seconds are off in the middle, if two measurements agree (benchmarks/planner)."""
DRAWN = 3
"""Of so many plans what happens over time is kept."""
HIDES = 0.9
"""Of what could travel while a rank computes, so much does: late rows between emulated hosts hid 0.88 or more
in 11 of 12 settings (benchmarks/wire)."""
ROUNDS = 2
"""Of messages to each other rank that a sum of gradients takes."""


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
) -> Candidate:
    """Graph parallelism on so many ranks.

    Args:
        parts: How many.
        loads: Of each part; one stands for all where they are alike.
        rates: Of the model.
        cluster: Where it runs.
        uncertain: By which share the halo may be off.
        decoupled: Whether maps come first.
        onebit: Whether rows of other parts have one bit a number.
        halved: Whether gradients of weights are summed in bf16.
        late: Whether they are those of the epoch before, and travel meanwhile.
    """
    coding = rates.coding * (rates.forward + rates.backward) / 2 if onebit else 0.0
    pace = cluster.pace(parts) * (rates.alone if parts == 1 else 1.0)
    coded = replace(rates, forward=rates.coded[0], backward=rates.coded[1]) if onebit else rates
    messages = [size / 2 for size in rates.weights] if halved else rates.weights
    sums, link = summed(parts, messages), cluster.bandwidth(parts)
    busy = tuple(
        (computing(rates, load.rows, load.edges, load.sent + load.halo) + coding * (load.sent + load.halo))
        / pace
        for load in loads
    )
    compute = max(busy) * (rates.uneven if parts > 1 else 1.0)
    most, halo = halos(coded, loads, parts)
    comes = most / link
    waits = comes - HIDES * min(comes, compute * (1.0 if late else rates.meanwhile)) + sums / link
    waits += cluster.latency * (parts - 1) * (rates.meetings + ROUNDS * len(rates.weights))
    settings = settings_of(decoupled, graph=parts)
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
    """Feature slices on so many ranks of each part.

    Args:
        sliced: How many, and what they do.
        loads: Of each part, as if one rank had it; a rank's memory. One stands for all where they are alike.
        rates: Of the model.
        cluster: Where it runs; the ranks of a part follow each other.
        uncertain: By which share the halo may be off.
        groups: Parts.
        decoupled: Whether maps come first.
    """
    count = sliced.count
    size = count * groups
    rows = [load.rows for load in loads] if len(loads) == groups else [loads[0].rows] * groups
    pace = cluster.pace(size)
    most, halo = halos(rates, loads, groups) if groups > 1 else (0.0, 0.0)
    sums = summed(size, rates.weights)
    # What is crossed between parts is cut too.
    busy = tuple(
        (sliced.computing(load) + rates.crossed * (load.sent + load.halo) / count) / pace for load in loads
    )
    waits = sliced.sent * max(rows) / max(sum(rows), 1) / count / cluster.bandwidth(count)
    waits += (most / count + sums) / cluster.bandwidth(size)
    messages = (count - 1) * sliced.meetings + (size - count) * rates.meetings
    waits += cluster.latency * (messages + (size - 1) * ROUNDS * len(rates.weights))
    sent = {"transpose": round(sliced.sent), "weights": round(sums * size)}
    return Candidate(
        settings_of(decoupled, graph=groups, tensor=count),
        not decoupled,
        max(busy) + waits,
        max(busy),
        waits,
        {"halo": round(halo), **sent} if groups > 1 else sent,
        max(load.memory for load in loads),
        uncertain if groups > 1 else 0.0,
        busy=busy,
    )


def settings_of(decoupled: bool, **axes: int) -> dict[str, int | bool | str]:
    """What a user would write."""
    mesh: dict[str, int | bool | str] = {axis: size for axis, size in axes.items() if size > 1}
    return {**mesh, "decouple": True} if decoupled else mesh


def ranked(
    candidates: Sequence[Candidate], cluster: Cluster, facts: Mapping[str, object] | None = None
) -> Plans:
    """Candidates that fit by predicted time, each with its reason beside the next best; and the others.

    One that is not exact counts as ``WORTH`` times as slow as it is.

    Raises:
        PlanError: If none fits.
    """
    fitting = sorted(
        (one for one in candidates if one.memory_bytes <= cluster.memory),
        key=lambda one: one.epoch_seconds * (1.0 if one.exact else WORTH),
    )
    refused = [
        (
            replace(one, run=None),
            f"needs {one.memory_bytes / 2**30:.2f} GiB a rank, there are {cluster.memory / 2**30:.2f}",
        )
        for one in candidates
        if one.memory_bytes > cluster.memory
    ]
    if not fitting:
        least = min(candidates, key=lambda one: one.memory_bytes)
        raise PlanError(
            f"a cut fits {cluster.size} devices of {cluster.memory / 2**30:.2f} GiB",
            f"{least.name} needs least, {least.memory_bytes / 2**30:.2f} GiB a rank",
            hint="more devices, a narrower model, or --allow history decoupled",
        )
    told = [
        _with_reason(one if place < DRAWN else replace(one, run=None), fitting)
        for place, one in enumerate(fitting)
    ]
    return Plans(tuple(told), tuple(refused), facts or {})


def _with_reason(one: Candidate, fitting: Sequence[Candidate]) -> Candidate:
    """A sentence that sets a candidate beside its runner-up, or beside the best."""
    best = fitting[0]
    other = (fitting[1] if len(fitting) > 1 else None) if one is best else best
    share = one.exposed_seconds / one.epoch_seconds if one.epoch_seconds else 0.0
    what = "messages and other stages" if "pipe" in one.settings else "messages"
    waits = f"{share:.0%} of an epoch waits for {what}" if one.bytes_per_epoch else "nothing crosses"
    if other is None:
        text = f"the only one that fits; {waits}"
    else:
        ratio = max(one.epoch_seconds, other.epoch_seconds) / min(one.epoch_seconds, other.epoch_seconds)
        verb = "faster" if one.epoch_seconds < other.epoch_seconds else "slower"
        before = ", but exact" if one is best and verb == "slower" else ""
        text = f"{ratio:.2f} times {verb} than {other.name}{before}: {_why(one, other)}; {waits}"
    return replace(one, reason=text)


def _why(one: Candidate, other: Candidate) -> str:
    computing = one.compute_seconds - other.compute_seconds
    waiting = one.exposed_seconds - other.exposed_seconds
    faster = computing + waiting < 0
    if abs(computing) >= abs(waiting):
        return "it computes less a rank" if faster else "it computes more a rank"
    return "less of it waits for messages" if faster else "more of it waits for messages"
