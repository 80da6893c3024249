"""What goes into a plan, in which order, and who has to go when blocks or lanes run short."""

import pytest

from services.scheduler.core.limits import Settings
from services.scheduler.core.waiting import MAX_OVERTAKES
from shared.wire.executor import BatchPlan, work_of
from shared.wire.facts import ExecutorLimits, ModelFacts
from tests.fakes.scheduler_world import World

FACTS = ModelFacts("plain", 1000, 8192, [], "fake")


def world_of(
    max_inflight=1, num_blocks=600, block_size=16, num_lanes=8, max_step_tokens=512, step_time_budget_ms=10_000
):
    world = World(
        Settings(max_inflight=max_inflight, step_time_budget_ms=step_time_budget_ms),
        FACTS,
        pool_slots=num_blocks * block_size,
    )
    gateway = world.join_gateway()
    executor = world.join_executor(ExecutorLimits(num_blocks, block_size, num_lanes, max_step_tokens))
    return world, gateway, executor


def prompt(num_tokens, first=1):
    return [(first + i) % 1000 for i in range(num_tokens)]


def rows(executor):
    """The latest plan's work: (lane, start, count, sample)."""
    return [tuple(row) for row in work_of(executor.plans[-1])]


def retires(executor):
    return len(executor.plans[-1].retires) // 4


def plans_of(world):
    """Every plan so far."""
    messages = [getattr(action, "message", None) for actions in world.actions for action in actions]
    return [message for message in messages if isinstance(message, BatchPlan)]


def lane_of(world, executor, stream):
    core = world.scheduler.executors[executor.id]
    return next(lane for lane in core.lanes.values() if lane.request.submit.request_id == stream.submit.request_id)


def test_an_arrival_is_planned_at_once():
    world, gateway, executor = world_of()
    world.submit(gateway, prompt(100), 4)
    assert rows(executor) == [(0, 0, 100, True)]


def test_a_prompt_longer_than_the_budget_is_cut_at_block_boundaries():
    world, gateway, executor = world_of(max_step_tokens=40)
    world.submit(gateway, prompt(100), 4)
    seen = rows(executor)
    for _ in range(2):
        world.run_step(executor.id)
        seen += rows(executor)
    assert seen == [(0, 0, 32, False), (0, 32, 32, False), (0, 64, 36, True)]


def test_decodes_come_first_and_never_miss_a_step():
    world, gateway, executor = world_of(max_step_tokens=64)
    for i in range(4):
        world.submit(gateway, prompt(10, i), 200)
    world.run_step(executor.id)
    world.run_step(executor.id)
    world.submit(gateway, prompt(2000), 4)
    for _ in range(40):
        world.run_step(executor.id)
        decodes = rows(executor)[:4]
        assert [row[2:] for row in decodes] == [(1, True)] * 4
        assert sum(row[2] for row in rows(executor)) <= 64


def test_short_prompts_pass_a_long_one_that_still_advances():
    """Issue 3's case at a small scale: each short one has its first token within 3 steps of its arrival."""
    world, gateway, executor = world_of(num_lanes=16)
    streams = [world.submit(gateway, prompt(10, i), 500) for i in range(4)]
    for _ in range(3):
        world.run_step(executor.id)
    long = world.submit(gateway, prompt(8000), 4)
    world.run_step(executor.id)
    short = [world.submit(gateway, prompt(60, 100 * i), 4) for i in range(5)]
    before = [len(stream.tokens) for stream in streams]
    for _ in range(3):
        start = lane_of(world, executor, long).scheduled
        world.run_step(executor.id)
        assert lane_of(world, executor, long).scheduled - start >= 512 // 4 - 16
    assert all(stream.tokens for stream in short)
    assert [len(stream.tokens) for stream in streams] == [count + 3 for count in before]


def test_with_two_in_flight_a_decode_is_planned_on_a_promised_token():
    world, gateway, executor = world_of(max_inflight=2)
    stream = world.submit(gateway, prompt(20), 3)
    assert [work_of(plan)[0][:] for plan in executor.plans] == [(0, 0, 20, True), (0, 20, 1, True)]
    world.run_step(executor.id)
    assert rows(executor) == [(0, 21, 1, True)]
    world.run_step(executor.id)
    assert len(executor.plans) == 1, "nothing is planned past max_tokens"
    world.run_step(executor.id)
    assert stream.end == "length"


