"""Cases STREAM 1-7 of the known failures, and the exact bytes of every shape of stream."""

import asyncio
import re
import socket
from typing import Any

import httpx
import openai
import pytest

from services.gateway import generation
from shared import fake_model
from tests.fakes.gateway_world import World, events_of, text_of, world
from tests.fakes.scripted_scheduler import Answer, Script, ScriptedScheduler
from tests.fakes.waiting import await_until

EOS = fake_model.IM_END


def says(text: str, finish: Any = "length", **more: Any) -> Script:
    """Every request gets this text, a byte per token."""
    return lambda submit: Answer([*text.encode()][: submit.max_tokens], finish, **more)


def normal(body: str) -> str:
    """The stream without what differs from run to run."""
    body = re.sub(r'"id":"(chatcmpl|cmpl)-[0-9a-f]{24}"', r'"id":"\1-X"', body)
    return re.sub(r'"created":\d+', '"created":0', body)


def chat_chunk(choices: str, more: str = "") -> str:
    head = '{"id":"chatcmpl-X","object":"chat.completion.chunk","created":0,"model":"fake-model","choices":'
    return f"data: {head}[{choices}]{more}}}\n\n"


def completion_chunk(choices: str, more: str = "") -> str:
    head = '{"id":"cmpl-X","object":"text_completion","created":0,"model":"fake-model","choices":'
    return f"data: {head}[{choices}]{more}}}\n\n"


ROLE = '{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
END = '{"index":0,"delta":{},"logprobs":null,"finish_reason":"%s"}'
DONE = "data: [DONE]\n\n"


def said(text: str) -> str:
    return f'{{"index":0,"delta":{{"content":"{text}"}},"logprobs":null,"finish_reason":null}}'


async def test_golden_chat_stream() -> None:
    async with world(ScriptedScheduler(says('a"é'))) as w:
        response = await w.chat(max_tokens=4, stream=True)
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        expected = [ROLE, said("a"), said('\\"'), said("é"), END % "length"]
        assert normal(response.text) == "".join(map(chat_chunk, expected)) + DONE


async def test_golden_chat_stream_with_usage() -> None:
    async with world(ScriptedScheduler(says("ab", "stop", cached_tokens=16))) as w:
        response = await w.chat(max_tokens=4, stream=True, stream_options={"include_usage": True})
        null = ',"usage":null'
        usage = (
            ',"usage":{"prompt_tokens":48,"completion_tokens":2,"total_tokens":50,'
            '"prompt_tokens_details":{"cached_tokens":16}}'
        )
        # "b" ends it as a stop token would, so it has no text but is counted
        chunks = [chat_chunk(ROLE, null), chat_chunk(said("a"), null), chat_chunk(END % "stop", null)]
        prompt_tokens = len("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n") - 12 - 10 - 12 + 3
        usage = usage.replace("48", str(prompt_tokens)).replace("50", str(prompt_tokens + 2))
        assert normal(response.text) == "".join(chunks) + chat_chunk("", usage) + DONE


async def test_golden_completion_stream() -> None:
    async with world(ScriptedScheduler(says("ab"))) as w:
        response = await w.complete(max_tokens=2, stream=True, return_token_ids=True)
        ids = ',"logprobs":null,"finish_reason":null,'
        expected = [
            f'{{"index":0,"text":""{ids}"prompt_token_ids":[104,101,108,108,111]}}',
            f'{{"index":0,"text":"a"{ids}"token_ids":[97]}}',
            f'{{"index":0,"text":"b"{ids}"token_ids":[98]}}',
            '{"index":0,"text":"","logprobs":null,"finish_reason":"length","token_ids":[]}',
        ]
        assert normal(response.text) == "".join(map(completion_chunk, expected)) + DONE


