"""How much JSON a client may give where a field may hold anything. Called by whatever reads such a field; pure."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

from services.gateway.api.errors import invalid

MAX_DEPTH = 64
"""Levels: what works on it by recursion must get to its end."""
MAX_INNER = 50_000
"""Objects and lists in all."""
MAX_VALUES = 500_000
"""Values in all: while they are gone through streams get their tokens late."""

MAX_BRACKETS = 500_000
"""Opening ones in a whole body, those in its texts included. To make objects and lists of them takes 0.2 s, in which no
stream gets a token, whichever thread does it."""


def check_body(body: bytes) -> None:
    """Raise ApiError (400) for a body in which there may be far too much, before it is read."""
    if body.count(b"{") + body.count(b"[") > MAX_BRACKETS:
        raise invalid(f"the request body has more than {MAX_BRACKETS} opening brackets")


class Bounds:
    """What one field may still hold."""

    def __init__(self, param: str) -> None:
        self._param = param
        self._inner_left = MAX_INNER
        self._values_left = MAX_VALUES

    def take(self, value: Any) -> None:
        """Raise ApiError (400) for JSON that is nested too deeply, or is too much with what was taken before."""
        level = [value]
        for _ in range(MAX_DEPTH):
            self._values_left -= sum(len(outer) for outer in level if isinstance(outer, dict | list))
            if self._values_left < 0:
                raise invalid(f"{self._param} has more than {MAX_VALUES} values", self._param)
            inner = (inner for outer in level for inner in _inside(outer))
            level = list(islice(inner, self._inner_left + 1))
            if not level:
                return
            self._inner_left -= len(level)
            if self._inner_left < 0:
                raise invalid(f"{self._param} has more than {MAX_INNER} objects and lists", self._param)
        raise invalid(f"{self._param} is nested more than {MAX_DEPTH} levels deep", self._param)


def check_bounds(value: Any, param: str) -> None:
    """The same for a field that is all there at once."""
    Bounds(param).take(value)


def _inside(value: Any) -> Iterator[Any]:
    """The objects and lists that are right inside."""
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return (inner for inner in values if isinstance(inner, dict | list))
