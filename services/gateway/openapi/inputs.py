"""Fields that ``services.gateway.api.prompts`` checks by hand, as types: only described. Pure data."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from services.gateway.api.prompts import MAX_PROMPTS
from services.gateway.api.tools import MAX_TOOLS, NAME

TokenId = Annotated[int, Meta(ge=0)]
Text = Annotated[str, Meta(min_length=1)]
TokenIds = Annotated[list[TokenId], Meta(min_length=1)]


class TextPart(Struct):
    """A piece of a message's text."""

    type: Literal["text", "input_text", "output_text"]
    text: str


class CallOfFunction(Struct):
    """A function, and the arguments it was called with, as JSON text or as an object."""

    name: str
    arguments: str | dict[str, Any] | None = None


class EarlierCall(Struct):
    """A call of the assistant's; its id and type are handed to the model's template as they are."""

    function: CallOfFunction


class ChatMessage(Struct):
    """A message of a conversation."""

    role: Text
    content: str | list[TextPart]
    name: str | None = None
    tool_calls: list[EarlierCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class CallingMessage(Struct):
    """A message of the assistant's that only calls tools."""

    role: Literal["assistant"]
    tool_calls: Annotated[list[EarlierCall], Meta(min_length=1)]
    content: None = None
    reasoning_content: str | None = None


class ThinkingMessage(Struct):
    """A message of the assistant's that only thinks: it was cut off."""

    role: Literal["assistant"]
    reasoning_content: Text
    content: None = None


class FunctionDefinition(Struct):
    """A function that the model may call."""

    name: Annotated[str, Meta(pattern=f"^{NAME.pattern}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema of type object."""
    strict: bool | None = None


class FunctionTool(Struct):
    """A tool: only functions are."""

    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(Struct):
    """A function by its name."""

    name: str


class NamedFunction(Struct, tag="function"):
    """This function is to be called."""

    function: FunctionName


class NamedFunctions(Struct):
    """Several of the tools."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunction], Meta(min_length=1)]


class AllowedTools(Struct, tag="allowed_tools"):
    """Only these tools may be called."""

    allowed_tools: NamedFunctions


class TextBlock(Struct, tag="text"):
    """Text."""

    text: str


class ThinkingBlock(Struct, tag="thinking"):
    """What the model thought."""

    thinking: str


class RedactedThinkingBlock(Struct, tag="redacted_thinking"):
    """Thoughts that nobody can read; they are left out."""


class ToolUseBlock(Struct, tag="tool_use"):
    """A call of the assistant's."""

    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(Struct, tag="tool_result"):
    """What a call brought."""

    tool_use_id: str
    content: str | list[TextBlock] | None = None


class UserTurn(Struct, tag="user", tag_field="role"):
    """What the user says, and what tools brought."""

    content: str | list[TextBlock | ToolResultBlock]


class AssistantTurn(Struct, tag="assistant", tag_field="role"):
    """What the assistant thought, said and called."""

    content: str | list[TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock]


class SystemTurn(Struct, tag="system", tag_field="role"):
    """What the operator says."""

    content: str | list[TextBlock]


class InputMessage(Struct):
    """A message."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[TextPart]
    type: Literal["message"] = "message"


class FunctionCall(Struct, tag="function_call"):
    """A call of the assistant's; the arguments are JSON text."""

    call_id: str
    name: str
    arguments: Annotated[str, Meta(examples=["{}"])]


class FunctionCallOutput(Struct, tag="function_call_output"):
    """What a call brought."""

    call_id: str
    output: str | list[TextPart]


class ReasoningText(Struct):
    """A piece of what the model thought."""

    text: str


class ReasoningItem(Struct, tag="reasoning"):
    """What the model thought."""

    content: list[ReasoningText] | None = None


PROMPTS: tuple[Any, ...] = (
    Text,
    Annotated[list[Text], Meta(min_length=1, max_length=MAX_PROMPTS)],
    TokenIds,
    Annotated[list[TokenIds], Meta(min_length=1, max_length=MAX_PROMPTS)],
)
"""A completion's prompt is one of these, and so on below."""
CHAT_MESSAGES: tuple[Any, ...] = (ChatMessage, CallingMessage, ThinkingMessage)
ANTHROPIC_MESSAGES: tuple[Any, ...] = (UserTurn, AssistantTurn, SystemTurn)
RESPONSE_ITEMS: tuple[Any, ...] = (InputMessage, FunctionCall, FunctionCallOutput, ReasoningItem)
TOOLS: Any = Annotated[list[FunctionTool], Meta(max_length=MAX_TOOLS)] | None
TOOL_CHOICE: Any = Literal["none", "auto", "required"] | NamedFunction | AllowedTools | None
