"""Thoughts are split off the text, however it comes in pieces, and hide calls."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.text.message_parser import PLAIN, MessageFormat
from services.gateway.text.reasoning import ThinkParser, is_open, marks_reasoning
from services.gateway.text.tool_calls.formats import HERMES, LLAMA3
from tests.fakes.parsing import parts_of, plain

CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'


@pytest.mark.parametrize(
    ("inside", "text", "expected"),
    [
        (False, "<think>\nhm\n\nso\n</think>\n\n4", [("think", "hm\n\nso"), "4"]),
        (False, "\n<think></think> 4", ["4"]),
        (False, "4 <think> 5 </think>", ["4 <think> 5 </think>"]),
        (False, "<thin", ["<thin"]),
        (False, " \n", [" \n"]),
        (False, "<think>cut off", [("think", "cut off")]),
        (False, "<think>a</think>b</think>", [("think", "a"), "b</think>"]),
        (False, "  plain ", ["  plain "]),
        (True, "\nhm </th ink\n</think>\n4\n", [("think", "hm </th ink"), "4\n"]),
        (True, "</think>4", ["4"]),
        (True, "cut </thi", [("think", "cut </thi")]),
        (True, "", []),
    ],
)
def test_whole_texts_and_every_cut(inside: bool, text: str, expected: list[object]) -> None:
    whole = parts_of(ThinkParser(inside=inside), text)
    assert plain(whole) == expected
    assert parts_of(ThinkParser(inside=inside), text, range(len(text))) == whole
    assert all(parts_of(ThinkParser(inside=inside), text, [cut]) == whole for cut in range(len(text)))


@given(
    scraps=st.lists(
        st.sampled_from(["<think>", "</think>", "<", "</", "think>", " ", "\n", "a", CALL, "ü"]), max_size=15
    ),
    cuts=st.sets(st.integers(1, 120), max_size=10),
    inside=st.booleans(),
)
def test_any_text_in_any_pieces_with_calls_in_it(scraps: list[str], cuts: set[int], inside: bool) -> None:
    text = "".join(scraps)
    message_format = MessageFormat(LLAMA3, reasoning=True, inside=inside)
    first, second = message_format.parser(), message_format.parser()
    assert first is not None
    assert second is not None
    assert parts_of(first, text, cuts) == parts_of(second, text)


def test_thoughts_hide_calls_and_the_answer_does_not() -> None:
    parser = MessageFormat(HERMES, ["f"], reasoning=True, inside=True).parser()
    assert parser is not None
    text = f"I could {CALL}</think>\n{CALL}"
    assert plain(parts_of(parser, text)) == [("think", f"I could {CALL}"), ("f", "{}")]
    assert parser.awaits_results


def test_thoughts_leave_as_they_come() -> None:
    parser = ThinkParser(inside=False)
    told = [
        plain(parser.feed(piece)) for piece in ("<thi", "nk>", "\n", "a", " b", " ", "</", "think>", "\n", "4", "2")
    ]
    assert told == [[], [], [], [("think", "a")], [("think", " b")], [], [], [], [], ["4"], ["2"]]


def test_a_format_with_nothing_to_read_has_no_parser() -> None:
    assert PLAIN.parser() is None
    assert PLAIN.markers == ()


def test_what_templates_tell() -> None:
    assert marks_reasoning("{{ content.split('</think>')[-1] }}")
    assert not marks_reasoning("{{ content }}")
    assert is_open("<|assistant|>\n<think>\n")
    assert not is_open("<|assistant|>\n<think>\n\n</think>\n\n")
