"""The executor's shell in front of a device: steps are launched ahead, and each is answered when it is done."""

from typing import Any

from services.executor.backend import StepError
from services.executor.backends.fake import FakeBackend
from services.executor.batch import StepBatch
from shared import fake_model
from shared.wire.executor import batch_plan
from tests.fakes.device_backend import DeviceBackend
from tests.fakes.plans import failed, sampled
from tests.fakes.scheduler_side import DEADLINE_S, EPOCH
from tests.fakes.waiting import await_until
from tests.integration.test_executor_shell import LIMITS, World, decode, first, run, world


def a_device(*held: int) -> DeviceBackend:
    """One that hangs in steps ``held`` until they are let go."""
    device = DeviceBackend(FakeBackend(fake_model.facts(64), LIMITS))
    device.hold(*held)
    return device


async def alone(w: World) -> list[list[int]]:
    """What the lane of ``first`` says when each plan comes after the answer to the one before."""
    return [sampled(await w.scheduler.ask(plan)) for plan in (first(1), decode(2, 3), decode(3, 4))]


def test_a_step_is_launched_while_the_one_before_runs_and_each_is_answered_when_it_is_done() -> None:
    async def scenario() -> None:
        async with world(a_device()) as w:
            expected = await alone(w)
        device = a_device(1, 2)
        async with world(device) as w:
            w.scheduler.send(first(1))
            w.scheduler.send(decode(2, 3, confirmed=0))
            await await_until(lambda: len(device.calls) == 2, DEADLINE_S, "both launches")
            assert device.calls == [("launch", 1), ("launch", 2)]
            assert w.scheduler.answers == []
            device.let(1)
            assert sampled(await w.scheduler.answered(1)) == expected[0]
            w.scheduler.send(decode(3, 4, confirmed=1))
            await await_until(lambda: ("launch", 3) in device.calls, DEADLINE_S, "the third launch")
            assert len(w.scheduler.answers) == 1
            device.let(2)
            assert [sampled(await w.scheduler.answered(number)) for number in (2, 3)] == expected[1:]
            assert device.fed == 2

    run(scenario)


def test_a_device_that_hangs_is_seen() -> None:
    async def scenario() -> None:
        device = a_device(1)
        async with world(device) as w:
            w.scheduler.send(first(1))
            await await_until(lambda: w.scheduler.beats and w.scheduler.beats[-1].busy_ms > 200, DEADLINE_S, "busy")
            assert device.calls == [("launch", 1)]
            device.let(1)
            await w.scheduler.answered(1)
            heard = len(w.scheduler.beats)
            await await_until(lambda: len(w.scheduler.beats) > heard, DEADLINE_S, "another heartbeat")
            assert w.scheduler.beats[-1].busy_ms == 0

    run(scenario)


def test_what_runs_when_a_session_ends_is_for_nobody() -> None:
    async def scenario() -> None:
        device = a_device(2)
        async with world(device) as w:
            expected = sampled(await w.scheduler.ask(first(1)))
            w.scheduler.send(decode(2, 3))
            w.scheduler.send(decode(3, 4, confirmed=1))
            await await_until(lambda: ("launch", 3) in device.calls, DEADLINE_S, "both launches")
            w.scheduler.router.drop(w.scheduler.peer)
            await w.scheduler.joined(2)
            w.scheduler.send(first(1))
            device.let(2)
            answer = await w.scheduler.answered(2)
            assert (answer.step, sampled(answer)) == (1, expected)
            assert device.calls[4:] == [("read", 2), ("read", 3), ("launch", 1), ("read", 1)]
            assert w.ignored("session") == 2

    run(scenario)


def test_a_step_that_fails_on_the_device_takes_the_next_one_with_it() -> None:
    async def scenario() -> None:
        device = a_device(2)
        compute = device.inner.run

        def fail(batch: StepBatch) -> Any:
            output = compute(batch)
            if batch.step == 2:
                raise StepError("no luck", [0])
            return output

        device.inner.run = fail  # type: ignore[method-assign]
        async with world(device) as w:
            await w.scheduler.ask(first(1))
            w.scheduler.send(decode(2, 3))
            w.scheduler.send(decode(3, 4, confirmed=1))
            await await_until(lambda: ("launch", 3) in device.calls, DEADLINE_S, "both launches")
            device.let(2)
            await w.scheduler.answered(3)
            assert [failed(answer).kind for answer in w.scheduler.answers[1:]] == ["error", "follows_failure"]
            assert len(sampled(await w.scheduler.ask(decode(4, 3, confirmed=3)))) == 1
            emptied = await w.scheduler.ask(batch_plan(EPOCH, 5, 4, retires=[0]))
            assert sampled(emptied) == []

    run(scenario)


def test_a_device_that_fails_after_its_session_ends_the_process_all_the_same() -> None:
    async def scenario() -> None:
        device = a_device(1)

        def fail(batch: StepBatch) -> Any:
            raise StepError("the device failed", fatal=True)

        device.inner.run = fail  # type: ignore[method-assign]
        async with world(device) as w:
            w.scheduler.send(first(1))
            await await_until(lambda: device.calls, DEADLINE_S, "the launch")
            w.scheduler.router.drop(w.scheduler.peer)
            await w.scheduler.joined(2)
            device.let(1)
            assert await w.shell.ended == 1

    run(scenario)
