"""Grammars of calls: what they let through is read back as calls by the format's own parser, and nothing else is let
through. Compiled by what executors compile them with.
"""

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest
from llguidance import LLTokenizer

from services.gateway.text.lark import answer_of, behind_thoughts
from services.gateway.text.parts import CallStart
from services.gateway.text.tool_calls.formats import HERMES, LLAMA3, MISTRAL, MISTRAL_LIST, ToolFormat, format_of
from services.gateway.text.tool_calls.grammar import Function, forced_calls, strict_calls
from shared import fake_model
from shared.constraints import ConstraintError, compile_constraint, read_vocabulary
from shared.wire.sampling import Constraint
from tests.fakes.parsing import parts_of, plain

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
LOOK = Function("look", {**CITY, "additionalProperties": False}, False)
NOTHING = Function("no-thing_1", {"type": "object", "properties": {}, "additionalProperties": False}, False)
FORMATS = [HERMES, LLAMA3, MISTRAL, MISTRAL_LIST]
ULM = ("look", '{"city": "Ulm"}')


@pytest.fixture(name="vocabulary", scope="module")
def _vocabulary() -> LLTokenizer:
    return read_vocabulary(fake_model.facts(), None)


def ids_of(text: str, marker_ids: Mapping[str, int]) -> list[int]:
    """The fake model's tokens: a byte each, and markers that are tokens by themselves."""
    pieces = re.split("|".join(f"({re.escape(marker)})" for marker in marker_ids) or "$", text)
    return [i for piece in pieces if piece for i in ([marker_ids[piece]] if piece in marker_ids else piece.encode())]


def may_be(
    constraint: Constraint, vocabulary: LLTokenizer, text: str, marker_ids: Mapping[str, int] = MappingProxyType({})
) -> bool:
    """Whether it takes all of ``text`` and lets it end there."""
    matcher = compile_constraint(constraint, vocabulary)
    return all(matcher.consume_token(i) for i in ids_of(text, marker_ids)) and matcher.is_accepting()


def written(kind: ToolFormat, *calls: tuple[str, str]) -> str:
    notation = kind.notation
    told = [notation.before_name + f + notation.before_arguments + a + notation.after_arguments for f, a in calls]
    return notation.before + notation.between.join(told) + notation.after


@pytest.mark.parametrize("kind", FORMATS)
def test_what_is_forced_is_calls_as_the_parser_reads_them(kind: ToolFormat, vocabulary: LLTokenizer) -> None:
    constraint = behind_thoughts(forced_calls(kind.notation, [LOOK, NOTHING], {}), "none", {})
    most_calls = kind.notation.most_calls
    for calls in ([ULM], [ULM, ("no-thing_1", "{}")][:most_calls], [ULM] * most_calls):
        text = written(kind, *calls)
        assert may_be(constraint, vocabulary, text)
        assert plain(parts_of(kind.parser(["look", "no-thing_1"], str), text)) == calls
    for text in (
        "",
        "Well.",
        written(kind, ("other", "{}")),
        written(kind, ("look", "{}")),
        written(kind, ("look", '{"city": 5}')),
        written(kind, ("no-thing_1", '{"a": 1}')),
        written(kind, ULM) + " Well.",
        written(kind, *[ULM] * (most_calls + 1)),
    ):
        assert not may_be(constraint, vocabulary, text), text
    one = behind_thoughts(forced_calls(kind.notation, [LOOK], {}, one=True), "none", {})
    assert may_be(one, vocabulary, written(kind, ULM))
    assert not may_be(one, vocabulary, written(kind, ULM, ULM))


def test_thoughts_come_before_what_is_forced(vocabulary: LLTokenizer) -> None:
    call = written(HERMES, ULM)
    perhaps = behind_thoughts(forced_calls(HERMES.notation, [LOOK], {}), "perhaps", {})
    assert all(may_be(perhaps, vocabulary, f"{thoughts}{call}") for thoughts in ("", "<think>hm, </thin\n</think>\n\n"))
    assert not may_be(perhaps, vocabulary, f"hm{call}")
    inside = behind_thoughts(forced_calls(HERMES.notation, [LOOK], {}), "open", {})
    assert all(may_be(inside, vocabulary, f"{thoughts}</think>{call}") for thoughts in ("", "hm"))
    assert not may_be(inside, vocabulary, call)
    assert not may_be(inside, vocabulary, f"hm</think> no {call}")


@pytest.mark.parametrize("kind", [HERMES, MISTRAL, MISTRAL_LIST])
def test_under_auto_text_is_free_and_what_begins_as_a_call_is_one(kind: ToolFormat, vocabulary: LLTokenizer) -> None:
    constraint = behind_thoughts(strict_calls(kind.notation, [LOOK], {}), "none", {})
    call, begin = written(kind, ULM), kind.notation.begin
    for text in ("", "Well.", begin[:-1], call, f"Well.\n{call}", f"{call}\nSo\n{call}", f"{call} {begin[:4]}"):
        assert may_be(constraint, vocabulary, text), text
    for text in (f"Well {begin}.", begin, call.replace("look", "other"), call.replace('"Ulm"', "5")):
        assert not may_be(constraint, vocabulary, text), text


TAG = LLAMA3.notation.tag


