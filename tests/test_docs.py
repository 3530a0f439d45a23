"""What the documentation shows runs: examples, README's script, flags, links, the shell files."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch_geometric.nn import GCN

import kagome
import warm
from imports import MODULES, arrows

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
GUIDES = [
    ROOT / "README.md",
    *(ROOT / "docs" / f"{name}.md" for name in ("cli", "training", "strategies", "benchmarks")),
    *sorted((ROOT / "docs").glob("how-to-*.md")),
]
SHELL = [*sorted(EXAMPLES.glob("*.sh")), *sorted(EXAMPLES.glob("*.sbatch")), ROOT / ".ci" / "run"]


def run(*args: object, cwd: Path, **env: str) -> str:
    """What a command prints, run with this Python's own tools first on the path."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    given = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": path, **env}
    done = subprocess.run(
        [str(a) for a in args],
        cwd=cwd,
        env=given,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, f"{' '.join(map(str, args))}\n{done.stdout}{done.stderr}"
    return done.stdout


def printed(script: Path, *, cwd: Path, ranks: int = 1, **env: str) -> str:
    """What a script prints."""
    done = warm.run(script, cwd=cwd, ranks=ranks, **env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def accuracy(text: str) -> str:
    found = re.findall(r"test accuracy (\d\.\d{4})", text)
    assert len(found) == 1, text
    return found[0]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def test_samples_of_plans_are_as_they_are_printed() -> None:
    """README's table had seconds without what they may be off by."""
    rows = [
        line
        for page in PAGES
        for block in blocks(page, "console")
        for line in block.splitlines()
        if re.search(r" (yes|no) .* (ms|s)\b.*%.* [KMG]B$", line)
    ]
    assert len(rows) > 10
    for row in rows:
        assert re.search(r"  (yes|no) +\d[\d.]* (ms|s) \+-\d+% +\d+% ", row), row


LEARNED = {
    "link_prediction": (-1, 0.5),  # of MRR; 0.17 by chance
    "recommender": (-1, 0.6),  # of recall@20; 0.15 by chance
    "fraud": (1, 0.6),  # of average precision; 0.06 by chance
    "potential": (-1, -0.1),
    "weather": (-1, 0.1),  # of the change is explained
    "flattened_batch": (-1, 0.4),  # of the variance is explained
    "hetero": (-1, 0.6),  # of accuracy; 0.25 by chance
    "hetero_trainer": (-1, 0.6),
}
"""Examples of own loops: which number of the last line is more than a bound, or less than one below 0."""


@pytest.mark.some(2)
@pytest.mark.parametrize("name", LEARNED)
def test_examples_of_own_loops_learn_and_are_the_same_on_two_ranks(tmp_path: Path, name: str) -> None:
    script = EXAMPLES / f"{name}.py"
    alone = found(printed(script, cwd=tmp_path))
    assert alone == found(printed(script, cwd=tmp_path, ranks=2))
    place, bound = LEARNED[name]
    assert alone[place] > bound if bound > 0 else alone[place] < -bound


def test_every_example_is_run_by_a_test_here() -> None:
    assert {p.name for p in EXAMPLES.glob("*.py")} == {
        "twelve_lines.py",
        "own_model.py",
        "own_data.py",
        "mesh_simulation.py",
        *(f"{name}.py" for name in LEARNED),
        "lightning_loop.py",
        "accelerate_loop.py",
        "ray_loop.py",
    }
    for path in EXAMPLES.iterdir():
        if path.is_file():
            assert len(path.read_text().splitlines()) <= 120, path.name


def test_readme_script_is_the_example_and_gives_the_same_on_two_ranks(tmp_path: Path) -> None:
    (script,) = blocks(ROOT / "README.md", "python")
    assert len([line for line in script.splitlines() if line]) == 12
    example = EXAMPLES / "twelve_lines.py"
    assert example.read_text().endswith(script)
    (tmp_path / "script.py").write_text(script)
    alone = printed(example, cwd=tmp_path)
    two = printed(tmp_path / "script.py", cwd=tmp_path, ranks=2)
    assert accuracy(alone) == accuracy(two)
    assert "scores (1797, 10)" in alone
    assert "scores (1797, 10)" in two


def test_own_model_gives_the_same_on_three_ranks(tmp_path: Path) -> None:
    script = EXAMPLES / "own_model.py"
    alone = printed(script, cwd=tmp_path, EPOCHS="12")
    three = printed(script, cwd=tmp_path, ranks=3, EPOCHS="12")
    assert accuracy(alone) == accuracy(three)
    assert float(accuracy(alone)) > 0.8


@pytest.mark.parametrize(("page", "scores"), [("own-loop", "(1797, 1)"), ("sets", "(200, 4)")])
def test_own_loop_gives_the_same_on_two_ranks(tmp_path: Path, page: str, scores: str) -> None:
    script, *_ = blocks(ROOT / "docs" / f"{page}.md", "python")
    (tmp_path / "script.py").write_text(script)
    alone = printed(tmp_path / "script.py", cwd=tmp_path)
    assert f"scores {scores}" in alone
    assert found(alone) == found(printed(tmp_path / "script.py", cwd=tmp_path, ranks=2))


def test_own_loop_checks_model_and_loss(capsys: pytest.CaptureFixture[str]) -> None:
    script, *rest = blocks(ROOT / "docs" / "own-loop.md", "python")
    (check,) = [block for block in rest if "kagome.check" in block]
    exec(compile(script + check, "own-loop.md", "exec"), {})
    assert "one rank and plain PyG equal" in capsys.readouterr().out


def test_loop_of_links_gives_the_same_on_two_ranks(tmp_path: Path) -> None:
    script, *_ = blocks(ROOT / "docs" / "links.md", "python")
    (tmp_path / "script.py").write_text(script)
    alone = found(printed(tmp_path / "script.py", cwd=tmp_path))
    assert alone == found(printed(tmp_path / "script.py", cwd=tmp_path, ranks=2))
    assert alone[2] > 0.5  # MRR; 0.27 by chance


def test_mesh_simulation_learns_and_is_the_same_on_two_ranks(tmp_path: Path) -> None:
    script = EXAMPLES / "mesh_simulation.py"
    alone = found(printed(script, cwd=tmp_path))
    assert alone == found(printed(script, cwd=tmp_path, ranks=2))
    assert alone[1] > 0.3  # of the variance is explained


def test_scores_without_labels_as_the_page_shows(tmp_path: Path) -> None:
    (script,) = (each for each in complete(ROOT / "docs" / "own-loop.md") if "load_weights" in each)
    data = kagome.load("digits")
    model = GCN(64, 16, num_layers=2, out_channels=10)
    kagome.Trainer(model, data, out=tmp_path / "runs" / "digits").fit(2)
    (tmp_path / "script.py").write_text(script)
    printed(tmp_path / "script.py", cwd=tmp_path, ranks=2)
    expected = model.eval()(data.x, data.edge_index).detach()
    torch.testing.assert_close(kagome.load_rows(tmp_path / "scores"), expected, rtol=1e-4, atol=1e-4)


def test_a_run_goes_on_with_other_ranks_as_the_page_shows(tmp_path: Path) -> None:
    (script,) = (each for each in complete(ROOT / "docs" / "own-loop.md") if "STEPS, FILE" in each)
    for name, ranks, steps in (("whole", 1, 20), ("parts", 1, 7), ("parts", 2, 20)):
        (folder := tmp_path / name).mkdir(exist_ok=True)
        (folder / "script.py").write_text(script.replace("STEPS, FILE = 20", f"STEPS, FILE = {steps}"))
        last = printed(folder / "script.py", cwd=folder, ranks=ranks)
        if name == "whole":
            whole = last
    assert numbers(last) == pytest.approx(numbers(whole), rel=1e-3)
    assert torch.load(tmp_path / "parts" / "run.pt")["step"] == 20


def test_a_loop_does_what_a_trainer_does_as_the_page_shows(tmp_path: Path) -> None:
    (script,) = (each for each in complete(ROOT / "docs" / "own-loop.md") if "PATIENCE" in each)
    (tmp_path / "script.py").write_text(script)
    alone = found(printed(tmp_path / "script.py", cwd=tmp_path))
    two = found(printed(tmp_path / "script.py", cwd=tmp_path, ranks=2))
    assert alone == two
    assert alone[1] > 0.9
    kept = [path.name for path in sorted((tmp_path / "run").iterdir())]
    assert 0 < len(kept) <= 2


def complete(page: Path) -> list[str]:
    """The scripts of a page: blocks that import what they use."""
    return [block for block in blocks(page, "python") if "import kagome" in block]


def numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"loss (\d+\.\d+)", text)]


