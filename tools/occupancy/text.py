"""The picture as text: one line a lane, one character a step."""

from collections.abc import Iterator

from tools.occupancy.record import Cell, Kind, Rows

LEGEND = "capital: prefill; small: decode; -: held and not computed; x: dead (empty while others wait); .: idle"
_LETTERS = "abcdefghijklmnopqrstuvwyz"
"""Without x, which stands for dead lane-steps."""


def letter(request: int) -> str:
    """A request's letter; letters come again every 25 requests."""
    return _LETTERS[request % len(_LETTERS)] if request >= 0 else "?"


def draw(rows: Rows, most_steps: int = 120) -> Iterator[str]:
    """Lines of one executor's picture."""
    steps = rows.steps[:most_steps]
    width = len(str(rows.num_used - 1))
    for lane in range(rows.num_used):
        yield f"lane {lane:>{width}} |{''.join(_character(step[lane]) for step in steps)}|"
    if rows.unused:
        yield rows.unused
    left_out = len(rows.steps) - len(steps) + rows.dropped
    if left_out:
        yield f"and {left_out} steps more"


def _character(cell: Cell) -> str:
    match cell.kind:
        case Kind.IDLE:
            return "."
        case Kind.DEAD:
            return "x"
        case Kind.STALLED:
            return "-"
        case Kind.PREFILL:
            return letter(cell.request).upper()
        case Kind.DECODE:
            return letter(cell.request)