async def test_golden_whole_answers() -> None:
    async with world(ScriptedScheduler(says("ab"))) as w:
        usage = (
            '"usage":{"prompt_tokens":5,"completion_tokens":2,"total_tokens":7,'
            '"prompt_tokens_details":{"cached_tokens":0}}'
        )
        response = await w.complete(max_tokens=2)
        assert normal(response.text) == (
            '{"id":"cmpl-X","object":"text_completion","created":0,"model":"fake-model","choices":['
            '{"index":0,"text":"ab","logprobs":null,"finish_reason":"length"}],' + usage + "}"
        )
        response = await w.chat(max_tokens=2, return_token_ids=True)
        answer = response.json()
        assert answer["object"] == "chat.completion"
        assert answer["choices"] == [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "ab", "refusal": None},
                "logprobs": None,
                "finish_reason": "length",
                "token_ids": [97, 98],
            }
        ]
        assert len(answer["prompt_token_ids"]) == answer["usage"]["prompt_tokens"]


async def test_stream_01_stop_string_hold_back() -> None:
    text = "the quick brown fox jumps over the lazy dog"
    async with world(ScriptedScheduler(says(text))) as w:
        for stop in (["brown fox"], "wn fo", ["zzz", "k brow"]):
            found = text.index(stop[-1] if isinstance(stop, list) else stop)
            response = await w.complete(max_tokens=40, stream=True, stop=stop)
            events = events_of(response.text)
            assert text_of(events) == text[:found]
            assert [event["choices"][0]["finish_reason"] for event in events[:-1]][-1] == "stop"
            assert all(event["choices"][0]["text"] for event in events[:-2])
            await await_until(lambda: not w.scheduler.runs, 2, "the request is cancelled")


async def test_stream_01_nothing_of_the_tokens_behind_the_stop_is_counted() -> None:
    async with world(ScriptedScheduler(says("one two three four"))) as w:
        answer = (await w.complete(max_tokens=18, stop=["two"], return_token_ids=True)).json()
        assert answer["choices"][0]["text"] == "one "
        assert bytes(answer["choices"][0]["token_ids"]) == b"one two"
        assert answer["usage"]["completion_tokens"] == len("one two")
        await await_until(lambda: w.scheduler.cancels, 2, "the scheduler was told")
        assert w.scheduler.cancels[-1].request_id == w.scheduler.submits[-1].request_id


async def test_stream_02_tail_is_flushed_at_the_end() -> None:
    text = "twelve bytes"
    async with world(ScriptedScheduler(says(text))) as w:
        for stop in ([text[-4:] + "\u0001"], ["never-there-zzz"]):
            streamed = events_of((await w.complete(max_tokens=12, stream=True, stop=stop)).text)
            whole = (await w.complete(max_tokens=12, stop=stop)).json()
            assert text_of(streamed) == text == whole["choices"][0]["text"]
            assert streamed[-2]["choices"][0]["finish_reason"] == "length"


async def test_stream_03_characters_spread_over_tokens() -> None:
    text = "😀👩‍👩‍👧 漢字 ไทย ď"
    async with world(ScriptedScheduler(says(text))) as w:
        events = events_of((await w.complete(max_tokens=200, stream=True)).text)
        assert text_of(events) == text == (await w.complete(max_tokens=200)).json()["choices"][0]["text"]
        assert not any("\ufffd" in str(event) for event in events)


async def test_stream_03_a_broken_character_at_the_end_is_told_once() -> None:
    async with world(ScriptedScheduler(says("é"))) as w:
        events = events_of((await w.complete(max_tokens=1, stream=True)).text)
        assert text_of(events) == "\ufffd" == (await w.complete(max_tokens=1)).json()["choices"][0]["text"]


async def test_stream_04_joined_deltas_are_the_whole_decode() -> None:
    async with world(ScriptedScheduler()) as w:
        tokenizer = w.gateway.tokenizer

        async def one(index: int) -> None:
            prompt = f"prompt number {index}" + (", " if index % 2 else "")
            response = await w.complete(prompt=prompt, max_tokens=20, stream=True, return_token_ids=True, seed=index)
            events = events_of(response.text)
            ids = [token for event in events[:-1] for token in event["choices"][0].get("token_ids", [])]
            assert len(ids) == 20
            assert text_of(events) == tokenizer.decode(ids, skip_special_tokens=True)
            assert text_of(events).startswith(" ")

        for index in range(10):
            await one(index)
        await asyncio.gather(*map(one, range(50)))


