"""The ``prompt`` of a completion and the ``messages`` of a chat, checked and brought into one form. Pure.

Called by the endpoints before anything is tokenized.
"""

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from services.gateway.api.errors import ApiError, invalid
from services.gateway.api.json_bounds import Bounds
from services.gateway.api.schema import unknown_fields

MAX_PROMPTS = 1024
MESSAGE_FIELDS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")
TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
PART_JOINER = ""
"""Text parts of one message are put together as they are."""

Prompt = str | list[int]


def prompts_of(value: Any) -> list[Prompt]:
    """All prompts of a completion: a string, token ids, or a list of either. Raises ApiError (400)."""
    if isinstance(value, str):
        return [_checked_text(value)]
    if not isinstance(value, list):
        raise invalid("prompt must be a string, a list of strings, a list of token ids or a list of those", "prompt")
    if not value:
        raise invalid("prompt must not be empty", "prompt")
    if not any(isinstance(item, str | list) for item in value):
        return [_checked_ids(value)]
    if len(value) > MAX_PROMPTS:
        raise invalid(f"prompt may hold at most {MAX_PROMPTS} prompts, not {len(value)}", "prompt")
    if all(isinstance(item, str) for item in value):
        return [_checked_text(item) for item in value]
    if all(isinstance(item, list) for item in value):
        return [_checked_ids(item) for item in value]
    raise invalid("prompt must not mix strings and token ids", "prompt")


def _checked_text(text: str) -> str:
    if not text:
        raise invalid("prompt must not be empty", "prompt")
    return text


def _checked_ids(ids: list[Any]) -> list[int]:
    if not ids:
        raise invalid("prompt must not be empty", "prompt")
    if not all(type(token_id) is int for token_id in ids):
        raise invalid("token ids of prompt must be integers", "prompt")
    return ids


def check_token_ids(ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Raise ApiError (400) unless every id is in the vocabulary."""
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        raise invalid(f"{param}: token ids must be from 0 to {vocab_size - 1}", param)


def messages_of(value: Any) -> list[dict[str, Any]]:
    """The messages of a chat as templates take them: content is one string. Raises ApiError (400)."""
    if not isinstance(value, list) or not value:
        raise invalid("messages must be a list of at least one message", "messages")
    bounds = Bounds("messages")
    bounds.take(value)
    return [_message(message, f"messages[{index}]", bounds) for index, message in enumerate(value)]


def _message(message: Any, place: str, bounds: Bounds) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise invalid(f"{place} must be an object", "messages")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise invalid(f"{place}.role must be a string", "messages")
    for name in message.keys() - MESSAGE_FIELDS:
        unknown_fields.note(f"messages[].{name}")
    checked: dict[str, Any] = {"role": role, "content": _content(message, f"{place}.content")}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if (text := message.get(name)) is not None:
            if not isinstance(text, str):
                raise invalid(f"{place}.{name} must be a string", "messages")
            checked[name] = text
    if (calls := message.get("tool_calls")) is not None and calls != []:
        checked["tool_calls"] = _tool_calls(calls, f"{place}.tool_calls", bounds)
    return checked


def _content(message: dict[str, Any], place: str) -> str:
    content = message.get("content")
    says_more = message.get("tool_calls") or message.get("reasoning_content")
    if content is None and message.get("role") == "assistant" and says_more:
        return ""
    return text_of(content, place)


def text_of(content: Any, place: str) -> str:
    """A string, or the text of a list of parts. Raises ApiError (400) about the field that ``place`` begins with."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return PART_JOINER.join(_part(part, f"{place}[{index}]") for index, part in enumerate(content))
    raise invalid_at(place, "must be a string or a list of text parts")


def string_at(part: dict[str, Any], name: str, place: str) -> str:
    """A field that must be a string. Raises ApiError (400)."""
    value = part.get(name)
    if not isinstance(value, str):
        raise invalid_at(f"{place}.{name}", "must be a string")
    return value


def invalid_at(place: str, problem: str) -> ApiError:
    """400 about one place in a field, as in ``messages[1].content[0]``."""
    return invalid(f"{place} {problem}", re.split(r"[.\[]", place)[0])


def _part(part: Any, place: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        raise invalid_at(place, "must be an object with a type")
    if kind not in TEXT_PARTS:
        raise unsupported_part(kind, place)
    return string_at(part, "refusal" if kind == "refusal" else "text", place)


def unsupported_part(kind: str, place: str) -> ApiError:
    """400: only text is understood."""
    return invalid_at(place, f"is content of type {kind[:40]!r}, which is not supported: only text is")


def _tool_calls(calls: Any, place: str, bounds: Bounds) -> list[dict[str, Any]]:
    """Templates take a call's arguments as an object; clients send them back as the JSON text they got."""
    if not isinstance(calls, list):
        raise invalid(f"{place} must be a list", "messages")
    checked = []
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise invalid(f"{place}[{index}].function must be an object with a name", "messages")
        arguments = _arguments(function.get("arguments"), f"{place}[{index}].function.arguments", bounds)
        checked.append({"type": "function", **call, "function": {"name": function["name"], "arguments": arguments}})
    return checked


def _arguments(arguments: Any, place: str, bounds: Bounds) -> dict[str, Any]:
    if arguments is None or arguments == "":
        return {}
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments)
        except (msgspec.DecodeError, RecursionError):
            raise invalid(f"{place} is not valid JSON", "messages") from None
        bounds.take(arguments)
    if not isinstance(arguments, dict):
        raise invalid(f"{place} must be an object, or its JSON text", "messages")
    return arguments
