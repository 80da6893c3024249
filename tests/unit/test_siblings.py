"""Choices of one prompt: one computes it, the others share its blocks, whatever becomes of the one."""

import pytest

from services.scheduler.core.limits import Settings
from shared.wire.executor import BatchPlan
from shared.wire.facts import ExecutorLimits, ModelFacts
from tests.fakes.scheduler_world import World

FACTS = ModelFacts("plain", 1000, 8192, [], "fake")
LIMITS = ExecutorLimits(64, 16, 8, 512)
PROMPT = list(range(100))


def world_of(limits=LIMITS, **settings):
    world = World(Settings(**settings), FACTS, pool_slots=limits.num_blocks * limits.block_size)
    return world, world.join_gateway(), world.join_executor(limits)


def submit(world, gateway, n, prompt=PROMPT, max_tokens=10, group="g", **fields):
    return [world.submit(gateway, prompt, max_tokens, seed=seed, group=group, **fields) for seed in range(n)]


def cached(world):
    """Cached tokens of every admission."""
    messages = [getattr(action, "message", None) for actions in world.actions for action in actions]
    return [admit.num_cached for plan in messages if isinstance(plan, BatchPlan) for admit in plan.admits]


@pytest.mark.parametrize("max_inflight", [1, 2])
def test_the_prompt_is_computed_once(max_inflight):
    world, gateway, executor = world_of(max_inflight=max_inflight)
    streams = submit(world, gateway, 4)
    assert world.scheduler.ledger.num_waiting == 3
    world.run_step(executor.id)
    lanes = list(world.scheduler.executors[executor.id].lanes.values())
    assert len(lanes) == 4
    assert len({tuple(lane.table[:6]) for lane in lanes}) == 1
    world.drain()
    assert cached(world) == [0, 96, 96, 96]
    assert [stream.cached_tokens for stream in streams] == [0, 96, 96, 96]


def test_a_prompt_in_chunks_is_waited_for_to_its_end():
    world, gateway, executor = world_of(ExecutorLimits(64, 16, 8, 32), max_inflight=1)
    submit(world, gateway, 2)
    for _ in range(3):
        assert world.scheduler.ledger.siblings.num_held == 1
        world.run_step(executor.id)
    world.drain()
    assert cached(world) == [0, 96]


@pytest.mark.parametrize("length", [1, 15, 16])
def test_a_prompt_without_a_block_to_share_is_not_waited_for(length):
    world, gateway, executor = world_of(max_inflight=1)
    submit(world, gateway, 4, PROMPT[:length])
    world.run_step(executor.id)
    assert not world.scheduler.ledger.siblings.num_held
    world.drain()


def test_without_the_cache_nobody_waits():
    world, gateway, _ = world_of(prefix_cache=False)
    submit(world, gateway, 3)
    assert not world.scheduler.ledger.siblings.num_held
    world.drain()


def test_other_prompts_and_gateways_do_not_wait():
    world, gateway, _ = world_of()
    submit(world, gateway, 1)
    submit(world, gateway, 1, group="h")
    submit(world, world.join_gateway(), 1)
    assert not world.scheduler.ledger.siblings.num_held


@pytest.mark.parametrize("max_tokens", [1, 10])
def test_a_leader_that_ends_with_its_prompt_lets_the_others_go(max_tokens):
    world, gateway, _ = world_of()
    streams = submit(world, gateway, 3, max_tokens=max_tokens)
    world.drain()
    assert cached(world) == [0, 96, 96]
    assert {stream.end for stream in streams} == {"length"}


def test_when_the_leader_ends_early_the_next_one_leads():
    world, gateway, _ = world_of(ExecutorLimits(64, 16, 8, 32))
    first, second, third = submit(world, gateway, 3)
    world.cancel(gateway, second.submit.request_id)
    world.cancel(gateway, first.submit.request_id)
    assert third.submit.request_id in world.streams[gateway]
    assert not world.scheduler.ledger.siblings.num_held
    world.drain()
    assert third.end == "length"


def test_when_the_executor_is_lost_the_leader_still_leads():
    world, gateway, executor = world_of(ExecutorLimits(64, 16, 8, 32), max_inflight=1)
    streams = submit(world, gateway, 3)
    world.run_step(executor.id)
    world.kill_executor(executor.id)
    world.join_executor(LIMITS)
    world.drain()
    assert {stream.end for stream in streams} == {"length"}
    assert cached(world)[-2:] == [96, 96]


def test_when_nobody_can_hold_them_they_all_wait_for_an_executor_and_end_together():
    world, gateway, executor = world_of(recovery_timeout_ms=1000)
    streams = submit(world, gateway, 3)
    world.kill_executor(executor.id)
    assert not world.scheduler.ledger.siblings.num_held
    world.pass_time(1000)
    assert {stream.end for stream in streams} == {"error"}


def test_resubmitted_siblings_share_again():
    world, gateway, executor = world_of()
    streams = submit(world, gateway, 3)
    for _ in range(3):
        world.run_step(executor.id)
    world.restart_scheduler(executors_first=True)
    world.drain()
    assert {stream.end for stream in streams} == {"length"}
    assert cached(world) == [0, 96, 96]


def test_a_deadline_ends_a_request_that_is_held_back():
    world, gateway, _ = world_of(ExecutorLimits(64, 16, 8, 32), max_inflight=1)
    first, second = (world.submit(gateway, PROMPT, 10, group="g", deadline_ms=deadline_ms) for deadline_ms in (0, 50))
    assert world.scheduler.ledger.siblings.num_held == 1
    world.pass_time(50)
    assert second.end == "deadline"
    assert world.scheduler.ledger.siblings.num_held == 0
    world.drain()
    assert first.end == "length"
