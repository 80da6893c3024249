"""Times and sizes of steps as the scheduler sees them, with a clock in hand."""

import pytest
from prometheus_client import CollectorRegistry

from services.scheduler.core.counters import Counters
from services.scheduler.metrics import CoreCollector, Figures, StepMetrics
from shared.wire.executor import BatchFailed, BatchResult, Work, batch_plan


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def steps(registry: CollectorRegistry, clock: Clock) -> StepMetrics:
    return StepMetrics(registry, clock)


def _value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value("paternoster:" + name, labels)


WORK = [Work(0, 0, 7, False), Work(1, 3, 1, True)]


def test_a_steps_time_size_and_overhead(steps: StepMetrics, registry: CollectorRegistry, clock: Clock) -> None:
    steps.planned("e", batch_plan(1, 0, -1, work=WORK))
    clock.now += 0.5
    steps.done("e", BatchResult(1, 0, run_us=400_000))
    assert _value(registry, "step_seconds_sum") == pytest.approx(0.4)
    assert _value(registry, "step_overhead_seconds_sum") == pytest.approx(0.1)
    assert _value(registry, "iteration_tokens_total_sum") == 8
    assert _value(registry, "step_lanes_sum") == 2


def test_the_overhead_of_a_step_that_was_planned_ahead_begins_with_the_answer_before_it(
    steps: StepMetrics, registry: CollectorRegistry, clock: Clock
) -> None:
    steps.planned("e", batch_plan(1, 0, -1, work=WORK))
    steps.planned("e", batch_plan(1, 1, -1, work=WORK))
    clock.now += 1.0
    steps.done("e", BatchResult(1, 0, run_us=1_000_000))
    clock.now += 1.0
    steps.done("e", BatchResult(1, 1, run_us=990_000))
    assert _value(registry, "step_overhead_seconds_sum") == pytest.approx(0.01)


def test_a_plan_without_work_is_no_step(steps: StepMetrics, registry: CollectorRegistry) -> None:
    steps.planned("e", batch_plan(1, 0, -1, retires=[3]))
    steps.done("e", BatchResult(1, 0))
    assert _value(registry, "step_seconds_count") == 0
    assert _value(registry, "step_lanes_count") == 0


def test_answers_that_nobody_waits_for_are_not_measured(steps: StepMetrics, registry: CollectorRegistry) -> None:
    steps.done("stranger", BatchResult(1, 0, run_us=1))
    steps.planned("e", batch_plan(1, 5, -1, work=WORK))
    steps.done("e", BatchResult(1, 4, run_us=1))
    steps.left("e")
    steps.left("e")
    steps.done("e", BatchResult(1, 5, run_us=1))
    assert _value(registry, "step_seconds_count") == 0


def test_failures_are_counted_under_known_kinds_only(steps: StepMetrics, registry: CollectorRegistry) -> None:
    steps.planned("e", batch_plan(1, 0, -1, work=WORK))
    steps.failed("e", BatchFailed(1, 0, "error"))
    steps.failed("e", BatchFailed(1, 0, "a peer's invention"))
    assert _value(registry, "step_failures_total", kind="error") == 1
    assert _value(registry, "step_failures_total", kind="other") == 1


def test_the_age_of_a_running_step_ends_with_its_answer(steps: StepMetrics, registry: CollectorRegistry) -> None:
    steps.beat("stranger", 9000)
    steps.planned("e", batch_plan(1, 0, -1, work=WORK))
    steps.beat("e", 1500)
    assert _value(registry, "step_age_seconds") == 1.5
    steps.done("e", BatchResult(1, 0))
    assert _value(registry, "step_age_seconds") == 0


def _executor(total: int, used: int) -> dict[str, object]:
    return {"blocks": {"total": total, "used": used}, "inflight": 1}


def test_the_cores_figures_are_read_at_each_scrape(registry: CollectorRegistry) -> None:
    counters = Counters(preempted=2, rejected={"queue_full": 3}, ended={"stop": 4})
    state = {"running": 5, "waiting": 6, "executors": [_executor(30, 10), _executor(10, 10)]}
    registry.register(CoreCollector(lambda: Figures(counters, state, 2, {"gateways": {"bad_session": 7}})))
    assert _value(registry, "kv_cache_usage_perc") == 0.5
    assert _value(registry, "num_requests_running") == 5
    assert _value(registry, "num_preemptions_total") == 2
    assert _value(registry, "requests_rejected_total", code="queue_full") == 3
    assert _value(registry, "requests_rejected_total", code="too_long") == 0
    assert _value(registry, "request_success_total", finished_reason="stop") == 4
    assert _value(registry, "dropped_frames_total", link="gateways", reason="bad_session") == 7
    state.update(running=0, waiting=0, executors=[])
    assert _value(registry, "kv_cache_usage_perc") == 0
    assert _value(registry, "num_requests_running") == 0
    assert _value(registry, "executors_connected") == 0
