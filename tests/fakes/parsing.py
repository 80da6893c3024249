"""Reads a text in pieces and writes what came of it as plain values."""

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from services.gateway.text.parts import Arguments, CallStart, Content, Parser, Part, Reasoning, joined


def parts_of(parser: Parser, text: str, cuts: Iterable[int] = ()) -> list[Part]:
    """The joined parts of ``text``, fed in the pieces between ``cuts``."""
    parts: list[Part] = []
    for start, end in pairwise([0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]):
        parts += parser.feed(text[start:end])
    return joined(parts + parser.flush())


def plain(parts: Iterable[Part]) -> list[Any]:
    """Text as it is, thoughts as ("think", text), each call as (name, arguments)."""
    result: list[Any] = []
    for part in parts:
        match part:
            case Content(text):
                result.append(text)
            case Reasoning(text):
                result.append(("think", text))
            case CallStart(_, _, name):
                result.append((name, ""))
            case Arguments(_, text):
                result[-1] = (result[-1][0], result[-1][1] + text)
    return result
