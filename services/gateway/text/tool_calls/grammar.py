"""Grammars that make a model call functions: in its own format, with arguments that follow their schemas. Pure.

Made for the chat endpoint; see ``services.gateway.text.lark``.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from services.gateway.text.lark import Rules, Thoughts, json_rule, literal, text_up_to, text_without
from services.gateway.text.reasoning import OPEN
from services.gateway.text.tool_calls.notation import Notation

_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Of arguments: what models are trained on, and nothing to get lost in."""


@dataclass(frozen=True)
class Function:
    """One that may be called."""

    name: str
    """Letters, digits, ``_`` and ``-``."""
    parameters: Mapping[str, Any]
    """A JSON schema."""
    is_strict: bool
    """Whether its schema must be followed to the letter; else what no grammar can express is left out."""


def forced_calls(
    notation: Notation, functions: Sequence[Function], marker_ids: Mapping[str, int], *, one: bool = False
) -> Rules:
    """``answer`` is at least one call, or exactly ``one``, and nothing else.

    ``marker_ids``: of markers that are tokens by themselves.
    """
    return {
        "answer": _row(notation, 1 if one else notation.most_calls, marker_ids),
        "call": _call(notation, functions, marker_ids),
    }


def strict_calls(
    notation: Notation, functions: Sequence[Function], marker_ids: Mapping[str, int], thoughts: Thoughts = "none"
) -> Rules:
    """``answer`` is any text in which what begins as a call is one. ``thoughts`` may come before it."""
    if not notation.begin:
        return _strict_unmarked_call(notation, functions, marker_ids, thoughts)
    begin = notation.begin
    rest = replace(
        notation,
        before=notation.before.removeprefix(begin),
        before_name=notation.before_name if notation.before else notation.before_name.removeprefix(begin),
    )
    return {
        "answer": "(opening calls)* TEXT?",
        "calls": _row(rest, notation.most_calls if notation.before else 1, marker_ids),
        "call": _call(rest, functions, marker_ids),
        "TEXT": text_without(begin, marker_ids),
        **text_up_to("opening", begin, marker_ids),
    }


def _strict_unmarked_call(
    notation: Notation, functions: Sequence[Function], marker_ids: Mapping[str, int], thoughts: Thoughts
) -> Rules:
    """Where calls have no mark: what opens with the character that opens a call is one, as is what follows the tag, and
    nothing comes behind it. That object's keys may come in any order, so no later character tells as surely."""
    first, tag = re.escape(notation.before_name[0]), notation.tag
    text = rf"/\s*([^\s{first}](?s:.*))?/"
    if thoughts == "perhaps" and OPEN not in marker_ids:
        text += rf" & ~/\s*{OPEN}(?s:.*)/"  # or thoughts could pass for text that is followed by anything
    return {
        "answer": "GAP? call | tagged GAP? call | TEXT?",
        "call": _call(notation, functions, marker_ids),
        "GAP": r"/\s{1,4}/",
        "TEXT": f"{text} & {text_without(tag, marker_ids)}",
        **text_up_to("tagged", tag, marker_ids, text),
    }


def _call(notation: Notation, functions: Sequence[Function], marker_ids: Mapping[str, int]) -> str:
    """One call of any of the functions."""
    written = []
    for function in functions:
        before = literal(notation.before_name + function.name + notation.before_arguments, marker_ids)
        guidance = {**_SPACING, "lenient": not function.is_strict}
        schema = json_rule({**function.parameters, "x-guidance": guidance})
        written.append(" ".join([before, schema, literal(notation.after_arguments, marker_ids)]))
    return "\n  | ".join(written)


def _row(notation: Notation, most_calls: int, marker_ids: Mapping[str, int]) -> str:
    """Some calls and what is around them."""
    more = f"({literal(notation.between, marker_ids)} call){{0,{most_calls - 1}}}" if most_calls > 1 else ""
    pieces = [literal(notation.before, marker_ids), "call", more, literal(notation.after, marker_ids)]
    return " ".join(filter(None, pieces))
