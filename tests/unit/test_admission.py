"""Never is told from not now; queues have limits; resubmitted streams are never turned away."""

import msgspec
import pytest

from services.scheduler.core.events import ExecutorJoined, Submitted
from services.scheduler.core.limits import Settings
from shared.wire import tokens
from shared.wire.executor import BatchPlan
from shared.wire.facts import ExecutorLimits, ModelFacts
from shared.wire.gateway import Rejected, Submit
from shared.wire.sampling import Sampling
from tests.fakes.model_executor import ModelExecutor
from tests.fakes.scheduler_world import World

FACTS = ModelFacts("plain", 1000, 8192, [7], "fake")
SMALL = ExecutorLimits(16, 16, 4, 512)


def world_of(limits=SMALL, facts=FACTS, **settings):
    world = World(Settings(**settings), facts, pool_slots=256 if limits in (SMALL, None) else None)
    gateway = world.join_gateway()
    if limits is not None:
        world.join_executor(limits)
    return world, gateway


def prompt(num_tokens):
    return [i % 5 for i in range(num_tokens)]


def rejections(world):
    return [
        action.message
        for actions in world.actions
        for action in actions
        if isinstance(getattr(action, "message", None), Rejected)
    ]


def test_sched_25_a_prompt_no_pool_can_hold_is_rejected_and_blocks_nobody():
    world, gateway = world_of()
    too_long = world.submit(gateway, prompt(300), 4)
    assert too_long.end == "rejected"
    assert rejections(world)[0].code == "too_long"
    assert "300" in rejections(world)[0].detail
    assert "256" in rejections(world)[0].detail
    short = world.submit(gateway, prompt(10), 4, ignore_eos=True)
    world.drain()
    assert short.end == "length"


@pytest.mark.parametrize(("num_prompt", "end"), [(254, "length"), (255, "length"), (256, "rejected")])
def test_sched_25_the_exact_fit_works(num_prompt, end):
    """255 tokens and one more fill 256 slots; the exact fit also runs beside a watermark."""
    world, gateway = world_of()
    stream = world.submit(gateway, prompt(num_prompt), 10, ignore_eos=True)
    world.drain()
    assert stream.end == end
    assert len(stream.tokens) == (256 - num_prompt if end == "length" else 0)


def test_a_prompt_of_the_context_length_is_rejected_naming_both():
    world, gateway = world_of(ExecutorLimits(1000, 16, 4, 512), msgspec.structs.replace(FACTS, context_len=100))
    world.submit(gateway, prompt(100), 4)
    assert rejections(world)[0].detail == "the prompt has 100 tokens; the context length is 100"
    longest = world.submit(gateway, prompt(99), 4, ignore_eos=True)
    world.drain()
    assert (longest.end, len(longest.tokens)) == ("length", 1)


@pytest.mark.parametrize("bad", [[], [1000], [1, 2, 4_000_000_000]])
def test_prompts_that_make_no_sense_are_invalid(bad):
    world, gateway = world_of()
    world.submit(gateway, bad, 4)
    assert rejections(world)[0].code == "invalid"


def test_columns_that_make_no_sense_are_invalid():
    world, gateway = world_of()
    submit = Submit("r", tokens.pack([1]), Sampling(), 1)
    for bad in ({"prompt": b"\1"}, {"output": b"\1\2\3\4\5"}, {"stop_token_ids": b"\1\2"}):
        actions = world.scheduler.handle(Submitted(gateway, msgspec.structs.replace(submit, **bad)), 0)
        assert actions[0].message.code == "invalid"


def test_without_executors_requests_wait_and_are_judged_when_one_joins():
    world, gateway = world_of(None)
    good = world.submit(gateway, prompt(10), 4, ignore_eos=True)
    bad = world.submit(gateway, prompt(300), 4)
    assert good.accepted
    assert bad.accepted
    world.join_executor(SMALL)
    assert bad.end == "error"
    assert "300 tokens" in bad.error
    world.drain()
    assert good.end == "length"


