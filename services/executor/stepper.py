"""Plans in, answers out: lanes and backend together, for one session at a time. No threads, no sockets.

Called by the shell in the compute thread, and by tests that want a whole executor without a process. Where the backend
computes on a device, a step is launched while the one before it runs: its batch is laid out behind tokens that are only
promised, and the device feeds them. Answers keep the order of the plans.
"""

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from services.executor.backend import Backend, Launched, StepError
from services.executor.batch import StepBatch, needs_host
from services.executor.lanes import Lanes
from services.executor.progress import Flight
from services.executor.refusals import PlanError
from services.executor.results import failed, result
from shared.wire.executor import BatchFailed, BatchPlan, BatchResult, LaneFailure

log = logging.getLogger(__name__)

Answer = BatchResult | BatchFailed
Tell = Callable[[Answer], None]


@dataclass(eq=False)
class Step:
    """One that was launched and has not been read."""

    plan: BatchPlan
    failures: list[LaneFailure]
    """Of lanes whose work was left out."""
    flight: Flight
    launched: Launched
    tell: Tell
    started_at: float
    """perf_counter() when its launch began."""
    ended_at: float = 0.0

    def wait(self) -> None:
        """Return when the device is done with it; from any thread."""
        self.launched.wait()
        self.ended_at = self.ended_at or time.perf_counter()


class Stepper:
    """Answers every plan with exactly one ``BatchResult`` or ``BatchFailed``."""

    def __init__(self, backend: Backend, on_gap: Callable[[float], object] = lambda gap_s: None) -> None:
        """``on_gap`` is told, in the compute thread, how long a request on a lane has waited between two steps."""
        self._on_gap = on_gap
        self._ended_at = 0.0
        """perf_counter() at the end of the step that was read last."""
        self.lanes = Lanes(backend.facts, backend.limits, backend.released, backend.taken)
        self._backend = backend
        self._steps: deque[Step] = deque()
        """Launched and not read: at most one while the next is laid out, and never more than two."""
        self._last_failed = -1
        """The last step of this session that failed by itself; plans made in ignorance of it fail too.

        One that merely follows does not count: the scheduler knows its fate as soon as it knows of the first."""

    def reset(self) -> None:
        """A new session: what still runs is waited for, every lane is empty and no step has failed."""
        self._settle()
        self.lanes.clear()
        self._ended_at = 0.0
        self._last_failed = -1

    def launch(self, plan: BatchPlan, tell: Tell) -> Step | None:
        """Apply the plan and launch its work as one step; ``tell`` gets the answer, here or in a later call.

        Returns the step if it runs on: it is to be finished once its ``wait`` is over.
        """
        if len(self._steps) > 1:
            self._finish_oldest()
        for admit in plan.admits:
            if admit.sampling.constraint is not None:
                self._backend.prepare(admit.sampling.constraint)
        try:
            self.lanes.apply(plan)
            laid_out = self._lay_out(plan)
        except PlanError as error:
            self._answer(plan, BatchFailed(plan.epoch, plan.step, "bad_plan", detail=str(error)), tell)
            return None
        batch, failures = laid_out if laid_out is not None else (None, [])
        if batch is None or not batch.lanes:
            self._answer(plan, BatchResult(plan.epoch, plan.step, failures=failures), tell)
            return None
        return self._launch(plan, batch, failures, tell)

    def finish(self, step: Step) -> None:
        """Read a step that ``launch`` returned, and answer its plan. Harmless when that was done meanwhile."""
        while step in self._steps:
            self._finish_oldest()

    def _lay_out(self, plan: BatchPlan) -> tuple[StepBatch, list[LaneFailure]] | None:
        """The plan's work; None when it fails with a step before. Raises PlanError.

        Here is decided whether it may run behind a step that nobody has read: see ``batch.needs_host``.
        """
        if plan.confirmed < self._last_failed:
            return None
        laid_out = self.lanes.batch(plan)
        if self._steps and needs_host(laid_out[0]):
            self._settle()
            return self._lay_out(plan)
        return laid_out

    def _launch(self, plan: BatchPlan, batch: StepBatch, failures: list[LaneFailure], tell: Tell) -> Step | None:
        started_at = time.perf_counter()
        try:
            launched = self._backend.launch(batch)
        except Exception as error:
            self._answer(plan, self._failed(plan, error), tell)
            return None
        step = Step(plan, failures, self.lanes.launch(batch), launched, tell, started_at)
        self._steps.append(step)
        if not launched.done:
            return step
        self._settle()
        return None

    def _answer(self, plan: BatchPlan, answer: Answer, tell: Tell) -> None:
        """Answer a plan without a step, in its turn: those before it are read first."""
        self._settle()
        is_final = isinstance(answer, BatchFailed) and (answer.fatal or answer.kind == "bad_plan")
        if plan.confirmed < self._last_failed and not is_final:
            answer = self._following(plan)
        elif isinstance(answer, BatchFailed):
            self._has_failed(plan)
        tell(answer)

    def _settle(self) -> None:
        while self._steps:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        step = self._steps.popleft()
        try:
            step.wait()
            output = step.launched.read()
        except Exception as error:
            self._fail(step, error)
            return
        self.lanes.commit(step.flight, output)
        step.tell(result(step.plan, step.flight.batch, output, step.failures, self._timed(step)))

    def _fail(self, step: Step, error: Exception) -> None:
        """A launched step failed, and with it what was launched behind it; what the device does of that counts not."""
        self._has_failed(step.plan)
        self.lanes.roll_back(step.flight)
        step.tell(self._failed(step.plan, error))
        while self._steps:
            later = self._steps.popleft()
            self.lanes.roll_back(later.flight)
            later.tell(self._following(later.plan))

    def _failed(self, plan: BatchPlan, error: Exception) -> BatchFailed:
        if not isinstance(error, StepError):
            log.error("step %d failed", plan.step, exc_info=error)
        return failed(plan, error)

    def _has_failed(self, plan: BatchPlan) -> None:
        self._ended_at = 0.0
        self._last_failed = plan.step

    def _following(self, plan: BatchPlan) -> BatchFailed:
        return BatchFailed(plan.epoch, plan.step, "follows_failure", detail=f"step {self._last_failed} failed")

    def _timed(self, step: Step) -> int:
        """Microseconds from when the device could begin, its launch or the end of the step before, to its end."""
        began_at = max(step.started_at, self._ended_at)
        admitted = {admit.lane for admit in step.plan.admits}
        if self._ended_at and any(lane not in admitted for lane in step.flight.batch.lanes):
            self._on_gap(began_at - self._ended_at)
        self._ended_at = step.ended_at
        return round((step.ended_at - began_at) * 1e6)
