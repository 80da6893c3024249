"""Tool calls through a whole system, with OpenAI's own client: what is forced is called, with arguments that fit."""

import json
from typing import Any

import pytest
from openai import pydantic_function_tool
from pydantic import BaseModel, Field

from tests.e2e.system import System


class Weather(BaseModel):
    """Tells the weather."""

    city: str = Field(max_length=30)
    unit: str = Field(pattern="^(celsius|fahrenheit)$")


class Time(BaseModel):
    """Tells the time."""


TOOLS: Any = [pydantic_function_tool(Weather), pydantic_function_tool(Time)]
MESSAGES: Any = [{"role": "user", "content": "How warm is it in Zürich?"}]


NAMED: Any = {"type": "function", "function": {"name": "Weather"}}
FIELDS: dict[str, Any] = {"model": "default", "messages": MESSAGES, "max_tokens": 120, "seed": 3}


def check_named_call(system: System) -> None:
    """Whole, streamed and parsed."""
    with system.client(timeout=100) as client:
        choice = client.chat.completions.parse(**FIELDS, tools=TOOLS, tool_choice=NAMED).choices[0]
        assert choice.finish_reason == "stop"
        assert choice.message.tool_calls
        told = choice.message.tool_calls[0].function
        assert told.name == "Weather"
        assert isinstance(told.parsed_arguments, Weather)
        with client.chat.completions.stream(**FIELDS, tools=TOOLS, tool_choice=NAMED) as stream:
            for _ in stream:
                pass
            streamed = stream.get_final_completion().choices[0].message.tool_calls
        assert streamed
        assert streamed[0].function.arguments == told.arguments


def check_required_calls(system: System) -> None:
    """And the conversation goes on with them."""
    with system.client(timeout=100) as client:
        choice = client.chat.completions.create(**FIELDS, tools=TOOLS, tool_choice="required").choices[0]
        assert choice.finish_reason in ("tool_calls", "length")
        assert choice.message.content is None
        assert choice.message.tool_calls
        for called in choice.message.tool_calls[: -1 if choice.finish_reason == "length" else None]:
            assert called.function.name in ("Weather", "Time")
            assert isinstance(json.loads(called.function.arguments), dict)
        whole = [called for called in choice.message.tool_calls if called.function.arguments.endswith("}")]
        turn = {"role": "assistant", "content": None, "tool_calls": [called.model_dump() for called in whole]}
        results = [{"role": "tool", "tool_call_id": called.id, "content": "12"} for called in whole]
        fields = {**FIELDS, "messages": [*MESSAGES, turn, *results], "max_tokens": 5}
        assert client.chat.completions.create(**fields).choices


def test_forced_calls_of_the_fake_model(fake_system: System) -> None:
    check_named_call(fake_system)
    check_required_calls(fake_system)


@pytest.mark.model
def test_forced_calls_of_the_default_model(real_system: System) -> None:
    check_named_call(real_system)
    check_required_calls(real_system)
