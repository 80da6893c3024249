"""Chunks of ``/v1/chat/completions`` and ``/v1/completions``, byte for byte as OpenAI's clients read them.

What is the same in every chunk of an answer is formatted once; a chunk costs one JSON string and one join. Pure.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import msgspec

from services.gateway.api.errors import ApiError
from services.gateway.choice import Update
from services.gateway.logprobs import TokenLogprobs, chat_shape, completion_shape
from services.gateway.shapes.chat_message import delta_of, message_of
from services.gateway.shapes.shape import KEEP_ALIVE, Outline

DONE = b"data: [DONE]\n\n"

_json = msgspec.json.encode


class Chunks(ABC):
    """A ``Shape``. Subclasses say how a choice looks, in a chunk and whole."""

    object_name: ClassVar[str]
    chunk_name: ClassVar[str]
    empty_body: ClassVar[bytes]
    """Of the chunk that carries the finish reason."""
    keep_alive = KEEP_ALIVE

    def __init__(self, outline: Outline) -> None:
        self._outline = outline
        self._settings = outline.settings
        self._with_logprobs = outline.settings.num_logprobs >= 0
        self._head = b"data: " + _json(self._plain_head(self.chunk_name))[:-1] + b","
        self._heads: dict[int, bytes] = {}
        self._held_ids: dict[int, list[int]] = {}
        self._held_logprobs: dict[int, list[TokenLogprobs]] = {}
        """What waits for the next chunk of its choice: a token whose text is held back leaves with it."""

    def _plain_head(self, object_name: str) -> dict[str, Any]:
        outline = self._outline
        return {"id": outline.answer_id, "object": object_name, "created": outline.created, "model": outline.model}

    # Streamed.

    def opening(self) -> bytes:
        """See ``Shape``. A choice opens with its first update."""
        return b""

    def events(self, updates: list[Update]) -> bytes:
        """See ``Shape``."""
        return b"".join([chunk for update in updates for chunk in self._chunks(update)])

    def ending(self) -> bytes:
        """See ``Shape``. The usage, if asked for, has a chunk of its own."""
        if not self._settings.include_usage:
            return DONE
        return b"".join([self._head, b'"choices":[],"usage":', self._outline.usage.json(), b"}\n\n", DONE])

    def failure(self, error: ApiError) -> bytes:
        """See ``Shape``."""
        return b"data: " + error.body() + b"\n\n" + DONE

    def _chunks(self, update: Update) -> Iterable[bytes]:
        index = update.choice
        head = self._heads.get(index)
        if head is None:
            head = self._heads[index] = self._head + b'"choices":[{"index":%d,' % index
            yield from self._opening(index, head)
        if self._settings.return_token_ids:
            self._held_ids.setdefault(index, []).extend(update.token_ids)
        if update.logprobs:
            self._held_logprobs.setdefault(index, []).extend(update.logprobs)
        for body in self._bodies(update):
            told = (b',"logprobs":', self._logprobs(index), b',"finish_reason":null')
            yield b"".join([head, body, *told, self._ids(index), b"}]", *self._tail()])
        if update.finish is not None:
            told = (b',"logprobs":', self._logprobs(index), b',"finish_reason":"%s"' % update.finish.encode())
            yield b"".join([head, self.empty_body, *told, self._ids(index), b"}]", *self._tail()])

    def _logprobs(self, index: int) -> bytes:
        if not self._with_logprobs:
            return b"null"
        held = self._held_logprobs.pop(index, None)
        return _json(self._logprobs_of(held)) if held else b"null"

    def _ids(self, index: int) -> bytes:
        if not self._settings.return_token_ids:
            return b""
        return b',"token_ids":' + _json(self._held_ids.pop(index, []))

    def _prompt_ids(self, index: int) -> bytes:
        return b'"prompt_token_ids":%s,' % _json(self._outline.prompts[index // self._settings.n])

    def _tail(self) -> tuple[bytes, ...]:
        """From behind the choices to the event's end."""
        if self._settings.continuous_usage:
            return (b',"usage":', self._outline.usage.json(), b"}\n\n")
        return (b',"usage":null}\n\n',) if self._settings.include_usage else (b"}\n\n",)

    @abstractmethod
    def _opening(self, index: int, head: bytes) -> Iterable[bytes]:
        """The events before a choice's first text."""

    @abstractmethod
    def _bodies(self, update: Update) -> Iterable[bytes]:
        """What a choice says now, as it stands between its index and its logprobs: one chunk each."""

    # Whole.

    def whole(self, updates: list[Update]) -> bytes:
        """See ``Shape``."""
        body = self._plain_head(self.object_name)
        body["choices"] = [self._choice(index, update) for index, update in enumerate(updates)]
        body["usage"] = self._outline.usage.plain()
        if self._settings.return_token_ids:
            self._add_prompt_ids(body)
        return _json(body)

    def _choice(self, index: int, update: Update) -> dict[str, Any]:
        logprobs = self._logprobs_of(update.logprobs) if self._with_logprobs else None
        choice = {"index": index, **self._content(update), "logprobs": logprobs, "finish_reason": update.finish}
        if self._settings.return_token_ids:
            choice["token_ids"] = update.token_ids
        return choice

    @abstractmethod
    def _content(self, update: Update) -> dict[str, Any]:
        """What a choice says."""

    @abstractmethod
    def _logprobs_of(self, told: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """The logprobs of a choice, or of a chunk of it."""

    @abstractmethod
    def _add_prompt_ids(self, body: dict[str, Any]) -> None:
        """Put the prompts' ids where the endpoint has them."""


class ChatChunks(Chunks):
    """Of ``/v1/chat/completions``: the role first, then content, then an empty delta with the finish reason."""

    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"
    empty_body = b'"delta":{}'

    def _opening(self, index: int, head: bytes) -> Iterable[bytes]:
        if self._settings.return_token_ids:
            head = self._head + self._prompt_ids(index) + head[len(self._head) :]
        role = b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'
        yield b"".join([head, role, *self._tail()])

    def _bodies(self, update: Update) -> Iterable[bytes]:
        if update.text:
            return (b'"delta":{"content":%s}' % _json(update.text),)
        return [b'"delta":%s' % _json(delta_of(part)) for part in update.parts]

    def _content(self, update: Update) -> dict[str, Any]:
        return {"message": message_of(update.told)}

    def _logprobs_of(self, told: Sequence[TokenLogprobs]) -> dict[str, Any]:
        return chat_shape(told, self._outline.spell)

    def _add_prompt_ids(self, body: dict[str, Any]) -> None:
        body["prompt_token_ids"] = self._outline.prompts[0]


class CompletionChunks(Chunks):
    """Of ``/v1/completions``: text, then an empty text with the finish reason."""

    object_name = chunk_name = "text_completion"
    empty_body = b'"text":""'

    def _opening(self, index: int, head: bytes) -> Iterable[bytes]:
        if self._settings.return_token_ids:
            ids = b'"text":"","logprobs":null,"finish_reason":null,' + self._prompt_ids(index)[:-1]
            yield b"".join([head, ids, b"}]", *self._tail()])

    def _bodies(self, update: Update) -> Iterable[bytes]:
        return (b'"text":%s' % _json(update.text),) if update.text else ()

    def _content(self, update: Update) -> dict[str, Any]:
        return {"text": update.text}

    def _logprobs_of(self, told: Sequence[TokenLogprobs]) -> dict[str, Any]:
        return completion_shape(told, self._outline.spell)

    def _add_prompt_ids(self, body: dict[str, Any]) -> None:
        for choice in body["choices"]:
            choice["prompt_token_ids"] = self._outline.prompts[choice["index"] // self._settings.n]