@pytest.mark.parametrize(
    ("max_tokens", "script"), [(5, says("hello")), (1, says("h")), (5, lambda _: Answer([EOS], "stop"))]
)
async def test_stream_05_shape_of_a_chat_stream(max_tokens: int, script: Script) -> None:
    async with world(ScriptedScheduler(script)) as w:
        response = await w.chat(max_tokens=max_tokens, stream=True)
        events = events_of(response.text)
        assert events[-1] == "[DONE]"
        choices = [event["choices"][0] for event in events[:-1]]
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert not any("role" in choice["delta"] for choice in choices[1:])
        assert all("finish_reason" in choice for choice in choices)
        assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == [
            choices[-1]["finish_reason"]
        ]
        assert len({(event["id"], event["created"]) for event in events[:-1]}) == 1


async def stream_by_hand(w: World, num_ticks: int) -> httpx.Response:
    """A chat whose tokens leave once its headers have come."""
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 200, "stream": True}
    async with w.http.stream("POST", "/v1/chat/completions", json=body) as response:
        for _ in range(num_ticks):
            w.scheduler.tick()
        await response.aread()
    return response


async def test_stream_06_a_failure_after_the_first_byte_is_one_error_event() -> None:
    async with world(ScriptedScheduler(says("abc", "error", error="the executor failed"), auto=False)) as w:
        response = await stream_by_hand(w, 3)
        events = events_of(response.text)
        assert response.status_code == 200
        assert text_of(events) == "abc"
        assert events[-1] == "[DONE]"
        error = {"type": "server_error", "param": None, "code": "internal_error"}
        assert events[-2] == {"error": {"message": "the executor failed", **error}}
        assert not any(event["choices"][0]["finish_reason"] for event in events[:-2])
        stream = await w.openai.chat.completions.create(
            model="default", messages=[{"role": "user", "content": "hi"}], stream=True
        )
        for _ in range(3):
            w.scheduler.tick()
        with pytest.raises(openai.APIError, match="the executor failed"):
            async for _ in stream:
                pass
        w.scheduler.auto = True
        assert (await w.chat(max_tokens=200)).status_code == 500


async def test_a_deadline_that_passes_is_an_error_of_its_own() -> None:
    scheduler = ScriptedScheduler(says("abc", "deadline", error="the deadline of 9 ms has passed"), auto=False)
    async with world(scheduler) as w:
        events = events_of((await stream_by_hand(w, 3)).text)
        assert events[-1] == "[DONE]"
        error = {"type": "timeout_error", "param": None, "code": "deadline_exceeded"}
        assert events[-2] == {"error": {"message": "the deadline of 9 ms has passed", **error}}
        w.scheduler.auto = True
        response = await w.chat(max_tokens=200)
        assert (response.status_code, response.json()["error"]["code"]) == (504, "deadline_exceeded")


async def test_stream_06_abort_never_reaches_a_client() -> None:
    async with world(ScriptedScheduler(says("abc", "cancelled"), auto=False)) as w:
        assert "error" in events_of((await stream_by_hand(w, 3)).text)[-2]
        w.scheduler.auto = True
        assert (await w.chat(max_tokens=200)).status_code == 500


async def test_stream_07_usage_only_on_request_and_summed() -> None:
    async with world(ScriptedScheduler()) as w:
        for post in (w.chat, w.complete):
            for options in (None, {"include_usage": False}):
                events = events_of((await post(max_tokens=3, stream=True, stream_options=options)).text)
                assert not any("usage" in event for event in events[:-1])
            events = events_of((await post(max_tokens=3, stream=True, stream_options={"include_usage": True})).text)
            whole = (await post(max_tokens=3)).json()
            assert events[-2]["choices"] == []
            assert events[-2]["usage"] == whole["usage"]
            assert all(event["usage"] is None for event in events[:-2])
            assert events[-3]["choices"][0]["finish_reason"] == "length"


