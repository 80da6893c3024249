"""Conversations for tests of the gateway, and what becomes of them."""

from typing import Any

from services.gateway.text.fake_tokenizer import fake_tokenizer
from services.gateway.text.tokenizer import Tokenizer
from shared.wire import tokens
from tests.fakes.gateway_world import World

USER = {"role": "user", "content": "hi"}
HISTORY = [
    USER,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": "ü"}'}}],
    },
    {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "fine"}]},
]
"""A function was called."""
OTHER_APIS: dict[str, dict[str, Any]] = {
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": [USER], "max_tokens": 50},
}
"""What is answered by the path of a chat in another shape, and the least of a request."""
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": PARAMETERS, **more}}


WEATHER, TIME = tool("weather", description="Tells the weather."), tool("time")


def with_template(source: str) -> Tokenizer:
    """The fake model's tokenizer with another chat template."""
    tokenizer = fake_tokenizer()
    tokenizer._model.chat_template = source
    return tokenizer


def prompt_of(w: World) -> str:
    """The last request's prompt, special tokens spelled out."""
    return w.gateway.tokenizer.decode(tokens.unpack(w.scheduler.submits[-1].prompt), skip_special_tokens=False)