def test_a_retire_without_other_work_is_sent_alone():
    world, gateway, executor = world_of()
    world.submit(gateway, prompt(20), 1)
    world.run_step(executor.id)
    assert (rows(executor), retires(executor)) == ([], 1)
    world.run_step(executor.id)
    assert not executor.plans, "an idle executor is left alone"


def test_lanes_never_outnumber_the_rows_of_a_step():
    world, gateway, executor = world_of(num_lanes=8, max_step_tokens=3)
    for i in range(8):
        world.submit(gateway, prompt(3, i), 50)
    for _ in range(20):
        world.run_step(executor.id)
    assert len(rows(executor)) == 3


def test_the_time_budget_cuts_chunks_once_steps_were_measured():
    world, gateway, executor = world_of(step_time_budget_ms=40)
    for i in range(40):
        world.submit(gateway, prompt(1 + i), 20)
    world.drain()
    world.submit(gateway, prompt(400), 2)
    assert rows(executor)[0][2] < 64


def test_when_blocks_run_short_the_last_in_order_goes_and_comes_back():
    """Case 28: what a preempted request gets is what an undisturbed one gets (checked by the world)."""
    world, gateway, _ = world_of(num_blocks=12, block_size=4, max_step_tokens=16)
    streams = [world.submit(gateway, prompt(8, 100 * i), 30, seed=i) for i in range(4)]
    world.drain()
    assert world.scheduler.counters.preempted > 0
    assert [(stream.end, len(stream.tokens)) for stream in streams] == [("length", 30)] * 4


def test_the_first_in_order_is_never_preempted():
    world, gateway, executor = world_of(num_blocks=12, block_size=4, max_step_tokens=16)
    first = world.submit(gateway, prompt(8), 30)
    for i in range(3):
        world.submit(gateway, prompt(8, 100 * i), 30)
    seq = lane_of(world, executor, first).seq
    while not first.end:
        assert lane_of(world, executor, first).seq == seq
        world.run_step(executor.id)
    assert world.scheduler.counters.preempted > 0


def test_sched_27_of_two_that_need_the_last_block_the_less_urgent_goes():
    world, gateway, executor = world_of(num_blocks=6, block_size=4, num_lanes=2)
    less = world.submit(gateway, prompt(8), 8, priority=1)
    more = world.submit(gateway, prompt(4), 8, priority=0)
    while not (world.scheduler.counters.preempted or more.end):
        world.run_step(executor.id)
    plan = executor.plans[-1]
    assert world.scheduler.counters.preempted == 1
    assert [row[0] for row in rows(executor)] == [lane_of(world, executor, more).number]
    assert retires(executor) == 1
    assert not plan.admits
    world.drain()
    assert (less.end, more.end) == ("length", "length")


def test_sched_27_an_urgent_arrival_takes_the_seat_of_a_less_urgent_one():
    world, gateway, executor = world_of(num_lanes=2)
    low = [world.submit(gateway, prompt(8, i), 40, priority=5) for i in range(2)]
    world.run_step(executor.id)
    urgent = world.submit(gateway, prompt(8, 50), 4, priority=-5)
    world.run_step(executor.id)
    assert lane_of(world, executor, urgent)
    assert retires(executor) == 1
    world.run_step(executor.id)
    assert urgent.tokens
    assert lane_of(world, executor, low[0]), "the one that came first stays"
    world.drain()
    assert [stream.end for stream in [*low, urgent]] == ["length"] * 3
    assert world.scheduler.counters.preempted == 1


def test_equal_priorities_preempt_nobody():
    world, gateway, _ = world_of(num_lanes=1)
    world.submit(gateway, prompt(8), 4)
    world.submit(gateway, prompt(8, 9), 4)
    world.drain()
    assert world.scheduler.counters.preempted == 0


def test_an_urgent_arrival_preempts_nobody_when_another_executor_has_room():
    world, gateway, _ = world_of(num_lanes=1)
    world.submit(gateway, prompt(8), 40, priority=5)
    world.join_executor(ExecutorLimits(600, 16, 1, 512))
    world.submit(gateway, prompt(8, 9), 4, priority=0)
    world.drain()
    assert world.scheduler.counters.preempted == 0


