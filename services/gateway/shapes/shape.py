"""The one thing in which the generating endpoints differ: how an answer is written, as events or whole.

``services.gateway.api.answer`` has the text made and sent and calls a ``Shape`` for the bytes. Shapes are pure.
"""

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from services.gateway.api.errors import ApiError
from services.gateway.api.settings import Settings
from services.gateway.choice import Update
from services.gateway.logprobs import Spell
from services.gateway.usage import Usage

KEEP_ALIVE = b": keep-alive\n\n"


class Outline(Struct, frozen=True):
    """What is known of an answer before its first token."""

    answer_id: str
    created: int
    """Seconds since 1970."""
    model: str
    settings: Settings
    prompts: Sequence[list[int]]
    """``prompts[i // n]`` is choice i's."""
    usage: Usage
    """Follows the choices' counts."""
    spell: Spell


class Shape(Protocol):
    """One answer. A stream is ``opening``, any number of ``events``, and ``ending`` or ``failure``."""

    keep_alive: bytes
    """A sign of life."""

    def opening(self) -> bytes:
        """Events that leave with the headers; may be none."""

    def events(self, updates: list[Update]) -> bytes:
        """All events for what came in one turn; may be none."""

    def ending(self) -> bytes:
        """The last events of a stream whose choices all finished."""

    def failure(self, error: ApiError) -> bytes:
        """The last events of a stream that failed."""

    def whole(self, updates: list[Update]) -> bytes:
        """The JSON body of an answer in one piece; one update for each choice."""
