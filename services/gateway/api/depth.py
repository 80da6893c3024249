"""How deeply JSON of a client may be nested. Called by whatever reads a field that may hold anything; pure."""

from collections.abc import Iterable
from typing import Any

from services.gateway.api.errors import invalid

MAX_DEPTH = 64
"""Of the JSON inside messages, tools, schemas and the variables of templates."""


def check_depth(value: Any, param: str) -> None:
    """Raise ApiError (400) for JSON nested so deeply that what works on it by recursion might not get to its end."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for outer in level for inner in _inside(outer)]
        if not level:
            return
    raise invalid(f"{param} is nested more than {MAX_DEPTH} levels deep", param)


def _inside(value: Any) -> Iterable[Any]:
    """The objects and lists that are right inside."""
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [inner for inner in values if isinstance(inner, dict | list)]