def test_sched_29_a_full_queue_turns_new_requests_away_and_keeps_its_word():
    world, gateway = world_of(ExecutorLimits(16, 16, 1, 512), max_queue=10, retry_after_ms=700)
    streams = [world.submit(gateway, prompt(10), 4, ignore_eos=True) for _ in range(200)]
    accepted = [stream for stream in streams if stream.accepted]
    assert len(accepted) == 11
    turned_away = rejections(world)
    assert [(r.code, r.retry_after_ms) for r in turned_away] == [("queue_full", 700)] * 189
    world.drain()
    assert {stream.end for stream in accepted} == {"length"}
    assert world.submit(gateway, prompt(10), 4).accepted
    world.drain()


def test_a_stream_of_an_earlier_scheduler_is_never_turned_away_and_goes_first():
    world, gateway = world_of(ExecutorLimits(16, 16, 2, 512), max_queue=1)
    (executor,) = world.executors
    streams = [world.submit(gateway, prompt(10), 20, ignore_eos=True) for _ in range(2)]
    while not all(stream.tokens for stream in streams):
        world.run_step(executor)
    for stream in streams[:1]:
        world.cancel(gateway, stream.submit.request_id)
    streams[0] = world.submit(gateway, prompt(10), 20, ignore_eos=True)
    while not all(stream.tokens for stream in streams):
        world.run_step(executor)
    world.restart_scheduler(executors_first=False)
    world.drain()
    assert [stream.end for stream in streams] == ["length"] * 2


def test_streams_of_an_earlier_scheduler_go_before_new_requests():
    world, gateway = world_of(None)
    world.submit(gateway, prompt(10), 4)
    resubmitted(world, gateway, [5, 6], max_tokens=10)
    actions = world.scheduler.handle(ExecutorJoined("e", ModelExecutor("e", FACTS, SMALL, 2).hello), 0)
    plan = next(a.message for a in actions if isinstance(getattr(a, "message", None), BatchPlan))
    assert [tokens.count(admit.tokens) for admit in plan.admits] == [5, 10]


def resubmitted(world, gateway, output, **fields):
    submit = Submit("again", tokens.pack([1, 2, 3]), Sampling(), output=tokens.pack(output), resubmitted=True, **fields)
    actions = world.scheduler.handle(Submitted(gateway, submit), 0)
    return [action.message for action in actions]


def test_a_resubmitted_stream_that_has_all_its_tokens_ends_at_once():
    world, gateway = world_of()
    accepted, deltas = resubmitted(world, gateway, [5, 6, 5], max_tokens=3)
    assert accepted.request_id == "again"
    assert (deltas.items[0].finish, deltas.items[0].token_ids) == ("length", b"")
    assert (deltas.items[0].usage.prompt_tokens, deltas.items[0].usage.completion_tokens) == (3, 3)


def test_a_resubmitted_stream_that_has_its_stop_token_ends_at_once():
    world, gateway = world_of()
    _, deltas = resubmitted(world, gateway, [5, 7], max_tokens=10)
    assert (deltas.items[0].finish, deltas.items[0].stop_token_id) == ("stop", 7)


def test_a_resubmitted_stream_is_judged_when_an_executor_joins():
    world, gateway = world_of(None)
    (accepted,) = resubmitted(world, gateway, [5, 7], max_tokens=10)
    assert accepted.request_id == "again"
    assert world.scheduler.ledger.num_waiting == 1


def test_a_resubmitted_stream_that_fits_no_executor_yet_waits_for_one():
    world, gateway = world_of(ExecutorLimits(4, 16, 4, 512))
    (accepted,) = resubmitted(world, gateway, [5] * 80, max_tokens=200)
    assert accepted.request_id == "again"
    assert world.scheduler.next_deadline_ms() == 60_000


def test_a_resubmitted_stream_never_judged_before_is_told_of_the_context_length():
    """It was accepted while no executor was connected, and so was its prompt."""
    world, gateway = world_of(ExecutorLimits(1000, 16, 4, 512), msgspec.structs.replace(FACTS, context_len=3))
    (rejected,) = resubmitted(world, gateway, [], max_tokens=4)
    assert (rejected.code, rejected.detail) == ("too_long", "the prompt has 3 tokens; the context length is 3")


def test_a_live_id_submitted_again_is_ignored():
    world, gateway = world_of()
    stream = world.submit(gateway, prompt(10), 4, ignore_eos=True, request_id="same")
    actions = world.happen(Submitted(gateway, stream.submit))
    assert actions == []
    assert world.scheduler.counters.stale == {"duplicate_submit": 1}
    world.drain()
    assert stream.end == "length"
