"""What the answer to a chat may be, and how it is read: thoughts, then text or tool calls. Called by ``chat``.

A constraint holds for the answer; thoughts before it are free. Calls that a request forces are a constraint, and so are
those of functions that are ``strict``.
"""

from collections.abc import Mapping

from services.gateway.api.constraints import Asked
from services.gateway.api.errors import invalid
from services.gateway.api.tools import ToolUse
from services.gateway.text.dialect import Dialect
from services.gateway.text.lark import Rules, Thoughts, answer_of, behind_thoughts, either
from services.gateway.text.message_parser import MessageFormat
from services.gateway.text.tokenizer import Tokenizer
from services.gateway.text.tool_calls.formats import ToolFormat
from services.gateway.text.tool_calls.grammar import Function, forced_calls, strict_calls
from shared.wire.sampling import MAX_CONSTRAINT_CHARS


def message_format_of(dialect: Dialect, tool_use: ToolUse | None, *, inside: bool) -> MessageFormat:
    """``inside``: the prompt ends inside the model's thoughts. Raises ApiError (400) where calls cannot be read."""
    if tool_use is None:
        return MessageFormat(reasoning=dialect.reasoning, inside=inside)
    if dialect.tools is None:
        raise invalid("this server takes no tool calls from its model (see --tool-call-parser)", "tools")
    return MessageFormat(
        tools=dialect.tools,
        names=frozenset(tool_use.allowed),
        parallel=tool_use.parallel,
        is_named=tool_use.mode == "named",
        reasoning=dialect.reasoning,
        inside=inside,
    )


def constraint_of_chat(
    tokenizer: Tokenizer, asked: Asked | None, tool_use: ToolUse | None, message_format: MessageFormat
) -> Asked | None:
    """What the output must be; ``asked`` is what the request says of its text. Raises ApiError (400)."""
    marker_ids = tokenizer.added_ids(message_format.markers)
    thoughts: Thoughts = "none"
    if message_format.reasoning:
        thoughts = "open" if message_format.inside else "perhaps"
    rules, param = None, "tools"
    if tool_use is not None and message_format.tools is not None:
        rules = _calls(message_format.tools, tool_use, marker_ids, thoughts, is_text_free=asked is None)
    if asked is not None and (tool_use is None or tool_use.mode == "auto"):
        if rules is None and thoughts == "none":
            return asked
        text, param = answer_of(asked.constraint), asked.param
        rules = text if rules is None else either(rules, text)
    if rules is None:
        return None
    constraint = behind_thoughts(rules, thoughts, marker_ids)
    if len(constraint.source) > MAX_CONSTRAINT_CHARS:
        raise invalid(f"{param}: the schemas have too many characters to be kept to", param)
    return Asked(constraint, param)


def _calls(
    tool_format: ToolFormat, tool_use: ToolUse, marker_ids: Mapping[str, int], thoughts: Thoughts, *, is_text_free: bool
) -> Rules | None:
    """The rules of an answer with calls; None where anything may be written."""
    notation = tool_format.notation
    functions = [
        Function(function["name"], function["parameters"], function["name"] in tool_use.strict)
        for function in tool_use.functions
        if function["name"] in tool_use.allowed
    ]
    if tool_use.mode == "auto" and is_text_free:
        if not any(function.is_strict for function in functions):
            return None
        return strict_calls(notation, functions, marker_ids, thoughts)
    one = tool_use.mode == "named" or not tool_use.parallel
    return forced_calls(notation, functions, marker_ids, one=one)
