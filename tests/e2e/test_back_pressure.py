"""A gateway that stands still while 500 streams produce, and one that dies with messages queued for it (bugs.md 35)."""

import asyncio
import json
import re
import signal
from typing import Any

import httpx

from tests.e2e.conftest import StartSystem
from tests.e2e.system import System
from tests.fakes.waiting import await_until

NUM_REQUESTS, CHOICES, TOKENS = 125, 4, 60
SLOW_MS = 100
"""A step; so that no stream has ended when its gateway is declared lost after 5 s."""
BODY = {
    "model": "default",
    "n": CHOICES,
    "max_tokens": TOKENS,
    "temperature": 1.0,
    "ignore_eos": True,
    "return_token_ids": True,
}


def _body(number: int) -> dict[str, Any]:
    return BODY | {"prompt": f"stream number {number}", "seed": number}


async def _stream(client: httpx.AsyncClient, system: System, number: int, begun: list[int]) -> list[list[int]]:
    """Token ids of each choice, which must be as many as usage says, and the end must be told."""
    ids: list[list[int]] = [[] for _ in range(CHOICES)]
    usage: dict[str, int] = {}
    last = ""
    options = {"stream": True, "stream_options": {"include_usage": True}}
    url = f"{system.base_url}/v1/completions"
    async with client.stream("POST", url, json=_body(number) | options) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            last = line or last
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                begun[number] = 1
                ids[choice["index"]] += choice.get("token_ids") or []
    assert last == "data: [DONE]"
    assert [len(each) for each in ids] == [TOKENS] * CHOICES
    assert usage["completion_tokens"] == TOKENS * CHOICES
    return ids


async def test_exec_35_streams_are_complete_though_their_gateway_stood_still(start_system: StartSystem) -> None:
    system = start_system(faults={"step_ms": SLOW_MS}, max_lanes=512, num_blocks=4000)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=200, limits=limits) as client:
        begun = [0] * NUM_REQUESTS
        streams = [asyncio.create_task(_stream(client, system, n, begun)) for n in range(NUM_REQUESTS)]
        await await_until(lambda: sum(begun) >= NUM_REQUESTS // 2, 60, "half of the streams are under way")
        system.kill("gateway", signal.SIGSTOP)
        try:
            await await_until(lambda: re.search("gateway .* left: ", system.log), 60, "the gateway is declared lost")
        finally:
            system.kill("gateway", signal.SIGCONT)
        found = await asyncio.gather(*streams)
        calm = await asyncio.gather(*(_stream(client, system, n, begun) for n in (0, 60, 124)))
        assert calm == [found[n] for n in (0, 60, 124)]
        system.wait_idle()

        streams = [asyncio.create_task(_stream(client, system, n, begun)) for n in range(20)]
        await await_until(lambda: system.debug_state()["gateway"]["streams"] > 0, 60, "streams run again")
        system.kill("gateway", signal.SIGSTOP)
        system.kill("gateway", signal.SIGKILL)
        ended = await asyncio.gather(*streams, return_exceptions=True)
        assert any(isinstance(each, httpx.HTTPError) for each in ended), "those it had begun are broken off"
    system.wait_ready()
    system.wait_idle()
    assert system.running
