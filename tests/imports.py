"""The law of imports, read from the source: which package imports which, and on which level each stands.

Run as ``python tests/imports.py`` it writes the table that CONTRIBUTING.md shows.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import kagome

SOURCE = Path(kagome.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
SHOWN = Path(__file__).parents[1] / "CONTRIBUTING.md"
BEGIN, END = "<!-- imports begin -->", "<!-- imports end -->"


def name_of(path: Path) -> str:
    """The module's name; a package's is that of its folder."""
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in FILES}


def package_of(module: str) -> str:
    """The folder in which a module lies; a file at the top is a package of its own."""
    if MODULES[module].name == "__init__.py":
        return module
    parent = module.rpartition(".")[0]
    return module if parent == "kagome" else parent


def imports_of(path: Path, *, at_start: bool = False) -> set[str]:
    """Modules of Kagome that a file names in an import or a string.

    Args:
        path: Of the file.
        at_start: Whether to leave out what is imported in functions, for type checkers, or by a string.
    """
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if at_start and (
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
        ):
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert not node.level, f"{path}: relative import"
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            modules = {module for module in whole if module in MODULES}
            found.update(modules or {node.module})
        elif not at_start and isinstance(node, ast.Constant) and node.value in MODULES:
            found.add(str(node.value))
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text()))
    return {name for name in found if name in MODULES}


def arrows() -> dict[str, set[str]]:
    """Each package with the packages that its files name. The face (``kagome``) names what it shows."""
    found: dict[str, set[str]] = defaultdict(set)
    for module, path in MODULES.items():
        here = package_of(module)
        found[here] |= {package_of(name) for name in imports_of(path)} - {here}
    return {name: others - {"kagome"} for name, others in found.items() if name != "kagome"}


def levels(graph: Mapping[str, set[str]]) -> dict[str, int]:
    """How far above the lowest packages each stands.

    Raises:
        ValueError: If packages import each other in a circle, which it names.
    """
    found: dict[str, int] = {}

    def visit(name: str, above: tuple[str, ...]) -> int:
        if name in above:
            raise ValueError(" -> ".join((*above[above.index(name) :], name)))
        if name not in found:
            found[name] = 1 + max((visit(each, (*above, name)) for each in sorted(graph[name])), default=-1)
        return found[name]

    for name in sorted(graph):
        visit(name, ())
    return found


def table() -> str:
    """The packages by level, with what each imports, as Markdown."""
    graph = arrows()
    height = levels(graph)
    rows = ["| level | package | imports |", "|---|---|---|"]
    for name in sorted(graph, key=lambda each: (height[each], each)):
        others = ", ".join(f"`{each.removeprefix('kagome.')}`" for each in sorted(graph[name]))
        rows.append(f"| {height[name]} | `{name.removeprefix('kagome.')}` | {others} |")
    return "\n".join(rows)


def parts_of(text: str) -> Iterator[str]:
    """What stands before the table in CONTRIBUTING.md, the table, and what stands after it."""
    head, _, rest = text.partition(BEGIN)
    body, _, tail = rest.partition(END)
    yield from (head, body.strip(), tail)


if __name__ == "__main__":
    before, _, after = parts_of(SHOWN.read_text())
    SHOWN.write_text(f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}")
