"""Fields that ``services.gateway.api.prompts`` checks by hand, as types: only described. Pure data."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from services.gateway.api.prompts import MAX_PROMPTS

TokenId = Annotated[int, Meta(ge=0)]
Text = Annotated[str, Meta(min_length=1)]
TokenIds = Annotated[list[TokenId], Meta(min_length=1)]


class TextPart(Struct):
    """A piece of a message's text."""

    type: Literal["text", "input_text", "output_text"]
    text: str


class CalledFunction(Struct):
    """A function, and the arguments it was called with, as JSON text or as an object."""

    name: str
    arguments: str | dict[str, Any]


class ToolCall(Struct):
    """A call of the assistant's."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(Struct):
    """A message of a conversation. The content of the assistant's may be null where it has tool calls."""

    role: Text
    content: str | list[TextPart] | None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


PROMPT_KINDS: tuple[Any, ...] = (
    Text,
    Annotated[list[Text], Meta(min_length=1, max_length=MAX_PROMPTS)],
    TokenIds,
    Annotated[list[TokenIds], Meta(min_length=1, max_length=MAX_PROMPTS)],
)
"""A completion's prompt is one of these."""
MESSAGES: Any = Annotated[list[ChatMessage], Meta(min_length=1)]
