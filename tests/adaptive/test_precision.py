"""Precision levels: how rows cross by what probes find, up to exact; and a run that must climb it."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st
from test_late import Noted, told

from kagome import Parallel, Trainer
from kagome.adaptive import precision
from kagome.adaptive.precision import (
    EXACT,
    PrecisionController,
    PrecisionLevel,
    StalenessProbe,
    levels_of,
)
from kagome.adaptive.thresholds import CODED_FAIR, LONGEST, ROWS_FAIR, ROWS_GOOD
from kagome.comm.channel import Channel
from pipelines import SEED, data, model
from training import QUIET, settings

BITS = ("onebit", "int2", "int4", "int8", "bf16", "none")


def even(*codecs: str) -> list[PrecisionLevel]:
    """Rungs that wait, each with one codec both ways."""
    return [PrecisionLevel(codec, codec, True) for codec in codecs]


def course(
    found: PrecisionController, cosines: Any, epochs: int
) -> tuple[list[int], list[PrecisionLevel], list[str]]:
    """Epochs that probed, the level of every epoch, what was said; each probe finds the next cosine."""
    probed, levels, said, left = [], [], [], iter(cosines)
    for epoch in range(1, epochs + 1):
        levels.append(found.level)
        if found.probes():
            probed.append(epoch)
            said.append(found.observe(StalenessProbe(epoch, found.level, next(left, 1.0), 1.0)))
        said.append(found.done(epoch))
    return probed, levels, [line for line in said if line]


@given(st.lists(st.floats(-1, 1), max_size=40), st.integers(1, 60))
def test_a_controller_goes_on_from_what_another_knew(cosines, at):
    settings_of = Parallel(codec="int2", codec_backward="int4", max_age=1)
    whole, before = PrecisionController(settings_of), PrecisionController(settings_of)
    expected = course(whole, cosines, at + 40)[1]
    assert course(before, cosines, at)[1] == expected[:at]
    state = json.loads(json.dumps(before.state_dict()))
    after = PrecisionController(settings_of, state)
    assert course(after, cosines[len(before.found) :], 40)[1] == expected[at:]
    assert [probe.level for probe in after.found] == [probe.level for probe in whole.found]
    other = PrecisionController(Parallel(codec="int8"), state)
    assert (other.index, other.found) == (0, []), "its levels are others"


# Rungs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, [EXACT]),
        ({"max_age": 1}, [PrecisionLevel("none", "none", False), EXACT]),
        ({"codec": "onebit"}, even(*BITS)),
        ({"codec": "onebit", "max_age": 2}, [PrecisionLevel("onebit", "onebit", False), *even(*BITS)]),
        (
            {"codec": "int8", "max_age": 1},
            [PrecisionLevel("int8", "int8", False), *even("int8", "bf16", "none")],
        ),
        ({"codec": "bf16"}, even("bf16", "none")),
        ({"codec": "fp16"}, even("fp16", "none")),
        ({"codec": "fp32"}, even("fp32", "none")),
        (
            {"codec": "int4", "codec_backward": "bf16"},
            [
                PrecisionLevel("int4", "bf16", True),
                PrecisionLevel("int8", "none", True),
                PrecisionLevel("bf16", "none", True),
                EXACT,
            ],
        ),
        (
            {"codec_backward": "int8", "max_age": 1},
            [
                PrecisionLevel("none", "int8", False),
                PrecisionLevel("none", "int8", True),
                PrecisionLevel("none", "bf16", True),
                EXACT,
            ],
        ),
    ],
)
def test_levels_go_from_what_was_asked_for_to_exact(given, expected):
    found = levels_of(Parallel(**given))
    assert list(found) == expected
    assert [level.exact for level in found] == [*[False] * (len(found) - 1), True]


def test_what_a_level_is_called():
    assert PrecisionLevel("onebit", "onebit", False).text() == "codec onebit, late"
    assert PrecisionLevel("int8", "none", True).text() == "codec int8 and none, none late"


# By what probes find ----------------------------------------------------------------------------------


def test_good_rows_are_probed_ever_less():
    probed, levels, said = course(PrecisionController(Parallel(codec="int8")), [], 400)
    assert probed[:2] == [1, 2]  # the first puts off no other
    assert [b - a for a, b in pairwise(probed[1:])] == [2, 4, 8, 16, 32, *[LONGEST] * 5]
    assert {level.text() for level in levels} == {"codec int8, none late"}  # there is no lower one
    assert not said


def test_rows_between_good_and_fair_are_probed_a_little_less():
    between = (ROWS_GOOD + CODED_FAIR) / 2
    probed, levels, said = course(PrecisionController(Parallel(codec="int8")), [between] * 100, 40)
    assert [b - a for a, b in pairwise(probed)] == list(range(1, len(probed)))
    assert len(set(levels)) == 1
    assert not said


@pytest.mark.parametrize("bad", [0.0, CODED_FAIR - 0.01, -1.0, float("nan")])
def test_bad_rows_go_one_level_up_at_once_and_never_above_exact(bad):
    found = PrecisionController(Parallel(codec="onebit", max_age=1))
    probed, levels, said = course(found, [bad] * 100, 30)
    # Exact rows are not looked at; no other epoch is trusted before a probe was fair.
    assert probed == list(range(1, 7))
    assert levels[:7] == list(found.levels)
    assert set(levels[7:]) == {EXACT}
    assert len(said) == len(found.climbed) == len(found.levels) - 1
    assert said[0].startswith(
        "epoch 1: rows cross with codec onebit, none late from now on (codec onebit, late"
    )
    assert said[-1].startswith("epoch 6: rows cross with codec none, none late from now on")


def judged(
    found: PrecisionController, probes: list[tuple[float, float]], epochs: int
) -> tuple[list[int], list[str]]:
    """Epochs that probed and what was said; each probe finds the next cosine and ratio."""
    probed, said = [], []
    for epoch in range(1, epochs + 1):
        if found.probes():
            probed.append(epoch)
            said.append(
                found.observe(StalenessProbe(epoch, found.level, *probes[min(len(probed), len(probes)) - 1]))
            )
        said.append(found.done(epoch))
    return probed, [line for line in said if line]


FAR, NEAR = (0.95, 0.6), (0.98, 0.9)
"""A cosine that is good and a length that is not: off by 0.47; and one that is off by 0.2."""


def test_late_rows_that_are_mostly_far_off_wait_although_their_cosine_is_good():
    """Squirrel and Flickr with late rows: cosines of 0.85 to 0.98, and 5 to 10 points lost."""
    assert StalenessProbe(1, EXACT, *FAR).off == pytest.approx(0.469, abs=1e-3)
    assert StalenessProbe(1, EXACT, 1.0, 1.0).off == 0
    found = PrecisionController(Parallel(max_age=1))
    probed, said = judged(found, [FAR], 12)
    assert probed[:3] == [2, 3, 4]
    assert said == [
        "epoch 4: rows cross with codec none, none late from now on (codec none, late: gradient 0.60 times "
        "as long, cosine 0.95, mostly off by 0.47 of its length)"
    ]
    assert found.level.waits
    one_of_three = PrecisionController(Parallel(max_age=1))
    assert not judged(one_of_three, [NEAR, FAR, NEAR, NEAR, FAR, NEAR, NEAR], 100)[1]
    two_of_three = PrecisionController(Parallel(max_age=1))
    assert judged(two_of_three, [NEAR, NEAR, FAR, NEAR, FAR], 100)[0][:5] == [2, 4, 8, 10, 14]
    assert two_of_three.level.waits
    assert not judged(PrecisionController(Parallel(codec="onebit")), [FAR], 100)[1], (
        "what codecs lose is noise"
    )


def test_late_rows_that_are_tried_again_are_judged_anew():
    found = PrecisionController(Parallel(max_age=1))
    _, said = judged(found, [FAR], 200)
    assert [line.split(":")[0] for line in said] == ["epoch 4", "epoch 195", "epoch 199"]
    assert "again, after codec none, none late" in said[1]


def test_one_bad_probe_is_one_level():
    found = PrecisionController(Parallel(codec="onebit", max_age=1))
    _, levels, said = course(found, [1.0, 1.0, 1.0, 0.1], 12)
    assert levels[:8] == [PrecisionLevel("onebit", "onebit", False)] * 8
    assert levels[8:] == [PrecisionLevel("onebit", "onebit", True)] * 4
    assert len(said) == 1
    assert found.climbed == [found.found[3]]
    assert found.climbed[0].epoch == 8


def test_after_the_longest_wait_one_level_down_is_tried():
    found = PrecisionController(Parallel(codec="int4", max_age=1))
    low, up = found.levels[:2]
    probed, levels, said = course(found, [0.1, *[1.0] * 8, 1.0, 0.1], 240)
    down = probed[8]  # probes after 1, 2, 4 ... epochs, the last two after the longest wait
    assert down == 2 + 2 + 4 + 8 + 16 + 32 + 2 * LONGEST
    assert levels[0] == low
    assert set(levels[1:down]) == {up}
    assert levels[down : down + 2] == [low] * 2
    assert said[1] == f"epoch {down}: rows cross with {low.text()} again, after {up.text()}"
    # It is probed at once, and again when it has rows of an epoch before; and was not worth it.
    assert probed[9:11] == [down + 1, down + 2]
    assert set(levels[down + 2 :]) == {up}
    assert len(said) == 3


def test_what_codes_is_looked_at_before_it_is_tried_again():
    """Once that epoch was nobody's: with Squirrel's GAT its gradient was 539 times too long."""
    found = PrecisionController(Parallel(codec="onebit"))
    probed, levels, said = course(found, [0.1, *[1.0] * 8, -0.1], 300)
    again = levels.index(found.levels[0], 1) + 1
    assert again in probed
    assert said[1].startswith(f"epoch {again - 1}: rows cross with codec onebit, none late again")
    assert said[2].startswith(f"epoch {again}: rows cross with codec int2, none late from now on")
    assert levels[again] == found.levels[1]


def test_late_rows_without_a_codec_have_nothing_to_look_at_in_the_first_epoch():
    probed, _, said = course(PrecisionController(Parallel(max_age=1)), [(ROWS_FAIR + CODED_FAIR) / 2], 8)
    assert probed[:3] == [2, 3, 5]
    assert not said, "a codec's noise is judged more strictly"


def test_a_level_that_failed_again_is_left_alone_for_twice_as_long():
    found, failed = PrecisionController(Parallel(max_age=1)), []
    for epoch in range(1, 3000):
        if found.probes():
            failed.append(epoch)
            assert found.observe(StalenessProbe(epoch, found.level, 0.0, 1.0))
        found.done(epoch)
    assert [b - a for a, b in pairwise(failed)] == [(n + 1) * LONGEST + 1 for n in (2, 4, 8, 16)]


def test_exact_rows_are_left_again():
    found = PrecisionController(Parallel(codec="none", max_age=1))
    _, levels, said = course(found, [0.1], 260)
    assert levels[2] == EXACT
    assert levels[-1] == found.levels[0]
    assert len(said) == 2


@pytest.mark.parametrize("given", [{"codec": "onebit", "max_age": 1, "guard": False}, {}, {"codec": "none"}])
def test_without_a_guard_or_anything_to_guard_nothing_is_probed(given):
    found = PrecisionController(Parallel(**given))
    probed, levels, said = course(found, [], 200)
    assert not probed
    assert not said
    assert set(levels) == {found.levels[0]}


# A run ------------------------------------------------------------------------------------------------


class Remembering(Noted):
    """It keeps the weights of which it was given the gradients."""

    def step(self, closure: Any = None) -> None:
        self.before = [
            *getattr(self, "before", ()),
            [p.detach().clone() for p in self.param_groups[0]["params"]],
        ]
        super().step(closure)


def guarded(channel: Channel, fair: float, parallel: dict[str, Any], epochs: int) -> dict[str, Any]:
    """Train where probes are bad below a cosine."""
    with (
        mock.patch.object(precision, "ROWS_FAIR", fair),
        mock.patch.object(precision, "CODED_FAIR", fair),
        Trainer(
            model("sage"),
            data(),
            parallel=Parallel(**parallel),
            train=settings(seed=SEED),
            report=QUIET,
            optimizer=Remembering,
        ) as trainer,
    ):
        summary = trainer.fit(epochs)
        found = trainer.engine.controller.precision
        return told(trainer, summary) | {
            "before": trainer.optimizer.before,
            "level": found.level,
            "probes": [(probe.epoch, probe.cosine, probe.ratio) for probe in found.found],
        }


def exact_gradients(before: list[torch.Tensor]) -> tuple[float, list[torch.Tensor]]:
    """Loss and gradients of plain PyG with these weights."""
    plain, given = model("sage"), data()
    with torch.no_grad():
        for parameter, value in zip(plain.parameters(), before, strict=True):
            parameter.copy_(value)
    out = plain.train()(given.x, given.edge_index)
    loss = F.cross_entropy(out[given.train_mask], given.y[given.train_mask])
    loss.backward()
    return float(loss.detach()), [p.grad for p in plain.parameters()]


def off(found: dict[str, Any], epoch: int) -> float:
    """How far an epoch's gradient is from the exact one, over its length."""
    loss, exact = exact_gradients(found["before"][epoch - 1])
    given = torch.cat([g.flatten() for g in found["gradients"][epoch - 1].values()])
    whole = torch.cat([g.flatten() for g in exact])
    gap = abs(found["losses"][epoch - 1] - loss) / loss
    return max(float((given - whole).norm() / whole.norm()), gap)