@pytest.mark.parametrize("marker_ids", [{}, {TAG: fake_model.FIRST_SPECIAL}])
def test_under_auto_what_opens_as_a_call_of_llama_3_is_one(marker_ids: dict[str, int], vocabulary: LLTokenizer) -> None:
    constraint = behind_thoughts(strict_calls(LLAMA3.notation, [LOOK], marker_ids), "none", {})
    call, wrong = written(LLAMA3, ULM), written(LLAMA3, ("look", '{"city": 5}'))

    def fits(text: str) -> bool:
        return may_be(constraint, vocabulary, text, marker_ids)

    for text in (
        "",
        "Well.",
        f"\n\nWell {call}",
        call,
        f"\n{call}",
        f"{TAG}{call}",
        f"Well. {TAG}\n{call}",
        "Well <|pyt",
    ):
        assert fits(text), text
    for begun in ("", "\n", TAG, f"Well. {TAG}"):
        for text in (
            "{",
            "{}",
            wrong,
            call.replace("look", "other"),
            f"{call}; {call}",
            f"{call} So",
            f"{{ {call[1:]}",
        ):
            assert not fits(begun + text), text
    assert not fits(f"{TAG}Well.")


def test_thoughts_are_no_way_around_a_strict_function_of_llama_3(vocabulary: LLTokenizer) -> None:
    call, wrong = written(LLAMA3, ULM), written(LLAMA3, ("look", '{"city": 5}'))
    for marker_ids in ({}, {"<think>": 300, "</think>": 301}):
        rules = strict_calls(LLAMA3.notation, [LOOK], marker_ids, "perhaps")
        constraint = behind_thoughts(rules, "perhaps", marker_ids)
        for begun in ("", "<think>hm</think>", "<think>{</think>\n\n"):
            assert may_be(constraint, vocabulary, f"{begun}Well.", marker_ids)
            assert may_be(constraint, vocabulary, begun + call, marker_ids)
            assert not may_be(constraint, vocabulary, begun + wrong, marker_ids)


def test_markers_that_are_special_tokens_are_named_by_their_ids(vocabulary: LLTokenizer) -> None:
    ids = {"[TOOL_CALLS]": fake_model.FIRST_SPECIAL, "[ARGS]": fake_model.FIRST_SPECIAL + 2}
    text = written(MISTRAL, ULM, ULM)
    for make in (forced_calls, strict_calls):
        constraint = behind_thoughts(make(MISTRAL.notation, [LOOK], ids), "none", ids)
        assert may_be(constraint, vocabulary, text, ids)
        assert may_be(constraint, vocabulary, text) == (make is strict_calls), "spelled out it is text like any other"
    assert may_be(constraint, vocabulary, f"Well. {text} So.", ids)


def test_a_schema_that_no_grammar_can_express_is_a_mistake_only_if_strict(vocabulary: LLTokenizer) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}

    def forced(*, is_strict: bool) -> Constraint:
        return behind_thoughts(forced_calls(HERMES.notation, [Function("f", schema, is_strict)], {}), "none", {})

    compile_constraint(forced(is_strict=False), vocabulary)
    with pytest.raises(ConstraintError, match="uniqueItems"):
        compile_constraint(forced(is_strict=True), vocabulary)


@pytest.mark.parametrize(
    ("constraint", "fits", "fits_not"),
    [
        (Constraint("json_schema", '{"type": "integer"}'), "5", "a"),
        (Constraint("regex", r"a/b\/[0-9]+|\d"), "a/b/12", "a/b"),
        (Constraint("lark", 'start: "}" start? | word\nword: "{"'), "}}{", "{}"),
    ],
)
def test_a_constraint_of_any_kind_is_kept_behind_thoughts(
    constraint: Constraint, fits: str, fits_not: str, vocabulary: LLTokenizer
) -> None:
    assert may_be(constraint, vocabulary, fits)
    perhaps = behind_thoughts(answer_of(constraint), "perhaps", {})
    inside = behind_thoughts(answer_of(constraint), "open", {})
    for thoughts in ("hm\n</think>\n\n", "</think>"):
        assert may_be(inside, vocabulary, thoughts + fits)
        assert not may_be(inside, vocabulary, thoughts + fits_not)
        assert may_be(perhaps, vocabulary, f"<think>{thoughts}{fits}")
    assert may_be(perhaps, vocabulary, fits)
    assert not may_be(perhaps, vocabulary, fits_not)


@pytest.mark.parametrize(
    ("name", "template", "expected"),
    [
        ("auto", "", None),
        ("auto", "{{ messages }}", HERMES),
        ("auto", "{{ tools }}<tool_call>", HERMES),
        ("auto", "{{ tools }}[TOOL_CALLS] [", MISTRAL_LIST),
        ("auto", "{{ tools }}[TOOL_CALLS]f[ARGS]", MISTRAL),
        ("auto", "{{ tools }}<|python_tag|>", LLAMA3),
        ("auto", '{{ tools }}<|start_header_id|>{"name": f, "parameters": x}', LLAMA3),
        ("auto", "{{ tools }}", None),
        ("none", "{{ tools }}<tool_call>", None),
        ("hermes", "{{ tools }}[TOOL_CALLS]", HERMES),
        ("hermes", "{{ messages }}", HERMES),
        ("llama3", "{{ tools }}", LLAMA3),
        ("llama3", "{{ messages }}", None),
        ("mistral", "{{ tools }}", MISTRAL_LIST),
    ],
)
def test_the_format_is_found_in_the_template(name: Any, template: str, expected: ToolFormat | None) -> None:
    assert format_of(name, template) == expected


@pytest.mark.parametrize("kind", FORMATS)
def test_ids_of_calls_are_new_and_fit_the_template(kind: ToolFormat) -> None:
    ids = {kind.new_call_id() for _ in range(100)}
    assert len(ids) == 100
    parser = kind.new_parser(["look"], parallel=True)
    start = parts_of(parser, written(kind, ULM))[0]
    assert isinstance(start, CallStart)
    assert start.call_id.isalnum() and len(start.call_id) == 9 if kind.short_ids else start.call_id.startswith("call_")
