"""A chat's messages, built from the items of other APIs: what one turn of the assistant said, thought and called is one
message. Used by the requests of ``/v1/responses`` and ``/v1/messages``; pure.
"""

from typing import Any


class History:
    """Messages as ``/v1/chat/completions`` takes them, in order."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []

    def say(self, role: str, text: str) -> None:
        """A message of text. The assistant's joins the reasoning right before it."""
        last = self._last()
        if role == "assistant" and last is not None and last.keys() == {"role", "reasoning_content"}:
            last["content"] = text
        else:
            self.messages.append({"role": role, "content": text})

    def think(self, text: str) -> None:
        """Reasoning: the assistant's next turn begins, or goes on where nothing but reasoning came before."""
        last = self._last()
        if last is not None and last.keys() == {"role", "reasoning_content"}:
            last["reasoning_content"] += f"\n\n{text}"
        else:
            self.messages.append({"role": "assistant", "reasoning_content": text})

    def call(self, call_id: str, name: str, arguments: str) -> None:
        """A tool call of the assistant, with its arguments as JSON text."""
        last = self._last()
        if last is None:
            last = {"role": "assistant"}
            self.messages.append(last)
        function = {"name": name, "arguments": arguments}
        last.setdefault("tool_calls", []).append({"id": call_id, "type": "function", "function": function})

    def answer(self, call_id: str, text: str) -> None:
        """What a tool call brought."""
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": text})

    def _last(self) -> dict[str, Any] | None:
        """The last message if it is the assistant's."""
        last = self.messages[-1] if self.messages else None
        return last if last is not None and last["role"] == "assistant" else None
