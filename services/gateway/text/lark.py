"""Pieces of grammars in the dialect of Lark that executors compile (``shared.constraints``). Pure.

Used by the grammars of tool calls and by what puts thoughts before an answer.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, Literal

from services.gateway.text.reasoning import CLOSE, OPEN
from shared.constraints import JSON_WHITESPACE
from shared.wire.sampling import Constraint

Thoughts = Literal["none", "perhaps", "open"]
"""Before the answer: none; some in tags if the model likes; some that the prompt has begun."""
Rules = dict[str, str]
"""By name."""


def literal(text: str, marker_ids: Mapping[str, int]) -> str:
    """``text`` itself; markers in it that are tokens by themselves have no text, only ids."""
    pieces = re.split("|".join(f"({re.escape(marker)})" for marker in marker_ids) or "$", text)
    return " ".join(
        f"<[{marker_ids[piece]}]>" if piece in marker_ids else json.dumps(piece) for piece in pieces if piece
    )


def text_up_to(name: str, end: str, marker_ids: Mapping[str, int], text: str = "/(?s:.*)/") -> Rules:
    """The rule ``name``: text of a pattern, any unless given, and ``end`` behind it."""
    if end in marker_ids:
        return {name: f"{name.upper()}_TEXT? {literal(end, marker_ids)}", f"{name.upper()}_TEXT": text}
    return {f"{name}[suffix={json.dumps(end)}]": text}


def text_without(marker: str, marker_ids: Mapping[str, int]) -> str:
    """The pattern of text, not empty, in which the marker does not come."""
    return "/(?s:.+)/" if marker in marker_ids else f"/(?s:.+)/ & ~/(?s:.*{re.escape(marker)}.*)/"


def behind_thoughts(rules: Rules, thoughts: Thoughts, marker_ids: Mapping[str, int]) -> Constraint:
    """The constraint that thoughts come first, which are free, and then what the rule ``answer`` says."""
    start = {
        "none": "answer",
        "perhaps": f"({literal(OPEN, marker_ids)} thoughts)? answer",
        "open": "thoughts answer",
    }[thoughts]
    all_rules = {"start": start, **rules}
    if thoughts != "none":
        all_rules |= {"thoughts": "thought SPACE?", "SPACE": r"/\s{1,4}/", **text_up_to("thought", CLOSE, marker_ids)}
    return Constraint("lark", "\n".join(f"{name}: {rule}" for name, rule in all_rules.items()))


def either(calls: Rules, text: Rules) -> Rules:
    """``answer`` is that of the one or that of the other."""
    return {**calls, **text, "answer": "called | said", "called": calls["answer"], "said": text["answer"]}


def answer_of(constraint: Constraint) -> Rules:
    """A constraint of any kind as the rule ``answer``."""
    match constraint.kind:
        case "json_schema":
            return {"answer": json_rule(json.loads(constraint.source))}
        case "regex":
            escaped = re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", constraint.source).replace("\n", r"\n")
            return {"answer": "ANSWER", "ANSWER": f"/{escaped}/"}
        case "lark":
            return {"answer": f"%lark {{\n{constraint.source}\n}}"}


def json_rule(schema: Mapping[str, Any]) -> str:
    """JSON that follows a schema, with bounded whitespace unless the schema says otherwise."""
    guidance = schema.get("x-guidance") or {"whitespace_pattern": JSON_WHITESPACE}
    return f"%json {json.dumps({**schema, 'x-guidance': guidance})}"
