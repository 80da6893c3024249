"""The scheduler's shell and process: real core, real sockets, and peers that speak the wire by hand."""

import asyncio
import contextlib
import json
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from services.scheduler.core import events
from services.scheduler.core.debug_state import debug_state
from services.scheduler.core.limits import Settings
from services.scheduler.core.machine import Scheduler
from services.scheduler.main import LoopReader
from services.scheduler.metrics import StepMetrics
from services.scheduler.shell import Shell
from shared.net.crash import Crash
from shared.net.dealer import Dealer
from shared.wire import codec, executor, gateway, tokens
from shared.wire.facts import ExecutorLimits, ModelFacts
from shared.wire.sampling import Sampling
from shared.wire.session import Heartbeat
from tests.fakes.links import ANYWHERE, PATIENT, ROOT, DealerEnd, dealer_end
from tests.fakes.waiting import await_until, wait_until

FACTS = ModelFacts("tiny", 100, 64, [99], "fake")


class HandExecutor:
    """Answers each plan as the wire asks: the token of a sample is its lane's last token plus one."""

    def __init__(self, endpoint: str, facts: ModelFacts = FACTS, answering: bool = True) -> None:
        self.facts = facts
        self.answering = answering
        self.plans: list[executor.BatchPlan] = []
        self.losses: list[str] = []
        self.refusals: list[str] = []
        self._lanes: dict[int, tuple[int, int]] = {}  # lane: seq, last token
        self.dealer: Dealer[executor.ToExecutor] = Dealer(
            endpoint, "executor", "hand", codec.scheduler_to_executor, self, **PATIENT
        )

    def hello(self) -> executor.ExecutorHello:
        return executor.ExecutorHello("hand", 1, self.facts, ExecutorLimits(16, 4, 4, 16), "none", "none")

    def heartbeat(self) -> Heartbeat:
        return Heartbeat()

    def welcome(self, message: executor.ExecutorWelcome) -> None:
        self._lanes.clear()

    def lost(self, why: str) -> None:
        self.losses.append(why)

    def refused(self, reason: str) -> None:
        self.refusals.append(reason)

    def message(self, message: Any) -> None:
        assert isinstance(message, executor.BatchPlan)
        self.plans.append(message)
        if not self.answering:
            return
        for lane in tokens.unpack(message.retires):
            del self._lanes[lane]
        for admit in message.admits:
            self._lanes[admit.lane] = (admit.seq, tokens.unpack(admit.tokens)[-1])
        lanes = [work.lane for work in executor.work_of(message) if work.sample]
        for lane in lanes:
            seq, last = self._lanes[lane]
            self._lanes[lane] = (seq, last + 1)
        seqs, sampled = [self._lanes[lane][0] for lane in lanes], [self._lanes[lane][1] for lane in lanes]
        columns = (tokens.pack(column) for column in (lanes, seqs, sampled))
        self.dealer.send(executor.BatchResult(message.epoch, message.step, *columns, run_us=100))


@contextlib.asynccontextmanager
async def _hand_executor(endpoint: str, **options: Any) -> AsyncIterator[HandExecutor]:
    hand = HandExecutor(endpoint, **options)
    hand.dealer.start()
    try:
        yield hand
    finally:
        await hand.dealer.close()


def _submit(request_id: str, prompt: list[int], max_tokens: int) -> gateway.Submit:
    return gateway.Submit(request_id, tokens.pack(prompt), Sampling(), max_tokens)


def _text_of(end: DealerEnd, request_id: str) -> tuple[list[int], str | None]:
    """The tokens and the finish reason that a request got so far."""
    deltas = [d for m in end.messages if isinstance(m, gateway.Tokens) for d in m.items if d.request_id == request_id]
    return [t for d in deltas for t in tokens.unpack(d.token_ids)], deltas[-1].finish if deltas else None


class SchedulerProcess:
    """A scheduler in a process of its own, on free ports."""

    def __init__(
        self, gateways: str = ANYWHERE, executors: str = ANYWHERE, first: str = "0", **options: object
    ) -> None:
        """``first`` is Python to run in the process before all else."""
        arguments = {"gateways_endpoint": gateways, "executors_endpoint": executors, "metrics_port": 0, **options}
        program = (
            "import sys; from services.scheduler.main import run; from services.scheduler.options import "
            f"SchedulerOptions; {first}; sys.exit(run(SchedulerOptions(**{arguments!r})))"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", program], cwd=ROOT, stderr=subprocess.PIPE, text=True
        )
        self.log = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log += line

    def addresses(self) -> tuple[str, str]:
        """Where gateways and executors connect, once it serves."""
        pattern = re.compile(r"gateways at (\S+), executors at (\S+)\n")
        wait_until(
            lambda: pattern.search(self.log) or self.process.poll() is not None, 100, "the scheduler's addresses"
        )
        found = pattern.search(self.log)
        assert found, self.log
        return found[1], found[2]

    def page(self, path: str) -> str:
        """A page of its own server."""
        found = re.search(r"metrics are on (http://[^/]+)/", self.log)
        assert found, self.log
        with urllib.request.urlopen(found[1] + path, timeout=5) as answer:
            return answer.read().decode()

    def end(self, number: int) -> int:
        """Send a signal and return the exit code."""
        self.process.send_signal(number)
        return self.process.wait(20)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()
        assert self.process.stderr is not None
        self.process.stderr.close()


