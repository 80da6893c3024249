"""``/v1/messages`` through Anthropic's own client and as raw bytes: shapes, errors, and what becomes of the request."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pydantic
import pytest

from services.gateway import generation
from services.gateway.api.guards import MAX_BODY_BYTES
from shared.wire import tokens
from tests.fakes.answers import named_events
from tests.fakes.conversations import prompt_of
from tests.fakes.gateway_world import World, world
from tests.fakes.scripted_scheduler import Answer, Script, ScriptedScheduler, says
from tests.fakes.waiting import await_until

HI = [{"role": "user", "content": "hi"}]
ASK: dict[str, Any] = {"model": "default", "max_tokens": 50, "messages": HI}


@contextlib.asynccontextmanager
async def serving(script: Script, **options: Any) -> AsyncIterator[tuple[World, anthropic.AsyncAnthropic]]:
    """A gateway, and Anthropic's client of it."""
    auto = options.pop("auto", True)
    async with world(ScriptedScheduler(script, auto=auto), **options) as w:
        key = options.get("api_keys", ("none",))[0]
        async with anthropic.AsyncAnthropic(base_url=w.url, api_key=key, max_retries=0, timeout=20) as client:
            yield w, client


async def test_whole_and_streamed_say_the_same() -> None:
    async with serving(says("hello", cached_tokens=16)) as (w, client):
        whole = await client.messages.create(**ASK)
        assert [block.model_dump(exclude_none=True) for block in whole.content] == [{"type": "text", "text": "hello"}]
        assert (whole.stop_reason, whole.stop_sequence, whole.role) == ("end_turn", None, "assistant")
        prompt_tokens = len(tokens.unpack(w.scheduler.submits[-1].prompt))
        assert whole.usage.input_tokens == prompt_tokens - 16
        assert whole.usage.cache_read_input_tokens == 16
        assert whole.usage.output_tokens == 6
        async with client.messages.stream(**ASK) as stream:
            text = [piece async for piece in stream.text_stream]
            final = await stream.get_final_message()
        assert text == list("hello")
        assert final.model_dump(exclude={"id"}) == {
            **whole.model_dump(exclude={"id"}),
            "content": final.model_dump()["content"],
        }
        assert final.content[0].text == "hello"
        await w.until_idle()


@pytest.mark.parametrize(
    ("script", "fields", "reason", "sequence"),
    [
        (says("hello", "length"), {}, "max_tokens", None),
        (says("hello there"), {"stop_sequences": ["zzz", "lo t"]}, "stop_sequence", "lo t"),
        (says(""), {}, "end_turn", None),
    ],
)
async def test_stop_reasons(script: Script, fields: dict[str, Any], reason: str, sequence: str | None) -> None:
    async with serving(script) as (_, client):
        whole = await client.messages.create(**ASK, **fields)
        async with client.messages.stream(**ASK, **fields) as stream:
            final = await stream.get_final_message()
        for message in (whole, final):
            assert (message.stop_reason, message.stop_sequence) == (reason, sequence)
            assert len(message.content) == 1
        assert whole.content[0].text == final.content[0].text


async def test_a_history_with_tools_and_thoughts_becomes_a_prompt() -> None:
    turns: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": "Wea"}, {"type": "text", "text": "ther?"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "x"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "t1", "name": "look", "input": {"where": "Ulm"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "rain"}]},
                {"type": "text", "text": "And?"},
            ],
        },
    ]
    system = [
        {"type": "text", "text": "Be "},
        {"type": "text", "text": "short.", "cache_control": {"type": "ephemeral"}},
    ]
    async with serving(says("ok")) as (w, client):
        sampling = {"top_k": 7, "top_p": 0.5, "temperature": 0.25}
        await client.messages.create(**{**ASK, "messages": turns}, system=system, extra_body=sampling)
        submit = w.scheduler.submits[-1]
        assert prompt_of(w) == (
            "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nWeather?<|im_end|>\n"
            '<|im_start|>assistant\nI look.\n<tool_call>\n{"name": "look", "arguments": {"where": "Ulm"}}\n</tool_call>'
            "<|im_end|>\n<|im_start|>user\n<tool_response>\nrain\n</tool_response><|im_end|>\n"
            "<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n"
        )
        assert (submit.sampling.top_k, submit.sampling.top_p, submit.sampling.temperature) == (7, 0.5, 0.25)
        assert submit.max_tokens == 50
        count = await client.messages.count_tokens(model="default", messages=turns, system=system)
        assert count.input_tokens == len(tokens.unpack(submit.prompt))


