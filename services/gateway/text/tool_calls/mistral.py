"""The formats of Mistral: ``[TOOL_CALLS] [{"name": "f", "arguments": {...}}, ...]`` and, newer, for each call
``[TOOL_CALLS]f[ARGS]{...}``, perhaps with ``[CALL_ID]...`` behind the name. Pure.
"""

import re

from services.gateway.text.tool_calls.notation import Notation
from services.gateway.text.tool_calls.parser import Reading, ToolParser

BEGIN, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
LIST_NOTATION = Notation(
    '{"name": "', '", "arguments": ', "}", between=", ", before=f"{BEGIN} [", after="]", begin=BEGIN
)
NOTATION = Notation(BEGIN, ARGS, "", between="", begin=BEGIN)
_NAME = re.compile(r"[\w-]*")


class MistralParser(ToolParser):
    """See ``ToolParser``."""

    markers = (BEGIN, CALL_ID, ARGS)

    def _read(self) -> Reading[None]:
        while (yield from self._content_until(BEGIN)):
            if (yield from self._peek()) == "[":
                yield from self._list()
            else:
                yield from self._named()
            self._reject()

    def _list(self) -> Reading[None]:
        yield from self._literal("[")
        while (yield from self._call()):
            if not (yield from self._literal(",")):
                yield from self._literal("]")
                yield from self._peek()
                self._drop()
                return

    def _named(self) -> Reading[None]:
        name = yield from self._run_of(_NAME)
        if (yield from self._literal(CALL_ID)):
            yield from self._run_of(_NAME)
        yield from self._literal(ARGS)
        if name in self._names and (yield from self._peek()) == "{":
            self._start(name)
            yield from self._stream_value()
            yield from self._peek()
            self._drop()
