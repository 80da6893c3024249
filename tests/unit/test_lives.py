"""When what happened to requests, as a watcher hears it, and the times that come of it; with a clock in hand."""

from collections.abc import Callable

import pytest
from prometheus_client import CollectorRegistry

from services.scheduler.core.events import (
    Cancelled,
    Event,
    ExecutorJoined,
    ExecutorLeft,
    GatewayJoined,
    GatewayLeft,
    StepDone,
    Submitted,
)
from services.scheduler.core.lanes import Executor
from services.scheduler.core.limits import Settings
from services.scheduler.core.machine import Scheduler
from services.scheduler.lives import Life, Lives
from services.scheduler.request_metrics import RequestMetrics
from shared.metrics import harmless
from shared.wire import tokens
from shared.wire.executor import Admit, BatchResult, ExecutorHello
from shared.wire.facts import ExecutorLimits, ModelFacts
from shared.wire.gateway import Submit, Usage
from shared.wire.sampling import Sampling

FACTS = ModelFacts("tiny", 100, 32, [1], "fake")
G = "gateway"


class World:
    """A core, what follows it, and a clock that stands still unless moved."""

    def __init__(self, num_lanes: int = 1) -> None:
        self.now = 1000.0
        self.told: list[str] = []
        self.registry = CollectorRegistry()
        self.core = Scheduler(0, Settings(max_inflight=1))
        self.lives = Lives(self.core, [self, RequestMetrics(self.registry)], lambda: self.now)
        self._limits = ExecutorLimits(16, 4, num_lanes, 64)
        self.handle(GatewayJoined(G))

    def handle(self, event: Event) -> None:
        self.lives.follow(event, self.core.handle(event, int(self.now * 1000)))

    def join(self, name: str, numerics: str = "n") -> None:
        self.handle(ExecutorJoined(name, ExecutorHello(name, 1, FACTS, self._limits, "cpu", numerics)))

    def submit(self, request_id: str, max_tokens: int = 2, **fields: bool) -> None:
        self.handle(Submitted(G, Submit(request_id, tokens.pack([5, 6]), Sampling(), max_tokens, **fields)))

    def step(self, name: str) -> None:
        """Its oldest step brings the token 7 for everybody in it."""
        step = self.core.executors[name].inflight[0]
        sampled = tokens.pack([7] * len(step.samples))
        self.handle(StepDone(name, BatchResult(0, step.number, step.sample_lanes, step.sample_seqs, sampled)))

    def value(self, stem: str) -> float:
        return self.registry.get_sample_value(f"paternoster:{stem}") or 0.0

    # Watcher.

    def accepted(self, life: Life) -> None:
        self.told.append(f"{life.submit.request_id} accepted")

    def admitted(self, life: Life, executor: Executor, admit: Admit, now: float) -> None:
        self.told.append(f"{life.submit.request_id} admitted to {executor.id}")

    def first_token(self, life: Life, now: float) -> None:
        self.told.append(f"{life.submit.request_id} first token")

    def ended(self, life: Life, reason: str, usage: Usage | None, now: float) -> None:
        self.told.append(f"{life.submit.request_id} {reason}")


def test_a_life_from_end_to_end() -> None:
    world = World()
    world.submit("a")
    world.now += 2
    world.join("e")
    world.now += 3
    world.step("e")
    world.now += 5
    world.step("e")
    assert world.told == ["a accepted", "a admitted to e", "a first token", "a length"]
    assert world.value("request_queue_time_seconds_sum") == 2
    assert world.value("request_prefill_time_seconds_sum") == 3
    assert world.value("request_decode_time_seconds_sum") == 5
    assert world.value("request_inference_time_seconds_sum") == 8
    assert len(world.lives) == 0


def test_a_lost_executor_is_no_second_beginning_and_other_numerics_are_counted() -> None:
    world = World()
    world.join("e")
    world.submit("a", max_tokens=3)
    world.step("e")
    world.handle(ExecutorLeft("e", "silence"))
    world.join("same")
    world.step("same")
    assert world.core.counters.numerics_changed == 0
    world.handle(ExecutorLeft("same", "silence"))
    world.join("other", numerics="m")
    assert world.core.counters.numerics_changed == 1
    assert world.value("request_queue_time_seconds_count") == 1
    world.step("other")
    assert world.told[-1] == "a length"
    assert world.told.count("a first token") == 1


@pytest.mark.parametrize("leave", [GatewayLeft(G), GatewayJoined(G)])
def test_a_gateway_that_is_gone_takes_its_lives_along(leave: Event) -> None:
    world = World()
    world.join("e")
    world.submit("a")
    world.submit("b")
    world.handle(leave)
    assert world.told[-2:] == ["a abandoned", "b abandoned"]
    assert len(world.lives) == 0
    assert world.value("request_decode_time_seconds_count") == 0


def test_a_cancelled_one_ends_once_and_one_that_was_submitted_again_is_not_measured() -> None:
    world = World(num_lanes=2)
    world.join("e")
    world.submit("a")
    world.submit("b", resubmitted=True)
    world.step("e")
    world.handle(Cancelled(G, "a"))
    world.handle(Cancelled(G, "a"))
    world.step("e")
    world.step("e")
    assert sorted(told for told in world.told if "cancelled" in told or "length" in told) == ["a cancelled", "b length"]
    assert world.value("request_queue_time_seconds_count") == 1
    assert world.value("request_decode_time_seconds_count") == 1


def test_a_watcher_that_breaks_is_logged_once_and_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a watcher's mistake")

    world = World()
    world.admitted = broken  # type: ignore[method-assign]
    world.join("e")
    for name in "abc":
        world.submit(name, max_tokens=1)
    for _ in range(3):
        world.step("e")
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert world.told.count("c length") == 1


def test_harmless_keeps_what_works() -> None:
    seen: list[int] = []
    measure: Callable[[int], None] = harmless(seen.append)
    measure(3)
    assert seen == [3]
