"""``/v1/responses`` through the official client and as raw bytes: events, errors, and what becomes of the request."""

import time
from typing import Any

import openai
import pydantic
import pytest
from openai.types.responses import Response, ResponseStreamEvent

from services.gateway import generation
from shared.wire import tokens
from tests.fakes.answers import named_events
from tests.fakes.conversations import prompt_of
from tests.fakes.gateway_world import world
from tests.fakes.scripted_scheduler import Answer, ScriptedScheduler, says

ASK: dict[str, Any] = {"model": "default", "input": "hi"}
EVENT = pydantic.TypeAdapter[Any](ResponseStreamEvent)


async def test_whole_and_streamed_say_the_same() -> None:
    async with world(ScriptedScheduler(says("hello", cached_tokens=16))) as w:
        whole = await w.openai.responses.create(**ASK, instructions="Be short.", metadata={"a": "b"}, store=True)
        assert whole.output_text == "hello"
        assert (whole.status, whole.incomplete_details, whole.error) == ("completed", None, None)
        assert (whole.instructions, whole.metadata, whole.store) == ("Be short.", {"a": "b"}, False)
        assert whole.completed_at is not None
        assert whole.created_at <= whole.completed_at <= time.time()
        assert whole.usage is not None
        assert whole.usage.input_tokens == len(tokens.unpack(w.scheduler.submits[-1].prompt))
        assert whole.usage.input_tokens_details.cached_tokens == 16
        assert (whole.usage.output_tokens, whole.usage.total_tokens) == (6, whole.usage.input_tokens + 6)
        async with w.openai.responses.stream(**ASK, instructions="Be short.", metadata={"a": "b"}) as stream:
            events = [event async for event in stream]
            final = await stream.get_final_response()
        assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "hello"
        assert final.output_text == "hello"
        assert final.usage == whole.usage
        assert final.completed_at is not None
        assert {event.response.completed_at for event in events if event.type == "response.in_progress"} == {None}
        await w.until_idle()


async def test_every_event_is_what_the_official_types_say() -> None:
    async with world(ScriptedScheduler(says("hé"))) as w:
        response = await w.post("/v1/responses", **ASK, stream=True)
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        events = named_events(response.text)
        for _, data in events:
            EVENT.validate_python(data)
        assert [name for name, _ in events] == [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
            "response.output_text.delta",
            "response.output_text.delta",
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.completed",
        ]
        assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
        whole = (await w.post("/v1/responses", **ASK)).json()
        Response.model_validate(whole)
        told, key = events[-1][1]["response"], events[0][1]["response"]["id"]
        assert told["output"][0]["content"] == whole["output"][0]["content"]
        assert told.keys() == whole.keys()
        assert {data["response"]["id"] for _, data in events if "response" in data} == {key}


async def test_what_max_output_tokens_cuts_off_is_incomplete() -> None:
    async with world(ScriptedScheduler(says("hello", "length"))) as w:
        whole = await w.openai.responses.create(**ASK, max_output_tokens=5)
        assert (whole.status, whole.output[0].status) == ("incomplete", "incomplete")
        assert whole.incomplete_details is not None
        assert whole.incomplete_details.reason == "max_output_tokens"
        assert whole.completed_at is None
        assert w.scheduler.submits[-1].max_tokens == 5
        events = named_events((await w.post("/v1/responses", **ASK, stream=True)).text)
        assert events[-1][0] == "response.incomplete"
        assert events[-1][1]["response"]["output"][0]["status"] == "incomplete"


class City(pydantic.BaseModel):
    name: str
    people: int


async def test_parse_reads_what_the_schema_asks_for() -> None:
    async with world(ScriptedScheduler(says('{"name":"Ulm","people":126000}'))) as w:
        parsed = await w.openai.responses.parse(**ASK, text_format=City)
        assert parsed.output_parsed == City(name="Ulm", people=126000)
        constraint = w.scheduler.submits[-1].sampling.constraint
        assert constraint is not None
        assert '"people"' in constraint.source
        async with w.openai.responses.stream(**ASK, text_format=City) as stream:
            assert (await stream.get_final_response()).output_parsed == parsed.output_parsed


async def test_an_answer_without_text_is_an_empty_message() -> None:
    async with world(ScriptedScheduler(says(""))) as w:
        whole = await w.openai.responses.create(**ASK)
        assert (whole.output_text, len(whole.output)) == ("", 1)
        async with w.openai.responses.stream(**ASK) as stream:
            assert (await stream.get_final_response()).output_text == ""


async def test_a_history_with_tools_and_thoughts_becomes_a_prompt() -> None:
    items: list[Any] = [
        {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {
            "type": "message",
            "id": "msg_1",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "I look.", "annotations": []}],
        },
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"where":"Ulm"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        {"type": "function_call", "call_id": "c2", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "sun"}]},
        {"type": "message", "role": "developer", "content": "Decide."},
    ]
    async with world(ScriptedScheduler(says("ok"))) as w:
        fields = {"temperature": 0.25, "top_p": 0.5, "include": ["reasoning.encrypted_content"]}
        await w.openai.responses.create(model="default", input=items, instructions="Be short.", **fields)
        submit = w.scheduler.submits[-1]
        assert prompt_of(w) == (
            "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nWeather?<|im_end|>\n"
            '<|im_start|>assistant\nI look.\n<tool_call>\n{"name": "look", "arguments": {"where": "Ulm"}}\n</tool_call>'
            "<|im_end|>\n<|im_start|>user\n<tool_response>\nrain\n</tool_response><|im_end|>\n"
            '<|im_start|>assistant\n<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
            "<|im_end|>\n<|im_start|>user\n<tool_response>\nsun\n</tool_response><|im_end|>\n"
            "<|im_start|>system\nDecide.<|im_end|>\n<|im_start|>assistant\n"
        )
        assert (submit.sampling.temperature, submit.sampling.top_p) == (0.25, 0.5)
        assert submit.sampling.num_logprobs == -1


