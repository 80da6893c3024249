"""Failures end whom they must and nobody else; answers no executor may give end its session."""

import msgspec
import pytest

from services.scheduler.core.actions import DropExecutor
from services.scheduler.core.events import StepDone, StepFailed, Submitted
from services.scheduler.core.limits import Settings
from shared.wire import tokens
from shared.wire.executor import BatchFailed, BatchResult, LaneFailure, LaneLogprobs
from shared.wire.facts import ExecutorLimits, ModelFacts
from shared.wire.gateway import Submit
from shared.wire.logprobs import record_bytes
from shared.wire.sampling import Sampling
from tests.fakes.scheduler_world import World

FACTS = ModelFacts("plain", 1000, 8192, [], "fake")
LIMITS = ExecutorLimits(64, 16, 4, 512)


def world_of(max_inflight=2, num_streams=4, num_executors=1, max_tokens=20):
    world = World(Settings(max_inflight=max_inflight), FACTS, pool_slots=64 * 16)
    gateway = world.join_gateway()
    executors = [world.join_executor(LIMITS).id for _ in range(num_executors)]
    streams = [world.submit(gateway, [i] * 20, max_tokens) for i in range(num_streams)]
    for _ in range(4):
        for executor in executors:
            world.run_step(executor)
    return world, gateway, executors[0], streams


@pytest.mark.parametrize("max_inflight", [1, 2])
def test_a_blamed_request_ends_and_its_neighbours_go_on(max_inflight):
    world, _, executor, streams = world_of(max_inflight)
    world.fail_next_step(executor, blame_row=1)
    world.drain()
    assert sorted(stream.end for stream in streams) == ["error", "length", "length", "length"]


@pytest.mark.parametrize("max_inflight", [1, 2])
def test_a_failure_nobody_is_to_blame_for_is_tried_again(max_inflight):
    world, _, executor, streams = world_of(max_inflight)
    world.fail_next_step(executor, blame_row=None)
    world.drain()
    assert {stream.end for stream in streams} == {"length"}
    assert world.scheduler.counters.failed_steps == 1


def test_a_spoiled_sample_ends_one_request_alone():
    world, _, executor, streams = world_of()
    world.spoil_next_sample(executor, 2)
    world.drain()
    assert sorted(stream.end for stream in streams) == ["error", "length", "length", "length"]
    assert world.scheduler.counters.failed_steps == 0


@pytest.mark.parametrize("seed", [666, 667])
@pytest.mark.parametrize("max_inflight", [1, 2])
def test_a_poisoned_request_is_found_and_its_neighbours_go_on(max_inflight, seed):
    """Seed 666 makes every step fail it takes part in, 667 kills the executor. Nobody says who it was."""
    world, gateway, _, streams = world_of(max_inflight)
    poisoned = world.submit(gateway, [500] * 20, 20, seed=seed)
    for _ in range(400):
        if not world.executors:
            world.join_executor(LIMITS)
        world.run_step(next(iter(world.executors)))
    world.drain()
    assert poisoned.end == "error"
    assert "given up after 3 failures in a row" in poisoned.error
    assert {stream.end for stream in streams} == {"length"}
    assert world.mishaps == 3


def test_a_fatal_failure_loses_the_executor_and_no_stream():
    world, _, executor, streams = world_of(num_executors=2)
    world.fail_next_step(executor, blame_row=None, fatal=True)
    world.run_step(executor)
    assert any(isinstance(action, DropExecutor) for action in world.actions[-1])
    world.drain()
    assert {stream.end for stream in streams} == {"length"}


def test_the_culprit_of_a_fatal_failure_ends():
    world, _, executor, streams = world_of(num_executors=1)
    world.fail_next_step(executor, blame_row=0, fatal=True)
    world.run_step(executor)
    world.join_executor(LIMITS)
    world.drain()
    assert sorted(stream.end for stream in streams) == ["error", "length", "length", "length"]


def failures(world):
    return {request.failures for requests in world.scheduler.ledger.requests.values() for request in requests.values()}


def test_when_the_culprit_is_known_nobody_else_is_suspected():
    world, _, executor, _ = world_of()
    world.fail_next_step(executor, blame_row=1)
    world.run_step(executor)
    assert failures(world) == {0}
    world.lie(executor, 0)
    while executor in world.executors:
        world.lie(executor, 0)
    assert failures(world) == {0}
    unblamed, _, executor, _ = world_of()
    unblamed.fail_next_step(executor, blame_row=None)
    unblamed.run_step(executor)
    assert failures(unblamed) == {1}


def lies(world, executor):
    """Answers no executor may give to its oldest plan."""
    core = world.scheduler.executors[executor]
    step = core.inflight[0]
    lanes, seqs = step.sample_lanes, step.sample_seqs
    good = tokens.pack([1] * len(step.samples))
    return {
        "too few samples": BatchResult(0, step.number, lanes[4:], seqs[4:], good[4:]),
        "too few tokens": BatchResult(0, step.number, lanes, seqs, good[4:]),
        "another seq": BatchResult(0, step.number, lanes, tokens.pack([99] * len(step.samples)), good),
        "another order": BatchResult(0, step.number, lanes[4:] + lanes[:4], seqs[4:] + seqs[:4], good),
        "a cut column": BatchResult(0, step.number, lanes[1:], seqs, good),
        "outside the vocabulary": BatchResult(0, step.number, lanes, seqs, tokens.pack([1000] * len(step.samples))),
        "a failure too many": BatchResult(0, step.number, lanes, seqs, good, [LaneFailure(0, 0, "")]),
        "a later step first": BatchResult(0, step.number + 1, lanes, seqs, good),
        "a step never sent": BatchResult(0, step.number + 50, lanes, seqs, good),
        "blame in a cut column": BatchFailed(0, step.number, "error", b"\1\2\3"),
        "a plan it cannot take": BatchFailed(0, step.number, "bad_plan"),
    }


