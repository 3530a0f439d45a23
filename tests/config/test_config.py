"""Settings: every field goes to TOML and back; every wrong one has an error that names it."""

from __future__ import annotations

import dataclasses
import functools
import math
import tomllib
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from kagome import config
from kagome.config import toml_io
from kagome.errors import ConfigError

text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)
count = st.integers(1, 10**12)
size = st.floats(1e-12, 1e12)

RUNS = st.builds(
    config.Run,
    data=st.builds(
        config.Data,
        name=text,
        root=text,
        partition=st.none() | text,
        undirected=st.booleans(),
        self_loops=st.booleans(),
        project=st.none() | count,
        split=st.integers(0, 99),
    ),
    model=st.builds(
        config.Model, name=text, layers=count, hidden=count, dropout=st.floats(0, 0.99), heads=count
    ),
    parallel=st.builds(
        config.Parallel,
        graph=st.none() | count,
        partitioner=st.sampled_from(["metis", "streaming", "contiguous", "random"]),
        part_weights=st.lists(st.floats(1e-3, 1e3), max_size=4).map(tuple),
    ),
    train=st.builds(
        config.Train,
        epochs=st.integers(0, 10**6),
        seed=st.integers(-(2**60), 2**60),
        lr=size,
        weight_decay=st.floats(0, 10),
        patience=st.none() | count,
        eval_every=count,
        clip=st.none() | size,
        amp=st.sampled_from(["none", "bf16"]),
        metric=st.sampled_from(["auto", "accuracy", "roc_auc", "f1_micro"]),
        check=st.booleans(),
        save_every=st.none() | count,
        timeout=st.floats(1e-12, 1e8),
    ),
    report=st.builds(
        config.Report,
        page=st.booleans(),
        trace=st.booleans(),
        progress=st.booleans(),
        tensorboard=st.booleans(),
        memory=st.booleans(),
    ),
)


@settings(max_examples=150, deadline=None)
@given(RUNS)
def test_every_setting_goes_to_toml_and_back(run):
    """Control characters in a text were written as they are, which TOML forbids."""
    assert toml_io.from_dict(tomllib.loads(toml_io.to_toml(run))) == run


def test_the_round_trip_leaves_out_no_field(tmp_path):
    fields = {
        section.name: {field.name for field in dataclasses.fields(getattr(config.Run(), section.name))}
        for section in dataclasses.fields(config.Run)
    }
    full = config.Run(
        data=config.Data(partition="p", project=3),
        parallel=config.Parallel(
            graph=2,
            chunks=3,
            memory_gib=1.0,
            layers=("a", "b"),
            codec_backward="bf16",
            codec_stage="int8",
            max_age=1,
            sync_every=5,
        ),
        train=config.Train(
            patience=1, clip=1.0, save_every=2, ignore_index=-1, sample_weight="w", target_type="paper"
        ),
    )
    assert {section: set(values) for section, values in toml_io.as_dict(full).items()} == fields
    path = tmp_path / "run.toml"
    path.write_text(toml_io.to_toml(full), encoding="utf-8")
    assert toml_io.from_toml(path) == full


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (math.hypot, "python:math:hypot"),
        (functools.partial(math.hypot, 1), "python:math:hypot"),
        (tomllib.loads, "python:tomllib._parser:loads"),
        (config.Train(), "python:kagome.config.settings:Train"),
        (lambda: 1, f"python:{__name__}:<lambda>"),
    ],
)
def test_a_function_has_a_name_in_settings(tmp_path, given, name):
    assert toml_io.own_name(given) == name
    path = tmp_path / "run.toml"
    path.write_text(toml_io.to_toml(config.Run(), {"loss": name}))
    with pytest.raises(ConfigError, match=r"train\.loss to be a name; got the function"):
        toml_io.from_toml(path)
    assert toml_io.from_toml(path, trains=False) == config.Run()


def test_what_is_left_out_keeps_its_default():
    assert toml_io.from_dict({}) == config.Run()
    assert toml_io.from_dict({"train": {"epochs": 3}}).train == config.Train(epochs=3)


