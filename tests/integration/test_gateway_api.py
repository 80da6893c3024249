"""Cases API 11-16, SAMPLE 17, 19 and 20: what is refused and how, and what reaches the scheduler."""

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator

import pytest

from services.gateway.api.schema import unknown_fields
from shared import fake_model
from shared.wire import tokens
from tests.fakes.gateway_world import error_of, events_of, text_of, world
from tests.fakes.scripted_scheduler import Answer, ScriptedScheduler
from tests.fakes.waiting import await_until

V = fake_model.VOCAB_SIZE
L = fake_model.CONTEXT_LEN


async def test_api_11_empty_prompts() -> None:
    async with world(ScriptedScheduler()) as w:
        for prompt in ("", [""], [], [[]], ["a", ""], [[1], []], None, 5, {"a": 1}, ["a", [1]], [None]):
            for stream in (True, False):
                error_of(await w.complete(prompt=prompt, stream=stream), "prompt")
        assert not w.scheduler.submits
        assert (await w.complete()).status_code == 200


async def test_api_12_token_ids_outside_the_vocabulary() -> None:
    scheduler = ScriptedScheduler(auto=False)
    async with world(scheduler) as w:
        other = asyncio.create_task(w.complete(max_tokens=50, stream=True))
        await await_until(lambda: scheduler.runs, 5, "a stream runs meanwhile")
        for bias in ({str(V): 1}, {"-1": 1}, {"abc": 1}, {"5": "x"}, {"5": 1e9}, {"": 1}, {"\u0665": 1}):
            error_of(await w.complete(logit_bias=bias), "logit_bias")
        for prompt in ([-1], [V], [1.5], [True], [2**40], [0, "a"], [[0], [V]]):
            error_of(await w.complete(prompt=prompt), "prompt")
        for ids in ([-1], [V], [1.5], ["a"], [True]):
            error_of(await w.complete(stop_token_ids=ids), "stop_token_ids")
        scheduler.auto = True
        assert (await w.complete(prompt=[0, V - 1], max_tokens=1)).status_code == 200
        assert tokens.unpack(scheduler.submits[-1].prompt) == [0, V - 1]
        assert (await other).text.endswith("[DONE]\n\n")


BAD_NUMBERS = [
    ("seed", 18446744073709551616),
    ("seed", 1.5),
    ("top_logprobs", 1000000),
    ("top_logprobs", 21),
    ("top_logprobs", -1),
    ("top_logprobs", 5),
    ("logprobs", 5),
    ("echo", True),
    ("n", 1000000),
    ("n", 0),
    ("n", True),
    ("temperature", 1e300),
    ("temperature", -1),
    ("temperature", "hot"),
    ("top_p", -1),
    ("top_p", 1.0001),
    ("min_p", 2),
    ("repetition_penalty", 0),
    ("repetition_penalty", 1e-5),
    ("repetition_penalty", 101),
    ("repetition_penalty", "1"),
    ("presence_penalty", 2.1),
    ("frequency_penalty", -2.1),
    ("logit_bias", {"5": 100.5}),
    ("logit_bias", {"5": True}),
    ("logit_bias", [5]),
    ("logit_bias", {str(token): 1 for token in range(1025)}),
    ("top_k", 0.01),
    ("top_k", "5"),
    ("top_k", -2),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", 2**40),
    ("max_tokens", True),
    ("min_tokens", -1),
    ("priority", 2**40),
    ("deadline_ms", -5),
    ("stop", [""]),
    ("stop", ""),
    ("stop", ["a"] * 17),
    ("stop", 5),
    ("stream", "yes"),
    ("stream_options", {"include_usage": 1}),
    ("best_of", 2),
]


async def test_api_13_numbers_out_of_bounds() -> None:
    async with world(ScriptedScheduler()) as w:
        await w.chat(max_tokens=1)
        num_submits = len(w.scheduler.submits)
        for name, value in BAD_NUMBERS:
            started = time.perf_counter()
            response = await w.chat(**{name: value, "stream": value if name == "stream" else name == "stream_options"})
            assert time.perf_counter() - started < 1.0
            error_of(response, name)
        for literal in ("NaN", "Infinity", "-Infinity", "1e999"):
            body = '{"messages":[{"role":"user","content":"hi"}],"temperature":' + literal + "}"
            error_of(await w.http.post("/v1/chat/completions", content=body))
        assert len(w.scheduler.submits) == num_submits
        assert (await w.chat(seed=-1, max_tokens=1)).status_code == 200


