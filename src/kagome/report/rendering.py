"""Rendering: pages and charts from the jinja2 templates in ``templates/``, where every value is escaped.

Where it sits: ``report.charts`` draws with it from plain numbers, and ``report.page`` writes whole pages.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from kagome.records.units import seconds_text


def page(template: str, **values: Any) -> str:
    """Return a page as HTML, which opens offline without scripts.

    Args:
        template: The file name of the page's template.
        values: The values that the template shows. Text is escaped, :class:`Markup` is not.
    """
    return environment().get_template(template).render(values)


def chart(macro: str, **values: Any) -> Markup:
    """Return a chart as HTML; ``macro`` is its name in ``charts.html``."""
    html: Markup = getattr(environment().get_template("charts.html").module, macro)(**values)
    return html


@cache
def environment() -> Environment:
    """Return jinja2's environment with this package's templates, compiled at their first use."""
    loader = FileSystemLoader(Path(__file__).with_name("templates"))
    # StrictUndefined: a value that a template expects and nobody passes is an error, not an empty place.
    found = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    found.filters.update(at="{:.2f}".format, seconds=seconds_text)
    return found
