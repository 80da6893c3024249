"""A request that has not ended by its deadline ends then, wherever it is."""

import pytest

from services.scheduler.core.deadlines import Deadlines
from services.scheduler.core.limits import Settings
from services.scheduler.core.request import Request
from shared.wire import tokens
from shared.wire.facts import ExecutorLimits, ModelFacts
from shared.wire.gateway import Submit
from shared.wire.sampling import Sampling
from tests.fakes.scheduler_world import World

FACTS = ModelFacts("plain", 1000, 8192, [], "fake")


def world_of(num_lanes=1, **settings):
    world = World(Settings(**({"max_inflight": 1} | settings)), FACTS)
    gateway = world.join_gateway()
    executor = world.join_executor(ExecutorLimits(600, 16, num_lanes, 512))
    return world, gateway, executor


def prompt(first, num_tokens=10):
    return [(first + i) % 1000 for i in range(num_tokens)]


def test_waiting_past_the_deadline_ends_without_a_token():
    world, gateway, _ = world_of()
    first = world.submit(gateway, prompt(1), 20)
    late = world.submit(gateway, prompt(50), 20, deadline_ms=100)
    assert world.scheduler.next_deadline_ms() == 100
    world.pass_time(99)
    assert not late.end
    world.pass_time(1)
    assert (late.end, late.tokens, late.error) == ("deadline", [], "the deadline of 100 ms has passed")
    assert world.scheduler.counters.ended == {"deadline": 1}
    world.drain()
    assert first.end == "length"


@pytest.mark.parametrize("policy", ["continuous", "prefill-first", "static"])
def test_running_past_the_deadline_ends_with_what_there_is_and_frees_the_lane(policy):
    world, gateway, executor = world_of(policy=policy, static_wait_ms=0)
    late = world.submit(gateway, prompt(1), 200, deadline_ms=100)
    after = world.submit(gateway, prompt(50), 3)
    for _ in range(5):
        world.run_step(executor.id)
    world.pass_time(100)
    assert (late.end, len(late.tokens)) == ("deadline", 5)
    world.drain()
    assert after.end == "length"


def test_a_deadline_holds_while_no_executor_is_connected():
    world, gateway, executor = world_of()
    world.kill_executor(executor.id)
    late = world.submit(gateway, prompt(1), 20, deadline_ms=100)
    world.pass_time(100)
    assert late.end == "deadline"


def test_an_idle_executor_is_told_to_retire_at_once():
    world, gateway, executor = world_of()
    world.submit(gateway, prompt(1), 1)
    late = world.submit(gateway, prompt(50), 200, deadline_ms=100)
    world.run_step(executor.id)
    world.run_step(executor.id)
    world.pass_time(100)
    assert late.end == "deadline"
    world.run_step(executor.id)
    assert tokens.count(executor.plans[-1].retires) == 1
    world.drain()


def test_one_that_ends_in_time_leaves_nothing_behind():
    deadlines = Deadlines()
    requests = [Request("g", Submit(f"r{i}", tokens.pack([1]), Sampling(), 1), i) for i in range(1000)]
    for i, request in enumerate(requests):
        deadlines.add(request, 10_000 - i)
    for request in requests[:990]:
        deadlines.forget(request)
    assert len(deadlines._heap) < 60
    assert deadlines.next_ms() == 9001
    assert deadlines.due(9003) == [requests[999], requests[998], requests[997]]
    assert deadlines.next_ms() == 9004
