"""A request goes to the executor that holds its longest prefix, if that has room soon; else to whoever has."""

import pytest

from services.scheduler.core.limits import Settings
from shared.wire.facts import ExecutorLimits, ModelFacts
from tests.fakes.scheduler_world import World

FACTS = ModelFacts("plain", 1000, 8192, [], "fake")
LIMITS = ExecutorLimits(64, 16, 2, 512)
PROMPT = list(range(100))


class Bench:
    """Two executors; the second holds a prefix of PROMPT."""

    def __init__(self, **settings):
        self.world = World(Settings(max_inflight=1, **settings), FACTS)
        self.gateway = self.world.join_gateway()
        second = self.world.join_executor(LIMITS).id
        self.submit(PROMPT[:65], 1)
        self.world.drain()
        self.first, self.second = self.world.join_executor(LIMITS).id, second

    def submit(self, prompt, max_tokens=4, **fields):
        return self.world.submit(self.gateway, prompt, max_tokens, **fields)

    def place(self, stream):
        lane = self.world.scheduler.ledger.requests[self.gateway][stream.submit.request_id].lane
        return lane.executor.id if lane is not None else None


def other_prompt(first):
    return [500 + first + i for i in range(40)]


def test_a_request_prefers_the_executor_with_its_longest_prefix():
    bench = Bench()
    bench.submit(other_prompt(0))
    assert bench.place(bench.submit(other_prompt(100))) is not None
    stream = bench.submit(PROMPT)
    bench.world.run_step(bench.first)
    bench.world.run_step(bench.first)
    assert bench.place(stream) is None, "the other one has room, and leaves it"
    bench.world.run_step(bench.second)
    assert bench.place(stream) == bench.second
    bench.world.drain()
    assert stream.cached_tokens == 64


def test_the_wait_is_bounded():
    bench = Bench(prefix_wait_ms=50)
    bench.submit(other_prompt(0))
    bench.submit(other_prompt(100))
    bench.world.run_step(bench.first)
    stream = bench.submit(PROMPT)
    assert bench.place(stream) is None
    bench.world.pass_time(49)
    assert bench.place(stream) is None
    bench.world.pass_time(1)
    bench.world.run_step(bench.first)
    assert bench.place(stream) == bench.first
    bench.world.drain()
    assert stream.cached_tokens == 0


@pytest.mark.parametrize("settings", [{"prefix_wait_ms": 0}, {"prefix_cache": False}])
def test_without_a_wait_or_a_cache_whoever_has_room_pulls(settings):
    bench = Bench(**settings)
    bench.submit(other_prompt(0))
    bench.submit(other_prompt(100))
    stream = bench.submit(PROMPT)
    bench.world.run_step(bench.first)
    assert bench.place(stream) == bench.first


def test_a_full_executor_is_not_waited_for():
    bench = Bench()
    held = [bench.submit(PROMPT, 40), bench.submit(PROMPT, 40)]
    bench.world.run_step(bench.second)
    assert [bench.place(stream) for stream in held] == [bench.second, bench.second]
    assert bench.place(bench.submit(PROMPT)) == bench.first


def test_whoever_holds_as_much_takes_it():
    bench = Bench(prefix_wait_ms=50)
    bench.submit(other_prompt(0))
    again = bench.submit(PROMPT[:66], 1)
    bench.world.pass_time(50)
    assert bench.place(again) == bench.first
    bench.world.drain()
    busy = bench.submit(other_prompt(200))
    stream = bench.submit(PROMPT)
    assert {bench.place(busy), bench.place(stream)} == {bench.first, bench.second}
    bench.world.drain()
    assert stream.cached_tokens == 64


def test_an_executor_that_is_lost_is_not_waited_for():
    bench = Bench()
    bench.submit(other_prompt(0))
    stream = bench.submit(PROMPT)
    assert bench.place(stream) is None
    bench.world.kill_executor(bench.second)
    assert bench.place(stream) == bench.first


class Mixed:
    """A stream whose executor, of numerics "a", was lost; others of the given numerics are at work on a step."""

    def __init__(self, *numerics):
        self.world = World(Settings(max_inflight=1, prefix_wait_ms=50), FACTS)
        self.gateway = self.world.join_gateway()
        lost = self.world.join_executor(LIMITS, "a").id
        self.stream = self.world.submit(self.gateway, PROMPT, 40)
        self.world.run_step(lost)
        self.world.run_step(lost)
        self.others = [self.world.join_executor(LIMITS, one).id for one in numerics]
        for i in range(len(numerics)):
            self.world.submit(self.gateway, other_prompt(100 * i), 40)
        self.world.kill_executor(lost)
        assert self.place() is None, "nobody can plan now"

    def place(self):
        lane = self.world.scheduler.ledger.requests[self.gateway][self.stream.submit.request_id].lane
        return lane.executor.id if lane is not None else None