async def test_stream_07_usage_of_a_list_of_prompts() -> None:
    async with world(ScriptedScheduler()) as w:
        fields = {"prompt": ["a", "b b b"], "n": 2, "max_tokens": 3, "seed": 5}
        whole = (await w.complete(**fields)).json()
        assert whole["usage"]["prompt_tokens"] == 1 + 5
        assert whole["usage"]["completion_tokens"] == 4 * 3
        response = await w.complete(**fields, stream=True, stream_options={"include_usage": True})
        events = events_of(response.text)
        assert events[-2]["usage"] == whole["usage"]
        for choice in whole["choices"]:
            assert text_of(events, choice["index"]) == choice["text"]
        assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]


async def test_continuous_usage_is_on_every_chunk() -> None:
    async with world(ScriptedScheduler()) as w:
        options = {"include_usage": True, "continuous_usage_stats": True}
        events = events_of((await w.complete(max_tokens=3, stream=True, stream_options=options)).text)
        assert [event["usage"]["completion_tokens"] for event in events[:-1]][-1] == 3
        assert all(event["usage"]["prompt_tokens"] == 5 for event in events[:-1])


async def test_sample_18_choices_have_seeds_of_their_own_and_the_first_is_the_result_for_one() -> None:
    async with world(ScriptedScheduler()) as w:
        one = (await w.complete(seed=7, max_tokens=4)).json()["choices"]
        three = (await w.complete(seed=7, max_tokens=4, n=3)).json()["choices"]
        again = (await w.complete(seed=7, max_tokens=4, n=3)).json()["choices"]
        assert three[0]["text"] == one[0]["text"]
        assert len({choice["text"] for choice in three}) == 3
        assert three == again


async def test_one_event_per_token_while_the_client_keeps_up() -> None:
    async with world(ScriptedScheduler()) as w:
        events = events_of((await w.complete(max_tokens=200, stream=True)).text)
        assert len(events) >= 0.98 * 200


async def test_signs_of_life_while_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "KEEP_ALIVE_S", 0.02)
    scheduler = ScriptedScheduler(auto=False)
    async with (
        world(scheduler) as w,
        w.http.stream("POST", "/v1/completions", json={"prompt": "a", "stream": True, "max_tokens": 1}) as response,
    ):
        assert response.status_code == 200
        lines = response.aiter_lines()
        assert [await anext(lines) for _ in range(4)] == [": keep-alive", "", ": keep-alive", ""]
        scheduler.tick()
        rest = [line async for line in lines]
        assert rest[-2] == "data: [DONE]"


async def _read_nothing(w: World, num_tokens: int) -> tuple[Any, Any]:
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", w.port))
    reader, writer = await asyncio.open_connection(sock=client, limit=1024)
    body = httpx.Request(
        "POST", w.url, json={"prompt": "a", "stream": True, "max_tokens": num_tokens, "ignore_eos": True}
    ).content
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await writer.drain()
    return reader, writer


async def test_a_client_that_does_not_read_is_cut_off_and_blocks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "MAX_WAITING_TOKENS", 300)
    scheduler = ScriptedScheduler(lambda submit: Answer([300] * submit.max_tokens))
    facts = fake_model.facts(context_len=1_000_000)
    scheduler.facts = facts
    async with world(scheduler) as w:
        reader, writer = await _read_nothing(w, 900_000)
        await await_until(lambda: scheduler.runs, 5, "the greedy request runs")
        other = await w.complete(max_tokens=20)
        assert other.status_code == 200
        await await_until(lambda: scheduler.cancels, 60, "the client that does not read is cut off")
        await w.until_idle()
        writer.close()
        assert reader is not None
