"""The executor's shell over a real link: sessions, answers in order, heartbeats while a step runs."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from services.executor.backend import StepError, StepOutput
from services.executor.backends.fake import FakeBackend
from services.executor.batch import StepBatch
from services.executor.compute import Compute
from services.executor.metrics import ExecutorMetrics
from services.executor.options import ExecutorOptions
from services.executor.shell import Shell
from shared import fake_model
from shared.net.crash import Crash
from shared.wire.executor import BatchPlan, Draining, Shutdown, Work, batch_plan
from shared.wire.facts import ExecutorLimits
from tests.fakes.device_backend import DeviceBackend
from tests.fakes.plans import admit, failed, sampled
from tests.fakes.scheduler_side import DEADLINE_S, EPOCH, SchedulerSide
from tests.fakes.waiting import await_until

LIMITS = ExecutorLimits(num_blocks=32, block_size=4, num_lanes=4, max_step_tokens=64)


class Gated(FakeBackend):
    """A fake backend whose steps wait at a gate while it is shut."""

    def __init__(self) -> None:
        super().__init__(fake_model.facts(64), LIMITS)
        self.gate = threading.Event()
        self.gate.set()
        self.runs: list[int] = []
        self.error: Exception | None = None

    def run(self, batch: StepBatch) -> StepOutput:
        self.runs.append(batch.step)
        assert self.gate.wait(DEADLINE_S)
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        return super().run(batch)


class World:
    """One executor and the scheduler's end of its link, in one loop."""

    def __init__(self, scheduler: SchedulerSide, backend: Gated, shell: Shell, metrics: ExecutorMetrics) -> None:
        self.scheduler = scheduler
        self.backend = backend
        self.shell = shell
        self._metrics = metrics

    def ignored(self, reason: str) -> float:
        return self._metrics.registry.get_sample_value("paternoster:executor_ignored_total", {"reason": reason}) or 0.0


@asynccontextmanager
async def world(device: DeviceBackend | None = None, **options: Any) -> AsyncIterator[World]:
    """``device``: computes in place of the gated backend."""
    scheduler, backend, metrics, crash = SchedulerSide(), Gated(), ExecutorMetrics(), Crash()
    crash.watch(asyncio.get_running_loop())
    crashing = asyncio.ensure_future(crash.wait())
    compute = Compute(crash.report)
    executor_options = replace(ExecutorOptions(name="e", scheduler=scheduler.endpoint, backend="fake"), **options)
    shell = Shell(executor_options, device or backend, compute, metrics, crash.report, interval_s=0.05)
    the_world = World(scheduler, backend, shell, metrics)
    shell.start()
    try:
        await scheduler.joined()
        await await_until(lambda: shell.connected, DEADLINE_S, "the welcome")
        yield the_world
        assert not crashing.done(), crashing.exception()
    finally:
        backend.gate.set()
        await shell.close()
        await the_world.scheduler.router.close()
        assert compute.close(DEADLINE_S)
        crashing.cancel()


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 60))


def first(step: int, lane: int = 0, block: int = 0, epoch: int = EPOCH) -> BatchPlan:
    """Admit a lane with the prompt 65, 66, 67 and sample its first token."""
    return batch_plan(
        epoch, step, step - 1, admits=[admit(lane, [65, 66, 67], [block, block + 1])], work=[Work(lane, 0, 3, True)]
    )


def decode(step: int, start: int, confirmed: int | None = None, lane: int = 0) -> BatchPlan:
    return batch_plan(EPOCH, step, step - 1 if confirmed is None else confirmed, work=[Work(lane, start, 1, True)])


def test_hello_plan_result() -> None:
    async def scenario() -> None:
        async with world() as w:
            hello = w.scheduler.hellos[0]
            assert (hello.name, hello.limits, hello.facts) == ("e", LIMITS, fake_model.facts(64))
            answer = await w.scheduler.ask(first(1))
            assert (answer.epoch, answer.step, len(sampled(answer))) == (EPOCH, 1, 1)
            assert len(sampled(await w.scheduler.ask(decode(2, 3)))) == 1
            emptied = await w.scheduler.ask(BatchPlan(EPOCH, 3, 2, retires=b"\0\0\0\0"))
            assert sampled(emptied) == []
            assert w.backend.runs == [1, 2]

    run(scenario)


def test_answers_keep_the_order_of_the_plans() -> None:
    async def scenario() -> None:
        async with world() as w:
            w.backend.gate.clear()
            w.scheduler.send(first(1))
            w.scheduler.send(decode(2, 3, confirmed=0))
            w.scheduler.send(batch_plan(EPOCH, 3, 0, retires=[0]))
            await await_until(lambda: w.backend.runs == [1], DEADLINE_S, "the first step to run")
            assert w.scheduler.answers == []
            w.backend.gate.set()
            await w.scheduler.answered(3)
            assert [answer.step for answer in w.scheduler.answers] == [1, 2, 3]

    run(scenario)


def test_heartbeats_go_on_and_tell_of_a_long_step() -> None:
    async def scenario() -> None:
        async with world() as w:
            w.backend.gate.clear()
            w.scheduler.send(first(1))
            await await_until(lambda: w.scheduler.beats and w.scheduler.beats[-1].busy_ms > 200, DEADLINE_S, "busy")
            w.backend.gate.set()
            await w.scheduler.answered(1)
            heard = len(w.scheduler.beats)
            await await_until(lambda: len(w.scheduler.beats) > heard, DEADLINE_S, "another heartbeat")
            assert w.scheduler.beats[-1].busy_ms == 0
            assert not w.scheduler.losses

    run(scenario)