def test_a_request_goes_on_where_its_bits_are_the_same():
    mixed = Mixed("b", "a")
    mixed.world.run_step(mixed.others[0])
    assert mixed.place() is None
    mixed.world.run_step(mixed.others[1])
    assert mixed.place() == mixed.others[1]


def test_it_waits_for_the_same_bits_for_a_bounded_time():
    mixed = Mixed("b", "a")
    mixed.world.pass_time(50)
    mixed.world.run_step(mixed.others[0])
    assert mixed.place() == mixed.others[0]


def test_it_does_not_wait_for_bits_that_nobody_has():
    mixed = Mixed("b", "c")
    mixed.world.run_step(mixed.others[0])
    assert mixed.place() == mixed.others[0]


def test_a_new_executor_gets_work_at_once():
    bench = Bench()
    bench.world.kill_executor(bench.first)
    streams = [bench.submit(other_prompt(100 * i), 40) for i in range(3)]
    assert bench.place(streams[-1]) is None
    new = bench.world.join_executor(LIMITS).id
    assert bench.place(streams[-1]) == new


def test_a_hint_is_followed_only_as_far_as_it_is_true(monkeypatch):
    """Every chain looks the same to the directory: nothing is kept for an executor that holds nothing."""
    monkeypatch.setattr("services.scheduler.core.directory.crc32", lambda data, before=0: 7)
    bench = Bench()
    stream = bench.submit(other_prompt(0))
    assert not bench.world.scheduler.ledger.preferences.requests()
    assert bench.place(stream) is not None
    bench.world.drain()


def test_a_request_is_not_kept_for_an_executor_that_can_never_hold_it():
    world = World(Settings(max_inflight=1), FACTS)
    gateway = world.join_gateway()
    small = world.join_executor(ExecutorLimits(5, 16, 2, 512)).id
    world.submit(gateway, PROMPT[:65], 1)
    world.drain()
    large = world.join_executor(LIMITS).id
    world.submit(gateway, PROMPT[:60], 8)
    stream = world.submit(gateway, PROMPT, 8)
    assert not world.scheduler.ledger.preferences.requests()
    lane = world.scheduler.ledger.requests[gateway][stream.submit.request_id].lane
    assert lane.executor.id == large != small
    world.drain()


def test_nobody_is_preempted_for_a_request_that_is_kept_for_another_executor():
    """Else the one that made room would take its place again at once, and so on for as long as the other is kept."""
    bench = Bench()
    on_second = [bench.submit(other_prompt(100 * i), 60, priority=0) for i in range(1)]
    bench.world.run_step(bench.second)
    on_first = [bench.submit(other_prompt(200 + 100 * i), 60, priority=5) for i in range(2)]
    urgent = bench.submit(PROMPT, 4, priority=0)
    for _ in range(10):
        bench.world.run_step(bench.first)
        bench.world.run_step(bench.second)
    bench.world.drain()
    assert {stream.end for stream in [*on_first, *on_second, urgent]} == {"length"}
    assert bench.world.scheduler.counters.preempted <= 2


@pytest.mark.parametrize("how", ["kill_executor", "drain_executor"])
def test_nothing_is_kept_for_an_executor_that_goes(how):
    """Found by random steps: it had no other request, so nothing else came back to the queue and nobody was asked."""
    bench = Bench()
    for stream in (bench.submit(other_prompt(0)), bench.submit(other_prompt(100))):
        if bench.place(stream) == bench.first:
            bench.world.cancel(bench.gateway, stream.submit.request_id)
        else:
            busy = stream
    while bench.world.run_step(bench.first):
        pass
    kept = bench.submit(PROMPT)
    bench.world.cancel(bench.gateway, busy.submit.request_id)
    assert bench.place(kept) is None, "the other one holds its prefix, and is in the middle of a step"
    getattr(bench.world, how)(bench.second, *([10_000] if how == "drain_executor" else []))
    assert bench.place(kept) == bench.first
    bench.world.drain()
