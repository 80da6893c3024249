"""``paternoster up`` itself: it starts, restarts, drains and ends a system, and leaves nothing behind."""

import asyncio
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from tests.e2e.conftest import StartSystem
from tests.e2e.prompts import Prompt
from tests.e2e.streams import Said, stream
from tests.e2e.system import START_S, Role, System
from tests.fakes.waiting import await_until, wait_until
from tools.ports import LinkPorts

PROMPT = Prompt("drain me", chat=True)
PACED = {"step_ms": 20}
"""A token takes 20 ms, so that a stream's length in seconds is its max_tokens / 50."""


def port_of(system: System) -> int:
    return int(system.base_url.rsplit(":", 1)[1])


async def under_way(client: openai.AsyncOpenAI, max_tokens: int) -> tuple[list[Said], list["asyncio.Task[Said]"]]:
    """Four streams, each of which has said something."""
    said = [Said() for _ in range(4)]
    options: dict[str, Any] = {"max_tokens": max_tokens, "extra_body": {"ignore_eos": True}}
    tasks = [asyncio.create_task(stream(client, PROMPT, each, **options)) for each in said]
    await await_until(lambda: all(each.token_ids for each in said), 60, "all streams are under way")
    return said, tasks


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_leaves_cleanly_and_leaves_nothing_behind(
    start_system: StartSystem, number: signal.Signals, tmp_path: Path
) -> None:
    long = tmp_path.joinpath(*["x" * 100] * 3)  # case EXEC 34: no path of ours may grow too long for a socket
    long.mkdir(parents=True)
    system = start_system(gateways=2, executors=2, env={"TMPDIR": str(long)})
    assert (len(system.pids("gateway")), len(system.pids("scheduler")), len(system.pids("executor"))) == (2, 1, 2)
    assert system.client().completions.create(model="default", prompt="hello", max_tokens=3).choices[0].text
    port = port_of(system)
    system.stop(number)
    with socket.create_server(("127.0.0.1", port)):
        pass
    assert list(long.iterdir()) == []
    assert "Traceback" not in system.log


async def test_ops_44_streams_finish_in_the_drain_and_new_work_is_refused(start_system: StartSystem) -> None:
    system = start_system(faults=PACED, drain_timeout=30)
    async with system.async_client(timeout=60) as client, httpx.AsyncClient(base_url=system.base_url) as kept:
        assert (await kept.get("/ready")).status_code == 200
        said, tasks = await under_way(client, 150)
        os.killpg(system.up.pid, signal.SIGINT)  # as a terminal does: to the whole process group
        await await_until(lambda: "draining" in system.log, 60, "the drain begins")
        body = {"model": "default", "prompt": "late", "max_tokens": 3}

        async def refused() -> bool:
            return (await kept.post("/v1/completions", json=body)).status_code == 503

        deadline = time.monotonic() + 60
        while not await refused():
            assert time.monotonic() < deadline, "new work is refused"
        await asyncio.gather(*tasks)
    assert [(each.finish_reason, each.completion_tokens) for each in said] == [("length", 150)] * 4
    assert system.wait() == 0


@pytest.mark.parametrize("drain_timeout", [0, 1])
async def test_ops_44_what_outlasts_the_drain_ends_with_an_error_event(
    start_system: StartSystem, drain_timeout: int
) -> None:
    system = start_system(faults=PACED, drain_timeout=drain_timeout)
    async with system.async_client(timeout=60) as client:
        _, tasks = await under_way(client, 3000)
        started_at = time.monotonic()
        system.up.send_signal(signal.SIGTERM)
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert 0.9 * drain_timeout < time.monotonic() - started_at < drain_timeout + 10
    assert [type(end) for end in ends] == [openai.APIError] * 4, ends
    assert system.wait() == 0


