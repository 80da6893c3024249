"""Several gateways on one port, with keys: what one is asked and what another is asked counts together."""

import asyncio
import contextlib
import json
import os
import signal
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.e2e.conftest import StartSystem
from tests.e2e.system import System
from tests.fakes.certificates import certificate_in
from tests.fakes.waiting import await_until

ONE_EACH = httpx.Limits(max_connections=1, max_keepalive_connections=1)
STAFF = {"Authorization": "Bearer sk-staff"}


@contextlib.asynccontextmanager
async def clients(system: System, count: int) -> AsyncIterator[list[list[httpx.AsyncClient]]]:
    """For each of two gateways clients whose one connection is with it: while it was made the other was stopped."""
    async with contextlib.AsyncExitStack() as stack:
        found: list[list[httpx.AsyncClient]] = []
        for other in reversed(system.pids("gateway")):
            os.kill(other, signal.SIGSTOP)
            try:
                found.append([])
                for _ in range(count):
                    client = httpx.AsyncClient(base_url=system.base_url, timeout=60, limits=ONE_EACH)
                    found[-1].append(await stack.enter_async_context(client))
                    assert (await client.get("/health")).status_code == 200
            finally:
                os.kill(other, signal.SIGCONT)
        yield found


def key_file(folder: Path, **limits: Any) -> str:
    path = folder / "keys"
    path.write_text("sk-staff\n" + json.dumps({"key": "sk-ann", "name": "ann", **limits}) + "\n")
    return str(path)


async def ask(client: httpx.AsyncClient, key: str = "sk-ann", **fields: Any) -> httpx.Response:
    body = {"prompt": "hello", "max_tokens": 4, "ignore_eos": True, **fields}
    return await client.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"})


async def test_a_keys_rates_hold_over_all_gateways(start_system: StartSystem, tmp_path: Path) -> None:
    keys = key_file(tmp_path, requests_per_minute=6, weight=2)
    system = start_system(gateways=2, api_key_file=keys)
    async with clients(system, 1) as ((one,), (two,)):
        names = [(await each.get("/debug/state", headers=STAFF)).json()["gateway"]["name"] for each in (one, two)]
        assert sorted(names) == ["gateway-0", "gateway-1"]
        served = [await ask(client) for _ in range(3) for client in (one, two)]
        assert [answer.status_code for answer in served] == [200] * 6
        for client in (one, two):
            refused = await ask(client)
            assert refused.status_code == 429
            assert refused.json()["error"]["code"] == "rate_limited"
            assert 1 <= int(refused.headers["retry-after"]) <= 10, "a sixth of a minute, less what has passed"
            assert (await ask(client, "sk-staff")).status_code == 200, "another key is not concerned"
        assert (await ask(one, n=7)).status_code == 400, "more than may ever be"
        assert (await ask(one, "sk-nobody")).status_code == 401
    assert "sk-" not in system.log
    assert not any("sk-" in each for pid in system.pids("gateway") for each in psutil.Process(pid).cmdline())


async def test_requests_at_once_and_debug_state_are_those_of_all_gateways(
    start_system: StartSystem, tmp_path: Path
) -> None:
    keys = key_file(tmp_path, concurrency=2)
    system = start_system(gateways=2, api_key_file=keys, faults={"step_ms": 20})
    async with clients(system, 2) as (ones, twos):
        running = [asyncio.create_task(ask(client, max_tokens=5000)) for client in (ones[0], twos[0])]

        async def state() -> dict[str, Any]:
            answer: dict[str, Any] = (await ones[1].get("/debug/state", headers=STAFF)).json()
            return answer

        seen: dict[str, Any] = {}

        async def both_run() -> None:
            while [each["streams"] for each in seen.get("gateways", ())] != [1, 1]:
                seen.update(await state())

        await asyncio.wait_for(both_run(), 30)
        assert sorted(each["pid"] for each in seen["gateways"]) == sorted(system.pids("gateway"))
        assert {each["id"][: len("gateway-gateway-0")] for each in seen["gateways"]} == {
            "gateway-gateway-0",
            "gateway-gateway-1",
        }
        assert seen["gateway"]["streams"] == 1
        for client in (ones[1], twos[1]):
            refused = await ask(client, stream=True)
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limited")
        system.kill("scheduler")
        await await_until(lambda: len(system.pids("scheduler")) == 1, 60, "there is another scheduler")
        seen.clear()

        async def again() -> None:
            while [each["streams"] for each in seen.get("gateways", ())] != [1, 1]:
                answer = await ones[1].get("/debug/state", headers=STAFF)
                seen.update(answer.json() if answer.status_code == 200 else {})

        await asyncio.wait_for(again(), 60)

        async def first_answer() -> int:
            while (status := (await ask(twos[1])).status_code) == 503:
                pass  # no executor has joined the new scheduler
            return status

        assert await asyncio.wait_for(first_answer(), 60) == 429, "the new scheduler counts the streams it took back"
        for task in running:
            task.cancel()
        await asyncio.wait(running)
        gone: list[int] = []

        async def one_fits() -> None:
            while (await ask(twos[1])).status_code == 429:
                gone.append(1)

        await asyncio.wait_for(one_fits(), 30)


async def test_up_serves_https_and_each_gateway_tells_its_metrics(start_system: StartSystem, tmp_path: Path) -> None:
    files = certificate_in(tmp_path)
    system = start_system(gateways=2, ssl_certfile=files.certfile, ssl_keyfile=files.keyfile, faults={"step_ms": 5})
    assert system.base_url.startswith("https://127.0.0.1:")
    trusting = ssl.create_default_context(cafile=files.authority)
    async with httpx.AsyncClient(base_url=system.base_url, verify=trusting, timeout=60) as http:
        body = {"model": "default", "prompt": "hello", "max_tokens": 20, "ignore_eos": True, "stream": True}
        answer = await http.post("/v1/completions", json=body)
        assert answer.text.endswith("data: [DONE]\n\n")
        async with http.stream("POST", "/v1/completions", json={**body, "max_tokens": 8000}) as stream:
            async for _ in stream.aiter_lines():
                break

        async def idle() -> bool:
            state = (await http.get("/debug/state")).json()
            return not any(each["streams"] for each in state["gateways"]) and not state["scheduler"]["running"]

        async def until_idle() -> None:
            while not await idle():
                pass

        await asyncio.wait_for(until_idle(), 10)
