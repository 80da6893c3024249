"""Grammars in EBNF (``root ::= ...``, the notation GBNF) written in Lark. Pure, but slow for what people should not
write: called in a confined fork, by ``services.gateway.constraint_process``.

The converter is llguidance's. A rule that is no more than a pattern becomes one there: it takes as much as it can.
"""

import re

from llguidance.gbnf_to_lark import gbnf_to_lark

from shared.constraints import ConstraintError
from shared.wire.sampling import MAX_CONSTRAINT_CHARS

_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
_PIECE = re.compile(
    r'"(?:\\.|[^"\\])*"|#[^\r\n]*|\[\^?(?:\\.|[^\]\\])*\]|(?<=[*+?}])(?=(?:\s|#[^\r\n]*)*\)\s*[*+?{])', re.DOTALL
)
"""A literal, a comment or a class; or, empty, where a repetition ends a group that is repeated itself."""
_CHAR = r"\\(?:x..|u.{4}|U.{8}|.)|[^\\]"
_MEMBER = re.compile(rf"({_CHAR})(?:-({_CHAR}))?", re.DOTALL)
"""Of a class: a character or a range."""
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)


def is_ebnf(grammar: str) -> bool:
    """Whether it has a rule as they are written in EBNF, and in Lark never."""
    return _RULE.search(grammar) is not None


def lark_of(grammar: str) -> str:
    """The same in Lark. Raises ConstraintError."""
    try:
        lark = gbnf_to_lark(_ESCAPE.sub(_spelled, _PIECE.sub(_respelled, grammar)))
    except RecursionError:
        raise ConstraintError("it is nested too deeply") from None
    except IndexError:
        raise ConstraintError("it ends in the middle of an escape sequence") from None
    except Exception as error:  # what it raises is of no common type
        raise ConstraintError(str(error)) from error
    rules = [line for line in lark.split("\n") if line and not line.startswith(("%llguidance", "//"))]
    if sum(map(len, rules)) + len(rules) > MAX_CONSTRAINT_CHARS:
        raise ConstraintError(f"written in Lark it has more than {MAX_CONSTRAINT_CHARS} characters")
    return "\n".join(rules)


def _respelled(piece: re.Match[str]) -> str:
    """A class without what is an operator in a class of Lark's patterns (``&&``, ``~~``, ``--``). ``("a"{3})?`` as
    ``("a"{3} "")?``: the converter leaves out the parentheses of a group of one. The rest as it is."""
    text = piece[0]
    if not text:
        return ' ""'
    if not text.startswith("["):
        return text
    opening = "[^" if text.startswith("[^") else "["
    return opening + _MEMBER.sub(_member, text[len(opening) : -1]) + "]"


def _member(found: re.Match[str]) -> str:
    return "-".join(f"\\x{ord(char):02x}" if char in ("&", "~", "-") else char for char in found.groups() if char)


def _spelled(escape: re.Match[str]) -> str:
    r"""``\u0041`` in a way that the converter keeps: it drops leading zeros. ``\[`` as Lark's literals have it."""
    digits = escape[1] or escape[2]
    if digits is None:
        return f"\\x{ord(escape[0][1]):02x}" if escape[0] in (r"\[", r"\]") else escape[0]
    code = int(digits, 16)
    if code < 0x80:
        return f"\\x{code:02x}"
    return escape[0] if code > 0x10FFFF or 0xD800 <= code < 0xE000 else chr(code)
