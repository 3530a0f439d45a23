"""The executor: each action goes where it belongs, in order, and the one that fails is pointed at."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from kagome.pipelining.executor import Executor, names_of, needed
from kagome.schedule.actions import Action, ActionKind, from_text, parse

(PROGRAM,) = from_text("0RECV_F0<1 0F0 0SEND_F0>1 0B0\n")


@dataclass
class Log:
    """Transfers, a watchdog and a clock that write down what they are told."""

    fails: str = ""

    def __post_init__(self) -> None:
        self.lines: list[str] = []

    def note(self, verb: str, action: Action) -> None:
        self.lines.append(f"{verb} {action}")
        if str(action) == self.fails:
            raise ValueError(self.fails)

    def send(self, action: Action) -> None:
        self.note("send", action)

    def receive(self, action: Action) -> None:
        self.note("receive", action)

    def compute(self, action: Action) -> None:
        self.note("compute", action)

    def end(self) -> None:
        self.lines.append("end")

    @contextmanager
    def phase(self, name: str, epoch: int | None) -> Iterator[Any]:
        self.lines.append(f"{epoch}:")
        yield

    def run(self, program: Any) -> list[str]:
        executor = Executor(3, self.lines.append, self.phase)
        executor.run(program, self.compute, self, turn="epoch 7", epoch=7)
        return self.lines


def test_each_action_is_announced_timed_and_performed() -> None:
    assert Log().run(PROGRAM[:2]) == [
        *("epoch 7: 0RECV_F0<1", "7:", "receive 0RECV_F0<1"),
        *("epoch 7: 0F0", "7:", "compute 0F0", "end"),
    ]
    assert Log().run(PROGRAM[2:])[2:-1:3] == ["send 0SEND_F0", "compute 0B0"]


def test_the_failing_action_is_pointed_at(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="0F0"):
        Log("0F0").run(PROGRAM)
    assert capsys.readouterr().err == (
        "kagome: rank 3 stopped here in epoch 7:\n0RECV_F0<1 0F0 0SEND_F0 0B0\n           ^\n"
    )


@dataclass(frozen=True)
class Ends:
    takes: dict[int, tuple[str, ...]]
    gives: dict[int, tuple[str, ...]]


@dataclass(frozen=True)
class Known:
    grad: bool


def test_messages_that_would_carry_nothing_are_left_out() -> None:
    values = {"x": Known(True), "mask": Known(False)}
    stages = [
        Ends({}, {1: ("x", "mask"), 2: ("mask",)}),
        Ends({0: ("x", "mask")}, {}),
        Ends({0: ("mask",)}, {}),
    ]
    text = "0F0 0SEND_F0 0SEND_F0>2 0RECV_B0 0RECV_B0<2 0B0"
    program = tuple(map(parse, text.split()))
    assert " ".join(map(str, needed(program, stages, values))) == "0F0 0SEND_F0 0SEND_F0>2 0RECV_B0 0B0"
    assert names_of(Action(1, ActionKind.RECV_F, 0), stages[1], values) == ["x", "mask"]
    assert names_of(Action(1, ActionKind.SEND_B, 0), stages[1], values) == ["x"]
