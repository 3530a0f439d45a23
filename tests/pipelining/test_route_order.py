"""Every schedule ends with nccl's rules of order if each route has a communicator, and does not with fewer.

The transfers of each rank run against a recorder. What they begin and wait for is then performed on imaginary
communicators: operations of one communicator follow each other on each rank, and a message ends only when it
comes first on both.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from kagome.comm.transport.routes import POSTED_AHEAD, Route, both_passes
from kagome.pipelining.dag.replicas import _summed
from kagome.pipelining.dag.sample_layout import SampleLayout
from kagome.pipelining.dag.transfers import DagTransfers
from kagome.pipelining.executor import needed
from kagome.pipelining.p2p import StageTransfers
from kagome.schedule.actions import Action, ActionKind, Program, parse
from kagome.schedule.schedules import Shape, arrivals, fill_drain, forward_only, k_forward_k_backward

Communicator = Callable[[Route], Hashable]
COMMUNICATORS: dict[str, Communicator] = {
    "one for all": lambda route: "all",
    "one a pair": lambda route: frozenset(route[:2]),
    "one a pair and pass": lambda route: (frozenset(route[:2]), route.backward),
    "one a route": lambda route: route,
}


@dataclass
class Message:
    """One end of a message."""

    rank: int
    route: Route
    text: str
    shape: tuple[int, ...]


@dataclass
class Recorder:
    """A channel that notes what a rank begins and waits for."""

    rank: int
    size: int
    lanes: bool = False
    log: list[tuple[str, Message]] = field(default_factory=list)

    def start_send(
        self, rows: Tensor, peer: int, *, action: str, kind: str = "", backward: bool = False
    ) -> Any:
        return self._begun(Route(self.rank, peer, backward), action, tuple(rows.shape), rows)

    def start_receive(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        peer: int,
        *,
        action: str,
        kind: str = "",
        backward: bool = False,
    ) -> Any:
        return self._begun(
            Route(peer, self.rank, backward), action, tuple(shape), torch.zeros(tuple(shape), dtype=dtype)
        )

    def _begun(self, route: Route, text: str, shape: tuple[int, ...], rows: Tensor) -> Any:
        message = Message(self.rank, route, text, shape)
        self.log.append(("begin", message))

        def wait() -> Tensor:
            self.log.append(("wait", message))
            return rows

        return SimpleNamespace(wait=wait)


def stuck(logs: Sequence[Sequence[tuple[str, Message]]], communicator: Communicator) -> list[str]:
    """Perform what the ranks do, and return where ranks wait for ever."""
    streams: dict[tuple[int, Hashable], deque[Message]] = defaultdict(deque)
    at, ended = [0] * len(logs), set[int]()
    moved = True
    while moved:
        moved = False
        for rank, log in enumerate(logs):
            while at[rank] < len(log):
                step, message = log[at[rank]]
                if step == "wait" and id(message) not in ended:
                    break
                if step == "begin":
                    streams[rank, communicator(message.route)].append(message)
                at[rank] += 1
                moved = True
        for (rank, number), stream in list(streams.items()):
            while stream and stream[0].route.sender == rank:
                sent = stream[0]
                other = streams[sent.route.receiver, number]
                # Both ends come first, and they are the two ends of one message.
                if not (other and other[0].route == sent.route):
                    break
                assert other[0].shape == sent.shape
                ended |= {id(stream.popleft()), id(other.popleft())}
                moved = True
    return [f"rank {rank}: {log[at[rank]]}" for rank, log in enumerate(logs) if at[rank] < len(log)]


def matched(logs: Sequence[Sequence[tuple[str, Message]]]) -> None:
    """On each route the receiver expects what the sender sends, in the same order."""
    ends: dict[Route, tuple[list[Any], list[Any]]] = defaultdict(lambda: ([], []))
    for rank, log in enumerate(logs):
        for step, message in log:
            if step == "begin":
                action = message.text.partition(",")[0]
                sends = message.route.sender == rank
                if sends and action != "sum":
                    action = str(parse(action).counterpart)
                ends[message.route][not sends].append((action, message.shape))
    for route, (sent, come) in ends.items():
        assert sent == come, route


def used(logs: Sequence[Sequence[tuple[str, Message]]]) -> set[Route]:
    return {message.route for log in logs for _, message in log}


def value(number: int, grad: bool) -> Any:
    """A value of a stage; the shape tells values apart."""
    return SimpleNamespace(grad=grad, dtype=torch.float32, shape_of=lambda count: (count, number))


# Chunks ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chunks:
    """Stages in rotation on some ranks, links with their values, and the programs that are performed."""

    shape: Shape
    ranks: int
    grads: tuple[bool, ...]
    schedule: str
    k: int = 1

    def stages(self) -> list[Any]:
        made = [SimpleNamespace(number=n, takes={}, gives={}) for n in range(self.shape.stages)]
        for number, (one, other) in enumerate(self.shape.all_links):
            names = (f"v{number}", f"w{number}")[: 1 + number % 2]
            made[one].gives[other] = names
            made[other].takes[one] = names
        return made

    def values(self) -> dict[str, Any]:
        grads = self.grads
        return {
            f"{letter}{n}": value(2 * n + place + 1, grads[n % len(grads)])
            for n in range(len(self.shape.all_links))
            for place, letter in enumerate("vw")
        }

    def programs(self) -> tuple[Program, ...]:
        """The programs of all ranks."""
        known = {
            "fill-drain": lambda: fill_drain(self.shape),
            "forward": lambda: forward_only(self.shape),
            "kfkb": lambda: k_forward_k_backward(self.shape, self.k),
        }[self.schedule]()
        return self._needed(known)

    def _needed(self, programs: Sequence[Program]) -> tuple[Program, ...]:
        stages, values = self.stages(), self.values()
        return tuple(tuple(needed(program, stages, values)) for program in programs)

    def logs(self) -> list[list[tuple[str, Message]]]:
        stages, values = self.stages(), self.values()
        codes = {
            stage.number: SimpleNamespace(
                stage=stage,
                survey=SimpleNamespace(values=values),
                shape=lambda name, scope: values[name].shape_of(1),
            )
            for stage in stages
        }
        homes = [number % self.ranks for number in range(self.shape.stages)]
        rows = {name: torch.zeros(each.shape_of(1)) for name, each in values.items()}
        stage_run = SimpleNamespace(
            scope=None,
            training=True,
            outs=rows,
            gradient=rows.__getitem__,
            take=lambda name, value: None,
            returned=lambda name, value: None,
        )
        runs = defaultdict(lambda: stage_run)
        programs = self.programs()
        found = []
        for rank in range(self.ranks):
            channel = Recorder(rank, self.ranks)
            transfers = StageTransfers(codes, channel, homes, runs, 1)
            transfers.post(arrivals(programs, rank), programs[rank])
            perform(transfers, programs[rank])
            found.append(channel.log)
        return found


def perform(transfers: Any, program: Program, after: Callable[[Action], None] = lambda action: None) -> None:
    for action in program:
        if action.kind.sends:
            transfers.send(action)
        elif action.kind.receives:
            transfers.receive(action)
        after(action)
    transfers.end()


@st.composite
def chunk_cases(draw: st.DrawFn) -> Chunks:
    ranks, each = draw(st.integers(2, 4)), draw(st.integers(1, 3))
    stages = ranks * each
    order = tuple(draw(st.permutations(range(draw(st.integers(1, 6))))))
    every = [(one, other) for one in range(stages) for other in range(one + 1, stages)]
    links = {*pairwise(range(stages)), *draw(st.lists(st.sampled_from(every), max_size=4))}
    shape = Shape(stages, order, tuple(sorted(links)), ranks)
    grads = tuple(draw(st.lists(st.booleans(), min_size=1, max_size=4)))
    schedules = ["fill-drain", "forward", *(["kfkb"] if each == 1 else [])]
    schedule = draw(st.sampled_from(schedules))
    return Chunks(shape, ranks, grads, schedule, draw(st.integers(1, 3)))


@given(chunk_cases())
def test_chunks_end_with_a_communicator_for_each_route(case):
    logs = case.logs()
    matched(logs)
    links = case.shape.all_links
    assert used(logs) <= both_passes((one % case.ranks, other % case.ranks) for one, other in links)
    assert not stuck(logs, COMMUNICATORS["one a route"])


KNOWN = {
    "two stages a rank": Chunks(Shape(4, (0, 1, 2, 3), None, 2), 2, (True,), "fill-drain"),
    "1F1B of 4 stages": Chunks(Shape(4, (0, 1, 2, 3, 4, 5)), 4, (True,), "kfkb", 1),
    "fill and drain of 4 stages": Chunks(Shape(4, (0, 1, 2, 3)), 4, (True,), "fill-drain"),
}


@pytest.mark.parametrize("fewer", ["one for all", "one a pair"])
@pytest.mark.parametrize("case", KNOWN)
def test_known_cases_wait_for_ever_with_fewer(case, fewer):
    logs = KNOWN[case].logs()
    assert stuck(logs, COMMUNICATORS[fewer])
    assert not stuck(logs, COMMUNICATORS["one a route"])


def test_two_stages_a_rank_need_more_than_a_communicator_a_pass():
    assert stuck(KNOWN["two stages a rank"].logs(), COMMUNICATORS["one a pair and pass"])


def test_few_receives_are_posted_ahead():
    """Each posted receive occupies a part of the GPU; a backward's would do so through the whole forward."""
    for log in KNOWN["1F1B of 4 stages"].logs():
        open_now, most = set[str](), 0
        for step, message in log:
            if message.route.receiver == message.rank:
                (open_now.add if step == "begin" else open_now.discard)(message.text)
                most = max(most, len(open_now))
        assert 0 < most <= POSTED_AHEAD + 1  # with the one that is waited for


