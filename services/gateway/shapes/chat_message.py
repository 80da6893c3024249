"""An assistant's message in OpenAI's shape, whole or as the deltas of a stream. Used by ``chunks``; pure."""

from collections.abc import Iterable
from typing import Any

from services.gateway.text.parts import Arguments, CallStart, Content, Part, Reasoning


def delta_of(part: Part) -> dict[str, Any]:
    """A tool call begins with its id and name; what follows has only its index and a piece of its arguments."""
    match part:
        case Content(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning_content": text}
        case CallStart(index):
            return {"tool_calls": [{"index": index, **_new_call(part)}]}
        case Arguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def message_of(parts: Iterable[Part]) -> dict[str, Any]:
    """The whole message. Its content is null where there are only calls."""
    content = reasoning = ""
    calls: list[dict[str, Any]] = []
    for part in parts:
        match part:
            case Content(text):
                content += text
            case Reasoning(text):
                reasoning += text
            case CallStart():
                calls.append(_new_call(part))
            case Arguments(index, text):
                calls[index]["function"]["arguments"] += text
    message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else ""), "refusal": None}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def _new_call(start: CallStart) -> dict[str, Any]:
    return {"id": start.call_id, "type": "function", "function": {"name": start.name, "arguments": ""}}
