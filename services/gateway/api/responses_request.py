"""Requests of ``/v1/responses`` (OpenAI's Responses API), and how each reads as a chat request. Pure."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from services.gateway.api.errors import invalid
from services.gateway.api.history import History
from services.gateway.api.json_bounds import check_bounds
from services.gateway.api.prompts import invalid_at, string_at, text_of
from services.gateway.api.schema import NumLogprobs, Share, is_json

LOGPROBS = "message.output_text.logprobs"
"""The one thing of ``include`` that an answer can have more."""


class TextFormat(Struct):
    """``text.format``."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class TextConfig(Struct):
    """``text``."""

    format: TextFormat | None = None
    verbosity: str | None = None


class Reasoning(Struct):
    """``reasoning``."""

    effort: Annotated[str, Meta(max_length=64)] | None = None
    summary: str | None = None


class FunctionChoice(Struct):
    """``tool_choice``, when it names the function to be called."""

    type: Literal["function"]
    name: str


class ResponsesRequest(Struct, kw_only=True):
    """``POST /v1/responses``. A field that is null is as one that is absent."""

    model: str | None = None
    input: str | Annotated[list[dict[str, Any]], Meta(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Share | None = None
    top_logprobs: NumLogprobs | None = None
    include: list[str] | None = None
    stream: bool | None = None
    text: TextConfig | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    metadata: Annotated[dict[str, Annotated[str, Meta(max_length=512)]], Meta(max_length=16)] | None = None


CHAT_NAMES = {"messages": "input", "max_tokens": "max_output_tokens", "response_format": "text.format"}
"""What a field of the chat request is called here."""


def chat_fields(request: ResponsesRequest) -> dict[str, Any]:
    """The same as fields of ``/v1/chat/completions``. Raises ApiError (400)."""
    check_bounds(request.input, "input")
    history = History()
    if request.instructions:
        history.say("system", request.instructions)
    if isinstance(request.input, str):
        history.say("user", request.input)
    else:
        for index, item in enumerate(request.input):
            _add(history, item, f"input[{index}]")
    fields: dict[str, Any] = {"messages": history.messages, "max_tokens": request.max_output_tokens}
    for name in ("model", "stream", "temperature", "top_p", "parallel_tool_calls"):
        fields[name] = getattr(request, name)
    if request.top_logprobs or LOGPROBS in (request.include or ()):
        fields["logprobs"] = True
        fields["top_logprobs"] = request.top_logprobs
    if request.text is not None and request.text.format is not None:
        fields["response_format"] = _response_format(request.text.format)
    if request.tools:
        fields["tools"] = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(request.tools)]
    if request.tool_choice is not None:
        fields["tool_choice"] = _tool_choice(request.tool_choice)
    if request.reasoning is not None:
        fields["reasoning_effort"] = request.reasoning.effort
    return fields


def _add(history: History, item: dict[str, Any], place: str) -> None:
    match item.get("type", "message"):
        case "message":
            role = item.get("role")
            if role not in ("user", "assistant", "system", "developer"):
                raise invalid_at(f"{place}.role", "must be user, assistant, system or developer")
            history.say(role, text_of(item.get("content"), f"{place}.content"))
        case "function_call":
            arguments = string_at(item, "arguments", place)
            if not is_json(arguments):
                raise invalid_at(f"{place}.arguments", "is not valid JSON")
            history.call(string_at(item, "call_id", place), string_at(item, "name", place), arguments)
        case "function_call_output":
            history.answer(string_at(item, "call_id", place), text_of(item.get("output"), f"{place}.output"))
        case "reasoning":
            if text := _reasoning_text(item, place):
                history.think(text)
        case kind:
            raise invalid_at(f"{place}.type", f"{str(kind)[:40]!r} is not supported")


def _reasoning_text(item: dict[str, Any], place: str) -> str:
    content = [] if item.get("content") is None else item["content"]
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise invalid_at(f"{place}.content", "must be a list of parts")
    return "".join(string_at(part, "text", f"{place}.content[{index}]") for index, part in enumerate(content))


def _response_format(wanted: TextFormat) -> dict[str, Any]:
    if wanted.type != "json_schema":
        return {"type": wanted.type}
    if wanted.schema is None:
        raise invalid("text.format.schema is needed with type json_schema", "text")
    schema = {"name": wanted.name, "schema": wanted.schema, "strict": wanted.strict}
    return {"type": "json_schema", "json_schema": {name: value for name, value in schema.items() if value is not None}}


def _tool(tool: dict[str, Any], place: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise invalid_at(f"{place}.type", f"{str(tool.get('type'))[:40]!r} is not supported: only functions are")
    names = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: tool[name] for name in names if tool.get(name) is not None}}


def _tool_choice(choice: str | FunctionChoice) -> Any:
    if isinstance(choice, str):
        return choice
    return {"type": "function", "function": {"name": choice.name}}
