"""kill -9 of each process in turn while streams run (bugs.md 6, 33): executor and scheduler are a pause, no more."""

import asyncio
import signal

import httpx
import openai
import pytest

from tests.e2e.conftest import StartSystem
from tests.e2e.prompts import Prompt
from tests.e2e.streams import Said, stream
from tests.e2e.system import Role, System
from tests.fakes.waiting import await_until

NUM_STREAMS = 8
LONG = {"max_tokens": 150, "temperature": 0.8, "extra_body": {"ignore_eos": True}}
SLOW = {"step_ms": 10}


def _prompt(number: int) -> Prompt:
    return Prompt(f"stream number {number} " + "and so on " * number, chat=bool(number % 2))


async def _undisturbed(client: openai.AsyncOpenAI) -> list[Said]:
    streams = [stream(client, _prompt(n), seed=n, **LONG) for n in range(NUM_STREAMS)]
    return list(await asyncio.gather(*streams))


async def _under_way(client: openai.AsyncOpenAI) -> tuple[list[Said], list["asyncio.Task[Said]"]]:
    said = [Said() for _ in range(NUM_STREAMS)]
    tasks = [asyncio.create_task(stream(client, _prompt(n), said[n], seed=n, **LONG)) for n in range(NUM_STREAMS)]
    await await_until(lambda: all(len(each.token_ids) >= 10 for each in said), 60, "all streams are under way")
    return said, tasks


def _same(said: list[Said], calm: list[Said]) -> None:
    for each, expected in zip(said, calm, strict=True):
        assert each.token_ids == expected.token_ids
        assert each.text == expected.text
        assert each.finish_reason == expected.finish_reason == "length"
        assert (each.prompt_tokens, each.completion_tokens) == (expected.prompt_tokens, expected.completion_tokens)


@pytest.mark.parametrize(
    ("executors", "killed"),
    [(2, ["executor"]), (1, ["executor"]), (2, ["scheduler"]), (1, ["scheduler", "executor"])],
    ids=["executor of two", "only executor", "scheduler", "scheduler and executor"],
)
async def test_exec_33_streams_outlive_executor_and_scheduler(
    start_system: StartSystem, executors: int, killed: list[Role]
) -> None:
    system = start_system(executors=executors, faults=SLOW)
    async with system.async_client(timeout=60) as client:
        calm = await _undisturbed(client)
        said, tasks = await _under_way(client)
        for role in killed:
            system.kill(role)
        await asyncio.gather(*tasks)
        _same(said, calm)
        system.wait_ready()
        fresh = await stream(client, _prompt(0), seed=0, **LONG)
        _same([fresh], calm[:1])
    system.wait_idle()


async def test_exec_33_a_killed_gateway_frees_its_requests(start_system: StartSystem) -> None:
    system = start_system(faults=SLOW)
    async with system.async_client(timeout=60) as client:
        said, tasks = await _under_way(client)
        system.kill("gateway")
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(each, openai.APIError | httpx.HTTPError) for each in ended), ended
        system.wait_ready()
        system.wait_idle()
        assert (await stream(client, _prompt(0), seed=0, **LONG)).token_ids[:10] == said[0].token_ids[:10]


async def test_exec_33_a_stopped_executor_is_found_out_and_wakes_up_harmless(start_system: StartSystem) -> None:
    system = start_system(executors=2, faults=SLOW)
    async with system.async_client(timeout=60) as client:
        calm = await _undisturbed(client)
        said, tasks = await _under_way(client)
        pid = system.kill("executor", signal.SIGSTOP)
        try:
            await asyncio.gather(*tasks)
        finally:
            system.kill("executor", signal.SIGCONT, index=system.pids("executor").index(pid))
        _same(said, calm)
        await await_until(
            lambda: len(system.debug_state()["scheduler"]["executors"]) == 2, 20, "the woken executor has rejoined"
        )
        _same(await _undisturbed(client), calm)
    system.wait_idle()


async def test_stream_06_no_executor_for_the_recovery_timeout_ends_streams_with_an_error(
    start_system: StartSystem,
) -> None:
    """bugs.md 6 and 33: the executor dies and its successor never gets ready."""
    poison = {"step_ms": 10, "rules": [{"prompt_contains": "boom", "at_output_token": 3, "do": "hang"}]}
    system = start_system(faults=poison, recovery_timeout=2, step_timeout=1)
    async with system.async_client(timeout=60) as client:
        with pytest.raises(openai.APIError):
            await stream(client, Prompt("boom", chat=False), **LONG)
        assert system.get("/health").status_code == 200
        system.wait_ready()
        assert (await stream(client, _prompt(1), seed=1, **LONG)).finish_reason == "length"


async def test_stream_06_a_request_that_fails_by_itself_ends_alone(start_system: StartSystem) -> None:
    rules = [{"prompt_contains": f"{do}!", "at_output_token": 3, "do": do} for do in ("raise", "nan", "exit")]
    system: System = start_system(faults={"step_ms": 10, "rules": rules})
    async with system.async_client(timeout=60) as client:
        calm = await _undisturbed(client)
        said, tasks = await _under_way(client)
        for do in ("raise", "nan", "exit"):
            broken = Said()
            with pytest.raises(openai.APIError):
                await stream(client, Prompt(f"{do}!", chat=False), broken, **LONG)
            assert 0 < len(broken.token_ids) <= 3
            assert broken.finish_reason is None
        await asyncio.gather(*tasks)
        _same(said, calm)
    system.wait_idle()
