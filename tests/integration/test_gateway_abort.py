"""Cases ABORT 8 and 9: a client that leaves cancels its request at once, streamed or not, through all middleware."""

import asyncio
import contextlib
import gc
import logging
import time
import weakref
from typing import Any

import httpx
import pytest

from services.gateway.api import answer, note
from services.gateway.api.note import Note
from services.gateway.gateway import Gateway
from services.gateway.generation import Generation
from tests.fakes.conversations import OTHER_APIS
from tests.fakes.gateway_world import World, world
from tests.fakes.scripted_scheduler import Answer, ScriptedScheduler
from tests.fakes.waiting import await_until

KEY = "sk-test"
EVERYTHING = {"api_keys": (KEY,), "cors_origins": ("https://page.example",), "debug_endpoints": True}
HEADERS = {"Authorization": f"Bearer {KEY}", "Origin": "https://page.example"}


async def leave(w: World, *, stream: bool, read: int) -> None:
    """Open a request, read some bytes of its answer, drop the connection."""
    body = httpx.Request(
        "POST", w.url, json={"prompt": "p" * 300, "max_tokens": 2000, "ignore_eos": True, "stream": stream}
    ).content
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Length: {len(body)}\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", w.port)
    before = len(w.scheduler.submits)
    writer.write(head.encode() + b"\r\n" + body)
    await await_until(lambda: len(w.scheduler.submits) > before, 5, "the request was submitted")
    if read:
        await reader.readuntil(b"data: ")
    writer.transport.abort()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


async def test_abort_08_a_hundred_clients_leave_after_the_first_chunk() -> None:
    scheduler = ScriptedScheduler(lambda submit: Answer([300] * submit.max_tokens), auto=False)
    async with world(scheduler, **EVERYTHING) as w:
        for _ in range(100):
            before = len(scheduler.submits)
            leaving = asyncio.create_task(leave(w, stream=True, read=1))
            await await_until(lambda at=before: len(scheduler.submits) > at, 5, "submitted")
            scheduler.tick()
            await leaving
        await w.until_idle()
        assert len(scheduler.cancels) == 100


@pytest.mark.parametrize("stream", [True, False])
async def test_abort_09_leaving_before_the_first_token(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    scheduler = ScriptedScheduler(auto=False)
    with caplog.at_level(logging.INFO):
        async with world(scheduler, **EVERYTHING) as w:
            await leave(w, stream=stream, read=0)
            await await_until(lambda: scheduler.cancels, 0.5, "the cancel reached the scheduler")
            await w.until_idle()
            assert await _answers(w)
    assert "No response returned" not in caplog.text
    assert "Traceback" not in caplog.text
    assert " 499 " in caplog.text


async def test_abort_09_leaving_before_the_request_is_accepted() -> None:
    scheduler = ScriptedScheduler(lambda submit: Answer(silent=True))
    async with world(scheduler, **EVERYTHING) as w:
        await leave(w, stream=True, read=0)
        await await_until(lambda: scheduler.cancels, 0.5, "the cancel reached the scheduler")
        await w.until_idle()


async def test_abort_09_leaving_behind_a_body_so_long_that_reading_paused() -> None:
    async with world(ScriptedScheduler(auto=False)) as w:
        await _seen_after(w, stream=True, way="running", more={"user": "x" * 2_000_000})
        await w.until_idle()


async def _seen_after(w: World, *, stream: bool, way: str, more: dict[str, str] | None = None) -> float:
    """Seconds from a client's leaving to its request's cancel at the scheduler. ``more``: fields of the request."""
    fields = {"prompt": "p", "max_tokens": 2000, "stream": stream, **(more or {})}
    body = httpx.Request("POST", w.url, json=fields).content
    reader, writer = await asyncio.open_connection("127.0.0.1", w.port)
    num_submits, num_cancels = len(w.scheduler.submits), len(w.scheduler.cancels)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    await await_until(lambda: len(w.scheduler.submits) > num_submits, 5, "the request was submitted")
    if way != "queued":
        w.scheduler.tick()
    if way != "queued" and stream:
        await reader.readuntil(b"data: ")
    began = time.perf_counter()
    if way == "half closed":
        writer.write_eof()
    else:
        writer.close()
    await await_until(lambda: len(w.scheduler.cancels) > num_cancels, 5, "the cancel")
    seconds = time.perf_counter() - began
    writer.close()
    return seconds


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("way", ["queued", "running", "half closed"])
async def test_abort_09_a_disconnect_is_seen_at_once_in_every_mode(stream: bool, way: str) -> None:
    """Within 100 ms; the quickest of five counts, as the machine may be busy but whoever polls is never quick."""
    scheduler = ScriptedScheduler(lambda submit: Answer([300] * 2000), auto=False)
    async with world(scheduler) as w:
        assert min([await _seen_after(w, stream=stream, way=way) for _ in range(5)]) < 0.1
        await w.until_idle()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", OTHER_APIS)
async def test_abort_09_a_client_of_another_api_that_leaves_cancels(path: str, stream: bool) -> None:
    async with world(ScriptedScheduler(auto=False)) as w:
        asking = asyncio.create_task(w.post(path, **OTHER_APIS[path], stream=stream))
        await await_until(lambda: w.scheduler.runs, 5, "it runs")
        asking.cancel()
        await await_until(lambda: w.scheduler.cancels, 2, "the cancel reached the scheduler")
        await w.until_idle()


async def _answers(w: World) -> bool:
    w.scheduler.auto = True
    response = await w.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers=HEADERS)
    return response.status_code == 200


