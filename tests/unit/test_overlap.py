"""A step launched while the one before it runs: the same tokens, answers in order, and who fails with whom."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from services.executor.backend import StepError, StepOutput
from services.executor.backends.fake import FakeBackend
from services.executor.batch import StepBatch
from services.executor.stepper import Step, Stepper
from shared import fake_model
from shared.wire import tokens
from shared.wire.executor import Append, BatchFailed, BatchPlan, BatchResult, LaneFailure, Work, batch_plan
from shared.wire.facts import ExecutorLimits
from shared.wire.sampling import Constraint, Sampling
from tests.fakes.device_backend import DeviceBackend
from tests.fakes.plans import admit, failed, run_plan, sampled

LIMITS = ExecutorLimits(num_blocks=16, block_size=4, num_lanes=4, max_step_tokens=32)
PLAIN = Sampling()


class Inner(FakeBackend):
    """Fails in the steps it is told to, on the device."""

    def __init__(self) -> None:
        super().__init__(fake_model.facts(64), LIMITS)
        self.errors: dict[int, Exception] = {}
        self.spoilt: dict[int, dict[int, str]] = {}

    def run(self, batch: StepBatch) -> StepOutput:
        output = super().run(batch)
        if batch.step in self.errors:
            raise self.errors[batch.step]
        output.failures |= self.spoilt.get(batch.step, {})
        return output


class Executor:
    """A stepper behind a device; ``started`` steps run on."""

    def __init__(self) -> None:
        self.inner = Inner()
        self.device = DeviceBackend(self.inner)
        self.gaps: list[float] = []
        self.stepper = Stepper(self.device, self.gaps.append)
        self.answers: list[BatchResult | BatchFailed] = []
        self.running: list[Step] = []

    def launch(self, plan: BatchPlan) -> None:
        step = self.stepper.launch(plan, self.answers.append)
        if step is not None:
            self.running.append(step)

    def finish(self) -> BatchResult | BatchFailed:
        """End the oldest step that runs; to finish one that was read before changes nothing."""
        told = len(self.answers)
        while len(self.answers) == told:
            self.stepper.finish(self.running.pop(0))
        return self.answers[told]

    def kinds(self) -> list[tuple[int, str]]:
        return [(answer.step, answer.kind if isinstance(answer, BatchFailed) else "done") for answer in self.answers]


def first(sampling: Sampling = PLAIN) -> BatchPlan:
    """Lanes 0 and 1, prompts of three tokens and one."""
    admits = [admit(0, [65, 66, 67], [0, 2], sampling=sampling), admit(1, [70], [1])]
    return batch_plan(1, 1, 0, admits=admits, work=[Work(0, 0, 3, True), Work(1, 0, 1, True)])


def decode(
    step: int, confirmed: int, lane_0: int | None = None, lane_1: int | None = None, **parts: object
) -> BatchPlan:
    """Positions to compute of the two lanes."""
    work = [Work(lane, at, 1, True) for lane, at in ((0, lane_0), (1, lane_1)) if at is not None]
    return batch_plan(1, step, confirmed, work=work, **parts)  # type: ignore[arg-type]


def expected(sampling: Sampling = PLAIN) -> list[list[int]]:
    """What the two lanes say when every step is read before the next."""
    stepper = Stepper(Inner())
    plans = [first(sampling), decode(2, 1, 3, 1), decode(3, 2, 4, 2), decode(4, 3, 5, 3)]
    return [sampled(run_plan(stepper, plan)) for plan in plans]


@pytest.fixture
def executor() -> Executor:
    return Executor()


@pytest.mark.parametrize("sampling", [PLAIN, Sampling(temperature=1.0, seed=3, top_k=5), Sampling(min_tokens=4)])
def test_a_step_is_launched_before_the_one_it_depends_on_is_read(executor: Executor, sampling: Sampling) -> None:
    executor.launch(first(sampling))
    executor.launch(decode(2, 0, 3, 1))
    for step, confirmed in ((3, 1), (4, 2)):
        assert sampled(executor.finish()) == expected(sampling)[step - 3]
        executor.launch(decode(step, confirmed, step + 1, step - 1))
    assert [sampled(executor.finish()) for _ in range(2)] == expected(sampling)[2:]
    order = [("launch", 1), ("launch", 2), ("read", 1), ("launch", 3), ("read", 2), ("launch", 4), ("read", 3)]
    assert executor.device.calls == [*order, ("read", 4)]
    assert executor.device.fed == 6
    assert executor.stepper.lanes.view(0).tokens == [65, 66, 67] + [said[0] for said in expected(sampling)]


def test_a_result_does_not_wait_for_the_next_plan(executor: Executor) -> None:
    executor.launch(first())
    assert executor.answers == []
    assert sampled(executor.finish()) == expected()[0]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(repetition_penalty=1.5),
        Sampling(presence_penalty=0.5),
        Sampling(frequency_penalty=0.5),
        Sampling(num_logprobs=0),
        Sampling(constraint=Constraint("regex", "[a-z ]*")),
    ],
)
def test_who_needs_the_token_on_the_host_waits_for_it(executor: Executor, sampling: Sampling) -> None:
    executor.launch(first(sampling))
    executor.launch(decode(2, 0, 3, 1))
    assert executor.device.calls == [("launch", 1), ("read", 1), ("launch", 2)]
    assert len(executor.answers) == 1, "the first is answered before the second ends"
    executor.finish()
    executor.launch(decode(3, 2, lane_1=2))
    executor.launch(decode(4, 2, lane_1=3))
    assert executor.device.calls[-2:] == [("launch", 3), ("launch", 4)], "its neighbours do not wait"


def test_logprobs_of_a_prompt_are_read_at_once(executor: Executor) -> None:
    executor.launch(first())
    asking = admit(2, [80, 81], [3], sampling=Sampling(prompt_logprobs=True, num_logprobs=0))
    executor.launch(batch_plan(1, 2, 0, admits=[asking], work=[Work(2, 0, 1, False)]))
    assert executor.device.calls == [("launch", 1), ("read", 1), ("launch", 2)]


def test_who_was_told_of_its_prompt_waits_no_more(executor: Executor) -> None:
    executor.launch(first(Sampling(prompt_logprobs=True)))
    executor.launch(decode(2, 0, 3, 1))
    assert executor.device.calls == [("launch", 1), ("launch", 2)]
    assert [sampled(executor.finish()) for _ in range(2)] == expected()[:2]


def test_a_step_that_fails_on_the_device_fails_what_was_launched_behind_it(executor: Executor) -> None:
    executor.inner.errors[2] = StepError("out of luck", [1])
    executor.launch(first())
    executor.launch(decode(2, 0, 3, 1))
    executor.finish()
    executor.launch(decode(3, 1, 4, 2, appends=[Append(1, 7)]))
    failure = failed(executor.finish())
    assert (failure.kind, failure.detail, tokens.unpack(failure.lanes)) == ("error", "out of luck", [1])
    assert executor.kinds() == [(1, "done"), (2, "error"), (3, "follows_failure")]
    executor.launch(decode(4, 3, 3, 1))
    assert executor.device.calls[-1] == ("launch", 4)
    executor.launch(decode(5, 3, 4, 2))
    assert [sampled(executor.finish()) for _ in range(2)] == expected()[1:3]
    assert executor.stepper.lanes.view(1).blocks == [1, 7]


@pytest.mark.parametrize("error", [StepError("no memory"), MemoryError("no memory")])
def test_a_step_that_cannot_be_launched_is_answered_in_its_turn(executor: Executor, error: Exception) -> None:
    executor.launch(first())
    executor.device.launch_error = error
    executor.launch(decode(2, 0, 3, 1))
    assert executor.kinds() == [(1, "done"), (2, "error")]
    executor.launch(decode(3, 1, 4, 2))
    assert executor.kinds()[2:] == [(3, "follows_failure")]
    assert sampled(run_plan(executor.stepper, decode(4, 3, 3, 1))) == expected()[1]


def test_a_step_that_cannot_be_launched_behind_one_that_fails_only_follows(executor: Executor) -> None:
    """Or the scheduler, which knows of the first alone, would be told of a failure that it does not expect."""
    executor.inner.errors[1] = StepError("out of luck")
    executor.launch(first())
    executor.device.launch_error = StepError("no memory")
    executor.launch(decode(2, 0, 3, 1))
    assert executor.kinds() == [(1, "error"), (2, "follows_failure")]
    assert sampled(run_plan(executor.stepper, batch_plan(1, 3, 1, work=[Work(1, 0, 1, True)]))) == expected()[0][1:]


def test_a_device_that_is_gone_is_told_as_fatal(executor: Executor) -> None:
    executor.inner.errors[1] = StepError("the device failed", fatal=True)
    executor.launch(first())
    executor.launch(decode(2, 0, 3, 1))
    assert failed(executor.finish()).fatal


def test_plans_without_a_step_are_answered_behind_the_one_that_runs(executor: Executor) -> None:
    executor.launch(first())
    executor.launch(batch_plan(1, 2, 0, retires=[1]))
    assert executor.kinds() == [(1, "done"), (2, "done")]
    executor.launch(decode(3, 2, 3))
    executor.launch(decode(4, 2, 9))
    assert executor.kinds()[2:] == [(3, "done"), (4, "bad_plan")]


def test_a_plan_too_many_waits_for_the_oldest(executor: Executor) -> None:
    executor.launch(first())
    executor.launch(decode(2, 0, 3, 1))
    executor.launch(decode(3, 0, 4, 2))
    assert executor.kinds() == [(1, "done")]
    assert [sampled(executor.finish()) for _ in range(2)] == expected()[1:3]


def test_a_lane_without_a_token_fails_alone_and_stays_failed(executor: Executor) -> None:
    executor.inner.spoilt[1] = {0: "NaN"}
    executor.launch(first())
    executor.launch(decode(2, 0, 3, 1))
    for step, detail in ((1, "NaN"), (2, "failed in an earlier step")):
        answer = executor.finish()
        assert isinstance(answer, BatchResult)
        assert answer.failures == [LaneFailure(0, 100, detail)]
        assert sampled(answer) == expected()[step - 1][1:]
    assert executor.stepper.lanes.view(0).computed == 3
    executor.launch(decode(3, 1, 4, 2))
    third = executor.finish()
    assert isinstance(third, BatchResult)
    assert third.failures == [LaneFailure(0, 100, "failed in an earlier step")]
    assert sampled(third) == expected()[2][1:]


def test_a_lane_may_be_retired_and_its_blocks_given_away_while_its_step_runs(executor: Executor) -> None:
    executor.launch(first())
    newcomer = admit(0, [65, 66, 67], [2, 0], seq=300)
    work = [Work(1, 1, 1, True), Work(0, 0, 3, True)]
    executor.launch(batch_plan(1, 2, 0, retires=[0], admits=[newcomer], work=work))
    assert executor.stepper.lanes.view(0) == (300, [65, 66, 67], 0, [2, 0])
    assert sampled(executor.finish()) == expected()[0]
    assert executor.stepper.lanes.view(0) == (300, [65, 66, 67], 0, [2, 0]), "the old token is not the newcomer's"
    cached = admit(3, [65, 66, 67, 65, 66], [0, 5], num_cached=4)
    assert sampled(executor.finish()) == [expected()[1][1], expected()[0][0]]
    executor.launch(batch_plan(1, 3, 2, retires=[0], admits=[cached], work=[Work(3, 4, 1, True)]))
    assert executor.kinds()[2:] == [(3, "bad_plan")], "what the old lane computed there is gone"


def test_a_step_that_fails_does_not_roll_back_who_came_since(executor: Executor) -> None:
    executor.inner.errors[1] = StepError("out of luck")
    executor.launch(first())
    cached = admit(0, [65, 66, 67], [5], seq=300)
    executor.launch(batch_plan(1, 2, 0, retires=[0], admits=[cached]))
    assert executor.kinds() == [(1, "error"), (2, "follows_failure")]
    assert sampled(run_plan(executor.stepper, batch_plan(1, 3, 2, work=[Work(0, 0, 3, True)]))) == expected()[0][:1]


def test_a_new_session_waits_for_what_runs_and_begins_empty(executor: Executor) -> None:
    executor.launch(first())
    executor.launch(decode(2, 0, 3, 1))
    executor.stepper.reset()
    assert executor.device.calls[2:] == [("read", 1), ("read", 2)]
    assert executor.stepper.lanes.open_lanes() == []
    executor.stepper.finish(executor.running[0])
    assert len(executor.answers) == 2, "each is answered once"
    assert sampled(run_plan(executor.stepper, first())) == expected()[0]


def test_time_on_the_device_is_counted_once(executor: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    clock: Iterator[float] = iter([10.0, 11.0, 15.0, 18.0, 20.0, 21.0])
    monkeypatch.setattr("services.executor.stepper.time", SimpleNamespace(perf_counter=lambda: next(clock)))
    executor.launch(first())
    executor.launch(decode(2, 0, 3, 1))
    answers = [executor.finish(), executor.finish()]
    executor.launch(decode(3, 2, 4, 2))
    answers.append(executor.finish())
    assert [answer.run_us for answer in answers if isinstance(answer, BatchResult)] == [5_000_000, 3_000_000, 1_000_000]
    assert executor.gaps == [0.0, 2.0]