def test_nothing_of_an_old_session_reaches_the_next() -> None:
    """The session ends while a step runs and another plan waits: neither is answered, and all lanes are empty."""

    async def scenario() -> None:
        async with world() as w:
            alone = sampled(await w.scheduler.ask(first(1)))
            w.backend.gate.clear()
            w.scheduler.send(decode(2, 3))
            w.scheduler.send(decode(3, 4, confirmed=1))
            await await_until(lambda: w.backend.runs == [1, 2], DEADLINE_S, "the step to run")
            w.scheduler.router.drop(w.scheduler.peer)
            await w.scheduler.joined(2)
            w.scheduler.send(first(1))
            w.backend.gate.set()
            answer = await w.scheduler.answered(2)
            assert (answer.step, sampled(answer)) == (1, alone)
            assert w.backend.runs == [1, 2, 1]
            assert w.ignored("session") == 2

    run(scenario)


def test_a_new_session_forgets_failed_steps() -> None:
    async def scenario() -> None:
        async with world() as w:
            assert failed(await w.scheduler.ask(decode(9, 3))).kind == "bad_plan"
            w.scheduler.router.drop(w.scheduler.peer)
            await w.scheduler.joined(2)
            assert len(sampled(await w.scheduler.ask(first(1)))) == 1

    run(scenario)


def test_plans_of_another_epoch_and_old_steps_are_ignored() -> None:
    async def scenario() -> None:
        async with world() as w:
            w.scheduler.send(first(1, epoch=EPOCH + 1))
            await w.scheduler.ask(first(5))
            w.scheduler.send(decode(5, 3))
            answer = await w.scheduler.ask(decode(6, 3))
            assert answer.step == 6
            assert (w.ignored("epoch"), w.ignored("step")) == (1, 1)

    run(scenario)


def test_a_failed_step_fails_what_was_planned_before_it_was_known() -> None:
    async def scenario() -> None:
        async with world() as w:
            await w.scheduler.ask(first(1))
            w.backend.gate.clear()
            w.backend.error = StepError("no luck", [0])
            w.scheduler.send(decode(2, 3))
            w.scheduler.send(decode(3, 4, confirmed=1))
            w.backend.gate.set()
            await w.scheduler.answered(3)
            error, follower = map(failed, w.scheduler.answers[1:])
            assert (error.kind, error.lanes, error.detail, error.fatal) == ("error", b"\0\0\0\0", "no luck", False)
            assert follower.kind == "follows_failure"
            assert len(sampled(await w.scheduler.ask(decode(4, 3, confirmed=3)))) == 1
            assert not w.shell.ended.done()

    run(scenario)


def test_a_fatal_failure_is_told_and_ends_the_process() -> None:
    async def scenario() -> None:
        async with world() as w:
            w.backend.error = StepError("the device is gone", fatal=True)
            assert failed(await w.scheduler.ask(first(1))).fatal
            assert await w.shell.ended == 1

    run(scenario)


def test_shutdown_ends_the_process_well() -> None:
    async def scenario() -> None:
        async with world() as w:
            w.scheduler.send(Shutdown("scaled in"))
            assert await w.shell.ended == 0

    run(scenario)


def test_who_wants_to_leave_asks_and_goes_when_told() -> None:
    async def scenario() -> None:
        async with world() as w:
            assert w.shell.drain()
            assert await w.shell.ended == 0
            assert w.scheduler.drains == [Draining(4000)]

    run(scenario)


@pytest.mark.parametrize("drain_timeout_s", [0.0, 0.2])
def test_a_scheduler_that_does_not_answer_is_not_waited_for(drain_timeout_s: float) -> None:
    async def scenario() -> None:
        async with world(drain_timeout_s=drain_timeout_s) as w:
            w.scheduler.lets_go = False
            assert w.shell.drain()
            assert await w.shell.ended == 0

    run(scenario)


def test_who_wants_to_leave_does_not_join_another_scheduler() -> None:
    async def scenario() -> None:
        async with world(drain_timeout_s=60) as w:
            w.scheduler.lets_go = False
            assert w.shell.drain()
            w.scheduler.router.drop(w.scheduler.peer)
            assert await w.shell.ended == 0
            assert len(w.scheduler.hellos) == 1

    run(scenario)


def test_with_nobody_to_ask_it_leaves_at_once() -> None:
    async def scenario() -> None:
        async with world() as w:
            await w.shell.close()
            assert not w.shell.drain()

    run(scenario)


def test_leaving_says_goodbye() -> None:
    async def scenario() -> None:
        async with world() as w:
            await w.shell.close()
            await await_until(lambda: w.scheduler.losses, DEADLINE_S, "the goodbye")
            assert w.scheduler.losses == ["goodbye"]

    run(scenario)


def test_metrics_count_steps() -> None:
    async def scenario() -> None:
        async with world() as w:
            await w.scheduler.ask(first(1))
            await w.scheduler.ask(decode(2, 9))
            read = w._metrics.registry.get_sample_value
            assert read("paternoster:executor_steps_total", {"outcome": "done"}) == 1
            assert read("paternoster:executor_steps_total", {"outcome": "bad_plan"}) == 1
            assert read("paternoster:executor_step_tokens_sum") == 3
            assert read("paternoster:executor_batch_size_sum") == 1
            assert read("paternoster:executor_step_seconds_count") == 1

    run(scenario)


def test_a_scheduler_that_is_not_there_yet_is_waited_for() -> None:
    async def scenario() -> None:
        async with world() as w:
            endpoint = w.scheduler.endpoint
            await w.scheduler.router.close()
            await await_until(lambda: not w.shell.connected, DEADLINE_S, "the loss")
            w.scheduler = SchedulerSide(endpoint)
            await w.scheduler.joined()
            assert len(sampled(await w.scheduler.ask(first(1)))) == 1

    run(scenario)
