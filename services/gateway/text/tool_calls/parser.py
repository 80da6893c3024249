"""What the parsers of all formats share: a cursor over text that is still coming, and the JSON object of one call.

A parser is a generator that reads on and yields where it needs more text. It tells of a call only once it is certain
to be one: its arguments begin, and its name is one of the request's tools. Until then the text is held back, and if
it turns out to be no call it leaves as content; nothing a model writes is an error. Arguments leave as they come and
are the model's own text, which may be no valid JSON. Whitespace around calls is dropped. Pure.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator
from typing import ClassVar, TypeVar

import msgspec

from services.gateway.text.parts import Arguments, CallStart, Content, Part, held_from, joined
from services.gateway.text.tool_calls.json_extent import JsonExtent

ARGUMENTS_KEYS = ("arguments", "parameters")
MAX_HELD_CHARS = 64 * 1024
"""Of one value that comes before it is certain that there is a call (some models write arguments before the name)."""
_SPACE = re.compile(r"\s*")
_SCALAR = re.compile(r"[-+.\w]*")

Result = TypeVar("Result")
Reading = Generator[None, None, Result]
"""Yields where it needs more text; once the text is complete it no longer does."""


class ToolParser(ABC):
    """See ``Parser``; subclasses know what stands around the calls."""

    markers: ClassVar[tuple[str, ...]]
    """What tells of a call. Where the vocabulary has these as special tokens they must stay in the text."""

    def __init__(self, names: Collection[str], new_id: Callable[[], str], *, parallel: bool = True) -> None:
        """``names`` of the functions that may be called; without ``parallel`` calls after the first are dropped."""
        self._names = names
        self._new_id = new_id
        self._parallel = parallel
        self._num_calls = 0
        self._text = ""
        """What has not left yet."""
        self._at = 0
        """The cursor: text before it is read, but held back until it is clear what it is."""
        self._ended = False
        self._parts: list[Part] = []
        self._reading = self._read()

    def feed(self, text: str) -> list[Part]:
        """See ``Parser``."""
        self._text += text
        return self._go_on()

    def flush(self) -> list[Part]:
        """See ``Parser``."""
        self._ended = True
        return self._go_on()

    @abstractmethod
    def _read(self) -> Reading[None]:
        """The whole text."""

    def _go_on(self) -> list[Part]:
        next(self._reading, None)
        parts, self._parts = self._parts, []
        return joined(parts)

    # What leaves.

    def _content(self, end: int) -> None:
        """The text up to ``end`` is content."""
        if end:
            self._parts.append(Content(self._text[:end]))
            self._text = self._text[end:]
        self._at = 0

    def _drop(self) -> None:
        """What was read up to the cursor needs not be told."""
        self._text = self._text[self._at :]
        self._at = 0

    def _reject(self) -> None:
        """What was read since the last call is none. It is never read again: that would take long for some texts."""
        if self._text[: self._at].strip():
            self._content(self._at)
        self._at = 0

    def _start(self, name: str) -> None:
        """A call begins, with the arguments at the cursor."""
        self._drop()
        self._num_calls += 1
        if self._told:
            self._parts.append(CallStart(self._num_calls - 1, self._new_id(), name))

    def _arguments(self, text: str) -> None:
        if self._told and text:
            self._parts.append(Arguments(self._num_calls - 1, text))

    @property
    def _told(self) -> bool:
        return self._parallel or self._num_calls == 1

    # Reading.

    def _content_until(self, marker: str) -> Reading[bool]:
        """Let content out up to the marker and stand behind it; false if none comes."""
        while (found := self._text.find(marker)) < 0:
            self._content(len(self._text) if self._ended else held_from(self._text, marker))
            if self._ended:
                return False
            yield
        self._content(len(self._text[:found].rstrip()))
        self._at = self._text.find(marker) + len(marker)
        return True

    def _peek(self) -> Reading[str]:
        """The next character but whitespace, which is passed over; none at the end."""
        while True:
            space = _SPACE.match(self._text, self._at)
            assert space is not None
            self._at = space.end()
            if self._at < len(self._text) or self._ended:
                return self._text[self._at : self._at + 1]
            yield

    def _literal(self, text: str) -> Reading[bool]:
        """Whether ``text`` comes next, behind whitespace; then it is passed over."""
        yield from self._peek()
        while not self._text.startswith(text, self._at):
            if self._ended or not text.startswith(self._text[self._at :]):
                return False
            yield
        self._at += len(text)
        return True

    def _closing(self, text: str) -> Reading[None]:
        """Pass over ``text``, or as much of it as there is at the end."""
        if not (yield from self._literal(text)) and self._ended and text.startswith(self._text[self._at :]):
            self._at = len(self._text)

    def _run_of(self, characters: re.Pattern[str]) -> Reading[str]:
        """All that matches from the cursor on."""
        while True:
            found = characters.match(self._text, self._at)
            assert found is not None
            if found.end() < len(self._text) or self._ended:
                self._at = found.end()
                return found[0]
            yield

    def _value(self) -> Reading[str]:
        """The text of the next JSON value; empty if it is none, incomplete or too long to be held back."""
        if (yield from self._peek()) not in ('"', "{", "["):
            return (yield from self._run_of(_SCALAR))
        extent, start, seen = JsonExtent(), self._at, self._at
        while (end := extent.end_in(self._text[seen:])) < 0 and len(self._text) - start <= MAX_HELD_CHARS:
            seen = len(self._text)
            while seen == len(self._text):
                if self._ended:
                    self._at = seen
                    return ""
                yield
        if end < 0 or seen + end - start > MAX_HELD_CHARS:
            self._at = start + MAX_HELD_CHARS
            return ""
        self._at = seen + end
        return self._text[start : self._at]

    def _stream_value(self) -> Reading[None]:
        """The object at the cursor, where held text begins, is the call's arguments: it leaves as it comes."""
        extent = JsonExtent()
        while True:
            end = extent.end_in(self._text) if self._text else -1
            self._at = end if end >= 0 else len(self._text)
            self._arguments(self._text[: self._at])
            self._drop()
            if end >= 0 or self._ended:
                return
            yield

    def _call(self) -> Reading[bool]:
        """One ``{"name": ..., "arguments": {...}}``, its keys in any order; false if it is no call.

        What is broken behind the arguments is content: the call has been told.
        """
        if not (yield from self._literal("{")):
            return False
        name, arguments, num_before = "", "{}", self._num_calls
        while True:
            key = _decoded((yield from self._value()))
            if not (yield from self._literal(":")):
                break
            is_new = self._num_calls == num_before
            if key in ARGUMENTS_KEYS and name and is_new and (yield from self._peek()) == "{":
                self._start(name)
                yield from self._stream_value()
            elif not (value := (yield from self._value())):
                break
            elif key == "name" and is_new:
                name = str(_decoded(value))
                if name not in self._names:
                    break
            elif key in ARGUMENTS_KEYS:
                arguments = _as_object(value)
            if (yield from self._literal(",")):
                continue
            if (yield from self._literal("}")):
                self._close(name, arguments, told=self._num_calls > num_before)
                return self._num_calls > num_before
            break
        self._reject()
        return self._num_calls > num_before

    def _close(self, name: str, arguments: str, *, told: bool) -> None:
        """The call's object ends at the cursor."""
        if told:
            self._drop()
        elif name and arguments:
            self._start(name)
            self._arguments(arguments)


def _decoded(value: str) -> object:
    """A JSON value; None where it is not valid, half a surrogate pair included: no answer could carry it."""
    try:
        return msgspec.json.decode(value)
    except (msgspec.DecodeError, RecursionError):
        return None


def _as_object(value: str) -> str:
    """The text of a call's arguments that were given before the name, or as text, or not at all; empty if not fit."""
    if value == "null":
        return "{}"
    if value.startswith('"'):
        text = _decoded(value)
        return text if isinstance(text, str) and isinstance(_decoded(text), dict) else ""
    return value if value.startswith("{") else ""
