"""Executors leave in peace: what runs may end there, nobody new comes, and in the end all goes on elsewhere."""

import pytest

from services.scheduler.core.actions import ToExecutor
from services.scheduler.core.limits import Settings
from shared.wire.executor import Drain, Shutdown
from shared.wire.facts import ExecutorLimits, ModelFacts
from tests.fakes.scheduler_world import World

FACTS = ModelFacts("plain", 1000, 8192, [], "fake")
LIMITS = ExecutorLimits(64, 16, 4, 512)


def world_of(num_executors=1, **settings):
    world = World(Settings(**settings), FACTS, pool_slots=64 * 16)
    gateway = world.join_gateway()
    return world, gateway, [world.join_executor(LIMITS).id for _ in range(num_executors)]


def prompt(first):
    return [first + i for i in range(20)]


def to_executors(world):
    """What executors were told besides plans, in the last event."""
    actions = [action for action in world.actions[-1] if isinstance(action, ToExecutor)]
    return [action.message for action in actions if isinstance(action.message, Drain | Shutdown)]


def test_an_idle_executor_leaves_at_once():
    world, gateway, (executor,) = world_of()
    world.drain_executor(executor, 1000)
    assert [action.message for action in world.actions[-2] if isinstance(action, ToExecutor)] == [
        Drain(),
        Shutdown("drained"),
    ]
    assert not world.scheduler.executors
    assert not world.availability[gateway]
    assert world.scheduler.counters.executors_drained == 1
    assert world.scheduler.counters.executors_lost == 0
    assert world.scheduler.counters.stale == {}, "its goodbye was expected"


@pytest.mark.parametrize("max_inflight", [1, 2])
def test_what_runs_ends_where_it_is_and_nobody_new_comes(max_inflight):
    world, gateway, (leaving, staying) = world_of(2, max_inflight=max_inflight)
    running = [world.submit(gateway, prompt(100 * i), 20) for i in range(4)]
    seen = [world.executors[leaving], world.executors[staying]]
    world.run_step(leaving)
    world.run_step(staying)
    world.drain_executor(leaving, 10_000)
    later = [world.submit(gateway, prompt(500 + 100 * i), 4) for i in range(3)]
    world.drain()
    assert {stream.end for stream in running + later} == {"length"}
    assert world.scheduler.counters.lost == 0
    assert list(world.executors) == [staying]
    assert seen[0].plans == seen[1].plans == type(seen[0].plans)()


def test_when_time_is_up_the_rest_goes_on_elsewhere():
    world, gateway, (leaving,) = world_of()
    streams = [world.submit(gateway, prompt(100 * i), 50) for i in range(2)]
    for _ in range(10):
        world.run_step(leaving)
    world.drain_executor(leaving, 300)
    assert to_executors(world) == [Drain()]
    world.run_step(leaving)
    world.pass_time(299)
    assert leaving in world.executors
    staying = world.join_executor(LIMITS).id
    world.pass_time(1)
    assert list(world.executors) == [staying]
    assert world.scheduler.counters.lost == 2
    world.drain()
    assert {stream.end for stream in streams} == {"length"}
    assert all(request.failures == 0 for request in world.scheduler.ledger.stranded)


def test_with_nobody_else_they_wait_for_somebody():
    world, gateway, (leaving,) = world_of(recovery_timeout_ms=1000)
    stream = world.submit(gateway, prompt(0), 50)
    world.run_step(leaving)
    world.drain_executor(leaving, 0)
    assert not world.executors
    assert world.scheduler.ledger.num_waiting == 1
    world.join_executor(LIMITS)
    world.drain()
    assert stream.end == "length"


def test_a_second_request_to_leave_does_not_prolong_the_first():
    world, gateway, (leaving,) = world_of()
    world.submit(gateway, prompt(0), 500)
    world.drain_executor(leaving, 100)
    world.drain_executor(leaving, 10_000)
    world.pass_time(100)
    assert not world.executors


def test_an_executor_that_dies_while_it_drains_is_lost():
    world, gateway, (leaving, _) = world_of(2)
    streams = [world.submit(gateway, prompt(100 * i), 20) for i in range(4)]
    world.drain_executor(leaving, 10_000)
    world.kill_executor(leaving)
    assert world.scheduler.counters.executors_lost == 1
    world.drain()
    assert {stream.end for stream in streams} == {"length"}


def test_a_stranger_that_wants_to_leave_is_counted():
    world, _, _ = world_of()
    world.executors["stranger"] = world.join_executor(LIMITS)
    world.drain_executor("stranger", 1)
    del world.executors["stranger"]
    assert world.scheduler.counters.stale == {"executor": 1}
