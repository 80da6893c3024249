"""OPS 48: whatever clients send for however long, memory, tables and metrics stay as they are."""

import asyncio
import random
import re
from typing import Any

import httpx
import psutil
import pytest

from tests.e2e.conftest import StartSystem
from tests.e2e.system import System

TOGETHER = 8


async def _one(client: httpx.AsyncClient, rng: random.Random, number: int) -> None:
    """A tiny request of one of the kinds there are; names, ids and stop strings never come twice."""
    body: dict[str, Any] = {"prompt": f"{number}", "max_tokens": 2, "stop": [f"stop {number}"], "ignore_eos": True}
    headers = {"X-Request-Id": f"id-{number}"}
    match rng.choice(["ok", "ok", "bad", "leave", "three", "prompts", "unknown", "nowhere", "chat"]):
        case "bad":
            body["temperature"] = -1 - number
        case "three":
            body["n"] = 3
        case "prompts":
            body["prompt"] = [f"{number}", f"{number} again"]
        case "unknown":
            body[f"field_{number}"] = number
        case "nowhere":
            await client.get(f"/nowhere/{number}", headers=headers)
            return
        case "chat":
            messages = [{"role": "user", "content": f"{number}"}]
            await client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 2}, headers=headers)
            return
        case "leave":
            body |= {"stream": True, "max_tokens": 500}
            async with client.stream("POST", "/v1/completions", json=body, headers=headers) as response:
                await anext(response.aiter_lines())
            return
    response = await client.post("/v1/completions", json=body, headers=headers)
    assert response.status_code == (400 if "temperature" in body else 200), response.text


async def _many(client: httpx.AsyncClient, rng: random.Random, numbers: range) -> None:
    left = iter(numbers)

    async def work() -> None:
        for number in left:
            await _one(client, rng, number)

    await asyncio.gather(*(work() for _ in range(TOGETHER)))


async def _labels(client: httpx.AsyncClient) -> set[str]:
    """Every series that the gateway tells."""
    await client.get("/metrics")  # the first of these is itself something new to tell
    page = (await client.get("/metrics")).text
    return set(re.findall(r"^(paternoster:\S+?\{[^}]*\}|paternoster:\S+) ", page, re.MULTILINE))


def _memory(system: System) -> dict[str, int]:
    """Resident bytes of each process."""
    pids = {role: system.pids(role)[0] for role in ("gateway", "scheduler", "executor")}  # type: ignore[arg-type]
    return {role: psutil.Process(pid).memory_info().rss for role, pid in pids.items()}


@pytest.mark.parametrize(
    ("first", "step", "rounds", "may_grow"),
    [
        pytest.param(300, 300, 2, 0.05, id="small"),
        pytest.param(20_000, 45_000, 4, 0.01, id="full", marks=[pytest.mark.soak, pytest.mark.timeout(0)]),
    ],
)
async def test_ops_48_memory_and_labels_do_not_grow(
    start_system: StartSystem, first: int, step: int, rounds: int, may_grow: float
) -> None:
    system = start_system(num_blocks=512)
    rng = random.Random(48)
    async with httpx.AsyncClient(base_url=system.base_url, timeout=60) as client:
        await _many(client, rng, range(first))
        await asyncio.to_thread(system.wait_idle)
        before, labels = _memory(system), await _labels(client)
        for number in range(rounds):
            start = first + number * step
            await _many(client, rng, range(start, start + step))
            await asyncio.to_thread(system.wait_idle)
            now = _memory(system)
            grown = {role: now[role] / before[role] - 1 for role in now}
            assert max(grown.values()) < may_grow, (start + step, grown)
            before = now
        assert await _labels(client) == labels
