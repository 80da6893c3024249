"""Each format of tool calls: what is read from whole texts, and that pieces of them give the same."""

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.text.parts import Arguments, CallStart, Content, Part
from services.gateway.text.tool_calls.hermes import HermesParser
from services.gateway.text.tool_calls.json_extent import JsonExtent
from services.gateway.text.tool_calls.llama3 import Llama3Parser
from services.gateway.text.tool_calls.mistral import MistralParser
from services.gateway.text.tool_calls.parser import MAX_HELD_CHARS, ToolParser
from tests.fakes.parsing import parts_of, plain

KINDS: list[type[ToolParser]] = [HermesParser, Llama3Parser, MistralParser]
ARGUMENTS = '{"a": "x</tool_call>\\"}[", "b": [1, {"ü": "😀;"}]}'
CALL = f'{{"name": "f", "arguments": {ARGUMENTS}}}'
LATE = '{"arguments": {"q": 1}, "id": 3, "name": "g"}'


def parser(kind: type[ToolParser], **options: Any) -> ToolParser:
    count = itertools.count()
    return kind(("f", "g"), lambda: f"id-{next(count)}", **options)


WHOLE: list[tuple[type[ToolParser], str, list[Any]]] = [
    (HermesParser, f"<tool_call>\n{CALL}\n</tool_call>", [("f", ARGUMENTS)]),
    (HermesParser, f"Well.\n<tool_call>{LATE}</tool_call>\n", ["Well.", ("g", '{"q": 1}')]),
    (
        HermesParser,
        f"<tool_call>{CALL}</tool_call>\n<tool_call>\n{LATE}\n</tool_call> So.",
        [("f", ARGUMENTS), ("g", '{"q": 1}'), "So."],
    ),
    (HermesParser, f"<tool_call>{CALL}", [("f", ARGUMENTS)]),
    (HermesParser, f"<tool_call>{CALL}\n</tool_ca", [("f", ARGUMENTS)]),
    (HermesParser, f"<tool_call>{CALL}</tool_case", [("f", ARGUMENTS), "</tool_case"]),
    (HermesParser, '<tool_call>{"name": "f", "arguments": {"a": "cut', [("f", '{"a": "cut')]),
    (HermesParser, '<tool_call>{"name": "f"}</tool_call>', [("f", "{}")]),
    (HermesParser, '<tool_call>{"name": "f", "arguments": null}</tool_call>', [("f", "{}")]),
    (HermesParser, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', [("f", '{"a": 1}')]),
    (Llama3Parser, '{"name": "f", "parameters": {"a": 1}}', [("f", '{"a": 1}')]),
    (Llama3Parser, f"<|python_tag|>{CALL}; {LATE}", [("f", ARGUMENTS), ("g", '{"q": 1}')]),
    (Llama3Parser, f"{CALL}\n{LATE}\n", [("f", ARGUMENTS), ("g", '{"q": 1}')]),
    (Llama3Parser, f"Well. <|python_tag|>{CALL}", ["Well.", ("f", ARGUMENTS)]),
    (MistralParser, f"[TOOL_CALLS] [{CALL}, {LATE}]", [("f", ARGUMENTS), ("g", '{"q": 1}')]),
    (MistralParser, f"Well.[TOOL_CALLS][{CALL}]</s>", ["Well.", ("f", ARGUMENTS), "</s>"]),
    (MistralParser, f"[TOOL_CALLS]f[ARGS]{ARGUMENTS}[TOOL_CALLS]g[ARGS]{{}}", [("f", ARGUMENTS), ("g", "{}")]),
    (MistralParser, "[TOOL_CALLS]f[CALL_ID]a1b2c3d4e[ARGS]{}", [("f", "{}")]),
]
NO_CALLS: list[tuple[type[ToolParser], str]] = [
    *((kind, text) for kind in KINDS for text in ("", "plain", " < [ {", '{"a": 1}\n', "[1, 2]", "\n\n")),
    (HermesParser, "<tool_call>not JSON</tool_call>"),
    (HermesParser, "<tool_call>"),
    (HermesParser, '<tool_call>\n{"name": "f", "argu'),
    (HermesParser, ' <tool_call> {"name": "unknown", "arguments": {}}\n</tool_call>\n'),
    (HermesParser, '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
    (HermesParser, '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    (HermesParser, '<tool_call>{"name": "f", "arguments": "no JSON"}</tool_call>'),
    (HermesParser, '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"\\ud800\\"}"}</tool_call>'),  # half a character
    (HermesParser, '<tool_call>{"arguments": {"a": 1}}</tool_call>'),
    (HermesParser, '<tool_call>{"na\\qme": "f"}</tool_call>'),
    (HermesParser, "<tool_call>" + "[" * 5000),
    (HermesParser, '<tool_call>{"arguments": {"a": "' + "b" * MAX_HELD_CHARS + '"}, "name": "f"}</tool_call>'),
    (Llama3Parser, '{"name": "Ann", "parameters": {}}'),
    (Llama3Parser, f"Here it comes: {CALL}"),
    (Llama3Parser, '<|python_tag|>brave_search.call(query="x")'),
    (MistralParser, "[TOOL_CALLS] nothing"),
    (MistralParser, "[TOOL_CALLS]unknown[ARGS]{}"),
    (MistralParser, "[TOOL_CALLS][]"),
    (MistralParser, "[TOOL_CALLS]f[ARGS]"),
]


@pytest.mark.parametrize(("kind", "text", "expected"), WHOLE)
def test_calls(kind: type[ToolParser], text: str, expected: list[Any]) -> None:
    parts = parts_of(parser(kind), text)
    assert plain(parts) == expected
    starts = [part for part in parts if isinstance(part, CallStart)]
    assert [(start.index, start.call_id) for start in starts] == [(i, f"id-{i}") for i in range(len(starts))]


@pytest.mark.parametrize(("kind", "text"), NO_CALLS)
def test_what_is_no_call_leaves_as_content(kind: type[ToolParser], text: str) -> None:
    assert "".join(plain(parts_of(parser(kind), text))) == text


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        (HermesParser, f"<tool_call>{CALL[:-1]} oops}}</tool_call>", [("f", ARGUMENTS), "oops}</tool_call>"]),
        (HermesParser, f"<tool_call>no <tool_call>{LATE}", ["<tool_call>no", ("g", '{"q": 1}')]),
        (Llama3Parser, f"{CALL}; then", [("f", ARGUMENTS), "; then"]),
        (Llama3Parser, f"{CALL} and more", [("f", ARGUMENTS), "and more"]),
        (MistralParser, f"[TOOL_CALLS][{CALL}, oops]", [("f", ARGUMENTS), ", oops]"]),
    ],
)
def test_what_is_broken_behind_a_call_leaves_as_content(kind: type[ToolParser], text: str, expected: list[Any]) -> None:
    assert plain(parts_of(parser(kind), text)) == expected


@pytest.mark.parametrize(
    ("kind", "text"),
    [(kind, text) for kind, text, _ in WHOLE] + [(kind, text) for kind, text in NO_CALLS if len(text) < 1000],
)
def test_every_cut_gives_the_same(kind: type[ToolParser], text: str) -> None:
    whole = parts_of(parser(kind), text)
    assert parts_of(parser(kind), text, range(len(text))) == whole
    assert all(parts_of(parser(kind), text, [cut]) == whole for cut in range(len(text)))


MARKERS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>")
WORDS = ('"name"', '"f"', '"g"', '"arguments"', '"parameters"', "f", "null", CALL)
SCRAPS = st.sampled_from([*MARKERS, *WORDS, *';,[]{}"\\:1ü< \n'])


@pytest.mark.parametrize("kind", KINDS)
@given(scraps=st.lists(SCRAPS, max_size=25), cuts=st.sets(st.integers(1, 200), max_size=10))
def test_any_text_in_any_pieces(kind: type[ToolParser], scraps: list[str], cuts: set[int]) -> None:
    text = "".join(scraps)
    whole = parts_of(parser(kind), text)
    assert parts_of(parser(kind), text, cuts) == whole
    if not any(isinstance(part, CallStart) for part in whole):
        assert "".join(plain(whole)) == text


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


def written(kind: type[ToolParser], calls: list[tuple[str, str]]) -> str:
    if kind is HermesParser:
        return "\n".join(f'<tool_call>\n{{"name": "{f}", "arguments": {a}}}\n</tool_call>' for f, a in calls)
    if kind is Llama3Parser:
        return "; ".join(f'{{"name": "{f}", "parameters": {a}}}' for f, a in calls)
    return "".join(f"[TOOL_CALLS]{f}[ARGS]{a}" for f, a in calls)


@pytest.mark.parametrize("kind", KINDS)
@given(
    calls=st.lists(
        st.tuples(st.sampled_from("fg"), st.dictionaries(st.text(max_size=6), VALUES)), min_size=1, max_size=3
    ),
    cuts=st.sets(st.integers(1, 300), max_size=12),
    ascii_only=st.booleans(),
)
def test_whatever_the_arguments_they_arrive(
    kind: type[ToolParser], calls: list[tuple[str, dict[str, Any]]], cuts: set[int], ascii_only: bool
) -> None:
    told = [(name, json.dumps(arguments, ensure_ascii=ascii_only)) for name, arguments in calls]
    assert plain(parts_of(parser(kind), written(kind, told), cuts)) == told


def test_only_what_may_become_a_call_is_held_back_and_arguments_leave_as_they_come() -> None:
    state = parser(HermesParser)

    def feed(*pieces: str) -> list[list[Part]]:
        return [state.feed(piece) for piece in pieces]

    assert feed("Hi", " there", ".\n", "<to", "ols>", " <") == [
        [Content("Hi")],
        [Content(" there")],
        [Content(".")],
        [],
        [Content("\n<tools>")],
        [],
    ]
    assert feed("tool_call>", '{"name": "f', '", "arguments": ', '{"a"', ": 1", "}", "}", "</tool_call>") == [
        [],
        [],
        [],
        [CallStart(0, "id-0", "f"), Arguments(0, '{"a"')],
        [Arguments(0, ": 1")],
        [Arguments(0, "}")],
        [],
        [],
    ]
    assert state.flush() == []


@pytest.mark.parametrize("piece", ['<tool_call>{"a": [', '<tool_call>{"a": "', "<tool_call>{", "[TOOL_CALLS][{[", "{"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_hostile_text_is_read_once(kind: type[ToolParser], piece: str, monkeypatch: pytest.MonkeyPatch) -> None:
    num_chars = 0
    end_in = JsonExtent.end_in

    def counted(extent: JsonExtent, text: str) -> int:
        nonlocal num_chars
        num_chars += len(text)
        return end_in(extent, text)

    monkeypatch.setattr(JsonExtent, "end_in", counted)
    text = piece * (200_000 // len(piece))
    assert "".join(plain(parts_of(parser(kind), text, range(0, len(text), 50)))) == text
    assert num_chars <= 2 * len(text)


def test_long_arguments_may_come_before_the_name() -> None:
    arguments = json.dumps({"text": "a" * 50_000})
    text = f'<tool_call>{{"arguments": {arguments}, "name": "f"}}</tool_call>'
    assert plain(parts_of(parser(HermesParser), text, range(0, len(text), 500))) == [("f", arguments)]


def test_calls_after_the_first_are_dropped_unless_they_may_be_parallel() -> None:
    text = f"<tool_call>{CALL}</tool_call><tool_call>{LATE}</tool_call>"
    assert plain(parts_of(parser(HermesParser, parallel=False), text)) == [("f", ARGUMENTS)]
