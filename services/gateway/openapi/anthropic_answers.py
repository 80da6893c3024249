"""What the endpoints answer to Anthropic's clients, as types; see ``answers``. Pure data."""

from typing import Any, Literal

from msgspec import Struct


class AnthropicErrorDetail(Struct):
    """What is wrong."""

    type: str
    message: str


class AnthropicError(Struct):
    """Any answer to them that is no success."""

    type: Literal["error"]
    error: AnthropicErrorDetail


class MessageUsage(Struct):
    """Token counts of a message: input that was found in the prefix cache is counted apart."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: dict[str, int]


class ContentBlock(Struct):
    """A part of a message."""

    type: Literal["text", "thinking", "tool_use"]
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None


class Message(Struct):
    """A message in one piece."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(Struct):
    """How long a prompt is."""

    input_tokens: int


class AnthropicModel(Struct):
    """The model that is served."""

    type: Literal["model"]
    id: str
    display_name: str
    created_at: str
    lifecycle: Literal["active"]
    max_input_tokens: int | None
    max_tokens: int | None


class AnthropicModelList(Struct):
    """All models: one, and no further page."""

    data: list[AnthropicModel]
    has_more: bool
    first_id: str
    last_id: str
