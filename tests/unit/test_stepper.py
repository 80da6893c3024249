"""One plan in, one answer out: which of the failures it is, and what stays true after it."""

from services.executor.backend import StepError, StepOutput
from services.executor.backends.fake import FakeBackend
from services.executor.batch import StepBatch
from services.executor.stepper import Stepper
from shared import fake_model
from shared.wire import tokens
from shared.wire.executor import Append, BatchPlan, BatchResult, LaneFailure, Work, batch_plan, samples_of
from shared.wire.facts import ExecutorLimits
from tests.fakes.plans import admit, failed, run_plan, sampled

LIMITS = ExecutorLimits(num_blocks=16, block_size=4, num_lanes=4, max_step_tokens=32)


class Backend(FakeBackend):
    """Fails when told to."""

    def __init__(self) -> None:
        super().__init__(fake_model.facts(64), LIMITS)
        self.error: Exception | None = None
        self.failures: dict[int, str] = {}
        self.runs = 0

    def run(self, batch: StepBatch) -> StepOutput:
        self.runs += 1
        output = super().run(batch)
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        output.failures, self.failures = self.failures, {}
        return output


def start() -> tuple[Stepper, Backend]:
    """Lanes 0 and 1 have their first token."""
    backend = Backend()
    stepper = Stepper(backend)
    admits = [admit(0, [65, 66, 67], [0]), admit(1, [70], [1])]
    run_plan(stepper, batch_plan(1, 1, 0, admits=admits, work=[Work(0, 0, 3, True), Work(1, 0, 1, True)]))
    return stepper, backend


def decode(step: int, confirmed: int, position: int = 3, **parts: object) -> BatchPlan:
    return batch_plan(1, step, confirmed, work=[Work(0, position, 1, True)], **parts)  # type: ignore[arg-type]


def test_samples_carry_lane_and_seq_in_work_order() -> None:
    stepper, _ = start()
    answer = run_plan(stepper, batch_plan(1, 2, 1, work=[Work(1, 1, 1, True), Work(0, 3, 1, True)]))
    assert isinstance(answer, BatchResult)
    assert [(sample.lane, sample.seq) for sample in samples_of(answer)] == [(1, 101), (0, 100)]
    assert (answer.epoch, answer.step) == (1, 2)


def test_a_plan_without_work_runs_nothing() -> None:
    stepper, backend = start()
    assert run_plan(stepper, batch_plan(1, 2, 1, retires=[0])) == BatchResult(1, 2)
    assert backend.runs == 1


def test_replanned_work_runs_as_if_nothing_had_failed() -> None:
    stepper, _ = start()
    expected = sampled(run_plan(stepper, decode(2, 1)))
    stepper, backend = start()
    backend.error = StepError("out of luck", [1])
    failure = failed(run_plan(stepper, decode(2, 1)))
    assert (failure.kind, failure.detail, tokens.unpack(failure.lanes), failure.fatal) == (
        "error",
        "out of luck",
        [1],
        False,
    )
    assert sampled(run_plan(stepper, decode(3, 2))) == expected


def test_work_planned_in_ignorance_fails_but_its_changes_apply() -> None:
    stepper, backend = start()
    backend.error = StepError("out of luck")
    failed(run_plan(stepper, decode(2, 1)))
    follower = decode(3, 1, 4, retires=[1], admits=[admit(2, [80], [1])], appends=[Append(0, 5)])
    assert failed(run_plan(stepper, follower)).kind == "follows_failure"
    assert stepper.lanes.open_lanes() == [0, 2]
    assert stepper.lanes.view(0).blocks == [0, 5]
    assert backend.runs == 2
    assert len(sampled(run_plan(stepper, decode(4, 2)))) == 1


def test_followers_do_not_make_followers() -> None:
    """With two steps always in flight, a chain of them would never end."""
    stepper, backend = start()
    backend.error = StepError("out of luck")
    failed(run_plan(stepper, decode(2, 1)))
    assert failed(run_plan(stepper, decode(3, 1, 4))).kind == "follows_failure"
    assert len(sampled(run_plan(stepper, decode(4, 2)))) == 1


def test_a_bad_plan_is_a_failure_too() -> None:
    stepper, _ = start()
    assert failed(run_plan(stepper, decode(2, 1, 9))).kind == "bad_plan"
    assert failed(run_plan(stepper, decode(3, 1))).kind == "follows_failure"
    changes = batch_plan(1, 4, 3, retires=[0, 3])
    assert failed(run_plan(stepper, changes)).kind == "bad_plan"
    assert stepper.lanes.open_lanes() == [1]


def test_an_unexpected_exception_blames_nobody_and_is_survived() -> None:
    stepper, backend = start()
    backend.error = MemoryError("x" * 10_000)
    failure = failed(run_plan(stepper, decode(2, 1)))
    assert (failure.kind, failure.lanes, failure.fatal) == ("error", b"", False)
    assert failure.detail.startswith("MemoryError: xxx")
    assert len(failure.detail) <= 500
    assert len(sampled(run_plan(stepper, decode(3, 2)))) == 1


def test_one_lane_without_a_token_leaves_the_others_alone() -> None:
    stepper, _ = start()
    both = batch_plan(1, 2, 1, work=[Work(0, 3, 1, True), Work(1, 1, 1, True)])
    expected = sampled(run_plan(stepper, both))
    stepper, backend = start()
    backend.failures = {0: "NaN"}
    answer = run_plan(stepper, both)
    assert isinstance(answer, BatchResult)
    assert answer.failures == [LaneFailure(0, 100, "NaN")]
    assert sampled(answer) == expected[1:]
    late = run_plan(stepper, batch_plan(1, 3, 1, work=[Work(0, 4, 1, True), Work(1, 2, 1, True)]))
    assert isinstance(late, BatchResult)
    assert [failure.lane for failure in late.failures] == [0]
    assert len(sampled(late)) == 1


def test_reset_forgets_lanes_and_failures() -> None:
    stepper, backend = start()
    backend.error = StepError("out of luck")
    failed(run_plan(stepper, decode(9, 1)))
    stepper.reset()
    assert stepper.lanes.open_lanes() == []
    fresh = batch_plan(1, 1, 0, admits=[admit(0, [65], [0])], work=[Work(0, 0, 1, True)])
    assert len(sampled(run_plan(stepper, fresh))) == 1


def test_idle_time_between_steps_counts_while_a_request_is_on_a_lane() -> None:
    gaps: list[float] = []
    stepper = Stepper(FakeBackend(fake_model.facts(64), LIMITS), gaps.append)
    run_plan(stepper, batch_plan(1, 1, 0, admits=[admit(0, [65, 66, 67], [0])], work=[Work(0, 0, 3, True)]))
    assert gaps == []
    run_plan(stepper, decode(2, 1))
    assert len(gaps) == 1
    assert gaps[0] >= 0
    run_plan(stepper, batch_plan(1, 3, 2, retires=[0]))
    run_plan(stepper, batch_plan(1, 4, 3, admits=[admit(0, [65, 66, 67], [0])], work=[Work(0, 0, 3, True)]))
    assert len(gaps) == 1, "nobody waited"
