"""Constraints of lanes: masks follow the output, whatever happens to the lane, and no lane is in another's way."""

import re
from collections.abc import Iterator
from threading import Event, Lock

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer

from services.executor import constraints
from services.executor.backends.fake import FakeBackend
from services.executor.batch import SampleRow
from services.executor.constraints import Constraints
from services.executor.stepper import Stepper
from services.scheduler.core.limits import Settings
from shared import fake_model
from shared.constraints import compile_constraint, read_vocabulary
from shared.wire import tokens
from shared.wire.executor import Admit, BatchResult, LaneFailure, Work, batch_plan, samples_of
from shared.wire.facts import ExecutorLimits
from shared.wire.sampling import Constraint, Sampling
from tests.fakes.plans import run_plan
from tests.fakes.scheduler_world import World
from tests.fakes.waiting import wait_until

WORDS = fake_model.facts()
ENDS = set(fake_model.EOS_TOKEN_IDS)
AB = Constraint("regex", "ab+")
NUMBERS = Constraint("json_schema", '{"type":"array","items":{"type":"integer"},"minItems":2,"maxItems":9}')
LIMITS = ExecutorLimits(num_blocks=64, block_size=4, num_lanes=4, max_step_tokens=64)


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However loaded the machine is, what compiles at all is waited for."""
    for name in ("PATIENCE_S", "PATIENCE_ALONE_S"):
        monkeypatch.setattr(constraints, name, 60.0)


def a_row(output: str, constraint: Constraint = AB, lane: int = 0, seq: int = 0) -> SampleRow:
    ids = np.array([7, *output.encode()], np.int32)
    return SampleRow(0, lane, seq, Sampling(constraint=constraint), len(ids), ids, num_prompt=1)


def a_set() -> Constraints:
    return Constraints(WORDS, lambda: read_vocabulary(WORDS, None))


def allowed(told: constraints.Masks, index: int = 0) -> set[int]:
    return set(constraints.unpacked(told.allowed[index], WORDS.vocab_size).nonzero()[0].tolist())


def test_a_mask_is_what_the_output_so_far_allows() -> None:
    held = a_set()
    assert allowed(held.masks([a_row("")])) == {ord("a")}
    assert allowed(held.masks([a_row("a")])) == {ord("b")}
    assert allowed(held.masks([a_row("abb")])) == {ord("b")} | ENDS
    held.released(0)
    assert allowed(held.masks([a_row("ab", seq=1)])) == {ord("b")} | ENDS
    assert allowed(held.masks([a_row("", seq=2)])) == {ord("a")}, "a lane that was not released"


def test_where_nothing_may_follow_only_an_end_does() -> None:
    told = a_set().masks([a_row("ab", Constraint("regex", "ab")), a_row("ab", lane=1)])
    assert told.ended == {0}
    assert allowed(told, 0) == ENDS
    assert a_set().masks([a_row("", Constraint("lark", 'start: ""'))]).ended == {0}, "an empty text has ended at once"


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (Constraint("regex", "(a"), "cannot be compiled"),
        (Constraint("json_schema", '{"type":"strin"}'), "cannot be compiled"),
        (Constraint("json_schema", "[]"), "cannot be compiled"),
        (Constraint("lark", "start: nothing"), "cannot be compiled"),
        (Constraint("regex", "ac"), "does not fit"),
        (Constraint("lark", r"start: /[^\s\S]/"), "does not fit|cannot be followed|no token"),
    ],
)
def test_a_constraint_that_fails_fails_alone_and_quotes_nothing(bad: Constraint, why: str) -> None:
    told = a_set().masks([a_row("ab", bad), a_row("a", lane=1)])
    assert re.search(why, told.failures[0])
    assert bad.source not in told.failures[0]
    assert allowed(told, 1) == {ord("b")}
    assert 0 not in told.allowed


def test_a_step_does_not_wait_for_what_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    may_read = Event()

    def read() -> LLTokenizer:
        may_read.wait(60)
        return read_vocabulary(WORDS, None)

    held = Constraints(WORDS, read)
    held.prepare(AB)
    monkeypatch.setattr(constraints, "PATIENCE_ALONE_S", 0.0)
    assert held.masks([a_row("")]).late == {0}
    may_read.set()
    wait_until(lambda: not held.masks([a_row("")]).late, 60, "it is compiled")
    assert allowed(held.masks([a_row("")])) == {ord("a")}


def test_what_is_never_compiled_fails_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Constraints(WORDS, lambda: Event().wait())  # type: ignore[arg-type, return-value]
    monkeypatch.setattr(constraints, "PATIENCE_ALONE_S", 0.0)
    assert held.masks([a_row("")]).late == {0}
    monkeypatch.setattr(constraints, "OVERDUE_S", 0.0)
    late = {0: "the constraint takes too long to compile"}
    wait_until(lambda: held.masks([a_row("")]).failures == late, 60, "it has begun, and does not end")


def test_only_so_many_are_compiled_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    most, running, may_end, lock = 0, 0, Event(), Lock()

    def slowly(constraint: Constraint, vocabulary: LLTokenizer) -> LLMatcher:
        nonlocal most, running
        with lock:
            running += 1
            most = max(most, running)
        may_end.wait(60)
        with lock:
            running -= 1
        return compile_constraint(constraint, vocabulary)

    monkeypatch.setattr(constraints, "compile_constraint", slowly)
    monkeypatch.setattr(constraints, "PATIENCE_ALONE_S", 0.0)
    monkeypatch.setattr(constraints, "OVERDUE_S", 0.0)
    held = a_set()
    some = [Constraint("regex", f"a{{{number}}}") for number in range(1, 9)]
    for each in some:
        held.prepare(each)
    wait_until(lambda: running == constraints.MAX_COMPILING, 60, "as many as may are compiled")
    rows = [a_row("", each, lane) for lane, each in enumerate(some)]
    assert held.masks(rows).late == {*range(constraints.MAX_COMPILING, 8)}, "who waits for its turn is not overdue"
    may_end.set()
    monkeypatch.setattr(constraints, "OVERDUE_S", 60.0)
    wait_until(lambda: not held.masks(rows).late, 60, "all are compiled")
    assert most == constraints.MAX_COMPILING


@pytest.mark.parametrize(("bound", "most"), [("MAX_COMPILED", 3), ("MAX_KEPT_S", 3.5e-9)])
def test_only_so_much_that_was_compiled_is_kept(bound: str, most: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their number is bounded, and so is their size, by the time that they took: a nanosecond each, here."""
    monkeypatch.setattr(constraints, bound, most)
    monkeypatch.setattr(constraints._Compiled, "took_s", property(lambda _: 1e-9, lambda *_: None), raising=False)
    held = a_set()
    some = [Constraint("regex", f"a{{{number}}}") for number in range(1, 9)]
    for lane, each in enumerate([*some, some[0]]):
        assert allowed(held.masks([a_row("", each, lane)])) == {ord("a")}
    assert list(held._compiled) == [*some[-2:], some[0]]