async def test_api_13_bodies_that_are_no_request() -> None:
    async with world(ScriptedScheduler()) as w:
        bodies = [b"", b"{", b"[]", b"5", b"null", b'"x"', b"\xff", b'{"prompt":"\\ud800"}', b"[" * 100_000]
        nested = b'{"prompt":"a","x":' + b"[" * 50_000 + b"]" * 50_000 + b"}"
        for body in [*bodies, nested, b'{"prompt":"a",}', b'{"prompt":"a"} x']:
            for path in ("/v1/completions", "/v1/chat/completions"):
                error_of(await w.http.post(path, content=body))
        too_large = await w.http.post("/v1/completions", content=b" " * (8 * 1024 * 1024 + 1))
        assert (too_large.status_code, too_large.json()["error"]["code"]) == (413, "body_too_large")
        assert (await w.http.post("/v1/completions", content=_pieces(9))).status_code == 413
        assert (await w.complete()).status_code == 200


NESTS = {"list": ("[", "]"), "object": ('{"a":', "}"), "schema": ('{"type":"object","properties":{"a":', "}}")}
NESTED = [
    ("/v1/completions", '{"prompt":"a","max_tokens":1,"stop":NEST}'),
    ("/v1/completions", '{"prompt":NEST,"max_tokens":1}'),
    ("/v1/completions", '{"prompt":"a","max_tokens":1,"structured_outputs":{"json":NEST}}'),
    ("/v1/chat/completions", '{"messages":NEST,"max_tokens":1}'),
    ("/v1/chat/completions", '{"messages":[{"role":"user","content":NEST}],"max_tokens":1}'),
    (
        "/v1/chat/completions",
        '{"messages":[{"role":"assistant","tool_calls":[{"id":"1","type":"function","function":'
        '{"name":"f","arguments":NEST}}]}],"max_tokens":1}',
    ),
    (
        "/v1/chat/completions",
        '{"messages":[{"role":"user","content":"hi"}],"max_tokens":1,"tools":[{"type":"function",'
        '"function":{"name":"f","parameters":NEST}}],"tool_choice":"required"}',
    ),
    ("/v1/responses", '{"input":NEST,"max_output_tokens":1}'),
    ("/v1/messages", '{"model":"default","messages":NEST,"max_tokens":1}'),
    ("/tokenize", '{"messages":NEST}'),
]
"""Where a client may put something nested."""


@pytest.mark.parametrize("depth", [60, 450, 900, 100_000])
async def test_api_13_whatever_is_nested_too_deeply_is_400(depth: int) -> None:
    """Never a crash, nor a RecursionError, neither where it is read nor where it is used."""
    async with world(ScriptedScheduler()) as w:
        for opening, closing in NESTS.values():
            nest = opening * depth + "1" + closing * depth
            for path, body in NESTED:
                response = await w.http.post(path, content=body.replace("NEST", nest))
                assert response.status_code in (200, 400), (path, response.status_code)
                assert response.status_code == 400 or depth < 100_000
        assert (await w.complete(max_tokens=1)).status_code == 200


async def _pieces(num_mebibytes: int) -> AsyncIterator[bytes]:
    """A body of unannounced length."""
    for _ in range(num_mebibytes):
        yield b" " * 1024 * 1024


