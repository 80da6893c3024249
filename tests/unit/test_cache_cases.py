"""The prefix cache at work in a scheduler (bugs.md 30 to 32): whatever it finds, streams are as without it."""

import random

import pytest

from services.scheduler.core.debug_state import debug_state
from services.scheduler.core.limits import Settings
from shared.wire import tokens
from shared.wire.executor import BatchPlan
from shared.wire.facts import ExecutorLimits, ModelFacts
from tests.fakes.scheduler_world import World

FACTS = ModelFacts("plain", 1000, 8192, [], "fake")


def world_of(num_blocks=64, num_lanes=8, max_step_tokens=512, **settings):
    world = World(Settings(**settings), FACTS, pool_slots=num_blocks * 16)
    gateway = world.join_gateway()
    executor = world.join_executor(ExecutorLimits(num_blocks, 16, num_lanes, max_step_tokens))
    return world, gateway, executor


def prompt(num_tokens, first=1):
    return [(first + i) % 1000 for i in range(num_tokens)]


def plans_of(world):
    messages = [getattr(action, "message", None) for actions in world.actions for action in actions]
    return [message for message in messages if isinstance(message, BatchPlan)]


def admits_of(world):
    return [admit for plan in plans_of(world) for admit in plan.admits]


def test_the_second_of_two_equal_prompts_computes_only_its_end():
    world, gateway, _ = world_of()
    first = world.submit(gateway, prompt(100), 4)
    world.drain()
    second = world.submit(gateway, prompt(100), 4)
    world.drain()
    assert second.tokens == first.tokens
    assert [admit.num_cached for admit in admits_of(world)] == [0, 96]
    assert (first.cached_tokens, second.cached_tokens) == (0, 96)
    counters = world.scheduler.counters
    assert (counters.prefix_queries, counters.prefix_hits) == (200, 96)


def test_a_conversation_goes_on_from_its_last_answer():
    world, gateway, _ = world_of()
    first = world.submit(gateway, prompt(40), 30)
    world.drain()
    world.submit(gateway, [*prompt(40), *first.tokens, 5, 6, 7], 4)
    world.drain()
    assert admits_of(world)[1].num_cached == 64, "69 tokens were computed: 40, and 29 of the answer"


def test_blocks_are_found_only_once_their_step_is_confirmed():
    world, gateway, executor = world_of()
    world.submit(gateway, prompt(40), 1)
    world.submit(gateway, prompt(40), 4)
    world.run_step(executor.id)
    world.submit(gateway, prompt(40), 4)
    world.drain()
    assert [admit.num_cached for admit in admits_of(world)] == [0, 0, 32]


@pytest.mark.parametrize("fields", [{"tenant": "other"}, {"salt": "pepper"}, {"tenant": "other", "salt": "pepper"}])
def test_tenants_and_salts_share_nothing(fields):
    world, gateway, _ = world_of()
    for each in ({}, fields, {}, fields):
        world.submit(gateway, prompt(40), 4, **each)
        world.drain()
    assert [admit.num_cached for admit in admits_of(world)] == [0, 0, 32, 32]


def test_without_the_cache_nothing_is_kept():
    world, gateway, _ = world_of(prefix_cache=False)
    for _ in range(2):
        world.submit(gateway, prompt(40), 4)
        world.drain()
    assert [admit.num_cached for admit in admits_of(world)] == [0, 0]
    assert debug_state(world.scheduler)["executors"][0]["blocks"] == {"total": 64, "free": 64, "cached": 0, "used": 0}


def test_the_snapshot_tells_cached_from_used_and_free():
    world, gateway, _ = world_of()
    world.submit(gateway, prompt(40), 1)
    blocks = debug_state(world.scheduler)["executors"][0]["blocks"]
    assert blocks == {"total": 64, "free": 61, "cached": 0, "used": 3}
    world.drain()
    blocks = debug_state(world.scheduler)["executors"][0]["blocks"]
    assert blocks == {"total": 64, "free": 62, "cached": 2, "used": 0}


