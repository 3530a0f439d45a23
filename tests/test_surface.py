"""What a user sees changes only where a change means it; runs that an earlier version wrote go on."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import surface


def start(words: list[str], folder: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "kagome", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("part", ["names", "flags", "settings"])
def test_names_flags_and_settings_are_those_that_are_written_down(part: str) -> None:
    assert getattr(surface, part)() == surface.read()[part]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_saved_run_goes_on_as_if_it_had_never_ended(ranks: int, tmp_path: Path) -> None:
    shutil.copytree(surface.SAVED, tmp_path, dirs_exist_ok=True)
    more = ["--resume", "run", "--train.epochs", str(surface.RESUMED)]
    mesh = ["--parallel.graph", str(ranks)]
    settings = tmp_path / "run" / "config.toml"
    if ranks == 1:  # a value that is withdrawn: such a run goes on with the nearest one
        settings.write_text(settings.read_text().replace('activations = "auto"', 'activations = "disk"'))
        assert "disk" in settings.read_text()
    surface.train(tmp_path, *more, *mesh, ranks=ranks, start=start)
    expected = [float(each) for each in surface.json.loads((surface.SAVED / "losses.json").read_text())]
    assert surface.losses(tmp_path / "run") == pytest.approx(expected, rel=1e-5)
    assert f'activations = "{"host" if ranks == 1 else "auto"}"' in settings.read_text()
    if ranks == 2:
        wanted = {
            name.replace("epoch-000003", f"epoch-{surface.RESUMED:06d}"): content
            for name, content in surface.read()["run"].items()
        }
        found = surface.files_of(tmp_path / "run")
        assert {name: content for name, content in found.items() if "epoch-000003" not in name} == wanted
