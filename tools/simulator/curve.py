"""What a sweep trades: time to first token over time per token, a point for each run. Called by ``report``.

One self-contained HTML file, as the picture of lanes is.
"""

from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby
from math import floor, log10

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
    title = f"What the runs trade: TTFT over TPOT, {percent}"
    parts = [
        "<!doctype html>",
        f'<html lang="en"><meta charset="utf-8"><title>{title}</title><style>{STYLE}</style><h1>{title}</h1>',
        f'<svg width="{_SIZE + 2 * _MARGIN}" height="{_SIZE + _MARGIN}" role="img" aria-label="{title}">',
        f'<path d="M{_MARGIN} 10V{_SIZE}H{_SIZE + _MARGIN}" fill="none" stroke="currentColor"/>',
        f'<text x="{_SIZE + _MARGIN}" y="{_SIZE + 32}" text-anchor="end">TPOT, ms</text>',
        f'<text x="{_MARGIN + 6}" y="16">TTFT, ms</text>',
    ]
    for value in _ticks(most_tpot):
        x, _ = _place(value / most_tpot, 0)
        parts.append(f'<text x="{x:.0f}" y="{_SIZE + 15}" text-anchor="middle">{value:g}</text>')
    for value in _ticks(most_ttft):
        _, y = _place(0, value / most_ttft)
        parts.append(f'<text x="{_MARGIN - 5}" y="{y:.0f}" text-anchor="end">{value:g}</text>')
    for number, (executors, group) in enumerate(groupby(known, key=lambda point: point[0].executors)):
        scaled = [(row, *_place(tpot / most_tpot, ttft / most_ttft)) for row, tpot, ttft in group]
        parts += _line(scaled, f"{executors} executor{'s' * (executors > 1)}", colour(number))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _ticks(most: float) -> list[float]:
    """Round numbers up to ``most``, five at most."""
    scale = 10.0 ** floor(log10(most))
    step = next(size * scale for size in (0.2, 0.5, 1.0, 2.0) if most / (size * scale) <= 5.5)
    return [step * number for number in range(1, int(most / step) + 1)]


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
    _, x, y = points[-1]
    yield f'<text x="{x + 6:.1f}" y="{y + 12:.1f}" style="fill:{stroke};font-weight:600">{name}</text>'