def plain_loss() -> float:
    """The last loss of the examples' training by PyTorch and PyG alone."""
    data = kagome.load("digits")
    torch.manual_seed(0)
    model = GCN(64, 16, num_layers=2, out_channels=1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(20):
        loss = ((model(data.x, data.edge_index) - data.x.mean(dim=1, keepdim=True)) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("package", ["lightning", "accelerate"])
def test_frameworks_give_the_loss_of_the_plain_loop(package: str, ranks: int, tmp_path: Path) -> None:
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", ranks]
    text = run(*torchrun, EXAMPLES / f"{package}_loop.py", cwd=tmp_path)
    assert numbers(text) == [pytest.approx(plain_loss(), rel=1e-3)]
    if package == "lightning":  # its checkpoint is the plain model's
        saved = torch.load(tmp_path / "runs" / "lightning" / "best.ckpt")
        weights = {name.removeprefix("model."): value for name, value in saved["state_dict"].items()}
        GCN(64, 16, num_layers=2, out_channels=1).load_state_dict(weights)
        assert saved["global_step"] <= 20  # of the best epoch
    else:
        assert (tmp_path / "runs" / "accelerate" / "model.safetensors").exists()


def test_a_ray_train_function_gives_the_loss_of_the_plain_loop(tmp_path: Path) -> None:
    if find_spec("ray") is None:
        pytest.skip("ray is not installed")
    text = run(sys.executable, EXAMPLES / "ray_loop.py", cwd=tmp_path)
    assert numbers(text.splitlines()[-1]) == [pytest.approx(plain_loss(), rel=1e-3)]
    assert "checkpoint True" in text


def found(text: str) -> list[float]:
    """The numbers with decimals on the last line that a script prints; in float32 the last one may differ."""
    return [round(float(number), 3) for number in re.findall(r"\d+\.\d+", text.strip().splitlines()[-1])]


def test_a_trainer_of_several_vertex_types_as_the_page_about_them_shows(tmp_path: Path) -> None:
    _, script, *_ = blocks(ROOT / "docs" / "sets.md", "python")
    (tmp_path / "script.py").write_text(f"{script}print(scores.shape, summary['test_metric'])")
    text = printed(tmp_path / "script.py", cwd=tmp_path, ranks=2)
    assert "[200, 4]" in text
    assert 0 < found(text)[-1] < 1


def test_stages_of_any_module_as_the_page_about_them_shows(tmp_path: Path) -> None:
    (script,) = blocks(ROOT / "docs" / "dag-pipelines.md", "python")
    (tmp_path / "script.py").write_text(script)
    assert "runs/uno/report.html" in printed(tmp_path / "script.py", cwd=tmp_path, ranks=4)
    assert (tmp_path / "runs" / "uno" / "trace.json").exists()


@pytest.mark.slow
def test_own_data_by_file_and_by_function(tmp_path: Path) -> None:
    assert float(accuracy(printed(EXAMPLES / "own_data.py", cwd=tmp_path))) > 0.6
    name = "python:examples.own_data:communities"
    out = tmp_path / "run"
    run("kagome", "train", "--data.name", name, "--train.epochs", 2, "--out", out, cwd=ROOT)
    assert (out / "summary.json").exists()


@pytest.mark.slow
def test_two_nodes_on_this_machine(tmp_path: Path) -> None:
    out, meet = tmp_path / "run", f"127.0.0.1:{_free_port()}"
    script, bin_ = EXAMPLES / "two_nodes.sh", str(Path(sys.executable).parent)
    run("bash", script, "--train.epochs", 2, "--out", out, cwd=tmp_path, BIN=bin_, MEET=meet)
    assert '"world_size": 2' in (out / "summary.json").read_text()
    one = tmp_path / "one"
    run("kagome", "train", "--nproc", 1, "--train.epochs", 2, "--out", one, cwd=tmp_path)
    curves = [
        [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in (one, out)
    ]
    assert curves[0] == pytest.approx(curves[1], rel=1e-5)


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize("path", SHELL, ids=lambda p: p.name)
def test_shell_files_parse(path: Path) -> None:
    run("bash", "-n", path, cwd=ROOT)


def test_ci_run_can_be_executed() -> None:
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_readme_and_guides_name_flags_that_exist(tmp_path: Path) -> None:
    text = "\n".join(page.read_text() for page in GUIDES)
    scripts = "\n".join(block for page in GUIDES for block in blocks(page, "sh"))
    shown = re.findall(r"kagome (\w+)((?: +[^\s#`]+)*)", scripts)
    helps = {name: run("kagome", name, "--help", cwd=tmp_path) for name in {name for name, _ in shown}}
    assert {"train", "predict", "plan", "check", "partition", "report", "doctor"} == set(helps)
    for name, rest in shown:
        for flag in re.findall(r"--[\w.-]+", rest):
            assert re.search(rf"{re.escape(flag)}(?![\w.-])", helps[name]), f"kagome {name} {flag}"
    for flag in set(re.findall(r"--(?:data|model|parallel|train|report)\.[\w-]+", text)):
        assert flag in helps["train"], flag


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    links = re.findall(r"\]\((?!https?://|#)([^)#\s]+)", text)
    links += re.findall(r'src="(?!https?://)([^"]+)"', text)
    for link in links:
        assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_architecture_has_the_first_sentence_of_every_package() -> None:
    """Eight of them had changed in the source alone."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    shown = re.findall(r"^\| `([\w.]+)` \| (.+) \|$", page, re.MULTILINE)
    heads = {name: ast.get_docstring(ast.parse(MODULES[name].read_text())) or "" for name in arrows()}
    assert dict(shown) == {
        name.removeprefix("kagome."): head.splitlines()[0].replace("``", "`") for name, head in heads.items()
    }
