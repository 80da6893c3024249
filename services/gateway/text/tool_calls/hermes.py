"""The format of Hermes and Qwen: ``<tool_call>{"name": "f", "arguments": {...}}</tool_call>`` for each call. Pure."""

from services.gateway.text.tool_calls.notation import Notation
from services.gateway.text.tool_calls.parser import Reading, ToolParser

BEGIN, END = "<tool_call>", "</tool_call>"
NOTATION = Notation(f'{BEGIN}\n{{"name": "', '", "arguments": ', f"}}\n{END}", between="\n", begin=BEGIN)


class HermesParser(ToolParser):
    """See ``ToolParser``. A closing tag that is missing, or cut by the end of the text, is not missed."""

    markers = (BEGIN, END)

    def _read(self) -> Reading[None]:
        while (yield from self._content_until(BEGIN)):
            if (yield from self._call()):
                yield from self._closing(END)
                yield from self._peek()
                self._drop()
            else:
                self._reject()