async def test_api_13_mutated_bodies_never_give_a_5xx() -> None:
    source = random.Random(13)
    good = (
        b'{"model":"default","messages":[{"role":"user","content":"hi"}],"n":2,"temperature":0.7,"top_p":0.9,'
        b'"max_tokens":3,"stop":["x"],"stream":false,"seed":5,"top_k":3,"min_tokens":1,"input":[{"role":"user",'
        b'"content":"hi"}],"system":[{"type":"text","text":"a"}],"tokens":[1],"metadata":{"a":"b"}%s}'
    )
    paths = {
        "/v1/completions": b',"prompt":"hello"',
        "/v1/chat/completions": b',"tools":[{"type":"function","function":{"name":"f"}}]',
        "/v1/responses": b',"text":{"format":{"type":"text"}},"tools":[{"type":"function","name":"f"}]',
        "/v1/messages": b',"tools":[{"name":"f","input_schema":{}}],"tool_choice":{"type":"auto"}',
        "/v1/messages/count_tokens": b"",
        "/tokenize": b"",
        "/detokenize": b"",
    }
    pieces = [
        b"null",
        b"-1",
        b"{}",
        b"[]",
        b'""',
        b"true",
        b"1e400",
        b"\xff",
        b"{",
        b"99999999999999999999",
        b'"\\u0000"',
    ]
    async with world(ScriptedScheduler(), tool_call_parser="hermes") as w:
        for round_number in range(420):
            path = [*paths][round_number % len(paths)]
            whole = good % paths[path]
            start = source.randrange(len(whole))
            body = whole[:start] + source.choice(pieces) + whole[start + source.randrange(12) :]
            response = await w.http.post(path, content=body)
            assert response.status_code < 500, body
            if round_number < len(paths):
                assert (await w.http.post(path, content=whole)).status_code == 200, path
        await w.until_idle()


async def test_api_14_unknown_fields_are_ignored_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    unknown_fields._seen.clear()
    fields = {"user": "u1", "store": False, "service_tier": "auto", "some_typo": 3, "max_tokens": 3}
    message = {"role": "user", "content": "hi", "name": "bob", "x_meta": {"a": 1}}
    async with world(ScriptedScheduler()) as w:
        with caplog.at_level(logging.INFO, "services.gateway.api.schema"):
            for _ in range(3):
                assert (await w.chat(messages=[message], **fields)).status_code == 200
            for number in range(500):
                unknown_fields.note(f"field {number}")
    names = [record.getMessage() for record in caplog.records]
    assert sum("some_typo" in name for name in names) == 1
    assert sum("x_meta" in name for name in names) == 1
    assert not any("service_tier" in name for name in names)
    assert len(names) <= unknown_fields.MAX_NAMES


async def test_api_15_the_same_request_id_twice() -> None:
    scheduler = ScriptedScheduler(auto=False)
    async with world(scheduler) as w:
        headers = {"X-Request-Id": "same"}
        fields = {"max_tokens": 5, "seed": 1, "request_id": "same"}
        first = asyncio.create_task(w.http.post("/v1/completions", json={**fields, "prompt": "a"}, headers=headers))
        second = asyncio.create_task(w.http.post("/v1/completions", json={**fields, "prompt": "bb"}, headers=headers))
        await await_until(lambda: len(scheduler.runs) == 2, 5, "both run")
        first.cancel()
        await await_until(lambda: len(scheduler.runs) == 1, 5, "the first is cancelled")
        third = asyncio.create_task(w.http.post("/v1/completions", json={**fields, "prompt": "a"}, headers=headers))
        await await_until(lambda: len(scheduler.runs) == 2, 5, "the third runs")
        scheduler.auto = True
        scheduler._keep_ticking()
        answers = [await second, await third]
        assert [answer.headers["x-request-id"] for answer in answers] == ["same", "same"]
        texts = [answer.json()["choices"][0]["text"] for answer in answers]
        assert texts == [
            (await w.complete(prompt=prompt, **fields)).json()["choices"][0]["text"] for prompt in ("bb", "a")
        ]


async def test_request_ids_are_made_up_where_missing_or_unfit() -> None:
    async with world(ScriptedScheduler()) as w:
        for given in (None, "x" * 200, "tab\there"):
            headers = {} if given is None else {"X-Request-Id": given}
            echoed = (await w.http.get("/health", headers=headers)).headers["x-request-id"]
            assert echoed
            assert echoed != given


async def test_api_16_lengths_around_the_context() -> None:
    async with world(ScriptedScheduler(lambda submit: Answer([300] * submit.max_tokens))) as w:
        for stream in (True, False):
            for max_tokens in (None, 1, 2):
                fields = {"max_tokens": max_tokens, "stream": stream}
                for length in (L, L + 1, 10 * L):
                    error = error_of(await w.complete(prompt=[5] * length, **fields))
                    assert str(length) in error["message"]
                    assert str(L) in error["message"]
                    assert error["code"] == "context_length_exceeded"
                response = await w.complete(prompt=[5] * (L - 1), **fields)
                assert response.status_code == 200
                assert w.scheduler.submits[-1].max_tokens == 1
        answer = (await w.complete(prompt=[5] * (L - 1), max_tokens=1)).json()
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 1