@pytest.fixture
def start() -> Iterator[Any]:
    started: list[SchedulerProcess] = []

    def start_one(**options: object) -> SchedulerProcess:
        started.append(SchedulerProcess(**options))
        return started[-1]

    yield start_one
    for process in started:
        process.close()


def _metrics(process: SchedulerProcess) -> dict[str, float]:
    lines = process.page("/metrics").splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}


async def test_requests_are_served_and_shown_and_nothing_is_left_when_idle(start: Any) -> None:
    process = start()
    gateways, executors = await asyncio.to_thread(process.addresses)
    async with dealer_end(gateways, **PATIENT) as end, _hand_executor(executors) as hand:
        ready = gateway.Availability(True, "", FACTS, 63)
        await await_until(lambda: ready in end.messages or (end.welcomes and end.welcomes[0].ready), 10, "an executor")
        for number in range(8):
            end.dealer.send(_submit(f"r{number}", [number * 10, number * 10 + 1], 5))
        end.dealer.send(_submit("too long", [1] * 64, 5))
        await await_until(lambda: all(_text_of(end, f"r{n}")[1] for n in range(8)), 20, "all requests")
        for number in range(8):
            assert _text_of(end, f"r{number}") == ([number * 10 + 2 + i for i in range(5)], "length")
        rejected = [m for m in end.messages if isinstance(m, gateway.Rejected)]
        assert [(m.request_id, m.code) for m in rejected] == [("too long", "too_long")]
        end.dealer.send(gateway.Cancel("r0"))
        end.dealer.send(gateway.StateQuery(77))
        replies: list[gateway.StateReply] = []
        await await_until(
            lambda: replies.extend(m for m in end.messages if isinstance(m, gateway.StateReply)) or replies, 5, "state"
        )
        assert replies[0].query_id == 77
        state = json.loads(replies[0].state_json)
        assert (state["waiting"], state["running"]) == (0, 0)
        assert state["executors"][0]["blocks"] == {"total": 16, "free": 8, "cached": 8, "used": 0}
        found = await asyncio.to_thread(_metrics, process)
        assert found["paternoster:executors_connected"] == 1
        assert found["paternoster:gateways_connected"] == 1
        assert found['paternoster:request_success_total{finished_reason="length"}'] == 8
        assert found['paternoster:requests_rejected_total{code="too_long"}'] == 1
        assert found["paternoster:num_requests_running"] == found["paternoster:num_requests_waiting"] == 0
        assert found["paternoster:kv_cache_usage_perc"] == 0
        assert found["paternoster:step_seconds_count"] == found["paternoster:steps_total"]
        assert found["paternoster:steps_total"] == sum(1 for plan in hand.plans if plan.work_lanes)
        assert found['paternoster:dropped_frames_total{link="gateways",reason="bad_session"}'] == 0
        assert (await asyncio.to_thread(process.page, "/health")) == "ok\n"
        await hand.dealer.close()
        await await_until(
            lambda: not end.messages[-1].ready if hasattr(end.messages[-1], "ready") else 0, 5, "no executor"
        )
        found = await asyncio.to_thread(_metrics, process)
        assert found["paternoster:executors_connected"] == found["paternoster:steps_inflight"] == 0
    assert await asyncio.to_thread(process.end, signal.SIGTERM) == 0
    assert "WARNING executor" not in process.log


