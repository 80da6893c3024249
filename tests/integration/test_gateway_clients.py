"""The official openai client against the gateway, its exceptions too."""

from typing import Any

import openai
import pytest

from shared import fake_model
from tests.fakes.gateway_world import world
from tests.fakes.scripted_scheduler import Answer, ScriptedScheduler

MESSAGES = [{"role": "user", "content": "hi"}]


async def test_chat_and_completions_streamed_and_not() -> None:
    async with world(ScriptedScheduler(lambda submit: Answer([*b"hello"]))) as w:
        chat = await w.openai.chat.completions.create(model="default", messages=MESSAGES, max_tokens=5)
        assert chat.choices[0].message.content == "hello"
        assert chat.choices[0].finish_reason == "length"
        assert chat.usage is not None
        assert chat.usage.completion_tokens == 5
        stream = await w.openai.chat.completions.create(
            model="default", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "hello"
        assert chunks[-1].usage.total_tokens == chat.usage.total_tokens
        completion = await w.openai.completions.create(model="default", prompt=["a", "b"], n=2)
        assert [choice.text for choice in completion.choices] == ["hello"] * 4
        text = await w.openai.completions.create(model="default", prompt=[1, 2, 3], stream=True)
        assert "".join([chunk.choices[0].text async for chunk in text]) == "hello"
        w.scheduler.script = lambda submit: Answer([*b"hello", fake_model.IM_END], "stop")
        async with w.openai.chat.completions.stream(model="default", messages=MESSAGES) as helper:
            final = await helper.get_final_completion()
        assert final.choices[0].message.content == "hello"
        assert [model.id async for model in w.openai.models.list()] == ["fake-model"]
        assert (await w.openai.models.retrieve("default")).id == "fake-model"


async def test_its_exceptions() -> None:
    full = Answer(reject=("queue_full", "the queue is full", 1000))
    async with world(ScriptedScheduler(lambda submit: full), api_keys=("sk-right",)) as w:
        with pytest.raises(openai.BadRequestError, match="temperature") as bad:
            await w.openai.completions.create(model="default", prompt="a", temperature=5)
        assert bad.value.param == "temperature"
        with pytest.raises(openai.NotFoundError, match="gpt-4") as missing:
            await w.openai.completions.create(model="gpt-4", prompt="a")
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.AuthenticationError):
            await w.openai.with_options(api_key="sk-wrong").completions.create(model="default", prompt="a")
        with pytest.raises(openai.RateLimitError, match="queue is full"):
            await w.openai.completions.create(model="default", prompt="a")
        w.scheduler.script = lambda submit: Answer(reject=("unavailable", "no executor", 0))
        with pytest.raises(openai.InternalServerError, match="no executor") as away:
            await w.openai.completions.create(model="default", prompt="a", stream=True)
        assert away.value.status_code == 503


async def test_tool_calls_streamed_and_not() -> None:
    call = '<tool_call>{"name": "weather", "arguments": {"city": "Bern"}}</tool_call>'
    function = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
    fields: dict[str, Any] = {
        "model": "default",
        "messages": MESSAGES,
        "tools": [{"type": "function", "function": function}],
    }
    answer = Answer([*call.encode(), fake_model.IM_END], "stop")
    async with world(ScriptedScheduler(lambda submit: answer)) as w:
        choice = (await w.openai.chat.completions.create(**fields)).choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        told = choice.message.tool_calls[0]
        assert (told.function.name, told.function.arguments) == ("weather", '{"city": "Bern"}')
        history = [*MESSAGES, choice.message, {"role": "tool", "tool_call_id": told.id, "content": "sunny"}]
        assert (await w.openai.chat.completions.create(**{**fields, "messages": history})).choices
        async with w.openai.chat.completions.stream(**fields) as helper:
            kinds = [event.type async for event in helper]
            final = (await helper.get_final_completion()).choices[0].message.tool_calls[0]
        assert "tool_calls.function.arguments.delta" in kinds
        assert (final.function.name, final.function.arguments) == ("weather", '{"city": "Bern"}')
