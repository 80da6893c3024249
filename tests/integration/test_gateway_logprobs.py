"""Case SAMPLE 21 of the known failures; logprobs, echo and penalties over HTTP, and the exact bytes of streams."""

import asyncio
import json
import math
from typing import Any

import pytest

from shared import fake_model
from shared.wire import tokens
from tests.fakes.gateway_world import error_of, events_of, text_of, world
from tests.fakes.scripted_scheduler import Answer, ScriptedScheduler
from tests.fakes.waiting import await_until
from tests.integration.test_gateway_stream import DONE, END, ROLE, chat_chunk, completion_chunk, normal, says


def strict(body: str | bytes) -> Any:
    """JSON as the standard has it: no NaN, no Infinity."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(body, parse_constant=refuse)


def chat_entry(token: str, spelled: list[int], rank: int, top: str) -> str:
    values = ",".join(map(str, spelled))
    return f'{{"token":"{token}","logprob":{-0.5 * rank},"bytes":[{values}],"top_logprobs":[{top}]}}'


async def test_golden_chat_stream_with_logprobs() -> None:
    async with world(ScriptedScheduler(says("aé"))) as w:
        response = await w.chat(max_tokens=3, stream=True, logprobs=True, top_logprobs=1)
        expected = [ROLE]
        top = '{"token":"a","logprob":-0.5,"bytes":[97]}'
        content = chat_entry("a", [97], 1, top)
        expected.append(
            f'{{"index":0,"delta":{{"content":"a"}},"logprobs":{{"content":[{content}],"refusal":null}},'
            '"finish_reason":null}'
        )
        parts = []
        for byte in "é".encode():
            spelled = f"bytes:\\\\x{byte:02x}"
            parts.append(chat_entry(spelled, [byte], 1, f'{{"token":"{spelled}","logprob":-0.5,"bytes":[{byte}]}}'))
        expected.append(
            f'{{"index":0,"delta":{{"content":"é"}},"logprobs":{{"content":[{",".join(parts)}],"refusal":null}},'
            '"finish_reason":null}'
        )
        expected.append(END % "length")
        assert normal(response.text) == "".join(map(chat_chunk, expected)) + DONE


async def test_golden_chat_stream_whose_last_token_has_no_text() -> None:
    async with world(ScriptedScheduler(lambda submit: Answer([97, fake_model.IM_END], "stop"))) as w:
        response = await w.chat(max_tokens=3, stream=True, logprobs=True)
        told = '"logprobs":{"content":[%s],"refusal":null}'
        end = chat_entry("<|im_end|>", list(b"<|im_end|>"), 1, "")
        expected = [
            ROLE,
            f'{{"index":0,"delta":{{"content":"a"}},{told % chat_entry("a", [97], 1, "")},"finish_reason":null}}',
            f'{{"index":0,"delta":{{}},{told % end},"finish_reason":"stop"}}',
        ]
        assert normal(response.text) == "".join(map(chat_chunk, expected)) + DONE


async def test_golden_completion_stream_with_echo() -> None:
    async with world(ScriptedScheduler(says("xy"))) as w:
        response = await w.complete(prompt="ab", max_tokens=2, stream=True, logprobs=1, echo=True)
        expected = [
            '{"index":0,"text":"ab","logprobs":{"text_offset":[0,1],"token_logprobs":[null,-1.0],"tokens":["a","b"],'
            '"top_logprobs":[null,{"a":-0.5,"b":-1.0}]},"finish_reason":null}',
            '{"index":0,"text":"x","logprobs":{"text_offset":[2],"token_logprobs":[-0.5],"tokens":["x"],'
            '"top_logprobs":[{"x":-0.5}]},"finish_reason":null}',
            '{"index":0,"text":"y","logprobs":{"text_offset":[3],"token_logprobs":[-0.5],"tokens":["y"],'
            '"top_logprobs":[{"y":-0.5}]},"finish_reason":null}',
            '{"index":0,"text":"","logprobs":null,"finish_reason":"length"}',
        ]
        assert normal(response.text) == "".join(map(completion_chunk, expected)) + DONE


async def test_golden_whole_answers_with_logprobs() -> None:
    async with world(ScriptedScheduler(says("xy"))) as w:
        response = await w.complete(prompt="ab", max_tokens=1, logprobs=0, echo=True)
        usage = (
            '"usage":{"prompt_tokens":2,"completion_tokens":1,"total_tokens":3,'
            '"prompt_tokens_details":{"cached_tokens":0}}'
        )
        assert normal(response.text) == (
            '{"id":"cmpl-X","object":"text_completion","created":0,"model":"fake-model","choices":['
            '{"index":0,"text":"abx","logprobs":{"text_offset":[0,1,2],"token_logprobs":[null,-1.0,-0.5],'
            '"tokens":["a","b","x"],"top_logprobs":[null,{"b":-1.0},{"x":-0.5}]},"finish_reason":"length"}],'
            + usage
            + "}"
        )
        answer = strict((await w.chat(max_tokens=1, logprobs=True, top_logprobs=2)).text)
        assert answer["choices"][0]["logprobs"] == {
            "content": [
                {
                    "token": "x",
                    "logprob": -0.5,
                    "bytes": [120],
                    "top_logprobs": [
                        {"token": "x", "logprob": -0.5, "bytes": [120]},
                        {"token": "y", "logprob": -1.0, "bytes": [121]},
                    ],
                }
            ],
            "refusal": None,
        }


async def test_sample_21_strict_json_and_numbers_that_are_finite() -> None:
    async with world(ScriptedScheduler(says("xyz"))) as w:
        fields = {"prompt": "correct horse", "echo": True, "logprobs": 5, "temperature": 1, "top_k": 1, "max_tokens": 3}
        whole = strict((await w.complete(**fields)).text)["choices"][0]
        assert whole["logprobs"]["token_logprobs"][0] is whole["logprobs"]["top_logprobs"][0] is None
        assert all(math.isfinite(value) for value in whole["logprobs"]["token_logprobs"][1:])
        assert len(whole["logprobs"]["tokens"]) == len("correct horse") + 3
        chat = {"logprobs": True, "top_logprobs": 20, "logit_bias": {"120": -100}, "max_tokens": 3}
        content = strict((await w.chat(**chat)).text)["choices"][0]["logprobs"]["content"]
        assert [len(entry["top_logprobs"]) for entry in content] == [20] * 3
        for post, asked in ((w.complete, fields), (w.chat, chat)):
            response = await post(**asked, stream=True)
            for line in response.text.split("\n\n")[:-2]:
                strict(line.removeprefix("data: "))
        sampling = w.scheduler.submits[-1].sampling
        assert tokens.unpack(sampling.bias_ids) == [120]
        assert tokens.unpack_floats(sampling.bias_values) == [-100.0]


async def test_streamed_and_whole_tell_the_same() -> None:
    text = "two 🙂 wörds"
    async with world(ScriptedScheduler(says(text))) as w:
        for more in ({}, {"echo": True}, {"stop": ["rds"]}, {"stop": ["zzz", "🙂 x"]}):
            fields = {"prompt": "é?", "max_tokens": 40, "logprobs": 2, "return_token_ids": True, **more}
            whole = (await w.complete(**fields)).json()["choices"][0]
            events = events_of((await w.complete(**fields, stream=True)).text)
            parts = [event["choices"][0] for event in events[:-1]]
            told = [part["logprobs"] for part in parts if part["logprobs"]]
            for key in ("text_offset", "token_logprobs", "tokens", "top_logprobs"):
                assert [item for part in told for item in part[key]] == whole["logprobs"][key]
            assert text_of(events) == whole["text"]
            ids = [token for part in parts for token in part.get("token_ids", [])]
            assert ids == whole["token_ids"]
            prompt_ids = list("é?".encode()) if "echo" in more else []
            assert len(whole["logprobs"]["tokens"]) == len(prompt_ids) + len(ids)
            check_offsets(whole, prompt_ids + ids)


def check_offsets(choice: dict[str, Any], ids: list[int]) -> None:
    """Each offset is the number of characters before the one in which the token begins."""
    offsets = choice["logprobs"]["text_offset"]
    for index, offset in enumerate(offsets):
        before = bytes(ids[:index])
        assert offset == len(before.decode(errors="ignore"))
    assert offsets[0] == 0


async def test_chat_chunks_carry_one_entry_per_counted_token() -> None:
    async with world(ScriptedScheduler(says("hold on, wait"))) as w:
        fields = {"max_tokens": 13, "logprobs": True, "top_logprobs": 3, "stop": ["on, wait!", "xyz"]}
        whole = (await w.chat(**fields)).json()
        events = events_of((await w.chat(**fields, stream=True)).text)
        parts = [event["choices"][0] for event in events[:-1]]
        content = [entry for part in parts if part["logprobs"] for entry in part["logprobs"]["content"]]
        assert content == whole["choices"][0]["logprobs"]["content"]
        assert len(content) == whole["usage"]["completion_tokens"] == 13
        # the text that was held back as a possible stop string comes with what is told of its tokens
        last = next(part for part in parts if part["delta"].get("content") == "on, wait")
        assert [entry["token"] for entry in last["logprobs"]["content"]] == list("on, wait")


@pytest.mark.parametrize("stream", [False, True])
async def test_only_the_prompt(stream: bool) -> None:
    async with world(ScriptedScheduler(says("xyz"))) as w:
        response = await w.complete(
            prompt=["abc", "d"], max_tokens=0, logprobs=1, echo=True, n=2, stream=stream, return_token_ids=True
        )
        assert response.status_code == 200, response.text
        if stream:
            events = events_of(response.text)
            for index, text in enumerate(("abc", "abc", "d", "d")):
                parts = [event["choices"][0] for event in events[:-1] if event["choices"][0]["index"] == index]
                assert "".join(part["text"] for part in parts) == text
                assert parts[-1]["finish_reason"] == "length"
                assert [part["logprobs"]["tokens"] for part in parts if part["logprobs"]] == [list(text)]
        else:
            answer = response.json()
            assert [choice["text"] for choice in answer["choices"]] == ["abc", "abc", "d", "d"]
            assert answer["choices"][0]["logprobs"]["token_logprobs"] == [None, -1.0, -1.0]
            assert answer["choices"][3]["logprobs"]["token_logprobs"] == [None]
            assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
            assert {str(choice["token_ids"]) for choice in answer["choices"]} == {"[]"}
            assert answer["usage"]["completion_tokens"] == 0
        assert {submit.max_tokens for submit in w.scheduler.submits} == {1}
        for fields in ({"echo": True}, {"logprobs": 1}, {"echo": True, "logprobs": False}, {}):
            error_of(await w.complete(max_tokens=0, **fields), "max_tokens")


async def test_echo_without_logprobs() -> None:
    async with world(ScriptedScheduler(says(" there"))) as w:
        fields = {"max_tokens": 6, "echo": True}
        whole = (await w.complete(**fields)).json()["choices"][0]
        assert (whole["text"], whole["logprobs"]) == ("hello there", None)
        assert text_of(events_of((await w.complete(**fields, stream=True)).text)) == "hello there"
        assert not w.scheduler.submits[-1].sampling.prompt_logprobs
        ids = [*b"a", fake_model.IM_END, *b"b"]
        for skip, text in ((True, "ab there"), (False, "a<|im_end|>b there")):
            answer = await w.complete(prompt=ids, skip_special_tokens=skip, **fields)
            assert answer.json()["choices"][0]["text"] == text
        stopped = (await w.complete(prompt="a th", stop=["th"], **fields)).json()["choices"][0]
        assert stopped["text"] == "a th ", "a stop string in the prompt is none"


async def test_what_is_asked_for_reaches_the_scheduler() -> None:
    async with world(ScriptedScheduler()) as w:
        await w.complete(
            repetition_penalty=1.5,
            presence_penalty=-2,
            frequency_penalty=2.0,
            logit_bias={"9": 1, "5": -0.5},
            logprobs=7,
            echo=True,
        )
        sampling = w.scheduler.submits[-1].sampling
        assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.5, -2.0, 2.0)
        assert tokens.unpack(sampling.bias_ids) == [5, 9]
        assert tokens.unpack_floats(sampling.bias_values) == [-0.5, 1.0]
        assert (sampling.num_logprobs, sampling.prompt_logprobs) == (7, True)
        for post, fields, sent in (
            (w.chat, {}, -1),
            (w.chat, {"logprobs": False, "top_logprobs": 0}, -1),
            (w.chat, {"logprobs": True}, 0),
            (w.chat, {"logprobs": True, "top_logprobs": 20}, 20),
            (w.complete, {"logprobs": None}, -1),
            (w.complete, {"logprobs": False}, -1),
            (w.complete, {"logprobs": 0}, 0),
        ):
            assert (await post(max_tokens=1, **fields)).status_code == 200
            sampling = w.scheduler.submits[-1].sampling
            assert (sampling.num_logprobs, sampling.prompt_logprobs) == (sent, False)
            assert sampling.repetition_penalty == 1.0


async def test_api_13_logprobs_out_of_bounds() -> None:
    async with world(ScriptedScheduler()) as w:
        for value in (True, -1, 21, 1.5, "5"):
            error_of(await w.complete(logprobs=value), "logprobs")
        too_many = await w.complete(prompt=[5] * 8000, n=128, logprobs=0, echo=True, max_tokens=0)
        assert "more than 1000000" in error_of(too_many, "logprobs")["message"]
        assert not w.scheduler.submits


async def test_the_openai_client_reads_logprobs() -> None:
    async with world(ScriptedScheduler(says("hey"))) as w:
        messages: Any = [{"role": "user", "content": "hi"}]
        fields: Any = {"model": "default", "messages": messages, "max_tokens": 3, "logprobs": True, "top_logprobs": 2}
        chat = await w.openai.chat.completions.create(**fields)
        assert chat.choices[0].logprobs is not None
        content = chat.choices[0].logprobs.content
        assert content is not None
        assert [(entry.token, entry.logprob, entry.bytes) for entry in content] == [
            (char, -0.5, [ord(char)]) for char in "hey"
        ]
        assert [len(entry.top_logprobs) for entry in content] == [2] * 3
        w.scheduler.script = lambda submit: Answer([*b"hey", fake_model.IM_END], "stop")
        async with w.openai.chat.completions.stream(**fields | {"max_tokens": 4}) as helper:
            final = await helper.get_final_completion()
        assert final.choices[0].logprobs is not None
        told_streamed = final.choices[0].logprobs.content
        assert told_streamed is not None
        assert [entry.model_dump() for entry in told_streamed[:3]] == [entry.model_dump() for entry in content]
        assert told_streamed[3].token == "<|im_end|>"
        w.scheduler.script = says("hey")
        completion = await w.openai.completions.create(
            model="default",
            prompt="ab",
            max_tokens=3,
            logprobs=1,
            echo=True,
            logit_bias={"5": -100},
            presence_penalty=1,
        )
        told = completion.choices[0].logprobs
        assert told is not None
        assert told.tokens == list("abhey")
        assert told.text_offset == [0, 1, 2, 3, 4]


async def test_what_is_told_of_a_long_prompt_is_written_off_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(ScriptedScheduler(says("xyz"))) as w:
        fields = {"prompt": "long " * 100, "max_tokens": 3, "logprobs": 20, "echo": True}
        threaded: list[object] = []
        in_thread = w.gateway.in_thread

        async def noted(work: Any) -> Any:
            threaded.append(work)
            return await in_thread(work)

        monkeypatch.setattr(w.gateway, "in_thread", noted)
        whole = strict((await w.complete(**fields)).text)["choices"][0]
        assert len(threaded) == 2, "the echo of the prompt, and the answer"
        events = events_of((await w.complete(**fields, stream=True)).text)
        assert len(threaded) == 4
        assert text_of(events) == whole["text"] == "long " * 100 + "xyz"
        assert len(whole["logprobs"]["tokens"]) == 503


async def test_a_restarted_scheduler_may_tell_of_the_prompt_again() -> None:
    scheduler = ScriptedScheduler(says("xyz"), auto=False)
    async with world(scheduler) as w:
        fields = {"prompt": "abcdef", "max_tokens": 3, "logprobs": 1, "echo": True}
        task = asyncio.create_task(w.complete(**fields))
        await await_until(lambda: scheduler.runs, 5, "it runs")
        scheduler.tick()  # the first tokens of the prompt
        await scheduler.close()
        scheduler.reopen()
        await await_until(lambda: scheduler.runs, 10, "it is submitted again")
        scheduler.auto = True
        scheduler._keep_ticking()
        choice = (await task).json()["choices"][0]
        assert choice["text"] == "abcdefxyz"
        assert choice["logprobs"]["tokens"] == list("abcdefxyz")


async def test_records_that_cannot_be_right_fail_their_stream_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = ScriptedScheduler(says("xyz"))
    async with world(scheduler) as w:
        monkeypatch.setattr(scheduler, "_logprobs", lambda run, token_ids: None)
        assert (await w.complete(logprobs=1, max_tokens=3)).status_code == 500
        assert (await w.complete(max_tokens=3)).status_code == 200
        await w.until_idle()
