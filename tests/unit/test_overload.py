"""Who is turned away, and that what they are told is true."""

import pytest

from services.scheduler.core import overload
from services.scheduler.core.limits import Settings
from services.scheduler.core.request import Request
from shared.wire import tokens
from shared.wire.facts import ExecutorLimits, ModelFacts
from shared.wire.gateway import Rejected, Submit
from shared.wire.sampling import Sampling
from tests.fakes.scheduler_world import World

FACTS = ModelFacts("plain", 1000, 8192, [], "fake")


class Clock:
    """A world in which steps take the time that the executor says they took."""

    def __init__(self, num_lanes=4, num_blocks=600, **settings):
        self.world = World(Settings(**({"max_inflight": 1} | settings)), FACTS)
        self.gateway = self.world.join_gateway()
        self.executor = self.world.join_executor(ExecutorLimits(num_blocks, 16, num_lanes, 512))
        self.number = 0
        self.firsts = {}
        """Time from submit to first token of each stream."""
        self.arrivals = {}

    def submit(self, num_prompt=10, max_tokens=5, **fields):
        self.number += 1
        prompt = [(37 * self.number + i) % 1000 for i in range(num_prompt)]
        stream = self.world.submit(self.gateway, prompt, max_tokens, **fields)
        if stream.end != "rejected":
            self.arrivals[stream.submit.request_id] = self.world.now_ms, stream
        return stream

    def step(self):
        """Run a step, or let a millisecond pass."""
        before = self.world.now_ms
        if self.executor.plans:
            self.world.now_ms += max(1, self.executor.run_us() // 1000)
            self.world.run_step(self.executor.id)
        else:
            self.world.pass_time(1)
        for request_id, (at_ms, stream) in list(self.arrivals.items()):
            if stream.tokens:
                self.firsts[request_id] = self.world.now_ms - at_ms
                del self.arrivals[request_id]
        return self.world.now_ms - before

    def until(self, now_ms):
        while self.world.now_ms < now_ms:
            self.step()

    def warm_up(self):
        """Run enough that steps and stays are known."""
        for i in range(60):
            self.submit(1 + i % 20)
            self.step()
        while any(self.world.streams.values()):
            self.step()

    def rejection(self):
        messages = [getattr(a, "message", None) for actions in self.world.actions for a in actions]
        return [message for message in messages if isinstance(message, Rejected)][-1]


def test_sched_29_tokens_in_the_queue_are_limited_too():
    clock = Clock(num_lanes=1, max_queue_tokens=50, retry_after_ms=700)
    streams = [clock.submit(20) for _ in range(5)]
    assert [stream.end for stream in streams] == ["", "", "", "rejected", "rejected"], "one runs, 40 tokens wait"
    assert (clock.rejection().code, clock.rejection().retry_after_ms) == ("queue_full", 700)
    assert not clock.submit(10).end, "a small one still goes in"
    clock.world.drain()
    assert not clock.submit(5000).end, "whatever its size, a request that finds nobody waiting may wait"
    clock.world.drain()


@pytest.mark.parametrize("limits", [{"max_queue": 5}, {"max_queue_tokens": 60}])
def test_sched_29_retry_after_of_a_full_queue_is_when_there_is_room(limits):
    clock = Clock(num_lanes=4, **limits)
    clock.warm_up()
    for _ in range(5):
        clock.submit(10, 20)
    clock.step()
    while clock.submit(10, 20).end != "rejected":
        pass
    told_ms = clock.rejection().retry_after_ms
    started_ms = clock.world.now_ms
    while clock.submit(10, 20).end == "rejected":
        clock.step()
    waited_ms = clock.world.now_ms - started_ms
    assert told_ms / 4 <= waited_ms <= told_ms * 4
    clock.world.drain()


def test_nothing_is_predicted_before_anything_was_measured():
    clock = Clock(ttft_limit_ms=1)
    assert not [stream for stream in (clock.submit(100) for _ in range(50)) if stream.end]
    clock.world.drain()


def test_requests_that_would_miss_the_limit_are_turned_away_and_the_others_make_it():
    limit_ms = 1500
    clock = Clock(num_lanes=4, ttft_limit_ms=limit_ms)
    clock.warm_up()
    clock.firsts.clear()
    rejected = 0
    for _ in range(150):
        rejected += clock.submit(30, 20).end == "rejected"
        clock.until(clock.world.now_ms + 60)
    assert clock.rejection().code == "overloaded"
    assert 20 < rejected < 130
    while any(clock.world.streams.values()):
        clock.step()
    made = [ttft_ms for ttft_ms in clock.firsts.values() if ttft_ms <= limit_ms * 1.2]
    assert len(made) >= 0.95 * len(clock.firsts)
    assert max(clock.firsts.values()) > limit_ms / 2, "it does not turn away for nothing"


def test_without_the_limit_the_same_load_misses_it():
    clock = Clock(num_lanes=4)
    clock.warm_up()
    clock.firsts.clear()
    for _ in range(150):
        clock.submit(30, 20)
        clock.until(clock.world.now_ms + 60)
    while any(clock.world.streams.values()):
        clock.step()
    assert sum(ttft_ms <= 1500 for ttft_ms in clock.firsts.values()) < 0.6 * len(clock.firsts)


def test_retry_after_of_an_overload_is_when_the_request_would_make_it():
    clock = Clock(num_lanes=4, ttft_limit_ms=1000)
    clock.warm_up()
    for _ in range(5):
        clock.submit(30, 20)
    clock.step()
    while clock.submit(30, 20).end != "rejected":
        pass
    told_ms = clock.rejection().retry_after_ms
    started_ms = clock.world.now_ms
    while clock.submit(30, 20).end == "rejected":
        clock.step()
    assert told_ms / 4 <= max(clock.world.now_ms - started_ms, 1) <= max(told_ms * 4, 100)
    clock.world.drain()


def test_a_prompt_too_long_for_the_limit_is_taken_when_nobody_is_before_it():
    clock = Clock(ttft_limit_ms=100)
    clock.warm_up()
    assert not clock.submit(400).end
    clock.step()
    assert clock.submit(400).end == "rejected"
    clock.world.drain()


def test_streams_of_an_earlier_scheduler_are_never_turned_away():
    clock = Clock(num_lanes=1, ttft_limit_ms=1, max_queue=1, max_queue_tokens=1)
    clock.warm_up()
    clock.step()
    streams = [clock.submit(30, 20) for _ in range(4)]
    kept = [stream for stream in streams if not stream.end]
    assert len(kept) >= 1
    clock.world.restart_scheduler(executors_first=True)
    assert not [stream for stream in kept if stream.end]
    again = clock.submit(30, resubmitted=True)
    assert not again.end
    clock.world.drain()


@pytest.mark.parametrize("num_ahead", [0, 1, 8, 30])
def test_predictions_are_near_what_happens(num_ahead):
    clock = Clock(num_lanes=4)
    clock.warm_up()
    clock.firsts.clear()
    for _ in range(num_ahead):
        clock.submit(30, 20)
    clock.step()
    submit = Submit("probe", tokens.pack([1] * 30), Sampling(), 20)
    request = Request("g", submit, 10**6)
    request.limit = 50
    forecast = overload.predict(request, clock.world.scheduler.ledger)
    probe = clock.submit(30, 20)
    while not probe.tokens:
        clock.step()
    ttft_ms = clock.firsts[probe.submit.request_id]
    assert forecast.ttft_ms / 2 <= ttft_ms <= forecast.ttft_ms * 2, (forecast, ttft_ms)
    clock.world.drain()


def test_a_pause_of_the_machine_turns_nobody_away_afterwards():
    clock = Clock(num_lanes=4, ttft_limit_ms=500)
    clock.warm_up()
    clock.submit(10, 5)
    clock.world.run_step(clock.executor.id)
    run_us = clock.executor.run_us
    clock.executor.run_us = lambda: 30_000_000
    clock.step()
    clock.executor.run_us = run_us
    assert [clock.submit(10, 5).end for _ in range(3)] == [""] * 3


def test_a_model_that_takes_most_of_a_step_to_read_has_the_budget_that_plans_have():
    """80 ms a step and a tenth of one a row: the budget of 100 ms is 160, and so a step holds all rows it may."""
    clock = Clock()
    cost = clock.world.scheduler.executors[clock.executor.id].cost
    cost.base_us, cost.row_us, cost.num_steps = 80_000.0, 100.0, 32
    request = Request("g", Submit("r", tokens.pack([1] * 2000), Sampling(), 5), 0)
    forecast = overload.predict(request, clock.world.scheduler.ledger)
    assert forecast is not None
    assert forecast.alone_ms == pytest.approx(2000 / 512 * (80 + 51.2))
