"""Measures of the source: how much of it a reader must hold at once. Run as ``python tests/house.py``.

Where it sits: ``test_house`` keeps each from growing past what ``golden/house.json`` says.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path

from imports import FILES, MODULES, SOURCE, imports_of

BOUNDS = Path(__file__).parent / "golden" / "house.json"
LONG = 60
"""Lines of a function, signature and docstring left out."""
PUBLIC = 15
"""Public methods of a class."""
SHORT = 4
"""Words of a docstring's first line that say too little."""
ATTACHING = frozenset(("Interceptor", "apply_rules", "install", "recompute"))
"""What puts a model on a part: the interceptor, layer rules, forward hooks, recomputation."""


def widest_folder() -> int:
    """Modules in the folder that has most, its ``__init__`` left out."""
    return max(Counter(path.parent for path in FILES if path.name != "__init__.py").values())


def longest_file() -> int:
    """Lines of the longest file."""
    return max(path.read_text().count("\n") for path in FILES)


def lines() -> int:
    """Lines of all files."""
    return sum(path.read_text().count("\n") for path in FILES)


def classes_of_one_name() -> int:
    """Names of public classes that stand in two files or more."""
    homes = defaultdict(set)
    for path, node in _nodes():
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            homes[node.name].add(path)
    return sum(len(paths) > 1 for paths in homes.values())


def long_functions() -> int:
    """Functions of more than 60 lines, counted from behind signature and docstring."""
    return sum(isinstance(node, _FUNCTIONS) and _length(node) > LONG for _, node in _nodes())


def large_classes() -> int:
    """Classes with more than 15 public methods."""
    return sum(isinstance(node, ast.ClassDef) and len(_public(node)) > PUBLIC for _, node in _nodes())


def short_summaries() -> int:
    """Docstrings of functions and classes whose first line has four words or fewer."""
    found = [ast.get_docstring(node) for _, node in _nodes() if isinstance(node, (*_FUNCTIONS, ast.ClassDef))]
    return sum(text is not None and len(text.splitlines()[0].split()) <= SHORT for text in found)


def few_comments() -> float:
    """Lines of code a comment: fewer is better."""
    comments = code = 0
    for path in FILES:
        tokens = list(tokenize.generate_tokens(io.StringIO(path.read_text()).readline))
        comments += sum(token.type == tokenize.COMMENT for token in tokens)
        code += len({token.start[0] for token in tokens if token.type not in _BLANK})
    return round(code / comments, 1)


def modules_of_one_importer() -> int:
    """Modules that one other module alone imports."""
    importers = Counter(name for path in FILES for name in imports_of(path) if name in MODULES)
    return sum(count == 1 for count in importers.values())


def exchanges_spelled_out() -> int:
    """Functions that take the counts of an exchange one by one, in place of a request."""
    return sum(
        isinstance(node, _FUNCTIONS) and {"send_counts", "recv_counts"} <= {arg.arg for arg in node.args.args}
        for _, node in _nodes()
    )


def attach_dances() -> int:
    """Modules beside ``components.parallelize`` that make an interceptor, rules, hooks or recomputation."""
    made = {path for path, node in _nodes() if isinstance(node, ast.Call) and _name(node.func) in ATTACHING}
    return len(made - {MODULES.get("kagome.components.parallelize")})


def saved_tensor_hooks() -> int:
    """Places that set hooks on the tensors that autograd saves."""
    return _named("torch.autograd.graph.saved_tensors_hooks")


def autocasts() -> int:
    """Places that make a context of mixed precision."""
    return _named("torch.autocast")


def executors() -> int:
    """Places that walk a program and point at the action that fails, the simulator among them."""
    return _called("pointed")


def memory_accounts() -> int:
    """Places that fill a record of memory by kind, measured or estimated."""
    return _called("MemoryByKind")


def schedule_shapes() -> int:
    """Classes that know which stages read a stage."""
    found = (node for _, node in _nodes() if isinstance(node, ast.ClassDef))
    return sum({"sources", "readers"} <= set(_public(node)) for node in found)


_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_BLANK = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
MEASURES = (
    lines,
    widest_folder,
    longest_file,
    long_functions,
    large_classes,
    classes_of_one_name,
    modules_of_one_importer,
    short_summaries,
    few_comments,
    exchanges_spelled_out,
    attach_dances,
    saved_tensor_hooks,
    autocasts,
    executors,
    memory_accounts,
    schedule_shapes,
)


@cache
def _nodes() -> list[tuple[Path, ast.AST]]:
    return [(path, node) for path in FILES for node in ast.walk(ast.parse(path.read_text()))]


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _named(name: str) -> int:
    """Count the uses of a name of torch, as a call or a base class."""
    return sum(isinstance(node, ast.Attribute) and ast.unparse(node) == name for _, node in _nodes())


def _called(name: str) -> int:
    """Count the calls of a function or a class of Kagome."""
    calls = (node.func for _, node in _nodes() if isinstance(node, ast.Call))
    return sum(isinstance(func, ast.Name) and func.id == name for func in calls)


def _length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    return 0 if not body else (body[-1].end_lineno or 0) - body[0].lineno + 1


def _public(node: ast.ClassDef) -> list[str]:
    return [each.name for each in node.body if isinstance(each, _FUNCTIONS) and each.name[0] != "_"]


def measured() -> dict[str, float]:
    """Every measure by its name."""
    return {measure.__name__: measure() for measure in MEASURES}


if __name__ == "__main__":
    print(SOURCE)
    for name, value in measured().items():
        print(f"{name:28} {value:,}")
