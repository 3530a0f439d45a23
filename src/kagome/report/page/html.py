"""HTML frame of a page that opens offline without scripts, with its sections and tables.

Where it sits: ``page`` and ``plan_page`` fill it; colours and type come from ``report.charts.style``.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from kagome.report.charts.style import MARK, STYLE


def document(title: str, facts: str, parts: Sequence[str], footer: str) -> str:
    """Return a whole page as HTML.

    Args:
        title: The title of the page.
        facts: The line below the title.
        parts: The sections as HTML; empty ones are left out.
        footer: The last line.

    Returns:
        HTML.
    """
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)} | Kagome</title>\n<style>{STYLE}</style></head>\n<body><main>\n"
        f"<header>{MARK}<div><h1>{escape(title)}</h1><p>{escape(facts)}</p></div></header>\n"
        + "\n".join(part for part in parts if part)
        + f"\n<footer>{escape(footer)}</footer>\n"
        + "</main></body></html>\n"
    )


def section(title: str, body: str, lead: str = "", css: str = "") -> str:
    """Return a card with a title and a sentence under it."""
    kind = f' class="{css}"' if css else ""
    return f"<section{kind}><h2>{escape(title)}</h2>{lead and f'<p>{escape(lead)}</p>'}{body}</section>"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table that scrolls sideways in a narrow window, or ``""`` without rows."""
    if not rows:
        return ""
    top = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    lines = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{lines}</tbody></table></div>'