def test_a_run_whose_probes_are_bad_climbs_to_exact_and_says_so(ranks):
    found = ranks(2, guarded, 2.0, {"codec": "onebit", "max_age": 1}, 10)
    for rank in found:
        assert rank["level"] == EXACT
        climbs = [note for note in rank["notes"] if "from now on" in note]
        assert len(climbs) == 6
        assert "rows cross with codec onebit, none late from now on" in climbs[0]
        assert "rows cross with codec none, none late from now on" in climbs[-1]
        assert rank["losses"] == found[0]["losses"]
        assert rank["probes"] == found[0]["probes"]
    one = found[0]
    assert [epoch for epoch, *_ in one["probes"]] == [1, 2, 3, 4, 5, 6]
    # A probe's epoch takes the exact gradient; after the last one up all do.
    assert max(off(one, epoch) for epoch in range(1, 11)) < 1e-10
    # Each probe compares what the level below exact gives: the finer, the nearer.
    cosines = [cosine for _, cosine, _ in one["probes"]]
    assert cosines[0] < 0.999
    assert 1 - cosines[4] < 1e-3 < 1 - cosines[0]


@pytest.mark.parametrize(
    "parallel",
    [{"skip_drift": 0.1, "max_age": 3}, {"codec": "int4", "adaptive_bits": True}, {"halo_sample": 0.5}],
    ids=["skip", "fit", "sample"],
)
def test_what_chooses_among_rows_is_left_level_by_level(ranks, parallel):
    found = ranks(2, guarded, 2.0, parallel, 9)
    for rank in found:
        assert rank["level"] == EXACT
        assert rank["losses"] == found[0]["losses"]
    one = found[0]
    assert one["probes"][0][0] == 1
    assert max(off(one, epoch) for epoch in range(1, 10)) < 1e-10


