"""Style of the report page: its style sheet, its logo, and the colour of each phase and kind.

Where it sits: constants for ``report.page`` and ``report.chrome_trace``; imports nothing.
"""

from __future__ import annotations

_INKS = {
    # Cool colours compute, warm colours move data, grey does neither.
    "forward": "blue", "backward": "teal", "optimizer": "violet",
    "exchange": "orange", "weights": "amber", "sending": "orange",
    "evaluate": "grey", "checkpoint": "dim",
    "partition": "dim", "load": "grey", "check": "violet",
    # Kinds of bytes: a kind has the same colour everywhere.
    "halo": "orange", "stage": "rose", "transpose": "blue", "statistics": "teal", "other": "grey",
    # Shares of the diagnosis.
    "compute": "blue", "waiting": "rose", "memory": "violet",
}  # fmt: skip


def ink(name: str) -> str:
    """Return the colour class of a phase, a kind of bytes or a share; grey for those without one."""
    return f"ink-{_INKS.get(name, 'grey')}"


# The logo: three directions of one weave.
MARK = (
    '<svg class="logo" viewBox="0 0 32 32" aria-hidden="true">'
    '<path class="ink-blue" d="M2 12H30M2 20H30"/>'
    '<path class="ink-orange" d="M6 2.5 22 29.5M10 -2 27 27" transform="translate(0 1)"/>'
    '<path class="ink-teal" d="M26 2.5 10 29.5M22 -2 5 27" transform="translate(0 1)"/></svg>'
)

