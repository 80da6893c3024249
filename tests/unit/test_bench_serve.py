"""The load test against a server made for it, byte by byte, so that every way of failing is there."""

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tools.bench.client import Client
from tools.bench.figures import Limits, Outcome
from tools.bench.http import Server
from tools.bench.serve import LoadOptions, closed_loop, open_loop, run
from tools.bench.workload import Job, Lengths

Answer = Callable[[str, dict[str, Any]], list[bytes]]
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
"""Without a length: the body ends with the connection, as a crashed server's does."""


def event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def text(piece: str) -> bytes:
    return event({"choices": [{"index": 0, "text": piece, "finish_reason": None}]})


def usage(prompt_tokens: int, completion_tokens: int) -> bytes:
    return event({"choices": [], "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}})


DONE = b"data: [DONE]\n\n"


@asynccontextmanager
async def server(answer: Answer) -> AsyncIterator[str]:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        path = head.split()[1]
        length = next((int(line.split(":")[1]) for line in head.splitlines() if line.startswith("Content-Length")), 0)
        body = json.loads(await reader.readexactly(length)) if length else {}
        for part in answer(path, body):
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0)
        writer.close()

    async with await asyncio.start_server(handle, "127.0.0.1", 0) as listening:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"


def client(url: str, chat: bool = False, timeout_s: float = 10.0) -> Client:
    return Client(Server.at(url), "m", chat, True, 0.0, timeout_s)


async def ask(answer: list[bytes], chat: bool = False) -> Outcome:
    async with server(lambda path, body: answer) as url:
        return await client(url, chat).run(Job("hi", 4))


async def test_a_whole_answer() -> None:
    outcome = await ask([HEAD, b": ping\n\n", text("a"), text(""), text("b")[:9], text("b")[9:], usage(7, 3), DONE])
    assert outcome.failure == ""
    assert (outcome.pieces, outcome.prompt_tokens, outcome.output_tokens) == (2, 7, 3)
    assert outcome.first_at is not None
    assert outcome.sent_at <= outcome.first_at <= outcome.last_at <= outcome.ended_at


async def test_a_chat_answer_counts_from_its_first_content() -> None:
    role = event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
    word = event({"choices": [{"index": 0, "delta": {"content": "hi"}}]})
    outcome = await ask([HEAD, role, word, event({"choices": [{"index": 0, "delta": {}}]}), DONE], chat=True)
    assert (outcome.failure, outcome.pieces) == ("", 1)


@pytest.mark.parametrize(
    ("answer", "failure"),
    [
        ([HEAD, text("a")], "the stream ended without [DONE]"),
        ([HEAD, text("a"), event({"error": {"message": "lost"}}), DONE], "error event: lost"),
        ([HEAD, b"data: {oops\n\n", DONE], "an event that is no JSON"),
        ([b"HTTP/1.1 429 Too Many\r\n\r\n", b'{"error": {"message": "queue full"}}'], "HTTP 429: queue full"),
        ([b"HTTP/1.1 500 Oops\r\n\r\n", b"<html>"], "HTTP 500: None"),
        (
            [HEAD.replace(b"Connection: close", b"Content-Length: 999"), text("a")],
            "the connection ended in the middle of the answer",
        ),
        ([], "the connection ended in the middle of the answer"),
    ],
)
async def test_a_failed_answer_says_why(answer: list[bytes], failure: str) -> None:
    assert (await ask(answer)).failure == failure


async def test_a_server_that_is_not_there_and_one_that_never_answers() -> None:
    assert (await client("http://127.0.0.1:1").run(Job("hi", 1))).failure.startswith("connection: ")

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async with await asyncio.start_server(silent, "127.0.0.1", 0) as listening:
        url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        assert (await client(url, timeout_s=0.05).run(Job("hi", 1))).failure == "no end within 0.05 s"


async def test_tokens_are_counted_by_tokenize_or_else_by_usage() -> None:
    def with_tokenize(path: str, body: dict[str, Any]) -> list[bytes]:
        assert (path, body["prompt"]) == ("/tokenize", "a b")
        return [b'HTTP/1.1 200 OK\r\n\r\n{"count": 5}']

    def without(path: str, body: dict[str, Any]) -> list[bytes]:
        if path == "/tokenize":
            return [b"HTTP/1.1 404 Not Found\r\n\r\n{}"]
        assert (path, body["max_tokens"]) == ("/v1/completions", 1)
        return [b'HTTP/1.1 200 OK\r\n\r\n{"usage": {"prompt_tokens": 6}}']

    for answer, count in ((with_tokenize, 5), (without, 6)):
        async with server(answer) as url:
            assert await client(url).count_tokens("a b") == count


class Crowd:
    """Jobs that take ``ticks`` turns of the loop; knows how many ran at once."""

    def __init__(self, ticks: int) -> None:
        self.most = self.running = 0
        self._ticks = ticks

    async def run(self, job: Job) -> Outcome:
        self.running += 1
        self.most = max(self.most, self.running)
        for _ in range(self._ticks):
            await asyncio.sleep(0)
        self.running -= 1
        return Outcome(0.0)


def load() -> Any:
    return iter(lambda: Job("x", 1), None)


async def test_a_closed_loop_keeps_exactly_its_concurrency() -> None:
    crowd = Crowd(3)
    outcomes = await closed_loop(crowd.run, load(), 4, 50, None)
    assert (len(outcomes), crowd.most) == (50, 4)


async def test_a_loop_ends_with_its_duration() -> None:
    crowd = Crowd(1)
    outcomes = await closed_loop(crowd.run, load(), 2, None, 0.05)
    assert outcomes
    assert crowd.running == 0
    assert len(await open_loop(crowd.run, load(), iter([0.0, 0.01, 0.06, 0.07]), None, 0.05)) == 2


async def test_an_open_loop_does_not_wait_for_answers() -> None:
    crowd = Crowd(1000)
    outcomes = await open_loop(crowd.run, load(), iter([0.0] * 30), 20, None)
    assert (len(outcomes), crowd.most) == (20, 20)


def options(url: str, **changes: Any) -> LoadOptions:
    lengths = Lengths.parse("4")
    plain = LoadOptions(
        url=url,
        model="",
        api_key="",
        chat=False,
        concurrency=3,
        rate=None,
        prompt_tokens=lengths,
        output_tokens=lengths,
        num_requests=12,
        duration_s=None,
        warmup=2,
        seed=0,
        ignore_eos=True,
        temperature=0.0,
        timeout_s=10.0,
        limits=Limits(),
        json_file="",
    )
    return dataclasses.replace(plain, **changes)


def openai_like(path: str, body: dict[str, Any]) -> list[bytes]:
    if path == "/v1/models":
        return [b'HTTP/1.1 200 OK\r\n\r\n{"data": [{"id": "tiny"}]}']
    if path == "/tokenize":
        return [f'HTTP/1.1 200 OK\r\n\r\n{{"count": {len(body["prompt"].split())}}}'.encode()]
    assert (body["model"], body["stream"], body["ignore_eos"], body["max_tokens"]) == ("tiny", True, True, 4)
    return [HEAD, text("a"), text("b"), usage(4, 4), DONE]


def in_thread(answer: Answer, test: Callable[[str], int]) -> int:
    async def body() -> int:
        async with server(answer) as url:
            return await asyncio.to_thread(test, url)

    return asyncio.run(body())


@pytest.mark.parametrize("rate", [None, 500.0])
def test_the_command_from_end_to_end(rate: float | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "figures.json"
    assert in_thread(openai_like, lambda url: run(options(url, rate=rate, json_file=str(file)))) == 0
    figures = json.loads(file.read_text())
    assert (figures["requests"], figures["failed"], figures["model"]) == (12, 0, "tiny")
    assert figures["mean_prompt_tokens"] == figures["mean_output_tokens"] == 4
    assert figures["load"]["output_tokens"] == {"kind": "uniform", "low": 4, "high": 4}
    assert "TTFT ms p50 p90 p99" in capsys.readouterr().out


def test_a_load_of_which_nothing_went_well_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    def broken(path: str, body: dict[str, Any]) -> list[bytes]:
        return openai_like(path, body) if path != "/v1/completions" else [HEAD]

    assert in_thread(broken, lambda url: run(options(url))) == 1
    assert "without [DONE]" in capsys.readouterr().out


def test_no_server_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(options("http://127.0.0.1:1")) == 1
    assert capsys.readouterr().err.startswith("paternoster: error: cannot reach 127.0.0.1:1")
