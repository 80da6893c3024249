"""One plan in, one answer out: lanes and backend together, for one session at a time. No threads, no sockets.

Called by the shell in the compute thread, and by tests that want a whole executor without a process.
"""

import logging
import time
from collections.abc import Callable

from services.executor.backend import Backend, StepError, StepOutput
from services.executor.batch import StepBatch
from services.executor.lanes import Lanes, PlanError
from shared.wire import tokens
from shared.wire.executor import BatchFailed, BatchPlan, BatchResult, LaneFailure, LaneLogprobs

log = logging.getLogger(__name__)

NOT_READY = "its constraint is still being compiled"
MAX_DETAIL = 500
"""Characters of an unexpected exception that travel."""


class Stepper:
    """Answers every plan with exactly one ``BatchResult`` or ``BatchFailed``."""

    def __init__(self, backend: Backend, on_gap: Callable[[float], object] = lambda gap_s: None) -> None:
        """``on_gap`` is told, in the compute thread, how long a request on a lane has waited between two steps."""
        self._on_gap = on_gap
        self._ended_at = 0.0
        """perf_counter() at the end of the step before."""
        self.lanes = Lanes(backend.facts, backend.limits, backend.released, backend.taken)
        self._backend = backend
        self._last_failed = -1
        """The last step of this session that failed by itself; plans made in ignorance of it fail too.

        One that merely follows does not count: the scheduler knows its fate as soon as it knows of the first."""

    def reset(self) -> None:
        """A new session: every lane is empty and no step has failed."""
        self.lanes.clear()
        self._ended_at = 0.0
        self._last_failed = -1

    def step(self, plan: BatchPlan) -> BatchResult | BatchFailed:
        """Apply the plan and run its work as one step."""
        for admit in plan.admits:
            if admit.sampling.constraint is not None:
                self._backend.prepare(admit.sampling.constraint)
        try:
            self.lanes.apply(plan)
            if plan.confirmed < self._last_failed:
                return BatchFailed(plan.epoch, plan.step, "follows_failure", detail=f"step {self._last_failed} failed")
            batch, failures = self.lanes.batch(plan)
        except PlanError as error:
            return self._failed(plan, "bad_plan", str(error))
        if not batch.lanes:
            return BatchResult(plan.epoch, plan.step, failures=failures)
        return self._run(plan, batch, failures)

    def _run(self, plan: BatchPlan, batch: StepBatch, failures: list[LaneFailure]) -> BatchResult | BatchFailed:
        started = time.perf_counter()
        admitted = {admit.lane for admit in plan.admits}
        if self._ended_at and any(lane not in admitted for lane in batch.lanes):
            self._on_gap(started - self._ended_at)
        try:
            output = self._backend.run(batch)
        except StepError as error:
            return self._failed(plan, "error", error.detail, error.lanes, error.fatal)
        except Exception as error:
            log.exception("step %d failed", plan.step)
            return self._failed(plan, "error", f"{type(error).__name__}: {error}"[:MAX_DETAIL])
        self._ended_at = time.perf_counter()
        run_us = round((self._ended_at - started) * 1e6)
        self.lanes.commit(batch, output)
        return _result(plan, batch, output, failures, run_us)

    def _failed(
        self, plan: BatchPlan, kind: str, detail: str, lanes: list[int] | None = None, fatal: bool = False
    ) -> BatchFailed:
        self._ended_at = 0.0
        self._last_failed = plan.step
        return BatchFailed(plan.epoch, plan.step, kind, tokens.pack(lanes or []), detail, fatal)


def _result(
    plan: BatchPlan, batch: StepBatch, output: StepOutput, failures: list[LaneFailure], run_us: int
) -> BatchResult:
    sampled, sampled_tokens = batch.samples, output.tokens
    if output.failures or output.late:
        without = output.failures | dict.fromkeys(output.late, NOT_READY)
        failures = failures + [
            LaneFailure(sampled[index].lane, sampled[index].seq, detail, index in output.late)
            for index, detail in without.items()
        ]
        kept = [index for index in range(len(sampled)) if index not in without]
        sampled, sampled_tokens = [sampled[index] for index in kept], [sampled_tokens[index] for index in kept]
    return BatchResult(
        epoch=plan.epoch,
        step=plan.step,
        sample_lanes=tokens.pack([sample.lane for sample in sampled]),
        sample_seqs=tokens.pack([sample.seq for sample in sampled]),
        sample_tokens=tokens.pack(sampled_tokens),
        failures=failures,
        run_us=run_us,
        logprobs=_logprobs(batch, output) if output.logprobs or output.prompt_logprobs else [],
    )


def _logprobs(batch: StepBatch, output: StepOutput) -> list[LaneLogprobs]:
    told = [
        LaneLogprobs(prompt.lane, prompt.seq, prompt.start, records)
        for prompt, records in zip(batch.prompts, output.prompt_logprobs, strict=True)
    ]
    for index, record in output.logprobs.items():
        sample = batch.samples[index]
        told.append(LaneLogprobs(sample.lane, sample.seq, sample.position, record))
    return told
