"""One conversation through all three APIs, with their makers' clients: the same words, in one piece and streamed."""

from typing import Any

import anthropic
import openai
import pytest
from pydantic import BaseModel, Field

from tests.e2e.system import System

HISTORY: Any = [
    {"role": "user", "content": "Name a colour."},
    {"role": "assistant", "content": "Blue."},
    {"role": "user", "content": "Name another one."},
]
SYSTEM = "You answer in one word."


class Colour(BaseModel):
    name: str = Field(max_length=12)


@pytest.mark.model
def test_the_default_model_says_the_same_through_all_apis(real_system: System) -> None:
    with openai.OpenAI(base_url=f"{real_system.base_url}/v1", api_key="none", max_retries=0, timeout=100) as client:
        said = _of_chat(client)
        assert _of_responses(client) == said
        told = client.responses.parse(model="default", input="A colour?", temperature=0, text_format=Colour)
        assert told.output_parsed is not None
    with anthropic.Anthropic(base_url=real_system.base_url, api_key="none", max_retries=0, timeout=100) as client:
        assert _of_messages(client) == said


def _of_chat(client: openai.OpenAI) -> tuple[str, int]:
    history = [{"role": "system", "content": SYSTEM}, *HISTORY]
    whole = client.chat.completions.create(model="default", messages=history, max_tokens=12, temperature=0)
    assert whole.usage is not None
    return whole.choices[0].message.content or "", whole.usage.prompt_tokens


def _of_responses(client: openai.OpenAI) -> tuple[str, int]:
    fields: dict[str, Any] = {"input": HISTORY, "instructions": SYSTEM, "max_output_tokens": 12, "temperature": 0}
    whole = client.responses.create(model="default", **fields)
    deltas = [
        event.delta
        for event in client.responses.create(model="default", **fields, stream=True)
        if event.type == "response.output_text.delta"
    ]
    assert "".join(deltas) == whole.output_text
    assert whole.usage is not None
    return whole.output_text, whole.usage.input_tokens


def _of_messages(client: anthropic.Anthropic) -> tuple[str, int]:
    fields: dict[str, Any] = {"model": "default", "messages": HISTORY, "system": SYSTEM}
    greedy: Any = {"temperature": 0}
    whole = client.messages.create(**fields, max_tokens=12, extra_body=greedy)
    with client.messages.stream(**fields, max_tokens=12, extra_body=greedy) as stream:
        streamed = "".join(stream.text_stream)
    assert whole.content[0].type == "text"
    assert streamed == whole.content[0].text
    counted = client.messages.count_tokens(**fields).input_tokens
    assert counted == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)
    return streamed, counted
