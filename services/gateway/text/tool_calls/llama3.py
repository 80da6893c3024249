"""The format of Llama 3: ``{"name": "f", "parameters": {...}}``, several with ``;`` between them. Pure.

Such an object is a call where it opens the text, or follows ``<|python_tag|>`` anywhere.
"""

from services.gateway.text.tool_calls.notation import Notation
from services.gateway.text.tool_calls.parser import Reading, ToolParser

PYTHON_TAG = "<|python_tag|>"
NOTATION = Notation('{"name": "', '", "parameters": ', "}", between="; ", most_calls=1, tag=PYTHON_TAG)
"""Of several calls the model's own template makes an error when they come back."""


class Llama3Parser(ToolParser):
    """See ``ToolParser``."""

    markers = (PYTHON_TAG,)

    def _read(self) -> Reading[None]:
        if (yield from self._peek()) == "{":
            yield from self._calls()
        self._reject()
        while (yield from self._content_until(PYTHON_TAG)):
            yield from self._calls()
            self._reject()

    def _calls(self) -> Reading[None]:
        while (yield from self._call()):
            if (yield from self._literal(";")):
                self._marked = self._at
            else:
                yield from self._peek()
                self._drop()
