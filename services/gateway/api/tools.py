"""``tools``, ``tool_choice`` and ``parallel_tool_calls`` of a chat, checked. Called by the chat endpoint; pure."""

import re
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from services.gateway.api.errors import ApiError, invalid
from services.gateway.api.json_bounds import check_bounds
from services.gateway.api.schema import ChatRequest

MAX_TOOLS = 128
MAX_TOOLS_BYTES = 512 * 1024
NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
"""What OpenAI allows; nothing in it means anything to a template or a grammar."""
NO_PARAMETERS = {"type": "object", "properties": {}}

Mode = Literal["auto", "required", "named"]


@dataclass(frozen=True)
class ToolUse:
    """What a request says of tools: there is one where the model may call any."""

    functions: list[dict[str, Any]]
    """Each with ``name``, ``description`` and ``parameters``, a JSON schema."""
    allowed: tuple[str, ...]
    """Names of those that may be called."""
    strict: frozenset[str]
    """Names of those whose arguments must follow their schema."""
    mode: Mode
    parallel: bool


def tool_use_of(fields: ChatRequest) -> ToolUse | None:
    """None where no call is wanted. Raises ApiError (400)."""
    functions = _functions(fields.tools)
    mode, allowed = _choice(fields.tool_choice, tuple(functions))
    if mode == "none":
        return None
    return ToolUse(
        functions=[
            {key: function[key] for key in ("name", "description", "parameters")} for function in functions.values()
        ],
        allowed=allowed,
        strict=frozenset(name for name, function in functions.items() if function["strict"]),
        mode=mode,
        parallel=fields.parallel_tool_calls is not False,
    )


def _functions(tools: Any) -> dict[str, dict[str, Any]]:
    """By name."""
    if tools is None:
        return {}
    if not isinstance(tools, list):
        raise _wrong("tools must be a list")
    if len(tools) > MAX_TOOLS:
        raise _wrong(f"tools may hold at most {MAX_TOOLS} functions, not {len(tools)}")
    check_bounds(tools, "tools")
    functions: dict[str, dict[str, Any]] = {}
    for index, tool in enumerate(tools):
        function = _function(tool, f"tools[{index}]")
        if functions.setdefault(function["name"], function) is not function:
            raise _wrong(f"tools[{index}]: there are two functions named {function['name']!r}")
    if len(msgspec.json.encode(tools)) > MAX_TOOLS_BYTES:
        raise _wrong(f"tools may have at most {MAX_TOOLS_BYTES} bytes of JSON")
    return functions


def _function(tool: Any, place: str) -> dict[str, Any]:
    if not isinstance(tool, dict) or not isinstance(tool.get("type"), str):
        raise _wrong(f"{place} must be an object with a type")
    if tool["type"] != "function":
        raise _wrong(f"{place}: tools of type {tool['type'][:40]!r} are not supported, only functions are")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise _wrong(f"{place}.function must be an object")
    name = function.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise _wrong(f"{place}.function.name must be 1 to 64 letters, digits, underscores and dashes")
    description = function.get("description")
    if not isinstance(description, str | None):
        raise _wrong(f"{place}.function.description must be a string")
    parameters = function.get("parameters")
    if parameters is None:
        parameters = NO_PARAMETERS
    if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
        raise _wrong(f"{place}.function.parameters must be a JSON schema of type object")
    strict = function.get("strict")
    if not isinstance(strict, bool | None):
        raise _wrong(f"{place}.function.strict must be a boolean")
    return {"name": name, "description": description or "", "parameters": parameters, "strict": bool(strict)}


def _choice(choice: Any, names: tuple[str, ...]) -> tuple[Mode | Literal["none"], tuple[str, ...]]:
    """How tools are to be used, and the names of those that may be."""
    if choice == "none" or (choice is None and not names):
        return "none", ()
    if not names:
        raise invalid("tool_choice needs tools", "tool_choice")
    match choice:
        case None | "auto":
            return "auto", names
        case "required":
            return "required", names
        case {"type": "function", "function": {"name": str(name)}}:
            return "named", (_known(name, names),)
        case {"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required" as mode, "tools": [*tools]}}:
            return mode, _allowed(tools, names)
    raise invalid(
        'tool_choice must be \'none\', \'auto\', \'required\', {"type": "function", "function": {"name": ...}} or '
        "allowed_tools with a mode and a list of functions",
        "tool_choice",
    )


def _allowed(tools: list[Any], names: tuple[str, ...]) -> tuple[str, ...]:
    allowed = []
    for tool in tools:
        match tool:
            case {"type": "function", "function": {"name": str(name)}}:
                allowed.append(_known(name, names))
            case _:
                raise invalid("the tools of tool_choice must each be a function with a name", "tool_choice")
    if not allowed:
        raise invalid("the tools of tool_choice must not be empty", "tool_choice")
    return tuple(dict.fromkeys(allowed))


def _known(name: str, names: tuple[str, ...]) -> str:
    if name not in names:
        raise invalid(f"tool_choice names the function {name[:64]!r}, which is not among the tools", "tool_choice")
    return name


def _wrong(message: str) -> ApiError:
    return invalid(message, "tools")