async def test_max_tokens_defaults() -> None:
    async with world(ScriptedScheduler(lambda submit: Answer([300]))) as w:
        for fields in ({}, {"max_tokens": None}):
            await w.complete(**fields)
            assert w.scheduler.submits[-1].max_tokens == 16
            await w.chat(**fields)
            assert w.scheduler.submits[-1].max_tokens == L - len(w.scheduler.submits[-1].prompt) // 4
        await w.chat(max_tokens=3, max_completion_tokens=5)
        assert w.scheduler.submits[-1].max_tokens == 5
        await w.complete(max_tokens=10 * L)
        assert w.scheduler.submits[-1].max_tokens == L - 5


async def test_sample_17_tiny_temperatures_are_greedy() -> None:
    async with world(ScriptedScheduler()) as w:
        for temperature, sent in ((0, 0.0), (1e-9, 0.0), (9e-6, 0.0), (1e-4, 1e-4), (None, 1.0)):
            await w.complete(temperature=temperature, seed=1)
            assert w.scheduler.submits[-1].sampling.temperature == sent


async def test_sample_19_min_tokens() -> None:
    async with world(ScriptedScheduler(lambda submit: Answer([*b"a\nb\nc\nd\ne\n"][: submit.max_tokens]))) as w:
        answer = (await w.complete(stop=["\n"], min_tokens=4, max_tokens=10)).json()
        assert answer["choices"][0] == {"index": 0, "text": "a\nb\nc", "logprobs": None, "finish_reason": "stop"}
        assert answer["usage"]["completion_tokens"] == 6
        sampling = w.scheduler.submits[-1].sampling
        assert sampling.min_tokens == 4
        assert tokens.unpack(sampling.stop_token_ids) == fake_model.EOS_TOKEN_IDS
        await w.complete(min_tokens=2, stop_token_ids=[7], ignore_eos=True)
        submit = w.scheduler.submits[-1]
        assert tokens.unpack(submit.sampling.stop_token_ids) == [7, *fake_model.EOS_TOKEN_IDS]
        assert (submit.ignore_eos, tokens.unpack(submit.stop_token_ids)) == (True, [7])
        error_of(await w.complete(min_tokens=41, max_tokens=40), "min_tokens")
        error_of(await w.complete(min_tokens=17), "min_tokens")


async def test_sample_20_what_off_means() -> None:
    async with world(ScriptedScheduler()) as w:
        for top_k, sent in ((-1, 0), (0, 0), (1, 1), (V, 0), (V + 1, 0), (None, 0), (5, 5)):
            assert (await w.complete(top_k=top_k, temperature=1, seed=1)).status_code == 200
            assert w.scheduler.submits[-1].sampling.top_k == sent
        for top_p, sent_p, temperature in ((0, 1.0, 0.0), (1e-6, 1e-6, 1.0), (1, 1.0, 1.0), (None, 1.0, 1.0)):
            assert (await w.complete(top_p=top_p, temperature=1, seed=1)).status_code == 200
            sampling = w.scheduler.submits[-1].sampling
            assert (sampling.top_p, sampling.temperature) == (sent_p, temperature)
        error_of(await w.complete(top_p=1.0001), "top_p")


async def test_fields_for_the_scheduler_are_passed_on() -> None:
    async with world(ScriptedScheduler()) as w:
        await w.complete(priority=-3, deadline_ms=5000, cache_salt="tenant 7", seed=9)
        submit = w.scheduler.submits[-1]
        assert (submit.priority, submit.salt, submit.sampling.seed) == (-3, "tenant 7", 9)
        assert 4000 < submit.deadline_ms <= 5000
        await w.complete()
        await w.complete(seed=-1)
        seeds = [submit.sampling.seed for submit in w.scheduler.submits[-2:]]
        assert seeds[0] != seeds[1]


