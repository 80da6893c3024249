"""Server-sent events of the two streaming endpoints, byte for byte as OpenAI's clients read them.

What is the same in every chunk of a response is formatted once; a chunk costs one JSON string and one join. Used by
``services.gateway.api.answer``; pure.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from services.gateway.choice import Update
from services.gateway.logprobs import TokenLogprobs
from services.gateway.usage import Usage

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"

_json = msgspec.json.encode

LogprobsShape = Callable[[Sequence[TokenLogprobs]], dict[str, Any]]
"""Writes logprobs in the endpoint's shape."""


def error_event(body: bytes) -> bytes:
    """The last event of a stream that failed; ``body`` is an ``ApiError``'s."""
    return b"data: " + body + b"\n\n"


class Events(ABC):
    """The chunks of one response. Subclasses say how a choice's part of a chunk looks."""

    object_name: str

    def __init__(
        self,
        response_id: str,
        created: int,
        model: str,
        usage: Usage,
        prompts: Sequence[Sequence[int]],
        *,
        n: int,
        with_usage: bool,
        with_usage_always: bool,
        with_token_ids: bool,
        logprobs: LogprobsShape | None,
    ) -> None:
        """``prompts[i // n]`` is choice i's prompt; ``usage`` follows the choices' counts; ``logprobs`` writes them."""
        self._usage = usage
        self._prompts = prompts
        self._n = n
        self._with_usage = with_usage
        self._with_usage_always = with_usage_always
        self._with_token_ids = with_token_ids
        self._logprobs_shape = logprobs
        head = _json({"id": response_id, "object": self.object_name, "created": created, "model": model})
        self._head = b"data: " + head[:-1] + b","
        self._heads: dict[int, bytes] = {}
        self._held_ids: dict[int, list[int]] = {}
        self._held_logprobs: dict[int, list[TokenLogprobs]] = {}
        """What waits for the next chunk of its choice: a token whose text is held back leaves with it."""

    def chunks(self, updates: list[Update]) -> bytes:
        """All events for what came in one turn; may be empty."""
        return b"".join([event for update in updates for event in self._events(update)])

    def usage_chunk(self) -> bytes:
        """The chunk before ``[DONE]`` when usage was asked for, else nothing."""
        if not self._with_usage:
            return b""
        return b"".join([self._head, b'"choices":[],"usage":', self._usage.json(), b"}\n\n"])

    def _events(self, update: Update) -> Iterable[bytes]:
        index = update.choice
        head = self._heads.get(index)
        if head is None:
            head = self._heads[index] = self._head + b'"choices":[{"index":%d,' % index
            yield from self._opening(index, head)
        if self._with_token_ids:
            self._held_ids.setdefault(index, []).extend(update.token_ids)
        if update.logprobs:
            self._held_logprobs.setdefault(index, []).extend(update.logprobs)
        if update.text:
            part = self._text(head, update.text, self._logprobs(index))
            yield b"".join([*part, b"null", self._ids(index), b"}]", *self._tail()])
        if update.finish is not None:
            part = self._end(head, self._logprobs(index))
            yield b"".join([*part, b'"%s"' % update.finish.encode(), self._ids(index), b"}]", *self._tail()])

    def _logprobs(self, index: int) -> bytes:
        if self._logprobs_shape is None:
            return b"null"
        held = self._held_logprobs.pop(index, None)
        return _json(self._logprobs_shape(held)) if held else b"null"

    def _ids(self, index: int) -> bytes:
        if not self._with_token_ids:
            return b""
        return b',"token_ids":' + _json(self._held_ids.pop(index, []))

    def _prompt_ids(self, index: int) -> bytes:
        return b'"prompt_token_ids":%s,' % _json(self._prompts[index // self._n])

    def _tail(self) -> tuple[bytes, ...]:
        """From behind the choices to the event's end."""
        if self._with_usage_always:
            return (b',"usage":', self._usage.json(), b"}\n\n")
        return (b',"usage":null}\n\n',) if self._with_usage else (b"}\n\n",)

    @abstractmethod
    def _opening(self, index: int, head: bytes) -> Iterable[bytes]:
        """The events before a choice's first text."""

    @abstractmethod
    def _text(self, head: bytes, text: str, logprobs: bytes) -> tuple[bytes, ...]:
        """From ``head`` to ``"finish_reason":``."""

    @abstractmethod
    def _end(self, head: bytes, logprobs: bytes) -> tuple[bytes, ...]:
        """As ``_text``, of the chunk that carries the finish reason."""


class ChatEvents(Events):
    """Of ``/v1/chat/completions``: the role first, then content, then an empty delta with the finish reason."""

    object_name = "chat.completion.chunk"

    def _opening(self, index: int, head: bytes) -> Iterable[bytes]:
        if self._with_token_ids:
            head = self._head + self._prompt_ids(index) + head[len(self._head) :]
        role = b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'
        yield b"".join([head, role, *self._tail()])

    def _text(self, head: bytes, text: str, logprobs: bytes) -> tuple[bytes, ...]:
        return (head, b'"delta":{"content":', _json(text), b'},"logprobs":', logprobs, b',"finish_reason":')

    def _end(self, head: bytes, logprobs: bytes) -> tuple[bytes, ...]:
        return (head, b'"delta":{},"logprobs":', logprobs, b',"finish_reason":')


class CompletionEvents(Events):
    """Of ``/v1/completions``: text, then an empty text with the finish reason."""

    object_name = "text_completion"

    def _opening(self, index: int, head: bytes) -> Iterable[bytes]:
        if self._with_token_ids:
            ids = b'"text":"","logprobs":null,"finish_reason":null,' + self._prompt_ids(index)[:-1]
            yield b"".join([head, ids, b"}]", *self._tail()])

    def _text(self, head: bytes, text: str, logprobs: bytes) -> tuple[bytes, ...]:
        return (head, b'"text":', _json(text), b',"logprobs":', logprobs, b',"finish_reason":')

    def _end(self, head: bytes, logprobs: bytes) -> tuple[bytes, ...]:
        return (head, b'"text":"","logprobs":', logprobs, b',"finish_reason":')
