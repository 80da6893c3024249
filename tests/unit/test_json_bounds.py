"""What a client may nest, and how much of it, wherever a field may hold anything."""

import functools
import json
from typing import Any

import pytest

from services.gateway.api import messages_request, responses_request
from services.gateway.api.constraints import constraint_of
from services.gateway.api.errors import ApiError
from services.gateway.api.json_bounds import MAX_BRACKETS, MAX_DEPTH, MAX_INNER, MAX_VALUES, check_bounds
from services.gateway.api.messages_request import MessagesRequest
from services.gateway.api.prompts import messages_of
from services.gateway.api.refusals import MESSAGES, RESPONSES
from services.gateway.api.responses_request import ResponsesRequest
from services.gateway.api.schema import ChatRequest, checked, parse
from services.gateway.api.tools import tool_use_of


def nested(levels: int) -> Any:
    return functools.reduce(lambda inner, number: [inner] if number % 2 else {"a": inner}, range(levels - 1), [1])


@pytest.mark.parametrize(
    "good", [nested(MAX_DEPTH), [{}] * (MAX_INNER - 1) + [[1, "a", None]], "a", 1, {}, [0] * 100_000]
)
def test_what_is_within_bounds(good: Any) -> None:
    check_bounds(good, "x")


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (nested(MAX_DEPTH + 1), "levels"),
        ([{"a": []}] * (MAX_INNER // 2 + 1), "lists"),
        ([[1] * (MAX_VALUES // 2)] * 2, "values"),
    ],
)
def test_what_is_not(bad: Any, why: str) -> None:
    with pytest.raises(ApiError, match=why) as raised:
        check_bounds(bad, "x")
    assert (raised.value.status, raised.value.param) == (400, "x")


def read_chat(body: bytes) -> None:
    request = parse(body, ChatRequest)
    tool_use_of(request)
    constraint_of(request)
    messages_of(request.messages)


def read_messages(body: bytes) -> None:
    messages_of(checked(messages_request.chat_fields(parse(body, MessagesRequest, MESSAGES)), ChatRequest).messages)


def read_responses(body: bytes) -> None:
    messages_of(checked(responses_request.chat_fields(parse(body, ResponsesRequest, RESPONSES)), ChatRequest).messages)


def test_arguments_of_all_calls_count_together() -> None:
    def history(num_calls: int) -> list[Any]:
        call = {"type": "function", "function": {"name": "f", "arguments": json.dumps({"a": [{}] * 9_000})}}
        return [{"role": "assistant", "content": None, "tool_calls": [call] * num_calls}]

    messages_of(history(5))
    with pytest.raises(ApiError, match="objects and lists"):
        messages_of(history(6))


def test_an_ignored_field_has_its_bounds_too_and_a_text_may_be_full_of_brackets() -> None:
    user = {"role": "user", "content": "[{" * (MAX_BRACKETS // 4)}
    read_chat(json.dumps({"messages": [user]}).encode())
    with pytest.raises(ApiError, match="brackets") as raised:
        read_chat(json.dumps({"messages": [user], "ignored": [[]] * (MAX_BRACKETS // 2)}).encode())
    assert raised.value.status == 400


MANY: list[Any] = [{"role": "user", "content": "a"}] * (MAX_INNER + 1)


@pytest.mark.parametrize(
    ("read", "fields", "param"),
    [
        (read_chat, {"messages": MANY}, "messages"),
        (
            read_chat,
            {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * MAX_INNER}]},
            "messages",
        ),
        (read_chat, {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": MANY}}}]}, "tools"),
        (read_chat, {"guided_json": {"enum": MANY}}, "guided_json"),
        (read_messages, {"messages": MANY, "max_tokens": 1}, "messages"),
        (read_responses, {"input": MANY}, "input"),
    ],
)
def test_there_is_no_field_for_more(read: Any, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError, match="objects and lists") as raised:
        read(json.dumps(fields).encode())
    assert (raised.value.status, raised.value.param) == (400, param)