class City(pydantic.BaseModel):
    name: str
    people: int


async def test_parse_reads_what_the_schema_asks_for() -> None:
    async with serving(says('{"name":"Ulm","people":126000}')) as (w, client):
        parsed = await client.messages.parse(**ASK, output_format=City)
        assert parsed.parsed_output == City(name="Ulm", people=126000)
        constraint = w.scheduler.submits[-1].sampling.constraint
        assert constraint is not None
        assert '"people"' in constraint.source


async def test_the_last_message_of_the_assistant_goes_on() -> None:
    async with serving(says("ok")) as (w, client):
        await client.messages.create(**{**ASK, "messages": [*HI, {"role": "assistant", "content": "The answer is ("}]})
        assert prompt_of(w).endswith("<|im_start|>assistant\nThe answer is (")


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "'image'"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [5]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "input": 5}]}]}, "content[0].input"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "content[0].tool_use_id"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"temperature": 3}, "temperature"),
    ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
    ({"container": "c"}, "container"),
    (
        {"output_config": {"format": {"type": "json_schema", "schema": {"type": "nonsense"}}}},
        "output_config.format",
    ),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": False, "name": "f"}]}, "tools[0].type"),
    ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
]


async def test_what_is_wrong_is_a_400_of_anthropics_shape() -> None:
    async with serving(says("ok")) as (w, _):
        for fields, named in WRONG:
            response = await w.post("/v1/messages", **{**ASK, **fields})
            assert response.status_code == 400, (fields, response.text)
            body = response.json()
            assert body["type"] == "error"
            assert body["error"].keys() == {"type", "message"}
            assert body["error"]["type"] == "invalid_request_error"
            assert named in body["error"]["message"]
        assert not w.scheduler.submits


async def test_harmless_fields_are_ignored() -> None:
    fields = {"metadata": {"user_id": "u"}, "service_tier": "auto", "thinking": {"type": "adaptive"}, "x_new": 1}
    async with serving(says("ok")) as (w, _):
        assert (await w.post("/v1/messages", **ASK, **fields)).status_code == 200


async def test_errors_of_the_middleware_and_of_the_scheduler_have_anthropics_shape_too() -> None:
    full = Answer(reject=("queue_full", "the queue is full", 3000))
    async with serving(lambda submit: full, api_keys=("sk-right",)) as (w, client):
        with pytest.raises(anthropic.AuthenticationError, match="authentication_error"):
            await client.with_options(api_key="sk-wrong").messages.create(**ASK)
        with pytest.raises(anthropic.RateLimitError, match="the queue is full") as limited:
            await client.messages.create(**ASK, stream=True)
        assert limited.value.response.headers["retry-after"] == "3"
        with pytest.raises(anthropic.NotFoundError, match="gpt-4"):
            await client.messages.create(**{**ASK, "model": "gpt-4"})
        headers = {"x-api-key": "sk-right"}
        large = await w.http.post("/v1/messages", content=b" " * (MAX_BODY_BYTES + 1), headers=headers)
        assert (large.status_code, large.json()["error"]["type"]) == (413, "request_too_large")
        missing = await w.http.get("/v1/messages/batches", headers=headers)
        assert (missing.status_code, missing.json()["error"]["type"]) == (404, "not_found_error")
        w.scheduler.announce(ready=False, reason="no executor")
        await await_until(lambda: not w.gateway.link.ready, 5, "not ready")
        with pytest.raises(anthropic.InternalServerError, match="no executor"):
            await client.messages.create(**ASK)
        w.gateway.draining = True
        drained = await w.http.post("/v1/messages", json=ASK, headers=headers)
        assert (drained.status_code, drained.json()["error"]["type"]) == (503, "overloaded_error")


