"""Where a JSON value ends, in a text that comes in pieces. Used by the parsers beside it; pure."""

import re

_OUTSIDE = re.compile(r'["{}\[\]]')
_IN_STRING = re.compile(r'["\\]')


class JsonExtent:
    """Follows one object, array or string. Brackets are counted, not checked: it finds the end, no more."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def end_in(self, piece: str) -> int:
        """The index in ``piece``, the value's next text, right behind its last character; -1 if it goes on.

        The first piece begins with the value's opening bracket or quote; none is empty.
        """
        at = 0
        if self._escaped:
            self._escaped, at = False, 1
        while (found := (_IN_STRING if self._in_string else _OUTSIDE).search(piece, at)) is not None:
            at = found.end()
            match found[0]:
                case "\\":
                    self._escaped = at == len(piece)
                    at += 1
                case '"':
                    self._in_string = not self._in_string
                case "{" | "[":
                    self._depth += 1
                case _:
                    self._depth -= 1
            if self._depth <= 0 and not self._in_string:
                return at
        return -1
