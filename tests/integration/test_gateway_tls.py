"""The gateway over TLS: what holds for plain connections holds for these."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from services.gateway import connection, generation
from services.gateway.main import MISCONFIGURED, run
from services.gateway.options import GatewayOptions
from shared import fake_model
from tests.fakes.certificates import Certificate, certificate_in
from tests.fakes.gateway_world import World, events_of, text_of, world
from tests.fakes.scripted_scheduler import Answer, ScriptedScheduler
from tests.fakes.waiting import await_until


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return certificate_in(tmp_path_factory.mktemp("tls"))


def tls_world(files: Certificate, scheduler: ScriptedScheduler, **options: Any) -> Any:
    tls = {"ssl_certfile": files.certfile, "ssl_keyfile": files.keyfile, "authority": files.authority}
    return world(scheduler, **tls, **options)


@contextlib.asynccontextmanager
async def connected(w: World) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A raw connection that has shaken hands, aborted at the end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", w.port, ssl=w.tls)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


def post(**fields: Any) -> bytes:
    body = json.dumps({"prompt": "hi", **fields}).encode()
    return b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body


async def test_answers_whole_and_streamed(files: Certificate) -> None:
    async with tls_world(files, ScriptedScheduler()) as w:
        assert w.url.startswith("https://")
        whole = await w.complete(max_tokens=5, seed=1)
        streamed = await w.complete(max_tokens=5, seed=1, stream=True)
        assert text_of(events_of(streamed.text)) == whole.json()["choices"][0]["text"]


async def test_who_speaks_plain_http_is_turned_away_and_breaks_nothing(files: Certificate) -> None:
    async with tls_world(files, ScriptedScheduler()) as w:
        reader, writer = await asyncio.open_connection("127.0.0.1", w.port)
        writer.write(post(max_tokens=1))
        async with asyncio.timeout(10):
            with contextlib.suppress(ConnectionError):
                assert not (await reader.read()).startswith(b"HTTP")
        writer.close()
        assert (await w.complete(max_tokens=1)).status_code == 200
        assert len(w.scheduler.submits) == 1


@pytest.mark.parametrize("polite", [True, False])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_cancels_its_request(files: Certificate, stream: bool, polite: bool) -> None:
    scheduler = ScriptedScheduler(lambda submit: Answer([300] * submit.max_tokens), auto=False)
    async with tls_world(files, scheduler) as w, connected(w) as (reader, writer):
        writer.write(post(max_tokens=1000, stream=stream))
        await await_until(lambda: scheduler.runs, 5, "it runs")
        scheduler.tick()
        if stream:
            await reader.readuntil(b"data: ")
        writer.close() if polite else writer.transport.abort()
        await await_until(lambda: scheduler.cancels, 5, "it is cancelled")
        await w.until_idle()


async def test_a_client_that_does_not_read_is_cut_off_and_blocks_nobody(
    files: Certificate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "MAX_WAITING_TOKENS", 300)
    scheduler = ScriptedScheduler(lambda submit: Answer([300] * submit.max_tokens))
    scheduler.facts = fake_model.facts(context_len=1_000_000)
    async with tls_world(files, scheduler) as w, connected(w) as (reader, writer):
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(post(max_tokens=900_000, stream=True))
        await await_until(lambda: scheduler.runs, 5, "the greedy request runs")
        assert (await w.complete(max_tokens=20)).status_code == 200
        await await_until(lambda: scheduler.cancels, 60, "the client that does not read is cut off")
        await w.until_idle()


@pytest.mark.parametrize("begun", [b"", b"POST /v1/comp", post(max_tokens=1)[:-5]])
async def test_a_silent_client_is_not_waited_for(
    files: Certificate, begun: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "CLIENT_SILENCE_S", 0.2)
    async with tls_world(files, ScriptedScheduler()) as w, connected(w) as (reader, writer):
        writer.write(begun)
        async with asyncio.timeout(10):
            with contextlib.suppress(ConnectionError):
                await reader.read()


async def test_bodies_and_heads_have_the_same_bounds(files: Certificate) -> None:
    async with tls_world(files, ScriptedScheduler()) as w:
        large = await w.http.post("/v1/completions", content=b" " * (9 * 2**20))
        assert large.status_code == 413
        async with connected(w) as (reader, writer):
            writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nX-Long: ")
            with contextlib.suppress(ConnectionError):
                for _ in range(100):
                    writer.write(b"a" * 1024)
                    await writer.drain()
            async with asyncio.timeout(10):
                assert (await reader.readline()).startswith(b"HTTP/1.1 431")
        assert (await w.complete(max_tokens=1)).status_code == 200


@pytest.mark.parametrize("wrong", ["missing", "no certificate", "another key"])
def test_a_certificate_that_is_none_ends_the_start(
    files: Certificate, tmp_path: Path, wrong: str, capsys: pytest.CaptureFixture[str]
) -> None:
    certfile = {"missing": "/no/such/file", "no certificate": __file__}.get(wrong, files.certfile)
    keyfile = certificate_in(tmp_path).keyfile if wrong == "another key" else files.keyfile
    options = GatewayOptions(
        "g", "tcp://127.0.0.1:1", backend="fake", port=0, ssl_certfile=certfile, ssl_keyfile=keyfile
    )
    assert run(options) == MISCONFIGURED
    assert f"cannot serve TLS with {certfile}: " in capsys.readouterr().err