async def test_either_kind_of_key_opens_every_route_and_a_bearers_goes_first() -> None:
    async with serving(says("ok"), api_keys=("sk-right",)) as (w, _):
        right, wrong = {"x-api-key": "sk-right"}, {"x-api-key": "sk-wrong"}
        bearer = {"Authorization": "Bearer sk-right"}
        for headers, status in [
            (right, 200),
            (bearer, 200),
            ({**right, **bearer}, 200),
            ({**right, "Authorization": "Basic eA=="}, 200),
            (wrong, 401),
            ({**wrong, **bearer}, 200),
            ({**right, "Authorization": "Bearer sk-wrong"}, 401),
            ({}, 401),
        ]:
            assert (await w.http.post("/v1/messages", json=ASK, headers=headers)).status_code == status, headers
            assert (await w.http.get("/v1/models", headers=headers)).status_code == status, headers


async def test_models_are_told_of_in_either_shape() -> None:
    async with serving(says("ok")) as (w, client):
        [card] = [model async for model in client.models.list()]
        for told in (card, await client.models.retrieve("default")):
            assert (told.type, told.id, told.display_name, told.lifecycle) == (
                "model",
                "fake-model",
                "fake-model",
                "active",
            )
            assert told.created_at.timestamp() == w.gateway.started_at
            assert told.max_input_tokens == told.max_tokens == w.gateway.facts().context_len
        with pytest.raises(anthropic.NotFoundError, match="not_found_error"):
            await client.models.retrieve("other")
        assert [model.object async for model in w.openai.models.list()] == ["model"]
        assert (await w.http.get("/v1/models/other")).json()["error"]["code"] == "model_not_found"


async def test_stream_06_a_failure_after_the_first_byte_is_an_error_event() -> None:
    async with serving(says("abc", "error", error="the executor failed"), auto=False) as (w, client):
        stream = await client.messages.create(**ASK, stream=True)
        for _ in range(3):
            w.scheduler.tick()
        seen: list[str] = []
        text = ""

        async def read() -> None:
            nonlocal text
            async for event in stream:
                seen.append(event.type)
                text += event.delta.text if event.type == "content_block_delta" else ""

        with pytest.raises(anthropic.APIStatusError, match="the executor failed"):
            await read()
        assert seen[:2] == ["message_start", "content_block_start"]
        assert set(seen[2:]) == {"content_block_delta"}
        assert text == "abc", "in as many events as the gateway needs: what waits is merged"
        async with w.http.stream("POST", "/v1/messages", json={**ASK, "stream": True}) as response:
            for _ in range(3):
                w.scheduler.tick()
            raw = named_events((await response.aread()).decode())
        assert raw[-1] == ("error", {"type": "error", "error": {"type": "api_error", "message": "the executor failed"}})


async def test_signs_of_life_are_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "KEEP_ALIVE_S", 0.02)
    async with (
        serving(says("a"), auto=False) as (w, _),
        w.http.stream("POST", "/v1/messages", json={**ASK, "stream": True}) as response,
    ):
        seen = ""
        async for piece in response.aiter_text():
            seen += piece
            if seen.count("event: ping") == 3:
                w.scheduler.auto = True
                w.scheduler._keep_ticking()
        assert named_events(seen)[-1] == ("message_stop", {"type": "message_stop"})


THINKS_AND_CALLS = (
    "<think>hm</think>I look.\n"
    '<tool_call>{"name": "look", "arguments": {"where": "Ulm"}}</tool_call>'
    '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
)
LOOK: Any = {"name": "look", "description": "Looks.", "input_schema": {"type": "object", "properties": {}}}


async def test_thoughts_and_calls_are_blocks_of_their_own() -> None:
    async with serving(says(THINKS_AND_CALLS), reasoning_parser="think") as (_, client):
        fields: dict[str, Any] = {**ASK, "tools": [LOOK], "max_tokens": 500}
        whole = await client.messages.create(**fields)
        async with client.messages.stream(**fields) as stream:
            streamed = await stream.get_final_message()
        for message in (whole, streamed):
            thoughts, text, *calls = message.content
            assert (thoughts.type, thoughts.thinking) == ("thinking", "hm")
            assert (text.type, text.text) == ("text", "I look.")
            assert [(call.name, call.input) for call in calls] == [("look", {"where": "Ulm"}), ("look", {})]
            assert len({call.id for call in calls}) == 2
            assert message.stop_reason == "tool_use"
            assert message.usage.output_tokens_details is not None
            assert message.usage.output_tokens_details.thinking_tokens == len("<think>hm</think")
