"""Answers of ``/v1/messages`` as Anthropic's clients read them. Pure."""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from services.gateway.api.errors import ApiError
from services.gateway.shapes.content_blocks import ContentBlock, ContentBlocks, event

PING = event("ping", {})
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class Messages(ContentBlocks):
    """A ``Shape``: content blocks, no ``[DONE]``."""

    keep_alive = PING

    def opening(self) -> bytes:
        """See ``Shape``. What of the prompt was cached is not known yet."""
        return event("message_start", {"message": self._message([], None, None)}) + PING

    def failure(self, error: ApiError) -> bytes:
        """See ``Shape``."""
        return b"event: error\ndata: %s\n\n" % error.anthropic_body()

    def _opened(self, block: ContentBlock) -> Iterable[bytes]:
        content = self._content(block)
        if block.kind == "call":
            content["input"] = {}
        yield event("content_block_start", {"index": block.index, "content_block": content})

    def _grown(self, block: ContentBlock, text: str, logprobs: Sequence[dict[str, Any]]) -> bytes:
        match block.kind:
            case "text":
                delta = {"type": "text_delta", "text": text}
            case "reasoning":
                delta = {"type": "thinking_delta", "thinking": text}
            case "call":
                delta = {"type": "input_json_delta", "partial_json": text}
        return event("content_block_delta", {"index": block.index, "delta": delta})

    def _closed(self, block: ContentBlock) -> Iterable[bytes]:
        yield event("content_block_stop", {"index": block.index})

    def _finished(self) -> Iterable[bytes]:
        delta = {"stop_reason": self._stop_reason(), "stop_sequence": self._stop}
        yield event("message_delta", {"delta": delta, "usage": self._usage()})
        yield event("message_stop", {})

    def _body(self) -> dict[str, Any]:
        content = [self._content(block) for block in self._blocks]
        return self._message(content, self._stop_reason(), self._stop)

    def _stop_reason(self) -> str:
        """Whoever called a tool waits for its result, also where the request forced the call."""
        assert self._finish is not None
        if self._stop is not None:
            return "stop_sequence"
        has_calls = any(block.kind == "call" for block in self._blocks)
        return "tool_use" if self._finish == "stop" and has_calls else STOP_REASONS[self._finish]

    def _message(self, content: list[Any], stop_reason: str | None, stop_sequence: str | None) -> dict[str, Any]:
        return {
            "id": self._outline.answer_id,
            "type": "message",
            "role": "assistant",
            "model": self._outline.model,
            "content": content,
            "stop_reason": stop_reason,
            "stop_sequence": stop_sequence,
            "usage": self._usage(),
        }

    def _content(self, block: ContentBlock) -> dict[str, Any]:
        match block.kind:
            case "text":
                return {"type": "text", "text": block.text}
            case "reasoning":
                return {"type": "thinking", "thinking": block.text, "signature": ""}
            case "call":
                return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": _object(block.text)}

    def _usage(self) -> dict[str, Any]:
        """Anthropic counts what was found in the cache apart from the rest of the input."""
        usage = self._outline.usage
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
        }


def _object(arguments: str) -> Any:
    """A call's arguments; what the model wrote may be no JSON (it was cut off)."""
    try:
        value = msgspec.json.decode(arguments or "{}")
    except (msgspec.DecodeError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
