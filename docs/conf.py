"""The site: README, the pages of ``docs/`` and ``benchmarks/``, and an API from docstrings.

Where it sits: ``make docs`` gives it to Sphinx; pages are read as they stand on a Git host. Inline code such
as ``halo/exchange.py: HaloExchange.add`` or ``kagome.load`` becomes a link to the docstring. What pages name
so decides what the API shows beside the public names, and a name that is gone ends the build.
"""

from __future__ import annotations

import builtins
import inspect
import re
from collections import defaultdict
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.addnodes import download_reference, pending_xref
from sphinx.application import Sphinx
from sphinx.ext.autodoc.mock import mock
from sphinx.util import logging
from sphinx.util.nodes import make_refnode

import kagome

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"
CODE = ROOT / "docs" / "code"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]

project = "Kagome"
release = kagome.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "README"
include_patterns = ["README.md", "CONTRIBUTING.md", "docs/**", "benchmarks/*/*.md"]
include_patterns += ["benchmarks/*/results/*/*.md"]  # the GPU's runs
exclude_patterns = [".*", "build", "examples", "runs", "src", "tests", "**/runs"]
html_theme = "furo"
html_title = "Kagome"
html_copy_source = False
html_show_copyright = False
smartquotes_action = "D"  # dashes alone: quotes stay as they are on a Git host
# Most lines of code fit the page then: tables of plans have 101 columns.
html_theme_options = {"light_css_variables": {"code-font-size": "0.72rem"}}
highlight_language = "none"
maximum_signature_line_length = 88
myst_heading_anchors = 3
napoleon_numpy_docstring = False
napoleon_custom_sections = ["Shapes", "Cost", "Source"]
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False
WITHOUT = [] if find_spec("triton") else ["triton"]
"""Packages that some machines lack: modules that import them are read with stand-ins."""
autodoc_mock_imports = WITHOUT

CONTENTS = """
```{toctree}
:hidden:
:caption: Tutorial

docs/training
docs/own-loop
docs/sets
docs/links
docs/tables
docs/frameworks
docs/refused
```

```{toctree}
:hidden:
:caption: How-to

docs/how-to-large-graph
docs/how-to-deep-gnn
docs/how-to-slow-network
```

```{toctree}
:hidden:
:caption: Strategies

docs/strategies
```

```{toctree}
:hidden:
:caption: Reference

docs/cli
docs/api
docs/glossary
docs/messages
docs/convolutions
docs/places
```

```{toctree}
:hidden:
:caption: Explanation

docs/architecture
docs/design-notes
docs/exchange
docs/slices
docs/pipelines
docs/dag-pipelines
docs/planner
docs/benchmarks
docs/gpu
CONTRIBUTING
```
"""
FOLDERS = """
```{toctree}
:hidden:
:glob:

../benchmarks/*/README
```
"""

_FILE = re.compile(r"((?:[a-z_0-9]+/)*[a-z_0-9]+)\.py(?:: ([\w.]+))?")
_DOTTED = re.compile(r"(kagome(?:\.\w+)+)(?:\(.*\))?")
_IMPORT = re.compile(r"^from (kagome[\w.]*) import (.+)$", re.MULTILINE)
_logger = logging.getLogger(__name__)


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect the functions below to the build."""
    app.connect("builder-inited", write_code_pages)
    app.connect("source-read", add_frame)
    app.connect("autodoc-process-docstring", keep_colons, priority=400)  # before napoleon's
    app.connect("doctree-read", leave_builtins)
    app.connect("doctree-resolved", link_names)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def add_frame(app: Sphinx, page: str, source: list[str]) -> None:
    """Add what the site alone needs to a page: tables of contents, and titles for results."""
    if page == root_doc:
        source[0] += CONTENTS
    elif page == "docs/benchmarks":
        source[0] += FOLDERS
    elif page.startswith("benchmarks/") and not page.endswith("/README"):
        source[0] = f"---\norphan: true\n---\n\n# {page}\n\n{source[0]}"


def keep_colons(app: Sphinx, what: str, name: str, value: object, options: object, lines: list[str]) -> None:
    """Put an empty comment before a field's docstring: napoleon takes a line with a colon for a type."""
    if what in ("attribute", "data", "property"):
        lines[:0] = ["..", ""]


def leave_builtins(app: Sphinx, doctree: nodes.document) -> None:
    """Take the links of Python's own types away: Sphinx would make ``bytes`` one to a field of that name."""
    for node in list(doctree.findall(pending_xref)):
        if node["reftarget"] in vars(builtins):
            node.replace_self(node.children)