def test_a_panic_of_the_compiler_fails_its_row_alone() -> None:
    class Panic(BaseException):
        pass

    def read() -> LLTokenizer:
        raise Panic

    told = Constraints(WORDS, read).masks([a_row("")])
    assert told.failures == {0: "the constraint cannot be compiled"}


def test_a_bad_constraint_ends_its_request_alone() -> None:
    stepper = Stepper(FakeBackend(WORDS, LIMITS))
    ids, blocks = tokens.pack([1, 2]), map(tokens.pack, ([0], [1]))
    bad, good = (Sampling(constraint=constraint) for constraint in (Constraint("regex", "(a"), AB))
    admits = [Admit(lane, lane, ids, 2, 0, next(blocks), sampling) for lane, sampling in enumerate((bad, good))]
    work = [Work(0, 0, 2, True), Work(1, 0, 2, True)]
    answer = run_plan(stepper, batch_plan(0, 0, -1, admits=admits, work=work))
    assert isinstance(answer, BatchResult)
    assert answer.failures == [LaneFailure(0, 0, "the constraint cannot be compiled")]
    assert [(sample.lane, sample.token) for sample in samples_of(answer)] == [(1, ord("a"))]


# In a whole system of fakes: every stream is compared with one that was never disturbed.


@pytest.fixture(params=[1, 2], ids=["inflight1", "inflight2"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    world = World(Settings(max_inflight=request.param), WORDS)
    yield world
    world.drain()


def texts(world: World) -> list[str]:
    """Of the streams that have ended, without the token that ended them."""
    told = []
    for stream in world.past:
        ids = stream.tokens[:-1] if stream.end == "stop" else stream.tokens
        told.append(b"".join(map(fake_model.token_bytes, ids)).decode(errors="replace"))
    return told


PATTERN = Constraint("regex", "[a-z ]{3,30}[.!?] [0-9]{2}")


def submit_some(world: World, count: int, max_tokens: int = 60) -> None:
    gateway = world.join_gateway()
    for number in range(count):
        constraint = (PATTERN, NUMBERS, None)[number % 3]
        world.submit(gateway, [number, 5, 6], max_tokens, seed=number, constraint=constraint, min_tokens=number % 5)


def check_texts(world: World, count: int) -> None:
    world.drain()
    assert len(world.past) == count
    for stream, text in zip(world.past, texts(world), strict=True):
        match stream.submit.sampling.constraint:
            case Constraint("regex", pattern) if stream.end == "stop":
                assert re.fullmatch(pattern, text)
            case Constraint("json_schema") if stream.end == "stop":
                assert re.fullmatch(r"\[[-0-9, \n\r\t]*\]", text)
    ends = [stream.end for stream in world.past if stream.submit.sampling.constraint == PATTERN]
    assert "stop" in ends


def test_constrained_texts_end_by_themselves(world: World) -> None:
    world.join_executor(LIMITS)
    submit_some(world, 9)
    check_texts(world, 9)


def test_preemption_changes_no_text(world: World) -> None:
    world.join_executor(ExecutorLimits(num_blocks=10, block_size=4, num_lanes=4, max_step_tokens=64))
    submit_some(world, 9, max_tokens=40)
    check_texts(world, 9)
    assert world.scheduler.counters.preempted


def test_lost_executors_and_schedulers_change_no_text(world: World) -> None:
    first = world.join_executor(LIMITS)
    submit_some(world, 6)
    for _ in range(8):
        world.run_step(first.id)
    world.join_executor(LIMITS)
    world.kill_executor(first.id)
    for executor_id in [*world.executors] * 5:
        world.run_step(executor_id)
    world.restart_scheduler(executors_first=True)
    check_texts(world, 6)


def test_an_ended_text_ends_whatever_min_tokens_say(world: World) -> None:
    world.join_executor(LIMITS)
    constraint = Constraint("lark", 'start: "yes" | "no"')
    stream = world.submit(world.join_gateway(), [1, 2], 50, constraint=constraint, min_tokens=20)
    world.drain()
    assert stream.end == "stop"
    assert texts(world)[0] in ("yes", "no")


def test_a_request_whose_constraint_is_late_is_admitted_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.join_executor(LIMITS)
    gateway = world.join_gateway()
    lates = iter([True, True, False])
    follow = Constraints._follow

    def hesitant(self: Constraints, row: SampleRow, until: float) -> object:
        if len(self._compiled) and row.position == row.num_prompt and next(lates, False):
            raise TimeoutError
        return follow(self, row, until)

    stream = world.submit(gateway, [3, 4], 12, constraint=AB)
    stream.undisturbed()
    monkeypatch.setattr(Constraints, "_follow", hesitant)
    other = world.submit(gateway, [5], 12, seed=2)
    world.drain()
    assert world.scheduler.counters.preempted == 2
    assert stream.end in ("stop", "length")
    assert other.end in ("stop", "length")
    assert tokens.count(stream.submit.prompt) == 2