async def test_ops_44_a_second_signal_ends_it_now(start_system: StartSystem) -> None:
    system = start_system(faults=PACED, drain_timeout=60)
    async with system.async_client(timeout=60) as client:
        _, tasks = await under_way(client, 3000)
        system.up.send_signal(signal.SIGTERM)
        await await_until(lambda: "draining" in system.log, 60, "the drain begins")
        started_at = time.monotonic()
        system.up.send_signal(signal.SIGINT)
        assert await asyncio.to_thread(system.wait) == 128 + signal.SIGINT
        assert time.monotonic() - started_at < 5
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize("role", ["gateway", "scheduler", "executor"])
def test_a_dead_child_is_started_again(fake_system: System, role: Role) -> None:
    killed = fake_system.kill(role)
    assert fake_system.get("/health").status_code == 200  # from a gateway just started again, if need be
    wait_until(lambda: fake_system.pids(role) not in ([], [killed]), START_S, f"another {role} runs")
    fake_system.wait_ready()
    assert fake_system.client().completions.create(model="default", prompt="hello", max_tokens=3).choices[0].text


def test_a_child_that_cannot_start_ends_everything_with_its_reason(start_system: StartSystem) -> None:
    system = start_system(wait=False, env={"PATERNOSTER_FAULTS": "{oops"})
    assert system.wait(START_S) not in (0, 128 + signal.SIGKILL)
    last = system.log.splitlines()[-1]
    assert last.startswith("paternoster: error: executor-0 cannot start (exit code ")
    assert "PATERNOSTER_FAULTS" in last


@pytest.fixture
def busy_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize("option", ["port", "link_port", "metrics_port"])
def test_a_port_in_use_is_told_before_anything_starts(start_system: StartSystem, busy_port: int, option: str) -> None:
    system = start_system(wait=False, **{option: busy_port})
    assert system.wait() == 1
    (line,) = system.log.splitlines()
    assert line.startswith("paternoster: error: cannot take ")
    assert line.endswith(f"port {busy_port} on 127.0.0.1: it is in use")


def test_a_model_that_is_not_there_is_the_last_line(start_system: StartSystem) -> None:
    system = start_system(wait=False, backend="torch", model="/no/such/model.gguf")
    assert system.wait(START_S) == 1
    (line,) = (line for line in system.log.splitlines() if "cannot fetch" in line)
    assert line == system.log.splitlines()[-1]
    assert line.startswith("paternoster: error: no model to serve: cannot fetch /no/such/model.gguf")


def test_a_wrong_setting_stops_the_start(start_system: StartSystem) -> None:
    for options in ({"backend": "magic"}, {"env": {"PATERNOSTER_EXECUTERS": "2"}}):
        system = start_system(wait=False, **options)
        assert system.wait() == 2
        assert len(system.log.splitlines()) == 1


def test_its_own_kill_takes_its_children_along_though_they_are_in_sessions_of_their_own(fake_system: System) -> None:
    children = psutil.Process(fake_system.up.pid).children()
    assert len({os.getpgid(child.pid) for child in children} - {fake_system.up.pid}) == 3
    fake_system.up.kill()
    assert fake_system.wait() == -signal.SIGKILL


def test_exec_34_systems_that_start_at_the_same_moment_do_not_meet(start_system: StartSystem) -> None:
    start_at_once(start_system, 4)


@pytest.mark.soak
def test_exec_34_eight_systems_that_start_at_the_same_moment_five_times(start_system: StartSystem) -> None:
    for _ in range(5):
        start_at_once(start_system, 8)


def start_at_once(start_system: StartSystem, count: int) -> None:
    """Each serves, and its scheduler knows its own executor and no other."""
    systems = [start_system(wait=False) for _ in range(count)]
    for system in systems:
        wait_until(lambda: system.base_url or not system.running, START_S, "the system serves")  # noqa: B023
        assert system.base_url, system.log
        executors = system.debug_state()["scheduler"]["executors"]
        assert [executor["pid"] for executor in executors] == system.pids("executor")
    for system in systems:
        system.stop()


def test_exec_34_neither_what_a_kill_left_nor_a_long_tmpdir_is_in_the_way(
    start_system: StartSystem, tmp_path: Path
) -> None:
    """The links are TCP: no socket file can be stale, and no path too long for one."""
    with LinkPorts(0) as links:
        port = links.gateways
    killed = start_system(link_port=port)
    killed.up.kill()
    killed.wait()
    long_path = tmp_path / ("x" * 200)
    long_path.mkdir()
    again = start_system(link_port=port, env={"TMPDIR": str(long_path)})
    assert again.get("/ready").status_code == 200
    again.stop()
    assert not list(long_path.iterdir())
