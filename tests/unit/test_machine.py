"""What the machine does with each event; see the property tests for what must hold whatever happens."""

import msgspec
import pytest

from services.scheduler.core import invariants
from services.scheduler.core.actions import DropExecutor, RefuseExecutor, ToGateway
from services.scheduler.core.debug_state import debug_state
from services.scheduler.core.events import Cancelled, ExecutorJoined, ExecutorLeft, Submitted
from services.scheduler.core.limits import Settings
from shared.wire.facts import ExecutorLimits, ModelFacts
from shared.wire.gateway import Availability, GatewayWelcome, Tokens
from tests.fakes.model_executor import ModelExecutor
from tests.fakes.scheduler_world import World

FACTS = ModelFacts("plain", 1000, 8192, [], "fake")
LIMITS = ExecutorLimits(64, 16, 4, 512)


def world_of(num_executors=1, **settings):
    world = World(Settings(**settings), FACTS, pool_slots=64 * 16)
    gateway = world.join_gateway()
    for _ in range(num_executors):
        world.join_executor(LIMITS)
    return world, gateway


def sent(actions, kind):
    return [a.message for a in actions if isinstance(a, ToGateway) and isinstance(a.message, kind)]


@pytest.mark.parametrize("max_inflight", [1, 2])
def test_case_10_results_for_a_cancelled_request_are_dropped(max_inflight):
    world, gateway = world_of(max_inflight=max_inflight)
    (executor,) = world.executors.values()
    a = world.submit(gateway, [1] * 20, 50)
    b = world.submit(gateway, [2] * 20, 50)
    for _ in range(3):
        world.run_step(executor.id)
    world.cancel(gateway, a.submit.request_id)
    free = world.scheduler.executors[executor.id].pool.num_free
    tokens_of_a = list(a.tokens)
    world.run_step(executor.id)
    world.cancel(gateway, a.submit.request_id)
    assert (a.end, a.tokens) == ("cancelled", tokens_of_a)
    assert world.scheduler.executors[executor.id].pool.num_free >= free - 1
    world.drain()
    assert (b.end, len(b.tokens)) == ("length", 50)


def test_case_10_cancel_and_last_token_in_either_order():
    for cancel_first in (True, False):
        world, gateway = world_of()
        (executor,) = world.executors
        stream = world.submit(gateway, [1] * 20, 1)
        if cancel_first:
            world.cancel(gateway, stream.submit.request_id)
        world.run_step(executor)
        world.cancel(gateway, stream.submit.request_id)
        world.drain()
        assert stream.end == ("cancelled" if cancel_first else "length")


