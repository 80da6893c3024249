"""How much JSON a client may give where a field may hold anything. Called by whatever reads such a field; pure."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

from services.gateway.api.errors import invalid

MAX_DEPTH = 64
"""Levels: what works on it by recursion must get to its end."""
MAX_INNER = 50_000
"""Objects and lists in all: while they are gone through no stream gets a token."""


def check_bounds(value: Any, param: str) -> None:
    """Raise ApiError (400) for JSON that is nested too deeply or has too many objects and lists."""
    level, room = [value], MAX_INNER
    for _ in range(MAX_DEPTH):
        level = list(islice((inner for outer in level for inner in _inside(outer)), room + 1))
        if not level:
            return
        room -= len(level)
        if room < 0:
            raise invalid(f"{param} has more than {MAX_INNER} objects and lists", param)
    raise invalid(f"{param} is nested more than {MAX_DEPTH} levels deep", param)


def _inside(value: Any) -> Iterator[Any]:
    """The objects and lists that are right inside."""
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return (inner for inner in values if isinstance(inner, dict | list))
