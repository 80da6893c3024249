"""What the text of an assistant's message is made of, as parsers tell it. Pure data.

Made by the parsers of ``services.gateway.text``, carried by ``services.gateway.choice``, written by the shapes.
"""

from collections.abc import Iterable
from typing import Protocol

from msgspec import Struct


class Content(Struct, frozen=True):
    """Text for the reader; never empty."""

    text: str


class Reasoning(Struct, frozen=True):
    """Text the model wrote for itself; never empty."""

    text: str


class CallStart(Struct, frozen=True):
    """A tool call begins."""

    index: int
    """The call's place among those of the message."""
    call_id: str
    name: str
    """Of the function."""


class Arguments(Struct, frozen=True):
    """More of the JSON text of a call's arguments; never empty."""

    index: int
    text: str


Part = Content | Reasoning | CallStart | Arguments


class Parser(Protocol):
    """The state of one text. However it is cut into pieces, the parts joined are the same."""

    def feed(self, text: str) -> list[Part]:
        """What this text makes certain; may be empty."""

    def flush(self) -> list[Part]:
        """The text is complete: what was held back."""


def joined(parts: Iterable[Part]) -> list[Part]:
    """Neighbours of one kind as one."""
    result: list[Part] = []
    for part in parts:
        last = result[-1] if result else None
        match part, last:
            case (Content(), Content()):
                result[-1] = Content(last.text + part.text)
            case (Reasoning(), Reasoning()):
                result[-1] = Reasoning(last.text + part.text)
            case (Arguments(index, text), Arguments(last_index, last_text)) if index == last_index:
                result[-1] = Arguments(index, last_text + text)
            case _:
                result.append(part)
    return result


def held_from(text: str, marker: str) -> int:
    """Where the tail of ``text`` starts that may become ``marker``, with the whitespace before it."""
    for size in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:size]):
            return len(text[:-size].rstrip())
    return len(text.rstrip())
