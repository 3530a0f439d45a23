"""The command line, in this process: every command's good path, every mistake with its words and its code."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kagome import config
from kagome.cli import app
from kagome.cli.app import parse_train

SBM = "sbm:vertices=300,degree=6,features=8,classes=4,communities=4"
FEW = ["--data.name", SBM, "--train.epochs", "3", "--report.no-progress"]

WRONG_MODEL = '''
import torch
from torch import nn
from torch_geometric.nn import SAGEConv


class Hidden(nn.Module):
    """Adds the mean of all rows where no torch call shows it."""

    def forward(self, x):
        return x + float(x.detach().numpy().mean())


class Table(nn.Module):
    """A layer whose result depends on which rows lie together."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.table = Hidden()
        self.conv = SAGEConv(in_channels, 8)
        self.last = SAGEConv(8, out_channels)

    def forward(self, x, edge_index):
        x = self.table(self.conv(x, edge_index))
        return self.last(x.relu(), edge_index)


def build(in_channels, out_channels):
    return Table(in_channels, out_channels)


def fine(in_channels, out_channels, hidden):
    from torch_geometric.nn import GraphSAGE

    return GraphSAGE(in_channels, hidden, 2, out_channels)
'''


@pytest.fixture
def kagome(tmp_path, monkeypatch, capfd):
    """``kagome("train", ...)``: exit code, standard output, standard error, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "KAGOME_DATA"):
        monkeypatch.delenv(name, raising=False)

    def run(*args: str) -> tuple[int, str, str]:
        code: object = 0
        try:
            app.main(list(args))
        except SystemExit as left:
            code = left.code
        out, err = capfd.readouterr()
        assert isinstance(code, int | None)
        assert "Traceback" not in err + out
        return code or 0, out, err

    return run


# Help ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [[], ["train"], ["check"], ["partition"], ["report"], ["doctor"]])
def test_help_names_every_flag(kagome, command):
    code, out, _ = kagome(*command, "--help")
    assert code == 0
    words = {
        (): ["train", "check", "partition", "report", "doctor"],
        ("train",): [
            "--data.name",
            "--train.patience",
            "--model.heads",
            "--nproc",
            "--resume",
            "--parallel.graph",
        ],
        ("check",): ["--vertices", "--model.name"],
        ("partition",): ["--parts", "--out DIR"],
    }
    for word in words.get(tuple(command), ["usage"]):
        assert word in out


def test_help_is_quick_and_loads_no_torch(tmp_path):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    code = "import sys\nfrom kagome.cli import main\n"
    code += "try: main(['train', '-h'])\nfinally: print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.splitlines()[-1] == "False"
    after = resource.getrusage(resource.RUSAGE_CHILDREN)  # not by the clock: the machine may be busy
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 3


def test_version(kagome):
    from kagome import __version__

    assert kagome("--version") == (0, f"kagome {__version__}\n", "")


def test_nothing_asked_is_a_mistake_that_shows_the_commands(kagome):
    code, out, _ = kagome()
    assert code == 2
    assert "kagome train" in out


# Mistakes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["fly"], 2, ["train, predict, plan, check, partition, report, doctor", "'fly'", "kagome --help"]),
        (["train", "--train.epoch", "3"], 2, ["--train.epoch", "--train.epochs"]),
        (["train", "--training.epochs", "3"], 2, ["Unrecognized", "--training.epochs"]),
        (["train", "--train.epochs", "many"], 2, ["--train.epochs", "many"]),
        (["train", "--train.epochs", "-1"], 2, ["train.epochs to be 0 or more", "-1"]),
        (["train", "--train.lr", "-1"], 2, ["train.lr to be 0 or more"]),
        (["train", "--train.amp", "fp8"], 2, ["amp", "bf16"]),
        (["train", "--nproc", "0"], 2, ["--nproc to be a number from 1 up; got 0"]),
        (
            ["train", "--nproc", "2", "--parallel.graph", "3"],
            2,
            ["3 ranks for the mesh graph=3", "got 2", "--nproc 3"],
        ),
        (["train", "--parallel.graph", "0"], 2, ["parallel.graph to be 1 or more"]),
        (["train", "nowhere.toml"], 2, ["nowhere.toml", "cannot be read"]),
        (["train", "--resume", "nowhere"], 1, ["got no folder nowhere"]),
        (["train", "--data.name", "Coraa"], 1, ["Coraa", "Cora, CiteSeer"]),
        (["train", "--data.name", "sbm:vertexes=3"], 1, ["vertices", "vertexes=3"]),
        (["train", "--data.name", "python:nothing.here:f"], 1, ["nothing.here"]),
        (["train", "--data.partition", "nowhere"], 1, ["nowhere"]),
        (["train", *FEW, "--model.name", "gatt"], 1, ["'gatt'", "Try: --model.name gat"]),
        (["train", *FEW, "--model.dropout", "1.5"], 1, ["model.dropout"]),
        (["train", *FEW, "--train.metric", "roc_auc"], 2, ["roc_auc", "4 classes"]),
        (["partition", "--data.name", SBM], 2, ["--out"]),
        (["partition", "--data.name", SBM, "--parts", "0", "--out", "parts"], 2, ["partition.parts", "0"]),
        (
            ["partition", "--data.name", SBM, "--parts", "301", "--out", "parts"],
            1,
            ["301 parts", "300 vertices"],
        ),
        (["plan", "--vertices", "0", "--edges", "9"], 2, ["plan.vertices"]),
        (["plan", "--vertices", "9", "--edges", "-1"], 2, ["plan.edges"]),
        (["plan", "--classes", "0"], 2, ["plan.classes"]),
        (["plan", "--devices", "0"], 2, ["plan.devices"]),
        (["check", "--vertices", "-1"], 2, ["check.vertices"]),
        (
            ["train", *FEW, "--model.layers", "999999999999"],
            1,
            ["999,999,999,999 layers", "GiB that are free"],
        ),
        (["train", *FEW, "--model.layers", "4", "--model.hidden", "100000000000"], 1, ["GiB that are free"]),
        (["train", *FEW, "--parallel.chunks", "1000000"], 2, ["chunks=1,000,000", "300 vertices"]),
        (["train", "--nproc", "1000000"], 1, ["1,000,000 local ranks", "GiB"]),
        (["train", "--max-restarts", "-1"], 2, ["--max-restarts to be a number from 0 up; got -1"]),
        (["train", "--out", "x" * 5000], 2, ["up to 4,096 characters"]),
        (["report", "nowhere"], 2, ["nowhere", "no such folder"]),
    ],
)
def test_a_mistake_has_words_and_a_code(kagome, args, code, words):
    found, _, err = kagome(*args)
    assert found == code
    for word in words:
        assert word in err
    assert not Path("nowhere").exists()


def test_mistakes_in_a_settings_file(kagome):
    for text, words in {
        "[trian]\nepochs = 3": "got [trian]",
        "[train]\nepoch = 3": "got 'epoch'",
        "[train]\nepochs = 'many'": "train.epochs to be a whole number; got 'many'",
        "train = 3": "[train] to be a section of settings",
        "[train": "file of TOML",
    }.items():
        Path("run.toml").write_text(text)
        code, _, err = kagome("train", "run.toml")
        assert code == 2
        assert words in err
        assert "run.toml" in err


def test_an_out_that_cannot_be_written(kagome):
    Path("taken").write_text("a file")
    code, _, err = kagome("train", *FEW, "--out", "taken")
    assert code == 2
    assert "taken" in err
    assert "--out" in err


# Good paths ---------------------------------------------------------------------------------------

SUMMARY = [
    *("test_metric", "val_metric", "metric_name", "best_epoch", "epochs", "epoch_seconds", "bytes_per_epoch"),
    *("peak_memory_bytes", "predicted", "max_age", "world_size", "parallel", "seed"),
]
KINDS = {"halo", "stage", "transpose", "weights", "statistics", "other", "total"}


def has_all_files(
    folder: Path, epochs: int, world: int, vertices: int = 300, classes: int = 4, sent: bool | None = None
) -> None:
    """A run directory with every file, as the design has it."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == list(range(1, epochs + 1))
    for line in lines:
        times = {"waited", "under_way"} & set(line)  # where anything was exchanged
        assert set(line) - times == {
            *("epoch", "loss", "train_metric", "val_metric", "best_epoch", "seconds", "bytes")
        }
        assert set(line["bytes"]) == KINDS
    summary = json.loads((folder / "summary.json").read_text())
    assert list(summary)[: len(SUMMARY)] == SUMMARY
    assert (summary["epochs"], summary["world_size"], len(summary["peak_memory_bytes"])) == (
        epochs,
        world,
        world,
    )
    assert set(summary["bytes_per_epoch"]) == KINDS
    assert (summary["bytes_per_epoch"]["halo"] > 0) == (world > 1 if sent is None else sent)
    assert 0 <= summary["test_metric"] <= 1
    with np.load(folder / "predictions.npz") as found:
        assert (found["scores"].shape, found["scores"].dtype.kind) == ((vertices, classes), "f")
        assert (found["label"].shape, found["label"].dtype.kind) == ((vertices,), "i")
        assert (found["label"] == found["scores"].argmax(1)).all()
    assert json.loads((folder / "trace.json").read_text())
    assert "<html" in (folder / "report.html").read_text()
    assert (folder / "checkpoints" / "latest").read_text().strip() == f"epoch-{epochs:06d}"
    assert (folder / "model.safetensors").stat().st_size > 100
    assert "[parallel]" in (folder / "config.toml").read_text()


def test_train_a_file_with_flags_over_it_then_resume_then_report(kagome):
    Path("run.toml").write_text(
        f'[data]\nname = "{SBM}"\n[train]\nepochs = 9\nweight-decay = 0\n[model]\nname = "sage"\n'
        "[report]\nprogress = false\n"
    )
    code, out, _ = kagome("train", "run.toml", "--train.epochs", "3", "--out", "here")
    assert code == 0
    assert "test accuracy" in out
    assert "Report: here/report.html" in out
    has_all_files(Path("here"), epochs=3, world=1)
    text = Path("here/config.toml").read_text()
    assert ('name = "sage"' in text, "epochs = 3" in text, "weight_decay = 0.0" in text) == (True, True, True)
    # One checkpoint's folder is as good as the run's: the run's settings and folder are found from it.
    for resume, epochs in (("here", 5), ("here/checkpoints/epoch-000005", 6)):
        code, out, _ = kagome("train", "--resume", resume, "--train.epochs", str(epochs))
        assert code == 0
        has_all_files(Path("here"), epochs=epochs, world=1)
    assert not list(Path("here/checkpoints").rglob("config.toml"))
    page = Path("here/report.html")
    page.unlink()
    code, out, _ = kagome("report", "here")
    assert code == 0
    assert "best epoch" in out
    assert page.exists()


def test_runs_without_a_name_get_folders_of_their_own(kagome):
    for _ in range(2):
        assert kagome("train", *FEW, "--report.no-page", "--report.no-trace")[0] == 0
    found = sorted(path.name for path in Path("runs").iterdir())
    assert len(found) == 2
    assert found[0][:-3] == found[1][:-3]
    assert not (Path("runs") / found[0] / "report.html").exists()


def test_a_model_and_data_of_the_user_s_own(kagome):
    Path("my_things.py").write_text(WRONG_MODEL)
    code, out, _ = kagome("train", *FEW, "--model.name", "python:my_things:fine", "--out", "own")
    assert code == 0
    assert "test accuracy" in out


def test_check_tells_right_from_wrong_by_a_layer_s_name(kagome):
    Path("my_checked.py").write_text(WRONG_MODEL)
    code, out, _ = kagome("check", "--data.name", SBM, "--model.name", "gat", "--all", "--vertices", "60")
    assert code == 0
    assert "split over 3 and whole equal" in out
    assert "convs.0" in out
    code, out, err = kagome("check", "--data.name", SBM, "--model.name", "python:my_checked:build")
    assert code == 1
    assert "table" in out + err
    assert "kagome: error" in err


@pytest.mark.parametrize("command", [("train", "--out", "run"), ("check",), ("plan",)])
def test_a_label_of_no_class_is_refused_before_a_model_is_as_wide_as_it_says(kagome, tmp_path, command):
    """The model was built first, of 2^62 columns: torch's words, and a traceback."""
    label = np.array([0, 1, 2**62, 0])
    np.savez(
        tmp_path / "g.npz", x=np.ones((4, 2), "f4"), y=label, edge_index=np.array([[0, 1, 2], [1, 2, 3]])
    )
    code, _, err = kagome(*command, "--data.name", f"npz:{tmp_path / 'g.npz'}")
    assert code == 1
    assert f"y[2] = {2**62}" in err


def test_check_splits_as_the_flags_do_and_says_what_it_leaves_out(kagome):
    few = ("check", "--data.name", SBM, "--vertices", "60")
    sliced = ("--parallel.graph", "2", "--parallel.tensor", "2", "--parallel.decouple")
    code, out, _ = kagome(*few, "--model.name", "gcn", *sliced)
    assert code == 0
    assert "split over 4 (features over 2) and whole equal" in out
    code, out, _ = kagome(*few, "--parallel.pipe", "2", "--parallel.chunks", "8", "--parallel.codec", "int8")
    assert code == 0
    for words in ("pipe=2: pipelines", "chunks=8: rows that are old", "codec='int8': codecs round"):
        assert f"compared without {words}" in out
    assert "memory" not in out, "of stages none is known"
    code, _, err = kagome(*few, "--parallel.tensor", "2", "--model.no-fast")
    assert code == 2
    assert "model.fast=False, which leaves them out" in err


def test_a_file_stands_over_the_settings_of_the_run_that_goes_on(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("run").mkdir()
    Path("run/config.toml").write_text(
        "[train]\nepochs = 9\nlr = 0.5\n[parallel]\ngraph = 2\npipe = 2\n[model]\nhidden = 7\n"
    )
    Path("new.toml").write_text("[train]\nlr = 0.25\n")
    go_on = ["--resume", "run"]
    found = parse_train(["new.toml", *go_on, "--model.hidden", "5"])
    assert (found.train.epochs, found.train.lr, found.model.hidden) == (9, 0.25, 5)
    assert (found.parallel.graph, found.parallel.pipe) == (2, 2), "on as many ranks as before"
    for flags in (["--nproc", "3"], ["--parallel.pipe", "3"]):
        assert parse_train([*go_on, *flags]).parallel.graph is None, "the ranks there are now decide"
    for name, value in {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "a", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert parse_train(go_on).parallel.graph is None


def test_partition_says_how_good_the_cut_is_and_refuses_another_number_of_ranks(kagome):
    code, out, _ = kagome("partition", "--data.name", SBM, "--parts", "3", "--out", "parts")
    assert code == 0
    assert "of edges are cut" in out
    (sums,) = [line for line in out.splitlines() if line.startswith("with partial sums")]
    rows = sum(int(line.split()[3].replace(",", "")) for line in out.splitlines()[1:4])
    assert f" rows in place of {rows:,} (" in sums
    assert "--data.partition parts --nproc 3" in out
    assert sum(int(line.split()[1]) for line in out.splitlines()[1:4]) == 300
    code, _, err = kagome("train", "--data.partition", "parts", "--nproc", "1")
    assert code == 1
    assert "got 3 parts in parts" in err


def test_a_partition_in_the_current_folder_counts_only_if_it_is_asked_for(tmp_path, monkeypatch):
    """Inside a partition's folder, training started a rank for each of its parts."""
    monkeypatch.chdir(tmp_path)
    Path("partition.json").write_text('{"num_parts": 3}')
    assert app._ranks(config.Run()) is None
    assert app._ranks(config.Run(data=config.Data(partition="."))) == 3


def test_a_partition_of_one_part_trains_on_one_rank(kagome):
    assert kagome("partition", "--data.name", SBM, "--parts", "1", "--out", "whole")[0] == 0
    assert kagome("train", "--data.partition", "whole", *FEW[2:], "--out", "run")[0] == 0
    has_all_files(Path("run"), epochs=3, world=1)


LONG = "n" * 300
LONG_PATHS = {
    "out": ["train", *FEW, "--out", LONG],
    "a folder of out": ["train", *FEW, "--out", f"{LONG}/run"],
    "resume": ["train", *FEW, "--resume", LONG],
    "settings": ["train", LONG],
    "plan": ["train", *FEW, "--parallel.plan", LONG, "--nproc", "2"],
    "npz": ["train", "--data.name", f"npz:{LONG}"],
    "root": ["train", "--data.root", LONG],
    "cluster": ["plan", "--cluster", LONG],
    "page": ["plan", "--page", LONG],
    "checkpoint": ["predict", "--checkpoint", LONG, "--out", "scores.npz"],
    "scores": ["predict", "--checkpoint", "run", "--out", f"{LONG}.npz"],
    "parts": ["partition", "--data.name", SBM, "--parts", "2", "--out", LONG],
    "report": ["report", LONG],
}


@pytest.mark.parametrize("words", LONG_PATHS.values(), ids=LONG_PATHS)
def test_a_name_that_no_file_system_holds_is_one_sentence(words, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        app.main(words)
    assert ended.value.code not in (0, None)
    told = capfd.readouterr().err
    assert "Traceback" not in told
    assert "kagome: error: " in told or "error ─" in told  # the box around what flags do not take
    assert list(tmp_path.iterdir()) == []


def test_a_name_for_which_a_hidden_one_is_too_long_is_one_sentence(tmp_path, monkeypatch, capfd):
    """A file is written beside its place first, under a longer name."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        app.main(["partition", "--data.name", SBM, "--parts", "2", "--out", LONG[:254]])
    told = capfd.readouterr().err
    assert "File name too long" in told
    assert "Traceback" not in told