async def test_a_killed_scheduler_comes_back_and_a_live_stream_goes_on(start: Any) -> None:
    first = start()
    gateways, executors = await asyncio.to_thread(first.addresses)
    async with dealer_end(gateways, **PATIENT) as end, _hand_executor(executors, answering=False) as hand:
        await await_until(lambda: end.dealer.connected and hand.dealer.connected, 10, "both sessions")
        end.dealer.send(_submit("r", [1, 2], 5))
        await await_until(lambda: hand.plans, 10, "a plan")
        assert await asyncio.to_thread(first.end, signal.SIGKILL) == -signal.SIGKILL
        await await_until(lambda: end.losses and hand.losses, 10, "both losses")
        hand.answering = True
        second = start(gateways=gateways, executors=executors)
        await await_until(lambda: end.dealer.connected and hand.dealer.connected, 20, "both sessions again")
        assert end.welcomes[1].epoch > end.welcomes[0].epoch
        output = tokens.pack([3, 4])
        resubmitted = gateway.Submit("r", tokens.pack([1, 2]), Sampling(), 5, output=output, resubmitted=True)
        assert end.dealer.send(resubmitted)
        await await_until(lambda: _text_of(end, "r")[1], 10, "the rest of the stream")
        assert _text_of(end, "r") == ([5, 6, 7], "length")
    assert await asyncio.to_thread(second.end, signal.SIGINT) == 0


async def test_an_executor_with_another_model_is_refused_and_told_why(start: Any) -> None:
    process = start()
    _, executors = await asyncio.to_thread(process.addresses)
    async with _hand_executor(executors) as first:
        await await_until(lambda: first.dealer.connected, 10, "a session")
        async with _hand_executor(executors, facts=ModelFacts("other", 100, 64, [99], "fake")) as other:
            await await_until(lambda: other.refusals, 10, "the refusal")
            assert "other" in other.refusals[0]


async def test_a_crash_ends_the_process_at_once_with_its_traceback(start: Any) -> None:
    process = start(first="from services.scheduler.core import machine; machine.Scheduler.handle = lambda *_: 1 / 0")
    gateways, _ = await asyncio.to_thread(process.addresses)
    async with dealer_end(gateways, **PATIENT):
        assert await asyncio.to_thread(process.process.wait, 10) == 1
    await await_until(lambda: "crashed" in process.log, 5, "the last line")
    assert "Traceback" in process.log
    assert "ZeroDivisionError" in process.log.splitlines()[-1]


async def test_a_loop_that_hangs_is_not_healthy_and_does_not_hang_a_scrape() -> None:
    core = Scheduler(1, Settings())
    async with _shell(core, Crash()) as (shell, _, _):
        reader = LoopReader(asyncio.get_running_loop(), shell.figures, answer_s=0.05)
        assert await asyncio.to_thread(reader.health) == (True, "ok")
        answers: list[Any] = []
        thread = threading.Thread(target=lambda: answers.extend((reader.health(), reader.read())))
        thread.start()
        thread.join(10)  # in the loop's own thread: it hangs
        (well, why), figures = answers
        assert not well
        assert "0.05 s" in why
        assert figures.gateways == 0


def test_a_port_that_is_taken_and_nonsense_are_configuration_mistakes(start: Any) -> None:
    gateways, _ = start().addresses()
    for options, words in (({"gateways": gateways}, "in use"), ({"max_inflight": 3}, "max_inflight")):
        process = start(**options)
        assert process.process.wait(20) == 78
        wait_until(lambda: words in process.log.splitlines()[-1], 5, "the reason in the last line")  # noqa: B023
        assert "Traceback" not in process.log


@contextlib.asynccontextmanager
async def _shell(core: Scheduler, crash: Crash) -> AsyncIterator[tuple[Shell, str, str]]:
    shell = Shell(core, StepMetrics(CollectorRegistry()), crash.report)
    addresses = shell.bind(ANYWHERE, ANYWHERE)
    try:
        yield shell, *addresses
    finally:
        await shell.close()


async def test_an_exception_from_the_core_is_a_crash_after_which_no_event_is_handled() -> None:
    class Broken(Scheduler):
        handled = 0

        def handle(self, event: Any, now_ms: int) -> Any:
            self.handled += 1
            raise RuntimeError("an impossible transition, with its story")

    core = Broken(1, Settings())
    crash = Crash()
    async with (
        _shell(core, crash) as (shell, address, _),
        dealer_end(address, **PATIENT),
    ):
        with pytest.raises(RuntimeError, match="story"):
            await asyncio.wait_for(crash.wait(), 10)
        shell.handle(events.TimePassed())
        assert core.handled == 1


async def test_a_step_that_is_never_answered_costs_the_executor_its_session() -> None:
    core = Scheduler(1, Settings(step_timeout_ms=200))
    async with (
        _shell(core, Crash()) as (shell, gateways, executors),
        dealer_end(gateways, **PATIENT) as end,
        _hand_executor(executors, answering=False) as hand,
    ):
        await await_until(lambda: end.dealer.connected and hand.dealer.connected, 10, "both sessions")
        end.dealer.send(_submit("r", [1, 2], 5))
        await await_until(lambda: hand.plans, 10, "a plan")
        await await_until(lambda: core.counters.executors_lost == 1, 10, "the loss")
        assert shell.executors.peers() == []
        assert debug_state(core)["waiting"] == 1