def write_code_pages(app: Sphinx) -> None:
    """Write a page for each package, with the modules, classes and functions that pages name."""
    found: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for name in names_in_pages():
        module, within = split(name)
        if module == "kagome" or not exists(name) or documented(name) != name:
            continue  # public names have a page of their own; link_names reports missing ones
        words = module.split(".")
        for count in range(2, len(words) + 1):
            shown = found[".".join(words[:count])]
        for first in within[:1]:
            shown[first].update(each for each in within[1:2] if each.startswith("_"))
    pages: dict[str, list[str]] = defaultdict(list)
    for module in sorted(found):
        path = module.replace(".", "/").removeprefix("kagome/")
        heading = path if (SOURCE / "kagome" / path).is_dir() else f"{path}.py"
        underline = ("-" if "/" in path else "=") * len(heading)
        lines = [heading, underline, "", f".. automodule:: {module}", ""]
        for name, private in sorted(found[module].items()):
            lines += [*directive(module, name, private), ""]
        pages[path.partition("/")[0]] += lines
    CODE.mkdir(exist_ok=True)
    for old in {path.stem for path in CODE.glob("*.rst")} - set(pages):
        (CODE / f"{old}.rst").unlink()
    for package, lines in pages.items():
        page, text = CODE / f"{package}.rst", "\n".join(lines)
        if not page.exists() or page.read_text() != text:  # else Sphinx would read it again
            page.write_text(text)


def directive(module: str, name: str, private: set[str]) -> list[str]:
    """The lines that show one name of a module, and those private members of a class that pages name."""
    value = getattr(import_module(module), name)
    if inspect.isclass(value):
        chosen = [f"   :private-members: {', '.join(sorted(private))}"] if private else []
        return [f".. autoclass:: {module}.{name}", "   :members:", *chosen]
    if inspect.isroutine(value):
        return [f".. autofunction:: {module}.{name}"]
    return [f".. autodata:: {module}.{name}", "   :no-value:"]


def link_names(app: Sphinx, doctree: nodes.document, page: str) -> None:
    """Make inline code that names a file or a public name a link to its docstring, or the class around it."""
    objects = app.env.domains["py"].objects  # type: ignore[attr-defined]
    for node in [*doctree.findall(nodes.literal), *doctree.findall(download_reference)]:
        text, name = node.astext(), name_of(node.astext())
        if isinstance(node.parent, nodes.reference | nodes.title | download_reference):
            continue
        if not name:
            near = (ROOT, ROOT / "benchmarks", (ROOT / page).parent)
            if _FILE.fullmatch(text) and not any((each / text.partition(":")[0]).exists() for each in near):
                _logger.warning("no such file: %s", text, location=node)
        elif not exists(name):
            _logger.warning("no such name: %s", text, location=node)
        else:
            name = documented(name)
            while name and name not in objects:
                name = name.rpartition(".")[0]
            if entry := objects.get(name):
                place = page, entry.docname, entry.node_id
                node.replace_self(make_refnode(app.builder, *place, nodes.literal(text, text), name))


def names_in_pages() -> Iterator[str]:
    """Yield the dotted names that pages have in inline code, and import in scripts."""
    for page in PAGES:
        text = page.read_text()
        yield from filter(None, map(name_of, re.findall(r"`([^`\n]+)`", text)))
        for module, names in _IMPORT.findall(text):
            yield from (f"{module}.{name}" for name in names.split(", "))


def name_of(text: str) -> str:
    """Return the dotted name that inline code stands for; empty if it stands for none of Kagome's."""
    if found := _DOTTED.fullmatch(text):
        return found[1]
    if (found := _FILE.fullmatch(text)) and (SOURCE / "kagome" / f"{found[1]}.py").exists():
        return ".".join(["kagome", *found[1].split("/"), *filter(None, [found[2]])])
    return ""


def split(name: str) -> tuple[str, list[str]]:
    """Return the module of a dotted name, and the names within the module."""
    words = name.split(".")
    count = len(words)
    while not (
        (path := SOURCE.joinpath(*words[:count])).with_suffix(".py").is_file()
        or (path / "__init__.py").is_file()
    ):
        count -= 1
    return ".".join(words[:count]), words[count:]


def exists(name: str) -> bool:
    """Whether there is such a name; attributes of instances are looked for in the source of their class."""
    module, within = split(name)
    with mock(WITHOUT):
        value: Any = import_module(module)
    for word in within:
        if not hasattr(value, word):
            return inspect.isclass(value) and re.search(rf"\b{word}\b", inspect.getsource(value)) is not None
        value = getattr(value, word)
    return True


def documented(name: str) -> str:
    """Return the name under which the API has a dotted name: that of the public face, if it is there."""
    module, within = split(name)
    if within and module != "kagome":
        value = getattr(import_module(module), within[0])
        for public in kagome.__all__:
            if getattr(kagome, public) is value:
                return ".".join(["kagome", public, *within[1:]])
    return name
