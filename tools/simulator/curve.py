"""What a sweep trades: time to first token over time per token, a point for each run. Called by ``report``.

One self-contained HTML file, as the picture of lanes is.
"""

from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby

from tools.occupancy.page import STYLE, colour
from tools.simulator.figures import Row

_SIZE = 460
_MARGIN = 60


def page(rows: Sequence[Row], percent: str = "p50") -> str:
    """The file: runs with as many executors are joined by a line, in the order of the sweep."""
    points = [(row, row.tpot_ms[percent], row.ttft_ms[percent]) for row in rows]
    known = [(row, tpot, ttft) for row, tpot, ttft in points if tpot is not None and ttft is not None]
    most_tpot = max((tpot for _, tpot, _ in known), default=0.0) or 1.0
    most_ttft = max((ttft for _, _, ttft in known), default=0.0) or 1.0
    title = f"TTFT over TPOT, {percent}, milliseconds"
    parts = [
        "<!doctype html>",
        f'<html lang="en"><meta charset="utf-8"><title>{title}</title><style>{STYLE}</style><h1>{title}</h1>',
        f'<svg width="{_SIZE + 2 * _MARGIN}" height="{_SIZE + _MARGIN}" role="img" aria-label="{title}">',
        f'<path d="M{_MARGIN} 10V{_SIZE}H{_SIZE + _MARGIN}" fill="none" stroke="currentColor"/>',
    ]
    for share in (0.25, 0.5, 0.75, 1.0):
        x, y = _place(share, share)
        parts.append(f'<text x="{x:.0f}" y="{_SIZE + 15}" text-anchor="middle">{share * most_tpot:.4g}</text>')
        parts.append(f'<text x="{_MARGIN - 5}" y="{y:.0f}" text-anchor="end">{share * most_ttft:.4g}</text>')
    for number, (executors, group) in enumerate(groupby(known, key=lambda point: point[0].executors)):
        scaled = [(row, *_place(tpot / most_tpot, ttft / most_ttft)) for row, tpot, ttft in group]
        parts += _line(scaled, f"{executors} executor{'s' * (executors > 1)}", colour(number))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _place(right: float, up: float) -> tuple[float, float]:
    """Pixels of a point, given as shares of the axes."""
    return _MARGIN + right * (_SIZE - 20), _SIZE - up * (_SIZE - 20)


def _line(points: Sequence[tuple[Row, float, float]], name: str, stroke: str) -> Iterator[str]:
    path = " ".join(f"{x:.1f},{y:.1f}" for _, x, y in points)
    yield f'<polyline points="{path}" fill="none" stroke="{stroke}" stroke-width="2"><title>{name}</title></polyline>'
    for row, x, y in points:
        label = ", ".join([name, *(f"{key.replace('_', ' ')} {value}" for key, value in row.settings.items())])
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{stroke}"><title>{escape(label)}</title></circle>'
        short = " ".join(map(str, row.settings.values())) or str(row.executors)
        yield f'<text x="{x + 6:.1f}" y="{y - 4:.1f}">{escape(short)}</text>'
