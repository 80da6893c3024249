"""Requests of ``/v1/messages`` (Anthropic's Messages API), and how each reads as a chat request. Pure."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from services.gateway.api.errors import invalid
from services.gateway.api.history import History
from services.gateway.api.json_bounds import check_bounds
from services.gateway.api.prompts import invalid_at, string_at, text_of, unsupported_part
from services.gateway.api.schema import MAX_STOPS, Share, Stop

DROPPED_BLOCKS = ("redacted_thinking",)


class ToolChoice(Struct):
    """``tool_choice``."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Struct):
    """``thinking``. Whether a model thinks is the model's affair: a budget for it cannot be kept."""

    type: Literal["disabled", "adaptive", "enabled"]


class OutputFormat(Struct):
    """``output_config.format``."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Struct):
    """``output_config``."""

    effort: Annotated[str, Meta(max_length=64)] | None = None
    format: OutputFormat | None = None


class CountTokensRequest(Struct, kw_only=True):
    """``POST /v1/messages/count_tokens``."""

    model: str | None = None
    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """``POST /v1/messages``."""

    max_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    stop_sequences: Annotated[list[Stop], Meta(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None


CHAT_NAMES = {"stop": "stop_sequences", "response_format": "output_config.format"}
"""What a field of the chat request is called here."""


def chat_fields(request: CountTokensRequest) -> dict[str, Any]:
    """The same as fields of ``/v1/chat/completions``. Raises ApiError (400)."""
    if request.thinking is not None and request.thinking.type == "enabled":
        raise invalid("thinking with a budget is not supported", "thinking", "unsupported_parameter")
    check_bounds(request.messages, "messages")
    history = History()
    if request.system:
        history.say("system", text_of(request.system, "system"))
    for index, message in enumerate(request.messages):
        _add(history, message, f"messages[{index}]")
    fields: dict[str, Any] = {"model": request.model, "messages": history.messages}
    if request.messages[-1].get("role") == "assistant":
        fields["continue_final_message"] = True  # what the client wrote for the assistant is how the answer begins
    if request.tools:
        fields["tools"] = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(request.tools)]
    if request.tool_choice is not None:
        fields["tool_choice"] = _tool_choice(request.tool_choice)
        if request.tool_choice.disable_parallel_tool_use is not None:
            fields["parallel_tool_calls"] = not request.tool_choice.disable_parallel_tool_use
    output = request.output_config or OutputConfig()
    fields["reasoning_effort"] = output.effort
    if output.format is not None:
        schema = {"name": "output", "schema": output.format.schema, "strict": True}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    if isinstance(request, MessagesRequest):
        fields["stop"] = request.stop_sequences or None
        for name in ("max_tokens", "stream", "temperature", "top_p", "top_k"):
            fields[name] = getattr(request, name)
    return fields


def _add(history: History, message: dict[str, Any], place: str) -> None:
    role = message.get("role")
    if role not in ("user", "assistant", "system"):
        raise invalid_at(f"{place}.role", "must be user, assistant or system")
    content = message.get("content")
    if not isinstance(content, list):
        history.say(role, text_of(content, f"{place}.content"))
        return
    blocks = [_block(block, f"{place}.content[{index}]") for index, block in enumerate(content)]
    if role == "assistant":
        _add_turn(history, blocks, place)
    else:
        _add_results_and_text(history, role, blocks, place)


def _block(block: Any, place: str) -> dict[str, Any]:
    if not isinstance(block, dict) or not isinstance(block.get("type"), str):
        raise invalid_at(place, "must be an object with a type")
    return block


def _add_turn(history: History, blocks: Sequence[dict[str, Any]], place: str) -> None:
    """What the assistant thought, said and called."""
    text = ""
    calls: list[tuple[str, str, str]] = []
    for index, block in enumerate(blocks):
        here = f"{place}.content[{index}]"
        match block["type"]:
            case "text":
                text += text_of([block], f"{place}.content")
            case "thinking":
                history.think(string_at(block, "thinking", here))
            case "tool_use":
                arguments = block.get("input")
                if not isinstance(arguments, dict):
                    raise invalid_at(f"{here}.input", "must be an object")
                call_id, name = string_at(block, "id", here), string_at(block, "name", here)
                calls.append((call_id, name, msgspec.json.encode(arguments).decode()))
            case kind if kind not in DROPPED_BLOCKS:
                raise unsupported_part(kind, here)
    history.say("assistant", text)
    for call in calls:
        history.call(*call)


def _add_results_and_text(history: History, role: str, blocks: Sequence[dict[str, Any]], place: str) -> None:
    """Results of tools are messages of their own; the text around them is the role's."""
    texts: list[str] = []

    def say() -> None:
        if texts:
            history.say(role, "".join(texts))
            texts.clear()

    for index, block in enumerate(blocks):
        here = f"{place}.content[{index}]"
        match block["type"]:
            case "text":
                texts.append(string_at(block, "text", here))
            case "tool_result" if role == "user":
                say()
                content = block.get("content")
                result = "" if content is None else text_of(content, f"{here}.content")
                history.answer(string_at(block, "tool_use_id", here), result)
            case kind:
                raise unsupported_part(kind, here)
    if not blocks:
        texts.append("")
    say()


def _tool(tool: dict[str, Any], place: str) -> dict[str, Any]:
    kind = tool.get("type")
    if kind not in (None, "custom"):
        raise invalid_at(f"{place}.type", f"{str(kind)[:40]!r} is not supported: only tools of the client are")
    function = {
        "name": tool.get("name"),
        "description": tool.get("description"),
        "parameters": tool.get("input_schema"),
    }
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def _tool_choice(choice: ToolChoice) -> Any:
    if choice.type == "tool":
        if not choice.name:
            raise invalid("tool_choice.name is needed with type tool", "tool_choice")
        return {"type": "function", "function": {"name": choice.name}}
    return {"auto": "auto", "any": "required", "none": "none"}[choice.type]
