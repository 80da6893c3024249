"""Order and overload as clients see them: who is turned away, who waits, who goes first (bugs.md 25 to 29)."""

import asyncio
import json
from time import monotonic
from typing import Any

import httpx

from tests.e2e.conftest import StartSystem
from tests.e2e.system import System
from tests.fakes.waiting import await_until

BODY = {"model": "default", "prompt": "hello", "max_tokens": 60, "ignore_eos": True, "seed": 1}


async def ask(client: httpx.AsyncClient, **fields: Any) -> tuple[httpx.Response, float]:
    """The whole answer, and seconds until the status came."""
    asked_at = monotonic()
    async with client.stream("POST", "/v1/completions", json=BODY | fields) as response:
        took_s = monotonic() - asked_at
        await response.aread()
    return response, took_s


def is_running(system: System) -> bool:
    return bool(system.debug_state()["scheduler"]["running"] == 1)


def events(response: httpx.Response) -> list[Any]:
    return [json.loads(line[6:]) for line in response.text.split("\n\n") if line.startswith("data: {")]


def client_of(base_url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=base_url, timeout=60, limits=httpx.Limits(max_connections=None))


async def test_sched_25_a_prompt_no_pool_holds_is_refused_and_blocks_nobody(start_system: StartSystem) -> None:
    system = start_system(num_blocks=16, block_size=16)
    async with client_of(system.base_url) as client:
        (too_long, took_s), (short, _) = await asyncio.gather(ask(client, prompt=[5] * 300), ask(client, max_tokens=4))
        assert (too_long.status_code, short.status_code) == (400, 200)
        assert took_s < 5
        exact, _ = await ask(client, prompt=[5] * 255, max_tokens=9)
        assert exact.json()["usage"]["completion_tokens"] == 1


async def test_sched_27_an_urgent_request_takes_the_seat_of_a_patient_one(start_system: StartSystem) -> None:
    system = start_system(max_lanes=1, faults={"step_ms": 5})
    async with client_of(system.base_url) as client:
        undisturbed, _ = await ask(client, max_tokens=300, priority=5)
        patient = asyncio.create_task(ask(client, max_tokens=300, priority=5))
        await await_until(lambda: is_running(system), 60, "it runs")
        urgent, _ = await ask(client, max_tokens=3, priority=-5)
        assert urgent.status_code == 200
        assert not patient.done()
        assert (await patient)[0].json()["choices"] == undisturbed.json()["choices"]
    assert system.debug_state()["scheduler"]["preempted"] == 1


async def test_sched_29_a_full_queue_turns_away_at_once_and_keeps_its_word(start_system: StartSystem) -> None:
    """200 at once, streamed and not, some of two choices, with one seat and a queue of 10."""
    system = start_system(max_lanes=1, max_queue=10, faults={"step_ms": 10})
    async with client_of(system.base_url) as client:
        fields = [{"stream": i % 2 == 0, "n": 2 if i % 10 == 0 else 1, "seed": i} for i in range(200)]
        answers = await asyncio.gather(*(ask(client, **each) for each in fields))
        served = [response for response, _ in answers if response.status_code == 200]
        refused = [(response, took_s) for response, took_s in answers if response.status_code != 200]
        assert 5 <= len(served) <= 40
        assert {response.status_code for response, _ in refused} == {429}
        assert all(1 <= int(response.headers["retry-after"]) <= 60 for response, _ in refused)
        assert all(response.json()["error"]["code"] == "queue_full" for response, _ in refused)
        for response in served:
            assert "error" not in response.text, "an accepted one is never dropped"
        assert (await ask(client, max_tokens=2))[0].status_code == 200
    system.wait_idle()


async def test_a_deadline_is_an_error_before_the_first_byte_and_an_event_after_it(start_system: StartSystem) -> None:
    system = start_system(max_lanes=1, faults={"step_ms": 10})
    async with client_of(system.base_url) as client:
        running = asyncio.create_task(ask(client, max_tokens=2000, deadline_ms=1500, stream=True))
        await await_until(lambda: is_running(system), 60, "it runs")
        waiting, took_s = await ask(client, deadline_ms=200)
        assert (waiting.status_code, waiting.json()["error"]["code"]) == (504, "deadline_exceeded")
        assert took_s < 5
        ended, _ = await running
    assert ended.status_code == 200
    assert events(ended)[-1]["error"]["code"] == "deadline_exceeded"
    assert ended.text.endswith("data: [DONE]\n\n")
    assert len(events(ended)) > 10
    system.wait_idle()


async def test_requests_that_would_miss_the_time_to_first_token_are_turned_away(start_system: StartSystem) -> None:
    system = start_system(max_lanes=2, ttft_limit_ms=500, faults={"step_ms": 10})
    async with client_of(system.base_url) as client:
        await ask(client, max_tokens=100)
        answers = await asyncio.gather(*(ask(client, seed=i) for i in range(30)))
        statuses = [response.status_code for response, _ in answers]
        assert statuses.count(200) >= 2
        assert statuses.count(429) >= 10
        assert set(statuses) == {200, 429}
        refused = next(response for response, _ in answers if response.status_code == 429)
        assert refused.json()["error"]["code"] == "overloaded"
        asked_at = monotonic()
        while (await ask(client))[0].status_code != 200:
            assert monotonic() - asked_at < int(refused.headers["retry-after"]) + 2, "Retry-After is true"
