"""What ``pyproject.toml`` declares is what the source imports, what is pinned, and what is shipped."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path

from imports import FILES, SOURCE
from kagome.cli.doctor import NEEDED

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PYPROJECT["project"]["optional-dependencies"]
NOT_DECLARED = {
    "llvmlite": "comes with numba, in the version that numba needs",
    "triton": "comes with torch where torch has CUDA",
    "ogb": "only for --data.name ogb:..., which says so",
}


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[^\w-]", each)[0] for each in requirements}


def modules(requirements: list[str]) -> set[str]:
    return {{"scikit-learn": "sklearn"}.get(name, name.replace("-", "_")) for name in names(requirements)}


def imported() -> set[str]:
    """Packages of others that a file of the source imports anywhere."""
    found: set[str] = set()
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module.partition(".")[0])
    return found - sys.stdlib_module_names - {"kagome"}


def test_what_is_declared_is_what_is_imported():
    declared = modules(PYPROJECT["project"]["dependencies"])
    optional = modules([*EXTRAS["data"], *EXTRAS["tensorboard"], *EXTRAS["parquet"]])
    assert declared == imported() - optional - NOT_DECLARED.keys()


def test_each_is_pinned_and_looked_for_by_the_doctor():
    declared = PYPROJECT["project"]["dependencies"]
    pinned = {line.partition("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines()}
    assert names([*declared, *(each for extra in EXTRAS.values() for each in extra)]) <= pinned
    assert set(NEEDED) == names(declared)


def test_files_that_are_no_modules_are_shipped():
    patterns = PYPROJECT["tool"]["setuptools"]["package-data"]["kagome"]
    shipped = {path for pattern in patterns for path in SOURCE.glob(pattern)}
    others = {path for path in SOURCE.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert others - {path for path in others if path.suffix == ".py"} == shipped
