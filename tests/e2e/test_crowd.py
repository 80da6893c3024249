"""Crowds on the fake backend: abrupt disconnects leave nothing behind (bugs.md 8), and idle costs nothing."""

import asyncio
import contextlib

import httpx
import psutil

from tests.e2e.conftest import StartSystem
from tests.e2e.system import System

BODY = {"model": "default", "prompt": "tell me more", "max_tokens": 200, "ignore_eos": True, "stream": True}


async def _leave_early(client: httpx.AsyncClient, url: str, seed: int, chunks: int) -> None:
    async with client.stream("POST", url, json=BODY | {"seed": seed, "max_tokens": 2000}) as response:
        assert response.status_code == 200
        async for _ in response.aiter_lines():
            chunks -= 1
            if chunks <= 0:
                return


async def _stay(client: httpx.AsyncClient, url: str, seed: int) -> str:
    async with client.stream("POST", url, json=BODY | {"seed": seed}) as response:
        assert response.status_code == 200
        lines = [line async for line in response.aiter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    return "\n".join(lines)


async def test_abort_08_two_hundred_streams_and_a_hundred_abrupt_disconnects(start_system: StartSystem) -> None:
    system = start_system(executors=2, num_blocks=600)
    url = f"{system.base_url}/v1/completions"
    async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=None)) as client:
        leaving = [_leave_early(client, url, seed, chunks=1 + seed % 20) for seed in range(100)]
        staying = [_stay(client, url, 1000 + seed) for seed in range(100)]
        mixed = [each for pair in zip(leaving, staying, strict=True) for each in pair]
        await asyncio.gather(*mixed)
        system.wait_idle()


async def test_abort_09_a_client_that_leaves_before_the_first_token(start_system: StartSystem) -> None:
    """Streamed and not, with every middleware on."""
    system = start_system(
        faults={"step_ms": 50, "prefill_ms_per_token": 2}, api_key="sk-test", cors_origin="https://example.com"
    )
    url = f"{system.base_url}/v1/completions"
    headers = {"Authorization": "Bearer sk-test"}
    for stream in (True, False):
        body = BODY | {"stream": stream, "prompt": "a long prompt " * 30}
        async with httpx.AsyncClient(headers=headers) as client:
            with contextlib.suppress(httpx.ReadTimeout):
                await client.post(url, json=body, timeout=httpx.Timeout(5, read=0.3))
        system.wait_idle()
    assert "Traceback" not in system.log
    assert "No response returned" not in system.log


def _cpu_s(processes: list[psutil.Process]) -> float:
    return sum(t.user + t.system for t in (process.cpu_times() for process in processes))


async def test_exec_36_idle_costs_under_two_percent_of_a_core(start_system: StartSystem) -> None:
    system: System = start_system()
    async with httpx.AsyncClient(timeout=60) as client:
        await _stay(client, f"{system.base_url}/v1/completions", 1)
    system.wait_idle()
    processes = [psutil.Process(pid) for role in ("gateway", "scheduler", "executor") for pid in system.pids(role)]
    assert len(processes) == 3
    before = _cpu_s(processes)
    seconds = 10.0
    await asyncio.sleep(seconds)  # the measurement itself: CPU seconds used while nothing happens
    assert _cpu_s(processes) - before < 0.02 * seconds
