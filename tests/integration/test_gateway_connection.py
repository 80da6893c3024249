"""What a client does to a connection below whole HTTP requests: offers, floods, silence, leaving in a pipeline.

Each test is named after what once broke.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

import pytest

from services.gateway import connection
from tests.fakes.gateway_world import World, events_of, world
from tests.fakes.scripted_scheduler import ScriptedScheduler
from tests.fakes.waiting import await_until

OFFERS = {
    "h2c": "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n",
    "tls": "Upgrade: TLS/1.2\r\nConnection: Upgrade, keep-alive\r\n",
    "websocket": "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: AA==\r\n",
}


@contextlib.asynccontextmanager
async def connected(w: World) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A raw connection to the gateway, aborted at the end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", w.port)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


def request(path: str, headers: str = "", **fields: object) -> bytes:
    """A POST as bytes."""
    body = json.dumps({"prompt": "hi", **fields}).encode()
    return f"POST {path} HTTP/1.1\r\nHost: x\r\n{headers}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def answer_of(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body (not chunked) of the next answer."""
    async with asyncio.timeout(10):
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in head[1:] if line)}
        return int(head[0].split()[1]), headers, await reader.readexactly(int(headers["content-length"]))


@pytest.mark.parametrize("offer", OFFERS)
async def test_a_body_behind_an_offer_to_upgrade_was_lost(offer: str) -> None:
    async with world(ScriptedScheduler()) as w, connected(w) as (reader, writer):
        for _ in range(2):  # and the connection is as good as before
            post = request("/v1/completions", OFFERS[offer], max_tokens=2)
            writer.write(post[:40])
            await writer.drain()
            writer.write(post[40:] + b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            status, _, body = await answer_of(reader)
            assert (status, len(json.loads(body)["choices"])) == (200, 1)
            assert (await answer_of(reader))[2] == b'{"status":"ok"}'


async def test_connect_is_refused_and_does_not_spin() -> None:
    async with world(ScriptedScheduler()) as w:
        for target in ("x:80", "/health"):
            async with connected(w) as (reader, writer):
                writer.write(f"CONNECT {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
                async with asyncio.timeout(10):
                    assert b" 200 " not in await reader.read()


async def test_what_is_no_http_got_plain_text() -> None:
    async with world(ScriptedScheduler()) as w, connected(w) as (reader, writer):
        writer.write(b"\x00\xffnonsense\r\n\r\n")
        status, headers, body = await answer_of(reader)
        assert (status, headers["connection"]) == (400, "close")
        assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("opening", "piece"),
    [
        (b"GET /", b"u" * 8192),
        (b"GET /health HTTP/1.1\r\nX: ", b"v" * 8192),
        (b"GET /health HTTP/1.1\r\n", b"X: y\r\n" * 1024),
        (b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n", b"X: y\r\n" * 1024),
        (b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n5;", b"x" * 8192),
    ],
    ids=["target", "header", "headers", "trailers", "chunk-extension"],
)
async def test_a_head_without_end_filled_the_memory(opening: bytes, piece: bytes) -> None:
    async with world(ScriptedScheduler()) as w, connected(w) as (reader, writer):
        writer.write(opening)
        sent = 0
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(10):
                while not reader.at_eof() and sent < 100 * connection.MAX_HEAD_BYTES:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
                    sent += len(piece)
        assert sent < 100 * connection.MAX_HEAD_BYTES, "it takes everything"
        assert (await w.http.get("/health")).status_code == 200


async def test_large_heads_that_end_are_served() -> None:
    async with world(ScriptedScheduler()) as w:
        for _ in range(3):
            assert (await w.http.get("/health", headers={"X-Large": "x" * 30_000})).status_code == 200


@pytest.mark.parametrize(
    "begun", [b"", b"\r\n", b"GET /hea", b"POST /v1/completions HTTP/1.1\r\nContent-Length: 9\r\n\r\n{"]
)
async def test_a_silent_client_held_its_connection_for_ever(begun: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "CLIENT_SILENCE_S", 0.2)
    async with world(ScriptedScheduler()) as w, connected(w) as (reader, writer):
        writer.write(begun)
        async with asyncio.timeout(10):
            with contextlib.suppress(ConnectionError):
                await reader.read()


async def test_a_client_that_waits_for_its_answer_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "CLIENT_SILENCE_S", 0.1)
    async with world(ScriptedScheduler(auto=False)) as w:
        asking = asyncio.create_task(w.complete(max_tokens=1))
        await await_until(lambda: w.scheduler.runs, 5, "the request runs")
        await asyncio.wait([asking], timeout=0.4)
        w.scheduler.tick()
        assert (await asking).json()["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("stream", [True, False])
async def test_leaving_with_requests_in_a_pipeline_cancelled_only_the_last(stream: bool, together: bool) -> None:
    async with world(ScriptedScheduler(auto=False)) as w, connected(w) as (_, writer):
        one = request("/v1/completions", max_tokens=50, stream=stream)
        writer.write(one * 3 if together else one)
        await await_until(lambda: w.scheduler.runs, 5, "the first request runs")
        if not together:
            writer.write(one * 2)
            await writer.drain()
        writer.close()
        await w.until_idle()
        assert len(w.scheduler.submits) == 1


async def test_requests_in_a_pipeline_are_answered_in_order() -> None:
    async with world(ScriptedScheduler()) as w, connected(w) as (reader, writer):
        for pieces in ([1], [200, 37], [3] * 400):
            many = b"".join(request("/v1/completions", max_tokens=count) for count in (5, 1, 3))
            at = 0
            for size in [*pieces, len(many)]:
                writer.write(many[at : at + size])
                await writer.drain()
                at += size
            counts = [json.loads((await answer_of(reader))[2])["usage"]["completion_tokens"] for _ in range(3)]
            assert counts == [5, 1, 3]


async def test_garbage_behind_a_streaming_request_went_into_its_answer() -> None:
    async with world(ScriptedScheduler(auto=False)) as w, connected(w) as (reader, writer):
        writer.write(request("/v1/completions", max_tokens=5, stream=True))
        head = await reader.readuntil(b"\r\n\r\n")
        writer.write(b"\x00 garbage \r\n\r\n")
        body = b""
        async with asyncio.timeout(10):
            while True:
                w.scheduler.tick()
                size = int(await reader.readline(), 16)
                body += (await reader.readexactly(size + 2))[:-2]
                if not size:
                    break
        assert b" 200 " in head
        assert events_of(body)[-1] == "[DONE]"
        assert (await answer_of(reader))[0] == 400
