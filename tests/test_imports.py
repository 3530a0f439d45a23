"""The law of imports, read from the source: who may know whom, no circle, small files, no hidden state."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import kagome

SOURCE = Path(kagome.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
LIMIT = 600

ANYWHERE = {
    "errors",
    "config",
    "ranks",
    "threads",
    "allocator",
    "available",
    "caller",
    "commands",
    "compiled",
    "leftovers",
    "named",
    "opened",
    "planfile",
    "reading",
    "system",
    "written",
    "sealed",
    "kinds",
}
"""Leaves without torch that every folder may import."""

MAY = {
    "errors": set(),
    "config": {"errors", "clashes", "kinds", "planfile"},
    "kinds": {"errors"},
    "planfile": {"errors", "kinds", "reading"},
    "reading": set(),
    "written": {"errors", "config", "kinds", "reading"},
    "commands": {"config", "errors", "kinds"},
    "clashes": {"errors", "config"},
    "ranks": {"errors"},
    "named": set(),
    "system": {"errors", "available"},
    "forked": {"system", "available"},
    "threads": set(),
    "allocator": set(),
    "available": set(),
    "caller": set(),
    "compiled": set(),
    "leftovers": set(),
    "sealed": set(),
    "opened": set(),
    "launch": {"errors", "ranks"},
    "graph": {"graph"},
    "kernels": {"kernels"},
    "model": {"model", "kernels"},
    "comm": {"comm", "kernels"},
    "neighbors": {"neighbors", "comm", "graph", "kernels"},
    "report": {"report", "schedule"},
    "schedule": {"schedule"},
    "planner": {"planner", "schedule"},
    "kagome.planner.profile": {"planner", "model"},
    "run": {"run", "graph", "model", "comm", "neighbors", "report", "schedule", "planner"},
    "doctor": {"comm", "launch"},
    "cli": {
        *("run", "graph", "model", "comm", "report", "launch", "doctor", "planner", "schedule", "kagome"),
    },
    "__main__": {"cli"},
    "kagome": set(),
}
"""Folder, or file at the top -> what it may import of the package."""


def name_of(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def folder_of(module: str) -> str:
    return module.split(".")[1] if "." in module else "kagome"


def imports_of(path: Path, *, at_start: bool = False) -> set[str]:
    """Modules of the package that a file imports; ``at_start`` leaves out those inside functions."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return  # for readers only
        if at_start and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert not node.level, f"{path}: relative import"
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            modules = {module for module in whole if module in MODULES}
            found.update(modules or {node.module})
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text()))
    return {name for name in found if name.split(".")[0] == "kagome"}


MODULES = {name_of(path): path for path in FILES}


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_file_imports_only_what_its_folder_may_know(path):
    folder = folder_of(name_of(path))
    allowed = MAY.get(name_of(path), MAY[folder]) | (set() if folder in ANYWHERE else ANYWHERE)
    wrong = {name for name in imports_of(path) if folder_of(name) not in allowed}
    assert not wrong, f"{folder} may import {sorted(allowed)}"


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
    assert text.count("\n") <= LIMIT
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
        "import kagome.cli, kagome.config, kagome.ranks, kagome.launch",
        "import kagome.report.summary, kagome.report.page, kagome.report.meters",
        *[f"import kagome.{name}" for name in ("schedule", "planner") if (SOURCE / name).exists()],
    ],
)
def test_a_fresh_process_loads_no_torch(code):
    assert not {"torch", "torch_geometric"} & loaded_by(code)


def test_the_public_face():
    face = {"Trainer", "Parallel", "Train", "Report", "check", "load", "pipeline", "plan", "KagomeError"}
    assert set(kagome.__all__) == {*face, "__version__"}
    for name in kagome.__all__:
        assert getattr(kagome, name) is not None
    with pytest.raises(AttributeError, match=r"no attribute 'Trainr'; it has .*Trainer"):
        kagome.Trainr  # noqa: B018


def test_no_two_test_files_have_one_name():
    """Pytest imports test files by their bare name."""
    names = [path.name for path in Path(__file__).parent.rglob("*.py") if path.name != "__init__.py"]
    assert sorted(names) == sorted(set(names))
