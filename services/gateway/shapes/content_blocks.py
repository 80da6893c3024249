"""Answers as a row of blocks, each of one kind, which open, grow and close one after the other: what the shapes of
``/v1/responses`` and ``/v1/messages`` share. A whole answer is built by the same steps as a stream. Pure.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from services.gateway.choice import Finish, Update
from services.gateway.logprobs import TokenLogprobs, chat_shape
from services.gateway.shapes.shape import Outline
from services.gateway.text.parts import Arguments, CallStart, Content, Part, Reasoning

Kind = Literal["text", "reasoning", "call"]


@dataclass
class ContentBlock:
    """A part of an answer; its text is the arguments if it is a call."""

    kind: Kind
    index: int
    call_id: str = ""
    name: str = ""
    """Both if it is a call: the name is the function's."""
    pieces: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    """Of its tokens, where asked for."""

    @property
    def text(self) -> str:
        """All of it so far."""
        return "".join(self.pieces)


def event(name: str, data: dict[str, Any]) -> bytes:
    """One server-sent event, whose data names it as well."""
    return b"event: %s\ndata: %s\n\n" % (name.encode(), msgspec.json.encode({"type": name, **data}))


class ContentBlocks(ABC):
    """A ``Shape`` of one choice. Subclasses write the events."""

    def __init__(self, outline: Outline) -> None:
        self._outline = outline
        self._blocks: list[ContentBlock] = []
        self._open: ContentBlock | None = None
        self._finish: Finish | None = None
        self._stop: str | None = None
        """The stop string that ended it."""
        self._held: list[TokenLogprobs] = []
        """Of tokens whose text has not come yet."""

    def events(self, updates: list[Update]) -> bytes:
        """See ``Shape``."""
        return b"".join([written for update in updates for written in self._update(update)])

    def ending(self) -> bytes:
        """See ``Shape``. An answer without text has one empty block."""
        closing = [] if self._blocks else [*self._turn_to("text")]
        return b"".join([*closing, *self._close(), *self._finished()])

    def whole(self, updates: list[Update]) -> bytes:
        """See ``Shape``."""
        self.events(updates)
        self.ending()
        return msgspec.json.encode(self._body())

    def _update(self, update: Update) -> Iterator[bytes]:
        self._held.extend(update.logprobs)
        for part in update.told:
            yield from self._take(part)
        if update.finish is not None:
            self._finish, self._stop = update.finish, update.stop

    def _take(self, part: Part) -> Iterator[bytes]:
        match part:
            case Content(text):
                yield from self._grow("text", text)
            case Reasoning(text):
                yield from self._grow("reasoning", text)
            case CallStart(_, call_id, name):
                yield from self._turn_to("call", call_id, name)
            case Arguments(_, text):
                yield from self._grow("call", text)

    def _grow(self, kind: Kind, text: str) -> Iterator[bytes]:
        if self._open is None or self._open.kind != kind:
            yield from self._turn_to(kind)
        assert self._open is not None
        self._open.pieces.append(text)
        yield self._grown(self._open, text, self._take_logprobs(self._open))

    def _turn_to(self, kind: Kind, call_id: str = "", name: str = "") -> Iterator[bytes]:
        yield from self._close()
        self._open = ContentBlock(kind, len(self._blocks), call_id, name)
        self._blocks.append(self._open)
        yield from self._opened(self._open)

    def _close(self) -> Iterable[bytes]:
        block, self._open = self._open, None
        if block is None:
            return ()
        self._take_logprobs(block)
        return self._closed(block)

    def _take_logprobs(self, block: ContentBlock) -> Sequence[dict[str, Any]]:
        """What is told of tokens since the last time; none unless they are the text's."""
        if not self._held or block.kind != "text":
            return ()
        told: list[dict[str, Any]] = chat_shape(self._held, self._outline.spell)["content"]
        self._held = []
        block.logprobs.extend(told)
        return told

    @abstractmethod
    def _opened(self, block: ContentBlock) -> Iterable[bytes]:
        """The events of a block that begins."""

    @abstractmethod
    def _grown(self, block: ContentBlock, text: str, logprobs: Sequence[dict[str, Any]]) -> bytes:
        """The event of more text."""

    @abstractmethod
    def _closed(self, block: ContentBlock) -> Iterable[bytes]:
        """The events of a block that is complete."""

    @abstractmethod
    def _finished(self) -> Iterable[bytes]:
        """The last events."""

    @abstractmethod
    def _body(self) -> dict[str, Any]:
        """The whole answer."""
