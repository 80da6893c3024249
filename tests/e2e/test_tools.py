"""Tool calls through a whole system, with OpenAI's own client: what is forced is called, with arguments that fit."""

import json
from typing import Any

import openai
import pytest
from openai import pydantic_function_tool
from pydantic import BaseModel, Field

from tests.e2e.system import System


class Weather(BaseModel):
    """Tells the weather."""

    city: str = Field(max_length=30)
    unit: str = Field(pattern="^(celsius|fahrenheit)$")


TIME: Any = {"type": "function", "function": {"name": "time", "parameters": {"type": "object", "properties": {}}}}
WEATHER: Any = {"type": "function", "function": {"name": "Weather", "parameters": Weather.model_json_schema()}}
MESSAGES: Any = [{"role": "user", "content": "How warm is it in Zürich?"}]


def check_calls(system: System) -> None:
    with openai.OpenAI(base_url=f"{system.base_url}/v1", api_key="none", max_retries=0, timeout=100) as client:
        fields: dict[str, Any] = {"model": "default", "messages": MESSAGES, "max_tokens": 200, "seed": 3}
        named: Any = {"type": "function", "function": {"name": "Weather"}}
        answer = client.chat.completions.create(**fields, tools=[WEATHER, TIME], tool_choice=named)
        choice = answer.choices[0]
        assert choice.finish_reason == "stop"
        assert choice.message.tool_calls
        told = choice.message.tool_calls[0]
        Weather.model_validate_json(told.function.arguments)
        assert told.function.name == "Weather"
        with client.chat.completions.stream(**fields, tools=[WEATHER, TIME], tool_choice=named) as stream:
            for _ in stream:
                pass
            streamed = stream.get_final_completion().choices[0].message
        assert streamed.tool_calls
        assert streamed.tool_calls[0].function.arguments == told.function.arguments
        choice = client.chat.completions.create(**fields, tools=[WEATHER, TIME], tool_choice="required").choices[0]
        assert choice.finish_reason in ("tool_calls", "length")
        assert choice.message.tool_calls
        for called in choice.message.tool_calls[: -1 if choice.finish_reason == "length" else None]:
            assert called.function.name in ("Weather", "time")
            json.loads(called.function.arguments)
        tool: Any = pydantic_function_tool(Weather)
        parsed = client.chat.completions.parse(**fields, tools=[tool], tool_choice=named).choices[0].message
        assert parsed.tool_calls
        assert isinstance(parsed.tool_calls[0].function.parsed_arguments, Weather)
        history = [*MESSAGES, choice.message.model_dump(exclude_none=True)]
        history += [{"role": "tool", "tool_call_id": call.id, "content": "12"} for call in choice.message.tool_calls]
        assert client.chat.completions.create(**{**fields, "messages": history, "max_tokens": 5}).choices


def test_forced_calls_of_the_fake_model(fake_system: System) -> None:
    check_calls(fake_system)


@pytest.mark.model
def test_forced_calls_of_the_default_model(real_system: System) -> None:
    check_calls(real_system)