@pytest.mark.parametrize("phase", range(4))
def test_an_urgent_started_prefill_does_not_wait_for_the_blocks_of_a_less_urgent_decode(phase):
    world, gateway, executor = world_of(num_blocks=11, block_size=4, num_lanes=2, max_step_tokens=2)
    low = world.submit(gateway, prompt(8), 28, priority=1)
    while len(low.tokens) < 1 + phase:
        world.run_step(executor.id)
    urgent = world.submit(gateway, prompt(20, 50), 3)
    world.run_step(executor.id)
    while not urgent.end:
        before = lane_of(world, executor, urgent).scheduled
        world.run_step(executor.id)
        assert urgent.end or lane_of(world, executor, urgent).scheduled > before
    world.drain()
    assert low.end == "length"


def test_sched_26_small_requests_pass_a_big_one_that_does_not_fit_now():
    world, gateway, executor = world_of(num_blocks=40, block_size=16, num_lanes=8)
    long = world.submit(gateway, prompt(370), 60)
    world.run_step(executor.id)
    big = world.submit(gateway, prompt(300, 500), 4)
    small = [world.submit(gateway, prompt(10, i), 2) for i in range(20)]
    for _ in range(20):
        world.run_step(executor.id)
    assert all(stream.end == "length" for stream in small)
    assert not big.tokens
    assert not long.end
    while not long.end:
        world.run_step(executor.id)
    world.run_step(executor.id)
    world.run_step(executor.id)
    assert big.tokens, "it starts as soon as there is room"


def test_sched_26_a_big_request_is_passed_a_bounded_number_of_times():
    world, gateway, executor = world_of(num_blocks=40, block_size=16, num_lanes=8)
    world.submit(gateway, prompt(330), 200)
    world.run_step(executor.id)
    big = world.submit(gateway, prompt(400, 500), 4)
    waiting = world.scheduler.ledger.requests[gateway][big.submit.request_id]
    num_small, num_passed = 0, 0
    while waiting.lane is None:
        num_passed = world.scheduler.counters.admitted - 1
        while len(world.streams[gateway]) < 20:
            world.submit(gateway, prompt(10, num_small), 8)
            num_small += 1
        world.run_step(executor.id)
    assert waiting.overtaken == num_passed == MAX_OVERTAKES
    world.drain()


def test_executors_that_are_free_share_what_waits():
    world, gateway, first = world_of()
    world.kill_executor(first.id)
    for i in range(8):
        world.submit(gateway, prompt(10, i), 50)
    one = world.join_executor(ExecutorLimits(600, 16, 4, 512))
    other = world.join_executor(ExecutorLimits(600, 16, 8, 512))
    lanes = [len(world.scheduler.executors[executor.id].lanes) for executor in (one, other)]
    assert lanes == [4, 4]
    world.submit(gateway, prompt(10, 99), 5)
    world.drain()


def test_arrivals_go_to_the_executor_with_the_fewest_lanes_in_use():
    world, gateway, one = world_of(max_inflight=2)
    other = world.join_executor(ExecutorLimits(600, 16, 8, 512))
    world.submit(gateway, prompt(10), 1)
    assert len(one.plans) == 1, "it has room for a second step in flight"
    world.submit(gateway, prompt(10, 7), 1)
    assert [len(world.scheduler.executors[executor.id].lanes) for executor in (one, other)] == [1, 1]


def test_a_suspect_is_tried_alone():
    world, gateway, executor = world_of(max_inflight=2)
    streams = [world.submit(gateway, prompt(10, i), 50) for i in range(3)]
    for _ in range(5):
        world.run_step(executor.id)
    for failed_steps in (1, 2):
        world.fail_next_step(executor.id, blame_row=None)
        while world.scheduler.counters.failed_steps < failed_steps:
            world.run_step(executor.id)
    for _ in range(8):
        world.run_step(executor.id)
    requests = [lane_of(world, executor, stream).request for stream in streams]
    assert [request.failures for request in requests] == [0, 0, 0]
    work = [[row.lane for row in work_of(plan)] for plan in plans_of(world)]
    assert [lanes for lanes in work[3:] if len(lanes) == 1] == [[0], [1], [2]]
