"""What each policy puts into a step, and that none of them changes a token."""

from typing import get_args

import pytest

from services.scheduler.core.debug_state import debug_state
from services.scheduler.core.limits import Policy, Settings
from shared.wire import tokens
from shared.wire.executor import BatchPlan, work_of
from shared.wire.facts import ExecutorLimits, ModelFacts
from tests.fakes.scheduler_world import World

FACTS = ModelFacts("plain", 1000, 8192, [], "fake")
LESSON = (12, 3, 6, 8, 4, 4, 4, 4)
"""Steps that each request takes: the first computes the prompt and samples, each later one decodes."""


def world_of(policy, num_blocks=600, block_size=16, num_lanes=8, max_step_tokens=512, **settings):
    settings = {"max_inflight": 1, "static_batch_size": 4, "step_time_budget_ms": 10_000} | settings
    world = World(Settings(policy=policy, **settings), FACTS, pool_slots=num_blocks * block_size)
    gateway = world.join_gateway()
    executor = world.join_executor(ExecutorLimits(num_blocks, block_size, num_lanes, max_step_tokens))
    return world, gateway, executor


def prompt(num_tokens, first=1):
    return [(first + i) % 1000 for i in range(num_tokens)]


def plans_of(world):
    messages = [getattr(action, "message", None) for actions in world.actions for action in actions]
    return [message for message in messages if isinstance(message, BatchPlan)]


def counts(executor):
    """Tokens of each row of the latest plan, by lane."""
    return {row.lane: row.num_tokens for row in work_of(executor.plans[-1])} if executor.plans else {}


@pytest.mark.parametrize("policy", get_args(Policy))
@pytest.mark.parametrize("max_inflight", [1, 2])
def test_r5_the_tokens_are_the_same_under_each_policy(policy, max_inflight):
    """The world holds every stream against an undisturbed run."""
    world, gateway, executor = world_of(policy, 24, 4, 4, 16, max_inflight=max_inflight)
    streams = [world.submit(gateway, prompt(3 + 5 * i, 7 * i), 2 + 3 * i, seed=i) for i in range(6)]
    for _ in range(9):
        world.run_step(executor.id)
    streams += [world.submit(gateway, prompt(20, i), 5, seed=i, priority=-1) for i in range(3)]
    world.drain()
    assert {stream.end for stream in streams} == {"length"}


# prefill-first


def test_prefill_first_stops_every_decode_for_a_prefill():
    world, gateway, executor = world_of("prefill-first")
    first = world.submit(gateway, prompt(10), 50)
    world.run_step(executor.id)
    world.run_step(executor.id)
    world.submit(gateway, prompt(100), 50)
    world.submit(gateway, prompt(200), 50)
    world.run_step(executor.id)
    assert counts(executor) == {1: 100, 2: 200}, "both prompts whole, and no decode"
    before = len(first.tokens)
    world.run_step(executor.id)
    assert len(first.tokens) == before
    assert counts(executor) == {0: 1, 1: 1, 2: 1}
    world.drain()


def test_prefill_first_takes_whole_prompts_in_order_and_cuts_only_what_no_step_holds():
    world, gateway, executor = world_of("prefill-first", max_step_tokens=64)
    world.submit(gateway, prompt(150), 4)
    world.submit(gateway, prompt(40, 300), 4)
    world.submit(gateway, prompt(30, 600), 4)
    seen = [counts(executor)]
    for _ in range(4):
        world.run_step(executor.id)
        seen.append(counts(executor))
    assert seen == [{0: 64}, {0: 64}, {0: 22, 1: 40}, {2: 30}, {0: 1, 1: 1, 2: 1}]


@pytest.mark.parametrize("max_inflight", [1, 2])
def test_prefill_first_never_mixes(max_inflight):
    world, gateway, executor = world_of("prefill-first", 40, 4, 4, 16, max_inflight=max_inflight)
    for i in range(12):
        world.submit(gateway, prompt(2 + 3 * i, i), 6)
        world.run_step(executor.id)
    world.drain()
    started: set[int] = set()
    for plan in plans_of(world):
        started -= set(tokens.unpack(plan.retires))
        decodes = {row.lane in started for row in work_of(plan)}
        assert len(decodes) <= 1
        started |= {row.lane for row in work_of(plan) if row.sample}


# static


