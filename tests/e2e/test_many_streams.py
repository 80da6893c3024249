"""Very many streams on one gateway: they come, stay and go, and nothing of them is left."""

import asyncio
import contextlib
import json
import random

import psutil
import pytest

from tests.e2e.conftest import StartSystem
from tests.e2e.system import System
from tests.fakes.waiting import await_until

FULL = [pytest.mark.soak, pytest.mark.timeout(1800)]
TOGETHER = 50
"""Cycles at once."""
MB = 2**20


def request(body: object) -> bytes:
    data = json.dumps(body).encode()
    return b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(data) + data


class Client:
    """One connection with one request on it."""

    def __init__(self, system: System) -> None:
        self._port = int(system.base_url.rsplit(":", 1)[1])

    async def ask(self, **fields: object) -> None:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self._port)
        self.writer.write(request({"prompt": "a", "ignore_eos": True, "stream": True} | fields))

    async def until(self, what: bytes) -> None:
        async with asyncio.timeout(60):
            await self.reader.readuntil(what)

    def leave(self, *, abruptly: bool = False) -> None:
        if abruptly:
            self.writer.transport.abort()
        else:
            self.writer.close()


async def cycle(system: System, rng: random.Random) -> None:
    """Open and close in one of the ways in which clients do."""
    client = Client(system)
    way = rng.choice(["whole", "whole", "leave", "abort", "at once", "bad", "three"])
    await client.ask(max_tokens=2000 if way in ("leave", "abort") else 3, n=3 if way == "three" else 1)
    if way == "bad":
        client.leave()
        await client.ask(max_tokens=-1)
        await client.until(b" 400 ")
    elif way in ("leave", "abort"):
        await client.until(b"data: ")
    elif way != "at once":
        await client.until(b"[DONE]")
    client.leave(abruptly=way in ("abort", "at once"))
    with contextlib.suppress(ConnectionError):
        await client.writer.wait_closed()


async def cycles(system: System, number: int, seed: int) -> None:
    rng = random.Random(seed)
    for start in range(0, number, TOGETHER):
        await asyncio.gather(*(cycle(system, rng) for _ in range(min(TOGETHER, number - start))))


def memory(processes: list[psutil.Process]) -> list[int]:
    return [process.memory_info().rss for process in processes]


@pytest.mark.parametrize("number", [pytest.param(300, id="small"), pytest.param(10_000, marks=FULL, id="full")])
async def test_ops_48_streams_that_come_and_go_leave_nothing(start_system: StartSystem, number: int) -> None:
    system = start_system(max_lanes=64, max_step_tokens=512)
    processes = [psutil.Process(pid) for role in ("gateway", "scheduler", "executor") for pid in system.pids(role)]
    await cycles(system, max(100, number // 10), 0)  # what is allocated once is not a leak
    system.wait_idle()
    descriptors, before = [process.num_fds() for process in processes], memory(processes)
    await cycles(system, number, 1)
    system.wait_idle()
    await await_until(lambda: processes[0].num_fds() <= descriptors[0] + 3, 60, "the gateway's descriptors are closed")
    assert [process.num_fds() for process in processes[1:]] == descriptors[1:]
    grown = [now - then for now, then in zip(memory(processes), before, strict=True)]
    assert max(grown) < 8 * MB + number * 200, [f"{each / MB:.1f} MB" for each in grown]


@pytest.mark.parametrize("streams", [pytest.param(100, id="small"), pytest.param(2000, marks=FULL, id="full")])
async def test_many_streams_at_once(start_system: StartSystem, streams: int) -> None:
    """One in twenty runs, the others wait and are told that they live; whoever comes is answered."""
    running = streams // 20
    system = start_system(max_lanes=running, num_blocks=40 * streams, faults={"step_ms": 50})
    clients = [Client(system) for _ in range(streams)]
    for client in clients:
        await client.ask(max_tokens=4000)
    await asyncio.gather(*(client.until(b" 200 ") for client in clients))
    await asyncio.gather(*(client.until(b"data: ") for client in clients[:running]))
    if streams >= 2000:  # it takes 10 s until they are
        await asyncio.gather(*(client.until(b": keep-alive") for client in clients[running:]))
    await asyncio.gather(*(client.until(b"data: ") for client in clients[:running]))
    state = await asyncio.to_thread(system.debug_state)
    assert (state["gateway"]["streams"], state["scheduler"]["running"]) == (streams, running)
    assert (await asyncio.to_thread(system.get, "/health")).status_code == 200
    for client in clients:
        client.leave()
    await asyncio.to_thread(system.wait_idle)
