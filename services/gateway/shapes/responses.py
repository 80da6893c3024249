"""Answers of ``/v1/responses``: items of output, and numbered events that tell of each step. Pure but for the clock."""

import time
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from services.gateway.api.errors import ApiError
from services.gateway.api.responses_request import ResponsesRequest
from services.gateway.shapes.content_blocks import ContentBlock, ContentBlocks, event
from services.gateway.shapes.shape import KEEP_ALIVE, Outline

ITEM_PREFIXES = {"text": "msg", "reasoning": "rs", "call": "fc"}


class Responses(ContentBlocks):
    """A ``Shape``; every block is an item of output."""

    keep_alive = KEEP_ALIVE

    def __init__(self, outline: Outline, request: ResponsesRequest) -> None:
        super().__init__(outline)
        self._request = request
        self._key = outline.answer_id.removeprefix("resp_")
        self._num_events = 0

    def _event(self, name: str, /, **data: Any) -> bytes:
        number = self._num_events
        self._num_events += 1
        return event(name, {"sequence_number": number, **data})

    def opening(self) -> bytes:
        """See ``Shape``."""
        created = self._event("response.created", response=self._response("in_progress"))
        return created + self._event("response.in_progress", response=self._response("in_progress"))

    def failure(self, error: ApiError) -> bytes:
        """See ``Shape``. The response as far as it came, with the error in it."""
        told = self._event("error", code=error.code, message=error.message, param=error.param)
        failed = {"code": "server_error", "message": error.message}
        return told + self._event("response.failed", response=self._response("failed", failed))

    def _opened(self, block: ContentBlock) -> Iterable[bytes]:
        item = self._item(block, "in_progress")
        if block.kind != "call":
            item["content"] = []
        yield self._event("response.output_item.added", output_index=block.index, item=item)
        if block.kind != "call":
            yield self._event("response.content_part.added", **self._place(block), part=self._part(block))

    def _grown(self, block: ContentBlock, text: str, logprobs: Sequence[dict[str, Any]]) -> bytes:
        place = self._place(block)
        match block.kind:
            case "text":
                return self._event("response.output_text.delta", **place, delta=text, logprobs=logprobs)
            case "reasoning":
                return self._event("response.reasoning_text.delta", **place, delta=text)
            case "call":
                return self._event("response.function_call_arguments.delta", **place, delta=text)

    def _closed(self, block: ContentBlock) -> Iterable[bytes]:
        place = self._place(block)
        text = block.text
        match block.kind:
            case "text":
                yield self._event("response.output_text.done", **place, text=text, logprobs=block.logprobs)
            case "reasoning":
                yield self._event("response.reasoning_text.done", **place, text=text)
            case "call":
                name = "response.function_call_arguments.done"
                yield self._event(name, **place, name=block.name, arguments=text)
        if block.kind != "call":
            yield self._event("response.content_part.done", **place, part=self._part(block))
        item = self._item(block, self._status(block))
        yield self._event("response.output_item.done", output_index=block.index, item=item)

    def _finished(self) -> Iterable[bytes]:
        body = self._body()
        yield self._event(f"response.{body['status']}", response=body)

    def _body(self) -> dict[str, Any]:
        return self._response("incomplete" if self._finish == "length" else "completed")

    def _status(self, block: ContentBlock) -> str:
        """Of an item that gets no more: the last one may have been cut off, by max_output_tokens or a failure."""
        is_cut_off = block is self._open or (self._finish == "length" and block is self._blocks[-1])
        return "incomplete" if is_cut_off else "completed"

    def _place(self, block: ContentBlock) -> dict[str, Any]:
        place: dict[str, Any] = {"item_id": self._item_id(block), "output_index": block.index}
        if block.kind != "call":
            place["content_index"] = 0
        return place

    def _item_id(self, block: ContentBlock) -> str:
        return f"{ITEM_PREFIXES[block.kind]}_{self._key}{block.index}"

    def _item(self, block: ContentBlock, status: str) -> dict[str, Any]:
        item: dict[str, Any] = {"id": self._item_id(block), "status": status}
        match block.kind:
            case "text":
                return {**item, "type": "message", "role": "assistant", "content": [self._part(block)]}
            case "reasoning":
                return {**item, "type": "reasoning", "summary": [], "content": [self._part(block)]}
            case "call":
                called = {"call_id": block.call_id, "name": block.name, "arguments": block.text}
                return {**item, "type": "function_call", **called}

    def _part(self, block: ContentBlock) -> dict[str, Any]:
        if block.kind == "reasoning":
            return {"type": "reasoning_text", "text": block.text}
        return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": block.logprobs}

    def _response(self, status: str, error: dict[str, Any] | None = None) -> dict[str, Any]:
        request, outline = self._request, self._outline
        text = request.text.format if request.text is not None else None
        is_over = status != "in_progress"
        return {
            "id": outline.answer_id,
            "object": "response",
            "created_at": outline.created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "background": False,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "max_tool_calls": None,
            "metadata": request.metadata or {},
            "model": outline.model,
            "output": [self._item(block, self._status(block)) for block in self._blocks],
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": request.reasoning.effort if request.reasoning else None, "summary": None},
            "service_tier": "default",
            "store": False,
            "temperature": 1.0 if request.temperature is None else request.temperature,
            "text": {"format": {"type": "text"} if text is None else _given(text)},
            "tool_choice": "auto" if request.tool_choice is None else request.tool_choice,
            "tools": request.tools or [],
            "top_logprobs": request.top_logprobs or 0,
            "top_p": 1.0 if request.top_p is None else request.top_p,
            "truncation": "disabled",
            "usage": self._usage() if is_over else None,
        }

    def _usage(self) -> dict[str, Any]:
        usage = self._outline.usage
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }


def _given(struct: msgspec.Struct) -> dict[str, Any]:
    """Its fields that are not null."""
    return {name: value for name, value in msgspec.structs.asdict(struct).items() if value is not None}