def test_names_as_the_flags_have_them_and_whole_numbers_for_any_number():
    train = toml_io.from_dict({"train": {"weight-decay": 0, "lr": 1, "eval-every": 2}}).train
    assert train == config.Train(weight_decay=0.0, lr=1.0, eval_every=2)
    assert isinstance(train.lr, float)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"trian": {}}, r"one of the sections data, model, parallel, train, report; got \[trian\]"),
        ({"train": {"epoch": 3}}, r"a setting of \[train\]: epochs, .*; got 'epoch'"),
        ({"train": 3}, r"\[train\] to be a section of settings; got 3"),
        ({"train": {"epochs": "3"}}, "train.epochs to be a whole number; got '3'"),
        ({"train": {"epochs": 2.5}}, "train.epochs to be a whole number; got 2.5"),
        ({"train": {"epochs": True}}, "train.epochs to be a whole number; got True"),
        ({"train": {"check": 1}}, "train.check to be true or false; got 1"),
        ({"train": {"amp": "fp8"}}, "train.amp to be none or bf16; got 'fp8'"),
        ({"train": {"amp": 16}}, "train.amp to be none or bf16; got 16"),
        ({"train": {"clip": [1]}}, r"train.clip to be a number; got \[1\]"),
        ({"data": {"name": 7}}, "data.name to be a text; got 7"),
        ({"parallel": {"layers": "conv1"}}, "parallel.layers to be a list of texts; got 'conv1'"),
        ({"parallel": {"graph": "two"}}, "parallel.graph to be a whole number; got 'two'"),
    ],
)
def test_a_wrong_table_is_told_with_the_file(table, words):
    with pytest.raises(ConfigError, match=words) as caught:
        toml_io.from_dict(table, where="run.toml")
    assert "(run.toml)" in str(caught.value)


NAN = float("nan")


@pytest.mark.parametrize(
    ("kind", "values", "words"),
    [
        (config.Train, {"epochs": -1}, "train.epochs to be 0 or more; got -1"),
        (config.Train, {"eval_every": 0}, "train.eval_every to be 1 or more"),
        (config.Train, {"patience": 0}, "train.patience to be 1 or more"),
        (config.Train, {"save_every": 0}, "train.save_every to be 1 or more"),
        (config.Train, {"lr": -0.1}, "train.lr to be 0 or more"),
        (config.Train, {"lr": NAN}, "train.lr to be a finite number, up to .*; got nan"),
        (config.Train, {"weight_decay": -1}, "train.weight_decay"),
        (config.Train, {"clip": 0}, "train.clip to be above 0"),
        (config.Train, {"timeout": NAN}, "train.timeout to be a finite number, up to .*; got nan"),
        (config.Train, {"amp": "fp16"}, "none or bf16"),
        (config.Train, {"metric": "nothing"}, "auto, accuracy, roc_auc, .*, loss; got 'nothing'"),
        (config.Train, {"loss": "nothing"}, "auto, cross_entropy, bce, mse, mae, huber; got 'nothing'"),
        (config.Train, {"metric_columns": (0, -1)}, "numbers from 0 up"),
        (config.Data, {"project": 0}, "data.project to be 1 or more"),
        (config.Data, {"split": -1}, "data.split to be 0 or more"),
        (config.Parallel, {"graph": 0}, "parallel.graph to be 1 or more; got 0"),
        (config.Parallel, {"pipe": 0}, "parallel.pipe to be 1 or more; got 0"),
        (config.Parallel, {"cross_chunk": "none"}, "history, drop, exact; got 'none'"),
        (
            config.Parallel,
            {"schedule": "1f1b"},
            "each other for schedule='1f1b'; got cross_chunk='history'",
        ),
        (
            config.Parallel,
            {"partitioner": "kahip"},
            "contiguous, random, coordinates; got 'kahip'",
        ),
        (config.Parallel, {"max_age": "1"}, "max_age to be a whole number; got '1'"),
        (config.Parallel, {"max_age": 1.5}, "max_age to be a whole number; got 1.5"),
        (config.Parallel, {"pipe": True}, "pipe to be a whole number; got True"),
        (config.Parallel, {"graph": "2"}, "graph to be a whole number; got '2'"),
        (config.Parallel, {"smoothing": None}, "smoothing to be a number; got None"),
        (config.Parallel, {"halo_sample": "0.5"}, "halo_sample to be a number; got '0.5'"),
        (config.Parallel, {"memory_gib": "1"}, "memory_gib to be a number; got '1'"),
        (config.Parallel, {"adaptive_bits": "yes"}, "adaptive_bits to be true or false; got 'yes'"),
        (config.Parallel, {"sync_every": 2.5, "max_age": 1}, "a whole number or auto; got 2.5"),
        (config.Parallel, {"allow": ("rows",)}, "a list of decoupled, history, onebit, stale; got"),
        (config.Model, {"hidden": "64"}, "model.hidden to be a whole number; got '64'"),
        (config.Report, {"page": None}, "report.page to be true or false; got None"),
        (config.Parallel, {"codec": None}, "onebit; got None"),
        (config.Train, {"timeout": "600"}, "timeout to be a number; got '600'"),
    ],
)
def test_values_out_of_range(kind: Any, values, words):
    with pytest.raises(ConfigError, match=words):
        kind(**values)