def test_prompt_logprobs_come_from_computing():
    world, gateway, _ = world_of()
    for _ in range(2):
        world.submit(gateway, prompt(40), 4, num_logprobs=1, prompt_logprobs=True)
        world.drain()
    assert [admit.num_cached for admit in admits_of(world)] == [0, 0]


def test_a_preempted_request_finds_its_own_blocks():
    world, gateway, _ = world_of(num_blocks=8, max_inflight=1)
    first = world.submit(gateway, prompt(40), 60)
    second = world.submit(gateway, prompt(40, 500), 60)
    world.drain()
    assert world.scheduler.counters.preempted > 0
    assert first.end == second.end == "length"
    again = [admit for admit in admits_of(world) if admit.num_prompt < tokens.count(admit.tokens)]
    assert again
    assert all(admit.num_cached > 0 for admit in again)
    assert (first.cached_tokens, second.cached_tokens) == (0, 0), "that of the first admission counts"


def test_cache_30_a_found_block_is_never_handed_to_another():
    """In one plan A finds the only evictable block and B wants every other one."""
    world, gateway, executor = world_of(num_blocks=8, max_inflight=1, num_lanes=8)
    world.submit(gateway, prompt(17), 1)
    world.drain()
    assert debug_state(world.scheduler)["executors"][0]["blocks"]["cached"] == 1
    world.submit(gateway, prompt(10, 900), 50)
    b = world.submit(gateway, prompt(85, 500), 10)
    a = world.submit(gateway, prompt(20), 10)
    world.run_step(executor.id)
    world.drain()
    assert (a.end, b.end) == ("length", "length")
    assert a.cached_tokens in (0, 16)


@pytest.mark.parametrize("budget", [8, 16, 1000])
@pytest.mark.parametrize("num_tokens", [15, 16, 17, 32, 33])
def test_cache_31_a_prompt_found_whole_leaves_a_token_to_compute(budget, num_tokens):
    world, gateway, _ = world_of(max_step_tokens=budget)
    streams = []
    for _ in range(2):
        streams.append(world.submit(gateway, prompt(num_tokens), 20))
        world.drain()
    for num_shared in (16, 31):
        world.submit(gateway, [*prompt(min(num_shared, num_tokens)), *prompt(9, 700)], 20)
        world.drain()
    assert streams[0].tokens == streams[1].tokens
    assert streams[1].cached_tokens == (num_tokens - 1) // 16 * 16
    assert all(admit.num_cached < tokens.count(admit.tokens) for admit in admits_of(world))
    assert all(min(tokens.unpack(plan.work_counts), default=1) > 0 for plan in plans_of(world))


@pytest.mark.parametrize(
    "num_requests",
    [
        pytest.param(500, marks=pytest.mark.timeout(300)),
        pytest.param(5000, marks=[pytest.mark.soak, pytest.mark.timeout(0)]),
    ],
)
def test_cache_32_after_many_requests_the_books_add_up(num_requests):
    """Random lengths, a third aborted, some preempted, prefixes shared. ``World`` checks every invariant each time."""
    chance = random.Random(32)
    world, gateway, executor = world_of(num_blocks=32, num_lanes=6, max_step_tokens=64)
    shared = prompt(48, 300)
    for number in range(num_requests):
        length = chance.randint(1, 70)
        ids = [chance.randrange(1000) for _ in range(length)]
        if chance.random() < 0.5:
            ids = [*shared[: chance.randint(1, 48)], *ids][:70]
        world.submit(gateway, ids, chance.randint(1, 40), stop_token_ids=tokens.pack([chance.randrange(1000)]))
        for _ in range(chance.randint(0, 8)):
            world.run_step(executor.id)
        live = list(world.streams[gateway])
        if live and chance.random() < 0.3:
            world.cancel(gateway, chance.choice(live))
        if number % 50 == 0:
            world.drain()
            blocks = debug_state(world.scheduler)["executors"][0]["blocks"]
            assert blocks["free"] + blocks["cached"] == blocks["total"]
    world.drain()
    assert world.scheduler.counters.preempted > 0
    assert world.scheduler.counters.prefix_hits > 0
