"""Mutated requests, bodies and heads, over bare connections to every route: never a 5xx, and nothing stays behind."""

import asyncio
import itertools
import json
import random
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from services.gateway.openapi.operations import OPERATIONS
from tests.e2e.conftest import StartSystem
from tests.e2e.system import System

CLIENTS = 16
SILENCE_S = 0.5
"""After it a client says that it will send no more: its head may announce what never comes, or keep the connection."""
MAX_GROWTH_BYTES = 48 * 1024 * 1024
HI: Any = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 9}}, "required": ["city"]}
FUNCTION = {"name": "f", "description": "F", "parameters": SCHEMA}
COMMON = {"model": "default", "max_tokens": 3, "temperature": 0.7, "top_p": 0.9, "stream": False, "top_k": 3}
CALLS = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"city": "Bern"}'}}]
BODIES: dict[str, Any] = {
    "/v1/chat/completions": COMMON
    | {"messages": [*HI, {"role": "assistant", "tool_calls": CALLS}, {"role": "tool", "content": "x"}]}
    | {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "auto", "n": 2, "stop": ["x"]}
    | {"logprobs": True, "top_logprobs": 2, "seed": 5, "logit_bias": {"5": 1}, "stream_options": None},
    "/v1/completions": COMMON
    | {"prompt": [[1, 2], [3]], "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}
    | {"logprobs": 2, "echo": True, "min_tokens": 1, "stop_token_ids": [7], "priority": 1, "cache_salt": "s"},
    "/v1/responses": COMMON
    | {"input": [{"role": "user", "content": "hi"}, {"type": "reasoning", "content": [{"text": "hm"}]}]}
    | {"tools": [{"type": "function", **FUNCTION}], "text": {"format": {"type": "text"}}, "metadata": {"a": "b"}},
    "/v1/messages": COMMON
    | {"messages": HI, "system": [{"type": "text", "text": "s"}], "stop_sequences": ["x"]}
    | {"tools": [{"name": "f", "input_schema": SCHEMA}], "tool_choice": {"type": "auto"}},
    "/v1/messages/count_tokens": {"messages": HI, "system": "s", "thinking": {"type": "disabled"}},
    "/tokenize": {"messages": HI, "return_token_strs": True, "chat_template_kwargs": {"a": 1}},
    "/detokenize": {"tokens": [65, 66, 1000]},
}
PIECES = (
    *(b"null", b"-1", b"0", b"{}", b"[]", b'""', b"true", b"1e400", b"0.5", b"\xff", b"{", b'"\\ud800"', b'"\\u0000"'),
    *(
        b"99999999999999999999",
        b"\r\n",
        b"\0",
        b": ",
        b"chunked",
        b"100000",
        b"[[[[[[[[",
        b"\xc3\xa9" * 50,
        b"%00",
        b"/..",
    ),
)


def request(source: random.Random, path: str) -> bytes:
    """A good request with its body or its head mutated."""
    is_post = path in BODIES
    body = json.dumps(BODIES[path] | {"stream": source.random() < 0.3}).encode() if is_post else b""
    mutates_head = not is_post or source.random() < 0.4
    if not mutates_head:
        body = mutated(source, body)
    lines = [f"{'POST' if is_post else 'GET'} {path.replace('{model}', 'default')} HTTP/1.1", "Host: localhost"]
    lines += ["Content-Type: application/json", f"Content-Length: {len(body)}", "X-Request-Id: one", "x-api-key: none"]
    lines += ["Accept: */*", "Origin: http://a", f"traceparent: 00-{'a' * 32}-{'b' * 16}-01", "Connection: close"]
    head = "\r\n".join(lines).encode()
    return (mutated(source, head) if mutates_head else head) + b"\r\n\r\n" + body


def mutated(source: random.Random, text: bytes) -> bytes:
    """With up to three places replaced, cut out, doubled or flipped."""
    for _ in range(source.randint(1, 3)):
        start = source.randrange(len(text) + 1)
        end = min(len(text), start + source.randrange(12))
        middle = source.choice((source.choice(PIECES), b"", text[start:end] * 2, bytes([source.randrange(256)])))
        text = text[:start] + middle + text[end:]
    return text


async def status_of(system: System, sent: bytes) -> int:
    """Of the answer; 0 if there is none."""
    url = urlsplit(system.base_url)
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    received = b""
    try:
        writer.write(sent)
        while piece := await _next(reader, writer):
            received += piece
    except ConnectionError:
        pass
    finally:
        writer.close()
    line = received.partition(b"\r\n")[0]
    return int(line.split()[1]) if line.startswith(b"HTTP/1.1 ") else 0


async def _next(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    try:
        return await asyncio.wait_for(reader.read(65536), SILENCE_S)
    except TimeoutError:
        writer.write_eof()
    return await asyncio.wait_for(reader.read(65536), 60)


async def fuzz(system: System, seed: int, num_requests: int) -> list[int]:
    """Statuses of so many requests, from several clients at once."""
    source = random.Random(seed)
    paths = itertools.cycle(operation.path for operation in OPERATIONS)
    requests = ((request(source, path), path) for path, _ in zip(paths, range(num_requests), strict=False))
    statuses: list[int] = []

    async def client() -> None:
        for sent, path in requests:
            status = await status_of(system, sent)
            assert status < 500, (seed, path, status, sent)
            statuses.append(status)

    async with asyncio.TaskGroup() as clients:
        for _ in range(CLIENTS):
            clients.create_task(client())
    return statuses


async def check(system: System, num_requests: int) -> None:
    """Half of them to warm up; the other half must not cost memory that stays, and all is given back."""
    seed = random.randrange(2**32)
    processes = [psutil.Process(pid) for role in ("gateway", "scheduler", "executor") for pid in system.pids(role)]
    statuses = await fuzz(system, seed, num_requests // 2)
    system.wait_idle()
    before = [process.memory_info().rss for process in processes]
    statuses += await fuzz(system, seed + 1, num_requests // 2)
    system.wait_idle()
    grown = [process.memory_info().rss - rss for process, rss in zip(processes, before, strict=True)]
    print(f"{len(statuses)} requests, {statuses.count(200)} served, {statuses.count(0)} unanswered, grown by {grown}")
    assert max(grown) < MAX_GROWTH_BYTES, (seed, grown)
    assert {200, 400, 404} <= {*statuses}


async def test_mutated_requests_never_give_a_5xx(start_system: StartSystem) -> None:
    await check(start_system(max_model_len=256), 900)


@pytest.mark.soak
async def test_a_hundred_thousand_mutated_requests_never_give_a_5xx(start_system: StartSystem) -> None:
    await check(start_system(max_model_len=256), 100_000)
