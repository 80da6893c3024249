"""Exact bytes of streams, as kept in ``tests/data/transcripts``: what is asked, and how it is answered.

``python -m tests.transcripts`` records them anew, by hand, after a shape was changed on purpose.
"""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

from shared import fake_model
from tests.fakes.gateway_world import World, world
from tests.fakes.scripted_scheduler import Answer, ScriptedScheduler
from tests.fakes.waiting import await_until

FOLDER = Path(__file__).parent / "data" / "transcripts"
CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
HI = [{"role": "user", "content": "hi"}]
TOOL = {"name": "look", "description": "Look.", "parameters": {"type": "object", "properties": {}}}
CALL = 'I look.\n<tool_call>{"name": "look", "arguments": {"where": "Ulm"}}</tool_call>'


class Case(NamedTuple):
    """One request and what the model says to it."""

    path: str
    fields: dict[str, Any]
    says: str = 'a"é🙂'
    finish: Any = "stop"
    """``error``: the request fails after its last token."""


USAGE = {"stream_options": {"include_usage": True}}
CASES = {
    "chat": Case(CHAT, {"messages": HI}),
    "chat-usage": Case(CHAT, {"messages": HI, **USAGE}),
    "chat-usage-always": Case(
        CHAT, {"messages": HI, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}, "ab"
    ),
    "chat-logprobs": Case(CHAT, {"messages": HI, "logprobs": True, "top_logprobs": 2}),
    "chat-several": Case(CHAT, {"messages": HI, "n": 2}, "ab"),
    "chat-ids": Case(CHAT, {"messages": HI, "return_token_ids": True}, "aé"),
    "chat-stop": Case(CHAT, {"messages": HI, "stop": ["cd"]}, "abcde"),
    "chat-empty": Case(CHAT, {"messages": HI}, ""),
    "chat-length": Case(CHAT, {"messages": HI, "max_tokens": 2}, "abc", "length"),
    "chat-error": Case(CHAT, {"messages": HI}, "ab", "error"),
    "chat-tool": Case(CHAT, {"messages": HI, "tools": [{"type": "function", "function": TOOL}]}, CALL),
    "completion": Case(COMPLETIONS, {"prompt": "x"}),
    "completion-usage": Case(COMPLETIONS, {"prompt": "x", **USAGE}),
    "completion-logprobs": Case(COMPLETIONS, {"prompt": "x", "logprobs": 2}),
    "completion-several": Case(COMPLETIONS, {"prompt": ["x", "yz"], "n": 2, **USAGE}, "ab"),
    "completion-echo": Case(COMPLETIONS, {"prompt": "xé", "echo": True, "logprobs": 1}, "ab"),
    "completion-ids": Case(COMPLETIONS, {"prompt": "x", "return_token_ids": True}, "aé"),
    "completion-error": Case(COMPLETIONS, {"prompt": "x"}, "ab", "error"),
    "responses": Case(RESPONSES, {"input": "hi", "instructions": "Be short."}),
    "responses-logprobs": Case(RESPONSES, {"input": "hi", "top_logprobs": 1}, "aé"),
    "responses-length": Case(RESPONSES, {"input": "hi", "max_output_tokens": 2}, "abc", "length"),
    "responses-error": Case(RESPONSES, {"input": "hi"}, "ab", "error"),
    "responses-tool": Case(RESPONSES, {"input": "hi", "tools": [{"type": "function", **TOOL}]}, CALL),
    "messages": Case(MESSAGES, {"messages": HI, "max_tokens": 9}),
    "messages-stop": Case(MESSAGES, {"messages": HI, "max_tokens": 9, "stop_sequences": ["cd"]}, "abcde"),
    "messages-length": Case(MESSAGES, {"messages": HI, "max_tokens": 2}, "abc", "length"),
    "messages-error": Case(MESSAGES, {"messages": HI, "max_tokens": 9}, "ab", "error"),
    "messages-tool": Case(
        MESSAGES,
        {"messages": HI, "max_tokens": 99, "tools": [{"name": "look", "input_schema": TOOL["parameters"]}]},
        CALL,
    ),
}


@contextlib.asynccontextmanager
async def speaking_world() -> AsyncIterator[World]:
    """Where all of it is said; its ticks are ours."""
    async with world(ScriptedScheduler(auto=False), tool_call_parser="hermes") as w:
        yield w


async def transcript_of(w: World, case: Case) -> str:
    """The body of the stream, without what differs from run to run."""
    ids = [*case.says.encode()] + [fake_model.IM_END] * (case.finish == "stop")
    error = "the executor failed" if case.finish == "error" else ""
    w.scheduler.script = lambda submit: Answer(ids[: submit.max_tokens], case.finish, error)
    before = _num_on_the_way(w)
    async with w.http.stream("POST", case.path, json={**case.fields, "stream": True}) as response:
        while w.scheduler.runs:
            w.scheduler.tick()
            await await_until(
                lambda: _num_on_the_way(w) == before or not w.scheduler.runs, 5, "what a tick brought has come"
            )
        await response.aread()
    return normal(response.text)


def _num_on_the_way(w: World) -> float:
    """Tokens that the gateway has not got, now or ever: two steps at once might share what is counted so far."""
    name = "paternoster:generation_tokens_total"
    came = w.gateway.metrics.registry.get_sample_value(name, {"model_name": "fake-model"})
    assert came is not None
    return w.scheduler.num_sent - came


def normal(body: str) -> str:
    """Ids and times without their digits."""
    body = re.sub(r"(chatcmpl-|cmpl-|resp_|msg_|rs_|fc_|call_)[0-9a-f]{24}", r"\1X", body)
    return re.sub(r'"(created|created_at|completed_at)":\d+', r'"\1":0', body)


async def _record() -> None:
    async with speaking_world() as w:
        for name, case in CASES.items():
            (FOLDER / f"{name}.txt").write_text(await transcript_of(w, case))


if __name__ == "__main__":
    asyncio.run(_record())