async def test_the_text_may_end_with_the_stop_string() -> None:
    async with world(ScriptedScheduler(lambda submit: Answer([*b"one two three"][: submit.max_tokens]))) as w:
        for included, text in ((True, "one two"), (False, "one "), (None, "one ")):
            fields = {"stop": ["two"], "max_tokens": 13, "include_stop_str_in_output": included}
            choice = (await w.complete(**fields)).json()["choices"][0]
            assert (choice["text"], choice["finish_reason"]) == (text, "stop")
            assert text_of(events_of((await w.chat(**fields, stream=True)).text)) == text


async def test_the_effort_of_reasoning_is_told_to_the_template() -> None:
    template = "{{ reasoning_effort | default('none given') }}"
    async with world(ScriptedScheduler(), trust_request_chat_template=True) as w:
        for fields, told in (
            ({}, "none given"),
            ({"reasoning_effort": "low"}, "low"),
            ({"chat_template_kwargs": {"reasoning_effort": "high"}}, "high"),
        ):
            assert (await w.chat(max_tokens=1, chat_template=template, **fields)).status_code == 200
            prompt = tokens.unpack(w.scheduler.submits[-1].prompt)
            assert b"".join(map(fake_model.token_bytes, prompt)).decode() == told


async def test_seeds_of_requests_without_one_repeat_with_the_option() -> None:
    rows = []
    for _ in range(2):
        async with world(ScriptedScheduler(), seed=11) as w:
            await w.complete()
            await w.complete()
            rows.append([submit.sampling.seed for submit in w.scheduler.submits])
    assert rows[0] == rows[1]
    assert len(set(rows[0])) == 2


async def test_neutral_values_of_unsupported_fields_pass() -> None:
    fields = {
        "echo": False,
        "tools": [],
        "response_format": {"type": "text"},
        "max_tokens": 1,
    }
    async with world(ScriptedScheduler()) as w:
        assert (await w.chat(**fields)).status_code == 200
        tool = {"type": "function", "function": {"name": "f"}}
        assert (await w.chat(tools=[tool], tool_choice="none", max_tokens=1)).status_code == 200
        assert (await w.complete(best_of=1, echo=False, suffix=None, logprobs=None)).status_code == 200
        for name, value in (("suffix", "x"), ("top_logprobs", 5), ("prompt_logprobs", 5)):
            error_of(await w.complete(**{name: value}), name)


async def test_model_names() -> None:
    async with world(ScriptedScheduler()) as w:
        for name in (None, "default", "fake-model"):
            assert (await w.complete(model=name)).status_code == 200
        response = await w.chat(model="gpt-4")
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "model_not_found"
        assert (await w.http.get("/v1/models")).json()["data"][0]["id"] == "fake-model"
        assert (await w.http.get("/v1/models/default")).json()["max_model_len"] == L
        assert (await w.http.get("/v1/models/other/name")).status_code == 404
        assert (await w.http.get("/v1/nothing")).json()["error"]["type"] == "not_found_error"


async def test_other_methods_and_paths_than_those_written_out() -> None:
    async with world(ScriptedScheduler()) as w:
        refused = await w.http.get("/v1/completions")
        assert (refused.status_code, refused.headers["allow"]) == (405, "POST")
        assert refused.json()["error"]["message"] == "Method Not Allowed"
        assert set((await w.http.post("/health")).headers["allow"].split(", ")) == {"GET", "HEAD"}
        head = await w.http.head("/health")
        assert (head.status_code, head.content) == (200, b"")
        assert (await w.http.get("/health/", follow_redirects=True)).json() == {"status": "ok"}


async def test_skip_special_tokens() -> None:
    async with world(ScriptedScheduler(lambda submit: Answer([65, fake_model.END_OF_TEXT, 66]))) as w:
        for skip, text in ((None, "AB"), (True, "AB"), (False, "A<|endoftext|>B")):
            fields = {"skip_special_tokens": skip, "ignore_eos": True, "max_tokens": 3}
            assert (await w.complete(**fields)).json()["choices"][0]["text"] == text
            assert text_of(events_of((await w.complete(stream=True, **fields)).text)) == text


async def test_too_many_choices_in_all() -> None:
    async with world(ScriptedScheduler()) as w:
        error_of(await w.complete(prompt=["a"] * 100, n=128), "n")
        error_of(await w.complete(prompt=["a"] * 2000), "prompt")
