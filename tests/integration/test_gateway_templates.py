"""``chat_template`` of requests: refused unless trusted, bounded if it is."""

import asyncio
import time
from pathlib import Path

import pytest

from services.gateway import gateway as gateway_module
from services.gateway import helper_process
from shared import fake_model
from shared.wire import tokens
from tests.fakes.gateway_world import World, world
from tests.fakes.scripted_scheduler import Answer, ScriptedScheduler

ENDLESS = "{% for a in range(100000) %}" * 3 + "{% endfor %}" * 3


def prompt_of(w: World) -> str:
    return w.gateway.tokenizer.decode(tokens.unpack(w.scheduler.submits[-1].prompt), skip_special_tokens=False)


async def refused(w: World, template: str, why: str) -> None:
    response = await w.chat(chat_template=template)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "chat_template"), error
    assert why in error["message"]


async def test_a_template_of_a_request_is_refused_unless_trusted() -> None:
    async with world(ScriptedScheduler()) as w:
        await refused(w, "{{ messages }}", "--trust-request-chat-template")
        assert not w.scheduler.submits


def environment_of(process: asyncio.subprocess.Process) -> bytes:
    return Path(f"/proc/{process.pid}/environ").read_bytes()


async def test_a_trusted_template_is_honoured_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PATERNOSTER_API_KEY", "OTEL_EXPORTER_OTLP_HEADERS", "SOME_TOKEN"):
        monkeypatch.setenv(name, "sk-secret")
    async with world(ScriptedScheduler(), trust_request_chat_template=True) as w:
        template = "{{ eos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ mark }}{% endfor %}"
        response = await w.chat(chat_template=template, chat_template_kwargs={"mark": "!"}, max_tokens=1)
        assert response.status_code == 200
        assert prompt_of(w) == "<|im_end|>[user] hi!"
        messages = [{"role": "user", "content": "hi"}]
        told = await w.post("/tokenize", messages=messages, chat_template="{{ messages[0].content }}")
        assert bytes(told.json()["tokens"]) == b"hi"
        await refused(w, "{{ raise_exception('no') }}", "messages: no")
        await refused(w, "{% for", "")
        await refused(w, "{{ ''.__class__.__mro__ }}", "unsafe")
        await refused(w, "{{ 'a' * 3000000000 }}", "memory")
        await refused(w, "{{ 'a' * 9000000 }}", "characters")
        await refused(w, r"{{ '\ud800' }}", "surrogate")
        await refused(w, r"{{ raise_exception('\ud800') }}", "surrogate")
        await refused(w, "a" * 70_000, "65536")
        await refused(w, "", "empty prompt")
        started = time.monotonic()
        endless = asyncio.create_task(refused(w, ENDLESS, "processor time"))
        health = await w.http.get("/health")
        assert health.status_code == 200
        assert not endless.done()
        await endless
        assert time.monotonic() - started < 60
        assert (await w.chat(chat_template=template, max_tokens=1)).status_code == 200
        process = w.gateway.request_templates._process._process
        assert process is not None
        assert b"sk-secret" not in environment_of(process), "it might tell a template that breaks out"
        process.kill()
        await process.wait()
        assert (await w.chat(chat_template=template, max_tokens=1)).status_code == 200, "it is started again"


async def test_more_templates_than_can_wait_are_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(helper_process, "MAX_WAITING", 2)
    async with world(ScriptedScheduler(), trust_request_chat_template=True) as w:
        asked = [asyncio.create_task(w.chat(chat_template="a", max_tokens=1)) for _ in range(8)]
        responses = [await task for task in asked]
        assert {response.status_code for response in responses} == {200, 429}
        turned_away = next(response for response in responses if response.status_code == 429)
        assert turned_away.headers["retry-after"] == "1"
        assert turned_away.json()["error"]["code"] == "overloaded"
        assert (await w.chat(chat_template="a", max_tokens=1)).status_code == 200


async def test_an_answer_is_read_as_the_template_of_its_request_has_it() -> None:
    call = '[TOOL_CALLS] [{"name": "f", "arguments": {}}]'
    answer = Answer([*f"hm</think>{call}".encode(), fake_model.IM_END], "stop")
    tools = [{"type": "function", "function": {"name": "f"}}]
    async with world(ScriptedScheduler(lambda submit: answer), trust_request_chat_template=True) as w:
        template = "{{ tools }}[TOOL_CALLS]<think>"
        message = (await w.chat(tools=tools, chat_template=template)).json()["choices"][0]["message"]
        assert message["reasoning_content"] == "hm"
        assert message["tool_calls"][0]["function"]["name"] == "f"
        assert (await w.chat(tools=tools)).json()["choices"][0]["message"]["content"] == f"hm</think>{call}"


async def test_what_waits_too_long_for_a_thread_gets_503(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_module, "TEXT_TIMEOUT_S", 0.05)
    async with world(ScriptedScheduler()) as w:
        go_on = asyncio.Event()
        loop = asyncio.get_running_loop()

        def block() -> None:
            asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result()

        blocked = [loop.run_in_executor(w.gateway._text_threads, block) for _ in range(gateway_module.TEXT_THREADS)]
        long = [{"role": "user", "content": "a" * (2 * gateway_module.SHORT)}]
        response = await w.chat(messages=long, max_tokens=1)
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        assert not w.scheduler.submits
        go_on.set()
        await asyncio.gather(*blocked)
        assert (await w.chat(messages=long, max_tokens=1)).status_code == 200
