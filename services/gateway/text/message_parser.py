"""The text of an assistant's message to its parts: thoughts first, then content and tool calls. Pure.

The endpoints say how answers are to be read (``MessageFormat``); each choice has a parser of its own.
"""

from collections.abc import Collection
from dataclasses import dataclass

from services.gateway.text.parts import CallStart, Content, Parser, Part
from services.gateway.text.reasoning import MARKERS, ThinkParser
from services.gateway.text.tool_calls.formats import ToolFormat


class MessageParser:
    """See ``Parser``. What a model thinks is never a call."""

    def __init__(self, reasoning: ThinkParser | None, tools: Parser | None, *, is_named: bool = False) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._is_named = is_named
        self._has_calls = False

    @property
    def is_thinking(self) -> bool:
        """Whether the text is among the model's thoughts."""
        return self._reasoning is not None and self._reasoning.is_thinking

    @property
    def awaits_results(self) -> bool:
        """Whether the message has calls of the model's own choice: then it ends for want of their results."""
        return self._has_calls and not self._is_named

    def feed(self, text: str) -> list[Part]:
        """See ``Parser``."""
        if self._reasoning is not None:
            return self._calls_in(self._reasoning.feed(text))
        return self._calls_in([Content(text)] if text else [])

    def flush(self) -> list[Part]:
        """See ``Parser``."""
        rest = self._calls_in(self._reasoning.flush()) if self._reasoning is not None else []
        return rest + self._noted(self._tools.flush()) if self._tools is not None else rest

    def _calls_in(self, parts: list[Part]) -> list[Part]:
        if self._tools is None:
            return parts
        found: list[Part] = []
        for part in parts:
            found += self._noted(self._tools.feed(part.text)) if isinstance(part, Content) else [part]
        return found

    def _noted(self, parts: list[Part]) -> list[Part]:
        self._has_calls = self._has_calls or any(isinstance(part, CallStart) for part in parts)
        return parts


@dataclass(frozen=True)
class MessageFormat:
    """How the answers to one request are to be read."""

    tools: ToolFormat | None = None
    names: Collection[str] = ()
    """Functions that may be called."""
    parallel: bool = True
    is_named: bool = False
    """Whether the request names the one function to be called."""
    reasoning: bool = False
    inside: bool = False
    """Whether the prompt ends inside the model's thoughts."""

    def parser(self) -> MessageParser | None:
        """For one choice; None where all text is content."""
        if self.tools is None and not self.reasoning:
            return None
        return MessageParser(
            ThinkParser(inside=self.inside) if self.reasoning else None,
            self.tools.new_parser(self.names, parallel=self.parallel) if self.tools is not None else None,
            is_named=self.is_named,
        )

    @property
    def markers(self) -> tuple[str, ...]:
        """Special tokens that must stay in the text."""
        tools = self.tools.parser.markers if self.tools is not None else ()
        return (*tools, *(MARKERS if self.reasoning else ()))


PLAIN = MessageFormat()
"""All text is content."""