CSS = """
:root { color-scheme: light dark;
  --page: #f6f6f3; --card: #ffffff; --text: #1d2129; --soft: #5d6570; --line: #dfe1e0; --track: #eef0ef;
  --blue: #3569b5; --teal: #2f9688; --violet: #8a63b5; --orange: #d9652b; --amber: #e0a526; --rose: #bf4a6e;
  --grey: #8d97a2; --dim: #c0c6cc; --warn: #fdf3dd; --warn-line: #e0a526; }
@media (prefers-color-scheme: dark) { :root {
  --page: #14171b; --card: #1c2026; --text: #e8eaec; --soft: #a2abb5; --line: #333940; --track: #262b32;
  --blue: #6ea3ee; --teal: #4dbfae; --violet: #b793e6; --orange: #f0884f; --amber: #f0bf4c; --rose: #e57c9c;
  --grey: #87919c; --dim: #59626c; --warn: #332a16; --warn-line: #b98a26; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text);
  font: 15px/1.5 Inter, "Segoe UI", system-ui, -apple-system, Roboto, "Helvetica Neue", sans-serif;
  font-variant-numeric: tabular-nums; }
main { max-width: 1080px; margin: 0 auto; padding: 36px 24px 56px; }
header { display: flex; gap: 16px; align-items: center; margin-bottom: 24px; }
h1 { font-size: 27px; line-height: 1.2; letter-spacing: -0.015em; margin: 0; overflow-wrap: anywhere; }
header p { margin: 3px 0 0; color: var(--soft); }
h2 { font-size: 17px; letter-spacing: -0.005em; margin: 0 0 4px; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 20px 24px 22px; margin-top: 16px; break-inside: avoid; }
section > p { margin: 0 0 14px; color: var(--soft); max-width: 78ch; overflow-wrap: anywhere; }
.logo { width: 46px; height: 46px; flex: none; } .logo path { fill: none; stroke-width: 2.6; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(158px, 1fr)); gap: 1px; padding: 0;
  overflow: hidden; background: var(--line); }
.tiles div { background: var(--card); padding: 16px 18px; }
.tiles dt { color: var(--soft); font-size: 13px; } .tiles dt::first-letter { text-transform: uppercase; }
.tiles dd { margin: 2px 0 0; font-size: 23px; font-weight: 600; letter-spacing: -0.02em;
  white-space: nowrap; }
.tiles dd.long { font-size: 17px; line-height: 2.03; } section.tiles dl { display: contents; }
.tiles small { display: block; white-space: normal; line-height: 1.4; font-size: 12.5px;
  font-weight: 400; letter-spacing: 0; color: var(--soft); }
.beside { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(400px, 100%), 1fr));
  gap: 0 16px; }
section > :last-child, .bars:last-child { margin-bottom: 0; } .scroll + p { margin-top: 14px; }
.shares .bars { display: block; } .shares .legend { margin: 8px 0 0; }
.verdict p.finding { font-size: 18px; line-height: 1.4; color: var(--text); margin: 4px 0 4px; }
.warn { background: var(--warn); border-color: var(--warn-line); }
.warn ul { margin: 4px 0 0; padding-left: 20px; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(400px, 100%), 1fr));
  gap: 24px 36px; }
figure { margin: 0; min-width: 0; }
figcaption, h3 { font-size: 14px; font-weight: 600; margin: 0 0 2px; }
small { color: var(--soft); font-weight: 400; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 2px 16px; margin: 2px 0 12px; padding: 0;
  font-size: 13px; color: var(--soft); }
.legend i { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: 6px; }
.plot { display: grid; grid-template: 190px 36px / auto 1fr; font-size: 12px; color: var(--soft); }
.plot .y { position: relative; min-width: 52px; }
.plot .y span { position: absolute; right: 8px; transform: translateY(-50%); white-space: nowrap; }
.plot .area { position: relative; } .plot .area svg { width: 100%; height: 100%; display: block;
  overflow: visible; }
.plot .area b { position: absolute; bottom: 3px; font-weight: 400; white-space: nowrap; padding: 0 6px; }
.plot .area b.before { transform: translateX(-100%); }
.plot .x { grid-column: 2; position: relative; margin-top: 4px; }
.plot .x span { position: absolute; transform: translateX(-50%); }
.plot .x em { position: absolute; right: 0; top: 15px; font-style: normal; }
polyline { fill: none; stroke-width: 2; stroke-linejoin: round; vector-effect: non-scaling-stroke; }
.grid, .mark { stroke: var(--line); vector-effect: non-scaling-stroke; }
.mark { stroke: var(--soft); stroke-dasharray: 3 3; }
.bars { display: grid; grid-template-columns: auto minmax(60px, 1fr) auto; gap: 6px 12px;
  align-items: center; }
.bars .name { white-space: nowrap; } .bars .value { text-align: right; color: var(--soft);
  white-space: nowrap; }
.bar { width: 100%; height: 20px; display: block; border-radius: 3px; background: var(--track); }
.many .bars { gap: 2px 12px; font-size: 12px; line-height: 1.2; } .many .bar { height: 10px; }
.gantt { width: 100%; padding-left: 64px; overflow: visible; display: block; }
.gantt text { font-size: 12px; fill: var(--soft); } .lanes { min-width: 960px; }
.gantt text.chunk { font-size: 11px; fill: var(--card); pointer-events: none; }
.gantt text.part { font-weight: 600; } .gantt rect.wait { fill: var(--dim); stroke: none; }
.track { fill: var(--track); }
rect { stroke: var(--card); stroke-width: 0.5; }
.scroll { overflow-x: auto; margin-top: 12px; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th { text-align: right; font-weight: 600; color: var(--soft); font-size: 13px; }
th:first-child, td:first-child { text-align: left; }
td { text-align: right; } th, td { padding: 5px 14px 5px 0; border-bottom: 1px solid var(--line);
  white-space: nowrap; }
th:last-child, td:last-child { padding-right: 0; }
details { margin-top: 12px; } summary { cursor: pointer; color: var(--soft); font-size: 13px; }
.settings { columns: 3 260px; column-gap: 36px; margin-top: 10px; }
.settings div { break-inside: avoid; margin-bottom: 14px; }
.settings dl { display: grid; grid-template-columns: auto 1fr; gap: 1px 14px; margin: 0; font-size: 14px; }
.settings dt { color: var(--soft); } .settings dd { margin: 0; text-align: right; overflow-wrap: anywhere; }
pre { overflow-x: auto; font-size: 13px; } footer { color: var(--soft); font-size: 13px; margin-top: 20px; }
@media (max-width: 560px) { main { padding: 20px 12px 40px; } section { padding: 16px; }
h1 { font-size: 22px; }
  .tiles { padding: 0; grid-template-columns: 1fr 1fr; } .tiles div { padding: 12px 14px; }
  .tiles dd { font-size: 19px; } .tiles dd.long { font-size: 14px; line-height: 2; white-space: normal; }
  .logo { width: 36px; height: 36px; } }
@media print { body { background: none; } section { border-color: #ccc; } }
"""

INKS = ("blue", "teal", "violet", "orange", "amber", "rose", "grey", "dim")

STYLE = CSS + "".join(
    f"rect.ink-{name} {{ fill: var(--{name}); }} i.ink-{name} {{ background: var(--{name}); }} "
    f"polyline.ink-{name}, path.ink-{name} {{ stroke: var(--{name}); }}\n"
    for name in INKS
)