def _answer(gateway: Gateway) -> object:
    """The response object of one streamed request, as the endpoint makes it."""
    from services.gateway.api.answer import Answer as HttpAnswer
    from services.gateway.api.schema import CompletionRequest
    from services.gateway.api.settings import settings_of
    from services.gateway.shapes.chunks import CompletionChunks

    facts = gateway.facts()
    settings = settings_of(CompletionRequest(stream=True, max_tokens=100), facts, 1)
    return HttpAnswer(gateway, settings, [[65, 66]], facts, CompletionChunks, "cmpl-1")


@pytest.mark.parametrize("way", ["aclose", "collected", "cancelled"])
async def test_abort_08_closing_the_generator_in_any_way_cancels(way: str) -> None:
    scheduler = ScriptedScheduler(auto=False)
    async with world(scheduler) as w:
        answer = _answer(w.gateway)
        generation = answer._generation
        await generation.start()
        events = answer.events()
        scheduler.tick()
        assert b"data: " in await anext(events)
        sleeping = asyncio.create_task(anext(events))
        await asyncio.sleep(0)
        if way == "cancelled":
            sleeping.cancel()
        else:
            scheduler.tick()
            await sleeping
        if way == "aclose":
            await events.aclose()
        del events, sleeping
        gc.collect()
        await await_until(lambda: scheduler.cancels, 2, "the scheduler was told")
        await w.until_idle()


@pytest.mark.parametrize("stream", [True, False])
async def test_what_a_request_held_waited_for_a_search_for_garbage(
    stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[weakref.ref[object]] = []

    class WatchedNote(Note):
        def __init__(self) -> None:
            super().__init__()
            held.append(weakref.ref(self))

    class WatchedGeneration(Generation):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            held.append(weakref.ref(self))

    monkeypatch.setattr(note, "Note", WatchedNote)
    monkeypatch.setattr(answer, "Generation", WatchedGeneration)
    gc.disable()
    try:
        async with world(ScriptedScheduler()) as w:
            assert (await w.complete(stream=stream, n=2, max_tokens=3)).status_code == 200
            assert len(held) == 2
            await w.http.aclose()
            await await_until(lambda: not any(ref() for ref in held), 2, "both are freed with their connection")
    finally:
        gc.enable()
