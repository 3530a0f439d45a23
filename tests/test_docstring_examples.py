"""The examples in docstrings print what they show, and every public name has one."""

from __future__ import annotations

import ast
import doctest
from pathlib import Path

import pytest

import kagome
from imports import MODULES

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def _examples() -> dict[str, tuple[Path, int, str]]:
    """Return file, first line and text of every docstring with an example, by the name of its object.

    They are read from the source, as a wrapper around a function hides where it was written.
    """
    found = {}
    for module, path in MODULES.items():
        text = path.read_text()
        if ">>> " not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                docstring = ast.get_docstring(node) or ""
                if ">>> " in docstring:
                    found[f"{module}.{node.name}"] = path, node.body[0].lineno - 1, docstring
    return found


EXAMPLES = _examples()


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_an_example_prints_what_it_shows(
    name: str, tmp_path: Path, one_measure: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path, line, docstring = EXAMPLES[name]
    module = __import__(name.rpartition(".")[0], fromlist=["*"])
    test = doctest.DocTestParser().get_doctest(docstring, dict(vars(module)), name, str(path), line)
    said: list[str] = []
    doctest.DocTestRunner(optionflags=FLAGS).run(test, out=said.append)
    assert not said, "".join(said)


def test_every_public_name_has_an_example() -> None:
    public = (getattr(kagome, name) for name in kagome.__all__ if name != "__version__")
    assert [value.__name__ for value in public if ">>> " not in (value.__doc__ or "")] == []
