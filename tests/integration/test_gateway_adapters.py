"""LangChain's and LiteLLM's adapters as clients."""

import importlib
from types import ModuleType
from typing import Any

import pytest
from pydantic import BaseModel

from tests.fakes.gateway_world import World, world
from tests.fakes.scripted_scheduler import ScriptedScheduler, says

CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Bern"}}</tool_call>'
FUNCTION: dict[str, Any] = {
    "name": "weather",
    "description": "The weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
TOOL = {"type": "function", "function": FUNCTION}


class Colour(BaseModel):
    name: str


def adapter(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The package; it sends nothing to its makers, and is imported here only: it takes seconds."""
    monkeypatch.setenv("LANGSMITH_TRACING", "false")
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    return importlib.import_module(name)


async def test_langchain(monkeypatch: pytest.MonkeyPatch) -> None:
    langchain = adapter("langchain_openai", monkeypatch)
    async with world(ScriptedScheduler(says("hello")), api_keys=("sk",)) as w:
        fields: dict[str, Any] = {"model": "default", "base_url": f"{w.url}/v1", "api_key": "sk", "max_retries": 0}
        model = langchain.ChatOpenAI(**fields, http_async_client=w.http)
        told = await model.ainvoke("hi")
        assert told.content == "hello"
        assert told.usage_metadata["output_tokens"] == len("hello") + 1
        chunks = [chunk async for chunk in model.astream("hi", stream_usage=True)]
        assert "".join(chunk.content for chunk in chunks) == "hello"
        assert sum(chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata) == 6
        assert (await langchain.OpenAI(**fields, http_async_client=w.http).ainvoke("hi")) == "hello"
        responses = langchain.ChatOpenAI(**fields, http_async_client=w.http, use_responses_api=True)
        assert (await responses.ainvoke("hi")).text == "hello"
        assert "".join([chunk.text async for chunk in responses.astream("hi")]) == "hello"
        await _langchain_tools(w, model)
        await _langchain_structured(w, model)


async def _langchain_tools(w: World, model: Any) -> None:
    w.scheduler.script = says(CALL)
    with_tools = model.bind_tools([TOOL])
    told = await with_tools.ainvoke("hi")
    streamed = None
    async for chunk in with_tools.astream("hi"):
        streamed = chunk if streamed is None else streamed + chunk
    assert streamed is not None
    for message in (told, streamed):
        assert [(call["name"], call["args"]) for call in message.tool_calls] == [("weather", {"city": "Bern"})]
        assert message.response_metadata["finish_reason"] == "tool_calls"
    w.scheduler.script = says("It is sunny.")
    result = {"role": "tool", "content": "sunny", "tool_call_id": told.tool_calls[0]["id"]}
    answer = await with_tools.ainvoke([{"role": "user", "content": "hi"}, told, result])
    assert answer.content == "It is sunny."
    await model.bind_tools([TOOL], tool_choice="any").ainvoke("hi")
    assert w.scheduler.submits[-1].sampling.constraint is not None


async def _langchain_structured(w: World, model: Any) -> None:
    for method, text in (
        ("json_schema", '{"name": "red"}'),
        ("json_mode", '{"name": "red"}'),
        ("function_calling", '<tool_call>{"name": "Colour", "arguments": {"name": "red"}}</tool_call>'),
    ):
        w.scheduler.script = says(text)
        structured = model.with_structured_output(Colour, method=method)
        assert await structured.ainvoke("A colour as JSON.") == Colour(name="red")
        assert w.scheduler.submits[-1].sampling.constraint is not None, method


@pytest.mark.filterwarnings("ignore")  # its own types make pydantic warn
async def test_litellm(monkeypatch: pytest.MonkeyPatch) -> None:
    litellm = adapter("litellm", monkeypatch)
    async with world(ScriptedScheduler(says("hello")), api_keys=("sk",)) as w:
        fields: dict[str, Any] = {
            "model": "openai/default",
            "messages": [{"role": "user", "content": "hi"}],
            "client": w.openai,
            "num_retries": 0,
        }
        told = await litellm.acompletion(**fields)
        assert (told.choices[0].message.content, told.choices[0].finish_reason) == ("hello", "stop")
        options = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = [chunk async for chunk in await litellm.acompletion(**fields, **options)]
        whole = litellm.stream_chunk_builder(chunks)
        assert whole.choices[0].message.content == "hello"
        assert whole.usage.completion_tokens == told.usage.completion_tokens == len("hello") + 1
        with pytest.raises(litellm.NotFoundError, match="gpt-4"):
            await litellm.acompletion(**{**fields, "model": "openai/gpt-4"})
        w.scheduler.script = says('{"name": "red"}')
        told = await litellm.acompletion(**fields, response_format=Colour)
        assert Colour.model_validate_json(told.choices[0].message.content).name == "red"
        assert w.scheduler.submits[-1].sampling.constraint is not None
        w.scheduler.script = says(CALL)
        told = await litellm.acompletion(**fields, tools=[TOOL])
        chunks = [chunk async for chunk in await litellm.acompletion(**fields, tools=[TOOL], stream=True)]
        for answer in (told, litellm.stream_chunk_builder(chunks)):
            function = answer.choices[0].message.tool_calls[0].function
            assert (function.name, function.arguments) == ("weather", '{"city": "Bern"}')
            assert answer.choices[0].finish_reason == "tool_calls"
