"""A conversation as the text of a prompt, by a chat template: code in Jinja that comes with a model. Pure.

What templates differ in is evened out here: some know no tools, some no developer; some take a call's arguments as
text, some look for calls only where content is null. Called by ``services.gateway.text.chat_prompt``. The sandbox and
the variables are those of transformers.
"""

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from transformers.utils.chat_template_utils import render_jinja_template

from services.gateway.text.tool_calls.formats import takes_tools
from services.gateway.text.tool_prompt import with_tools

RESERVED = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversations",
        "documents",
        "messages",
        "return_assistant_tokens_mask",
        "tools",
    }
)
"""Variables of a template that no request may set by name."""


@dataclass(frozen=True)
class Conversation:
    """What a template is given."""

    messages: list[dict[str, Any]]
    """At least one; each with a role, and content that is a string. Arguments of tool calls are objects."""
    functions: list[dict[str, Any]] = field(default_factory=list)
    """That the model may call: each with a name, a description and parameters, a JSON schema."""
    add_generation_prompt: bool = True
    continue_final: bool = False
    variables: dict[str, Any] = field(default_factory=dict)
    """Whatever else the template is to see; no name is reserved."""


class ChatTemplate:
    """One template. Rendering is slow, and may raise anything: it runs the model's code."""

    def __init__(self, source: str, special_tokens: Mapping[str, Any]) -> None:
        """``special_tokens``: variables such as ``bos_token``."""
        self.source = source
        self.special_tokens = dict(special_tokens)

    def render(self, conversation: Conversation) -> str:
        """The prompt's text, special tokens spelled out."""
        tools = [{"type": "function", "function": function} for function in conversation.functions]
        messages = [self._message(message) for message in conversation.messages]
        if takes_tools(self.source):
            return self._rendered(messages, conversation, tools or None)
        return self._rendered(with_tools(messages, tools), conversation, None)

    def _message(self, message: dict[str, Any]) -> dict[str, Any]:
        if message["role"] == "developer" and "developer" not in self.source:
            return {**message, "role": "system"}
        if message.get("tool_calls") and takes_tools(self.source):
            return self._call_style.of(message)
        return message

    @cached_property
    def _call_style(self) -> "_CallStyle":
        """The first in which the template writes a call with its arguments as JSON."""
        for style in _CALL_STYLES:
            messages = [style.of(message) if "tool_calls" in message else message for message in _PROBE]
            with contextlib.suppress(Exception):  # of one that does not suit it
                if '"probe"' in self._rendered(messages, Conversation(messages), None):
                    return style
        return _CALL_STYLES[0]

    def _rendered(
        self, messages: list[dict[str, Any]], conversation: Conversation, tools: list[dict[str, Any]] | None
    ) -> str:
        texts: list[str] = render_jinja_template(
            conversations=[messages],
            tools=list(tools) if tools is not None else None,
            chat_template=self.source,
            add_generation_prompt=conversation.add_generation_prompt,
            continue_final_message=conversation.continue_final,
            **{**self.special_tokens, **conversation.variables},
        )[0]  # type: ignore[assignment]  # a pair, whatever its annotation says
        return texts[0]


class _CallStyle(NamedTuple):
    """What a template takes for an assistant's message with tool calls."""

    no_content: str | None
    """Beside calls."""
    text_arguments: bool
    """Whether arguments are their JSON text, not an object."""

    def of(self, message: dict[str, Any]) -> dict[str, Any]:
        calls = message["tool_calls"]
        if self.text_arguments:
            calls = [_with_text_arguments(call) for call in calls]
        return {**message, "content": message["content"] or self.no_content, "tool_calls": calls}


_CALL_STYLES = [_CallStyle(no_content, as_text) for no_content in ("", None) for as_text in (False, True)]
_PROBE: list[dict[str, Any]] = [
    {"role": "user", "content": "x"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "123456789", "type": "function", "function": {"name": "f", "arguments": {"probe": "x"}}}],
    },
    {"role": "tool", "name": "f", "tool_call_id": "123456789", "content": "x"},
]
"""A conversation that every template which knows of tools can write."""


def _with_text_arguments(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}
