"""The law of imports, read from the source: no circle, a table that is kept, small files, no hidden state."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import kagome
from imports import FILES, MODULES, SHOWN, SOURCE, arrows, imports_of, levels, name_of, parts_of, table

LINES = 600
"""Of a file."""
MODULES_OF_A_FOLDER = 12
"""Beside its ``__init__``."""
NO_TORCH = ("config", "launch", "planner", "records", "report", "schedule")
"""Packages of which no module loads torch when it is imported."""


def test_packages_import_each_other_in_no_circle():
    """Imports in functions, under TYPE_CHECKING and by a string count."""
    height = levels(arrows())
    assert height["kagome.errors"] == 0
    with pytest.raises(ValueError, match="a -> b -> a"):
        levels({"a": {"b"}, "b": {"a"}, "c": set()})


def test_the_table_of_imports_is_that_of_the_source():
    """A new arrow is written down by ``python tests/imports.py``, and seen in review."""
    _, shown, _ = parts_of(SHOWN.read_text())
    assert shown == table()


def test_a_folder_is_a_chapter():
    held = Counter(path.parent for path in FILES if path.name != "__init__.py")
    wide = {str(folder.relative_to(SOURCE)): count for folder, count in held.items()}
    assert not {name: count for name, count in wide.items() if count > MODULES_OF_A_FOLDER}
    for folder in held:
        first = ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
        assert first
        assert len(first.splitlines()) == 1 or folder == SOURCE


def test_no_circle_of_imports():
    """Depth first over what is imported when a module is."""
    done: set[str] = set()

    def visit(module: str, above: tuple[str, ...]) -> None:
        assert module not in above, " -> ".join((*above[above.index(module) :], module))
        if module in done or module not in MODULES:
            return
        for name in sorted(imports_of(MODULES[module], at_start=True)):
            visit(name, (*above, module))
        done.add(module)

    for module in MODULES:
        visit(module, ())
    assert done == set(MODULES)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_file_is_short_says_what_it_is_and_keeps_no_state(path):
    text = path.read_text()
    assert text.count("\n") <= LINES
    tree = ast.parse(text)
    assert ast.get_docstring(tree)
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.AnnAssign) and not ast.unparse(node.annotation).startswith(
            ("Final", "Mapping")
        ):
            targets = [node.target]
        value = getattr(node, "value", None)
        mutable = isinstance(value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp)
        for target in targets:
            name = ast.unparse(target)
            constant = name.lstrip("_").isupper() or name.startswith("__")
            assert not mutable or constant, f"{name} can be changed by anyone"
    globals_ = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Global)]
    assert not globals_


def loaded_by(code: str) -> set[str]:
    program = f"{code}\nimport sys\nprint(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "code",
    [
        "import kagome; dir(kagome); kagome.Parallel(graph=2); kagome.KagomeError",
        "import kagome.cli.app, kagome.config, kagome.launch.environment, kagome.launch.launcher",
        "import kagome.report.summary, kagome.report.page.page, kagome.records.epoch",
        *[f"import kagome.{name}" for name in ("schedule", "planner") if (SOURCE / name).exists()],
    ],
)
def test_a_fresh_process_loads_no_torch(code):
    assert not {"torch", "torch_geometric"} & loaded_by(code)


def test_the_command_line_loads_neither_numpy_nor_numba():
    code = "import kagome.cli.app, kagome.launch.launcher, kagome.kernels.base.kept_code"
    assert not {"numpy", "numba", "torch"} & loaded_by(code)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ranks_are_forked_of_a_process_without_threads_or_collections():
    """A lock that a thread holds would stay locked in the fork."""
    program = (
        "import gc, os, sys, kagome.train.preload\n"
        "assert {'kagome.train.trainer', 'torch._dynamo', 'torch_geometric.nn'} <= set(sys.modules)\n"
        "print(len(os.listdir('/proc/self/task')), gc.isenabled(), gc.get_freeze_count() > 100_000)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "True", "True"]
    assert "leaked" not in done.stderr  # nanobind's word for objects that were frozen until the end


def test_no_module_of_these_packages_loads_torch():
    names = [name for name in MODULES if name.startswith(tuple(f"kagome.{each}" for each in NO_TORCH))]
    assert not {"torch", "torch_geometric"} & loaded_by(f"import {', '.join(names)}")


def test_the_public_face():
    face = {"Trainer", "Parallel", "Train", "Report", "check", "load", "pipeline", "plan", "shard"}
    face |= {"load_rows", "load_weights", "Graph", "Vertices", "Edges"}
    assert set(kagome.__all__) == {*face, "KagomeError", "__version__"}
    for name in kagome.__all__:
        assert getattr(kagome, name) is not None
    with pytest.raises(AttributeError, match=r"no attribute 'Trainr'; it has .*Trainer"):
        kagome.Trainr  # noqa: B018


def test_no_two_test_files_have_one_name():
    """Pytest imports test files by their bare name."""
    names = [path.name for path in Path(__file__).parent.rglob("*.py") if path.name != "__init__.py"]
    assert sorted(names) == sorted(set(names))