def test_static_runs_a_batch_to_the_end_of_its_longest_and_lets_nobody_join():
    """The lesson's schedule: four lanes, twelve steps, dead lane-steps behind the early finishers."""
    world, gateway, executor = world_of("static", num_lanes=4)
    streams = [world.submit(gateway, prompt(4, 10 * i), steps) for i, steps in enumerate(LESSON)]
    live, dead = [], []
    for _ in range(12):
        assert not executor.plans[-1].retires
        live.append(len(counts(executor)))
        dead.append(len(world.scheduler.executors[executor.id].dead))
        world.run_step(executor.id)
    assert live == [4, 4, 4, 3, 3, 3, 2, 2, 1, 1, 1, 1]
    assert [4 - count for count in live] == dead
    assert sum(dead) == 9 + 6 + 4
    assert [stream.end for stream in streams] == ["length"] * 4 + [""] * 4
    plan = executor.plans[-1]
    assert (plan.step, tokens.count(plan.retires), len(plan.admits)) == (12, 4, 4), "the 13th step is the next batch's"
    world.drain()


def test_continuous_refills_a_lane_on_the_step_after_its_sequence_retires():
    world, gateway, executor = world_of("continuous", num_lanes=4)
    world.kill_executor(executor.id)
    for i, steps in enumerate(LESSON):
        world.submit(gateway, prompt(4, 10 * i), steps)
    executor = world.join_executor(executor.limits)
    live = []
    for _ in range(12):
        live.append(len(counts(executor)))
        world.run_step(executor.id)
    assert live == [4] * 10 + [3, 2], "every lane is busy while anybody waits"
    world.drain()


def test_static_forms_a_full_batch_at_once_and_a_smaller_one_after_a_while():
    world, gateway, executor = world_of("static", static_wait_ms=50)
    for i in range(3):
        world.submit(gateway, prompt(4, i), 3)
    assert not executor.plans
    assert world.scheduler.next_deadline_ms() == 50
    world.pass_time(49)
    assert not executor.plans
    world.submit(gateway, prompt(4, 9), 3)
    assert len(executor.plans[-1].admits) == 4
    world.submit(gateway, prompt(4, 10), 3)
    world.pass_time(200)
    while len(executor.plans[-1].admits) != 1:
        world.run_step(executor.id)
    world.drain()
    world.submit(gateway, prompt(4, 11), 3)
    world.pass_time(50)
    assert len(executor.plans[-1].admits) == 1
    world.drain()
    assert world.scheduler.next_deadline_ms() is None


def test_static_wakes_an_idle_executor_however_the_time_comes_to_pass():
    world, gateway, executor = world_of("static", static_wait_ms=50)
    world.submit(gateway, prompt(4), 3)
    world.now_ms = 60
    world.cancel(gateway, "unknown")
    assert len(executor.plans) == 1
    world.drain()


def test_static_reserves_the_longest_output_of_each_member():
    world, gateway, executor = world_of("static", num_blocks=16, block_size=4, static_wait_ms=0)
    for i in range(4):
        world.submit(gateway, prompt(8, i), 16)
    assert len(executor.plans[-1].admits) == 1, "it came alone, and nobody waited"
    world.drain()
    admitted = [len(plan.admits) for plan in plans_of(world) if plan.admits]
    assert admitted == [1, 2, 1], "two of 24 tokens at most, in 64 slots"
    assert world.scheduler.counters.preempted == 0


def test_static_prefills_a_batch_of_more_tokens_than_a_step_before_it_decodes():
    world, gateway, executor = world_of("static", max_step_tokens=64)
    for i in range(4):
        world.submit(gateway, prompt(40, i), 3)
    assert len(executor.plans[-1].admits) == 4
    seen = [counts(executor)]
    for _ in range(4):
        world.run_step(executor.id)
        seen.append(counts(executor))
    assert seen == [{0: 40}, {1: 40}, {2: 40}, {3: 40}, {0: 1, 1: 1, 2: 1, 3: 1}]
    world.drain()


def test_a_cancelled_member_of_a_static_batch_leaves_a_dead_lane():
    world, gateway, executor = world_of("static")
    streams = [world.submit(gateway, prompt(4, i), 10) for i in range(4)]
    world.run_step(executor.id)
    world.cancel(gateway, streams[0].submit.request_id)
    world.run_step(executor.id)
    assert len(counts(executor)) == 3
    state = debug_state(world.scheduler)["executors"][0]
    assert state["lanes"] == {"total": 8, "used": 3, "dead": 1}
    world.drain()