@pytest.mark.parametrize("name", lies(*world_of()[::2]))
def test_an_executor_that_breaks_the_protocol_is_dropped_and_its_streams_go_on(name):
    world, _, executor, streams = world_of()
    lie = lies(world, executor)[name]
    event = StepDone(executor, lie) if isinstance(lie, BatchResult) else StepFailed(executor, lie)
    actions = world.happen(event)
    assert any(isinstance(action, DropExecutor) for action in actions)
    world.join_executor(LIMITS)
    world.drain()
    assert {stream.end for stream in streams} == {"length"}


def test_a_step_that_runs_after_a_failed_one_breaks_the_protocol():
    world, _, executor, _ = world_of(max_inflight=2)
    first, second = world.scheduler.executors[executor].inflight
    world.scheduler.handle(StepFailed(executor, BatchFailed(0, first.number, "error")), 0)
    samples = tokens.pack([1] * len(second.samples))
    answer = BatchResult(0, second.number, second.sample_lanes, second.sample_seqs, samples)
    actions = world.scheduler.handle(StepDone(executor, answer), 0)
    assert any(isinstance(action, DropExecutor) for action in actions)


def test_a_stop_token_before_min_tokens_is_a_token_like_any_other():
    """Also when the executor was not told to mask it."""
    world, gateway, executor, _ = world_of(num_streams=0, max_inflight=1)
    submit = Submit("r", tokens.pack([1]), Sampling(min_tokens=2), 9, stop_token_ids=tokens.pack([5]))
    scheduler = world.scheduler
    scheduler.handle(Submitted(gateway, submit), 0)
    deltas = []
    for step in range(3):
        column, token = tokens.pack([0]), tokens.pack([5])
        actions = scheduler.handle(StepDone(executor, BatchResult(0, step, column, column, token)), 0)
        deltas += actions[-1].message.items
    assert [delta.finish for delta in deltas] == [None, None, "stop"]
    assert deltas[-1].usage.completion_tokens == 3


def test_logprobs_of_a_lane_that_has_no_work_in_the_step_end_the_session():
    world, _, executor, _ = world_of(max_inflight=1, num_executors=2)
    answer = world.executors[executor].run()
    assert isinstance(answer, BatchResult)
    lie = msgspec.structs.replace(answer, logprobs=[LaneLogprobs(3, 2**31, 0, b"")])
    actions = world.happen(StepDone(executor, lie))
    assert any(isinstance(action, DropExecutor) for action in actions)
    world.drain()


def test_prompt_logprobs_of_a_first_token_come_in_the_same_delta():
    world, gateway, executor, _ = world_of(num_streams=0)
    stream = world.submit(gateway, [5, 6, 7], 3, num_logprobs=1, prompt_logprobs=True)
    assert world.run_step(executor)
    assert len(stream.tokens) == 1
    assert len(stream.prompt_records) == 2 * record_bytes(1)
    world.drain()
    assert stream.end == "length"


def test_prompt_logprobs_come_chunk_by_chunk_and_again_after_a_loss():
    world, gateway, _, _ = world_of(num_streams=0, num_executors=2)
    stream = world.submit(gateway, list(range(700)), 3, num_logprobs=0, prompt_logprobs=True)
    where = next(name for name, each in world.executors.items() if each.plans)
    assert world.run_step(where)
    assert not stream.tokens
    assert 0 < len(stream.prompt_records) < 699 * record_bytes(0)
    world.kill_executor(where)
    world.drain()
    assert stream.end == "length"
    assert len(stream.prompt_records) == 699 * record_bytes(0)


@pytest.mark.parametrize("max_inflight", [1, 2])
def test_abort_10_results_of_a_request_that_was_aborted_meanwhile_are_dropped(max_inflight):
    """Aborted between its plan and the plan's results, twice; its blocks are free once, its neighbour goes on."""
    world, gateway, executor, streams = world_of(max_inflight, num_streams=2)
    aborted, other = streams
    for _ in range(2):
        world.cancel(gateway, aborted.submit.request_id)
        world.run_step(executor)
    assert len(aborted.tokens) < 20
    world.drain()
    assert (aborted.end, other.end) == ("cancelled", "length")
    assert world.scheduler.counters.stale["cancel"] == 1
    assert world.scheduler.counters.violations == 0


def test_abort_10_an_abort_beside_the_last_token_ends_it_once():
    for abort_first in (True, False):
        world, gateway, executor, streams = world_of(max_inflight=1, num_streams=2)
        last = streams[0]
        while len(last.tokens) < 19:
            world.run_step(executor)
        if abort_first:
            world.cancel(gateway, last.submit.request_id)
        world.run_step(executor)
        if not abort_first:
            world.cancel(gateway, last.submit.request_id)
        world.drain()
        assert [stream.end for stream in streams] == ["cancelled" if abort_first else "length", "length"]