def test_files_that_cannot_be_read(tmp_path):
    path = tmp_path / "run.toml"
    with pytest.raises(ConfigError, match="cannot be read"):
        toml_io.from_toml(path)
    path.write_bytes(b"\xff\xfe[train]")
    with pytest.raises(ConfigError, match="cannot be read"):
        toml_io.from_toml(path)
    path.write_text("[train]\nepochs = ")
    with pytest.raises(ConfigError, match="to be a settings file of TOML; got"):
        toml_io.from_toml(path)


def test_a_withdrawn_value_says_what_replaces_it_and_a_saved_run_goes_on_with_that(tmp_path):
    words = r"activations to be one of auto, device, host, recompute; got 'disk'(.|\n)*host(.|\n)*recompute"
    with pytest.raises(ConfigError, match=words):
        config.Parallel(activations="disk")  # type: ignore[arg-type]
    path = tmp_path / "config.toml"
    path.write_text('[parallel]\nactivations = "disk"\n')
    with pytest.raises(ConfigError, match=words):
        toml_io.from_toml(path)
    assert toml_io.from_toml(path, saved=True).parallel == config.Parallel(activations="host")
    path.write_text('parallel = "disk"\n')
    with pytest.raises(ConfigError, match="to be a section of settings"):
        toml_io.from_toml(path, saved=True)


def test_a_cut_fits_the_ranks_there_are():
    assert config.Parallel().fit(3) == config.Parallel(graph=3, chunks=1)
    assert config.Parallel(pipe=2).fit(6) == config.Parallel(pipe=2, graph=3, chunks=8)
    with pytest.raises(ConfigError, match=r"4 ranks for the mesh pipe=4 x graph=1; got 6"):
        config.Parallel(pipe=4).fit(6)
    assert config.Parallel(graph=3, partitioner="random").fit(3).partitioner == "random"
    with pytest.raises(ConfigError, match=r"3 ranks for the mesh graph=3; got 4(.|\n)*--nproc 3"):
        config.Parallel(graph=3).fit(4)


def test_settings_cannot_be_changed_or_given_by_place():
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.Train().epochs = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        config.Train(3)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[train]\nseed = 18446744073709551616", "train.seed to be a whole number of 64 bits"),
        ("[train]\nlr = 1e300", "train.lr to be a finite number, up to 3.4e+38"),
        ("[train]\ntimeout = inf", "train.timeout to be a finite number"),
        ("[train]\ntimeout = 1e12", "train.timeout to be 1e+08 seconds or less"),
        ('[data]\nroot = "a\\u0000b"', "data.root to be a text without the character NUL"),
        (f"[train]\nseed = {'9' * 5_000}", "one that cannot be read"),
        (f"[train]\nseed = 0x{'f' * 5_000}", "a whole number has 20,000 bits"),
        (f"[train]\nseed = {'[' * 10_000}{']' * 10_000}", "nested more than 64 levels deep"),
        (f"[train]\n{'.'.join('a' * 10_000)} = 1", "nested more than 64 levels deep"),
        (f'[data]\nname = 3\nroot = "{"a" * 10_000}"', "data.name to be a text; got 3"),
        (f'[train]\nlr = "{"a" * 10_000}"', "more characters"),
    ],
)
def test_what_no_machine_holds_is_refused_in_one_short_sentence(tmp_path, text, words):
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        toml_io.from_toml(path)
    assert words in str(caught.value)
    assert len(str(caught.value)) < 1_000


@pytest.mark.parametrize(
    "text",
    ["[" * 10_000, '{"plans": ' * 10_000, '{"plans": [{"settings": {"graph": NaN}}]}', "", "\0", "3", "[]"],
)
def test_what_is_no_plan_is_refused_in_one_short_sentence(tmp_path, text):
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        config.Parallel(plan=str(path))
    assert "plan" in str(caught.value)
    assert len(str(caught.value)) < 1_000


@pytest.mark.parametrize(
    ("settings", "ranks", "got"),
    [
        ({"halo_sample": 0.5}, None, "rows of other parts for halo_sample"),
        ({"skip_drift": 0.1, "max_age": 2}, None, "rows of other parts for skip_drift"),
        ({"adaptive_bits": True, "codec": "int4"}, None, "rows of other parts for adaptive_bits"),
        ({"chunks": 2}, 2, "parts of one chunk for partial_sums"),
        ({"tensor": 2}, 2, "whole parts for tensor=2"),
    ],
)
def test_partial_sums_give_way_to_what_needs_rows_or_are_refused(settings, ranks, got):
    auto = config.Parallel(**settings)
    assert auto.partial_sums_sent == ("auto" if "chunks" in settings else "off")
    with pytest.raises(ConfigError, match=got):
        config.Parallel(**settings, partial_sums="on").fit(ranks or 2)
    if ranks:
        auto.fit(ranks)
    assert config.Parallel(codec="int4", max_age=1, partial_sums="on").partial_sums_sent == "on"