@pytest.mark.parametrize("leave", [False, True])
def test_what_is_freed_is_told_the_executor_at_once(leave):
    world, gateway = world_of(max_inflight=2)
    world.join_gateway()
    (executor,) = world.executors.values()
    stream = world.submit(gateway, [1] * 20, 1)
    assert len(executor.plans) == 1
    if leave:
        world.leave_gateway(gateway)
    else:
        world.cancel(gateway, stream.submit.request_id)
    assert [len(plan.retires) // 4 for plan in executor.plans] == [0, 1]


def test_a_gateway_is_told_when_what_can_be_served_changes_and_only_then():
    world = World(Settings(), FACTS)
    world.join_gateway()
    (welcome,) = sent(world.actions[-1], GatewayWelcome)
    assert (welcome.ready, welcome.facts, welcome.reason) == (False, None, "no executor is connected")
    first = world.join_executor(LIMITS)
    assert sent(world.actions[-1], Availability) == [Availability(True, "", FACTS, 1023)]
    world.join_executor(LIMITS)
    assert sent(world.actions[-1], Availability) == []
    larger = world.join_executor(ExecutorLimits(1000, 16, 4, 512))
    assert sent(world.actions[-1], Availability)[0].max_prompt_tokens == 8191
    world.kill_executor(larger.id)
    assert sent(world.actions[-1], Availability)[0].max_prompt_tokens == 1023
    world.kill_executor(first.id)
    assert sent(world.actions[-1], Availability) == []
    world.kill_executor(next(iter(world.executors)))
    assert sent(world.actions[-1], Availability)[0].ready is False


@pytest.mark.parametrize(
    ("field", "value"),
    [("model", "other"), ("vocab_size", 5), ("context_len", 9), ("eos_token_ids", [1]), ("tokenizer_digest", "x")],
)
def test_an_executor_of_another_model_is_refused_by_the_field_s_name(field, value):
    world, _ = world_of()
    other = ModelExecutor("other", msgspec.structs.replace(FACTS, **{field: value}), LIMITS, 2)
    (action,) = world.happen(ExecutorJoined(other.id, other.hello))
    assert isinstance(action, RefuseExecutor)
    assert field in action.reason
    assert repr(value) in action.reason


def test_another_model_may_come_once_nothing_of_the_first_is_left():
    world, _ = world_of()
    world.kill_executor(next(iter(world.executors)))
    other = ModelExecutor("other", msgspec.structs.replace(FACTS, model="other"), LIMITS, 2)
    world.executors[other.id] = other
    world.happen(ExecutorJoined(other.id, other.hello))
    assert "other" in world.scheduler.executors


def test_a_lost_executor_s_requests_go_on_elsewhere_before_later_ones():
    world, gateway = world_of()
    (first,) = world.executors
    streams = [world.submit(gateway, [i] * 20, 8) for i in range(4)]
    for _ in range(4):
        world.run_step(first)
    later = world.submit(gateway, [9] * 20, 8)
    world.kill_executor(first)
    assert world.scheduler.ledger.num_waiting == 5
    second = world.join_executor(LIMITS)
    admitted = [lane.request.submit.request_id for lane in world.scheduler.executors[second.id].lanes.values()]
    assert admitted == [stream.submit.request_id for stream in streams]
    world.drain()
    assert {stream.end for stream in [*streams, later]} == {"length"}


def test_waiting_without_an_executor_ends_after_the_recovery_timeout():
    world, gateway = world_of(recovery_timeout_ms=1000)
    stream = world.submit(gateway, [1] * 20, 50)
    (executor,) = world.executors
    world.run_step(executor)
    world.kill_executor(executor)
    assert world.scheduler.next_deadline_ms() == 1000
    world.pass_time(999)
    late = world.submit(gateway, [1] * 20, 50)
    assert not stream.end
    world.pass_time(1)
    assert (stream.end, stream.error) == ("error", "no executor was connected for 1000 ms")
    assert not late.end, "it has waited for a millisecond"
    world.join_executor(LIMITS)
    world.drain()
    assert late.end == "length"


def test_a_request_too_large_for_what_is_left_waits_for_a_bounded_time():
    world = World(Settings(recovery_timeout_ms=1000), FACTS)
    gateway = world.join_gateway()
    large = world.join_executor(ExecutorLimits(64, 16, 4, 512))
    world.join_executor(ExecutorLimits(4, 16, 4, 512))
    stream = world.submit(gateway, [1] * 200, 50)
    world.run_step(large.id)
    world.kill_executor(large.id)
    world.pass_time(1000)
    assert stream.error == "no executor could hold this request for 1000 ms"


def test_a_request_that_outgrows_a_small_executor_goes_on_a_larger_one():
    world = World(Settings(max_inflight=1), FACTS)
    gateway = world.join_gateway()
    small = world.join_executor(ExecutorLimits(4, 16, 1, 512))
    stream = world.submit(gateway, [1] * 40, 10)
    world.drain()
    world.submit(gateway, [1] * 40, 3)
    world.join_executor(ExecutorLimits(64, 16, 1, 512))
    world.run_step(small.id)
    grown = world.submit(gateway, [2] * 50, 40)
    world.drain()
    assert (stream.end, grown.end, len(grown.tokens)) == ("length", "length", 40)


def test_a_step_that_takes_too_long_loses_the_executor():
    world, gateway = world_of(step_timeout_ms=500)
    (executor,) = world.executors.values()
    stream = world.submit(gateway, [1] * 20, 5)
    executor.hangs = True
    assert world.scheduler.next_deadline_ms() == 500
    world.pass_time(499)
    assert world.executors
    world.pass_time(1)
    assert any(isinstance(action, DropExecutor) for action in world.actions[-1])
    world.join_executor(LIMITS)
    world.drain()
    assert stream.end == "length"


def test_a_step_s_time_starts_when_the_one_before_it_has_ended():
    world, gateway = world_of(max_inflight=2, step_timeout_ms=500)
    (executor,) = world.executors
    world.submit(gateway, [1] * 20, 50)
    world.pass_time(400)
    world.run_step(executor)
    assert world.scheduler.next_deadline_ms() == 900


def test_losing_a_gateway_frees_its_requests_and_tells_nobody():
    world, gateway = world_of(max_inflight=1)
    other = world.join_gateway()
    kept = world.submit(other, [3] * 20, 20)
    for i in range(6):
        world.submit(gateway, [i] * 20, 20)
    world.run_step(next(iter(world.executors)))
    world.leave_gateway(gateway)
    assert not sent(world.actions[-1], Tokens)
    assert debug_state(world.scheduler)["running"] == 1
    assert debug_state(world.scheduler)["waiting"] == 0
    world.drain()
    assert kept.end == "length"


def test_what_strangers_say_is_counted_and_ignored():
    world, gateway = world_of()
    stream = world.submit(gateway, [1], 1)
    before = debug_state(world.scheduler)
    assert world.happen(Submitted("gateway-nobody", stream.submit)) == []
    assert world.happen(Cancelled("gateway-nobody", "r")) == []
    assert world.happen(ExecutorLeft("executor-nobody", "")) == []
    assert debug_state(world.scheduler) == before
    assert world.scheduler.counters.stale == {"gateway": 2, "executor": 1}


def test_an_executor_that_says_hello_again_starts_empty():
    world, gateway = world_of()
    (executor,) = world.executors.values()
    stream = world.submit(gateway, [1] * 20, 5)
    world.run_step(executor.id)
    world.say_hello_again(executor.id)
    world.drain()
    assert stream.end == "length"


def test_deltas_of_one_step_come_in_one_message_a_gateway():
    world, gateway = world_of()
    other = world.join_gateway()
    (executor,) = world.executors
    for i in range(4):
        world.submit([gateway, other][i % 2], [i] * 5, 5)
    while not any(len(message.items) == 2 for message in sent(world.actions[-1], Tokens)):
        world.run_step(executor)
    assert [len(message.items) for message in sent(world.actions[-1], Tokens)] == [2, 2]


def test_the_debug_state_has_the_documented_shape():
    world, gateway = world_of()
    world.submit(gateway, [1] * 20, 5)
    (executor,) = world.executors
    world.run_step(executor)
    assert debug_state(world.scheduler) == {
        "waiting": 0,
        "running": 1,
        "preempted": 0,
        "executors": [
            {
                "id": executor,
                "pid": 1,
                "blocks": {"total": 64, "free": 62, "cached": 0, "used": 2},
                "lanes": {"total": 4, "used": 1, "dead": 0},
                "inflight": 2,
                "steps": 1,
            }
        ],
    }


def test_a_broken_invariant_is_told_with_the_story():
    world, gateway = world_of()
    world.submit(gateway, [1] * 20, 5)
    core = next(iter(world.scheduler.executors.values()))
    core.lanes[0].computed = 99
    with pytest.raises(invariants.BrokenInvariant, match=r"(?s)out of order.*accept.*admit"):
        invariants.check(world.scheduler)
