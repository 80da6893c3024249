"""Aged priority: the urgent first, and nobody for ever last."""

from services.scheduler.core.limits import Settings
from services.scheduler.core.waiting import MAX_OVERTAKES
from shared.wire.facts import ExecutorLimits, ModelFacts
from tests.fakes.scheduler_world import World

FACTS = ModelFacts("plain", 1000, 8192, [], "fake")


def world_of(num_lanes=1, num_blocks=600, **settings):
    world = World(Settings(**({"max_inflight": 1, "ageing_ms": 1000} | settings)), FACTS)
    gateway = world.join_gateway()
    executor = world.join_executor(ExecutorLimits(num_blocks, 16, num_lanes, 512))
    return world, gateway, executor


def prompt(first, num_tokens=10):
    return [(first + i) % 1000 for i in range(num_tokens)]


def test_lower_priorities_go_first_whatever_came_first():
    world, gateway, _ = world_of()
    streams = [world.submit(gateway, prompt(7 * i), 2, priority=p) for i, p in enumerate([0, 5, 1, 5, 0])]
    ends = []
    while any(world.streams.values()):
        world.run_step(next(iter(world.executors)))
        ends += [i for i, stream in enumerate(streams) if stream.end and i not in ends]
    assert ends == [0, 4, 2, 1, 3]


def test_nothing_waits_for_ever_behind_a_stream_of_urgent_requests():
    world, gateway, executor = world_of()
    low = [world.submit(gateway, prompt(500 + i), 3, priority=2_000_000_000 - i) for i in range(3)]
    ended_at = {}
    for turn in range(600):
        while len(world.streams[gateway]) - sum(not stream.end for stream in low) < 3:
            world.submit(gateway, prompt(turn), 3, priority=-1)
        world.run_step(executor.id)
        world.pass_time(10)
        ended_at |= {i: world.now_ms for i, stream in enumerate(low) if stream.end and i not in ended_at}
    assert sorted(ended_at) == [0, 1, 2]
    assert all(ended_at[i] <= 1000 + 3 * 100 for i in range(3)), "all three priorities were left out for as long"
    for stream in list(world.streams[gateway].values()):
        world.cancel(gateway, stream.submit.request_id)
    world.drain()


def test_a_priority_gets_one_turn_in_a_while_and_no_more():
    world, gateway, executor = world_of()
    low = [world.submit(gateway, prompt(500 + i), 1, priority=7) for i in range(20)]
    world.run_step(executor.id)
    for turn in range(300):
        while len(world.streams[gateway]) < 24:
            world.submit(gateway, prompt(turn), 3, priority=0)
        world.run_step(executor.id)
        world.pass_time(10)
    assert 1 + 2 <= sum(bool(stream.end) for stream in low) <= 1 + 3
    for stream in list(world.streams[gateway].values()):
        world.cancel(gateway, stream.submit.request_id)
    world.drain()


def test_an_aged_request_runs_at_the_urgency_it_has_earned():
    """Else the next urgent one would take its place at once, and it would wait for ever after all."""
    world, gateway, executor = world_of()
    first = world.submit(gateway, prompt(1), 3, priority=0)
    aged = world.submit(gateway, prompt(50), 30, priority=9)
    world.pass_time(1000)
    urgent = world.submit(gateway, prompt(90), 3, priority=0)
    while not first.end:
        world.run_step(executor.id)
    for _ in range(10):
        world.run_step(executor.id)
    assert len(aged.tokens) > 3
    assert not urgent.tokens
    assert world.scheduler.counters.preempted == 0
    world.drain()


def test_sched_26_a_turn_is_not_given_past_a_request_that_holds_the_door():
    world, gateway, executor = world_of(num_lanes=4, num_blocks=40)
    world.submit(gateway, prompt(1, 330), 300)
    world.run_step(executor.id)
    big = world.submit(gateway, prompt(50, 400), 4)
    request = world.scheduler.ledger.requests[gateway][big.submit.request_id]
    request.overtaken = MAX_OVERTAKES
    late = world.submit(gateway, prompt(90), 2, priority=3)
    world.pass_time(5000)
    world.run_step(executor.id)
    assert not late.tokens
    while not late.tokens:
        world.run_step(executor.id)
    assert big.tokens


def test_a_preempted_request_keeps_its_place():
    world, gateway, executor = world_of(num_lanes=4, num_blocks=12)
    streams = [world.submit(gateway, prompt(70 * i, 40), 30, seed=i) for i in range(4)]
    later = [world.submit(gateway, prompt(500, 5), 2, tenant="other") for _ in range(3)]
    while not world.scheduler.counters.preempted:
        world.run_step(executor.id)
    back = [r for r in world.scheduler.ledger.queue.head(10) if not r.rank.fresh]
    assert back == world.scheduler.ledger.queue.head(len(back))
    world.drain()
    assert {stream.end for stream in [*streams, *later]} == {"length"}