def test_a_run_whose_probes_are_good_stays_as_it_was_set(ranks):
    found = ranks(2, guarded, -2.0, {"codec": "onebit", "max_age": 1}, 7)
    for rank in found:
        assert rank["level"] == PrecisionLevel("onebit", "onebit", False)
        assert not [note for note in rank["notes"] if "from now on" in note]
    one = found[0]
    probed = [epoch for epoch, *_ in one["probes"]]
    assert probed[:3] == [1, 2, 4]
    for epoch in range(1, 8):
        assert (off(one, epoch) < 1e-10) == (epoch in probed), epoch


@pytest.mark.parametrize("rest", [{}, {"sync_every": 2}], ids=["late", "waits in each other epoch"])
def test_the_probe_measures_the_gradient_that_late_rows_give(ranks, rest):
    """In an epoch that waits, too: probes that agree come in epochs 2, 4, 8 and so on."""
    parallel = {"max_age": 1}
    probed = ranks(2, guarded, -2.0, {**parallel, **rest}, 2)[0]
    late = ranks(2, guarded, -2.0, {**parallel, "guard": False}, 2)[0]
    assert not late["probes"]
    one, other = (torch.cat([g.flatten() for g in run["gradients"][1].values()]) for run in (probed, late))
    ((epoch, cosine, ratio),) = probed["probes"]
    assert epoch == 2
    assert cosine == pytest.approx(float(one @ other / one.norm() / other.norm()), abs=1e-12)
    assert ratio == pytest.approx(float(other.norm() / one.norm()), abs=1e-12)
    assert cosine < 1 - 1e-6