# Samples ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Samples:
    """A DAG of stages with replicas and micro-batches of several sizes."""

    batch: int
    links: tuple[tuple[int, int], ...]
    sizes: tuple[int, ...]
    devices: tuple[int, ...]
    k: tuple[int, ...]
    grads: tuple[bool, ...] = (True,)

    def logs(self) -> list[list[tuple[str, Message]]]:
        count = len(self.sizes)
        pieces = [SimpleNamespace(number=n, takes={}, gives={}, output=None) for n in range(count)]
        facts = {}
        for number, (one, other) in enumerate(self.links):
            name = f"v{number}"
            pieces[one].gives[other] = pieces[other].takes[one] = (name,)
            facts[name] = value(number + 1, self.grads[number % len(self.grads)])
        shape = Shape(count, range(self.batch), self.links, sizes=self.sizes)
        programs = [tuple(needed(each, pieces, facts)) for each in k_forward_k_backward(shape, list(self.k))]
        layout = SampleLayout(self.batch, self.sizes, self.devices)
        return [self._log(rank, layout, pieces, facts, programs) for rank in range(sum(self.devices))]

    def _log(
        self, rank: int, layout: SampleLayout, pieces: Any, facts: Any, programs: Any
    ) -> list[tuple[str, Message]]:
        stage, replica = layout.seat(rank)
        channel = Recorder(rank, sum(self.devices))

        def stage_run_of(action: Action) -> Any:
            samples = layout.samples(stage, layout.chunk(stage, action), replica)
            rows = {name: torch.zeros(fact.shape_of(len(samples))) for name, fact in facts.items()}
            return SimpleNamespace(
                samples=samples,
                outs=rows,
                gradient=rows.__getitem__,
                rows=lambda value, name, part: value[part.start - samples.start : part.stop - samples.start],
                take=lambda other, name, part: None,
            )

        code = SimpleNamespace(piece=pieces[stage], branches=SimpleNamespace(facts=facts))
        transfers = DagTransfers(code, layout, channel, programs[stage], stage_run_of, "update 1")

        def after(action: Action) -> None:
            if action.kind is ActionKind.B:
                transfers.answered(stage_run_of(action))

        perform(transfers, programs[stage], after)
        if len(ranks := layout.ranks(stage)) > 1:
            _summed(torch.zeros(7), list(ranks), channel, "sum")
        return channel.log


