"""The compute thread: jobs in order, answers on the loop, errors to whom they belong."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from services.executor.compute import Compute
from tests.fakes.waiting import await_until


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 30))


def refuse(error: BaseException) -> None:
    raise AssertionError("no job should have crashed") from error


def test_jobs_run_in_order_in_one_thread_and_are_answered_on_the_loop() -> None:
    async def scenario() -> None:
        compute = Compute(refuse)
        answers: list[tuple[int, int, int]] = []
        for number in range(50):
            compute.submit(
                lambda number=number: compute.post(
                    lambda thread: answers.append((number, thread, threading.get_ident())), threading.get_ident()
                )
            )
        await await_until(lambda: len(answers) == 50, 10, "all answers")
        assert [answer[0] for answer in answers] == list(range(50))
        assert len({answer[1] for answer in answers}) == 1
        assert {answer[2] for answer in answers} == {threading.get_ident()} != {answers[0][1]}
        assert compute.close(10)

    run(scenario)


def test_call_returns_and_raises() -> None:
    async def scenario() -> None:
        compute = Compute(refuse)
        assert await compute.call(lambda: 5) == 5
        with pytest.raises(ZeroDivisionError):
            await compute.call(lambda: 1 // 0)
        assert compute.close(10)

    run(scenario)


def test_what_a_submitted_job_raises_is_a_crash_and_the_thread_lives_on() -> None:
    async def scenario() -> None:
        crashes: list[BaseException] = []
        compute = Compute(crashes.append)
        compute.submit(lambda: 1 // 0)
        assert await compute.call(lambda: 5) == 5
        assert [type(crash) for crash in crashes] == [ZeroDivisionError]
        assert compute.close(10)

    run(scenario)


def test_what_waits_for_a_device_keeps_no_job_waiting() -> None:
    async def scenario() -> None:
        compute, gates = Compute(refuse), [threading.Event(), threading.Event()]
        done: list[str] = []
        for number, gate in enumerate(gates):
            compute.submit(
                lambda number=number, gate=gate: compute.submit_after(
                    lambda: gate.wait(20) or None, lambda: done.append(f"after {number}")
                )
            )
        compute.submit(lambda: done.append("between"))
        await await_until(lambda: done == ["between"], 10, "a job while the device is waited for")
        await await_until(lambda: compute.busy_s > 0.02, 10, "the device to count as busy")
        gates[1].set()
        assert done == ["between"], "waits are in order"
        assert not compute.close(0.01), "a device cannot be stopped"
        gates[0].set()
        assert compute.close(10)

    run(scenario)


def test_what_a_wait_is_for_runs_in_the_thread() -> None:
    async def scenario() -> None:
        compute = Compute(refuse)
        threads: list[int] = []
        thread = await compute.call(threading.get_ident)
        compute.submit(lambda: compute.submit_after(lambda: None, lambda: threads.append(threading.get_ident())))
        await await_until(lambda: threads == [thread], 10, "the job behind the wait")
        assert compute.close(10)

    run(scenario)


def test_busy_tells_how_long_and_close_tells_of_a_job_that_runs() -> None:
    async def scenario() -> None:
        compute, gate = Compute(refuse), threading.Event()
        assert compute.busy_s == 0
        compute.submit(lambda: gate.wait(20))
        await await_until(lambda: compute.busy_s > 0.02, 10, "busy")
        assert not compute.close(0.01)
        gate.set()
        await await_until(lambda: compute.busy_s == 0, 10, "the job's end")
        assert compute.close(10)

    run(scenario)
