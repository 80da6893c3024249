"""Any JSON reads as a chat request or is a 400; turns of the assistant that belong together become one message."""

import json
from collections.abc import Callable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from services.gateway.api import messages_request, responses_request
from services.gateway.api.errors import ApiError
from services.gateway.api.history import History
from services.gateway.api.messages_request import MessagesRequest
from services.gateway.api.prompts import messages_of
from services.gateway.api.refusals import MESSAGES, RESPONSES
from services.gateway.api.responses_request import ResponsesRequest
from services.gateway.api.schema import ChatRequest, checked, parse

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 70) | st.text("ab{", max_size=3),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=3,
)
KINDS = ("text", "thinking", "tool_use", "tool_result", "redacted_thinking", "input_text", "image", "function")
ITEM_KINDS = ("message", "function_call", "function_call_output", "reasoning", "item_reference")
NAMES = ("text", "thinking", "id", "name", "input", "tool_use_id", "content", "call_id", "arguments", "output", "role")


def objects(kinds: tuple[str, ...], values: Any) -> Any:
    """Objects that look right often enough to get somewhere."""
    fields = st.dictionaries(st.sampled_from(NAMES), values, max_size=4)
    roles = st.sampled_from(["user", "assistant", "system", "x"])
    kind = st.sampled_from(kinds)
    return st.builds(lambda more, role, kind: {"role": role, "content": "a", "type": kind, **more}, fields, roles, kind)


PARTS = st.lists(objects(KINDS, JSON | st.just({"a": 1})), max_size=3)
MESSAGE_LISTS = st.lists(objects(KINDS, JSON | PARTS), min_size=1, max_size=4)
ITEM_LISTS = st.lists(objects(ITEM_KINDS, JSON | PARTS), min_size=1, max_size=4)


def messages_after(read: Callable[[], dict[str, Any]]) -> list[dict[str, Any]] | None:
    """What the chat makes of it; None if it is refused."""
    try:
        return messages_of(checked(read(), ChatRequest).messages)
    except ApiError as error:
        status = error.status
    assert status == 400
    return None


@given(messages=MESSAGE_LISTS, tools=JSON | PARTS, choice=JSON | st.just({"type": "any"}))
def test_any_messages_are_a_chat_or_a_400(messages: Any, tools: Any, choice: Any) -> None:
    body = json.dumps({"messages": messages, "max_tokens": 5, "tools": tools, "tool_choice": choice}).encode()
    messages_after(lambda: messages_request.chat_fields(parse(body, MessagesRequest, MESSAGES)))


@given(items=ITEM_LISTS | JSON, tools=JSON | PARTS, text=JSON | st.just({"format": {"type": "json_object"}}))
def test_any_input_is_a_chat_or_a_400(items: Any, tools: Any, text: Any) -> None:
    body = json.dumps({"input": items, "tools": tools, "text": text}).encode()
    messages_after(lambda: responses_request.chat_fields(parse(body, ResponsesRequest, RESPONSES)))


@given(messages=MESSAGE_LISTS)
def test_no_text_of_messages_is_lost(messages: list[dict[str, Any]]) -> None:
    body = json.dumps({"messages": messages, "max_tokens": 5}).encode()
    read = messages_after(lambda: messages_request.chat_fields(parse(body, MessagesRequest, MESSAGES)))
    if read is not None:
        given_text = "".join(_texts(message["content"]) for message in messages)
        assert "".join(message["content"] for message in read) == given_text


def _texts(content: Any) -> str:
    """All that is said in a message, results of tools included."""
    if isinstance(content, str):
        return content
    texts = ""
    for block in content:
        inner = block.get("text", "") if block["type"] == "text" else block.get("content")
        texts += _texts(inner) if block["type"] in ("text", "tool_result") and inner is not None else ""
    return texts


def test_what_was_thought_said_and_called_at_once_is_one_message() -> None:
    history = History()
    history.say("user", "a")
    history.think("hm")
    history.say("assistant", "b")
    history.call("1", "f", "{}")
    history.call("2", "g", "{}")
    history.answer("1", "x")
    history.call("3", "h", "{}")
    history.say("assistant", "c")
    history.say("assistant", "d")
    told = [
        (message["role"], message.get("content"), len(message.get("tool_calls", ()))) for message in history.messages
    ]
    assert told == [
        ("user", "a", 0),
        ("assistant", "b", 2),
        ("tool", "x", 0),
        ("assistant", None, 1),
        ("assistant", "c", 0),
        ("assistant", "d", 0),
    ]
    assert history.messages[1]["reasoning_content"] == "hm"


def test_a_turn_that_was_thoughts_only_is_one_message_that_a_chat_takes() -> None:
    """It was cut off; or the model thought again and again."""
    history = History()
    history.say("user", "a")
    history.think("hm")
    history.think("so")
    history.say("user", "go on")
    assert messages_of(history.messages) == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "reasoning_content": "hm\n\nso"},
        {"role": "user", "content": "go on"},
    ]


def test_thoughts_between_what_is_said_are_all_of_one_turn() -> None:
    blocks = [
        {"type": "thinking", "thinking": "a"},
        {"type": "text", "text": "b"},
        {"type": "thinking", "thinking": "c"},
        {"type": "tool_use", "id": "1", "name": "f", "input": {}},
    ]
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": blocks}]
    body = json.dumps({"messages": turns, "max_tokens": 5}).encode()
    read = messages_after(lambda: messages_request.chat_fields(parse(body, MessagesRequest, MESSAGES)))
    assert read is not None
    [_, turn] = read
    assert (turn["reasoning_content"], turn["content"], len(turn["tool_calls"])) == ("a\n\nc", "b", 1)
