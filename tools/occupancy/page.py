"""The picture as one self-contained HTML file: SVG only, no script, nothing fetched from anywhere."""

from collections.abc import Iterable, Iterator
from html import escape
from typing import NamedTuple

from tools.occupancy.record import Cell, Kind, Rows

_CELL = 9
"""Pixels a lane is high; a step is as wide where few are drawn."""
_GAP = 1
_WIDTH = 1100
STYLE = """
:root { color-scheme: light dark; --ink: #1c2024; --paper: #fff; --dead: #d33; --idle: #8882; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8ea; --paper: #16181b; --dead: #f55; --idle: #fff1; } }
body { font: 14px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2rem; }
h2 { margin: 1.6rem 0 .2rem; font-size: 1.05rem; } h1 { font-size: 1.3rem; }
p { margin: .2rem 0 .6rem; } svg { display: block; margin: .3rem 0; max-width: 100%; }
table { border-collapse: collapse; margin: .8rem 0; } td, th { padding: .15rem .8rem .15rem 0; text-align: right; }
td:first-child, th:first-child { text-align: left; } th { border-bottom: 1px solid; font-weight: 600; }
.idle { fill: var(--idle); } .dead { fill: url(#hatch); } .stalled { fill-opacity: .25; }
.key { display: inline; margin: 0; vertical-align: -1px; }
.prefill { stroke: var(--ink); stroke-width: 1.2; } text { fill: var(--ink); font-size: 10px; }
"""
_HATCH = (
    '<svg width="0" height="0" style="position:absolute"><pattern id="hatch" width="4" height="4" '
    'patternUnits="userSpaceOnUse" patternTransform="rotate(45)"><path d="M1 0V4" stroke="var(--dead)" '
    'stroke-width="1.5"/></pattern></svg>'
)
"""Of dead lanes: no request looks like it, whatever its colour."""


class Panel(NamedTuple):
    """One picture with its heading."""

    title: str
    note: str
    """A line of figures."""
    rows: list[Rows]


def page(title: str, panels: Iterable[Panel], table: tuple[list[str], list[list[str]]] | None = None) -> str:
    """The whole file. ``table`` is a heading row and rows, drawn under the title."""
    parts = [
        "<!doctype html>",
        f'<html lang="en"><meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>',
        f"{_HATCH}<h1>{escape(title)}</h1>",
    ]
    panels = list(panels)
    most_steps = max((len(rows.steps) for panel in panels for rows in panel.rows), default=0)
    width = max(2.0, min(float(_CELL * 3), _WIDTH / max(1, most_steps)))  # the same in all, so that they compare
    if table is not None:
        parts += _table(*table)
    parts.append(f"<p>Each row is a lane, each column a step. {_legend()}</p>")
    for panel in panels:
        parts.append(f"<section><h2>{escape(panel.title)}</h2><p>{escape(panel.note)}</p>")
        for rows in panel.rows:
            parts += _svg(rows, panel.title, width)
        parts.append("</section>")
    return "\n".join(parts) + "\n"


def colour(request: int) -> str:
    """A request's colour: hues a golden angle apart, so that neighbours differ, in two lightnesses."""
    hue = round(request * 137.508) % 360
    return f"hsl({hue} 62% {46 if request % 2 else 58}%)"


def _table(head: list[str], rows: list[list[str]]) -> Iterator[str]:
    yield "<table><tr>" + "".join(f"<th>{escape(name)}</th>" for name in head) + "</tr>"
    for row in rows:
        yield "<tr>" + "".join(f"<td>{escape(value)}</td>" for value in row) + "</tr>"
    yield "</table>"


def _legend() -> str:
    kinds = (
        ("prefill", f'fill="{colour(1)}"', "prefill (framed)"),
        ("decode", f'fill="{colour(1)}"', "decode"),
        ("stalled", f'fill="{colour(1)}"', "held, not computed"),
        ("dead", "", "dead: empty while others wait"),
        ("idle", "", "idle"),
    )
    return " &nbsp; ".join(
        f'<svg width="10" height="10" class="key"><rect class="{name}" width="10" height="10" {fill}/></svg> {text}'
        for name, fill, text in kinds
    )


def _svg(rows: Rows, title: str, width: float) -> Iterator[str]:
    num_steps = max(1, len(rows.steps))
    total = round(width * num_steps)
    height = rows.num_used * (_CELL + _GAP)
    yield (
        f'<svg width="{total + 2}" height="{height + 16}" role="img" '
        f'aria-label="{escape(title)}: {rows.num_lanes} lanes of {escape(rows.executor)}">'
    )
    for lane in range(rows.num_used):
        for start, end, cell in _runs([step[lane] for step in rows.steps]):
            yield _rect(start * width + 1, lane * (_CELL + _GAP) + 1, (end - start) * width - 0.5, cell, start, end)
    every = next(size for size in (1, 2, 5, 10, 20, 50, 100, 200, 500, 10**9) if size * width >= 28)
    for step in range(0, num_steps, every):
        yield f'<text x="{step * width + 1:.1f}" y="{height + 12}">{step + 1}</text>'
    yield "</svg>"
    if rows.unused:
        yield f"<p>{rows.unused}</p>"
    if rows.dropped:
        yield f"<p>and {rows.dropped} steps more</p>"


def _runs(cells: list[Cell]) -> Iterator[tuple[int, int, Cell]]:
    """Equal neighbours as one: from, to (not included), what."""
    start = 0
    for i in range(1, len(cells) + 1):
        if i == len(cells) or cells[i] != cells[start]:
            yield start, i, cells[start]
            start = i


def _rect(x: float, y: float, width: float, cell: Cell, start: int, end: int) -> str:
    kind = Kind(cell.kind).name.lower()
    fill = f' fill="{colour(cell.request)}"' if cell.kind >= Kind.STALLED else ""
    steps = f"step {start + 1}" if end == start + 1 else f"steps {start + 1} to {end}"
    tip = f"request {cell.request}, {kind}, {steps}" if cell.request >= 0 else f"{kind}, {steps}"
    return (
        f'<rect class="{kind}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_CELL}"{fill}>'
        f"<title>{tip}</title></rect>"
    )