@st.composite
def sample_cases(draw: st.DrawFn) -> Samples:
    count = draw(st.integers(2, 5))
    every = [(one, other) for one in range(count) for other in range(one + 1, count)]
    links = set(draw(st.lists(st.sampled_from(every), max_size=6)))
    links |= {(draw(st.integers(0, other - 1)), other) for other in range(1, count)}  # each takes from one
    sizes, k = (
        tuple(draw(st.lists(st.sampled_from(some), min_size=count, max_size=count)))
        for some in ((1, 2, 4), (1, 2))
    )
    devices = tuple(draw(st.lists(st.integers(1, 2), min_size=count, max_size=count)))
    grads = tuple(draw(st.lists(st.booleans(), min_size=1, max_size=3)))
    return Samples(8, tuple(sorted(links)), sizes, devices, k, grads)


@given(sample_cases())
def test_samples_end_with_a_communicator_for_each_route(case):
    logs = case.logs()
    matched(logs)
    assert not stuck(logs, COMMUNICATORS["one a route"])


TOWERS = Samples(8, ((0, 2), (1, 2), (2, 3)), (2, 4, 2, 2), (1, 1, 1, 1), (1, 1, 1, 1))


@pytest.mark.parametrize("fewer", ["one for all", "one a pair"])
def test_a_dag_waits_for_ever_with_fewer(fewer):
    logs = TOWERS.logs()
    assert stuck(logs, COMMUNICATORS[fewer])
    assert not stuck(logs, COMMUNICATORS["one a route"])
