"""A few cases of each kind of altered input: served sanely or refused in one sentence, nothing else.

Many more are run by ``python -m tests.fuzz``; figures are in ``benchmarks/faults``.
"""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest

import warm

from . import runner
from .harness import FAULTS, Case, Kind, command, run_case

FEW = 2


def in_process(name: str, seed: int, file: str) -> None:
    """Run a few cases of a kind; results go to a file."""
    with Path(file).open("w") as lines:
        runner.run_many(
            runner.kinds()[name], range(FEW), seed, lambda result: print(result.line(), file=lines)
        )


@pytest.mark.some(3)
@pytest.mark.parametrize("name", runner.kinds())
def test_altered_inputs_are_served_sanely_or_refused_in_one_sentence(name: str, tmp_path: Path) -> None:
    job = warm.context().Process(target=in_process, args=(name, 1, str(tmp_path / "results")))
    job.start()
    job.join()
    assert job.exitcode == 0
    results = [json.loads(line) for line in (tmp_path / "results").read_text().splitlines()]
    assert len(results) == FEW
    assert not [result for result in results if result["outcome"] in FAULTS]


class Told:
    """A kind whose cases do what they are told."""

    name, seconds = "told", 5.0

    def __init__(self, do: str, wrong: str = "") -> None:
        self.do, self.wrong = do, wrong

    def prepare(self, shared: Path) -> None: ...

    def make(self, rng: random.Random, folder: Path) -> Case:
        (folder / "kept").write_text("as it was")
        return Case(f"{self.do} {rng.random()}", keeps=(folder / "kept",))

    def run(self, case: Case) -> Any:
        from kagome.errors import DataError

        if self.do == "refuse":
            raise DataError("an input was to be read", "it cannot be")
        if self.do == "crash":
            raise ZeroDivisionError
        if self.do == "wait":
            time.sleep(60)
        if self.do == "die":
            import os

            os.abort()
        if self.do == "write":
            Path("kept").write_text("new")
        if self.do == "command":
            return command(["nonsense"])
        if self.do == "flag":
            return command(["doctor", "--nonsense"])
        return self.do

    def sane(self, case: Case, result: Any) -> str:
        return self.wrong


@pytest.mark.parametrize(
    ("do", "wrong", "outcome"),
    [
        ("nothing", "", "accepted"),
        ("nothing", "not as it should be", "nonsense"),
        ("refuse", "", "refused"),
        ("command", "", "refused"),
        ("flag", "", "refused"),
        ("crash", "", "traceback"),
        ("die", "", "traceback"),
        ("write", "", "nonsense"),
    ],
)
def test_outcomes_are_told_apart(do: str, wrong: str, outcome: str) -> None:
    kind: Kind = Told(do, wrong)
    found = run_case(kind, 0, 3)
    assert found.outcome == outcome, found
    assert found.what == run_case(kind, 0, 3).what, "a case can be run again by its number"


def test_a_case_that_does_not_end_is_stopped() -> None:
    kind = Told("wait")
    kind.seconds = 1.0
    found = run_case(kind, 0, 0)
    assert found.outcome == "hang"