async def test_logprobs_come_with_their_text() -> None:
    async with world(ScriptedScheduler(says("hé"))) as w:
        for fields in ({"include": ["message.output_text.logprobs"]}, {"top_logprobs": 2}):
            whole = await w.openai.responses.create(**ASK, **fields)
            told = whole.output[0].content[0].logprobs
            assert bytes(value for one in told for value in one.bytes)[:3] == "hé".encode()
            assert {len(one.top_logprobs) for one in told} == {fields.get("top_logprobs", 0)}
            events = named_events((await w.post("/v1/responses", **ASK, **fields, stream=True)).text)
            for _, data in events:
                EVENT.validate_python(data)
            deltas = [data["logprobs"] for name, data in events if name == "response.output_text.delta"]
            assert [[one["bytes"] for one in part] for part in deltas] == [[[104]], [[195], [169]]]
            assert events[-1][1]["response"]["output"][0]["content"][0]["logprobs"] == [
                one.model_dump() for one in told
            ]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": 5}, "input"),
    ({"input": [{"role": "robot", "content": "a"}]}, "input"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
    ({"input": [{"type": "function_call", "call_id": "c", "name": 5}]}, "input"),
    ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{"}]}, "input"),
    ({"input": [{"type": "reasoning", "content": [5]}]}, "input"),
    ({"input": [{"type": "reasoning", "content": False}]}, "input"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"temperature": 3}, "temperature"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"background": True}, "background"),
    ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text"),
    ({"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "nonsense"}}}}, "text"),
    ({"tools": [{"type": "web_search"}]}, "tools"),
    ({"tool_choice": {"type": "file_search"}}, "tool_choice"),
    ({"metadata": {"a": 5}}, "metadata"),
]


async def test_what_is_wrong_is_a_400_that_names_the_field() -> None:
    async with world(ScriptedScheduler(says("ok"))) as w:
        for fields, param in WRONG:
            response = await w.post("/v1/responses", **{**ASK, **fields})
            assert response.status_code == 400, (fields, response.text)
            error = response.json()["error"]
            assert error["param"] == param, error
            assert param in error["message"]
        assert not w.scheduler.submits


async def test_harmless_fields_are_ignored() -> None:
    fields = {"store": True, "user": "u", "truncation": "auto", "service_tier": "auto", "background": False, "x_new": 1}
    async with world(ScriptedScheduler(says("ok"))) as w:
        response = await w.post(
            "/v1/responses", **ASK, **fields, reasoning={"effort": "low"}, text={"verbosity": "low"}
        )
        assert response.status_code == 200


async def test_what_the_scheduler_refuses_is_an_exception_of_the_client() -> None:
    async with world(ScriptedScheduler(lambda submit: Answer(reject=("queue_full", "full", 1)))) as w:
        with pytest.raises(openai.RateLimitError, match="full"):
            await w.openai.responses.create(**ASK, stream=True)
        with pytest.raises(openai.NotFoundError, match="gpt-4"):
            await w.openai.responses.create(model="gpt-4", input="a")


async def test_stream_06_a_failure_after_the_first_byte_is_an_error_and_a_failed_response() -> None:
    async with world(ScriptedScheduler(says("abc", "error", error="the executor failed"), auto=False)) as w:
        stream = await w.openai.responses.create(**ASK, stream=True)
        for _ in range(3):
            w.scheduler.tick()
        events: list[Any] = [event async for event in stream]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        error, failed = events[-2:]
        assert (error.type, error.code, error.message) == ("error", "internal_error", "the executor failed")
        assert (failed.type, failed.response.status) == ("response.failed", "failed")
        assert (failed.response.error.code, failed.response.error.message) == ("server_error", "the executor failed")
        assert failed.response.output[0].content[0].text == "abc"
        assert failed.response.output[0].status == "incomplete"
        w.scheduler.auto = True
        assert (await w.post("/v1/responses", **ASK)).status_code == 500


async def test_signs_of_life_are_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "KEEP_ALIVE_S", 0.02)
    body = {**ASK, "stream": True}
    async with (
        world(ScriptedScheduler(says("a"), auto=False)) as w,
        w.http.stream("POST", "/v1/responses", json=body) as response,
    ):
        seen = ""
        async for piece in response.aiter_text():
            seen += piece
            if seen.count(": keep-alive\n\n") == 2:
                w.scheduler.auto = True
                w.scheduler._keep_ticking()
        assert named_events(seen)[-1][0] == "response.completed"


async def test_thoughts_and_calls_are_items_of_their_own() -> None:
    text = '<think>hm</think>I look. <tool_call>{"name": "look", "arguments": {"where": "Ulm"}}</tool_call>'
    tools: Any = [{"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}]
    async with world(ScriptedScheduler(says(text)), reasoning_parser="think") as w:
        fields: dict[str, Any] = {"model": "default", "input": "Weather?", "tools": tools}
        whole = await w.openai.responses.create(**fields)
        async with w.openai.responses.stream(**fields) as stream:
            names = [event.type async for event in stream]
            streamed = await stream.get_final_response()
        assert names.count("response.function_call_arguments.delta") == len('{"where": "Ulm"}')
        for response in (whole, streamed):
            thoughts, said, call = response.output
            assert (thoughts.type, said.type, call.type) == ("reasoning", "message", "function_call")
            assert thoughts.content[0].text == "hm"
            assert response.output_text == "I look."
            assert (call.name, call.arguments) == ("look", '{"where": "Ulm"}')
            assert call.call_id.startswith("call_")
