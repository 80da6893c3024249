"""A whole executor in the test's own thread: the real lane mirror and fake backend, driven plan by plan.

``PlanOracle`` is an independent reading of the plans, made only from their bytes and the answers: it knows what the
scheduler may send next.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from services.executor.backend import StepError, StepOutput
from services.executor.backends.fake import FakeBackend
from services.executor.batch import StepBatch
from services.executor.stepper import Step, Stepper
from shared.wire import codec, tokens
from shared.wire.executor import BatchFailed, BatchPlan, BatchResult, ExecutorHello, work_of
from shared.wire.facts import ExecutorLimits, ModelFacts
from tests.fakes.device_backend import DeviceBackend
from tests.fakes.plans import appends_of, run_plan


class FaultyBackend(FakeBackend):
    """Fails the next step that computes anything, as told."""

    def __init__(self, facts: ModelFacts, limits: ExecutorLimits) -> None:
        super().__init__(facts, limits)
        self.fault: Callable[[StepBatch], StepError | None] | None = None
        self.spoil: Callable[[StepBatch], dict[int, str]] | None = None
        self.delay: int | None = None
        """Row whose sample comes later: its constraint is not ready."""
        self.poison: dict[int, bool] = {}
        """Seeds of requests that make every step fail that samples for them, and whether the executor dies of it."""

    def run(self, batch: StepBatch) -> StepOutput:
        """Write KV first: a step that fails may well have written some."""
        output = super().run(batch)
        for sample in batch.samples:
            if sample.sampling.seed in self.poison:
                raise StepError("poisoned", fatal=self.poison[sample.sampling.seed])
        if self.fault is not None:
            fault, self.fault = self.fault, None
            error = fault(batch)
            if error is not None:
                raise error
        if self.spoil is not None:
            spoil, self.spoil = self.spoil, None
            output.failures = spoil(batch)
        if self.delay is not None and batch.samples:
            row, self.delay = self.delay, None
            output.late = {row % len(batch.samples)} - output.failures.keys()
        for index in [*output.failures, *output.late]:
            output.logprobs.pop(index, None)
        return output


class ModelExecutor:
    """Holds plans until it is told to run one."""

    def __init__(
        self, executor_id: str, facts: ModelFacts, limits: ExecutorLimits, max_inflight: int, overlaps: bool = False
    ) -> None:
        """``overlaps``: plans are launched as they come, on a device that runs them when their answer is wanted."""
        self.id = executor_id
        self.limits = limits
        self.max_inflight = max_inflight
        self.backend = FaultyBackend(facts, limits)
        self.overlaps = overlaps
        self.stepper = Stepper(DeviceBackend(self.backend) if overlaps else self.backend)
        self.hello = ExecutorHello(executor_id, 1, facts, limits, "cpu", "fake")
        self.plans: deque[BatchPlan] = deque()
        self.running: deque[Step] = deque()
        self.answers: deque[BatchResult | BatchFailed] = deque()
        self.oracle = PlanOracle(limits)
        self.hangs = False
        self.wants_to_leave = False
        self.is_draining = False

    def receive(self, plan: BatchPlan) -> None:
        """Take a plan off the wire."""
        plan = codec.scheduler_to_executor.decode(codec.encode(plan))
        assert not (self.is_draining and plan.admits), "an executor that drains is given a request"
        self.plans.append(plan)
        assert len(self.plans) <= self.max_inflight, "more steps in flight than allowed"
        self.oracle.planned(plan)
        if self.overlaps:
            step = self.stepper.launch(plan, self.answers.append)
            if step is not None:
                self.running.append(step)

    def run(self) -> BatchResult | BatchFailed:
        """Run the oldest plan."""
        plan = self.plans.popleft()
        if not self.overlaps:
            self.answers.append(run_plan(self.stepper, plan))
        while not self.answers:
            self.stepper.finish(self.running.popleft())
        answer = self.answers.popleft()
        assert not (isinstance(answer, BatchFailed) and answer.kind == "bad_plan"), answer.detail
        if isinstance(answer, BatchResult):
            answer = msgspec.structs.replace(answer, run_us=self.run_us())
        self.oracle.answered(answer)
        return codec.executor_to_scheduler.decode(codec.encode(answer))

    def run_us(self) -> int:
        """What the oldest plan takes: made up by the rule the scheduler believes in, to repeat to the byte."""
        counts = self.oracle.sent[0].rows
        rows, reads = sum(row.end - row.start for row in counts), sum(row.end * (row.end - row.start) for row in counts)
        return 1500 + 700 * rows + 50 * reads

    def restart(self) -> None:
        """A new session: nothing of the old one counts."""
        kept, self.backend.fault, self.backend.spoil = (self.backend.fault, self.backend.spoil), None, None
        self.stepper.reset()  # what still runs is nobody's: no accident is counted in it
        self.backend.fault, self.backend.spoil = kept
        self.plans.clear()
        self.running.clear()
        self.answers.clear()
        self.oracle = PlanOracle(self.limits)
        self.hangs = self.wants_to_leave = self.is_draining = False


@dataclass
class OracleLane:
    """One lane as the plans tell it."""

    seq: int
    known: int
    blocks: list[int]
    scheduled: int = 0
    computed: int = 0
    reached: int = 0

    @property
    def pending(self) -> int:
        return self.known - self.scheduled


class SentRow(NamedTuple):
    """One row of work that was sent."""

    lane: int
    seq: int
    start: int
    end: int
    sample: bool


@dataclass
class SentStep:
    """Work of a plan not answered yet."""

    number: int
    rows: list[SentRow]
    doomed: bool = False


class PlanOracle:
    """Checks P1-P4 and B5 on every plan, and tells which lanes a plan left out (for P6)."""

    def __init__(self, limits: ExecutorLimits) -> None:
        self.limits = limits
        self.lanes: dict[int, OracleLane] = {}
        self.sent: deque[SentStep] = deque()
        self.next_step = 0
        self.confirmed = -1
        self.left_out: list[OracleLane] = []
        """Lanes with one token to compute that the latest plan does not work on."""

    def planned(self, plan: BatchPlan) -> None:
        """Check a plan against all plans and answers before it."""
        assert plan.step == self.next_step, "steps are numbered without gaps"
        assert plan.confirmed == self.confirmed, "the plan names the last step that was answered"
        self.next_step += 1
        for number in tokens.unpack(plan.retires):
            del self.lanes[number]
        for admit in plan.admits:
            assert admit.lane not in self.lanes
            known, cached = tokens.count(admit.tokens), admit.num_cached
            assert cached < known, "B7: a token is left to compute"
            assert cached % self.limits.block_size == 0, "B7: whole blocks"
            self.lanes[admit.lane] = OracleLane(admit.seq, known, tokens.unpack(admit.blocks), cached, cached)
        for lane, block in appends_of(plan):
            self.lanes[lane].blocks.append(block)
        work = work_of(plan)
        assert sum(row.num_tokens for row in work) <= self.limits.max_step_tokens, "P1"
        assert len({row.lane for row in work}) == len(work), "P2"
        worked = {row.lane for row in work}
        self.left_out = [lane for number, lane in self.lanes.items() if lane.pending == 1 and number not in worked]
        step = SentStep(plan.step, [])
        for row in work:
            lane = self.lanes[row.lane]
            end = row.start + row.num_tokens
            assert row.num_tokens > 0, "no work is empty"
            assert row.start == lane.scheduled, "P3: ranges tile the sequence"
            assert end <= lane.known, "P3"
            assert row.sample == (end == lane.known), "P4"
            lane.scheduled = end
            lane.known += row.sample
            step.rows.append(SentRow(row.lane, lane.seq, row.start, end, row.sample))
        for lane in self.lanes.values():
            needed = -(-max(lane.scheduled, lane.reached) // self.limits.block_size)
            assert len(lane.blocks) == needed, "B5"
        self.sent.append(step)

    def answered(self, answer: BatchResult | BatchFailed) -> None:
        """Follow an answer, which the scheduler is about to get."""
        step = self.sent.popleft()
        assert step.number == answer.step
        self.confirmed = step.number
        if isinstance(answer, BatchResult):
            for row in step.rows:
                lane = self.lanes.get(row.lane)
                if lane is not None and lane.seq == row.seq:
                    lane.computed = row.end
        elif not step.doomed:
            for failed in [step, *self.sent]:
                failed.doomed = True
                self._roll_back(failed)

    def _roll_back(self, step: SentStep) -> None:
        for row in step.rows:
            lane = self.lanes.get(row.lane)
            if lane is not None and lane.seq == row.seq:
                lane.reached = max(lane.reached, lane.scheduled)
                lane.scheduled = lane.computed
                lane.known -= row.sample
