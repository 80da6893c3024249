"""Grammars in EBNF: what they let through once they are written in Lark, and what is wrong with others."""

import json

import pytest
from llguidance import LLTokenizer

from services.gateway.text.ebnf import is_ebnf, lark_of
from services.gateway.text.lark import answer_of, behind_thoughts
from shared import fake_model
from shared.constraints import ConstraintError, compile_constraint, read_vocabulary
from shared.wire.sampling import MAX_CONSTRAINT_CHARS, Constraint

JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes }
  )* "\"" ws
number ::= "-"? ([0-9] | [1-9] [0-9]{0,15}) ("." [0-9]+)? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""


@pytest.fixture(name="vocabulary", scope="module")
def _vocabulary() -> LLTokenizer:
    return read_vocabulary(fake_model.facts(), None)


def may_be(constraint: Constraint, vocabulary: LLTokenizer, text: str) -> bool:
    matcher = compile_constraint(constraint, vocabulary)
    return all(matcher.consume_token(byte) for byte in text.encode()) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("grammar", "fits", "fits_not"),
    [
        (
            JSON,
            ["{}", '{"a": [1, -2.5, {"é/": null}]}', json.dumps({"a": '"\n\\é'})],
            ["", "[1]", '{"a" 1}', "{'a':1}"],
        ),
        (
            r'root ::= "\u0041\u00e9\x42" [\u0043-\u0045\u4e00-\u9fff] "\\u00"',
            ["AéBD\\u00", "AéB中\\u00"],
            ["AéBF\\u00"],
        ),
        (r'root ::= [^/\[\]"\u002d] .', ["ab", "a/"], ["/a", "[a", "]a", '"a', "-a"]),
        ('# first\nroot ::= (item "\\n")+\nitem ::= "- " [^\\n]+ # last', ["- a b\n- c\n"], ["- \n", "a\n"]),
        (
            'root ::= [a-z]{2,3} ("-" [0-9]{3})? | Other-one\nOther-one ::= "X" root?',
            ["ab", "abc-123", "XXab"],
            ["a", "Xa"],
        ),
        (r'root ::= "a\u2028b" [^\u0085]', ["a\u2028bx", "a\u2028b\n"], ["a\nbx", "a\u2028b\x85"]),
        (
            r'root ::= "\[&&--]" [a&&z] [x~~] [+--] [^--/] [\[\]~-]',
            ["[&&--]a~,0]", "[&&--]&x-0-"],
            ["[&&--]b~,0]", "[&&--]a~,.]"],
        ),
        ("root ::= [0-9]+ [0-9]+", ["12", "123"], ["1"]),
        (
            'root ::= ([0-9]{3})? "-" ((item? # )*\n)* )+ # "\nitem ::= ("(+)+"+){1,2} | ([+)*]* )? "!"',
            ["-", "123-(+)+", "-(+)+)*!", "123-!"],
            ["12-", "123123-", "-(+)+(+"],
        ),
        ('root ::= "<|im_end|>"', ["<|im_end|>"], [""]),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_it_says_is_what_it_lets_through(
    grammar: str, fits: list[str], fits_not: list[str], vocabulary: LLTokenizer
) -> None:
    assert is_ebnf(grammar)
    constraint = Constraint("lark", lark_of(grammar))
    assert not is_ebnf(constraint.source)
    behind = behind_thoughts(answer_of(constraint), "open", {})
    for text in fits:
        assert may_be(constraint, vocabulary, text), text
        assert may_be(behind, vocabulary, f"hm</think>{text}"), text
    for text in fits_not:
        assert not may_be(constraint, vocabulary, text), text


@pytest.mark.parametrize(
    ("grammar", "why"),
    [
        ('root ::= ("a"', r"Expected '\)'"),
        ('root ::= "a" $', "Expected name"),
        ('root ::= "a', "Unexpected end"),
        ("root ::= nothing", "'nothing' not found"),
        ('first ::= "a"', "No 'root' rule"),
        ('root ::= "a\\', "escape"),
        (r'root ::= "\q"', "escape"),
        ('root ::= a A\na ::= "x"\nA ::= "y"', "already exists"),
        ("root ::= " + "(" * 5000 + '"a"' + ")" * 5000, "nested too deeply"),
        ("root ::= " + '"a"+' * (MAX_CONSTRAINT_CHARS // 5), "more than 262144 characters"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_cannot_be_written_in_lark_says_why(grammar: str, why: str) -> None:
    with pytest.raises(ConstraintError, match=why):
        lark_of(grammar)


@pytest.mark.parametrize("grammar", ['start: "a"', 'start: "root ::= a"', "", 'start: /x/\n// root ::= "a"'])
def test_lark_is_not_taken_for_it(grammar: str) -> None:
    assert not is_ebnf(grammar)
